"""Placements of a tensor on the ranks of a mesh, in the terms of `torch.distributed.tensor`:
`Shard`, `Replicate` and `Partial`. Its own placements may stand in their places.

These are classes of their own because the import of torch's takes as long as that of torch.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.errors import MeshError
from weft.meshes.mesh import Mesh
from weft.ops.products.parts import balanced

# The functions that combine the values of two ranks.
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": operator.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduced(inputs: Sequence[Tensor], reduce_op: str) -> Tensor:
    """The sum (maximum, minimum) of tensors, as a balanced tree: neighbours are added, then
    neighbouring sums. A sum of 16-bit values is made in float32, and rounded once.

    >>> reduced([torch.tensor(2.0**25), torch.tensor(1.0), torch.tensor(1.0), torch.tensor(2.0)], "sum") - 2.0**25
    tensor(4.)
    """
    if reduce_op != "sum" or inputs[0].dtype not in (torch.float16, torch.bfloat16):
        return balanced(REDUCTIONS[reduce_op], inputs)
    return balanced(REDUCTIONS[reduce_op], [x.float() for x in inputs]).to(inputs[0].dtype)


@attrs.frozen
class Shard:
    """Each rank along the axis holds one part of dimension `dim`, all of one size, in the order of
    the ranks."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@attrs.frozen
class Replicate:
    """Each rank along the axis holds the whole tensor.

    As the placement of a result it is a claim, which `weft.shard` checks, so that a forgotten
    `all_reduce` is an error. Nothing is compared where the ranks compute the result with the same
    operators from the same values, which a collective makes of different ones. Elsewhere each call
    compares the ranks' results, in every bit; on a GPU the host waits for them. What must be
    compared can neither be differentiated nor become part of a graph, except where only `PerRank()`
    arguments, such as weights that each rank loads, may differ.
    """

    def __str__(self) -> str:
        return "Replicate()"


@attrs.frozen
class Partial:
    """The tensor is the sum of what the ranks along the axis hold. As the placement of an argument:
    the first rank gets the whole tensor, and the others get zeros (for `max` and `min`, the whole
    tensor too).

    Args:
        reduce_op: `sum`; or `max` or `min`, for the maximum or the minimum.
    """

    reduce_op: str = "sum"

    def __str__(self) -> str:
        if self.reduce_op != "sum":
            return f"Partial({self.reduce_op!r})"
        return "Partial()"


@attrs.frozen
class PerRank:
    """A tuple with one tree for each rank: each gets its own, and returns one. For what is never
    whole, such as parameters that each rank loads, or states that each writes in place."""

    def __str__(self) -> str:
        return "PerRank()"


Placement = Shard | Replicate | Partial
_PLACEMENT = "Shard(dim), Replicate() or Partial(); PerRank() for a tuple of trees"


@attrs.frozen(init=False)
class Placements:
    """The placements of a tensor on a mesh of several axes, by axis; on the axes that are not named
    it is replicated.

    A dimension that is sharded over several axes is cut along the one that is named first, and each
    part along the next: `Placements(z=Shard(0), y=Shard(0))` is JAX's `P(("z", "y"))`, whatever the
    order of the axes in the mesh.

    Args:
        by_axis: for the name of an axis, its placement.

    >>> print(Placements(data=Shard(0), tensor=Shard(1)))
    Placements(data=Shard(0), tensor=Shard(1))
    """

    by_axis: tuple[tuple[str, Placement], ...]

    def __init__(self, **by_axis: Any) -> None:
        call = f"Placements({', '.join(f'{axis}=...' for axis in by_axis)})"
        self.__attrs_init__(
            tuple((axis, as_placement(placement, call)) for axis, placement in by_axis.items())
        )

    def __str__(self) -> str:
        return f"Placements({', '.join(f'{axis}={placement}' for axis, placement in self.by_axis)})"


def as_placement(spec: Any, call: str) -> Placement:
    """A placement, of weft's or of torch's.

    Raises:
        MeshError: it is neither.
    """
    if isinstance(spec, Shard | Replicate | Partial):
        placement: Placement = spec
    elif is_placement(spec) and not isinstance(spec, Placements):
        placement = _OF_TORCH[type(spec).__name__](spec)
    else:
        raise MeshError(call, f"a placement that is {kind_of(spec)}", _PLACEMENT)
    if isinstance(placement, Partial) and placement.reduce_op not in REDUCTIONS:
        raise MeshError(
            call, f"Partial({placement.reduce_op!r})", f"one of {', '.join(map(repr, REDUCTIONS))}"
        )
    return placement


_OF_TORCH: dict[str, Callable[[Any], Placement]] = {
    "Shard": lambda torch_placement: Shard(torch_placement.dim),
    "Replicate": lambda torch_placement: Replicate(),
    "Partial": lambda torch_placement: Partial(torch_placement.reduce_op),
}


