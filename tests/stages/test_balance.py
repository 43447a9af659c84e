"""balance: the best of all splits, and among equal ones the closest to an even split."""

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, strategies as st

from weft.errors import CostError, ProgramError
from weft.stages.layout import StageLayout, balance, split_layers


def stage_costs(
    layouts: Sequence[StageLayout], costs: Sequence[float], first: float, last: float
) -> list[Fraction]:
    """The exact cost of each stage, without rounding."""
    return [
        sum(
            (Fraction(costs[layer]) for layer in one.layers),
            Fraction(first) * one.first + Fraction(last) * one.last,
        )
        for one in layouts
    ]


def all_splits(num_layers: int, num_stages: int) -> list[tuple[StageLayout, ...]]:
    splits = []
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *cuts, num_layers)
        pairs = enumerate(itertools.pairwise(ends))
        splits.append(tuple(StageLayout(index, num_stages, a, b) for index, (a, b) in pairs))
    return splits


problems = st.integers(1, 9).flatmap(
    lambda layers: st.tuples(
        st.lists(st.integers(0, 4) | st.floats(0, 1e3), min_size=layers, max_size=layers),
        st.integers(1, layers),
        st.sampled_from([0, 1, 2.5, 7]),
        st.sampled_from([0, 1, 2.5, 7]),
    )
)


@given(problems)
def test_no_split_has_a_faster_slowest_stage_and_ties_go_as_written(problem: Any) -> None:
    costs, stages, first, last = problem
    even = split_layers(len(costs), stages)

    def rank(split: tuple[StageLayout, ...]) -> tuple[Any, ...]:
        split_costs = stage_costs(split, costs, first, last)
        far = sum(abs(len(a.layers) - len(b.layers)) for a, b in zip(split, even, strict=True))
        return (
            max(split_costs),
            far,
            sum(cost**2 for cost in split_costs),
            [one.stop for one in split],
        )

    assert balance(costs, stages, first=first, last=last) == min(
        all_splits(len(costs), stages), key=rank
    )


@given(problems)
def test_it_is_the_even_split_wherever_that_is_as_good_as_any(problem: Any) -> None:
    costs, stages, first, last = problem
    balanced = balance(costs, stages, first=first, last=last)
    even = split_layers(len(costs), stages)
    slowest, of_even = (max(stage_costs(split, costs, first, last)) for split in (balanced, even))
    assert slowest <= of_even
    assert (balanced == even) == (slowest == of_even)


@pytest.mark.parametrize(("layers", "stages"), [(1, 1), (30, 4), (28, 8), (61, 16), (94, 7)])
@pytest.mark.parametrize("cost", [0.0, 0.1, 3e-4])
def test_equal_layers_alone_are_split_evenly_whatever_rounding_says(
    layers: int, stages: int, cost: float
) -> None:
    assert balance([cost] * layers, stages) == split_layers(layers, stages)


def test_what_the_ends_cost_moves_layers_away_from_them() -> None:
    assert [len(one.layers) for one in balance([1.0] * 12, 3, last=4.0)] == [5, 5, 2]
    assert [len(one.layers) for one in balance([1.0] * 12, 3, first=4.0)] == [2, 5, 5]
    assert [len(one.layers) for one in balance([1.0] * 3, 3, last=100.0)] == [1, 1, 1]
    assert balance([1.0, 2.0], 1, first=5.0, last=7.0) == split_layers(2, 1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([1.0, -1.0], 1, 0.0, 0.0), "layer_costs[1]=-1.0"),
        (([1.0, float("inf")], 1, 0.0, 0.0), "layer_costs[1]=inf"),
        (([1.0, 1.0], 2, float("nan"), 0.0), "first=nan"),
        (([1.0, 1.0], 2, 0.0, -2.0), "last=-2.0"),
    ],
)
def test_a_cost_that_cannot_be_is_refused(arguments: Any, problem: str) -> None:
    costs, stages, first, last = arguments
    with pytest.raises(CostError) as error:
        balance(costs, stages, first=first, last=last)
    assert (error.value.problem, error.value.instead) == (problem, "a finite number >= 0")


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (3, 0), (0, 1)])
def test_stages_without_layers_are_refused(layers: int, stages: int) -> None:
    with pytest.raises(ProgramError, match=f"{layers} layers for {stages} stages"):
        balance([1.0] * layers, stages)


def test_a_number_of_layers_is_no_costs() -> None:
    with pytest.raises(CostError) as error:
        balance(28, 4)  # type: ignore[arg-type]
    assert (error.value.call, error.value.problem) == ("balance(28, 4)", "layer_costs is an int")
