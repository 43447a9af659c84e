"""The Triton kernels of `weft::paged_attention`: keys and values are kept, queries attend, shares are combined. When
each is launched says `weft.ops.paged_attention_triton`. Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.blocks_triton import quantize_rows
from weft.ops.early_triton import begin, release
from weft.ops.kernel_triton import kernel


@triton.jit
def _owner(index, query_start_loc, num_reqs, QUERIES: tl.constexpr, EXTRA: tl.constexpr, BLOCK_R: tl.constexpr):
    """The request that owns block `index`, or num_reqs: how many of the requests 1..num_reqs begin at or before it.

    Request r begins at block query_start_loc[r] // QUERIES + EXTRA * r; empty ones that begin with it are passed over.
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
):
    """Keep one token's k and v in its slot, unless it is padding; `values` is where kv_pages[1] begins."""
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
            tl.store(kv_pages + slot * WIDTH + i, key, mask=i < WIDTH)
            tl.store(kv_pages + values + slot * WIDTH + i, value, mask=i < WIDTH)


@triton.jit
def _zero_tokens(out, scales, first, end, step, head, heads, GROUP: tl.constexpr, ROWS: tl.constexpr,
                 DIM: tl.constexpr, DIMS: tl.constexpr, QUANTIZE: tl.constexpr):  # fmt: skip
    """Zero GROUP heads from `head` on, of the tokens first:end:step."""
    row = tl.arange(0, ROWS)
    for token in range(first, end, step):
        cell = tl.cast(token, tl.int64) * heads + head + row
        _store(tl.zeros([ROWS, DIMS], tl.float32), out, scales, cell, row < GROUP, DIM, DIMS, QUANTIZE)


@triton.jit
def _store(x, out, scales, cell, inside, DIM: tl.constexpr, DIMS: tl.constexpr, QUANTIZE: tl.constexpr):
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


