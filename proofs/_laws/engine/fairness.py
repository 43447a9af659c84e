"""L18: requests are served FIFO within a priority and lower priority numbers first, every request
ends, and steps keep their time limit. Checked on the host, for any tokens."""

import itertools
from collections.abc import Sequence

from weft.ops.requests import LAST_TOKEN
from weft.proofs._strategies.engine.traces import Trace
from weft.proofs.checks.difference import LawViolation
from weft.proofs.serving import happen, read_made_up
from weft.transforms.engine.requests.host_state import HostState, RequestState
from weft.transforms.engine.requests.step_time import StepTime
from weft.transforms.engine.scheduler import schedule
from weft.transforms.engine.steps.step import Work


def served_in_turn(trace: Trace) -> None:
    """L18: no request begins while one of a better priority, or an earlier one of the same
    priority, waits.

    The first of all requests that have begun gets a step at each turn of its cohort, so every
    request ends. If there is a time limit, a step with prompts and the step of decodes before it
    keep within the limit together, or have a single chunk of at most a page."""
    time = trace.budget.step_time
    host = HostState.empty(trace.budget, trace.num_pages, trace.page_size)
    last = max(arrival.tick for arrival in trace.arrivals)
    lengths = sum(len(a.request.prompt) + a.request.max_tokens for a in trace.arrivals)
    # As if each token took a step, for which it waits for its cohort's turn and for tokens to be
    # read.
    most = last + (lengths + len(trace.arrivals)) * (trace.budget.num_cohorts + trace.window)
    unread: list[list[Work]] = []
    for tick in itertools.count():
        host = happen(trace, host, tick)
        if host.is_idle and tick > last:
            return
        if tick > most:
            raise LawViolation(
                f"L18 everything ends: {sorted(host.requests)} are left after {most} steps"
            )
        before = list(host.waiting)
        first = min(host.running.values(), key=lambda r: r.turn, default=None)
        due = (
            first is not None
            and first.cohort == tick % trace.budget.num_cohorts
            and not first.is_full
        )
        host, works = schedule(host, trace.budget)
        _check_order(before, host)
        if (
            due
            and first is not None
            and all(first.request.id not in work.requests for work in works)
        ):
            raise LawViolation(
                f"L18 in turn: {first.request.id} is the first of all, and gets no step of its"
                " cohort's"
            )
        if time is not None:
            check_time(works, time, trace.page_size)
        unread.append(list(works))
        if len(unread) >= trace.window:
            host = read_made_up(host, [work for works in unread for work in works])
            unread = []


def check_time(works: Sequence[Work], time: StepTime, page_size: int) -> None:
    """Check the work of one turn: a step of prompts, and the step of decodes before it if these are
    separate.

    Raises:
        LawViolation: the work takes longer than the limit, and has more than a single chunk of at
            most a page.
    """
    took = 0.0
    chunks = list[int]()
    decodes = 0
    for work in works:
        pairs = 0
        reads = 0
        parts = work.token_ids or ((LAST_TOKEN,),) * len(work.rows)
        for ids, start in zip(parts, work.starts, strict=True):
            if ids == (LAST_TOKEN,):
                reads = reads + start
                decodes = decodes + 1
            else:
                chunks.append(len(ids))
                # Counted token by token, where the scheduler has a formula.
                pairs += sum(start + place + 1 for place in range(len(ids)))
        took += time.seconds(sum(map(len, parts)), pairs, reads)
    if took > time.limit and chunks and (len(chunks) > 1 or chunks[0] > page_size):
        problem = f"chunks of {chunks} tokens beside {decodes} decodes"
        raise LawViolation(
            f"L18 in time: {problem} take {took:g} s, and the limit is {time.limit:g}"
        )


def _check_order(before: list[RequestState], host: HostState) -> None:
    begun = [req for req in before if req.row >= 0]
    for req in before:
        late = next((other for other in begun if req.row < 0 and other.turn > req.turn), None)
        if late is not None:
            raise LawViolation(
                f"L18 in turn: {late.request.id} begins before {req.request.id}, which waits"
            )
