"""Transports: execute a pipeline's programs. All transports follow the protocol `Transport`.

These modules carry messages:
- `local`, `threads`, `distributed`: the transports. Each gives a rank's worker a `Link`, which
  sends and receives.
- `gloo`, `nccl`, `peer`: the ends of edges between processes, which carry tensors for
  `distributed`.
- `messages`: `ProcessLink`, and a message's header and layout. `wire`: the connections that carry
  headers.
- `json_values`: values as JSON. `agreement`: the values that ranks compare. `network`: the run's
  addresses and secret.

These modules find failures:
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
    """Where the ranks of a pipeline run, and how their messages travel."""

    @property
    def member(self) -> int | None:
        """The number of this process's rank as a member of collectives
        (`weft.ops.transfers.collective`); None if ranks take part in no collectives, or if several
        ranks run here."""

    def ranks(self, num_ranks: int) -> Sequence[int]:
        """Those of a pipeline's `num_ranks` ranks that run in this process, in order.

        Raises:
            ProgramError: the transport cannot run this number of ranks.
        """

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank. All ranks make these calls in the same order."""

    def collect(self, value: Any) -> list[Any]:
        """The values of all processes, in order, in each process. All ranks make these calls in the
        same order."""

    def assert_equal(self, subject: str, value: str) -> None:
        """Note a value that must be equal on every rank. Every rank must note it at the same place
        in its sequence of calls. The ranks compare their notes with the next message, before the
        receiver computes anything from it."""

    def check(self) -> None:
        """Raise RankError if a rank is known to have failed.

        A host calls it while it waits for its device: after a failure, the device's work may never
        end.
        """

    def received(self, last: int | None = None, /) -> Callable[[], None]:
        """A check of the messages received so far (in a session: up to job `last`).

        The host calls the returned function before it reads results computed from these messages.
        The function raises if a sender was asked to do something else than this rank.
        """

    def mail(self, num_ranks: int, /) -> Any:
        """A holder for messages that are sent in one run and received in a later run."""

    def run(self, checked: CheckedPrograms, workers: Sequence[Worker], mail: Any, /) -> None:
        """Execute checked programs for the ranks that run here.

        Args:
            checked: the programs of all ranks.
            workers: the workers of the ranks that run here. After the run, each holds its rank's
                new state and outputs.
            mail: the mail of this run and of the runs that it continues.

        Raises:
            RankError: on a rank that waits for another rank that raised, exited or stalled. The
                rank that raised gets its own error.
        """
