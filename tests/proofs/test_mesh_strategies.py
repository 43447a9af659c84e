"""`meshes` draws meshes of the axes that it is asked for."""

import pytest
from hypothesis import find, given, strategies as st
from refusal import refused

import weft
from weft.errors import MeshError
from weft.proofs.strategies import meshes


@given(
    st.sampled_from([("rows",), ("pipeline", "tensor"), ("data", "pipeline", "tensor")]).flatmap(
        lambda axes: st.tuples(st.just(axes), meshes(axes=axes))
    )
)
def test_a_mesh_has_the_axes_in_order(drawn: tuple[tuple[str, ...], weft.Mesh]) -> None:
    axes, mesh = drawn
    assert tuple(mesh.sizes) == axes
    assert 2 <= mesh.num_ranks <= 8


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_size_is_drawn(size: int) -> None:
    assert find(meshes(axes=["tensor"]), lambda mesh: mesh.num_ranks == size) == weft.Mesh(
        tensor=size
    )
    assert len(find(meshes(), lambda mesh: len(mesh.sizes) == 2).sizes) == 2


@pytest.mark.parametrize("axes", [(), ("a", "a"), ("a", "b", "c", "d")])
def test_axes_that_no_mesh_has(axes: tuple[str, ...]) -> None:
    with refused(MeshError, f"meshes(axes={axes!r})", "<any>", "1 to 3 names"):
        find(meshes(axes=axes), lambda _: True)
