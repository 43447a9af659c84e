"""A session is a stream in parts: outputs and states do not depend on which micro-batches are
submitted together."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from refusal import refused

from weft.batches.state import advance
from weft.errors import ProgramError
from weft.proofs import strategies
from weft.proofs.checks.difference import assert_equal, visible
from weft.proofs.strategies import Scenario
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.schedule import Job, count_running, jobs_for, make_programs
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.local import Local
from weft.transforms.pipelines.transports.threads import Threads
from weft.transforms.pipelines.weaving import interleaved

THREADS = Threads(timeout=20.0)


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    jobs: list[Job] = []
    for index in range(draw(st.integers(0, 9))):
        feeding = [i for i in range(index) if jobs[i].feeds]
        jobs.append(Job(draw(st.booleans()), draw(st.sampled_from([None, *feeding]))))
    return jobs


@given(st.integers(1, 5), job_lists(), st.sampled_from((None, 1, 2)), st.booleans())
def test_what_runs_before_the_end_is_a_beginning(
    stages: int, jobs: list[Job], buffers: int | None, more: bool
) -> None:
    """Up to the last job's effects, a program is a prefix of the program for more jobs."""
    counts, first = count_running(stages, jobs, advances=True, buffers=buffers)
    longer = [*jobs, Job(more)]
    for before, after, count in zip(
        make_programs(stages, jobs, advances=True, buffers=buffers),
        make_programs(stages, longer, advances=True, buffers=buffers),
        counts,
        strict=True,
    ):
        assert before.effects[:count] == after.effects[:count]
        assert all(e.microbatch >= first for e in before.effects[count:])
        assert all(
            e.microbatch == len(jobs) or not str(e).startswith("run stage")
            for e in after.effects[count:]
        )


@given(st.data(), strategies.scenarios(min_layers=2, max_layers=3, max_steps=6))
@pytest.mark.parametrize("make", [Local, lambda: THREADS], ids=["local", "threads"])
def test_a_session_is_a_stream(
    make: Callable[[], Transport], data: st.DataObject, scenario: Scenario
) -> None:
    stages = data.draw(st.integers(1, scenario.config.num_layers))
    batches = scenario.batches()
    params = scenario.params(stages)
    jobs = jobs_for(
        [frozenset(b.rows.tolist()) for b in batches], [bool(b.samples.any()) for b in batches]
    )
    step = pipeline(scenario.stages(stages), advance=advance, transport=make())
    expected_state, expected = step.stream(params, scenario.state(stages), batches, jobs)

    session = step.session(params, scenario.state(stages))
    returned = list[tuple[int, Any]]()
    start = 0
    while start < len(batches):
        stop = data.draw(st.integers(start, len(batches)))
        stop += stop == start
        returned += session.submit(batches[start:stop], jobs[start:stop])
        start = stop
    state, rest = session.close()
    returned += rest
    assert [number for number, _ in returned] == list(range(len(batches)))
    assert_equal("session: outputs", [out for _, out in returned], list(expected))
    assert_equal("session: state", visible(state), visible(expected_state))


def test_stages_overlap_across_submissions() -> None:
    """With two cohorts on two stages, no submission waits for its own tokens."""

    def stage(p: Any, s: torch.Tensor, batch: torch.Tensor, x: torch.Tensor | None) -> Any:
        return s, batch if x is None else x

    step = pipeline([stage, stage], advance=lambda s, batch, out: s + out.sum())
    session = step.session([None] * 2, [torch.zeros(()), torch.zeros(())])
    got = [
        [
            number
            for number, _ in session.submit(
                [torch.ones(1)], [Job(True, number - 2 if number >= 2 else None)]
            )
        ]
        for number in range(6)
    ]
    assert got == [[], [], [], [0], [1], [2]] or got == [[], [], [0], [1], [2], [3]]
    state, rest = session.close()
    assert [number for number, _ in rest] == [
        n for n in range(6) if n not in [m for some in got for m in some]
    ]
    assert [float(s) for s in state] == [6.0, 6.0]


def test_a_pipeline_to_whose_ranks_nothing_returns_has_no_session() -> None:
    step = pipeline([lambda p, s, batch, x: (s, batch)] * 2)
    with pytest.raises(ProgramError, match="no advance, so that nothing returns"):
        step.session([None] * 2, [None] * 2)


def counting(p: Any, s: torch.Tensor, batch: torch.Tensor, x: torch.Tensor | None) -> Any:
    return s + 1, batch if x is None else x


def kept(s: torch.Tensor, batch: Any, out: Any) -> torch.Tensor:
    return s


def zeros(count: int) -> list[torch.Tensor]:
    return [torch.zeros(()) for _ in range(count)]


