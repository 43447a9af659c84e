"""Planted bugs of the scheduler and of the pages."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor

from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.sampling import SamplingParams, for_request
from weft.batches.state import State
from weft.errors import RequestError
from weft.proofs import serving
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.stages.adapters.slots import write_slot
from weft.stages.attention.rope import mrope_positions
from weft.transforms.engine import scheduler
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.requests.host_state import (
    Budget,
    HostState,
    Request,
    RequestState,
    end,
    preempt,
    salt,
)
from weft.transforms.engine.requests.masks import RequestMask, compute_mask
from weft.transforms.engine.requests.pages import Pages
from weft.transforms.engine.requests.prompts import PromptContent
from weft.transforms.engine.scheduler import observe
from weft.transforms.engine.steps.step import Work, batch_positions
from weft.transforms.engine.weights import Weights

_SCHEDULER = "weft.transforms.engine.scheduler"
_REQUESTS = "weft.transforms.engine.requests.host_state"
_PAGES = "weft.transforms.engine.requests.pages"
_STEP = "weft.transforms.engine.steps.step"
_INPUTS = "weft.transforms.engine.requests.inputs"


class _Trusting(Pages):
    """Shares pages found in the prefix cache, even those that are not retained."""

    def acquire(self, pages: Iterable[int]) -> None:
        for page in pages:
            # The right version raises a KeyError for a page that is neither held nor evictable. The
            # bugs below need it not to: a crash would be noticed by any test.
            self._evictable.pop(page, None)
            self._refcounts[page] += 1


class _OwnersForgotten(_Trusting):
    """Frees a page when the first of its holders releases it."""

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            # With one holder this is the right count, so that two requests must share a page, and
            # one of them must end while the other still reads it.
            self._refcounts[page] = 1
        super().release(list(dict.fromkeys(pages)))


def _without_waiting(host: HostState, req: RequestState, *args: Any) -> None:
    _START(host, req, *args)
    # The row's former request may have a job in flight, whose tokens go to the same row. Without
    # steps that run ahead there is none.
    req.last_job = None


_START = scheduler._admit


def _predicting() -> AbstractContextManager[Any]:
    """Every second rank ends a request one token early, without waiting for the last one."""
    hosts: list[HostState] = []

    def observed(host: HostState, job: int, token_ids: Sequence[Sequence[int]]) -> Any:
        # By identity: hosts are equal as long as they agree, which is what the law checks.
        if all(host is not other for other in hosts):
            hosts.append(host)
        host, got = observe(host, job, token_ids)
        for _, req, _ in got:
            left = len(req.request.prompt) + req.request.max_tokens - len(req.tokens)
            # The prediction is right, since the last token does end the request. What breaks is
            # that only some of the ranks make it, and their programs differ from then on.
            if hosts.index(host) % 2 and not req.reason and left == 1:
                end(host, req, "length")
        return host, got

    return mock.patch.object(serving, "observe", observed)


# The hash of the pages before is left out. A prompt shows it that begins with the tokens of a later
# page of another one, whose keys and values have another beginning in them.
def _by_tokens_alone(_: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _no_adapters(slots: Iterable[int]) -> int:
    return 0


# Prompts with embeddings have placeholders for tokens, which are the same for every image.
def _nothing_given(content: PromptContent, start: int, stop: int) -> bytes:
    return b""


def _in_order_without_delta(state: State, batch: Batch, resolved: ResolvedBatch) -> Tensor:
    # The prompt itself is right, so its first token is too. The tokens after it have positions that
    # an image has moved.
    zeros = torch.zeros_like(state.mrope_position_deltas)
    return mrope_positions(attrs.evolve(state, mrope_position_deltas=zeros), batch, resolved)


def _in_their_chunk(contents: Sequence[Any], starts: Sequence[int], *where: Any) -> Any:
    """Each chunk of a prompt gets the positions of the prompt's first tokens."""
    # A prompt that is read in one chunk starts at 0 anyway.
    return batch_positions(contents, [0] * len(starts), *where)


