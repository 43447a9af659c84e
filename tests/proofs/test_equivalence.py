"""`assert_equivalent`: planted differences are found, shrunk, and shown word for word; equal
functions pass."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor

import weft
from weft.batches.batch import Batch
from weft.errors import CheckError
from weft.proofs.checks.equivalence import Counterexample, assert_equivalent
from weft.proofs.checks.search import NOT_AGAIN
from weft.proofs.strategies import batches, tensors


def clipped(x: Tensor) -> dict[str, Tensor]:
    return {"x": x.clamp(max=2.0), "n": (x > 0).sum()}


def whole(x: Tensor) -> dict[str, Tensor]:
    return {"x": x.clone(), "n": (x > 0).sum()}


def refusing(x: Tensor) -> Tensor:
    if x.sum() > 1:
        raise ValueError("too much")
    return x


def counterexample(
    f: Callable[..., Any], g: Callable[..., Any], drawn: Any, **options: Any
) -> Counterexample:
    with pytest.raises(Counterexample) as caught:
        assert_equivalent(f, g, drawn, **options)
    assert not getattr(caught.value, "__notes__", [])
    return caught.value


CLIPPED = """\
clipped is not whole, bitwise
  at:      ['x'], element [0] of float32 [1] on cpu
  clipped: 2.0
  whole:   2.25
  apart:   0.25, 1,048,576 ULPs
  leaves:  1 of 2 differ; this is the first
