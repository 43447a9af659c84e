"""JAX's tests of the functions that `jit` takes, and of reads on the host, as scenarios of
`graphify`.

A docstring names the test. After it stands `refused` or `differs`, with the reason, where weft does
not do the same.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from graphified import X, captures
from torch import Tensor

from weft.errors import CaptureError
from weft.transforms.graphs.graphify import graphify

# The function
# ---------------------------------------------------------------------------------------------------------


def test_a_graphified_function_prints_its_name() -> None:
    """jax: JitTest.test_jit_repr"""

    def my_function(x: Tensor) -> Tensor:
        return x

    assert repr(graphify(my_function)) == "<graphify(my_function), 0 graphs>"


def test_a_callable_whose_repr_fails_still_prints() -> None:
    """jax: JitTest.test_jit_repr_errors"""

    class Callable_:
        def __call__(self, x: Tensor) -> Tensor:
            return x + 1

        def __repr__(self) -> str:
            raise ValueError("invalid repr")

    g = graphify(Callable_())
    assert "Callable_" in repr(g)
    assert torch.equal(g(X), X + 1)


def test_the_name_of_a_partial_is_that_of_its_class() -> None:
    """jax: JitTest.test_fun_name; differs: JAX takes the name of the inner function, weft that of
    the class"""

    def inner(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    partial: Any = functools.partial(inner, X)
    assert "partial" in repr(graphify(partial))
    partial.__name__ = "named"
    assert "named" in repr(graphify(partial))
    assert torch.equal(graphify(partial)(X), X + X)


def test_the_names_and_attributes_of_the_function_are_kept() -> None:
    """jax: JitTest.test_jit_wrapped_attributes"""

    def f(x: Tensor) -> Tensor:
        """Adds one."""
        return x + 1

    f.some_value = 4  # type: ignore[attr-defined]
    g: Any = graphify(f)
    names = ("__doc__", "__name__", "__module__", "__qualname__", "__annotations__", "some_value")
    assert [getattr(g, n) for n in names] == [getattr(f, n) for n in names]
    assert inspect.signature(g) == inspect.signature(f)


def test_a_number_is_not_a_function() -> None:
    """jax: JitTest.test_jit_of_noncallable"""
    with pytest.raises(CaptureError, match="3, which is not a function"):
        graphify(3)  # type: ignore[call-overload]


def test_a_generator_function_is_refused() -> None:
    """jax: JitTest.test_jit_of_generator"""

    def gen(x: Tensor) -> Iterator[Tensor]:
        yield x

    with pytest.raises(CaptureError, match="a function that yields or awaits"):
        graphify(gen)


def test_a_builtin_with_a_signature_replays() -> None:
    """jax: JitTest.test_jit_python_builtin"""
    g = graphify(operator.add, static_argnames="b")
    assert torch.equal(g(X, 1), X + 1)
    assert torch.equal(g(X, 2), X + 2)
    assert captures(g) == 2


def test_a_class_without_a_signature_is_refused() -> None:
    """jax: JitTest.test_resolve_argnums_signature_fail; refused: names of arguments need a
    signature"""
    with pytest.raises(
        CaptureError, match=r"whose argument names are unknown\n.*lambda x: int\(x\)"
    ):
        graphify(int)


def test_a_signature_that_raises_is_refused() -> None:
    """jax: JitTest.test_donate_argnames_signature_fail"""

    class NoSignature:
        @property
        def __signature__(self) -> inspect.Signature:
            raise TypeError("no signature")

        def __call__(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(CaptureError, match="whose argument names are unknown"):
        graphify(NoSignature(), donate_argnames="x")


def test_a_callable_without_weak_references_replays() -> None:
    """jax: JitTest.test_jit_of_nonweakreferenceable_function; differs: JAX's cache needs weak
    references, weft's not"""

    class Slots:
        __slots__ = ()

        def __call__(self, x: Tensor) -> Tensor:
            return x + 1

    g = graphify(Slots())
    assert [g(X).sum().item(), g(X + 1).sum().item()] == [10, 14]
    assert captures(g) == 1


def test_a_method_with_a_static_self() -> None:
    """jax: JitTest.test_static_argnum_on_method"""

    class A:
        @graphify(static_argnames="self")
        def add(self, x: Tensor) -> Tensor:
            return x + 2

    assert torch.equal(A().add(X), X + 2)


def test_a_decorated_classmethod_replays() -> None:
    """jax: JitTest.test_static_argnum_on_static_method_is_not_supported (supported here)"""

    class A:
        @graphify
        @classmethod
        def add(cls, x: Tensor) -> Tensor:
            return x + 2

    for owner in (A, A()):
        assert torch.equal(owner.add(X), X + 2)


def test_a_decorated_staticmethod_replays() -> None:
    """jax: JitTest.test_staticmethod_is_not_supported (supported here)"""

    class A:
        @graphify
        @staticmethod
        def add(x: Tensor) -> Tensor:
            return x + 2

    for owner in (A, A()):
        assert torch.equal(owner.add(X), X + 2)


def test_decorators_of_methods_outside_of_graphify() -> None:
    """jax: JitTest.test_static_argnum_on_static_method_is_not_supported (the order that works)"""

    class A:
        @classmethod
        @graphify(static_argnames="cls")
        def of_class(cls, x: Tensor) -> Tensor:
            return x + 2

        @staticmethod
        @graphify
        def static(x: Tensor) -> Tensor:
            return x + 3

    assert torch.equal(A.of_class(X), X + 2)
    assert torch.equal(A().static(X), X + 3)


# Reads on the host
# ----------------------------------------------------------------------------------------------------


READS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item (test_jit_item)": (lambda x: x * x[1].item(), "reads a tensor on the host"),
    "branch (test_switch_value_jit)": (
        lambda x: x if x[1] > 0 else -x,
        "a branch on a tensor's value",
    ),
    "index (test_list_index_err)": (
        lambda x: [1, 2, 3][x.long()[1]],
        "Tensor.__index__ reads a tensor on the host",
    ),
    "range (test_range_err)": (
        lambda x: [x + i for i in range(x.long()[1])],
        "__index__ reads a tensor",
    ),
    "int (test_cast_int)": (lambda x: int(x[1]), "reads a tensor on the host"),
    "float (test_casts)": (lambda x: float(x[1]), "reads a tensor on the host"),
    "complex (test_casts)": (lambda x: complex(x[1]), "reads a tensor on the host"),
    "numpy (test_unwrapped_numpy)": (lambda x: np.exp(x), "numpy"),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_on_the_host_is_refused(read: str) -> None:
    """jax: APITest.test_jit_item, test_switch_value_jit, test_list_index_err, test_range_err,
    test_cast_int, test_casts, test_unwrapped_numpy"""
    fn, problem = READS[read]
    with pytest.raises(CaptureError, match=problem):
        graphify(fn)(X)


def test_a_static_index_and_a_static_range() -> None:
    """jax: APITest.test_list_index_err, APITest.test_range_err (the way that works)"""
    assert graphify(lambda n: [1, 2, 3][n], static_argnames="n")(0) == 1
    assert torch.equal(
        graphify(lambda x, n: sum((x for _ in range(n)), X * 0), static_argnames="n")(X, 5), 5 * X
    )
