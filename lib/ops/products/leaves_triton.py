"""The CUDA implementation of `weft::sum_leaves`, in Triton. Import it only where triton is
installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import begin, early, kernel, release
from weft.ops.products.blocks_triton import load_sum
from weft.ops.tiles.tile import cdiv

# The elements of a program.
_BLOCK = 1024


@triton.jit
def _tree(
    x, offsets, inside, stride, PARTS: tl.constexpr, FIRST: tl.constexpr, LEAVES: tl.constexpr
):
    """The sum of LEAVES leaves, starting at FIRST, as a balanced tree."""
    if LEAVES == 1:
        first = x + FIRST * PARTS * tl.cast(stride, tl.int64)
        return load_sum(first, offsets, inside, stride, PARTS, tl.float32)
    else:
        left = _tree(x, offsets, inside, stride, PARTS, FIRST, LEAVES // 2)
        return left + _tree(x, offsets, inside, stride, PARTS, FIRST + LEAVES // 2, LEAVES // 2)


@kernel(do_not_specialize=["count"])
def _sum_kernel(x, out, count, PARTS: tl.constexpr, LEAVES: tl.constexpr, BLOCK: tl.constexpr):
    begin()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    total = _tree(x, offsets, inside, count, PARTS, 0, LEAVES)
    release()
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


def sum_leaves(x: Tensor, leaves: int, dtype: torch.dtype) -> Tensor:
    """`weft::sum_leaves`."""
    x, out = x.contiguous(), x.new_empty(x.shape[1:], dtype=dtype)
    with torch.cuda.device_of(x):
        if out.numel():
            _sum_kernel[(cdiv(out.numel(), _BLOCK),)](
                x,
                out,
                out.numel(),
                PARTS=len(x) // leaves,
                LEAVES=leaves,
                BLOCK=_BLOCK,
                num_warps=4,
                **early(x),
            )
    return out
