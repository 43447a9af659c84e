"""Compares the elements of two tensors: which differ, which differ most, and by how many ULPs."""

from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

# For each size in bytes, the integer dtype as which bits are compared.
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class Tolerance:
    """The tolerance for floating-point and complex elements, as in `torch.isclose`.

    If both are 0, the comparison is bitwise, so that 0.0 differs from -0.0. Elements of other
    dtypes must be equal.

    Args:
        atol, rtol: the absolute and the relative tolerance.
        equal_nan: whether NaN equals NaN, whatever the bits.
    """

    atol: float = 0.0
    rtol: float = 0.0
    equal_nan: bool = True

    @property
    def exact(self) -> bool:
        """Whether no tolerance is given."""
        return self.atol == self.rtol == 0

    def __str__(self) -> str:
        if self.exact:
            return "bitwise"
        return f"within atol={self.atol:g} and rtol={self.rtol:g}"


@attrs.frozen
class Place:
    """One element: its index, both values, and their distance in ULPs."""

    index: tuple[int, ...]
    actual: Any
    expected: Any
    ulps: int | None

    def apart(self) -> str:
        """The distance between the two values, as a number and in ULPs."""
        if self.ulps == 0:
            return "0 ULPs: zeros of either sign"
        if isinstance(self.actual, bool):
            return "a bool"
        # NaN minus a number, or an infinity minus itself, is NaN.
        amount = abs(self.actual - self.expected)
        if amount != amount:
            return "NaN"
        return f"{amount:.6g}" + (
            "" if self.ulps is None else f", {self.ulps:,} ULP{'s' * (self.ulps != 1)}"
        )


def plain(x: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """A detached, dense tensor whose memory holds the elements themselves: lazy conjugation and
    negation are resolved."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(x))
    x = x.detach().resolve_conj().resolve_neg()
    if x.layout == torch.strided:
        return x
    return x.to_dense()


def unequal(a: Tensor, b: Tensor, tolerance: Tolerance) -> Tensor:
    """A bool tensor that is True where two `plain` tensors of one shape and dtype differ."""
    if a.dtype.is_complex and tolerance.exact:
        return unequal(torch.view_as_real(a), torch.view_as_real(b), tolerance).any(-1)
    if has_no_numbers(a.dtype) or not (a.dtype.is_floating_point or a.dtype.is_complex):
        return _bits(a) != _bits(b)
    wide_a = _wide(a)
    wide_b = _wide(b)
    if not tolerance.exact:
        return ~torch.isclose(wide_a, wide_b, tolerance.rtol, tolerance.atol, tolerance.equal_nan)
    differ = _bits(a) != _bits(b)
    # NaN has many bit patterns, and operators do not promise which one they give.
    nan = wide_a.isnan() & wide_b.isnan()
    if tolerance.equal_nan:
        return differ & ~nan
    return differ | nan


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(_INTS[x.dtype.itemsize]).reshape(x.shape)


def has_no_numbers(dtype: torch.dtype) -> bool:
    """Whether a dtype packs two elements into a byte; torch has no arithmetic for these dtypes."""
    return "_x2" in str(dtype)


def _wide(x: Tensor) -> Tensor:
    """The same numbers in a dtype for which torch has comparisons."""
    small = x.dtype.itemsize == 1 and x.dtype.is_floating_point
    if small:
        return x.to(torch.float32)
    if x.dtype == torch.complex32:
        return x.to(torch.complex64)
    return x


def first_place(a: Tensor, b: Tensor, differ: Tensor) -> Place:
    """The first element that differs."""
    return _place(a, b, tuple(int(i) for i in differ.nonzero()[0]))


def worst_place(a: Tensor, b: Tensor, differ: Tensor) -> Place:
    """The element that differs most; NaN on one side counts as more than any number."""
    if has_no_numbers(a.dtype):
        return first_place(a, b, differ)
    if a.dtype.is_complex:
        wide = torch.complex128
    else:
        wide = torch.float64
    amounts = (a.to(wide)[differ] - b.to(wide)[differ]).abs().nan_to_num(nan=torch.inf)
    return _place(a, b, tuple(int(i) for i in differ.nonzero()[amounts.argmax()]))


def _place(a: Tensor, b: Tensor, index: tuple[int, ...]) -> Place:
    x = a[index]
    y = b[index]
    if has_no_numbers(a.dtype):
        x = _bits(x)
        y = _bits(y)
    return Place(index, x.item(), y.item(), ulps(x, y))


def ulps(a: Tensor, b: Tensor) -> int | None:
    """The distance in ULPs between two 0-dimensional tensors of one floating-point dtype: 1 for
    neighbours. None for NaN, and for other dtypes.

    Infinity is one step after the largest number. For complex numbers, the larger distance of both
    parts.

    >>> ulps(torch.tensor(1.0), torch.tensor(1.0).nextafter(torch.tensor(2.0)))
    1
    >>> ulps(torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16))
    128
    """
    if a.dtype.is_complex:
        parts = [
            ulps(x, y) for x, y in zip(torch.view_as_real(a), torch.view_as_real(b), strict=True)
        ]
        distances = [part for part in parts if part is not None]
        if len(distances) == 2:
            return max(distances)
        return None
    if (
        not a.dtype.is_floating_point
        or has_no_numbers(a.dtype)
        or bool(_wide(a).isnan() | _wide(b).isnan())
    ):
        return None
    return abs(_rank(a) - _rank(b))


def _rank(x: Tensor) -> int:
    """An integer for each floating-point number, in the same order and without gaps; 0 for both
    zeros."""
    # IEEE 754 numbers of one sign are ordered as the integers with the same bits.
    bits = int(_bits(x).item())
    if x.dtype == torch.float8_e8m0fnu:  # which has no sign
        return bits
    top = 1 << (8 * x.dtype.itemsize - 1)
    magnitude = bits & (top - 1)
    if bits < 0 or bits >= top:
        return -magnitude
    return magnitude
