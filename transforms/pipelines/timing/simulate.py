"""`simulate`: the timeline of programs, from the costs of their effects.

The machine is the checker's (`weft.transforms.pipelines.checker`) with time. Every rank performs
its effects in order, and an edge holds `capacity` messages, from their send to the end of their
receive. A send waits for room on its edge, starts the transfer and goes on. Transfers on one edge
run one after the other, and transfers on different edges run in parallel. A receive waits until its
message has arrived, and a fence until the messages of its micro-batch were received.

Each start and end is therefore a maximum of earlier times plus costs, and any order of simulation
that the programs allow gives the same timeline. A larger cost never makes the timeline shorter, and
a larger capacity never makes it longer.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import attrs

from weft.arguments.checks import COUNT, Rule, check_values
from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError
from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    ReduceScatter,
)
from weft.transforms.pipelines.checker import PROGRAMS
from weft.transforms.pipelines.machine import Edge, Step, interleave, puts, takes
from weft.transforms.pipelines.timing.costs import (
    Costs,
    bytes_sent,
    effect_seconds,
    transfer_seconds,
)
from weft.transforms.pipelines.timing.events import Event
from weft.transforms.pipelines.timing.timeline import Timeline, make_timeline


@attrs.frozen
class _Message:
    """A message on an edge: its bytes, and the times at which it is sent and arrives."""

    size: float
    sent: float
    arrives: float


class _Clocks:
    """The state of the simulation: each rank's time, and for each edge its messages and the times
    at which they were received."""

    def __init__(self, num_ranks: int, costs: Costs, capacity: int) -> None:
        self.costs = costs
        self.capacity = capacity
        self.now = [0.0] * num_ranks
        self.messages: dict[Edge, list[_Message]] = defaultdict(list)
        self.received: dict[Edge, list[float]] = defaultdict(list)
        # By rank and micro-batch: the edge of each message sent, and its index there
        self.sent: dict[tuple[int, int], list[tuple[Edge, int]]] = defaultdict(list)
        # For ranks in a collective whose effect is not performed yet: its begin and end
        self.met: dict[int, tuple[float, float]] = {}

    def move(self, step: Step) -> Event:
        """Perform one effect, after all effects that it waits for."""
        if isinstance(step.effect, Collective):
            return self._meet(step.rank, step.effect)
        start = self.now[step.rank]
        edges = puts(step, len(self.now))
        active = start + self.costs.launch + effect_seconds(self.costs, step.effect, step.rank)
        end = max((active, *self._waits(step, edges)))
        if (edge := takes(step)) is not None:
            self.received[edge].append(end)
        for edge in edges:
            self._send(edge, step.effect, end)
        self.now[step.rank] = end
        return Event(step.rank, step.effect, start, end, end - active)

    def _meet(self, rank: int, effect: Collective) -> Event:
        """Perform a collective on one of its ranks, after all of them have reached it."""
        if rank not in self.met:
            begins = self._all_there(effect)
            ends = begins + (self.costs.launch + effect_seconds(self.costs, effect))
            self.met.update(dict.fromkeys(effect.ranks, (begins, ends)))
        begins, ends = self.met.pop(rank)
        start, self.now[rank] = self.now[rank], ends
        return Event(rank, effect, start, ends, begins - start)

    def _all_there(self, effect: Collective) -> float:
        """The time at which the last rank reaches a collective."""
        return max(self.now[each] for each in effect.ranks)

    def _waits(self, step: Step, edges: Sequence[Edge]) -> Iterable[float]:
        """The times before which an effect cannot end."""
        if (edge := takes(step)) is not None:
            return [self.messages[edge][len(self.received[edge])].arrives]
        match step.effect:
            case AllReduce() | AllGather() | ReduceScatter() | AllToAll() | PPermute():
                raise AssertionError("the ranks of a collective wait in `_meet`")
            case Fence(mb):
                return [self.received[edge][index] for edge, index in self.sent[step.rank, mb]]
            case Run() | Send() | Recv() | Broadcast():
                # On an edge that was full, the n-th message needs the receipt of message
                # n - capacity.
                full = (edge for edge in edges if len(self.messages[edge]) >= self.capacity)
                return [
                    self.received[edge][len(self.messages[edge]) - self.capacity] for edge in full
                ]

    def _send(self, edge: Edge, effect: Effect, now: float) -> None:
        assert isinstance(effect, Send | Broadcast)
        size = bytes_sent(self.costs, effect)
        queue = self.messages[edge]
        if queue:
            # An edge carries one message at a time, in order.
            begins = max(now, queue[-1].arrives)
        else:
            begins = now
        arrives = begins + transfer_seconds(self.costs, effect, (edge.source, edge.to), size)
        self.sent[edge.source, effect.microbatch].append((edge, len(queue)))
        queue.append(_Message(size, now, arrives))

    def peak_bytes(self) -> list[float]:
        """For each rank, the peak of the bytes of messages from or to it that were sent but not yet
        received."""
        changes: list[list[tuple[float, float]]] = [[] for _ in self.now]
        for edge, queue in self.messages.items():
            for message, received in zip(queue, self.received[edge], strict=True):
                for rank in (edge.source, edge.to):
                    changes[rank] += [(message.sent, message.size), (received, -message.size)]
        # Sorting puts receipts, whose sizes are negative, before sends at the same time.
        return [_peak(sorted(rank_changes)) for rank_changes in changes]


def _peak(changes: Sequence[tuple[float, float]]) -> float:
    current = most = 0.0
    for _, size in changes:
        current += size
        most = max(most, current)
    return most


_RULES: dict[str, Rule] = {
    "programs": PROGRAMS,
    "costs": (Costs, "Costs(stages=(1e-3, ...))"),
    "capacity": COUNT,
}


def simulate(programs: Sequence[Program], costs: Costs, *, capacity: int = 2) -> Timeline:
    """The timeline of programs with the given costs.

    Args:
        programs: the programs of all ranks, in order.
        costs: the costs of their effects.
        capacity: the number of messages that an edge holds. `Threads` uses 2; the checker proves
            programs correct for 1.

    Raises:
        ProgramError: programs that do not run to their end.
        CostError: an effect without a cost, or with an impossible cost.

    >>> from weft.transforms.pipelines.schedule import streaming
    >>> print(simulate(streaming(2, 3), Costs(stages=(1e-3, 1e-3))).as_text(40))
        ms |0          |2             bubble
    rank 0 0000001111111222222           25%
    rank 1 ......0000000111111222222     25%
    0-9 runs that micro-batch (its last
    digit); . waits; blank: idle
    2 ranks, 4 ms; most bytes of messages a
    rank holds: 0
    """
    values = {"programs": programs, "costs": costs, "capacity": capacity}
    check_values(f"simulate(programs, costs, capacity={capacity!r})", _RULES, values, ProgramError)
    clocks = _Clocks(len(programs), costs, capacity)
    events = [clocks.move(step) for step in interleave(programs, capacity=capacity)]
    return make_timeline(events, clocks.peak_bytes())
