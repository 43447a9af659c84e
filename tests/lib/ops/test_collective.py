"""Collectives as functions: where they may be called, on what, and the texts of the errors."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from refusal import refused
from torch import Tensor

from weft.errors import MeshError, ProgramError
from weft.meshes.mesh import Mesh
from weft.meshes.placements import Replicate
from weft.ops.transfers.collective import (
    Place,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    placed,
    ppermute,
    reduce_scatter,
)
from weft.ops.transfers.transfer import register
from weft.transforms.shards.shard import shard

CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce(x, 'tensor')": lambda x: all_reduce(x, "tensor"),
    "all_gather(x, 'tensor', dim=0)": lambda x: all_gather(x, "tensor"),
    "reduce_scatter(x, 'tensor', dim=0)": lambda x: reduce_scatter(x, "tensor"),
    "ppermute(x, 'tensor', [(0, 1)])": lambda x: ppermute(x, "tensor", [(0, 1)]),
    "all_to_all(x, 'tensor', split_dim=0, concat_dim=1)": lambda x: all_to_all(
        x, "tensor", split_dim=0, concat_dim=1
    ),
    "axis_index('tensor')": lambda x: axis_index("tensor"),
    "axis_size('tensor')": lambda x: axis_size("tensor"),
}
PAIRS = (
    "pairs of places along the axis, each once as a sender and once as a receiver: [(0, 1), (1, 0)]"
)
OF_TENSORS = [call for call in CALLS if not call.startswith("axis")]


@pytest.mark.parametrize("call", CALLS)
def test_outside_a_shard(call: str) -> None:
    instead = "weft.shard(f, mesh, in_placements, out_placements), and the call inside f"
    with refused(
        MeshError, call, "no mesh: the call is not in a function that weft.shard runs", instead
    ):
        CALLS[call](torch.ones(2, 2))


@pytest.mark.parametrize("call", CALLS)
def test_an_axis_that_the_mesh_lacks(call: str) -> None:
    problem = "axis 'tensor' of Mesh(data=2, rows=2)"
    with (
        placed(Place(Mesh(data=2, rows=2), 0)),
        refused(MeshError, call, problem, "one of 'data', 'rows'"),
    ):
        CALLS[call](torch.ones(2, 2))


@pytest.mark.parametrize("call", OF_TENSORS)
def test_what_is_no_tensor(call: str) -> None:
    instead = "a tensor; for trees, torch.utils._pytree.tree_map"
    with placed(Place(Mesh(tensor=2), 0)), refused(MeshError, call, "x is a dict", instead):
        CALLS[call]({"h": torch.ones(2)})


@pytest.mark.parametrize(
    ("call", "fn", "problem", "instead"),
    [
        (
            "all_reduce(x, 'tensor')",
            lambda x: all_reduce(x, "tensor", reduce_op="mean"),
            "reduce_op='mean'",
            "one of 'sum', 'max', 'min'",
        ),
        (
            "all_gather(x, 'tensor', dim=2)",
            lambda x: all_gather(x, "tensor", dim=2),
            "x [4, 3]",
            "one of its dimensions",
        ),
        (
            "reduce_scatter(x, 'tensor', dim=1)",
            lambda x: reduce_scatter(x, "tensor", dim=1),
            "x [4, 3] for 2 ranks",
            "a dimension 1 that is a multiple of 2",
        ),
        (
            "all_to_all(x, 'tensor', split_dim=1, concat_dim=0)",
            lambda x: all_to_all(x, "tensor", split_dim=1, concat_dim=0),
            "x [4, 3] for 2 ranks",
            "a dimension 1 that is a multiple of 2",
        ),
        (
            "all_to_all(x, 'tensor', split_dim=0, concat_dim=-3)",
            lambda x: all_to_all(x, "tensor", split_dim=0, concat_dim=-3),
            "x [4, 3]",
            "one of its dimensions",
        ),
        (
            "ppermute(x, 'tensor', [(0, 2)])",
            lambda x: ppermute(x, "tensor", [(0, 2)]),
            "place 2 among 2 ranks",
            PAIRS,
        ),
        (
            "ppermute(x, 'tensor', [(0, 1), (0, 0)])",
            lambda x: ppermute(x, "tensor", [(0, 1), (0, 0)]),
            "place 0, which sends twice",
            PAIRS,
        ),
        (
            "ppermute(x, 'tensor', {0: 1})",
            lambda x: ppermute(x, "tensor", cast(Any, {0: 1})),
            "perm is {0: 1}",
            PAIRS,
        ),
    ],
)
def test_options_that_do_not_fit(
    call: str, fn: Callable[[Tensor], Any], problem: str, instead: str
) -> None:
    with placed(Place(Mesh(tensor=2), 0)), refused(MeshError, call, problem, instead):
        fn(torch.ones(4, 3))


def test_the_place_is_that_of_the_rank() -> None:
    with placed(Place(Mesh(data=2, tensor=3), 4)):
        assert (axis_index("data"), axis_index("tensor")) == (1, 1)
        assert (axis_size("data"), axis_size("tensor")) == (2, 3)


class Alone:
    """A rank that gets back what it brings, and notes it."""

    def __init__(self) -> None:
        self.performed: list[str] = []

    def perform(self, effect: Any, x: Tensor, /) -> Tensor:
        self.performed.append(str(effect))
        return x.clone()


def test_a_member_executes_what_is_called() -> None:
    member = Alone()
    place = Place(Mesh(tensor=1), 0, register(member))
    with placed(place):
        assert all_reduce(torch.ones(2), "tensor", reduce_op="max").tolist() == [1, 1]
        assert all_to_all(torch.ones(2, 2), "tensor", split_dim=1, concat_dim=-2).shape == (2, 2)
    assert member.performed == [
        "all_reduce max among 0 [mb 0]",
        "all_to_all dim 1 to -2 among 0 [mb 0]",
    ]


def test_a_member_that_is_gone_is_named() -> None:
    place = Place(Mesh(tensor=1), 0, register(Alone()))
    problem = "a transport that is closed"
    instead = "make a new one"
    with placed(place), refused(ProgramError, "'all_reduce sum among 0 [mb 0]'", problem, instead):
        all_reduce(torch.ones(2), "tensor")


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.float16, torch.float64, torch.complex64]
)
def test_any_dtype_is_gathered(dtype: torch.dtype) -> None:
    f = shard(lambda x: all_gather(x, "tensor"), Mesh(tensor=3), Replicate(), Replicate())
    assert torch.equal(f(torch.ones(1, dtype=dtype)), torch.ones(3, dtype=dtype))
