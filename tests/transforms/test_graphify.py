"""graphify: when it captures and when it replays, what it hands out, what it refuses, and that it changes nothing."""

import copy
import inspect
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jvp, vmap

import weft
from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.donation import clone, donated_argnames, donates
from weft.errors import CacheMissError, CaptureError, DeviceError, DonatedError
from weft.outputs import Output
from weft.proofs.laws import assert_equal
from weft.transforms.graphify import Graphified, graphify
from weft.transforms.ladder import Limits, make_ladder
from weft.transforms.memo import CacheInfo
from weft.trees import axes, pytree, static

LAW = "graphify changes nothing"
X = torch.arange(4.0)
State = dict[str, Tensor]


def twice(x: Any, k: Any = 1) -> Any:
    """Doubles whatever tensors it gets, and hands the value back."""
    return torch.utils._pytree.tree_map(lambda t: t * 2 if isinstance(t, Tensor) else t, x), k


def counts(g: Graphified[Any, Any]) -> tuple[int, int, int]:
    info = g.cache_info()
    return info.captures, info.replays, info.eager


def agree(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> Graphified[Any, Any]:
    """Each call of the graphified function gives what the function gives; its results then never change."""
    g = graphify(fn)
    kept = []
    for args in calls:
        seen, wanted = g(*args), fn(*args)
        assert_equal(LAW, seen, wanted)
        kept.append((seen, clone(wanted)))
    for seen, wanted in kept:
        assert_equal("a result never changes", seen, wanted)
    return g


# The memo ------------------------------------------------------------------------------------------------------------

CHANGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "shape": ((X[:2].clone(),), "x: shape (2,), captured (4,)"),
    "dtype": ((X.double(),), "x: dtype torch.float64, captured torch.float32"),
    "stride": ((torch.ones(4, 2)[:, 0],), "x: stride (2,), captured (1,)"),
    "device": ((X.to("meta"),), "x: device meta, captured cpu"),
    "value": ((X, 2), "k: 2, captured 1"),
    "bool for int": ((X, True), "k: True, captured 1"),
    "float for int": ((X, 1.0), "k: 1.0, captured 1"),
    "text": ((X, "1"), "k: '1', captured 1"),
    "None": ((X, None), "k: None, captured 1"),
    "tensor for value": ((X, torch.tensor(1)), "k: a tensor, captured 1"),
    "value for tensor": ((2.0, 1), "x: 2.0, captured a tensor"),
    "structure": (({"x": X},), "x: structure {'x': *}, captured *"),
    "list": (([X],), "x: structure [*], captured *"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_field_is_a_miss_and_a_frozen_function_names_it(change: str) -> None:
    other, text = CHANGES[change]
    g = graphify(twice)
    g(X)
    g.freeze()
    with pytest.raises(CacheMissError) as error:
        g(*other)
    assert str(error.value).startswith("twice(...)\n  saw: a miss after freeze(): " + text)
    instead = "capture this signature before freeze(), or call with arguments like the captured ones"
    remedy = {"value": ": pass k as a 0-dim tensor: torch.tensor(2)"}
    remedy["float for int"] = remedy["value"].replace("2", "1.0")
    assert error.value.instead == instead + remedy.get(change, "")
    assert_equal(LAW, g(X + 1), twice(X + 1))
    assert counts(g) == (1, 2, 0)


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "device"])
def test_a_changed_field_has_a_graph_of_its_own(change: str) -> None:
    other, _ = CHANGES[change]
    g = agree(twice, (X,), other, (X + 1,), other, (X,))
    assert counts(g) == (2, 5, 0)


def test_the_nearest_captured_signature_is_the_one_that_a_miss_is_held_against() -> None:
    g = graphify(lambda x, y: (x * 2, y))
    g(X, 1)
    g(X[:2], 2)
    g.freeze()
    with pytest.raises(CacheMissError, match=r"freeze\(\): y: 3, captured 2\n"):
        g(X[:2], 3)


def test_keywords_in_any_order_and_defaults_written_out_are_one_signature() -> None:
    g = graphify(twice)
    for result in (g(X, 1), g(k=1, x=X), g(x=X, k=1), g(X)):
        assert_equal(LAW, result, twice(X))
    assert counts(g) == (1, 4, 0)


def test_arguments_of_every_kind_reach_their_places() -> None:
    def mixed(a: Tensor, /, b: Tensor = X, *rest: Tensor, c: float = 2.0, **more: Tensor) -> Tensor:
        return a + 10 * b + 100 * sum(rest, torch.zeros(4)) + c * 1000 + 5 * more.get("a", X) + more.get("z", X)

    g = graphify(mixed)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X,), {}), ((X, X + 1), {}), ((X, X + 1, X + 2), {}), ((X, X + 1, X + 2, X + 3), {"c": 3.0}),
        ((X,), {"b": X + 5}), ((X,), {"a": X + 7}), ((X + 1,), {"z": X, "a": X + 2}), ((X + 1,), {"a": X + 2, "z": X}),
    ]  # fmt: skip
    for args, kwargs in calls:
        assert_equal(LAW, g(*args, **kwargs), mixed(*args, **kwargs))


def test_a_wrong_call_is_the_functions_own_type_error() -> None:
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'z'"):
        graphify(twice)(X, z=1)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        graphify(twice)()


