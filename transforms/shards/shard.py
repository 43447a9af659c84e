"""`shard`: a function of one rank's part becomes a function of whole tensors, which every rank of a mesh runs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import kind_of, names_arguments
from weft.donation import refuse_donated
from weft.effects import Program
from weft.errors import MeshError
from weft.meshes.mesh import Mesh
from weft.meshes.placements import Placement, is_placement, on_axes, part_of, whole_of
from weft.settings import is_batch_invariant
from weft.torchapi.private import in_functorch_transform, switches
from weft.transforms.pipelines.machine import Step, interleave
from weft.transforms.shards.local import run_in_turn
from weft.transforms.shards.tracing import Trace, trace
from weft.trees import TreeSpec, broadcast_prefix, tree_flatten, tree_unflatten
from weft.value_keys import value_key

_MAX_TRACES = 1024


@attrs.frozen(eq=False)
class Traces:
    """The traces of a function on all ranks, for arguments of one signature, and the order of their effects."""

    by_rank: tuple[Trace, ...]
    order: tuple[Step, ...]


class Sharded:
    """A function that every rank of a mesh runs on its part, made by `shard`."""

    def __init__(self, fn: Callable[..., Any], mesh: Mesh, in_placements: Any, out_placements: Any, call: str) -> None:
        functools.update_wrapper(self, fn)
        self.mesh = mesh
        self.in_placements = in_placements
        self.out_placements = out_placements
        self._fn = fn
        self._call = call
        self._traces: dict[Any, Traces] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, placements, structure = self._placed(args)
        for leaf in leaves:
            refuse_donated(leaf, call=self._call)
        parts = [self._parts(leaf, placed) for leaf, placed in zip(leaves, placements, strict=True)]
        by_rank = [[part[rank] for part in parts] for rank in self.mesh]
        traces = self._trace(by_rank, structure)
        made = run_in_turn(traces.by_rank, traces.order, by_rank)
        return self._join(traces.by_rank, made, leaves, placements, by_rank)

    def programs(self, *args: Any) -> tuple[Program, ...]:
        """The checked program of each rank for arguments of this signature."""
        leaves, placements, structure = self._placed(args)
        parts = [self._parts(leaf, placed) for leaf, placed in zip(leaves, placements, strict=True)]
        traces = self._trace([[part[rank] for part in parts] for rank in self.mesh], structure)
        return tuple(one.program(self.mesh.num_ranks) for one in traces.by_rank)

    def _placed(self, args: tuple[Any, ...]) -> tuple[list[Any], list[Sequence[Placement]], TreeSpec]:
        """The leaves of the arguments, the placements of each, and their structure."""
        leaves, structure = tree_flatten(args)
        given = self.in_placements if isinstance(self.in_placements, tuple) else (self.in_placements,) * len(args)
        return leaves, self._each(given, args, "in_placements"), structure

    def _each(self, prefix: Any, tree: Any, name: str) -> list[Sequence[Placement]]:
        """The placements of each leaf of a tree."""
        try:
            found = broadcast_prefix(prefix, tree, is_placement)
        except ValueError as error:
            seen = f"{name} of another structure than the values: {str(error).splitlines()[0]:.200}"
            raise MeshError(
                self._call, seen, "the same structure, or one placement for all that is below it"
            ) from error
        return [on_axes(one, self.mesh, f"{self._call}: {name}") for one in found]

    def _parts(self, leaf: Any, placements: Sequence[Placement]) -> list[Any]:
        if not isinstance(leaf, Tensor):
            return [leaf] * self.mesh.num_ranks
        return [part_of(leaf, placements, self.mesh, rank, self._call) for rank in self.mesh]

    def _trace(self, by_rank: Sequence[Sequence[Any]], structure: TreeSpec) -> Traces:
        every = [leaf for leaves in by_rank for leaf in leaves]
        grads = in_functorch_transform() or (
            torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in every)
        )
        key = structure, tuple(map(_leaf_key, every)), grads, is_batch_invariant(), switches()
        if (found := self._traces.get(key)) is None:
            if len(self._traces) >= _MAX_TRACES:
                self._traces.clear()
            name = getattr(self._fn, "__name__", str(self._fn))
            made = tuple(
                trace(self._fn, name, self.mesh, rank, own, structure, grads) for rank, own in enumerate(by_rank)
            )
            order = tuple(interleave([one.program(self.mesh.num_ranks) for one in made]))
            found = self._traces[key] = Traces(made, order)
        return found

    def _join(
        self,
        traces: Sequence[Trace],
        made: Sequence[Sequence[Any]],
        given: Sequence[Any],
        placements: Sequence[Sequence[Placement]],
        by_rank: Sequence[Sequence[Any]],
    ) -> Any:
        """The whole result. A result that is the ranks' parts of an argument, written in place or not, is the
        argument."""
        first = traces[0]
        if any(one.structure != first.structure for one in traces):
            seen = "results of other structures on other ranks"
            raise MeshError(self._call, seen, "the same structure on every rank")
        shape = tree_unflatten(list(made[0]), first.structure)
        out = self._each(self.out_placements, shape, "out_placements")
        whole = list[Any]()
        for index, placed in enumerate(out):
            parts = [leaves[index] for leaves in made]
            if not isinstance(parts[0], Tensor):
                whole.append(parts[0])
                continue
            source = next((i for i, x in enumerate(by_rank[0]) if x is parts[0]), None)
            same = source is not None and all(own[source] is part for own, part in zip(by_rank, parts, strict=True))
            if same and source is not None and placements[source] == placed:
                whole.append(given[source])
            else:
                whole.append(whole_of(parts, placed, self.mesh))
        return tree_unflatten(whole, first.structure)

    def __repr__(self) -> str:
        return f"<Sharded {getattr(self._fn, '__name__', self._fn)} on {self.mesh}>"


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device
    return value_key(leaf)


@names_arguments("mesh, in_placements and out_placements", in_specs="in_placements=...", out_specs="out_placements=...")
def shard(f: Callable[..., Any], mesh: Any, in_placements: Any, out_placements: Any) -> Sharded:
    """Run a function on every rank of a mesh, each with its part of the arguments: JAX's `shard_map`.

    The function is written for one rank. It gets that rank's part of each argument, computes with it, and exchanges
    tensors by `weft.all_reduce`, `all_gather`, `reduce_scatter` and `all_to_all`. On a mesh of one rank the parts are
    whole and the collectives change nothing: so a function is equal to itself on any mesh, or it lacks a collective.

    Args:
        f: a pure function of tensors, and of trees of them. It is traced once for each rank and signature.
        mesh: a `Mesh`, a dict of sizes by axis, or a `torch.distributed.device_mesh.DeviceMesh` with names.
        in_placements: for each argument a placement, or a tree of them of the argument's structure, or of its top.
            `Shard(dim)`, `Replicate()`, `Partial()`, of weft or of `torch.distributed.tensor`; on a mesh of several
            axes `Placements(tensor=Shard(0))`. Without a tuple, it is that of every argument.
        out_placements: of the result, likewise.

    Returns:
        A function of whole tensors with the same result. Its `programs(*args)` are data: for each rank the parts that
        it runs, and the collectives between them, checked before anything runs.

    Raises:
        MeshError: placements that do not fit the mesh, or the arguments.
        ProgramError: ranks that do not run the same collectives in the same order.
        CaptureError: a function that reads the values of tensors.

    >>> import torch, weft
    >>> def mlp(params, x):  # columns of `up` and rows of `down`: one sum over the ranks
    ...     return weft.all_reduce(torch.relu(x @ params["up"]) @ params["down"], "tensor")
    >>> placements = {"up": weft.Shard(1), "down": weft.Shard(0)}
    >>> f = shard(mlp, weft.Mesh(tensor=2), (placements, weft.Replicate()), weft.Replicate())
    >>> params = {"up": torch.ones(4, 8), "down": torch.ones(8, 4)}
    >>> f(params, torch.ones(1, 4))
    tensor([[32., 32., 32., 32.]])
    >>> print(f.programs(params, torch.ones(1, 4))[0])
    rank 0 of 2
      run part 0 [mb 0]
      all_reduce sum among 0, 1 [mb 0]: x[1, 4] float32
      run part 1 [mb 0]
    """
    name = getattr(f, "__name__", kind_of(f))
    call = f"weft.shard({name}, {mesh!s:.80}, ...)"
    if not callable(f):
        raise MeshError(call, f"f is {kind_of(f)}", "a function")
    return Sharded(f, Mesh.of(mesh, call), in_placements, out_placements, call)
