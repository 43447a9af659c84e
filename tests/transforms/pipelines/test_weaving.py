"""`weave` and `interleaved`: their programs, and the bubble that `simulate` predicts, compared with
the bound in the literature."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from weft.display.tables import Table
from weft.effects import Broadcast, Program, Run
from weft.errors import ProgramError
from weft.proofs._laws.schedule import fewest_rounds
from weft.transforms.pipelines.checker import check
from weft.transforms.pipelines.schedule import Job, decode_jobs, make_programs
from weft.transforms.pipelines.timing.costs import Costs
from weft.transforms.pipelines.timing.simulate import simulate
from weft.transforms.pipelines.weaving import interleaved, weave

STAGE = 1e-3
SIZES = [(p, v, m) for p in (2, 3, 4, 8) for v in (1, 2, 4) for m in (p, 2 * p, 4 * p)]


def bubble(num_ranks: int, per_rank: int, microbatches: int) -> float:
    """Idle time divided by working time, if every rank takes `STAGE` seconds for its part of the
    model."""
    programs = interleaved(num_ranks)(
        num_ranks * per_rank, [Job(feeds=False)] * microbatches, advances=False
    )
    timeline = simulate(programs, Costs((STAGE / per_rank,) * num_ranks * per_rank))
    return timeline.step_time / (microbatches * STAGE) - 1


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_the_bubble_is_that_of_the_literature(p: int, v: int, m: int) -> None:
    """Narayanan et al. (2021), section 2.2: (p - 1) / (v * m)."""
    assert bubble(p, v, m) == pytest.approx((p - 1) / (v * m), rel=1e-9)


def test_the_table_of_bubbles() -> None:
    rows = [
        {"ranks": p, "stages of each": v, "micro-batches": m, "bubble": f"{bubble(p, v, m):.1%}"}
        for p, m in ((4, 4), (4, 8))
        for v in (1, 2, 4)
    ]
    assert str(Table.of(rows)).splitlines() == [
        "ranks  stages of each  micro-batches  bubble",
        "    4               1              4   75.0%",
        "    4               2              4   37.5%",
        "    4               4              4   18.8%",
        "    4               1              8   37.5%",
        "    4               2              8   18.8%",
        "    4               4              8    9.4%",
    ]


def test_the_picture_shows_a_shorter_fill() -> None:
    programs = interleaved(2)(4, [Job(feeds=False)] * 2, advances=False)
    lines = simulate(programs, Costs((1e-3,) * 4)).as_text(40).splitlines()
    assert [line.split()[2] for line in lines[1:3]] == [
        "00000111110000011111",
        ".....00000111110000011111",
    ]


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("p", "v"), [(1, 1), (1, 3), (2, 2), (3, 2), (4, 1)])
@pytest.mark.parametrize("m", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("feeds", [False, True])
@pytest.mark.parametrize("buffers", [None, 1, 2])
def test_interleaved_programs_pass_at_every_size(
    p: int, v: int, m: int, feeds: bool, buffers: int | None
) -> None:
    for advances in (False, True):
        programs = interleaved(p)(p * v, [Job(feeds=feeds)] * m, advances=advances, buffers=buffers)
        check(programs, buffers=buffers)
        for program in programs:
            runs = [effect for effect in program.effects if isinstance(effect, Run)]
            assert sum(run.stage is not None for run in runs) == v * m
            assert sum(run.what == "advance" for run in runs) == m * advances


def test_with_one_stage_on_each_rank_the_runs_are_those_of_make_programs() -> None:
    jobs = decode_jobs(3, 3)
    for mine, ours in zip(interleaved(3)(3, jobs), make_programs(3, jobs), strict=True):
        assert [e for e in mine.effects if isinstance(e, Run) and e.stage is not None] == [
            e for e in ours.effects if isinstance(e, Run) and e.stage is not None
        ]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
def test_a_decode_loop_waits_for_its_own_tokens(p: int, v: int, cohorts: int, steps: int) -> None:
    jobs = decode_jobs(cohorts, steps)
    programs = interleaved(p)(p * v, jobs)
    check(programs)
    for program in programs:
        for place, effect in enumerate(program.effects):
            if isinstance(effect, Run) and effect.stage is not None:
                after = jobs[effect.microbatch].after
                assert after is None or Run("advance", after) in program.effects[:place]
                assert after is None or Broadcast(p - 1, after) in program.effects[:place]


def listed(program: Program) -> list[str]:
    return [str(effect) for effect in program.effects]


def test_a_message_that_is_not_yet_needed_is_received_early() -> None:
    """Rank 0 runs stage 0 on all micro-batches first; rank 1 waits for the result of stage 2."""
    first = [Run("stage 0", 0), Run("stage 0", 1), Run("stage 2", 0), Run("stage 2", 1)]
    last = [Run("stage 1", 0), Run("stage 3", 0), Run("stage 1", 1), Run("stage 3", 1)]
    programs = weave([first, last], [Job(feeds=False)] * 2, advances=False)
    check(programs)
    assert listed(programs[1])[:6] == [
        "recv stage 0 from 0 [mb 0]",
        "run stage 1 [mb 0]",
        "send stage 1 to 0 [mb 0]",
        "recv stage 0 from 0 [mb 1]",
        "recv stage 2 from 0 [mb 0]",
        "run stage 3 [mb 0]",
    ]


def breadth_first(num_ranks: int, per_rank: int, microbatches: int) -> list[list[Run]]:
    """Each rank runs a stage on all micro-batches before its next stage (Lamy-Poirier, 2022,
    "Breadth-first pipeline parallelism")."""
    stages = [range(rank, num_ranks * per_rank, num_ranks) for rank in range(num_ranks)]
    return [
        [Run(f"stage {stage}", mb) for stage in rank_stages for mb in range(microbatches)]
        for rank_stages in stages
    ]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 8), (2, 3, 4), (3, 2, 5), (4, 4, 8), (1, 3, 4)])
@pytest.mark.parametrize("buffers", [None, 1])
def test_a_breadth_first_order_idles_for_the_fill_alone(
    p: int, v: int, m: int, buffers: int | None
) -> None:
    if p == 1 and buffers:
        pytest.skip("one rank overwrites a result before its next stage reads it")
    jobs = [Job(feeds=False)] * m
    programs = weave(breadth_first(p, v, m), jobs, advances=False, buffers=buffers)
    check(programs, buffers=buffers)
    rounds = simulate(programs, Costs((1.0,) * p * v)).step_time
    assert rounds == fewest_rounds(programs, jobs) == v * m + p - 1


REFUSED: dict[str, tuple[Any, str]] = {
    "a later stage first, on one rank": (
        lambda: weave([[Run("stage 1", 0), Run("stage 0", 0)]], [Job()]),
        (
            "weave(<the runs of 1 ranks>, <1 jobs>)\n  saw: rank 0 waits for ever at 'run stage 1"
            " [mb 0]'"
        ),
    ),
    "each rank waits for the other": (
        lambda: weave(
            [[Run("stage 2", 0), Run("stage 0", 0)], [Run("stage 1", 0), Run("stage 3", 0)]],
            [Job()],
        ),
        "saw: rank 0 waits for ever at 'run stage 2 [mb 0]'",
    ),
    "a job before the job that it waits for": (
        lambda: weave([[Run("stage 0", 1), Run("stage 0", 0)]], [Job(), Job(after=0)]),
        "saw: rank 0 waits for ever at 'run stage 0 [mb 1]'",
    ),
    "another rank's stage": (
        lambda: weave([[Run("stage 1", 0)], [Run("stage 0", 0)]], [Job()]),
        (
            "saw: 'run stage 1 [mb 0]' on rank 0\n  instead: Run('stage s', mb), with s % 2 the"
            " rank and mb less than 1"
        ),
    ),
    "an advance among the runs": (
        lambda: weave([[Run("advance", 0)]], [Job()]),
        "saw: 'run advance [mb 0]' on rank 0",
    ),
    "a job that is not there": (
        lambda: weave([[Run("stage 0", 1)]], [Job()]),
        "saw: 'run stage 0 [mb 1]' on rank 0",
    ),
    "stages that do not divide": (
        lambda: interleaved(2)(3, [Job()]),
        (
            "interleaved(2)(3, <1 jobs>)\n  saw: 3 stages on 2 ranks\n  instead: as many stages on"
            " each rank"
        ),
    ),
    "no rank": (lambda: interleaved(0), "interleaved(0)\n  saw: num_ranks=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_runs_that_cannot_be_are_refused(case: str) -> None:
    call, said = REFUSED[case]
    with pytest.raises(ProgramError) as error:
        call()
    assert said in str(error.value)
