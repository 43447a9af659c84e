"""The fields of `LayerParams` that a model's layer has, and the checkpoint's tensors that fill
them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import attrs
import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.ops.products.fp8 import BLOCK, ceil_blocks
from weft.stages.config import ModelConfig


@attrs.frozen
class Part:
    """One of the checkpoint's tensors, and its place in a field: the rows from `start`, of one
    expert if the layer has experts.

    Args:
        name: transformers' name of the tensor.
        shape: its shape in the field.
        start: its first row in the field.
        expert: the index of its expert in the field; None: the layer has no experts.
        stored: its shape in the checkpoint, if the field has only a share of it; None: `shape`.
        offset: where that share begins in each dimension.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0
    expert: int | None = None
    stored: tuple[int, ...] | None = None
    offset: tuple[int, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in the checkpoint."""
        return self.stored or self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The share of the checkpoint's tensor, as an index; empty: all of it."""
        return tuple(
            slice(at, at + size) for at, size in zip(self.offset, self.shape, strict=False)
        )

    def place(self, field: Tensor) -> Tensor:
        """The view of the field's tensor that holds this part."""
        if self.expert is None:
            rows = field
        else:
            rows = field[self.expert]
        view = rows[self.start : self.start + self.shape[0]]
        if view.dim() == 1:
            return view
        return view[:, : self.shape[1]]


@attrs.frozen
class Field:
    """A tensor of `LayerParams`: its shape, dtype (None: the model's), and the parts that fill it;
    the rest is 0."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    dtype: torch.dtype | None = None


@attrs.frozen
class _Linear:
    """Linear layers of the same input, stacked by rows in one field and computed as one product.

    Args:
        field: the prefix of the fields: `qkv` for qkv_proj, qkv_bias and qkv_scale.
        modules: the number of rows of each layer, by transformers' name within the decoder layer.
        columns: the number of columns of each.
        width: the number of columns of the field; those beyond `columns` are 0.
        bias: whether they have biases.
    """

    field: str
    modules: Mapping[str, int]
    columns: int
    width: int
    bias: bool = False


def layer_fields(config: ModelConfig, index: int) -> dict[str, Field]:
    """The fields of `LayerParams` that layer `index` of this model has, in the order of the
    computation.

    Raises:
        ConfigError: only some of the linear layers that form one product are quantised.
    """
    hidden = config.hidden_size
    layer = f"model.layers.{index}"
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    attention = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": key}
    fields = {"input_layernorm": _norm(f"{layer}.input_layernorm", hidden)}
    fields |= _attention(config, layer, _Linear("qkv", attention, hidden, hidden, config.qkv_bias))
    if config.qk_norm:
        fields |= {
            f"{part}_norm": _norm(f"{layer}.self_attn.{part}_norm", config.head_dim)
            for part in "qk"
        }
    fields |= _attention(
        config, layer, _Linear("o", {"self_attn.o_proj": hidden}, query, query, config.o_bias)
    )
    fields["post_attention_layernorm"] = _norm(f"{layer}.post_attention_layernorm", hidden)
    if config.moe is None or not config.moe.is_sparse(index):
        return fields | _feed_forward(
            config, layer, ["mlp"], config.intermediate_size, config.mlp_bias
        )
    shape = config.moe.num_experts, hidden
    fields["router"] = Field(shape, (Part(f"{layer}.mlp.gate.weight", shape),))
    experts = [
        f"mlp.experts.{expert}"
        for expert in range(config.moe.num_local_experts or config.moe.num_experts)
    ]
    return fields | _stacked(
        _feed_forward(config, layer, experts, config.moe.inner, False), experts
    )


def row_starts(sizes: Iterable[int], fp8: bool) -> tuple[int, ...]:
    """The rows at which matrices of these sizes begin in one field, and the end of the last one; in
    FP8, each matrix begins a new block.

    >>> row_starts((130, 2), True), row_starts((130, 2), False)
    ((0, 256, 384), (0, 130, 132))
    """
    unit = BLOCK if fp8 else 1
    return tuple(accumulate((-(-size // unit) * unit for size in sizes), initial=0))


def _norm(module: str, size: int) -> Field:
    return Field((size,), (Part(f"{module}.weight", (size,)),))


def _attention(config: ModelConfig, layer: str, linear: _Linear) -> dict[str, Field]:
    return _linear(
        layer, linear, _converted(config, [f"{layer}.{module}" for module in linear.modules])
    )


def _feed_forward(
    config: ModelConfig, layer: str, modules: Sequence[str], inner: int, bias: bool
) -> dict[str, Field]:
    """The fields of a feed-forward block; with several experts, those of the first. All experts are
    computed as one product, so either all are in FP8 or none is."""
    hidden = config.hidden_size
    module = modules[0]
    firsts = [f"{layer}.{module}.{which}_proj" for module in modules for which in ("gate", "up")]
    first_fp8 = _converted(config, firsts)
    down_fp8 = _converted(config, [f"{layer}.{module}.down_proj" for module in modules])
    first = _Linear(
        "gate_up", {f"{module}.gate_proj": inner, f"{module}.up_proj": inner}, hidden, hidden, bias
    )
    fields = _linear(layer, first, first_fp8)
    # As wide as a half of the first product, which is a whole number of blocks in FP8.
    width = fields["gate_up_proj"].shape[0] // 2
    down = _Linear("down", {f"{module}.down_proj": hidden}, inner, width, bias)
    return fields | _linear(layer, down, down_fp8)


def _linear(layer: str, linear: _Linear, fp8: bool) -> dict[str, Field]:
    """The fields of the weights, and of the biases and the scales if there are any."""
    names = [f"{layer}.{module}" for module in linear.modules]
    weights = []
    biases = []
    scales = []
    # A single matrix needs no padding to whole blocks, as no other follows it.
    *starts, end = row_starts(linear.modules.values(), fp8 and len(names) > 1)
    for name, rows, start in zip(names, linear.modules.values(), starts, strict=True):
        weights.append(Part(f"{name}.weight", (rows, linear.columns), start))
        biases.append(Part(f"{name}.bias", (rows,), start))
        blocks = ceil_blocks(rows), ceil_blocks(linear.columns)
        # Despite the name, which is that of the format, weights are multiplied by it.
        scales.append(Part(f"{name}.weight_scale_inv", blocks, start // BLOCK))
    if fp8:
        weight_dtype = torch.float8_e4m3fn
    else:
        weight_dtype = None
    fields = {f"{linear.field}_proj": Field((end, linear.width), tuple(weights), weight_dtype)}
    if linear.bias:
        fields[f"{linear.field}_bias"] = Field((end,), tuple(biases))
    if fp8:
        shape = ceil_blocks(end), ceil_blocks(linear.width)
        fields[f"{linear.field}_scale"] = Field(shape, tuple(scales), torch.float32)
    return fields


def _converted(config: ModelConfig, names: list[str]) -> bool:
    """Whether these linear layers, which form one product, are in FP8."""
    if config.fp8 is None:
        names_by_fp8 = {}
    else:
        # Reversed, so that the first name of each kind remains, which the error shows.
        names_by_fp8 = {config.fp8.converts(name): name for name in reversed(names)}
    if len(names_by_fp8) > 1:
        problem = f"{names_by_fp8[True]} in FP8 and {names_by_fp8[False]} not, which are parts of one product"
        instead = (
            "let modules_to_not_convert name all parts of a product, as all experts of a layer, or"
            " none"
        )
        raise ConfigError("layer_fields(config, index)", problem, instead)
    return True in names_by_fp8


def _stacked(first: dict[str, Field], experts: Sequence[str]) -> dict[str, Field]:
    """The fields of all experts, stacked along a new first dimension, from the fields of the first
    expert."""
    return {
        name: Field((len(experts), *field.shape), tuple(_of_experts(field, experts)), field.dtype)
        for name, field in first.items()
    }


def _of_experts(first: Field, experts: Sequence[str]) -> Iterator[Part]:
    for expert, module in enumerate(experts):
        for part in first.parts:
            yield Part(part.name.replace(experts[0], module), part.shape, part.start, expert)