# The adapter computed the page's keys and values: the same tokens under another one share it here.
def _salt_of_none(request: Request, version: int) -> bytes:
    return salt(attrs.evolve(request, adapter=-1), version)


def _makes_room_from_the_first(host: HostState, req: RequestState, count: int) -> bool:
    while host.pages.num_free < count:
        # Every request still gets its tokens, as if alone. Only the order of service is wrong, and
        # only when pages run out.
        first = min(host.running.values(), key=lambda r: r.turn)
        preempt(host, first)
        if first is req:
            return False
    return True


def _found_before_computed(host: HostState, req: RequestState, *args: Any) -> None:
    """A prompt's last page is published as soon as the prompt is given its pages."""
    _START(host, req, *args)
    # Whoever finds the page copies it at once, before its owner has written it. If the owner's step
    # comes first, all is well.
    if (name := req.hash_partial_page(host.pages.page_size)) is not None:
        host.pages.publish_partial(req.pages[len(req.page_hashes)], name)


@contextmanager
def _latest_first() -> Iterator[None]:
    def turn(req: RequestState) -> tuple[int, int]:
        return req.request.priority, -req.arrival

    # The queue and the cohorts are both sorted by it: with one of them left, the order would be
    # mixed rather than reversed.
    with replace(_REQUESTS, "turn", turn)(), replace(_SCHEDULER, "turn", turn)():
        yield


class _PartsOutlive(_Trusting):
    """Finds a page by its old prefix after it was given to another request."""

    # The name outlives the content. It takes another request that gets the page, and a third one
    # that asks for the old beginning.
    def _unpublish_partial(self, page: int) -> None:
        pass


def _ending_late(host: HostState, req: RequestState, reason: str) -> None:
    # Late only where steps are under way that the host has not read. A host that waits for each
    # step sees every stop in time.
    if reason != "stop" or not req.num_unread:
        end(host, req, reason)


def _of_one_seed(seed: int, n: int) -> list[int]:
    # Each completion is right by itself: only several of one prompt show that they are the same.
    return [seed] * n


def _of_one_token_less(
    id: str, masked: RequestMask, said: Sequence[int], vocab_size: int
) -> bytes | None:
    # The first token has the right mask. A mask that allows the same tokens in every state stays
    # right.
    return compute_mask(id, masked, said[:-1], vocab_size)


def _of_the_one_before(work: Work, batch: Batch, device: Any) -> Batch:
    # One request with a mask, or several with equal ones, stay right.
    return _MASKED(attrs.evolve(work, masks=(*work.masks[-1:], *work.masks[:-1])), batch, device)


_MASKED = Work._masked


class _MasksStay(Engine):
    """A request without a mask gets the mask of the previous request in its row."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._executor: Any = _Staying(self._executor)


class _Staying:
    def __init__(self, stepper: Any) -> None:
        self._executor = stepper
        self._masks: dict[int, bytes | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def __call__(self, works: Sequence[Work]) -> Any:
        return self._executor([self._with_old(work) for work in works])

    def _with_old(self, work: Work) -> Work:
        if work.masks:
            self._masks |= {
                row: mask
                for row, mask in zip(work.rows, work.masks, strict=True)
                # Only requests that have one leave a mask behind: the next one in the row must be
                # without, and in a step in which another request has a mask.
                if mask is not None
            }
        masks = tuple(self._masks.get(row) for row in work.rows)
        if any(masks):
            return attrs.evolve(work, masks=masks)
        return work


def _free_to_run_ahead(*args: Any) -> Request:
    """A request with a mask does not wait until the host has read its tokens."""
    # A mask depends on the token before, which the device may have sampled before the host has read
    # it. Where the host does not run ahead, nothing changes.
    return attrs.evolve(Request(*args), is_masked=False)


def _without_version(request: Request, version: int) -> bytes:
    return salt(request, 0)


def _pages_are_kept(host: HostState) -> HostState:
    """Running requests keep their pages when the parameters change."""
    host.version += 1
    for req in host.requests.values():
        req.version = host.version
    return host


def _no_pairs(tokens: int, context: int) -> float:
    return 0.0


class _WithoutDecodes(scheduler._Room):
    def __init__(self, budget: Budget, decodes: Sequence[RequestState]) -> None:
        super().__init__(budget, ())
        # The tokens of the decodes still count, so that only their time is left out.
        self.tokens -= len(decodes) * budget.mixed


class _OfEachChunk(scheduler._Room):
    def take(self, *args: Any) -> int:
        # A step with a single chunk, or without a limit in seconds, is right.
        self._taken = 0
        self._pairs = 0.0
        return super().take(*args)


class _AllLeft(RequestMask):
    """Forgets the tokens that the request's parameters forbid."""

    def allowed_after(self, _: int) -> torch.Tensor:
        # All bits set: every token is allowed to follow.
        return torch.full_like(self.allowed, -1)


