"""The memo of graphify: the calls that share a graph, and the reasons given for a miss."""

import math
from typing import Any

import attrs
import pytest
import torch
from graphified import LAW, X, agree, counts, twice
from torch import Tensor

from weft.errors import CacheMissError, CaptureError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.values.trees import pytree, static

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
    instead = (
        "capture this signature before freeze(), or call it with arguments like the captured ones"
    )
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
        return (
            a
            + 10 * b
            + 100 * sum(rest, torch.zeros(4))
            + c * 1000
            + 5 * more.get("a", X)
            + more.get("z", X)
        )

    g = graphify(mixed)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X,), {}),
        ((X, X + 1), {}),
        ((X, X + 1, X + 2), {}),
        ((X, X + 1, X + 2, X + 3), {"c": 3.0}),
        ((X,), {"b": X + 5}),
        ((X,), {"a": X + 7}),
        ((X + 1,), {"z": X, "a": X + 2}),
        ((X + 1,), {"a": X + 2, "z": X}),
    ]
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
    g = agree(
        lambda x, none, scalar: (x * 2, x, x.sum(), none, scalar),
        (x, None, 3),
        (x.logical_not() * 1, None, 3),
    )
    agree(lambda x: (x + 1).clone(), (x,), (x * 0,))
    assert g.cache_info().captures in (1, 2)


def test_a_replay_sees_nothing_of_the_values_at_capture() -> None:
    g = graphify(lambda x: (x.relu(), x.argmax(), torch.where(x > 1, x, -x), x.sort().values))
    g(X)
    for x in (-X, X.flip(0), torch.full((4,), math.nan), torch.full((4,), math.inf)):
        assert_equal(LAW, g(x), (x.relu(), x.argmax(), torch.where(x > 1, x, -x), x.sort().values))
    assert counts(g) == (1, 5, 0)


def test_minus_zero_is_not_zero() -> None:
    g = agree(lambda x, y: torch.copysign(x, torch.full_like(x, y)), (X + 1, 0.0), (X + 1, -0.0))
    assert g.cache_info().captures == 2


def test_nan_is_one_value() -> None:
    g = graphify(lambda x, fill: torch.where(x > 1, x, fill))
    for _ in range(3):
        g(X, float("nan"))
    assert counts(g) == (1, 3, 0)


@pytest.mark.parametrize(("first", "second"), [(2, 2.0), (1, True), ((1, 2), (1.0, 2))])
def test_static_values_that_are_equal_but_not_alike_are_two_signatures(
    first: Any, second: Any
) -> None:
    x = torch.arange(3)

    def fn(x: Tensor, k: Any) -> Tensor:
        return x * (k[0] if isinstance(k, tuple) else k)

    g = graphify(fn, static_argnames=("k",))
    for k in (first, second):
        assert_equal(LAW, g(x, k), fn(x, k))
    assert g.cache_info().captures == 2


@pytree
@attrs.frozen(eq=False)
class Tagged:
    x: Tensor
    tag: Any = attrs.field(metadata=static())


def test_static_fields_that_are_equal_but_not_alike_are_two_signatures() -> None:
    g = agree(lambda v: v.x * v.tag, (Tagged(torch.arange(3), 1),), (Tagged(torch.arange(3), 1.0),))
    assert g.cache_info().captures == 2


def test_static_fields_are_part_of_the_key() -> None:
    g = agree(lambda v: v.x * v.tag, (Tagged(X, 1),), (Tagged(X, 2),), (Tagged(X + 1, 1),))
    assert g.cache_info().captures == 2


UNHASHABLE = "not a tensor and cannot be hashed (unhashable type: 'set')"


@pytest.mark.parametrize("method", ["__call__", "explain", "capture"])
def test_what_cannot_be_hashed_is_named(method: str) -> None:
    g = graphify(lambda x, y: (x, y))
    with pytest.raises(CaptureError) as error:
        getattr(g, method)(X, {"deep": {1, 2}})
    assert error.value.problem == f"y['deep'] is {UNHASHABLE}"
    assert error.value.instead == "pass a tensor, or a hashable value (a tuple for a list)"


def test_a_static_argument_that_cannot_be_hashed_is_named() -> None:
    with pytest.raises(CaptureError) as error:
        graphify(twice, static_argnames=("k",))(X, {1})
    assert error.value.problem == f"k is {UNHASHABLE}"


def test_another_params_tensor_is_a_miss_that_names_it() -> None:
    g = graphify(lambda params, x: params["w"][0] * x)
    params = {"w": [torch.ones(4)]}
    g(params, X)
    assert "captures: " in str(g.explain({"w": [torch.ones(4)]}, X))
    g.freeze()
    with pytest.raises(CacheMissError) as error:
        g({"w": [torch.ones(4)]}, X)
    assert (
        "params['w'][0]: another tensor than the captured one (captured by reference)"
        in error.value.problem
    )


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
    g(table, X, X + 2)
    g(table.mul_(2), X + 1, X)  # params are copied now
    g(table.clone(), X, X + 2)
    assert counts(g) == (2, 3, 0)


def test_params_keep_alive_what_a_graph_reads() -> None:
    g = graphify(lambda params, x: params * x)
    g(torch.full((4,), 3.0), X)
    for _ in range(6):  # a freed address would soon be reused
        params = torch.full((4,), 5.0)
        assert_equal(LAW, g(params, X), 5 * X)
        del params


@pytest.mark.parametrize("argument", ["donate_argnames", "static_argnames", "reference_argnames"])
def test_names_that_are_no_arguments_are_refused(argument: str) -> None:
    with pytest.raises(CaptureError) as error:
        graphify(twice, **{argument: ("parmas",)})
    assert error.value.call == "graphify(twice, ...)"
    assert "'parmas', which is not one of its arguments" in error.value.problem
    assert error.value.instead == "one of x, k"
