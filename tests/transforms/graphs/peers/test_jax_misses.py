"""JAX's tests of explained cache misses, as scenarios of `graphify`.

A docstring names the test. After it stands `refused` or `differs`, with the reason, where weft does
not do the same.
"""

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from graphified import X, captures
from torch import Tensor

import weft
from weft.transforms.graphs.graphify import graphify


@pytest.fixture
def explained() -> Iterator[list[str]]:
    """The messages about misses, collected while the test runs."""
    messages: list[str] = []
    handler = logging.Handler()
    logger = logging.getLogger("weft")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    weft.config.explain_cache_misses = True
    yield messages
    weft.config.explain_cache_misses = False
    logger.removeHandler(handler)


Y = torch.ones(4)

MISSES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "other_in_tree": ((X, (Y, Y)), {}, r"y: structure (*, *), captured *"),
    "other_dtype": ((X, Y.int()), {}, "y: dtype torch.int32, captured torch.float32"),
    "other_weak_type": ((X, 1.0), {}, "y: 1.0, captured a tensor"),
    "other_shape": ((X, Y[:1]), {}, "y: shape (1,), captured (4,)"),
    "other_static_argnums": ((X, Y, "bar"), {}, "mode: 'bar', captured 'foo'"),
    "other_static_argnames": ((X, Y), {"mode": "bar"}, "mode: 'bar', captured 'foo'"),
    "multiple_changes": (
        (X[:2], Y[:2].int()),
        {},
        "; y: shape (2,), captured (4,); y: dtype torch.int32",
    ),
}


@pytest.mark.parametrize("change", MISSES)
def test_the_reason_of_a_miss_is_logged(change: str, explained: list[str]) -> None:
    """jax: APITest.test_cache_miss_explanations_other_in_tree,
    test_cache_miss_explanations_other_dtype, test_cache_miss_explanations_other_weak_type,
    test_cache_miss_explanations_other_shape, test_cache_miss_explanations_other_static_argnums,
    test_cache_miss_explanations_other_static_argnames,
    test_cache_miss_explanations_multiple_changes"""

    def f(x: Tensor, y: Any, mode: str = "foo") -> Tensor:
        return torch.sin(x) + (y[0] if isinstance(y, tuple) else y)

    args, kwargs, reason = MISSES[change]
    g = graphify(f, static_argnames="mode")
    g(X, Y)
    g(*args, **kwargs)
    assert len(explained) == 1
    assert reason in explained[0]


def test_a_first_capture_is_not_explained(explained: list[str]) -> None:
    """jax: APITest.test_cache_miss_explanations_first_miss; differs: a first capture has nothing to
    differ from"""
    g = graphify(lambda x: x + 1)
    g(X)
    g(X)
    assert explained == []


def test_the_nearest_captured_call_explains_a_miss(explained: list[str]) -> None:
    """jax: APITest.test_cache_miss_explanations_other_shape_explain_closest; differs: the nearest
    has the fewest fields that differ, and sizes do not count"""
    g = graphify(lambda x: x * 1)
    g(torch.ones(1, 2, dtype=torch.int32))
    g(torch.ones(10, 20))
    g(torch.ones(1, 2))
    assert "x: dtype torch.float32, captured torch.int32" in explained[-1]
    g(torch.ones(10, 2))
    assert "x: shape (10, 2), captured (1, 2)" in explained[-1]


def test_a_keyword_is_not_a_miss(explained: list[str]) -> None:
    """jax: APITest.test_cache_miss_explanations_other_arg_passed_as_kwarg; differs: keywords and
    positions share a graph"""
    g = graphify(lambda x, y: x.sin() + y)
    g(X, Y)
    g(X, y=Y)
    assert explained == []


def test_the_surroundings_explain_a_miss(explained: list[str]) -> None:
    """jax: APITest.test_cache_miss_explanations_other_tracing_config"""
    g = graphify(lambda x, y: x.sin() + y)
    g(X, Y)
    with torch.autocast("cpu"):
        g(X, Y)
    assert "autocast: (torch.bfloat16, None), captured (None, None)" in explained[0]


def test_new_functions_in_a_loop_are_not_explained(explained: list[str]) -> None:
    """jax: APITest.test_cache_miss_explanations_new_function_in_loop; differs: each graphified
    function has its own cache"""
    for _ in range(2):
        graphify(lambda x: 2 * x)(X)
    assert explained == []


def test_a_miss_of_a_builtin_is_explained(explained: list[str]) -> None:
    """jax: APITest.test_cache_miss_explanations_no_source_info"""
    g = graphify(operator.add)
    g(X, Y)
    g(X, Y.int())
    assert explained[0].startswith("add: no graph for this call: b: dtype")


def test_misses_of_threads_are_explained(explained: list[str]) -> None:
    """jax: APITest.test_cache_miss_explanations_are_thread_safe"""
    g = graphify(lambda x: x.sum())

    def run(first: int) -> None:
        for n in range(first, 40, 10):
            assert g(torch.zeros(n)) == 0

    with ThreadPoolExecutor(10) as threads:
        list(threads.map(run, range(10)))
    assert captures(g) == 40
    assert len(explained) == 39


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], Any]] = {
    "dot_precision": lambda: matmul_precision("high"),
    "rank_promotion (here the default dtype)": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_global_setting_forces_a_capture(setting: str) -> None:
    """jax: APITest.test_dot_precision_forces_retrace, APITest.test_rank_promotion_forces_retrace"""
    g = graphify(lambda x: x @ x + torch.ones(()))
    g(torch.eye(2))
    g(torch.eye(2))
    assert captures(g) == 1
    with SETTINGS[setting]():
        assert g(torch.eye(2)).dtype == (torch.eye(2) + torch.ones(())).dtype
        assert captures(g) == 2
        g(torch.eye(2))
    assert captures(g) == 2


def test_the_size_of_an_enclosing_vmap_is_not_cached() -> None:
    """jax: JitTest.test_caches_depend_on_axis_env"""
    g = graphify(lambda x: x * x.shape[0] if x.dim() else x * 2)
    for n in (2, 3):
        assert torch.equal(torch.vmap(g)(torch.ones(n, 4)), torch.full((n, 4), 4.0))
        assert torch.equal(g(torch.ones(n)), torch.full((n,), float(n)))
