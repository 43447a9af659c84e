"""The simulator's machine by brute force, a clock that ticks, and programs and costs to compare the
two."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.meshes.collectives import AllReduce, Collective
from weft.transforms.pipelines.schedule import Job, make_programs
from weft.transforms.pipelines.timing.costs import Costs


@attrs.define(eq=False)
class Sent:
    """A message of the ticking machine."""

    mb: int
    size: int
    left: int
    since: int
    until: int | None = None


class Ticking:
    """The same machine by brute force: time passes in ticks, and in each tick every rank does
    whatever it can."""

    def __init__(self, programs: Sequence[Program], costs: dict[str, int], capacity: int) -> None:
        self.programs = programs
        self.costs = costs
        self.capacity = capacity
        self.edges: dict[tuple[int, int, str], list[Sent]] = defaultdict(list)
        self.at = [0] * len(programs)
        self.began = [0] * len(programs)
        self.moments: list[tuple[int, Effect, int, int]] = []
        self.meetings: dict[
            tuple[int, ...], tuple[int, set[int]]
        ] = {}  # since when all are there, and who has left
        self.now = 0

    def run(self) -> None:
        while any(at < len(p.effects) for at, p in zip(self.at, self.programs, strict=True)):
            while any(self.advance(rank) for rank in range(len(self.programs))):
                pass
            for queue in self.edges.values():
                moving = next((m for m in queue if m.left), None)
                if moving:
                    moving.left -= 1
            self.now += 1
            assert self.now < 10_000

    def advance(self, rank: int) -> bool:
        """Whether a rank can finish its effect now."""
        if self.at[rank] == len(self.programs[rank].effects):
            return False
        effect = self.programs[rank].effects[self.at[rank]]
        work = 0 if isinstance(effect, Collective) else self.costs["launch"]
        if isinstance(effect, Run):
            stage = self.costs["stage"] * (1 + effect.microbatch)
            part = self.costs["uneven"] * rank
            work += {"advance": self.costs["advance"], "part 0": part}.get(effect.what, stage)
        if self.now < self.began[rank] + work or not self.allowed(rank, effect):
            return False
        self.act(rank, effect)
        self.moments.append((rank, effect, self.began[rank], self.now))
        self.at[rank] += 1
        self.began[rank] = self.now
        return True

    def incoming(self, rank: int, effect: Effect) -> list[Sent] | None:
        match effect:
            case Recv(source):
                return self.edges[source, rank, "stages"]
            case Broadcast(root) if root != rank:
                return self.edges[root, rank, "returns"]
        return None

    def outgoing(self, rank: int, effect: Effect) -> list[list[Sent]]:
        match effect:
            case Send(to):
                return [self.edges[rank, to, "stages"]]
            case Broadcast(root) if root == rank:
                return [
                    self.edges[rank, to, "returns"]
                    for to in range(len(self.programs))
                    if to != rank
                ]
        return []

    def leaves(self, rank: int, effect: Collective) -> bool:
        """Whether all ranks have been at a collective for as long as it takes; and then this one
        leaves it."""
        ranks = effect.ranks
        if ranks not in self.meetings:
            at = [self.programs[r].effects[self.at[r] : self.at[r] + 1] for r in ranks]
            if any(next_effects != (effect,) for next_effects in at):
                return False
            self.meetings[ranks] = self.now, set()
        since, left = self.meetings[ranks]
        if rank in left or self.now < since + self.costs["launch"] + self.costs["meet"] * len(
            ranks
        ):
            return False
        left.add(rank)
        if left == set(ranks):
            del self.meetings[ranks]
        return True

    def allowed(self, rank: int, effect: Effect) -> bool:
        if isinstance(effect, Collective):
            return self.leaves(rank, effect)
        queue = self.incoming(rank, effect)
        if queue is not None:
            first = next((i for i, m in enumerate(queue) if m.until is None), None)
            return first is not None and not any(m.left for m in queue[: first + 1])
        if isinstance(effect, Fence):
            sent_messages = [
                m
                for (source, _, _), messages in self.edges.items()
                if source == rank
                for m in messages
            ]
            return not any(m.until is None and m.mb == effect.microbatch for m in sent_messages)
        waiting = [
            sum(m.until is None for m in messages) for messages in self.outgoing(rank, effect)
        ]
        return all(count < self.capacity for count in waiting)

    def act(self, rank: int, effect: Effect) -> None:
        queue = self.incoming(rank, effect)
        if queue is not None:
            next(m for m in queue if m.until is None).until = self.now
        size = self.costs["output" if isinstance(effect, Broadcast) else "message"]
        for messages in self.outgoing(rank, effect):
            messages.append(Sent(effect.microbatch, size, self.costs["latency"] + size, self.now))

    def peak(self, rank: int) -> int:
        """The most bytes held at any tick, computed by visiting all ticks."""
        mine = [
            m
            for (source, to, _), messages in self.edges.items()
            if rank in (source, to)
            for m in messages
        ]
        bytes_in_flight = (
            sum(m.size for m in mine if m.until is not None and m.since <= tick < m.until)
            for tick in range(self.now)
        )
        return max(bytes_in_flight, default=0)


@st.composite
def programs_of_any_kind(draw: st.DrawFn) -> list[Program]:
    """Programs that can end with one message per edge, recorded from a random run."""
    ranks = draw(st.integers(1, 4))
    effects: list[list[Effect]] = [[] for _ in range(ranks)]
    queues: dict[tuple[int, int, str], int] = {}  # the micro-batch that is on an edge
    for _ in range(draw(st.integers(0, 30))):
        rank = draw(st.integers(0, ranks - 1))
        mb = draw(st.integers(0, 3))
        peers = [to for to in range(ranks) if to != rank]
        group = tuple(draw(st.lists(st.sampled_from(peers), unique=True))) if peers else ()
        ways: list[Any] = [Run(f"stage {rank}", mb), Run("advance", mb), Run("part 0", mb)]
        ways += [AllReduce((rank, *group), mb)] * 2
        ways += [Send(to, mb) for to in peers if (rank, to, "stages") not in queues]
        ways += [Broadcast(rank, mb)] * all((rank, to, "returns") not in queues for to in peers)
        ways += [Fence(mb)] * all(
            sent != mb for (source, _, _), sent in queues.items() if source == rank
        )
        taken: dict[Effect, tuple[int, int, str]] = {}
        for edge, sent in queues.items():
            if edge[1] == rank:
                taken[Recv(edge[0], sent) if edge[2] == "stages" else Broadcast(edge[0], sent)] = (
                    edge
                )
        effect = draw(st.sampled_from([*taken, *ways]))
        for each in effect.ranks if isinstance(effect, Collective) else (rank,):
            effects[each].append(effect)
        if effect in taken:
            del queues[taken[effect]]
        elif isinstance(effect, Send):
            queues[rank, effect.to, "stages"] = mb
        elif isinstance(effect, Broadcast):
            queues |= {(rank, to, "returns"): mb for to in peers}
    for (source, to, kind), mb in queues.items():
        effects[to].append(Recv(source, mb) if kind == "stages" else Broadcast(source, mb))
    return [Program(rank, ranks, tuple(mine)) for rank, mine in enumerate(effects)]


@st.composite
def schedules(draw: st.DrawFn) -> list[Program]:
    """Programs made by `make_programs`."""
    jobs: list[Job] = []
    for index in range(draw(st.integers(1, 7))):
        feeding = [i for i in range(index) if jobs[i].feeds]
        jobs.append(Job(draw(st.booleans()), draw(st.sampled_from([None, *feeding]))))
    buffers = draw(st.sampled_from([None, 1, 2]))
    return list(
        make_programs(draw(st.integers(1, 4)), jobs, buffers=buffers, advances=draw(st.booleans()))
    )


NAMES = ("stage", "advance", "latency", "message", "output", "launch", "meet", "uneven")
prices = st.fixed_dictionaries({name: st.integers(0, 3) for name in NAMES})


def costs_of(price: dict[str, int]) -> Costs:
    """The ticking machine's costs, at one byte per tick."""
    return Costs(
        lambda stage, mb: price["stage"] * (1 + mb),
        advance=price["advance"],
        latency=price["latency"],
        bytes_per_second=1,
        message_bytes=price["message"],
        output_bytes=price["output"],
        launch=price["launch"],
        parts=lambda part, rank: price["uneven"] * rank,
        collective=lambda effect: price["meet"] * len(effect.ranks),
    )
