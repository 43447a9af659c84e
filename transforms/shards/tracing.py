"""Traces of a function on each rank of a mesh: its operators, cut at the collectives into a program
of effects."""

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Graph, Node

from weft.effects import Effect, Program, Run
from weft.errors import CaptureError, DerivativeError
from weft.meshes.collectives import Collective, with_schema
from weft.meshes.mesh import Mesh
from weft.ops.transfers.collective import Place, effect_of, placed
from weft.torchapi.faking import (
    called_by_dispatcher,
    fake_tensors,
    is_fake_of,
    is_fault_of_torch,
    keeping_dispatch_keys,
    makes_subclass,
    reads_values,
    without_saved_tensors_hooks,
)
from weft.torchapi.frames import custom_function
from weft.torchapi.private import (
    VIEWS,
    ZEROS_OF_A_TANGENT,
    DispatchMode,
    FunctionMode,
    default_device,
    in_functorch_transform,
    innermost,
    is_fake,
    is_functorch_wrapped_tensor,
    may_be_differentiated,
    schema_of,
    seen_as,
    still_alive,
    storage_id,
    without_modes,
)
from weft.transforms.graphs.backends.loops import looping
from weft.transforms.graphs.calls.key import check_tensors
from weft.values.trees import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten


@attrs.frozen(eq=False)
class Trace:
    """A function's operators on one rank, for arguments of one signature.

    Args:
        rank: the rank.
        graph: the operators.
        outside: the tensors that it reads and that are not arguments, by their names in the graph.
        closed_over: those of them that the function did not make.
        parts: the operators between two collectives, in order.
        collectives: the collective after each part but the last, with its node.
        structure: the structure of the result.
        leaves: the leaves of the result: for a tensor its node, else the value itself.
        last_uses: for each node, the values that no later node uses.
        arguments: for each leaf of the result that is an argument, written in place or not, the
            argument's index among the tensors of the arguments.
        written: the indices of the arguments that are written in place.
    """

    rank: int
    graph: Graph
    outside: dict[str, Tensor]
    closed_over: tuple[Tensor, ...]
    parts: tuple[tuple[Node, ...], ...]
    collectives: tuple[tuple[Node, Collective], ...]
    structure: TreeSpec
    leaves: tuple[Any, ...]
    last_uses: dict[Node, list[Node]]
    arguments: dict[int, int]
    written: frozenset[int]

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
    fn: Callable[..., Any],
    name: str,
    mesh: Mesh,
    rank: int,
    leaves: Sequence[Any],
    structure: TreeSpec,
    *,
    grads: bool,
    wrapped: Sequence[Tensor] = (),
) -> Trace:
    """Trace a function on fake tensors, as one rank runs it.

    The trace is made without the captures, transforms, modes and hooks on saved tensors around the
    call; those of the later run apply to its operators. Autocast's conversions become part of the
    trace. The default device is kept, because it decides where the function makes its tensors.

    Args:
        fn, name: the function, and its name in errors.
        mesh, rank: where it runs.
        leaves, structure: the rank's arguments. Of tensors only shapes, strides, dtypes and devices
            are read.
        grads: whether the trace will be differentiated. If so, functions with derivatives replace
            weft's operators.
        wrapped: the tensors that the function may read and that transforms around the call have
            wrapped.

    Raises:
        CaptureError: the function reads the values of tensors, writes a tensor in place that is not
            an argument, keeps a tensor that it made, or draws random numbers, which would differ
            with the number of ranks.
        DerivativeError: the trace will be differentiated, and the function keeps autograd from
            following a value; or it registers a hook on a tensor, which would not be part of the
            trace.
    """
    recorder = Recorder(name, rank, grads, wrapped)
    device = default_device()
    with contextlib.ExitStack() as surroundings:
        for context in (
            keeping_dispatch_keys(),
            without_modes(),
            without_saved_tensors_hooks(),
            looping(None),
        ):
            # Captures, transforms and hooks around the call belong to the run; here they would see
            # fake tensors.
            surroundings.enter_context(context)
        surroundings.enter_context(torch.set_grad_enabled(grads or torch.is_grad_enabled()))
        surroundings.enter_context(placed(Place(mesh, rank, differentiated=grads)))
        arguments = [
            recorder.argument(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        for inner in (
            recorder.fake,
            recorder,
            _Calls(recorder),
            device or contextlib.nullcontext(),
        ):
            surroundings.enter_context(inner)
        try:
            result, result_structure = tree_flatten(fn(*tree_unflatten(arguments, structure)))
        except (RuntimeError, TypeError) as error:
            if is_fault_of_torch(error):
                problem = (
                    f"a fault of torch in its trace on rank {rank}:"
                    f" {str(error).splitlines()[0]:.160}"
                )
                raise CaptureError(
                    recorder.call,
                    problem,
                    "the operator that the traceback names, outside the shard",
                ) from error
            if makes_subclass(error):
                problem = (
                    f"rank {rank} makes a tensor of a subclass of Tensor, which may redefine any"
                    " operator"
                )
                raise CaptureError(
                    recorder.call, problem, "plain tensors inside, and the subclass around it"
                ) from error
            if not reads_values(error):
                raise
            raise recorder.refuse_read(str(error)) from error
        # The function may have caught the error of a read and gone on without the value.
        if recorder.reads:
            raise recorder.refuse_read(recorder.reads[0])
        result_leaves = tuple(map(recorder.in_graph, result))
        recorder.refuse_backward()
    # Otherwise these fake tensors would be alive in `refuse_kept`, as if the function kept them.
    del arguments, result
    with without_modes():  # an outer trace would take these tensors for closed-over ones
        return _finished(recorder, result_leaves, result_structure)


def _finished(recorder: "Recorder", result_leaves: tuple[Any, ...], structure: TreeSpec) -> Trace:
    """The trace that a recorder has recorded; its function returned these results."""
    if recorder.cut is not None:
        problem = (
            f"{recorder.cut} under torch.no_grad(), or in an autograd.Function, on a value that has"
            " a gradient"
        )
        raise DerivativeError(
            recorder.call, problem, "value.detach(); or the whole call in torch.no_grad()"
        )
    graph = recorder.graph
    # Before the search for random operators: torch's own calls on `meta` may look random.
    _erase_shapes_alone(graph, {leaf for leaf in result_leaves if isinstance(leaf, Node)})
    if (node := next(filter(_draws, graph.nodes), None)) is not None:
        problem = f"{node.target}, whose random numbers would be others on each number of ranks"
        raise CaptureError(
            recorder.call, problem, "an argument that is drawn outside, placed as what it meets"
        )
    recorder.refuse_kept()
    inputs = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    origins = (
        (place, inputs.get(_origin(leaf)))
        for place, leaf in enumerate(result_leaves)
        if isinstance(leaf, Node)
    )
    returned = {place: index for place, index in origins if index is not None}
    _separate_elements(graph)
    # By storage: a write to a view writes the argument that it is a view of.
    storages = {storage for node in graph.nodes for storage in written_by(node)}
    _allow_other_strides(graph, storages)
    written = frozenset(index for node, index in inputs.items() if storage_of(node) in storages)
    closed_over = (
        node for node in graph.find_nodes(op="get_attr") if node.target in recorder.closed_over
    )
    if (
        node := next((node for node in closed_over if storage_of(node) in storages), None)
    ) is not None:
        problem = (
            f"a tensor {list(node.meta['val'].shape)} that is no argument, and that each rank"
            " writes in place"
        )
        raise CaptureError(
            recorder.call, problem, "an argument, whose new value the function returns"
        )
    parts, collectives = _cut(graph)
    return Trace(
        rank=recorder.rank,
        graph=graph,
        outside=recorder.outside,
        closed_over=tuple(recorder.outside[target] for target in sorted(recorder.closed_over)),
        parts=parts,
        collectives=collectives,
        structure=structure,
        leaves=result_leaves,
        last_uses=_last_uses(graph, result_leaves),
        arguments=returned,
        written=written,
    )


class Recorder(DispatchMode):
    """Records the operators that a function calls on fake tensors.

    A tensor that is neither an argument nor made by the trace is closed over. Each run reads it
    anew, as the object that the function named, so its derivatives and the transforms that wrap it
    are those of the run.

    Args:
        name: the name of the function.
        rank: the rank that it runs on.
        grads: whether the trace will be differentiated.
        wrapped: as in `trace`.
    """

    def __init__(self, name: str, rank: int, grads: bool, wrapped: Sequence[Tensor]) -> None:
        super().__init__()
        self.call = f"weft.shard({name}, ...)"
        self.rank = rank
        self.grads = grads
        self.graph = Graph()
        self.fake = fake_tensors()
        self.outside = dict[str, Tensor]()
        self.closed_over = set[str]()
        self.cut: str | None = None
        """The first operator at which autograd would not follow a value of the function, but would
        follow it in the trace."""
        self._wrapped = {id(x): x for x in wrapped}
        self._has_fake_arguments = False
        self._nodes = dict[int, tuple[Tensor, Node]]()
        # By id, each beside the tensor itself, which keeps the id from being used again.
        self._stand_ins = dict[int, tuple[Tensor, Tensor]]()
        self._leaves = list[Tensor]()
        self.reads = list[str]()
        """The messages of errors at reads of values. The trace fails even if the function catches
        the error and goes on."""
        # Asked now, because the trace itself runs without the transforms around the call.
        self._is_transformed = in_functorch_transform()

    def argument(self, like: Tensor) -> Tensor:
        """The fake tensor that stands for an argument."""
        # An outer trace has fake arguments, and may close over fake tensors of its own.
        self._has_fake_arguments |= is_fake(like)
        return self._stand_in(like, self.graph.placeholder(f"argument_{len(self._nodes)}"))

    def inside(self, tensor: Tensor) -> Tensor:
        """The tensor as the trace has it: itself if the trace made it, else the fake tensor that
        stands for a closed-over one."""
        if is_fake_of(tensor, self.fake):
            return tensor
        if id(tensor) not in self._stand_ins:
            if is_fake(tensor):
                self._refuse_fake(tensor)
            else:
                check_tensors([tensor], self.call, lambda: ["a tensor that it closes over"])
            refuse_layout(tensor, "a tensor that it closes over", self.call)
            self._refuse_inner(tensor)
            node = self._read(tensor)
            self.closed_over.add(str(node.target))
            self._stand_ins[id(tensor)] = (tensor, self._stand_in(tensor, node))
        return self._stand_ins[id(tensor)][1]

    def _refuse_fake(self, tensor: Tensor) -> None:
        """Raise CaptureError for a tensor of an earlier trace, unless this call has fake arguments
        itself."""
        if not self._has_fake_arguments:
            problem = (
                f"a tensor {list(tensor.shape)} without values, which an earlier trace made and the"
                " function kept"
            )
            raise CaptureError(
                self.call, problem, "make it before the call and pass it in, or return it"
            )

    def _refuse_inner(self, tensor: Tensor) -> None:
        """Raise CaptureError for a tensor that a transform inside the function wrapped before the
        trace saw it."""
        if (
            id(tensor) in self._wrapped
            or not is_functorch_wrapped_tensor(tensor)
            or not in_functorch_transform()
        ):
            return
        problem = (
            f"a transform of torch.func inside it, of a tensor {list(tensor.shape)} that it closes"
            " over"
        )
        raise CaptureError(
            self.call, problem, "the tensor as an argument of f; or x * 1 for x in that call"
        )

    def node_of(self, tensor: Tensor) -> Node:
        """The node that made a tensor."""
        # A transform inside the function wraps the fake tensors; the graph has the wrapped ones.
        fake = innermost(self.inside(tensor))
        if id(fake) not in self._nodes:
            self._find_copy(fake)
        return self._nodes[id(fake)][1]

    def refuse_kept(self) -> None:
        """Raise CaptureError if a tensor of the trace, which has no values, is alive outside it.
        Call it when all results are mapped to nodes: it forgets which node made which tensor."""
        # Weak references first, since the tables that are cleared next hold the tensors.
        references = [weakref.ref(tensor) for tensor, _ in self._nodes.values()]
        self._nodes.clear()
        self._stand_ins.clear()
        self._leaves.clear()

        def alive() -> list[Tensor]:
            return [tensor for reference in references if (tensor := reference()) is not None]

        if kept := still_alive(alive):
            shapes = ", ".join(
                f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in kept[:3]
            )
            problem = (
                f"a tensor that it made is kept and not returned ({shapes}): in a cache, a global"
                " or an attribute"
            )
            raise CaptureError(
                self.call, problem, "make it before the call and pass it in, or return it"
            )

    def refuse_backward(self) -> None:
        """Raise DerivativeError if the function has added to the gradient of an argument or of a
        closed-over tensor."""
        with without_modes():
            lost = next((leaf for leaf in self._leaves if leaf.grad is not None), None)
        if lost is not None:
            problem = (
                f"backward() inside it, whose gradient of a tensor {list(lost.shape)} its trace"
                " would lose"
            )
            raise DerivativeError(
                self.call,
                problem,
                "torch.autograd.grad inside it; or backward() of what it returns",
            )

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Add a call of an operator and its result to the graph."""
        args, kwargs = tree_map(self.in_graph, (args, kwargs))
        node = self.graph.call_function(func, args, kwargs)
        if isinstance(result, Tensor):
            self._note(result, node)
            return
        # A tuple of results: one node for the call, and one for each item.
        for index, part in enumerate(result or ()):
            if isinstance(part, Tensor):
                self._note(part, self.graph.call_function(operator.getitem, (node, index)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A constant in the source code. Each run must copy it anew, as the function may write to
        # it.
        if func is torch.ops.aten.lift_fresh.default and not is_fake_of(args[0], self.fake):
            constant = func(*args)
            self.record(
                torch.ops.aten.lift_fresh_copy.default, (self._read(args[0]),), {}, constant
            )
            return constant
        args, kwargs = tree_map(
            lambda x: self.inside(x) if isinstance(x, Tensor) else x, (args, kwargs)
        )
        if effect_of(func, args) is not None:
            refuse_layout(args[0], "a collective's tensor", self.call)
            self._refuse_unknown_shape(args[0])
            # The fake tensor of a constant carries its value, from which torch would compute a
            # value for the sum over all ranks. A blank tensor has none.
            result = func(_blank(args[0]), *args[1:], **kwargs)
        else:
            result = func(*args, **kwargs)
        # Autograd detaches what it saves, which is no operator of the function.
        if func is torch.ops.aten.detach.default and not called_by_dispatcher():
            self._note(result, self.node_of(args[0]))
        elif _is_part_of_a_trace(func, result):
            self._refuse_own_rule()
            self._look_for_a_cut(func, (args, kwargs), result)
            self.record(func, args, kwargs, result)
        return result

    def _refuse_unknown_shape(self, sent: Tensor) -> None:
        """Raise CaptureError for a collective's tensor whose shape depends on values: such shapes
        may differ by rank, and no program can be checked for them."""
        if any(isinstance(size, torch.SymInt) for size in sent.shape):
            problem = (
                f"rank {self.rank} reads the values of a tensor, on which the shape of a"
                " collective's tensor depends"
            )
            raise CaptureError(self.call, problem, "torch.where, which keeps the shape")

    def _refuse_own_rule(self) -> None:
        """Raise DerivativeError for an operator in an autograd.Function if a transform of
        torch.func is around the call: the transform would use the Function's own rule, which a
        trace loses."""
        if not self._is_transformed or torch.is_grad_enabled():
            return
        kind = custom_function("weft.transforms.shards.shard")
        if kind is not None and not kind.__module__.startswith("weft."):
            problem = (
                f"the autograd.Function {kind.__name__} under a transform of torch.func, which"
                " would lose its rule"
            )
            raise DerivativeError(
                self.call, problem, "the transform inside the shard: weft.shard(vmap(f), ...)"
            )

    def _look_for_a_cut(self, func: Any, arguments: Any, result: Any) -> None:
        """Note an operator without grad mode that computes from a value which requires grad."""
        if not self.grads or self.cut is not None or torch.is_grad_enabled():
            return
        # weft's operators have derivatives of their own, and detaching is what the user asked for.
        if func.namespace == "weft" or func in (
            torch.ops.aten.detach.default,
            torch.ops.aten.alias.default,
        ):
            return
        has_gradient = any(
            isinstance(x, Tensor) and has_derivatives(x) for x in tree_leaves(result)
        )
        if has_gradient and any(
            isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(arguments)
        ):
            self.cut = str(func)

    def _read(self, tensor: Tensor) -> Node:
        """A node for a tensor that is read from outside the trace."""
        target = f"outside_{len(self.outside):06}"
        self.outside[target] = tensor
        return self.graph.get_attr(target)

    def _stand_in(self, like: Tensor, node: Node) -> Tensor:
        """A fake tensor of the same shape, strides, dtype, device, and conjugate and negative bit.
        If autograd follows the tensor, it follows the fake tensor: as a leaf, which no operator may
        write in place, or as a result."""
        with without_modes(), torch.inference_mode(False), torch.enable_grad(), self.fake:
            fake = _blank(like)
            if may_be_differentiated(like) and has_derivatives(fake):
                fake.requires_grad_()
                self._leaves.append(fake)
                result = fake.clone()
                if not (like.is_leaf and like.requires_grad) and result.stride() == fake.stride():
                    fake = result
            self._note(fake, node)
        return fake

    def _note(self, tensor: Tensor, node: Node) -> None:
        """Remember which node made a tensor. A detached alias keeps its present metadata, because a
        later operator may change them."""
        self._nodes[id(tensor)] = (tensor, node)
        with without_modes(), self.fake:
            node.meta["val"] = tensor.detach()

    def _find_copy(self, fake: Tensor) -> None:
        """Find the node of a tensor object that torch made without an operator: the node of the
        last tensor with the same memory."""
        # The last one, because a later operator may have written the memory in place.
        for tensor, node in reversed(self._nodes.values()):
            if storage_id(tensor) == storage_id(fake) and layout_of(tensor) == layout_of(fake):
                self._nodes[id(fake)] = (fake, node)
                return
        problem = f"a tensor {list(fake.shape)} that no operator made"
        raise CaptureError(self.call, problem, "an operator of torch, or an argument")

    def refuse_read(self, why: str) -> CaptureError:
        """The error for a read of values; `why` is the message of torch's error."""
        problem = f"rank {self.rank} reads the values of a tensor: {why.splitlines()[0]:.160}"
        return CaptureError(self.call, problem, "torch.where, or a Python argument")

    def in_graph(self, value: Any) -> Any:
        """The node of a tensor; any other value itself, unless it depends on the values of a
        tensor."""
        # Torch gives a symbol for a number that it cannot know without values.
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            problem = (
                f"rank {self.rank} reads the values of a tensor, on which the number {value}"
                " depends"
            )
            raise CaptureError(self.call, problem, "torch.where, or a Python argument")
        if isinstance(value, Tensor):
            return self.node_of(value)
        return value


def has_strides(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def refuse_layout(tensor: Any, name: str, call: str) -> None:
    """Raise CaptureError for a sparse or nested tensor, whose layout a trace does not have."""
    if isinstance(tensor, Tensor) and not has_strides(tensor):
        problem = (
            f"{name} is {'nested' if tensor.is_nested else tensor.layout}, which no rank has a"
            " part of"
        )
        raise CaptureError(
            call, problem, "x.to_dense(); or its indices and values, as tensors of their own"
        )


def _blank(like: Tensor) -> Tensor:
    """A tensor of the same shape, strides, dtype, device, and conjugate and negative bit."""
    return seen_as(
        torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device), like
    )


def _is_part_of_a_trace(func: Any, result: Any) -> bool:
    """Whether an operator makes or writes a tensor. Other operators only answer questions about a
    tensor, such as its device or size."""
    makes = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
    schema = schema_of(func)
    return makes or schema is None or schema.is_mutable or not schema.returns


def _erase_shapes_alone(graph: Graph, results: Set[Node]) -> None:
    """Erase operators on the device `meta` that compute nothing for the results: torch called them
    only for the shapes of tangents."""
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.users or node in results:
            continue
        value = node.meta.get("val")
        schema = schema_of(node.target)
        # An operator without a schema may do anything.
        may_write = schema is None or schema.is_mutable
        is_pure = not may_write and effect_of(node.target, node.args) is None
        if is_pure and isinstance(value, Tensor) and value.is_meta:
            graph.erase_node(node)


def _separate_elements(graph: Graph) -> None:
    """Give each element of a tangent its own memory. Torch makes a tangent like its zeros, and then
    writes to it. Outside a trace these zeros have no memory; in a trace they are expanded from one
    element, so that all elements of the tangent would share memory."""
    for node in graph.find_nodes(op="call_function", target=ZEROS_OF_A_TANGENT):
        value = node.meta["val"]
        if any(
            size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True)
        ):
            node.target = torch.ops.aten.new_zeros.default
            node.args = (node.args[0], list(value.shape))
            node.kwargs = {}


def _draws(node: Node) -> bool:
    """Whether a call of an operator draws random numbers."""
    schema = schema_of(node.target)
    if schema is None or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in schema.arguments]
    # Attention draws only for its dropout, which is 0 in evaluation.
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    chance: Any = node.kwargs.get("dropout_p", node.args[place] if place < len(node.args) else 0.0)
    return bool(chance != 0.0)


