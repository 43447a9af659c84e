"""JAX's tests of the arguments of `jit`, as scenarios of `graphify`: static values, keywords,
defaults, pytrees.

A docstring names the test. After it stands `refused` or `differs`, with the reason, where weft does
not do the same.
"""

import collections
import copy
import enum
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from graphified import X, captures
from torch import Tensor

import weft
from weft.errors import CaptureError
from weft.transforms.graphs.graphify import graphify

# Static arguments
# -----------------------------------------------------------------------------------------------------


def test_a_decorator_with_options() -> None:
    """jax: JitTest.test_jit_decorator_factory"""

    @graphify(static_argnames=["flag"])
    def f(x: Tensor, flag: bool) -> Tensor:
        return x if flag else -x

    assert torch.equal(f(X, True), X)
    assert torch.equal(f(X, False), -X)


@pytest.mark.parametrize("as_tensors", [True, False])
def test_static_arguments_make_misses_and_tensors_do_not(as_tensors: bool) -> None:
    """jax: JitTest.test_jit_static_args; differs: a Python number is part of the key without being
    static"""

    def f(x: Any, y: Any, z: Any, flag: bool = False, flag2: bool = False) -> Any:
        assert flag
        return 100 * x + 10 * y + z

    def values(*numbers: int) -> list[Any]:
        return [torch.tensor(n) for n in numbers] if as_tensors else list(numbers)

    g = graphify(f, static_argnames=("flag", "flag2"))
    assert g(*values(1, 2, 3), True, False) == 123
    assert g(*values(1, 2, 3), True, False) == 123
    assert captures(g) == 1
    assert g(*values(2, 1, 3), True, False) == 213
    assert captures(g) == (1 if as_tensors else 2)
    assert g(*values(2, 1, 3), True, True) == 213
    assert captures(g) == (2 if as_tensors else 3)


def test_several_static_arguments_in_any_order() -> None:
    """jax: APITest.test_make_jaxpr_static_argnums_order"""
    for names in (("a", "b"), ("b", "a")):
        g = graphify(lambda a, b, c: (a + c) - b * c, static_argnames=names)
        assert g(1, 2, torch.tensor(3)).item() == -2


def test_static_values_that_are_equal_share_a_graph() -> None:
    """jax: JitTest.test_static_args_equality"""

    class A:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return isinstance(other, A)

    g = graphify(lambda x, a: x * 100, static_argnames="a")
    assert torch.equal(g(X, A()), g(X, A()))
    assert captures(g) == 1


def test_static_values_of_other_types_do_not_share_a_graph() -> None:
    """jax: JitTest.test_jit_static_argnums_requires_type_equality"""
    g = graphify(lambda x, k: x * k, static_argnames="k")
    for count, k in enumerate((1, True, 1.0), 1):
        for _ in range(2):
            assert g(X.long(), k).dtype == (X.long() * k).dtype
        assert captures(g) == count


def test_zero_and_minus_zero_are_two_static_values() -> None:
    """jax: PJitTest.test_zero_literal_equality"""
    g = graphify(lambda x, by: x / by, static_argnames="by")
    one = torch.ones(())
    assert (g(one, -0.0).item(), g(one, 0.0).item()) == (-math.inf, math.inf)
    h = graphify(lambda x: (x / -0.0, x / 0.0))
    assert [t.item() for t in h(one)] == [-math.inf, math.inf]


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_static_argument_that_cannot_be_hashed_is_refused(calls_before: int) -> None:
    """jax: JitTest.test_jit_raises_on_first_invocation_on_non_hashable_static_argnum,
    test_cpp_jit_raises_on_non_hashable_static_argnum"""
    g = graphify(lambda x, y: x + 3, static_argnames="y")
    for _ in range(calls_before):
        g(X, 1)
    with pytest.raises(CaptureError, match="y is not a tensor and cannot be hashed"):
        g(X, np.asarray(1))


def test_a_static_value_whose_equality_fails() -> None:
    """jax: JitTest.test_cpp_jit_raises_on_non_hashable_static_argnum; differs: the error of
    `__eq__` is raised as it is"""

    class HashableWithoutEq:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            raise NotImplementedError("no equality")

    g = graphify(lambda x, y: x + 3, static_argnames="y")
    g(X, HashableWithoutEq())
    with pytest.raises(NotImplementedError, match="no equality"):
        g(X, HashableWithoutEq())  # the hashes agree, so equality is asked for


