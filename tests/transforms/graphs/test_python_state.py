"""What a function keeps in Python, in modules and objects that it names: a graph would freeze it,
so it is refused."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphified import LAW, agree, counts, refusal
from torch import Tensor, nn

from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify

X = torch.arange(3.0)
INSTEAD = (
    "instead: a tensor in its place, which the function takes as an argument and returns (for what"
    " a module holds"
)


class Count:
    """A number in a plain object."""

    def __init__(self) -> None:
        self.n = 0

    def next(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * self.n

    def __call__(self, x: Tensor) -> Tensor:
        return self.next(x)


class Counts(nn.Module):
    """Counts in an object of a list of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.namespace = types.SimpleNamespace(counts=[Count()])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.namespace.counts[0].next(x)
        return result


COUNT = Count()


def by_global(x: Tensor) -> Tensor:
    return COUNT.next(x)


def by_closure() -> tuple[Callable[[Tensor], Tensor], Any]:
    module = Counts()
    return lambda x: module(x) + 1, module.namespace.counts[0]


def in_a_part() -> tuple[Callable[[Tensor], Tensor], Any]:
    module = nn.Sequential(nn.Identity(), nn.Sequential(Counts()))
    return lambda x: module(x) + 1, module[1][0].namespace.counts[0]


def by_object() -> tuple[Callable[[Tensor], Tensor], Any]:
    count = Count()
    return lambda x: count.next(x) + 1, count


def with_its_module() -> tuple[Callable[[Tensor], Tensor], Any]:
    module = Counts()
    return module, module.namespace.counts[0]


def with_its_object(make: Callable[[Count], Any]) -> Callable[[], tuple[Any, Any]]:
    def make_both() -> tuple[Any, Any]:
        count = Count()
        return make(count), count

    return make_both


FROZEN: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "a module": (with_its_module, "Counts.namespace.counts[0].n"),
    "a module that is closed over": (by_closure, "module.namespace.counts[0].n"),
    "a part of a module": (in_a_part, "module.1.0.namespace.counts[0].n"),
    "an object that is closed over": (by_object, "count.n"),
    "a global object": (lambda: (by_global, COUNT), "COUNT.n"),
    "the object of a method": (with_its_object(lambda count: count.next), "Count.n"),
    "an object that is called": (with_its_object(lambda count: count), "Count.n"),
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_number_that_a_run_changes_is_refused_by_its_path(name: str) -> None:
    make, path = FROZEN[name]
    fn, count = make()
    said = refusal(fn, X)
    assert f"saw: {path} changes from " in said
    assert " while it runs, and a replay does not repeat that" in said
    assert INSTEAD in said
    assert count.n == 0  # as if there had been no capture


steps = 0


def by_global_name(x: Tensor) -> Tensor:
    global steps
    steps += 1
    return x * steps


def by_nonlocal_name() -> Callable[[Tensor], Tensor]:
    is_odd = False

    def flip(x: Tensor) -> Tensor:
        nonlocal is_odd
        is_odd = not is_odd
        return x if is_odd else -x

    return flip


def by_inner_name() -> Callable[[Tensor], Tensor]:
    rate = 1.0

    def decayed(x: Tensor) -> Tensor:
        def decay() -> float:
            nonlocal rate
            rate *= 0.5
            return rate

        return x * decay()

    return decayed


@pytest.mark.parametrize(
    ("make", "subject", "factor"),
    [
        (lambda: by_global_name, "steps, a global of by_global_name, changes from 1 to 2", 1.0),
        (by_nonlocal_name, "is_odd, a nonlocal of flip, changes from True to False", 1.0),
        (by_inner_name, "rate, a nonlocal of decayed, changes from 0.5 to 0.25", 0.5),
    ],
)
def test_a_name_that_a_run_binds_and_uses_is_refused(
    make: Callable[[], Callable[[Tensor], Tensor]],
    subject: str,
    factor: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "steps", 0)
    fn = make()
    said = refusal(fn, X)
    assert f"saw: {subject} while it runs, and a replay does not repeat that" in said
    assert INSTEAD in said
    assert torch.equal(fn(X), X * factor)  # as if there had been no capture


def test_a_name_that_a_run_sets_before_it_uses_it_is_its_own_affair() -> None:
    last = 0

    def noted(x: Tensor) -> Tensor:
        nonlocal last
        last = len(x)
        return x * last

    assert counts(agree(noted, (X,), (X + 1,))) == (1, 2, 0)


def test_what_the_first_run_sets_and_later_ones_leave_is_kept() -> None:
    class Scale:
        factor: float | None = None

    scale = Scale()

    def scaled(x: Tensor) -> Tensor:
        if scale.factor is None:
            scale.factor = 3.0
        return x * scale.factor

    assert counts(agree(scaled, (X,), (X + 1,))) == (1, 2, 0)


def test_a_log_beside_the_function_is_its_own_affair() -> None:
    log: list[int] = []

    def logged(x: Tensor) -> Tensor:
        log.append(len(x))
        return x * 2

    g = graphify(logged)
    for _ in range(2):
        assert_equal(LAW, g(X), X * 2)
