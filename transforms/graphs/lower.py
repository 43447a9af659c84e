"""`Lowered` and `Compiled`, the states of a graphified function for one signature, as in JAX; the listing of its
operators; the kernels that are compiled ahead of a capture."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import attrs
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.errors import CacheMissError, CaptureError
from weft.ops.register import triton_version
from weft.torchapi.private import signal_capture, storage_id
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends.operators import tensors_in
from weft.transforms.graphs.cache import Cache
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.capture import ONE_AT_A_TIME, Graph, audit_of, prepare
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.explain import Miss
from weft.transforms.graphs.memory import MemoryAnalysis, analysis_of
from weft.transforms.graphs.options import Graphable
from weft.trees import TreeSpec, leaves_with_names, tree_leaves, tree_map, tree_structure, tree_unflatten


@attrs.frozen
class Value:
    """A tensor of a listing: its number, dtype and shape, and what it is if no operator of the listing made it."""

    number: int
    kind: str
    origin: str = ""

    def __str__(self) -> str:
        return f"%{self.number}"


@attrs.frozen
class Line:
    """An operator: what it was called with, as text, the tensors among that, and what it made.

    Args:
        splits: whether it stays outside the graphs, between two pieces.
    """

    operator: str
    arguments: str
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    splits: bool = False

    def __str__(self) -> str:
        made = ", ".join(map(str, self.makes))
        kinds = ", ".join(value.kind for value in self.makes)
        return f"{made + ' = ' if made else ''}{self.operator}({self.arguments}){'  : ' + kinds if kinds else ''}"


@attrs.frozen
class Listing:
    """A function's run: its inputs, its operators in order, and its results.

    Args:
        title: which function, and for what.
        inputs: the tensors that it read without having made them.
        lines: its operators.
        results: for each leaf of the result its path, and what it is.
    """

    title: str
    inputs: tuple[Value, ...]
    lines: tuple[Line, ...]
    results: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        yield self.title
        for value in self.inputs:
            yield f"  {value} : {value.kind}  {value.origin}"
        pieces = 1
        for line in self.lines:
            if line.splits:
                pieces += 1
                yield f"  -- runs by itself, between piece {pieces - 1} and piece {pieces}:"
            yield f"  {line}"
        for path, what in self.results:
            yield f"  return {path or 'the whole'} = {what}"

    def as_dot(self) -> str:
        """The graph of operators in Graphviz's DOT: boxes are operators, ellipses are inputs, arrows are tensors."""
        lines = ["digraph {", "  rankdir=TB; node [fontname=monospace];"]
        makers: dict[int, str] = {}
        for value in self.inputs:
            makers[value.number] = f"v{value.number}"
            label = _quoted(value.origin + "\n" + value.kind)
            lines.append(f"  v{value.number} [label={label}];")
        for index, line in enumerate(self.lines):
            style = "box, style=bold" if line.splits else "box"
            lines.append(f"  n{index} [shape={style}, label={_quoted(line.operator)}];")
            for value in dict.fromkeys(line.reads):
                if value.number in makers:
                    lines.append(f"  {makers[value.number]} -> n{index} [label={_quoted(value.kind)}];")
            makers.update((value.number, f"n{index}") for value in line.makes)
        return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    return '"' + text.replace('"', r"\"").replace("\n", r"\n") + '"'


