"""The gate of a feed-forward block, `silu(gate) * up`, and its quantisation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops.products.fp8 import ROUNDED, Quantized, empty_quantized, reference_quantize
from weft.ops.products.parts import sum_parts, widened
from weft.ops.register import operator


def gated(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) * up` in float32, rounded once: the reference for every kernel with a gate."""
    wide = widened(gate)
    # On a CPU, torch's vectorised silu rounds a tensor's last elements differently from the others.
    return (wide / (1 + torch.exp(-wide)) * widened(up)).to(dtype)


def functional_gated(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """`gated` with derivatives that are finite for any gate, where those of `exp` overflow."""
    return (F.silu(widened(gate)) * widened(up)).to(dtype)


def functional_silu_mul(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu_mul`, computed with `functional_gated`."""
    gate, up = sum_parts(x, dtype).chunk(2, dim=-1)
    return functional_gated(gate, up, dtype)


@operator(
    kernel="weft.ops.products.gate_triton:silu_mul",
    fake=lambda x, dtype: x.new_empty((x.shape[-2], x.shape[-1] // 2), dtype=dtype),
    functional=functional_silu_mul,
)
def silu_mul(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) * up`: the gate is the left half of x, up the right half (SwiGLU, Shazeer, arXiv
    2002.05202).

    Args:
        x: `[T, 2 * I]`, or float32 parts of it `[S, T, 2 * I]`. The computation is in float32, and
            rounded once.
        dtype: the dtype of the result; the sum of the parts is rounded to it too.

    Returns:
        `[T, I]`.

    >>> silu_mul(torch.tensor([[1.0, 2.0]]), torch.float32)
    tensor([[1.4621]])
    """
    gate, up = sum_parts(x, dtype).chunk(2, dim=-1)
    return gated(gate, up, dtype)


def silu_mul_quantized(x: Tensor, dtype: torch.dtype) -> Quantized:
    """`silu_mul`, rounded to `dtype` and then quantised."""
    return Quantized(*_silu_mul_quantized(x, dtype))


@operator(
    kernel="weft.ops.products.gate_triton:silu_mul_quantized",
    fake=lambda x: empty_quantized(x, x.shape[-2], x.shape[-1] // 2),
    no_derivative=ROUNDED,
)
def _silu_mul_quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return reference_quantize(silu_mul.reference(x, dtype))
