"""Residual additions with the normalisation, and the quantisation, that follow them: one op for what is one kernel."""

import torch
from torch import Tensor

from weft.ops.fp8 import ROUNDED, Quantized, ceil_blocks, reference_quantize
from weft.ops.parts import sum_parts, widened
from weft.ops.register import register, without_derivative


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019, arXiv 1910.07467).

    Args:
        x: `[T, N]`. Computed with in float32 and rounded once, after the multiplication by the weight.
        weight: `[N]`, of x's dtype.
        eps: added to the mean square.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.5)
    tensor([[0.8321, 1.1094]])
    """
    normed: Tensor = _rms_norm(x, weight, eps)
    return normed


def rms_norm_quantized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantized]:
    """`rms_norm`, and the same quantised, 128 columns of a token at a time."""
    normed, values, scales = _rms_norm_quantized(x, weight, eps)
    return normed, Quantized(values, scales)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of `x` and `residual`, rounded to the residual's dtype, and that sum normalised as by `rms_norm`.

    Args:
        x: `[T, N]`, or parts of it `[S, T, N]`.
        residual: `[T, N]`.

    Returns:
        The normalised sum and the sum, `[T, N]` each.
    """
    normed, total = _add_rms_norm(x, residual, weight, eps)
    return normed, total


def add_rms_norm_quantized(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantized, Tensor]:
    """`add_rms_norm`, with what is normalised also quantised: normalised, quantised, sum."""
    normed, values, scales, total = _add_rms_norm_quantized(x, residual, weight, eps)
    return normed, Quantized(values, scales), total


def add_parts(x: Tensor, residual: Tensor) -> Tensor:
    """The sum of `x` (or its parts) and `residual`, as `add_rms_norm` forms it."""
    total: Tensor = _add_parts(x, residual)
    return total


def reference_add_parts(x: Tensor, residual: Tensor) -> Tensor:
    """`weft::add_parts` in plain torch, on any device."""
    return sum_parts(x, residual.dtype) + residual


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weft::rms_norm` in plain torch, on any device."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def functional_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in operations that have derivatives of all orders and modes; torch's own norm has a fused kernel."""
    wide = widened(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widened(weight)).to(x.dtype)


def reference_rms_norm_quantized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`weft::rms_norm_quantized` in plain torch, on any device."""
    normed = reference_rms_norm(x, weight, eps)
    return normed, *reference_quantize(normed)


def reference_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`weft::add_rms_norm` in plain torch, on any device."""
    total = reference_add_parts(x, residual)
    return reference_rms_norm(total, weight, eps), total


def functional_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same by `functional_rms_norm`."""
    total = reference_add_parts(x, residual)
    return functional_rms_norm(total, weight, eps), total


def reference_add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`weft::add_rms_norm_quantized` in plain torch, on any device."""
    total = reference_add_parts(x, residual)
    return *reference_rms_norm_quantized(total, weight, eps), total


def _fake_quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    tokens, columns = x.shape
    scales = x.new_empty((tokens, ceil_blocks(columns)), dtype=torch.float32)
    return x.new_empty((tokens, columns), dtype=torch.float8_e4m3fn), scales


def _fake_rms_norm_quantized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), *_fake_quantized(x)


def _fake_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


def _fake_add_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(residual), *_fake_quantized(residual), torch.empty_like(residual)


_rms_norm = register(
    "rms_norm", "(Tensor x, Tensor weight, float eps) -> Tensor",
    cpu=reference_rms_norm, fake=lambda x, weight, eps: torch.empty_like(x), kernel="weft.ops.norm_triton:norm",
    functional=functional_rms_norm,
)  # fmt: skip
_rms_norm_quantized = register(
    "rms_norm_quantized", "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    cpu=reference_rms_norm_quantized, fake=_fake_rms_norm_quantized, kernel="weft.ops.norm_triton:norm_quantized",
    functional=without_derivative("rms_norm_quantized", ROUNDED, reference_rms_norm_quantized),
)  # fmt: skip
_add_rms_norm = register(
    "add_rms_norm", "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    cpu=reference_add_rms_norm, fake=_fake_add, kernel="weft.ops.norm_triton:add_norm",
    functional=functional_add_rms_norm,
)  # fmt: skip
_add_rms_norm_quantized = register(
    "add_rms_norm_quantized",
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=reference_add_rms_norm_quantized, fake=_fake_add_quantized, kernel="weft.ops.norm_triton:add_norm_quantized",
    functional=without_derivative("add_rms_norm_quantized", ROUNDED, reference_add_rms_norm_quantized),
)  # fmt: skip
_add_parts = register(
    "add_parts", "(Tensor x, Tensor residual) -> Tensor",
    cpu=reference_add_parts, fake=lambda x, residual: torch.empty_like(residual), kernel="weft.ops.norm_triton:add",
)  # fmt: skip
