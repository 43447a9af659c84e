"""The checker: programs are proved right before anything moves.

The machine it runs them on: every rank takes its effects in order; each edge is a queue of `capacity` messages, one
for what stages send and one for what returns. A send waits while its queue is full, a receive while it is empty, a
fence until its messages were received. Ranks are deterministic and each queue has one writer and one reader, so what
is sent and whether all reach their end do not depend on the order in which ranks move, and more capacity never blocks
(Kahn, 1974, "The semantics of a simple language for parallel programming"): one run with one message an edge decides.
`weft.proofs.programs` holds that against all interleavings.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError


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
            mine, theirs = step.effect, sent.effect
            assert isinstance(mine, Recv | Broadcast)
            assert isinstance(theirs, Send | Broadcast)
            if (theirs.microbatch, theirs.schema) != (mine.microbatch, mine.schema):
                raise ProgramError(
                    "check of a pipeline's programs",
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
    """Raise ProgramError unless the programs are right: every receive meets its send, in order and schema; all ranks
    reach their end even where an edge holds one message; all work on micro-batches of the same class; each effect
    finds what it needs; and no result is overwritten that is still being sent.

    Args:
        programs: of all ranks, in order.
        buffers: results that a stage holds before it overwrites the oldest; None: each is a value of its own.
    """
    call = f"check of {len(programs)} programs"
    for index, program in enumerate(programs):
        if (program.rank, program.num_ranks) != (index, len(programs)):
            raise ProgramError(
                call,
                f"program {index} says it is of rank {program.rank} of {program.num_ranks}",
                "give the programs of all ranks, in order",
            )
        if program.classes != programs[0].classes:
            seen = f"rank 0 has micro-batches {programs[0].classes}, and rank {index} {program.classes}"
            raise ProgramError(call, seen, "make the batch by the same pure function on every rank")
        _check_ranks(program)
    for _ in interleave(programs, capacity=1):
        pass
    for program in programs:
        _check_values(program)
        if buffers is not None:
            _check_buffers(program, buffers)


def _check_ranks(program: Program) -> None:
    """Raise ProgramError if an effect names a rank that there is not, or its own as the other end."""
    for effect in program.effects:
        match effect:
            case Send(peer) | Recv(peer):
                ok = peer < program.num_ranks and peer != program.rank
            case Broadcast(root):
                ok = root < program.num_ranks
            case _:
                ok = True
        if not ok:
            seen = f"'{effect}'"
            instead = f"another rank than {program.rank}, below {program.num_ranks}"
            raise ProgramError(f"check of rank {program.rank}'s program", seen, instead)


def _check_values(program: Program) -> None:
    """Raise ProgramError unless each effect finds what it needs on its rank: an input, a result, an output."""
    returning = {effect.microbatch for effect in program.effects if isinstance(effect, Broadcast)}
    done: set[tuple[str, int]] = set()
    for effect in program.effects:
        mb = effect.microbatch
        ran = ("stage", mb) in done
        match effect:
            case Recv():
                what, ok = "recv", not ran
            case Run("advance"):
                what, ok = "advance", ran and (mb not in returning or ("broadcast", mb) in done)
            case Run():
                what, ok = "stage", program.rank == 0 or ("recv", mb) in done
            case Send():
                what, ok = "send", ran
            case Broadcast():
                what, ok = "broadcast", ran
            case Fence():
                what, ok = "fence", bool({("send", mb), ("broadcast", mb)} & done)
        if not ok or (what, mb) in done:
            raise ProgramError(
                f"check of rank {program.rank}'s program",
                f"'{effect}', for which it does not hold what that needs",
                "recv, then run, then send or broadcast, then advance, each once a micro-batch",
            )
        done.add((what, mb))


def _check_buffers(program: Program, buffers: int) -> None:
    """Raise ProgramError if a stage runs into a buffer that is still being sent."""
    held: list[Run] = []
    unfenced: dict[int, Effect] = {}
    for effect in program.effects:
        match effect:
            case Fence(mb):
                unfenced.pop(mb, None)
            case Run("advance"):
                pass
            case Run():
                old = held[-buffers].microbatch if len(held) >= buffers else None
                if old is not None and old in unfenced:
                    raise ProgramError(
                        f"check of rank {program.rank}'s program",
                        f"'{effect}' overwrites what '{unfenced[old]}' may still be sending",
                        f"'{Fence(old)}' before it",
                    )
                held.append(effect)
            case Send() | Broadcast():
                if not (isinstance(effect, Broadcast) and effect.root != program.rank):
                    unfenced[effect.microbatch] = effect
