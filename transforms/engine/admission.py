"""Prompts: who begins, with which pages, and which tokens are read next."""

import bisect

from weft.transforms.engine.host import Budget, HostState, key
from weft.transforms.engine.pages import Pages
from weft.transforms.engine.requests import Running
from weft.transforms.engine.work import Admission, Edits


def take_prompts(host: HostState, budget: Budget, cohort: int, room: int) -> tuple[list[tuple[Running, int]], Edits]:
    """Chunks of prompts of at most `room` tokens: of those that were begun, and then of those that wait."""
    chunks: list[tuple[Running, int]] = []
    copies: list[tuple[int, int]] = []
    admitted: list[Admission] = []
    mine = host.cohorts[cohort]
    for running in mine:
        if not running.on_device and running.filled < running.length:
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
    taken = min(room, running.length - running.filled)
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
    running.filled = len(shared) * pages.page_size
    if source is not None:
        copies.append((source, running.pages[len(shared)]))
        running.filled = length - 1
    host.num_found += running.filled
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
    bisect.insort(host.cohorts[cohort], running, key=key)
    request = running.request
    generated = tuple(running.tokens[len(request.prompt) :])
    placed = (running.row, tuple(running.pages), running.filled)
    asked = request.sampling, request.prompt
    delta = 0 if request.given is None else request.given.delta
    admitted.append(Admission(*placed, *asked, generated, request.adapter, running.limit, delta))
