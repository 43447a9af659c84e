"""The scheduler: what every step does, decided on the host, some steps ahead of what the device has said.

Pure, in the sense of `State`: each function takes the host's state and returns the next one, which owns what the old
one held. What comes out is a function of what went in alone: ranks that see the same requests and the same tokens, at
the same places, decide the same.
"""

from collections.abc import Container, Iterable, Sequence

import attrs

from weft.batch import LAST_TOKEN
from weft.errors import RequestError
from weft.transforms.engine.admission import take_prompts
from weft.transforms.engine.decodes import take_decodes
from weft.transforms.engine.host import Budget, HostState, end, keep_pages, lead, preempt, wait
from weft.transforms.engine.prompts import Given
from weft.transforms.engine.requests import Request, Running
from weft.transforms.engine.work import Edits, Work


def add(host: HostState, request: Request, budget: Budget, behind: str | None = None) -> HostState:
    """A request arrives.

    Args:
        host: taken.
        request: what is asked.
        budget: what there is to give.
        behind: the id of a request under way with the same prompt: this one waits until that prompt is in the cache,
            and shares its pages.

    Raises:
        RequestError: its id is taken, or it could never be served.
    """
    call, length = f"engine.add(..., id={request.id!r})", len(request.prompt) + request.max_tokens
    if host.find(request.id) is not None:
        raise RequestError(call, "a request of that id that has not ended", "another id, or abort it first")
    if not request.prompt or request.max_tokens < 1:
        seen = f"{len(request.prompt)} prompt tokens, max_tokens={request.max_tokens}"
        raise RequestError(call, seen, "at least one of each")
    needed, size = host.pages.pages_for(length), host.pages.page_size
    for most, what, limit in (
        (budget.max_pages, "a request may have", "max_model_len"),
        (host.pages.num_pages, "there are", "num_pages"),
    ):
        if needed > most:
            seen = f"a prompt of {len(request.prompt)} tokens, and {request.max_tokens} to generate; {what} "
            seen += f"{most * size}, by EngineLimits.{limit}"
            raise RequestError(call, seen, f"a shorter prompt, fewer max_tokens, or a greater {limit}")
    running = Running(request, host.num_arrivals, host.version, [*request.prompt])
    leader = None if behind is None else host.find(behind)
    host.requests[request.id] = running
    host.num_arrivals += 1
    if leader is None or leader.computed >= len(request.prompt):
        wait(host, running)
    else:
        leader.followers.append(running)
        running.leader = leader
    return host


def finish(host: HostState, request_id: str, reason: str) -> HostState:
    """End a request; what is under way for it is dropped when it is read.

    Args:
        host: taken.
        request_id: of a request that has not ended.
        reason: `abort`, `stop`, or `error`.

    Raises:
        RequestError: there is no such request.
    """
    found = host.find(request_id)
    if found is None:
        call = f"finish({request_id!r}, {reason!r})"
        raise RequestError(call, "no request of that id that has not ended", "an id that was added")
    end(host, found, reason)
    return host


def outdate(host: HostState) -> HostState:
    """The parameters have changed: no page that was computed before is read again. Requests that have pages begin anew
    with the tokens that they have, those of steps under way included.

    Args:
        host: taken.
    """
    host.version += 1
    for running in list(host.running.values()):
        preempt(host, running)
    for running in host.requests.values():
        running.version, running.hashes = host.version, []
    return host


def observe(
    host: HostState, job: int, token_ids: Sequence[Sequence[int]], faults: Container[int] = ()
) -> tuple[HostState, list[tuple[int, Running, int]]]:
    """Read what a job sampled; jobs are read in order.

    Args:
        host: taken.
        job: its number.
        token_ids: of each row of its batch, those that are its next ones.
        faults: the rows in which no token could be drawn behind these: their requests end with the reason `error`, and
            what they computed is found by no other one.

    Returns:
        The host's state, and the requests that got tokens or ended, each with its place in the batch and how many it
        got: none behind its end. Those that ended have a `reason`.
    """
    got = []
    for index, running, most in host.unread.pop(job):
        running.num_unread -= 1
        running.most_unread -= most
        if running.reason:
            continue  # it ended before: these tokens were sampled ahead of knowing
        count = _read(host, running, token_ids[index])
        if index in faults and not running.reason:
            host.pages.forget(running.pages)
            end(host, running, "error")
        if count or running.reason:
            got.append((index, running, count))
    return host, got


