"""The parameters of a decoder as a tree of tensors, and a stage's part of them."""

from collections.abc import Mapping

import attrs
from torch import Tensor

from weft.errors import ProgramError
from weft.stages.config import ModelConfig
from weft.stages.layout import StageLayout
from weft.trees import pytree, tree_leaves


# Compared and hashed by identity: `==` on a field would be a tensor, which is neither true nor false.
@pytree
@attrs.frozen(eq=False)
class LayerParams:
    """One decoder layer; None: the model has no such tensor.

    The projections are `[out, in]`, as `torch.nn.functional.linear` takes them, their biases `[out]`; the layer norms
    `[hidden]`; `q_norm` and `k_norm` `[head_dim]`.
    """

    input_layernorm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    post_attention_layernorm: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@pytree
@attrs.frozen(eq=False)
class DecoderParams:
    """What a stage owns of a decoder, or the whole of it.

    Args:
        embed_tokens: `[vocab, hidden]`; None but on the first stage.
        layers: the stage's layers, in order.
        norm: `[hidden]`; None but on the last stage.
        lm_head: `[vocab, hidden]`; None but on the last stage; the embedding itself where the two are tied.
        inv_freq: `[head_dim / 2]`, float32 whatever the others are: rounded frequencies would misplace far tokens.
    """

    embed_tokens: Tensor | None
    layers: tuple[LayerParams, ...]
    norm: Tensor | None
    lm_head: Tensor | None
    inv_freq: Tensor


def layer_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every field of `LayerParams` that a model with this configuration has, by the field's name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    outputs = {"q": query, "k": key, "v": key, "o": hidden, "gate": inner, "up": inner, "down": hidden}
    inputs = {"o": query, "down": inner}
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    shapes |= {f"{name}_proj": (size, inputs.get(name, hidden)) for name, size in outputs.items()}
    biased = "qkv" * config.qkv_bias + "o" * config.o_bias
    names = [*biased, *(("gate", "up", "down") if config.mlp_bias else ())]
    shapes |= {f"{name}_bias": (outputs[name],) for name in names}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return shapes


def slice_params(params: DecoderParams, layout: StageLayout) -> DecoderParams:
    """A stage's part of the whole model's parameters: the same tensors, no copies.

    Raises:
        ProgramError: `params` is not a whole model, or has another number of layers than the layouts were made for.
    """
    call = f"slice_params(params, {layout!r})"
    if params.embed_tokens is None or params.norm is None or params.lm_head is None:
        raise ProgramError(call, "params without an embedding or a head: already a stage's", "pass the whole model's")
    if layout.stop > len(params.layers) or (layout.last and layout.stop != len(params.layers)):
        seen = f"params with {len(params.layers)} layers"
        raise ProgramError(call, seen, f"split_layers({len(params.layers)}, {layout.num_stages})[{layout.index}]")
    return DecoderParams(
        embed_tokens=params.embed_tokens if layout.first else None,
        layers=params.layers[layout.start : layout.stop],
        norm=params.norm if layout.last else None,
        lm_head=params.lm_head if layout.last else None,
        inv_freq=params.inv_freq,
    )


def num_bytes(params: DecoderParams) -> int:
    """The memory that the tensors take; a tied head is the embedding's memory and counts once."""
    tensors = [leaf for leaf in tree_leaves(params) if isinstance(leaf, Tensor)]
    return sum({(t.device, t.data_ptr(), t.nbytes): t.nbytes for t in tensors}.values())
