"""What happened when: an event is one effect of one rank, with its start, its end and how long it waited."""

import math
from collections.abc import Iterable, Sequence

import attrs

from weft.effects import Effect, Run
from weft.errors import CostError

ADVANCE = "advance"
"""What `Run` calls the step that takes an output into the state."""


@attrs.frozen
class Event:
    """One effect of one rank, simulated or measured.

    Args:
        rank, effect: whose, and what.
        start: when the rank came to it; seconds.
        end: when the rank went on.
        waited: how much of that, at its end, the rank waited: for a message, for room on an edge, for a receipt.

    Raises:
        CostError: an end before the start, or a wait that is longer than the event.
    """

    rank: int
    effect: Effect
    start: float
    end: float
    waited: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not (self.rank >= 0 and 0 <= self.end - self.start < math.inf and self.waited >= 0):
            instead = "a rank >= 0, and finite seconds with start <= end and waited >= 0"
            raise CostError(f"Event(rank={self.rank}, '{self.effect}', …)", self._moments(), instead)
        if self.waited > self.end - self.start:
            seen, instead = self._moments(), f"waited <= {self.end - self.start}, which is end - start"
            raise CostError(f"Event(rank={self.rank}, '{self.effect}', …)", seen, instead)

    def _moments(self) -> str:
        return f"start={self.start}, end={self.end}, waited={self.waited}"

    @property
    def active(self) -> float:
        """The moment at which it stopped to work and began to wait."""
        return self.end - self.waited


def num_ranks(events: Iterable[Event]) -> int:
    """The ranks that the events are of."""
    return max((event.rank for event in events), default=-1) + 1


def last_end(events: Iterable[Event]) -> float:
    """When the last event ended."""
    return max((event.end for event in events), default=0.0)


def busy_seconds(events: Sequence[Event]) -> tuple[float, ...]:
    """The seconds that each rank ran stages and advanced: not what it sent, waited for, or launched besides."""
    seconds = [0.0] * num_ranks(events)
    for event in events:
        if isinstance(event.effect, Run):
            seconds[event.rank] += event.active - event.start
    return tuple(seconds)


def how_many(ranks: int) -> str:
    """A number of ranks in words."""
    return f"{ranks} rank{'s' * (ranks != 1)}"
