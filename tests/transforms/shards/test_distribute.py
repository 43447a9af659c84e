"""`distribute`: torch's `distribute_tensor` as the oracle, the way back, and refusals."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from refusal import refused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from weft.errors import MeshError

MESH = weft.Mesh(data=2, tensor=2)
X = torch.arange(32.0).view(4, 8)
THEIRS: dict[str, tuple[Any, Any]] = {
    "rows": (weft.Placements(tensor=weft.Shard(0)), [Replicate(), Shard(0)]),
    "columns by both": (
        weft.Placements(data=weft.Shard(1), tensor=weft.Shard(1)),
        [Shard(1), Shard(1)],
    ),
    "rows and columns": (
        weft.Placements(data=weft.Shard(0), tensor=weft.Shard(1)),
        [Shard(0), Shard(1)],
    ),
    "replicas": (weft.Replicate(), [Replicate(), Replicate()]),
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("rank", range(4))
def test_parts_are_those_of_torch(name: str, rank: int) -> None:
    ours, theirs = THEIRS[name]
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        expected = distribute_tensor(X, mesh, theirs, src_data_rank=None)
        assert isinstance(expected, DTensor)
        assert torch.equal(weft.distribute(X, MESH, ours)[rank], expected.to_local())
        assert torch.equal(weft.distribute(X, mesh, ours)[rank], expected.to_local())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "placed", [*(ours for ours, _ in THEIRS.values()), weft.Placements(tensor=weft.Partial())]
)
def test_shard_takes_the_parts_and_gives_back_the_whole(placed: Any) -> None:
    parts = weft.distribute({"x": X, "n": 3}, MESH, {"x": placed, "n": weft.Replicate()})
    whole = weft.shard(lambda tree: tree["x"] * tree["n"], MESH, weft.PerRank(), placed)(parts)
    assert torch.equal(whole, X * 3)


def test_one_placement_holds_for_all_below_it() -> None:
    one, two = weft.distribute(
        {"a": [X, X + 1], "b": X}, {"tensor": 2}, {"a": weft.Shard(0), "b": weft.Replicate()}
    )
    assert torch.equal(torch.cat([one["a"][1], two["a"][1]]), X + 1)
    assert two["b"] is X


@pytest.mark.parametrize(
    ("placed", "problem", "instead"),
    [
        (
            weft.Shard(0),
            "Shard(0) of a tensor [3, 2] over 2 ranks along 'tensor'",
            "a dimension that is a <any>",
        ),
        (
            [weft.Shard(0)],
            "placements of another structure than the values: <any>",
            "the same structure, or <any>",
        ),
        (weft.PerRank(), "PerRank() of a whole tree", "Shard(dim), Replicate() or Partial()"),
    ],
)
def test_what_cannot_be_cut_is_refused(placed: Any, problem: str, instead: str) -> None:
    with refused(MeshError, "weft.distribute(tree, Mesh(tensor=2), ...)", problem, instead):
        weft.distribute(torch.ones(3, 2), weft.Mesh(tensor=2), placed)