LEAVES = {
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "strided": torch.arange(8.0)[::2],
    "expanded": torch.arange(2.0)[:, None].expand(2, 3),
    "offset": torch.arange(8.0)[3:],
    "zero-size": torch.empty(0, 3),
    "0-dim": torch.tensor(3.0),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves_of_every_layout(leaf: str) -> None:
    x = LEAVES[leaf]
    g = agree(lambda x, none, scalar: (x * 2, x, x.sum(), none, scalar), (x, None, 3), (x.logical_not() * 1, None, 3))
    agree(lambda x: (x + 1).clone(), (x,), (x * 0,))
    assert g.cache_info().captures in (1, 2)


def test_a_replay_sees_nothing_of_the_values_at_capture() -> None:
    g = graphify(lambda x: (x.relu(), x.argmax(), torch.where(x > 1, x, -x), x.sort().values))
    g(X)
    for x in (-X, X.flip(0), torch.full((4,), math.nan), torch.full((4,), math.inf)):
        assert_equal(LAW, g(x), (x.relu(), x.argmax(), torch.where(x > 1, x, -x), x.sort().values))
    assert counts(g) == (1, 5, 0)


def test_minus_zero_is_not_zero() -> None:
    agree(lambda x, y: torch.copysign(x, torch.full_like(x, y)), (X + 1, 0.0), (X + 1, -0.0))


def test_nan_is_one_value() -> None:
    g = graphify(lambda x, fill: torch.where(x > 1, x, fill))
    for _ in range(3):
        g(X, float("nan"))
    assert counts(g) == (1, 3, 0)


@pytest.mark.parametrize(("first", "second"), [(2, 2.0), (1, True), ((1, 2), (1.0, 2))])
def test_static_values_that_are_equal_but_not_alike_are_two_signatures(first: Any, second: Any) -> None:
    x = torch.arange(3)
    g = graphify(lambda x, k: x * (k if not isinstance(k, tuple) else k[0]), static_argnames=("k",))
    assert_equal(LAW, g(x, first), g._fn(x, first))
    assert_equal(LAW, g(x, second), g._fn(x, second))


@pytree
@attrs.frozen(eq=False)
class Tagged:
    x: Tensor
    tag: Any = attrs.field(metadata=static())


def test_static_fields_that_are_equal_but_not_alike_are_two_signatures() -> None:
    agree(lambda v: v.x * v.tag, (Tagged(torch.arange(3), 1),), (Tagged(torch.arange(3), 1.0),))


def test_static_fields_are_part_of_the_key() -> None:
    g = agree(lambda v: v.x * v.tag, (Tagged(X, 1),), (Tagged(X, 2),), (Tagged(X + 1, 1),))
    assert g.cache_info().captures == 2


UNHASHABLE = "no tensor and cannot be hashed (unhashable type: 'set')"


@pytest.mark.parametrize("method", ["__call__", "explain", "capture"])
def test_what_cannot_be_hashed_is_named(method: str) -> None:
    g = graphify(lambda x, y: (x, y))
    with pytest.raises(CaptureError) as error:
        getattr(g, method)(X, {"deep": {1, 2}})
    assert error.value.seen == f"y['deep'] is {UNHASHABLE}"
    assert error.value.instead == "pass a tensor, or a hashable value (a tuple for a list)"


def test_a_static_argument_that_cannot_be_hashed_is_named() -> None:
    with pytest.raises(CaptureError) as error:
        graphify(twice, static_argnames=("k",))(X, {1})
    assert error.value.seen == f"k is {UNHASHABLE}"


# What it hands out ---------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("fn", [torch.conj, lambda params: params.conj() * 1, lambda params: params.conj()[:1]])
def test_a_conjugate_view_of_params_is_not_params(fn: Callable[[Tensor], Tensor]) -> None:
    g = graphify(lambda params: fn(params))
    params = torch.tensor([1 + 2j])
    for p in (params, params.conj()):
        assert_equal(LAW, g(p).resolve_conj(), fn(p).resolve_conj())


def test_a_conjugated_state_is_the_next_state() -> None:
    g = graphify(lambda s: s.conj(), donate_argnames=("s",))
    assert g(torch.tensor([1 + 2j])).tolist() == [1 - 2j]


# Donation ------------------------------------------------------------------------------------------------------------

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
    "out is a view of the old": lambda s, x: ({"a": s["a"] + x, "b": s["b"]}, (s["a"][1:], s["b"].view(2, 1))),
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
    other, held = clone(state), []
    for i in range(4):
        x = torch.tensor([0.5, float(i)])
        result = step(state, x)
        replayed = g(other, x)
        assert_equal(LAW, replayed, result)
        state, other = result[WHERE.get(name, 0)], replayed[WHERE.get(name, 0)]
        state = clone(state)  # aliases that eager code would write through are not the subject
        outs = [r for i, r in enumerate(replayed) if i != WHERE.get(name, 0)]
        held.append((outs, clone(outs)))
        for seen, wanted in held:
            assert_equal("a result never changes", seen, wanted)
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
    seen, wanted = g(torch.ones(2), torch.full((2,), 2.0)), fn(torch.ones(2), torch.full((2,), 2.0))
    for _ in range(3):
        assert_equal(LAW, seen, wanted)
        if len(seen) != 2:
            return
        seen, wanted = g(*clone(seen) if name == "one twice" else seen), fn(*clone(wanted))


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
    dead, live = torch.zeros(2), torch.zeros(2)
    g(dead, torch.zeros(2))
    with pytest.raises(DonatedError) as error:
        g(live, dead)
    assert error.value.call == "<lambda>(...)"
    assert error.value.seen == "a tensor of shape (2,) that was donated to <lambda>(s)"
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


def test_a_view_of_the_state_as_input_is_copied_before_the_state_is_written() -> None:
    g = graphify(lambda s, x: (s.add_(1), x * 2), donate_argnames=("s",))
    for turn in range(3):
        state = torch.full((2,), float(turn))
        assert_equal(LAW, g(state, state[:1]), (torch.full((2,), turn + 1.0), torch.full((1,), turn * 2.0)))


def test_what_is_captured_by_reference_may_not_lie_in_what_is_donated() -> None:
    def step(params: Tensor, state: State) -> tuple[State, Tensor]:
        return {"h": state["h"] + 1}, params * 2

    g = graphify(step, donate_argnames="state")
    whole = torch.ones(4)
    with pytest.raises(DonatedError, match=r"params shares its storage with state\['h'\], which is donated"):
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


# References ----------------------------------------------------------------------------------------------------------


def test_another_params_tensor_is_a_miss_that_names_it() -> None:
    g = graphify(lambda params, x: params["w"][0] * x)
    params = {"w": [torch.ones(4)]}
    g(params, X)
    assert "captures: " in str(g.explain({"w": [torch.ones(4)]}, X))
    g.freeze()
    with pytest.raises(CacheMissError) as error:
        g({"w": [torch.ones(4)]}, X)
    assert "params['w'][0]: another tensor than the captured one (captured by reference)" in error.value.seen


def test_params_changed_in_place_are_seen_by_the_next_replay() -> None:
    g = graphify(lambda params, x: params * x)
    params = torch.ones(4)
    g(params, X)
    params.mul_(3)
    assert_equal(LAW, g(params, X), 3 * X)
    assert counts(g) == (1, 2, 0)


def test_reference_argnames_of_ones_own() -> None:
    g = graphify(lambda table, params, x: table * x + params, reference_argnames=("table",))
    table = torch.ones(4)
    g(table, X, X)
    g(table.mul_(2), X + 1, X)  # params is copied now
    g(table.clone(), X, X)
    assert counts(g) == (2, 3, 0)


def test_params_keep_alive_what_a_graph_reads() -> None:
    g = graphify(lambda params, x: params * x)
    g(torch.full((4,), 3.0), X)
    for _ in range(6):  # a freed address would soon be handed out again
        params = torch.full((4,), 5.0)
        assert_equal(LAW, g(params, X), 5 * X)
        del params


@pytest.mark.parametrize("argument", ["donate_argnames", "static_argnames", "reference_argnames"])
def test_names_that_are_no_arguments_are_refused(argument: str) -> None:
    with pytest.raises(CaptureError) as error:
        graphify(twice, **{argument: ("parmas",)})
    assert error.value.call == "graphify(twice, ...)"
    assert "'parmas', which is no argument of it" in error.value.seen
    assert error.value.instead == "one of x, k"


# Inspection ----------------------------------------------------------------------------------------------------------


def test_explain_says_what_a_call_would_do_and_does_nothing() -> None:
    g = graphify(twice)
    assert str(g.explain(X)) == (
        "captures: no ladder, so each signature has a graph of its own; nothing is captured yet"
    )
    assert counts(g) == (0, 0, 0)
    g(X)
    seen = g.explain(X + 1)
    assert (seen.captured, str(seen)) == (True, "replays: no ladder, so each signature has a graph of its own")
    assert str(g.explain(X, 2)).endswith("; k: 2, captured 1; pass k as a 0-dim tensor: torch.tensor(2)")
    assert str(g.freeze().explain(X, 2)).startswith("would raise, being frozen: ")
    assert counts(g) == (1, 1, 0)
    wants = torch.ones(2, requires_grad=True)
    assert str(g.explain(wants)).startswith("runs inline: an argument requires grad")


LADDER = make_ladder("full", Limits(max_num_reqs=4, max_num_tokens=8))


def test_explain_with_a_ladder() -> None:
    g = graphify(lambda b: b, ladder=[BatchDescriptor.uniform(4)])
    three = Batch.decode([0, 1, 2])
    under = "'uniform x1, 3 reqs' runs under 'uniform x1, 4 reqs', the least of the ladder that covers it"
    assert str(g.explain(three)) == f"captures: {under}; nothing is captured yet"
    g(three)
    assert str(g.explain(three)) == f"replays: {under}"
    assert str(g.explain(Batch.decode(range(5)))) == "runs eagerly: no captured class covers 'uniform x1, 5 reqs'"
    other = attrs.evolve(three, samples=three.samples.int())
    assert str(g.freeze().explain(other)).endswith("; b.samples: dtype torch.int32, captured torch.bool")


def test_capture_runs_nothing_that_shows() -> None:
    g = graphify(lambda s, x: (s.add_(x), s * 2), donate_argnames=("s",))
    state = torch.ones(4)
    assert g.capture(state, X) == CacheInfo(captures=1, replays=0, eager=0, currsize=1)
    assert state.tolist() == [1.0] * 4
    assert_equal(LAW, g(state, X), (X + 1, 2 * X + 2))
    assert counts(g) == (1, 1, 0)
    g.capture(torch.ones(4), X)  # at another address: a graph of its own
    assert g.cache_info().currsize == 2


def test_capture_captures_the_ladder_once() -> None:
    g = graphify(lambda b: Output(b.rows * 2, b.rows * 1.0), ladder=LADDER)
    assert g.capture(Batch.decode([0])).captures == len(LADDER)
    g.freeze()
    for batch in (Batch.decode([2, 1, 0]), Batch.ragged([3, 1], [[1, 2], [3]])):
        assert_equal(LAW, g(batch), Output(batch.rows * 2, batch.rows * 1.0))
    assert g.capture(Batch.decode([1])).captures == len(LADDER)


def test_cache_clear_starts_anew_and_thaws() -> None:
    g = graphify(twice)
    g(X)
    g.freeze().cache_clear()
    assert g.cache_info() == CacheInfo()
    assert_equal(LAW, g(X[:2]), twice(X[:2]))
    assert repr(g) == "<graphify(twice), 1 graphs>"


def test_it_looks_like_the_function() -> None:
    @graphify
    def plain(x: Tensor) -> Tensor:
        """A docstring."""
        return x + 1

    @graphify(static_argnames=("k",))
    def powered(x: Tensor, k: int = 2) -> Tensor:
        return x**k

    assert (plain.__name__, plain.__doc__) == ("plain", "A docstring.")
    assert_equal(LAW, (plain(X), powered(X), powered(X, 3)), (X + 1, X**2, X**3))
    assert powered.cache_info().captures == 2


def test_static_values_are_constants_that_a_miss_names() -> None:
    g = graphify(lambda x, n, how: [x * i if how == "by" else x + i for i in range(n)], static_argnames=("n", "how"))
    assert len(g(X, 3, how="by")) == 3
    assert len(g(X, 1, how="by")) == 1
    g.freeze()
    with pytest.raises(CacheMissError, match="static argument how: 'plus', captured 'by'"):
        g(X, 3, how="plus")


def test_backends_by_name() -> None:
    with pytest.raises(DeviceError) as error:
        graphify(twice, backend="tap")(X)
    assert error.value.call == "graphify(..., backend='tap')"
    assert error.value.instead == "backend='tape', 'cuda' or None"
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="this machine has no CUDA device"):
            graphify(twice, backend="cuda")(X)


