"""RMS norms, fused with the residual addition before them and the quantisation after them: each
operator is one kernel."""

import torch
from torch import Tensor

from weft.ops.products.fp8 import ROUNDED, Quantized, empty_quantized, reference_quantize
from weft.ops.products.parts import sum_parts, widened
from weft.ops.register import operator


def functional_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in operations with derivatives of all orders and modes, unlike torch's fused
    norm."""
    wide = widened(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widened(weight)).to(
        x.dtype
    )


def functional_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`, computed with `functional_rms_norm`."""
    total = sum_parts(x, residual.dtype) + residual
    return functional_rms_norm(total, weight, eps), total


@operator(
    kernel="weft.ops.norm_triton:norm",
    fake=lambda x: torch.empty_like(x),
    functional=functional_rms_norm,
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019, arXiv
    1910.07467).

    Args:
        x: `[T, N]`. The computation is in float32, with one rounding after the multiplication by
            the weight.
        weight: `[N]`, of x's dtype.
        eps: a constant added to the mean square.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.5)
    tensor([[0.8321, 1.1094]])
    """
    return torch_rms_norm(x, weight, eps)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Torch's own norm over the last dimension of `[..., N]`, in which each row's sum depends on
    that row alone."""
    # torch splits a single row's sum among threads, but not the sums of two rows.
    if x.numel() == x.shape[-1]:
        return torch.nn.functional.rms_norm(x.expand(2, *x.shape), (x.shape[-1],), weight, eps)[0]
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm_quantized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Quantized]:
    """`rms_norm`, and its result quantised in blocks of 128 columns of a token."""
    normed, values, scales = _rms_norm_quantized(x, weight, eps)
    return normed, Quantized(values, scales)


@operator(
    kernel="weft.ops.norm_triton:norm_quantized",
    fake=lambda x: (torch.empty_like(x), *empty_quantized(x, *x.shape)),
    no_derivative=ROUNDED,
)
def _rms_norm_quantized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    normed = rms_norm.reference(x, weight, eps)
    return normed, *reference_quantize(normed)


@operator(
    kernel="weft.ops.norm_triton:add_norm",
    fake=lambda residual: (torch.empty_like(residual), torch.empty_like(residual)),
    functional=functional_add_rms_norm,
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` and `residual`, round the sum to the residual's dtype, and normalise it as `rms_norm`
    does.

    Args:
        x: `[T, N]`, or parts of it `[S, T, N]`.
        residual: `[T, N]`.

    Returns:
        The normalised sum and the sum, `[T, N]` each.
    """
    total = add_parts.reference(x, residual)
    return rms_norm.reference(total, weight, eps), total


def add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Quantized, Tensor]:
    """`add_rms_norm` that also quantises: it returns the normalised sum, the same quantised, and
    the sum."""
    normed, values, scales, total = _add_rms_norm_quantized(x, residual, weight, eps)
    return normed, Quantized(values, scales), total


@operator(
    kernel="weft.ops.norm_triton:add_norm_quantized",
    fake=lambda residual: (
        torch.empty_like(residual),
        *empty_quantized(residual, *residual.shape),
        torch.empty_like(residual),
    ),
    no_derivative=ROUNDED,
)
def _add_rms_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = add_parts.reference(x, residual)
    return *_rms_norm_quantized.reference(total, weight, eps), total


@operator(kernel="weft.ops.norm_triton:add", fake=lambda residual: torch.empty_like(residual))
def add_parts(x: Tensor, residual: Tensor) -> Tensor:
    """The sum of `x` (or its parts) and `residual`, as `add_rms_norm` computes it."""
    return sum_parts(x, residual.dtype) + residual
