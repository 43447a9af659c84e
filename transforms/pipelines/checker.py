"""The checker: proves programs correct before anything moves. A transport runs only
`CheckedPrograms`.

The checker looks at each rank's program by itself, and then runs all programs on an abstract
machine (`weft.transforms.pipelines.machine`).

Stage s runs on rank s % num_ranks. All ranks run the same number of stages: one, or several in turn
(interleaved stages).

Ranks are deterministic, and each queue has one writer and one reader. Therefore neither the
messages nor whether all ranks reach their end depends on the order in which ranks move, and more
capacity never blocks (Kahn, 1974, "The semantics of a simple language for parallel programming").
One run of the machine, with one message per edge, is therefore enough: programs that pass it end in
every order and with every capacity. `weft.proofs.checks.programs_exhaustive` compares this claim
with all interleavings.
"""

import functools
import hashlib
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

from weft import __version__
from weft.arguments.checks import Rule, check_values
from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send, listing
from weft.errors import ProgramError
from weft.meshes.collectives import AllGather, AllReduce, AllToAll, PPermute, ReduceScatter
from weft.meshes.mesh import Mesh
from weft.transforms.pipelines.lanes import lane_rank, spread
from weft.transforms.pipelines.machine import Machine, Step, interleave, puts, stage_sent, takes

_COLLECTIVES = (
    "a collective inside a stage (weft.all_reduce(x, axis)), with weft.shard(stage, mesh, ...) or "
    "weft.pipeline(stages, mesh=mesh): a program of a pipeline performs none"
)

PROGRAMS: Rule = (
    lambda value: (
        isinstance(value, list | tuple) and all(isinstance(program, Program) for program in value)
    ),
    "the programs of all ranks: step.programs(), weft.effects.parse_listing(text)",
)


def check(programs: Sequence[Program], *, buffers: int | None = None) -> None:
    """Raise ProgramError unless the programs are correct: all ranks run the same micro-batches, of
    the same classes, in the same order, and advance with all of them or with none; each effect
    finds what it needs; every receive matches its send in order and schema; all ranks reach their
    end even if an edge holds only one message; and no result is overwritten before it was read, or
    before a fence has waited until it was sent.

    Programs do not contain `Job.after`, so it is not checked here;
    `weft.proofs.evidence.solver.schedule_proof` proves that `make_programs` respects it.

    Args:
        programs: the programs of all ranks, in order.
        buffers: the number of results that a stage holds before it overwrites the oldest one. None:
            it never overwrites a result.
    """
    check_values("check(programs)", {"programs": PROGRAMS}, {"programs": programs}, ProgramError)
    # First what is wrong in a single program: the machine below would only report the deadlock that
    # follows from it.
    for mistake in _mistakes(programs, buffers):
        raise mistake
    # One message per edge is the hardest case: programs that end with it end with more.
    for _ in interleave(programs, capacity=1):
        pass


