"""Proofs by z3 that schedules are right for all jobs up to a bound, on edges of any capacity:
`python -m weft.proofs.evidence.solver.schedule_proof`.

It runs `make_programs`, `streaming`, `decode_jobs` and `jobs_for` themselves on unknown jobs
(`weft.proofs.evidence.solver.symbolic`): whether each feeds, which job it runs after, which jobs
share a request. On each path the programs are known. Then z3 looks for a time for each effect that
is later than all it must wait for (`timetable`), and proves that these times work for every
capacity. If such times exist, there is no deadlock: the earliest effect that is not done never has
to wait for another one.
"""

import argparse
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, overload

import z3

from weft.effects import Broadcast, Effect, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError
from weft.proofs.evidence.solver.symbolic import Integer, Path, Verdict, flag, prove, unknown
from weft.transforms.pipelines.checker import check
from weft.transforms.pipelines.machine import Edge, Step, puts, takes
from weft.transforms.pipelines.schedule import Job, decode_jobs, jobs_for, make_programs, streaming

Place = tuple[int, int]  # an effect's rank, and its index in that rank's program


def choice(path: Path, name: str, values: Sequence[Any]) -> Any:
    """An unknown one of several values."""
    number = z3.Int(name)
    # The last value is what is left: an unknown that is none of them would be a path without a
    # meaning.
    for index, value in enumerate(values[:-1]):
        if path.branch(number == index):
            return value
    return values[-1]


class Truth:
    """An unknown truth value, decided when it is first asked for."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.term = z3.Bool(name)

    def __bool__(self) -> bool:
        return self.path.branch(self.term)


class Jobs(Sequence[Job]):
    """Jobs that an unknown integer can index."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = tuple(jobs)

    def __len__(self) -> int:
        return len(self.jobs)

    @overload
    def __getitem__(self, index: int) -> Job: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Job]: ...
    def __getitem__(self, index: Any) -> Any:
        # By type, since an unknown says that it is an int.
        if type(index) is not Integer:
            return self.jobs[index]
        number: Any = index
        return next(job for i, job in enumerate(self.jobs) if number == i)


def unknown_jobs(path: Path, count: int) -> Jobs:
    """Unknown jobs, assumed only to be valid for `make_programs`."""
    jobs = list[Job]()
    returning = list[Any]()
    for index in range(count):
        feeds: Any = Truth(path, f"job {index} feeds")
        # Whether there is an `after` is decided at once, because the code asks `is None`, which
        # cannot be unknown.
        waits = index > 0 and flag(path, f"job {index} waits")
        if waits:
            after = unknown(path, f"job {index} after")
        else:
            after = None
        if after is not None:
            # What `make_programs` requires: an earlier job, whose output returns.
            path.assume(z3.Or(*(z3.And(after.term == i, term) for i, term in enumerate(returning))))
        jobs.append(Job(feeds, after))
        returning.append(feeds.term)
    return Jobs(jobs)


class Requests:
    """The requests of a micro-batch, which can only be asked whether it shares any with another."""

    def __init__(self, path: Path, index: int) -> None:
        self.path = path
        self.index = index

    # All that `jobs_for` asks of two sets of requests: so the proof is for any requests.
    def __and__(self, other: "Requests") -> Truth:
        return Truth(self.path, _shared(other.index, self.index))


def _shared(earlier: int, later: int) -> str:
    return f"micro-batches {earlier} and {later} share a request"


def happens_before(
    programs: Sequence[Program], capacity: Any
) -> Iterator[tuple[Place, Place, Any]]:
    """The pairs of effects that must happen in order, each with its condition: a rank's effects run
    in program order; a message is taken after it is put, and put after the message `capacity`
    before it on its edge is taken; a fence is passed after every message that it waits for is
    taken."""
    putting = defaultdict[Edge, list[Place]](list)
    taking = defaultdict[Edge, list[Place]](list)
    # Places and not effects: one effect may occur twice, as a fence.
    effects = {(p.rank, index): effect for p in programs for index, effect in enumerate(p.effects)}
    for (rank, index), effect in effects.items():
        if index:
            yield (rank, index - 1), (rank, index), True
        for edge in puts(Step(rank, effect), len(programs)):
            putting[edge].append((rank, index))
        if (taken := takes(Step(rank, effect))) is not None:
            taking[taken].append((rank, index))
    for edge, sent in putting.items():
        # Strict: edges whose ends differ in number have been refused by `edges_agree` before.
        for number, (put, took) in enumerate(zip(sent, taking[edge], strict=True)):
            yield put, took, True
            for later in range(number + 1, len(sent)):
                # A condition and not a fact, since the capacity is unknown: only messages that far
                # apart must wait.
                yield took, sent[later], later - number >= capacity
            for place, effect in effects.items():
                mine = place[0] == edge.source and place > put
                if (
                    mine
                    and isinstance(effect, Fence)
                    and effect.microbatch == effects[put].microbatch
                ):
                    yield took, place, True


