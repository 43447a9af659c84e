"""`Adapter`: a LoRA adapter, loaded from PEFT's format."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values
from weft.arguments.expressions import Expression, read_expression
from weft.arguments.json_text import Fields, read_object
from weft.errors import ConfigError
from weft.stages.checkpoints.digests import Origin, digest_files, digest_params
from weft.stages.checkpoints.reading import FLOATS, check_tensor, open_tensors, refuse_names
from weft.stages.config import find_file
from weft.stages.model import Model
from weft.stages.shares import adaptable
from weft.trees import OF_THIS_PROCESS, pytree, static

T = TypeVar("T")
Names = tuple[str, ...] | Expression

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_USED = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
}
# Fields that matter only to training, to its initial values, or to bookkeeping.
_NEUTRAL = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
    "ensure_weight_tying",
}
_NEUTRAL_AT: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # These leave the base model's weights unchanged; other methods subtract the adapter's initial
    # values from them.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
_OFF: tuple[Any, ...] = (None, False, [], {}, "")
_ALL = "all-linear"
_RULES: dict[str, Rule] = {
    "model": (
        Model,
        "model = weft.load(folder) first, then weft.load_adapter(model, the adapter's folder)",
    ),
    "folder": (str | os.PathLike, "the adapter's folder"),
}


@pytree
@attrs.frozen(eq=False)
class Adapter:
    """A LoRA adapter: the pair of matrices that it adds to each linear layer. The matrices are the
    leaves of the tree; they may be trained, in place or as a new tree.

    Args:
        deltas: a dict from transformers' name of each linear layer that it changes
            (`model.layers.3.self_attn.q_proj`) to the matrices `a [rank, in]` and `b [out, rank]`,
            float32. The scaling is part of b: `b @ (a @ x)` is added.
        path: the folder that it was loaded from.
        origin: digests of the files that it was loaded from; None if it was not loaded.
    """

    deltas: Mapping[str, tuple[Tensor, Tensor]]
    path: Path = attrs.field(metadata={**OF_THIS_PROCESS, **static()})
    origin: Origin | None = attrs.field(
        default=None, kw_only=True, metadata={**OF_THIS_PROCESS, **static()}
    )

    @property
    def weights(self) -> str:
        """A digest that the ranks of a pipeline compare: of the files, with a note if any of 4
        values sampled from each matrix has changed; without files, of the sampled values."""
        if self.origin is None:
            return digest_params(self.deltas)
        return self.origin.describe(self.deltas)

    @property
    def rank(self) -> int:
        """The greatest rank of its layers."""
        return max((a.shape[0] for a, _ in self.deltas.values()), default=1)

    def __repr__(self) -> str:
        return f"<Adapter {str(self.path)!r}, {len(self.deltas)} layers, rank {self.rank}>"


@attrs.frozen
class LoraConfig:
    """An adapter_config.json: which linear layers a LoRA changes, and how.

    Args:
        rank, alpha: the rank and alpha of layers that no pattern matches.
        use_rslora: whether the scaling is alpha / sqrt(rank) (Kalajdzievski, 2023, arXiv
            2312.03732), not alpha / rank.
        rank_pattern, alpha_pattern: the ranks and alphas of layers whose names match an expression;
            the first match counts.
        targets, excluded: ends of names, or an expression that matches whole names.
        layers: the decoder layers that are changed; None: all.
        in_layers: an expression that matches the names of modules in a list of layers.
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
        """The rank of a linear layer, by transformers' name."""
        return next((rank for key, rank in self.rank_pattern if key.matches(name)), self.rank)

    def scaling_of(self, name: str) -> float:
        """The factor by which `b @ a` is multiplied."""
        alpha = next((alpha for key, alpha in self.alpha_pattern if key.matches(name)), self.alpha)
        rank = self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def changes(self, name: str) -> bool:
        """Whether a linear layer of the decoder has a pair of matrices."""
        if _is_in(name, self.excluded) or not _is_in(name, self.targets):
            return False
        if self.layers is None or isinstance(self.targets, Expression):
            return True
        return (
            self.in_layers.matches(name)
            and next(int(x) for x in name.split(".") if x.isdecimal()) in self.layers
        )


def _is_in(name: str, names: Names) -> bool:
    if isinstance(names, Expression):
        return names.matches(name)
    return any(name == one or name.endswith(f".{one}") for one in names)


def parse_lora(raw: Mapping[str, Any], call: str) -> LoraConfig:
    """Read the object of an adapter_config.json. Every field is either used, neutral, switched off,
    or refused.

    Raises:
        ConfigError: a field that weft does not support, named with its value; a value of the wrong
            type.
    """
    fields = Fields(raw, call, _CONFIG)
    fields.check(
        raw.get("peft_type") == "LORA", "peft_type", "weft loads adapters of peft_type='LORA'"
    )
    for name, value in raw.items():
        if name not in _USED | _NEUTRAL:
            instead = (
                f"weft supports LoRA without {name}; merge this adapter into its model instead"
            )
            if name in _NEUTRAL_AT:
                instead = (
                    f"weft supports {name}={_NEUTRAL_AT[name][0]!r}; merge this adapter instead"
                )
            fields.check(value in _NEUTRAL_AT.get(name, _OFF), name, instead)
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
    value = fields.raw.get("layers_to_transform")
    if isinstance(value, list):
        layers = value
    elif value is None:
        layers = []
    else:
        layers = [value]
    numbers = all(type(one) is int for one in layers)
    fields.check(
        numbers,
        "layers_to_transform",
        "layers_to_transform is a layer's number, a list of them, or null",
    )
    return tuple(layers) or None


