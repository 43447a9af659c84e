"""Requests, the state of each request, and the host's books: which requests wait or run, with their
rows and pages."""

import bisect
import hashlib
import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

from weft.arguments.checks import COUNT, Rule, check_values
from weft.batches.sampling import SamplingParams
from weft.batches.sampling_rows import features
from weft.errors import RequestError
from weft.ops.sampling.logits import PENALTIES
from weft.transforms.engine.requests.pages import Pages, hash_page, hash_pages
from weft.transforms.engine.requests.prompts import PromptContent, RequestExtras
from weft.transforms.engine.requests.step_time import StepTime

T = TypeVar("T")
_BUDGET_RULES: dict[str, Rule] = {
    **dict.fromkeys(("max_num_reqs", "max_pages", "num_cohorts"), COUNT),
    "query_lens": (
        lambda lens: 1 in lens and min(lens) >= 1,
        "whole numbers >= 1, with a 1: steps without drafts",
    ),
}


def tokens_rule(least: int) -> Rule:
    """The rule for the tokens of a batch: at least one for each request of a cohort."""
    return (
        lambda most: most >= least
    ), f"{least} or more, or fewer requests: a step may be of {least} requests"


@attrs.frozen
class Request:
    """A prompt to continue.

    Args:
        id: a name, unique among the requests that have not ended.
        prompt: token ids, at least one; EMBEDDED (-2) where `prompt_content` has an embedding.
        max_tokens: the most tokens to generate, at least one.
        sampling: how its tokens are chosen and what ends it (`weft.batches.sampling.for_request`).
        priority: lower numbers run first, FIFO among equal ones; higher numbers can starve.
        adapter: the slot of its LoRA adapter; -1: none.
        prompt_content: the prompt's embeddings, positions and per-token inputs; None: the prompt is
            token ids alone.
        is_masked: whether its next token depends on a mask, which the host computes from all
            earlier tokens and so has to have read.
        extras: its extra inputs for the model's stages; None: the model's defaults.
        is_captured: whether the stages capture values for each of its tokens.
        prefix_caching: how it uses leading tokens that are in the prefix cache
            (`caching_policy`).
        cache_salt: it shares pages only with requests of the same salt.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    priority: int = 0
    adapter: int = -1
    prompt_content: PromptContent | None = None
    is_masked: bool = False
    extras: RequestExtras | None = attrs.field(default=None, repr=False)
    is_captured: bool = attrs.field(default=False, repr=False)
    prefix_caching: str = attrs.field(default="full", repr=False)
    cache_salt: str = attrs.field(default="", repr=False)

    def __attrs_post_init__(self) -> None:
        sizes = {"tokens of the prompt": len(self.prompt), "max_tokens": self.max_tokens}
        check_values(f"Request(id={self.id!r}, ...)", dict.fromkeys(sizes, COUNT), sizes)

    def __str__(self) -> str:
        """One line, which must be equal on all ranks."""
        if self.prompt_content is None:
            contents = b""
        else:
            contents = self.prompt_content.content(0, len(self.prompt))
        # A digest, since ranks compare this line for each request, and a prompt can be long.
        digest = hashlib.blake2b(repr(self.prompt).encode() + contents, digest_size=6).hexdigest()
        more = f", adapter {self.adapter}" * (self.adapter >= 0) + ", masked" * self.is_masked
        more += "" if self.extras is None else f", extras {self.extras.digest.decode()}"
        more += f", cache_salt={self.cache_salt!r}" * bool(self.cache_salt)
        return (
            f"{self.id!r}, a prompt of {len(self.prompt)} tokens ({digest}),"
            f" max_tokens={self.max_tokens}, priority={self.priority}{more}, {self.sampling!r}"
        )


@attrs.define(eq=False)
class RequestState:
    """A request that has not ended, as the host knows it.

    The host launches steps before it has read the tokens of earlier ones. It does not know the
    unread tokens, nor, with drafts, their number: until it reads them, its counts are upper bounds.

    Args:
        request: what the user asked for.
        arrival: its place in the order of arrival.
        version: the version of the parameters with which its pages are computed.
        tokens: the prompt and the tokens read so far.
        row: its row of the device state; -1: it has none, and waits.
        cohort: the group of requests that it is stepped with.
        pages: its pages of the KV cache, in order.
        page_hashes: the content hashes of its full pages of known tokens.
        num_published: its leading pages that are published in the prefix cache.
        num_prefilled: its leading tokens that are in the KV cache once the launched chunks are
            done, including those that were found in the prefix cache.
        num_found: its leading tokens that were found in the prefix cache, but that it recomputes.
        num_unread: launched steps that sample for it and whose tokens the host has not read.
        max_unread: the most tokens that those steps sample.
        on_device: whether the device state holds the token that it continues from.
        last_job: the last job that samples for it.
        reason: why it ended: `stop`, `length`, `abort` or `error`; empty: it has not.
        leader: a request with the same prompt, whose pages it waits for.
        followers: the requests that wait for its pages.
        can_draft: whether a step may sample several of its tokens.
        max_len: the most tokens that it can have, its prompt included.
        stops: the tokens that end it.
    """

    request: Request
    arrival: int
    version: int
    tokens: list[int]
    row: int = -1
    cohort: int = -1
    pages: list[int] = attrs.field(factory=list)
    page_hashes: list[bytes] = attrs.field(factory=list)
    num_published: int = 0
    num_prefilled: int = 0
    num_found: int = 0
    num_unread: int = 0
    max_unread: int = 0
    on_device: bool = False
    last_job: int | None = None
    reason: str = ""
    leader: "RequestState | None" = attrs.field(default=None, repr=False)
    followers: list["RequestState"] = attrs.field(factory=list, repr=False)
    can_draft: bool = attrs.field(init=False)
    max_len: int = attrs.field(init=False)
    stops: Sequence[int] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.max_len = len(self.request.prompt) + self.request.max_tokens
        self.stops = self.request.sampling.stop_token_ids
        # Each token changes the penalties or the mask of the next one, so one step cannot sample
        # several.
        self.can_draft = not (features(self.request.sampling) & PENALTIES or self.request.is_masked)

    @property
    def turn(self) -> tuple[int, int]:
        """Sort key of the scheduling order: FIFO within a priority; lower numbers first."""
        return self.request.priority, self.arrival

    @property
    def length(self) -> int:
        """Upper bound of its tokens once the launched steps are done."""
        length = len(self.tokens) + self.max_unread
        return length if length < self.max_len else self.max_len  # twice as fast as `min`

    @property
    def num_computed(self) -> int:
        """Upper bound of its tokens in the KV cache once the launched steps are done. After the
        prompt these are all but the last one."""
        if self.on_device:
            return self.length - 1
        return self.num_prefilled

    @property
    def num_left(self) -> int:
        """Upper bound of the tokens still to be sampled after the launched steps."""
        return self.max_len - len(self.tokens) - self.num_unread

    @property
    def is_full(self) -> bool:
        """Whether the launched steps sample all of its remaining tokens."""
        return len(self.tokens) + self.num_unread >= self.max_len

    @property
    def max_useful(self) -> int:
        """The most tokens that its next step could sample."""
        if self.can_draft:
            return self.num_left
        return 1

    def hash_pages(self, page_size: int) -> None:
        """Hash all pages that known tokens fill."""
        first = len(self.page_hashes)
        last = len(self.tokens) // page_size
        # The fast path: without content besides ids, all pages are hashed in one loop.
        if first < last and self.request.prompt_content is None:
            if first:
                before = self.page_hashes[-1]
            else:
                before = salt(self.request, self.version)
            self.page_hashes += hash_pages(
                before, self.tokens[first * page_size : last * page_size], page_size
            )
        for index in range(len(self.page_hashes), last):
            self.page_hashes.append(self._hash_page(index, page_size))

    def hash_partial_page(self, page_size: int) -> bytes | None:
        """The content hash of its last, partly filled page, when all tokens are known. None if the
        page has fewer than two tokens: the last token is computed anyway, so a copy would save
        nothing."""
        full = len(self.tokens) // page_size
        if len(self.tokens) - full * page_size < 2:
            return None
        self.hash_pages(page_size)
        return self._hash_page(full, page_size)

    def _hash_page(self, index: int, page_size: int) -> bytes:
        """The content hash of a page of known tokens; the hash of the page before has to exist."""
        start = index * page_size
        request = self.request
        tokens = self.tokens[start : start + page_size]
        if index:
            before = self.page_hashes[index - 1]
        else:
            before = salt(request, self.version)
        if request.prompt_content is None:
            more = b""
        else:
            more = request.prompt_content.content(start, start + len(tokens))
        return hash_page(before + more, tokens)


def salt(request: Request, version: int) -> bytes:
    """The salt of every page's content hash: keys and values of equal tokens differ by the
    adapter's slot (-1: none), the version of the parameters, and the request's extras. A request
    may add a salt, so that others cannot infer its prompt from the time that a cache hit saves."""
    salt_bytes = b"version %d adapter %d" % (version, request.adapter)
    if request.extras is not None:
        salt_bytes += b" extras " + request.extras.digest
    # Hashed to a fixed length: what a page depends on is appended to the salt, and a client could
    # choose a text that looks like it.
    if request.cache_salt:
        salt_bytes += (
            b" salt "
            + hashlib.blake2b(request.cache_salt.encode(), digest_size=16).hexdigest().encode()
        )
    return salt_bytes


def sample_seeds(seed: int, n: int) -> list[int]:
    """A seed for each of the `n` completions of a request; the first completion has the request's
    seed."""
    return [seed, *(request_seed(seed, index) for index in range(1, n))]


def request_seed(seed: int, index: int) -> int:
    """The seed of request `index` of an engine with this seed."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    # 63 bits, so that the seed fits into an int64.
    return int.from_bytes(digest, "little") >> 1


