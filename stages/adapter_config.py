"""`LoraConfig`: what a LoRA's adapter_config.json says, every field of it used, known to be neutral, switched off, or
refused."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from weft.errors import ConfigError
from weft.stages.expressions import Expression
from weft.stages.fields import Fields

T = TypeVar("T")
Names = tuple[str, ...] | Expression

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
        rank_pattern, alpha_pattern: of layers whose names an expression matches; the first that does counts.
        targets, excluded: ends of names, or an expression that matches whole names.
        layers: the decoder layers that are changed; None: all.
        in_layers: matches the names of what is in a list of layers.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Sequence[tuple[Expression, int]]
    alpha_pattern: Sequence[tuple[Expression, float]]
    targets: Names
    excluded: Names
    layers: tuple[int, ...] | None
    in_layers: Expression

    def rank_of(self, name: str) -> int:
        """The rank of a linear layer, by transformers' name of it."""
        return next((rank for key, rank in self.rank_pattern if key.matches(name)), self.rank)

    def scaling_of(self, name: str) -> float:
        """What `b @ a` is multiplied by."""
        alpha = next((alpha for key, alpha in self.alpha_pattern if key.matches(name)), self.alpha)
        rank = self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def changes(self, name: str) -> bool:
        """Whether a linear layer of the decoder has a pair of matrices."""
        if _is_in(name, self.excluded) or not _is_in(name, self.targets):
            return False
        if self.layers is None or isinstance(self.targets, Expression):
            return True
        # The layer's number is the only one in such a name.
        return self.in_layers.matches(name) and next(int(x) for x in name.split(".") if x.isdecimal()) in self.layers


def _is_in(name: str, given: Names) -> bool:
    if isinstance(given, Expression):
        return given.matches(name)
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
        rank_pattern=_pattern(fields, "rank_pattern", lambda inner, key: inner.integer(key, 1)),
        alpha_pattern=_pattern(fields, "alpha_pattern", lambda inner, key: inner.number(key, 1.0)),
        targets=_names(fields, "target_modules", all_linear=True),
        excluded=_names(fields, "exclude_modules"),
        layers=_layers(fields),
        in_layers=_in_layers(fields),
    )


def _layers(fields: Fields) -> tuple[int, ...] | None:
    found = fields.raw.get("layers_to_transform")
    given = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(one) is int for one in given):
        raise fields.refuse("layers_to_transform", "layers_to_transform is a layer's number, a list of them, or null")
    return tuple(given) or None


def _in_layers(fields: Fields) -> Expression:
    found = fields.raw.get("layers_pattern")
    given = _strings(fields, "layers_pattern") if not isinstance(found, str) else [found]
    around = {"before": r"(?:.*\.)?", "after": r"\.\d+\..*"}
    return _expression(fields, "layers_pattern", "|".join(given) or "[^.]*", **around)


def _pattern(fields: Fields, name: str, value: Callable[[Fields, str], T]) -> list[tuple[Expression, T]]:
    found = fields.raw.get(name) or {}
    if not isinstance(found, dict):
        raise fields.refuse(name, f"{name} is an object of numbers")
    inner = attrs.evolve(fields, raw=found, prefix=f"{name}.")
    return [(_expression(inner, key, key, before=r"(?:.*\.)?"), value(inner, key)) for key in found]


def _names(fields: Fields, name: str, *, all_linear: bool = False) -> Names:
    found = fields.raw.get(name)
    if all_linear and found == _ALL:
        return Expression(".*")
    return _expression(fields, name, found) if found and isinstance(found, str) else tuple(_strings(fields, name))


def _strings(fields: Fields, name: str) -> list[str]:
    found = fields.raw.get(name) or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise fields.refuse(name, f"{name} is a list of names, or a regular expression")
    return found


def _expression(fields: Fields, name: str, text: str, **around: str) -> Expression:
    try:
        return Expression(text, **around)
    except ConfigError as error:
        raise fields.refuse(name, f"a regular expression: {error.seen}") from None
