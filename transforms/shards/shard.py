"""`shard`: a function written for one rank's part becomes a function of whole tensors that runs on
every rank of a mesh."""

import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import kind_of, names_arguments
from weft.effects import Program
from weft.errors import MeshError
from weft.meshes.distribute import match_placements
from weft.meshes.mesh import Mesh, as_mesh, coordinates_of
from weft.meshes.placements import (
    Layout,
    Partial,
    PerRank,
    Shard,
    on_axes,
    part_key,
    part_of,
    same_parts,
    whole_of,
)
from weft.meshes.replicas import differing, ranks_in_words
from weft.ops.transfers.collective import current_place
from weft.settings import is_batch_invariant
from weft.torchapi.private import (
    WithoutAutocast,
    default_device,
    in_functorch_transform,
    in_trace_of_torch,
    is_fake,
    may_be_differentiated,
    switches,
    uncompiled,
    without_modes,
)
from weft.transforms.graphs.backends.loops import current_looper
from weft.transforms.graphs.calls.key import check_plain, check_tensors
from weft.transforms.graphs.outside import PythonState
from weft.transforms.pipelines.machine import Step, interleave
from weft.transforms.shards.local import run_in_turn
from weft.transforms.shards.results import PlacedResult, place_results, refuse_unlike
from weft.transforms.shards.surroundings import ClosedOver, wrapped_tensors
from weft.transforms.shards.tracing import Trace, has_strides, refuse_layout, trace
from weft.transforms.shards.value_numbers import result_numbers
from weft.values.bounded import BoundedDict
from weft.values.donation import refuse_donated, refuse_donated_in
from weft.values.keys import value_key
from weft.values.trees import (
    TreeSpec,
    leaves_with_names,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

# The most traces that are cached: calls with ever new signatures must not fill the memory.
_MAX_TRACES = 1024


@attrs.frozen(eq=False)
class Parts:
    """Each rank's arguments.

    Args:
        by_rank: the arguments of each rank.
        sources: by the `id` of each of their tensors, the argument that it is a part of, and that
            argument's placements.
        replicas: (rank, `id`) of each tensor that an earlier rank holds too.
        keys: for each rank and tensor, in order, a pair: a key that only equal parts of the same
            tensor share; and the rank if the tensor is `PerRank()`, else None.
    """

    by_rank: tuple[tuple[Any, ...], ...]
    sources: dict[int, tuple[Tensor, Layout]]
    replicas: set[tuple[int, int]]
    keys: tuple[list[tuple[Hashable, int | None]], ...]

    def tensors(self, traces: Sequence[Trace], call: str) -> list[list[Tensor]]:
        """Each rank's tensors, with a copy for each replica that the function writes in place.

        Raises:
            MeshError: the function writes in place an argument that is `Partial()`: its ranks hold
                terms of a sum.
        """
        tensors = []
        for rank, (args, rank_trace) in enumerate(zip(self.by_rank, traces, strict=True)):
            leaves = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]
            for index in rank_trace.written:
                leaf = leaves[index]
                _, layout = self.sources.get(id(leaf), (leaf, ()))
                if partial := next(
                    (placement for _, placement in layout if isinstance(placement, Partial)), None
                ):
                    problem = (
                        f"{partial} of a tensor {list(leaf.shape)} that the function writes in"
                        " place"
                    )
                    raise MeshError(
                        call,
                        problem,
                        "Replicate(), and all_reduce what is written; or return a new tensor",
                    )
                # Replicas are one tensor in this process: each rank must write to its own copy.
                if (rank, id(leaf)) in self.replicas:
                    leaves[index] = leaf.clone()
                    self.sources[id(leaves[index])] = self.sources[id(leaf)]
            tensors.append(leaves)
        return tensors


@attrs.define(eq=False)
class Traces:
    """The traces of a function on all ranks, for arguments of one signature.

    Args:
        by_rank: the trace of each rank.
        order: an order of all ranks' effects in which they can run.
        closed_over: what the traces read that is not an argument.
        results: the leaves of the result that have a placement.
    """

    by_rank: tuple[Trace, ...]
    order: tuple[Step, ...]
    closed_over: ClosedOver
    results: tuple[PlacedResult, ...]


