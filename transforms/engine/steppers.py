"""Steppers: what does the scheduler's work to the states, on one device or many."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from weft.batch import Batch
from weft.outputs import IntermediateTensors, Output
from weft.transforms.engine.work import Work, apply_edits
from weft.transforms.graphify import Graphified
from weft.transforms.pipeline import Pipelined
from weft.transforms.schedule import Job


class Stepper(Protocol):
    """Does work in order; nothing waits for the device."""

    state: Any
    graphs: Sequence[Graphified[..., Any]]
    """What replays, of what runs here; empty: all is eager."""

    def __call__(self, works: Sequence[Work]) -> Sequence[Output | None]:
        """What the last stage made of each; None where nothing returns."""

    def capture(self) -> None:
        """Capture all classes of the graphs' ladders now."""


class Stepped:
    """Does work by a step, one after the other.

    Args:
        step: `(params, state, batch) -> (state, Output)` over tuples with one entry for each stage that runs here.
        params, state: these entries.
        device: where batches go.
    """

    graphs: Sequence[Graphified[..., Any]]

    def __init__(
        self, step: Callable[[Any, Any, Any], tuple[Any, Any]], params: Any, state: Any, device: torch.device | str
    ) -> None:
        self.step = step
        self.graphs = (step,) if isinstance(step, Graphified) else ()
        self.params = params
        self.state = state
        self.device = device

    def __call__(self, works: Sequence[Work]) -> Sequence[Output | None]:
        outputs = []
        for work in works:
            state = tuple(apply_edits(state, work.edits) for state in self.state) if work.edits else self.state
            self.state, out = self.step(self.params, state, work.place(self.device).batch)
            outputs.append(out)
        return outputs

    def capture(self) -> None:
        for graph in self.graphs:
            graph.capture(self.params, self.state, Batch.decode([0], device=self.device))


class Streamed:
    """Does work by `pipelined.stream`, so that stages overlap: the works of a call are one program.

    Args:
        pipelined: of stages over work (`edited`), with `advance_work`.
        params, state: one entry for each stage that runs here.
        device: where batches go.
        graphs: of the stages that run here; none: they run eagerly.
        messages: for each, an example of what it receives, for a batch of one token.
    """

    def __init__(
        self,
        pipelined: Pipelined,
        params: Any,
        state: Any,
        device: torch.device | str = "cpu",
        graphs: Sequence[Graphified[..., Any]] = (),
        messages: Sequence[IntermediateTensors | None] = (),
    ) -> None:
        self.pipelined = pipelined
        self.graphs = graphs
        self.messages = messages
        self.params = params
        self.state = state
        self.device = device

    def __call__(self, works: Sequence[Work]) -> Sequence[Output | None]:
        if not works:
            return ()
        placed = [work.place(self.device) for work in works]
        self.state, outputs = self.pipelined.stream(self.params, self.state, placed, jobs_of(works))
        return outputs

    def capture(self) -> None:
        for graph, params, state, message in zip(self.graphs, self.params, self.state, self.messages, strict=False):
            graph.capture(params, state, Batch.decode([0], device=self.device), message)


def jobs_of(works: Sequence[Work]) -> list[Job]:
    """The jobs of works that are run together: none waits for one that was run before."""
    first = works[0].job
    return [Job(w.feeds, None if w.after is None or w.after < first else w.after - first) for w in works]
