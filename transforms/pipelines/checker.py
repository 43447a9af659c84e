"""The checker: proves programs right before anything moves. `CheckedPrograms` are what a transport runs.

It checks each rank's program by itself, and then runs all of them on an abstract machine. There, every rank performs
its effects in order, and each edge is a queue of `capacity` messages; what stages send and what returns have queues of
their own. A send waits while its queue is full, a receive while it is empty, and a fence until its messages were
received.

Ranks are deterministic, and each queue has one writer and one reader. So the messages, and whether all ranks reach
their end, do not depend on the order in which ranks move, and more capacity never blocks (Kahn, 1974, "The semantics of
a simple language for parallel programming"). So one run of the machine, with one message per edge, is enough: programs
that pass it end in every order and with every capacity. `weft.proofs.solver.programs_exhaustive` compares that with all
interleavings.
"""

import functools
import hashlib
import platform
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import attrs
import torch

from weft import __version__
from weft.arguments.checks import Rule, check_values
from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send, listing
from weft.errors import ProgramError

PROGRAMS: Rule = (
    lambda given: isinstance(given, list | tuple) and all(isinstance(program, Program) for program in given),
    "the programs of all ranks: step.programs(), weft.effects.parse_listing(text)",
)


@attrs.frozen
class Edge:
    """A queue from one rank to another, for what stages send or for what returns from the last stage."""

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
    """Whether a message has the micro-batch and the schema that its receiver waits for."""
    ours, theirs = taken.effect, sent.effect
    assert isinstance(ours, Recv | Broadcast)
    assert isinstance(theirs, Send | Broadcast)
    return (theirs.microbatch, theirs.schema) == (ours.microbatch, ours.schema)


class Machine:
    """Programs under way: the position of each rank, and the messages on each edge."""

    def __init__(self, programs: Sequence[Program], capacity: int = 1) -> None:
        self.programs = tuple(programs)
        self.call = f"check of {len(programs)} programs"
        self.capacity = capacity
        self.at = [0] * len(programs)
        self.queues: dict[Edge, deque[Step]] = {}

    def place(self, at: Sequence[int]) -> None:
        """Move each rank to where it has performed `at[rank]` effects; an edge then holds what was sent and not
        received."""
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
        """The next effect of a rank; None at its end."""
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
        """The effects that can run now."""
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
                instead = "the same micro-batches in the same order, and one schema, on both ends of an edge"
                raise ProgramError(self.call, f"{sent} meets {step}", instead)
        for edge in puts(step, len(self.programs)):
            self.queues.setdefault(edge, deque()).append(step)
        self.at[step.rank] += 1

    def leftover(self) -> ProgramError | None:
        """The error for a message that was sent and that nobody receives; None if there is none."""
        edge = next((edge for edge, queue in self.queues.items() if queue), None)
        if edge is None:
            return None
        instead = f"a {'recv' if edge.carries == 'stages' else 'broadcast'} on rank {edge.to}"
        return ProgramError(self.call, f"{self.queues[edge][0]} is never received", instead)

    def deadlock(self) -> ProgramError:
        """The error for programs that cannot go on: ranks wait for each other, or for one that is at its end."""
        rank, chain = next(r for r in range(len(self.programs)) if self.next(r) is not None), list[Step]()
        while (step := self.next(rank)) is not None and step not in chain:
            chain.append(step)
            rank = self.blockers(step)[0]
        links = chain if step is None else chain[chain.index(step) :]
        targets = [*(link.rank for link in links[1:]), rank]
        waits = "; ".join(f"{link} waits for rank {target}" for link, target in zip(links, targets, strict=True))
        ends = ": a cycle" if step is not None else ", which is at its end"
        instead = "give every send a recv, and order them so that one message an edge is enough"
        return ProgramError(self.call, f"no rank can go on: {waits}{ends}", instead)


def interleave(programs: Sequence[Program], *, capacity: int = 1) -> Iterator[Step]:
    """The effects of all ranks in an order in which one process can run them.

    Raises:
        ProgramError: a receive meets a message of another micro-batch or schema, no rank can go on, or a message is
            left over.
    """
    machine = Machine(programs, capacity)
    while steps := machine.ready():
        for step in steps:  # a step that is ready stays ready: only its own rank takes from its queues
            machine.move(step)
            yield step
    waits = any(machine.next(rank) is not None for rank in range(len(programs)))
    if error := machine.deadlock() if waits else machine.leftover():
        raise error


