"""Steppers: what does the scheduler's work to the states, on one device or many."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch

from weft.batch import Batch
from weft.outputs import Output
from weft.transforms.engine.work import PlacedWork, Work, apply_edits
from weft.transforms.graphify import Graphified
from weft.transforms.pipeline import Pipelined
from weft.transforms.schedule import Job

_MAX_PLACED = 16


class Stepper(Protocol):
    """Does work in order; nothing waits for the device."""

    state: Any

    @property
    def graphs(self) -> Sequence[Graphified[..., Any]]:
        """What was graphified and runs here."""

    def __call__(self, works: Sequence[Work]) -> Sequence[Output | None]:
        """What the last stage made of each; None where nothing returns."""

    def capture(self) -> None:
        """Capture all that the graphs' ladders hold, without a trace in the states."""


@attrs.frozen
class Placer:
    """Puts batches on a device; one that decodes the same rows as one before is that one again.

    Args:
        device: where they go.
    """

    device: torch.device | str
    _decodes: dict[tuple[tuple[int, ...], int, int], Batch] = attrs.field(factory=dict, init=False)

    def __call__(self, work: Work) -> PlacedWork:
        if work.token_ids:
            return work.place(self.device)
        key = work.rows, work.query_len, work.num_active_loras
        if (batch := self._decodes.get(key)) is None:
            if len(self._decodes) >= _MAX_PLACED:
                del self._decodes[next(iter(self._decodes))]
            batch = self._decodes[key] = work.place(self.device).batch
        return PlacedWork(batch, work.edits)


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

    def __call__(self, works: Sequence[Work]) -> Sequence[Output | None]:
        outputs = []
        for work in works:
            state = tuple(apply_edits(state, work.edits) for state in self.state) if work.edits else self.state
            self.state, out = self.step(self.params, state, self._place(work).batch)
            outputs.append(out)
        return outputs

    def capture(self) -> None:
        for graph in self.graphs:
            graph.capture(self.params, self.state, Batch.decode([0], device=self._place.device))


class Streamed:
    """Does work by `pipelined.stream`, so that stages overlap: the works of a call are one program.

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
        self._examples = tuple(example for _, example in graphs)
        self._place = Placer(device)

    def __call__(self, works: Sequence[Work]) -> Sequence[Output | None]:
        if not works:
            return ()
        placed = [self._place(work) for work in works]
        self.state, outputs = self.pipelined.stream(self.params, self.state, placed, jobs_of(works))
        return outputs

    def capture(self) -> None:
        batch = Batch.decode([0], device=self._place.device)
        for graph, *stage in zip(self.graphs, self.params, self.state, self._examples, strict=False):
            params, state, x = stage
            graph.capture(params, state, batch, x)


def jobs_of(works: Sequence[Work]) -> list[Job]:
    """The jobs of works that are run together: none waits for one that was run before."""
    first = works[0].job
    return [Job(w.feeds, None if w.after is None or w.after < first else w.after - first) for w in works]
