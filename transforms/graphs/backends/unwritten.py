"""`UnwrittenMemory`: memory that torch allocated in a run and that no operator wrote.

A few of torch's functions write to memory directly and not by an operator (`max_pool1d` on a CPU).
A tape does not see such a write, and would not repeat it.
"""

from collections.abc import Callable, Iterable, Set

from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi.private import storage_id
from weft.transforms.graphs.backends.host_reads import user_line


class UnwrittenMemory:
    """The storages that operators allocated, until an operator writes to them.

    Args:
        refuse: makes the error for a fault and its remedy.
        asked_for: the storages that the function itself asked for (`torch.empty`), which it may
            leave unwritten.
    """

    def __init__(self, refuse: Callable[[str, str], CaptureError], asked_for: set[int]) -> None:
        self._refuse = refuse
        self._asked_for = asked_for
        self._lines: dict[int, str] = {}

    def allocated(self, result: Tensor) -> None:
        """Note memory that an operator allocated and did not write."""
        if result.numel():
            self._lines[storage_id(result)] = user_line()
            # A freed storage may have had the same number.
            self._asked_for.discard(storage_id(result))

    def written(self, storages: Iterable[int]) -> None:
        """Note that an operator wrote to these storages."""
        for storage in storages if self._lines else ():
            self._lines.pop(storage, None)

    def check_read(self, storages: Set[int]) -> None:
        """Raise CaptureError if one of these storages, which are about to be read or returned, is
        unwritten."""
        for storage in self._lines.keys() & storages - self._asked_for if self._lines else ():
            fault = (
                "torch wrote to memory without an operator, which a tape cannot repeat, at"
                f" {self._lines[storage]}"
            )
            raise self._refuse(
                fault,
                "a function of torch that calls operators, outside of this one if there is none",
            )
