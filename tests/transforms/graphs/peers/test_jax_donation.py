"""JAX's tests of donation, as scenarios of `graphify`.

A docstring names JAX's test. After it stands `refused` or `differs`, with the reason, where weft
does not do the same.
"""

from typing import Any

import pytest
import torch
from graphified import captures
from torch import Tensor

import weft
from weft.errors import DonatedError
from weft.transforms.graphs.graphify import graphify


def assert_dead(*tensors: Tensor) -> None:
    """Each tensor is refused by the next graphified call that takes it."""
    for tensor in tensors:
        with pytest.raises(DonatedError, match="was donated to"):
            graphify(lambda x: x + 1)(tensor)


def assert_live(*tensors: Tensor) -> None:
    for tensor in tensors:
        graphify(lambda x: x + 1)(tensor)


@pytest.fixture
def two(device: str) -> Tensor:
    return torch.full((2,), 2.0, device=device)


def test_a_donated_input_is_dead(device: str) -> None:
    """jax: JitTest.test_jit_donate_invalidates_input"""
    move = graphify(lambda x: x + x - x, donate_argnames="x")
    x = torch.ones((), device=device)
    assert move(x).item() == 1
    assert_dead(x)


def test_donated_and_static_arguments(device: str) -> None:
    """jax: JitTest.test_jit_donate_static_argnums; differs: the parts of a result with a donated
    argument's structure are its next value"""
    g = graphify(
        lambda a, b, c, d: (a + b + c, a + b + d),
        static_argnames=("a", "b"),
        donate_argnames=("c", "d"),
    )
    c, d = torch.full((2,), 2.0, device=device), torch.full((4,), 1.0, device=device)
    places = c.data_ptr(), d.data_ptr()
    e, f = g(1, 2, c, d)
    assert (e.tolist(), f.tolist()) == ([5, 5], [4] * 4)
    assert (e.data_ptr(), f.data_ptr()) == places
    assert_dead(c, d)


def test_donated_keywords_and_static_arguments(two: Tensor) -> None:
    """jax: JitTest.test_jit_donate_argnames_kwargs_static_argnums"""
    g = graphify(
        lambda a, b, c, d, e: (a + b + c, a + b + d, a + b + e),
        static_argnames=("a", "b"),
        donate_argnames=("d", "e"),
    )
    c, d, e = (
        two,
        torch.full((4,), 1.0, device=two.device),
        torch.full((6,), 3.0, device=two.device),
    )
    results = g(1, 2, c, d=d, e=e)
    assert [r.tolist() for r in results] == [[5] * 2, [4] * 4, [6] * 6]
    assert_live(c)
    assert_dead(d, e)


def test_a_donated_argument_whose_structure_does_not_come_back(two: Tensor) -> None:
    """jax: JitTest.test_jit_donate_warning_raised, PJitTest.testBufferDonationNotDonated; differs:
    the callee takes the storage without a warning"""
    g = graphify(lambda x, y: {"total": x.sum() + y.sum()}, donate_argnames=("x", "y"))
    y = torch.tensor([1, 2], device=two.device)
    assert g(two, y)["total"].item() == 7
    assert_dead(two, y)


def test_a_donated_argument_that_comes_back_in_another_dtype(two: Tensor) -> None:
    """jax: JitTest.test_jit_donate_weak_type"""
    result = graphify(lambda x: x.to(torch.int64), donate_argnames="x")(two)
    assert (result.dtype, result.tolist()) == (torch.int64, [2, 2])
    assert_dead(two)


def test_a_donated_argument_that_comes_back_in_another_shape(device: str) -> None:
    """jax: PJitTest.testBufferDonationDifferentIOShapes"""
    g = graphify(lambda x, y: (x.reshape(4, 4), y.reshape(16)), donate_argnames=("x", "y"))
    x, y = torch.arange(16.0, device=device), torch.arange(16.0, device=device).reshape(16, 1)
    first, second = g(x, y)
    assert (first.shape, second.shape) == ((4, 4), (16,))
    assert torch.equal(first.flatten(), second)
    assert_dead(x, y)


def test_a_copy_made_before_survives(device: str) -> None:
    """jax: JitTest.test_jnp_array_copy, PJitTest.test_device_put_copy_donate"""
    x = torch.tensor([0, 1], device=device)
    copy = weft.clone(x)

    @graphify(donate_argnames="array")
    def fill(array: Tensor) -> Tensor:
        array[:1] = 77
        return array

    assert fill(x).tolist() == [77, 1]
    assert copy.tolist() == [0, 1]
    assert_dead(x)
    assert_live(copy)


def test_donation_by_the_decorator_and_by_the_option(two: Tensor) -> None:
    """jax: JitTest.test_specify_donate_argnums_and_argnames; differs: the two ways are
    `weft.donates` and the option"""

    @graphify(donate_argnames=("b", "c"))
    @weft.donates("a")
    def f(a: Tensor, b: Tensor, c: Tensor) -> Any:
        return a * 2, b * 2, c * 2

    x = two
    y = two.clone()
    z = two.clone()
    assert [t.tolist() for t in f(x, b=y, c=z)] == [[4, 4]] * 3
    assert_dead(x, y, z)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_a_donated_argument_by_position_and_by_keyword(by_keyword: bool, two: Tensor) -> None:
    """jax: JitTest.test_donate_argnames_with_args, JitTest.test_donate_argnums_with_kwargs,
    PJitTest.testBufferDonationWithNames, PJitTest.testBufferDonationWithKwargs"""
    f = graphify(lambda inp: inp * 2, donate_argnames="inp")
    assert (f(inp=two) if by_keyword else f(two)).tolist() == [4, 4]
    assert_dead(two)


