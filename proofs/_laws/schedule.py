"""L10: generated programs are right, and the checker accepts right programs and nothing else.

`weft.proofs.checks.programs_exhaustive` defines what is right: it tries every order in which ranks
could move. The checker requires one thing more: a stage that overwrites a result it has sent must
have the fence in its program, even if something else (a returned output, or a full edge) keeps the
two apart in every order. So it accepts exactly the programs that are both right and `fenced`.
"""

import functools
import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.effects import Broadcast, Effect, Fence, Program, Run
from weft.errors import ProgramError
from weft.proofs._strategies.programs import Broken, Scheduled
from weft.proofs._strategies.schedules import Woven
from weft.proofs.checks.difference import LawViolation
from weft.proofs.checks.programs_exhaustive import fault, fenced
from weft.transforms.pipelines.checker import check
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.schedule import Job
from weft.transforms.pipelines.timing.costs import Costs
from weft.transforms.pipelines.timing.simulate import simulate
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.weaving import interleaved

# Every order of a program is tried only if its ranks have at most this many joint positions: the
# number is a product over the ranks.
WORLDS = 5_000


def refusal(case: Scheduled) -> str | None:
    """The checker's error for these programs, or None if it accepts them."""
    try:
        check(case.programs, buffers=case.buffers)
    except ProgramError as error:
        return error.problem
    return None


def checker_is_right(case: Scheduled) -> None:
    """L10: the checker accepts programs if and only if they are right and fenced."""
    wrong = fault(case.programs, buffers=case.buffers)
    refused = refusal(case)
    if wrong is None and not fenced(case.programs, case.buffers):
        wrong = "a fence is missing"
    if (wrong is None) != (refused is None):
        if refused is None:
            said = f"accepts what goes wrong: {wrong}"
        else:
            said = f"refuses what is right: {refused}"
        raise LawViolation(f"L10 the checker is right: it {said}")


def broken_programs_are_refused(case: Broken) -> None:
    """L10: the checker accepts right programs, and refuses them once they have a fault."""
    if (refused := refusal(case.right)) is not None:
        raise LawViolation(f"L10 broken programs are refused: and right ones: {refused}")
    for name, wrong in case.wrong.items():
        if refusal(wrong) is None:
            failure = fault(wrong.programs, buffers=wrong.buffers)
            raise LawViolation(
                f"L10 broken programs are refused: {name}: the checker accepts what goes wrong:"
                f" {failure}"
            )


def schedules_are_right(case: Scheduled) -> None:
    """L10: the programs of `make_programs` are right, pass the checker, and run no job before the
    jobs it waits for."""
    refused = refusal(case)
    if refused is not None:
        raise LawViolation(f"L10 schedules are right: refused: {refused}")
    small = prod(len(program.effects) + 1 for program in case.programs) <= WORLDS
    if small and (wrong := fault(case.programs, buffers=case.buffers)) is not None:
        raise LawViolation(f"L10 schedules are right: {wrong}")
    for program in case.programs:
        for mb, job in enumerate(case.jobs):
            if job.after is not None and not _waits(program, mb, job.after):
                problem = f"rank {program.rank} runs job {mb} before it took in job {job.after}"
                raise LawViolation(f"L10 schedules are right: {problem}")


def _waits(program: Program, mb: int, after: int) -> bool:
    """Whether a rank receives the output of job `after`, and advances with it, before it runs job
    `mb`."""
    before = program.effects[: program.effects.index(Run(f"stage {program.rank}", mb))]
    needed = [e for e in program.effects if isinstance(e, Broadcast) or e == Run("advance", after)]
    return all(e in before for e in needed if e.microbatch == after)


def own_schedules_are_compositions(case: Woven, transport: Transport | None = None) -> None:
    """L10: programs that run stages in any allowed order pass the checker, take as few rounds as
    that order needs, and return what the stages return when run one after the other.

    Edited programs return the same or are refused, and the checker is right about them too.
    """
    law = "L10 own schedules are compositions"
    if (refused := refusal(case.scheduled)) is not None:
        raise LawViolation(f"{law}: refused: {refused}")
    rounds = _rounds(case)
    fewest = fewest_rounds(case.scheduled.programs, case.scheduled.jobs)
    # A message that no rank needs yet must not hold up a run by filling its edge: LoopedBFS once
    # took 18 rounds for that, where 17 are enough.
    if rounds > fewest:
        raise LawViolation(
            f"{law}: {rounds} rounds of equally fast stages, where {fewest} are enough"
        )
    expected = _one_after_the_other(case)
    if (result := _streamed(case, case.scheduled, transport)) != expected:
        raise LawViolation(f"{law}: {result} for {expected}")
    if prod(len(program.effects) + 1 for program in case.edited.programs) <= WORLDS:
        checker_is_right(case.edited)
    try:
        result = _streamed(case, case.edited, transport)
    except ProgramError:
        return
    except Exception as error:
        raise LawViolation(
            f"{law}: accepted after an edit, it raises {type(error).__name__}"
        ) from error
    if result != expected:
        raise LawViolation(f"{law}: accepted after an edit, it returns {result} for {expected}")


