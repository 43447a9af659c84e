"""Operators of torch's database inside `shard`: each rank's result is that of the operator on its
parts."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from refusal import refused
from torch import Tensor

import weft
from weft.errors import CaptureError, WeftError
from weft.proofs._strategies.sharded_operators import (
    TRANSFORMS,
    TWO,
    ShardedOperator,
    sharded_operators,
)
from weft.torchapi import private
from weft.torchapi.operator_database import operator_database
from weft.torchapi.private import pytree

WHOLE = weft.Replicate()
# Operators that have no derivative by one of their float arguments.
NOT_DERIVED = ("nn.functional.soft_margin_loss", "nn.functional.batch_norm")
# Operators that read what is not theirs or what nothing has written, whose shapes the ranks' parts
# do not keep, or of which torch lacks a derivative that a trace would have.
_UNSAFE = (
    "_segment_reduce",
    "as_strided",
    "batch_norm",
    "empty",
    "resize_",
    "linspace",
    "logspace",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def difference(drawn: ShardedOperator) -> str | None:
    """How the sharded operator differs from the plain one; None if it is refused, or if plain torch
    fails."""
    try:
        expected = drawn.expected()
    except Exception:
        return None
    try:
        result = drawn.sharded()
    except WeftError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    leaves = pytree.tree_leaves(result)
    other = pytree.tree_leaves(expected)
    return (
        None
        if len(leaves) == len(other) and all(map(_is_close, leaves, other))
        else f"{result}, not {expected}"
    )


def _is_close(a: Any, b: Any) -> bool:
    if not isinstance(b, Tensor):
        return bool(a == b or a != a)
    if a.layout is not torch.strided:
        a = a.to_dense()
        b = b.to_dense()
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return (
        bool(torch.allclose(a, b, 1e-4, 1e-5, equal_nan=True))
        if a.is_floating_point()
        else torch.equal(a, b)
    )


@given(sharded_operators())
@settings(max_examples=25, deadline=None)
def test_drawn_operators(drawn: ShardedOperator | None) -> None:
    if drawn is None or any(part in drawn.name for part in _UNSAFE) or _draws_random_numbers(drawn):
        return
    assert difference(drawn) is None, drawn


def _draws_random_numbers(drawn: ShardedOperator) -> bool:
    """Whether plain torch computes another result at a second call."""
    try:
        first, second = (pytree.tree_leaves(drawn.expected()) for _ in range(2))
    except Exception:
        return False
    return not all(map(_is_close, first, second))


@pytest.mark.parametrize("name", NOT_DERIVED)
def test_an_argument_without_a_derivative_is_not_differentiated(name: str) -> None:
    operators = sharded_operators([name])
    find(operators, lambda x: x is not None and x.transform == "vmap")  # it is drawn

    @given(operators)
    @settings(max_examples=30, deadline=None)
    def same(drawn: ShardedOperator | None) -> None:
        if drawn is not None and drawn.alike:
            assert difference(drawn) is None, drawn

    same()


def test_every_float_argument_differentiated_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "weft.transforms.shards.tracing.may_be_differentiated", private.is_functorch_wrapped_tensor
    )
    example = find(
        sharded_operators(NOT_DERIVED),
        lambda x: x is not None and x.alike and difference(x) is not None,
        settings=settings(max_examples=2000, database=None, phases=[Phase.generate]),
    )
    assert example is not None
    assert "not differentiable" in str(difference(example))


def test_a_dimension_of_one_element_may_have_any_stride() -> None:
    for stride in ((0, 0), (5, 3), (1, 1)):
        step = weft.shard(
            lambda x, stride=stride: x.as_strided((1, 1), stride) * 1, TWO, WHOLE, WHOLE
        )
        assert torch.equal(step(torch.ones(1)), torch.ones(1, 1))
    assert torch.equal(
        weft.shard(lambda x: x.expand(1, 1), TWO, WHOLE, WHOLE)(torch.tensor(2.0)),
        torch.full((1, 1), 2.0),
    )


def test_sizes_by_a_tensor_are_a_read_of_values() -> None:
    step = weft.shard(torch.tensor_split, TWO, WHOLE, WHOLE)
    problem = "rank 0 reads the values of a tensor: <any>"
    with refused(
        CaptureError, "weft.shard(tensor_split, ...)", problem, "torch.where, or a Python argument"
    ):
        step(torch.ones(5), torch.tensor([2, 3]))


def quantile_under_jvp() -> None:
    """A call in whose trace torch itself fails."""
    x = torch.ones(3, 2)
    torch.func.jvp(
        weft.shard(lambda y: torch.nanquantile(y, 0.5, dim=0), TWO, WHOLE, WHOLE), (x,), (x,)
    )


def keys() -> tuple[str, str]:
    """The state of the dispatcher in this thread."""
    return str(torch._C._dispatch_tls_local_include_set()), str(
        torch._C._dispatch_tls_local_exclude_set()
    )


def test_after_a_fault_of_torch_in_a_trace_the_next_trace_is_right() -> None:
    before = keys()
    with pytest.raises(
        CaptureError, match=r"a fault of torch in its trace|aten\.equal"
    ):  # the latter in torch 2.11
        quantile_under_jvp()
    assert keys() == before
    x = torch.randn(4)
    assert torch.equal(weft.shard(torch.sin, TWO, weft.Shard(0), weft.Shard(0))(x), x.sin())


def test_every_transform_is_drawn() -> None:
    for transform in TRANSFORMS:
        find(sharded_operators(["sin"]), lambda x, t=transform: x is not None and x.transform == t)
    names = {entry.name for entry in operator_database()}
    assert set(NOT_DERIVED) <= names