@kernel(do_not_specialize=["num_reqs", "num_tokens"])
def attend_kernel(
    q,
    kv_pages,
    slot_mapping,
    block_table,
    query_start_loc,
    seq_lens,
    shares,
    maxima,
    sums,
    scales,
    num_reqs,
    num_tokens,
    values,
    stride_q,
    stride_table,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Attend with QUERIES queries of one request, and the heads of one key head, to one share of the context.

    `scale` includes log2(e), since powers are of 2. Without splits `shares` is the output itself, else what
    `combine_kernel` reads. Rows of padding are not read; in the output they are zeroed.
    """
    begin()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request = tl.program_id(0)
    if SPLITS == 1:
        first = tl.load(query_start_loc + num_reqs) + request
        head = tl.program_id(1) * GROUP
        programs = tl.num_programs(0)
        _zero_tokens(shares, scales, first, num_tokens, programs, head, HEADS, GROUP, ROWS, DIM, DIMS, QUANTIZE)
    if not ONE_BLOCK:
        request = _owner(tl.program_id(0), query_start_loc, num_reqs, QUERIES, 1, BLOCK_R)
    if request >= num_reqs:
        return
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    seq_len = tl.load(seq_lens + request)
    block = 0 if ONE_BLOCK else tl.program_id(0) - start // QUERIES - request

    row = tl.arange(0, ROWS)
    query = block * QUERIES + row // GROUP
    token = (start + query).to(tl.int64)
    inside = (row < QUERIES * GROUP) & (query < query_len)
    live = inside & (query < seq_len)  # of padding seq_len is 0
    live &= tl.load(slot_mapping + token, mask=live, other=-1) >= 0
    # Tiles end with the last live row's context: later slots are not reached, and may hold NaN.
    position = tl.where(live, seq_len - query_len + query, -1)
    lo, hi = _share(tl.max(position, axis=0) + 1, KEYS, SPLITS)

    head = tl.program_id(1) * GROUP + row % GROUP
    dim = tl.arange(0, DIMS)
    mask = live[:, None] & (dim < DIM)[None, :]
    queries = tl.load(q + (token * stride_q + head * DIM)[:, None] + dim[None, :], mask=mask, other=0.0)
    table = block_table + request.to(tl.int64) * stride_table
    m, s, acc = _attend_tiles(
        queries, position, kv_pages, values, table, lo, hi, scale, KV_HEADS, DIM, PAGE_SIZE, ROWS, KEYS, DIMS
    )

    release()
    cell = (token * HEADS + head) * SPLITS + tl.program_id(2)
    if SPLITS == 1:
        acc = tl.where(live[:, None], acc / tl.where(s == 0, 1.0, s)[:, None], 0.0)
        _store(acc.to(q.dtype.element_ty).to(tl.float32), shares, scales, cell, inside, DIM, DIMS, QUANTIZE)
    else:
        tl.store(maxima + cell, m, mask=live)
        tl.store(sums + cell, s, mask=live)
        tl.store(shares + (cell * DIM)[:, None] + dim[None, :], acc, mask=mask)


@triton.jit
def _share(length, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """The positions lo:hi of this program's share of a context, in whole tiles; the last shares may be empty."""
    share = tl.cdiv(tl.cdiv(length, KEYS), SPLITS) * KEYS
    lo = tl.program_id(2) * share
    return lo, tl.minimum(lo + share, length)


@triton.jit
def _attend_tiles(
    queries,
    position,
    kv_pages,
    values,
    table,
    lo,
    hi,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """The running maximum `[ROWS]`, sum `[ROWS]` and weighted values `[ROWS, DIMS]` over the positions lo:hi."""
    dim = tl.arange(0, DIMS)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(lo, hi, KEYS):
        at = start + tl.arange(0, KEYS)
        page = tl.load(table + at // PAGE_SIZE, mask=at < hi, other=0).to(tl.int64)
        offset = ((page * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + tl.program_id(1)) * DIM
        # Zeros, not what lies there: a probability of 0 times NaN is NaN.
        mask = (at < hi)[:, None] & (dim < DIM)[None, :]
        key = tl.load(kv_pages + offset[:, None] + dim[None, :], mask=mask, other=0.0)
        value = tl.load(kv_pages + values + offset[:, None] + dim[None, :], mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((at[None, :] <= position[:, None]) & (at < hi)[None, :], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        # A row that has seen no key yet stays at -inf, and -inf - -inf would be NaN.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(m - base)
        s = s * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return m, s, acc


@kernel(do_not_specialize=["num_tokens"])
def combine_kernel(
    shares,
    maxima,
    sums,
    slot_mapping,
    query_start_loc,
    seq_lens,
    out,
    scales,
    num_tokens,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Add the shares of one query and head, each scaled by 2 ** (its maximum - the greatest), over the like sum."""
    begin()
    request, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, step = tl.num_programs(2), tl.num_programs(0) * tl.num_programs(1)
    first = tl.load(query_start_loc + tl.num_programs(0)) + request * tl.num_programs(1) + query
    _zero_tokens(out, scales, first, num_tokens, step, head, heads, 1, 1, DIM, DIMS, QUANTIZE)
    start = tl.load(query_start_loc + request)
    inside = start + query < tl.load(query_start_loc + request + 1)
    token = (start + query).to(tl.int64)
    live = inside & (tl.load(seq_lens + request) > 0)
    live &= tl.load(slot_mapping + token, mask=live, other=-1) >= 0
    release()
    dim = tl.arange(0, DIMS)
    cell = token * heads + head + tl.arange(0, 1)
    result = tl.zeros([1, DIMS], tl.float32)
    if live:
        part = (token * heads + head) * SPLITS + tl.arange(0, SPLITS)
        m = tl.load(maxima + part)
        base = tl.max(m, axis=0)
        weight = tl.exp2(m - tl.where(base == float("-inf"), 0.0, base))
        total = tl.sum(weight * tl.load(sums + part), axis=0)
        mask = (weight > 0)[:, None] & (dim < DIM)[None, :]
        share = tl.load(shares + (part * DIM)[:, None] + dim[None, :], mask=mask, other=0.0)
        result = (tl.sum(share * weight[:, None], axis=0) / tl.where(total == 0, 1.0, total))[None, :]
    if inside:
        _store(result.to(TYPE).to(tl.float32), out, scales, cell, cell >= 0, DIM, DIMS, QUANTIZE)
