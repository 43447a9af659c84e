"""`DecoderParams`: the parameters of a decoder as a tree of tensors, and a stage's part of them."""

import attrs
from torch import Tensor

from weft.display.summary import Summarized
from weft.errors import ProgramError
from weft.stages.layout import StageLayout, check_layout
from weft.values.trees import pytree, static, tree_leaves


# eq=False, here and below: `==` of two tensors is a tensor, which has no truth value.
@pytree
@attrs.frozen(eq=False, repr=False)
class LoraWeights(Summarized):
    """The adapter slots of one product of a layer; an empty slot is 0. The product may comprise
    several linear layers, each with a pair of matrices.

    Args:
        a: `[slots, pairs, rank, in]`.
        b: `[slots, out, rank]`, already multiplied by the adapter's scaling.
        starts: the row of `out` where each pair begins, and the end of the last one.
    """

    a: Tensor
    b: Tensor
    starts: tuple[int, ...] = attrs.field(metadata=static())


@pytree
@attrs.frozen(eq=False, repr=False)
class LayerLora(Summarized):
    """The adapter slots of a layer's products; None: no adapter changes that product."""

    qkv: LoraWeights | None = None
    o: LoraWeights | None = None
    gate_up: LoraWeights | None = None
    down: LoraWeights | None = None


@pytree
@attrs.frozen(eq=False, repr=False)
class LayerParams(Summarized):
    """The parameters of one decoder layer; None: the model has no such tensor.

    A projection is `[out, in]`, as `torch.nn.functional.linear` takes it, and its bias is `[out]`.
    Projections of the same input are stacked by rows in one matrix. The layer norms are `[hidden]`;
    `q_norm` and `k_norm` are `[head_dim]`.

    If there is a `router` `[experts, hidden]`, `gate_up_proj` is `[experts, 2 * inner, hidden]` and
    `down_proj` is `[experts, hidden, inner]`. On a rank that holds whole experts, these two have
    only the rank's own experts.

    A projection with a scale is float8_e4m3fn: `weight[…, n, k]` is multiplied by `scale[…, n //
    128, k // 128]`, which is float32. Each of the stacked matrices begins at a multiple of 128
    rows; zeros fill the gaps.

    `lora` holds slots for adapters, in the dtype of the norms. `index` is the layer's place in the
    whole model.
    """

    input_layernorm: Tensor
    qkv_proj: Tensor
    o_proj: Tensor
    post_attention_layernorm: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    router: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    qkv_scale: Tensor | None = None
    o_scale: Tensor | None = None
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None
    lora: LayerLora = LayerLora()
    index: int = attrs.field(default=0, metadata=static())


@pytree
@attrs.frozen(eq=False, repr=False)
class DecoderParams(Summarized):
    """The parameters of one stage of a decoder, or of all of it.

    Args:
        embed_tokens: `[vocab, hidden]`; None except on the first stage.
        layers: the stage's layers, in order.
        norm: `[hidden]`; None except on the last stage.
        lm_head: `[vocab, hidden]`; None except on the last stage. None there, too, if the head is
            tied to an embedding that the stage holds: `head` is then the embedding. So every
            trained tensor is exactly one leaf, and constants such as RoPE's frequencies are none.
    """

    embed_tokens: Tensor | None
    layers: tuple[LayerParams, ...]
    norm: Tensor | None
    lm_head: Tensor | None = None

    @property
    def head(self) -> Tensor | None:
        """The head `[vocab, hidden]`: `lm_head`, or the embedding that it is tied to; None except
        on the last stage."""
        if self.norm is None:
            return None
        if self.lm_head is None:
            return self.embed_tokens
        return self.lm_head


def slice_params(params: DecoderParams, layout: StageLayout) -> DecoderParams:
    """A stage's part of the whole model's parameters: the same tensors, no copies.

    Args:
        params: the parameters of the whole model.
        layout: the layout of the stage.

    Raises:
        ProgramError: `params` is not a whole model, or has another number of layers than the
            layouts were made for.
    """
    call = f"slice_params(params, {layout!r})"
    if params.embed_tokens is None or params.head is None:
        raise ProgramError(
            call,
            "params without an embedding or a head: already a stage's",
            "pass the whole model's",
        )
    check_layout(layout, len(params.layers), call)
    lm_head = None
    if layout.last:
        if layout.first:
            lm_head = params.lm_head
        else:
            # This stage has no embedding, so a tied head has to be a tensor of its own here.
            lm_head = params.head
    return DecoderParams(
        embed_tokens=params.embed_tokens if layout.first else None,
        layers=params.layers[layout.start : layout.stop],
        norm=params.norm if layout.last else None,
        lm_head=lm_head,
    )


def head_fault(params: DecoderParams, is_tied: bool) -> tuple[str, str] | None:
    """A problem with the head and its remedy, or None: it is missing, or it is there beside the
    embedding to which the configuration ties it.

    Args:
        params: the parameters of a stage, or of a whole model.
        is_tied: the configuration's `tie_word_embeddings`.
    """
    if params.norm is None:
        return None
    is_embedding = is_tied and params.embed_tokens is not None
    if is_embedding and params.lm_head is not None:
        problem = "params.lm_head beside an embedding, and tie_word_embeddings=True"
        instead = (
            "lm_head=None: the head is the embedding; or a config with tie_word_embeddings=False"
        )
        return problem, instead
    if not is_embedding and params.lm_head is None:
        if is_tied:
            tied = "params without an embedding"
        else:
            tied = "tie_word_embeddings=False"
        return f"params.lm_head is None, and {tied}", "lm_head: a tensor [vocab, hidden]"
    return None


def num_bytes(params: DecoderParams) -> int:
    """The memory of the tensors in bytes; one that occurs twice, as a tied head, counts once."""
    tensors = [leaf for leaf in tree_leaves(params) if isinstance(leaf, Tensor)]
    return sum({(t.device, t.data_ptr(), t.nbytes): t.nbytes for t in tensors}.values())
