"""`Mesh`: the numbers, places and groups of its ranks, against torch's DeviceMesh; and what it
refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from refusal import refused
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.errors import MeshError
from weft.meshes.mesh import Mesh, as_mesh, coordinates_of, group_of, stride_of

SIZES = st.dictionaries(st.sampled_from("abc"), st.integers(1, 4), min_size=1)


@pytest.fixture
def world() -> Iterator[None]:
    """A world of 6 ranks that send nothing, in which this process is rank 4."""
    dist.init_process_group("fake", rank=4, world_size=6, store=FakeStore())
    yield
    dist.destroy_process_group()


@given(SIZES)
def test_ranks_are_numbered_row_by_row(sizes: dict[str, int]) -> None:
    mesh = Mesh(**sizes)
    grid = torch.arange(torch.Size(sizes.values()).numel()).reshape(*sizes.values())
    assert list(mesh) == list(range(mesh.num_ranks)) == grid.flatten().tolist()
    for rank in mesh:
        place = coordinates_of(mesh, rank)
        assert list(place) == list(sizes)
        assert grid[tuple(place.values())] == rank
        for index, axis in enumerate(sizes):
            along = [slice(None) if i == index else at for i, at in enumerate(place.values())]
            assert group_of(mesh, rank, axis) == tuple(grid[tuple(along)].tolist())
            assert stride_of(mesh, axis) == grid.stride(index)


@pytest.mark.usefixtures("world")
def test_groups_are_those_of_a_device_mesh() -> None:
    theirs = init_device_mesh("cpu", (2, 3), mesh_dim_names=("data", "tensor"))
    mesh = as_mesh(theirs, "f()")
    assert mesh == Mesh(data=2, tensor=3)
    assert list(coordinates_of(mesh, 4).values()) == list(theirs.get_coordinate() or ())
    for axis in mesh.sizes:
        assert list(group_of(mesh, 4, axis)) == dist.get_process_group_ranks(theirs.get_group(axis))


@pytest.mark.usefixtures("world")
def test_a_device_mesh_needs_names() -> None:
    instead = 'weft.Mesh(tensor=2), or a DeviceMesh with mesh_dim_names=("tensor",)'
    with refused(MeshError, "f()", "mesh is a DeviceMesh without names", instead):
        as_mesh(DeviceMesh("cpu", torch.arange(6)), "f()")


def test_a_mesh_is_given_as_one_or_as_its_sizes() -> None:
    assert as_mesh({"tensor": 2}, "f()") == as_mesh(Mesh(tensor=2), "f()") == Mesh(tensor=2)
    assert Mesh(data=2, tensor=3) != Mesh(tensor=3, data=2)
    assert str(Mesh(data=2, tensor=3)) == "Mesh(data=2, tensor=3)"
    with refused(
        MeshError,
        "f()",
        "mesh is an int",
        'weft.Mesh(tensor=2), or <any>mesh_dim_names=("tensor",)',
    ):
        as_mesh(4, "f()")


@pytest.mark.parametrize(
    ("sizes", "call", "problem"),
    [
        ({}, "Mesh()", "no axis"),
        ({"tensor": 0}, "Mesh(tensor=0)", "tensor=0"),
        ({"data": 2, "tensor": 1.5}, "Mesh(data=2, tensor=1.5)", "tensor=1.5"),
        ({"tensor": True}, "Mesh(tensor=True)", "tensor=True"),
    ],
)
def test_sizes_that_are_no_numbers_are_refused(
    sizes: dict[str, Any], call: str, problem: str
) -> None:
    with refused(MeshError, call, problem, "the number of ranks along each axis: Mesh(tensor=2)"):
        Mesh(**sizes)
