"""`simulate`: the timeline of programs, from the costs of their effects.

The machine is the checker's (`weft.transforms.pipelines.checker`) with time. Every rank performs its effects in order,
and an edge holds `capacity` messages, from their send to the end of their receive. A send waits for room on its edge,
starts the transfer and goes on. The transfers of an edge go one after the other, and those of different edges side by
side. A receive waits until its message has arrived, and a fence until the messages of its micro-batch were received.

So each start and end is a maximum of earlier times plus costs, and any order of simulation that the programs allow
gives the same timeline. A larger cost never makes it shorter, and a larger capacity never makes it longer.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import attrs

from weft.arguments.checks import COUNT, Rule, check_values
from weft.effects import Broadcast, Effect, Fence, Program, Run, Send
from weft.errors import CostError, ProgramError
from weft.transforms.pipelines.checker import PROGRAMS
from weft.transforms.pipelines.events import ADVANCE, Event
from weft.transforms.pipelines.machine import Edge, Step, interleave, puts, takes
from weft.transforms.pipelines.timeline import Timeline

_COST: Rule = (lambda value: 0 <= value < math.inf), "a finite number >= 0"
_COST_OR_FUNCTION: Rule = (lambda value: callable(value) or 0 <= value < math.inf), _COST[1]
_COST_RULES: dict[str, Rule] = {
    **dict.fromkeys(("advance", "latency", "launch"), _COST),
    **dict.fromkeys(("message_bytes", "output_bytes"), _COST_OR_FUNCTION),
    "bytes_per_second": (lambda value: value > 0, "a number > 0; infinite: transfers take the latency alone"),
    "stages": (
        lambda value: callable(value) or isinstance(value, Iterable),
        "seconds of each stage: (1e-3, 2e-3), or a function (stage, microbatch)",
    ),
}


@attrs.frozen
class Costs:
    """The costs of effects, in seconds and bytes.

    Args:
        stages: seconds of each stage for a micro-batch, or a function `(stage, microbatch) -> seconds`.
        advance: seconds of an advance of the state.
        latency: seconds of each transfer, whatever its size.
        bytes_per_second: of each edge; infinite: a transfer takes only the latency.
        message_bytes: of the message of a stage for a micro-batch, or a function of the micro-batch.
        output_bytes: of the output that returns from the last stage, likewise.
        launch: seconds of the host before each effect.

    Raises:
        CostError: a cost that is negative or not finite.

    >>> Costs(stages=(1e-3, -1e-3))
    Traceback (most recent call last):
        ...
    weft.errors.CostError: Costs(stages=(0.001, -0.001), …)
      saw: stages[1]=-0.001
      instead: a finite number >= 0
    """

    stages: Sequence[float] | Callable[[int, int], float]
    advance: float = 0.0
    latency: float = 0.0
    bytes_per_second: float = math.inf
    message_bytes: float | Callable[[int], float] = 0
    output_bytes: float | Callable[[int], float] = 0
    launch: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self, recurse=False).items():
            check_values(f"Costs({name}={value!r}, …)", _COST_RULES, {name: value}, CostError)
        if not callable(self.stages):
            each = {f"stages[{stage}]": value for stage, value in enumerate(self.stages)}
            check_values(f"Costs(stages={self.stages!r}, …)", dict.fromkeys(each, _COST), each, CostError)

    def seconds(self, effect: Effect) -> float:
        """The seconds that an effect costs its rank, without waits and launch; only a `Run` costs any."""
        if not isinstance(effect, Run):
            return 0.0
        if effect.what == ADVANCE:
            return self.advance
        match = re.fullmatch(r"stage (\d+)", effect.what)
        if match is None or not (callable(self.stages) or int(match[1]) < len(self.stages)):
            instead = f"Costs(stages=...) with a cost for each stage; a Run of 'stage N', or of {ADVANCE!r}"
            raise CostError(f"costs of '{effect}'", f"no cost of {effect.what!r}", instead)
        stage, mb = int(match[1]), effect.microbatch
        if callable(self.stages):
            return _valid(f"costs of '{effect}'", f"stages({stage}, {mb})", self.stages(stage, mb))
        return self.stages[stage]

    def bytes_of(self, effect: Send | Broadcast) -> float:
        """The bytes of the message that an effect sends."""
        name, mb = "message_bytes" if isinstance(effect, Send) else "output_bytes", effect.microbatch
        size: float | Callable[[int], float] = getattr(self, name)
        return _valid(f"costs of '{effect}'", f"{name}({mb})", size(mb)) if callable(size) else size


def _valid(call: str, name: str, value: float) -> float:
    """A cost that the user's function returned."""
    check_values(call, {name: _COST}, {name: value}, CostError)
    return value