def check(programs: Sequence[Program], *, buffers: int | None = None) -> None:
    """Raise ProgramError unless the programs are right: all ranks run the same micro-batches, of the same classes, in
    the same order, and advance with all of them or with none; each effect finds what it needs; every receive meets its
    send, in order and schema; all ranks reach their end even if an edge holds only one message; and no result is
    overwritten before it was read, or before a fence has waited until it was sent.

    The job that a job runs after (`Job.after`) is not part of a program; `weft.proofs.solver.schedule_proof` proves
    that `make_programs` respects it.

    Args:
        programs: of all ranks, in order.
        buffers: results that a stage holds before it overwrites the oldest; None: it overwrites none.
    """
    check_values("check(programs)", {"programs": PROGRAMS}, {"programs": programs}, ProgramError)
    for mistake in _mistakes(programs, buffers):
        raise mistake
    for _ in interleave(programs, capacity=1):
        pass


def _mistakes(programs: Sequence[Program], buffers: int | None) -> Iterator[ProgramError]:
    """The errors for what is wrong before any rank moves. Only the first one counts: the others may follow from it."""
    call = f"check of {len(programs)} programs"
    if not programs or (buffers is not None and buffers < 1):
        seen = f"buffers={buffers}" if programs else "no program"
        yield ProgramError(call, seen, "a program for each rank, and one buffer or more (None: no reuse)")
    for index, program in enumerate(programs):
        if (program.rank, program.num_ranks) != (index, len(programs)):
            seen = f"program {index} says it is of rank {program.rank} of {program.num_ranks}"
            yield ProgramError(call, seen, "give the programs of all ranks, in order")
        if program.classes != programs[0].classes:
            seen = f"rank 0 has micro-batches {programs[0].classes}, and rank {index} {program.classes}"
            yield ProgramError(call, seen, "make the batch by the same pure function on every rank")
        yield from check_peers(program)
    yield from _check_runs(programs)
    returning = frozenset(effect.microbatch for effect in programs[-1].effects if isinstance(effect, Broadcast))
    for program in programs:
        yield from check_needs(program, returning)
        if buffers is not None:
            yield from check_buffers(program, buffers)


def _check_runs(programs: Sequence[Program]) -> Iterator[ProgramError]:
    """Errors unless all ranks run the same micro-batches in the same order, and advance alike."""
    call = f"check of {len(programs)} programs"
    wanted = _ran(programs[0], "stage 0")
    count = len(programs[0].classes) or len(wanted)
    if sorted(wanted) != list(range(count)):
        yield ProgramError(call, f"rank 0 runs micro-batches {wanted}", f"each of the {count} from 0 on, once")
    advanced = sorted(_ran(programs[0], "advance"))
    for rank, program in enumerate(programs):
        if (ran := _ran(program, f"stage {rank}")) != wanted:
            seen = f"rank 0 runs micro-batches {wanted}, and rank {rank} {ran}"
            yield ProgramError(call, seen, "the same micro-batches in the same order on every rank")
        mine = sorted(_ran(program, "advance"))
        if mine != advanced or mine not in ([], list(range(count))):
            seen = f"rank {rank} advances with micro-batches {mine} of {count}, and rank 0 with {advanced}"
            yield ProgramError(call, seen, "every rank advances with each micro-batch once, or none with any")


def _ran(program: Program, what: str) -> list[int]:
    return [effect.microbatch for effect in program.effects if isinstance(effect, Run) and effect.what == what]


def check_peers(program: Program) -> Iterator[ProgramError]:
    """An error for each effect that this rank cannot have: a rank runs its own stage, receives from the rank
    before it and sends to the rank after it; the last rank broadcasts."""
    rank, last = program.rank, program.num_ranks - 1
    for effect in program.effects:
        match effect:
            case Send(to):
                ok = rank < last and to == rank + 1
                instead = f"send to {rank + 1}" if rank < last else "a broadcast: the last rank sends to none"
            case Recv(source):
                ok = rank > 0 and source == rank - 1
                instead = f"recv from {rank - 1}" if rank > 0 else "no recv: the first stage runs on the batch"
            case Broadcast(root):
                ok, instead = root == last, f"broadcast from {last}, the last rank"
            case Run(what):
                ok, instead = what in (f"stage {rank}", "advance"), f"run stage {rank}, or run advance"
            case Fence():
                ok, instead = True, ""
        if not ok:
            yield _refused(program, f"'{effect}' on rank {rank} of {last + 1}", instead)


def check_needs(program: Program, returning: frozenset[int]) -> Iterator[ProgramError]:
    """An error for each effect that does not stand once, after the effect that makes its input, result or output.

    Args:
        program: one rank's.
        returning: the micro-batches whose output returns, and with which the ranks advance.
    """
    done: set[Effect] = set()  # their schemas are left out
    for effect in program.effects:
        bare = _bare(effect)
        missing = [need for need in _needs(program, bare, returning) if need not in done]
        if missing or (bare in done and not isinstance(bare, Fence)):
            seen = f"'{effect}' without '{missing[0]}' before it" if missing else f"'{effect}' once more"
            instead = "recv, then run, then send or broadcast, then fence and advance, each once a micro-batch"
            yield _refused(program, seen, instead)
        done.add(bare)


