"""plan_cohorts: closed forms of the steady state, the best plan, and its refusals."""

import math
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from weft.errors import CostError, ProgramError
from weft.transforms.pipelines.timing.cohorts import plan_cohorts
from weft.transforms.pipelines.timing.costs import Costs


@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([0.0, 1.0, 8.1]),
    st.sampled_from([0.01, 1.0]),
    st.data(),
)
def test_equal_stages_are_as_the_closed_form_says(
    stages: int, requests: int, fixed: float, each: float, data: st.DataObject
) -> None:
    number = data.draw(st.integers(1, min(2 * stages, requests)))
    (row,) = plan_cohorts(
        lambda size: [fixed + each * size] * stages, requests, stages, cohorts=[number]
    ).rows
    size = math.ceil(requests / number)
    step = max(number, stages) * (fixed + each * size)
    assert (row.cohorts, row.size) == (number, size)
    assert row.step_time == pytest.approx(step)
    assert row.tokens_per_second == pytest.approx(requests / step)
    assert row.bubbles == pytest.approx([max(0.0, 1 - number / stages)] * stages)
    assert min(row.bubbles) >= 0


def test_the_slowest_stage_sets_the_step_and_the_others_wait() -> None:
    (row,) = plan_cohorts(lambda size: [1.0, 4.0, 2.0], 3, 3, cohorts=[3]).rows
    assert (row.step_time, row.bubbles, row.bubble) == (12, (0.75, 0, 0.5), pytest.approx(1.25 / 3))


def test_transfers_are_hidden_by_a_cohort_more() -> None:
    costs = Costs([1.0, 1.0], latency=0.25)
    two, three = plan_cohorts(lambda size: costs, 6, 2, cohorts=[3, 2]).rows
    assert (two.cohorts, two.step_time, two.bubble) == (2, 2.5, pytest.approx(0.2))
    assert (three.cohorts, three.step_time, three.bubble) == (3, 3, 0)


def test_the_numbers_tried_are_one_to_twice_the_stages_and_no_more_than_requests() -> None:
    assert [row.cohorts for row in plan_cohorts(lambda size: [1.0] * 3, 128, 3).rows] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert [row.cohorts for row in plan_cohorts(lambda size: [1.0] * 3, 2, 3).rows] == [1, 2]


def test_the_best_makes_the_most_tokens_and_is_the_smallest_of_equals() -> None:
    plan = plan_cohorts(lambda size: [1e-3 * size] * 2, 8, 2)
    assert [row.tokens_per_second for row in plan.rows] == pytest.approx(
        [500, 1000, 8 / 9 * 1000, 1000]
    )
    assert plan.best is plan.rows[1]
    assert [line.endswith("best") for line in str(plan).splitlines()] == [
        False,
        False,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("requests", "stages", "options", "problem"),
    [
        (0, 2, {}, "num_requests=0"),
        (4, 0, {}, "num_stages=0"),
        (4, 2, {"capacity": 0}, "capacity=0"),
        (4, 2, {"cohorts": []}, "cohorts=[]"),
        (4, 2, {"cohorts": [0, 1]}, "cohorts=[0, 1]"),
        (4, 2, {"cohorts": [2, 5]}, "cohorts=[2, 5]"),
    ],
)
def test_numbers_that_make_no_loop_are_refused(
    requests: int, stages: int, options: Any, problem: str
) -> None:
    with pytest.raises(ProgramError) as error:
        plan_cohorts(lambda size: [1.0] * stages, requests, stages, **options)
    assert error.value.problem == problem


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(CostError) as error:
        plan_cohorts(lambda size: [1.0] * 3, 4, 2)
    assert (error.value.problem, error.value.instead) == (
        "stages=[1.0, 1.0, 1.0]",
        "a cost for each of 2 stages",
    )


@pytest.mark.parametrize("name", ["stages", "message_bytes", "output_bytes"])
def test_costs_that_depend_on_the_micro_batch_are_refused(name: str) -> None:
    costs = attrs.evolve(Costs([1.0, 1.0]), **{name: lambda *which: 1.0})
    with pytest.raises(
        CostError, match=rf"saw: {name}=<function.*\n  instead: a cost that is the same"
    ):
        plan_cohorts(lambda size: costs, 4, 2)


@pytest.mark.parametrize(
    ("seconds", "options", "instead"),
    [
        ([1.0, 1.0], {}, "a function from a cohort's size to the seconds of each stage"),
        (lambda size: [1.0, 1.0], {"cohorts": 2}, "a list of numbers, .* or None"),
    ],
)
def test_costs_that_are_no_function_and_numbers_that_are_no_list_are_refused(
    seconds: Any, options: Any, instead: str
) -> None:
    with pytest.raises(ProgramError, match=f"instead: {instead}"):
        plan_cohorts(seconds, 4, 2, **options)
