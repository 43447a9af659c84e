"""The shortest decimals that reproduce the elements of a tensor, bit for bit."""

import math
from typing import Any

import torch
from torch import Tensor


def digits(x: Tensor) -> list[str]:
    """An expression for each element of a 1-dimensional tensor, which `torch.tensor(...,
    dtype=x.dtype)` reads back exactly.

    >>> digits(torch.tensor([0.1, 1 / 3, -0.0, float("inf")]))
    ['0.1', '0.33333334', '-0.0', "float('inf')"]
    >>> digits(torch.tensor([0.1, 1 / 3], dtype=torch.bfloat16))
    ['0.1', '0.334']
    """
    if x.dtype.is_complex:
        real, imag = (digits(part) for part in (torch.view_as_real(x)[:, i] for i in (0, 1)))
        return [f"complex({a}, {b})" for a, b in zip(real, imag, strict=True)]
    if x.dtype.is_floating_point:
        values = x.cpu().double().tolist()
    else:
        values = x.tolist()
    if x.dtype.is_floating_point:
        return [_shortest(value, x.dtype) for value in values]
    return list(map(repr, values))


def _shortest(value: float, dtype: torch.dtype) -> str:
    if not math.isfinite(value):
        return f"float('{value}')"
    # With 17 digits every float64 is exact, and `repr` has as many as it needs.
    for precision in range(1, 17):
        text = repr(float(f"{value:.{precision}g}"))
        if _read(text, dtype) == value:
            return text
    return repr(value)


def _read(text: str, dtype: torch.dtype) -> Any:
    # As torch rounds to the dtype, since the code makes the tensor in the same way.
    return torch.tensor(float(text), dtype=dtype).double().item()
