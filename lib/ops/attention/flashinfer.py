"""FlashInfer's attention over pages: XQA for decodes, which a graph can capture, and FA3 or FA2,
planned on the host, for other batches.

The package is imported at the first call, so that weft works without it.
"""

import functools
import threading
from importlib.util import find_spec
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from weft.ops.attention import functional
from weft.torchapi.private import is_differentiated

DTYPES = torch.bfloat16, torch.float16
HEAD_DIMS = 64, 128, 256

# XQA keeps its semaphores, which must be zero, in the first 8 MiB of the workspace. After them come
# the partial results of split contexts, at most one for each multiprocessor.
_SEMAPHORES = 8 * 2**20
_SHARES = 16 * 2**20
# Bytes for the partial results of split contexts, shared by all wrappers for prompts.
_WORKSPACE = 128 * 2**20


def missing(device: torch.device) -> str:
    """Why FlashInfer's kernels cannot run on the device, or an empty text."""
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python"
    if (
        device.type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) != (9, 0)
    ):
        return "compute capability 9.0, the only one on which weft has run it"
    return ""


@attrs.frozen(eq=False)
class DecodePlan:
    """The plan of a decode: arguments that XQA accepts even for padding, and its workspace.

    Args:
        table: the block table, with page 0 for padded requests.
        lengths: the length of each context, 1 for padded requests.
        dead: [num_tokens] bool: the tokens whose result must be 0.
        workspace: XQA's semaphores and partial results.
    """

    table: Tensor
    lengths: Tensor
    dead: Tensor
    workspace: Tensor


@attrs.frozen(eq=False)
class PromptPlan:
    """The plan of a step with prompts, made on the host.

    Args:
        wrapper: FlashInfer's wrapper, after its `plan`; None if no request has a token.
        rows: the tokens that attend; None if these are the first `count`.
        count: the number of tokens that attend.
        dead: the places, among these tokens, of those whose result must be 0; None if there are
            none.
    """

    wrapper: Any
    rows: Tensor | None
    count: int
    dead: Tensor | None


def plan(q: Tensor, kv_pages: Tensor, *where: Any) -> DecodePlan | PromptPlan:
    """The function `plan` of `AttentionBackend`."""
    slots, table, starts, lengths, longest, scale, window = where
    with torch.cuda.device_of(q):
        if longest == 1 and len(q) == len(lengths):
            return _plan_decode(q, slots, table, lengths)
        return _plan_prompts(
            q, kv_pages, table, _read_queries(slots, starts, lengths), scale, window
        )


def attend(q: Tensor, kv_pages: Tensor, *rest: Any) -> Tensor:
    """The function `attend` of `AttentionBackend`."""
    *where, planned = rest
    *_, scale, window = where
    # FlashInfer's kernels have no derivative.
    if is_differentiated(q) or is_differentiated(kv_pages):
        return functional.attend(q, None, None, kv_pages, *where)
    with torch.cuda.device_of(q):  # FlashInfer launches on the current device
        if isinstance(planned, DecodePlan):
            return _decode(q, kv_pages, scale, window, planned)
        return _prompts(q, kv_pages, planned)


def _plan_decode(
    q: Tensor, slot_mapping: Tensor, block_table: Tensor, seq_lens: Tensor
) -> DecodePlan:
    live = seq_lens > 0
    workspace = torch.empty(_SEMAPHORES + _SHARES, dtype=torch.uint8, device=q.device)
    # XQA uses at most one int32 semaphore for each request and head.
    workspace[: 4 * q.shape[0] * q.shape[1]].zero_()
    table = torch.where(live[:, None], block_table, 0)
    return DecodePlan(table, seq_lens.clamp(min=1), (slot_mapping < 0) | ~live, workspace)


def _decode(q: Tensor, kv_pages: Tensor, scale: float, window: int, planned: DecodePlan) -> Tensor:
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    out = trtllm_batch_decode_with_kv_cache(
        q.contiguous(),
        (kv_pages[0], kv_pages[1]),
        planned.workspace,
        planned.table,
        planned.lengths.view(torch.uint32),
        planned.table.shape[1] * kv_pages.shape[2],
        bmm1_scale=scale,
        bmm2_scale=1.0,
        # FlashInfer does not count the query's own position; -1: no window.
        window_left=window - 1,
        out=torch.empty_like(q, memory_format=torch.contiguous_format),
        kv_layout="NHD",
        backend="xqa",
    )
    masked: Tensor = out.masked_fill_(planned.dead[:, None, None], 0)
    return masked


@attrs.frozen(eq=False)
class _Queries:
    """The queries of a step, as NumPy arrays on the host.

    Args:
        requests: [n]: the requests that have live tokens.
        starts, ends: [n]: the range of each request's tokens, up to its last live one.
        contexts: [n]: the length of each context, up to that token.
        dead: the tokens in these ranges with slot -1.
    """

    requests: Any
    starts: Any
    ends: Any
    contexts: Any
    dead: Any


