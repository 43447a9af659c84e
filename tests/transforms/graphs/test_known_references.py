"""Calls with the same arguments by reference as an earlier one: these are not inspected again, and
results are the same."""

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from graphified import LAW, X
from hypothesis import given, strategies as st
from torch import Tensor

from weft.batches.descriptor import BatchDescriptor
from weft.errors import CacheMissError, CaptureError, DonatedError, StaleResultError, WeftError
from weft.proofs import assert_equal
from weft.transforms.graphs.calls import call as calls
from weft.transforms.graphs.calls.borrowing import check_borrowed
from weft.transforms.graphs.calls.fast_path import MAX_KNOWN, FastPath
from weft.transforms.graphs.graphified import Graphified, classes_held
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import donate
from weft.values.trees import axes, descriptor_field, pytree


@pytree
@attrs.frozen(eq=False)
class Weights:
    layers: tuple[Tensor, ...]
    scale: float


@pytree
@attrs.frozen(eq=False)
class Rows:
    descriptor: BatchDescriptor = attrs.field(metadata=descriptor_field())
    x: Any = attrs.field(metadata=axes("num_tokens"))


def rows(size: int) -> Rows:
    return Rows(BatchDescriptor(size, size), torch.arange(4.0 * size).reshape(size, 4))


def step(params: Weights, state: dict[str, Tensor], batch: Rows, how: Any = 1) -> Any:
    out = batch.x * params.layers[0] + params.layers[1] * params.scale * how + state["sum"]
    return {"sum": state["sum"] + 1, "n": state["n"] + 1}, Rows(batch.descriptor, out)


def make_step(**options: Any) -> Graphified[..., Any]:
    sizes = [BatchDescriptor(n, n) for n in (8, 4)]
    return graphify(step, ladder=sizes, donate_argnames="state", static_argnames="how", **options)


def make_state() -> dict[str, Tensor]:
    return {"sum": torch.zeros(4), "n": torch.zeros(())}


def make_weights(by: float = 0.0) -> Weights:
    return Weights((X + 1 + by, X + 2), 2.0)


