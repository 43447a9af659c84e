"""Decoder stages: Llama, Qwen2, Qwen2-VL's text, Qwen3 and Qwen3-MoE as pure functions of parameters, state and batch.

A stage is `(params, state, batch, x) -> (state, y)`: `x` is None on the first stage and `IntermediateTensors` on the
others; `y` is `IntermediateTensors`, and on the last stage `Output`. The architectures differ only in their parameters:
the biases, QK norms, routers or FP8 scales that a model lacks are None.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.batch import EMBEDDED, Batch, ResolvedBatch
from weft.donation import donates
from weft.errors import DescriptorError, ProgramError, WeftError
from weft.ops.attention.backends import AttentionBackend
from weft.ops.attention.paged import paged_attention_quantized
from weft.ops.experts.products import run_experts
from weft.ops.experts.routing import route
from weft.ops.fp8 import BLOCK
from weft.ops.gate import silu_mul, silu_mul_quantized
from weft.ops.linear import fp8_linear, linear
from weft.ops.lora import add_lora
from weft.ops.norm import add_parts, add_rms_norm, add_rms_norm_quantized, rms_norm, rms_norm_quantized
from weft.ops.rotary import rotate_and_keep
from weft.outputs import IntermediateTensors, Output
from weft.settings import batch_invariant as invariant
from weft.stages.attention import context
from weft.stages.attention.rope import inverse_frequencies, mrope_positions, position_fault, rope_tables
from weft.stages.config import ModelConfig
from weft.stages.functions import (
    OWN,
    Attend,
    Beside,
    ChangeLogits,
    DecoderStage,
    Layer,
    LogitsAt,
    Normed,
    StageFunctions,
    Tables,
    blamed_on,
    changed_layer,
    check_added,
    check_attended,
    check_functions,
    noted,
)
from weft.stages.head import finish, read_at, verify
from weft.stages.layer_fields import row_starts
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams, LayerParams, LoraWeights
from weft.stages.sown import SownNames, at_layer, carried_on, sowing
from weft.state import State, resolve

_NOTHING = nullcontext()


def decoder_stage(
    config: ModelConfig,
    layout: StageLayout,
    *,
    keep_logits: bool = False,
    num_logprobs: int = 0,
    num_drafts: int = 0,
    attention: Callable[..., tuple[Tensor, Tensor]] | None = None,
    feed_forward: Callable[..., Tensor] | None = None,
    norm: Callable[..., tuple[Normed, Tensor]] | None = None,
    logits: ChangeLogits | None = None,
    layers: Mapping[int, Callable[[Layer], Layer]] | None = None,
    captures: Mapping[str, Tensor] | None = None,
    carries: Mapping[str, Tensor] | None = None,
    token_extras: Mapping[str, Tensor] | None = None,
    attend: Attend | AttentionBackend | None = None,
    beside: Beside | None = None,
    batch_invariant: bool = False,
    sown_names: SownNames | None = None,
) -> DecoderStage:
    """The stage that owns `layout.layers` of the model.

    Args:
        config: the whole model's.
        layout: the layers; the first stage also embeds, the last also normalises, projects to the vocabulary and
            samples.
        keep_logits: also return the logits [num_reqs, vocab_size] (float32, large).
        num_logprobs: also return the logprobs of this many of the likeliest tokens; 0: only the chosen token's.
        num_drafts: the most drafts of a request in a batch (`weft.stages.drafting`); if not 0, the state has a
            `drafting`, and every step verifies.
        attention, attend, feed_forward, norm, logits, layers: functions of your own, as in `StageFunctions`.
        captures, carries: the values that they capture of a token, and carry to the next, as in `StageFunctions`.
        beside: other models, which the last stage lets read the same tokens (`weft.stages.drafting.readers_beside`).
        token_extras: the default values of inputs that tokens have of their own, on the stage's device.
        batch_invariant: whether the stage runs in `weft.batch_invariant()`.
        sown_names: shared by the stages of a split that run in this process, which find in it what none of them
            captures, and what two of them carry; None: this stage knows its own alone.

    Returns:
        A pure function that takes the storage of its state.

    Raises:
        ProgramError: one of the functions is not a function, or the model has no such layer.
    """
    own: dict[str, Any] = {"captures": captures or {}, "carries": carries or {}, "token_extras": token_extras or {}}
    own["attend"] = attend
    functions = StageFunctions(attention, feed_forward, norm, logits, layers or {}, **own)
    check_functions("decoder_stage(config, layout, ...)", functions, config.num_layers)
    names = sown_names or SownNames(layout.num_stages)

    _, attention_factor = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    section, name = config.rope.mrope_section, f"stage {layout.index} of {layout.num_stages}"

    @donates("state")
    def stage(
        params: DecoderParams, state: State, batch: Batch, x: IntermediateTensors | None
    ) -> tuple[State, IntermediateTensors | Output]:
        with invariant() if batch_invariant else _NOTHING:
            return run(params, state, batch, x)

    def run(
        params: DecoderParams, state: State, batch: Batch, x: IntermediateTensors | None
    ) -> tuple[State, IntermediateTensors | Output]:
        _check_call(name, layout, params, batch, x, section is not None)
        resolved = _resolved(state, batch)
        if functions.token_extras:
            resolved = attrs.evolve(resolved, token_extras=_token_extras(name, functions.token_extras, batch))
        hidden = embed(params, resolved, batch.inputs_embeds) if x is None else x.hidden_states
        if x is not None and x.input_ids is not None:
            batch = attrs.evolve(batch, input_ids=x.input_ids)
        positions = None
        if section is not None:
            positions = mrope_positions(state, batch, resolved) if x is None else x.positions
        angles = resolved.positions if positions is None else positions
        tables = rope_tables(params.inv_freq, angles, attention_factor, hidden.dtype, section)
        with sowing(functions.captures, functions.carries, resolved) as (sown, own_batch):
            given = params, state.kv_pages, own_batch, tables, hidden
            hidden, pages = run_layers(config, *given, functions, layout.start)
        sown.check_carried()
        captured = sown.after(x, hidden.device)
        if pages is not state.kv_pages:
            state = attrs.evolve(state, kv_pages=pages)
        if functions.carries:
            state = carried_on(name, state, resolved, sown)
        if not layout.last:
            names.add(layout.index, sown)
            return state, IntermediateTensors(hidden, batch.input_ids if num_drafts else None, positions, captured)
        where, others = read_at(batch, num_drafts) if num_drafts else None, dict[str, LogitsAt]()
        if beside is not None:
            known = torch.where(batch.input_ids < 0, resolved.input_ids, batch.input_ids)  # with the drafts
            state, others = beside(state, attrs.evolve(resolved, input_ids=known))
        result = resolved, hidden, keep_logits, num_logprobs, where, logits, captured, others
        out = finish(config, params, state.sampling, batch, *result)
        names.add(layout.index, sown)  # after a call from `logits`, which is another mistake
        out = attrs.evolve(out, captured=captured) if captured else out
        return state, out if where is None else verify(state, batch, where, out)

    stage.__name__ = stage.__qualname__ = name
    return stage


def _check_call(
    name: str, layout: StageLayout, params: DecoderParams, batch: Batch, x: IntermediateTensors | None, has_mrope: bool
) -> None:
    """Raise ProgramError for the parameters of another stage, and for a later stage without `x`; DescriptorError for a
    batch of another stage, or with positions that the model does not have."""
    kind: type[WeftError] = ProgramError
    owned = params.embed_tokens is not None, params.norm is not None, len(params.layers)
    if owned != (layout.first, layout.last, len(layout.layers)):
        parts = [*["the embedding"] * owned[0], f"{owned[2]} layers", *["the head"] * owned[1]]
        seen = f"params of {', '.join(parts)}"
        instead = f"this stage's own, of layers {layout.start} to {layout.stop - 1}: Runner.params[{layout.index}]"
    elif x is None and not layout.first:
        seen, instead = "x is None", "what the stage before returned"
    elif fault := position_fault(batch, x, has_mrope):
        kind, (seen, instead) = DescriptorError, fault
    else:
        return
    raise kind(f"{name}(params, state, batch, x)", seen, instead)


def _token_extras(name: str, defaults: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """The inputs [num_tokens, ...] that each token of the batch has of its own."""
    if others := batch.token_extras.keys() - defaults.keys():
        known = f"the names that the stages declare: {', '.join(map(repr, defaults))}"
        raise DescriptorError(f"{name}(params, state, batch, x)", f"token_extras of {sorted(others)}", known)
    given, count = batch.token_extras, len(batch.input_ids)
    return {key: given[key].values if key in given else x.expand(count, *x.shape) for key, x in defaults.items()}


def _resolved(state: State, batch: Batch) -> ResolvedBatch:
    """As `resolve`, with a note on an error about indices, which nothing checks on the host."""
    try:
        return resolve(state, batch)
    except IndexError as error:
        (rows, pages), size = state.block_table.shape, state.kv_pages.shape[3]
        error.add_note(
            f"a row or a token of the batch beyond the state, which has rows 0 to {rows - 2} of at most {pages * size} "
            "tokens: name rows that were admitted, or make room (make_state(..., lengths=[...]), State.zeros(...))"
        )
        raise


def embed(params: DecoderParams, batch: ResolvedBatch, given: Tensor | None) -> Tensor:
    """The embeddings [num_tokens, hidden_size] of the batch's tokens, with those that are `given` in their places.
    First stage only."""
    assert params.embed_tokens is not None, "only the first stage's parameters hold the embedding"
    if given is None:
        return F.embedding(batch.input_ids, params.embed_tokens)
    known = F.embedding(batch.input_ids.clamp(min=0), params.embed_tokens)
    return torch.where((batch.input_ids == EMBEDDED)[:, None], given, known)


def run_layers(
    config: ModelConfig,
    params: DecoderParams,
    kv_pages: Tensor,
    batch: ResolvedBatch,
    tables: Tables,
    hidden: Tensor,
    functions: StageFunctions = OWN,
    start: int = 0,
) -> tuple[Tensor, Tensor]:
    """The stage's decoder layers, one after the other; `kv_pages[i]` is written for layer i of the stage.

    Args:
        kv_pages: [layers of the stage, 2, num_pages, page_size, num_kv_heads, head_dim].
        tables: the rotary cosines and sines, each [num_tokens, head_dim / 2].
        hidden: [num_tokens, hidden_size].
        functions: those of one's own.
        start: the index of the stage's first layer in the model.

    Returns:
        [num_tokens, hidden_size]; and the pages: `kv_pages` itself if they were written in place (`rotate_and_keep`).
    """

    attend = functools.partial(_attend_block, config, functions)
    feed = functools.partial(_feed_forward_block, config, functions)

    def whole(layer: LayerParams, own: Tensor, batch: ResolvedBatch, tables: Tables, hidden: Tensor) -> Any:
        added, hidden, pages = attend(layer, own, batch, tables, None, hidden)
        return add_parts(*feed(layer, batch, added, hidden)), pages

    added, written, in_place = None, list[Tensor](), True
    for index, layer in enumerate(params.layers):
        own, change = kv_pages[index], functions.layers.get(start + index)
        if functions.carries:
            at_layer(start + index)
        if change is None:
            # In two calls, so that what the last layer added is freed before the experts of this one take memory.
            added, hidden, pages = attend(layer, own, batch, tables, added, hidden)
            added, hidden = feed(layer, batch, added, hidden)
        else:
            hidden = hidden if added is None else add_parts(added, hidden)
            given = layer, own, batch, tables, hidden
            added, (hidden, pages) = None, changed_layer(start + index, change, whole, *given)
        in_place = in_place and pages is own
        written.append(pages)
    hidden = hidden if added is None else add_parts(added, hidden)
    return hidden, kv_pages if in_place else torch.stack(written)


def _attend_block(
    config: ModelConfig,
    functions: StageFunctions,
    layer: LayerParams,
    kv_pages: Tensor,
    batch: ResolvedBatch,
    tables: Tables,
    added: Tensor | None,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's attention after its norm, which first adds the last block's result, if there is one: the attention's
    result, which is not added yet, the hidden states, and the pages."""
    x, hidden = _normed(config, functions, layer.input_layernorm, batch, added, hidden, layer.qkv_scale is not None)
    if functions.attention is None:
        own = None if functions.attend is None else functools.partial(_attended, functions.attend)
        added, pages = attention(config, layer, kv_pages, batch, tables, x, attend=own)
        return added, hidden, pages
    with blamed_on("attention", batch):
        added, pages = functions.attention(config, layer, kv_pages, batch, tables, x)
    return check_added("attention", added, hidden), hidden, pages