def timetable(programs: Sequence[Program]) -> dict[Place, int] | None:
    """A time for each effect that keeps every order if an edge holds one message; None if there is
    none."""
    solver = z3.Solver()
    times = dict[Place, Any]()
    # With one message an edge the most pairs are ordered: times that keep these keep all others.
    for before, after, holds in happens_before(programs, 1):
        terms = [times.setdefault(place, z3.Int(f"time of {place}")) for place in (before, after)]
        if holds:
            solver.add(terms[0] < terms[1])
    # No such times means a cycle: each of its effects waits for the one before.
    if solver.check() != z3.sat:
        return None
    model = solver.model()
    return {
        place: model.eval(term, model_completion=True).as_long() for place, term in times.items()
    }


@functools.lru_cache(4096)  # different jobs often have the same programs
def never_stuck(programs: tuple[Program, ...]) -> Any:
    """The claim that all programs end, on edges of any capacity from one up: the times found for
    one work for all."""
    times = timetable(programs)
    capacity = z3.Int("capacity")
    if times is None:
        return False
    ordered = [
        z3.Implies(holds, z3.BoolVal(times[before] < times[after]))
        for before, after, holds in happens_before(programs, capacity)
        # Pairs that always hold, and whose times are in order, are true: z3 need not see thousands
        # of them.
        if holds is not True or times[before] >= times[after]
    ]
    # The times are numbers by now, so that z3 only has to find a capacity for which they are wrong.
    return z3.Implies(capacity >= 1, z3.And(*ordered))


def edges_agree(programs: Sequence[Program]) -> bool:
    """The claim that each edge's sends and receives are the same micro-batches, in the same order
    and schema."""
    putting = defaultdict[Edge, list[Any]](list)
    taking = defaultdict[Edge, list[Any]](list)
    for program in programs:
        for effect in program.effects:
            for edge in puts(Step(program.rank, effect), len(programs)):
                putting[edge].append(_message(effect))
            if (taken := takes(Step(program.rank, effect))) is not None:
                taking[taken].append(_message(effect))
    # As lists: the order on an edge counts, since messages carry no name by which to choose.
    return putting == taking


def _message(effect: Effect) -> Any:
    assert isinstance(effect, Send | Recv | Broadcast)
    return effect.microbatch, effect.schema


def accepted(programs: Sequence[Program], buffers: int | None) -> bool:
    """The claim that the checker accepts the programs."""
    try:
        check(programs, buffers=buffers)
    except ProgramError:
        return False
    return True


def right(programs: tuple[Program, ...], buffers: int | None) -> dict[str, Any]:
    """The claims about any programs, by name."""
    # First, because the other claims pair sends and receives by their order.
    if not edges_agree(programs):
        return {"edges agree": False}
    return {"never stuck": never_stuck(programs), "passes the checker": accepted(programs, buffers)}


def taken_in(programs: Sequence[Program], mb: int, earlier: int) -> bool:
    """Whether every rank receives the returned output of one micro-batch, and advances, before it
    runs another."""
    for program in programs:
        before = program.effects[: program.effects.index(Run(f"stage {program.rank}", mb))]
        needed = [
            # The last rank broadcasts where the others receive: for all of them it is the same
            # effect.
            e
            for e in program.effects
            if e.microbatch == earlier and isinstance(e, Broadcast)
        ]
        if not all(effect in before for effect in (*needed, Run("advance", earlier))):
            return False
    return True


def prove_jobs(stages: int, count: int, buffers: Sequence[int | None]) -> Iterator[Verdict]:
    """`make_programs` is right for any jobs."""

    def run(path: Path) -> dict[str, Any]:
        jobs = unknown_jobs(path, count)
        num_buffers = choice(path, "buffers", buffers)
        programs = make_programs(stages, jobs, buffers=num_buffers)
        afters: list[tuple[int, Any]] = [
            (mb, job.after) for mb, job in enumerate(jobs) if job.after is not None
        ]
        waits = [
            # `after` may still be several jobs on this path: the claim must hold for each that is
            # possible.
            z3.Implies(after.term == earlier, z3.BoolVal(taken_in(programs, mb, earlier)))
            for mb, after in afters
            for earlier in range(mb)
        ]
        return right(programs, num_buffers) | {"each job after its own": z3.And(*waits)}

    yield prove(
        f"make_programs, {stages} stages, any {count} jobs, buffers {_listed(buffers)}", run
    )


