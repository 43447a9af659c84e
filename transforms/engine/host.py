"""What the host knows of the requests, and how it keeps the books: who waits, who runs, who holds which page."""

import bisect
import operator

import attrs

from weft.errors import RequestError
from weft.transforms.engine.pages import Pages
from weft.transforms.engine.requests import Running


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
        query_lens: how many tokens of each request a uniform decode may have, its drafts included: 1, and others.

    Raises:
        RequestError: numbers that leave no room for a request.
    """

    max_num_reqs: int
    max_num_tokens: int
    max_pages: int
    num_cohorts: int = 1
    mixed: bool = False
    query_lens: tuple[int, ...] = (1,)

    def __attrs_post_init__(self) -> None:
        least = min(self.max_num_reqs, self.max_pages, self.num_cohorts, *self.query_lens)
        if 1 not in self.query_lens:
            raise RequestError(str(self), f"query_lens={self.query_lens}", "1 among them: not every step has drafts")
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
        unread: for each job whose tokens the host has not read, who samples: its place in the batch, and how
            many tokens at most.
        row_jobs: the last job that returns something for a row.
        num_ticks, num_jobs, num_arrivals, num_preempted: how many there were.
        num_found: tokens that were in the cache when a request began.
        version: of the parameters: how often they changed.
    """

    pages: Pages
    free_rows: list[int]
    cohorts: tuple[list[Running], ...]
    requests: dict[str, Running] = attrs.field(factory=dict)
    waiting: list[Running] = attrs.field(factory=list)
    running: dict[str, Running] = attrs.field(factory=dict)
    unread: dict[int, tuple[tuple[int, Running, int], ...]] = attrs.field(factory=dict)
    row_jobs: dict[int, int] = attrs.field(factory=dict)
    num_ticks: int = 0
    num_jobs: int = 0
    num_arrivals: int = 0
    num_preempted: int = 0
    num_found: int = 0
    version: int = 0

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


def wait(host: HostState, running: Running) -> None:
    """A request waits for its turn."""
    bisect.insort(host.waiting, running, key=key)


key = operator.attrgetter("key")
"""Of a request: whose turn it is."""


def keep_pages(host: HostState, running: Running) -> None:
    """Have pages found by their content that are full of tokens which are known, and computed by steps before."""
    if len(running.tokens) < (running.kept + 1) * host.pages.page_size:
        return  # as after most tokens: no page more is full
    running.name_pages(host.pages.page_size)
    full = min(len(running.tokens), running.computed) // host.pages.page_size
    for index in range(running.kept, full):
        host.pages.keep(running.pages[index], running.hashes[index])
    running.kept = max(running.kept, full)


def lead(host: HostState, running: Running) -> None:
    """Once all that a request knows is in the cache, have its last page found too, and let begin who follows it."""
    if running.computed < len(running.tokens):
        return
    if (name := running.name_part(host.pages.page_size)) is not None:
        host.pages.keep_part(running.pages[len(running.hashes)], name)
    release_followers(host, running)


def release_followers(host: HostState, leader: Running) -> None:
    """Let wait for their own turn who waited for a request's pages."""
    for running in leader.followers:
        running.leader = None
        wait(host, running)
    leader.followers = []


def preempt(host: HostState, running: Running) -> None:
    """Take a request's row and pages; it waits to begin anew with the tokens that it has."""
    free(host, running)
    wait(host, running)
    host.num_preempted += 1


def end(host: HostState, running: Running, reason: str) -> None:
    """A request ends, wherever it is; what is under way for it is dropped when it is read."""
    del host.requests[running.request.id]
    if running.row >= 0:
        free(host, running)
    elif running.leader is not None:
        running.leader.followers.remove(running)
    else:
        del host.waiting[bisect.bisect_left(host.waiting, key(running), key=key)]
    release_followers(host, running)
    running.reason = reason


def free(host: HostState, running: Running) -> None:
    """Take a request's row and pages."""
    del host.running[running.request.id]
    mine = host.cohorts[running.cohort]
    del mine[bisect.bisect_left(mine, key(running), key=key)]
    host.pages.release(running.pages)
    host.free_rows.append(running.row)
    running.row = running.cohort = -1
    running.pages, running.filled, running.kept, running.on_device = [], 0, 0, False
