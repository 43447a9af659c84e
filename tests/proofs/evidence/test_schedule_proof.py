"""z3 proves schedules, and refutes each bug planted in their generators with a counterexample."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest import mock

import attrs
import pytest

pytest.importorskip("z3")

import z3

from weft.effects import Effect, Fence, Program, Recv, Run, Send
from weft.proofs.evidence.solver import schedule_proof
from weft.proofs.evidence.solver.symbolic import Path, Verdict, explore
from weft.transforms.pipelines import schedule
from weft.transforms.pipelines.schedule import Job, make_programs, streaming

PROOFS: dict[str, Callable[[], Iterator[Verdict]]] = {
    "loops": lambda: schedule_proof.prove_loops(3, 8, 3),
    "jobs, 1 stage": lambda: schedule_proof.prove_jobs(1, 3, (None, 1, 2)),
    "jobs, 2 stages": lambda: schedule_proof.prove_jobs(2, 3, (None, 1)),
    "4 jobs, 2 stages": lambda: schedule_proof.prove_jobs(2, 4, (None, 1)),
    "jobs, 4 stages": lambda: schedule_proof.prove_jobs(4, 3, (None, 1, 2)),
    "requests": lambda: schedule_proof.prove_requests(3, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name.startswith("4") else ()) for name in PROOFS],
)
def test_it_is_proved(name: str) -> None:
    verdicts = list(PROOFS[name]())
    assert verdicts
    assert [str(v) for v in verdicts if not v.holds] == []
    assert all(v.paths > 20 for v in verdicts)


def test_no_job_list_is_left_out() -> None:
    """There is one path per list of three jobs: each job may feed, and follows none or an earlier
    one that feeds."""
    job_lists: set[tuple[Any, ...]] = set()

    def run(path: Path) -> None:
        jobs = schedule_proof.unknown_jobs(path, 3)
        make_programs(2, jobs)
        feeds = [bool(job.feeds) for job in jobs]
        after = [
            None if j.after is None else next(i for i in range(3) if j.after == i) for j in jobs
        ]
        job_lists.add((*zip(feeds, after, strict=True),))

    assert all(result is None for _, result in explore(run))
    counted = {
        ((a, None), (b, second), (c, third))
        for a in (False, True)
        for b in (False, True)
        for c in (False, True)
        for second in (None, *([0] if a else []))
        for third in (None, *([0] if a else []), *([1] if b else []))
    }
    assert job_lists == counted


Change = Callable[[int, list[Effect]], None]
EFFECTS = schedule._effects


def generating(change: Change) -> AbstractContextManager[Any]:
    def changed(rank: int, *args: Any) -> list[Effect]:
        effects = list(EFFECTS(rank, *args))
        change(rank, effects)
        return effects

    return mock.patch.object(schedule, "_effects", changed)


def ahead(stages_behind: int) -> int:
    return 2 * stages_behind + (2 if stages_behind else 1)


def no_sends(rank: int, effects: list[Effect]) -> None:
    effects[:] = [e for e in effects if not isinstance(e, Send)]


def swapped_recvs(rank: int, effects: list[Effect]) -> None:
    places = [i for i, e in enumerate(effects) if isinstance(e, Recv)]
    if len(places) > 1:
        effects[places[0]], effects[places[1]] = effects[places[1]], effects[places[0]]


def no_fences(rank: int, effects: list[Effect]) -> None:
    effects[:] = [e for e in effects if not isinstance(e, Fence)]


def lagging(rank: int, effects: list[Effect]) -> None:
    """Rank 0 advances only at its end."""
    effects.sort(key=lambda e: rank == 0 and isinstance(e, Run) and e.what == "advance")


def forgetful(rank: int, num_stages: int, jobs: Sequence[Any], *args: Any) -> Iterator[Effect]:
    return EFFECTS(rank, num_stages, [attrs.evolve(job, after=None) for job in jobs], *args)


BUGS: dict[
    str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Iterator[Verdict]], str]
] = {
    "one job too far ahead": (
        lambda: mock.patch.object(schedule, "_ahead", ahead),
        lambda: schedule_proof.prove_loops(2, 6, 2),
        "never stuck: ",
    ),
    "no sends": (lambda: generating(no_sends), PROOFS["loops"], "edges agree: "),
    "recvs swapped": (lambda: generating(swapped_recvs), PROOFS["loops"], "edges agree: "),
    "no fences": (lambda: generating(no_fences), PROOFS["jobs, 2 stages"], "passes the checker: "),
    "advances late": (
        lambda: generating(lagging),
        PROOFS["jobs, 2 stages"],
        "each job after its own: ",
    ),
    "waits for nothing": (
        lambda: mock.patch.object(schedule, "_effects", forgetful),
        PROOFS["requests"],
        "every state is known: ",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_a_generator_is_refuted(name: str) -> None:
    plant, proof, part = BUGS[name]
    with plant():
        counterexamples = [v.counterexample for v in proof() if v.counterexample is not None]
    assert any(text.startswith(part) for text in counterexamples), counterexamples


def test_a_bug_in_jobs_for_is_refuted() -> None:
    """Each job waits for the first of its requests' jobs, not for the last one."""

    def first(rows: Sequence[Any], samples: Sequence[Any]) -> tuple[Job, ...]:
        jobs: list[Job] = []
        for job_rows, feeds in zip(rows, samples, strict=True):
            jobs.append(
                Job(
                    feeds,
                    next(
                        (i for i, job in enumerate(jobs) if job.feeds and job_rows & rows[i]), None
                    ),
                )
            )
        return tuple(jobs)

    with mock.patch.object(
        import_module("weft.proofs.evidence.solver.schedule_proof"), "jobs_for", first
    ):
        counterexample = next(schedule_proof.prove_requests(2, 3)).counterexample
    assert counterexample is not None
    assert counterexample.startswith("every state is known: ")


def solved(term: Any) -> bool:
    """Whether a term holds for all values of its unknowns."""
    solver = z3.Solver()
    solver.add(z3.Not(term))
    return bool(solver.check() == z3.unsat)


def test_a_timetable_is_one_and_a_deadlock_has_none() -> None:
    programs = streaming(3, 4, feedback=True, buffers=1)
    times = schedule_proof.timetable(programs)
    assert times is not None
    assert all(
        times[a] < times[b] for a, b, holds in schedule_proof.happens_before(programs, 1) if holds
    )
    assert solved(schedule_proof.never_stuck(programs))
    late = list(streaming(2, 6, feedback=True))
    effects = sorted(
        late[0].effects, key=lambda e: not isinstance(e, Send) and e != Run("stage 0", e.microbatch)
    )
    late[0] = Program(0, 2, tuple(effects))
    assert schedule_proof.timetable(late) is None
    assert schedule_proof.never_stuck(tuple(late)) is False
