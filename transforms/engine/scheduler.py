"""The scheduler: decides on the host what every step computes, some steps before the host has read
the tokens that earlier steps sampled.

Each function takes the host's state as a donated argument and returns the next state. The result
depends only on the arguments: ranks that make the same calls with the same requests and tokens make
the same decisions.
"""

import bisect
from collections.abc import Container, Iterable, Sequence

import attrs

from weft.errors import RequestError
from weft.ops.requests import LAST_TOKEN
from weft.transforms.engine.requests.host_state import (
    Budget,
    HostState,
    Request,
    RequestState,
    check_free,
    end,
    enqueue,
    find_open,
    preempt,
    turn,
)
from weft.transforms.engine.requests.prefix_cache import (
    allocate_pages,
    publish_pages,
    publish_prompt,
)
from weft.transforms.engine.requests.prompts import PromptContent
from weft.transforms.engine.requests.step_time import pairs_of
from weft.transforms.engine.steps.step import Admission, Edits, Growth, Work


def add(host: HostState, request: Request, budget: Budget, behind: str | None = None) -> HostState:
    """Put a request into the waiting queue.

    Args:
        host: donated.
        request: what the user asked for.
        budget: the scheduler's limits.
        behind: the id of an unfinished request with the same prompt. This request waits until that
            prompt is in the cache, and shares its pages; only that one computes the prompt's
            logprobs.

    Raises:
        RequestError: the request's id is taken, or it could never be served.
    """
    call = f"engine.add(..., id={request.id!r})"
    length = len(request.prompt) + request.max_tokens
    check_free(call, [request.id], host.requests)
    needed = host.pages.pages_for(length)
    size = host.pages.page_size
    for most, what, limit in (
        (budget.max_pages, "a request may have", "max_model_len"),
        (host.pages.num_pages, "there are", "num_pages"),
    ):
        if needed > most:
            problem = (
                f"a prompt of {len(request.prompt)} tokens, and {request.max_tokens} to generate;"
                f" {what} "
            )
            problem += f"{most * size}, by EngineLimits.{limit}"
            raise RequestError(
                call, problem, f"a shorter prompt, fewer max_tokens, or a greater {limit}"
            )
    if behind is not None:
        request = attrs.evolve(
            request, sampling=attrs.evolve(request.sampling, prompt_logprobs=None)
        )
    req = RequestState(request, host.num_arrivals, host.version, [*request.prompt])
    if behind is None:
        leader = None
    else:
        leader = host.find(behind)
    host.requests[request.id] = req
    host.num_arrivals += 1
    if leader is None or leader.num_computed >= len(request.prompt):
        enqueue(host, req)
    else:
        leader.followers.append(req)
        req.leader = leader
    return host


def forget(host: HostState, request_ids: Sequence[str]) -> HostState:
    """Remove requests that `add` has entered since the last step, completely or in part.

    Args:
        host: donated.
        request_ids: all completions of one request.
    """
    for request_id in request_ids:
        host.requests.pop(request_id, None)
    host.waiting[:] = [req for req in host.waiting if req.request.id not in request_ids]
    return host


def finish(host: HostState, request_id: str, reason: str) -> HostState:
    """End a request; tokens of launched steps are dropped when they are read.

    Args:
        host: donated.
        request_id: the id of a request that has not ended.
        reason: `abort`, `stop`, or `error`.

    Raises:
        RequestError: there is no such request.
    """
    end(host, find_open(f"finish({request_id!r}, {reason!r})", host.requests, request_id), reason)
    return host


def outdate(host: HostState) -> HostState:
    """Note that the parameters have changed, so that no page computed before is read again. Running
    requests are preempted, and restart with the tokens that they have, including those of launched
    steps.

    Args:
        host: donated.
    """
    # The version salts every page's hash, so that pages of the old parameters match no request.
    host.version += 1
    for req in list(host.running.values()):
        preempt(host, req)
    for req in host.requests.values():
        req.version = host.version
        req.page_hashes = []
    return host


