"""The abstract machine: runs programs on queues that hold a few messages, without computing
anything.

Every rank performs its effects in order, and each edge is a queue of `capacity` messages. Results
that stages send and outputs that return have separate queues. A send waits while its queue is full,
a receive while it is empty, and a fence until its messages were received. A collective waits until
all its ranks have reached it.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError
from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    ReduceScatter,
    impossible,
)

_TOGETHER = (
    "the same collectives in the same order on all ranks of a group, with one shape and dtype"
)


@attrs.frozen
class Edge:
    """A queue from one rank to another, either for the results that stages send or for the outputs
    that return from the last stage."""

    source: int
    to: int
    carries: Literal["stages", "returns"]


@attrs.frozen
class Step:
    """One effect about to run on one rank."""

    rank: int
    effect: Effect

    def __str__(self) -> str:
        return f"rank {self.rank}: '{self.effect}'"


def puts(step: Step, num_ranks: int) -> tuple[Edge, ...]:
    """The edges that an effect puts a message on."""
    match step.effect:
        case Send(to):
            return (Edge(step.rank, to, "stages"),)
        case Broadcast(root, ranks=ranks):
            receivers = range(num_ranks) if ranks is None else ranks
            return tuple(
                Edge(root, rank, "returns") for rank in receivers if rank != root == step.rank
            )
        case (
            Run()
            | Recv()
            | Fence()
            | AllReduce()
            | AllGather()
            | ReduceScatter()
            | AllToAll()
            | PPermute()
        ):
            return ()


def takes(step: Step) -> Edge | None:
    """The edge that an effect takes a message from."""
    match step.effect:
        case Recv(source):
            return Edge(source, step.rank, "stages")
        case Broadcast(root):
            if root != step.rank:
                return Edge(root, step.rank, "returns")
            return None
        case (
            Run()
            | Send()
            | Fence()
            | AllReduce()
            | AllGather()
            | ReduceScatter()
            | AllToAll()
            | PPermute()
        ):
            return None


def matches(sent: Step, taken: Step) -> bool:
    """Whether a message has the micro-batch, stage and schema that its receiver expects."""
    ours = taken.effect
    theirs = sent.effect
    assert isinstance(ours, Recv | Broadcast)
    assert isinstance(theirs, Send | Broadcast)
    same = (theirs.microbatch, theirs.schema) == (ours.microbatch, ours.schema)
    return same and stage_sent(sent) == stage_sent(taken)


def stage_sent(step: Step) -> int | None:
    """The stage whose result a send or a receive carries; None for an output that returns."""
    match step.effect:
        case Send(stage=stage):
            if stage is None:
                return step.rank
            return stage
        case Recv(source, stage=stage):
            if stage is None:
                return source
            return stage
        case (
            Run()
            | Broadcast()
            | Fence()
            | AllReduce()
            | AllGather()
            | ReduceScatter()
            | AllToAll()
            | PPermute()
        ):
            return None


class Machine:
    """Programs under way: the position of each rank, and the messages on each edge."""

    def __init__(self, programs: Sequence[Program], capacity: int = 1) -> None:
        self.programs = tuple(programs)
        self.call = f"check of {len(programs)} programs"
        self.capacity = capacity
        self.at = [0] * len(programs)
        self.queues: dict[Edge, deque[Step]] = {}
        self._meetings = [_meetings(program) for program in self.programs]

    def place(self, at: Sequence[int]) -> None:
        """Move each rank to where it has performed `at[rank]` effects. An edge then holds the
        messages that were sent but not received."""
        self.at = list(at)
        done = [
            Step(p.rank, e)
            for p, count in zip(self.programs, at, strict=True)
            for e in p.effects[:count]
        ]
        received = Counter(edge for step in done if (edge := takes(step)) is not None)
        self.queues = {}
        for step in done:
            for edge in puts(step, len(self.programs)):
                self.queues.setdefault(edge, deque()).append(step)
        for edge, count in received.items():
            # No more than was sent: a monitor reads `at` from records of different age, in which a
            # receive may be ahead of its send.
            for _ in range(min(count, len(self.queues.get(edge, ())))):
                self.queues[edge].popleft()

    def next(self, rank: int) -> Step | None:
        """The next effect of a rank; None at its end."""
        effects = self.programs[rank].effects
        if self.at[rank] < len(effects):
            return Step(rank, effects[self.at[rank]])
        return None

    def blockers(self, step: Step) -> tuple[int, ...]:
        """The ranks that must move before this effect can run."""
        edge = takes(step)
        if edge is not None:
            if self.queues.get(edge):
                return ()
            return (edge.source,)
        match step.effect:
            case AllReduce() | AllGather() | ReduceScatter() | AllToAll() | PPermute():
                met = self._meeting(step)
                return tuple(rank for rank, at in met.items() if at is None or self.at[rank] < at)
            case Fence(mb):
                mine = (e for e in self.queues if e.source == step.rank)
                return tuple(
                    e.to
                    for e in mine
                    if any(sent.effect.microbatch == mb for sent in self.queues[e])
                )
            case Run() | Send() | Recv() | Broadcast():
                full = (
                    e
                    for e in puts(step, len(self.programs))
                    if len(self.queues.get(e, ())) >= self.capacity
                )
                return tuple(edge.to for edge in full)

    def _meeting(self, step: Step) -> dict[int, int | None]:
        """For each rank of a collective, the index of the effect with which it takes part in it;
        None if it has no such effect. `step` must be the next effect of its rank."""
        effect = step.effect
        assert isinstance(effect, Collective), "others meet nobody"
        # As in NCCL, the n-th collectives of a group's ranks belong together.
        number = self._meetings[step.rank][effect.ranks].index(self.at[step.rank])
        places_by_rank = {
            rank: self._meetings[rank].get(effect.ranks, ())
            for rank in effect.ranks
            if rank < len(self.programs)
        }
        return {
            rank: places[number] if number < len(places) else None
            for rank, places in places_by_rank.items()
        }

    def _match(self, step: Step) -> None:
        """Raise ProgramError if the ranks of a collective perform different collectives."""
        effect = step.effect
        if not isinstance(effect, Collective):
            return
        for rank, at in self._meeting(step).items():
            assert at is not None, "all ranks are there"
            if (theirs := self.programs[rank].effects[at]) != effect:
                instead = _TOGETHER
                problem = (
                    f"rank {step.rank} performs '{effect}' where rank {rank} performs '{theirs}'"
                )
                raise ProgramError(self.call, problem, instead)

    def ready(self) -> list[Step]:
        """The effects that can run now."""
        waiting = (self.next(rank) for rank in range(len(self.programs)))
        return [step for step in waiting if step is not None and not self.blockers(step)]

    def move(self, step: Step) -> None:
        """Run one effect.

        Raises:
            ProgramError: the effect receives a message of another micro-batch, stage or schema than
                it expects, or another rank of the collective performs a different one.
        """
        self._match(step)
        edge = takes(step)
        if edge is not None:
            sent = self.queues[edge].popleft()
            if not matches(sent, step):
                instead = (
                    "the same micro-batches in the same order, and one schema, on both ends of an"
                    " edge"
                )
                problem = (
                    f"rank {step.rank} expects '{step.effect}' but gets '{sent.effect}' from rank"
                    f" {sent.rank}"
                )
                raise ProgramError(self.call, problem, instead)
        for edge in puts(step, len(self.programs)):
            self.queues.setdefault(edge, deque()).append(step)
        self.at[step.rank] += 1

    def stray(self) -> ProgramError | None:
        """The error for an impossible collective; None if there is none. Its ranks must be distinct
        ranks of these programs and include its own rank, and its tensor's shape must allow it."""
        for rank, (program, meetings) in enumerate(zip(self.programs, self._meetings, strict=True)):
            for effect in program.effects:
                if isinstance(effect, Collective) and (mistake := impossible(effect)):
                    return ProgramError(self.call, f"rank {rank}: {mistake[0]}", mistake[1])
            for ranks, (first, *_) in meetings.items():
                if rank in ranks and len({*ranks} & {*range(len(self.programs))}) == len(ranks):
                    continue
                instead = (
                    f"different ranks from 0 to {len(self.programs) - 1}, and {rank} among them"
                )
                return ProgramError(self.call, str(Step(rank, program.effects[first])), instead)
        return None

    def leftover(self) -> ProgramError | None:
        """The error for a message that was sent and is never received; None if there is none."""
        edge = next((edge for edge, queue in self.queues.items() if queue), None)
        if edge is None:
            return None
        instead = f"a {'recv' if edge.carries == 'stages' else 'broadcast'} on rank {edge.to}"
        return ProgramError(self.call, f"{self.queues[edge][0]} is never received", instead)

    def deadlock(self) -> ProgramError:
        """The error for programs that cannot go on: ranks wait for each other, or for a rank that
        is at its end."""
        rank = next(r for r in range(len(self.programs)) if self.next(r) is not None)
        # Follow the waits from any blocked rank: they lead to a rank that is at its end, or into a
        # cycle.
        chain = list[Step]()
        while (step := self.next(rank)) is not None and step not in chain:
            chain.append(step)
            rank = self.blockers(step)[0]
        # The ranks before the cycle wait for it without being part of it.
        if step is None:
            links = chain
        else:
            links = chain[chain.index(step) :]
        targets = [*(link.rank for link in links[1:]), rank]
        waits = "; ".join(
            f"{link} waits for rank {target}" for link, target in zip(links, targets, strict=True)
        )
        if step is not None:
            ends = ": a cycle"
        else:
            ends = ", which is at its end"
        instead = "give every send a recv, and order them so that one message an edge is enough"
        if all(isinstance(link.effect, Collective) for link in links):
            instead = _TOGETHER
        return ProgramError(self.call, f"no rank can go on: {waits}{ends}", instead)


def _meetings(program: Program) -> dict[tuple[int, ...], list[int]]:
    """The indices of a rank's collectives, by the ranks that take part."""
    meetings = dict[tuple[int, ...], list[int]]()
    for index, effect in enumerate(program.effects):
        if isinstance(effect, Collective):
            meetings.setdefault(effect.ranks, []).append(index)
    return meetings


def interleave(programs: Sequence[Program], *, capacity: int = 1) -> Iterator[Step]:
    """The effects of all ranks in an order in which one process can run them.

    Raises:
        ProgramError: a receive gets a message of another micro-batch, stage or schema; no rank can
            go on; a message is left over; or a collective is not among ranks of these programs that
            include its own.
    """
    machine = Machine(programs, capacity)
    if (stray := machine.stray()) is not None:
        raise stray
    while steps := machine.ready():
        # All ready steps can run without asking again: a move of another rank never blocks them,
        # since each queue has one reader and one writer.
        for step in steps:
            machine.move(step)
            yield step
    waits = any(machine.next(rank) is not None for rank in range(len(programs)))
    if error := machine.deadlock() if waits else machine.leftover():
        raise error
