"""The CUDA implementation of `weft::paged_attention`, in Triton: three kernels whose launches
depend on shapes alone.

1. `write_kernel`, one program for each token, writes k and v to their slots. It is skipped if they
   are there already.
2. `attend_kernel` has one program for a block of queries of one request and a key head
   (`weft.ops.attention.block_triton`) or, for requests with few queries, for a key head and a share
   of their contexts (`weft.ops.attention.shares_triton`). In a batch with prompts, the first
   programs serve the requests with few queries.
3. `combine_kernel` of `weft.ops.attention.output_triton` follows only after such shares: for each
   request that several programs attended to, it rescales and adds their shares.

Tokens after the last request get zeros from the last kernel, or from the programs of prompts, which
take turns.

Nothing here reads a tensor's values on the host, so a CUDA graph can capture all of it and replay
it for other lengths. Import this module only where triton is installed. If TRITON_INTERPRET=1 was
set before, it runs on CPU tensors, for tests; not in bfloat16, whose products Triton's interpreter
computes wrongly.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.attention.block_triton import attend_block, attend_shares
from weft.ops.attention.launch import SEGMENT, plan_launch
from weft.ops.attention.output_triton import combine, zero_tokens
from weft.ops.kernel_triton import at_once, begin, early, kernel
from weft.ops.norm_triton import quantize
from weft.ops.products.blocks_triton import clamp_to_fp8
from weft.ops.products.fp8 import empty_quantized
from weft.ops.tiles.tile import power_of_two

_LOG2_E = 1.4426950408889634
# The smallest normal float32. A kernel flushes smaller scales to 0, and products with them.
_TINY = 2.0**-126
# The largest window of a kernel, which adds positions and windows in 32 bits; no context is as
# long.
_WIDEST = 2**30
# The number of requests that a program searches at a time for the owner of a block. It is the same
# for all batches, so that they share a compiled kernel.
_SEARCHED = 128


@triton.jit
def _owner(
    index,
    query_start_loc,
    num_reqs,
    QUERIES: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The request that owns block `index`, or num_reqs if none does: the number of requests
    1..num_reqs that begin at or before it.

    Request r begins at block query_start_loc[r] // QUERIES + EXTRA * r; empty requests that begin
    there are skipped.
    """
    count = 0
    for base in range(0, num_reqs, BLOCK_R):
        request = base + 1 + tl.arange(0, BLOCK_R)
        start = tl.load(query_start_loc + request, mask=request <= num_reqs, other=0)
        before = (start // QUERIES + EXTRA * request <= index) & (request <= num_reqs)
        count += tl.sum(before.to(tl.int32), axis=0)
    return count


@kernel(do_not_specialize=["num_reqs"])
def write_kernel(
    k,
    v,
    kv_pages,
    slot_mapping,
    query_start_loc,
    seq_lens,
    num_reqs,
    values,
    stride_k,
    stride_v,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FP8: tl.constexpr,
):
    """Write one token's k and v to its slot, unless it is padding; `values` is the offset of
    kv_pages[1]."""
    begin()
    token = tl.program_id(0)
    request = _owner(token, query_start_loc, num_reqs, 1, 0, BLOCK_R)
    seq_len = tl.load(seq_lens + request, mask=request < num_reqs, other=0)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    row = token.to(tl.int64)
    if (slot >= 0) & (seq_len > 0):
        for start in range(0, WIDTH, BLOCK):
            i = start + tl.arange(0, BLOCK)
            key = tl.load(k + row * stride_k + i, mask=i < WIDTH)
            value = tl.load(v + row * stride_v + i, mask=i < WIDTH)
            if FP8:
                key = clamp_to_fp8(key)
                value = clamp_to_fp8(value)
            tl.store(kv_pages + slot * WIDTH + i, key, mask=i < WIDTH)
            tl.store(kv_pages + values + slot * WIDTH + i, value, mask=i < WIDTH)


@kernel(do_not_specialize=["num_reqs", "num_tokens", "parts", "slack", "spare", "at_once"])
def attend_kernel(
    q,
    kv_pages,
    slot_mapping,
    block_table,
    query_start_loc,
    seq_lens,
    out,
    shares,
    maxima,
    sums,
    spans,
    scales,
    num_reqs,
    num_tokens,
    parts,
    slack,
    spare,
    values,
    stride_q,
    stride_table,
    scale,
    at_once,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Attend, with QUERIES queries of one request and the heads of one key head, to the request's
    context.

    With SHARE_ROWS, the first programs attend to the contexts of requests whose queries have at
    most that many rows (`attend_shares`). If all requests do (ONE_BLOCK), these are all programs;
    otherwise there is one for each request or part, whichever are more.

    `scale` is positive and includes log2(e), since exponentials are computed as powers of 2.
    `combine_kernel` reads the `shares` of requests that several programs attend to. Rows of padding
    are not read, and are zeroed in the output.
    """
    begin(at_once)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    programs = tl.num_programs(0)
    # The grid has one dimension, in which the programs of all key heads of a block are neighbours.
    if not ONE_BLOCK:
        index, kv_head, programs = index // KV_HEADS, index % KV_HEADS, programs // KV_HEADS
    few = 0
    if SHARE_ROWS:
        few = programs if ONE_BLOCK else tl.maximum(num_reqs, parts)
        if ONE_BLOCK or index < few:
            attend_shares(
                q,
                kv_pages,
                slot_mapping,
                block_table,
                query_start_loc,
                seq_lens,
                out,
                shares,
                maxima,
                sums,
                spans,
                scales,
                index,
                kv_head,
                num_reqs,
                parts,
                slack,
                spare,
                values,
                stride_q,
                stride_table,
                scale,
                HEADS,
                KV_HEADS,
                DIM,
                PAGE_SIZE,
                SHARE_ROWS,
                KEYS,
                DIMS,
                SPLITS,
                PARTS,
                WINDOW,
                ONE_BLOCK,
                QUANTIZE,
                BLOCK_R,
                SEGMENT,
                SEGMENTS,
            )
    index -= few
    if not (SHARE_ROWS and ONE_BLOCK) and index >= 0:
        first = tl.load(query_start_loc + num_reqs) + index
        step = programs - few
        head = kv_head * GROUP
        zero_tokens(
            out, scales, first, num_tokens, step, head, HEADS, GROUP, ROWS, DIM, DIMS, QUANTIZE
        )
        request = (
            index if ONE_BLOCK else _owner(index, query_start_loc, num_reqs, QUERIES, 1, BLOCK_R)
        )
        if request < num_reqs:
            start = tl.load(query_start_loc + request)
            query_len = tl.load(query_start_loc + request + 1) - start
            seq_len = tl.load(seq_lens + request)
            block = 0
            if not ONE_BLOCK:
                # A request's last block, which takes longest, begins first, and shared contexts
                # begin before prompts: long programs that began last would leave most
                # multiprocessors idle at the end.
                block = tl.cdiv(query_len, QUERIES) - 1 - (index - start // QUERIES - request)
                if SHARE_ROWS and (query_len <= SHARE_ROWS // GROUP) & (seq_len > 0):
                    block = -1
            if ONE_BLOCK or block >= 0:
                request_info = (request, kv_head, start, query_len, seq_len)
                share = (0, 0, True, 0)
                attend_block(
                    q,
                    kv_pages,
                    slot_mapping,
                    block_table,
                    out,
                    shares,
                    maxima,
                    sums,
                    scales,
                    request_info,
                    block,
                    share,
                    values,
                    stride_q,
                    stride_table,
                    scale,
                    HEADS,
                    KV_HEADS,
                    DIM,
                    PAGE_SIZE,
                    QUERIES,
                    ROWS,
                    KEYS,
                    DIMS,
                    False,
                    WINDOW,
                    ONE_BLOCK,
                    QUANTIZE,
                    SEGMENT,
                    SEGMENTS,
                )


def attend(q: Tensor, *rest: Any, batch_invariant: bool = False) -> Tensor:
    """`weft::paged_attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out if _attend_into(out, None, batch_invariant, q, *rest) else out.zero_()


def attend_quantized(q: Tensor, *rest: Any, batch_invariant: bool = False) -> tuple[Tensor, Tensor]:
    """`weft::paged_attention.quantized`, for heads of 128."""
    values, scales = empty_quantized(q, q.shape[0], q.shape[1] * q.shape[2])
    return (
        (values, scales)
        if _attend_into(values, scales, batch_invariant, q, *rest)
        else quantize(torch.zeros_like(q).flatten(1))
    )


# slot_mapping, block_table, query_start_loc and seq_lens, contiguous.
Where = tuple[Tensor, Tensor, Tensor, Tensor]


def _attend_into(
    out: Tensor,
    scales: Tensor | None,
    batch_invariant: bool,
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
    window: int,
) -> bool:
    """Write and attend, with the result in `out` `[T, H, D]`, or for FP8 in `[T, H * D]` and
    `scales` `[T, H]`.

    Returns:
        False if there is no request, in which case nothing is written.
    """
    if not seq_lens.numel():
        return False
    if not q.numel():
        return True
    where = (
        slot_mapping.contiguous(),
        block_table.contiguous(),
        query_start_loc.contiguous(),
        seq_lens.contiguous(),
    )
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(q):
        if k is not None and v is not None:
            _launch_write(_packed_heads(k), _packed_heads(v), kv_pages, where)
        _launch_attend(
            _packed_heads(q),
            kv_pages,
            where,
            max_query_len,
            scale,
            window,
            out,
            scales,
            batch_invariant,
        )
    return True


def _packed_heads(x: Tensor) -> Tensor:
    """`x` `[T, heads, D]` with each token's heads contiguous; the tokens need not be contiguous, as
    in a slice of fused q, k, v."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _launch_write(k: Tensor, v: Tensor, kv_pages: Tensor, where: Where) -> None:
    slot_mapping, _, query_start_loc, seq_lens = where
    width = k[0].numel()
    write_kernel[(k.shape[0],)](
        k,
        v,
        kv_pages,
        slot_mapping,
        query_start_loc,
        seq_lens,
        seq_lens.shape[0],
        kv_pages.stride(0),
        k.stride(0),
        v.stride(0),
        WIDTH=width,
        BLOCK=min(1024, power_of_two(width)),
        BLOCK_R=_SEARCHED,
        FP8=kv_pages.dtype == torch.float8_e4m3fn,
        **early(k),
    )


def _launch_attend(
    q: Tensor,
    kv_pages: Tensor,
    where: Where,
    max_query_len: int,
    scale: float,
    window: int,
    out: Tensor,
    scales: Tensor | None,
    batch_invariant: bool,
) -> None:
    # The kernel takes the maximum before it scales, so the scale must be positive.
    if scale < _TINY:
        q, scale = (-q, -scale) if scale <= -_TINY else (torch.zeros_like(q), 1.0)
    slot_mapping, block_table, query_start_loc, seq_lens = where
    (tokens, heads, dim), (_, _, page_size, kv_heads, _) = q.shape, kv_pages.shape
    requests = seq_lens.shape[0]
    group = heads // kv_heads
    context = block_table.shape[1] * page_size
    window = min(window, _WIDEST)
    # With a window fewer tiles are attended to; batch-invariant segments count from position 0.
    if window and not batch_invariant:
        context = min(context, window + max_query_len)
    shapes = tokens, requests, group, kv_heads, dim, context, max_query_len
    plan = plan_launch(
        *shapes, q.element_size(), kv_pages.element_size(), _processors(q.device), batch_invariant
    )
    segment = SEGMENT if batch_invariant else 0
    quantized = scales is not None
    scales = out if scales is None else scales
    # Placeholders for the results of shares, of which there are none.
    results = out, out, out, out
    if plan.shared:
        sizes = (
            (tokens, heads, plan.segments) if segment else (plan.places, kv_heads, plan.share_rows)
        )
        maxima = q.new_empty(sizes, dtype=torch.float32)
        spans = q.new_empty((requests, 4), dtype=torch.int32)
        results = (
            q.new_empty((*sizes, dim), dtype=torch.float32),
            maxima,
            torch.empty_like(maxima),
            spans,
        )
    searched = max(64, power_of_two(requests)) if plan.parts else 1 if plan.one_block else _SEARCHED
    grid = (plan.programs, kv_heads) if plan.one_block else (plan.programs * kv_heads,)
    attend_kernel[grid](
        q,
        kv_pages,
        *where,
        out,
        *results,
        scales,
        requests,
        tokens,
        plan.parts,
        plan.slack,
        plan.spare,
        kv_pages.stride(0),
        q.stride(0),
        block_table.stride(0),
        scale * _LOG2_E,
        at_once(tokens),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE_SIZE=page_size,
        QUERIES=plan.queries,
        ROWS=plan.rows,
        SHARE_ROWS=plan.share_rows,
        KEYS=plan.keys,
        DIMS=plan.dims,
        SPLITS=plan.splits,
        PARTS=plan.parts > 0,
        WINDOW=window,
        ONE_BLOCK=plan.one_block,
        QUANTIZE=quantized,
        BLOCK_R=searched,
        SEGMENT=segment,
        SEGMENTS=plan.segments,
        num_warps=plan.warps,
        num_stages=plan.stages,
        maxnreg=plan.registers,
        # A mask between two operations prevents their fusion, so masked tiles and others would
        # round differently.
        enable_fp_fusion=not batch_invariant,
        **early(q),
    )
    if plan.shared:
        tensors = *results, slot_mapping, query_start_loc, seq_lens, out, scales
        combine(plan, tensors, q, kv_heads, max_query_len, window)


def _processors(device: torch.device) -> int:
    """The number of multiprocessors of a CUDA device; 4 on the CPU, for the interpreter."""
    return (
        int(torch.cuda.get_device_properties(device).multi_processor_count)
        if device.type == "cuda"
        else 4
    )
