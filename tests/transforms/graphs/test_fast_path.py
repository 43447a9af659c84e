"""The fast path of a graphified call, which calls like an earlier one take."""

import collections
import gc
import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from graphified import LAW, Node, Point, X, doubled, general_calls
from torch import Tensor

from weft.batches.batch import Batch
from weft.errors import DonatedError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import donate
from weft.values.trees import pytree

TREES: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: X.clone(),
    "a parameter": lambda: torch.nn.Parameter(X.clone(), requires_grad=False),
    "nested": lambda: {"a": [X + 1, (X + 2, {})], "b": None, 3: (), "c": [X.int()]},
    "attrs": lambda: Node(X + 1, {"n": Node(X + 2, [2.5, True, "s"], (1, 2.0))}, "tag"),
    "a named tuple": lambda: Point(X + 1, [X + 2]),
    "values": lambda: (1, 1.5, None, "text", torch.float32, X + 1),
    "0-dim and empty": lambda: [torch.tensor(2.0), torch.empty(0, 3)],
    "strided": lambda: torch.arange(8.0)[::2],
    "many dtypes": lambda: [X + 1, X.int(), X.double(), X.bool(), X.int() + 1, X + 2],
    "a batch": lambda: Batch.decode([1, 2, 3]),
}


@pytest.mark.parametrize("outputs", ["safe", "borrow"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("role", ["copied", "by reference", "donated"])
def test_a_second_call_is_fast_and_says_the_same(tree: str, role: str, outputs: Any) -> None:
    names = {
        "by reference": {"reference_argnames": "tree"},
        "donated": {"donate_argnames": "tree"},
    }.get(role, {})
    g: Graphified[..., Any] = graphify(doubled, outputs=outputs, **names)
    value = TREES[tree]()
    for turn in range(3):
        expected = doubled(value)
        with general_calls(g) as general:
            result = g(value)
        assert_equal(LAW, result, expected)
        if turn != 1:  # the second state may be of other types than the first
            assert len(general) == (turn == 0)
        if role == "donated":
            with pytest.raises(DonatedError):
                g(value)
            value = result[0]
        elif role == "copied":
            value = TREES[tree]()


def test_a_node_that_generated_code_does_not_know_is_right_all_the_same() -> None:
    g = graphify(doubled)
    for i in range(3):
        value = collections.OrderedDict(a=X + i, b=X)
        assert_equal(LAW, g(value), doubled(value))


@pytest.mark.parametrize("by_reference", ["", "a b"])
def test_one_tensor_in_two_places(by_reference: str) -> None:
    """One tensor passed twice, like tied weights, in each order of such calls and others."""
    g = graphify(lambda a, b: (a + b, a - b), reference_argnames=by_reference.split())
    values = [X.clone(), X + 1]
    for turn in range(2):
        for a, b in [
            *itertools.product(values, repeat=2),
            *itertools.product(values[::-1], repeat=2),
        ]:
            with general_calls(g) as general:
                assert_equal(LAW, g(a, b), (a + b, a - b))
            assert not (general and turn)


# Immutable arguments, recognised by identity
# --------------------------------------------------------------------------


@pytree
@attrs.frozen(eq=False)
class Weights:
    layers: tuple[Any, ...]
    scale: float
    head: Tensor


def make_weights(scale: float = 2.0) -> Weights:
    tied = X.clone()
    return Weights(((X + 1, None), (X + 2, tied)), scale, tied)


def weigh(params: Weights, x: Tensor) -> Tensor:
    (a, _), (b, c) = params.layers
    return (a * x + b * c) * params.scale + params.head


def test_the_same_weights_are_read_once_and_others_as_well() -> None:
    g = graphify(weigh)
    one = make_weights()
    other = make_weights()
    scaled = make_weights(3.0)
    for turn in range(3):
        for params in (one, one, other, scaled, one):
            with general_calls(g) as general:
                assert_equal(LAW, g(params, X), weigh(params, X))
            assert not (general and turn)
    assert g.cache_info().captures == 3


def test_a_weight_in_another_place_or_taken_is_seen() -> None:
    g = graphify(weigh)
    params = make_weights()
    for _ in range(2):
        assert_equal(LAW, g(params, X), weigh(params, X))
    params.layers[0][0].data = torch.full((4,), 7.0)
    assert_equal(LAW, g(params, X), weigh(params, X))
    assert g.cache_info().captures == 2
    params.layers[1][0].requires_grad_(True)
    assert g(params, X).requires_grad
    params.layers[1][0].requires_grad_(False)
    donate(params.head, to="somebody")
    with pytest.raises(DonatedError, match="somebody"):
        g(params, X)


def test_a_tensor_that_stands_elsewhere_too_is_read_with_the_rest() -> None:
    g = graphify(weigh)
    params = make_weights()
    for turn in range(3):
        with general_calls(g) as general:
            assert_equal(LAW, g(params, params.head), weigh(params, params.head))
            assert_equal(LAW, g(params, X), weigh(params, X))
        assert not (general and turn)


def test_weights_that_nobody_holds_are_not_kept() -> None:
    @graphify(backend="tape", reference_argnames="params")
    def outer(params: Weights, x: Tensor) -> Tensor:
        return x + 1

    params = make_weights()
    for _ in range(3):
        outer(params, X)
    readers = [
        reader for fast_paths in outer._cache.fast_paths.by_form.values() for reader in fast_paths
    ]
    caches = [
        v
        for r in readers
        for v in r.layout.read.__globals__.values()
        if type(v).__name__ == "SubtreeCache"
    ]
    assert [h._cached is not None for h in caches] == [True]
    del params
    gc.collect()
    assert [h._cached for h in caches] == [None]


FORMS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X,), {}),
    ((X, X + 1), {}),
    ((X, X + 1, X + 2), {}),
    ((X,), {"c": 3.0}),
    ((X,), {"b": X + 5}),
    ((X,), {"a": X + 7}),
    ((X,), {"z": X + 1, "a": X + 2}),
    ((X,), {"a": X + 2, "z": X + 1}),
    ((X,), {"c": 2.5, "b": X + 1}),
]


def test_calls_of_every_form_twice() -> None:
    default = torch.ones(4)

    def mixed(
        a: Tensor, /, b: Tensor = default, *rest: Tensor, c: float = 2.0, **more: Tensor
    ) -> Tensor:
        return (
            a
            + 10 * b
            + 100 * sum(rest, torch.zeros(4))
            + c * 1000
            + 5 * more.get("a", X)
            + more.get("z", X)
        )

    g = graphify(mixed)
    for args, kwargs in FORMS:
        g(*args, **kwargs)
    default.mul_(3)
    with general_calls(g) as general:
        for args, kwargs in FORMS:
            assert_equal(LAW, g(*args, **kwargs), mixed(*args, **kwargs))
    assert general == []


def test_cleared_it_captures_again() -> None:
    g = graphify(lambda x: x * 2)
    for _ in range(2):
        g(X)
    g.cache_clear()
    assert_equal(LAW, g(X), X * 2)
    assert g.cache_info().captures == 1
