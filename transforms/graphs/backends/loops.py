"""Loops in captures: what `while_loop` asks of the capture around it."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor

from weft.transforms.graphs.backends.randomness import Randomness


class Looper(Protocol):
    """The part of a capture, or of a rehearsal of one, that records loops."""

    @property
    def unable(self) -> str | None:
        """The reason why it cannot record a loop whose length depends on data; None if it can."""

    def loop(self, flag: Tensor, step: Callable[[], None], /) -> None:
        """Record `step`, which runs once now, so that a replay repeats it while `flag` ([] bool) holds; `step` writes
        the flag."""


_LOOPER: ContextVar[Looper | None] = ContextVar("weft.looper", default=None)


def current_looper() -> Looper | None:
    """What records loops in this thread; None outside captures."""
    return _LOOPER.get()


@contextlib.contextmanager
def looping(looper: Looper, *, inside: bool = True) -> Iterator[None]:
    """A context in which `looper` records loops; with `inside=False` only where no other one does."""
    if not inside and _LOOPER.get() is not None:
        yield
        return
    token = _LOOPER.set(looper)
    try:
        yield
    finally:
        _LOOPER.reset(token)


class Rehearsal:
    """Runs each loop's step once: in a rehearsal, and in a listing of a function's operators."""

    def __init__(self, random: Randomness) -> None:
        self._random = random

    unable: str | None = None

    def loop(self, _: Tensor, step: Callable[[], None]) -> None:
        with self._random.repeated():
            step()


def split_in_loop(func: Any) -> tuple[str, str]:
    """The fault of a split operator that a loop repeats, and the remedy."""
    fault = f"{func}, at which the graph is split, inside while_loop"
    return (
        fault,
        "a back end of that operator that a graph can hold; or the Python loop outside the graphified function",
    )
