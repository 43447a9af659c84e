"""Schedules: pure functions from stages and jobs to each rank's program.

A schedule gets a list of jobs, one per micro-batch, which every rank runs in the same order. Job
lists differ in what a job waits for: nothing in streaming, the tokens of the previous step in a
decode loop.
"""

from collections.abc import Generator, Iterator, Sequence

import attrs

from weft.arguments.checks import kind_of
from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError
from weft.transforms.pipelines.argument_checks import Mistake, check_count, refuse
from weft.transforms.pipelines.checker import count_stages
from weft.values.schema import Schema


@attrs.frozen
class Job:
    """One micro-batch of a schedule.

    Args:
        feeds: whether the output returns to all ranks, which then advance their states with it. A
            micro-batch that samples nothing (a chunk of a prompt) need not feed: the ranks advance
            without its output.
        after: the job whose output must return before this job runs, namely the last earlier job
            that feeds one of its requests. None: this job waits for no output.
    """

    feeds: bool = True
    after: int | None = None


def make_programs(
    num_stages: int,
    jobs: Sequence[Job],
    *,
    schema: Schema | None = None,
    advances: bool = True,
    buffers: int | None = None,
) -> tuple[Program, ...]:
    """The programs that run `jobs` through the stages in order. Each rank receives, runs and sends
    one job after the other, and receives returning outputs as late as the next job allows.

    Args:
        num_stages: the number of stages and of ranks; stage r runs on rank r.
        jobs: one per micro-batch.
        schema: the schema of the values that travel between stages, if declared.
        advances: whether the ranks advance a state.
        buffers: the number of results that a stage holds before it overwrites the oldest one; a
            fence then waits until that one was sent. None: a stage never overwrites a result.

    Raises:
        ProgramError: fewer than one stage or buffer; or a job whose `after` is not an earlier job
            that feeds.

    >>> print(make_programs(2, [Job(), Job(after=0)])[0])
    rank 0 of 2
      run stage 0 [mb 0]
      send to 1 [mb 0]
      broadcast from 1 [mb 0]
      run advance [mb 0]
      run stage 0 [mb 1]
      send to 1 [mb 1]
      broadcast from 1 [mb 1]
      run advance [mb 1]
    """
    is_list = hasattr(jobs, "__len__") and all(isinstance(job, Job) for job in jobs)
    call = (
        f"make_programs({num_stages!r:.60}, <{len(jobs) if is_list else kind_of(jobs)} jobs>,"
        f" buffers={buffers!r})"
    )
    check_count(call, "num_stages", num_stages)
    check_count(call, "buffers", 1 if buffers is None else buffers)
    mistake = "no list of jobs", "make_programs(2, decode_jobs(...)), or [Job(), ...]"
    refuse(call, mistake_in_jobs(jobs) if is_list else mistake)
    programs = (
        _effects(rank, num_stages, jobs, schema, advances, buffers) for rank in range(num_stages)
    )
    return tuple(Program(rank, num_stages, tuple(effects)) for rank, effects in enumerate(programs))


def mistake_in_jobs(jobs: Sequence[Job], first: int = 0) -> Mistake | None:
    """The mistake in the first job whose `after` is not an earlier job that feeds; None if there is
    none. Jobs are numbered from `first` on."""
    for index, job in enumerate(jobs, first):
        after = job.after
        # Jobs before `first` are not in the list. They are over, so it no longer matters whether
        # they feed.
        if after is not None and not (
            0 <= after < index and (after < first or jobs[after - first].feeds)
        ):
            return f"job {index} runs after job {after}", "an earlier job, whose output returns"
    return None


def _effects(
    rank: int,
    num_stages: int,
    jobs: Sequence[Job],
    schema: Schema | None,
    advances: bool,
    buffers: int | None,
) -> Iterator[Effect]:
    left = yield from _running(rank, num_stages, jobs, schema, advances, buffers)
    for mb in left:
        yield from _take_in(rank, num_stages - 1, mb, advances)


def _running(
    rank: int,
    num_stages: int,
    jobs: Sequence[Job],
    schema: Schema | None,
    advances: bool,
    buffers: int | None,
) -> Generator[Effect, None, Sequence[int]]:
    """The effects up to those of the last job. Returns the jobs whose output this rank has not
    received by then."""
    last = num_stages - 1
    feeding = [index for index, job in enumerate(jobs) if job.feeds]
    # How many of the feeding jobs' outputs this rank has received
    taken = 0
    for mb, job in enumerate(jobs):
        # All outputs up to job `due` must be received before this job runs: the rank may only run
        # so far ahead, and the job needs the output of `job.after`.
        due = mb - _ahead(last - rank)
        if job.after is not None:
            due = max(due, job.after)
        while taken < len(feeding) and feeding[taken] <= due:
            yield from _take_in(rank, last, feeding[taken], advances)
            taken += 1
        if rank > 0:
            yield Recv(rank - 1, mb, schema)
        # A result of the last stage is sent only if its job feeds; otherwise no fence is needed.
        if buffers is not None and mb >= buffers and (rank < last or jobs[mb - buffers].feeds):
            yield Fence(mb - buffers)
        yield Run(f"stage {rank}", mb)
        if rank < last:
            yield Send(rank + 1, mb, schema)
        elif job.feeds:
            yield Broadcast(last, mb)
        if advances and not job.feeds:
            yield Run("advance", mb)
    return feeding[taken:]


