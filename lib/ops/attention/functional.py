"""The functional forms of the KV cache and of `weft::paged_attention`, for autograd and torch.func.

They use torch's own operations, run on any device, and read no values on the host, so that they can
also be captured in a graph and mapped by `vmap`.
"""

import torch
from torch import Tensor

from weft.errors import DerivativeError
from weft.ops.products.fp8 import as_kept
from weft.ops.products.parts import widened
from weft.ops.requests import find_owners


def keep(k: Tensor, v: Tensor, slot_mapping: Tensor, kv_pages: Tensor) -> Tensor:
    """New pages with each token's key and value `[T, Hkv, D]` in its slot; a token with slot -1 is
    skipped."""
    slots = kv_pages.shape[1] * kv_pages.shape[2]
    slot = slot_mapping.long()
    # In the flattened pages, all slots of keys come before those of values.
    index = torch.where(slot < 0, 2 * slots, torch.stack((slot, slot + slots))).flatten()
    new = _as_bytes(as_kept(torch.cat((k, v)), kv_pages.dtype))
    old = _as_bytes(kv_pages.flatten(0, 2))
    # The extra last row receives the skipped tokens: a mask would need a read on the host.
    rows = torch.cat((old, old.new_zeros((1, *old.shape[1:]))))
    kept: Tensor = rows.index_copy(0, index, new)[: 2 * slots].view(kv_pages.shape)
    if kept.dtype == kv_pages.dtype:
        return kept
    return kept.view(kv_pages.dtype)


def write_rows(rows: Tensor, index: Tensor, pages: Tensor) -> None:
    """Write keys or values `[n, Hkv, D]` to the slots `[n]` of pages `[P * page_size, Hkv, D]`, in
    place."""
    _as_bytes(pages).index_copy_(0, index.long(), _as_bytes(as_kept(rows, pages.dtype)))


def _as_bytes(x: Tensor) -> Tensor:
    """`x`, or its bytes if it is in FP8, which `index_copy` does not support."""
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8)
    return x


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv_pages: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
) -> Tensor:
    """`weft.ops.attention.paged.paged_attention`, with the same arguments.

    Gradients flow to q and to the pages, and so to the keys and values that this step or an earlier
    one wrote there.

    It materialises scores `[R, Hkv, n * H / Hkv, max_pages * page_size]` in float32, for at most n
    queries per request.

    Raises:
        DerivativeError: k and v are given, and autograd forbids writing to the pages in place.
    """
    tokens = q.shape[0]
    requests = len(seq_lens)
    kv_heads = kv_pages.shape[3]
    if not tokens or not requests:
        return torch.zeros_like(q)
    owner, place = find_owners(query_start_loc, tokens)
    lengths = query_start_loc[1:] - query_start_loc[:-1]
    live = (place < lengths[owner]) & (seq_lens[owner] > 0) & (slot_mapping >= 0)
    if k is not None and v is not None:
        _write(k, v, torch.where(live, slot_mapping, -1), kv_pages)

    # Pad the queries and their positions to a row per request, as long as the longest may be.
    step = torch.arange(min(max_query_len, tokens), device=q.device)
    token = (query_start_loc[:-1, None] + step).clamp(max=tokens - 1)
    position = (seq_lens - lengths)[:, None] + step
    end = torch.where((step < lengths[:, None]) & live[token], position + 1, 0).amax(1)
    queries = _by_kv_head(widened(torch.where(live[:, None, None], q, 0))[token], kv_heads) * scale

    # Unused entries of the table need not be pages; what is read there is masked below.
    history = kv_pages[:, block_table.clamp(0, kv_pages.shape[1] - 1)].flatten(2, 3)
    context = torch.arange(history.shape[2], device=q.device)
    # Memory past the context may hold NaN, and 0 * NaN is NaN: zero it.
    history = torch.where((context < end[:, None])[:, :, None, None], history, 0)
    keys, values = widened(history).transpose(2, 3).unbind(0)

    last = position[:, :, None]
    visible = context <= last
    if window:
        visible &= context > last - window
    beyond = (last < 0) | (step >= lengths[:, None])[:, :, None]
    # Padding sees one key: a softmax over none would be NaN, in the gradient too.
    visible |= beyond & (context == 0)
    scores = (queries @ keys.transpose(2, 3)).unflatten(2, (len(step), -1))
    weights = scores.masked_fill(~visible[:, None, :, None], -torch.inf).softmax(-1)
    mixed = (weights.flatten(2, 3) @ values).unflatten(2, (len(step), -1))
    out = mixed.transpose(1, 2).flatten(2, 3)[owner, place.clamp(0, len(step) - 1)]
    return torch.where(live[:, None, None], out.to(q.dtype), 0)


def _by_kv_head(q: Tensor, kv_heads: int) -> Tensor:
    """`[R, n, H, D] -> [R, Hkv, n * (H // Hkv), D]`: the queries that share a key head become the
    rows of one matrix."""
    grouped: Tensor = q.unflatten(2, (kv_heads, -1))
    return grouped.transpose(1, 2).flatten(2, 3)


def _write(k: Tensor, v: Tensor, slot_mapping: Tensor, kv_pages: Tensor) -> None:
    try:
        kv_pages.copy_(keep(k, v, slot_mapping, kv_pages))
    except RuntimeError as error:
        problem = f"pages that cannot be written in place here: {str(error).splitlines()[0]}"
        instead = "a clone of the pages, made inside of the function that is transformed"
        raise DerivativeError(
            "the derivative of paged_attention(q, k, v, kv_pages, …)", problem, instead
        ) from error