@contextmanager
def _some_token_where_none_is_left() -> Iterator[None]:
    """The token of a row without an allowed token is taken for a drawn one."""
    with (
        replace(_OUTPUTS, "RequestMask", _AllLeft)(),
        # NaN is still a fault, so that only a row whose tokens are all forbidden goes wrong.
        replace("weft.transforms.engine.steps.results", "is_fault", math.isnan)(),
    ):
        yield


@contextmanager
def _refused_where_it_is_admitted() -> Iterator[None]:
    """Parameters are not checked together with the model's end tokens before a step admits their
    request."""

    def unchecked(
        params: SamplingParams, eos_token_ids: Iterable[int], seed: int
    ) -> SamplingParams:
        # For this one call. The check where parameters are made stays: it does not know the end
        # tokens of the model, which may be all that was allowed.
        with mock.patch.object(SamplingParams, "_all_barred", return_value=None):
            return for_request(params, eos_token_ids, seed)

    without = replace(_INPUTS, "for_request", unchecked)()
    # A request's rows are written on trial when it is added, which is the other check: without it
    # the error comes in a step that also has requests of others.
    with without, replace(_INPUTS, "write_rows", lambda *args: None)():
        yield


@contextmanager
def _blames_value_errors_alone(call: str, instead: str) -> Iterator[None]:
    """Only the expected exceptions of a mask end its request; others end the step."""
    try:
        yield
    # An AssertionError of a grammar's own goes through, and ends the step for all its requests.
    except ValueError as error:
        raise RequestError(call, str(error), instead) from error


_WRITE = Weights.write


def _new_adapters_alone(weights: Weights, pairs: Any, adapters: Any) -> None:
    # By identity: one that is changed in place is the same adapter with other values.
    new = {id(adapter) for adapter in adapters.values()}

    def write_new(
        params: Any, config: Any, layout: Any, slot: int, adapter: Any, **options: Any
    ) -> None:
        if id(adapter) in new:
            write_slot(params, config, layout, slot, adapter, **options)

    with mock.patch("weft.transforms.engine.weights.write_slot", write_new):
        _WRITE(weights, pairs, adapters)


# Each bug has the law that is nearest to it: others may catch it too, later or by chance.
_SERVED, _AGREE, _ENGINE = find("L11", "stages"), find("L11", "hosts"), find("L11", "engine")
_ADAPTED, _EMBEDDED, _MASKS = (
    find("L11", "adapters"),
    find("L11", "embeddings"),
    find("L11", "masks"),
)
_FAULTS = find("L11", "faults")
_PAGED, _TURN, _AHEAD = find("L9", "pages"), find("L18", "turn"), find("L19")
_TIME = find("L18", "time")
_VERSIONS, _CHANGED = find("L23", "pages"), find("L23", "changed")
_ON_ENGINE = "weft.transforms.engine.engine"
_OUTPUTS = "weft.transforms.engine.outputs"
_LOADS = "weft.proofs._strategies.engine.engines"