def count_running(
    num_stages: int, jobs: Sequence[Job], *, advances: bool = False, buffers: int | None = None
) -> tuple[tuple[int, ...], int]:
    """For each rank's program by `make_programs`, the number of effects up to those of the last
    job; and the first job whose output some rank has not received by then (the number of jobs if
    there is none).

    >>> count_running(2, [Job(), Job()])
    ((4, 6), 0)
    """
    counts = []
    first = len(jobs)
    for rank in range(num_stages):
        running = _running(rank, num_stages, jobs, None, advances, buffers)
        count = 0
        while True:
            try:
                next(running)
            except StopIteration as end:
                first = min([first, *end.value[:1]])
                break
            count += 1
        counts.append(count)
    return tuple(counts), first


def _ahead(stages_behind: int) -> int:
    """The most jobs that a rank with n stages behind it may run ahead of the outputs that returned.
    With more than 2n + 1, and one message per edge, it could block the last rank, for which it
    waits itself. More than n + 2 has no use: the rank's state would only advance later."""
    return min(2 * stages_behind + 1, stages_behind + 2)


def _take_in(rank: int, last: int, mb: int, advances: bool) -> Iterator[Effect]:
    """Receive the last stage's output of a micro-batch, and advance."""
    # On the last rank, the broadcast is the send in `_running`.
    if rank != last:
        yield Broadcast(last, mb)
    if advances:
        yield Run("advance", mb)


def streaming(
    num_stages: int,
    num_microbatches: int,
    *,
    schema: Schema | None = None,
    feedback: bool = False,
    buffers: int | None = None,
) -> tuple[Program, ...]:
    """Forward-only streaming: each rank receives, runs and sends one micro-batch after the other.

    Args:
        num_stages: the number of stages and of ranks; stage r runs on rank r.
        num_microbatches: the number of parts of the batch.
        schema: the schema of the values that travel between stages, if declared.
        feedback: whether the last stage's output returns to all ranks, which then advance their
            states with it.
        buffers: as for `make_programs`.

    >>> print(streaming(2, 1, feedback=True)[0])
    rank 0 of 2
      run stage 0 [mb 0]
      send to 1 [mb 0]
      broadcast from 1 [mb 0]
      run advance [mb 0]
    """
    jobs = [Job(feeds=feedback)] * num_microbatches
    return make_programs(num_stages, jobs, schema=schema, advances=feedback, buffers=buffers)


def decode_jobs(num_cohorts: int, num_steps: int) -> tuple[Job, ...]:
    """The jobs of a decode loop: cohorts of requests take turns, `num_steps` steps each, and each
    step of a cohort waits for the tokens of the cohort's previous step. With as many cohorts as
    stages, all stages are busy.

    Args:
        num_cohorts: the number of groups of requests that decode in turn.
        num_steps: the number of decode steps of each cohort.

    Raises:
        ProgramError: either number is less than one.

    >>> [job.after for job in decode_jobs(2, 3)]
    [None, None, 0, 1, 2, 3]
    """
    call = f"decode_jobs({num_cohorts!r}, {num_steps!r})"
    check_count(call, "num_cohorts", num_cohorts)
    check_count(call, "num_steps", num_steps)
    return tuple(
        Job(after=None if index < num_cohorts else index - num_cohorts)
        for index in range(num_cohorts * num_steps)
    )


def jobs_for(rows: Sequence[frozenset[int]], samples: Sequence[bool]) -> tuple[Job, ...]:
    """The jobs of any mixture of prompt chunks and decodes: each waits for the last earlier job
    that sampled a token for one of its requests.

    Args:
        rows: the requests of each micro-batch.
        samples: for each micro-batch, whether it samples a token for any request.

    >>> [job.after for job in jobs_for([{0}, {1}, {0}, {0, 1}], [False, True, True, True])]
    [None, None, None, 2]
    """
    jobs: list[Job] = []
    for requests, feeds in zip(rows, samples, strict=True):
        earlier = (i for i in range(len(jobs) - 1, -1, -1) if jobs[i].feeds and requests & rows[i])
        jobs.append(Job(feeds, next(earlier, None)))
    return tuple(jobs)