def test_the_error_of_a_hash_is_raised_as_it_is() -> None:
    """jax: JitTest.test_cpp_jit_raises_other_exceptions_when_hashing_fails"""

    class A:
        def __hash__(self) -> int:
            raise ValueError("broken hash")

    with pytest.raises(ValueError, match=r"^broken hash$"):
        graphify(lambda x, a: x + 1, static_argnames="a")(X, A())


def test_a_static_argument_by_position_and_by_name() -> None:
    """jax: JitTest.test_jit_with_static_argnames, ArrayPjitTest.test_pjit_with_static_argnames"""

    def f(x: str) -> int:
        assert x == "foo"
        return 1

    g = graphify(f, static_argnames="x")
    assert (g("foo"), g(x="foo")) == (1, 1)
    assert captures(g) == 1


def test_a_static_argument_given_by_keyword() -> None:
    """jax: JitTest.test_new_static_argnum_on_keyword_arguments"""
    assert graphify(lambda x: x, static_argnames="x")(x=4) == 4


def test_the_default_of_a_static_argument() -> None:
    """jax: JitTest.test_new_static_argnum_with_default_arguments"""
    g = graphify(lambda x=4: x, static_argnames="x")
    assert (g(), g(4), g(5)) == (4, 4, 5)
    assert captures(g) == 2


def test_a_name_that_is_not_interned() -> None:
    """jax: ArrayPjitTest.test_jit_static_argnames_non_interned"""
    name = str(json.loads(json.dumps("foobar")))
    assert graphify(lambda foobar: foobar, static_argnames=[name])(foobar=2) == 2


def test_values_among_variable_keywords_are_part_of_the_key() -> None:
    """jax: ArrayPjitTest.test_pjit_with_static_argnames_cpp_dispatch; differs: a name inside
    **kwargs needs no declaration"""

    def f(y: Tensor, **kwargs: Any) -> Tensor:
        assert kwargs == {"x": "foo"}
        return y * y

    g = graphify(f)
    for _ in range(2):
        assert torch.equal(g(X, x="foo"), X * X)
    assert captures(g) == 1
    with pytest.raises(CaptureError, match="'x', which is not one of its arguments"):
        graphify(f, static_argnames="x")


@pytest.mark.parametrize("option", ["static_argnums", "donate_argnums"])
def test_arguments_by_number_are_refused(option: str) -> None:
    """jax: JitTest.test_jit_argnums_overflow_error; refused: arguments are named, so a number
    cannot be out of range"""
    with pytest.raises(weft.errors.ArgumentError, match=f"'{option}', which is no argument of it"):
        graphify(lambda a, b: a, **{option: (0, 1)})  # type: ignore[call-overload]


def test_a_negative_number_of_an_argument_is_refused() -> None:
    """jax: APITest.test_jit_negative_static_argnums; refused: arguments are named"""
    with pytest.raises(weft.errors.ArgumentError, match=r"static_argnames=\[\.\.\.\], by name"):
        graphify(lambda x, y: x * y, static_argnums=-1)  # type: ignore[call-overload]


@pytest.mark.parametrize("option", ["static_argnames", "donate_argnames"])
def test_names_of_arguments_are_checked(option: str) -> None:
    """jax: JitTest.test_jit_argnames_validation"""

    def f(a: Any, b: Any, c: Any) -> Any:
        return a

    options: dict[str, Any] = {option: ("b", "c")}
    graphify(f, **options)
    with pytest.raises(
        CaptureError, match=rf"{option} holds 'not_defined', which is not one of its arguments"
    ):
        graphify(f, **{option: ("b", "c", "not_defined")})  # type: ignore[call-overload]


def test_an_argument_that_is_static_and_donated_is_refused() -> None:
    """jax: JitTest.test_intersecting_static_and_donate_argnames"""
    with pytest.raises(CaptureError, match="'x' in static_argnames, and in donate_argnames"):
        graphify(lambda x: x, static_argnames="x", donate_argnames="x")


# Other arguments
# ------------------------------------------------------------------------------------------------------


def test_keywords_and_positions_share_a_graph() -> None:
    """jax: JitTest.test_jit_kwargs, ArrayPjitTest.test_pjit_kwargs; differs: JAX compiles again for
    a keyword"""
    g = graphify(lambda x, y, z: 100 * x + 10 * y + z)
    for args, kwargs in (((X, X, X), {}), ((X, X), {"z": X}), ((), {"z": X, "y": X, "x": X})):
        assert torch.equal(g(*args, **kwargs), 111 * X)
    assert captures(g) == 1
    g(X, X, z=X.double())
    assert captures(g) == 2


