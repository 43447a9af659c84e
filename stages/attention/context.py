"""Attention over a request's context: the model's own, and its two halves, from which to build
custom attention."""

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.batches.batch import ResolvedBatch
from weft.ops.attention.backends import AttentionBackend
from weft.ops.attention.paged import paged_attention
from weft.ops.requests import find_owners
from weft.stages.config import ModelConfig
from weft.stages.params import LayerParams

# The most elements of keys or values gathered at a time, to bound memory.
_MOST_ELEMENTS = 2**24


def attend(
    config: ModelConfig,
    layer: LayerParams,
    q: Tensor,
    kv_pages: Tensor,
    batch: ResolvedBatch,
    *,
    window: int | None = None,
    backend: AttentionBackend | None = None,
) -> Tensor:
    """Causal softmax attention of each token to its request's context, as `weft::paged_attention`
    computes it.

    Args:
        config: the model's configuration.
        layer: the layer's parameters; `layer.index` is its place in the model.
        q: [num_tokens, num_heads, head_dim], rotated.
        kv_pages: [2, num_pages, page_size, num_kv_heads, head_dim], with this step's keys and
            values in it.
        batch: the step's batch, as the decoder passes it on.
        window: the number of last positions that a token sees, its own included; 0: all; None: the
            layer's window in the model.
        backend: the implementation; None: the device's default.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    where = arguments(config, layer, q, batch, window)
    if backend is not None:
        return backend(batch.descriptor.query_len, q, kv_pages, *where, plans=batch.plans)
    return paged_attention(q, None, None, kv_pages, *where)


def arguments(
    config: ModelConfig,
    layer: LayerParams,
    q: Tensor,
    batch: ResolvedBatch,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, float, int]:
    """The arguments of `weft::paged_attention` after the pages."""
    # A ragged batch may be a single request. Reading the lengths would wait for the device, and
    # would end a capture.
    longest = batch.descriptor.query_len or max(len(q), 1)
    if window is None:
        if config.windows:
            window = config.windows[layer.index]
        else:
            window = 0
    where = batch.slot_mapping, batch.block_table, batch.query_start_loc, batch.seq_lens
    return *where, longest, config.head_dim**-0.5, window


def attention_scores(q: Tensor, kv_pages: Tensor, batch: ResolvedBatch) -> Tensor:
    """The scaled products of each token's queries and its context's keys, in torch's own
    operations.

    A softmax over the last dimension turns them into attention weights; a window, a bias or a cap
    can be applied before it.

    Args:
        q: [num_tokens, num_heads, head_dim], rotated.
        kv_pages: [2, num_pages, page_size, num_kv_heads, head_dim], with this step's keys and
            values in it.
        batch: the step's batch, as the decoder passes it on.

    Returns:
        [num_tokens, num_heads, n] float32, where n is the most tokens that a request may have.
        Index j is position j of the token's request; positions after the token's own are -inf.
        Long prompts need much memory.
    """
    rows = list[Tensor]()
    for part, keys in _contexts(kv_pages[0], batch):
        # Grouped by KV head, so that keys need not be repeated for each of the query heads that
        # share them.
        queries = q[part].unflatten(1, (keys.shape[2], -1)).float()
        scores = torch.einsum("tkgd,tnkd->tkgn", queries, keys.float()).flatten(1, 2)
        rows.append(scores.masked_fill(~_visible_mask(batch, part, keys)[:, None], -torch.inf))
    return torch.cat(rows).mul(q.shape[2] ** -0.5)


def weighted_values(weights: Tensor, kv_pages: Tensor, batch: ResolvedBatch) -> Tensor:
    """The weighted sum of the values of each token's context.

    Args:
        weights: [num_tokens, num_heads, n], indexed like the result of `attention_scores`.
        kv_pages: [2, num_pages, page_size, num_kv_heads, head_dim].
        batch: the step's batch, as the decoder passes it on.

    Returns:
        [num_tokens, num_heads, head_dim], of the pages' dtype, or of the weights' dtype if the
        pages are in FP8.
    """
    rows = list[Tensor]()
    for part, values in _contexts(kv_pages[1], batch):
        # Values that the token does not see may be NaN, which a weight of 0 does not remove.
        values = torch.where(
            _visible_mask(batch, part, values)[:, :, None, None], values, 0
        ).float()
        grouped = weights[part].unflatten(1, (values.shape[2], -1)).float()
        rows.append(torch.einsum("tkgn,tnkd->tkgd", grouped, values).flatten(1, 2))
    return torch.cat(rows).to(weights.dtype if kv_pages.dtype.itemsize == 1 else kv_pages.dtype)


def _contexts(pages: Tensor, batch: ResolvedBatch) -> Iterator[tuple[slice, Tensor]]:
    """The keys or values [t, n, num_kv_heads, head_dim] of each token's request, for t tokens at a
    time."""
    owners, _ = find_owners(batch.query_start_loc, len(batch.input_ids))
    # Unused entries of the table need not be pages; what is read there is masked.
    table = batch.block_table.clamp(0, len(pages) - 1)
    most = max(1, _MOST_ELEMENTS // (table.shape[1] * pages[0].numel()))
    for start in range(0, max(len(owners), 1), most):
        part = slice(start, start + most)
        yield part, pages[table[owners[part]]].flatten(1, 2)


def _visible_mask(batch: ResolvedBatch, part: slice, context: Tensor) -> Tensor:
    """[t, n] bool: whether a token sees a position."""
    return torch.arange(context.shape[1], device=context.device) <= batch.positions[part, None]