@attrs.frozen
class _Message:
    """A message on an edge: its bytes, and the moments at which it was sent and arrives."""

    size: float
    sent: float
    arrives: float


class _Clocks:
    """The moments so far: each rank's time, and for each edge its messages and the moments of their receipts."""

    def __init__(self, num_ranks: int, costs: Costs, capacity: int) -> None:
        self.costs = costs
        self.capacity = capacity
        self.now = [0.0] * num_ranks
        self.messages: dict[Edge, list[_Message]] = defaultdict(list)
        self.received: dict[Edge, list[float]] = defaultdict(list)
        self.sent: dict[tuple[int, int], list[tuple[Edge, int]]] = defaultdict(list)  # by rank and micro-batch

    def move(self, step: Step) -> Event:
        """Perform one effect, after all effects that it waits for."""
        start, edges = self.now[step.rank], puts(step, len(self.now))
        active = start + self.costs.launch + self.costs.seconds(step.effect)
        end = max((active, *self._waits(step, edges)))
        if (edge := takes(step)) is not None:
            self.received[edge].append(end)
        for edge in edges:
            self._send(edge, step.effect, end)
        self.now[step.rank] = end
        return Event(step.rank, step.effect, start, end, end - active)

    def _waits(self, step: Step, edges: Sequence[Edge]) -> Iterable[float]:
        """The moments before which an effect cannot end."""
        if (edge := takes(step)) is not None:
            return [self.messages[edge][len(self.received[edge])].arrives]
        if isinstance(step.effect, Fence):
            return [self.received[edge][index] for edge, index in self.sent[step.rank, step.effect.microbatch]]
        full = (edge for edge in edges if len(self.messages[edge]) >= self.capacity)
        return [self.received[edge][len(self.messages[edge]) - self.capacity] for edge in full]

    def _send(self, edge: Edge, effect: Effect, now: float) -> None:
        assert isinstance(effect, Send | Broadcast)
        size, queue = self.costs.bytes_of(effect), self.messages[edge]
        begins = max(now, queue[-1].arrives) if queue else now
        arrives = begins + (self.costs.latency + size / self.costs.bytes_per_second)
        self.sent[edge.source, effect.microbatch].append((edge, len(queue)))
        queue.append(_Message(size, now, arrives))

    def peak_bytes(self) -> list[float]:
        """For each rank, the most bytes at one time of messages sent and not yet received, at either end."""
        changes: list[list[tuple[float, float]]] = [[] for _ in self.now]
        for edge, queue in self.messages.items():
            for message, received in zip(queue, self.received[edge], strict=True):
                for rank in (edge.source, edge.to):
                    changes[rank] += [(message.sent, message.size), (received, -message.size)]
        return [_peak(sorted(found)) for found in changes]  # sorted: at one moment, receipts come first


def _peak(changes: Sequence[tuple[float, float]]) -> float:
    held = most = 0.0
    for _, size in changes:
        held += size
        most = max(most, held)
    return most


_RULES: dict[str, Rule] = {"programs": PROGRAMS, "costs": (Costs, "Costs(stages=(1e-3, ...))"), "capacity": COUNT}


def simulate(programs: Sequence[Program], costs: Costs, *, capacity: int = 2) -> Timeline:
    """The timeline of programs with the given costs.

    Args:
        programs: of all ranks, in order.
        costs: of their effects.
        capacity: messages that an edge holds. It is 2 in `Threads`; the check proves programs right for 1.

    Raises:
        ProgramError: programs that do not run to their end.
        CostError: an effect without a cost, or with an impossible one.

    >>> from weft.transforms.pipelines.schedule import streaming
    >>> print(simulate(streaming(2, 3), Costs(stages=(1e-3, 1e-3))).as_text(40))
        ms |0          |2             bubble
    rank 0 0000001111111222222           25%
    rank 1 ......0000000111111222222     25%
    0-9 runs that micro-batch (its last
    digit); . waits
    2 ranks, 4 ms; most bytes of messages a
    rank holds: 0
    """
    values = {"programs": programs, "costs": costs, "capacity": capacity}
    check_values(f"simulate(programs, costs, capacity={capacity!r})", _RULES, values, ProgramError)
    clocks = _Clocks(len(programs), costs, capacity)
    events = [clocks.move(step) for step in interleave(programs, capacity=capacity)]
    return Timeline.of(events, clocks.peak_bytes())
