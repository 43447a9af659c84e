"""What the threads of one run share: the edges, where each rank is, and the first failure."""

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from weft.transforms.pipelines.checker import Edge, Step, puts, takes
from weft.transforms.pipelines.transports.failures import Failure, blockers, culprit
from weft.transforms.pipelines.transports.plan import Plan

CAPACITY = 2
"""Messages that an edge holds."""


Queue = deque[tuple[int, Any]]


def _has_room(queue: Queue) -> bool:
    return len(queue) < CAPACITY


def _holds_none(queue: Queue, microbatch: int) -> bool:
    return all(sent != microbatch for sent, _ in queue)


class Exchange:
    """What the threads of one run share: the edges, where each rank is, and the first failure.

    Args:
        plan: what is run.
        timeout: seconds without progress after which a rank has stalled.
        edges: with what was sent before this run and is received in it.
        first: the number, over all runs, of its first micro-batch.
    """

    def __init__(self, plan: Plan, timeout: float, edges: dict[Edge, Queue], first: int) -> None:
        self.programs = plan.programs
        self.num_ranks = self.left = len(plan.programs)
        self.timeout = timeout
        self.failure: Failure | None = None
        self.at, self.ends = map(list, zip(*map(plan.span, range(self.num_ranks)), strict=True))
        self._edges = edges
        self._first = first
        self._changed = threading.Condition()

    def put(self, step: Step, value: Any) -> None:
        for edge in puts(step, self.num_ranks):
            with self._changed:
                queue = self._edges.setdefault(edge, deque())
                if edge.carries == "stages":  # what returns may be received in a later run
                    self._wait(step, partial(_has_room, queue), edge.to)
                queue.append((self._first + step.effect.microbatch, value))
                self._changed.notify_all()

    def take(self, step: Step, copied: Callable[[Any], Any]) -> Any:
        edge = takes(step)
        assert edge is not None, "only an effect that takes is received"
        with self._changed:
            queue = self._edges.setdefault(edge, deque())
            self._wait(step, lambda: bool(queue), edge.source)
            value = copied(queue[0][1])
            queue.popleft()
            self._changed.notify_all()
        return value

    def drained(self, step: Step) -> None:
        """Wait until all that the rank sent of a micro-batch was received: of what stages send, for what returns is a
        copy (`Worker.keeps`), and may be received in a later run."""
        mb = self._first + step.effect.microbatch
        with self._changed:
            for edge in [e for e in self._edges if e.source == step.rank and e.carries == "stages"]:
                queue = self._edges[edge]
                self._wait(step, partial(_holds_none, queue, mb), edge.to)

    def fail(self, failure: Failure) -> None:
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def end(self) -> None:
        """A rank has come to its end, well or not."""
        with self._changed:
            self.left -= 1
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for all ranks; after a failure no longer than the time-out, for one may never end."""
        with self._changed:
            self._progress(lambda: self.left == 0, self._unfinished)
            if self.failure is not None:
                self._changed.wait_for(lambda: self.left == 0, self.timeout if self.failure.error is not None else 0.1)

    def _wait(self, step: Step, ready: Callable[[], bool], peer: int) -> None:
        """Wait until `ready()`, which `peer` sees to."""
        self._progress(ready, lambda: peer)
        if not ready():
            assert self.failure is not None, "without one it waits"
            raise self.failure.for_rank(step.rank, str(step.effect))

    def _progress(self, ready: Callable[[], bool], peer: Callable[[], int]) -> None:
        """Wait until `ready()`, or a failure: where no rank shows progress for the time-out, one has stalled."""
        start, seen = time.monotonic(), list(self.at)
        while not ready() and self.failure is None:
            if self.at != seen:
                start, seen = time.monotonic(), list(self.at)
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
        """What a rank is about to do."""
        effects, index = self.programs[rank].effects, self.at[rank]
        return str(effects[index]) if index < len(effects) else "its end"

    def _stalled(self, peer: int) -> Failure:
        rank = culprit(peer, lambda waiting: blockers(self.programs, self.at, waiting, CAPACITY))
        return Failure(rank, self.instruction(rank), f"no progress for {self.timeout:g} s")
