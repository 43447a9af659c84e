"""The CUDA implementation of the operators of `weft.ops.products.gate`, in Triton.

Import it only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import at_once, begin, early, kernel, release
from weft.ops.products.blocks_triton import TRITON_DTYPES, gated, load_sum, quantize_rows
from weft.ops.products.fp8 import ceil_blocks
from weft.ops.products.parts import num_parts
from weft.ops.tiles.tile import cdiv, power_of_two

# The most blocks of 128 columns of a program.
_MOST_GROUPS = 8


@kernel(do_not_specialize=["at_once"])
def _gate_kernel(
    x,
    out,
    scales,
    inner,
    stride,
    at_once,
    PARTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TYPE: tl.constexpr,
):
    begin(at_once)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < inner
    offsets = token * 2 * inner + column
    gate = load_sum(x, offsets, inside, stride, PARTS, TYPE)
    up = load_sum(x, offsets + inner, inside, stride, PARTS, TYPE)
    row = gated(gate, up).to(TYPE)
    release()
    place = out + token * inner + column
    if QUANTIZE:
        values, scale = quantize_rows(row.to(tl.float32))
        tl.store(place, values, mask=inside)
        blocks = tl.cdiv(inner, 128)
        tl.store(scales + token * blocks + group, scale, mask=group < blocks)
    else:
        tl.store(place, row, mask=inside)


def silu_mul(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`weft::silu_mul`."""
    return _run(x, dtype, False)[0]


def silu_mul_quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`weft::silu_mul_quantized`."""
    return _run(x, dtype, True)


def _run(x: Tensor, dtype: torch.dtype, quantized: bool) -> tuple[Tensor, Tensor]:
    """The result and its scales, or the result twice if it is not quantised."""
    x, tokens, inner = x.contiguous(), x.shape[-2], x.shape[-1] // 2
    out = x.new_empty((tokens, inner), dtype=torch.float8_e4m3fn if quantized else dtype)
    scales = x.new_empty((tokens, ceil_blocks(inner)), dtype=torch.float32) if quantized else out
    groups = min(_MOST_GROUPS, power_of_two(ceil_blocks(inner)))
    with torch.cuda.device_of(x):
        if tokens:
            _gate_kernel[(tokens, cdiv(ceil_blocks(inner), groups))](
                x,
                out,
                scales,
                inner,
                2 * tokens * inner,
                at_once(tokens),
                PARTS=num_parts(x),
                QUANTIZE=quantized,
                GROUPS=groups,
                TYPE=TRITON_DTYPES[dtype],
                num_warps=max(1, groups // 2),
                **early(x),
            )
    return out, scales
