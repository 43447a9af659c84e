"""The scheduler: what every step does, decided on the host, some steps ahead of what the device has said.

Pure, in the sense of `State`: each function takes the host's state and returns the next one, which owns what the old
one held. What comes out is a function of what went in alone: ranks that see the same requests and the same tokens, at
the same places, decide the same.
"""

import bisect
import operator
from collections.abc import Iterable, Iterator, Sequence

import attrs

from weft.batch import LAST_TOKEN
from weft.errors import RequestError
from weft.transforms.engine.pages import Pages
from weft.transforms.engine.requests import Request, Running
from weft.transforms.engine.work import Admission, Edits, Growth, Work


@attrs.frozen
class Budget:
    """What there is to give, and to whom.

    Args:
        max_num_reqs: rows of the state: requests under way at once.
        max_num_tokens: tokens of a batch, at least one for each request of a cohort.
        max_pages: pages of a request, as its block table holds.
        num_cohorts: groups of requests that are stepped in turn; a pipeline of as many stages is kept busy. Each has
            at most its share of the rows.
        mixed: whether a batch may hold decodes and prompts; else prompts go in a batch of their own, and decodes stay
            uniform.

    Raises:
        RequestError: numbers that leave no room for a request.
    """

    max_num_reqs: int
    max_num_tokens: int
    max_pages: int
    num_cohorts: int = 1
    mixed: bool = False

    def __attrs_post_init__(self) -> None:
        least = min(self.max_num_reqs, self.max_pages, self.num_cohorts)
        if least < 1 or self.max_num_tokens < self.cohort_size:
            instead = f"numbers from 1 on, and at least {max(self.cohort_size, 1)} tokens"
            raise RequestError(str(self), "no room for a step of all requests", instead)

    @property
    def cohort_size(self) -> int:
        """Requests of a cohort at most."""
        return -(-self.max_num_reqs // max(self.num_cohorts, 1))


@attrs.define(eq=False)
class HostState:
    """What the host knows.

    Args:
        pages: of the KV cache.
        free_rows: rows that no request has.
        requests: all that have not ended, by id: those that wait, those that run, and those that follow another.
        waiting: requests without a row, in the order of their turns.
        running: requests with one, by id.
        cohorts: the same, of each cohort in the order of their turns.
        unread: for each job whose tokens the host has not read, who sampled one, in the order of its rows.
        row_jobs: the last job that returns something for a row.
        num_ticks, num_jobs, num_arrivals, num_preempted: how many there were.
        num_found: tokens that were in the cache when a request began.
    """

    pages: Pages
    free_rows: list[int]
    cohorts: tuple[list[Running], ...]
    requests: dict[str, Running] = attrs.field(factory=dict)
    waiting: list[Running] = attrs.field(factory=list)
    running: dict[str, Running] = attrs.field(factory=dict)
    unread: dict[int, tuple[tuple[int, Running], ...]] = attrs.field(factory=dict)
    row_jobs: dict[int, int] = attrs.field(factory=dict)
    num_ticks: int = 0
    num_jobs: int = 0
    num_arrivals: int = 0
    num_preempted: int = 0
    num_found: int = 0

    @classmethod
    def empty(cls, budget: Budget, num_pages: int, page_size: int) -> "HostState":
        """Nothing under way."""
        cohorts = tuple(list[Running]() for _ in range(budget.num_cohorts))
        return cls(Pages(num_pages, page_size), list(range(budget.max_num_reqs - 1, -1, -1)), cohorts)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.requests

    def find(self, request_id: str) -> Running | None:
        """The request of that id that has not ended."""
        return self.requests.get(request_id)


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
    call, length = f"add(request {request.id!r})", len(request.prompt) + request.max_tokens
    if host.find(request.id) is not None:
        raise RequestError(call, "a request of that id that has not ended", "another id, or abort it first")
    if not request.prompt or request.max_tokens < 1:
        seen = f"{len(request.prompt)} prompt tokens, max_tokens={request.max_tokens}"
        raise RequestError(call, seen, "at least one of each")
    most = min(budget.max_pages, host.pages.num_pages)
    if host.pages.pages_for(length) > most:
        seen = f"{length} tokens with those to generate, where {most} pages hold {most * host.pages.page_size}"
        raise RequestError(call, seen, "a shorter prompt, fewer max_tokens, or more pages")
    running = Running(request, host.num_arrivals, [*request.prompt])
    leader = None if behind is None else host.find(behind)
    host.requests[request.id] = running
    host.num_arrivals += 1
    if leader is None or leader.computed >= len(request.prompt):
        _wait(host, running)
    else:
        leader.followers.append(running)
        running.leader = leader
    return host


def finish(host: HostState, request_id: str, reason: str) -> HostState:
    """End a request; what is under way for it is dropped when it is read.

    Args:
        host: taken.
        request_id: of a request that has not ended.
        reason: `abort`, `stop`, or `error`: then what it computed is found by no other request.

    Raises:
        RequestError: there is no such request.
    """
    found = host.find(request_id)
    if found is None:
        call = f"finish({request_id!r}, {reason!r})"
        raise RequestError(call, "no request of that id that has not ended", "an id that was added")
    if reason == "error":
        host.pages.forget(found.pages)
    _end(host, found, reason)
    return host


def observe(host: HostState, job: int, token_ids: Sequence[int]) -> tuple[HostState, list[tuple[int, Running]]]:
    """Read what a job sampled; jobs are read in order.

    Args:
        host: taken.
        job: its number.
        token_ids: of each row of its batch.

    Returns:
        The host's state, and the requests that got a token, each with its place in the batch; those that it ended have
        a `reason`.
    """
    got = []
    for index, running in host.unread.pop(job):
        if running.reason:
            continue  # it ended before: this token was sampled ahead of knowing
        token = token_ids[index]
        running.tokens.append(token)
        _keep_pages(host, running)
        if token in running.request.sampling.stop_token_ids:
            _end(host, running, "stop")
        elif len(running.tokens) == len(running.request.prompt) + running.request.max_tokens:
            _end(host, running, "length")
        got.append((index, running))
    return host, got


def schedule(host: HostState, budget: Budget) -> tuple[HostState, tuple[Work, ...]]:
    """The next steps: of the next cohort, its decodes, and as many tokens of prompts as the budget allows.

    Who came first, of the least priority, goes first. When pages run out, the last in that order gives up its own, and
    begins anew later: its tokens are computed again, and none is sampled twice.
    """
    cohort = host.num_ticks % budget.num_cohorts
    host.num_ticks += 1
    growths = dict(_decodes(host, cohort))
    decodes = list(growths)
    grown = tuple(growth for growth in growths.values() if growth is not None)
    room = budget.max_num_tokens - (len(decodes) if budget.mixed else 0)
    chunks, edits = _prompts(host, budget, cohort, room)
    works = []
    if decodes and (not chunks or not budget.mixed):
        works.append(_work(host, Edits(growths=grown), [(r, 0) for r in decodes]))
        decodes, grown = [], ()
    if chunks:
        works.append(_work(host, attrs.evolve(edits, growths=grown), [*((r, 0) for r in decodes), *chunks]))
    for running, _ in chunks:
        _keep_pages(host, running)
        _lead(host, running)
    return host, tuple(works)


def _decodes(host: HostState, cohort: int) -> Iterator[tuple[Running, Growth | None]]:
    """The requests of a cohort that go on from their last tokens, with the page that each needs."""
    for running in tuple(host.cohorts[cohort]):
        if running.row < 0 or running.is_full or not running.decodes:
            continue
        start = len(running.pages)
        if running.computed < start * host.pages.page_size:
            yield running, None
        elif _make_room(host, running):
            more = host.pages.take(1)
            running.pages += more
            yield running, Growth(running.row, start, tuple(more))


def _make_room(host: HostState, running: Running) -> bool:
    """Free a page for a request, from the last in turn; False if that is itself."""
    while not host.pages.num_free:
        last = max(host.running.values(), key=_key)
        _preempt(host, last)
        if last is running:
            return False
    return True


def _prompts(host: HostState, budget: Budget, cohort: int, room: int) -> tuple[list[tuple[Running, int]], Edits]:
    """Chunks of prompts of at most `room` tokens: of those that were begun, and then of those that wait."""
    chunks: list[tuple[Running, int]] = []
    copies: list[tuple[int, int]] = []
    admitted: list[Admission] = []
    mine = host.cohorts[cohort]
    for running in mine:
        if not running.decodes and running.computed < running.length:
            room = _take_chunk(running, room, chunks)
    share = -(-(len(host.running) + len(host.waiting)) // budget.num_cohorts)
    while room and host.waiting and host.free_rows and len(mine) < min(share, budget.cohort_size):
        head = host.waiting[0]
        if head.num_unread or not _give_pages(host, head, copies):
            break
        _start(host, head, cohort, admitted)
        room = _take_chunk(head, room, chunks)
    host.pages.release([source for source, _ in copies])
    return chunks, Edits(tuple(copies), tuple(admitted))


def _take_chunk(running: Running, room: int, chunks: list[tuple[Running, int]]) -> int:
    taken = min(room, running.length - running.computed)
    if taken:
        chunks.append((running, taken))
    return room - taken


def _give_pages(host: HostState, running: Running, copies: list[tuple[int, int]]) -> bool:
    """Give a request the pages of its tokens, those first that are there already; False if there are too few.

    At least its last token is computed: where all are there, the last page is copied, to be written on.
    """
    pages, length = host.pages, running.length
    shared, source = _find_pages(pages, running)
    held = [*shared, *([] if source is None else [source])]
    need = pages.pages_for(length) - len(shared)
    if need > pages.count_free(held):
        return False
    pages.share(held)
    running.pages = [*shared, *pages.take(need)]
    running.computed = len(shared) * pages.page_size
    if source is not None:
        copies.append((source, running.pages[len(shared)]))
        running.computed = length - 1
    host.num_found += running.computed
    return True


def _find_pages(pages: Pages, running: Running) -> tuple[list[int], int | None]:
    """The pages of a request's tokens that are there to be shared, and one to be copied behind them."""
    running.name_pages(pages.page_size)
    if running.request.sampling.prompt_logprobs is not None:  # then every token of it is computed
        return [], None
    shared = pages.find(running.hashes)
    if len(shared) * pages.page_size == running.length:
        return shared[:-1], shared[-1]
    name = running.name_part(pages.page_size) if len(shared) == len(running.hashes) else None
    return shared, None if name is None else pages.find_part(name)


def _start(host: HostState, running: Running, cohort: int, admitted: list[Admission]) -> None:
    del host.waiting[0]
    running.row, running.cohort = host.free_rows.pop(), cohort
    running.last_job = host.row_jobs.get(running.row)
    host.running[running.request.id] = running
    bisect.insort(host.cohorts[cohort], running, key=_key)
    request = running.request
    generated = tuple(running.tokens[len(request.prompt) :])
    placed = (running.row, tuple(running.pages), running.computed)
    admitted.append(Admission(*placed, request.sampling, request.prompt, generated, request.adapter))


def _work(host: HostState, edits: Edits, parts: Sequence[tuple[Running, int]]) -> Work:
    """A step: of each request so many tokens of its prompt, or 0: the one sampled last."""
    job, uniform = host.num_jobs, not any(count for _, count in parts)
    host.num_jobs += 1
    work = Work(
        job,
        edits,
        tuple(running.request.id for running, _ in parts),
        tuple(running.row for running, _ in parts),
        () if uniform else tuple(_next_tokens(running, count) for running, count in parts),
        tuple(running.computed + max(count, 1) == running.length for running, count in parts),
        max((r.last_job for r, _ in parts if r.last_job is not None), default=None),
        _targets(parts),
        tuple(running.computed for running, _ in parts),
        count_adapters(running.request.adapter for running, _ in parts),
    )
    for (running, count), sampled in zip(parts, work.samples, strict=True):
        running.computed += max(count, 1)
        running.sampled += sampled
        running.on_device |= sampled
        if work.feeds:
            running.last_job = host.row_jobs[running.row] = job
    if work.feeds:
        host.unread[job] = tuple((i, r) for i, (r, _) in enumerate(parts) if work.samples[i])
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
        own = running.request.prompt[start : start + length]
        found.append((*own, *[0] * (length - len(own))))
    return tuple(found)


def _next_tokens(running: Running, count: int) -> tuple[int, ...]:
    return tuple(running.tokens[running.computed : running.computed + count]) if count else (LAST_TOKEN,)


def _keep_pages(host: HostState, running: Running) -> None:
    """Have pages found by their content that are full of tokens which are known, and computed by steps before."""
    running.name_pages(host.pages.page_size)
    full = min(len(running.tokens), running.computed) // host.pages.page_size
    for index in range(running.kept, full):
        host.pages.keep(running.pages[index], running.hashes[index])
    running.kept = max(running.kept, full)


def _lead(host: HostState, running: Running) -> None:
    """Once all that a request knows is in the cache, have its last page found too, and let begin who follows it."""
    if running.computed < len(running.tokens):
        return
    if (name := running.name_part(host.pages.page_size)) is not None:
        host.pages.keep_part(running.pages[len(running.hashes)], name)
    _release_followers(host, running)


def _release_followers(host: HostState, leader: Running) -> None:
    for running in leader.followers:
        running.leader = None
        _wait(host, running)
    leader.followers = []


def _preempt(host: HostState, running: Running) -> None:
    """Take a request's row and pages; it waits to begin anew with the tokens that it has."""
    _free(host, running)
    _wait(host, running)
    host.num_preempted += 1


def _end(host: HostState, running: Running, reason: str) -> None:
    del host.requests[running.request.id]
    if running.row >= 0:
        _free(host, running)
    elif running.leader is not None:
        running.leader.followers.remove(running)
    else:
        del host.waiting[bisect.bisect_left(host.waiting, _key(running), key=_key)]
    _release_followers(host, running)
    running.reason = reason


def _free(host: HostState, running: Running) -> None:
    del host.running[running.request.id]
    mine = host.cohorts[running.cohort]
    del mine[bisect.bisect_left(mine, _key(running), key=_key)]
    host.pages.release(running.pages)
    host.free_rows.append(running.row)
    running.row = running.cohort = -1
    running.pages, running.computed, running.kept, running.on_device = [], 0, 0, False


def _wait(host: HostState, running: Running) -> None:
    bisect.insort(host.waiting, running, key=_key)


_key = operator.attrgetter("key")
