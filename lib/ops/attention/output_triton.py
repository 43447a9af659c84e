"""The output of attention, in Triton: heads are stored as they are or in FP8, padding is zeroed,
and shares are combined.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.attention.launch import SEGMENT, Launch
from weft.ops.attention.shares_triton import count_tiles, place_of
from weft.ops.kernel_triton import at_once, begin, early, kernel, release
from weft.ops.products.blocks_triton import TRITON_DTYPES, quantize_rows
from weft.ops.tiles.tile import power_of_two

# The most values that a program combines, and the most values of shares that it loads at a time.
_MOST_VALUES = 1024
_MOST_AT_ONCE = 4096


@triton.jit
def zero_tokens(
    out,
    scales,
    first,
    end,
    step,
    head,
    heads,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    """Zero GROUP heads, starting at `head`, of the tokens first:end:step."""
    row = tl.arange(0, ROWS)
    for token in range(first, end, step):
        cell = tl.cast(token, tl.int64) * heads + head + row
        store_heads(
            tl.zeros([ROWS, DIMS], tl.float32), out, scales, cell, row < GROUP, DIM, DIMS, QUANTIZE
        )


@triton.jit
def store_heads(
    x, out, scales, cell, inside, DIM: tl.constexpr, DIMS: tl.constexpr, QUANTIZE: tl.constexpr
):
    """Store float32 heads `[R, DIMS]` at `cell` `[R]`; in FP8 each head is a block with a scale."""
    dim = tl.arange(0, DIMS)
    at = out + (cell * DIM)[:, None] + dim[None, :]
    mask = inside[:, None] & (dim < DIM)[None, :]
    if QUANTIZE:
        values, scale = quantize_rows(x)
        tl.store(scales + cell, scale, mask=inside)
        tl.store(at, values, mask=mask)
    else:
        tl.store(at, x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def merge(m, s, acc, m_more, s_more, acc_more):
    """Merge maxima `[R]`, sums `[R]` and weighted values `[R, DIMS]` of two shares of a context.

    The operations are explicit (`fma`), so that the bits do not depend on which kernel merges.
    """
    top = tl.maximum(m, m_more)
    base = tl.where(top == float("-inf"), 0.0, top)
    left = tl.exp2(m - base)
    right = tl.exp2(m_more - base)
    acc = tl.fma(acc_more, tl.broadcast_to(right[:, None], acc.shape), acc * left[:, None])
    return top, tl.fma(s_more, right, s * left), acc


@kernel(do_not_specialize=["num_tokens", "at_once"])
def combine_kernel(
    shares,
    maxima,
    sums,
    spans,
    slot_mapping,
    query_start_loc,
    seq_lens,
    out,
    scales,
    num_tokens,
    at_once,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    SHARES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    TYPE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Combine the shares of a request and a key head, EACH rows and SHARES shares at a time, into
    their weighted mean, with sums scaled to the largest maximum.

    The result of a request with a single share is stored already. Zeros are written here for
    requests without a tile, and for the tokens after the last request, up to num_tokens.

    With SEGMENTS > 0 a share is UNIT positions, and the shares are merged one after the other, even
    if one program computed several.
    """
    begin(at_once)
    request = tl.program_id(0)
    own_row = tl.program_id(1) * EACH
    kv_head = tl.program_id(2)
    num_reqs = tl.num_programs(0)
    step = tl.num_programs(1) * EACH
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP
    dim = tl.arange(0, DIMS)
    # Start all loads that do not depend on another value before waiting for any of them.
    first = tl.load(spans + 4 * request)
    last = tl.load(spans + 4 * request + 1)
    even = tl.load(spans + 4 * request + 2)
    start = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    seq_len = tl.load(seq_lens + request)
    total_tokens = tl.load(query_start_loc + num_reqs)
    if SPLITS > 1 and SEGMENTS == 0:  # here EACH is 1, and the programs cover all rows in one step
        row = own_row + tl.arange(0, EACH)
        share = tl.arange(0, SPLITS)
        place = (tl.cast(request * SPLITS + share, tl.int64) * KV_HEADS + kv_head) * ROWS
        m_even, s_even, shares_even = _load_shares(
            shares, maxima, sums, place, share < SPLITS, row, dim, DIM
        )
    query_len = tl.where(end - start <= QUERIES, end - start, 0)
    _, num_tiles = count_tiles(request, query_start_loc, seq_lens, num_reqs, QUERIES, UNIT, WINDOW)
    # The span of a request without a tile is not initialised.
    shared = (num_tiles > 0) & ((last > first) | (SEGMENTS > 0))
    release()
    if shared | (num_tiles <= 0):
        for first_row in range(own_row, query_len * GROUP, step):
            row = first_row + tl.arange(0, EACH)
            inside = row // GROUP < query_len
            token = (start + row // GROUP).to(tl.int64)
            live = inside & (tl.load(slot_mapping + token, mask=inside, other=-1) >= 0)
            cell = token * HEADS + kv_head * GROUP + row % GROUP
            m = tl.full([EACH], float("-inf"), tl.float32)
            total = tl.zeros([EACH], tl.float32)
            result = tl.zeros([EACH, DIMS], tl.float32)
            if shared:
                if SEGMENTS > 0:
                    tl.static_assert(EACH == 1)
                    position = tl.max(tl.where(live, seq_len - end + token, -1), axis=0)
                    oldest = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
                    for segment in range(oldest // UNIT, tl.cdiv(position + 1, UNIT)):
                        at = cell * SEGMENTS + segment
                        mask = (dim < DIM)[None, :]
                        values = tl.load(
                            shares + (at * DIM)[:, None] + dim[None, :], mask=mask, other=0.0
                        )
                        m, total, result = merge(
                            m, total, result, tl.load(maxima + at), tl.load(sums + at), values
                        )
                elif even:
                    if SPLITS > 1:
                        m_own = tl.where((first + share <= last)[:, None], m_even, float("-inf"))
                        m, total, result = _add_shares(m, total, result, m_own, s_even, shares_even)
                elif PARTS:
                    for base in range(first, last + 1, SHARES):
                        part = base + tl.arange(0, SHARES)
                        at = (
                            tl.cast(place_of(part, part == first), tl.int64) * KV_HEADS + kv_head
                        ) * ROWS
                        m_part, s_part, shares_part = _load_shares(
                            shares, maxima, sums, at, part <= last, row, dim, DIM
                        )
                        m, total, result = _add_shares(
                            m, total, result, m_part, s_part, shares_part
                        )
                result = tl.where(
                    live[:, None], result / tl.where(total == 0, 1.0, total)[:, None], 0.0
                )
            store_heads(
                result.to(TYPE).to(tl.float32), out, scales, cell, inside, DIM, DIMS, QUANTIZE
            )
    for first_row in range(own_row, GROUP, step):
        padding = total_tokens + request
        head = kv_head * GROUP + first_row
        zero_tokens(
            out,
            scales,
            padding,
            num_tokens,
            num_reqs,
            head,
            HEADS,
            GROUP - first_row,
            EACH,
            DIM,
            DIMS,
            QUANTIZE,
        )


@triton.jit
def _load_shares(shares, maxima, sums, place, there, row, dim, DIM: tl.constexpr):
    """Load the maxima `[N, R]`, sums `[N, R]` and weighted values `[N, R, DIMS]` of some rows at
    some places."""
    at = place[:, None] + row[None, :]
    there = there[:, None]
    m = tl.load(maxima + at, mask=there, other=float("-inf"))
    s = tl.load(sums + at, mask=there, other=0.0)
    mask = there[:, :, None] & (dim < DIM)[None, None, :]
    return m, s, tl.load(shares + (at * DIM)[:, :, None] + dim[None, None, :], mask=mask, other=0.0)


@triton.jit
def _add_shares(m, total, result, m_own, s_own, shares):
    """Add shares to the running maximum `[R]`, sum `[R]` and weighted values `[R, DIMS]`; a share
    whose maximum is -inf may hold anything."""
    top = tl.maximum(m, tl.max(m_own, axis=0))
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(m_own - base[None, :])
    kept = tl.exp2(m - base)
    has = weight > 0
    total = total * kept + tl.sum(tl.where(has, weight * s_own, 0.0), axis=0)
    shares = tl.where(has[:, :, None], shares, 0.0)
    return top, total, result * kept[:, None] + tl.sum(shares * weight[:, :, None], axis=0)


def combine(
    plan: Launch,
    tensors: tuple[Tensor, ...],
    q: Tensor,
    kv_heads: int,
    max_query_len: int,
    window: int,
) -> None:
    """Launch `combine_kernel` for queries `q` `[T, H, D]`; `tensors` are its first arguments, from
    shares to scales."""
    (tokens, heads, dim), requests, out = q.shape, tensors[6].shape[0], tensors[7]
    group = heads // kv_heads
    # If requests have one split, most programs would find nothing to do, and each program begins
    # later than the one before it: launch few.
    rows = min(max_query_len, plan.share_rows // group) * group
    typical_rows = rows if plan.one_block else group  # most decodes among prompts have one query
    programs, each = (
        (rows, 1)
        if plan.splits > 1
        else (1, min(power_of_two(typical_rows), max(1, _MOST_VALUES // plan.dims)))
    )
    shares = max(1, min(16, _MOST_AT_ONCE // (each * plan.dims)))
    combine_kernel[(requests, programs, kv_heads)](
        *tensors,
        tokens if plan.one_block else 0,  # otherwise the programs of prompts write the zeros
        at_once(tokens),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIMS=plan.dims,
        ROWS=plan.share_rows,
        UNIT=SEGMENT if plan.segments else plan.keys,
        SPLITS=plan.splits,
        PARTS=plan.parts > 0,
        EACH=each,
        SHARES=shares,
        # Few warps, since larger programs begin later.
        # With 8 or 16 splits, one warp takes 2 to 3 us less than four.
        num_warps=max(1, max(shares * each, plan.splits) * plan.dims // 4096),
        QUANTIZE=out.dtype == torch.float8_e4m3fn,
        TYPE=TRITON_DTYPES[q.dtype],
        SEGMENTS=plan.segments,
        WINDOW=window,
        enable_fp_fusion=not plan.segments,
        **early(q),
    )
