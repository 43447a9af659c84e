"""`Blocks`: tracks which `with` blocks of one kind are around a call."""

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

    Blocks may end in any order, and in another thread than they began in, as those inside
    generators do. Such a block does not affect the others, and is in force nowhere once it has
    ended. (Resetting a context variable by its token would instead restore the value from when the
    block began.)
    """

    def __init__(self, name: str) -> None:
        self._around: ContextVar[tuple[_Block[T], ...]] = ContextVar(name, default=())
        self.around = self._around.get
        """The blocks around this call, some of which may have ended in another thread. Most calls
        are in no block: then it is empty, and only C code has run."""

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
