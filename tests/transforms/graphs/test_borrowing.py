"""Borrowed results: the debug context finds each use after the replay that overwrote them, and no
other use."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphified import LAW, X, doubled, general_calls
from torch import Tensor

import weft
from weft.errors import CaptureError, StaleResultError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify

USES: dict[str, Callable[[Tensor], Any]] = {
    "operator": lambda x: x + 1,
    "right operand": lambda x: torch.ones(2) + x,
    "function": torch.sum,
    "in a list": lambda x: torch.cat([x, x]),
    "keyword": lambda x: torch.add(torch.ones(2), other=x),
    "printed": str,
    "host": lambda x: x.tolist(),
    "item": lambda x: x[0].item(),
    "view": lambda x: x[:1],
    "in place": lambda x: x.add_(1),
    "argument": lambda x: graphify(lambda y: y + 1)(x),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_after_the_next_replay_raises(use: str) -> None:
    f = graphify(lambda x: x * 2, outputs="borrow")
    with weft.check_borrowed():
        first = f(torch.ones(2))
        USES[use](first)
        first = f(torch.ones(2))
        f(torch.zeros(2))
        with pytest.raises(
            StaleResultError,
            match="a borrowed result of <lambda>, which 1 later replay has overwritten",
        ):
            USES[use](first)


def test_a_view_is_borrowed_too() -> None:
    f = graphify(lambda x: x * 2, outputs="borrow")
    with weft.check_borrowed():
        part = f(torch.ones(2, 2)).t()[0]
        assert part.shape == (2,)
        for _ in range(2):
            f(torch.zeros(2, 2))
        assert part.shape == (2,)
        with pytest.raises(StaleResultError, match="2 later replays have overwritten"):
            part.sum()


def test_another_graph_of_the_function_overwrites_too() -> None:
    f = graphify(lambda x: x * 2, outputs="borrow")
    with weft.check_borrowed():
        first = f(torch.ones(2))
        f(torch.ones(3))
        with pytest.raises(StaleResultError):
            first.sum()


def test_what_is_not_overwritten_may_be_used() -> None:
    f = graphify(lambda x: x * 2, outputs="borrow")
    g = graphify(lambda x: x * 2)
    with weft.check_borrowed():
        copy = f(torch.ones(2)).clone()
        safe = g(torch.ones(2))
        for _ in range(3):
            newest = f(torch.zeros(2))
            g(torch.zeros(2))
            assert newest.sum() == 0
            assert torch.equal(f(newest + 1), torch.full((2,), 2.0))
        assert torch.equal(copy, safe)


def test_the_context_captures_nothing_anew() -> None:
    f = graphify(lambda x: x * 2, outputs="borrow")
    f(torch.ones(2))
    with weft.check_borrowed(), weft.assert_max_captures(0):
        f(torch.ones(2))
    with weft.assert_max_captures(0):
        f(torch.ones(2))


def test_the_new_state_is_not_borrowed() -> None:
    step = graphify(lambda s, x: (s.add_(x), x * 2), donate_argnames="s", outputs="borrow")
    with weft.check_borrowed():
        state = torch.zeros(2)
        for turn in range(4):
            state, out = step(state, torch.ones(2))
            assert state[0].item() == turn + 1
            assert out[0].item() == 2


def test_outside_the_context_nothing_is_checked() -> None:
    f = graphify(lambda x: x * 2, outputs="borrow")
    first = f(torch.ones(2))
    f(torch.zeros(2))
    assert first.tolist() == [0.0, 0.0]


def test_a_borrowed_result_is_overwritten_by_the_next_replay() -> None:
    g = graphify(lambda x: x * 2, outputs="borrow")
    first = g(X)
    assert_equal(LAW, first, X * 2)
    second = g(X + 1)
    assert first.data_ptr() == second.data_ptr()
    assert_equal("overwritten", first, (X + 1) * 2)


def test_a_borrowed_tensor_object_is_the_callers_own() -> None:
    g = graphify(lambda x: x[None] * 2, outputs="borrow")
    g(X).t_()
    assert g(X).shape == (1, 4)
    step = graphify(lambda s: s + 1, donate_argnames=("s",))
    for _ in range(2):
        assert_equal(LAW, step(g(X)), X[None] * 2 + 1)


def test_a_borrowed_result_in_inference_mode() -> None:
    g = graphify(lambda x: x * 2, outputs="borrow")
    with torch.inference_mode():
        for turn in range(3):
            with general_calls(g) as general:
                result = g(X)
            assert_equal(LAW, result, X * 2)
            assert result.is_inference()
            assert len(general) == (turn == 0)
    assert not g(X).is_inference()


def test_an_input_buffer_is_never_lent() -> None:
    g = graphify(lambda a, b: (a, b, a + b), outputs="borrow")
    a, b, _ = g(X, X + 1)
    for _ in range(2):
        a, b, both = g(b, a)
    assert_equal(LAW, (a, b, both), (X, X + 1, X + X + 1))


def test_outputs_of_another_kind_are_refused() -> None:
    with pytest.raises(CaptureError) as error:
        graphify(doubled, outputs="safely")  # type: ignore[call-overload]
    assert (error.value.problem, error.value.instead) == (
        "outputs='safely'",
        "outputs='safe' or 'borrow'",
    )
