"""`distribute`: each rank's part of a tree of whole tensors."""

from typing import Any

from torch import Tensor

from weft.errors import MeshError
from weft.meshes.mesh import as_mesh
from weft.meshes.placements import PerRank, is_placement, on_axes, part_of
from weft.values.donation import refuse_donated_in
from weft.values.trees import TreeSpec, tree_flatten, tree_map, tree_unflatten


def distribute(tree: Any, mesh: Any, placements: Any) -> tuple[Any, ...]:
    """Each rank's part of a tree of whole tensors, in the order of the ranks: torch's
    `distribute_tensor`, for trees.

    Use it to make the params of a pipeline over a mesh, `[*distribute(first, mesh, ...),
    *distribute(second, mesh, ...)]`, where `mesh` has the axes along which ranks share a stage; and
    to make `PerRank()` arguments of `weft.shard`.

    Args:
        tree: a tree of tensors; other leaves go to every rank unchanged.
        mesh: as `weft.shard` takes it.
        placements: the placements of the tree, like those of one argument in the `in_placements` of
            `weft.shard`.

    Returns:
        A tree for each rank. Parts are views; a rank that writes its part in place needs a copy.

    Raises:
        MeshError: the placements do not fit the mesh or the tree, or the ranks cannot share a
            dimension evenly.
        DonatedError: a tensor was donated before.

    >>> import torch, weft
    >>> params = {"up": torch.ones(4, 8), "down": torch.ones(8, 4)}
    >>> parts = distribute(params, weft.Mesh(tensor=2), {"up": weft.Shard(1), "down": weft.Shard(0)})
    >>> [tuple(part["up"].shape) for part in parts]
    [(4, 4), (4, 4)]
    """
    call = f"weft.distribute(tree, {mesh!s:.80}, ...)"
    resolved_mesh = as_mesh(mesh, call)
    refuse_donated_in(call, tree=tree)
    placed, below, structure = match_placements(placements, tree, call, "placements")
    if any(isinstance(one, PerRank) for one in placed):
        raise MeshError(call, "PerRank() of a whole tree", "Shard(dim), Replicate() or Partial()")
    axes = [on_axes(one, resolved_mesh, f"{call}: placements") for one in placed]

    def part(rank: int) -> Any:
        shards = [
            tree_map(
                lambda x, where=where: (
                    part_of(x, where, resolved_mesh, rank, call) if isinstance(x, Tensor) else x
                ),
                one,
            )
            for where, one in zip(axes, below, strict=True)
        ]
        return tree_unflatten(shards, structure)

    return tuple(map(part, resolved_mesh))


def match_placements(
    prefix: Any, tree: Any, call: str, name: str
) -> tuple[list[Any], list[Any], TreeSpec]:
    """The placements in `prefix`, the subtree of `tree` below each of them, and the structure above
    them.

    Raises:
        MeshError: `prefix` is not a prefix of `tree`.
    """
    placed, structure = tree_flatten(prefix, is_placement)
    try:
        return placed, structure.flatten_up_to(tree), structure
    except ValueError as error:
        problem = f"{name} of another structure than the values: {str(error).splitlines()[0]:.200}"
        raise MeshError(
            call, problem, "the same structure, or one placement for all that is below it"
        ) from error
