"""`serve`: serves a drawn trace of requests, with any pipeline doing the scheduler's work."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs

from weft.batches.outputs import Output
from weft.proofs._strategies.engine.traces import Trace
from weft.proofs.checks.difference import LawViolation
from weft.transforms.engine.requests.host_state import HostState, RequestState
from weft.transforms.engine.scheduler import add, finish, observe, schedule
from weft.transforms.engine.steps.results import FinishedWork
from weft.transforms.engine.steps.step import Work

# The number of token ids to make up tokens from; every drawn model has at least as many.
_VOCABULARY = 11
# After this many steps an engine is assumed to run forever; drawn loads take about a hundred.
MOST_STEPS = 3000


class Run(Protocol):
    """Executes work in order: a stepper, or a substitute for one."""

    def __call__(self, works: Sequence[Work]) -> Sequence[FinishedWork]:
        """Launch works, and return those that are finished by now."""

    def flush(self) -> Sequence[FinishedWork]:
        """Finish the works that are still under way, and return them."""


@attrs.frozen(eq=False)
class Window:
    """The works of some ticks.

    Args:
        works: the works that were launched.
        done: the works that were finished by the end of these ticks.
        got: the requests that got tokens.
        settled: whether no work is under way.
    """

    works: tuple[Work, ...]
    done: tuple[FinishedWork, ...]
    got: tuple[RequestState, ...]
    settled: bool


def serve(trace: Trace, run: Run) -> Iterator[Window]:
    """Serve a trace to its end; `run` gets the works of `trace.window` ticks at a time.

    If the trace is read late, works under way are waited for only when there is nothing to launch.
    """
    host = HostState.empty(trace.budget, trace.num_pages, trace.page_size)
    tick = 0
    last = max(a.tick for a in trace.arrivals)
    while tick <= last or not host.is_idle:
        check_ends("L11 served", tick - last)
        works: list[Work] = []
        for _ in range(trace.window):
            host = happen(trace, host, tick)
            host, more = schedule(host, trace.budget)
            works += more
            tick += 1
        done = [*run(works)]
        # Without works to launch, a late reader must wait, or the trace would never end.
        if settled := not (trace.reads_late and works):
            done += run.flush()
        host, got = _observed(host, done)
        yield Window(tuple(works), tuple(done), got, settled)
    if rest := run.flush():  # works of requests that had already ended
        _, got = _observed(host, rest)
        yield Window((), tuple(rest), got, True)


def check_ends(law: str, steps: int) -> None:
    """Raise LawViolation if there were more than `MOST_STEPS` steps since the last request came."""
    if steps > MOST_STEPS:
        raise LawViolation(
            f"{law}: requests that had not ended {MOST_STEPS} steps after the last one came"
        )


def _observed(
    host: HostState, done: Sequence[FinishedWork]
) -> tuple[HostState, tuple[RequestState, ...]]:
    got: dict[RequestState, None] = {}
    for work, out in done:
        if work.feeds:
            assert out is not None, "what samples returns"
            host, some = observe(host, work.job, said(out))
            got |= dict.fromkeys(req for _, req, _ in some)
    return host, tuple(got)


def said(out: Output) -> list[list[int]]:
    """The new tokens of each row of a batch."""
    ids = out.token_ids.tolist()
    if out.num_tokens is None:
        return [[token] for token in ids]
    return [row[:count] for row, count in zip(ids, out.num_tokens.tolist(), strict=True)]


def happen(trace: Trace, host: HostState, tick: int) -> HostState:
    """Add the requests that arrive before a tick, and finish those that are aborted."""
    for arrival in trace.arrivals:
        if arrival.tick == tick:
            host = add(host, arrival.request, trace.budget, behind=arrival.behind)
        # It may have ended by itself before.
        if arrival.aborted == tick and host.find(arrival.request.id) is not None:
            host = finish(host, arrival.request.id, "abort")
    return host


def read_made_up(host: HostState, works: Sequence[Work]) -> HostState:
    """Let the host read works that no model ran, with tokens computed from the job and the row."""
    for work in works:
        if work.feeds:
            # Any function of job and row would do, if ranks that schedule for themselves compute
            # the same.
            host, _ = observe(
                host, work.job, [[(7 * work.job + row) % _VOCABULARY] for row in work.rows]
            )
    return host