def prove_requests(stages: int, count: int) -> Iterator[Verdict]:
    """`jobs_for` and the programs of its jobs are right for any micro-batches: no stage runs on a
    request before the ranks have advanced with every earlier micro-batch that it depends on."""

    def run(path: Path) -> dict[str, Any]:
        rows: Any = [Requests(path, index) for index in range(count)]
        samples: Any = [Truth(path, f"micro-batch {index} samples") for index in range(count)]
        programs = make_programs(stages, jobs_for(rows, samples))
        conditions = [
            z3.Implies(z3.Bool(_shared(earlier, mb)), z3.BoolVal(taken_in(programs, mb, earlier)))
            for mb in range(count)
            for earlier in range(mb)
        ]
        # From the requests and not from `Job.after`, which `jobs_for` itself has made.
        return right(programs, None) | {"every state is known": z3.And(*conditions)}

    yield prove(f"jobs_for, {stages} stages, any {count} micro-batches", run)


def prove_loops(stages: int, microbatches: int, steps: int) -> Iterator[Verdict]:
    """`streaming` and `decode_jobs` are right at every size."""

    def streamed(path: Path) -> dict[str, Any]:
        ranks = choice(path, "stages", range(1, stages + 1))
        mbs = choice(path, "count", range(microbatches + 1))
        num_buffers = choice(path, "buffers", (None, 1, 2, 3))
        feedback = flag(path, "feedback")
        return right(streaming(ranks, mbs, feedback=feedback, buffers=num_buffers), num_buffers)

    def decoded(path: Path) -> dict[str, Any]:
        ranks, cohorts = (
            choice(path, name, range(1, stages + 1)) for name in ("stages", "cohorts")
        )
        jobs = decode_jobs(cohorts, choice(path, "steps", range(1, steps + 1)))
        num_buffers = choice(path, "buffers", (None, 1, 2))
        programs = make_programs(ranks, jobs, buffers=num_buffers)
        # A cohort's turn before this one is so many jobs ago.
        waits = all(taken_in(programs, mb, mb - cohorts) for mb in range(cohorts, len(jobs)))
        return right(programs, num_buffers) | {"each step after the one before": waits}

    yield prove(
        f"streaming, up to {stages} stages, {microbatches} micro-batches, 3 buffers", streamed
    )
    yield prove(
        f"decode_jobs, up to {stages} stages, {stages} cohorts, {steps} steps, 2 buffers", decoded
    )


def _listed(buffers: Sequence[int | None]) -> str:
    return ", ".join("all" if count is None else str(count) for count in buffers)


def prove_all(stages: int = 4, jobs: int = 4, longest: int = 6) -> Iterator[Verdict]:
    """Run every proof, one after another.

    Args:
        stages: the most ranks.
        jobs: the most unknown jobs.
        longest: the most unknown jobs in all; more than `jobs` are proved only without buffers.
    """
    yield from prove_loops(stages, 3 * stages, 3)
    for ranks in range(1, stages + 1):
        for count in range(1, jobs + 1):
            yield from prove_jobs(ranks, count, (None, 1, 2))
        # The number of paths grows with each job and each number of buffers, so that the longest
        # lists have only one.
        for count in range(jobs + 1, longest + 1):
            yield from prove_jobs(ranks, count, (None,))
        yield from prove_requests(ranks, jobs)


def main() -> None:
    """Print the table, and exit with 1 if a claim is refuted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=4, help="any jobs, with any buffers")
    parser.add_argument(
        "--longest",
        type=int,
        default=5,
        help="any jobs, each result a value of its own (6: minutes)",
    )
    arguments = parser.parse_args()
    all_hold = True
    print(
        "schedules are right: the orders on each edge agree, no rank is ever stuck on edges of any"
        " capacity >= 1,"
    )
    print(
        "the checker accepts them, and no job runs before every rank has taken in what it runs"
        " after"
    )
    for verdict in prove_all(arguments.stages, arguments.jobs, arguments.longest):
        print(verdict, flush=True)
        all_hold &= verdict.holds
    raise SystemExit(not all_hold)


if __name__ == "__main__":
    main()
