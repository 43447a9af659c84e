"""The instruction `Attend` of a persistent kernel. Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.attention.block_triton import attend_tiles
from weft.ops.blocks_triton import clamp_to_fp8
from weft.ops.persistent.shared_triton import sum_parts, wait


@triton.jit
def attend(
    row, arrived, ended, arrivals, shares, maxima, sums, tokens, splits, program, PROGRAMS: tl.constexpr,
    TYPE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_TYPE: tl.constexpr, HEAD_NORM: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The fields are those of `Attend`, in order. An item is a share of the context of one request and key head.

    The share with the last position also keeps the new key and value, and reads them. The share that is the last to
    end joins them all.
    """
    qkv, parts = tl.load(row + 1), tl.load(row + 2).to(tl.int32)
    q_norm, k_norm = tl.load(row + 3), tl.load(row + 4)
    cos, sin = tl.load(row + 5).to(tl.pointer_type(TYPE)), tl.load(row + 6).to(tl.pointer_type(TYPE))
    slots = tl.load(row + 7).to(tl.pointer_type(tl.int64))
    kv_pages = tl.multiple_of(tl.load(row + 8).to(tl.pointer_type(KV_TYPE)), 16)
    block_table = tl.load(row + 9).to(tl.pointer_type(tl.int32))
    query_start_loc = tl.load(row + 10).to(tl.pointer_type(tl.int32))
    seq_lens = tl.load(row + 11).to(tl.pointer_type(tl.int32))
    out = tl.load(row + 12).to(tl.pointer_type(TYPE))
    columns, table_stride, value_stride = tl.load(row + 13), tl.load(row + 14), tl.multiple_of(tl.load(row + 15), 16)
    k_start, v_start = tl.load(row + 16), tl.load(row + 17)
    eps = tl.load(row + 18).to(tl.int32).to(tl.float32, bitcast=True)
    scale = tl.load(row + 19).to(tl.int32).to(tl.float32, bitcast=True)
    # Nothing in a program writes where the tokens are.
    token, has, seq_len, slot = _where(program // splits // KV_HEADS, tokens, query_start_loc, seq_lens, slots)
    wait(arrived, ended)
    EACH: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    group, dim = tl.arange(0, GROUP), tl.arange(0, DIM)
    for item in range(program, tokens * KV_HEADS * splits, PROGRAMS):
        split, head, request = item % splits, item // splits % KV_HEADS, item // splits // KV_HEADS
        if item != program:
            token, has, seq_len, slot = _where(request, tokens, query_start_loc, seq_lens, slots)
        own = (head * EACH + group)[:, None] * DIM + dim[None, :]
        shown = (group < EACH)[:, None] & (dim >= 0)[None, :]
        if (split == 0) & (request >= tl.load(query_start_loc + tokens)):  # a token after those of all requests
            tl.store(out + request * (HEADS * DIM) + own, tl.zeros([GROUP, DIM], TYPE), mask=shown)
        if has & ((seq_len == 0) | (slot < 0)):
            if split == 0:
                tl.store(out + token * (HEADS * DIM) + own, tl.zeros([GROUP, DIM], TYPE), mask=shown)
        elif has:
            share = tl.cdiv(tl.cdiv(seq_len, KEYS), splits) * KEYS
            used = tl.cdiv(seq_len, share)
            if split < used:
                query = _turned(
                    qkv, parts, tokens, token * columns, (head * EACH + group) * DIM, group < EACH, columns, q_norm,
                    cos + token * HALF, sin + token * HALF, eps, HEAD_NORM, DIM, TYPE,
                )  # fmt: skip
                if split == used - 1:
                    _keep(
                        qkv, parts, tokens, token * columns, k_start + head * DIM, v_start + head * DIM, columns,
                        k_norm, cos + token * HALF, sin + token * HALF, eps, kv_pages,
                        (slot * KV_HEADS + head) * DIM, value_stride, HEAD_NORM, DIM, TYPE,
                    )  # fmt: skip
                    tl.debug_barrier()
                if KV_TYPE != TYPE and tl.bfloat16 == TYPE:  # of FP8, as in `attend_block`
                    given = tl.clamp(query.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
                else:
                    given = query
                m, s, acc = attend_tiles(
                    tl.full([GROUP], float("-inf"), tl.float32), tl.zeros([GROUP], tl.float32),
                    tl.zeros([GROUP, DIM], tl.float32), given, tl.zeros([GROUP], tl.int32) + seq_len - 1, kv_pages,
                    value_stride, block_table + request * table_stride, head, split * share,
                    tl.minimum((split + 1) * share, seq_len), scale, KV_HEADS, DIM, PAGE_SIZE, KEYS, DIM, 0, True,
                )  # fmt: skip
                if used == 1:
                    tl.store(out + token * (HEADS * DIM) + own, (acc / s[:, None]).to(TYPE), mask=shown)
                else:
                    cell = (token * HEADS + head * EACH + group) * SPLITS + split
                    tl.store(maxima + cell, m, mask=group < EACH)
                    tl.store(sums + cell, s, mask=group < EACH)
                    tl.store(shares + cell[:, None] * DIM + dim[None, :], acc, mask=shown)
                    tl.debug_barrier()
                    if tl.atomic_add(arrivals + request * KV_HEADS + head, 1, sem="acq_rel") == used - 1:
                        tl.store(arrivals + request * KV_HEADS + head, 0)
                        for one in tl.static_range(EACH):
                            _join(
                                shares, maxima, sums, (token * HEADS + head * EACH + one) * SPLITS, used,
                                out + (token * HEADS + head * EACH + one) * DIM, DIM, SPLITS, TYPE,
                            )  # fmt: skip


@triton.jit
def _where(request, tokens, query_start_loc, seq_lens, slots):
    """A request's token, whether it has one, the length of its context, and the token's slot."""
    request = tl.minimum(request, tokens - 1)
    token = tl.load(query_start_loc + request).to(tl.int64)
    has = tl.load(query_start_loc + request + 1) > token
    return token, has, tl.load(seq_lens + request), tl.load(slots + token, mask=has, other=-1)


@triton.jit
def _halves(qkv, parts, tokens, offsets, mask, columns, HALF: tl.constexpr, TYPE: tl.constexpr):
    """The left and the right half of heads that begin at some columns of a token, in float32."""
    if parts == 0:
        start = qkv.to(tl.pointer_type(TYPE))
        left = tl.load(start + offsets, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(start + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    else:
        left = sum_parts(qkv, parts, offsets, tokens * columns, mask, TYPE)
        right = sum_parts(qkv, parts, offsets + HALF, tokens * columns, mask, TYPE)
    return left, right


@triton.jit
def _turned(
    qkv, parts, tokens, first, starts, shown, columns, norm, cos, sin, eps,
    HEAD_NORM: tl.constexpr, DIM: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The heads `[R, DIM]` that begin at the columns `starts` `[R]`, normalised and rotated."""
    HALF: tl.constexpr = DIM // 2
    pair = tl.arange(0, HALF)
    mask = shown[:, None] & (pair >= 0)[None, :]
    left, right = _halves(qkv, parts, tokens, first + starts[:, None] + pair[None, :], mask, columns, HALF, TYPE)
    if HEAD_NORM:
        weight = norm.to(tl.pointer_type(TYPE)) + pair
        gain = 1 / tl.sqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + eps)
        left *= gain[:, None] * tl.load(weight).to(tl.float32)[None, :]
        right *= gain[:, None] * tl.load(weight + HALF).to(tl.float32)[None, :]
    c, s = tl.load(cos + pair).to(tl.float32)[None, :], tl.load(sin + pair).to(tl.float32)[None, :]
    both = tl.join(left * c - right * s, right * c + left * s)
    return tl.reshape(tl.permute(both, (0, 2, 1)), (starts.shape[0], DIM)).to(TYPE)


@triton.jit
def _keep(
    qkv, parts, tokens, first, k_start, v_start, columns, norm, cos, sin, eps, kv_pages, place, value_stride,
    HEAD_NORM: tl.constexpr, DIM: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Write a token's key, normalised and rotated, and its value to their slot."""
    one, dim = tl.arange(0, 1), tl.arange(0, DIM)
    key = _turned(
        qkv, parts, tokens, first, k_start + one, one == 0, columns, norm, cos, sin, eps, HEAD_NORM, DIM, TYPE
    )
    value = tl.zeros([1, DIM], tl.float32)
    offsets = first + v_start + one[:, None] + dim[None, :]
    if parts == 0:
        value = tl.load(qkv.to(tl.pointer_type(TYPE)) + offsets).to(tl.float32)
    else:
        value = sum_parts(qkv, parts, offsets, tokens * columns, offsets >= 0, TYPE)
    at = kv_pages + place + one[:, None] + dim[None, :]
    if kv_pages.dtype.element_ty == tl.float8e4nv:
        tl.store(at, clamp_to_fp8(key))
        tl.store(at + value_stride, clamp_to_fp8(value))
    else:
        tl.store(at, key)
        tl.store(at + value_stride, value.to(TYPE))


@triton.jit
def _join(shares, maxima, sums, first, used, out, DIM: tl.constexpr, SPLITS: tl.constexpr, TYPE: tl.constexpr):
    """Join the shares of one head's context, as `combine_kernel` does."""
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    inside = split < used
    m = tl.load(maxima + first + split, mask=inside, other=float("-inf"))
    weight = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(weight * tl.load(sums + first + split, mask=inside, other=0.0), 0)
    share = tl.load(shares + (first + split)[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0.0)
    tl.store(out + dim, (tl.sum(share * weight[:, None], 0) / total).to(TYPE))
