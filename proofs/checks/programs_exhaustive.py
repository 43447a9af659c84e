"""Checks programs exhaustively, by trying every order in which the ranks could move.

This is a second, slower definition of correct programs, which shares only the effects with
`weft.transforms.pipelines.checker`. A world is the position of each rank, the values that it holds,
and the messages in flight. Each step that some rank can take leads to another world. Programs are
correct if no rank makes an error in any reachable world, and if, in each world without a next step,
all ranks are at their end and nothing is in flight. Edges hold one, two or three messages."""

import itertools
from collections.abc import Iterator, Sequence

import attrs

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.meshes.collectives import AllGather, AllReduce, AllToAll, PPermute, ReduceScatter
from weft.values.schema import Schema

# A program must be right however many messages an edge holds, as transports differ in this.
CAPACITIES = (1, 2, 3)

# One of "input", "ran", "result", "sent" and "output", the micro-batch, and the stage (or 0).
Value = tuple[str, int, int]
# The micro-batch, the schema, and the stage that made it.
Message = tuple[int, Schema | None, int]
# "stage" or "return", the sending rank, and the receiving rank.
Wire = tuple[str, int, int]
# Messages in flight by wire, oldest first. Wires are sorted and none is empty, so that equal worlds
# compare equal.
Flying = tuple[tuple[Wire, tuple[Message, ...]], ...]


class Wrong(Exception):
    """A rank makes an error, which the message describes."""


@attrs.frozen
class Rank:
    """A rank's position in its program, the values that it holds, and the (stage, micro-batch)
    pairs that it ran, in order."""

    at: int = 0
    holds: frozenset[Value] = frozenset()
    ran: tuple[tuple[int, int], ...] = ()


World = tuple[tuple[Rank, ...], Flying]