def _read_queries(slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor) -> _Queries:
    bounds = query_start_loc.cpu().numpy()
    lengths = seq_lens.cpu().numpy()
    live = slot_mapping.cpu().numpy() >= 0
    # For each place, one past the last live token before it; at the end of a request, this is its
    # end without trailing padding.
    last = np.maximum.accumulate(
        np.concatenate([[0], np.where(live, np.arange(1, len(live) + 1), 0)])
    )
    ends = np.minimum(last[bounds[1:]], bounds[1:])
    requests = np.flatnonzero((ends > bounds[:-1]) & (lengths > 0))
    starts, ends, padding = bounds[requests], ends[requests], bounds[requests + 1] - ends[requests]
    inside = np.zeros(len(live) + 1, dtype=np.int64)
    np.add.at(inside, starts, 1)
    np.add.at(inside, ends, -1)
    dead = np.flatnonzero((np.cumsum(inside)[:-1] > 0) & ~live)
    return _Queries(requests, starts, ends, lengths[requests] - padding, dead)


class _Wrappers(threading.local):
    """This thread's wrappers, by device and the parameters of a plan other than lengths, and its
    workspaces, by device."""

    def __init__(self) -> None:
        self.of: dict[Any, Any] = {}
        self.workspaces: dict[torch.device, Tensor] = {}


_WRAPPERS = _Wrappers()


def _plan_prompts(
    q: Tensor, kv_pages: Tensor, block_table: Tensor, queries: _Queries, scale: float, window: int
) -> PromptPlan:
    if not len(queries.requests):
        return PromptPlan(None, None, 0, None)
    (_, heads, dim), (_, _, page_size, kv_heads, _), device = q.shape, kv_pages.shape, q.device
    counts = queries.ends - queries.starts
    used = -(-queries.contexts // page_size)
    bounds = _sums(counts)
    pages = _sums(used)
    rows = None
    if (queries.starts != bounds[:-1]).any():
        rows = _ranges(queries.starts, counts)
    if rows is None:
        places = queries.dead
    else:
        places = np.searchsorted(rows, queries.dead)
    entries = _ranges(queries.requests.astype(np.int64) * block_table.shape[1], used)
    wrapper = _wrapper(device, heads, kv_heads, dim, window, page_size, scale, q.dtype)
    wrapper.plan(
        torch.from_numpy(bounds),
        torch.from_numpy(pages),
        block_table.flatten()[torch.from_numpy(entries).to(device)],
        torch.from_numpy(((queries.contexts - 1) % page_size + 1).astype(np.int32)),
        heads,
        kv_heads,
        dim,
        page_size,
        causal=True,
        sm_scale=scale,
        window_left=window - 1,
        q_data_type=q.dtype,
        kv_data_type=kv_pages.dtype,
        seq_lens=torch.from_numpy(queries.contexts.astype(np.int32)),
    )
    on_device = [
        None if one is None or not len(one) else torch.from_numpy(one).to(device)
        for one in (rows, places)
    ]
    return PromptPlan(wrapper, on_device[0], int(bounds[-1]), on_device[1])


def _wrapper(device: torch.device, *shape: Any) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrappers = _WRAPPERS
    if (device, shape) not in wrappers.of:
        if device not in wrappers.workspaces:
            wrappers.workspaces[device] = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        wrappers.of[device, shape] = BatchPrefillWithPagedKVCacheWrapper(
            wrappers.workspaces[device], "NHD", backend="auto"
        )
    return wrappers.of[device, shape]


def _prompts(q: Tensor, kv_pages: Tensor, planned: PromptPlan) -> Tensor:
    if planned.wrapper is None:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    run = functools.partial(planned.wrapper.run, paged_kv_cache=(kv_pages[0], kv_pages[1]))
    if planned.rows is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        run(q[: planned.count], out=out[: planned.count])
        out[planned.count :].zero_()
        if planned.dead is None:
            return out
        return out.index_fill_(0, planned.dead, 0)
    attended = run(q[planned.rows])
    if planned.dead is not None:
        attended = attended.index_fill_(0, planned.dead, 0)
    return torch.zeros_like(q, memory_format=torch.contiguous_format).index_copy_(
        0, planned.rows, attended
    )


def _sums(counts: Any) -> Any:
    """[n + 1] int32: where each of n ranges begins, and the end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _ranges(starts: Any, counts: Any) -> Any:
    """The concatenated ranges `start : start + count`."""
    before = np.repeat(_sums(counts)[:-1], counts)
    return np.repeat(starts, counts).astype(np.int64) + np.arange(len(before)) - before
