"""The instruction `Attend` of a persistent kernel. Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.persistent.shared_triton import eights, load_words, masked, numbers_of, of_parts, wait
from weft.ops.products.blocks_triton import clamp_to_fp8


@triton.jit
def place(
    program, splits, seq_lens, query_start_loc, slots, KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """A program's share of the context, which is the same in all instructions: its number and its key head, whether the
    token has a context, the shares that are used, the positions low:high before the new one, and where the new key
    goes."""
    split, head = program % splits, program // splits
    seq_len, slot = tl.load(seq_lens), tl.load(slots)
    live = (tl.load(query_start_loc + 1) > 0) & (seq_len > 0) & (slot >= 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(seq_len, KEYS), splits), 1) * KEYS
    low = split * share
    high = tl.where(live & (head < KV_HEADS), tl.minimum(low + share, seq_len - 1), 0)
    return split, head, live, tl.cdiv(seq_len, share), low, high, (slot * KV_HEADS + head) * DIM


@triton.jit
def attend(
    row, arrived, ended, arrivals, scratch, shares, maxima, sums, cosines, sines, block_table, split, head, live, used,
    low, high, target, PROGRAMS: tl.constexpr, TYPE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_TYPE: tl.constexpr, HEAD_NORM: tl.constexpr, GROUP: tl.constexpr,
    MADE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The fields are those of `Attend`, in order. A program has a share of the context of one key head.

    The keys before the new one, and all else that no instruction writes, are on the way before the wait. Each program
    makes its queries, the new key and the new value, as rows `[MADE, DIM]` of one matrix, and writes them to its
    scratch, to read them again as its tiles of keys are laid out: a key is in one part of a warp, and no warp needs
    another's numbers before the end. The share with the new key keeps it. The share that is the last to end joins them
    all.
    """
    qkv, parts = tl.load(row + 1), tl.load(row + 2).to(tl.int32)
    q_norm, k_norm = tl.load(row + 3).to(tl.pointer_type(TYPE)), tl.load(row + 4).to(tl.pointer_type(TYPE))
    pages = tl.load(row + 5)
    out = tl.load(row + 6).to(tl.pointer_type(TYPE))
    columns, value_stride = tl.load(row + 7).to(tl.int32), tl.load(row + 8)
    k_start, v_start = tl.load(row + 9).to(tl.int32), tl.load(row + 10).to(tl.int32)
    eps = tl.load(row + 11).to(tl.int32).to(tl.float32, bitcast=True)
    scale = tl.load(row + 12).to(tl.int32).to(tl.float32, bitcast=True)
    EACH: tl.constexpr = HEADS // KV_HEADS
    WORDS: tl.constexpr = DIM // 2
    key, value = _tile(pages, value_stride, block_table, head, low, high, KV_HEADS, DIM, PAGE_SIZE, KV_TYPE, ROWS, KEYS)
    made, dim = tl.arange(0, MADE)[:, None], tl.arange(0, DIM)[None, :]
    other = (dim + WORDS) % DIM  # the number that a number is rotated with
    is_key, is_value = made == EACH, made == EACH + 1
    gain, other_gain = tl.full([MADE, DIM], 1.0, tl.float32), tl.full([MADE, DIM], 1.0, tl.float32)
    if HEAD_NORM:
        norm = tl.where(is_key, k_norm, q_norm)
        gain = tl.load(norm + dim, mask=is_value == 0, other=1.0).to(tl.float32)
        other_gain = tl.load(norm + other, mask=is_value == 0, other=1.0).to(tl.float32)
    start = tl.where(is_key, k_start, tl.where(is_value, v_start, 0)) + head * DIM
    start = tl.where(made < EACH, (head * EACH + made) * DIM, start)
    there = made < EACH + 2
    wait(arrived, ended)
    if head < KV_HEADS:
        head_of = tl.arange(0, GROUP)[:, None]
        if live == 0:
            tl.store(
                out + (head * EACH + head_of) * DIM + dim,
                tl.zeros([GROUP, DIM], TYPE),
                mask=masked(head_of < EACH, split == 0),
            )
        elif split < used:
            x = of_parts(qkv, parts, start + dim, columns, there & (dim >= 0), TYPE)
            partner = of_parts(qkv, parts, start + other, columns, there & (dim >= 0), TYPE)
            turned = x * gain * cosines[None, :] + partner * other_gain * sines[None, :]
            if HEAD_NORM:
                turned *= (1 / tl.sqrt(tl.sum(x * x, 1) / DIM + eps))[:, None]
            turned = tl.where(is_value, x, turned).to(TYPE)
            kept = pages.to(tl.pointer_type(KV_TYPE)) + target + dim + tl.where(is_value, value_stride, 0)
            keeps = masked(is_key | is_value, split == used - 1)
            if tl.float8e4nv == KV_TYPE:
                rounded = clamp_to_fp8(turned)
                tl.store(kept, rounded, mask=keeps)
                turned = tl.where(is_key | is_value, rounded.to(tl.float32), turned.to(tl.float32)).to(TYPE)
            else:
                tl.store(kept, turned, mask=keeps)
            tl.store(scratch + made * DIM + dim, turned)
            tl.debug_barrier()
            # Of `[rows, heads, keys of a row, words]`.
            rows = tl.arange(0, ROWS)[:, None, None, None]
            heads = tl.arange(0, GROUP)[None, :, None, None]
            words = tl.arange(0, WORDS)[None, None, None, :]
            q_at, q_mask = rows * 0 + heads * WORDS + words, rows + heads + words >= 0
            q_even, q_odd = numbers_of(load_words(scratch.to(tl.int64), q_at, q_mask, TYPE), TYPE)
            q_even, q_odd = q_even * scale, q_odd * scale
            m = tl.full([ROWS, GROUP], float("-inf"), tl.float32)
            s = tl.zeros([ROWS, GROUP], tl.float32)
            even, odd = tl.zeros([ROWS, GROUP, WORDS], tl.float32), tl.zeros([ROWS, GROUP, WORDS], tl.float32)
            m, s, even, odd = _attend_tile(m, s, even, odd, q_even, q_odd, key, value, low, high, KV_TYPE, ROWS, KEYS)
            for first in range(low + KEYS, high, KEYS):
                k, v = _tile(
                    pages, value_stride, block_table, head, first, high, KV_HEADS, DIM, PAGE_SIZE, KV_TYPE, ROWS, KEYS
                )
                m, s, even, odd = _attend_tile(m, s, even, odd, q_even, q_odd, k, v, first, high, KV_TYPE, ROWS, KEYS)
            if split == used - 1:  # the new key is one of the first row
                own, always = rows * 0 + EACH * WORDS + words, rows + words >= 0
                new = load_words(scratch.to(tl.int64), own, always, TYPE)
                new_value = load_words(scratch.to(tl.int64), own + WORDS, always, TYPE)
                seen = tl.arange(0, ROWS)[:, None, None] == 0
                m, s, even, odd = _attend(m, s, even, odd, q_even, q_odd, new, new_value, seen, TYPE)
            cell = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]) * GROUP + tl.arange(0, GROUP)[None, :]
            tl.store(maxima + cell, m)
            tl.store(sums + cell, s)
            where = shares + cell[:, :, None] * DIM + tl.arange(0, WORDS)[None, None, :]
            tl.store(where, even)
            tl.store(where + WORDS, odd)
            tl.debug_barrier()
            m, s, total = _joined(maxima, sums, shares, tl.program_id(0) * ROWS, ROWS, GROUP, DIM, ROWS)
            column = tl.arange(0, GROUP * DIM)
            place = out + (head * EACH + column // DIM) * DIM + column % WORDS * 2 + column % DIM // WORDS
            mine = column < EACH * DIM
            if used == 1:
                tl.store(place, (total / s).to(TYPE), mask=mine)
            else:
                first_cell = PROGRAMS * ROWS + head * SPLITS
                at = (first_cell + split) * GROUP + column // DIM
                tl.store(maxima + at, m)
                tl.store(sums + at, s)
                tl.store(shares + (first_cell + split) * (GROUP * DIM) + column, total)
                tl.debug_barrier()
                if tl.atomic_add(arrivals + head, 1, sem="acq_rel") == used - 1:
                    tl.store(arrivals + head, 0)
                    m, s, total = _joined(maxima, sums, shares, first_cell, used, GROUP, DIM, SPLITS)
                    tl.store(place, (total / s).to(TYPE), mask=mine)


@triton.jit
def _joined(maxima, sums, shares, first, count, GROUP: tl.constexpr, DIM: tl.constexpr, MOST: tl.constexpr):
    """The maximum, sum and weighted values of cells that follow one another, for each number of each head `[GROUP *
    DIM]`. No load waits for another."""
    column = tl.arange(0, GROUP * DIM)
    head = column // DIM
    most = tl.full([GROUP * DIM], float("-inf"), tl.float32)
    for cell in tl.static_range(MOST):
        there = masked(column >= 0, cell < count)
        most = tl.maximum(most, tl.load(maxima + (first + cell) * GROUP + head, mask=there, other=float("-inf")))
    base = tl.where(most == float("-inf"), 0.0, most)
    total, values = tl.zeros([GROUP * DIM], tl.float32), tl.zeros([GROUP * DIM], tl.float32)
    for cell in tl.static_range(MOST):
        there, at = masked(column >= 0, cell < count), (first + cell) * GROUP
        weight = tl.exp2(tl.load(maxima + at + head, mask=there, other=float("-inf")) - base)
        total += weight * tl.load(sums + at + head, mask=there, other=0.0)
        values += weight * tl.load(shares + at * DIM + column, mask=there, other=0.0)
    return most, total, values


@triton.jit
def _tile(
    pages, value_stride, block_table, head, low, high, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, KV_TYPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The words of the keys and values `[ROWS, 1, KEYS / ROWS, DIM / 2]` of the positions from `low` on; zeros from
    `high` on, since a probability of 0 times NaN is NaN."""
    at = _positions(low, ROWS, KEYS)[:, :, :, None]
    page = tl.load(block_table + at // PAGE_SIZE, mask=at < high, other=0).to(tl.int64)
    offset = ((page * PAGE_SIZE + at % PAGE_SIZE) * KV_HEADS + head) * (DIM // 2)
    word = tl.arange(0, DIM // 2)[None, None, None, :]
    mask = (at < high) & (word >= 0)
    return load_words(pages, offset + word, mask, KV_TYPE), load_words(
        pages, offset + eights(value_stride >> 1) + word, mask, KV_TYPE
    )


@triton.jit
def _positions(low, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The positions of a tile `[ROWS, 1, KEYS / ROWS]`."""
    row = tl.arange(0, ROWS)[:, None, None] * (KEYS // ROWS)
    return low + row + tl.arange(0, KEYS // ROWS)[None, None, :]


@triton.jit
def _attend_tile(
    m, s, even, odd, q_even, q_odd, key, value, low, high, KV_TYPE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """`_attend` of a tile's keys before `high`."""
    return _attend(m, s, even, odd, q_even, q_odd, key, value, _positions(low, ROWS, KEYS) < high, KV_TYPE)


@triton.jit
def _attend(m, s, even, odd, q_even, q_odd, key, value, seen, TYPE: tl.constexpr):
    """Each row's running maximum and sum `[ROWS, GROUP]`, and weighted values `[ROWS, GROUP, DIM / 2]`, after keys."""
    first, second = numbers_of(key, TYPE)
    scores = tl.where(seen, tl.sum(first * q_even + second * q_odd, 3), float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 2))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    p = tl.exp2(scores - base[:, :, None])
    shrink = tl.exp2(m - base)
    first, second = numbers_of(value, TYPE)
    even = even * shrink[:, :, None] + tl.sum(p[:, :, :, None] * first, 2)
    odd = odd * shrink[:, :, None] + tl.sum(p[:, :, :, None] * second, 2)
    return m_new, s * shrink + tl.sum(p, 2), even, odd
