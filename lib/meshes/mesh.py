"""`Mesh`: ranks in a grid whose axes have names."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Never, cast

import attrs

from weft.arguments.checks import is_int, kind_of
from weft.errors import MeshError


@attrs.frozen(init=False)
class Mesh:
    """Ranks in a grid whose axes have names, numbered row by row, as in
    `torch.distributed.device_mesh`.

    Args:
        sizes: the number of ranks along each axis, by its name.
        unnamed: only to refuse sizes without names.

    Raises:
        MeshError: there is no axis, an axis has no name, or the size of an axis is not a whole
            number >= 1.

    >>> mesh = Mesh(pipeline=2, tensor=2)
    >>> mesh.num_ranks, mesh.sizes
    (4, {'pipeline': 2, 'tensor': 2})
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, *unnamed: Never, **sizes: int) -> None:
        wrong = next((name for name, size in sizes.items() if not is_int(size, 1)), None)
        if wrong is not None or not sizes or unnamed:
            if unnamed:
                problem = "sizes without names"
            elif wrong is None:
                problem = "no axis"
            else:
                problem = f"{wrong}={sizes[wrong]!r}"
            shown = [f"{size!r:.20}" for size in cast(tuple[Any, ...], unnamed)]
            shown += [f"{name}={size!r:.20}" for name, size in sizes.items()]
            written = ", ".join(shown)
            raise MeshError(
                f"Mesh({written})", problem, "the number of ranks along each axis: Mesh(tensor=2)"
            )
        self.__attrs_init__(tuple(sizes.items()))

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis."""
        return dict(self.axes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_ranks))

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"


def as_mesh(mesh: Any, call: str) -> "Mesh":
    """The mesh for a `Mesh`, a dict of sizes, or a `torch.distributed.device_mesh.DeviceMesh`,
    whose ranks are numbered by their places in it.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, Mapping):
        return Mesh(**mesh)
    # By its attributes, because an import of torch's class would take long.
    names = getattr(mesh, "mesh_dim_names", None)
    shape = getattr(mesh, "shape", None)
    if names and shape is not None:
        return Mesh(**dict(zip(names, map(int, shape), strict=True)))
    if shape is not None and hasattr(mesh, "mesh_dim_names"):
        kind = "a DeviceMesh without names"
    else:
        kind = kind_of(mesh)
    raise MeshError(
        call,
        f"mesh is {kind}",
        'weft.Mesh(tensor=2), or a DeviceMesh with mesh_dim_names=("tensor",)',
    )


def coordinates_of(mesh: Mesh, rank: int) -> dict[str, int]:
    """The place of a rank along each axis."""
    coordinates = dict[str, int]()
    # Row by row: the last axis counts fastest.
    for name, size in reversed(mesh.axes):
        rank, coordinates[name] = divmod(rank, size)
    return {name: coordinates[name] for name, _ in mesh.axes}


def stride_of(mesh: Mesh, axis: str) -> int:
    """The difference between the numbers of neighbours along an axis."""
    names = [name for name, _ in mesh.axes]
    return math.prod(size for _, size in mesh.axes[names.index(axis) + 1 :])


def group_of(mesh: Mesh, rank: int, axis: str) -> tuple[int, ...]:
    """The ranks that differ from `rank` only in their place along `axis`, and `rank` itself, in
    order."""
    first = rank - coordinates_of(mesh, rank)[axis] * stride_of(mesh, axis)
    return tuple(first + index * stride_of(mesh, axis) for index in range(mesh.sizes[axis]))
