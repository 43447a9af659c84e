"""The output of attention, in Triton: heads stored as they are or in FP8, zeros for padding, and shares combined.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.attention.shares_triton import count_tiles, place_of
from weft.ops.kernel_triton import begin, kernel, release
from weft.ops.products.blocks_triton import quantize_rows

_SHARES = tl.constexpr(16)
"""Shares of parts that are combined at a time."""


@triton.jit
def zero_tokens(out, scales, first, end, step, head, heads, GROUP: tl.constexpr, ROWS: tl.constexpr,
                DIM: tl.constexpr, DIMS: tl.constexpr, QUANTIZE: tl.constexpr):  # fmt: skip
    """Zero GROUP heads, from `head` on, of the tokens first:end:step."""
    row = tl.arange(0, ROWS)
    for token in range(first, end, step):
        cell = tl.cast(token, tl.int64) * heads + head + row
        store_heads(tl.zeros([ROWS, DIMS], tl.float32), out, scales, cell, row < GROUP, DIM, DIMS, QUANTIZE)


@triton.jit
def store_heads(x, out, scales, cell, inside, DIM: tl.constexpr, DIMS: tl.constexpr, QUANTIZE: tl.constexpr):
    """Store heads `[R, DIMS]` of float32 at `cell` `[R]`; in FP8 each is a block with a scale."""
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
    """The maximum `[R]`, sum `[R]` and weighted values `[R, DIMS]` of two shares of a context, always in the same
    operations, so that it does not matter which kernel merges them."""
    top = tl.maximum(m, m_more)
    base = tl.where(top == float("-inf"), 0.0, top)
    left, right = tl.exp2(m - base), tl.exp2(m_more - base)
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
    QUANTIZE: tl.constexpr,
    TYPE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Combine the shares of one query and EACH heads, one after the other: the weighted mean, by sums scaled to the
    largest maximum. The result of a request in one share is there already. The zeros of requests without a tile, and of
    the tokens after the last request, are written here.

    With SEGMENTS > 0 a share is UNIT positions, and they are merged one after the other, also those of one program.
    """
    begin(at_once)
    request, query, first_head = tl.program_id(0), tl.program_id(1), tl.program_id(2) * EACH
    step, num_reqs = tl.num_programs(0) * tl.num_programs(1), tl.num_programs(0)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    dim = tl.arange(0, DIMS)
    # All that does not depend on another value is asked for before any of it is waited for.
    first, last, even = tl.load(spans + 4 * request), tl.load(spans + 4 * request + 1), tl.load(spans + 4 * request + 2)
    start, end = tl.load(query_start_loc + request), tl.load(query_start_loc + request + 1)
    seq_len, total_tokens = tl.load(seq_lens + request), tl.load(query_start_loc + num_reqs)
    if SPLITS > 1 and SEGMENTS == 0:  # EACH is 1
        share = tl.arange(0, SPLITS)
        place = (tl.cast(request * SPLITS + share, tl.int64) * KV_HEADS + first_head // GROUP) * ROWS
        place += query * GROUP + first_head % GROUP
        m_even, s_even, shares_even = _load_shares(shares, maxima, sums, place, share < SPLITS, dim, DIM)
    inside = start + query < end
    token = (start + query).to(tl.int64)
    slot = tl.load(slot_mapping + token, mask=inside, other=-1)
    _, own = count_tiles(request, query_start_loc, seq_lens, num_reqs, UNIT, WINDOW)
    live = inside & (seq_len > 0) & (slot >= 0)
    shared = (own > 0) & ((last > first) | (SEGMENTS > 0))  # a request without a tile has no span
    padding = total_tokens + request * tl.num_programs(1) + query
    release()
    for other in range(EACH):
        head = first_head + other
        cell = token * HEADS + head + tl.arange(0, 1)
        m = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        result = tl.zeros([1, DIMS], tl.float32)
        if live & shared:
            if SEGMENTS > 0:
                position = seq_len - end + token
                oldest = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
                for segment in range(oldest // UNIT, position // UNIT + 1):
                    at = cell * SEGMENTS + segment
                    values = tl.load(shares + (at * DIM)[:, None] + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
                    m, total, result = merge(m, total, result, tl.load(maxima + at), tl.load(sums + at), values)
            else:
                if even:
                    if SPLITS > 1:
                        m_own = tl.where(first + share <= last, m_even, float("-inf"))
                        m, total, result = _add_shares(m, total, result, m_own, s_even, shares_even)
                elif PARTS:
                    for base in range(first, last + 1, _SHARES):
                        part = base + tl.arange(0, _SHARES)
                        at = (tl.cast(place_of(part, part == first), tl.int64) * KV_HEADS + head // GROUP) * ROWS
                        at += query * GROUP + head % GROUP
                        m_part, s_part, shares_part = _load_shares(shares, maxima, sums, at, part <= last, dim, DIM)
                        m, total, result = _add_shares(m, total, result, m_part, s_part, shares_part)
            result = result / tl.where(total == 0, 1.0, total)[:, None]
        if inside & (shared | (own <= 0)):
            store_heads(result.to(TYPE).to(tl.float32), out, scales, cell, cell >= 0, DIM, DIMS, QUANTIZE)
        zero_tokens(out, scales, padding, num_tokens, step, head, HEADS, 1, 1, DIM, DIMS, QUANTIZE)


@triton.jit
def _load_shares(shares, maxima, sums, at, there, dim, DIM: tl.constexpr):
    """The maxima `[N]`, sums `[N]` and weighted values `[N, DIMS]` at places."""
    mask = there[:, None] & (dim < DIM)[None, :]
    m = tl.load(maxima + at, mask=there, other=float("-inf"))
    s = tl.load(sums + at, mask=there, other=0.0)
    return m, s, tl.load(shares + (at * DIM)[:, None] + dim[None, :], mask=mask, other=0.0)


@triton.jit
def _add_shares(m, total, result, m_own, s_own, shares):
    """The running maximum `[1]`, sum `[1]` and weighted values `[1, DIMS]` with those of shares, of which one with a
    maximum of -inf may hold anything."""
    top = tl.maximum(m, tl.max(m_own, axis=0))
    base = tl.where(top == float("-inf"), 0.0, top)
    weight, kept = tl.exp2(m_own - base), tl.exp2(m - base)
    has = weight > 0
    total = total * kept + tl.sum(tl.where(has, weight * s_own, 0.0), axis=0)
    shares = tl.where(has[:, None], shares, 0.0)
    return top, total, result * kept[:, None] + tl.sum(shares * weight[:, None], axis=0)[None, :]