# What the audit refuses ----------------------------------------------------------------------------------------------
# Each function's fault stands on the line below its def: the test looks for that line in the error.

OUTSIDE = torch.zeros(4)


def reads_item(x: Tensor) -> Any:
    return x * x[1].item()


def reads_tolist(x: Tensor) -> Any:
    return x * sum(x.tolist())


def reads_numpy(x: Tensor) -> Any:
    return x * x.numpy().sum()


def reads_asarray(x: Tensor) -> Any:
    return x * float(x.__array__().sum())


def reads_bool(x: Tensor) -> Any:
    return x if x.sum() > 0 else -x


def reads_float(x: Tensor) -> Any:
    return x * math.sqrt(x[1])


def reads_int(x: Tensor) -> Any:
    return x * int(x[1])


def reads_index(x: Tensor) -> Any:
    return [x * i for i in range(x.long()[2])]


def reads_slice(x: Tensor) -> Any:
    return x[: x.long()[2]]


def reads_print(x: Tensor) -> Any:
    print(x)


def reads_format(x: Tensor) -> Any:
    return x, f"{x}"


def reads_format_number(x: Tensor) -> Any:
    return x, f"{x[1]:.2f}"


def reads_contains(x: Tensor) -> Any:
    return x * (2 if 3.0 in x else 1)


