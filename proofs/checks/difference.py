"""Compares values for all of weft's checks: leaf by leaf of their trees, bitwise unless a tolerance
is given."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from weft.batches.state import State
from weft.proofs.checks.elements import Place, Tolerance, first_place, plain, unequal, worst_place
from weft.proofs.checks.structures import structure_difference
from weft.values.keys import value_key
from weft.values.trees import leaves_with_names, tree_map, tree_structure

# Tolerances (float32) for runs of different shapes, whose matrix products may sum in another order.
ATOL = 2e-4
RTOL = 2e-4


class LawViolation(AssertionError):
    """A law does not hold; the message has the law, the path of the first difference, and both
    values there."""


@attrs.frozen
class Difference:
    """The first leaf in which two trees differ.

    Args:
        path: the path of the leaf, or of the node where the structures differ.
        actual, expected: a description of both sides: a value; or dtype, shape and device; or a
            class.
        kind: dtype, shape and device of both leaves if their elements differ; otherwise empty.
        first, worst: the first element that differs, by index, and the one that differs most.
        count, size: the number of the leaf's elements that differ, and of all its elements.
        num_leaves, of_leaves: the number of leaves that differ, and of all leaves; 0 if the
            structures differ.
    """

    path: str
    actual: str
    expected: str
    kind: str = ""
    first: Place | None = None
    worst: Place | None = None
    count: int = 0
    size: int = 0
    num_leaves: int = 0
    of_leaves: int = 0

    def __str__(self) -> str:
        if self.first is None:
            index = ""
        else:
            index = str(list(self.first.index))
        return f"{self.path}{index}: {self.actual} against {self.expected}"

    def text(self, actual: str = "seen", expected: str = "expected") -> str:
        """All fields, one per line; `actual` and `expected` name the two trees."""
        rows = [
            ("at", self._where()),
            (actual, self.actual),
            (expected, self.expected),
            *self._counts(),
        ]
        width = max(len(name) for name, _ in rows) + 1
        return "\n".join(f"{f'{name}:':<{width}} {value}" for name, value in rows)

    def _where(self) -> str:
        leaf = self.path or "the result"
        if self.first is None:
            return leaf
        if self.first.index:
            return f"{leaf}, element {list(self.first.index)} of {self.kind}"
        return f"{leaf}, {self.kind}"

    def _counts(self) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        if self.first is not None and self.worst is not None:
            rows.append(("apart", self.first.apart()))
            most = self.worst
            more = (
                f"most at {list(most.index)}: {most.actual!r} and {most.expected!r}, apart"
                f" {most.apart()}"
            )
            if self.size > 1:
                rows.append(
                    (
                        "differ",
                        f"{self.count:,} of {self.size:,} elements"
                        + f"; {more}" * (self.count > 1),
                    )
                )
        if self.of_leaves > 1:
            rows.append(
                ("leaves", f"{self.num_leaves} of {self.of_leaves} differ; this is the first")
            )
        return rows


def find_difference(
    actual: Any, expected: Any, tolerance: Tolerance | None = None
) -> Difference | None:
    """The first leaf, in flattening order, in which `actual` differs from `expected`; None if they
    are equal.

    The structures must be equal, including classes and static fields. So must the dtype, shape,
    device and elements of tensors (and of numpy arrays). Other leaves are compared as in the keys
    of graphs (`weft.values.keys`): 1 equals neither 1.0 nor True.

    Args:
        actual, expected: trees of tensors and other values.
        tolerance: of floating-point elements. None: bitwise, where NaN equals NaN.

    >>> print(find_difference({"h": torch.tensor([1.0, 2.0])}, {"h": torch.tensor([1.0, 2.5])}))
    ['h'][1]: 2.0 against 2.5
    """
    tolerance = tolerance or Tolerance()
    if (
        mismatch := structure_difference(tree_structure(actual), tree_structure(expected))
    ) is not None:
        return Difference(*mismatch)
    pairs = list(zip(leaves_with_names(actual), leaves_with_names(expected), strict=True))
    found_in = [_leaf_difference(path, a, b, tolerance) for (path, a), (_, b) in pairs]
    differing = [make for make in found_in if make is not None]
    if differing:
        return attrs.evolve(differing[0](), num_leaves=len(differing), of_leaves=len(pairs))
    return None


def assert_equal(law: str, actual: Any, expected: Any, *, exact: bool = True) -> None:
    """Raise LawViolation at the first leaf of `actual` that differs from `expected`.

    Args:
        law: what must hold; the error begins with it.
        actual, expected: trees of tensors and other values.
        exact: compare bitwise (NaN equals NaN). Otherwise floating-point numbers may differ by an
            absolute and a relative 2e-4, as those of runs of different shapes do.

    >>> assert_equal("a sum is in any order", {"y": torch.ones(2)}, {"y": torch.tensor([1.0, 2.0])})
    Traceback (most recent call last):
        ...
    weft.proofs.checks.difference.LawViolation: a sum is in any order: ['y'][1]: 1.0 against 2.0
    """
    if (
        difference := find_difference(
            actual, expected, Tolerance() if exact else Tolerance(ATOL, RTOL)
        )
    ) is not None:
        raise LawViolation(f"{law}: {difference}")


def _leaf_difference(
    path: str, a: Any, b: Any, tolerance: Tolerance
) -> Callable[[], Difference] | None:
    """A function that describes how two leaves differ; None if they are equal."""
    # A function, since only the first difference is shown, and describing one takes time.
    if not isinstance(a, Tensor | np.ndarray) or not isinstance(b, Tensor | np.ndarray):
        if _same(a, b, tolerance):
            return None
        return lambda: Difference(path, _words(a), _words(b))
    if (kinds := (_words(a), _words(b)))[0] != kinds[1]:
        return lambda: Difference(path, *kinds)
    a, b = plain(a), plain(b)
    # Tensors on `meta` have no elements.
    if a.is_meta or not bool((differ := unequal(a, b, tolerance)).any()):
        return None
    return lambda: _element_difference(path, kinds[0], a, b, differ)


def _words(value: Any) -> str:
    """A description of a leaf; for tensors and arrays, the properties that must agree before their
    elements are compared."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
    if isinstance(value, np.ndarray):
        return f"an array of numpy, {value.dtype} {list(value.shape)}"
    return repr(value)


def _same(a: Any, b: Any, tolerance: Tolerance) -> bool:
    # As tensors: bitwise, NaN equals NaN, and 0.0 differs from -0.0.
    if isinstance(a, float | complex) and type(a) is type(b):
        if isinstance(a, complex):
            kind = torch.complex128
        else:
            kind = torch.float64
        return not bool(
            unequal(torch.tensor(a, dtype=kind), torch.tensor(b, dtype=kind), tolerance)
        )
    return bool(value_key(a) == value_key(b) and (a is b or a == b))


def _element_difference(path: str, kind: str, a: Tensor, b: Tensor, differ: Tensor) -> Difference:
    first = first_place(a, b, differ)
    worst = worst_place(a, b, differ)
    actual = repr(first.actual)
    expected = repr(first.expected)
    return Difference(path, actual, expected, kind, first, worst, int(differ.sum()), differ.numel())


def visible(state: Sequence[State]) -> Any:
    """The part of a state that belongs to requests: all but the scratch row, the last one."""
    names = ("block_table", "positions", "last_tokens", "mrope_position_deltas")
    return [
        {"kv_pages": s.kv_pages, "sampling": tree_map(_of_requests, s.sampling)}
        | {name: _of_requests(getattr(s, name)) for name in names}
        for s in state
    ]


def _of_requests(table: Tensor) -> Tensor:
    return table[:-1]
