"""Generators of schedules: each rank's effects and their order, at every size; and which jobs wait
for others."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from refusal import refused

from weft.effects import Broadcast, Fence, Program, Recv, Run, Send
from weft.errors import ProgramError
from weft.proofs.strategies import job_lists
from weft.transforms.pipelines.checker import check
from weft.transforms.pipelines.machine import Step, interleave, puts, takes
from weft.transforms.pipelines.schedule import (
    Job,
    decode_jobs,
    jobs_for,
    make_programs,
    refuse_other_work,
    streaming,
)
from weft.values.schema import Schema, TensorSchema

SCHEMA = Schema((TensorSchema("h", ("num_tokens", 4), torch.float32),))


def lines(program: Program) -> list[str]:
    return [str(effect) for effect in program.effects]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("mbs", [0, 1, 2, 3, 7, 20])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("buffers", [None, 1, 3])
def test_streaming_passes_at_every_size(
    ranks: int, mbs: int, feedback: bool, buffers: int | None
) -> None:
    programs = streaming(ranks, mbs, schema=SCHEMA, feedback=feedback, buffers=buffers)
    check(programs, buffers=buffers)
    for capacity in (1, 2, mbs + 1):
        ran = list(interleave(programs, capacity=capacity))
        assert_each_effect_once_in_order(programs, ran)
        assert_bounded(ran, ranks, capacity)


def assert_each_effect_once_in_order(programs: Sequence[Program], ran: Sequence[Step]) -> None:
    for program in programs:
        assert tuple(step.effect for step in ran if step.rank == program.rank) == program.effects


def assert_bounded(ran: Sequence[Step], ranks: int, capacity: int) -> None:
    """Every edge always holds from 0 to `capacity` messages, and is empty at the end."""
    num_messages: dict[object, int] = {}
    for step in ran:
        for edge in puts(step, ranks):
            num_messages[edge] = num_messages.get(edge, 0) + 1
        if (edge := takes(step)) is not None:
            num_messages[edge] -= 1
        assert all(0 <= n <= capacity for n in num_messages.values())
    assert not any(num_messages.values())


def test_stages_of_different_micro_batches_overlap() -> None:
    """While rank 1 runs micro-batch 0, rank 0 already runs the next one, which is the point of a
    pipeline."""
    runs = [
        (s.rank, s.effect.microbatch)
        for s in interleave(streaming(2, 3))
        if isinstance(s.effect, Run)
    ]
    assert runs.index((0, 1)) < runs.index((1, 1))
    assert runs.index((0, 2)) < runs.index((1, 2))


def test_the_first_rank_takes_in_late_and_the_last_at_once() -> None:
    first, last = streaming(2, 2, feedback=True)
    assert lines(first) == [
        "run stage 0 [mb 0]",
        "send to 1 [mb 0]",
        "run stage 0 [mb 1]",
        "send to 1 [mb 1]",
        "broadcast from 1 [mb 0]",
        "run advance [mb 0]",
        "broadcast from 1 [mb 1]",
        "run advance [mb 1]",
    ]
    assert lines(last) == [
        "recv from 0 [mb 0]",
        "run stage 1 [mb 0]",
        "broadcast from 1 [mb 0]",
        "run advance [mb 0]",
        "recv from 0 [mb 1]",
        "run stage 1 [mb 1]",
        "broadcast from 1 [mb 1]",
        "run advance [mb 1]",
    ]


def test_no_rank_is_further_ahead_than_one_message_an_edge_allows() -> None:
    """With s stages after it, a rank runs at most 2s + 1 jobs ahead of returned outputs, and at
    most s + 2."""
    for program in streaming(4, 12, feedback=True):
        ahead = 0
        most = 0
        for effect in program.effects:
            ahead += isinstance(effect, Run) and effect.what != "advance"
            ahead -= isinstance(effect, Broadcast)
            most = max(most, ahead)
        behind = 3 - program.rank
        assert most == min(2 * behind + 1, behind + 2)


def test_what_does_not_feed_advances_at_once_and_returns_to_nobody() -> None:
    first, last = make_programs(2, [Job(feeds=False), Job()])
    assert lines(first) == [
        "run stage 0 [mb 0]",
        "send to 1 [mb 0]",
        "run advance [mb 0]",
        "run stage 0 [mb 1]",
        "send to 1 [mb 1]",
        "broadcast from 1 [mb 1]",
        "run advance [mb 1]",
    ]
    assert lines(last)[:4] == [
        "recv from 0 [mb 0]",
        "run stage 1 [mb 0]",
        "run advance [mb 0]",
        "recv from 0 [mb 1]",
    ]
    assert not any(
        "advance" in line
        for p in make_programs(2, [Job(feeds=False), Job()], advances=False)
        for line in lines(p)
    )


@settings(deadline=None, max_examples=200)
@given(job_lists(), st.integers(1, 4), st.booleans(), st.sampled_from((None, 1, 2)))
def test_any_jobs_pass_and_wait(
    jobs: tuple[Job, ...], stages: int, advances: bool, buffers: int | None
) -> None:
    programs = make_programs(stages, jobs, schema=SCHEMA, advances=advances, buffers=buffers)
    check(programs, buffers=buffers)
    for program in programs:
        runs = [e for e in program.effects if isinstance(e, Run) and e.what != "advance"]
        assert [e.microbatch for e in runs] == list(range(len(jobs)))
        for run, job in zip(runs, jobs, strict=True):
            if job.after is not None:
                before = program.effects[: program.effects.index(run)]
                assert Broadcast(stages - 1, job.after) in before
                assert (Run("advance", job.after) in before) == advances


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_fence_stands_before_each_run_into_a_used_buffer(buffers: int) -> None:
    for program in streaming(3, 5, feedback=True, buffers=buffers):
        for mb in range(5):
            run = program.effects.index(Run(f"stage {program.rank}", mb))
            assert (Fence(mb - buffers) in program.effects[:run]) == (mb >= buffers)
    assert not any(isinstance(e, Fence) for p in streaming(3, 5) for e in p.effects)


def test_the_last_rank_fences_only_what_it_sent() -> None:
    last = make_programs(2, [Job(feeds=False), Job(), Job()], buffers=1)[-1]
    assert [line for line in lines(last) if line.startswith("fence")] == ["fence [mb 1]"]


def test_the_schema_stands_on_both_ends_of_an_edge_between_stages() -> None:
    for program in streaming(3, 2, schema=SCHEMA, feedback=True):
        for effect in program.effects:
            if isinstance(effect, Send | Recv):
                assert effect.schema == SCHEMA
            if isinstance(effect, Broadcast):
                assert effect.schema is None


@pytest.mark.parametrize(("cohorts", "steps"), [(1, 1), (1, 4), (2, 3), (3, 3), (4, 1)])
def test_a_decode_loop_waits_for_the_step_before(cohorts: int, steps: int) -> None:
    jobs = decode_jobs(cohorts, steps)
    assert [job.after for job in jobs] == [None] * cohorts + list(range(cohorts * (steps - 1)))
    assert all(job.feeds for job in jobs)
    for stages in (1, 2, 4):
        check(make_programs(stages, jobs, buffers=1), buffers=1)


def test_with_as_many_cohorts_as_stages_all_are_busy() -> None:
    """Rank 0 runs the other cohorts before it waits for the first one's tokens."""
    first = make_programs(3, decode_jobs(3, 2))[0]
    waits = first.effects.index(Broadcast(2, 0))
    assert [e.microbatch for e in first.effects[:waits] if isinstance(e, Run)] == [0, 1, 2]