def observe(
    host: HostState, job: int, token_ids: Sequence[Sequence[int]], faults: Container[int] = ()
) -> tuple[HostState, list[tuple[int, RequestState, int]]]:
    """Record the tokens that a job sampled; jobs are read in order.

    Args:
        host: donated.
        job: its number.
        token_ids: the new tokens of each row of its batch.
        faults: the rows in which no further token could be drawn. Their requests end with the
            reason `error`, and the pages that they computed leave the prefix cache.

    Returns:
        The host's state, and the requests that got tokens or ended: place in the batch, request,
        and number of tokens up to its end. A request that ended has a `reason`.
    """
    got = []
    page_size = host.pages.page_size
    for index, req, most in host.unread.pop(job):
        req.num_unread -= 1
        req.max_unread -= most
        if req.reason:
            continue  # it ended while this step was in flight: drop these tokens
        count = _append_tokens(host, req, token_ids[index])
        # A cheap test first: most tokens fill no page.
        if len(req.tokens) >= (req.num_published + 1) * page_size and not req.reason:
            publish_pages(host, req)
        if index in faults and not req.reason:
            # Its keys and values may be NaN, which no other request may read.
            host.pages.unpublish(req.pages)
            end(host, req, "error")
        if count or req.reason:
            got.append((index, req, count))
    return host, got


def _append_tokens(host: HostState, req: RequestState, token_ids: Sequence[int]) -> int:
    """Append tokens up to the one that ends the request; returns how many were appended."""
    tokens = req.tokens
    stops = req.stops
    max_len = req.max_len
    for count, token in enumerate(token_ids, 1):
        tokens.append(token)
        if token in stops or len(tokens) == max_len:
            # Published first: `end` gives the pages up.
            publish_pages(host, req)
            end(host, req, "stop" if token in stops else "length")
            return count
    return len(token_ids)


def schedule(host: HostState, budget: Budget) -> tuple[HostState, tuple[Work, ...]]:
    """Schedule the next cohort's steps: its decodes, and as many prompt tokens as the budget
    allows.

    Lower priority numbers go first, FIFO among equal ones, so that a request with a higher number
    may wait without a bound. When pages run out, the last request in that order is preempted: it
    gives up its pages and starts again later. Its tokens are then recomputed, but none is sampled
    twice. A decode that shares a batch with prompts has no drafts.

    Args:
        host: donated.
        budget: the scheduler's limits.

    Returns:
        The host's state, and the work: no step, one, or two (decodes and prompts apart).
    """
    cohort = host.num_ticks % budget.num_cohorts
    host.num_ticks += 1
    query_len, decodes, growths = _schedule_decodes(host, budget, cohort)
    chunks, edits = _schedule_prefills(host, budget, cohort, _Room(budget, decodes))
    works = []
    if decodes and (not chunks or not budget.mixed):
        works.append(
            _make_work(host, Edits(growths=growths), [(req, 0) for req in decodes], query_len)
        )
        decodes = []
        growths = ()
    if chunks:
        scheduled = [*((req, 0) for req in decodes), *chunks]
        works.append(_make_work(host, attrs.evolve(edits, growths=growths), scheduled))
    for req, _ in chunks:
        # Before the step has computed them: steps run in order, so whoever finds these pages reads
        # them in a later step.
        publish_pages(host, req)
        publish_prompt(host, req)
    return host, tuple(works)


def _schedule_decodes(
    host: HostState, budget: Budget, cohort: int
) -> tuple[int, list[RequestState], tuple[Growth, ...]]:
    """The tokens per request of a cohort's next decode, its requests, and the pages that they
    get."""
    ready = [
        req
        for req in host.cohorts[cohort]
        # A masked request waits for its last token: the mask of the next one depends on it.
        if req.on_device and not req.is_full and not (req.num_unread and req.request.is_masked)
    ]
    query_len = choose_query_len(host, budget, ready)
    decodes = []
    growths = []
    page_size = host.pages.page_size
    for req in ready:
        if req.row < 0:
            continue  # preempted to free pages for another one
        # A cheap test before `_pages_needed`: most decodes fit in the pages that they have.
        reach = req.length - 1 + query_len
        if reach > len(req.pages) * page_size and (need := _pages_needed(host, req, query_len)):
            if not _preempt_for(host, req, need):
                continue
            growths.append(
                Growth(req.row, len(req.pages), tuple(more := host.pages.allocate(need)))
            )
            req.pages += more
        decodes.append(req)
    return query_len, decodes, tuple(growths)