def flattened(g: Graphified[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """The result of a call, and the arguments that were flattened and inspected."""
    inspected: list[str] = []
    whole = calls.leaf_key

    def leaf_key(leaf: Any, shape: Any, by_reference: bool) -> Any:
        inspected.append("by reference" if by_reference else "copied")
        return whole(leaf, shape, by_reference)

    with mock.patch.object(calls, "leaf_key", leaf_key):
        return g(*args), inspected


def test_a_new_size_asks_nothing_of_what_is_known() -> None:
    g = make_step()
    params = make_weights()
    state = make_state()
    expected_state = make_state()
    for turn, size in enumerate((8, 7, 3, 6, 3, 1)):
        expected_state, expected = step(params, expected_state, rows(size))
        (state, out), inspected = flattened(g, params, state, rows(size))
        assert_equal(LAW, (state, out), (expected_state, expected))
        assert ("by reference" in inspected) == (turn == 0)
        assert ("copied" in inspected) == (turn != 4)
    assert g.cache_info().captures == 2


def test_it_is_asked_again_of_other_weights_and_of_another_state() -> None:
    g = make_step()
    weights = [make_weights(), make_weights(5.0)]
    states = [make_state(), make_state()]
    expected_states = [make_state(), make_state()]
    for size in (8, 7, 6, 5):
        for world in (0, 1, 1, 0):
            expected_states[world], expected = step(
                weights[world], expected_states[world], rows(size)
            )
            states[world], out = g(weights[world], states[world], rows(size))
            assert_equal(LAW, (states[world], out), (expected_states[world], expected))
    assert g.cache_info().captures == 2


def test_what_differs_is_named_as_ever() -> None:
    g = make_step()
    params = make_weights()
    state = make_state()
    state, _ = g(params, state, rows(8))
    g.freeze()
    with pytest.raises(CacheMissError, match=r"batch\.x.*dtype|dtype.*batch\.x"):
        g(params, state, Rows(BatchDescriptor(7, 7), rows(7).x.int()))
    assert g(params, state, rows(7))[1].x.shape == (7, 4)


class Odd(Tensor):
    pass


def test_what_is_copied_is_asked_all_that_it_was() -> None:
    g = graphify(lambda params, x: x @ params.layers[0], reference_argnames="params")
    params = make_weights()
    g(params, torch.ones(2, 4))
    with pytest.raises(WeftError, match=r"x is .*subclass of Tensor"):
        g(params, torch.ones(3, 4).as_subclass(Odd))
    assert g(params, torch.ones(3, 4, requires_grad=True)).requires_grad
    assert g(params, torch.ones(5, 4).to_sparse()).tolist() == [10.0] * 5
    assert g.cache_info().captures == 1


def test_a_donated_tensor_that_is_copied_too_is_refused() -> None:
    g = graphify(lambda state, x: state + x.sum(), donate_argnames="state")
    state = g(torch.zeros(4), torch.ones(2))
    with pytest.raises(DonatedError, match="x is a tensor that the same call donates"):
        g(state, state)
    assert g(state, torch.ones(3)).tolist() == [5.0] * 4


def test_what_was_lent_and_overwritten_is_refused_all_the_same() -> None:
    lent = graphify(lambda x: x * 2, outputs="borrow")
    g = graphify(lambda params, x: params * x.sum(), reference_argnames="params")
    params = torch.ones(4)
    with check_borrowed():
        stale = lent(torch.ones(2))
        lent(torch.zeros(2))
    g(params, torch.ones(3))
    with pytest.raises(StaleResultError):
        g(params, stale)


@pytree
@attrs.frozen(eq=False)
class Options:
    value: Any


def test_a_static_argument_that_came_to_hold_a_tensor_is_refused() -> None:
    g = graphify(
        lambda params, x, options: params * x.sum(),
        reference_argnames="params",
        static_argnames="options",
    )
    params, options = torch.ones(4), Options(1)
    g(params, torch.ones(2), options)
    object.__setattr__(options, "value", torch.ones(1))
    with pytest.raises(CaptureError, match="options, a static argument, holds a tensor"):
        g(params, torch.ones(3), options)


def test_neither_weights_nor_a_state_are_kept_alive() -> None:
    g = make_step()
    params = make_weights()
    state = make_state()
    for size in (8, 7, 6):
        state, _ = g(params, state, rows(size))
    paths = [path for group in g._cache.fast_paths.by_form.values() for path in group]
    guarded_leaves = [
        guarded for path in paths for group in path.cached_references.values() for guarded in group
    ]
    assert guarded_leaves
    refs = [weakref.ref(leaf) for leaf in (*params.layers, *state.values())]
    del params, state
    gc.collect()
    assert [leaf() for leaf in refs] == [None] * 4


def test_more_than_are_kept_are_right_all_the_same() -> None:
    g = graphify(lambda params, x: params * x.sum(), reference_argnames="params")
    several = [torch.full((4,), float(i)) for i in range(MAX_KNOWN + 5)]
    for size in (2, 3):
        for params in several:
            with warnings.catch_warnings(
                action="ignore", category=RuntimeWarning
            ):  # one capture each
                result = g(params, torch.ones(size))
            assert_equal(LAW, result, params * size)


# Whatever happens to the arguments in between, results are as without the memory
# --------------------------------------


@attrs.define(eq=False)
class World:
    """Arguments, and changes to them between two calls."""

    params: Any = attrs.field(factory=lambda: [make_weights(), make_weights(5.0)])
    states: Any = attrs.field(factory=lambda: [make_state(), make_state()])
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def change(self, what: str) -> None:
        weight = self.params[0].layers[0]
        match what:
            case "moved":
                weight.data = weight.data + 1
            case "of another type":
                weight.data = weight.data.double()
            case "requires grad":
                weight.requires_grad_(not weight.requires_grad)
            case "taken":
                with suppress(DonatedError):
                    donate(weight, to="somebody")
            case "made again":
                self.params[0] = Weights(self.params[0].layers, 2.0)
            case "another scale":
                self.params[0] = Weights(self.params[0].layers, 3.0)
            case "tied":
                self.params[0] = Weights((self.params[0].layers[1],) * 2, 2.0)
            case "no grad":
                self.around = torch.no_grad
            case "inference mode":
                self.around = torch.inference_mode
            case "nothing around":
                self.around = nullcontext

    def call(self, g: Graphified[..., Any], world: int, size: int, kind: str, how: Any) -> Any:
        x = rows(size).x
        odd = {
            "strided": x.repeat(1, 2)[:, ::2],
            "integers": x.int(),
            "sparse": x.to_sparse(),
            "none": None,
        }
        odd |= {
            "requires grad": x.clone().requires_grad_(),
            "a weight": self.params[world].layers[0][None],
        }
        batch = Rows(BatchDescriptor(size, size), odd.get(kind, x))
        try:
            with self.around():
                self.states[world], out = g(self.params[world], self.states[world], batch, how)
            return out, self.states[world]
        except Exception as error:
            return f"{type(error).__name__}: {error}"


CHANGES = (
    *("moved", "of another type", "requires grad", "taken", "made again", "another scale", "tied"),
    *("no grad", "inference mode", "nothing around"),
)
KINDS = (
    "plain",
    "plain",
    "plain",
    "strided",
    "integers",
    "sparse",
    "requires grad",
    "a weight",
    "none",
)
EVENTS = st.one_of(
    st.sampled_from(CHANGES),
    st.tuples(
        st.integers(0, 1),
        st.integers(1, 9),
        st.sampled_from(KINDS),
        st.sampled_from((1, 1, 1, 1.0, True, 2)),
    ),
)


@given(st.lists(EVENTS, min_size=2, max_size=12))
def test_it_is_as_if_nothing_were_known(events: Sequence[Any]) -> None:
    said = []
    for recall in (FastPath.find_known, lambda *args: None):
        world = World()
        g = make_step()
        results = []
        with mock.patch.object(FastPath, "find_known", recall):
            for event in events:
                if isinstance(event, str):
                    world.change(event)
                else:
                    results.append(world.call(g, *event))
        said.append((results, g.cache_info(), classes_held(g)))
    for first, second in zip(said[0][0], said[1][0], strict=True):
        if isinstance(first, str) or isinstance(second, str):
            assert first == second
        else:
            assert_equal("recalled or not", first, second)
    assert said[0][1:] == said[1][1:]
