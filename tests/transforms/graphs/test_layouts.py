"""Buffers have the strides and the alignment of their arguments, so that kernels add up in the same
order."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from weft import graphify
from weft.proofs import assert_equal
from weft.transforms.graphs.calls.buffers import buffer_like, in_a_row

LAW = "graphify changes nothing"
everywhere = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def sums(x: Tensor) -> tuple[Tensor, ...]:
    rows = x if x.dim() == 2 else x[None]
    return x.sum(), x.mean(0), x.exp(), rows @ rows.t()


def expanded(n: int, device: str) -> Iterator[Tensor]:
    for seed in range(n):
        yield (
            torch.randn(1, 37, generator=torch.Generator().manual_seed(seed))
            .to(device)
            .expand(31, 37)
        )


def overlapping(n: int, device: str) -> Iterator[Tensor]:
    for seed in range(n):
        yield (
            torch.randn(100, generator=torch.Generator().manual_seed(seed))
            .to(device)
            .unfold(0, 20, 3)
        )


def misaligned(n: int, device: str) -> Iterator[Tensor]:
    for seed in range(n):
        yield torch.randn(1100, generator=torch.Generator().manual_seed(seed)).to(device)[
            seed % 5 : seed % 5 + 1001
        ]


@everywhere
@pytest.mark.parametrize("make", [expanded, overlapping, misaligned])
def test_last_bits_do_not_depend_on_the_layout(
    make: Callable[[int, str], Iterator[Tensor]], device: str
) -> None:
    g = graphify(sums)
    for x in make(10, device):
        assert_equal(LAW, g(x), sums(x))


def test_strides_that_a_function_reads_are_those_of_the_argument() -> None:
    g = graphify(lambda x: x * x.stride(0))
    for x in (torch.ones(1, 4).expand(3, 4), torch.ones(3, 4), torch.ones(1, 4).expand(3, 4)):
        assert_equal(LAW, g(x), x * x.stride(0))


def test_each_alignment_has_a_graph_and_no_more() -> None:
    g = graphify(lambda x: x @ x)
    memory = torch.randn(200)
    for _ in range(2):
        for first in range(16):
            x = memory[first : first + 100]
            assert_equal(LAW, g(x), x @ x)
    assert g.cache_info().captures == 4  # offsets of 0, 4, 8 and 12 bytes


def test_a_buffer_of_overlapping_elements_holds_each_once() -> None:
    x = torch.arange(6.0).unfold(0, 4, 1)
    buffer = buffer_like(x)
    assert (buffer.stride(), buffer.tolist()) == (x.stride(), x.tolist())
    assert buffer.untyped_storage().nbytes() <= 4 * (6 + 3)
    assert in_a_row(buffer).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_tensor_without_an_address_may_follow_one_with_it() -> None:
    for g in (graphify(lambda x: x * 2), graphify(lambda x: x * 2, reference_argnames="x")):
        for x in (torch.ones(3), torch.ones(3), torch.ones(3).to_sparse(), torch.ones(3)):
            assert_equal(
                LAW,
                g(x).to_dense() if x.is_sparse else g(x),
                (x * 2).to_dense() if x.is_sparse else x * 2,
            )