to see it again:
    import torch
    import weft.proofs
    args = (torch.tensor([2.25]),)
    weft.proofs.assert_equivalent(clipped, whole, args=args)"""


def test_a_planted_difference_is_made_small_and_said() -> None:
    error = counterexample(clipped, whole, (tensors(st.integers(0, 5)),))
    assert str(error) == CLIPPED


def test_the_code_raises_it_again() -> None:
    error = counterexample(clipped, whole, {"x": tensors(st.integers(0, 5), 2)}, atol=0.1)
    with pytest.raises(Counterexample) as again:
        exec(error.code(), {"clipped": clipped, "whole": whole})
    assert str(again.value) == str(error)
    assert "args=args, atol=0.1)" in error.code()


def test_inside_a_hypothesis_test_it_shrinks_too() -> None:
    @given(tensors(st.integers(0, 5)))
    def test(x: Tensor) -> None:
        assert_equivalent(clipped, whole, args=(x,))

    with pytest.raises(Counterexample) as caught:
        test()
    assert str(caught.value) == CLIPPED


@given(st.tuples(tensors(2), st.integers(0, 3)))
def test_equal_functions_pass(arguments: tuple[Tensor, int]) -> None:
    assert_equivalent(lambda x, n: x * n, lambda x, n: n * x, args=arguments)


def test_a_batch_is_shown_as_code() -> None:
    def ids(batch: Batch) -> Tensor:
        return batch.input_ids.clamp(max=6)

    error = counterexample(ids, lambda batch: batch.input_ids, (batches(),))
    namespace: dict[str, Any] = {}
    exec(error.code().rpartition("\n")[0], namespace)
    (batch,) = namespace["args"]
    assert isinstance(batch, Batch)
    assert batch.input_ids.max() == 7
    assert "descriptor=weft.BatchDescriptor(num_tokens=" in error.code()


def test_each_gets_arguments_of_its_own() -> None:
    def overwrites(x: Tensor) -> Tensor:
        return x.mul_(2)

    x = torch.ones(2)
    assert_equivalent(overwrites, overwrites, args=(x,))
    assert_equivalent(weft.donates("x")(overwrites), lambda x: x * 2, args={"x": x})
    assert x.tolist() == [1.0, 1.0]


def test_exceptions_of_one_function() -> None:
    error = counterexample(refusing, lambda x: x, (tensors(1),))
    assert (
        error.text
        == "refusing is not g, bitwise\n  refusing: raises ValueError: too much\n  g:       "
        " returns"
    )
    assert isinstance(error.__cause__, ValueError)
    assert counterexample(lambda x: x, refusing, (torch.ones(2),)).text.endswith(
        "refusing: raises ValueError: too much"
    )


def test_exceptions_of_both() -> None:
    def other(x: Tensor) -> Tensor:
        if x.sum() > 1:
            raise KeyError("too much")
        return x

    with pytest.raises(ValueError, match="too much") as caught:
        assert_equivalent(refusing, refusing, (tensors(1),))
    (note,) = caught.value.__notes__
    assert note == "Both raised this for\n    import torch\n    args = (torch.tensor([1.25]),)"
    with pytest.raises(ValueError, match="too much") as caught:
        assert_equivalent(refusing, other, (torch.full((1,), 3.0),))
    assert "Both raised this for" in caught.value.__notes__[0]
    assert_equivalent(refusing, refusing, (tensors(1),), raises=ValueError)
    error = counterexample(refusing, other, (tensors(1),), raises=(ValueError, KeyError))
    assert "other:    raises KeyError: 'too much'" in error.text
    assert error.code().endswith("args=args, raises=(ValueError, KeyError,))")


def test_assumptions_are_left_to_hypothesis() -> None:
    def assuming(x: Tensor) -> Tensor:
        assume(bool((x < 2).all()))
        return x.clamp(max=2.0)

    assert_equivalent(assuming, lambda x: x, args=(tensors(2),))


def test_what_does_not_happen_again_is_said() -> None:
    calls = []

    def impure(x: Tensor) -> Tensor:
        calls.append(x)
        return x + (len(calls) == 7)

    with pytest.raises(Counterexample) as caught:
        assert_equivalent(impure, lambda x: x, args=(tensors(1),))
    assert caught.value.__notes__ == [NOT_AGAIN]


def test_structures_and_kinds() -> None:
    assert "seen" not in counterexample(lambda x: (x, x), lambda x: [x, x], (torch.ones(1),)).text
    text = counterexample(lambda x: (x, x), lambda x: [x, x], (torch.ones(1),)).text
    assert text == "f is not g, bitwise\n  at: the result\n  f:  a tuple of 2\n  g:  a list of 2"
    text = counterexample(lambda x: x.double(), lambda x: x, (torch.ones(1),)).text
    assert "f:  float64 [1] on cpu\n  g:  float32 [1] on cpu" in text


@pytest.mark.parametrize(
    ("drawn", "problem"),
    [
        (tensors(2), "args drew a Tensor"),
        (torch.ones(2), "args is a Tensor"),
        ([torch.ones(2)], "args is a list"),
        ({0: torch.ones(2)}, "args is a dict"),
    ],
    ids=["a strategy of one", "a tensor", "a list", "a dict without names"],
)
def test_what_is_no_arguments(drawn: Any, problem: str) -> None:
    with pytest.raises(CheckError) as caught:
        assert_equivalent(clipped, whole, args=drawn)
    assert str(caught.value).splitlines()[:2] == [
        "assert_equivalent(clipped, whole, args=...)",
        f"  saw: {problem}",
    ]
    assert "instead: args=(x, y), or args={'x': x, 'y': y}" in str(caught.value)


def test_large_arguments_are_saved() -> None:
    x = torch.randn(40, 40)
    error = counterexample(lambda x: x, lambda x: x + 1, {"x": x})
    namespace: dict[str, Any] = {}
    exec(error.code().rpartition("\n")[0], namespace)
    assert torch.equal(namespace["args"]["x"], x)
    assert error.code() is error.code()  # saved once


def test_two_functions_of_one_name_are_f_and_g_in_the_code() -> None:
    """Two functions of one name, as `functools.wraps` makes them: code that compared `step` with
    itself would pass."""

    @functools.wraps(torch.exp)
    def wrapped(x: Tensor) -> Tensor:
        return x.exp() + 1

    with pytest.raises(Counterexample, match=r"^f \(exp\) is not g \(exp\), bitwise") as error:
        assert_equivalent(wrapped, torch.exp, (torch.zeros(1),))
    assert error.value.code().endswith("weft.proofs.assert_equivalent(f, g, args=args)")