_CLASS: Any = Tensor
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
# Attributes in which a stand-in differs from the closed-over tensor: they are read of the latter.
_OF_THE_OBJECT = (_CLASS.grad.__get__, _CLASS.requires_grad.__get__, _CLASS.is_leaf.__get__)
# Functions that return the values of a tensor; a trace has symbols instead.
_READS = (Tensor.item, Tensor.tolist)
# Functions that turn the values of a tensor into text.
_SHOWS = (Tensor.__repr__, Tensor.__format__)
# Writes of attributes: no operator makes them, so a trace would lose them.
_LOST = {_CLASS.data.__set__: "data", _CLASS.grad.__set__: "grad"}


def _data_of(x: Tensor) -> Tensor:
    return x.data


# Functions that reach no operator, and so are recorded here. Under nested transforms of torch.func
# each of these drops only the derivatives of the innermost transform, where `detach` drops all. So
# a run must call the function itself, under its own transforms. If a transform inside the function
# has wrapped the tensor, nothing is recorded.
_OF_ONE_LEVEL: dict[Any, Callable[..., Any]] = {
    _CLASS.data.__get__: _data_of,
    Tensor.detach_: torch.ops.aten.detach_.default,
    torch.detach_: torch.ops.aten.detach_.default,
    torch.ops.aten.detach_: torch.ops.aten.detach_.default,
    torch.ops.aten.detach_.default: (
        torch.ops.aten.detach_.default
    ),  # called by the trace of an inner shard
}


