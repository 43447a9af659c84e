"""FP8 as DeepSeek-V3 stores it (arXiv 2412.19437, section 3.3): the format of weights and the
quantiser of activations.

A value is a float8_e4m3fn times the float32 scale of its block. A block is 128 by 128 weights, or
128 columns of one token; the last block of a row or a column may be smaller.
"""

import attrs
import torch
from torch import Tensor

from weft.ops.register import operator
from weft.values.trees import pytree

# The columns that share a scale; in weights, also the rows.
BLOCK = 128

# The largest float8_e4m3fn.
MOST = 448.0

# The reason why an operator that quantises has no derivative.
ROUNDED = "values that are rounded to FP8, and change in steps"

# The lower bound on the magnitude from which a block's scale is computed, so that no scale is 0.
LEAST = 1e-10


def ceil_blocks(size: int) -> int:
    """The number of blocks in `size` rows or columns.

    >>> ceil_blocks(128), ceil_blocks(129)
    (1, 2)
    """
    return -(-size // BLOCK)


@pytree
@attrs.frozen(eq=False)
class Quantized:
    """Activations in FP8: `values[t, c] * scales[t, c // 128]`.

    Args:
        values: `[T, K]` float8_e4m3fn.
        scales: `[T, ceil(K / 128)]` float32.
    """

    values: Tensor
    scales: Tensor


def as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values to the dtype of a cache; for FP8 they are clamped to ±448, without a
    scale."""
    if dtype == torch.float8_e4m3fn:
        return x.float().clamp(-MOST, MOST).to(dtype)
    return x.to(dtype)


def reference_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `[T, K]`, 128 columns at a time, as every kernel that quantises must.

    Let m be the largest magnitude of a block, at least 1e-10, in float32. The scale is m / 448, and
    a value becomes x * (448 / m), clamped to ±448 and rounded to the nearest float8_e4m3fn, ties to
    even.

    Returns:
        Values `[T, K]` float8_e4m3fn and scales `[T, ceil(K / 128)]` float32.
    """
    tokens, columns = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, ceil_blocks(columns) * BLOCK - columns))
    blocks = padded.view(tokens, ceil_blocks(columns), BLOCK)
    most = blocks.abs().amax(-1).clamp(min=LEAST)
    # With a Python number, `MOST / most` would multiply by a rounded reciprocal of `most`.
    inverse = torch.full_like(most, MOST) / most
    scaled = (blocks * inverse[..., None]).clamp(-MOST, MOST)
    return scaled.to(torch.float8_e4m3fn).view(tokens, -1)[:, :columns].contiguous(), most / MOST


def dequantize(x: Quantized) -> Tensor:
    """The values `[T, K]` in float32."""
    return x.values.float() * x.scales.repeat_interleave(BLOCK, 1)[:, : x.values.shape[1]]


def dequantize_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """Weights `[…, N, K]` in float32, from blocks of 128 by 128.

    Args:
        weight: `[…, N, K]` float8_e4m3fn.
        scale: `[…, ceil(N / 128), ceil(K / 128)]` float32.
    """
    rows, columns = weight.shape[-2:]
    wide = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return weight.float() * wide[..., :rows, :columns]


def empty_quantized(like: Tensor, tokens: int, columns: int) -> tuple[Tensor, Tensor]:
    """Empty values and scales on a tensor's device."""
    scales = like.new_empty((tokens, ceil_blocks(columns)), dtype=torch.float32)
    return like.new_empty((tokens, columns), dtype=torch.float8_e4m3fn), scales


_quantize = operator(
    name="quantize",
    kernel="weft.ops.norm_triton:quantize",
    fake=lambda x: empty_quantized(x, *x.shape),
    no_derivative=ROUNDED,
)(reference_quantize)


def quantize(x: Tensor) -> Quantized:
    """Quantise `[T, K]` to FP8 as `reference_quantize` defines it, on CUDA in one kernel."""
    return Quantized(*_quantize(x))
