"""Results of graphify never change, and a donated state keeps its address."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphified import LAW, X, agree, counts
from torch import Tensor

import weft
from weft.errors import DonatedError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone, donated_argnames, donates
from weft.values.trees import tree_map

State = dict[str, Tensor]


# What it hands out
# ---------------------------------------------------------------------------------------------------

CONSTANT = torch.full((4,), 7.0)
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "the input": lambda x: x,
    "a view of the input": lambda x: x[1:],
    "the input twice": lambda x: (x, {"again": x}),
    "a result twice": lambda x: [x + 1] * 2,
    "a result and its view": lambda x: (lambda y: (y, y[::2]))(x + 1),
    "a constant": lambda x: (CONSTANT, x + CONSTANT, CONSTANT[1:]),
    "an expanded result": lambda x: (x * 2).sum(0, keepdim=True).expand(3),
    "python values": lambda x: {"a": x * 1, "b": [1, None, "s", 2.5]},
    "a named tuple": lambda x: (x + 1).max(0),
    "nothing": lambda x: None,
    "an empty tuple": lambda x: (),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_every_origin(name: str) -> None:
    agree(OUTPUTS[name], (X,), (X + 1,), (X * 3,))


def test_writing_to_a_result_changes_no_later_result() -> None:
    g = graphify(lambda x: (x, x + 1, CONSTANT))
    for result in g(X):
        result.fill_(-1)
    assert_equal(LAW, g(X), (X, X + 1, CONSTANT))
    assert CONSTANT.tolist() == [7.0] * 4


def test_the_type_of_a_result_is_kept() -> None:
    assert type(graphify(lambda x: x.max(0))(X)) is torch.return_types.max


def test_a_params_tensor_comes_back_as_itself() -> None:
    params = {"w": torch.ones(4)}
    g = graphify(lambda params, x: (params, x))
    assert g(params, X)[0]["w"] is params["w"]
    assert g(params, X + 1)[0]["w"] is params["w"]


@pytest.mark.parametrize(
    "fn", [torch.conj, lambda params: params.conj() * 1, lambda params: params.conj()[:1]]
)
def test_a_conjugate_view_of_params_is_not_params(fn: Callable[[Tensor], Tensor]) -> None:
    g = graphify(lambda params: fn(params))
    params = torch.tensor([1 + 2j])
    for p in (params, params.conj()):
        assert_equal(LAW, g(p).resolve_conj(), fn(p).resolve_conj())


def test_a_conjugated_state_is_the_next_state() -> None:
    g = graphify(lambda s: s.conj(), donate_argnames=("s",))
    assert g(torch.tensor([1 + 2j])).tolist() == [1 - 2j]


# Donation
# ------------------------------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[State, Tensor], Any]] = {
    "in place": lambda s, x: ({"a": s["a"].add_(x), "b": s["b"].mul_(2)}, x),
    "functional": lambda s, x: ({"a": s["a"] + x, "b": s["b"] * s["a"]}, s["a"] * 3),
    "one of both": lambda s, x: ({"a": s["a"] * s["b"], "b": s["b"].add_(x)}, x),
    "swapped": lambda s, x: ({"a": s["b"], "b": s["a"]}, x),
    "swapped and new": lambda s, x: ({"a": s["b"] + x, "b": s["a"]}, x),
    "both the same": lambda s, x: ({"a": s["a"].add_(x), "b": s["a"]}, x),
    "both views of one": lambda s, x: ({"a": s["a"], "b": s["a"].flip(0)}, x),
    "unchanged": lambda s, x: (s, x + s["a"]),
    "out is the new": lambda s, x: (lambda a: ({"a": a, "b": s["b"]}, a))(s["a"] + x),
    "out is the old": lambda s, x: ({"a": s["a"] + x, "b": s["b"]}, s["a"]),
    "out is a view of the old": lambda s, x: (
        {"a": s["a"] + x, "b": s["b"]},
        (s["a"][1:], s["b"].view(2, 1)),
    ),
    "out is a view of the new": lambda s, x: ({"a": s["a"].add_(x), "b": s["b"]}, s["a"][1:]),
    "returned twice": lambda s, x: (s, ({"a": s["a"], "b": s["b"]}, x)),
    "returned second": lambda s, x: (x, {"out": s["a"] * 2}, {"a": s["a"] + x, "b": s["b"] + 1}),
}
WHERE = {"returned second": 2}


@pytest.mark.parametrize("name", STEPS)
def test_a_donated_state_in_every_way_to_make_the_next(name: str) -> None:
    step = donates("s")(STEPS[name])
    g = graphify(step)
    state: State = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 5.0])}
    other = clone(state)
    kept = []
    for i in range(4):
        x = torch.tensor([0.5, float(i)])
        result = step(state, x)
        replayed = g(other, x)
        assert_equal(LAW, replayed, result)
        state = result[WHERE.get(name, 0)]
        other = replayed[WHERE.get(name, 0)]
        state = tree_map(torch.clone, state)  # no ties: eager code would write through them
        outs = [r for i, r in enumerate(replayed) if i != WHERE.get(name, 0)]
        kept.append((outs, clone(outs)))
        for returned, expected in kept:
            assert_equal("a result never changes", returned, expected)
    assert counts(g) == (1, 4, 0)


@pytest.mark.parametrize("name", STEPS)
def test_a_donated_state_stays_where_it_is(name: str) -> None:
    g = graphify(STEPS[name], donate_argnames=("s",))
    state = {"a": torch.ones(2), "b": torch.ones(2)}
    places = [t.data_ptr() for t in state.values()]
    state = g(state, torch.ones(2))[WHERE.get(name, 0)]
    assert [t.data_ptr() for t in state.values()] == places


PAIRS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "functional": lambda a, b: (a + b, b * 2),
    "crossed": lambda a, b: (b + 1, a * 2),
    "swapped": lambda a, b: (b, a),
    "in place, swapped": lambda a, b: (b.add_(1), a.mul_(2)),
    "the same": lambda a, b: (a, a + b),
    "one twice": lambda a, b: (b, b),
    "only one": lambda a, b: (a + b,),
    "three": lambda a, b: (a + b, a, b),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_donated_arguments_of_one_structure(name: str) -> None:
    fn = PAIRS[name]
    g = graphify(fn, donate_argnames=("a", "b"))
    results = g(torch.ones(2), torch.full((2,), 2.0))
    expected = fn(torch.ones(2), torch.full((2,), 2.0))
    for _ in range(3):
        assert_equal(LAW, results, expected)
        if len(results) != 2:
            return
        results = g(*clone(results) if name == "one twice" else results)
        expected = fn(*clone(expected))


class Pair(tuple[Any, ...]):
    """Registered below: its None is no leaf."""


torch.utils._pytree.register_pytree_node(
    Pair,
    lambda pair: ([x for x in pair if x is not None], tuple(x is None for x in pair)),
    lambda leaves, absent: Pair(
        None if is_absent else next(leaf_iterator)
        for leaf_iterator in [iter(leaves)]
        for is_absent in absent
    ),
)


def test_a_state_inside_a_class_that_leaves_out_a_value() -> None:
    g = graphify(lambda s, x: Pair((None, s + x, x * 2)), donate_argnames="s")
    state = torch.zeros(2)
    storages = set()
    for count in range(1, 5):
        _, state, out = g(state, torch.ones(2))
        storages.add(state.data_ptr())
        assert_equal(LAW, (state, out), (torch.full((2,), float(count)), torch.full((2,), 2.0)))
    assert (g.cache_info().captures, len(storages)) == (1, 1)


def test_states_that_lose_or_change_a_leaf() -> None:
    drop = graphify(lambda s: {"a": s["a"].add_(1)}, donate_argnames=("s",))
    first = drop({"a": torch.zeros(2), "b": torch.zeros(2)})
    second = drop({"a": torch.full((2,), 5.0), "b": torch.zeros(2)})
    assert (first["a"].tolist(), second["a"].tolist()) == ([1, 1], [6, 6])
    retype = graphify(lambda s: {"a": s["a"].to(torch.int64)}, donate_argnames=("s",))
    assert retype({"a": torch.full((2,), 3.7)})["a"].tolist() == [3, 3]


def test_a_state_with_python_values_counts_on() -> None:
    g = graphify(lambda s: {"n": s["n"] + 1, "t": s["t"] + s["n"]}, donate_argnames=("s",))
    state: dict[str, Any] = {"n": 0, "t": torch.zeros(1)}
    for _ in range(4):
        state = g(state)
    assert (state["n"], state["t"].item()) == (4, 6.0)


def test_a_dead_state_is_refused_by_name_before_anything_moves() -> None:
    g = graphify(lambda s, t: (s + 1, t + 1), donate_argnames=("s", "t"))
    dead = torch.zeros(2)
    live = torch.zeros(2)
    g(dead, torch.zeros(2))
    with pytest.raises(DonatedError) as error:
        g(live, dead)
    assert error.value.call == "<lambda>(...)"
    assert error.value.problem == "t, a tensor of shape (2,) that was donated to <lambda>(s)"
    assert g(live, torch.zeros(2))[0].tolist() == [1, 1]


def test_params_that_were_donated_elsewhere_are_refused() -> None:
    g = graphify(lambda params, x: params + x)
    dead = torch.zeros(4)
    weft.donate(dead, to="somebody")
    for args in ((dead, X), (X, dead)):
        with pytest.raises(DonatedError, match="donated to somebody"):
            g(*args)


def test_one_tensor_as_state_and_as_input() -> None:
    g = graphify(lambda s, x: (s.add_(x), x * 2), donate_argnames=("s",))
    both = torch.ones(2)
    with pytest.raises(DonatedError, match=r"x is a tensor that the same call donates"):
        g(both, both)
    assert_equal(LAW, g(both, both.clone()), (torch.full((2,), 2.0), torch.full((2,), 2.0)))


def test_a_view_of_the_state_as_input_is_refused() -> None:
    g = graphify(lambda s, x: (s.add_(1), x * 2), donate_argnames=("s",))
    state = torch.zeros(4)
    g(state[:2], X[:1])
    for view in (state[1:2], state[:2].numpy()):
        with pytest.raises(DonatedError, match=r"x is a view of s, which the same call donates"):
            g(state[:2], torch.as_tensor(view))
    assert_equal(LAW, g(state[:2], state[3:]), (torch.full((2,), 2.0), torch.zeros(1)))


def test_what_is_captured_by_reference_may_not_lie_in_what_is_donated() -> None:
    def step(params: Tensor, state: State) -> tuple[State, Tensor]:
        return {"h": state["h"] + 1}, params * 2

    g = graphify(step, donate_argnames="state")
    whole = torch.ones(4)
    with pytest.raises(
        DonatedError, match=r"params shares its storage with state\['h'\], which is donated"
    ):
        g(whole[:2], {"h": whole})
    assert counts(g) == (0, 0, 0)
    g(torch.ones(2), {"h": whole})


def test_all_donated_names_stay_declared() -> None:
    fn = donates("a")(lambda a, b: (a + 1, b + 1))
    assert set(donated_argnames(graphify(fn))) == {"a"}
    assert set(donated_argnames(graphify(fn, donate_argnames=("b",)))) == {"a", "b"}


def test_donates_upon_donates_donates_both() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    g = graphify(donates("b")(donates("a")(lambda a, b: (a.add_(1), b.add_(1)))))
    g(a, b)
    for dead in (a, b):
        with pytest.raises(DonatedError):
            g(dead, torch.zeros(2))


def test_a_next_state_without_grad_in_the_storage_of_one_with_it() -> None:
    def step(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = state + 1
        return state, state

    g = graphify(step, donate_argnames="state")
    with torch.no_grad():
        for _ in range(3):
            results = g(torch.ones(2, requires_grad=True).clone())
            assert [(x.requires_grad, x.tolist()) for x in results] == [(False, [2, 2])] * 2
        with torch.enable_grad():
            donated = torch.ones(2, requires_grad=True) * 1
        results = g(donated)
        assert [(x.requires_grad, x.tolist()) for x in results] == [(False, [2, 2])] * 2


def test_a_state_of_inference_mode_is_refused_outside_of_it() -> None:
    g = graphify(lambda state, x: (state + x, x * 2), donate_argnames="state")
    with torch.inference_mode():
        state, _ = g(torch.zeros(2), torch.ones(2))
        state, _ = g(torch.zeros(2), torch.ones(2))
    with pytest.raises(DonatedError, match="state, which is donated, was made in inference mode"):
        g(state, torch.ones(2))
    state, _ = g(state.clone(), torch.ones(2))
    assert state.tolist() == [2, 2]