def fewest_rounds(programs: Sequence[Program], jobs: Sequence[Job]) -> int:
    """The round in which the last run ends, if every run takes one round and begins as soon as it
    can.

    A run waits for three others: the run before it on its rank, the stage before it on its
    micro-batch, and the last stage on the job that its own job runs after. So this is the length
    of the longest chain of runs; messages are ignored.

    Args:
        programs: the programs of all ranks. Only their runs of stages count, in their order.
        jobs: one per micro-batch.
    """
    orders = [
        [e for e in p.effects if isinstance(e, Run) and e.stage is not None] for p in programs
    ]
    last = max((e.stage for order in orders for e in order if e.stage is not None), default=0)
    before: dict[tuple[int, int], tuple[int, int]] = {}
    for order in orders:
        for one, other in itertools.pairwise(order):
            before[_run(other)] = _run(one)

    @functools.cache
    def end(stage: int, microbatch: int) -> int:
        after = jobs[microbatch].after
        if (stage, microbatch) in before:
            needed = [before[stage, microbatch]]
        else:
            needed = []
        needed += [(stage - 1, microbatch)] if stage else []
        needed += [] if after is None else [(last, after)]
        return 1 + max((end(*run) for run in needed), default=0)

    return max((end(*_run(e)) for order in orders for e in order), default=0)


def _run(effect: Run) -> tuple[int, int]:
    assert effect.stage is not None, "an advance takes no round"
    return effect.stage, effect.microbatch


def _rounds(case: Woven) -> int:
    """The rounds that the programs take if every run takes one round and nothing else takes
    time."""
    return round(simulate(case.scheduled.programs, Costs((1.0,) * case.num_stages)).step_time)


def _stage(
    param: int, state: Tensor, batch: tuple[Tensor, int], x: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A stage on integers, whose result depends on the order in which all stages saw each
    request."""
    # Integers compare exactly. Multiplying and adding do not commute, so a swapped order shows.
    rows, number = batch
    x = number + rows if x is None else x
    # A prime below 2**16: products stay far from the end of int64.
    output = (x * param + state[rows]) % 65_521
    return state.index_copy(0, rows, state[rows] * 3 + output), output


def _advance(state: Tensor, batch: tuple[Tensor, int], out: Tensor | None) -> Tensor:
    rows, _ = batch
    return state.index_copy(0, rows, (state[rows] * 5 + (7 if out is None else out)) % 65_521)


def _batches(case: Woven) -> list[tuple[Tensor, int]]:
    return [(torch.tensor(sorted(rows)), number) for number, rows in enumerate(case.rows)]


def _listed(case: Woven, states: Sequence[Tensor], outputs: Sequence[Any]) -> list[Any]:
    """The states, and the outputs of the jobs whose `feeds` is set."""
    fed = [out.tolist() for out, job in zip(outputs, case.scheduled.jobs, strict=True) if job.feeds]
    return [[state.tolist() for state in states], fed]


def _one_after_the_other(case: Woven) -> list[Any]:
    states = [torch.arange(3) + index for index in range(case.num_stages)]
    outputs = list[Any]()
    for batch, job in zip(_batches(case), case.scheduled.jobs, strict=True):
        x: Any = None
        for index in range(case.num_stages):
            states[index], x = _stage(index + 2, states[index], batch, x)
        outputs.append(x)
        if case.advances:
            states = [_advance(state, batch, x if job.feeds else None) for state in states]
    return _listed(case, states, outputs)


def _without_schema(effect: Effect) -> Effect:
    if isinstance(effect, Run | Fence):
        return effect
    # The drawn schemas are of float tensors, and these stages send integers.
    return attrs.evolve(effect, schema=None)


def _streamed(case: Woven, scheduled: Scheduled, transport: Transport | None) -> list[Any]:
    programs = [
        attrs.evolve(p, effects=tuple(map(_without_schema, p.effects))) for p in scheduled.programs
    ]
    # `pipeline` also asks for the schedule of its default number of micro-batches.
    fallback = interleaved(len(programs))

    def schedule(num_stages: int, jobs: Sequence[Job], **options: Any) -> Sequence[Program]:
        if tuple(jobs) == scheduled.jobs:
            return programs
        return fallback(num_stages, jobs, **options)

    advance = _advance if case.advances else None
    step = pipeline(
        [_stage] * case.num_stages, advance=advance, transport=transport, schedule=schedule
    )
    params = [index + 2 for index in range(case.num_stages)]
    states, outputs = step.stream(
        params,
        [torch.arange(3) + index for index in range(case.num_stages)],
        _batches(case),
        scheduled.jobs,
    )
    return _listed(case, states, outputs)
