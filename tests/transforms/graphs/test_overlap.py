"""Shared memory element by element, against sets of addresses; and donated arguments that share
memory."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from weft.errors import DonatedError
from weft.proofs import assert_equal
from weft.transforms.graphs.calls.aliasing import overlap, overlaps_itself
from weft.transforms.graphs.graphify import graphify

DTYPES = [torch.int8, torch.float32, torch.complex64]


@st.composite
def views(draw: st.DrawFn, storage: Tensor) -> Tensor:
    """Any strided view of the bytes of `storage`."""
    dtype = draw(st.sampled_from(DTYPES))
    typed = storage.view(dtype)
    sizes = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = [draw(st.integers(0, 5)) for _ in sizes]
    span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size) + 1
    offset = draw(st.integers(0, max(0, typed.numel() - span)))
    return typed.as_strided(sizes, strides, offset)


def addresses(x: Tensor) -> list[int]:
    """The bytes of all elements, in order."""
    starts = [x.storage_offset()]
    for size, stride in zip(x.shape, x.stride(), strict=True):
        starts = [start + i * stride for start in starts for i in range(size)]
    return [start * x.element_size() + byte for start in starts for byte in range(x.element_size())]


@given(st.data())
def test_overlap_is_of_addresses(data: st.DataObject) -> None:
    storage = torch.zeros(256, dtype=torch.int8)
    a = data.draw(views(storage))
    b = data.draw(views(storage))
    assert overlap(a, b) == (not set(addresses(a)).isdisjoint(addresses(b)))
    assert not overlap(a, b.clone())


@given(st.data())
def test_overlap_with_itself_is_of_addresses(data: st.DataObject) -> None:
    a = data.draw(views(torch.zeros(256, dtype=torch.int8)))
    assert overlaps_itself(a) == (len(set(addresses(a))) < len(addresses(a)))


def step(s: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return s[0] + 1, s[1] * 2


def test_donated_leaves_that_share_memory_are_refused() -> None:
    x = torch.arange(5.0)
    with pytest.raises(DonatedError) as caught:
        graphify(step, donate_argnames="s")((x[:3], x[2:]))
    assert (
        str(caught.value)
        == "step(...)\n  saw: s[1] shares memory with s[0], and both are donated\n  instead: donate"
        " it once, and use it in both places inside the function (a copy would become a second"
        " value), or do not donate"
    )
    assert x.tolist() == [0, 1, 2, 3, 4]


def test_donated_leaves_of_one_storage_may_lie_apart() -> None:
    g = graphify(step, donate_argnames="s")
    for cut in (lambda x: (x[:3], x[3:]), lambda x: (x[::2], x[1::2])):
        expected = step(cut(torch.arange(6.0)))
        for _ in range(2):
            assert_equal("donated views", g(cut(torch.arange(6.0))), expected)


def test_a_donated_tensor_that_shares_memory_with_itself_is_refused() -> None:
    with pytest.raises(DonatedError, match="s, which is donated, has elements that share memory"):
        graphify(lambda s: s + 1, donate_argnames="s")(torch.zeros(1).expand(3))
