"""L9 for the KV cache: a request reads only keys and values computed for its own tokens, by itself
or by another request. L23: it reads only those computed with the current parameters."""

from collections.abc import Collection

import attrs

from weft.ops.requests import LAST_TOKEN
from weft.proofs._strategies.engine.traces import Trace
from weft.proofs.checks.difference import LawViolation
from weft.proofs.serving import check_ends, happen, read_made_up
from weft.transforms.engine.requests.host_state import HostState
from weft.transforms.engine.scheduler import outdate, schedule
from weft.transforms.engine.steps.step import Work

# The tokens that a slot was computed for, up to and including its own. None in the tuple is a token
# unknown to the host; None instead of the tuple is a slot that was never computed.
Content = tuple[int | None, ...] | None
# A page, and an offset in it.
Slot = tuple[int, int]


@attrs.define
class Device:
    """A model of the device that stores, instead of keys and values, the tokens that they were
    computed for.

    Args:
        page_size: slots per page.
        slots: the content of each slot.
        versions: the version of the parameters that computed each slot.
        tables: the pages of each row, as edited by the work.
        version: the number of times that the parameters have changed.
    """

    page_size: int
    slots: dict[Slot, Content] = attrs.field(factory=dict)
    versions: dict[Slot, int | None] = attrs.field(factory=dict)
    tables: dict[int, list[int]] = attrs.field(factory=dict)
    version: int = 0

    def do(self, work: Work, host: HostState) -> None:
        """Edit the tables and fill slots, as a stage would.

        Raises:
            LawViolation: a request reads a slot that was not computed, or was computed for other
                tokens or with other parameters.
        """
        for source, target in work.edits.copies:
            for offset in range(self.page_size):
                self.slots[target, offset] = self.slots.get((source, offset))
                self.versions[target, offset] = self.versions.get((source, offset))
        for admission in work.edits.admissions:
            self.tables[admission.row] = list(admission.pages)
        for growth in work.edits.growths:
            self.tables[growth.row] += growth.pages
        parts = work.token_ids or ((LAST_TOKEN,),) * len(work.rows)
        for name, row, start, ids in zip(work.requests, work.rows, work.starts, parts, strict=True):
            self._run(name, row, start, ids, host.requests[name].tokens)

    def _run(
        self, name: str, row: int, start: int, ids: tuple[int, ...], tokens: list[int]
    ) -> None:
        past: tuple[int | None, ...] = ()
        for place in range(start + len(ids)):
            slot = self.tables[row][place // self.page_size], place % self.page_size
            # The host does not know the tokens of steps that it has not read.
            past += (tokens[place] if place < len(tokens) else None,)
            if place >= start:
                self.slots[slot], self.versions[slot] = past, self.version
            elif not _may_be(self.slots.get(slot), past):
                problem = (
                    f"{name} reads token {place} from page {slot[0]}, computed for"
                    f" {self.slots.get(slot)}"
                )
                raise LawViolation(f"L9 pages: {problem}, and its own are {past}")
            elif self.versions[slot] != self.version:
                problem = (
                    f"{name} reads token {place} from page {slot[0]}, computed by version"
                    f" {self.versions[slot]}"
                )
                raise LawViolation(
                    f"L23 versions: {problem} of the parameters, after {self.version} changes"
                )


def _may_be(content: Content, past: tuple[int | None, ...]) -> bool:
    return (
        content is not None
        and len(content) == len(past)
        and all(a is None or b is None or a == b for a, b in zip(content, past, strict=True))
    )


def pages_are_read_by_whom_they_were_written_for(trace: Trace) -> None:
    """L9: whichever requests come, end, or are preempted, no request reads a page computed for
    other tokens, and at the end no page is held."""
    pages_are_of_the_parameters(trace, ())


def pages_are_of_the_parameters(trace: Trace, changes: Collection[int]) -> None:
    """L23: after the parameters change, no request reads a page computed before the change, neither
    from the prefix cache nor from its own earlier steps.

    L9 holds too.

    Args:
        trace: the requests that come and go.
        changes: the ticks before which the parameters change.
    """
    host = HostState.empty(trace.budget, trace.num_pages, trace.page_size)
    device = Device(trace.page_size)
    tick = 0
    last = max(arrival.tick for arrival in trace.arrivals)
    while tick <= last or not host.is_idle:
        check_ends("L9 pages", tick - last)
        works: list[Work] = []
        for _ in range(trace.window):
            host = happen(trace, host, tick)
            if tick in changes:
                host = outdate(host)
                device.version = device.version + 1
            host, more = schedule(host, trace.budget)
            for work in more:
                device.do(work, host)
            works += more
            tick += 1
        host = read_made_up(host, works)
    if host.pages.num_held:
        raise LawViolation(f"L9 pages: {host.pages.num_held} are held when all has ended")