@attrs.frozen
class Budget:
    """The limits that the scheduler observes.

    Args:
        max_num_reqs: rows of the device state, one for each running request.
        max_num_tokens: tokens of a batch, at least one for each request of a cohort.
        max_pages: pages per request: the width of the block table.
        num_cohorts: groups of requests that are stepped in turn; as many cohorts as stages keep a
            pipeline busy. Each cohort has at most its share of the rows.
        mixed: whether a batch may hold both decodes and prompts; if not, they get separate batches,
            and decodes stay uniform.
        query_lens: the numbers of tokens per request that a uniform decode may have, drafts
            included; 1 is one of them.
        step_time: the estimated time of a step with prompts, and its limit; None: no limit.

    Raises:
        RequestError: the numbers leave no room for a request.
    """

    max_num_reqs: int
    max_num_tokens: int
    max_pages: int
    num_cohorts: int = 1
    mixed: bool = False
    query_lens: tuple[int, ...] = (1,)
    step_time: StepTime | None = None

    def __attrs_post_init__(self) -> None:
        check_values(self, _BUDGET_RULES, {name: getattr(self, name) for name in _BUDGET_RULES})
        check_values(
            self,
            {"max_num_tokens": tokens_rule(self.cohort_size)},
            {"max_num_tokens": self.max_num_tokens},
        )

    @property
    def cohort_size(self) -> int:
        """The most requests of a cohort."""
        return -(-self.max_num_reqs // self.num_cohorts)


@attrs.define(eq=False)
class HostState:
    """The host's books, from which the scheduler decides each step.

    Args:
        pages: the pages of the KV cache.
        free_rows: rows that no request has.
        requests: all requests that have not ended, by id: waiting, running, or following a leader.
        waiting: requests without a row, in scheduling order.
        running: requests with a row, by id.
        cohorts: the running requests of each cohort, in scheduling order.
        unread: for each job whose tokens the host has not read, the requests for which it samples:
            place in the batch, request, and the most tokens that are sampled.
        row_jobs: for each row, the last job that returns something for it.
        num_ticks, num_jobs, num_arrivals, num_preempted: counts so far.
        num_found: tokens that were in the prefix cache when a request was admitted.
        version: the number of times that the parameters have changed.
    """

    pages: Pages
    free_rows: list[int]
    cohorts: tuple[list[RequestState], ...]
    requests: dict[str, RequestState] = attrs.field(factory=dict)
    waiting: list[RequestState] = attrs.field(factory=list)
    running: dict[str, RequestState] = attrs.field(factory=dict)
    unread: dict[int, tuple[tuple[int, RequestState, int], ...]] = attrs.field(factory=dict)
    row_jobs: dict[int, int] = attrs.field(factory=dict)
    num_ticks: int = 0
    num_jobs: int = 0
    num_arrivals: int = 0
    num_preempted: int = 0
    num_found: int = 0
    version: int = 0

    @classmethod
    def empty(cls, budget: Budget, num_pages: int, page_size: int) -> "HostState":
        """A state without requests."""
        cohorts = tuple(list[RequestState]() for _ in range(budget.num_cohorts))
        # The rows are in descending order, since `pop` takes from the end: row 0 is used first.
        return cls(
            Pages(num_pages, page_size), list(range(budget.max_num_reqs - 1, -1, -1)), cohorts
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request is left."""
        return not self.requests

    def find(self, request_id: str) -> RequestState | None:
        """The unfinished request of that id; None: there is none."""
        return self.requests.get(request_id)


def check_free(call: str, ids: Iterable[str], *open_ids: Container[str]) -> None:
    """Raise RequestError if an id belongs to a request that has not ended."""
    if any(id in each for id in ids for each in open_ids):
        raise RequestError(
            call, "a request of that id that has not ended", "another id, or abort it first"
        )


def find_open(call: str, entries: Mapping[str, T], id: object) -> T:
    """The entry of a request that has not ended.

    Raises:
        RequestError: there is no such request, or it has ended.
    """
    if isinstance(id, str) and id in entries:
        return entries[id]
    raise RequestError(
        call, "no request of that id that has not ended", "an id that add() returned"
    )


# The sort key of requests in scheduling order.
turn = operator.attrgetter("turn")


def enqueue(host: HostState, req: RequestState) -> None:
    """Put a request into the waiting queue."""
    bisect.insort(host.waiting, req, key=turn)


def requeue_followers(host: HostState, leader: RequestState) -> None:
    """Requeue the requests that were waiting for this request's pages."""
    for req in leader.followers:
        req.leader = None
        enqueue(host, req)
    leader.followers = []


def preempt(host: HostState, req: RequestState) -> None:
    """Take a request's row and pages away. It goes back to the queue, to restart with the tokens
    that it has."""
    free(host, req)
    enqueue(host, req)
    host.num_preempted += 1


def end(host: HostState, req: RequestState, reason: str) -> None:
    """End a request, whether it runs, waits or follows; tokens of launched steps are dropped when
    they are read."""
    del host.requests[req.request.id]
    if req.row >= 0:
        free(host, req)
    # Not in the queue: a follower waits in its leader's list.
    elif req.leader is not None:
        req.leader.followers.remove(req)
    else:
        del host.waiting[bisect.bisect_left(host.waiting, turn(req), key=turn)]
    # A leader that ends early never fills the pages that its followers wait for. Without this they
    # would wait forever.
    requeue_followers(host, req)
    req.reason = reason


def free(host: HostState, req: RequestState) -> None:
    """Take a request's row and pages."""
    del host.running[req.request.id]
    cohort = host.cohorts[req.cohort]
    del cohort[bisect.bisect_left(cohort, turn(req), key=turn)]
    host.pages.release(req.pages)
    # Launched steps may still write to the row. Work runs in order, so they are done before the
    # step that admits the next request into it.
    host.free_rows.append(req.row)
    req.row = req.cohort = -1
    req.pages = []
    # Nothing of it is in the cache now: an admission starts from what the prefix cache has.
    req.num_prefilled = 0
    req.num_found = 0
    req.num_published = 0
    req.on_device = False