def test_jobs_wait_for_the_last_that_sampled_for_one_of_their_requests() -> None:
    rows = [{0, 1}, {2}, {1}, {2, 3}, {0}, {1, 2}]
    jobs = jobs_for(
        [frozenset(job_rows) for job_rows in rows], [True, False, True, True, False, True]
    )
    assert [(job.feeds, job.after) for job in jobs] == [
        (True, None),
        (False, None),
        (True, 0),
        (True, None),
        (False, 0),
        (True, 3),
    ]
    with pytest.raises(ValueError, match="shorter"):
        jobs_for([frozenset({0})], [])


@pytest.mark.parametrize(
    ("jobs", "problem"),
    [
        ([Job(after=0)], "job 0 runs after job 0"),
        ([Job(), Job(after=2), Job()], "job 1 runs after job 2"),
        ([Job(), Job(after=-1)], "job 1 runs after job -1"),
        ([Job(feeds=False), Job(after=0)], "job 1 runs after job 0"),
    ],
)
def test_a_job_after_none_that_returns_is_refused(jobs: list[Job], problem: str) -> None:
    with pytest.raises(ProgramError) as error:
        make_programs(2, jobs)
    assert error.value.call == f"make_programs(2, <{len(jobs)} jobs>, buffers=None)"
    assert (error.value.problem, error.value.instead) == (
        problem,
        "an earlier job, whose output returns",
    )


@pytest.mark.parametrize(("stages", "buffers"), [(0, None), (-1, 1), (2, 0), (2, -1)])
def test_no_stage_and_no_buffer_are_refused(stages: int, buffers: int | None) -> None:
    with pytest.raises(
        ProgramError, match=r"saw: (num_stages|buffers)=(0|-1)\n  instead: a whole number >= 1"
    ):
        make_programs(stages, [Job()], buffers=buffers)


@pytest.mark.parametrize("arguments", [(decode_jobs(2, 2), 3), (3, 4), (2, [0]), ("2", [Job()])])
def test_what_is_no_schedule_is_refused(arguments: Any) -> None:
    with pytest.raises(ProgramError, match=r"saw: (num_stages=|no list of jobs)"):
        make_programs(*arguments)


@pytest.mark.parametrize(("cohorts", "steps"), [(0, 3), (2, 0), (-1, -1)])
def test_a_decode_loop_of_no_job_is_refused(cohorts: int, steps: int) -> None:
    with pytest.raises(ProgramError, match=rf"decode_jobs\({cohorts}, {steps}\)"):
        decode_jobs(cohorts, steps)


@given(job_lists(), st.integers(1, 4), st.integers(1, 4))
def test_programs_are_of_the_ranks_that_the_pipeline_has(
    jobs: tuple[Job, ...], stages: int, ranks: int
) -> None:
    programs = make_programs(stages, jobs, advances=True)
    if ranks == stages:
        refuse_other_work("step", programs, (stages, ranks), jobs, advances=True)
        return
    problem = f"programs of {stages} ranks, in a pipeline of {ranks}"
    with refused(
        ProgramError, "step: the programs of its schedule", problem, "as many ranks for any jobs"
    ):
        refuse_other_work("step", programs, (stages, ranks), jobs, advances=True)