@pytest.mark.parametrize(
    "number",
    [1, 2.5, True, 1 + 1j, np.float64(2.0)],
    ids=["int", "float", "bool", "complex", "np.float64"],
)
def test_python_numbers_keep_their_type(number: Any) -> None:
    """jax: JitTest.test_complex_support, JaxJitTest.test_arg_signature_of_value; differs: a number
    is not traced"""
    g = graphify(lambda x, n: (x * n, n))
    for _ in range(2):
        product, back = g(X, number)
        assert torch.equal(product, X * number)
        assert product.dtype == (X * number).dtype
        assert type(back) is type(number)


def test_a_numpy_scalar_is_refused() -> None:
    """jax: JaxJitTest.test_device_put_on_numpy_scalars; refused: a numpy scalar is neither a tensor
    nor a plain number"""
    with pytest.raises(
        CaptureError, match=r"n is a float32.*\n.*float\(\.\.\.\) or int\(\.\.\.\) of it"
    ):
        graphify(lambda x, n: x * n)(X, np.float32(2))


@pytest.mark.parametrize("array", [np.zeros(4), np.ma.array([1, 2, 3], mask=[True, False, True])])
def test_a_numpy_array_is_refused(array: Any) -> None:
    """jax: JitTest.test_jit_masked_array, JaxJitTest.test_device_put_on_numpy_arrays; refused: only
    tensors are copied in"""
    with pytest.raises(CaptureError, match=r"torch\.from_numpy\(array\)"):
        graphify(lambda x, a: x)(X, array)


def test_a_string_and_a_type_are_plain_values_and_an_object_is_not() -> None:
    """jax: JitTest.test_jit_bad_input; differs: strings and types are part of the key"""
    assert graphify(lambda x: x)("foo") == "foo"
    assert graphify(lambda x, d: x.to(d))(X, torch.int32).dtype == torch.int32
    with pytest.raises(
        CaptureError, match="d is an object, which is neither a tensor, a plain value nor a pytree"
    ):
        graphify(lambda x, d: x)(X, object())


def test_a_list_of_five_hundred_tensors() -> None:
    """jax: JitTest.test_jit_with_many_args_works"""
    g = graphify(lambda tensors: sum(tensors))
    for offset in (0, 1):
        assert g([torch.tensor(i + offset) for i in range(500)]) == sum(range(500)) + 500 * offset
    assert captures(g) == 1


@pytest.mark.parametrize("number", [2, 3, 4])
def test_arguments_that_are_not_used(number: int) -> None:
    """jax: JitTest.test_jit_with_pruned_args"""
    g = graphify(lambda *args: args[1] + 2)
    for offset in (0, 5):
        assert g(*(torch.tensor(i + offset) for i in range(number))) == 3 + offset


def test_enums_as_keys_of_a_dict() -> None:
    """jax: JitTest.test_jit_enum_as_dict_keys_fails; differs: keys of a dict are not sorted, so
    they need no order"""

    class E(enum.Enum):
        A = 0
        B = 1

    g = graphify(lambda d: d[E.A] - d[E.B])
    for _ in range(2):
        assert torch.equal(g({E.A: X, E.B: X * 2}), -X)


def test_a_named_tuple_comes_back_as_one() -> None:
    """jax: APITest.test_namedtuple_transparency"""
    point = collections.namedtuple("point", "x y")
    g = graphify(lambda p: (point(p.y, p.x), (p.x**2 + p.y**2).sqrt()))
    swapped, norm = g(point(torch.tensor(3.0), torch.tensor(4.0)))
    assert type(swapped) is point
    assert (swapped.x.item(), norm.item()) == (4, 5)


def test_a_subclass_of_a_named_tuple_keeps_its_methods() -> None:
    """jax: APITest.test_namedtuple_subclass_transparency"""

    class Point(collections.namedtuple("Base", "x y")):
        def total(self) -> Any:
            return self.x + self.y

    assert torch.equal(graphify(lambda p: p.total())(Point(X, X)), 2 * X)


def test_nan_times_zero() -> None:
    """jax: JitTest.test_jit_nan_times_zero"""
    g = graphify(lambda x: 1 + x * 0)
    assert g(torch.tensor(math.nan)).isnan()
    assert graphify(lambda x, n: x + 1 + n * 0)(X, math.nan).isnan().all()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_inside(copied: Callable[[Tensor], Tensor]) -> None:
    """jax: JitTest.test_jit_shallow_copy, JitTest.test_jit_deep_copy"""
    g = graphify(lambda x: copied(x) + 1)
    assert torch.equal(g(X), X + 1)
    assert torch.equal(g(X * 2), X * 2 + 1)
