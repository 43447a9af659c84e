"""`SharedRun`: the state that the threads of a run share, through which they pass messages and meet
in collectives."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from weft.errors import ProgramError
from weft.meshes.collectives import Collective
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.machine import Edge, Step, puts, takes
from weft.transforms.pipelines.transports.watching.failures import Failure, blockers, culprit

_SAME = "the same collectives in the same order on all ranks of a group, with one shape and dtype"
# The number of messages that an edge between threads holds; a sender waits while it is full.
_CAPACITY = 2

# The messages on an edge, each with the number of its micro-batch.
Queue = deque[tuple[int, Any]]


class SharedRun:
    """The state that the threads of a run share: the edges, each rank's position, and the first
    failure.

    Args:
        checked: the programs of the run.
        timeout: seconds without progress after which a rank counts as stalled.
        edges: the edges, with the messages that earlier runs sent and this run receives.
        first: the number of this run's first micro-batch, counted over all runs.
    """

    def __init__(
        self, checked: CheckedPrograms, timeout: float, edges: dict[Edge, Queue], first: int
    ) -> None:
        self.programs = checked.programs
        self.num_ranks = self.left = len(checked.programs)
        self.timeout = timeout
        self.failure: Failure | None = None
        self.at, self.ends = map(list, zip(*map(checked.span, range(self.num_ranks)), strict=True))
        self._edges = edges
        self._meetings: dict[tuple[tuple[int, ...], int], dict[int, tuple[Collective, Any]]] = {}
        self._met = Counter[tuple[int, tuple[int, ...]]]()
        self._first = first
        # One condition for all edges: a failure must wake every rank, whatever it waits for.
        self._changed = threading.Condition()

    def put(self, step: Step, value: Any) -> None:
        """Put a message on its edges, when there is room."""
        for edge in puts(step, self.num_ranks):
            with self._changed:
                queue = self._edges.setdefault(edge, deque())
                # A returning output does not wait for room, since it may be received only in a
                # later run.
                if edge.carries == "stages":
                    self._wait(step, partial(_has_room, queue), edge.to)
                queue.append((self._first + step.effect.microbatch, value))
                self._changed.notify_all()

    def take(self, step: Step, copied: Callable[[Any], Any]) -> Any:
        """Wait for a message and take it off its edge; `copied` makes it the receiver's own."""
        edge = takes(step)
        assert edge is not None, "only an effect that takes is received"
        with self._changed:
            queue = self._edges.setdefault(edge, deque())
            self._wait(step, lambda: bool(queue), edge.source)
            # Copy before the message leaves the queue: a fence waits only for messages in it, and
            # then the sender overwrites the value.
            value = copied(queue[0][1])
            queue.popleft()
            self._changed.notify_all()
        return value

    def meet(self, rank: int, effect: Collective, message: Any) -> list[Any]:
        """The messages of all ranks that take part in a collective, in the order of its ranks.

        Raises:
            ProgramError: another rank comes with a different collective or tensor, or is at its
                end.
        """
        with self._changed:
            number = self._met[rank, effect.ranks]
            self._met[rank, effect.ranks] += 1
            there = self._meetings.setdefault((effect.ranks, number), {})
            there[rank] = effect, message
            self._changed.notify_all()

            def late() -> int:
                return next((other for other in effect.ranks if other not in there), rank)

            def ended() -> int | None:
                return next(
                    (r for r in effect.ranks if r not in there and self.at[r] >= self.ends[r]), None
                )

            self._progress(lambda: len(there) == len(effect.ranks) or ended() is not None, late)
            if len(there) < len(effect.ranks):
                if self.failure is None:
                    raise ProgramError(
                        f"rank {rank}: '{effect}'", f"rank {ended()} is at its end", _SAME
                    )
                raise self.failure.for_rank(rank, str(effect))
            # The other ranks hold `there` already.
            self._meetings.pop((effect.ranks, number), None)
        refuse_unlike(rank, effect, {other: collective for other, (collective, _) in there.items()})
        return [there[other][1] for other in effect.ranks]

    def await_received(self, step: Step) -> None:
        """Wait until the next rank has received this rank's result for a micro-batch. A returning
        output needs no wait: it is a copy (`StageRun.copies_results`), and may be received only in
        a later run."""
        mb = self._first + step.effect.microbatch
        with self._changed:
            for edge in [e for e in self._edges if e.source == step.rank and e.carries == "stages"]:
                queue = self._edges[edge]
                self._wait(step, partial(_holds_none, queue, mb), edge.to)

    def fail(self, failure: Failure) -> None:
        """Note a failure, unless an earlier one was noted."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def end(self) -> None:
        """Note that a rank has ended, with or without an error."""
        with self._changed:
            self.left -= 1
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until all ranks have ended. After a failure, wait no longer than the time-out, since
        a rank may never end."""
        with self._changed:
            self._progress(lambda: self.left == 0, self._unfinished)
            if self.failure is not None:
                # A failure without an error is a stalled rank, which has had its time-out already.
                self._changed.wait_for(
                    lambda: self.left == 0, self.timeout if self.failure.error is not None else 0.1
                )

    def _wait(self, step: Step, ready: Callable[[], bool], peer: int) -> None:
        """Wait until `ready()`, which depends on `peer`."""
        self._progress(ready, lambda: peer)
        if not ready():
            assert self.failure is not None, "without one it waits"
            raise self.failure.for_rank(step.rank, str(step.effect))

    def _progress(self, ready: Callable[[], bool], peer: Callable[[], int]) -> None:
        """Wait until `ready()` or a failure. If no rank makes progress within the time-out, a rank
        has stalled, which is a failure."""
        start = time.monotonic()
        last_positions = list(self.at)
        while not ready() and self.failure is None:
            # The progress of any rank counts: where ranks work in turn, each may wait for longer
            # than the time-out.
            if self.at != last_positions:
                start = time.monotonic()
                last_positions = list(self.at)
            left = start + self.timeout - time.monotonic()
            if left <= 0:
                self.failure = self._stalled(peer())
                self._changed.notify_all()
            else:
                self._changed.wait(left)

    def _unfinished(self) -> int:
        """A rank that is not at its end."""
        return next((rank for rank, end in enumerate(self.ends) if self.at[rank] < end), 0)

    def instruction(self, rank: int) -> str:
        """The next effect of a rank."""
        effects = self.programs[rank].effects
        index = self.at[rank]
        if index < len(effects):
            return str(effects[index])
        return "its end"

    def _stalled(self, peer: int) -> Failure:
        rank = culprit(peer, lambda waiting: blockers(self.programs, self.at, waiting, _CAPACITY))
        return Failure(rank, self.instruction(rank), f"no progress for {self.timeout:g} s")


def refuse_unlike(rank: int, effect: Collective, there: Mapping[int, Collective]) -> None:
    """Raise ProgramError if another rank performs a different collective."""
    for other, collective in there.items():
        if collective != effect:
            raise ProgramError(
                f"rank {rank}: '{effect}'", f"rank {other} is at '{collective}'", _SAME
            )


def _has_room(queue: Queue) -> bool:
    return len(queue) < _CAPACITY


def _holds_none(queue: Queue, microbatch: int) -> bool:
    return all(sent != microbatch for sent, _ in queue)