def reads_equal(x: Tensor) -> Any:
    return x * torch.equal(x, x)


def reads_allclose(x: Tensor) -> Any:
    return x * torch.allclose(x, x)


def reads_new_tensor_of_scalars(x: Tensor) -> Any:
    return torch.tensor([x[0], x[1]])


def reads_dlpack(x: Tensor) -> Any:
    return x * float(np.from_dlpack(x).sum())


def shape_nonzero(x: Tensor) -> Any:
    return x.nonzero()


def shape_unique(x: Tensor) -> Any:
    return x.unique()


def shape_where(x: Tensor) -> Any:
    return torch.where(x > 1)


def mask_read(x: Tensor) -> Any:
    return x[x > 1]


def mask_write(x: Tensor) -> Any:
    (x * 1)[x > 1] = 0


def writes_argument(x: Tensor) -> Any:
    return x.add_(1)


def writes_view_of_argument(x: Tensor) -> Any:
    x[1:].detach().zero_()


def writes_out_argument(x: Tensor) -> Any:
    return torch.add(x, 1, out=x)


def writes_foreach(x: Tensor) -> Any:
    torch._foreach_add_([x * 1, x], 1.0)


def writes_outside(x: Tensor) -> Any:
    OUTSIDE.copy_(x)


def writes_outside_index(x: Tensor) -> Any:
    OUTSIDE[0] = x[0]