@attrs.define
class Move:
    """The next effect of a rank, executed in a copy of a world."""

    rank: int
    num_ranks: int
    num_stages: int
    effect: Effect
    holds: set[Value]
    ran: list[tuple[int, int]]
    flying: dict[Wire, tuple[Message, ...]]

    def done(self, capacity: int, buffers: int | None, returning: frozenset[int]) -> bool:
        """Execute the effect; return False if the rank has to wait.

        Raises:
            Wrong: the effect is an error in this world.
        """
        mb = self.effect.microbatch
        end = self.num_stages - 1
        match self.effect:
            case Run("advance"):
                rank_stages = range(self.rank, self.num_stages, self.num_ranks)
                self.require(
                    all(("ran", mb, stage) in self.holds for stage in rank_stages),
                    "advances before its stages ran",
                )
                self.require(
                    mb not in returning or ("output", mb, 0) in self.holds,
                    "advances without the output",
                )
            case Run():
                if self.effect.stage is None:
                    stage = -1
                else:
                    stage = self.effect.stage
                self.require(
                    stage % self.num_ranks == self.rank and 0 <= stage <= end,
                    "runs another's stage",
                )
                self.run(stage, buffers)
            case Send(to, _, schema, source_stage):
                if source_stage is None:
                    stage = self.rank
                else:
                    stage = source_stage
                self.require(
                    self.goes_on(stage) and stage % self.num_ranks == self.rank,
                    "sends another's result",
                )
                self.require(to == (self.rank + 1) % self.num_ranks, "sends past its neighbour")
                return self.launch([("stage", self.rank, to)], schema, stage, capacity)
            case Recv(source, _, schema, source_stage):
                if source_stage is None:
                    stage = source
                else:
                    stage = source_stage
                self.require(
                    self.goes_on(stage) and stage % self.num_ranks == source,
                    "receives another's result",
                )
                self.require(
                    source == (self.rank - 1) % self.num_ranks, "receives past its neighbour"
                )
                return self.land(
                    ("stage", source, self.rank), schema, stage, ("input", mb, stage + 1)
                )
            case Broadcast(root, _, schema):
                self.require(root == self.num_ranks - 1, "returns what is not the last stage's")
                if self.rank != root:
                    return self.land(("return", root, self.rank), schema, end, ("output", mb, 0))
                if not self.launch(
                    [("return", root, to) for to in range(root)], schema, end, capacity
                ):
                    return False
                self.holds.add(("output", mb, 0))
            case Fence():
                self.require(("sent", mb, 0) in self.holds, "waits for what was not sent")
                return not self.flies(mb)
            case AllReduce() | AllGather() | ReduceScatter() | AllToAll() | PPermute():
                self.require(False, "is performed by stages, and not by programs")
        return True

    def goes_on(self, stage: int) -> bool:
        """Whether the result of a stage is sent to another rank."""
        return self.num_ranks > 1 and 0 <= stage < self.num_stages - 1

    def require(self, holds: bool, wrong: str) -> None:
        if not holds:
            raise Wrong(f"rank {self.rank}: '{self.effect}' {wrong}")

    def take(self, what: str, stage: int) -> None:
        """Consume a value."""
        value = (what, self.effect.microbatch, stage)
        self.require(value in self.holds, f"finds no {what}")
        self.holds.remove(value)

    def flies(self, mb: int, stage: int | None = None) -> bool:
        """Whether a message of this rank for a micro-batch is in flight; with `stage`, only that
        stage's result counts."""
        mine = (
            message
            for wire, sent in self.flying.items()
            if wire[1] == self.rank
            for message in sent
        )
        return any(message[0] == mb and stage in (None, message[2]) for message in mine)

    def run(self, stage: int, buffers: int | None) -> None:
        """Run a stage, which overwrites the oldest of its `buffers` output buffers."""
        # On one rank no message carries a result to the next stage.
        if stage > 0:
            self.take(
                "input" if self.num_ranks > 1 else "result",
                stage if self.num_ranks > 1 else stage - 1,
            )
        runs = [mb for ran_stage, mb in self.ran if ran_stage == stage]
        if buffers is not None and len(runs) >= buffers:
            old = runs[-buffers]
            self.require(not self.flies(old, stage), f"overwrites micro-batch {old} in flight")
            self.holds.discard(("result", old, stage))
            if stage == self.num_stages - 1:  # the output shares the last stage's result buffer
                self.holds.discard(("output", old, 0))
        self.ran.append((stage, self.effect.microbatch))
        self.holds |= {
            ("ran", self.effect.microbatch, stage),
            ("result", self.effect.microbatch, stage),
        }

    def launch(
        self, wires: Sequence[Wire], schema: Schema | None, stage: int, capacity: int
    ) -> bool:
        """Put the result on its wires, once all of them have room."""
        if any(len(self.flying.get(wire, ())) >= capacity for wire in wires):
            return False
        self.take("result", stage)
        self.holds.add(("sent", self.effect.microbatch, 0))
        for wire in wires:
            self.flying[wire] = (
                *self.flying.get(wire, ()),
                (self.effect.microbatch, schema, stage),
            )
        return True

    def land(self, wire: Wire, schema: Schema | None, stage: int, value: Value) -> bool:
        """Take the next message from a wire."""
        if wire not in self.flying:
            return False
        message, *rest = self.flying.pop(wire)
        self.require(
            message == (self.effect.microbatch, schema, stage),
            f"meets micro-batch {message[0]}: {message[1]}",
        )
        if rest:
            self.flying[wire] = tuple(rest)
        self.holds.add(value)
        return True


def stages_of(programs: Sequence[Program]) -> int:
    """The number of stages: the least multiple of the number of ranks that exceeds the highest
    stage in the programs."""
    stages = [
        e.stage for p in programs for e in p.effects if isinstance(e, Run) and e.stage is not None
    ]
    return next(
        n for n in range(len(programs), 1 << 30, len(programs)) if n > max(stages, default=0)
    )


def ways_on(
    programs: Sequence[Program], world: World, capacity: int, buffers: int | None
) -> Iterator[World]:
    """Yield each world that one effect of one rank leads to.

    Raises:
        Wrong: a rank's next effect is an error.
    """
    ranks, flying = world
    stages = stages_of(programs)
    returning = frozenset(e.microbatch for e in programs[-1].effects if isinstance(e, Broadcast))
    for index, (rank, program) in enumerate(zip(ranks, programs, strict=True)):
        if rank.at < len(program.effects):
            effect = program.effects[rank.at]
            move = Move(
                index, len(programs), stages, effect, set(rank.holds), list(rank.ran), dict(flying)
            )
            if move.done(capacity, buffers, returning):
                new = Rank(rank.at + 1, frozenset(move.holds), tuple(move.ran))
                yield (*ranks[:index], new, *ranks[index + 1 :]), tuple(sorted(move.flying.items()))


