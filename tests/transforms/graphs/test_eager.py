"""Calls that run the function itself: the same as without graphify, inside other calls, and after
an error."""

import queue
import threading

import attrs
import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import DonatedError, StaleResultError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import donatable
from weft.values.trees import OF_THIS_VALUE, pytree

X = torch.arange(3.0)


@donatable
@pytree
@attrs.frozen(eq=False)
class Pair:
    first: Tensor
    second: Tensor
    _taken_by: str = attrs.field(default="", init=False, repr=False, metadata=OF_THIS_VALUE)


@pytest.mark.parametrize("replay", [True, False])
def test_an_eager_call_keeps_what_autograd_recorded(replay: bool) -> None:
    linear = nn.Linear(3, 3)
    g = graphify(lambda s, x: (s + 1, linear(x)), donate_argnames="s")
    with weft.no_capture(replay=replay):
        state, out = g(torch.zeros(3), X)
    assert_equal("the state", state, torch.ones(3))
    out.sum().backward()
    assert_equal("the gradient", linear.bias.grad, torch.ones(3))


def test_an_eager_call_keeps_the_state_in_place() -> None:
    g = graphify(lambda s, x: (s + x, x * 2), donate_argnames="s")
    state = torch.zeros(3)
    place = state.data_ptr()
    with weft.no_capture():
        for _ in range(3):
            state, out = g(state, X)
    assert state.data_ptr() == place
    assert_equal("state and output", (state, out), (3 * X, 2 * X))


def test_a_donated_state_object_is_counted_after_it_is_emptied() -> None:
    @weft.donates("pair")
    def step(pair: Pair, x: Tensor) -> tuple[Pair, Tensor]:
        return Pair(pair.first + 1, pair.second), x * 2

    g = graphify(step)
    pair = Pair(torch.zeros(2), torch.ones(2))
    places = pair.first.data_ptr(), pair.second.data_ptr()
    with weft.no_capture():
        for _ in range(2):
            pair, out = g(pair, X)
    assert_equal(
        "state and output",
        (pair.first, pair.second, out),
        (torch.full((2,), 2.0), torch.ones(2), X * 2),
    )
    assert (pair.first.data_ptr(), pair.second.data_ptr()) == places


def test_eager_calls_wait_for_no_other() -> None:
    handed: queue.Queue[float] = queue.Queue()
    results: dict[str, Tensor] = {}

    def meets(s: Tensor, x: Tensor, who: str) -> tuple[Tensor, Tensor]:
        if who == "waits":
            return s, x + handed.get(timeout=20)
        handed.put(1.0)
        return s, x

    g = graphify(meets, static_argnames="who", donate_argnames="s")

    def call(who: str) -> None:
        with weft.no_capture():
            results[who] = g(torch.zeros(1), X, who)[1]

    threads = [threading.Thread(target=call, args=(who,)) for who in ("waits", "hands over")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert_equal("both have run", (results["waits"], results["hands over"]), (X + 1, X))


def test_an_error_in_a_replay_says_what_was_donated() -> None:
    g = graphify(lambda s, i: (s.add_(1), torch.arange(3.0)[i]), donate_argnames="s")
    state, _ = g(torch.zeros(2), torch.tensor([0]))
    with pytest.raises(IndexError, match="index 7 is out of bounds") as caught:
        g(state, torch.tensor([7]))
    assert caught.value.__notes__ == [
        "<lambda> took s before its replay failed: their storage holds what the replay had written"
        " by then. Continue from a copy (weft.clone)."
    ]
    with pytest.raises(DonatedError, match=r"that was donated to <lambda>\(s\)"):
        g(state, torch.tensor([0]))
    assert_equal(
        "another state", g(torch.zeros(2), torch.tensor([1])), (torch.ones(2), torch.ones(1))
    )


def test_borrowed_results_outlive_the_graphs() -> None:
    g = graphify(lambda x: x * 2, outputs="borrow")
    with weft.check_borrowed():
        old = g(X)
        last = g(X + 1)
        g.cache_clear()
        assert_equal("no later replay overwrote it", last + 0, X * 2 + 2)
        with pytest.raises(StaleResultError, match="which 1 later replay has overwritten"):
            old + 0
        g(X + 2)
        assert_equal("nor one of another graph", last + 0, X * 2 + 2)


def test_a_frozen_function_runs_where_nothing_may_be_captured() -> None:
    g = graphify(lambda x: x * 2)
    g(X)
    g.freeze()
    with weft.no_capture():
        assert_equal("eagerly", g(torch.ones(5)), torch.full((5,), 2.0))
    assert g.cache_info().eager == 1