SERVING = (
    Mutant(
        "a page is freed while another request holds it",
        _PAGED,
        replace(_REQUESTS, "Pages", _OwnersForgotten),
    ),
    Mutant(
        "a page is known by its tokens alone", _PAGED, replace(_PAGES, "_digest", _by_tokens_alone)
    ),
    Mutant(
        "a part of a page is found before it is computed",
        _PAGED,
        replace(_SCHEDULER, "_admit", _found_before_computed),
    ),
    Mutant(
        "a part of a page is found after it was given away",
        _PAGED,
        replace(_REQUESTS, "Pages", _PartsOutlive),
    ),
    Mutant("a finish is predicted on one rank", _AGREE, _predicting),
    Mutant(
        "a row is freed while a step for it is under way",
        _SERVED,
        replace(_SCHEDULER, "_admit", _without_waiting),
    ),
    Mutant(
        "a page is known without its adapter", _ADAPTED, replace(_REQUESTS, "salt", _salt_of_none)
    ),
    Mutant(
        "a step is not told of its adapters",
        _ADAPTED,
        replace(_SCHEDULER, "count_adapters", _no_adapters),
    ),
    Mutant(
        "a page is known without its embeddings and positions",
        _EMBEDDED,
        partial(mock.patch.object, PromptContent, "content", _nothing_given),
    ),
    Mutant(
        "generated tokens lack their mRoPE offset",
        _EMBEDDED,
        replace("weft.stages.decoder", "mrope_positions", _in_order_without_delta),
    ),
    Mutant(
        "a chunk has the positions of the first",
        _EMBEDDED,
        replace(_STEP, "batch_positions", _in_their_chunk),
    ),
    Mutant(
        "all completions of a prompt have one seed",
        _ENGINE,
        replace(_INPUTS, "sample_seeds", _of_one_seed),
    ),
    Mutant(
        "a mask does not see the last token",
        _MASKS,
        replace(_OUTPUTS, "compute_mask", _of_one_token_less),
    ),
    Mutant(
        "a request has the mask of the one before it",
        _MASKS,
        partial(mock.patch.object, Work, "_masked", _of_the_one_before),
    ),
    Mutant("a mask stays in the row of its request", _MASKS, replace(_LOADS, "Engine", _MasksStay)),
    Mutant(
        "a request with a mask runs ahead", _MASKS, replace(_INPUTS, "Request", _free_to_run_ahead)
    ),
    Mutant("a token is returned although none is allowed", _FAULTS, _some_token_where_none_is_left),
    Mutant(
        "parameters that forbid every token are found only in a step",
        _FAULTS,
        _refused_where_it_is_admitted,
    ),
    Mutant(
        "an unexpected error of a mask ends the step",
        _FAULTS,
        replace("weft.transforms.engine.requests.masks", "blamed", _blames_value_errors_alone),
    ),
    Mutant("the last request is admitted first", _TURN, _latest_first),
    Mutant(
        "what a prompt's tokens attend to is left out of a step's time",
        _TIME,
        replace(_SCHEDULER, "pairs_of", _no_pairs),
    ),
    Mutant(
        "decodes are left out of a step's time",
        _TIME,
        replace(_SCHEDULER, "_Room", _WithoutDecodes),
    ),
    Mutant("a step's time is its last chunk's", _TIME, replace(_SCHEDULER, "_Room", _OfEachChunk)),
    Mutant(
        "the first request is preempted",
        _TURN,
        replace(_SCHEDULER, "_preempt_for", _makes_room_from_the_first),
    ),
    Mutant(
        "a page is known without the parameters' version",
        _VERSIONS,
        replace(_REQUESTS, "salt", _without_version),
    ),
    Mutant(
        "requests under way keep their pages when the parameters change",
        _VERSIONS,
        replace("weft.proofs._laws.engine.pages", "outdate", _pages_are_kept),
    ),
    Mutant(
        "a change of the parameters that is not announced is not seen",
        _CHANGED,
        partial(mock.patch.object, Weights, "are_changed", False),
    ),
    Mutant(
        "an adapter that is changed in place stays in its slot as it was",
        _CHANGED,
        partial(mock.patch.object, Weights, "write", _new_adapters_alone),
    ),
    Mutant(
        "a stop is seen late where steps are under way",
        _AHEAD,
        replace(_SCHEDULER, "end", _ending_late),
    ),
)
