"""Events: one effect of one rank, with its start, its end and its waiting time."""

import math
from collections.abc import Iterable, Sequence

import attrs

from weft.effects import Effect, Run
from weft.errors import CostError
from weft.meshes.collectives import Collective

# The `what` of a `Run` that advances a state with an output.
ADVANCE = "advance"


@attrs.frozen
class Event:
    """One effect of one rank, simulated or measured.

    Args:
        rank, effect: the rank, and the effect that it performed.
        start: the time at which the rank reached the effect, in seconds.
        end: the time at which the rank went on, in seconds.
        waited: the seconds at the end of the event in which the rank waited for a message, for room
            on an edge or for a receipt. In a collective, it is the seconds at the beginning, in
            which the rank waited for the other ranks.

    Raises:
        CostError: the end is before the start, or the wait is longer than the event.
    """

    rank: int
    effect: Effect
    start: float
    end: float
    waited: float = 0.0

    def __attrs_post_init__(self) -> None:
        seconds = self.end - self.start
        # As a negation, so that NaN is refused as well.
        if not (self.rank >= 0 and 0 <= self.waited <= seconds < math.inf):
            problem = f"start={self.start}, end={self.end}, waited={self.waited}"
            instead = (
                "a rank >= 0, and finite seconds with start <= end and 0 <= waited <= end - start"
            )
            raise CostError(f"Event(rank={self.rank}, '{self.effect}', …)", problem, instead)

    @property
    def work(self) -> tuple[float, float]:
        """The start and the end of the rank's work on the effect."""
        if isinstance(self.effect, Collective):
            return self.start + self.waited, self.end
        return self.start, self.end - self.waited

    @property
    def wait(self) -> tuple[float, float]:
        """The start and the end of the rank's wait."""
        start, end = self.work
        if isinstance(self.effect, Collective):
            return (self.start, start)
        return (end, self.end)


def num_ranks(events: Iterable[Event]) -> int:
    """The number of ranks that have events."""
    return max((event.rank for event in events), default=-1) + 1


def last_end(events: Iterable[Event]) -> float:
    """The time at which the last event ended."""
    return max((event.end for event in events), default=0.0)


def busy_seconds(events: Sequence[Event]) -> tuple[float, ...]:
    """The seconds in which each rank ran stages and advanced; messages, collectives and waits do
    not count."""
    seconds = [0.0] * num_ranks(events)
    for event in events:
        if isinstance(event.effect, Run):
            start, end = event.work
            seconds[event.rank] += end - start
    return tuple(seconds)


def ranks_in_words(ranks: int) -> str:
    """A number of ranks, as text: `1 rank`, `2 ranks`."""
    return f"{ranks} rank{'s' * (ranks != 1)}"
