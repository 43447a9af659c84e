"""Placements of a tensor on the ranks of a mesh, in the terms of `torch.distributed.tensor`:
`Shard`, `Replicate` and `Partial`. The placements of torch are accepted in their place.

weft has separate classes because importing torch's takes as long as importing torch itself.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.errors import MeshError
from weft.meshes.mesh import Mesh, coordinates_of, group_of

# The functions that combine the values of two ranks.
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": operator.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def balanced(add: Callable[[Tensor, Tensor], Tensor], xs: Sequence[Tensor]) -> Tensor:
    """Combine the tensors with `add` as a balanced tree: `(x0 + x1) + (x2 + x3)`.

    If their number is a power of two, several ranks may each add an equal share of them, and then
    add the ranks' sums in the same way.
    """
    while len(xs) > 1:
        xs = [add(*xs[i : i + 2]) if i + 1 < len(xs) else xs[i] for i in range(0, len(xs), 2)]
    return xs[0]


def reduced(inputs: Sequence[Tensor], reduce_op: str) -> Tensor:
    """The sum (maximum, minimum) of tensors, as a balanced tree: neighbours are added, then
    neighbouring sums. A sum of 16-bit floats is computed in float32 and rounded once.

    >>> reduced([torch.tensor(2.0**25), torch.tensor(1.0), torch.tensor(1.0), torch.tensor(2.0)], "sum") - 2.0**25
    tensor(4.)
    """
    if reduce_op != "sum" or inputs[0].dtype not in (torch.float16, torch.bfloat16):
        return balanced(REDUCTIONS[reduce_op], inputs)
    return balanced(REDUCTIONS[reduce_op], [x.float() for x in inputs]).to(inputs[0].dtype)


@attrs.frozen
class Shard:
    """Each rank along the axis holds one part of dimension `dim`; the parts have the same size and
    are in the order of the ranks."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@attrs.frozen
class Replicate:
    """Each rank along the axis holds the whole tensor.

    As the placement of a result it is a claim that `weft.shard` checks, so that a forgotten
    `all_reduce` is an error. Nothing is compared if the ranks compute the result with the same
    operators from the same values; a collective makes equal values from different ones. Otherwise
    each call compares the ranks' results, bit for bit, and on a GPU the host waits for them. A
    result that must be compared can neither be differentiated nor become part of a graph, unless
    only `PerRank()` arguments, such as weights that each rank loads, may differ.
    """

    def __str__(self) -> str:
        return "Replicate()"


@attrs.frozen
class Partial:
    """The tensor is the sum of what the ranks along the axis hold.

    As the placement of an argument, it gives the whole tensor to the first rank and zeros to the
    others (for `max` and `min`, the whole tensor to all).

    Args:
        reduce_op: `sum`, `max` or `min`.
    """

    reduce_op: str = "sum"

    def __str__(self) -> str:
        if self.reduce_op != "sum":
            return f"Partial({self.reduce_op!r})"
        return "Partial()"


@attrs.frozen
class PerRank:
    """A tuple with one tree for each rank: each rank is passed its tree, or returns it.

    Use it for values that are never whole, such as parameters that each rank loads, or states that
    each rank writes in place.
    """

    def __str__(self) -> str:
        return "PerRank()"


Placement = Shard | Replicate | Partial
_PLACEMENT = "Shard(dim), Replicate() or Partial(); PerRank() for a tuple of trees"


@attrs.frozen(init=False)
class Placements:
    """The placements of a tensor on a mesh of several axes, by axis; along axes that are not named
    it is replicated.

    A dimension that is sharded over several axes is cut along the axis that is named first, and
    each part along the next: `Placements(z=Shard(0), y=Shard(0))` is JAX's `P(("z", "y"))`,
    whatever the order of the axes in the mesh.

    Args:
        by_axis: the placement along each axis, by the axis name.

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
    """The weft placement for a placement of weft or torch.

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
    """Whether a value is a placement of weft or torch, or a `Placements`."""
    # By its names, because an import of torch's classes would take long.
    of_torch = (
        type(node).__module__.startswith("torch.distributed") and type(node).__name__ in _OF_TORCH
    )
    return isinstance(node, Shard | Replicate | Partial | Placements | PerRank) or of_torch


# The placement along each axis of a mesh: first the shards, in the order in which they cut the
# tensor, then the others.
Layout = tuple[tuple[str, Placement], ...]


def on_axes(spec: Any, mesh: Mesh, call: str) -> Layout:
    """The placement along each axis of a mesh.

    Raises:
        MeshError: the mesh lacks an axis; it has several, and a single placement does not say which
            one it is for; or the value is not a placement.
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
    """Whether two layouts give each rank the same part of a tensor with `ndim` dimensions."""
    return _by_dimension(one, ndim) == _by_dimension(other, ndim)


def _by_dimension(layout: Layout, ndim: int) -> tuple[Any, Any]:
    """The axes that cut each dimension, in order, and the placements along the other axes."""
    cuts = [
        (placement.dim % ndim, axis) for axis, placement in layout if isinstance(placement, Shard)
    ]
    rest = {axis: placement for axis, placement in layout if not isinstance(placement, Shard)}
    # The sort is stable: within one dimension, the order of the cuts matters and is kept.
    return sorted(cuts, key=lambda cut: cut[0]), rest


def part_key(layout: Layout, mesh: Mesh, rank: int) -> Hashable:
    """A key that is the same for two ranks if they hold equal parts of every tensor with this
    layout."""
    place = coordinates_of(mesh, rank)
    key: list[Hashable] = []
    for axis, placement in layout:
        match placement:
            case Shard():
                key.append((axis, place[axis]))
            case Partial("sum"):
                # The first rank has the whole tensor, the others have zeros.
                key.append((axis, place[axis] > 0))
            case Partial() | Replicate():
                pass
    return tuple(key)


def part_of(value: Tensor, layout: Layout, mesh: Mesh, rank: int, call: str) -> Tensor:
    """A rank's part of a tensor. Shards are views.

    Raises:
        MeshError: the tensor lacks a dimension, or the ranks cannot share it evenly.
    """
    place = coordinates_of(mesh, rank)
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
    # The cuts are undone in reverse order; after each axis, only its first ranks remain.
    by_rank = dict(enumerate(parts))
    for axis, placement in reversed(layout):
        firsts = [rank for rank in by_rank if not coordinates_of(mesh, rank)[axis]]
        by_rank = {
            first: _joined([by_rank[rank] for rank in group_of(mesh, first, axis)], placement)
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
