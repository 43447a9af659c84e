"""The parts of a compiled program: what they write, and what they read of each other, is as in the
function, wherever it is split, and whatever runs apart."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from graphified import LAW
from hypothesis import HealthCheck, Phase, find, given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.proofs import LawViolation, assert_equal
from weft.transforms.graphs.compiler import parts, program
from weft.transforms.graphs.graphify import graphify

Pool = list[Tensor]


def _rows(x: Tensor) -> Tensor:
    return x[1:] if len(x) > 1 else x[:]


# Each adds a value to the values so far, or writes to one of them.
STATEMENTS: dict[str, Callable[[Pool, Tensor, Tensor], Any]] = {
    "new": lambda pool, x, y: pool.append(x * 2 + 1),
    "scaled by a sum": lambda pool, x, y: pool.append(x * y.sum()),
    "sorted": lambda pool, x, y: pool.append(x.sort(0).values),
    "rows": lambda pool, x, y: pool.append(_rows(x)),
    "transposed": lambda pool, x, y: pool.append(x.t()),
    "one column": lambda pool, x, y: pool.append(x[:, :1]),
    "add": lambda pool, x, y: x.add_(y.mean()),
    "multiply": lambda pool, x, y: x.mul_(1.5),
    "fill": lambda pool, x, y: x.copy_(y.max()),
    "add of a view": lambda pool, x, y: x.add_(_rows(y.t()).sum()),
}


@attrs.frozen
class Statements:
    """A function of a state and an argument, by the names of statements and the values that they
    take; and the operators at which its graph is split, out of all that it calls."""

    lines: tuple[tuple[str, int, int], ...]
    split_at: frozenset[str] = frozenset()

    def __call__(self, state: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        pool = [state, x * 1]
        for name, i, j in self.lines:
            STATEMENTS[name](pool, pool[i % len(pool)], pool[j % len(pool)])
        return tuple(pool)


class _Names(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@st.composite
def statements(draw: st.DrawFn) -> Statements:
    index = st.integers(0, 11)
    lines = draw(
        st.lists(st.tuples(st.sampled_from([*STATEMENTS]), index, index), min_size=1, max_size=9)
    )
    function = Statements(tuple(lines))
    state, x = (torch.ones(3, 3) for _ in range(2))
    with _Names() as operators:
        function(state, x)
    # `x[:]` is `alias` without a trace, and a slice in one.
    names = sorted(operators.names - {"aten::alias"})
    some = draw(st.sets(st.sampled_from(names), max_size=3))
    return attrs.evolve(function, split_at=frozenset(some))


def check(function: Statements, compiler: str) -> None:
    g = graphify(
        lambda state, x: function(state, x),
        compiler=compiler,
        strict=True,
        donate_argnames="state",
        split_at=function.split_at,
    )
    state = torch.arange(9.0).reshape(3, 3)
    expected = state.clone()
    for call in range(2):
        x = torch.arange(9.0).reshape(3, 3).cos() + call
        results = g(state, x)
        expected_results = function(expected, x)
        assert_equal(LAW, results, expected_results)
        state, expected = results[0], expected_results[0]


@given(statements(), st.sampled_from(["eager", "aot_eager"]))
def test_parts_are_the_whole(function: Statements, compiler: str) -> None:
    with mock.patch.object(parts, "_LEAST_REPEATED", 1):
        check(function, compiler)


def _memory_of_each_value(self: Any, numbers: Any) -> set[int]:
    return {*numbers}


def _passed_on(self: Any, number: int, takes: list[int], there: set[int]) -> None:
    if number not in there:
        there.add(number)
        takes.append(number)


PLANTED: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "what other operators depend on runs after them": (
        "eager",
        lambda: mock.patch.object(parts._Candidates, "_memory", _memory_of_each_value),
    ),
    "a group whose values have other shapes is the same one": (
        "aot_eager",
        lambda: mock.patch.object(parts._Form, "_kind", return_value=()),
    ),
    "views pass between parts as if in memory of their own": (
        "aot_eager",
        lambda: mock.patch.multiple(
            program._Flow, _is_derived=lambda *args: False, _take=_passed_on
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_shows(name: str) -> None:
    compiler, planted = PLANTED[name]

    def fails(function: Statements) -> bool:
        with mock.patch.object(parts, "_LEAST_REPEATED", 1):
            try:
                check(function, compiler)
            except LawViolation:
                return True
        return False

    quick = settings(
        max_examples=600,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    with planted():
        find(statements(), fails, settings=quick)
