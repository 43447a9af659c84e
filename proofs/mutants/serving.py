"""Bugs of the scheduler and of the pages."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor

from weft.batch import Batch, ResolvedBatch
from weft.errors import RequestError
from weft.proofs import serving
from weft.proofs.mutants.planted import Mutant, replace
from weft.proofs.suite import find
from weft.sampling import SamplingParams
from weft.stages.rope import mrope_positions
from weft.state import State
from weft.transforms.engine import admission
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.host import HostState, end, preempt
from weft.transforms.engine.intake import check_sampling
from weft.transforms.engine.masks import Masked, read_mask
from weft.transforms.engine.pages import Pages, hash_page
from weft.transforms.engine.prompts import Given, place_positions
from weft.transforms.engine.requests import Request, Running, salt
from weft.transforms.engine.scheduler import observe
from weft.transforms.engine.weights import Weights
from weft.transforms.engine.work import Work

_SCHEDULER, _REQUESTS = "weft.transforms.engine.scheduler", "weft.transforms.engine.requests"
_HOST, _ADMISSION = "weft.transforms.engine.host", "weft.transforms.engine.admission"
_DECODES, _WORK = "weft.transforms.engine.decodes", "weft.transforms.engine.work"


class _Trusting(Pages):
    """Shares what was found, kept or not."""

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._kept.pop(page, None)
            self._count[page] += 1


class _OwnersForgotten(_Trusting):
    """Frees a page when the first of those that hold it goes."""

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._count[page] = 1
        super().release(list(dict.fromkeys(pages)))


def _without_waiting(host: HostState, running: Running, *args: Any) -> None:
    _START(host, running, *args)
    running.last_job = None


_START = admission._start


def _predicting() -> AbstractContextManager[Any]:
    """Every second rank ends a request one token early, taking the last one for granted."""
    hosts: list[HostState] = []

    def observed(host: HostState, job: int, token_ids: Sequence[Sequence[int]]) -> Any:
        if all(host is not seen for seen in hosts):
            hosts.append(host)
        host, got = observe(host, job, token_ids)
        for _, running, _ in got:
            left = len(running.request.prompt) + running.request.max_tokens - len(running.tokens)
            if hosts.index(host) % 2 and not running.reason and left == 1:
                end(host, running, "length")
        return host, got

    return mock.patch.object(serving, "observe", observed)


def _by_tokens_alone(_: bytes, token_ids: Sequence[int]) -> bytes:
    return hash_page(b"", token_ids)


def _no_adapters(slots: Iterable[int]) -> int:
    return 0


def _nothing_given(given: Given, start: int, stop: int) -> bytes:
    return b""


def _in_order_without_delta(state: State, batch: Batch, resolved: ResolvedBatch) -> Tensor:
    zeros = torch.zeros_like(state.mrope_position_deltas)
    return mrope_positions(attrs.evolve(state, mrope_position_deltas=zeros), batch, resolved)


def _in_their_chunk(given: Sequence[Any], starts: Sequence[int], *where: Any) -> Any:
    """A chunk of a prompt takes the positions of the prompt's first tokens."""
    return place_positions(given, [0] * len(starts), *where)


def _salt_of_none(adapter: int, version: int) -> bytes:
    return salt(-1, version)


def _makes_room_from_the_first(host: HostState, running: Running, count: int) -> bool:
    while host.pages.num_free < count:
        first = min(host.running.values(), key=lambda r: r.key)
        preempt(host, first)
        if first is running:
            return False
    return True


def _found_before_computed(host: HostState, running: Running, *args: Any) -> None:
    """A prompt's last page is found as soon as the prompt is given its pages."""
    _START(host, running, *args)
    if (name := running.name_part(host.pages.page_size)) is not None:
        host.pages.keep_part(running.pages[len(running.hashes)], name)


@contextmanager
def _latest_first() -> Iterator[None]:
    def key(running: Running) -> tuple[int, int]:
        return running.request.priority, -running.arrival

    with replace(_HOST, "key", key)(), replace(_ADMISSION, "key", key)(), replace(_DECODES, "key", key)():
        yield


class _PartsOutlive(_Trusting):
    """Finds what a page began with after it went to somebody else."""

    def _forget_part(self, page: int) -> None:
        pass


def _ending_late(host: HostState, running: Running, reason: str) -> None:
    if reason != "stop" or not running.num_unread:
        end(host, running, reason)


def _of_one_seed(seed: int, n: int) -> list[int]:
    return [seed] * n


def _of_one_token_less(id: str, masked: Masked, said: Sequence[int], vocab_size: int) -> bytes | None:
    return read_mask(id, masked, said[:-1], vocab_size)


def _of_the_one_before(work: Work, batch: Batch, device: Any) -> Batch:
    return _MASKED(attrs.evolve(work, masks=(*work.masks[-1:], *work.masks[:-1])), batch, device)


_MASKED = Work._masked


