"""A trace served: the scheduler's work done by any pipeline, some ticks at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from weft.outputs import Output
from weft.proofs.strategies.traces import Trace
from weft.transforms.engine.requests import Running
from weft.transforms.engine.scheduler import HostState, abort, add, observe, schedule
from weft.transforms.engine.work import Work
from weft.transforms.pipeline import Pipelined
from weft.transforms.schedule import Job

Run = Callable[[Sequence[Work]], Sequence[Output | None]]
"""Does work, in order; returns what the last stage made of each, where tokens return."""


@attrs.frozen(eq=False)
class Window:
    """Some ticks' work, what was returned, and the requests that got tokens."""

    works: tuple[Work, ...]
    outputs: tuple[Output | None, ...]
    got: tuple[Running, ...]


def serve(trace: Trace, run: Run) -> Iterator[Window]:
    """Serve a trace to its end; `run` does the work of `trace.window` ticks at once."""
    host = HostState.empty(trace.budget, trace.num_pages, trace.page_size)
    tick, last = 0, max(a.tick for a in trace.arrivals)
    while tick <= last or not host.is_idle:
        works: list[Work] = []
        for _ in range(trace.window):
            host = _happen(trace, host, tick)
            host, more = schedule(host, trace.budget)
            works += more
            tick += 1
        outputs = tuple(run(works))
        got: dict[Running, None] = {}
        for work, out in zip(works, outputs, strict=True):
            if work.feeds:
                assert out is not None, "what samples returns"
                host, some = observe(host, work.job, out.token_ids.tolist())
                got |= dict.fromkeys(some)
        yield Window(tuple(works), outputs, tuple(got))


def _happen(trace: Trace, host: HostState, tick: int) -> HostState:
    for arrival in trace.arrivals:
        if arrival.tick == tick:
            host = add(host, arrival.request, trace.budget)
        if arrival.aborted == tick and host.find(arrival.request.id) is not None:
            host = abort(host, arrival.request.id)
    return host


def jobs_of(works: Sequence[Work]) -> list[Job]:
    """The jobs of works that are run together: none waits for one that was run before."""
    first = works[0].job
    return [Job(w.feeds, None if w.after is None or w.after < first else w.after - first) for w in works]


class Streamed:
    """Does work by `pipelined.stream`, each window as one program.

    Args:
        pipelined: of stages over work (`edited`), with `advance_work`.
        params, state: one entry for each stage that runs here.
        device: where batches go.
    """

    def __init__(self, pipelined: Pipelined, params: Any, state: Any, device: torch.device | str = "cpu") -> None:
        self.pipelined = pipelined
        self.params = params
        self.state = state
        self.device = device

    def __call__(self, works: Sequence[Work]) -> Sequence[Output | None]:
        if not works:
            return ()
        placed = [work.place(self.device) for work in works]
        self.state, outputs = self.pipelined.stream(self.params, self.state, placed, jobs_of(works))
        return outputs
