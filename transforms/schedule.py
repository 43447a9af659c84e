"""Schedules: pure functions from the number of stages and micro-batches to each rank's program; and their check."""

from collections import deque
from collections.abc import Iterator, Sequence

import attrs

from weft.effects import Broadcast, Effect, Program, Recv, Run, Schema, Send
from weft.errors import ProgramError


def streaming(
    num_stages: int, num_microbatches: int, *, schema: Schema | None = None, feedback: bool = False
) -> tuple[Program, ...]:
    """Forward-only streaming: each rank receives, runs and sends one micro-batch after the other.

    Args:
        num_stages: ranks; stage r runs on rank r.
        num_microbatches: parts of the batch.
        schema: what travels between stages, where it is declared.
        feedback: whether the last stage's output returns to all ranks, which then advance their states with it.

    >>> print(streaming(2, 1, feedback=True)[0])
    rank 0 of 2
      run stage 0 [mb 0]
      send to 1 [mb 0]
      broadcast from 1 [mb 0]
      run advance [mb 0]
    """

    def effects(rank: int) -> Iterator[Effect]:
        for mb in range(num_microbatches):
            if rank > 0:
                yield Recv(rank - 1, mb, schema)
            yield Run(f"stage {rank}", mb)
            if rank < num_stages - 1:
                yield Send(rank + 1, mb, schema)
        for mb in range(num_microbatches if feedback else 0):
            yield Broadcast(num_stages - 1, mb)
            yield Run("advance", mb)

    return tuple(Program(rank, num_stages, tuple(effects(rank))) for rank in range(num_stages))


@attrs.frozen
class Step:
    """One effect about to run on one rank."""

    rank: int
    effect: Effect


def interleave(programs: Sequence[Program], *, capacity: int = 1) -> Iterator[Step]:
    """The effects of all ranks in an order in which one process can run them.

    Each edge is a queue of `capacity` messages: a send waits while it is full, a receive while it is empty. A broadcast
    waits for all ranks, and is yielded once for each.

    Raises:
        ProgramError: a receive meets a message of another micro-batch or schema, ranks differ in a broadcast, no rank
            can go on, or a message is left over.
    """
    at = [0] * len(programs)
    queues: dict[tuple[int, int], deque[Send]] = {}
    while any(at[p.rank] < len(p.effects) for p in programs):
        ready = [step for step in _next(programs, at) if _can_run(step, programs, at, queues, capacity)]
        if not ready:
            raise _deadlock(programs, at)
        for step in ready:
            _move(step, queues)
            at[step.rank] += 1
            yield step
    for (source, to), queue in queues.items():
        if queue:
            raise ProgramError(
                f"check of {len(programs)} programs",
                f"rank {source}: '{queue[0]}' is never received",
                f"a recv on rank {to}",
            )


def check(programs: Sequence[Program]) -> None:
    """Raise ProgramError unless every receive meets its send, in order and schema, and all ranks reach their end even
    where an edge holds one message."""
    for index, program in enumerate(programs):
        if (program.rank, program.num_ranks) != (index, len(programs)):
            raise ProgramError(
                f"check of {len(programs)} programs",
                f"program {index} says it is of rank {program.rank} of {program.num_ranks}",
                "give the programs of all ranks, in order",
            )
    for _ in interleave(programs, capacity=1):
        pass
    for program in programs:
        _check_values(program)


def _check_values(program: Program) -> None:
    """Raise ProgramError unless each effect finds what it needs on its rank: an input, a result, an output."""
    received: set[int] = set()
    results: set[int] = set()
    outputs: set[int] = set()
    for effect in program.effects:
        mb = effect.microbatch
        match effect:
            case Recv():
                ok, held = mb not in received, received
            case Run("advance"):
                ok, held = mb in outputs, outputs
                outputs.discard(mb)
            case Run():
                ok, held = program.rank == 0 or mb in received, results
                received.discard(mb)
            case Send():
                ok, held = mb in results, set()
                results.discard(mb)
            case Broadcast(root):
                ok, held = root < program.num_ranks and (root != program.rank or mb in results), outputs
        if not ok:
            raise ProgramError(
                f"check of rank {program.rank}'s program",
                f"'{effect}', for which it does not hold what that needs",
                "recv, then run, then send or broadcast, then advance, each once a micro-batch",
            )
        held.add(mb)


def _next(programs: Sequence[Program], at: Sequence[int]) -> list[Step]:
    return [Step(p.rank, p.effects[at[p.rank]]) for p in programs if at[p.rank] < len(p.effects)]


def _can_run(
    step: Step,
    programs: Sequence[Program],
    at: Sequence[int],
    queues: dict[tuple[int, int], deque[Send]],
    capacity: int,
) -> bool:
    effect = step.effect
    if isinstance(effect, Send):
        return len(queues.get((step.rank, effect.to), ())) < capacity
    if isinstance(effect, Recv):
        return bool(queues.get((effect.source, step.rank)))
    if isinstance(effect, Broadcast):
        waiting = _next(programs, at)
        return len(waiting) == len(programs) and all(other.effect == effect for other in waiting)
    return True


def _move(step: Step, queues: dict[tuple[int, int], deque[Send]]) -> None:
    if isinstance(step.effect, Send):
        queues.setdefault((step.rank, step.effect.to), deque()).append(step.effect)
    elif isinstance(step.effect, Recv):
        send = queues[step.effect.source, step.rank].popleft()
        if (send.microbatch, send.schema) != (step.effect.microbatch, step.effect.schema):
            raise ProgramError(
                "check of a pipeline's programs",
                f"rank {step.effect.source}: '{send}' meets rank {step.rank}: '{step.effect}'",
                "the same micro-batches in the same order, and one schema, on both ends of an edge",
            )


def _deadlock(programs: Sequence[Program], at: Sequence[int]) -> ProgramError:
    waiting = "; ".join(f"rank {step.rank}: '{step.effect}'" for step in _next(programs, at))
    ended = [p.rank for p in programs if at[p.rank] == len(p.effects)]
    return ProgramError(
        f"check of {len(programs)} programs",
        f"no rank can go on. Waiting: {waiting}" + (f". At their end: ranks {ended}" if ended else ""),
        "give every send a recv, and order them so that one message an edge is enough",
    )