def count_stages(programs: Sequence[Program]) -> int:
    """The number of stages that programs run, rounded up to the same number on each rank.

    >>> count_stages([Program(0, 1, (Run("stage 0", 0), Run("stage 1", 0)))])
    2
    """
    stages = [
        e.stage
        for program in programs
        for e in program.effects
        if isinstance(e, Run) and e.stage is not None
    ]
    return -(-(max(stages, default=0) + 1) // len(programs)) * len(programs)


def _mistakes(programs: Sequence[Program], buffers: int | None) -> Iterator[ProgramError]:
    """The errors that can be found before any rank moves. Only the first one counts: the others may
    follow from it."""
    call = f"check of {len(programs)} programs"
    if not programs or (buffers is not None and buffers < 1):
        if programs:
            problem = f"buffers={buffers}"
        else:
            problem = "no program"
        yield ProgramError(
            call, problem, "a program for each rank, and one buffer or more (None: no reuse)"
        )
    stages = count_stages(programs)
    for index, program in enumerate(programs):
        if (program.rank, program.num_ranks) != (index, len(programs)):
            problem = f"program {index} says it is of rank {program.rank} of {program.num_ranks}"
            yield ProgramError(call, problem, "give the programs of all ranks, in order")
        # The layout of messages follows from the class: a rank with other classes would receive
        # into buffers of other sizes.
        if program.classes != programs[0].classes:
            problem = (
                f"rank 0 has micro-batches {programs[0].classes}, and rank {index}"
                f" {program.classes}"
            )
            yield ProgramError(
                call, problem, "make the batch by the same pure function on every rank"
            )
        yield from check_peers(program, stages)
    yield from _check_runs(programs)
    # Only the last rank has outputs, so its broadcasts tell what returns.
    returning = frozenset(
        effect.microbatch for effect in programs[-1].effects if isinstance(effect, Broadcast)
    )
    for program in programs:
        yield from check_needs(program, returning, stages)
        if buffers is not None:
            yield from check_buffers(program, buffers, stages)
    # With one stage a rank, results go up and outputs come back down from the last rank: no channel
    # carries both kinds.
    if stages > len(programs):
        yield from check_channels(programs)


def _check_runs(programs: Sequence[Program]) -> Iterator[ProgramError]:
    """Errors unless all stages run the same micro-batches in the same order, and all ranks advance
    alike."""
    call = f"check of {len(programs)} programs"
    ranks = len(programs)
    expected = _ran(programs[0], "stage 0")
    count = len(programs[0].classes) or len(expected)
    if sorted(expected) != list(range(count)):
        yield ProgramError(
            call, f"rank 0 runs micro-batches {expected}", f"each of the {count} from 0 on, once"
        )
    for stage in range(count_stages(programs)):
        rank = stage % ranks
        if (ran := _ran(programs[rank], f"stage {stage}")) != expected:
            if stage >= ranks:
                where = f" in stage {stage}"
            else:
                where = ""
            problem = f"rank 0 runs micro-batches {expected}, and rank {rank} {ran}{where}"
            yield ProgramError(
                call, problem, "the same micro-batches in the same order on every rank"
            )
    advanced = sorted(_ran(programs[0], "advance"))
    for rank, program in enumerate(programs):
        mine = sorted(_ran(program, "advance"))
        if mine != advanced or mine not in ([], list(range(count))):
            problem = (
                f"rank {rank} advances with micro-batches {mine} of {count}, and rank 0 with"
                f" {advanced}"
            )
            yield ProgramError(
                call, problem, "every rank advances with each micro-batch once, or none with any"
            )


def _ran(program: Program, what: str) -> list[int]:
    return [
        effect.microbatch
        for effect in program.effects
        if isinstance(effect, Run) and effect.what == what
    ]


def check_peers(program: Program, num_stages: int) -> Iterator[ProgramError]:
    """An error for each effect that this rank cannot have. A rank runs its own stages, receives
    from the previous rank and sends to the next one (rank 0 comes after the last rank). Only the
    last rank broadcasts. Collectives belong inside stages, not in programs."""
    rank = program.rank
    ranks = program.num_ranks
    last = ranks - 1
    following = (rank + 1) % ranks
    previous = (rank - 1) % ranks
    for effect in program.effects:
        sent_stage = stage_sent(Step(rank, effect))
        if sent_stage is None:
            sent = -1
        else:
            sent = sent_stage
        between = 0 <= sent < num_stages - 1 and ranks > 1
        match effect:
            case Send(to):
                ok = between and sent % ranks == rank and to == following
                if rank < last:
                    instead = f"send to {rank + 1}"
                else:
                    instead = "a broadcast: the last rank sends to none"
                if num_stages > ranks > 1:
                    instead = (
                        f"send stage {rank} to {following}: a stage of rank {rank}, and not the"
                        " last one"
                    )
            case Recv(source):
                ok = between and sent % ranks == source == previous
                if rank > 0:
                    instead = f"recv from {rank - 1}"
                else:
                    instead = "no recv: the first stage runs on the batch"
                if num_stages > ranks > 1:
                    instead = (
                        f"recv stage {previous} from {previous}: a stage of that rank, and not the"
                        " last one"
                    )
            case Broadcast(root):
                ok = root == last
                instead = f"broadcast from {last}, the last rank"
            case Run():
                is_local = effect.stage is not None and effect.stage % ranks == rank
                ok = is_local or effect.what == "advance"
                instead = f"run stage {rank}, or run advance"
            case Fence():
                ok = True
                instead = ""
            case AllReduce() | AllGather() | ReduceScatter() | AllToAll() | PPermute():
                ok = False
                instead = _COLLECTIVES
        if not ok:
            yield _refused(program, f"'{effect}' on rank {rank} of {last + 1}", instead)


def check_needs(
    program: Program, returning: frozenset[int], num_stages: int
) -> Iterator[ProgramError]:
    """An error for each effect that occurs twice, or that does not come after the effects that make
    what it uses.

    Args:
        program: the program of one rank.
        returning: the micro-batches whose output returns, and with which the ranks advance.
        num_stages: the number of stages on all ranks together.
    """
    # Without schemas, which are compared where a send meets its receive
    done: set[Effect] = set()
    for effect in program.effects:
        bare = _bare(program.rank, effect)
        needs = list(_needs(program, bare, returning, num_stages))
        missing = [need for need in needs if need not in done]
        if isinstance(bare, Fence) and len(missing) < len(needs):
            # A fence waits for whatever was sent before it, so one send is enough.
            missing = []
        # A second fence is harmless: it finds everything sent.
        if missing or (bare in done and not isinstance(bare, Fence)):
            shown = _shown(missing[0], num_stages > program.num_ranks) if missing else ""
            problem = (
                f"'{effect}' without '{shown}' before it" if missing else f"'{effect}' once more"
            )
            instead = (
                "recv, then run, then send or broadcast, then fence and advance, each once a"
                " micro-batch"
            )
            yield _refused(program, problem, instead)
        done.add(bare)


def _bare(rank: int, effect: Effect) -> Effect:
    """The effect without its schema, and with its stage filled in."""
    if isinstance(effect, Send | Recv):
        return attrs.evolve(effect, schema=None, stage=stage_sent(Step(rank, effect)))
    if isinstance(effect, Broadcast):
        return attrs.evolve(effect, schema=None)
    return effect


def _shown(effect: Effect, interleaved: bool) -> Effect:
    """The effect as programs write it: without the stage if each rank has only one."""
    if isinstance(effect, Send | Recv) and not interleaved:
        return attrs.evolve(effect, stage=None)
    return effect


def _needs(
    program: Program, effect: Effect, returning: frozenset[int], num_stages: int
) -> Iterator[Effect]:
    """The effects that must come before an effect. For a fence, any one of them is enough."""
    rank = program.rank
    ranks = program.num_ranks
    mb = effect.microbatch
    local_stages = range(rank, num_stages, ranks)
    match effect:
        case Recv() | AllReduce() | AllGather() | ReduceScatter() | AllToAll() | PPermute():
            pass
        case Run("advance"):
            yield from (Run(f"stage {stage}", mb) for stage in local_stages)
            if mb in returning:
                yield Broadcast(ranks - 1, mb)
        case Run():
            if (stage := effect.stage) and ranks > 1:
                yield Recv((rank - 1) % ranks, mb, stage=stage - 1)
            elif stage:
                yield Run(f"stage {stage - 1}", mb)
        case Send():
            yield Run(f"stage {effect.stage}", mb)
        case Broadcast():
            yield Run(f"stage {local_stages[-1]}", mb)
        case Fence():
            outs = (_out(program, stage, mb, num_stages) for stage in local_stages)
            yield from (out for out in outs if not isinstance(out, Run))


def _out(program: Program, stage: int, mb: int, num_stages: int) -> Effect:
    """The effect that consumes a stage's result: the one that sends it, or the next stage's run if
    that is on the same rank."""
    if stage == num_stages - 1:
        return Broadcast(program.num_ranks - 1, mb)
    if program.num_ranks == 1:
        return Run(f"stage {stage + 1}", mb)
    return Send((program.rank + 1) % program.num_ranks, mb, stage=stage)


def check_buffers(program: Program, buffers: int, num_stages: int) -> Iterator[ProgramError]:
    """An error for each run of a stage that overwrites a result too early: before the result was
    sent or read, or while it may still be in flight (which only a fence rules out). The program
    must have passed `check_needs`."""
    effects = [_bare(program.rank, effect) for effect in program.effects]
    places = defaultdict[Effect, list[int]](list)
    for place, effect in enumerate(effects):
        places[effect].append(place)
    interleaved = num_stages > program.num_ranks
    for stage in range(program.rank, num_stages, program.num_ranks):
        runs = [
            (place, e) for place, e in enumerate(effects) if isinstance(e, Run) and e.stage == stage
        ]
        # With `buffers` results held, each run overwrites the result of the run `buffers` earlier.
        for (_, old), (place, new) in zip(runs, runs[buffers:], strict=False):
            uses = _uses(program, places, stage, old.microbatch, num_stages)
            late = next(
                (use for use, after in uses if not any(after <= at < place for at in places[use])),
                None,
            )
            if late is not None:
                shown = _shown(late, interleaved)
                problem = f"'{new}' overwrites what '{old}' made, with no '{shown}' before it"
                yield _refused(program, problem, f"'{shown}' before '{new}'")


def _uses(
    program: Program, places: Mapping[Effect, list[int]], stage: int, mb: int, num_stages: int
) -> Iterator[tuple[Effect, int]]:
    """The uses of a result, each with the first index at which it counts."""
    out = _out(program, stage, mb, num_stages)
    # The last stage's result of a job that does not feed: nobody reads it, so that it may be
    # overwritten at once.
    if out not in places:
        return
    yield out, 0
    if not isinstance(out, Run):
        # A fence before the send would not wait for it.
        yield Fence(mb), places[out][0]
    # An advance reads the output from the stage's own buffer.
    if isinstance(out, Broadcast) and Run("advance", mb) in places:
        yield Run("advance", mb), 0


def check_channels(programs: Sequence[Program]) -> Iterator[ProgramError]:
    """An error for each pair of ranks that receives messages of both kinds (results of stages, and
    outputs that return) in another order than they are sent. The abstract machine has a queue for
    each kind, but processes have one channel from one rank to another."""
    sent = defaultdict[tuple[int, int], list[Step]](list)
    taken = defaultdict[tuple[int, int], list[Step]](list)
    for step in (Step(program.rank, effect) for program in programs for effect in program.effects):
        for edge in puts(step, len(programs)):
            sent[edge.source, edge.to].append(step)
        if (source := takes(step)) is not None:
            taken[source.source, source.to].append(step)
    for pair, theirs in taken.items():
        # Not strict: a send without its receive is the machine's to report (`leftover`).
        for mine, other in zip(sent[pair], theirs, strict=False):
            if isinstance(mine.effect, Send) != isinstance(other.effect, Recv):
                problem = (
                    f"rank {mine.rank} performs '{mine.effect}' first, but rank {other.rank}'s"
                    f" '{other.effect}', which reads the same channel, expects another message"
                )
                yield ProgramError(
                    f"check of {len(programs)} programs",
                    problem,
                    "receive in the order of the sends",
                )


def _refused(program: Program, problem: str, instead: str) -> ProgramError:
    return ProgramError(f"check of rank {program.rank}'s program", problem, instead)


@attrs.frozen(eq=False)
class CheckedPrograms:
    """The programs of a run, checked at construction, and everything that ranks must agree on
    before they perform them.

    Args:
        lane: the programs of the ranks of one pipeline.
        buffers: the number of results that a stage holds before it overwrites the oldest one. None:
            it never overwrites a result.
        read_sources: returns the digests of the sources of each stage and of `advance`
            (`source_digest`). A function, because digests take a while and only processes compare
            them.
        spans: for each rank, the effects `start:stop` that this run performs. Earlier runs have
            performed the effects before them, and later runs perform those after. None: all
            effects.
        mesh: the mesh, of which each lane performs the programs
            (`weft.transforms.pipelines.lanes`). None: there is one lane.
    """

    lane: tuple[Program, ...]
    buffers: int | None = None
    read_sources: Callable[[], tuple[str, ...]] = tuple
    spans: tuple[tuple[int, int], ...] | None = None
    mesh: Mesh | None = None

    def __attrs_post_init__(self) -> None:
        # One lane stands for all: `spread` renumbers the ranks of its programs and changes nothing
        # else.
        check(self.lane, buffers=self.buffers)

    @functools.cached_property
    def programs(self) -> tuple[Program, ...]:
        """The programs of all ranks."""
        return spread(self.lane, self.mesh)

    @functools.cached_property
    def text(self) -> str:
        """The lines that all ranks compare: versions, sources, programs."""
        versions = (
            f"weft {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        )
        return "\n".join([versions, *self.read_sources(), listing(self.programs)])

    @functools.cached_property
    def digest(self) -> str:
        """A short hash of `text`."""
        return hashlib.blake2b(self.text.encode(), digest_size=6).hexdigest()

    @functools.cached_property
    def num_stages(self) -> int:
        """The number of stages, on all ranks together."""
        return count_stages(self.lane)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """The number of micro-batches of the programs."""
        return 1 + max(
            (effect.microbatch for program in self.lane for effect in program.effects), default=-1
        )

    @functools.cached_property
    def lines(self) -> tuple[tuple[str, ...], ...]:
        """The effects of all ranks as text."""
        return tuple(tuple(map(str, program.effects)) for program in self.programs)

    def span(self, rank: int) -> tuple[int, int]:
        """The effects of a rank that this run performs, as `(start, stop)`."""
        place = lane_rank(self.mesh, rank)
        if self.spans is None:
            return (0, len(self.lane[place].effects))
        return self.spans[place]

    def sends_on(self, rank: int) -> bool:
        """Whether a stage of this rank sends its results to another rank."""
        return lane_rank(self.mesh, rank) < len(self.lane) - 1 or self.num_stages > len(self.lane)

    @functools.cached_property
    def order(self) -> tuple[Step, ...]:
        """The effects of this run in an order in which one thread can perform them all."""
        counts = [0] * len(self.programs)
        order = []
        for step in interleave(self.programs):
            start, stop = self.span(step.rank)
            if start <= counts[step.rank] < stop:
                order.append(step)
            counts[step.rank] += 1
        return tuple(order)

    @functools.cached_property
    def leaves_messages(self) -> bool:
        """Whether this run ends with messages still under way, which a later run receives."""
        machine = Machine(self.programs)
        machine.place([self.span(rank)[1] for rank in range(len(self.programs))])
        return any(machine.queues.values())

    @property
    def lends(self) -> bool:
        """Whether results are lent: the sender overwrites them later, so a receiver must copy them,
        since its stage may keep or return them."""
        return self.buffers is not None