def writes_outside_batch_norm(x: Tensor) -> Any:
    return torch.nn.functional.batch_norm(x[:, None], OUTSIDE[:1], OUTSIDE[:1] + 1, training=True)


BRANCH, SHAPE = "a branch on a tensor's value", "has a result whose shape or value on the host depends on data"
MASK = "indexing with a boolean mask, whose result depends on data in shape or in work"
NOT_OWN = "of shape (4,), which it does not own"
REFUSED: dict[Callable[[Tensor], Any], str] = {
    reads_item: "Tensor.item reads a tensor on the host",
    reads_tolist: "Tensor.tolist reads a tensor on the host",
    reads_numpy: "Tensor.numpy reads a tensor on the host",
    reads_asarray: "Tensor.__array__ reads a tensor on the host",
    reads_bool: BRANCH,
    reads_float: "Tensor.__float__ reads a tensor on the host",
    reads_int: "Tensor.__int__ reads a tensor on the host",
    reads_index: "Tensor.__index__ reads a tensor on the host",
    reads_slice: "a tensor's value is read on the host",
    reads_print: "Tensor.__repr__ reads a tensor on the host",
    reads_format: "reads a tensor on the host",
    reads_format_number: "read",
    reads_contains: "a tensor's value is read on the host",
    reads_equal: f"aten.equal.default {SHAPE}",
    reads_allclose: f"aten.allclose.default {SHAPE}",
    reads_new_tensor_of_scalars: "read",
    reads_dlpack: "read",
    shape_nonzero: f"aten.nonzero.default {SHAPE}",
    shape_unique: f"aten._unique2.default {SHAPE}",
    shape_where: f"aten.nonzero.default {SHAPE}",
    mask_read: MASK,
    mask_write: MASK,
    writes_argument: f"aten.add_.Tensor writes to x {NOT_OWN}",
    writes_view_of_argument: "aten.zero_.default writes to x of shape (3,), which it does not own",
    writes_out_argument: f"aten.add.out writes to x {NOT_OWN}",
    writes_foreach: f"aten._foreach_add_.Scalar writes to x {NOT_OWN}",
    writes_outside: f"aten.copy_.default writes to a tensor from outside it {NOT_OWN}",
    writes_outside_index: "writes to a tensor from outside it of shape (), which it does not own",
    writes_outside_batch_norm: "writes to a tensor from outside it of shape (1,), which it does not own",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_what_a_replay_could_not_repeat_is_refused_with_its_line(fn: Callable[[Tensor], Any]) -> None:
    OUTSIDE.zero_()
    x = X.clone()
    with pytest.raises(CaptureError) as error:
        graphify(fn)(x)
    line = fn.__code__.co_firstlineno + 1
    text = Path(__file__).read_text().splitlines()[line - 1].strip()
    assert error.value.call == f"graphify({fn.__name__})"
    assert REFUSED[fn] in error.value.seen
    assert error.value.seen.endswith(f"\n       at {__file__}:{line}: {text}")
    writes = fn.__name__.startswith("writes")
    assert ("donate the argument" in error.value.instead) is writes
    assert ("torch.where" in error.value.instead) is not writes
    assert_equal("a refused capture leaves no trace", (x, OUTSIDE), (X, torch.zeros(4)))


def test_a_write_to_params_is_refused_by_its_path() -> None:
    with pytest.raises(CaptureError, match=r"writes to params\['w'\] of shape \(4,\)"):
        graphify(lambda params, x: params["w"].add_(x))({"w": torch.ones(4)}, X)


def test_a_tensor_made_inside_may_be_written_to_even_where_it_was_resized() -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.empty(0)
        torch.add(x, 1, out=out)
        return out.mul_(2)

    agree(fn, (X,), (X + 1,))


def test_a_mask_in_where_and_masked_fill_is_not_refused() -> None:
    agree(lambda x: (torch.where(x > 1, x, 0.0), x.masked_fill(x > 1, 5.0)), (X,), (X - 2,))


def test_a_failed_capture_leaves_state_and_memo_usable() -> None:
    def fn(s: Tensor, x: Tensor, bad: bool) -> Tensor:
        s.add_(x)
        return s.mul_(x.sum().item()) if bad else s

    g = graphify(fn, donate_argnames=("s",))
    state = torch.ones(4)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"Tensor\.item"):
            g(state, X, True)
        assert state.tolist() == [1.0] * 4
    assert_equal(LAW, g(state, X, False), X + 1)
    assert g.cache_info() == CacheInfo(captures=1, replays=1, eager=0, currsize=1)
    assert torch.equal(X * 1, X)  # the modes are gone


def test_an_error_of_the_function_itself_passes_through() -> None:
    def fn(s: Tensor, x: Tensor) -> Tensor:
        s.add_(1)
        raise KeyError("mine")

    g, state = graphify(fn, donate_argnames=("s",)), torch.ones(4)
    with pytest.raises(KeyError, match="mine"):
        g(state, X)
    assert state.tolist() == [1.0] * 4
    assert bool(X.sum() > 0)  # the modes are gone


# Ladders -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["__call__", "explain", "capture"])
def test_a_ladder_without_a_batch_is_refused(method: str) -> None:
    g = graphify(lambda x, params: Output(x, x), ladder=LADDER)
    with pytest.raises(CaptureError) as error:
        getattr(g, method)(X, X)
    assert error.value.call == "graphify(<lambda>, ladder=...)(x)"
    assert error.value.seen == "a ladder, but no argument that holds a descriptor"


