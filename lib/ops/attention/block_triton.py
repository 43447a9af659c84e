"""Attention of a block of queries to a share of its request's context, in Triton.

Softmax attention proceeds over one tile of keys at a time, with a running maximum and sum
(FlashAttention-2, Dao 2023, algorithm 1). The heads that share a key head are rows of one matrix,
so that each key is loaded once for all of them.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.attention.output_triton import merge, store_heads
from weft.ops.attention.shares_triton import count_tiles, part_of, place_of, requests_of, split_of
from weft.ops.kernel_triton import release


@triton.jit
def attend_shares(
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
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
    """`attend_kernel` for requests whose queries have at most ROWS rows.

    Program `index` attends to the context of one request or, with SPLITS > 1 or PARTS, to a share
    of one or of several in turn (`weft.ops.attention.shares_triton`). In that case it fills `spans`
    for each request that has a tile: its first program, its last, and whether these are its splits.
    """
    QUERIES: tl.constexpr = ROWS * KV_HEADS // HEADS
    COMBINED: tl.constexpr = SPLITS > 1 or PARTS
    UNIT: tl.constexpr = SEGMENT if SEGMENT else KEYS
    first_request = index // SPLITS
    number = 1
    even = True
    total = 1
    begin_at = 0
    end_at = 0
    before = 0
    if PARTS:
        first_request, number, even, total, begin_at, end_at, before = requests_of(
            index,
            query_start_loc,
            seq_lens,
            num_reqs,
            parts,
            slack,
            spare,
            QUERIES,
            SPLITS,
            UNIT,
            WINDOW,
            BLOCK_R,
        )
    # Without hoisting, since values for one request's stores would fill registers during the whole
    # loop.
    for following in tl.range(number, disable_licm=True):
        request = first_request + following
        first_tile, count = count_tiles(
            request, query_start_loc, seq_lens, num_reqs, QUERIES, UNIT, WINDOW
        )
        lo, hi = split_of(index % SPLITS, count, SPLITS)
        place = index
        last = index + tl.minimum(count, SPLITS) - 1
        if PARTS:
            earlier = before
            before = before + count
            if not even:
                lo = tl.maximum(begin_at - earlier, 0)
                hi = tl.minimum(end_at - earlier, count)
                place = place_of(index, lo == 0)
                last = part_of(earlier + count - 1, total, parts)
        if hi > lo:
            start = tl.load(query_start_loc + request)
            query_len = tl.load(query_start_loc + request + 1) - start
            request_info = request, kv_head, start, query_len, tl.load(seq_lens + request)
            share = first_tile + lo, first_tile + hi, hi - lo == count, place
            if COMBINED and (lo == 0) & (kv_head == 0):
                tl.store(spans + 4 * request, index)
                tl.store(spans + 4 * request + 1, last)
                tl.store(spans + 4 * request + 2, tl.cast(even, tl.int32))
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
                0,
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
                True,
                WINDOW,
                ONE_BLOCK,
                QUANTIZE,
                SEGMENT,
                SEGMENTS,
            )


@triton.jit
def attend_block(
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
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """`attend_kernel` for a block of a request's queries.

    `request_info` is the request, the key head, the request's first token, the number of its tokens
    in this step, and the length of its context.

    With SHARED, `share` says what to attend to: the first tile, the tile after the last, whether
    these are all tiles, and the place of this share, which segments do not need.

    With SEGMENT > 0, each segment of that many positions, counted from position 0, is attended to
    by itself. The segments are then merged in order, by this program or, from `shares`, by
    `combine_kernel`. So the order of a query's sums depends on its position alone. A segment is the
    tile of a share.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    request, kv_head, start, query_len, seq_len = request_info
    row = tl.arange(0, ROWS)
    query = block * QUERIES + row // GROUP
    token = (start + query).to(tl.int64)
    inside = (row < QUERIES * GROUP) & (query < query_len)
    live = inside & (query < seq_len)  # padding has a seq_len of 0
    live &= tl.load(slot_mapping + token, mask=live, other=-1) >= 0
    # Tiles end with the last live row's context, since later slots may hold NaN.
    position = tl.where(live, seq_len - query_len + query, -1)
    first = 0
    if WINDOW:  # begin with the tile of the first key that any of the queries sees
        oldest = tl.min(tl.where(live, position, seq_len), axis=0) - WINDOW + 1
        first = tl.maximum(oldest, 0) // KEYS * KEYS
    end = tl.max(position, axis=0) + 1

    head = kv_head * GROUP + row % GROUP
    head_pages = kv_pages + kv_head * DIM
    dim = tl.arange(0, DIMS)
    mask = live[:, None] & (dim < DIM)[None, :]
    queries = tl.load(
        q + (token * stride_q + head * DIM)[:, None] + dim[None, :], mask=mask, other=0.0
    )
    if kv_pages.dtype.element_ty == tl.float8e4nv and queries.dtype == tl.bfloat16:
        # FP8 converts to float16 in one instruction, but to bfloat16 in several. Queries beyond the
        # range of float16 are clamped.
        queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    table = block_table + request.to(tl.int64) * stride_table
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    cell = token * HEADS + head
    lo, hi, whole, place = share
    if SEGMENT:
        if not SHARED:
            lo = first // SEGMENT
            hi = tl.cdiv(end, SEGMENT)
        for segment in range(lo, tl.minimum(hi, tl.cdiv(end, SEGMENT))):
            m_own, s_own, acc_own = _attend_range(
                queries,
                position,
                live,
                head_pages,
                values,
                table,
                tl.maximum(segment * SEGMENT, first),
                tl.minimum((segment + 1) * SEGMENT, end),
                end,
                scale,
                KV_HEADS,
                DIM,
                PAGE_SIZE,
                ROWS,
                KEYS,
                DIMS,
                WINDOW,
                True,  # one loop for all tiles, for one order of sums
            )
            if not SHARED:
                m, s, acc = merge(m, s, acc, m_own, s_own, acc_own)
            else:
                at = cell * SEGMENTS + segment
                tl.store(maxima + at, m_own, mask=live)
                tl.store(sums + at, s_own, mask=live)
                tl.store(shares + (at * DIM)[:, None] + dim[None, :], acc_own, mask=mask)
    else:
        if SHARED:
            lo = lo * KEYS
            hi = tl.minimum(hi * KEYS, end)
        else:
            lo = first
            hi = end
        m, s, acc = _attend_range(
            queries,
            position,
            live,
            head_pages,
            values,
            table,
            lo,
            hi,
            end,
            scale,
            KV_HEADS,
            DIM,
            PAGE_SIZE,
            ROWS,
            KEYS,
            DIMS,
            WINDOW,
            ONE_BLOCK,
        )

    release()
    if SHARED and SEGMENT:
        return
    if whole:
        acc = tl.where(live[:, None], acc / tl.where(s == 0, 1.0, s)[:, None], 0.0)
        store_heads(
            acc.to(q.dtype.element_ty).to(tl.float32),
            out,
            scales,
            cell,
            inside,
            DIM,
            DIMS,
            QUANTIZE,
        )
    else:
        at = (tl.cast(place, tl.int64) * KV_HEADS + kv_head) * ROWS + row
        tl.store(maxima + at, m, mask=live)
        tl.store(sums + at, s, mask=live)
        tl.store(shares + (at * DIM)[:, None] + dim[None, :], acc, mask=mask)