def explore(programs: Sequence[Program], capacity: int, buffers: int | None = None) -> int:
    """Visit every reachable world, and return their number.

    Raises:
        Wrong: in one of them a rank makes an error, or no rank can move although work is left.
    """
    start: World = (tuple(Rank() for _ in programs), ())
    visited = {start}
    waiting = [start]
    while waiting:
        ranks, flying = world = waiting.pop()
        ahead = list(ways_on(programs, world, capacity, buffers))
        waiting += (new for new in ahead if new not in visited)
        visited.update(ahead)
        if not ahead:
            stuck = [
                i
                for i, (rank, p) in enumerate(zip(ranks, programs, strict=True))
                if rank.at < len(p.effects)
            ]
            if stuck:
                raise Wrong(f"ranks {stuck} wait for ever")
            if flying:
                raise Wrong(
                    f"nobody receives micro-batch {flying[0][1][0][0]} from rank {flying[0][0][1]}"
                )
    return len(visited)


def compare_ranks(programs: Sequence[Program]) -> None:
    """Raise unless all ranks run the same micro-batches in the same order and classes, and advance
    with all or none of them.

    Raises:
        Wrong: they do not.
    """
    ran = [
        [
            e.microbatch
            for e in programs[stage % len(programs)].effects
            if e == Run(f"stage {stage}", e.microbatch)
        ]
        for stage in range(stages_of(programs))
    ]
    advanced = [
        sorted(e.microbatch for e in p.effects if e == Run("advance", e.microbatch))
        for p in programs
    ]
    count = len(programs[0].classes) or len(ran[0])
    if any(order != ran[0] for order in ran) or sorted(ran[0]) != list(range(count)):
        raise Wrong(f"ranks run the micro-batches {ran}")
    if any(order != advanced[0] for order in advanced) or advanced[0] not in (
        [],
        list(range(count)),
    ):
        raise Wrong(f"ranks advance with the micro-batches {advanced}")
    if any(p.classes != programs[0].classes for p in programs):
        raise Wrong(f"ranks have the classes {[p.classes for p in programs]}")
    if [(p.rank, p.num_ranks) for p in programs] != [
        (i, len(programs)) for i in range(len(programs))
    ]:
        raise Wrong("the programs are of other ranks")
    for source, to in itertools.permutations(range(len(programs)), 2):
        sent = list(_kinds(programs[source], source, to))
        taken = list(_kinds(programs[to], source, to))
        # Other numbers of messages need no test here: `explore` ends with a rank that waits, or
        # with a message in flight.
        if stages_of(programs) > len(programs) and sent != taken and sorted(sent) == sorted(taken):
            raise Wrong(f"rank {to} receives in another order than rank {source} sends")


def _kinds(program: Program, source: int, to: int) -> Iterator[str]:
    """The kinds of the messages from `source` to `to`, in the order in which the program of one of
    the two sends or receives them."""
    for effect in program.effects:
        match effect:
            case Send(other) if (program.rank, other) == (source, to):
                yield "stage"
            case Recv(other) if (other, program.rank) == (source, to):
                yield "stage"
            case Broadcast(root) if root == source and program.rank in (source, to):
                yield "return"
            case _:
                pass


def fault(programs: Sequence[Program], *, buffers: int | None = None) -> str | None:
    """A description of what is wrong with the programs; None if they are correct."""
    try:
        compare_ranks(programs)
        for capacity in CAPACITIES:
            explore(programs, capacity, buffers)
    except Wrong as wrong:
        return str(wrong)
    return None


def fenced(programs: Sequence[Program], buffers: int | None) -> bool:
    """Whether every result that is sent is fenced before it is overwritten.

    The fence must be in the program between the two, even if something else orders them.
    """
    return buffers is None or all(_fenced(program, buffers) for program in programs)


def _fenced(program: Program, buffers: int) -> bool:
    runs: dict[int, list[int]] = {}
    open_ = set[tuple[int, int]]()
    last = max(
        (e.stage for e in program.effects if isinstance(e, Run) and e.stage is not None), default=0
    )
    for effect in program.effects:
        match effect:
            case Send(_, mb, _, stage):
                open_.add((program.rank if stage is None else stage, mb))
            case Broadcast(root, mb) if root == program.rank:
                open_.add((last, mb))
            case Fence(mb):
                open_ = {(stage, other) for stage, other in open_ if other != mb}
            case Run(_, mb) if (run_stage := effect.stage) is not None:
                before = runs.setdefault(run_stage, [])
                if len(before) >= buffers and (run_stage, before[-buffers]) in open_:
                    return False
                before.append(mb)
            case _:
                pass
    return True
