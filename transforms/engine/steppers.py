"""Steppers: what does the scheduler's work to the states, on one device or many."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

from weft.batch import Batch
from weft.outputs import Output
from weft.transforms.engine.work import PlacedWork, Work, apply_edits
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.memory import MemoryEstimate
from weft.transforms.pipelines.pipeline import Pipelined
from weft.transforms.pipelines.schedule import Job
from weft.transforms.pipelines.session import Session

_MAX_PLACED = 16

Done = tuple[Work, Output | None]
"""Work that is over, and what the last stage made of it; None where nothing returns."""


class Stepper(Protocol):
    """Does work in order; nothing waits for the device."""

    state: Any  # one entry for each stage that runs here, once nothing is under way

    @property
    def graphs(self) -> Sequence[Graphified[..., Any]]:
        """What was graphified and runs here."""

    @property
    def num_under_way(self) -> int:
        """Works that were launched, and have not been returned as done."""

    def __call__(self, works: Sequence[Work]) -> Sequence[Done]:
        """Launch works; what is done by now, in order: of a pipeline, works of calls before."""

    def flush(self) -> Sequence[Done]:
        """What is still under way, done."""

    def received(self, done: Sequence[Done], /) -> Callable[[], None]:
        """A function to call before a host reads what is done: it raises where that was computed of what others were
        not asked for."""

    def capture(self) -> None:
        """Capture all that the graphs' ladders hold, without a trace in the states."""

    def memory_estimates(self) -> list[MemoryEstimate]:
        """What that will take, of each of the graphs."""


@attrs.frozen
class Placer:
    """Puts batches on a device; one that decodes the same rows as one before is that one again.

    Args:
        device: where they go.
        first: whether the first stage runs here.
    """

    device: torch.device | str
    first: bool = True
    _decodes: dict[tuple[tuple[int, ...], int, int], Batch] = attrs.field(factory=dict, init=False)

    def __call__(self, work: Work) -> PlacedWork:
        if work.token_ids or work.masks:
            return work.place(self.device, self.first)
        key = work.rows, work.query_len, work.num_active_loras
        if (batch := self._decodes.get(key)) is None:
            if len(self._decodes) >= _MAX_PLACED:
                del self._decodes[next(iter(self._decodes))]
            batch = self._decodes[key] = work.place(self.device).batch
        return PlacedWork(batch, work.edits)


Example = tuple[Graphified[..., Any], tuple[Any, ...]]
"""A graphified function, and arguments for it."""


def capture_all(examples: Sequence[Example]) -> None:
    """Capture the ladders of these functions, their kernels compiled before."""
    for graph, example in examples:
        graph.compile_ahead(*example)
        graph.capture(*example)


def estimate_all(examples: Sequence[Example]) -> list[MemoryEstimate]:
    """What their graphs will take, their kernels compiled before."""
    estimates = []
    for graph, example in examples:
        graph.compile_ahead(*example)
        estimates.append(graph.memory_estimate(*example))
    return estimates


class Stepped:
    """Does work by a step, one after the other.

    Args:
        step: `(params, state, batch) -> (state, Output)` over tuples with one entry for each stage that runs here.
        params, state: these entries.
        device: where batches go.
    """

    def __init__(
        self, step: Callable[[Any, Any, Any], tuple[Any, Any]], params: Any, state: Any, device: torch.device | str
    ) -> None:
        self.step = step
        self.params = params
        self.state = state
        self.graphs: tuple[Graphified[..., Any], ...] = (step,) if isinstance(step, Graphified) else ()
        self._place = Placer(device)

    @property
    def num_under_way(self) -> int:
        return 0

    def __call__(self, works: Sequence[Work]) -> Sequence[Done]:
        done = []
        for work in works:
            state = tuple(apply_edits(state, work.edits) for state in self.state) if work.edits else self.state
            self.state, out = self.step(self.params, state, self._place(work).batch)
            done.append((work, out))
        return done

    def flush(self) -> Sequence[Done]:
        return ()

    def received(self, _: Sequence[Done], /) -> Callable[[], None]:
        return lambda: None

    def capture(self) -> None:
        capture_all(self._examples())

    def memory_estimates(self) -> list[MemoryEstimate]:
        return estimate_all(self._examples())

    def _examples(self) -> list[Example]:
        example = self.params, self.state, Batch.decode([0], device=self._place.device)
        return [(graph, example) for graph in self.graphs]


class Streamed:
    """Does work by a session of a pipeline: stages overlap, in a call and from one to the next.

    Args:
        pipelined: of stages over work (`edited`), with `advance_work`.
        params, state: one entry for each stage that runs here.
        device: where batches go.
        graphs: of these stages, as far as they are graphified, each with an example of what it gets from the one
            before.
    """

    def __init__(
        self,
        pipelined: Pipelined,
        params: Any,
        state: Any,
        device: torch.device | str = "cpu",
        graphs: Sequence[tuple[Graphified[..., Any], Any]] = (),
    ) -> None:
        self.pipelined = pipelined
        self.params = params
        self.state = state
        self.graphs = tuple(graph for graph, _ in graphs)
        self._given = tuple(x for _, x in graphs)
        self._place = Placer(device, 0 in pipelined.transport.ranks(len(pipelined.stages)))
        self._session: Session | None = None
        self._first = 0
        self._under_way: deque[Work] = deque()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def __call__(self, works: Sequence[Work]) -> Sequence[Done]:
        if not works:
            return ()
        if self._session is None:
            self._session, self._first = self.pipelined.session(self.params, self.state), works[0].job
        self._under_way += works
        jobs = [Job(work.feeds, self._after(work)) for work in works]
        return self._taken(self._session.submit([self._place(work) for work in works], jobs))

    def flush(self) -> Sequence[Done]:
        if self._session is None:
            return ()
        self.state, outputs = self._session.close()
        self._session = None
        return self._taken(outputs)

    def received(self, done: Sequence[Done], /) -> Callable[[], None]:
        last = None if self._session is None else done[-1][0].job - self._first
        return self.pipelined.transport.received(last)

    def _after(self, work: Work) -> int | None:
        """The job that it waits for, in the session; what came before has returned."""
        return None if work.after is None or work.after < self._first else work.after - self._first

    def _taken(self, outputs: Sequence[tuple[int, Any]]) -> Sequence[Done]:
        return [(self._under_way.popleft(), out) for _, out in outputs]

    def capture(self) -> None:
        capture_all(self._examples())

    def memory_estimates(self) -> list[MemoryEstimate]:
        return estimate_all(self._examples())

    def _examples(self) -> list[Example]:
        batch = Batch.decode([0], device=self._place.device)
        stages = zip(self.graphs, self.params, self.state, self._given, strict=False)
        return [(graph, (params, state, batch, x)) for graph, params, state, x in stages]
