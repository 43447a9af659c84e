"""Helpers for the tests of graphify: its law, a function to graphify, and counts of runs."""

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphified import Graphified
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone
from weft.values.trees import pytree, static

LAW = "graphify changes nothing"
X = torch.arange(4.0)


def twice(x: Any, k: Any = 1) -> Any:
    """Doubles each tensor of a value, in the same structure."""
    return torch.utils._pytree.tree_map(lambda t: t * 2 if isinstance(t, Tensor) else t, x), k


def counts(g: Graphified[Any, Any]) -> tuple[int, int, int]:
    info = g.cache_info()
    return info.captures, info.replays, info.eager


def captures(g: Graphified[..., Any]) -> int:
    return g.cache_info().captures


def agree(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> Graphified[Any, Any]:
    """Each call of the graphified function gives the function's results, which later calls do not
    change."""
    g = graphify(fn)
    kept = []
    for args in calls:
        result = g(*args)
        expected = fn(*args)
        assert_equal(LAW, result, expected)
        kept.append((result, clone(expected)))
    for result, expected in kept:
        assert_equal("a result never changes", result, expected)
    return g


def refusal(fn: Callable[..., Any], *args: Any) -> str:
    """The text of the error that a capture of `fn` raises; the random generator's state must be
    unchanged."""
    before = torch.get_rng_state()
    with pytest.raises(CaptureError) as caught:
        graphify(fn)(*args)
    assert torch.equal(before, torch.get_rng_state())
    return str(caught.value)


@contextmanager
def general_calls(g: Graphified[..., Any]) -> Iterator[list[Any]]:
    """The calls that took the general path inside the context."""
    calls: list[Any] = []
    general = g._call

    def counted(args: Any, kwargs: Any, *rest: Any) -> Any:
        calls.append((args, kwargs))
        return general(args, kwargs, *rest)

    with mock.patch.object(g, "_call", counted):
        yield calls


@pytree
@attrs.frozen(eq=False)
class Node:
    x: Tensor
    rest: Any
    tag: Any = attrs.field(default=1, metadata=static())


Point = collections.namedtuple("Point", "a b")


def doubled(tree: Any, by: Any = 2) -> Any:
    """A result with the argument's structure."""
    return torch.utils._pytree.tree_map(lambda t: t * by if isinstance(t, Tensor) else t, tree), by
