"""The comparison of values: the differences that it finds, and its texts word for word."""

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from weft.batches.batch import Batch
from weft.proofs.checks.difference import Difference, LawViolation, assert_equal, find_difference
from weft.proofs.checks.elements import Tolerance, ulps
from weft.proofs.strategies import tensors

NAN, INF = float("nan"), float("inf")
Pair = namedtuple("Pair", "left right")  # the kind that people have
FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
EIGHTH = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def one(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32).to(dtype)


SAID: dict[str, tuple[Any, Any, str]] = {
    "a tuple and a list": ((1, 2), [1, 2], ": a tuple of 2 against a list of 2"),
    "lengths": ({"a": [1]}, {"a": [1, 2]}, "['a']: a list of 1 against a list of 2"),
    "keys": ({"a": 1}, {"b": 1}, ": a dict of 'a' against a dict of 'b'"),
    "keys that are equal": ({1: 0}, {True: 0}, ": a dict of 1 against a dict of True"),
    "kinds of dicts": ({"a": 1}, OrderedDict(a=1), ": a dict of 'a' against an OrderedDict of 'a'"),
    "inside a defaultdict": (
        defaultdict(int, {"a": (1,)}),
        defaultdict(int, {"a": 1}),
        "['a']: a tuple of 1 against a leaf",
    ),
    "inside a namedtuple": (Pair(1, (2,)), Pair(1, 2), ".right: a tuple of 1 against a leaf"),
    "a static field": (
        Batch.decode([0]),
        attrs.evolve(Batch.decode([0]), descriptor=Batch.ragged([0], [[1]]).descriptor),
        (
            ": a Batch(descriptor=BatchDescriptor(num_tokens=1, num_reqs=1, query_len=1,"
            " num_active_loras=0)) against a Batch(descriptor=BatchDescriptor(num_tokens=1,"
            " num_reqs=1, query_len=None, num_active_loras=0))"
        ),
    ),
    "a number and a bool": ([1], [True], "[0]: 1 against True"),
    "zeros of Python": ([0.0], [-0.0], "[0]: 0.0 against -0.0"),
    "a tensor and a number": ([torch.tensor(1)], [1], "[0]: int64 [] on cpu against 1"),
    "dtypes": (
        torch.zeros(2),
        torch.zeros(2).double(),
        ": float32 [2] on cpu against float64 [2] on cpu",
    ),
    "shapes": (
        torch.zeros(2),
        torch.zeros(2, 1),
        ": float32 [2] on cpu against float32 [2, 1] on cpu",
    ),
    "devices": (
        torch.zeros(2),
        torch.zeros(2, device="meta"),
        ": float32 [2] on cpu against float32 [2] on meta",
    ),
    "zeros": (torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]), "[1]: 0.0 against -0.0"),
    "NaN on one side": (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), "[1]: nan against 2.0"),
    "bools": (torch.tensor([True]), torch.tensor([False]), "[0]: True against False"),
    "whole numbers": (
        torch.tensor([2**60]),
        torch.tensor([2**60 + 1]),
        f"[0]: {2**60} against {2**60 + 1}",
    ),
    "unsigned": (
        torch.tensor([3], dtype=torch.uint16),
        torch.tensor([4], dtype=torch.uint16),
        "[0]: 3 against 4",
    ),
    "complex": (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), "[0]: (1+2j) against (1-2j)"),
    "a conjugate": (
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]),
        "[0]: (1-2j) against (1+2j)",
    ),
    "arrays": (np.zeros(2), np.array([0.0, 1.0]), "[1]: 0.0 against 1.0"),
    "fp8": (one([1.0, 2.0], FLOATS[4]), one([1.0, 2.25], FLOATS[4]), "[1]: 2.0 against 2.25"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_is_told_apart(case: str) -> None:
    actual, expected, said = SAID[case]
    difference = find_difference(actual, expected)
    assert isinstance(difference, Difference)
    assert str(difference) == said
    for value in (actual, expected):
        assert find_difference(value, value) is None


@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHTH])
def test_nan_equals_nan_unless_told_otherwise(dtype: torch.dtype) -> None:
    x = one([1.0, NAN], dtype)
    assert find_difference(x, x.clone()) is None
    for tolerance in (Tolerance(equal_nan=False), Tolerance(0.1, 0.1, equal_nan=False)):
        assert str(find_difference(x, x.clone(), tolerance)) == "[1]: nan against nan"
        assert str(find_difference(NAN, NAN, tolerance)) == ": nan against nan"
    z = torch.tensor([complex(NAN, 1.0)])
    assert (
        str(find_difference(z, torch.tensor([complex(NAN, 2.0)])))
        == "[0]: (nan+1j) against (nan+2j)"
    )


