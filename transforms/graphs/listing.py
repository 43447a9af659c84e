"""A listing: the operators of a run with their inputs and results, as text or as a graph in DOT.

`make_fx` and torch.fx's drawer were tried instead. The text of `make_fx` gives no shapes, and does
not say where a tensor from outside comes from (`_tensor_constant0`); the drawer needs pydot.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.capture import Graph, Prepared
from weft.values.trees import tree_leaves, tree_map


@attrs.frozen
class Value:
    """A tensor of a listing: its number, its dtype and shape (`kind`), and where it comes from if
    no operator of the listing made it (`origin`).

    Args:
        address: its data pointer if it comes from outside; else 0.
    """

    number: int
    kind: str
    origin: str = ""
    address: int = attrs.field(default=0, eq=False, repr=False)

    def __str__(self) -> str:
        return f"%{self.number}"


@attrs.frozen
class Line:
    """One call of an operator: its arguments as text, the tensors that it read, and those it made.

    Args:
        splits: whether the operator stays outside the graphs, between two pieces.
    """

    operator: str
    arguments: str
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    splits: bool = False

    def __str__(self) -> str:
        names = ", ".join(map(str, self.makes))
        kinds = ", ".join(value.kind for value in self.makes)
        return f"{names + ' = ' if names else ''}{self.operator}({self.arguments}){'  : ' + kinds if kinds else ''}"


@attrs.frozen
class Listing:
    """A function's run: its inputs, its operators in order, and its results.

    Args:
        title: the function, its arguments, and the mode and class of the run.
        inputs: the tensors that it read and did not make.
        lines: its operators.
        results: for each leaf of the result, its path and what it is.
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
        """The graph of operators in Graphviz's DOT: boxes are operators, ellipses are inputs,
        arrows are tensors."""
        lines = ["digraph {", "  rankdir=TB; node [fontname=monospace];"]
        makers: dict[int, str] = {}
        for value in self.inputs:
            makers[value.number] = f"v{value.number}"
            label = _quoted(value.origin + "\n" + value.kind)
            lines.append(f"  v{value.number} [label={label}];")
        for index, line in enumerate(self.lines):
            if line.splits:
                style = "box, style=bold"
            else:
                style = "box"
            lines.append(f"  n{index} [shape={style}, label={_quoted(line.operator)}];")
            for value in dict.fromkeys(line.reads):
                if value.number in makers:
                    lines.append(
                        f"  {makers[value.number]} -> n{index} [label={_quoted(value.kind)}];"
                    )
            makers.update((value.number, f"n{index}") for value in line.makes)
        return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    return '"' + text.replace('"', r"\"").replace("\n", r"\n") + '"'


class Writer(OperatorWatch):
    """A watch that writes down every operator that runs under it.

    Args:
        inputs: (tensor, its description) for the tensors that the function starts from.
        split_at: operators that stay outside the graphs.
    """

    def __init__(self, inputs: Sequence[tuple[Tensor, str]], split_at: frozenset[str]) -> None:
        self.inputs: list[Value] = []
        self.lines: list[Line] = []
        self.split_at = split_at
        # By identity, because `==` of tensors is elementwise; weak, to keep no tensor alive.
        self._values = WeakIdKeyDictionary()
        self._count = 0
        for tensor, origin in inputs:
            self.inputs.append(self._new(tensor, origin))

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = tuple(self._value(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        text = ", ".join(
            [*map(self._show, args), *(f"{k}={self._show(v)}" for k, v in kwargs.items())]
        )
        result = self.pass_on(func, args, kwargs)
        outputs = tuple(
            self._new(x, "")
            for x in tree_leaves(result)
            if isinstance(x, Tensor) and x not in self._values
        )
        name = func._schema.name
        if func._overloadname != "default":
            overload = f".{func._overloadname}"
        else:
            overload = ""
        self.lines.append(Line(name + overload, text, reads, outputs, name in self.split_at))
        return result

    def value(self, tensor: Tensor) -> Value:
        """The value of the listing for a tensor; a new input if the listing has not met it yet."""
        return self._value(tensor)

    def _value(self, tensor: Tensor) -> Value:
        value: Value | None = self._values.get(tensor)
        if value is None:
            strided = tensor.layout is torch.strided and not tensor.is_meta
            value = self._new(tensor, "from outside", tensor.data_ptr() if strided else 0)
            self.inputs.append(value)
        return value

    def _new(self, tensor: Tensor, origin: str, address: int = 0) -> Value:
        shape = ", ".join(map(str, tensor.shape))
        value = Value(
            self._count, f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]", origin, address
        )
        self._count += 1
        self._values[tensor] = value
        return value

    def _show(self, argument: Any) -> str:
        def show(x: Any) -> Any:
            return _Shown(str(self._value(x)) if isinstance(x, Tensor) else _plain(x))

        return repr(tree_map(show, argument))


class _Shown(str):
    """Text whose `repr` has no quotes."""

    def __repr__(self) -> str:
        return str(self)


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.")


def compiled_lines(graph: Graph, compiler: str) -> Iterator[str]:
    """Describe the code that a compiler made of a graph, in lines.

    Args:
        graph: the graph.
        compiler: the compiler's name.
    """
    if graph.program is None:
        yield f"not compiled by {compiler}: {graph.why_not_compiled}"
        return
    yield f"compiled by {compiler}:"
    for line in graph.program.lines:
        yield f"  {line}"


def writer_of(prepared: Prepared, split_at: frozenset[str]) -> Writer:
    """Make the writer of a function's next run; it shows arguments by name and role."""
    num_kept = len(prepared.references) - prepared.num_donated
    roles = (
        ["donated"] * prepared.num_donated
        + ["by reference"] * num_kept
        + ["copied in"] * len(prepared.buffers)
    )
    inputs = [
        (alias, f"{name}, {role}")
        for alias, name, role in zip(prepared.aliases, prepared.names(), roles, strict=True)
        if isinstance(alias, Tensor)
    ]
    return Writer(inputs, split_at)
