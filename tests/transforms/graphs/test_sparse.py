"""Sparse and nested tensors inside graphified functions: replayed, or refused with the reason."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify

LAW = "a graph is its function"
INDICES = torch.tensor([[0, 1], [1, 0]])
EYE = torch.eye(2).to_sparse()


def coo(v: Tensor) -> Tensor:
    """A sparse tensor whose elements depend on the argument."""
    return torch.sparse_coo_tensor(INDICES, v, (2, 2))


REPLAYED: dict[str, Callable[[Tensor], Tensor]] = {
    "an argument's elements": lambda v: coo(v) @ torch.ones(2, 1),
    "computed elements": lambda v: (coo(v) * 2) @ torch.ones(2, 1),
    "a sparse result": lambda v: coo(v) * 2,
    "a sum of two": lambda v: coo(v) + coo(v * 3),
    "a transposed one": lambda v: (coo(v) * 2).t().to_dense(),
    "a sum over an axis": lambda v: torch.sparse.sum(coo(v), 1).to_dense(),
    "a mask from outside": lambda v: torch.diag(v).sparse_mask(EYE).to_dense(),
    "one from outside": lambda v: torch.sparse.mm(EYE * 2, v[:, None]),
}
REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "to_sparse": (lambda v: v.to_sparse(), "aten._to_sparse.default has a result whose shape"),
    "to_sparse_csr": (lambda v: torch.diag(v).to_sparse_csr(), "has a result whose shape"),
    "coalesce": (lambda v: coo(v).coalesce(), "aten._coalesce.default has a result whose shape"),
    "in place": (lambda v: (coo(v) * 1).mul_(2), "aten.mul_.Tensor writes to a sparse tensor"),
    "nested": (
        lambda v: torch.nested.nested_tensor([v, v]).to_padded_tensor(0.0),
        "makes a nested tensor of strided",
    ),
}


@pytest.mark.parametrize("way", REPLAYED)
def test_sparse_tensors_are_computed_again(way: str) -> None:
    g = graphify(REPLAYED[way])
    fn = REPLAYED[way]
    for v in (torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([-1.0, 0.0])):
        assert_equal(LAW, g(v), fn(v))
    assert g.cache_info().captures == 1


@pytest.mark.parametrize("way", REFUSED)
def test_sparse_tensors_whose_size_depends_on_data_are_refused(way: str) -> None:
    fn, problem = REFUSED[way]
    with pytest.raises(CaptureError) as error:
        graphify(fn)(torch.tensor([1.0, 2.0]))
    assert problem in error.value.problem