@pytest.mark.parametrize(
    ("batches", "jobs", "problem"),
    [
        (2, [Job()], "2 batches and the jobs [Job(feeds=True, after=None)]"),
        (1, [0], "1 batches and the jobs [0]"),
        (1, [Job(after=5)], "job 1 runs after job 5"),
        (1, [Job(after=1)], "job 1 runs after job 1"),
        (1, [Job(after=-1)], "job 1 runs after job -1"),
        (2, [Job(False), Job(after=1)], "job 2 runs after job 1"),
    ],
)
def test_jobs_that_cannot_be_are_refused_and_nothing_ran(
    batches: int, jobs: list[Job], problem: str
) -> None:
    session = pipeline([counting] * 2, advance=kept).session([None] * 2, zeros(2))
    session.submit([torch.zeros(1)], [Job()])
    with pytest.raises(ProgramError) as error:
        session.submit([torch.ones(1)] * batches, jobs)
    assert (error.value.call, error.value.problem) == (
        f"session.submit(<{batches} batches>, <{len(jobs)} jobs>)",
        problem,
    )
    session.submit([torch.full((1,), 2.0)], [Job(after=0)])
    state, _ = session.close()
    assert [float(s) for s in state] == [2.0, 2.0]


@pytest.mark.parametrize("batches", [torch.ones(1), 3])
def test_a_batch_that_is_in_no_list_is_named(batches: Any) -> None:
    session = pipeline([counting] * 2, advance=kept).session([None] * 2, zeros(2))
    name = {"Tensor": "a Tensor", "int": "an int"}[type(batches).__name__]
    with pytest.raises(ProgramError) as error:
        session.submit(batches, [Job()])
    assert error.value.call == f"session.submit(<{name}>, <a list>)"
    assert error.value.problem == f"{name} and the jobs [Job(feeds=True, after=None)]"
    assert error.value.instead == "a Job for each batch: submit([batch], [Job()])"


def test_a_session_that_waits_holds_no_batch_that_is_over() -> None:
    session = pipeline([counting], advance=kept).session([None], zeros(1))
    batch = torch.ones(1)
    is_over = weakref.ref(batch)
    outputs = session.submit([batch], [Job()])
    if not outputs:
        outputs = session.submit([torch.zeros(1)], [Job(after=0)])
    assert [number for number, _ in outputs][:1] == [0]
    del batch, outputs
    gc.collect()
    assert is_over() is None
    session.close()


def test_after_a_failure_a_session_is_over() -> None:
    """The ranks before the failed one have run the batch, so running it again would give another
    result."""

    def fails(p: Any, s: torch.Tensor, batch: torch.Tensor, x: torch.Tensor) -> Any:
        raise ValueError("planted")

    session = pipeline([counting, fails], advance=kept).session([None] * 2, zeros(2))
    with pytest.raises(ValueError, match="planted"):
        session.submit([torch.ones(1)], [Job()])
    for call in (lambda: session.submit([torch.ones(1)], [Job()]), session.close):
        with pytest.raises(
            ProgramError, match=r"a session that is over: it failed .ValueError: planted"
        ):
            call()


def test_a_schedule_of_other_ranks_for_more_jobs_is_refused_and_nothing_ran() -> None:
    def schedule(num_stages: int, jobs: Any, **options: Any) -> Any:
        return interleaved(3 - len(jobs))(num_stages, jobs, **options)

    session = pipeline([counting] * 2, advance=kept, schedule=schedule).session(
        [None] * 2, zeros(2)
    )
    session.submit([torch.zeros(1)], [Job()])
    call = "pipeline(<2 stages>): the programs of its schedule"
    with refused(
        ProgramError, call, "programs of 1 ranks, in a pipeline of 2", "as many ranks for any jobs"
    ):
        session.submit([torch.ones(1)] * 2, [Job(after=0)] * 2)
    session.submit([torch.zeros(1)], [Job(after=0)])
    state, _ = session.close()
    assert [float(s) for s in state] == [2.0, 2.0]


def test_a_session_that_was_closed_is_over() -> None:
    session = pipeline([counting] * 2, advance=kept).session([None] * 2, zeros(2))
    session.close()
    for call in (lambda: session.submit([torch.ones(1)], [Job()]), session.close):
        with pytest.raises(
            ProgramError,
            match="a session that is over: it was closed, and its state is the caller's",
        ):
            call()


def test_a_batch_that_cannot_be_read_leaves_the_session_as_it_was() -> None:
    class Odd:
        @property
        def batch(self) -> Any:
            raise RuntimeError("no batch")

    stages = [lambda p, s, batch, x: (s, 10 * batch), lambda p, s, batch, x: (s, x + s)]
    session = pipeline(stages, advance=lambda s, batch, out: s + 1).session((None, None), (0, 0))
    with pytest.raises(RuntimeError, match="no batch"):
        session.submit([Odd()], [Job()])
    outputs = session.submit([1], [Job()])
    state, rest = session.close()
    assert (state, outputs + rest) == ((1, 1), [(0, 10)])
