"""Transports: what executes a pipeline's programs. One protocol, and a worker for each rank."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weft.transforms.pipelines.transports.plan import Plan
from weft.transforms.pipelines.transports.worker import Worker


class Transport(Protocol):
    """Where the ranks of a pipeline run, and how their messages travel."""

    def ranks(self, num_ranks: int) -> Sequence[int]:
        """The ranks of a pipeline of `num_ranks` that run in this process, in order.

        Raises:
            ProgramError: there is no place for so many.
        """

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank: what all must agree on and one decides. Each calls it, in the same order."""

    def collect(self, value: Any) -> list[Any]:
        """Every process's value, in order, in each of them. Each calls it, in the same order."""

    def assert_equal(self, subject: str, value: str) -> None:
        """Note what every rank must say alike, at the same place among its calls: with the next message it is compared,
        before anything is computed with what one of them says otherwise."""

    def check(self) -> None:
        """Raise RankError if a rank is known to have failed, while a device computes for it, or waits."""

    def received(self, last: int | None = None, /) -> Callable[[], None]:
        """A function to call before a host reads what was computed of what was received so far, in a session up to job
        `last`: it raises where the senders were asked for something else."""

    def mail(self, num_ranks: int, /) -> Any:
        """What holds messages that are sent in one run and received in a later one."""

    def run(self, plan: Plan, workers: Sequence[Worker], mail: Any, /) -> None:
        """Execute checked programs, those of `ranks(...)` here.

        Args:
            plan: of all ranks.
            workers: of the ranks that run here; each is left with its rank's new state and outputs.
            mail: of this run and those that it goes on from.

        Raises:
            RankError: on the ranks that wait for one that raised, exited or stalled. That one raises what it raised.
        """
