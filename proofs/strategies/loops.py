"""Loops on integers for `while_loop`, with the values that Python's own integers give."""

from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import strategies as st
from torch import Tensor

STEPS = 6
"""The most steps of a drawn loop."""


@attrs.frozen
class Loop:
    """A loop on integers, which ends when their sum is `bound` or more. A step puts `3 * values[order[i]] + amounts[i]`
    at i, or just `values[order[i]]` where the amount is 0.

    Args:
        order, amounts: of the body.
        bound: of the sum; after `STEPS` steps the loop ends in any case.
        max_steps: as `while_loop` takes it.
        starts: the first values of each call, for one graph.
        in_place: whether the body takes the storage of its carry.
    """

    order: tuple[int, ...]
    amounts: tuple[int, ...]
    bound: int
    max_steps: int | None
    starts: tuple[tuple[int, ...], ...]
    in_place: bool

    def cond(self, carry: Any) -> Tensor:
        """The condition on tensors, `(values, steps)`."""
        values, steps = carry
        holds: Tensor = (sum(values) < self.bound) & (steps < STEPS)
        return holds

    def body(self, carry: Any) -> Any:
        """The body on tensors."""
        values, steps = carry
        return self._moved(values), steps + 1

    def _moved(self, values: Sequence[Any]) -> list[Any]:
        return [3 * values[i] + a if a else values[i] for i, a in zip(self.order, self.amounts, strict=True)]

    def wanted(self, start: Sequence[int]) -> list[int]:
        """The last values, then the number of steps, by Python's integers."""
        values, steps = list(start), 0
        while sum(values) < self.bound and steps < STEPS and steps != self.max_steps:
            values, steps = self._moved(values), steps + 1
        return [*values, steps]


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Loops of up to four values, with two or three calls.

    >>> from hypothesis import find
    >>> find(loops(), lambda loop: loop.wanted(loop.starts[0])[-1] == 2).max_steps is None
    True
    """
    count = draw(st.integers(1, 4))

    def numbers(low: int, high: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(st.integers(low, high), min_size=count, max_size=count).map(tuple)

    starts = draw(st.lists(numbers(-5, 5), min_size=2, max_size=3))
    order, amounts, bound = draw(numbers(0, count - 1)), draw(numbers(-3, 3)), draw(st.integers(-100, 100))
    return Loop(order, amounts, bound, draw(st.sampled_from((None, 1, 2, 5))), tuple(starts), draw(st.booleans()))
