"""Work: what programs must do for the jobs that they were made for, beyond being right."""

from collections.abc import Iterator, Sequence

import attrs

from weft.effects import Broadcast, Program, Recv, Run, Schema, Send
from weft.errors import ProgramError
from weft.transforms.pipelines.argument_checks import Mistake, refuse
from weft.transforms.pipelines.checker import count_stages
from weft.transforms.pipelines.schedule import Job


def put_classes(
    programs: Sequence[Program], classes: Sequence[str], schema: Schema | None, call: str
) -> Iterator[Program]:
    """The programs with the classes of their micro-batches, and with the schema of what travels where they have none.

    Raises:
        ProgramError: programs for other micro-batches, or other classes.
    """
    found = {effect.microbatch for program in programs for effect in program.effects}
    if classes and found != set(range(len(classes))):
        seen = f"programs of {len(found)} micro-batches, and a batch of {len(classes)}"
        instead = "a batch of as many parts, or a schedule (num_stages, jobs, ...) that makes the programs"
        raise ProgramError(call, seen, instead)
    for program in programs:
        if program.classes and classes and program.classes != tuple(classes):
            seen = f"programs for micro-batches {program.classes}, and a batch of {tuple(classes)}"
            raise ProgramError(call, seen, "programs without classes, or a schedule that makes them")
        own = (
            attrs.evolve(effect, schema=effect.schema or schema) if isinstance(effect, Send | Recv) else effect
            for effect in program.effects
        )
        yield attrs.evolve(program, classes=tuple(classes), effects=tuple(own) if schema else program.effects)


def refuse_other_work(
    call: str, programs: Sequence[Program], counts: tuple[int, int], jobs: Sequence[Job], *, advances: bool
) -> None:
    """Raise ProgramError unless checked programs run all jobs in order on all stages, each after the job that its own
    is after, return the output of each job that feeds, and advance where there is an `advance`.

    Args:
        call: the call that the error names.
        programs: of all ranks.
        counts: the number of stages, and of ranks.
        jobs: one per micro-batch.
        advances: whether the ranks advance a state.
    """
    refuse(f"{call}: the programs of its schedule", _mistake(programs, counts, jobs, advances))


def _mistake(
    programs: Sequence[Program], counts: tuple[int, int], jobs: Sequence[Job], advances: bool
) -> Mistake | None:
    num_stages, num_ranks = counts
    if len(programs) != num_ranks:
        return f"programs of {len(programs)} ranks, which were {num_ranks} before", "as many ranks for any jobs"
    if jobs and (stages := count_stages(programs)) != num_stages:
        return f"programs of {stages} stages for {num_stages}", "each stage s on rank s % num_ranks"
    ran = [e.microbatch for e in programs[0].effects if isinstance(e, Run) and e.stage == 0]
    if ran != list(range(len(jobs))):
        seen = f"runs of the micro-batches {ran}, where there are {len(jobs)}, in order"
        return seen, "each job once, in order: a schedule (num_stages, jobs, ...), or a batch of as many parts"
    feeding = {mb for mb, job in enumerate(jobs) if job.feeds}
    returned = {e.microbatch for e in programs[-1].effects if isinstance(e, Broadcast)}
    if feeding != returned:
        which = sorted(feeding ^ returned)[0]
        seen = f"micro-batch {which} {'feeds, and is not' if which in feeding else 'does not feed, and is'} broadcast"
        return seen, f"broadcast from {num_ranks - 1} for the jobs with feeds=True, on every rank"
    if ((Run("advance", 0) in programs[0].effects) != advances) and jobs:
        return f"{'no ' * advances}run advance", f"{'a' if advances else 'no'} run advance for each micro-batch"
    for program in programs:
        over = set[int]()
        for effect in program.effects:
            if isinstance(effect, Run) and effect.stage is not None:
                after = jobs[effect.microbatch].after
                before = {mb for mb in range(effect.microbatch) if advances and not jobs[mb].feeds}
                late = sorted((before | ({after} if after is not None else set())) - over)
                if late:
                    seen = f"rank {program.rank}: '{effect}' before job {late[0]} is over, after which it runs"
                    end = ["broadcast"] * jobs[late[0]].feeds + ["run advance"] * advances
                    return seen, f"{' and '.join(end)} [mb {late[0]}] before it"
            elif isinstance(effect, Run) if advances else isinstance(effect, Broadcast):
                over.add(effect.microbatch)  # an advance comes after the output
    return None