def _in_layers(fields: Fields) -> Expression:
    pattern = fields.raw.get("layers_pattern")
    if not isinstance(pattern, str):
        patterns = _strings(fields, "layers_pattern")
    else:
        patterns = [pattern]
    text = "|".join(patterns) or "[^.]*"
    return read_expression(fields, "layers_pattern", text, before=r"(?:.*\.)?", after=r"\.\d+\..*")


def _pattern(
    fields: Fields, name: str, value: Callable[[Fields, str], T]
) -> list[tuple[Expression, T]]:
    if fields.raw.get(name):
        inner = fields.nested(name, "an object of numbers")
    else:
        inner = None
    if inner is None:
        return []
    return [
        (read_expression(inner, key, key, before=r"(?:.*\.)?"), value(inner, key))
        for key in inner.raw
    ]


def _names(fields: Fields, name: str, *, all_linear: bool = False) -> Names:
    value = fields.raw.get(name)
    if all_linear and value == _ALL:
        return Expression(".*")
    if value and isinstance(value, str):
        return read_expression(fields, name, value)
    return tuple(_strings(fields, name))


def _strings(fields: Fields, name: str) -> list[str]:
    if fields.raw.get(name):
        return fields.items(name, str, "a list of names, or a regular expression")
    return []


def load_adapter(model: Model, folder: str | os.PathLike[str]) -> Adapter:
    """Load a LoRA adapter: adapter_config.json and adapter_model.safetensors, as PEFT's
    `save_pretrained` writes them.

    An adapter may change any linear layer of attention and of feed-forward blocks, but not experts.
    If the model is one stage of a pipeline, only that stage's layers are read. Values are loaded as
    float32; the computation is in the dtype of the model's activations.

    Args:
        model: the base model of the adapter.
        folder: a local folder.

    Raises:
        CheckpointNotFoundError: there is no such folder, or one of the two files is missing.
        ConfigError: adapter_config.json has a field that weft does not support: another kind of
            adapter, a bias, DoRA, modules that are saved whole.
        CheckpointError: a file is damaged; a tensor is missing, of another shape than the model and
            the configuration say, or of a module that weft does not adapt.
        RequestError: `model` is not a model, or `folder` is not a path.
    """
    check_values("weft.load_adapter(model, folder)", _RULES, {"model": model, "folder": folder})
    call = f"weft.load_adapter({model!r}, {os.fspath(folder)!r:.300})"
    path = Path(folder)
    for file in (_CONFIG, _WEIGHTS):
        pickled = {"adapter_model.bin": "save it again, as safetensors"}
        find_file(path, (file,), call, "pass a folder that PEFT's save_pretrained wrote", pickled)
    config = parse_lora(read_object(path / _CONFIG, call), call)
    parts = {
        n: part
        for i in range(model.config.num_layers)
        for n, (_, _, part) in adaptable(model.config, i).items()
    }
    pairs = _changed(config, parts, call)
    expected_names = {_tensor(name, which) for name in pairs for which in "AB"}
    stage_names = {
        name for i in model.layout.layers for name in adaptable(model.config, i)
    } & pairs.keys()
    with open_tensors(path / _WEIGHTS, "cpu", call) as handle:
        there = handle.keys()
        missing = sorted(expected_names.difference(there))
        extra = [name for name in there if name not in expected_names]
        refuse_names(missing, extra, _WEIGHTS, _CONFIG, call)
        deltas = {
            name: _read(handle, name, pairs[name], parts[name].shape, call)
            for name in parts
            if name in stage_names
        }
    origin = Origin(digest_files(path, (path / _CONFIG, path / _WEIGHTS)), digest_params(deltas))
    return Adapter(deltas, path, origin=origin)


def _changed(config: LoraConfig, names: Iterable[str], call: str) -> dict[str, tuple[int, float]]:
    """The rank and the scaling of each of these linear layers that the adapter changes."""
    try:
        if pairs := {
            n: (config.rank_of(n), config.scaling_of(n)) for n in names if config.changes(n)
        }:
            return pairs
        problem = "names no layer of the model that can be adapted"
        instead = (
            "an adapter of the model's own q, k, v, o, gate, up or down projections, none of"
            " experts"
        )
    # An expression of the file that takes too many steps to match.
    except ConfigError as error:
        problem = f"has {error.call}, and {error.problem}"
        instead = error.instead
    raise ConfigError(call, f"{_CONFIG} {problem}", instead)


def _tensor(name: str, which: str) -> str:
    return f"base_model.model.{name}.lora_{which}.weight"


def _read(
    handle: Any, name: str, rank_and_scaling: tuple[int, float], shape: tuple[int, ...], call: str
) -> tuple[Tensor, Tensor]:
    """The pair of matrices of a linear layer `[out, in]`, with the scaling in the second."""
    (rows, columns), (rank, scaling), pair = shape, rank_and_scaling, []
    for which, size in (("A", (rank, columns)), ("B", (rows, rank))):
        check_tensor(handle, _tensor(name, which), size, FLOATS, _WEIGHTS, _CONFIG, call)
        pair.append(handle.get_tensor(_tensor(name, which)).to(torch.float32))
    return pair[0], pair[1] * scaling