class _Calls(FunctionMode):
    """Sees calls of torch's functions above autograd and torch.func: replaces closed-over tensors
    by their stand-ins, records functions that reach no operator, and refuses hooks."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HOOKS:
            problem = (
                f"{func.__name__} on a tensor {list(args[0].shape)} inside it, which its trace"
                " would lose"
            )
            instead = "the hook outside, on an argument or on a result"
            raise DerivativeError(self.recorder.call, problem, instead)
        if func in _LOST:
            problem = (
                f"x.{_LOST[func]} = ... on a tensor {list(args[0].shape)}, which its trace would"
                " lose"
            )
            raise CaptureError(
                self.recorder.call,
                problem,
                "x.copy_(...) on an argument; or a new tensor that it returns",
            )
        if func in _SHOWS:
            problem = (
                f"rank {self.recorder.rank} reads the values of a tensor: Tensor.{func.__name__}"
            )
            raise CaptureError(self.recorder.call, problem, "torch.where, or a Python argument")
        if func in _OF_THE_OBJECT:
            return func(*args)
        args, kwargs = tree_map(
            lambda x: self.recorder.inside(x) if isinstance(x, Tensor) else x, (args, kwargs)
        )
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if reads_values(error):
                # Keep only the text: the error's frames hold this recorder, which would be a cycle.
                self.recorder.reads.append(str(error))
            raise
        # The result is a symbol, or a list of them: mapping it refuses it.
        if func in _READS:
            tree_map(self.recorder.in_graph, result)
        if func in _OF_ONE_LEVEL and not is_functorch_wrapped_tensor(args[0]):
            self.recorder.record(_OF_ONE_LEVEL[func], args, {}, innermost(result))
        return result


def _cut(graph: Graph) -> tuple[tuple[tuple[Node, ...], ...], tuple[tuple[Node, Collective], ...]]:
    """The operators between collectives, and the collectives with their nodes."""
    parts = [list[Node]()]
    collectives = list[tuple[Node, Collective]]()
    for node in graph.nodes:
        # Arguments are there before the first part.
        if node.op == "placeholder":
            continue
        if node.op == "call_function":
            effect = effect_of(node.target, node.args)
        else:
            effect = None
        if effect is None:
            parts[-1].append(node)
        else:
            collectives.append((node, with_schema(effect, node.all_input_nodes[0].meta["val"])))
            parts.append([])
    return tuple(map(tuple, parts)), tuple(collectives)


# Operators that cut a value's gradient, so that their result does not count as the argument.
_DETACHED = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def _origin(node: Node) -> Node:
    """The node that first made a tensor, not a later one that wrote it in place or returned it
    unchanged."""
    schema = schema_of(node.target)
    if (
        node.target in _DETACHED
        or schema is None
        or len(schema.returns) != 1
        or (alias := schema.returns[0].alias_info) is None
    ):
        return node
    aliased = [
        arg
        for arg, argument in zip(node.args, schema.arguments, strict=False)
        if argument.alias_info is not None
    ]
    # With several aliases it is not clear which argument the result is.
    if len(aliased) != 1 or not isinstance(aliased[0], Node):
        return node
    # A view of a part is not the argument itself.
    if not alias.is_write and _layout(node) != _layout(aliased[0]):
        return node
    return _origin(aliased[0])


def _layout(node: Node) -> tuple[Any, ...]:
    return layout_of(node.meta["val"])


def layout_of(value: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in its storage, and how its elements are read."""
    return (
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.is_conj(),
        value.is_neg(),
    )


