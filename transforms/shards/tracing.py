"""Traces of a function on each rank of a mesh: its operators, cut at the collectives, as a program of effects."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from weft.effects import Effect, Program, Run
from weft.errors import CaptureError, DerivativeError
from weft.meshes.collectives import Collective, with_schema
from weft.meshes.mesh import Mesh
from weft.ops.transfers.collective import Place, effect_of, placed
from weft.torchapi.private import VIEWS, DispatchMode, FunctionMode, schema_of, seen_as, storage_id, without_modes
from weft.transforms.graphs.backends.loops import looping
from weft.trees import TreeSpec, tree_flatten, tree_unflatten


@attrs.frozen(eq=False)
class Trace:
    """A function's operators on one rank, for arguments of one signature.

    Args:
        rank: the rank.
        graph: the operators.
        parts: the operators between two collectives, in order.
        collectives: the collective after each part but the last, with its node.
        structure: of the result.
        leaves: of the result: the node of a tensor, or a value that is no tensor.
        last_uses: for each node, the values that no later one uses.
        arguments: for each leaf of the result that is an argument, written in place or not, the argument's index among
            the tensors of the arguments.
        written: the indices of the arguments that are written in place.
    """

    rank: int
    graph: GraphModule
    parts: tuple[tuple[Node, ...], ...]
    collectives: tuple[tuple[Node, Collective], ...]
    structure: TreeSpec
    leaves: tuple[Any, ...]
    last_uses: dict[Node, list[Node]]
    arguments: dict[int, int]
    written: frozenset[int]

    def closed_over(self) -> list[Tensor]:
        """The tensors that it reads which are no arguments."""
        read = {str(node.target) for node in self.graph.graph.find_nodes(op="get_attr")}
        return [x for name in sorted(read) if isinstance(x := getattr(self.graph, name), Tensor)]

    def effects(self) -> Iterator[Effect]:
        """The effects of the rank: a run of each part, and the collectives."""
        for index, (_, effect) in enumerate(self.collectives):
            yield Run(f"part {index}", 0)
            yield effect
        yield Run(f"part {len(self.collectives)}", 0)

    def program(self, num_ranks: int) -> Program:
        """The program of the rank."""
        return Program(self.rank, num_ranks, tuple(self.effects()))


def trace(
    fn: Callable[..., Any], name: str, mesh: Mesh, rank: int, leaves: Sequence[Any], structure: TreeSpec, grads: bool
) -> Trace:
    """Trace a function on fake tensors, as one rank runs it.

    Args:
        fn, name: the function.
        mesh, rank: where it runs.
        leaves, structure: the rank's arguments. Only shapes, strides, dtypes and devices of tensors are read.
        grads: whether the trace will be differentiated. Then functions with derivatives stand for weft's operators.

    Raises:
        CaptureError: the function reads the values of tensors, writes one in place that is no argument, or draws random
            numbers, which would be others on each number of ranks.
        DerivativeError: the trace will be differentiated, and the function keeps autograd from following a value; or it
            registers a hook on a tensor, which would not be part of the trace.
    """
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    returned: list[tuple[list[Any], TreeSpec]] = []
    cuts = _Cuts()

    def run(*tensors: Tensor) -> list[Tensor]:
        own = list(leaves)
        for index, tensor in zip(places, tensors, strict=True):
            own[index] = tensor.requires_grad_() if grads and tensor.is_floating_point() else tensor
        watched = cuts if grads else contextlib.nullcontext()
        with placed(Place(mesh, rank, differentiated=grads)), watched, _RefusingHooks(name):
            out = fn(*tree_unflatten(own, structure))
        returned.append(tree_flatten(out))
        return [leaf for leaf in returned[-1][0] if isinstance(leaf, Tensor)]

    with without_modes(), looping(None), torch.set_grad_enabled(grads):
        examples = [_example(leaves[index]) for index in places]
        try:
            graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        except (torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode, RuntimeError) as error:
            if "fake" not in f"{type(error).__name__} {error}".lower() and "DataDependent" not in type(error).__name__:
                raise
            seen = f"rank {rank} reads the values of a tensor: {str(error).splitlines()[0]:.160}"
            raise CaptureError(f"weft.shard({name}, ...)", seen, "torch.where, or a Python argument") from error
    if cuts.first is not None:
        seen = f"{cuts.first} under torch.no_grad(), or in an autograd.Function, on a value that has a gradient"
        raise DerivativeError(f"weft.shard({name}, ...)", seen, "value.detach(); or the whole call in torch.no_grad()")
    if (node := next(filter(_draws, graph.graph.nodes), None)) is not None:
        seen = f"{node.target}, whose random numbers would be others on each number of ranks"
        raise CaptureError(
            f"weft.shard({name}, ...)", seen, "an argument that is drawn outside, placed as what it meets"
        )
    outputs, out_structure = returned[-1]
    nodes = iter(next(iter(graph.graph.find_nodes(op="output"))).args[0])
    made = tuple(next(nodes) if isinstance(leaf, Tensor) else leaf for leaf in outputs)
    inputs = {node: index for index, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    origins = ((place, inputs.get(_origin(leaf))) for place, leaf in enumerate(made) if isinstance(leaf, Node))
    arguments = {place: index for place, index in origins if index is not None}
    storages = _written(graph)
    _allow_other_strides(graph, storages)
    written = frozenset(index for node, index in inputs.items() if _storage(node) in storages)
    closed_over = (node for node in graph.graph.find_nodes(op="get_attr") if isinstance(node.meta.get("val"), Tensor))
    if (node := next((node for node in closed_over if _storage(node) in storages), None)) is not None:
        seen = f"a tensor {list(node.meta['val'].shape)} that is no argument, and that each rank writes in place"
        raise CaptureError(f"weft.shard({name}, ...)", seen, "an argument, whose new value the function returns")
    return Trace(rank, graph, *_cut(graph), out_structure, made, _last_uses(graph), arguments, written)


def _draws(node: Node) -> bool:
    """Whether a call of an operator draws random numbers."""
    schema = schema_of(node.target)
    if schema is None or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    chance: Any = node.kwargs.get("dropout_p", node.args[place] if place < len(node.args) else 0.0)
    return bool(chance != 0.0)


class _Cuts(DispatchMode):
    """The first operator in a trace where autograd would not follow a value, as the trace's operators would."""

    def __init__(self) -> None:
        super().__init__()
        self.first: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.first is None and not torch.is_grad_enabled() and func.namespace != "weft" and func not in _DETACHED:
            made = any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_flatten(out)[0])
            given = tree_flatten((args, kwargs))[0]
            if made and any(isinstance(x, Tensor) and x.requires_grad for x in given):
                self.first = str(func)
        return out


