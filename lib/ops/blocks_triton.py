"""What the Triton kernels share: parts that are added up, and blocks of 128 columns that are quantised.

Import it only where triton is installed. With TRITON_INTERPRET=1 set before, kernels run on CPU tensors, for tests; not
bfloat16, whose products triton's interpreter gets wrong.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl

from weft.ops.early_triton import INTERPRETED
from weft.ops.fp8 import LEAST, MOST

_MOST = tl.constexpr(MOST)
_LEAST = tl.constexpr(LEAST)

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def load_sum(x, offsets, mask, stride, PARTS: tl.constexpr, TYPE: tl.constexpr):
    """What the parts at `offsets` add up to, rounded to TYPE, in float32; 0 parts: x is the sum itself."""
    total = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        total += tl.load(x + i * tl.cast(stride, tl.int64) + offsets, mask=mask, other=0.0).to(tl.float32)
    return total.to(TYPE).to(tl.float32)


@triton.jit
def to_fp8(x):
    """float8_e4m3fn of float32 within its range, to nearest, ties to even."""
    if INTERPRETED:  # which rounds wrongly to FP8
        step = tl.exp2(tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(x), 1e-30))), -6.0) - 3.0)
        down = tl.floor(x / step)
        rest = x / step - down
        odd = down - 2 * tl.floor(down / 2)
        x = (down + tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1)), 1.0, 0.0)) * step
    return x.to(tl.float8e4nv)


@triton.jit
def quantize_rows(x):
    """Rows of 128 columns `[R, 128]` of float32: FP8 values and the scales `[R]`."""
    most = tl.maximum(tl.max(tl.abs(x), 1), _LEAST)
    scaled = x * tl.div_rn(_MOST + tl.zeros_like(most), most)[:, None]
    values = to_fp8(tl.minimum(tl.maximum(scaled, -_MOST), _MOST))
    return values, tl.div_rn(most, _MOST + tl.zeros_like(most))