def is_placement(node: Any) -> bool:
    """Whether a value is a placement, of weft's or of torch's, or several by axis."""
    of_torch = (
        type(node).__module__.startswith("torch.distributed") and type(node).__name__ in _OF_TORCH
    )
    return isinstance(node, Shard | Replicate | Partial | Placements | PerRank) or of_torch


# The placement on each axis of a mesh: those that cut a tensor, in the order in which they do, and
# then the others.
Layout = tuple[tuple[str, Placement], ...]


def on_axes(spec: Any, mesh: Mesh, call: str) -> Layout:
    """The placement on each axis of a mesh.

    Raises:
        MeshError: an axis that the mesh lacks; one placement that may be on any of several axes; or
            no placement.
    """
    if isinstance(spec, Placements):
        by_axis = dict(spec.by_axis)
        if unknown := next((axis for axis in by_axis if axis not in mesh.sizes), None):
            raise MeshError(
                call, f"{spec}, on axis {unknown!r} of {mesh}", f"one of {', '.join(mesh.sizes)}"
            )
        cuts = [
            (axis, placement) for axis, placement in spec.by_axis if isinstance(placement, Shard)
        ]
        rest = [(axis, by_axis.get(axis, Replicate())) for axis in mesh.sizes]
        return (*cuts, *(pair for pair in rest if not isinstance(pair[1], Shard)))
    placement = as_placement(spec, call)
    if len(mesh.axes) > 1 and placement != Replicate():
        instead = f"Placements({mesh.axes[-1][0]}={placement})"
        raise MeshError(call, f"{placement} on {mesh}, which has {len(mesh.axes)} axes", instead)
    return everywhere(placement, mesh)


def everywhere(placement: Placement, mesh: Mesh) -> Layout:
    """One placement on all axes of a mesh."""
    return tuple((axis, placement) for axis in mesh.sizes)


def same_parts(one: Layout, other: Layout, ndim: int) -> bool:
    """Whether two layouts give each rank the same part of a tensor with so many dimensions."""
    return _by_dimension(one, ndim) == _by_dimension(other, ndim)


def _by_dimension(layout: Layout, ndim: int) -> tuple[Any, Any]:
    """The axes that cut each dimension, in order, and the placements on the others."""
    cuts = [
        (placement.dim % ndim, axis) for axis, placement in layout if isinstance(placement, Shard)
    ]
    rest = {axis: placement for axis, placement in layout if not isinstance(placement, Shard)}
    return sorted(cuts, key=lambda cut: cut[0]), rest


def part_key(layout: Layout, mesh: Mesh, rank: int) -> Hashable:
    """A key that two ranks share if they hold equal parts, whatever tensor it is that has this
    layout."""
    place = mesh.coordinates(rank)
    key: list[Hashable] = []
    for axis, placement in layout:
        match placement:
            case Shard():
                key.append((axis, place[axis]))
            case Partial("sum"):
                # The first one has all of it, and the others zeros
                key.append((axis, place[axis] > 0))
            case Partial() | Replicate():
                pass
    return tuple(key)


def part_of(value: Tensor, layout: Layout, mesh: Mesh, rank: int, call: str) -> Tensor:
    """A rank's part of a tensor. Shards are views.

    Raises:
        MeshError: a dimension that the tensor lacks, or that the ranks cannot share evenly.
    """
    place = mesh.coordinates(rank)
    for axis, placement in layout:
        match placement:
            case Shard(dim):
                extent = _extent(value, dim, axis, mesh.sizes[axis], call)
                value = value.narrow(dim, place[axis] * extent, extent)
            case Partial("sum") if place[axis]:
                value = torch.zeros_like(value)
            case Partial() | Replicate():
                pass
    return value


def _extent(value: Tensor, dim: int, axis: str, size: int, call: str) -> int:
    if not -value.ndim <= dim < value.ndim:
        raise MeshError(
            call, f"Shard({dim}) of a tensor {list(value.shape)}", "one of its dimensions"
        )
    if value.shape[dim] % size:
        problem = f"Shard({dim}) of a tensor {list(value.shape)} over {size} ranks along {axis!r}"
        raise MeshError(
            call, problem, f"a dimension that is a multiple of {size}: pad it, or Replicate()"
        )
    return value.shape[dim] // size


def whole_of(parts: Sequence[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The tensor of which the ranks hold these parts: the inverse of `part_of`. Of replicas, the
    first is taken."""
    by_rank = dict(enumerate(parts))
    for axis, placement in reversed(layout):
        firsts = [rank for rank in by_rank if not mesh.coordinates(rank)[axis]]
        by_rank = {
            first: _joined([by_rank[rank] for rank in mesh.group(first, axis)], placement)
            for first in firsts
        }
    (whole,) = by_rank.values()
    return whole


def _joined(group: list[Tensor], placement: Placement) -> Tensor:
    match placement:
        case Shard(dim):
            return torch.cat(group, dim)
        case Partial(reduce_op):
            return reduced(group, reduce_op)
        case Replicate():
            return group[0]
