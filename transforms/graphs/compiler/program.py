"""A trace as a graph of torch.fx, compiled."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from weft.torchapi.inductor import Compiler, Symbols, compile_graph
from weft.transforms.graphs.compiler.sizes import NotShared, Size, Sizes
from weft.transforms.graphs.compiler.trace import Input, Operation, Ref, Trace


@attrs.frozen(eq=False)
class Program:
    """A compiled trace.

    Args:
        run: takes the sizes that are symbols, then the tensors of the inputs; returns those of the
            outputs.
        takes: the indices of the trace's inputs that it takes.
        symbols: the sizes that are symbols in it; None if it is for one class.
    """

    run: Callable[[list[Any]], Sequence[Tensor]]
    takes: tuple[int, ...]
    symbols: Symbols | None

    def arguments(self, inputs: Sequence[Tensor], sizes: Sizes) -> list[Any]:
        """The arguments of `run`, from the inputs of a trace and the sizes of its class."""
        names = [] if self.symbols is None else [*self.symbols.by_name]
        return [*(sizes[name] for name in names), *(inputs[i] for i in self.takes)]

    def is_for(self, sizes: Sizes) -> bool:
        """Whether the compiler assumed nothing that these sizes contradict."""
        return self.symbols is not None and self.symbols.hold(sizes)


def compile_trace(
    trace: Trace, outputs: Sequence[int], compiler: Compiler, sizes: Sizes | None = None
) -> Program:
    """Compile a trace that returns the values with these numbers.

    Args:
        trace: the trace; with `sizes`, its numbers may be `Size`.
        outputs: the numbers of the values that it returns.
        compiler: the compiler.
        sizes: the sizes of a class, for whose numbers the compiler chooses if it has to.
    """
    builder = _Builder(trace, sizes)
    for operation in trace.operations:
        builder.add(operation)
    builder.graph.output([builder.nodes[number] for number in outputs])
    module = fx.GraphModule(torch.nn.Module(), builder.graph)
    run = compile_graph(module, builder.examples, trace.mode, compiler)
    return Program(run, tuple(builder.takes), builder.symbols)


class _Builder:
    """Builds the graph of a trace.

    Attributes:
        nodes: the node of each value.
        takes: the indices of the inputs that are the graph's.
        examples: the symbols, then the fake tensors of these inputs.
    """

    def __init__(self, trace: Trace, sizes: Sizes | None) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[int, Any] = {}
        self.takes: list[int] = []
        self.examples: list[Any] = []
        self._mode = trace.mode
        self.symbols = None if sizes is None else Symbols(trace.mode, sizes)
        self._sizes: dict[str, fx.Node] = {}
        # As arguments of their own: torch's cache keeps what the compiler assumed of these only.
        for name, symbol in ({} if self.symbols is None else self.symbols.by_name).items():
            self._sizes[name] = self._placeholder(f"size_{name}", symbol)
        for index, value in enumerate(trace.inputs):
            if value.is_literal and value.tensor.dim() == 0 and value.tensor.is_cpu:
                self.nodes[value.number] = self._number(value.tensor)
            else:
                self._add_input(index, value)

    def _number(self, tensor: Tensor) -> fx.Node:
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        return self.graph.call_function(torch.ops.aten.full.default, ([], tensor.item()), options)

    def _add_input(self, index: int, value: Input) -> None:
        fake = value.fake
        shape, stride, offset = value.geometry
        if _has_size(value.geometry):
            if self.symbols is None or offset != 0:
                raise NotShared("a part of a tensor whose size differs between classes")
            options: dict[str, Any] = {"dtype": fake.dtype, "device": fake.device}
            with self._mode:
                fake = torch.empty_strided(self._values(shape), self._values(stride), **options)
        self.nodes[value.number] = self._placeholder(f"input_{value.number}", fake)
        self.takes.append(index)

    def _placeholder(self, name: str, example: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = node.meta["example_value"] = example
        self.examples.append(example)
        return node

    def _values(self, numbers: Sequence[Any]) -> list[Any]:
        assert self.symbols is not None
        symbols = self.symbols.by_name
        return [x.of(symbols) if isinstance(x, Size) else x for x in numbers]

    def add(self, operation: Operation) -> None:
        """Add an operator."""
        args = self._argument(operation.args)
        kwargs = self._argument(operation.kwargs)
        node = self.graph.call_function(operation.func, args, kwargs)
        for path, number in operation.results:
            result = node
            for index in path:
                result = self.graph.call_function(operator.getitem, (result, index))
            self.nodes[number] = result

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.nodes[value.number]
        if isinstance(value, Size):
            return value.node(self.graph, self._sizes)
        if isinstance(value, torch.Size):
            return list(value)
        if isinstance(value, tuple | list):
            return type(value)([self._argument(x) for x in value])
        if isinstance(value, dict):
            return {name: self._argument(x) for name, x in value.items()}
        return value


def _has_size(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_size, value))
    return isinstance(value, Size)