def _bare(effect: Effect) -> Effect:
    """The effect without its schema."""
    return effect if isinstance(effect, Run | Fence) else attrs.evolve(effect, schema=None)


def _needs(program: Program, effect: Effect, returning: frozenset[int]) -> Iterator[Effect]:
    """The effects that must stand before an effect."""
    rank, last, mb = program.rank, program.num_ranks - 1, effect.microbatch
    match effect:
        case Recv():
            pass
        case Run("advance"):
            yield Run(f"stage {rank}", mb)
            if mb in returning:
                yield Broadcast(last, mb)
        case Run():
            if rank > 0:
                yield Recv(rank - 1, mb)
        case Send() | Broadcast():
            yield Run(f"stage {rank}", mb)
        case Fence():
            yield Send(rank + 1, mb) if rank < last else Broadcast(last, mb)


def check_buffers(program: Program, buffers: int) -> Iterator[ProgramError]:
    """An error for each stage that overwrites a result that is still to be sent or read, or that may still be in
    flight: only a fence says that it is not. The program has passed `check_needs`."""
    effects, last = [_bare(effect) for effect in program.effects], program.num_ranks - 1
    first = {effect: place for place, effect in reversed(list(enumerate(effects)))}
    stage = f"stage {program.rank}"
    runs = [(place, e) for place, e in enumerate(effects) if e == Run(stage, e.microbatch)]
    for (_, old), (place, new) in zip(runs, runs[buffers:], strict=False):
        mb = old.microbatch
        out: Effect = Send(program.rank + 1, mb) if program.rank < last else Broadcast(last, mb)
        uses: list[Effect] = [out, Fence(mb)] if out in first else []
        if program.rank == last and out in first and Run("advance", mb) in first:
            uses.append(Run("advance", mb))  # an advance reads the output where the stage left it
        late = next((use for use in uses if first.get(use, place) >= place), None)
        if late is not None:
            seen = f"'{new}' overwrites what '{old}' made, with no '{late}' before it"
            yield _refused(program, seen, f"'{late}' before '{new}'")


def _refused(program: Program, seen: str, instead: str) -> ProgramError:
    return ProgramError(f"check of rank {program.rank}'s program", seen, instead)


@attrs.frozen(eq=False)
class CheckedPrograms:
    """The programs of a run, checked when this is made, and all that ranks must agree on before they perform them.

    Args:
        programs: of all ranks.
        buffers: results that a stage holds before it overwrites the oldest; None: it overwrites none.
        read_sources: returns the digest of each stage's source, and of `advance`'s (`source_digest`). It takes a while,
            and only processes compare them.
        spans: for each rank the effects `start:stop` that this run performs; earlier runs have performed those before,
            and later runs perform those after. None: all effects.
    """

    programs: tuple[Program, ...]
    buffers: int | None = None
    read_sources: Callable[[], tuple[str, ...]] = tuple
    spans: tuple[tuple[int, int], ...] | None = None

    def __attrs_post_init__(self) -> None:
        check(self.programs, buffers=self.buffers)

    @functools.cached_property
    def text(self) -> str:
        """The lines that all ranks compare: versions, sources, programs."""
        versions = f"weft {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        return "\n".join([versions, *self.read_sources(), listing(self.programs)])

    @functools.cached_property
    def digest(self) -> str:
        """A short hash of `text`."""
        return hashlib.blake2b(self.text.encode(), digest_size=6).hexdigest()

    @functools.cached_property
    def num_microbatches(self) -> int:
        """The number of micro-batches of the programs."""
        return 1 + max((effect.microbatch for program in self.programs for effect in program.effects), default=-1)

    def span(self, rank: int) -> tuple[int, int]:
        """The effects of a rank that this run performs, as `(start, stop)`."""
        return (0, len(self.programs[rank].effects)) if self.spans is None else self.spans[rank]

    @functools.cached_property
    def order(self) -> tuple[Step, ...]:
        """The effects of this run, in an order in which one thread can perform them for all ranks."""
        counts, order = [0] * len(self.programs), []
        for step in interleave(self.programs):
            start, stop = self.span(step.rank)
            if start <= counts[step.rank] < stop:
                order.append(step)
            counts[step.rank] += 1
        return tuple(order)

    @functools.cached_property
    def leaves_messages(self) -> bool:
        """Whether messages that a later run receives are still under way when this run is over."""
        machine = Machine(self.programs)
        machine.place([self.span(rank)[1] for rank in range(len(self.programs))])
        return any(machine.queues.values())

    @property
    def lends(self) -> bool:
        """Whether results are lent: the sender overwrites them later, so that a receiver, whose stage may keep or
        return what it got, must copy them."""
        return self.buffers is not None
