"""Placements: the parts of a tensor on the ranks are the whole, and those of torch's DTensor; and
what is refused."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from refusal import refused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    Partial as TorchPartial,
    Replicate as TorchReplicate,
    Shard as TorchShard,
    distribute_tensor,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.errors import MeshError
from weft.meshes.mesh import Mesh, coordinates_of
from weft.meshes.placements import (
    Partial,
    PerRank,
    Placement,
    Placements,
    Replicate,
    Shard,
    as_placement,
    is_placement,
    on_axes,
    part_of,
    same_parts,
    whole_of,
)

INSTEAD = "Shard(dim), Replicate() or Partial(); PerRank() for a tuple of trees"
PLACEMENTS = st.sampled_from(
    (Replicate(), Shard(0), Shard(1), Shard(-1), Partial(), Partial("max"), Partial("min"))
)


@given(
    st.tuples(PLACEMENTS, PLACEMENTS),
    st.permutations(("a", "b")),
    st.sampled_from(((2, 3), (1, 4), (2, 2))),
)
def test_the_parts_are_the_whole(
    placed: tuple[Placement, Placement], order: list[str], sizes: tuple[int, int]
) -> None:
    mesh = Mesh(a=sizes[0], b=sizes[1])
    value = torch.arange(12 * 24.0).reshape(12, 24)
    by_axis = dict(zip(order, placed, strict=True))
    layout = on_axes(Placements(**by_axis), mesh, "f()")
    parts = [part_of(value, layout, mesh, rank, "f()") for rank in mesh]
    assert torch.equal(whole_of(parts, layout, mesh), value)
    assert len({part.shape for part in parts}) == 1


@pytest.fixture
def ranks() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("rank", range(6))
def test_the_parts_are_those_of_a_dtensor(rank: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=6, store=FakeStore())
    theirs = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    mesh = Mesh(a=2, b=3)
    value = torch.arange(12 * 24.0).reshape(12, 24)
    kinds = (TorchReplicate(), TorchShard(0), TorchShard(1))
    for placed in [(one, other) for one in kinds for other in kinds]:
        expected = distribute_tensor(value, theirs, placed, src_data_rank=None).to_local()
        placements = dict(zip(mesh.sizes, placed, strict=True))
        layout = on_axes(Placements(**placements), mesh, "f()")
        assert torch.equal(part_of(value, layout, mesh, rank, "f()"), expected), placed


def test_shards_are_views_and_a_sum_is_on_the_first_rank() -> None:
    value = torch.ones(4)
    mesh = Mesh(a=2)
    assert (
        part_of(value, (("a", Shard(0)),), mesh, 1, "f()").untyped_storage().data_ptr()
        == value.data_ptr()
    )
    assert part_of(value, (("a", Replicate()),), mesh, 1, "f()") is value
    sums = [part_of(value, (("a", Partial()),), mesh, rank, "f()").sum().item() for rank in mesh]
    assert sums == [4, 0]
    terms = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, 4.0])]
    assert whole_of(terms, (("a", Partial("max")),), mesh).tolist() == [3, 5]
    assert whole_of(terms, (("a", Partial("min")),), mesh).tolist() == [1, 4]


def test_those_of_torch_stand_for_ours() -> None:
    assert as_placement(TorchShard(1), "f()") == Shard(1)
    assert as_placement(TorchReplicate(), "f()") == Replicate()
    assert as_placement(TorchPartial("max"), "f()") == Partial("max")
    assert Placements(a=TorchShard(0)) == Placements(a=Shard(0))
    assert all(
        map(
            is_placement,
            (TorchShard(0), TorchReplicate(), TorchPartial(), Placements(), PerRank(), Shard(0)),
        )
    )
    assert not any(map(is_placement, ("Shard", None, {"a": Shard(0)}, Mesh(a=2))))


@given(st.dictionaries(st.sampled_from(("data", "tensor")), PLACEMENTS))
@settings(max_examples=20)
def test_placements_print_as_they_are_written(by_axis: dict[str, Placement]) -> None:
    given_as = Placements(**by_axis)
    assert (
        eval(
            str(given_as), {kind.__name__: kind for kind in (Placements, Shard, Replicate, Partial)}
        )
        == given_as
    )
    assert str(PerRank()) == "PerRank()"


def test_an_axis_that_is_not_named_has_replicas() -> None:
    mesh = Mesh(data=2, tensor=2)
    assert on_axes(Placements(tensor=Shard(0)), mesh, "f()") == (
        ("tensor", Shard(0)),
        ("data", Replicate()),
    )
    assert on_axes(Replicate(), mesh, "f()") == (("data", Replicate()), ("tensor", Replicate()))
    assert on_axes(Shard(1), Mesh(tensor=2), "f()") == (("tensor", Shard(1)),)


@pytest.mark.parametrize("order", list(itertools.permutations(("x", "y", "z"), 2)))
def test_the_axis_that_is_named_first_cuts_first(order: tuple[str, str]) -> None:
    """JAX: `P((first, second))` numbers the blocks with the index along `first` in the higher
    place."""
    mesh = Mesh(x=2, y=3, z=2)
    value = torch.arange(12.0)
    first, second = order
    layout = on_axes(Placements(**dict.fromkeys(order, Shard(0))), mesh, "f()")
    blocks = value.view(mesh.sizes[first], mesh.sizes[second], -1)
    for rank in mesh:
        place = coordinates_of(mesh, rank)
        assert torch.equal(
            part_of(value, layout, mesh, rank, "f()"), blocks[place[first], place[second]]
        )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Placements(a=Shard(0), b=Shard(1)), Placements(b=Shard(1), a=Shard(0)), True),
        (Placements(a=Shard(0), b=Shard(0)), Placements(b=Shard(0), a=Shard(0)), False),
        (Placements(a=Shard(0), b=Shard(-2)), Placements(b=Shard(0), a=Shard(0)), False),
        (Placements(a=Shard(-1)), Placements(b=Replicate(), a=Shard(1)), True),
        (Placements(a=Partial()), Placements(a=Replicate()), False),
    ],
)
def test_the_order_counts_only_where_axes_cut_one_dimension(
    one: Placements, other: Placements, same: bool
) -> None:
    mesh = Mesh(a=2, b=2)
    assert same_parts(on_axes(one, mesh, "f()"), on_axes(other, mesh, "f()"), ndim=2) == same


@pytest.mark.parametrize(
    ("placed", "mesh", "problem", "instead"),
    [
        (
            Placements(rows=Shard(0)),
            Mesh(data=2, tensor=2),
            "Placements(rows=Shard(0)), on axis 'rows' of Mesh(data=2, tensor=2)",
            "one of data, tensor",
        ),
        (
            Shard(0),
            Mesh(data=2, tensor=2),
            "Shard(0) on Mesh(data=2, tensor=2), which has 2 axes",
            "Placements(tensor=Shard(0))",
        ),
        ("tensor", Mesh(tensor=2), "a placement that is a str", INSTEAD),
        (None, Mesh(tensor=2), "a placement that is None", INSTEAD),
        (Partial("mean"), Mesh(tensor=2), "Partial('mean')", "one of 'sum', 'max', 'min'"),
        (TorchPartial("avg"), Mesh(tensor=2), "Partial('avg')", "one of 'sum', 'max', 'min'"),
    ],
)
def test_what_is_no_placement_is_refused(
    placed: Any, mesh: Mesh, problem: str, instead: str
) -> None:
    with refused(MeshError, "f()", problem, instead):
        on_axes(placed, mesh, "f()")


def test_a_placement_that_is_none_is_named_with_its_axis() -> None:
    with refused(MeshError, "Placements(tensor=...)", "a placement that is an int", INSTEAD):
        Placements(tensor=1)


@pytest.mark.parametrize(
    ("dim", "problem", "instead"),
    [
        (2, "Shard(2) of a tensor [6, 5]", "one of its dimensions"),
        (
            1,
            "Shard(1) of a tensor [6, 5] over 3 ranks along 'a'",
            "a dimension that is a multiple of 3: pad it, or Replicate()",
        ),
    ],
)
def test_a_tensor_that_the_ranks_cannot_share_is_refused(
    dim: int, problem: str, instead: str
) -> None:
    with refused(MeshError, "f()", problem, instead):
        part_of(torch.ones(6, 5), (("a", Shard(dim)),), Mesh(a=3), 0, "f()")