def choose_query_len(host: HostState, budget: Budget, ready: Sequence[RequestState]) -> int:
    """The tokens per request of a decode, drafts included.

    It is the smallest captured length that holds all tokens that any request can use. If the step
    has no room for it, or too few pages are free, it is the next smaller length that fits: no
    request is preempted for drafts. It is 1 if any request has a mask, which is known only for the
    next token.
    """
    if max(budget.query_lens) == 1 or any(req.request.is_masked for req in ready):
        return 1
    useful = max((req.max_useful for req in ready), default=1)
    max_query_len = min(
        (n for n in budget.query_lens if n >= useful), default=max(budget.query_lens)
    )
    for query_len in sorted(budget.query_lens, reverse=True):
        fits = 1 < query_len <= max_query_len and query_len * len(ready) <= budget.max_num_tokens
        if (
            fits
            and sum(_pages_needed(host, req, query_len) for req in ready) <= host.pages.num_free
        ):
            return query_len
    return 1


def _pages_needed(host: HostState, req: RequestState, query_len: int) -> int:
    """Pages that a request lacks for a step of `query_len` tokens, however many drafts of the
    launched steps are accepted. The last token that it can have is never fed to the model, so it
    needs no slot."""
    reach = req.num_computed + query_len
    has = len(req.pages)
    if reach <= has * host.pages.page_size:
        return 0
    return max(host.pages.pages_for(min(reach, req.max_len - 1)) - has, 0)


def _preempt_for(host: HostState, req: RequestState, count: int) -> bool:
    """Preempt requests, the last in scheduling order first, until `count` pages are free; False if
    `req` itself was preempted."""
    while host.pages.num_free < count:
        last = max(host.running.values(), key=turn)
        preempt(host, last)
        if last is req:
            return False
    return True