def test_a_result_that_is_not_sized_is_refused_by_its_path() -> None:
    g = graphify(lambda b: {"ok": b, "bad": [b.rows * 2]}, ladder=LADDER)
    with pytest.raises(CaptureError) as error:
        g(Batch.decode([0, 1]))
    assert error.value.seen.startswith("the result's leaf ['bad'][0] of shape (2,) does not say which")
    assert "weft.axes('num_reqs')" in error.value.instead
    assert g.cache_info().currsize == 0
    assert g(Batch.decode(range(9)))["bad"][0].shape == (9,)  # eagerly there is nothing to unpad


def test_a_result_of_another_size_than_its_class_says_is_not_cut() -> None:
    """A tensor a token in a field a request: eagerly [3], so never silently [1]."""
    g = graphify(lambda b: Output(b.input_ids * 2, b.input_ids * 1.0), ladder=[BatchDescriptor(8, 4)])
    with pytest.raises(CaptureError, match="token_ids"):
        g(Batch.ragged([0], [[1, 2, 3]]))


@pytest.mark.parametrize("second", [Batch.ragged([0], [[1]]), Batch.decode([0, 1, 2])])
def test_two_batches_of_different_classes_are_refused(second: Batch) -> None:
    """Only one of them is sure to be padded to a rung that covers it; the other would run under another's class."""
    with pytest.raises((CaptureError, ValueError), match="descriptor"):
        graphify(lambda a, b: (a, b), ladder=LADDER)(Batch.decode([0, 1]), second)


def test_two_batches_of_one_class_are_padded_together() -> None:
    g = graphify(lambda a, b: Output(a.rows + b.rows, b.rows * 1.0), ladder=[BatchDescriptor.uniform(4)])
    assert g(Batch.decode([0, 1]), Batch.decode([5, 6])).token_ids.tolist() == [5, 7]
    assert counts(g) == (1, 1, 0)


def test_no_token_of_an_earlier_batch_is_left_in_a_padded_one() -> None:
    @pytree
    @attrs.frozen(eq=False)
    class Seen:
        tail: Tensor = attrs.field(metadata=axes("num_reqs"))

    g = graphify(lambda b: Seen(b.input_ids.sum() + 0 * b.rows), ladder=[BatchDescriptor(8, 4)])
    assert g(Batch.ragged([0, 1, 2], [[5], [6, 7], [8]])).tail.tolist() == [26] * 3
    assert g(Batch.ragged([0], [[1, 1]])).tail.tolist() == [2]


def test_an_empty_batch_runs_under_a_rung() -> None:
    g = graphify(lambda b: Output(b.rows, b.rows * 1.0), ladder=[BatchDescriptor.uniform(4)])
    assert g(Batch.decode([])).token_ids.shape == (0,)


def test_frozen_a_class_outside_the_ladder_still_runs_eagerly() -> None:
    g = graphify(lambda b: Output(b.rows, b.rows * 1.0), ladder=[BatchDescriptor.uniform(2)]).freeze()
    assert g(Batch.decode(range(5))).token_ids.shape == (5,)
    with pytest.raises(CacheMissError, match="nothing is captured yet"):
        g(Batch.decode([0]))


def test_an_error_of_the_functions_own_says_what_is_padded() -> None:
    g = graphify(lambda b, y: Output(b.rows, b.rows + y), ladder=[BatchDescriptor.uniform(4)])
    with pytest.raises(RuntimeError, match="must match the size") as error:
        g(Batch.decode([0, 1, 2]), torch.ones(3))
    assert error.value.__notes__ == [
        "in <lambda>, captured for 'uniform x1, 4 reqs': only fields with weft.axes(...) are padded to it"
    ]


# Composition ---------------------------------------------------------------------------------------------------------


