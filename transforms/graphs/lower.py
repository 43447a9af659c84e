"""`Lowered` and `Compiled`, the stages of a graphified function for one signature, as in JAX; the
listing of its operators; and compiling its kernels ahead of a capture."""

import contextlib
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import attrs
import torch
from torch import Tensor

from weft.errors import CacheMissError, CaptureError
from weft.ops.constants import kernel_kind
from weft.ops.register import triton_version
from weft.ops.transfers.collective import effect_of, others_wait
from weft.torchapi.inductor import Compiler, compiler_name
from weft.torchapi.patches import signal_capture
from weft.torchapi.private import (
    storage_id,
)
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends.operators import tensors_in
from weft.transforms.graphs.cache import Cache
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.capture import Graph, audit_of, prepare
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.explain import Miss
from weft.transforms.graphs.listing import Listing, Writer, compiled_lines, writer_of
from weft.transforms.graphs.memory import MemoryAnalysis, analysis_of
from weft.transforms.graphs.one_at_a_time import ONE_AT_A_TIME
from weft.transforms.graphs.options import Graphable
from weft.values.trees import TreeSpec, leaves_with_names, tree_structure, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")


@attrs.frozen(eq=False, repr=False)
class Lowered(Generic[R]):
    """The operators that a function runs for calls of one signature, recorded from one run.

    Args:
        name: the function's name.
        decision: the mode and the class that its calls run under.
        in_tree: the structure of the arguments by name, without the static ones.
        out_tree: the structure of the result.
        listing: the operators.
    """

    name: str
    decision: Decision[Any]
    in_tree: TreeSpec
    out_tree: TreeSpec
    listing: Listing
    _compile: Callable[["Lowered[R]", Compiler | None], "Compiled[R]"]

    def compile(self, compiler: Compiler | None = None) -> "Compiled[R]":
        """Capture the graph for calls of this signature, or take it from the memo.

        Args:
            compiler: compiles what the graph repeats, as `graphify` takes it; the graph is then
                this result's own, unless it is the function's compiler. None: the function's.

        Raises:
            CompilerError: torch has no such compiler; or, for a function with `strict=True`, it
                cannot compile this one.
        """
        return self._compile(self, compiler)

    def as_text(self, form: str = "text") -> str:
        """The listing of the operators as text, or with `form="dot"` as a graph for Graphviz."""
        if form not in ("text", "dot"):
            raise CaptureError(
                f"{self.name}.lower(...).as_text({form!r})", "no such form", "'text' or 'dot'"
            )
        if form == "text":
            return str(self.listing)
        return self.listing.as_dot()

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<Lowered {self.name}: {len(self.listing.lines)} operators, {self.decision.mode}>"


def refuse_call(lowered: Lowered[Any], miss: Miss) -> NoReturn:
    """Raise the error for a call of another signature."""
    instead = (
        f"call {lowered.name} itself, which captures what it needs; or pass arguments like the"
        " lowered ones, and "
    )
    instead += "by reference the same tensors, or the ones that a call returned in their place"
    call = f"{lowered.name}.lower(...).compile()(...)"
    raise CacheMissError(call, f"arguments unlike the lowered ones: {miss.differs}", instead)


@attrs.frozen(eq=False, repr=False)
class Compiled(Generic[R]):
    """A captured graph as a function. It takes only calls of the lowered signature, with the
    arguments captured by reference (donated arguments, params) at the addresses that the lowered
    call had. Where the graphified function would run inline (under autograd, torch.func, another
    capture), so does this one. A function may compute something else in the other grad mode: the
    first call in that mode captures a second graph."""

    lowered: Lowered[R]
    _graph: Graph
    _compiler: Compiler | None
    _run: Callable[[tuple[Any, ...], dict[str, Any]], R]

    def __call__(self, /, *args: Any, **kwargs: Any) -> R:
        return self._run(args, kwargs)

    def memory_analysis(self) -> MemoryAnalysis:
        """The memory of the graph, as measured at its capture."""
        return analysis_of([self._graph])

    def as_text(self, form: str = "text") -> str:
        """The listing of the operators as text, or with `form="dot"` as a graph for Graphviz.

        After the text of a compiled graph come the kernels that its compiler made, in order, each
        with the operators that it computes; or, if the compiler does not show its code, the
        operators that it compiled.
        """
        text = self.lowered.as_text(form)
        if form == "text" and self._compiler is not None:
            text = "\n".join([text, *compiled_lines(self._graph, compiler_name(self._compiler))])
        return text

    def __repr__(self) -> str:
        return (
            f"<Compiled {self.lowered.name}: {self._graph.recording.num_pieces} graphs,"
            f" {self.lowered.decision.mode}>"
        )


def lower(
    graphable: Graphable,
    call: Call,
    decision: Decision[Any],
    device: torch.device,
    compile: Callable[[Lowered[R], Compiler | None], Compiled[R]],
) -> Lowered[R]:
    """Run a function once on its own input buffers, and list its operators.

    Raises:
        CaptureError: the function cannot be captured.
    """
    prepared = prepare(graphable, call, decision.descriptor, InputBufferPool())
    names = prepared.names()
    writer = writer_of(
        prepared, graphable.split_at if decision.mode == "piecewise" else frozenset()
    )
    with ONE_AT_A_TIME:
        audit = audit_of(graphable, prepared, device)
        with prepared.restored(audit):
            with signal_capture(), audit.random.private_draws(), writer, audit:
                outputs = prepared.run()
            result = tree_unflatten(list(outputs.leaves), outputs.structure)
            pairs = zip(outputs.leaves, outputs.references, strict=True)
            values = [_result_text(leaf, reference, writer, names) for leaf, reference in pairs]
    paths = [path for path, _ in leaves_with_names(result)]
    if decision.descriptor is None:
        descriptor = ""
    else:
        descriptor = f" for '{decision.descriptor}'"
    title = (
        f"{graphable.name}({', '.join((*call.references, *call.copied))}),"
        f" {decision.mode}{descriptor}"
    )
    listing = Listing(
        title, tuple(writer.inputs), tuple(writer.lines), tuple(zip(paths, values, strict=True))
    )
    in_tree = tree_structure({**call.references, **call.copied})
    return Lowered(graphable.name, decision, in_tree, outputs.structure, listing, compile)


