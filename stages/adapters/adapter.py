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
from weft.arguments.json_text import Fields, is_plain_name, read_object
from weft.errors import ConfigError
from weft.stages.checkpoints.digests import Origin, digest_files, digest_params
from weft.stages.checkpoints.reading import FLOATS, check_tensor, open_tensors, refuse_names
from weft.stages.config import find_file
from weft.stages.model import Model
from weft.stages.shares import adaptable
from weft.values.trees import OF_THIS_PROCESS, pytree, static

T = TypeVar("T")

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
_TARGETS = "target_modules"
_EXCLUDED = "exclude_modules"
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
        rank_pattern, alpha_pattern: the ranks and alphas of layers by the ends of their names; the
            first match counts.
        targets: ends of the names of the layers that are changed; None: of any name.
        excluded: ends of the names of those that are not.
        has_expression: whether targets or excluded layers are given as a regular expression, which
            is not read: the layers that are changed are then those in the file of the weights.
        layers: the decoder layers that are changed; None: all.
        layer_lists: ends of the names of lists of layers; None: any.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: tuple[str, ...] | None
    excluded: tuple[str, ...]
    has_expression: bool
    layers: tuple[int, ...] | None
    layer_lists: tuple[str, ...] | None

    def rank_of(self, name: str) -> int:
        """The rank of a linear layer, by transformers' name."""
        ranks = (rank for end, rank in self.rank_pattern.items() if _ends(name, end))
        return next(ranks, self.rank)

    def scaling_of(self, name: str) -> float:
        """The factor by which `b @ a` is multiplied."""
        alphas = (alpha for end, alpha in self.alpha_pattern.items() if _ends(name, end))
        alpha = next(alphas, self.alpha)
        rank = self.rank_of(name)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def changes(self, name: str) -> bool:
        """Whether a linear layer of the decoder has a pair of matrices, unless an expression, which
        is not read, excludes it."""
        if any(_ends(name, end) for end in self.excluded):
            return False
        if self.targets is None:
            return True
        return any(_ends(name, end) for end in self.targets) and self._is_in_layers(name)

    def _is_in_layers(self, name: str) -> bool:
        if self.layers is None:
            return True
        parts = name.split(".")
        place = next(place for place, part in enumerate(parts) if part.isdecimal())
        layers = ".".join(parts[:place])
        is_in_list = self.layer_lists is None or any(_ends(layers, end) for end in self.layer_lists)
        return is_in_list and int(parts[place]) in self.layers


def _ends(name: str, end: str) -> bool:
    """Whether a name is `end`, or ends with it after a dot."""
    # By whole components, as PEFT matches: `proj` must not select `q_proj`.
    return name == end or name.endswith(f".{end}")


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
        # 8 is PEFT's default of both.
        rank=fields.integer("r", 8),
        alpha=fields.number("lora_alpha", 8),
        use_rslora=fields.flag("use_rslora", False),
        rank_pattern=_pattern(fields, "rank_pattern", lambda inner, key: inner.integer(key, 1)),
        alpha_pattern=_pattern(fields, "alpha_pattern", lambda inner, key: inner.number(key, 1.0)),
        targets=_targets(fields),
        excluded=() if _is_expression(raw, _EXCLUDED) else _names(fields, _EXCLUDED),
        has_expression=any(_is_expression(raw, name) for name in (_TARGETS, _EXCLUDED)),
        layers=_layers(fields),
        layer_lists=_layer_lists(fields),
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


def _layer_lists(fields: Fields) -> tuple[str, ...] | None:
    pattern = fields.raw.get("layers_pattern")
    if isinstance(pattern, str):
        names = (pattern,) * bool(pattern)
    else:
        names = _names(fields, "layers_pattern")
    are_plain = all(map(is_plain_name, names))
    fields.check(are_plain, "layers_pattern", "layers_pattern is a list of names")
    return names or None


def _pattern(fields: Fields, name: str, value: Callable[[Fields, str], T]) -> dict[str, T]:
    if not fields.raw.get(name):
        return {}
    inner = fields.nested(name, "an object of numbers")
    assert inner is not None
    for key in inner.raw:
        inner.check(is_plain_name(key), key, f"{name} has names, not regular expressions")
    return {key: value(inner, key) for key in inner.raw}


def _targets(fields: Fields) -> tuple[str, ...] | None:
    if fields.raw.get(_TARGETS) == _ALL or _is_expression(fields.raw, _TARGETS):
        return None
    return _names(fields, _TARGETS)


def _is_expression(raw: Mapping[str, Any], name: str) -> bool:
    # An expression is not evaluated: one such as `(.*)*(.*)*x!` keeps Python's `re` busy for ever,
    # and the names in the weights' file say which layers it selects.
    value = raw.get(name)
    return isinstance(value, str) and value not in ("", _ALL)


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    if not fields.raw.get(name):
        return ()
    return tuple(fields.items(name, str, "a list of names, or a regular expression"))


def load_adapter(model: Model, folder: str | os.PathLike[str]) -> Adapter:
    """Load a LoRA adapter: adapter_config.json and adapter_model.safetensors, as PEFT's
    `save_pretrained` writes them.

    An adapter may change any linear layer of attention and of feed-forward blocks, but not experts.
    Regular expressions in `target_modules` and `exclude_modules` are not read: the adapter then
    changes the layers of which its weights' file has tensors. If the model is one stage of a
    pipeline, only that stage's layers are read. Values are loaded as float32; the computation is in
    the dtype of the model's activations.

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
    with open_tensors(path / _WEIGHTS, "cpu", call) as handle:
        there = handle.keys()
        pairs = _changed(config, _in_file(parts, there) if config.has_expression else parts, call)
        # Names are checked for the whole model, so that every stage accepts or refuses the same
        # adapters.
        expected_names = {_tensor(name, which) for name in pairs for which in "AB"}
        stage_names = {
            name for i in model.layout.layers for name in adaptable(model.config, i)
        } & pairs.keys()
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
    pairs = {n: (config.rank_of(n), config.scaling_of(n)) for n in names if config.changes(n)}
    if not pairs:
        problem = f"{_CONFIG} names no layer of the model that can be adapted"
        instead = (
            "an adapter of the model's own q, k, v, o, gate, up or down projections, none of"
            " experts"
        )
        raise ConfigError(call, problem, instead)
    return pairs


def _in_file(names: Iterable[str], tensors: Sequence[str]) -> list[str]:
    """Those of the linear layers of which the weights' file has a tensor."""
    in_file = {*tensors}
    return [name for name in names if any(_tensor(name, which) in in_file for which in "AB")]


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
    # Scaled here, in float32: a slot has no factor, and adapters in neighbouring slots may differ
    # in it.
    return pair[0], pair[1] * scaling