def test_a_tolerance_is_of_floating_point_alone() -> None:
    loose = Tolerance(atol=1.0)
    actual = (torch.ones(2), 1.0, torch.tensor([1j]))
    near = (torch.zeros(2), 0.5, torch.tensor([0.5j]))
    assert find_difference(actual, near, loose) is None
    assert str(find_difference(torch.tensor([1]), torch.tensor([2]), loose)) == "[0]: 1 against 2"
    assert (
        str(find_difference(one([1.0], FLOATS[4]), one([3.0], FLOATS[4]), loose))
        == "[0]: 1.0 against 3.0"
    )
    assert str(find_difference(1.0, 2.5, loose)) == ": 1.0 against 2.5"


@pytest.mark.parametrize("dtype", FLOATS)
def test_neighbours_are_one_ulp_apart_and_zeros_none(dtype: torch.dtype) -> None:
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for value in (1.0, -1.5, 0.0, 3.0):
        x = one(value, dtype)
        assert ulps(x, (x.view(ints) + 1).view(dtype)) == 1
        assert ulps(x, x) == 0
    assert ulps(one(0.0, dtype), one(-0.0, dtype)) == 0
    smallest = torch.ones((), dtype=ints).view(dtype)
    assert ulps(smallest, (-smallest.float()).to(dtype) if dtype.itemsize == 1 else -smallest) == 2
    assert ulps(one(NAN, dtype), one(1.0, dtype)) is None


def test_ulps_across_infinity_and_of_other_types() -> None:
    largest = torch.tensor(torch.finfo(torch.float64).max, dtype=torch.float64)
    assert ulps(largest, torch.tensor(INF, dtype=torch.float64)) == 1
    assert ulps(-largest, largest) == 2 * 0x7FEFFFFFFFFFFFFF
    one_up = torch.tensor(1.0).nextafter(torch.tensor(2.0))
    assert ulps(torch.complex(one_up, torch.tensor(2.0)), torch.tensor(1 + 2j)) == 1
    assert ulps(torch.tensor(3), torch.tensor(4)) is None
    assert ulps(one(1.0, torch.float8_e8m0fnu), one(4.0, torch.float8_e8m0fnu)) == 2


@given(tensors(3), tensors(3))
def test_a_difference_is_found_if_and_only_if_an_element_differs(
    a: torch.Tensor, b: torch.Tensor
) -> None:
    difference = find_difference([a], [b])
    same = a.view(torch.int32) == b.view(torch.int32)
    assert (difference is None) == bool(same.all())
    if difference is not None and difference.first is not None and difference.worst is not None:
        assert difference.first.index == (int(same.long().argmin()),)
        assert difference.count == int((~same).sum())
        assert (
            abs(difference.worst.actual - difference.worst.expected) == (a - b).abs().max().item()
        )


TEXT = """\
at:       [0], element [0, 1] of float32 [2, 2] on cpu
graph:    1.0
function: 1.5
apart:    0.5, 4,194,304 ULPs
differ:   2 of 4 elements; most at [1, 0]: inf and 3.0, apart inf, 1,061,158,912 ULPs
leaves:   2 of 3 differ; this is the first"""


def test_all_that_is_said() -> None:
    actual = (torch.tensor([[0.0, 1.0], [INF, 0.0]]), 1, 2)
    expected = (torch.tensor([[0.0, 1.5], [3.0, 0.0]]), 1, 3)
    difference = find_difference(actual, expected)
    assert difference is not None
    assert difference.text("graph", "function") == TEXT
    zeros = find_difference(torch.tensor(0.0), torch.tensor(-0.0))
    assert zeros is not None
    assert (
        zeros.text()
        == "at:       the result, float32 [] on cpu\nseen:     0.0\nexpected: -0.0\napart:    0"
        " ULPs: zeros of either sign"
    )


def test_a_law_says_it_in_one_line() -> None:
    with pytest.raises(LawViolation) as caught:
        assert_equal("L0 a law", {"h": torch.tensor([1.0])}, {"h": torch.tensor([1.0001])})
    assert str(caught.value) == "L0 a law: ['h'][0]: 1.0 against 1.000100016593933"
    assert_equal("L0 a law", {"h": torch.tensor([1.0])}, {"h": torch.tensor([1.0001])}, exact=False)


@given(
    st.recursive(
        st.integers(0, 1),
        lambda inner: st.lists(inner, max_size=2) | st.tuples(inner),
        max_leaves=4,
    )
)
def test_trees_are_equal_to_themselves(tree: Any) -> None:
    assert find_difference(tree, tree) is None
    assert find_difference([tree], (tree,)) is not None
