"""Compares values that a compiler may round in another way."""

from typing import Any

import torch
from torch import Tensor

from weft.proofs.checks.difference import LawViolation, find_difference
from weft.proofs.checks.elements import plain
from weft.values.trees import tree_leaves


class RoundingViolation(LawViolation):
    """Values differ by more than torch's default tolerances; dtypes, shapes and structures are
    equal."""


def assert_rounded(law: str, actual: Any, expected: Any) -> None:
    """Raise RoundingViolation at the first leaf of `actual` that is not within the default
    tolerances of `torch.testing.assert_close` for its dtype; LawViolation if it differs in more
    than its elements.

    Args:
        law: what must hold; the error begins with it.
        actual, expected: trees of tensors and other values.

    >>> assert_rounded("a product", torch.tensor(1.0), torch.tensor(1.0000001))
    >>> assert_rounded("a product", torch.tensor(1.0), torch.tensor(1.1))
    Traceback (most recent call last):
        ...
    weft.proofs.checks.rounding.RoundingViolation: a product: []: 1.0 against 1.100000023841858
    """
    difference = find_difference(actual, expected)
    if difference is None:
        return
    if difference.first is None:
        raise LawViolation(f"{law}: {difference}")
    for x, y in _pairs(actual, expected):
        try:
            torch.testing.assert_close(plain(x), plain(y), equal_nan=True)
        except AssertionError:
            raise RoundingViolation(f"{law}: {find_difference(x, y)}") from None


def errors(actual: Any, expected: Any) -> list[float]:
    """The largest error of each tensor of `actual`, in the order of its leaves, in parts of the
    largest number that is expected; infinite where one side alone has NaN or an infinity."""
    return [_error(plain(x), plain(y)) for x, y in _pairs(actual, expected)]


def _pairs(actual: Any, expected: Any) -> list[tuple[Tensor, Tensor]]:
    pairs = zip(tree_leaves(actual), tree_leaves(expected), strict=True)
    return [(x, y) for x, y in pairs if isinstance(x, Tensor)]


def _error(actual: Tensor, expected: Tensor) -> float:
    wide = torch.complex128 if actual.is_complex() else torch.float64
    x = actual.to(wide)
    y = expected.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    if bool(same.all()):
        return 0.0
    error = float((x - y).abs()[~same].nan_to_num(nan=torch.inf).max())
    largest = float(y.abs().nan_to_num(0, 0).max())
    return error / largest if largest else torch.inf