class _MasksStay(Engine):
    """A request without a mask has that of the one which had its row before."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stepper: Any = _Staying(self._stepper)


class _Staying:
    def __init__(self, stepper: Any) -> None:
        self._stepper = stepper
        self._masks: dict[int, bytes | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stepper, name)

    def __call__(self, works: Sequence[Work]) -> Any:
        return self._stepper([self._with_old(work) for work in works])

    def _with_old(self, work: Work) -> Work:
        if work.masks:
            self._masks |= {row: mask for row, mask in zip(work.rows, work.masks, strict=True) if mask is not None}
        masks = tuple(self._masks.get(row) for row in work.rows)
        return attrs.evolve(work, masks=masks) if any(masks) else work


def _free_to_run_ahead(*args: Any) -> Request:
    """A request with a mask does not wait until what it said has been read."""
    return attrs.evolve(Request(*args), is_masked=False)


def _without_version(adapter: int, version: int) -> bytes:
    return salt(adapter, 0)


def _pages_are_kept(host: HostState) -> HostState:
    """Requests that have begun go on with their pages."""
    host.version += 1
    for running in host.requests.values():
        running.version = host.version
    return host


class _AllLeft(Masked):
    """Forgets what the parameters of its request bar."""

    def left_behind(self, _: int) -> torch.Tensor:
        return torch.full_like(self.left, -1)


@contextmanager
def _some_token_where_none_is_left() -> Iterator[None]:
    """The token of a row without one is taken for what was drawn."""
    with replace(_SAMPLES, "Masked", _AllLeft)(), replace("weft.transforms.engine.faults", "is_fault", math.isnan)():
        yield


@contextmanager
def _refused_where_it_is_admitted() -> Iterator[None]:
    """Parameters are not checked with the model's own ends before a step admits their request."""

    def without_ends(call: str, model: Any, params: SamplingParams, num_logprobs: int) -> None:
        if params.seed is None:  # those that the user gave
            check_sampling(call, model, params, num_logprobs)

    with replace(_INTAKE, "check_sampling", without_ends)(), replace(_INTAKE, "write_rows", lambda *args: None)():
        yield


@contextmanager
def _blames_value_errors_alone(call: str, instead: str) -> Iterator[None]:
    """Of what a mask may raise, only what was thought of ends its request."""
    try:
        yield
    except ValueError as error:
        raise RequestError(call, str(error), instead) from error


_SERVED, _AGREE, _ENGINE = find("L11", "stages"), find("L11", "hosts"), find("L11", "engine")
_ADAPTED, _EMBEDDED, _MASKS = find("L11", "adapters"), find("L11", "embeddings"), find("L11", "masks")
_FAULTS = find("L11", "faults")
_PAGED, _TURN, _AHEAD = find("L9", "pages"), find("L18"), find("L19")
_VERSIONS, _CHANGED = find("L23", "pages"), find("L23", "changed")
_ON_ENGINE, _INTAKE = "weft.transforms.engine.engine", "weft.transforms.engine.intake"
_SAMPLES = "weft.transforms.engine.samples"
_LOADS = "weft.proofs.strategies.engines"

SERVING = (
    Mutant("a page is freed while another request holds it", _PAGED, replace(_HOST, "Pages", _OwnersForgotten)),
    Mutant("a page is known by its tokens alone", _PAGED, replace(_REQUESTS, "hash_page", _by_tokens_alone)),
    Mutant(
        "a part of a page is found before it is computed", _PAGED, replace(_ADMISSION, "_start", _found_before_computed)
    ),
    Mutant("a part of a page is found after it was given away", _PAGED, replace(_HOST, "Pages", _PartsOutlive)),
    Mutant("a finish is predicted on one rank", _AGREE, _predicting),
    Mutant("a row is freed while a step for it is under way", _SERVED, replace(_ADMISSION, "_start", _without_waiting)),
    Mutant("a page is known without its adapter", _ADAPTED, replace(_REQUESTS, "salt", _salt_of_none)),
    Mutant("a step is not told of its adapters", _ADAPTED, replace(_SCHEDULER, "count_adapters", _no_adapters)),
    Mutant(
        "a page is known without its embeddings and positions",
        _EMBEDDED,
        partial(mock.patch.object, Given, "content", _nothing_given),
    ),
    Mutant(
        "what follows a prompt stands where it is read",
        _EMBEDDED,
        replace("weft.stages.decoder", "mrope_positions", _in_order_without_delta),
    ),
    Mutant("a chunk has the positions of the first", _EMBEDDED, replace(_WORK, "place_positions", _in_their_chunk)),
    Mutant("all completions of a prompt have one seed", _ENGINE, replace(_ON_ENGINE, "sample_seeds", _of_one_seed)),
    Mutant(
        "a mask is of one token less",
        _MASKS,
        replace(_SAMPLES, "read_mask", _of_one_token_less),
    ),
    Mutant(
        "a mask is of the request before it in the batch",
        _MASKS,
        partial(mock.patch.object, Work, "_masked", _of_the_one_before),
    ),
    Mutant("a mask stays in the row of its request", _MASKS, replace(_LOADS, "Engine", _MasksStay)),
    Mutant("a request with a mask runs ahead", _MASKS, replace(_INTAKE, "Request", _free_to_run_ahead)),
    Mutant("where no token is left, the first one is said", _FAULTS, _some_token_where_none_is_left),
    Mutant("parameters that bar all are refused by a step", _FAULTS, _refused_where_it_is_admitted),
    Mutant(
        "an error of a mask that was not thought of ends the step",
        _FAULTS,
        replace("weft.transforms.engine.masks", "blamed", _blames_value_errors_alone),
    ),
    Mutant("who came last goes first", _TURN, _latest_first),
    Mutant("room is made from the first", _TURN, replace(_DECODES, "_make_room", _makes_room_from_the_first)),
    Mutant("a page is known without the parameters' version", _VERSIONS, replace(_REQUESTS, "salt", _without_version)),
    Mutant(
        "requests under way keep their pages when the parameters change",
        _VERSIONS,
        replace("weft.proofs.laws.engine.pages", "outdate", _pages_are_kept),
    ),
    Mutant(
        "a change of the parameters that is not announced is not seen",
        _CHANGED,
        partial(mock.patch.object, Weights, "are_changed", False),
    ),
    Mutant("a stop is seen late where steps are under way", _AHEAD, replace(_SCHEDULER, "end", _ending_late)),
)
