"""The CUDA implementation of `weft::turn_tables`, in Triton. Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.blocks_triton import TRITON_DTYPES
from weft.ops.early_triton import begin, early
from weft.ops.kernel_triton import kernel
from weft.ops.tiles import cdiv

_BLOCK = 256
"""Angles of a program."""


@kernel(do_not_specialize=["count"])
def _turn_kernel(
    inv_freq, positions, cos, sin, count, pairs, factor, EACH: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr
):
    """EACH: every pair has positions of its own."""
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
            _turn_kernel[(cdiv(count, _BLOCK),)](
                inv_freq.contiguous(), positions.contiguous(), cos, sin, count, inv_freq.shape[0], attention_factor,
                EACH=positions.dim() == 2, BLOCK=_BLOCK, TYPE=TRITON_DTYPES[dtype], **early(inv_freq),
            )  # fmt: skip
    return cos, sin
