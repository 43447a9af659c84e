"""Decoder stages: Llama, Qwen2 and Qwen3 as pure functions of parameters, state and batch.

A stage is `(params, state, batch, x) -> (state, y)`: `x` is None on the first stage and `IntermediateTensors` on the
others; `y` is `IntermediateTensors`, and on the last stage `Output`. The three architectures differ in their
parameters alone: a bias or a QK norm that a model lacks is None.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.batch import EMBEDDED, Batch, ResolvedBatch
from weft.donation import donates
from weft.ops.paged_attention import paged_attention
from weft.ops.sample_rows import sample_rows
from weft.outputs import IntermediateTensors, Output
from weft.sampling_table import SamplingTable
from weft.stages.config import ModelConfig
from weft.stages.layout import StageLayout
from weft.stages.logprobs import prompt_logprobs, top_logprobs
from weft.stages.params import DecoderParams, LayerParams
from weft.stages.rope import apply_rope, inverse_frequencies, rope_tables
from weft.state import State, resolve

DecoderStage = Callable[
    [DecoderParams, State, Batch, IntermediateTensors | None], tuple[State, IntermediateTensors | Output]
]


def decoder_stage(
    config: ModelConfig, layout: StageLayout, *, keep_logits: bool = False, num_logprobs: int = 0
) -> DecoderStage:
    """The stage that owns `layout.layers` of the model.

    Args:
        config: the whole model's.
        layout: which layers; the first stage embeds, the last normalises, projects to the vocabulary and samples.
        keep_logits: return the logits [num_reqs, vocab_size] too (in float32, they are large).
        num_logprobs: return the logprobs of so many of the likeliest tokens too; 0: only the chosen one's.

    Returns:
        A pure function that takes the storage of its state.
    """

    _, attention_factor = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)

    @donates("state")
    def stage(
        params: DecoderParams, state: State, batch: Batch, x: IntermediateTensors | None
    ) -> tuple[State, IntermediateTensors | Output]:
        resolved = resolve(state, batch)
        hidden = embed(params, resolved, batch.inputs_embeds) if x is None else x.hidden_states
        tables = rope_tables(params.inv_freq, resolved.positions, attention_factor, hidden.dtype)
        hidden = layers(config, params, state.kv_pages, resolved, tables, hidden)
        if not layout.last:
            return state, IntermediateTensors(hidden)
        return state, finish(config, params, state.sampling, batch, resolved, hidden, keep_logits, num_logprobs)

    stage.__name__ = stage.__qualname__ = f"stage {layout.index} of {layout.num_stages}"
    return stage


def embed(params: DecoderParams, batch: ResolvedBatch, given: Tensor | None) -> Tensor:
    """The embeddings [num_tokens, hidden_size] of the batch's tokens, those that are `given` among them; first stage
    only."""
    assert params.embed_tokens is not None, "only the first stage's parameters hold the embedding"
    if given is None:
        return F.embedding(batch.input_ids, params.embed_tokens)
    known = F.embedding(batch.input_ids.clamp(min=0), params.embed_tokens)
    return torch.where((batch.input_ids == EMBEDDED)[:, None], given, known)


def layers(
    config: ModelConfig,
    params: DecoderParams,
    kv_pages: Tensor,
    batch: ResolvedBatch,
    tables: tuple[Tensor, Tensor],
    hidden: Tensor,
) -> Tensor:
    """The stage's decoder layers, one after the other; `kv_pages[i]` is written for layer i of the stage.

    Args:
        kv_pages: [layers of the stage, 2, num_pages, page_size, num_kv_heads, head_dim].
        tables: the rotary cosines and sines, each [num_tokens, head_dim / 2].
        hidden: [num_tokens, hidden_size].

    Returns:
        [num_tokens, hidden_size].
    """
    for index, layer in enumerate(params.layers):
        normed = rms_norm(hidden, layer.input_layernorm, config.rms_norm_eps)
        hidden = hidden + attention(config, layer, kv_pages[index], batch, tables, normed)
        normed = rms_norm(hidden, layer.post_attention_layernorm, config.rms_norm_eps)
        hidden = hidden + mlp(layer, normed)
    return hidden


def attention(
    config: ModelConfig,
    layer: LayerParams,
    kv_pages: Tensor,
    batch: ResolvedBatch,
    tables: tuple[Tensor, Tensor],
    x: Tensor,
) -> Tensor:
    """Grouped-query attention of one layer over the pages of each request, causal; writes this step's keys and values.

    Args:
        kv_pages: [2, num_pages, page_size, num_kv_heads, head_dim], written in place.
        tables: cosines and sines, each [num_tokens, head_dim / 2].
        x: [num_tokens, hidden_size], normalised.
    """
    tokens, dim = x.shape[0], config.head_dim
    q = F.linear(x, layer.q_proj, layer.q_bias).view(tokens, config.num_heads, dim)
    k = F.linear(x, layer.k_proj, layer.k_bias).view(tokens, config.num_kv_heads, dim)
    v = F.linear(x, layer.v_proj, layer.v_bias).view(tokens, config.num_kv_heads, dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
        k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
    q, k = apply_rope(q, *tables), apply_rope(k, *tables)
    longest = batch.descriptor.query_len or max(tokens, 1)
    mixed = paged_attention(
        q,
        k,
        v,
        kv_pages,
        batch.slot_mapping,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        longest,
        dim**-0.5,
    )
    return F.linear(mixed.reshape(tokens, config.num_heads * dim), layer.o_proj, layer.o_bias)


def mlp(layer: LayerParams, x: Tensor) -> Tensor:
    """The gated feed-forward block, `down(silu(gate(x)) * up(x))`; x and result [num_tokens, hidden_size]."""
    gate = F.linear(x, layer.gate_proj, layer.gate_bias)
    up = F.linear(x, layer.up_proj, layer.up_bias)
    return F.linear(F.silu(gate) * up, layer.down_proj, layer.down_bias)


def head(config: ModelConfig, params: DecoderParams, batch: ResolvedBatch, hidden: Tensor) -> Tensor:
    """The logits [num_reqs, vocab_size] at each request's last token; last stage only."""
    assert params.norm is not None, "only the last stage's parameters hold the norm and the head"
    assert params.lm_head is not None
    last = rms_norm(hidden[batch.last_index], params.norm, config.rms_norm_eps)
    return F.linear(last, params.lm_head)


def finish(
    config: ModelConfig,
    params: DecoderParams,
    table: SamplingTable,
    batch: Batch,
    resolved: ResolvedBatch,
    hidden: Tensor,
    keep_logits: bool = False,
    num_logprobs: int = 0,
) -> Output:
    """What the last stage makes of the last layer's states [num_tokens, hidden_size]: a token for each request, and
    what else was asked for."""
    logits = head(config, params, resolved, hidden)
    ids, logprobs = sample_rows(logits, table, batch.rows, resolved.positions[resolved.last_index], batch.token_mask)
    top = top_logprobs(logits, ids, logprobs, num_logprobs) if num_logprobs else (None, None)
    prompt: tuple[Tensor | None, ...] = (None, None, None)
    if batch.targets is not None:
        assert params.norm is not None, "only the last stage's parameters hold the norm and the head"
        assert params.lm_head is not None
        normed = rms_norm(hidden, params.norm, config.rms_norm_eps)
        prompt = prompt_logprobs(normed, params.lm_head, batch.targets, num_logprobs)
    return Output(ids, logprobs, logits.float() if keep_logits else None, *top, *prompt)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019, arXiv 1910.07467).

    In float32 inside, rounded once, after the multiplication by the weight.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
