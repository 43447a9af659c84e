"""The definition of right programs, by trying every order in which the ranks could move.

It is a second, slower definition, and shares only the effects with `weft.transforms.pipelines.checker`. A world is the
position of each rank, what it holds, and what is in flight; each step that some rank can take leads to another world.
Programs are right if no rank goes wrong in any reachable world, and if a world without a next step has all ranks at
their end and nothing in flight. Edges hold one, two or three messages."""

from collections.abc import Iterator, Sequence

import attrs

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Schema, Send

CAPACITIES = (1, 2, 3)

Value = tuple[str, int]  # "input", "ran", "result", "sent" or "output", of a micro-batch
Message = tuple[int, Schema | None]
Wire = tuple[str, int, int]  # "stage" or "return", from, to
Flying = tuple[tuple[Wire, tuple[Message, ...]], ...]  # in order of wires, oldest first on each; no wire is empty


class Wrong(Exception):
    """A fault of a rank, in words."""


@attrs.frozen
class Rank:
    """A rank's position in its program, what it holds, and the micro-batches that its stage ran, in order."""

    at: int = 0
    holds: frozenset[Value] = frozenset()
    ran: tuple[int, ...] = ()


World = tuple[tuple[Rank, ...], Flying]


@attrs.define
class Move:
    """The next effect of a rank, under way in a copy of a world."""

    rank: int
    last: int
    effect: Effect
    holds: set[Value]
    ran: list[int]
    flying: dict[Wire, tuple[Message, ...]]

    def done(self, capacity: int, buffers: int | None, returning: frozenset[int]) -> bool:
        """Execute the effect; False if the rank has to wait.

        Raises:
            Wrong: the effect is a fault here.
        """
        mb = self.effect.microbatch
        match self.effect:
            case Run("advance"):
                self.require(("ran", mb) in self.holds, "advances before its stage ran")
                self.require(mb not in returning or ("output", mb) in self.holds, "advances without the output")
            case Run(what):
                self.require(what == f"stage {self.rank}", "runs another's stage")
                self.run(buffers)
            case Send(to, _, schema):
                self.require(self.rank < self.last and to == self.rank + 1, "sends past its neighbour")
                return self.launch([("stage", self.rank, to)], schema, capacity)
            case Recv(source, _, schema):
                self.require(self.rank > 0 and source == self.rank - 1, "receives past its neighbour")
                return self.land(("stage", source, self.rank), schema, "input")
            case Broadcast(root, _, schema):
                self.require(root == self.last, "returns what is not the last stage's")
                if self.rank != root:
                    return self.land(("return", root, self.rank), schema, "output")
                if not self.launch([("return", root, to) for to in range(root)], schema, capacity):
                    return False
                self.holds.add(("output", mb))
            case Fence():
                self.require(("sent", mb) in self.holds, "waits for what was not sent")
                return not self.flies(mb)
        return True

    def require(self, holds: bool, wrong: str) -> None:
        if not holds:
            raise Wrong(f"rank {self.rank}: '{self.effect}' {wrong}")

    def take(self, what: str) -> None:
        """Consume a value."""
        value = (what, self.effect.microbatch)
        self.require(value in self.holds, f"finds no {what}")
        self.holds.remove(value)

    def flies(self, mb: int) -> bool:
        """Whether a message of this rank for a micro-batch is in flight."""
        return any(wire[1] == self.rank and any(m[0] == mb for m in sent) for wire, sent in self.flying.items())

    def run(self, buffers: int | None) -> None:
        """Run the stage, which overwrites the oldest of its output buffers."""
        if self.rank > 0:
            self.take("input")
        if buffers is not None and len(self.ran) >= buffers:
            old = self.ran[-buffers]
            self.require(not self.flies(old), f"overwrites micro-batch {old} in flight")
            self.holds.discard(("result", old))
            if self.rank == self.last:  # the output is the result, as the stage left it
                self.holds.discard(("output", old))
        self.ran.append(self.effect.microbatch)
        self.holds |= {("ran", self.effect.microbatch), ("result", self.effect.microbatch)}

    def launch(self, wires: Sequence[Wire], schema: Schema | None, capacity: int) -> bool:
        """Put the result on its wires, once all of them have room."""
        if any(len(self.flying.get(wire, ())) >= capacity for wire in wires):
            return False
        self.take("result")
        self.holds.add(("sent", self.effect.microbatch))
        for wire in wires:
            self.flying[wire] = (*self.flying.get(wire, ()), (self.effect.microbatch, schema))
        return True

    def land(self, wire: Wire, schema: Schema | None, what: str) -> bool:
        """Take the next message from a wire."""
        if wire not in self.flying:
            return False
        message, *others = self.flying.pop(wire)
        self.require(message == (self.effect.microbatch, schema), f"meets micro-batch {message[0]}: {message[1]}")
        if others:
            self.flying[wire] = tuple(others)
        self.holds.add((what, self.effect.microbatch))
        return True