_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


class _RefusingHooks(FunctionMode):
    """Refuses hooks on tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKS:
            seen = f"{func.__name__} on a tensor {list(args[0].shape)} inside it, which its trace would lose"
            instead = "the hook outside, on an argument or on a result"
            raise DerivativeError(f"weft.shard({self.name}, ...)", seen, instead)
        return func(*args, **(kwargs or {}))


_DETACHED = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _example(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides, dtype, device, and conjugate and negative bit."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return seen_as(made, tensor)


def _cut(graph: GraphModule) -> tuple[tuple[tuple[Node, ...], ...], tuple[tuple[Node, Collective], ...]]:
    parts, collectives = [list[Node]()], list[tuple[Node, Collective]]()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        effect = effect_of(node.target, node.args) if node.op == "call_function" else None
        if effect is None:
            parts[-1].append(node)
        else:
            collectives.append((node, with_schema(effect, node.all_input_nodes[0].meta["val"])))
            parts.append([])
    return tuple(map(tuple, parts)), tuple(collectives)


def _origin(node: Node) -> Node:
    """The node that first made a tensor: not an operator that wrote it in place, or that returned all of it as it
    is."""
    schema = schema_of(node.target)
    if schema is None or len(schema.returns) != 1 or (alias := schema.returns[0].alias_info) is None:
        return node
    given = [arg for arg, own in zip(node.args, schema.arguments, strict=False) if own.alias_info is not None]
    if len(given) != 1 or not isinstance(given[0], Node):
        return node
    if not alias.is_write and _layout(node) != _layout(given[0]):
        return node
    return _origin(given[0])


def _layout(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.is_conj(), value.is_neg()


def _storage(node: Node) -> int:
    return storage_id(node.meta["val"])


def _written(graph: GraphModule) -> set[int]:
    """The storages that an operator writes in place."""
    found = set[int]()
    for node in graph.graph.nodes:
        arguments = () if (schema := schema_of(node.target)) is None else schema.arguments
        given = {own.name: arg for own, arg in zip(arguments, node.args, strict=False)} | node.kwargs
        for own in arguments:
            if own.alias_info is not None and own.alias_info.is_write and own.name in given:
                found.update(_storage(leaf) for leaf in tree_flatten(given[own.name])[0] if isinstance(leaf, Node))
    return found


def _allow_other_strides(graph: GraphModule, written: set[int]) -> None:
    """Turn views into `reshape`, where nothing writes to them: under `vmap` the tensors may have strides that allow no
    view. On the strides of the trace `reshape` makes the same view."""
    for node in graph.graph.nodes:
        if node.target in VIEWS and _storage(node) not in written:
            node.target = torch.ops.aten.reshape.default


def _last_uses(graph: GraphModule) -> dict[Node, list[Node]]:
    """For each node, the values that no later one uses."""
    found, seen = dict[Node, list[Node]](), set[Node]()
    for node in reversed(graph.graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                found.setdefault(node, []).append(used)
    return found