class Writer(OperatorWatch):
    """A watch that writes down every operator that runs under it.

    Args:
        inputs: (tensor, what it is), for the tensors that the function starts from.
        split_at: operators that stay outside the graphs.
    """

    def __init__(self, inputs: Sequence[tuple[Tensor, str]], split_at: frozenset[str]) -> None:
        super().__init__()
        self.inputs: list[Value] = []
        self.lines: list[Line] = []
        self.split_at = split_at
        self._values = WeakIdKeyDictionary()
        self._count = 0
        for tensor, origin in inputs:
            self.inputs.append(self._new(tensor, origin))

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = tuple(self._value(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        text = ", ".join([*map(self._show, args), *(f"{k}={self._show(v)}" for k, v in kwargs.items())])
        result = func(*args, **kwargs)
        made = tuple(self._new(x, "") for x in tree_leaves(result) if isinstance(x, Tensor) and x not in self._values)
        name = func._schema.name
        overload = f".{func._overloadname}" if func._overloadname != "default" else ""
        self.lines.append(Line(name + overload, text, reads, made, name in self.split_at))
        return result

    def value(self, tensor: Tensor) -> Value:
        """The value that a tensor is: one of the listing, or an input met now."""
        return self._value(tensor)

    def _value(self, tensor: Tensor) -> Value:
        found: Value | None = self._values.get(tensor)
        if found is None:
            found = self._new(tensor, "from outside")
            self.inputs.append(found)
        return found

    def _new(self, tensor: Tensor, origin: str) -> Value:
        shape = ", ".join(map(str, tensor.shape))
        made = Value(self._count, f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]", origin)
        self._count += 1
        self._values[tensor] = made
        return made

    def _show(self, argument: Any) -> str:
        def show(x: Any) -> Any:
            return _Shown(str(self._value(x)) if isinstance(x, Tensor) else _plain(x))

        return repr(tree_map(show, argument))


class _Shown(str):
    """Text that is shown as it is."""

    def __repr__(self) -> str:
        return str(self)


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.")


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
    _compile: Callable[["Lowered[R]"], "Compiled[R]"]

    def compile(self) -> "Compiled[R]":
        """Capture the graph for calls of this signature, or take it from the memo."""
        return self._compile(self)

    def as_text(self, form: str = "text") -> str:
        """The listing of the operators as text, or with `form="dot"` as a graph for Graphviz."""
        if form not in ("text", "dot"):
            raise CaptureError(f"{self.name}.lower(...).as_text({form!r})", "no such form", "'text' or 'dot'")
        return str(self.listing) if form == "text" else self.listing.as_dot()

    def refuse(self, miss: Miss) -> NoReturn:
        """Raise the error for a call of another signature."""
        instead = (
            f"call {self.name} itself, which captures what it needs; or pass arguments like the lowered ones, and "
        )
        instead += "by reference the same tensors, or the ones that a call returned in their place"
        call = f"{self.name}.lower(...).compile()(...)"
        raise CacheMissError(call, f"arguments unlike the lowered ones: {miss.differs}", instead)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<Lowered {self.name}: {len(self.listing.lines)} operators, {self.decision.mode}>"


@attrs.frozen(eq=False, repr=False)
class Compiled(Generic[R]):
    """A captured graph as a function. It takes calls of the lowered signature only, with the arguments captured by
    reference (donated arguments, params) at the addresses that the lowered call had. Where the graphified function
    would run inline (under autograd, torch.func, another capture), so does this one. For the other grad mode, in which
    a function may compute something else, it has a second graph, captured at the first such call."""

    lowered: Lowered[R]
    _graph: Graph
    _run: Callable[[tuple[Any, ...], dict[str, Any]], R]

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        return self._run(args, kwargs)

    @property
    def in_tree(self) -> TreeSpec:
        """The structure of the arguments by name, without the static ones."""
        return self.lowered.in_tree

    @property
    def out_tree(self) -> TreeSpec:
        """The structure of the result."""
        return self.lowered.out_tree

    def as_text(self, form: str = "text") -> str:
        """The listing of the operators as text, or with `form="dot"` as a graph for Graphviz."""
        return self.lowered.as_text(form)

    def memory_analysis(self) -> MemoryAnalysis:
        """The memory of the graph, as measured at its capture."""
        return analysis_of([self._graph])

    def __repr__(self) -> str:
        return (
            f"<Compiled {self.lowered.name}: {self._graph.recording.num_pieces} graphs, {self.lowered.decision.mode}>"
        )


def lower(
    graphable: Graphable,
    call: Call,
    decision: Decision[Any],
    device: torch.device,
    compile: Callable[[Lowered[R]], Compiled[R]],
) -> Lowered[R]:
    """Run a function once on its own input buffers, and list its operators.

    Raises:
        CaptureError: the function cannot be captured.
    """
    prepared = prepare(graphable, call, decision.descriptor, InputBufferPool())
    leaves, names = (*prepared.references, *prepared.buffers), prepared.names()
    roles = ["donated"] * prepared.num_donated
    roles += ["by reference"] * (len(prepared.references) - prepared.num_donated)
    roles += ["copied in"] * len(prepared.buffers)
    inputs = [
        (alias, f"{name}, {role}")
        for alias, leaf, name, role in zip(prepared.aliases, leaves, names, roles, strict=True)
        if isinstance(leaf, Tensor)
    ]
    writer = Writer(inputs, graphable.split_at if decision.mode == "piecewise" else frozenset())
    audit = audit_of(graphable, prepared, device)
    with prepared.restored(audit):
        with signal_capture(), audit.random.private_draws(), writer, audit:
            outputs = prepared.run()
        result = tree_unflatten(list(outputs.leaves), outputs.structure)
        values = [_result_text(x, i, writer, names) for x, i in zip(outputs.leaves, outputs.references, strict=True)]
    paths = [path for path, _ in leaves_with_names(result)]
    descriptor = "" if decision.descriptor is None else f" for '{decision.descriptor}'"
    title = f"{graphable.name}({', '.join((*call.references, *call.copied))}), {decision.mode}{descriptor}"
    listing = Listing(title, tuple(writer.inputs), tuple(writer.lines), tuple(zip(paths, values, strict=True)))
    in_tree = tree_structure({**call.references, **call.copied})
    return Lowered(graphable.name, decision, in_tree, outputs.structure, listing, compile)


def _result_text(leaf: Any, reference: int | None, writer: Writer, names: Sequence[str]) -> str:
    if reference is not None:
        return f"{names[reference]}, in its place"
    return str(writer.value(leaf)) if isinstance(leaf, Tensor) else repr(leaf)


class _Zeros(OperatorWatch):
    """Makes weft's operators return zeros, because no kernel writes their results; zeros are valid as any index."""

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.namespace == "weft":
            inputs = {storage_id(x) for x in tensors_in(args, kwargs)}
            for output in tensors_in(result):
                if storage_id(output) not in inputs:
                    output.zero_()
        return result


def compile_ahead(graphable: Graphable, call: Call, cache: Cache) -> None:
    """Compile the kernels for the classes that have no graph yet; the arguments are left unchanged.

    It is for functions of weft's own operators, because another library's operator may fail on zeros. A class for which
    there is no memory is skipped: its capture will report that.
    """
    if triton_version() is None:
        return
    from weft.ops.kernel_triton import compiling  # imported here so that weft imports on machines without triton

    device = cache.backend_for(call).device
    # A separate pool, because replays may still be reading the graphs' own buffers, and its bytes would be counted.
    input_buffers = InputBufferPool()
    missing = [rung for rung in cache.rungs(call) if cache.find(cache.key(call, rung)) is None]
    with compiling(), ONE_AT_A_TIME:
        for rung in missing:
            with contextlib.suppress(torch.OutOfMemoryError):
                prepared = prepare(graphable, call, rung.descriptor, input_buffers)
                with prepared.restored(audit_of(graphable, prepared, device)), _Zeros():
                    prepared.run()
