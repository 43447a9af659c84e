"""The gate of a feed-forward block, `silu(gate) * up`, and its quantisation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops.fp8 import ROUNDED, Quantized, ceil_blocks, reference_quantize
from weft.ops.parts import sum_parts, widened
from weft.ops.register import register, without_derivative


def silu_mul(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) * up`, gate being the left half of x and up the right one (SwiGLU, Shazeer, arXiv 2002.05202).

    Args:
        x: `[T, 2 * I]`, or float32 parts of it `[S, T, 2 * I]`. Computed with in float32, rounded once.
        dtype: of the result; also what the sum of the parts is rounded to.

    Returns:
        `[T, I]`.

    >>> silu_mul(torch.tensor([[1.0, 2.0]]), torch.float32)
    tensor([[1.4621]])
    """
    out: Tensor = _silu_mul(x, dtype)
    return out


def silu_mul_quantized(x: Tensor, dtype: torch.dtype) -> Quantized:
    """`silu_mul`, rounded to `dtype` and then quantised."""
    return Quantized(*_silu_mul_quantized(x, dtype))


def gated(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) * up` of float32, rounded once; the reference of every kernel that gates."""
    return (F.silu(widened(gate)) * widened(up)).to(dtype)


def reference_silu_mul(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`weft::silu_mul` in plain torch, on any device."""
    gate, up = sum_parts(x, dtype).chunk(2, dim=-1)
    return gated(gate, up, dtype)


def reference_silu_mul_quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`weft::silu_mul_quantized` in plain torch, on any device."""
    return reference_quantize(reference_silu_mul(x, dtype))


def _fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[-2], x.shape[-1] // 2), dtype=dtype)


def _fake_quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tokens, inner = x.shape[-2], x.shape[-1] // 2
    scales = x.new_empty((tokens, ceil_blocks(inner)), dtype=torch.float32)
    return x.new_empty((tokens, inner), dtype=torch.float8_e4m3fn), scales


_silu_mul = register(
    "silu_mul", "(Tensor x, ScalarType dtype) -> Tensor",
    cpu=reference_silu_mul, fake=_fake, kernel="weft.ops.gate_triton:silu_mul",
)  # fmt: skip
_silu_mul_quantized = register(
    "silu_mul_quantized", "(Tensor x, ScalarType dtype) -> (Tensor, Tensor)",
    cpu=reference_silu_mul_quantized, fake=_fake_quantized, kernel="weft.ops.gate_triton:silu_mul_quantized",
    functional=without_derivative("silu_mul_quantized", ROUNDED, reference_silu_mul_quantized),
)  # fmt: skip
