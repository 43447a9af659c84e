"""`Constants`: the tensors on the CPU that are the same at each call, because a function makes them
from Python numbers alone. The function may read them on the host: a replay would read the same
values.
"""

from collections.abc import Iterable

import attrs


@attrs.define
class _Step:
    """A step of a loop, which a replay repeats.

    Args:
        outside: the constants from before the step.
        read: those of them whose values the host has read in the step.
        changed: those of them that the step has written, so that the next step finds other values.
    """

    outside: set[int]
    read: set[int] = attrs.field(factory=set)
    changed: set[int] = attrs.field(factory=set)


class Constants:
    """The storages of constants in one run, as `storage_id` gives them.

    A tensor from before a loop that a step writes has another value in the next step. So it is no
    constant, even if it is computed from constants alone, as the counter of a loop is.
    """

    def __init__(self) -> None:
        self._storages = set[int]()
        self._steps: list[_Step] = []

    def add(self, storage: int) -> None:
        """Add the storage of a new tensor."""
        self._storages.add(storage)
        for step in self._steps:
            step.outside.discard(storage)

    def clear(self) -> None:
        """Forget all, before another run."""
        self._storages.clear()

    def contains_all(self, storages: Iterable[int]) -> bool:
        """Whether these storages are constants."""
        return self._storages.issuperset(storages)

    def read(self, storage: int) -> bool:
        """Whether the host may read this storage; if so, note that it does."""
        if storage not in self._storages:
            return False
        for step in self._steps:
            if storage in step.outside:
                step.read.add(storage)
        return True

    def note(self, new: set[int], written: set[int], *, are_constant: bool) -> None:
        """Note the storages that an operator made or wrote in place, and whether it computed them
        from constants alone."""
        for step in self._steps:
            step.outside -= new  # a freed storage may have had the same number
            step.changed |= written & step.outside
        if are_constant:
            self._storages |= new | written
        else:
            self._storages -= new | written
        for step in self._steps:
            self._storages -= step.changed

    def begin_step(self, carry: Iterable[int]) -> None:
        """Begin a step of a loop, which writes these storages."""
        self._storages.difference_update(carry)
        self._steps.append(_Step(set(self._storages)))

    def end_step(self) -> bool:
        """End the step, and return whether it changed a constant that the host read in it."""
        step = self._steps.pop()
        return not step.read.isdisjoint(step.changed)
