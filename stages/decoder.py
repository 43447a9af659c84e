"""Decoder stages: Llama, Qwen2, Qwen2-VL's text, Qwen3 and Qwen3-MoE as pure functions of
parameters, state and batch.

A stage is `(params, state, batch, x) -> (state, y)`: `x` is None on the first stage and
`IntermediateTensors` on the others; `y` is `IntermediateTensors`, and on the last stage `Output`.
The architectures differ only in their parameters: the biases, QK norms, routers or FP8 scales that
a model lacks are None.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.descriptor import check_accepted, declare_check
from weft.batches.outputs import IntermediateTensors, Output
from weft.batches.state import State
from weft.errors import ProgramError
from weft.ops.attention.backends import AttentionBackend
from weft.ops.attention.paged import paged_attention_quantized
from weft.ops.experts.products import run_experts
from weft.ops.experts.routing import route
from weft.ops.norm import add_rms_norm, add_rms_norm_quantized, rms_norm, rms_norm_quantized
from weft.ops.products.fp8 import BLOCK
from weft.ops.products.gate import silu_mul, silu_mul_quantized
from weft.ops.products.linear import fp8_linear, linear, swiglu
from weft.ops.products.lora import add_lora
from weft.ops.rotary import rotate_and_keep
from weft.ops.transfers.collective import axis_index
from weft.settings import batch_invariant as invariant
from weft.stages.attention import context
from weft.stages.attention.rope import inverse_frequencies, mrope_positions, rope_tables
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import (
    Attend,
    Beside,
    ChangeLogits,
    DecoderStage,
    Layer,
    LogitsAt,
    Normed,
    StageFunctions,
    Tables,
    check_functions,
)
from weft.stages.custom.sown import SownNames, carried_on, sowing
from weft.stages.head import check_drafting, finish, read_at, verify
from weft.stages.inputs import check_call, check_drafts, embed, resolve_inputs
from weft.stages.layer_fields import row_starts
from weft.stages.layers import Blocks, run_layers
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams, LayerParams, LoraWeights
from weft.stages.shares import AXIS, TensorRanks
from weft.torchapi.private import to_device
from weft.values.donation import donates


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
    reduction_leaves: int = 1,
    sown_names: SownNames | None = None,
    ranks: TensorRanks | None = None,
    device: torch.device | str = "cpu",
) -> DecoderStage:
    """The stage that owns `layout.layers` of the model.

    Args:
        config: the whole model's configuration.
        layout: the stage's layers. The first stage also embeds; the last also normalises, projects
            to the vocabulary and samples.
        keep_logits: also return the logits [num_reqs, vocab_size] (float32, large).
        num_logprobs: also return the logprobs of this many of the likeliest tokens; 0: only the
            chosen token's.
        num_drafts: the most drafts of a request in a batch (`weft.stages.drafters.drafting`). If
            not 0, the state must have `drafting`, and every step verifies.
        attention, attend, feed_forward, norm, logits, layers: custom functions, as in
            `StageFunctions`.
        captures, carries: the values that they capture per token, and carry from token to token, as
            in `StageFunctions`.
        beside: other models that read the same tokens (`readers_beside`); the last stage runs them.
        token_extras: the default values of per-token inputs, on the stage's device.
        batch_invariant: whether the stage runs in `weft.batch_invariant()`.
        reduction_leaves: the number of leaves of each sum that ranks may share, as in
            `StageFunctions`.
        sown_names: one object for all stages of a split in this process. It detects names that no
            stage captures, and names that two layers carry. None: this stage checks only its own.
        ranks: the ranks that share the layers. The configuration, the parameters and the KV pages
            are then this rank's share (`weft.stages.shares`), and the stage must run within
            `weft.shard`.
        device: the device of the parameters. RoPE's frequencies are computed from the configuration
            and put there.

    Returns:
        A pure function that donates its state.

    Raises:
        ProgramError: one of the functions is not a function, or the model has no such layer.
    """
    options: dict[str, Any] = {
        "captures": captures or {},
        "carries": carries or {},
        "token_extras": token_extras or {},
    }
    options |= {"batch_invariant": batch_invariant, "reduction_leaves": reduction_leaves}
    functions = StageFunctions(
        attention, feed_forward, norm, logits, layers or {}, **options, attend=attend
    )
    check_functions("decoder_stage(config, layout, ...)", functions, config.num_layers)
    names = sown_names or SownNames(layout.num_stages)
    blocks = attrs.evolve(BLOCKS, ranks=ranks, reduction_leaves=reduction_leaves)
    is_cut = reduction_leaves > 1

    frequencies, attention_factor = inverse_frequencies(
        config.rope, config.head_dim, config.max_position_embeddings
    )
    # Closed over, and not part of the parameters: as a leaf, they would be trained.
    frequencies = to_device(frequencies, device)
    section = config.rope.mrope_section
    name = f"stage {layout.index} of {layout.num_stages}"

    @donates("state")
    def stage(
        params: DecoderParams, state: State, batch: Batch, x: IntermediateTensors | None
    ) -> tuple[State, IntermediateTensors | Output]:
        check_call(name, layout, params, batch, x, section is not None, config.tie_word_embeddings)
        check_accepted(stage, batch.descriptor)
        with invariant() if batch_invariant else nullcontext():
            check_drafting(state, num_drafts)
            resolved = resolve_inputs(name, functions.token_extras, state, batch)
            if x is None:
                hidden = embed(params, resolved, batch.inputs_embeds, ranks)
            else:
                hidden = x.hidden_states
            # The drafter runs in the first stage, so only that one has the drafts; they come with
            # `x`.
            if x is not None and x.input_ids is not None:
                batch = attrs.evolve(batch, input_ids=x.input_ids)
            positions = None
            if section is not None:
                if x is None:
                    positions = mrope_positions(state, batch, resolved)
                else:
                    positions = x.positions
            if hidden.device != frequencies.device:
                problem = (
                    f"parameters on {hidden.device}, and a stage made for {frequencies.device}"
                )
                instead = f"decoder_stage(..., device={str(hidden.device)!r})"
                raise ProgramError(f"{name}(params, state, batch, x)", problem, instead)
            if positions is None:
                angles = resolved.positions
            else:
                angles = positions
            # Once per step, for all layers.
            tables = rope_tables(frequencies, angles, attention_factor, hidden.dtype, section)
            with sowing(functions.captures, functions.carries, resolved) as (sown, own_batch):
                inputs = params, state.kv_pages, own_batch, tables, hidden
                hidden, pages = run_layers(config, blocks, *inputs, functions, layout.start)
            sown.check_carried()
            captured = sown.after(x, hidden.device)
            # Written in place, except under a derivative or a transform of torch.func.
            if pages is not state.kv_pages:
                state = attrs.evolve(state, kv_pages=pages)
            if functions.carries:
                state = carried_on(name, state, resolved, sown)
            if not layout.last:
                names.add(layout.index, sown)
                return state, IntermediateTensors(
                    hidden, batch.input_ids if num_drafts else None, positions, captured
                )
            if num_drafts:
                where = read_at(batch, num_drafts)
            else:
                where = None
            beside_logits = dict[str, LogitsAt]()
            if beside is not None:
                # On a later stage the drafts came with `x`, and `resolved` still has sentinels.
                input_ids = torch.where(batch.input_ids < 0, resolved.input_ids, batch.input_ids)
                state, beside_logits = beside(state, attrs.evolve(resolved, input_ids=input_ids))
            result = (
                resolved,
                hidden,
                keep_logits,
                num_logprobs,
                where,
                logits,
                captured,
                beside_logits,
                ranks,
                # The head is cut by rows, never its sums: one leaf fixes their order on every
                # number of ranks.
                int(is_cut),
            )
            out = finish(config, params, state.sampling, batch, *result)
            # After `finish`, so that a call of `sow` from `logits` raises its own, clearer error.
            names.add(layout.index, sown)
            if captured:
                out = attrs.evolve(out, captured=captured)
            return state, out if where is None else verify(state, batch, where, out)

    stage.__name__ = stage.__qualname__ = name
    if not num_drafts:
        declare_check(stage, partial(check_drafts, name))
    return stage


def norm(
    weight: Tensor, eps: float, added: Tensor | None, hidden: Tensor, *, quantized: bool
) -> tuple[Normed, Tensor]:
    """Add the result of the block before, if there is one, to the hidden states, and normalise.

    Args:
        added: [num_tokens, hidden_size], or parts of it (`weft.ops.products.parts`); None before
            the first block.
        hidden: [num_tokens, hidden_size].

    Returns:
        The normalised sum, and the sum itself.
    """
    if added is None:
        if quantized:
            first = Normed(*rms_norm_quantized(hidden, weight, eps))
        else:
            first = Normed(rms_norm(hidden, weight, eps))
        return first, hidden
    if not quantized:
        plain, total = add_rms_norm(added, hidden, weight, eps)
        return Normed(plain), total
    plain, fp8, total = add_rms_norm_quantized(added, hidden, weight, eps)
    return Normed(plain, fp8), total


def project(
    x: Normed, weight: Tensor, scale: Tensor | None, bias: Tensor | None, leaves: int = 0
) -> Tensor:
    """A linear layer, plain or in FP8: [num_tokens, out], or parts of it, or leaves."""
    if scale is None:
        return linear(x.plain, weight, bias, leaves)
    return fp8_linear(
        x.quantized or x.plain, weight, scale, bias, dtype=x.plain.dtype, leaves=leaves
    )


def attention(
    config: ModelConfig,
    layer: LayerParams,
    kv_pages: Tensor,
    batch: ResolvedBatch,
    tables: Tables,
    x: Normed,
    *,
    attend: Attend | None = None,
    leaves: int = 0,
) -> tuple[Tensor, Tensor]:
    """Causal grouped-query attention of one layer over the pages of each request; writes this
    step's keys and values.

    Args:
        kv_pages: [2, num_pages, page_size, num_kv_heads, head_dim].
        tables: cosines and sines, each [num_tokens, head_dim / 2].
        x: [num_tokens, hidden_size], normalised.
        attend: a replacement of `weft.stages.attend` with the same signature; None:
            `weft.stages.attend`, or an equivalent kernel.
        leaves: the number of leaves into which the sum over heads is cut
            (`weft.ops.products.leaves`); 0: it is not cut.

    Returns:
        [num_tokens, hidden_size], or parts of it, or the leaves; and the pages, as
        `rotate_and_keep` returns them.
    """
    tokens = x.plain.shape[0]
    dim = config.head_dim
    heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
    _, keys, values, _ = row_starts((one * dim for one in heads), layer.qkv_scale is not None)
    # Ranks share the rows of this product, not its sum. With 1 leaf, the order of a sum does not
    # depend on the number of rows, so every rank gets the same bits.
    qkv = project(x, layer.qkv_proj, layer.qkv_scale, layer.qkv_bias, min(leaves, 1))
    qkv = adapted(qkv, x.plain, layer.lora.qkv, batch)
    q, kv_pages = rotate_and_keep(
        qkv,
        layer.q_norm,
        layer.k_norm,
        config.rms_norm_eps,
        *tables,
        batch.slot_mapping,
        kv_pages,
        config.num_heads,
        (keys, values),
    )
    adapts = layer.lora.o is not None and batch.adapters is not None
    # One kernel for attention and the quantisation of its result, if a head is exactly one block of
    # a scale. An adapter reads the result unquantised.
    if attend is None and layer.o_scale is not None and dim == BLOCK and not adapts:
        fp8 = paged_attention_quantized(
            q, None, None, kv_pages, *context.arguments(config, layer, q, batch)
        )
        return fp8_linear(
            fp8, layer.o_proj, layer.o_scale, layer.o_bias, dtype=q.dtype, leaves=leaves
        ), kv_pages
    mixed = (attend or context.attend)(config, layer, q, kv_pages, batch).reshape(
        tokens, config.num_heads * dim
    )
    out = project(Normed(mixed), layer.o_proj, layer.o_scale, layer.o_bias, leaves)
    return adapted(out, mixed, layer.lora.o, batch, leaves), kv_pages


def adapted(
    y: Tensor, x: Tensor, lora: LoraWeights | None, batch: ResolvedBatch, leaves: int = 0
) -> Tensor:
    """Add each token's adapter to the product `y` of `x` `[T, in]`; `y` is `[T, out]`, or parts or
    leaves of it. Returns `y` itself if the layer or the batch has no adapters."""
    if lora is None or batch.adapters is None or batch.active_adapters is None:
        return y
    return add_lora(
        y, x, lora.a, lora.b, batch.adapters, batch.active_adapters, lora.starts, leaves
    )


def feed_forward(
    config: ModelConfig, layer: LayerParams, batch: ResolvedBatch, x: Normed, *, leaves: int = 0
) -> Tensor:
    """The gated block, `down(silu(gate(x)) * up(x))`, or the experts that the router chooses, each
    of which is such a block.

    Args:
        x: [num_tokens, hidden_size], normalised.
        leaves: the number of leaves into which the sum over inner columns is cut
            (`weft.ops.products.leaves`); 0: it is not cut.

    Returns:
        [num_tokens, hidden_size], or parts of it; or the leaves, each of as many parts.
    """
    dtype = x.plain.dtype
    if layer.router is None or config.moe is None:
        adapts = batch.adapters is not None
        lora = layer.lora
        # `swiglu` may gate within the product's kernel. An adapter has to be added before the gate,
        # and leaves and FP8 have other kernels.
        if layer.gate_up_scale is None and not leaves and not (adapts and lora.gate_up is not None):
            inner = swiglu(x.plain, layer.gate_up_proj, layer.gate_up_bias)
        else:
            gate_up = project(
                x, layer.gate_up_proj, layer.gate_up_scale, layer.gate_up_bias, min(leaves, 1)
            )
            gate_up = adapted(gate_up, x.plain, lora.gate_up, batch)
            # An adapter of `down` reads the inner values before they are quantised.
            if layer.down_scale is not None and not (adapts and lora.down is not None):
                fp8 = silu_mul_quantized(gate_up, dtype)
                return fp8_linear(
                    fp8,
                    layer.down_proj,
                    layer.down_scale,
                    layer.down_bias,
                    dtype=dtype,
                    leaves=leaves,
                )
            inner = silu_mul(gate_up, dtype)
        down = project(Normed(inner), layer.down_proj, layer.down_scale, layer.down_bias, leaves)
        return adapted(down, inner, lora.down, batch, leaves)
    weights, experts = route(
        linear(x.plain, layer.router), config.moe.top_k, config.moe.renormalize, dtype
    )
    if config.moe.num_local_experts is None:
        first = 0
    else:
        first = axis_index(AXIS) * config.moe.num_local_experts
    return run_experts(
        x.plain if x.quantized is None else x.quantized,
        layer.gate_up_proj,
        layer.down_proj,
        weights,
        experts,
        gate_up_scale=layer.gate_up_scale,
        down_scale=layer.down_scale,
        dtype=dtype,
        first=first,
        num_experts=config.moe.num_experts,
        leaves=leaves,
    )


# The decoder's own functions.
BLOCKS = Blocks(norm, attention, feed_forward)