class Sharded:
    """A function that every rank of a mesh runs on its part, as `shard` returns it.

    Args:
        fn: the function of one rank's part.
        mesh, in_placements, out_placements: as `shard` takes them.
        call: the text of the call that made it, for errors.
    """

    def __init__(
        self, fn: Callable[..., Any], mesh: Mesh, in_placements: Any, out_placements: Any, call: str
    ) -> None:
        functools.update_wrapper(self, fn)
        self.mesh = mesh
        self.in_placements = in_placements
        self.out_placements = out_placements
        self._fn = fn
        self._name = getattr(fn, "__name__", str(fn))
        self._call = call
        self._traces = BoundedDict[Any, Traces](_MAX_TRACES)

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts = self._parts(self._positional(args, kwargs))
        traces = self._trace(parts)
        with WithoutAutocast():  # the traces already contain its conversions
            leaves_by_rank = run_in_turn(
                traces.by_rank, traces.order, parts.tensors(traces.by_rank, self._call)
            )
        for result in traces.results:
            # Sizes that depend on data are known only now, and the ranks' must fit together.
            if not result.has_known_size:
                refuse_unlike(result.name, result.of(leaves_by_rank), result.layout, self._call)
        whole = self._join(traces.by_rank, leaves_by_rank, parts)
        self._compare(traces, leaves_by_rank)
        return whole

    def programs(self, *args: Any, **kwargs: Any) -> tuple[Program, ...]:
        """The checked program of each rank for arguments of this signature."""
        parts = self._parts(self._positional(args, kwargs))
        return tuple(one.program(self.mesh.num_ranks) for one in self._trace(parts).by_rank)

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments in the order of the function's parameters, which is that of
        `in_placements`."""
        if not kwargs:
            return args
        try:
            # Placements go by position, so a keyword is brought to its place.
            bound = inspect.signature(self._fn).bind(*args, **kwargs)
        except TypeError as error:
            raise MeshError(
                f"{self._call}(...)", str(error), f"the arguments of {self._name}"
            ) from error
        if bound.kwargs:
            problem = f"{', '.join(bound.kwargs)}, a parameter by name alone"
            instead = f"functools.partial({self._name}, ...), or a positional parameter"
            raise MeshError(f"{self._call}(...)", problem, instead)
        return bound.args

    def _parts(self, args: tuple[Any, ...]) -> Parts:
        """Each rank's arguments."""
        if isinstance(self.in_placements, tuple):
            placements = self.in_placements
        else:
            placements = (self.in_placements,) * len(args)
        if len(placements) != len(args):
            problem = f"in_placements for {len(placements)} arguments, and {len(args)} arguments"
            raise MeshError(
                f"{self._call}(...)", problem, "a placement, or a tree of them, for each argument"
            )
        all_parts = Parts(tuple(() for _ in self.mesh), {}, set(), tuple([] for _ in self.mesh))
        by_rank = [list[Any]() for _ in self.mesh]
        for index, (prefix, arg) in enumerate(zip(placements, args, strict=True)):
            self._check_tensors(arg, index)
            placed, below, structure = match_placements(
                prefix, arg, self._call, f"in_placements[{index}]"
            )
            for rank, rank_args in enumerate(by_rank):
                parts = zip(placed, below, strict=True)
                rank_parts = [
                    self._part(*each, rank, all_parts, (index, place))
                    for place, each in enumerate(parts)
                ]
                rank_args.append(tree_unflatten(rank_parts, structure))
        return attrs.evolve(all_parts, by_rank=tuple(map(tuple, by_rank)))

    def _check_tensors(self, arg: Any, index: int) -> None:
        """Raise CaptureError for a tensor of a subclass, whose own operators a trace would not
        call, and for a mutable object, whose changes a trace would not see."""

        def names() -> list[str]:
            return [f"args[{index}]{name}" for name, _ in leaves_with_names(arg)]

        leaves = tree_leaves(arg)
        if any(isinstance(leaf, Tensor) and not has_strides(leaf) for leaf in leaves):
            for name, leaf in zip(names(), leaves, strict=True):
                refuse_layout(leaf, name, self._call)
        if any(isinstance(leaf, Tensor) and type(leaf) is not Tensor for leaf in leaves):
            real_leaves = [
                None if isinstance(leaf, Tensor) and is_fake(leaf) else leaf for leaf in leaves
            ]
            check_tensors(real_leaves, self._call, names)
        check_plain(leaves, self._call, names, "close over it if it never changes")

    def _part(self, placement: Any, tree: Any, rank: int, all_parts: Parts, name: Hashable) -> Any:
        """A rank's part of a tree that has one placement throughout."""
        if isinstance(placement, PerRank):
            if not isinstance(tree, tuple) or len(tree) != self.mesh.num_ranks:
                problem = (
                    "PerRank() of"
                    f" {kind_of(tree)}{f' of {len(tree)}' if isinstance(tree, tuple) else ''}"
                )
                raise MeshError(
                    self._call,
                    problem,
                    f"a tuple with a tree for each of {self.mesh.num_ranks} ranks",
                )
            refuse_donated_in(self._call, tree=tree[rank])
            num_tensors = sum(isinstance(leaf, Tensor) for leaf in tree_leaves(tree[rank]))
            all_parts.keys[rank].extend(((name, number), rank) for number in range(num_tensors))
            return tree[rank]
        layout = on_axes(placement, self.mesh, f"{self._call}: in_placements")
        place = coordinates_of(self.mesh, rank)
        is_first = not any(
            place[axis] for axis, axis_placement in layout if not isinstance(axis_placement, Shard)
        )
        cut = part_key(layout, self.mesh, rank)
        numbers = itertools.count()

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            refuse_donated(leaf, call=self._call)
            all_parts.keys[rank].append(((name, next(numbers), cut), None))
            local_tensor = part_of(leaf, layout, self.mesh, rank, self._call)
            # To return the caller's own tensor where the ranks return their parts of it unchanged.
            all_parts.sources[id(local_tensor)] = leaf, layout
            if not is_first:
                all_parts.replicas.add((rank, id(local_tensor)))
            return local_tensor

        return tree_map(part, tree)

    def _trace(self, parts: Parts) -> Traces:
        """The traces for arguments of this signature, made anew if a closed-over value changed."""
        flat = [tree_flatten(rank_args) for rank_args in parts.by_rank]
        every = [leaf for leaves, _ in flat for leaf in leaves]
        is_transformed = in_functorch_transform()
        grads = is_transformed or (
            torch.is_grad_enabled()
            and any(isinstance(x, Tensor) and x.requires_grad for x in every)
        )
        structures = tuple(structure for _, structure in flat)
        device = default_device()
        modes = grads, is_transformed, is_batch_invariant(), device, switches()
        key = structures, tuple(map(_leaf_key, every)), modes
        traces = self._traces.get(key)
        if traces is None or traces.closed_over.has_changed():
            traces = self._make_traces(flat, parts.keys, grads)
            # Traces whose closed-over values cannot be checked for changes are used only once.
            if traces.closed_over.is_lasting:
                self._traces[key] = traces
            else:
                self._traces.pop(key, None)
        return traces

    def _make_traces(
        self,
        flat: Sequence[tuple[Any, TreeSpec]],
        keys: Sequence[Sequence[tuple[Hashable, int | None]]],
        grads: bool,
    ) -> Traces:
        """Trace the function on all ranks.

        A rank whose first trace changes Python state is traced a second time. A cache that the
        first trace fills stays as it is in the second; a counter changes again and is refused."""
        if in_functorch_transform():
            wrapped = wrapped_tensors(self._fn)
        else:
            wrapped = []
        in_python = PythonState(self._fn)
        by_rank = []
        for rank, (leaves, structure) in enumerate(flat):
            for _ in ("the first time", "with what that has put in a cache"):
                in_python.begin_run()
                rank_trace = trace(
                    self._fn,
                    self._name,
                    self.mesh,
                    rank,
                    leaves,
                    structure,
                    grads=grads,
                    wrapped=wrapped,
                )
                if in_python.change() is None:
                    break
            in_python.refuse_changes(self._call)
            by_rank.append(rank_trace)
        closed_over = [x for one in by_rank for x in one.closed_over]
        # Only a trace shows which tensors are closed over. If one of them requires grad, trace
        # again with derivatives.
        if not grads and torch.is_grad_enabled() and any(x.requires_grad for x in closed_over):
            return self._make_traces(flat, keys, grads=True)
        with without_modes():
            order = tuple(interleave([one.program(self.mesh.num_ranks) for one in by_rank]))
            numbers = result_numbers(by_rank, order, keys)
            # Numbered once more as if the ranks' `PerRank()` arguments were equal: by keys alone.
            alike = result_numbers(
                by_rank, order, [[key for key, _ in rank_keys] for rank_keys in keys]
            )
            results = tuple(
                place_results(by_rank, numbers, alike, self.mesh, self.out_placements, self._call)
            )
            return Traces(
                tuple(by_rank),
                order,
                ClosedOver(self._fn, closed_over, in_python.with_containers()),
                results,
            )

    def _join(
        self, traces: Sequence[Trace], leaves_by_rank: Sequence[Sequence[Any]], input_parts: Parts
    ) -> Any:
        """The whole result. If a result consists of the ranks' parts of one argument, written in
        place or not, it is that argument itself."""
        trees = [
            tree_unflatten(list(rank_leaves), one.structure)
            for rank_leaves, one in zip(leaves_by_rank, traces, strict=True)
        ]
        placed, _, structure = match_placements(
            self.out_placements, trees[0], self._call, "out_placements"
        )
        below = [
            match_placements(self.out_placements, tree, self._call, "out_placements")[1]
            for tree in trees
        ]
        return tree_unflatten(
            [
                self._whole(one, parts, input_parts)
                for one, parts in zip(placed, zip(*below, strict=True), strict=True)
            ],
            structure,
        )

    def _whole(self, placement: Any, parts: tuple[Any, ...], input_parts: Parts) -> Any:
        if isinstance(placement, PerRank):
            return parts
        layout = on_axes(placement, self.mesh, f"{self._call}: out_placements")

        def whole(*leaves: Any) -> Any:
            if not isinstance(leaves[0], Tensor):
                return leaves[0]
            sources = [input_parts.sources.get(id(leaf)) for leaf in leaves]
            first = sources[0]
            if first is not None and all(
                source is not None and source[0] is first[0] for source in sources
            ):
                argument, placed_as = first
                if same_parts(placed_as, layout, argument.ndim):
                    return argument
            return whole_of(leaves, layout, self.mesh)

        return tree_map(whole, *parts)

    def _compare(self, traces: Traces, results: Sequence[Sequence[Any]]) -> None:
        """Raise MeshError if ranks differ in a result that `out_placements` declares replicated; or
        if, by their traces, they may differ later: in a replay with other values, or in their
        derivatives."""
        for result in traces.results:
            leaves = result.of(results)
            for axis, ranks, is_trusted in result.unproven:
                replicas = [leaves[rank] for rank in ranks]
                is_tensor = isinstance(replicas[0], Tensor)
                apart = f"{ranks_in_words(ranks)} do not compute it from the same values"
                if is_tensor and is_trusted and _is_recorded() and in_functorch_transform():
                    continue
                if is_tensor and not is_trusted and _is_recorded():
                    fault = f"{apart}, and may differ in a replay"
                elif unequal := differing(replicas):
                    different = ranks_in_words([ranks[0], *(ranks[index] for index in unequal)])
                    fault = f"{different} have different values"
                elif is_tensor and not is_trusted and any(map(may_be_differentiated, replicas)):
                    fault = f"{apart}, and their derivatives may differ"
                else:
                    continue
                if not is_tensor:
                    instead = "a value that is the same on all ranks; or PerRank() as its placement"
                    raise MeshError(self._call, f"{result.name} is no tensor, and {fault}", instead)
                instead = (
                    f"weft.all_reduce(..., {axis!r}) in {self._name}; or as its placement Partial()"
                    " or Shard(dim)"
                )
                raise MeshError(
                    self._call, f"{result.name} is Replicate() along {axis!r}, and {fault}", instead
                )

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the traces: a copy makes its own."""
        return {**vars(self), "_traces": BoundedDict(_MAX_TRACES)}

    def __repr__(self) -> str:
        return f"<Sharded {self._name} on {self.mesh}>"


def _is_recorded() -> bool:
    """Whether this call is part of a capture or a trace, which will run again on other values."""
    place = current_place()
    is_traced = place is not None and place.number < 0  # in the trace of an outer shard
    return is_traced or current_looper() is not None or in_trace_of_torch()


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        layout = (
            tuple(leaf.shape),
            leaf.stride(),
            leaf.dtype,
            leaf.device,
            leaf.is_conj(),
            leaf.is_neg(),
        )
        return *layout, may_be_differentiated(leaf), leaf.is_leaf
    return value_key(leaf)


@names_arguments(
    "mesh, in_placements and out_placements",
    in_specs="in_placements=...",
    out_specs="out_placements=...",
)
def shard(f: Callable[..., Any], mesh: Any, in_placements: Any, out_placements: Any) -> Sharded:
    """Run a function on every rank of a mesh, each with its part of the arguments: JAX's
    `shard_map`.

    The function is written for one rank. It gets that rank's part of each argument, computes with
    it, and exchanges tensors by `weft.all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and
    `ppermute`. On a mesh of one rank the parts are the whole tensors, and all collectives except
    `ppermute`, which names places, change nothing. So compare the function on your mesh with itself
    on one rank: where the results differ, a collective is missing or a placement is wrong.

    Args:
        f: a pure function of tensors, and of trees of them. It is traced once for each rank and
            signature, and again whenever a tensor or other value that it reads by name, however
            deep in an object, was replaced. Closed-over tensors have derivatives, as arguments
            have. A closed-over tensor that is found neither by a name nor inside an object, or that
            a transform of torch.func has wrapped, causes a new trace at each call.
        mesh: a `Mesh`, a dict of sizes by axis, or a `torch.distributed.device_mesh.DeviceMesh`
            with names.
        in_placements: a tuple with a placement for each argument; a single placement holds for
            every argument. A placement is `Shard(dim)`, `Replicate()` or `Partial()`, of weft or of
            `torch.distributed.tensor`. On a mesh of several axes, name the axis:
            `Placements(tensor=Shard(0))`. For an argument that is a tree, pass a tree of
            placements, which may end above its leaves: a placement holds for everything below it.
            `PerRank()`: the argument is a tuple with a tree for each rank.
        out_placements: the placements of the result, in the same form.

    Returns:
        A function of whole tensors, with the signature of `f`. It runs all ranks in this thread;
        for ranks in threads or processes, see `mesh` of `weft.pipeline`. Its `programs(*args)` are
        data: for each rank the parts that it runs, and the collectives between them, checked before
        anything runs.

    Raises:
        MeshError: placements do not fit the mesh, the arguments or the results; shapes or dtypes of
            a result differ between ranks; values of a result placed as `Replicate()` differ between
            ranks; or, in a graph or a derivative, ranks do not compute such a result from the same
            values.
        ProgramError: ranks do not run the same collectives in the same order.
        CaptureError: the function reads the values of tensors, writes a tensor in place that is not
            an argument, or draws random numbers; or a tensor is of a subclass of `torch.Tensor`.

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
    return Sharded(f, as_mesh(mesh, call), in_placements, out_placements, call)