def test_two_threads_get_their_own_answers() -> None:
    g = graphify(lambda x: (x * 2, x.sum()))
    wrong: list[float] = []

    def work(sign: float) -> None:
        for i in range(60):
            x = torch.full((3 + i % 2,), sign * i)
            if not torch.equal(g(x)[0], x * 2):
                wrong.append(sign * i)

    threads = [threading.Thread(target=work, args=(sign,)) for sign in (1.0, -1.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, counts(g)) == ([], (2, 120, 0))


def test_a_capture_in_one_thread_does_not_refuse_reads_in_another() -> None:
    inside, go = threading.Event(), threading.Event()

    def fn(x: Tensor) -> Tensor:
        inside.set()
        assert go.wait(10)
        return x * 2

    thread = threading.Thread(target=graphify(fn), args=(X,))
    thread.start()
    assert inside.wait(10)
    assert X.sum().item() == 6.0
    go.set()
    thread.join()


def test_nested_it_inlines() -> None:
    inner = graphify(lambda s, x: s.add_(x), donate_argnames=("s",))
    outer = graphify(lambda s, x: inner(s, x) * 2, donate_argnames=("s",))
    state = torch.zeros(4)
    for wanted in (2 * X, 6 * X):
        state = outer(state, X)
        assert_equal(LAW, state, wanted)
    assert (counts(inner), counts(outer)) == ((0, 0, 0), (1, 2, 0))


def sine(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) * y


FUNC: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "vmap": lambda f: vmap(f)(torch.eye(4), torch.ones(4, 4)),
    "vmap of one": lambda f: vmap(f, in_dims=(0, None))(torch.eye(4), X),
    "grad": lambda f: grad(lambda x: f(x, X).sum())(X),
    "grad, argnums": lambda f: grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(X, X),
    "jvp": lambda f: jvp(f, (X, X), (X + 1, X)),
    "hessian": lambda f: hessian(lambda x: f(x, x).sum())(X),
    "per-sample": lambda f: vmap(grad(lambda x, y: f(x, y)))(X, X),
    "unmapped arguments in vmap": lambda f: vmap(lambda a: f(X, X) + a)(torch.eye(4)),
    "unmapped arguments in grad": lambda f: grad(lambda a: (f(X, X) * a).sum())(X),
    "unmapped arguments in jvp": lambda f: jvp(lambda a: f(X, X) * a, (X,), (X,)),
    "closure in grad": lambda f: grad(lambda w: (graphify(lambda x: f(x, w))(X)).sum())(X),
    "closure in vmap": lambda f: vmap(lambda w: graphify(lambda x: f(x, w))(X))(torch.eye(4)),
    "functionalize": lambda f: torch.func.functionalize(f)(X, X),
}


@pytest.mark.parametrize("name", FUNC)
def test_under_an_outer_transform_it_is_the_function(name: str) -> None:
    warm = graphify(sine)
    warm(X, X)
    for g in (graphify(sine), warm):
        assert_equal(LAW, FUNC[name](g), FUNC[name](sine))
    assert_equal(LAW, warm(X + 1, X), sine(X + 1, X))


INNER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad_and_value": grad_and_value(lambda w, x: (w * x).pow(2).sum()),
    "jvp": lambda w, x: jvp(lambda v: v**3, (w,), (x,)),
    "vmap": lambda w, x: vmap(lambda r: (r * w).sum())(torch.outer(x, x)),
    "jacrev": lambda w, x: torch.func.jacrev(lambda v: v * x)(w),
    "hessian": lambda w, x: hessian(lambda v: (v**3 * x).sum())(w),
}


@pytest.mark.parametrize("name", INNER)
def test_a_transform_inside_is_captured(name: str) -> None:
    g = agree(INNER[name], (X, X), (X + 1, X - 1), (X, X))
    assert counts(g) == (1, 3, 0)


def test_a_training_step_with_autograd_inside() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            (g,) = torch.autograd.grad((w * x).pow(2).sum(), w)
        return w.detach() - 0.1 * g

    agree(step, (X, X), (X + 1, X - 1))


def test_where_autograd_records_the_function_itself_runs() -> None:
    g, w = graphify(sine), torch.ones(4, requires_grad=True)
    g(X, w).sum().backward()
    assert_equal(LAW, w.grad, torch.sin(X))
    assert counts(g) == (0, 0, 0)
    with torch.no_grad():
        assert_equal(LAW, g(X, w), torch.sin(X))
    assert counts(g) == (1, 1, 0)
    assert g(X, w).requires_grad


def test_a_closed_over_parameter_keeps_its_gradient() -> None:
    w = torch.ones(4, requires_grad=True)
    g = graphify(lambda x: x * w)
    for _ in range(2):
        assert g(X).requires_grad
    assert counts(g) == (1, 0, 2)
    assert str(g.explain(X)).startswith("runs inline: it reads a tensor from outside that requires grad, and autograd")
    with torch.no_grad():
        assert not g(X).requires_grad
        assert str(g.explain(X)).startswith("replays: ")
    assert counts(g) == (2, 1, 2)


def test_a_closed_over_parameter_keeps_its_gradient_beside_a_donated_state() -> None:
    w = torch.ones(4, requires_grad=True)
    g = graphify(lambda s, x: (s * 0.5 + x * w, x), donate_argnames="s")
    state = torch.zeros(4)
    for _ in range(3):
        state, _ = g(state, X)
    state.sum().backward()
    assert_equal(LAW, w.grad, 1.75 * X)
    with weft.no_capture(replay=False):
        assert str(g.explain(torch.zeros(4), X)) == "runs eagerly: inside weft.no_capture(replay=False)"


def test_forward_mode_duals_keep_their_tangents() -> None:
    forward = torch.autograd.forward_ad
    g = graphify(lambda x: x * 2)
    g(X)
    with forward.dual_level():
        tangent = forward.unpack_dual(g(forward.make_dual(X, torch.ones(4)))).tangent
    assert_equal(LAW, tangent, torch.full((4,), 2.0))


def test_capture_with_arguments_that_require_grad_leaves_later_results_without() -> None:
    g, w = graphify(lambda x: x), torch.ones(4, requires_grad=True)
    g.capture(w)
    assert not g(X).requires_grad
    with torch.no_grad():
        assert_equal(LAW, g(w), torch.ones(4))


def test_a_graph_captured_in_inference_mode_serves_outside_and_back() -> None:
    g = graphify(lambda x: x * 2)
    for _ in range(2):
        with torch.inference_mode():
            g(X)
        assert_equal(LAW, g(X), X * 2)


