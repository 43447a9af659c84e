"""`Program`: a trace as a graph of torch.fx, compiled, and run on real tensors."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from weft.torchapi.inductor import compile_graph
from weft.transforms.graphs.compiler.trace import Input, Operation, Ref, Trace
from weft.values.trees import tree_map


@attrs.frozen(eq=False)
class Program:
    """A compiled trace.

    Args:
        run: takes the tensors of the inputs, and returns those of the outputs.
        inputs: the tensors of the inputs.
    """

    run: Callable[[list[Tensor]], Sequence[Tensor]]
    inputs: list[Tensor]

    def __call__(self) -> Sequence[Tensor]:
        return self.run([*self.inputs])


def compile_trace(trace: Trace, outputs: Sequence[int]) -> Program:
    """Compile a trace that returns the values with these numbers."""
    graph = fx.Graph()
    nodes: dict[int, Any] = {}
    inputs: list[Input] = []
    for value in trace.inputs:
        if value.tensor.dim() == 0 and value.tensor.is_cpu and value.is_literal:
            nodes[value.number] = _number(graph, value.tensor)
            continue
        node = graph.placeholder(f"input_{value.number}")
        node.meta["val"] = node.meta["example_value"] = value.fake
        nodes[value.number] = node
        inputs.append(value)
    for operation in trace.operations:
        _add(graph, nodes, operation)
    graph.output([nodes[number] for number in outputs])
    module = fx.GraphModule(torch.nn.Module(), graph)
    run = compile_graph(module, [value.fake for value in inputs])
    return Program(run, [value.tensor.detach() for value in inputs])


def _number(graph: fx.Graph, tensor: Tensor) -> fx.Node:
    options = {"dtype": tensor.dtype, "device": tensor.device}
    return graph.call_function(torch.ops.aten.full.default, ([], tensor.item()), options)


def _add(graph: fx.Graph, nodes: dict[int, Any], operation: Operation) -> None:
    def node_of(value: Any) -> Any:
        return nodes[value.number] if isinstance(value, Ref) else value

    args, kwargs = tree_map(node_of, (operation.args, operation.kwargs))
    node = graph.call_function(operation.func, args, kwargs)
    for path, number in operation.results:
        result = node
        for index in path:
            result = graph.call_function(operator.getitem, (result, index))
        nodes[number] = result