def test_donation_of_one_tree_among_three(device: str) -> None:
    """jax: PJitTest.testBufferDonationWithPyTreeKwargs, PJitTest.testBufferDonation"""

    def tree(value: float) -> dict[str, Any]:
        return {
            "a": {"b": torch.full((2,), value, device=device)},
            "c": torch.full((3,), value, device=device),
        }

    x, y, z = tree(4.0), tree(2.0), tree(1.0)
    add = graphify(
        lambda x, y, z: {
            "a": {"b": x["a"]["b"] + y["a"]["b"] + z["a"]["b"]},
            "c": x["c"] + y["c"] + z["c"],
        },
        donate_argnames="y",
    )
    result = add(x, y=y, z=z)
    assert (result["a"]["b"].tolist(), result["c"].tolist()) == ([7] * 2, [7] * 3)
    assert_live(x["c"], z["a"]["b"])
    assert_dead(y["a"]["b"], y["c"])


def test_the_listing_says_what_is_donated(device: str) -> None:
    """jax: JitTest.test_donate_args_info_aot, JitTest.test_dict_donation,
    JitTest.test_dict_donation_args_kwargs"""
    f = graphify(lambda z, y, x: (z, y, x), donate_argnames=("z", "y"))
    z, y, x = ({"t": torch.ones((), device=device)} for _ in range(3))
    for lowered in (f.lower(z=z, y=y, x=x), f.lower(z, y=y, x=x)):
        inputs = [
            line
            for line in lowered.as_text().splitlines()
            if ", donated" in line or ", copied in" in line
        ]
        assert [line.partition("  ")[2].split("  ")[-1] for line in inputs] == [
            "z['t'], donated",
            "y['t'], donated",
            "x['t'], copied in",
        ]
    assert_live(z["t"], y["t"])


def test_one_tensor_donated_and_passed_again_is_refused(two: Tensor) -> None:
    """jax: JitTest.test_double_donation"""
    f = graphify(lambda x, y: x + y, donate_argnames="x")
    with pytest.raises(DonatedError, match="y is a tensor that the same call donates"):
        f(two, two)
    assert_live(two)


def test_one_tensor_donated_twice_is_refused(two: Tensor) -> None:
    """jax: JitTest.test_double_donation"""
    f = graphify(lambda x, y: (x + 1, y + 2), donate_argnames=("x", "y"))
    with pytest.raises(DonatedError, match="y shares memory with x, and both are donated"):
        f(two, two)
    assert_live(two)


def test_an_inner_donation_inside_an_outer_function(two: Tensor) -> None:
    """jax: JitTest.test_jit_nested_donate_ignored"""
    square = graphify(lambda y: y**2, donate_argnames="y")
    g = graphify(lambda x: square(x * 1))
    assert [g(two).tolist() for _ in range(2)] == [[4, 4]] * 2
    assert_live(two)


def test_a_tensor_donated_twice_inside_the_outer_function_is_refused(two: Tensor) -> None:
    """jax: JitTest.test_jit_nested_donate_ignored (donated twice); refused: an inner donation
    counts too"""
    step = graphify(lambda s: s + 1, donate_argnames="s")

    def twice(x: Tensor) -> Any:
        y = x * 1
        return step(y), step(y)

    for fn in (twice, graphify(twice)):
        with pytest.raises(DonatedError, match=r"that was donated to <lambda>\(s\)"):
            fn(two)


def test_a_donated_identity_keeps_its_storage(two: Tensor) -> None:
    """jax: ArrayPjitTest.test_jit_no_forwarding"""
    place = two.data_ptr()
    same, double = graphify(lambda x: (x, x * 2), donate_argnames="x")(two)
    assert (same.tolist(), double.tolist(), same.data_ptr()) == ([2, 2], [4, 4], place)
    assert_dead(two)
    assert_live(same, double)


def test_a_lowered_function_donates(two: Tensor) -> None:
    """jax: JitTest.test_jit_lower_donate_argnums_available,
    PJitTest.testLowerDonateArgnumsAvailable, PJitTest.testLowerDonateArgnumsAvailableWithNames"""
    f = graphify(lambda x, y: (x + 4, y), donate_argnames="x")
    lowered = f.lower(two, two.clone())
    assert_live(two)
    compiled = lowered.compile()
    assert_live(two)
    result, _ = compiled(two, two.clone())
    assert result.tolist() == [6, 6]
    assert_dead(two)


def test_a_loop_that_donates_its_state_captures_once(device: str) -> None:
    """jax: JitTest.testBuffersAreFreedPromptly (with donation)"""
    step = graphify(lambda state, x: (state + x, state * 1), donate_argnames="state")
    state = torch.zeros(3, device=device)
    kept = []
    for i in range(5):
        state, old = step(state, torch.full((3,), float(i), device=device))
        kept.append(old)
    assert state.tolist() == [10] * 3
    assert [t[0].item() for t in kept] == [0, 0, 1, 3, 6]
    assert captures(step) == 1