def _read(host: HostState, running: Running, token_ids: Sequence[int]) -> int:
    """A request gets tokens; returns how many, up to one that ends it."""
    for count, token in enumerate(token_ids, 1):
        running.tokens.append(token)
        stops = token in running.request.sampling.stop_token_ids
        if stops or len(running.tokens) == running.limit:
            keep_pages(host, running)
            end(host, running, "stop" if stops else "length")
            return count
    keep_pages(host, running)
    return len(token_ids)


def schedule(host: HostState, budget: Budget) -> tuple[HostState, tuple[Work, ...]]:
    """The next steps: of the next cohort, its decodes, and as many tokens of prompts as the budget allows.

    FIFO within a priority; lower numbers first, so that a request of a higher number may wait without a bound. When
    pages run out, the last in that order gives up its own, and begins anew later: its tokens are computed again, and
    none is sampled twice. A decode that shares a batch with prompts has no drafts.

    Args:
        host: taken.
        budget: what there is to give.

    Returns:
        The host's state, and the work: none, one step, or two (decodes and prompts apart).
    """
    cohort = host.num_ticks % budget.num_cohorts
    host.num_ticks += 1
    query_len, decodes, grown = take_decodes(host, budget, cohort)
    room = budget.max_num_tokens - (len(decodes) if budget.mixed else 0)
    chunks, edits = take_prompts(host, budget, cohort, room)
    works = []
    if decodes and (not chunks or not budget.mixed):
        works.append(_work(host, Edits(growths=grown), [(r, 0) for r in decodes], query_len))
        decodes, grown = [], ()
    if chunks:
        works.append(_work(host, attrs.evolve(edits, growths=grown), [*((r, 0) for r in decodes), *chunks]))
    for running, _ in chunks:
        keep_pages(host, running)
        lead(host, running)
    return host, tuple(works)


def _work(host: HostState, edits: Edits, parts: Sequence[tuple[Running, int]], query_len: int = 1) -> Work:
    """A step: of each request so many tokens of its prompt, or 0: the one sampled last, and drafts."""
    job, uniform = host.num_jobs, not any(count for _, count in parts)
    host.num_jobs += 1
    starts = tuple([running.computed for running, _ in parts])
    ends = [start + (count or 1) for start, (_, count) in zip(starts, parts, strict=True)]
    work = Work(
        job,
        edits,
        tuple([running.request.id for running, _ in parts]),
        tuple([running.row for running, _ in parts]),
        () if uniform else tuple([_next_tokens(running, count) for running, count in parts]),
        tuple([end == running.length for end, (running, _) in zip(ends, parts, strict=True)]),
        max([r.last_job for r, _ in parts if r.last_job is not None], default=None),
        _targets(parts),
        starts,
        count_adapters([running.request.adapter for running, _ in parts]),
        query_len,
        () if uniform else _given(parts),
    )
    unread, feeds = [], work.feeds
    for index, ((running, count), sampled) in enumerate(zip(parts, work.samples, strict=True)):
        running.filled += count
        if sampled:
            most = running.most(query_len)
            unread.append((index, running, most))
            running.on_device = True
            running.num_unread += 1
            running.most_unread += most
        if feeds:
            running.last_job = host.row_jobs[running.row] = job
    if feeds:
        host.unread[job] = tuple(unread)
    return work


def count_adapters(slots: Iterable[int]) -> int:
    """How many different adapters there are; -1 is none."""
    return len({*slots} - {-1})


def _targets(parts: Sequence[tuple[Running, int]]) -> tuple[tuple[int, ...], ...]:
    if all(running.request.sampling.prompt_logprobs is None for running, _ in parts):
        return ()
    found = []
    for running, count in parts:
        start, length = running.computed + 1, max(count, 1)
        told = running.request.sampling.prompt_logprobs is not None  # another's prompt may hold what is no token
        own = running.request.prompt[start : start + length] if told else ()
        found.append((*own, *[0] * (length - len(own))))
    return tuple(found)


def _given(parts: Sequence[tuple[Running, int]]) -> tuple[Given | None, ...]:
    found = tuple([running.request.given if count else None for running, count in parts])
    return () if found.count(None) == len(found) else found


def _next_tokens(running: Running, count: int) -> tuple[int, ...]:
    return tuple(running.tokens[running.computed : running.computed + count]) if count else (LAST_TOKEN,)