def put_classes(
    programs: Sequence[Program], classes: Sequence[str], schema: Schema | None, call: str
) -> Iterator[Program]:
    """The programs, completed by the classes of their micro-batches; sends and receives without a
    schema get `schema`.

    Raises:
        ProgramError: the programs have other micro-batches, or other classes.
    """
    microbatches = {effect.microbatch for program in programs for effect in program.effects}
    if classes and microbatches != set(range(len(classes))):
        problem = f"programs of {len(microbatches)} micro-batches, and a batch of {len(classes)}"
        instead = (
            "a batch of as many parts, or a schedule (num_stages, jobs, ...) that makes the"
            " programs"
        )
        raise ProgramError(call, problem, instead)
    for program in programs:
        if program.classes and classes and program.classes != tuple(classes):
            problem = (
                f"programs for micro-batches {program.classes}, and a batch of {tuple(classes)}"
            )
            raise ProgramError(
                call, problem, "programs without classes, or a schedule that makes them"
            )
        effects = (
            (
                attrs.evolve(effect, schema=effect.schema or schema)
                if isinstance(effect, Send | Recv)
                else effect
            )
            for effect in program.effects
        )
        yield attrs.evolve(
            program, classes=tuple(classes), effects=tuple(effects) if schema else program.effects
        )


def refuse_other_work(
    call: str,
    programs: Sequence[Program],
    counts: tuple[int, int],
    jobs: Sequence[Job],
    *,
    advances: bool,
) -> None:
    """Raise ProgramError unless the checked programs do the work of the jobs: they run all jobs in
    order on all stages, each after its `Job.after`, return the output of each job that feeds, and
    advance if there is an `advance`.

    Args:
        call: the call that the error names.
        programs: the programs of all ranks.
        counts: the number of stages, and the number of ranks.
        jobs: one per micro-batch.
        advances: whether the ranks advance a state.
    """
    refuse(f"{call}: the programs of its schedule", _other_work(programs, counts, jobs, advances))


def _other_work(
    programs: Sequence[Program], counts: tuple[int, int], jobs: Sequence[Job], advances: bool
) -> Mistake | None:
    num_stages, num_ranks = counts
    if len(programs) != num_ranks:
        return (
            f"programs of {len(programs)} ranks, in a pipeline of {num_ranks}",
            "as many ranks for any jobs",
        )
    if jobs and (stages := count_stages(programs)) != num_stages:
        return (
            f"programs of {stages} stages, in a pipeline of {num_stages}",
            "each stage s on rank s % num_ranks",
        )
    ran = [e.microbatch for e in programs[0].effects if isinstance(e, Run) and e.stage == 0]
    if ran != list(range(len(jobs))):
        problem = f"runs of the micro-batches {ran}, where there are {len(jobs)}, in order"
        return (
            problem,
            (
                "each job once, in order: a schedule (num_stages, jobs, ...), or a batch of as many"
                " parts"
            ),
        )
    feeding = {mb for mb, job in enumerate(jobs) if job.feeds}
    returned = {e.microbatch for e in programs[-1].effects if isinstance(e, Broadcast)}
    if feeding != returned:
        which = sorted(feeding ^ returned)[0]
        problem = (
            f"micro-batch {which}"
            f" {'feeds, and is not' if which in feeding else 'does not feed, and is'} broadcast"
        )
        return (
            problem,
            f"broadcast from {num_ranks - 1} for the jobs with feeds=True, on every rank",
        )
    # One advance on one rank is enough to look at: the checker has refused programs in which ranks
    # or micro-batches differ in this.
    if ((Run("advance", 0) in programs[0].effects) != advances) and jobs:
        return (
            f"{'no ' * advances}run advance",
            f"{'a' if advances else 'no'} run advance for each micro-batch",
        )
    for program in programs:
        over = set[int]()
        for effect in program.effects:
            if isinstance(effect, Run) and effect.stage is not None:
                after = jobs[effect.microbatch].after
                # A job that does not feed still advances the state that later jobs read.
                before = {mb for mb in range(effect.microbatch) if advances and not jobs[mb].feeds}
                late = sorted((before | ({after} if after is not None else set())) - over)
                if late:
                    problem = (
                        f"rank {program.rank} performs '{effect}' too early: its job must wait for"
                        f" job {late[0]}"
                    )
                    end = ["broadcast"] * jobs[late[0]].feeds + ["run advance"] * advances
                    return problem, f"{' and '.join(end)} [mb {late[0]}] before it"
            elif isinstance(effect, Run) if advances else isinstance(effect, Broadcast):
                # With `advances`, a job is over at its advance, which comes after its output.
                over.add(effect.microbatch)
    return None
