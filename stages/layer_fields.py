"""The fields of `LayerParams` that a model's layer has, and the checkpoint's tensors that fill each of them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

import attrs
import torch

from weft.errors import ConfigError
from weft.ops.fp8 import BLOCK, ceil_blocks
from weft.stages.config import ModelConfig


@attrs.frozen
class Part:
    """One of the checkpoint's tensors, and its place in a field: the rows from `start`, in one expert if there are any.

    Args:
        name: transformers' name.
        shape: its shape in the checkpoint.
        start: its first row in the field.
        expert: its expert; None: the layer has none.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    expert: int | None = None


@attrs.frozen
class Field:
    """A tensor of `LayerParams`: its shape, dtype (None: the model's), and the parts that fill it; the rest is 0."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: torch.dtype | None = None


@attrs.frozen
class _Linear:
    """Linear layers of the same input, computed as one product: one below the other in one field.

    Args:
        field: `qkv` for qkv_proj, qkv_bias and qkv_scale.
        modules: the rows of each, by transformers' name below the layer.
        columns: the columns of each.
        width: the columns of the field; those beyond `columns` are 0.
        bias: whether they have one.
    """

    field: str
    modules: Mapping[str, int]
    columns: int
    width: int
    bias: bool = False


def layer_fields(config: ModelConfig, index: int) -> dict[str, Field]:
    """The fields of `LayerParams` that layer `index` of this model has, in the order of the computation.

    Raises:
        ConfigError: the quantisation takes some and leaves others of the layers that are one product.
    """
    hidden, layer = config.hidden_size, f"model.layers.{index}"
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
    fields = {"input_layernorm": _norm(f"{layer}.input_layernorm", hidden)}
    fields |= _linear(config, layer, _Linear("qkv", attention, hidden, hidden, config.qkv_bias))
    if config.qk_norm:
        fields |= {f"{part}_norm": _norm(f"{layer}.self_attn.{part}_norm", config.head_dim) for part in "qk"}
    fields |= _linear(config, layer, _Linear("o", {"self_attn.o_proj": hidden}, query, query, config.o_bias))
    fields["post_attention_layernorm"] = _norm(f"{layer}.post_attention_layernorm", hidden)
    if config.moe is None or not config.moe.is_sparse(index):
        return fields | _feed_forward(config, layer, "mlp", config.intermediate_size, config.mlp_bias)
    shape = config.moe.num_experts, hidden
    fields["router"] = Field(shape, (Part(f"{layer}.mlp.gate.weight", shape),))
    experts = (
        _feed_forward(config, layer, f"mlp.experts.{e}", config.moe.inner, False) for e in range(config.moe.num_experts)
    )
    return fields | _stacked(list(experts))


def adaptable(config: ModelConfig, index: int) -> dict[str, tuple[str, int, Part]]:
    """The linear layers of decoder layer `index` that an adapter may change, by transformers' name: the product that
    each is part of, its place in that product, and its part of the weights. Experts are left out."""
    found = {}
    for name, field in layer_fields(config, index).items():
        for place, part in enumerate(field.parts):
            if name.endswith("_proj") and part.expert is None:
                found[part.name.removesuffix(".weight")] = (name.removesuffix("_proj"), place, part)
    return found


def row_starts(sizes: Iterable[int], fp8: bool) -> tuple[int, ...]:
    """The rows at which matrices of these sizes begin in one field, and the end of the last; in FP8 each begins a
    block.

    >>> row_starts((130, 2), True), row_starts((130, 2), False)
    ((0, 256, 384), (0, 130, 132))
    """
    unit = BLOCK if fp8 else 1
    return tuple(accumulate((-(-size // unit) * unit for size in sizes), initial=0))


def _norm(module: str, size: int) -> Field:
    return Field((size,), (Part(f"{module}.weight", (size,)),))


def _feed_forward(config: ModelConfig, layer: str, module: str, inner: int, bias: bool) -> dict[str, Field]:
    hidden = config.hidden_size
    first = {f"{module}.gate_proj": inner, f"{module}.up_proj": inner}
    fields = _linear(config, layer, _Linear("gate_up", first, hidden, hidden, bias))
    # As wide as a half of the first product, which is a whole number of blocks in FP8.
    width = fields["gate_up_proj"].shape[0] // 2
    return fields | _linear(config, layer, _Linear("down", {f"{module}.down_proj": hidden}, inner, width, bias))


def _linear(config: ModelConfig, layer: str, linear: _Linear) -> dict[str, Field]:
    """The field of the weights, and those of the biases and the scales if there are any."""
    names = [f"{layer}.{module}" for module in linear.modules]
    fp8 = _converted(config, names)
    weights, biases, scales = [], [], []
    *starts, end = row_starts(linear.modules.values(), fp8 and len(names) > 1)
    for name, rows, start in zip(names, linear.modules.values(), starts, strict=True):
        weights.append(Part(f"{name}.weight", (rows, linear.columns), start))
        biases.append(Part(f"{name}.bias", (rows,), start))
        blocks = ceil_blocks(rows), ceil_blocks(linear.columns)
        scales.append(Part(f"{name}.weight_scale_inv", blocks, start // BLOCK))
    weight_dtype = torch.float8_e4m3fn if fp8 else None
    fields = {f"{linear.field}_proj": Field((end, linear.width), tuple(weights), weight_dtype)}
    if linear.bias:
        fields[f"{linear.field}_bias"] = Field((end,), tuple(biases))
    if fp8:
        shape = ceil_blocks(end), ceil_blocks(linear.width)
        fields[f"{linear.field}_scale"] = Field(shape, tuple(scales), torch.float32)
    return fields


def _converted(config: ModelConfig, names: list[str]) -> bool:
    """Whether these layers are in FP8: all of them, or none."""
    found = {} if config.fp8 is None else {name: config.fp8.converts(name) for name in names}
    if len(set(found.values())) > 1:
        seen = " and ".join(f"{name} {'in FP8' if fp8 else 'not'}" for name, fp8 in found.items())
        raise ConfigError("layer_fields(config, index)", seen, "let modules_to_not_convert name all of them, or none")
    return any(found.values())


def _stacked(experts: list[dict[str, Field]]) -> dict[str, Field]:
    """The fields of all experts, stacked along a new first dimension."""
    return {name: Field((len(experts), *first.shape), tuple(_of_experts(experts, name)), first.dtype)
            for name, first in experts[0].items()}  # fmt: skip


def _of_experts(experts: list[dict[str, Field]], name: str) -> Iterator[Part]:
    for expert, fields in enumerate(experts):
        if name not in fields or fields[name].dtype != experts[0][name].dtype or len(fields) != len(experts[0]):
            seen = f"{experts[0][name].parts[0].name} and those of expert {expert} stored in two ways"
            raise ConfigError("layer_fields(config, index)", seen, "quantise all experts of a layer, or none")
        yield from (attrs.evolve(part, expert=expert) for part in fields[name].parts)
