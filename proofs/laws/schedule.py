"""L10: generated programs are right, and the checker accepts right programs and nothing else.

`weft.proofs.solver.programs_exhaustive` defines what is right: it tries every order in which ranks could move. The
checker requires one thing more: a stage that overwrites a result that it sent must have the fence in its program, even
if something else (a returned output, or a full edge) keeps the two apart in every order. So it accepts exactly the
programs that are right and `fenced`.
"""

from math import prod

from weft.effects import Broadcast, Program, Run
from weft.errors import ProgramError
from weft.proofs.checks.difference import LawViolation
from weft.proofs.solver.programs_exhaustive import fault, fenced
from weft.proofs.strategies.programs import Broken, Scheduled
from weft.transforms.pipelines.checker import check

WORLDS = 5_000
"""The most positions of ranks for which every order of a generated program is tried."""


def refusal(case: Scheduled) -> str | None:
    """The checker's error for programs; None if it accepts them."""
    try:
        check(case.programs, buffers=case.buffers)
    except ProgramError as error:
        return error.seen
    return None


def checker_is_right(case: Scheduled) -> None:
    """L10: the checker accepts programs if and only if they are right and fenced."""
    wrong, refused = fault(case.programs, buffers=case.buffers), refusal(case)
    if wrong is None and not fenced(case.programs, case.buffers):
        wrong = "a fence is missing"
    if (wrong is None) != (refused is None):
        said = f"accepts what goes wrong: {wrong}" if refused is None else f"refuses what is right: {refused}"
        raise LawViolation(f"L10 the checker is right: it {said}")


def broken_programs_are_refused(case: Broken) -> None:
    """L10: the checker accepts right programs, and refuses them once they have a fault."""
    if (refused := refusal(case.right)) is not None:
        raise LawViolation(f"L10 broken programs are refused: and right ones: {refused}")
    for name, wrong in case.wrong.items():
        if refusal(wrong) is None:
            seen = fault(wrong.programs, buffers=wrong.buffers)
            raise LawViolation(f"L10 broken programs are refused: {name}: the checker accepts what goes wrong: {seen}")


def schedules_are_right(case: Scheduled) -> None:
    """L10: the programs of `make_programs` are right, pass the checker, and run no job before the jobs it waits for."""
    refused = refusal(case)
    if refused is not None:
        raise LawViolation(f"L10 schedules are right: refused: {refused}")
    small = prod(len(program.effects) + 1 for program in case.programs) <= WORLDS
    if small and (wrong := fault(case.programs, buffers=case.buffers)) is not None:
        raise LawViolation(f"L10 schedules are right: {wrong}")
    for program in case.programs:
        for mb, job in enumerate(case.jobs):
            if job.after is not None and not _waits(program, mb, job.after):
                seen = f"rank {program.rank} runs job {mb} before it took in job {job.after}"
                raise LawViolation(f"L10 schedules are right: {seen}")


def _waits(program: Program, mb: int, after: int) -> bool:
    """Whether a rank receives a job's returned output, and advances with it, before it runs another job."""
    before = program.effects[: program.effects.index(Run(f"stage {program.rank}", mb))]
    needed = [e for e in program.effects if isinstance(e, Broadcast) or e == Run("advance", after)]
    return all(e in before for e in needed if e.microbatch == after)
