"""Decodes: who goes on from its last token, how many drafts behind it, and the pages for them."""

from collections.abc import Sequence

from weft.transforms.engine.host import Budget, HostState, key, preempt
from weft.transforms.engine.requests import Running
from weft.transforms.engine.work import Growth


def take_decodes(host: HostState, budget: Budget, cohort: int) -> tuple[int, list[Running], tuple[Growth, ...]]:
    """The tokens of each request in a cohort's next decode, the requests, and the pages that they need."""
    mine = [
        running
        for running in host.cohorts[cohort]
        if running.on_device and not running.is_full and not (running.num_unread and running.request.is_masked)
    ]
    query_len = choose_query_len(host, budget, mine)
    taken, growths = [], []
    for running in mine:
        if running.row < 0:
            continue  # it made room for another
        if need := _need(host, running, query_len):
            if not _make_room(host, running, need):
                continue
            growths.append(Growth(running.row, len(running.pages), tuple(more := host.pages.take(need))))
            running.pages += more
        taken.append(running)
    return query_len, taken, tuple(growths)


def choose_query_len(host: HostState, budget: Budget, mine: Sequence[Running]) -> int:
    """Tokens of each request: as many, of those that there are graphs for, as one of the requests has use for; and for
    which there is room in a step, and free pages: for drafts nobody has to make room. One whose mask is known only for
    its next token keeps all from having drafts."""
    if max(budget.query_lens) == 1 or any(running.request.is_masked for running in mine):
        return 1
    useful = max((running.most_useful for running in mine), default=1)
    wanted = min((n for n in budget.query_lens if n >= useful), default=max(budget.query_lens))
    for query_len in sorted(budget.query_lens, reverse=True):
        fits = 1 < query_len <= wanted and query_len * len(mine) <= budget.max_num_tokens
        if fits and sum(_need(host, running, query_len) for running in mine) <= host.pages.num_free:
            return query_len
    return 1


def _need(host: HostState, running: Running, query_len: int) -> int:
    """Pages that a request lacks for a step of so many tokens, wherever those under way leave it: what was not drafted
    is read, and written, too. Its last token of all is never read."""
    reach, page_size = min(running.computed + query_len, running.limit - 1), host.pages.page_size
    has = len(running.pages)
    return host.pages.pages_for(reach) - has if reach > has * page_size else 0


def _make_room(host: HostState, running: Running, count: int) -> bool:
    """Free pages for a request, from the last in turn; False if that is itself."""
    while host.pages.num_free < count:
        last = max(host.running.values(), key=key)
        preempt(host, last)
        if last is running:
            return False
    return True
