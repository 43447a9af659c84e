"""piecewise: operators to cut at, named in every way, and names that are refused."""

from typing import Any

import pytest
import torch
from refusal import refused
from torch import Tensor

import weft
from weft.errors import CaptureError
from weft.transforms.graphs.graphified import num_pieces


def sorts(x: Tensor) -> Tensor:
    return torch.sort(x * 2).values + 1


OPERATORS = (
    "operators by name, as in 'weft::paged_attention' or 'aten::sort', or as torch.ops.aten.sort"
)


def test_operators_that_are_none() -> None:
    for operators, written in (
        (torch.sort, "sort"),
        ("torch.sort", "'torch.sort'"),
        ("sort", "'sort'"),
        (3, "3"),
    ):
        with refused(CaptureError, "graphify(sorts, ...)", f"split_at={written}", OPERATORS):
            weft.piecewise(sorts, split_at=operators)
    instead = (
        "the operators to cut at, as in split_at='aten::sort'; or weft.graphify, for one graph"
    )
    with refused(CaptureError, "weft.piecewise(sorts)", "split_at=()", instead):
        weft.piecewise(sorts, split_at=())


def test_operators_that_are_not_called_are_told_beside_those_that_are() -> None:
    problem = "no call of aten::linear, which split_at names"
    with refused(
        CaptureError,
        "graphify(sorts)",
        problem,
        "name an operator that it calls: aten::add, aten::mul, aten::sort",
    ):
        weft.piecewise(sorts, split_at="aten::linear")(torch.ones(2))

    def many(x: Tensor) -> Tensor:
        for name in (
            "sin",
            "cos",
            "tan",
            "exp",
            "log",
            "abs",
            "neg",
            "sqrt",
            "tanh",
            "erf",
            "sinh",
            "cosh",
        ):
            x = getattr(torch, name)(x)
        return x

    with pytest.raises(CaptureError) as error:
        weft.piecewise(many, split_at="aten::sort")(torch.ones(2))
    assert error.value.instead.endswith(", ...")
    assert error.value.instead.count("aten::") == 10


@pytest.mark.parametrize(
    "operators",
    [
        torch.ops.aten.sort,
        torch.ops.aten.sort.default,
        "aten::sort.default",
        ["aten::sort", "aten::topk"],
    ],
)
def test_operators_in_every_way_to_name_them(operators: Any) -> None:
    @weft.piecewise(split_at=operators)
    def decorated(x: Tensor) -> Tensor:
        return sorts(x)

    assert decorated(torch.tensor([3.0, 1.0])).tolist() == [3, 7]
    assert num_pieces(decorated) == (2,)
    assert decorated.__name__ == "decorated"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_operator_at_which_it_is_cut_may_be_in_inference_mode(device: str) -> None:
    """Its results lie in tensors of inference mode, and a replay writes them outside of it."""

    @weft.piecewise(split_at="aten::sort")
    def step(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return sorts(x)

    for first in (3.0, 5.0, 2.0):
        x = torch.tensor([first, 1.0, 4.0], device=device)
        assert torch.equal(step(x), sorts(x))
