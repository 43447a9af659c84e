"""Transports: execute a pipeline's programs. `Transport` is the protocol that every one of them
follows.

What carries messages:
- `local`, `threads`, `distributed`: the transports. Each gives a rank's worker a `Link`, which
  sends and receives.
- `gloo`, `nccl`, `peer`: the ends of edges between processes, which carry tensors for
  `distributed`.
- `messages`: `ProcessLink`, and a message's header and layout. `wire`: the connections that carry
  headers.
- `json_values`: values as JSON. `agreement`: the values that ranks compare. `network`: the run's
  addresses and secret.

What finds failures:
- `launch`: starts the processes, and sees how they end.
- `records`: what ranks write for each other. `watchdog`: the thread that shows that a rank runs.
- `monitor`: a rank's view of the others. `failures`: finds the rank that is to blame.

A new transport is a class with the methods of `Transport`; a new carrier of tensors is a
`messages.ProcessEnd`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.worker import Worker


class Transport(Protocol):
    """The place where the ranks of a pipeline run, and the way of their messages."""

    @property
    def member(self) -> int | None:
        """The number of this process's rank as a member of collectives
        (`weft.ops.transfers.collective`); None: ranks take part in none, or several run here."""

    def ranks(self, num_ranks: int) -> Sequence[int]:
        """The ranks of a pipeline of `num_ranks` that run in this process, in order.

        Raises:
            ProgramError: the transport has no place for so many.
        """

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank. All ranks call it, in the same order."""

    def collect(self, value: Any) -> list[Any]:
        """The values of all processes, in order, in each of them. All ranks call it, in the same
        order."""

    def assert_equal(self, subject: str, value: str) -> None:
        """Note a value that must be equal on every rank, at the same place among its calls. It is
        compared with the next message, before anything is computed from one that differs."""

    def check(self) -> None:
        """Raise RankError if a rank is known to have failed.

        A host calls it while it waits for its device, whose work then may never end.
        """

    def received(self, last: int | None = None, /) -> Callable[[], None]:
        """A check of the messages received so far (in a session: up to job `last`).

        The host calls the function that this returns before it reads what was computed from them.
        It raises if a sender was asked for something else than this rank.
        """

    def mail(self, num_ranks: int, /) -> Any:
        """A holder for messages that are sent in one run and received in a later one."""

    def run(self, checked: CheckedPrograms, workers: Sequence[Worker], mail: Any, /) -> None:
        """Execute checked programs for the ranks that run here.

        Args:
            checked: the programs of all ranks.
            workers: of the ranks that run here; each then holds its rank's new state and outputs.
            mail: of this run and those that it goes on from.

        Raises:
            RankError: on the ranks that wait for one that raised, exited or stalled. That one
                raises its own error.
        """
