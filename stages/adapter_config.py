"""`LoraConfig`: what a LoRA's adapter_config.json says, every field of it used, known to be neutral, switched off, or
refused."""

import math
import re
from collections.abc import Mapping
from typing import Any

import attrs

from weft.stages.fields import Fields

_USED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern",
}  # fmt: skip
# What only training, the start of it or bookkeeping reads.
_NEUTRAL = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
_NEUTRAL_AT: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # Of these the base model's weights stay what they are; others subtract the start of the adapter from them.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
_OFF: tuple[Any, ...] = (None, False, [], {}, "")
_ALL = "all-linear"


@attrs.frozen
class LoraConfig:
    """Which linear layers a LoRA changes, and how.

    Args:
        rank, alpha: of layers that no pattern names.
        use_rslora: whether the scaling is alpha / sqrt(rank) (Kalajdzievski, 2023, arXiv 2312.03732), not alpha / rank.
        rank_pattern, alpha_pattern: by the end of a layer's name, or a regular expression for it.
        targets, excluded: ends of names, or one regular expression for whole names.
        layers: the decoder layers that are changed; None: all.
        layers_pattern: names of the list that layers are in.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]

    def rank_of(self, name: str) -> int:
        """The rank of a linear layer, by transformers' name of it."""
        return next((rank for key, rank in self.rank_pattern.items() if _ends(key, name)), self.rank)

    def scaling_of(self, name: str) -> float:
        """What `b @ a` is multiplied by."""
        alpha = next((alpha for key, alpha in self.alpha_pattern.items() if _ends(key, name)), self.alpha)
        rank = self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def changes(self, name: str) -> bool:
        """Whether a linear layer has a pair of matrices."""
        if _is_in(name, self.excluded) or not (self.targets == _ALL or _is_in(name, self.targets)):
            return False
        if self.layers is None or isinstance(self.targets, str):
            return True
        found = re.match(rf"(?:^|.*?\.)(?:{'|'.join(self.layers_pattern) or '[^.]*'})\.(\d+)\.", name)
        return found is not None and int(found[1]) in self.layers


def _ends(key: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({key})$", name) is not None


def _is_in(name: str, given: tuple[str, ...] | str) -> bool:
    if isinstance(given, str):
        return bool(given) and re.fullmatch(given, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in given)


def parse_lora(raw: Mapping[str, Any], call: str) -> LoraConfig:
    """The object of an adapter_config.json.

    Raises:
        ConfigError: a field that weft does not support, named with its value; a value of the wrong type.
    """
    fields = Fields(raw, call, "adapter_config.json")
    if raw.get("peft_type") != "LORA":
        fields = attrs.evolve(fields, raw={"peft_type": None, **raw})
        raise fields.refuse("peft_type", "weft loads adapters of peft_type='LORA'")
    for name, value in raw.items():
        if name in _NEUTRAL_AT:
            if value not in _NEUTRAL_AT[name]:
                raise fields.refuse(name, f"weft supports {name}={_NEUTRAL_AT[name][0]!r}; merge this adapter instead")
        elif name not in _USED | _NEUTRAL and value not in _OFF:
            raise fields.refuse(name, f"weft supports LoRA without {name}; merge this adapter into its model instead")
    return LoraConfig(
        rank=fields.integer("r", 8),
        alpha=fields.number("lora_alpha", 8),
        use_rslora=fields.flag("use_rslora", False),
        rank_pattern=_pattern(fields, "rank_pattern"),
        alpha_pattern=_pattern(fields, "alpha_pattern"),
        targets=_names(fields, "target_modules"),
        excluded=_names(fields, "exclude_modules"),
        layers=_layers(fields),
        layers_pattern=_listed(_names(fields, "layers_pattern")),
    )


def _layers(fields: Fields) -> tuple[int, ...] | None:
    found = fields.raw.get("layers_to_transform")
    given = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(one) is int for one in given):
        raise fields.refuse("layers_to_transform", "layers_to_transform is a layer's number, a list of them, or null")
    return tuple(given) or None


def _pattern(fields: Fields, name: str) -> dict[str, Any]:
    found = fields.raw.get(name) or {}
    if not isinstance(found, dict):
        raise fields.refuse(name, f"{name} is an object of numbers")
    inner = attrs.evolve(fields, raw=found, prefix=f"{name}.")
    for key in found:
        _check_expression(inner, key, key)
    return {key: inner.integer(key, 1) if name == "rank_pattern" else inner.number(key, 1.0) for key in found}


def _names(fields: Fields, name: str) -> tuple[str, ...] | str:
    found = fields.raw.get(name)
    if isinstance(found, str):
        _check_expression(fields, name, found)
        return found
    if not isinstance(found, list | None) or not all(isinstance(one, str) for one in found or ()):
        raise fields.refuse(name, f"{name} is a list of names, or a regular expression")
    return tuple(found or ())


def _check_expression(fields: Fields, name: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise fields.refuse(name, f"a regular expression: {error}") from None


def _listed(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