class _Room:
    """The tokens, and with a time limit the seconds, that are left for prompts: in the same step as
    the decodes, or, if these are not mixed, in a step after theirs."""

    def __init__(self, budget: Budget, decodes: Sequence[RequestState]) -> None:
        self.tokens = budget.max_num_tokens
        self._time = budget.step_time
        self._taken = 0
        self._pairs = 0.0
        self._reads = 0
        if self._time is None:
            reads = 0
        else:
            reads = sum(req.num_computed for req in decodes)
        if budget.mixed:
            self.tokens = self.tokens - len(decodes)
            self._taken = len(decodes)
            self._reads = reads
        elif self._time is not None and decodes:
            before = self._time.seconds(len(decodes), reads=reads)
            self._time = attrs.evolve(self._time, limit=self._time.limit - before)

    def take(self, req: RequestState, page_size: int, is_first: bool) -> int:
        """The tokens of a request's next chunk. If the time limit cuts it, it is a number of whole
        pages. The step's first chunk has at least one page, so that prompts make progress beside
        any decodes."""
        count = num_requested = min(self.tokens, req.length - req.num_prefilled)
        if self._time is not None:
            most = self._time.most_tokens(
                num_requested, req.num_prefilled, self._taken, self._pairs, self._reads
            )
            if most < num_requested:
                count = min(num_requested, max(most // page_size, int(is_first)) * page_size)
            self._taken += count
            self._pairs += pairs_of(count, req.num_prefilled)
            page = self._time.most_tokens(page_size, 0, self._taken, self._pairs, self._reads)
            if count < num_requested or page < page_size:
                self.tokens = count  # no other whole page would fit
        self.tokens -= count
        return count


def _schedule_prefills(
    host: HostState, budget: Budget, cohort: int, room: _Room
) -> tuple[list[tuple[RequestState, int]], Edits]:
    """Chunks of prompts that fit into `room`: first of admitted requests, then of requests that are
    admitted here."""
    chunks: list[tuple[RequestState, int]] = []
    copies: list[tuple[int, int]] = []
    admissions: list[Admission] = []
    members = host.cohorts[cohort]
    for req in members:
        if not req.on_device and req.num_prefilled < req.length:
            _schedule_chunk(host, req, room, chunks)
    # Spread requests evenly over the cohorts, rounded up, rather than fill the first cohort.
    share = -(-(len(host.running) + len(host.waiting)) // budget.num_cohorts)
    while (
        room.tokens
        and host.waiting
        and host.free_rows
        and len(members) < min(share, budget.cohort_size)
    ):
        head = host.waiting[0]
        # A preempted request may have unread tokens, which its prompt would lack. Nobody overtakes
        # the head of the queue, so that large requests are not starved.
        if head.num_unread or not allocate_pages(host, head, copies):
            break
        _admit(host, head, cohort, admissions)
        _schedule_chunk(host, head, room, chunks)
    # `allocate_pages` held the sources so that no other admission evicted them; the copies run
    # before this step, and so before any later step could write on them.
    host.pages.release([source for source, _ in copies])
    return chunks, Edits(tuple(copies), tuple(admissions))


def _schedule_chunk(
    host: HostState, req: RequestState, room: _Room, chunks: list[tuple[RequestState, int]]
) -> None:
    if room.tokens and (count := room.take(req, host.pages.page_size, not chunks)):
        chunks.append((req, count))


def _admit(host: HostState, req: RequestState, cohort: int, admissions: list[Admission]) -> None:
    """Give the first waiting request a row, and a place in a cohort."""
    del host.waiting[0]
    req.row = host.free_rows.pop()
    req.cohort = cohort
    # A job of the row's former request may be in flight. Its tokens go to the same row, so the new
    # request runs after they have returned.
    req.last_job = host.row_jobs.get(req.row)
    host.running[req.request.id] = req
    bisect.insort(host.cohorts[cohort], req, key=turn)
    request = req.request
    admissions.append(
        Admission(
            req.row,
            tuple(req.pages),
            req.num_prefilled,
            request.sampling,
            request.prompt,
            tuple(req.tokens[len(request.prompt) :]),
            request.adapter,
            req.max_len,
            0 if request.prompt_content is None else request.prompt_content.delta,
            request.extras,
            req.num_found,
        )
    )


def _make_work(
    host: HostState, edits: Edits, scheduled: Sequence[tuple[RequestState, int]], query_len: int = 1
) -> Work:
    """A step over these requests. Each comes with its number of prompt tokens; 0 stands for a
    decode of its last token and drafts."""
    job = host.num_jobs
    uniform = not any(count for _, count in scheduled)
    host.num_jobs += 1
    requests = [req for req, _ in scheduled]
    if uniform:  # each continues from its last token, and samples
        starts = tuple([req.length - 1 for req in requests])
        samples = (True,) * len(requests)
    else:
        starts = tuple([req.num_computed for req in requests])
        ends = [start + (count or 1) for start, (_, count) in zip(starts, scheduled, strict=True)]
        samples = tuple([end == req.length for end, req in zip(ends, requests, strict=True)])
    work = Work(
        job,
        edits,
        tuple([req.request.id for req in requests]),
        tuple([req.row for req in requests]),
        () if uniform else tuple([_next_tokens(req, count) for req, count in scheduled]),
        samples,
        max([req.last_job for req in requests if req.last_job is not None], default=None),
        () if uniform else _targets(scheduled),
        starts,
        count_adapters([req.request.adapter for req in requests]),
        query_len,
        () if uniform else _contents(scheduled),
        captures=requests[0].request.is_captured,  # equal for all requests of a model
    )
    unread = []
    feeds = work.feeds
    row_jobs = host.row_jobs
    for index, ((req, count), sampled) in enumerate(zip(scheduled, samples, strict=True)):
        req.num_prefilled += count
        if sampled:
            most = query_len if req.can_draft else 1
            unread.append((index, req, most))
            req.on_device = True
            req.num_unread += 1
            req.max_unread += most
        if feeds:
            req.last_job = row_jobs[req.row] = job
    if feeds:
        host.unread[job] = tuple(unread)
    return work


def count_adapters(slots: Iterable[int]) -> int:
    """The number of different adapters; -1 stands for none."""
    return len({*slots} - {-1})


def _targets(scheduled: Sequence[tuple[RequestState, int]]) -> tuple[tuple[int, ...], ...]:
    if all(req.request.sampling.prompt_logprobs is None for req, _ in scheduled):
        return ()
    targets = []
    for req, count in scheduled:
        start = req.num_computed + 1
        length = max(count, 1)
        # Without logprobs, targets are 0: a prompt may hold EMBEDDED, which is not a token id.
        wants = req.request.sampling.prompt_logprobs is not None
        if wants:
            target_ids = req.request.prompt[start : start + length]
        else:
            target_ids = ()
        targets.append((*target_ids, *[0] * (length - len(target_ids))))
    return tuple(targets)


def _contents(scheduled: Sequence[tuple[RequestState, int]]) -> tuple[PromptContent | None, ...]:
    contents = tuple([req.request.prompt_content if count else None for req, count in scheduled])
    if contents.count(None) == len(contents):
        return ()
    return contents


def _next_tokens(req: RequestState, count: int) -> tuple[int, ...]:
    if count:
        return tuple(req.tokens[req.num_computed : req.num_computed + count])
    return (LAST_TOKEN,)
