"""What the checker asks of one rank's program by itself: whom it talks to, that each effect finds what it needs, and
that no buffer is written while it is in use.
"""

from collections.abc import Iterator

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError


def check_peers(program: Program) -> None:
    """Raise ProgramError if an effect is not this rank's: it runs its own stage, on what the rank before sends it, for
    the rank behind it; the last one broadcasts."""
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
            raise _refused(program, f"'{effect}' on rank {rank} of {last + 1}", instead)


def returned(program: Program) -> frozenset[int]:
    """The micro-batches whose output the last rank, whose program this is, returns to all."""
    return frozenset(effect.microbatch for effect in program.effects if isinstance(effect, Broadcast))


def check_values(program: Program, returning: frozenset[int]) -> None:
    """Raise ProgramError unless each effect stands once, and finds what it needs: an input, a result, an output.

    Args:
        program: of one rank.
        returning: micro-batches with whose output the ranks advance.
    """
    done: set[Effect] = set()  # without schemas
    for effect in program.effects:
        bare = _bare(effect)
        missing = [need for need in _needs(program, bare, returning) if need not in done]
        if missing or (bare in done and not isinstance(bare, Fence)):
            seen = f"'{effect}' without '{missing[0]}' before it" if missing else f"'{effect}' once more"
            instead = "recv, then run, then send or broadcast, then fence and advance, each once a micro-batch"
            raise _refused(program, seen, instead)
        done.add(bare)


def _bare(effect: Effect) -> Effect:
    match effect:
        case Send(to, mb):
            return Send(to, mb)
        case Recv(source, mb):
            return Recv(source, mb)
        case Broadcast(root, mb):
            return Broadcast(root, mb)
    return effect


def _needs(program: Program, effect: Effect, returning: frozenset[int]) -> Iterator[Effect]:
    """What must stand before an effect."""
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


def check_buffers(program: Program, buffers: int) -> None:
    """Raise ProgramError if a stage runs into a buffer that is still to be sent or read, or in flight for all that this
    rank knows: only a fence says that it is not. Of a program whose values were checked."""
    effects, last = [_bare(effect) for effect in program.effects], program.num_ranks - 1
    first = {effect: place for place, effect in reversed(list(enumerate(effects)))}
    runs = [
        (place, effect)
        for place, effect in enumerate(effects)
        if effect == Run(f"stage {program.rank}", effect.microbatch)
    ]
    for (_, old), (place, new) in zip(runs, runs[buffers:], strict=False):
        mb = old.microbatch
        out: Effect = Send(program.rank + 1, mb) if program.rank < last else Broadcast(last, mb)
        uses: list[Effect] = [out, Fence(mb)] if out in first else []
        if program.rank == last and out in first and Run("advance", mb) in first:
            uses.append(Run("advance", mb))  # which reads the output where the stage left it
        late = next((use for use in uses if first.get(use, place) >= place), None)
        if late is not None:
            seen = f"'{new}' overwrites what '{old}' made, with no '{late}' before it"
            raise _refused(program, seen, f"'{late}' before '{new}'")


def _refused(program: Program, seen: str, instead: str) -> ProgramError:
    return ProgramError(f"check of rank {program.rank}'s program", seen, instead)
