"""A session is a stream in parts: the same outputs and states, whatever is submitted together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import ProgramError
from weft.proofs import strategies
from weft.proofs.laws.compare import assert_equal, visible
from weft.proofs.strategies.models import Scenario
from weft.state import advance
from weft.transforms.pipeline import pipeline
from weft.transforms.schedule import Job, count_running, jobs_for, make_programs
from weft.transforms.transports import Transport
from weft.transforms.transports.local import Local
from weft.transforms.transports.threads import Threads

THREADS = Threads(timeout=20.0)


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    jobs: list[Job] = []
    for index in range(draw(st.integers(0, 9))):
        feeding = [i for i in range(index) if jobs[i].feeds]
        jobs.append(Job(draw(st.booleans()), draw(st.sampled_from([None, *feeding]))))
    return jobs


@given(st.integers(1, 5), job_lists(), st.sampled_from((None, 1, 2)), st.booleans())
def test_what_runs_before_the_end_is_a_beginning(stages: int, jobs: list[Job], buffers: int | None, more: bool) -> None:
    """Up to the last job's own effects, a program is the beginning of that of more jobs."""
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
        assert all(e.microbatch == len(jobs) or not str(e).startswith("run stage") for e in after.effects[count:])


@given(st.data(), strategies.scenarios(min_layers=2, max_layers=3, max_steps=6))
@pytest.mark.parametrize("make", [Local, lambda: THREADS], ids=["local", "threads"])
def test_a_session_is_a_stream(make: Callable[[], Transport], data: st.DataObject, scenario: Scenario) -> None:
    stages = data.draw(st.integers(1, scenario.config.num_layers))
    batches, params = scenario.batches(), scenario.params(stages)
    jobs = jobs_for([frozenset(b.rows.tolist()) for b in batches], [bool(b.samples.any()) for b in batches])
    step = pipeline(scenario.stages(stages), advance=advance, transport=make())
    expected_state, expected = step.stream(params, scenario.state(stages), batches, jobs)

    session, returned, start = step.session(params, scenario.state(stages)), list[tuple[int, Any]](), 0
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
        [number for number, _ in session.submit([torch.ones(1)], [Job(True, number - 2 if number >= 2 else None)])]
        for number in range(6)
    ]
    assert got == [[], [], [], [0], [1], [2]] or got == [[], [], [0], [1], [2], [3]]
    assert session.num_jobs == 6
    state, rest = session.close()
    assert [number for number, _ in rest] == [n for n in range(6) if n not in [m for some in got for m in some]]
    assert [float(s) for s in state] == [6.0, 6.0]


def test_a_pipeline_to_whose_ranks_nothing_returns_has_no_session() -> None:
    step = pipeline([lambda p, s, batch, x: (s, batch)] * 2)
    with pytest.raises(ProgramError, match="no advance, so that nothing returns"):
        step.session([None] * 2, [None] * 2)


def open_session() -> Any:
    step = pipeline([lambda p, s, batch, x: (s, batch if x is None else x)] * 2, advance=lambda s, batch, out: s + 1)
    return step.session([None] * 2, [0, 0])


@pytest.mark.parametrize(
    ("batches", "jobs", "seen"),
    [
        (torch.ones(3), [Job()], "no list of batches, or none of jobs"),
        ([torch.ones(3)], Job(), "no list of batches, or none of jobs"),
        ([torch.ones(3)] * 2, [Job()], "2 batches and the jobs [Job(feeds=True, after=None)]"),
        ([torch.ones(3)], [0], "1 batches and the jobs [0]"),
        ([torch.ones(3)], [Job(after=7)], "job 2 runs after job 7"),
        ([torch.ones(3)], [Job(after=2)], "job 2 runs after job 2"),
        ([torch.ones(3)], [Job(after=-1)], "job 2 runs after job -1"),
        ([torch.ones(3)], [Job(after=1)], "job 2 runs after job 1"),
    ],
)
def test_what_cannot_be_submitted_leaves_the_session_as_it_was(batches: Any, jobs: Any, seen: str) -> None:
    session = open_session()
    before = session.submit([torch.ones(1), torch.ones(2)], [Job(), Job(feeds=False)])
    with pytest.raises(ProgramError) as error:
        session.submit(batches, jobs)
    assert error.value.seen == seen
    after = session.submit([torch.ones(3)], [Job(after=0)])
    state, rest = session.close()
    assert state == (3, 3)
    outs = dict([*before, *after, *rest])
    assert outs[1] is None
    assert [int(outs[number].sum()) for number in (0, 2)] == [1, 3]


@pytest.mark.parametrize("call", [lambda s: s.submit([torch.ones(1)], [Job()]), lambda s: s.close()])
def test_a_closed_session_takes_nothing(call: Any) -> None:
    session = open_session()
    session.submit([torch.ones(1)], [Job()])
    session.close()
    with pytest.raises(ProgramError, match="a session that was closed"):
        call(session)