def _feed_forward_block(
    config: ModelConfig,
    functions: StageFunctions,
    layer: LayerParams,
    batch: ResolvedBatch,
    added: Tensor,
    hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `_attend_block`, the layer's feed-forward block."""
    quantized = layer.gate_up_scale is not None
    x, hidden = _normed(config, functions, layer.post_attention_layernorm, batch, added, hidden, quantized)
    if functions.feed_forward is None:
        return feed_forward(config, layer, batch, x), hidden
    with blamed_on("feed_forward", batch):
        return check_added("feed_forward", functions.feed_forward(config, layer, batch, x), hidden), hidden


def _normed(
    config: ModelConfig,
    functions: StageFunctions,
    weight: Tensor,
    batch: ResolvedBatch,
    added: Tensor | None,
    hidden: Tensor,
    quantized: bool,
) -> tuple[Normed, Tensor]:
    """The result of the norm, the model's or one's own."""
    with blamed_on("norm", batch) if functions.norm else _NOTHING:
        return (functions.norm or norm)(weight, config.rms_norm_eps, added, hidden, quantized=quantized)


def _attended(
    own: Attend | AttentionBackend,
    config: ModelConfig,
    layer: LayerParams,
    q: Tensor,
    kv_pages: Tensor,
    batch: ResolvedBatch,
) -> Tensor:
    """The result of attention of one's own, checked."""
    if isinstance(own, AttentionBackend):
        with noted(lambda _: f"in the attention back end {own.name!r}, of capability {own.capability!r}"):
            return check_attended(context.attend(config, layer, q, kv_pages, batch, backend=own), q)
    with blamed_on("attend", batch):
        return check_attended(own(config, layer, q, kv_pages, batch), q)


def norm(weight: Tensor, eps: float, added: Tensor | None, hidden: Tensor, *, quantized: bool) -> tuple[Normed, Tensor]:
    """Add the last block's result, if there was one, and normalise.

    Args:
        added: [num_tokens, hidden_size], or parts of it (`weft.ops.parts`).
        hidden: [num_tokens, hidden_size].

    Returns:
        The normalised sum, and the sum.
    """
    if added is None:
        first = Normed(*rms_norm_quantized(hidden, weight, eps)) if quantized else Normed(rms_norm(hidden, weight, eps))
        return first, hidden
    if not quantized:
        plain, total = add_rms_norm(added, hidden, weight, eps)
        return Normed(plain), total
    plain, fp8, total = add_rms_norm_quantized(added, hidden, weight, eps)
    return Normed(plain, fp8), total


def project(x: Normed, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """A linear layer, plain or in FP8: [num_tokens, out], or parts of it."""
    if scale is None:
        return linear(x.plain, weight, bias)
    return fp8_linear(x.quantized or x.plain, weight, scale, bias, dtype=x.plain.dtype)


def attention(
    config: ModelConfig,
    layer: LayerParams,
    kv_pages: Tensor,
    batch: ResolvedBatch,
    tables: Tables,
    x: Normed,
    *,
    attend: Attend | None = None,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention of one layer over the pages of each request, causal; writes this step's keys and values.

    Args:
        kv_pages: [2, num_pages, page_size, num_kv_heads, head_dim].
        tables: cosines and sines, each [num_tokens, head_dim / 2].
        x: [num_tokens, hidden_size], normalised.
        attend: in the place of `weft.stages.attend`, with its arguments and result; None: that, or what is equal to it.

    Returns:
        [num_tokens, hidden_size], or parts of it; and the pages, as `rotate_and_keep` returns them.
    """
    tokens, dim = x.plain.shape[0], config.head_dim
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    _, keys, values, _ = row_starts((one * dim for one in heads), layer.qkv_scale is not None)
    qkv = project(x, layer.qkv_proj, layer.qkv_scale, layer.qkv_bias)
    qkv = adapted(qkv, x.plain, layer.lora.qkv, batch)
    q, kv_pages = rotate_and_keep(
        qkv, layer.q_norm, layer.k_norm, config.rms_norm_eps, *tables, batch.slot_mapping, kv_pages,
        config.num_heads, (keys, values),
    )  # fmt: skip
    adapts = layer.lora.o is not None and batch.adapters is not None
    if attend is None and layer.o_scale is not None and dim == BLOCK and not adapts:
        fp8 = paged_attention_quantized(q, None, None, kv_pages, *context.arguments(config, layer, q, batch))
        return fp8_linear(fp8, layer.o_proj, layer.o_scale, layer.o_bias, dtype=q.dtype), kv_pages
    mixed = (attend or context.attend)(config, layer, q, kv_pages, batch).reshape(tokens, config.num_heads * dim)
    out = project(Normed(mixed), layer.o_proj, layer.o_scale, layer.o_bias)
    return adapted(out, mixed, layer.lora.o, batch), kv_pages


def adapted(y: Tensor, x: Tensor, lora: LoraWeights | None, batch: ResolvedBatch) -> Tensor:
    """Add each token's adapter to the product `y`, `[T, out]` or parts of it, of `x` `[T, in]`; `y` itself if neither
    the layer nor the batch has adapters."""
    if lora is None or batch.adapters is None or batch.active_adapters is None:
        return y
    return add_lora(y, x, lora.a, lora.b, batch.adapters, batch.active_adapters, lora.starts)


def feed_forward(config: ModelConfig, layer: LayerParams, batch: ResolvedBatch, x: Normed) -> Tensor:
    """The gated block, `down(silu(gate(x)) * up(x))`, or the experts that the router chooses, each such a block.

    Args:
        x: [num_tokens, hidden_size], normalised.

    Returns:
        [num_tokens, hidden_size], or parts of it.
    """
    dtype = x.plain.dtype
    if layer.router is None or config.moe is None:
        gate_up = project(x, layer.gate_up_proj, layer.gate_up_scale, layer.gate_up_bias)
        gate_up = adapted(gate_up, x.plain, layer.lora.gate_up, batch)
        if layer.down_scale is None or (layer.lora.down is not None and batch.adapters is not None):
            inner = silu_mul(gate_up, dtype)
            down = project(Normed(inner), layer.down_proj, layer.down_scale, layer.down_bias)
            return adapted(down, inner, layer.lora.down, batch)
        quantized = silu_mul_quantized(gate_up, dtype)
        return fp8_linear(quantized, layer.down_proj, layer.down_scale, layer.down_bias, dtype=dtype)
    weights, experts = route(linear(x.plain, layer.router), config.moe.top_k, config.moe.renormalize, dtype)
    return run_experts(
        x.plain if x.quantized is None else x.quantized, layer.gate_up_proj, layer.down_proj, weights, experts,
        gate_up_scale=layer.gate_up_scale, down_scale=layer.down_scale, dtype=dtype,
    )  # fmt: skip