@triton.jit
def _attend_range(
    queries,
    position,
    live,
    head_pages,
    values,
    table,
    lo,
    hi,
    end,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """The maximum `[ROWS]`, sum `[ROWS]` and weighted values `[ROWS, DIMS]` over the positions
    lo:hi, for a block whose last query is at `end - 1`."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    # Tiles that all queries see in full need no mask, and are attended to in a separate loop.
    if not ONE_BLOCK:
        visible_end = tl.minimum(
            tl.maximum(tl.min(tl.where(live, position, end - 1), axis=0) + 1, lo), hi
        )
        whole = lo + (visible_end - lo) // KEYS * KEYS
        if WINDOW:
            edge = tl.minimum(lo + tl.cdiv(tl.maximum(end - WINDOW - lo, 0), KEYS) * KEYS, whole)
            m, s, acc = _attend_tiles(
                m,
                s,
                acc,
                queries,
                position,
                head_pages,
                values,
                table,
                lo,
                edge,
                scale,
                KV_HEADS,
                DIM,
                PAGE_SIZE,
                KEYS,
                DIMS,
                WINDOW,
                True,
            )
            lo = edge
        m, s, acc = _attend_tiles(
            m,
            s,
            acc,
            queries,
            position,
            head_pages,
            values,
            table,
            lo,
            whole,
            scale,
            KV_HEADS,
            DIM,
            PAGE_SIZE,
            KEYS,
            DIMS,
            WINDOW,
            False,
        )
        lo = whole
    return _attend_tiles(
        m,
        s,
        acc,
        queries,
        position,
        head_pages,
        values,
        table,
        lo,
        hi,
        scale,
        KV_HEADS,
        DIM,
        PAGE_SIZE,
        KEYS,
        DIMS,
        WINDOW,
        True,
    )


@triton.jit
def _attend_tiles(
    m,
    s,
    acc,
    queries,
    position,
    head_pages,
    values,
    table,
    lo,
    hi,
    scale,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running maximum `[ROWS]`, sum `[ROWS]` and weighted values `[ROWS, DIMS]` after the
    positions lo:hi. Without MASKED, these must be whole tiles that every live query sees."""
    dim = tl.arange(0, DIMS)
    offsets = tl.arange(0, KEYS)
    WIDTH: tl.constexpr = KV_HEADS * DIM
    for start in range(lo, hi, KEYS):
        at = start + offsets
        # If a tile begins with a page, the places in pages are the same for all tiles.
        if KEYS % PAGE_SIZE == 0:
            pages = table + start // PAGE_SIZE + offsets // PAGE_SIZE
            slot = offsets % PAGE_SIZE
        else:
            pages = table + at // PAGE_SIZE
            slot = (at % PAGE_SIZE).to(tl.int64)
        page = tl.load(pages, mask=at < hi, other=0) if MASKED else tl.load(pages)
        where = (
            head_pages
            + (slot * WIDTH)[:, None]
            + dim[None, :]
            + (page.to(tl.int64) * (PAGE_SIZE * WIDTH))[:, None]
        )
        if MASKED or DIM < DIMS:
            # Load zeros, since memory may hold NaN, and a probability of 0 times NaN is NaN.
            mask = (at < hi)[:, None] & (dim < DIM)[None, :]
            key = tl.load(where, mask=mask, other=0.0)
            value = tl.load(where + values, mask=mask, other=0.0)
        else:
            key = tl.load(where)
            value = tl.load(where + values)
        if key.dtype != queries.dtype:  # FP8
            key = key.to(queries.dtype)
            value = value.to(queries.dtype)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee")
        if MASKED:
            visible = offsets[None, :] <= (tl.minimum(position, hi - 1) - start)[:, None]
            if WINDOW:
                visible &= offsets[None, :] > (position - (start + WINDOW))[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1) * scale)
        # A row that has seen no key yet stays at -inf, and -inf - -inf would be NaN.
        base = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        p = tl.exp2(scores * scale - base[:, None])  # one instruction scales and shifts
        shrink = tl.exp2(m - base)
        s = s * shrink + tl.sum(p, axis=1)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return m, s, acc