def has_derivatives(tensor: Tensor) -> bool:
    """Whether a tensor's dtype is one that autograd follows."""
    return tensor.is_floating_point() or tensor.is_complex()


def storage_of(node: Node) -> int:
    """The storage of the tensor that a node made."""
    return storage_id(node.meta["val"])


def written_by(node: Node) -> Iterator[int]:
    """The storages that a node's operator writes in place."""
    arguments = () if (schema := schema_of(node.target)) is None else schema.arguments
    values = {
        argument.name: arg for argument, arg in zip(arguments, node.args, strict=False)
    } | node.kwargs
    for argument in arguments:
        if (
            argument.alias_info is not None
            and argument.alias_info.is_write
            and argument.name in values
        ):
            yield from (
                storage_of(leaf)
                for leaf in tree_leaves(values[argument.name])
                if isinstance(leaf, Node)
            )


def _allow_other_strides(graph: Graph, written: set[int]) -> None:
    """Turn views that nothing writes to into `reshape`: under `vmap` the tensors may have strides
    that allow no view. With the strides of the trace, `reshape` returns the same view."""
    for node in graph.nodes:
        if node.target in VIEWS and storage_of(node) not in written:
            node.target = torch.ops.aten.reshape.default


def _last_uses(graph: Graph, results: Sequence[Any]) -> dict[Node, list[Node]]:
    """For each node, the values that no later node uses and that are not results."""
    last_uses = dict[Node, list[Node]]()
    live = {leaf for leaf in results if isinstance(leaf, Node)}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in live:
                live.add(used)
                last_uses.setdefault(node, []).append(used)
    return last_uses
