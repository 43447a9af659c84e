"""Memory that torch writes without an operator: computed by one instead, or refused."""

from collections.abc import Callable

import pytest
import torch
from refusal import at
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import CaptureError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify

LAW = "a graph is its function"
X, Y = torch.arange(12.0).reshape(2, 6), torch.arange(12.0).flip(0).reshape(2, 6)

POOLS: dict[str, Callable[[Tensor], object]] = {
    "torch": lambda x: torch.max_pool1d(x, 3, ceil_mode=True),
    "functional": lambda x: functional.max_pool1d(x, 2, 2, 1),
    "with indices": lambda x: functional.max_pool1d(x, 2, return_indices=True),
    "module": nn.MaxPool1d(3),
}


@pytest.mark.parametrize("way", POOLS)
def test_max_pool1d_is_computed_again(way: str) -> None:
    fn = POOLS[way]
    g = graphify(fn)
    for x in (X, Y):
        assert_equal(LAW, g(x), fn(x))
    assert g.cache_info().captures == 1


@pytest.mark.parametrize(
    "fn",
    [lambda x: torch.ops.aten.max_pool1d(x, 3), lambda x: torch.ops.aten.max_pool1d(x, 3) + 1],
    ids=["returned", "read"],
)
def test_what_a_tape_does_not_see_is_refused(fn: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError) as error:
        graphify(fn)(X)
    assert error.value.problem.startswith(
        "torch wrote to memory without an operator, which a tape cannot repeat, at "
    )
    assert (
        at(test_what_a_tape_does_not_see_is_refused, "torch.ops.aten").strip()
        in error.value.problem
    )


def test_memory_that_the_function_asks_for_may_stay_unwritten() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rest = torch.empty(3)
        filled = torch.empty_like(x)
        torch.add(x, 0, out=filled)
        return rest, filled, x.new_empty(2)

    g = graphify(fn)
    for x in (X, Y):
        rest, filled, more = g(x)
        assert (rest.shape, more.shape) == ((3,), (2,))
        assert torch.equal(filled, x)


def test_an_operator_that_reads_a_shape_reads_no_memory() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(lambda x: functional.dropout2d(x, 0.5), (x,), (x,))

    g = graphify(fn)
    x = torch.ones(4, 8, 2, 2)
    for _ in range(2):
        torch.manual_seed(0)
        expected = fn(x)
        torch.manual_seed(0)
        assert_equal(LAW, g(x), expected)
