"""Bugs of the scheduler and of the pages."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from weft.proofs import serving
from weft.proofs.mutants.planted import Mutant, replace
from weft.proofs.suite import find
from weft.transforms.engine import scheduler
from weft.transforms.engine.pages import Pages, hash_page
from weft.transforms.engine.requests import Running
from weft.transforms.engine.scheduler import HostState, observe

_SCHEDULER, _REQUESTS = "weft.transforms.engine.scheduler", "weft.transforms.engine.requests"


class _OwnersForgotten(Pages):
    """Frees a page when the first of those that hold it goes."""

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._count[page] = 1
        super().release(list(dict.fromkeys(pages)))

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._kept.pop(page, None)
            self._count[page] += 1


def _without_waiting(host: HostState, running: Running, *args: Any) -> None:
    _START(host, running, *args)
    running.last_job = None


_START = scheduler._start


def _predicting() -> AbstractContextManager[Any]:
    """Every second rank ends a request one token early, taking the last one for granted."""
    hosts: list[HostState] = []

    def observed(host: HostState, job: int, token_ids: Sequence[int]) -> Any:
        if all(host is not seen for seen in hosts):
            hosts.append(host)
        host, got = observe(host, job, token_ids)
        for _, running in got:
            left = len(running.request.prompt) + running.request.max_tokens - len(running.tokens)
            if hosts.index(host) % 2 and not running.reason and left == 1:
                scheduler._end(host, running, "length")
        return host, got

    return mock.patch.object(serving, "observe", observed)


def _by_tokens_alone(_: bytes, token_ids: Sequence[int]) -> bytes:
    return hash_page(b"", token_ids)


def _no_adapters(slots: Iterable[int]) -> int:
    return 0


def _salt_of_none(adapter: int) -> bytes:
    return b""


_SERVED, _AGREE, _ADAPTED = find("L11", "stages"), find("L11", "hosts"), find("L11", "adapters")

SERVING = (
    Mutant("a finish is predicted on one rank", _AGREE, _predicting),
    Mutant("a page is freed while another request holds it", _SERVED, replace(_SCHEDULER, "Pages", _OwnersForgotten)),
    Mutant("a row is freed while a step for it is under way", _SERVED, replace(_SCHEDULER, "_start", _without_waiting)),
    Mutant("a page is known by its tokens alone", _SERVED, replace(_REQUESTS, "hash_page", _by_tokens_alone)),
    Mutant("a page is known without its adapter", _ADAPTED, replace(_REQUESTS, "salt", _salt_of_none)),
    Mutant("a step is not told of its adapters", _ADAPTED, replace(_SCHEDULER, "count_adapters", _no_adapters)),
)
