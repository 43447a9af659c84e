"""Calls of many kinds of one function all take the fast path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphified import LAW, general_calls
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft import graphify
from weft.proofs import assert_equal


class Doubling(TorchFunctionMode):
    """A mode that changes what `torch.add` returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.add else result


def fast(calls: int, call: Callable[[int], Any], g: Any) -> None:
    """The second round of these calls takes the fast path alone."""
    for index in range(calls):
        call(index)
    with general_calls(g) as general:
        for index in range(calls):
            call(index)
    assert not general


def test_function_modes() -> None:
    g, x, doubling = graphify(lambda x: torch.add(x, 1)), torch.ones(3), Doubling()

    def call(index: int) -> None:
        if index == 0:
            with torch.device("cpu"):
                assert_equal(LAW, g(x), x + 1)
        elif index == 1:
            with doubling:
                assert_equal(LAW, g(x), (x + 1) * 2)
        elif index == 2:
            with doubling, torch.device("cpu"):
                assert_equal(LAW, g(x), (x + 1) * 2)
        else:
            assert_equal(LAW, g(x), x + 1)

    fast(4, call, g)


def test_layouts_of_one_shape() -> None:
    g = graphify(lambda x: x + 1)
    several = [torch.empty_strided((4, 4), (4 + i, 1)).fill_(i) for i in range(20)]
    for _ in range(2):  # the first layouts are forgotten once, when strides join the key
        for x in several:
            assert_equal(LAW, g(x), x + 1)
    fast(20, lambda i: assert_equal(LAW, g(several[i]), several[i] + 1), g)
    assert g.cache_info().captures == 20


@pytest.mark.parametrize("many", [64])
def test_structures(many: int) -> None:
    x = torch.ones(3)
    trees = [tuple({"a": x} if i >> bit & 1 else [x] for bit in range(6)) for i in range(many)]

    def first(tree: Any) -> Tensor:
        leaves = tree[0]["a"] if isinstance(tree[0], dict) else tree[0][0]
        return leaves + len([part for part in tree if isinstance(part, dict)])

    g = graphify(first)
    fast(many, lambda i: assert_equal(LAW, g(trees[i]), first(trees[i])), g)