def test_autocast_is_seen() -> None:
    g, a = graphify(lambda x: x @ x), torch.eye(2)
    assert g(a).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert g(a).dtype == torch.bfloat16
    assert g(a).dtype == torch.float32


def test_a_fake_call_leaves_the_real_one_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    g = graphify(lambda x: x * 2)
    with FakeTensorMode():
        assert g(torch.ones(3)).shape == (3,)
    assert g(torch.ones(3)).tolist() == [2.0] * 3


def test_make_fx_traces_through_it() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    g = graphify(lambda x: x * 2)
    g(X)
    traced = make_fx(g)(X)
    assert_equal(LAW, traced(X + 1), 2 * X + 2)
    assert [n.name for n in traced.graph.nodes if n.op == "call_function"] == ["mul"]


# Random numbers ------------------------------------------------------------------------------------------------------


def test_random_numbers_are_drawn_anew_in_each_replay() -> None:
    g = graphify(lambda x: x + torch.rand(4))
    assert not torch.equal(g(X), g(X))
    torch.manual_seed(3)
    seen = [g(X), g(X)]
    torch.manual_seed(3)
    assert_equal(LAW, seen, [X + torch.rand(4), X + torch.rand(4)])


def test_a_capture_draws_no_random_numbers() -> None:
    g = graphify(lambda x, generator: x + torch.rand(4, generator=generator) + torch.rand(4))
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    seen = g(X, generator)
    generator.manual_seed(3)
    torch.manual_seed(3)
    assert_equal(LAW, seen, X + torch.rand(4, generator=generator) + torch.rand(4))


# Methods -------------------------------------------------------------------------------------------------------------


@pytree
@attrs.frozen(eq=False)
class Scale:
    w: Tensor

    @graphify
    def times(self, x: Tensor) -> Tensor:
        """A docstring."""
        return x * self.w


def test_a_method_is_the_graphified_function_of_its_instance() -> None:
    scale = Scale(X + 1)
    Scale.times.cache_clear()
    assert_equal(LAW, scale.times(X), X * (X + 1))
    assert (scale.times.cache_info(), scale.times.__doc__) == (Scale.times.cache_info(), "A docstring.")
    assert counts(Scale.times) == (1, 1, 0)
    assert [*inspect.signature(scale.times).parameters] == ["x"]
    assert scale.times.explain(X).captured
    assert_equal(LAW, scale.times.lower(X).compile()(scale, X), X * (X + 1))
    assert scale.times.capture(torch.ones(1)).captures == 2
    assert repr(scale.times) == f"<<graphify(times), 2 graphs> of {scale!r}>"
    with pytest.raises(AttributeError, match="cach_info"):
        _ = scale.times.cach_info


# Things that are not functions ---------------------------------------------------------------------------------------


def test_a_module_in_eval_mode_is_a_function() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval().requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    g = graphify(module)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert_equal(LAW, (g(x), g(x + 1)), (module(x), module(x + 1)))
    assert_equal(LAW, dict(module.state_dict()), dict(before))
    assert repr(g) == "<graphify(Sequential), 1 graphs>"


def test_a_tensor_that_the_function_keeps_is_refused() -> None:
    kept: list[Tensor] = []

    def leaks(x: Tensor) -> Tensor:
        y = x * 2
        kept.append(y[:1])
        return y + 1

    g = graphify(leaks)
    with pytest.raises(
        CaptureError, match=r"a tensor that it made is kept and not returned \(float32\[4\], float32\[1\]\)"
    ):
        g(X)
    assert counts(g) == (0, 0, 0)
    kept.clear()


def test_a_cache_filled_by_the_warm_up_is_a_constant() -> None:
    cache: dict[str, Tensor] = {}

    def cached(x: Tensor) -> Tensor:
        if "table" not in cache:
            cache["table"] = torch.arange(4.0) * 3
        return x + cache["table"]

    agree(cached, (X,), (X + 1,))


def test_a_cycle_of_references_is_no_leak() -> None:
    def cyclic(x: Tensor) -> Tensor:
        y: list[Any] = [x * 2]
        y.append(y)
        return y[0] + 1

    agree(cyclic, (X,), (X + 1,))


def test_a_python_value_is_frozen_at_capture() -> None:
    calls = []
    g = graphify(lambda x: calls.append(1) or x + len(calls))
    first, second = g(X), g(X)
    assert torch.equal(first, second)
    assert len(calls) == 2  # the warm-up, and the capture


@pytest.mark.parametrize("split_at", [(), "aten::index_copy_"])
def test_a_capture_runs_again_on_the_state_as_it_was(split_at: Any) -> None:
    """A state that counts, of which the last row is free: a second run on what the first one left would be beyond."""

    def write(state: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        state["rows"].index_copy_(0, state["n"], x)
        return {"n": state["n"] + 1, "rows": state["rows"]}, state["rows"].sum(0)

    graph = graphify(write, donate_argnames="state", split_at=split_at)
    state = {"n": torch.tensor([2]), "rows": torch.zeros(3, 2)}
    state, out = graph(state, torch.ones(1, 2))
    assert state["n"].tolist() == [3]
    assert out.tolist() == [1.0, 1.0]
    assert graph.graphs().graphs[0].operators == 4  # the write, the count, the sum, and the count's copy to its place
