"""A trace served: the scheduler's work done by any pipeline, some ticks at a time."""

from collections.abc import Callable, Iterator, Sequence

import attrs

from weft.outputs import Output
from weft.proofs.strategies.traces import Trace
from weft.transforms.engine.host import HostState
from weft.transforms.engine.requests import Running
from weft.transforms.engine.scheduler import add, finish, observe, schedule
from weft.transforms.engine.work import Work

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
            host = happen(trace, host, tick)
            host, more = schedule(host, trace.budget)
            works += more
            tick += 1
        outputs = tuple(run(works))
        got: dict[Running, None] = {}
        for work, out in zip(works, outputs, strict=True):
            if work.feeds:
                assert out is not None, "what samples returns"
                host, some = observe(host, work.job, said(out))
                got |= dict.fromkeys(running for _, running, _ in some)
        yield Window(tuple(works), outputs, tuple(got))


def said(out: Output) -> list[list[int]]:
    """The tokens that each row of a batch got."""
    ids = out.token_ids.tolist()
    if out.num_tokens is None:
        return [[token] for token in ids]
    return [own[:count] for own, count in zip(ids, out.num_tokens.tolist(), strict=True)]


def happen(trace: Trace, host: HostState, tick: int) -> HostState:
    """What comes, and what is aborted, before a tick."""
    for arrival in trace.arrivals:
        if arrival.tick == tick:
            host = add(host, arrival.request, trace.budget, behind=arrival.behind)
        if arrival.aborted == tick and host.find(arrival.request.id) is not None:
            host = finish(host, arrival.request.id, "abort")
    return host
