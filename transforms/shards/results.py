"""What a sharded function returns, by its traces: the placement of each leaf, and whether the
ranks' parts fit together."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from torch import Tensor
from torch.fx import Node

from weft.errors import MeshError
from weft.meshes.distribute import match_placements
from weft.meshes.mesh import Mesh
from weft.meshes.placements import Layout, PerRank, Replicate, Shard, everywhere, on_axes
from weft.meshes.replicas import replicas
from weft.transforms.shards.tracing import Trace
from weft.values.trees import leaves_with_names, tree_flatten, tree_unflatten


@attrs.frozen(eq=False)
class PlacedResult:
    """A leaf of the result that has a placement on the mesh other than `PerRank()`.

    Args:
        name: the name of the leaf in errors.
        indices: for each rank, the index of the leaf among the rank's leaves.
        layout: the placement on each axis. A leaf that is not a tensor is the same on all ranks.
        unproven: axes along which it is `Replicate()` although ranks, by their traces, do not
            compute it from the same values: the axis, these ranks, and whether they would compute
            it from the same values if their `PerRank()` arguments, such as weights that each rank
            loads, were equal.
        has_known_size: whether its size does not depend on values of tensors.
    """

    name: str
    indices: tuple[int, ...]
    layout: Layout
    unproven: tuple[tuple[str, tuple[int, ...], bool], ...]
    has_known_size: bool

    def of(self, leaves_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """This leaf on each rank, out of all leaves by rank."""
        return [leaves[index] for leaves, index in zip(leaves_by_rank, self.indices, strict=True)]


@attrs.frozen
class _Place:
    """Stands for a leaf, by its index among all leaves of a rank."""

    index: int


def place_results(
    traces: Sequence[Trace],
    numbers: Sequence[Sequence[int]],
    alike: Sequence[Sequence[int]],
    mesh: Mesh,
    out_placements: Any,
    call: str,
) -> Iterator[PlacedResult]:
    """Yield the leaves of the result that have a placement.

    Args:
        traces: the traces of all ranks.
        numbers: for each leaf of each rank, its value number.
        alike: the value numbers that the leaves would have if the ranks' `PerRank()` arguments were
            equal.
        mesh, out_placements, call: as in `shard`.

    Raises:
        MeshError: placements of another structure than the result, or results that do not fit
            together: their structures, shapes or dtypes differ from rank to rank, or they lack the
            dimension of a `Shard`.
    """
    trees = [
        tree_unflatten([_Place(index) for index in range(len(one.leaves))], one.structure)
        for one in traces
    ]
    placed, _, _ = match_placements(out_placements, trees[0], call, "out_placements")
    below = [match_placements(out_placements, tree, call, "out_placements")[1] for tree in trees]
    names = [f"result{name}" for name, _ in leaves_with_names(trees[0])]
    for placement, parts in zip(placed, zip(*below, strict=True), strict=True):
        if isinstance(placement, PerRank):
            continue
        declared_layout = on_axes(placement, mesh, f"{call}: out_placements")
        flat = [tree_flatten(part) for part in parts]
        if different := [
            rank for rank, (_, structure) in enumerate(flat) if structure != flat[0][1]
        ]:
            problem = (
                f"results of other structures on other ranks: {_structures(flat, different[0])}"
            )
            raise MeshError(call, problem, "the same structure on every rank")
        for places in zip(*(places for places, _ in flat), strict=True):
            indices = tuple(place.index for place in places)
            leaves = [one.leaves[index] for one, index in zip(traces, indices, strict=True)]
            name = names[indices[0]]
            refuse_unlike(
                name,
                [leaf.meta["val"] if isinstance(leaf, Node) else leaf for leaf in leaves],
                declared_layout,
                call,
            )
            layout = declared_layout
            if isinstance(leaves[0], Node):
                _refuse_missing(name, leaves[0], declared_layout, call)
            else:
                layout = everywhere(Replicate(), mesh)
            values = [
                rank_numbers[index] for rank_numbers, index in zip(numbers, indices, strict=True)
            ]
            likewise = [
                rank_numbers[index] for rank_numbers, index in zip(alike, indices, strict=True)
            ]
            unproven = tuple(
                (axis, ranks, len({likewise[rank] for rank in ranks}) == 1)
                for axis, ranks in replicas(layout, mesh)
                if len({values[rank] for rank in ranks}) > 1
            )
            yield PlacedResult(name, indices, layout, unproven, all(map(_has_known_size, leaves)))


def _has_known_size(leaf: Any) -> bool:
    return not isinstance(leaf, Node) or all(
        isinstance(size, int) for size in leaf.meta["val"].shape
    )


def _structures(flat: Sequence[tuple[Any, Any]], rank: int) -> str:
    texts = [f"{flat[place][1]!s:.80} on rank {place}" for place in (0, rank)]
    return " and ".join(texts).replace("\n", " ")


def refuse_unlike(name: str, leaves: Sequence[Any], layout: Layout, call: str) -> None:
    """Raise MeshError if the kind, shape or dtype of a result differs between ranks."""
    kinds = [_kind(leaf) for leaf in leaves]
    rank = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if rank is None:
        return
    placed = ", ".join(map(str, dict.fromkeys(placement for _, placement in layout)))
    problem = (
        f"{name}, placed as {placed}, is {kinds[0]} on rank 0 and {kinds[rank]} on rank {rank}"
    )
    raise MeshError(
        call, problem, "the same shape and dtype on every rank: pad it, convert it; or PerRank()"
    )


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return "no tensor"
    return f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')} on '{leaf.device}'"


def _refuse_missing(name: str, leaf: Node, layout: Layout, call: str) -> None:
    """Raise MeshError if a result lacks the dimension along which it is sharded."""
    shape = leaf.meta["val"].shape
    for axis, placement in layout:
        if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
            problem = (
                f"{name} {list(shape)} is {placement} along {axis!r}, and has no dimension"
                f" {placement.dim}"
            )
            instead = (
                f"weft.all_reduce(..., {axis!r}) and Replicate(); Partial(); or x.reshape(1) for a"
                " part each"
            )
            raise MeshError(call, problem, instead)
