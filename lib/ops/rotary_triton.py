"""The CUDA implementation of `weft::turn_tables` and `weft::rotate_and_keep`, in Triton. Import it
only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import at_once, begin, early, kernel, release
from weft.ops.products.blocks_triton import TRITON_DTYPES, clamp_to_fp8, load_sum
from weft.ops.products.parts import num_parts
from weft.ops.tiles.tile import cdiv, power_of_two

# The heads of a program.
_HEADS = 8
# The angles of a program.
_ANGLES = 256


@kernel(do_not_specialize=["at_once"])
def _rotary_kernel(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    slots,
    kv_pages,
    out,
    columns,
    stride,
    to_values,
    k_start,
    v_start,
    eps,
    at_once,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    TYPE: tl.constexpr,
    FP8: tl.constexpr,
):
    begin(at_once)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS
    kv_head = (head - HEADS) % KV_HEADS
    start = tl.where(is_q, head * DIM, tl.where(is_v, v_start, k_start) + kv_head * DIM)
    pair = tl.arange(0, HALF)
    live = pair < DIM // 2
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & live[None, :]
    offsets = token * columns + start[:, None] + pair[None, :]
    left = load_sum(qkv, offsets, inside, stride, PARTS, TYPE)
    right = load_sum(qkv, offsets + DIM // 2, inside, stride, PARTS, TYPE)
    if NORM:
        gain = 1 / tl.sqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + eps)
        place = tl.where(is_q[:, None], q_norm + pair[None, :], k_norm + pair[None, :])
        mask = inside & (is_v == 0)[:, None]
        left *= tl.where(is_v, 1.0, gain)[:, None] * tl.load(place, mask=mask, other=1.0).to(
            tl.float32
        )
        right *= tl.where(is_v, 1.0, gain)[:, None] * tl.load(
            place + DIM // 2, mask=mask, other=1.0
        ).to(tl.float32)
    table = token * (DIM // 2) + pair
    c = tl.load(cos + table, mask=live, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + table, mask=live, other=0.0).to(tl.float32)[None, :]
    release()
    # Values are not rotated.
    turned_left = tl.where(is_v[:, None], left, left * c - right * s).to(TYPE)
    turned_right = tl.where(is_v[:, None], right, right * c + left * s).to(TYPE)
    query = out + (token * HEADS + head)[:, None] * DIM + pair[None, :]
    tl.store(query, turned_left, mask=inside & is_q[:, None])
    tl.store(query + DIM // 2, turned_right, mask=inside & is_q[:, None])
    if slot >= 0:
        kept = inside & (head >= HEADS)[:, None]
        page = kv_pages + tl.where(is_v, to_values, 0)[:, None]
        page += (slot * KV_HEADS + kv_head)[:, None] * DIM + pair[None, :]
        if FP8:
            tl.store(page, clamp_to_fp8(turned_left), mask=kept)
            tl.store(page + DIM // 2, clamp_to_fp8(turned_right), mask=kept)
        else:
            tl.store(page, turned_left, mask=kept)
            tl.store(page + DIM // 2, turned_right, mask=kept)


def rotate_and_keep(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    kv_pages: Tensor,
    num_heads: int,
    starts: list[int],
) -> Tensor:
    """`weft::rotate_and_keep`."""
    qkv, (tokens, columns) = qkv.contiguous(), qkv.shape[-2:]
    kv_heads, dim = kv_pages.shape[-2:]
    out = cos.new_empty((tokens, num_heads, dim))
    blocks = cdiv(num_heads + 2 * kv_heads, _HEADS)
    with torch.cuda.device_of(qkv):
        if tokens:
            _rotary_kernel[(tokens, blocks)](
                qkv,
                cos if q_norm is None else q_norm,
                cos if k_norm is None else k_norm,
                cos.contiguous(),
                sin.contiguous(),
                slot_mapping.contiguous(),
                kv_pages,
                out,
                columns,
                tokens * columns,
                kv_pages.stride(0),
                *starts,
                eps,
                at_once(tokens),
                HEADS=num_heads,
                KV_HEADS=kv_heads,
                DIM=dim,
                HALF=power_of_two(dim // 2),
                BLOCK=_HEADS,
                NORM=q_norm is not None and k_norm is not None,
                PARTS=num_parts(qkv),
                TYPE=TRITON_DTYPES[cos.dtype],
                FP8=kv_pages.dtype == torch.float8_e4m3fn,
                num_warps=4,
                **early(qkv),
            )
    return out


@kernel(do_not_specialize=["count"])
def _turn_kernel(
    inv_freq,
    positions,
    cos,
    sin,
    count,
    pairs,
    factor,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
):
    """With EACH, every pair has its own positions."""
    begin()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    position = tl.load(positions + (place if EACH else place // pairs), mask=inside, other=0)
    angle = position.to(tl.float32) * tl.load(inv_freq + place % pairs, mask=inside, other=0.0)
    tl.store(cos + place, (tl.cos(angle) * factor).to(TYPE), mask=inside)
    tl.store(sin + place, (tl.sin(angle) * factor).to(TYPE), mask=inside)


def turn_tables(
    inv_freq: Tensor, positions: Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`weft::turn_tables`."""
    cos, sin = inv_freq.new_empty((2, positions.shape[0], inv_freq.shape[0]), dtype=dtype)
    with torch.cuda.device_of(inv_freq):
        if count := cos.numel():
            _turn_kernel[(cdiv(count, _ANGLES),)](
                inv_freq.contiguous(),
                positions.contiguous(),
                cos,
                sin,
                count,
                inv_freq.shape[0],
                attention_factor,
                EACH=positions.dim() == 2,
                BLOCK=_ANGLES,
                TYPE=TRITON_DTYPES[dtype],
                **early(inv_freq),
            )
    return cos, sin