def ways_on(programs: Sequence[Program], world: World, capacity: int, buffers: int | None) -> Iterator[World]:
    """Each world that one effect of one rank leads to.

    Raises:
        Wrong: a rank's next effect is a fault.
    """
    ranks, flying = world
    last = len(programs) - 1
    returning = frozenset(e.microbatch for e in programs[last].effects if isinstance(e, Broadcast))
    for index, (own, program) in enumerate(zip(ranks, programs, strict=True)):
        if own.at < len(program.effects):
            move = Move(index, last, program.effects[own.at], set(own.holds), list(own.ran), dict(flying))
            if move.done(capacity, buffers, returning):
                new = Rank(own.at + 1, frozenset(move.holds), tuple(move.ran))
                yield (*ranks[:index], new, *ranks[index + 1 :]), tuple(sorted(move.flying.items()))


def explore(programs: Sequence[Program], capacity: int, buffers: int | None = None) -> int:
    """Visit every reachable world, and return their number.

    Raises:
        Wrong: in one of them a rank goes wrong, or no rank can move although work is left.
    """
    start: World = (tuple(Rank() for _ in programs), ())
    seen, waiting = {start}, [start]
    while waiting:
        ranks, flying = world = waiting.pop()
        ahead = list(ways_on(programs, world, capacity, buffers))
        waiting += (new for new in ahead if new not in seen)
        seen.update(ahead)
        if not ahead:
            stuck = [i for i, (rank, p) in enumerate(zip(ranks, programs, strict=True)) if rank.at < len(p.effects)]
            if stuck:
                raise Wrong(f"ranks {stuck} wait for ever")
            if flying:
                raise Wrong(f"nobody receives micro-batch {flying[0][1][0][0]} from rank {flying[0][0][1]}")
    return len(seen)


def compare_ranks(programs: Sequence[Program]) -> None:
    """Raise unless all ranks run the same micro-batches in one order and class, and advance with all or none of them.

    Raises:
        Wrong: they do not.
    """
    ran = [[e.microbatch for e in p.effects if e == Run(f"stage {i}", e.microbatch)] for i, p in enumerate(programs)]
    advanced = [sorted(e.microbatch for e in p.effects if e == Run("advance", e.microbatch)) for p in programs]
    count = len(programs[0].classes) or len(ran[0])
    if any(own != ran[0] for own in ran) or sorted(ran[0]) != list(range(count)):
        raise Wrong(f"ranks run the micro-batches {ran}")
    if any(own != advanced[0] for own in advanced) or advanced[0] not in ([], list(range(count))):
        raise Wrong(f"ranks advance with the micro-batches {advanced}")
    if any(p.classes != programs[0].classes for p in programs):
        raise Wrong(f"ranks have the classes {[p.classes for p in programs]}")
    if [(p.rank, p.num_ranks) for p in programs] != [(i, len(programs)) for i in range(len(programs))]:
        raise Wrong("the programs are of other ranks")


def fault(programs: Sequence[Program], *, buffers: int | None = None) -> str | None:
    """The fault of some programs, in words; None if they are right."""
    try:
        compare_ranks(programs)
        for capacity in CAPACITIES:
            explore(programs, capacity, buffers)
    except Wrong as wrong:
        return str(wrong)
    return None


def fenced(programs: Sequence[Program], buffers: int | None) -> bool:
    """Whether every result that is sent is fenced before it is overwritten. The program must have the fence between the
    two, even if something else would keep them apart."""
    return buffers is None or all(_fenced(program, buffers) for program in programs)


def _fenced(program: Program, buffers: int) -> bool:
    runs = [e.microbatch for e in program.effects if isinstance(e, Run) and e.what != "advance"]
    overwrites = dict(zip(runs[buffers:], runs, strict=False))
    open_ = set[int]()
    for effect in program.effects:
        match effect:
            case Send(_, mb):
                open_.add(mb)
            case Broadcast(root, mb) if root == program.rank:
                open_.add(mb)
            case Fence(mb):
                open_.discard(mb)
            case Run(what, mb) if what != "advance" and overwrites.get(mb) in open_:
                return False
    return True
