"""`Blocks`: the `with` blocks of one kind that are around a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")


@attrs.define(eq=False)
class _Block(Generic[T]):
    """A `with` block, and the value that is in force inside."""

    value: T
    is_open: bool = True


class Blocks(Generic[T]):
    """The `with` blocks of one kind around a call, in this thread.

    Blocks may end in any order, and in another thread than they began in: those of generators do.
    Such a block leaves the others as they are, and is in force nowhere once it has ended. (The
    tokens of a context variable would bring back the value that was there when the block began.)
    """

    def __init__(self, name: str) -> None:
        self._around: ContextVar[tuple[_Block[T], ...]] = ContextVar(name, default=())
        self.around = self._around.get
        """The blocks around this call; some may have ended in another thread. Empty if there is
        none: most calls are in none, and this tells it in C."""

    def values(self) -> tuple[T, ...]:
        """The values of the blocks around this call, outermost first."""
        return tuple(block.value for block in self.around() if block.is_open)

    @contextmanager
    def block(self, value: T) -> Iterator[None]:
        """A block in which `value` is in force."""
        block = _Block(value)
        self._around.set((*self._around.get(), block))
        try:
            yield
        finally:
            block.is_open = False
            self._around.set(tuple(other for other in self._around.get() if other.is_open))
