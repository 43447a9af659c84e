"""The checker: programs are proved right before anything moves.

What one rank's program says by itself is `weft.transforms.pipelines.rank_checks`; here is what ranks say to each other.

The machine it runs them on: every rank takes its effects in order; each edge is a queue of `capacity` messages, one
for what stages send and one for what returns. A send waits while its queue is full, a receive while it is empty, a
fence until its messages were received. Ranks are deterministic and each queue has one writer and one reader, so what
is sent and whether all reach their end do not depend on the order in which ranks move, and more capacity never blocks
(Kahn, 1974, "The semantics of a simple language for parallel programming"): one run with one message an edge decides.
`weft.proofs.solver.programs_exhaustive` holds that against all interleavings.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from weft.arguments import kind_of
from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError
from weft.transforms.pipelines.rank_checks import check_buffers, check_peers, check_values, returned


@attrs.frozen
class Edge:
    """A queue from one rank to another: of what stages send, or of what returns from the last stage."""

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
        case Broadcast(root) if root == step.rank:
            return tuple(Edge(root, rank, "returns") for rank in range(num_ranks) if rank != root)
    return ()


def takes(step: Step) -> Edge | None:
    """The edge that an effect takes a message from."""
    match step.effect:
        case Recv(source):
            return Edge(source, step.rank, "stages")
        case Broadcast(root) if root != step.rank:
            return Edge(root, step.rank, "returns")
    return None


def matches(sent: Step, taken: Step) -> bool:
    """Whether a message is what its receiver waits for: of the micro-batch, in the schema."""
    ours, theirs = taken.effect, sent.effect
    assert isinstance(ours, Recv | Broadcast)
    assert isinstance(theirs, Send | Broadcast)
    return (theirs.microbatch, theirs.schema) == (ours.microbatch, ours.schema)


class Machine:
    """Programs under way: where each rank is, and what is on each edge."""

    def __init__(self, programs: Sequence[Program], capacity: int = 1) -> None:
        self.programs = tuple(programs)
        self.capacity = capacity
        self.at = [0] * len(programs)
        self.queues: dict[Edge, deque[Step]] = {}

    def place(self, at: Sequence[int]) -> None:
        """Put each rank where it has performed so many of its effects: on an edge is what was sent and not received."""
        self.at = list(at)
        done = [Step(p.rank, e) for p, count in zip(self.programs, at, strict=True) for e in p.effects[:count]]
        received = Counter(edge for step in done if (edge := takes(step)) is not None)
        self.queues = {}
        for step in done:
            for edge in puts(step, len(self.programs)):
                self.queues.setdefault(edge, deque()).append(step)
        for edge, count in received.items():
            for _ in range(min(count, len(self.queues.get(edge, ())))):
                self.queues[edge].popleft()

    def next(self, rank: int) -> Step | None:
        """What a rank is about to do; None at its end."""
        effects = self.programs[rank].effects
        return Step(rank, effects[self.at[rank]]) if self.at[rank] < len(effects) else None

    def blockers(self, step: Step) -> tuple[int, ...]:
        """The ranks that must move before this can."""
        edge = takes(step)
        if edge is not None:
            return () if self.queues.get(edge) else (edge.source,)
        if isinstance(step.effect, Fence):
            mb = step.effect.microbatch
            mine = (e for e in self.queues if e.source == step.rank)
            return tuple(e.to for e in mine if any(sent.effect.microbatch == mb for sent in self.queues[e]))
        full = (e for e in puts(step, len(self.programs)) if len(self.queues.get(e, ())) >= self.capacity)
        return tuple(edge.to for edge in full)

    def ready(self) -> list[Step]:
        """What can run now."""
        waiting = (self.next(rank) for rank in range(len(self.programs)))
        return [step for step in waiting if step is not None and not self.blockers(step)]

    def move(self, step: Step) -> None:
        """Run one effect.

        Raises:
            ProgramError: it receives a message of another micro-batch, schema or kind than it expects.
        """
        edge = takes(step)
        if edge is not None:
            sent = self.queues[edge].popleft()
            if not matches(sent, step):
                raise ProgramError(
                    f"check of {len(self.programs)} programs",
                    f"{sent} meets {step}",
                    "the same micro-batches in the same order, and one schema, on both ends of an edge",
                )
        for edge in puts(step, len(self.programs)):
            self.queues.setdefault(edge, deque()).append(step)
        self.at[step.rank] += 1

    def refuse_leftovers(self) -> None:
        """Raise ProgramError if a message was sent that nobody receives."""
        for edge, queue in self.queues.items():
            if queue:
                instead = f"a {'recv' if edge.carries == 'stages' else 'broadcast'} on rank {edge.to}"
                raise ProgramError(f"check of {len(self.programs)} programs", f"{queue[0]} is never received", instead)

    def deadlock(self) -> ProgramError:
        """Why nothing can move: a cycle of ranks that wait for each other, or a rank that waits for one at its end."""
        rank, chain = next(r for r in range(len(self.programs)) if self.next(r) is not None), list[Step]()
        while (step := self.next(rank)) is not None and step not in chain:
            chain.append(step)
            rank = self.blockers(step)[0]
        links = chain if step is None else chain[chain.index(step) :]
        targets = [*(link.rank for link in links[1:]), rank]
        waits = "; ".join(f"{link} waits for rank {target}" for link, target in zip(links, targets, strict=True))
        ends = "a cycle" if step is not None else "which is at its end"
        return ProgramError(
            f"check of {len(self.programs)} programs",
            f"no rank can go on: {waits}{': ' if step is not None else ', '}{ends}",
            "give every send a recv, and order them so that one message an edge is enough",
        )


def interleave(programs: Sequence[Program], *, capacity: int = 1) -> Iterator[Step]:
    """The effects of all ranks in an order in which one process can run them.

    Raises:
        ProgramError: a receive meets a message of another micro-batch or schema, no rank can go on, or a message is
            left over.
    """
    machine = Machine(programs, capacity)
    while steps := machine.ready():
        for step in steps:  # a step that is ready stays so: only its own rank takes from its queues
            machine.move(step)
            yield step
    if any(machine.next(rank) is not None for rank in range(len(programs))):
        raise machine.deadlock()
    machine.refuse_leftovers()


def check(programs: Sequence[Program], *, buffers: int | None = None) -> None:
    """Raise ProgramError unless the programs are right: all ranks run the same micro-batches, of the same classes, in
    the same order, and advance with all of them or with none; each effect finds what it needs; every receive meets its
    send, in order and schema; all ranks reach their end even where an edge holds one message; and no result is
    overwritten that is yet to be read, or whose sending no fence has waited for.

    What a job runs after (`Job.after`) is not in a program: `make_programs` keeps it, by proof.

    Args:
        programs: of all ranks, in order.
        buffers: results that a stage holds before it overwrites the oldest; None: each is a value of its own.
    """
    if not isinstance(programs, list | tuple) or not all(isinstance(program, Program) for program in programs):
        seen = kind_of(programs) + (" of other things" if isinstance(programs, list | tuple) else "")
        raise ProgramError(
            "check(programs)", seen, "the programs of all ranks: step.programs(), weft.effects.parse_listing(text)"
        )
    call = f"check of {len(programs)} programs"
    if not programs or (buffers is not None and buffers < 1):
        seen = f"buffers={buffers}" if programs else "no program"
        raise ProgramError(call, seen, "a program for each rank, and one buffer or more (None: no reuse)")
    for index, program in enumerate(programs):
        if (program.rank, program.num_ranks) != (index, len(programs)):
            seen = f"program {index} says it is of rank {program.rank} of {program.num_ranks}"
            raise ProgramError(call, seen, "give the programs of all ranks, in order")
        if program.classes != programs[0].classes:
            seen = f"rank 0 has micro-batches {programs[0].classes}, and rank {index} {program.classes}"
            raise ProgramError(call, seen, "make the batch by the same pure function on every rank")
        check_peers(program)
    _check_runs(programs)
    for program in programs:
        check_values(program, returned(programs[-1]))
        if buffers is not None:
            check_buffers(program, buffers)
    for _ in interleave(programs, capacity=1):
        pass


def _check_runs(programs: Sequence[Program]) -> None:
    """Raise ProgramError unless all ranks run the same micro-batches in the same order, and advance alike."""
    call = f"check of {len(programs)} programs"
    wanted = _ran(programs[0], "stage 0")
    count = len(programs[0].classes) or len(wanted)
    if sorted(wanted) != list(range(count)):
        raise ProgramError(call, f"rank 0 runs micro-batches {wanted}", f"each of the {count} from 0 on, once")
    advanced = sorted(_ran(programs[0], "advance"))
    for rank, program in enumerate(programs):
        if (ran := _ran(program, f"stage {rank}")) != wanted:
            seen = f"rank 0 runs micro-batches {wanted}, and rank {rank} {ran}"
            raise ProgramError(call, seen, "the same micro-batches in the same order on every rank")
        mine = sorted(_ran(program, "advance"))
        if mine != advanced or mine not in ([], list(range(count))):
            seen = f"rank {rank} advances with micro-batches {mine} of {count}, and rank 0 with {advanced}"
            raise ProgramError(call, seen, "every rank advances with each micro-batch once, or none with any")


def _ran(program: Program, what: str) -> list[int]:
    return [effect.microbatch for effect in program.effects if isinstance(effect, Run) and effect.what == what]