def _result_text(leaf: Any, reference: int | None, writer: Writer, names: Sequence[str]) -> str:
    if reference is not None:
        return f"{names[reference]}, in its place"
    if isinstance(leaf, Tensor):
        return str(writer.value(leaf))
    return repr(leaf)


class _Zeros(OperatorWatch):
    """Makes weft's operators return zeros, because no kernel writes their results; zeros are in
    range for any index.

    A call whose arguments are of the same kinds as those of an earlier call, such as the same
    operator in another layer, needs the same kernels. It is not passed on; its results are zeros
    with the shapes of the earlier results. A collective is always passed on, because the other
    ranks take part in it.
    """

    def __init__(self) -> None:
        self._makers: dict[Any, Callable[[], Any]] = {}

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace != "weft":
            return self.pass_on(func, args, kwargs)
        key = func, *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items())
        if (maker := self._makers.get(key)) is not None:
            return maker()
        result = self.pass_on(func, args, kwargs)
        inputs = {storage_id(x) for x in tensors_in(args, kwargs)}
        for output in tensors_in(result):
            if storage_id(output) not in inputs:
                output.zero_()
        # New zeros cannot stand for a result that shares memory with an argument or another result.
        if effect_of(func, args) is None and _are_own(
            result if isinstance(result, tuple) else (result,), inputs
        ):
            self._makers[key] = _maker(result)
        return result


def _kind(value: Any) -> Any:
    """Everything about an operator's argument that may decide which kernels it needs, except a
    tensor's values."""
    if isinstance(value, Tensor):
        return kernel_kind(value)
    if isinstance(value, list):
        return tuple(map(_kind, value))
    return (type(value), value)


def _are_own(outputs: Sequence[Any], inputs: Set[int]) -> bool:
    """Whether an operator's results are tensors that each fill a new storage of their own."""
    if not all(isinstance(x, Tensor) and x.untyped_storage().nbytes() == x.nbytes for x in outputs):
        return False
    return len({storage_id(x) for x in outputs} - inputs) == len(outputs)


def _maker(result: Any) -> Callable[[], Any]:
    """A function that makes zeros like an operator's result."""
    if isinstance(result, tuple):
        makers = [*map(_maker, result)]
        return lambda: tuple(make() for make in makers)
    size, stride, options = (
        result.shape,
        result.stride(),
        {"dtype": result.dtype, "device": result.device},
    )
    return lambda: torch.empty_strided(size, stride, **options).zero_()


def compiling_at_once() -> AbstractContextManager[None]:
    """A context in which several calls of `compile_ahead` compile their kernels side by side, until
    it exits."""
    if triton_version() is None or not torch.cuda.is_available():
        return contextlib.nullcontext()
    from weft.ops.kernel_triton import compiling

    return compiling()


def compile_ahead(graphable: Graphable, call: Call, cache: Cache) -> None:
    """Compile the kernels for the classes that have no graph yet, or for the call itself if no
    class covers it; the arguments are left unchanged.

    It is for functions of weft's own operators, because another library's operator may fail on
    zeros. A class for which there is no memory is skipped: its capture will report that.

    For graphs it runs on the back end's stream, so that libraries allocate their workspaces there.
    A library that is first called during a capture would allocate them in the graphs' pool.
    """
    if triton_version() is None:
        return
    # Imported here so that weft imports on machines without triton.
    from weft.ops.copying.copies_triton import ask_for_kernels
    from weft.ops.kernel_triton import compiling

    backend = cache.backend_for(call)
    # A separate pool, because replays may still be reading the graphs' own buffers, and its bytes
    # would be counted.
    input_buffers = InputBufferPool()
    decision = cache.decide(call)
    if decision.mode == "none":
        classes = [decision]
    else:
        classes = cache.rungs(call)
    missing = [
        rung for rung in classes if rung is decision or cache.find(cache.key(call, rung)) is None
    ]
    zeros = _Zeros()
    with (
        compiling(),
        ONE_AT_A_TIME,
        contextlib.nullcontext() if decision.mode == "none" else backend.allocating(),
    ):
        if backend.device.type == "cuda":
            ask_for_kernels(backend.device, len(call.copied_leaves))
        for rung in missing:
            with _may_be_full():
                prepared = prepare(graphable, call, rung.descriptor, input_buffers)
                with prepared.restored(audit_of(graphable, prepared, backend.device)), zeros:
                    prepared.run()


def rehearse(graphable: Graphable, call: Call, cache: Cache) -> None:
    """Run the function once, without a graph, on padding of the call's class, if there is memory
    for it; the arguments are left unchanged. If other ranks of a mesh wait for this rank's
    collectives, full memory is an error."""
    with ONE_AT_A_TIME, _may_be_full():
        prepared = prepare(graphable, call, cache.descriptor(call), InputBufferPool())
        audit = audit_of(graphable, prepared, cache.backend_for(call).device)
        with prepared.restored(audit), audit.random.private_draws():
            prepared.run()


def _may_be_full() -> AbstractContextManager[None]:
    """A context that suppresses an out-of-memory error, unless other ranks wait for this rank's
    collectives."""
    if others_wait():
        return contextlib.nullcontext()
    return contextlib.suppress(torch.OutOfMemoryError)
