"""A graph neural network over graphs of many sizes, and an MLP of many leaves; both in JAX too."""

import importlib
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.batches.descriptor import Descriptor
from weft.proofs.evidence.bench.modules.variants import JAX, Call, Setting, in_turn
from weft.values.trees import axes, descriptor_field, pytree

# (Nodes, edges) of the graphs of a call, and of the classes that weft captures.
GRAPHS = tuple((n, 4 * n + 37) for n in (700, 910, 1500, 1980, 2600, 3900, 5200, 7900))
CLASSES = ((1024, 4096), (2048, 8192), (4096, 16384), (8192, 32768))
SMALL_GRAPHS = ((5, 11), (7, 16), (12, 25))
SMALL_CLASSES = ((8, 16), (16, 32))


@attrs.frozen
class GraphSize(Descriptor):
    """The size class of a graph."""

    nodes: int
    edges: int


@pytree
@attrs.frozen(eq=False)
class Graph:
    """The features of nodes, and weighted edges between them. Padding has the weight 0."""

    size: GraphSize = attrs.field(metadata=descriptor_field())
    x: Tensor = attrs.field(metadata=axes("nodes"))
    sources: Tensor = attrs.field(metadata=axes("edges"))
    targets: Tensor = attrs.field(metadata=axes("edges"))
    weights: Tensor = attrs.field(metadata=axes("edges"))


@pytree
@attrs.frozen(eq=False)
class Nodes:
    """A result for each node."""

    x: Tensor = attrs.field(metadata=axes("nodes"))


class GraphNetwork(nn.Module):
    """Layers in which each node adds up the messages of the edges that lead to it."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(num_layers))

    def forward(self, x: Tensor, sources: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = functional.silu(message(x))[sources] * weights[:, None]
            received = torch.zeros_like(x).index_add(0, targets, sent)
            x = x + functional.silu(update(torch.cat([x, received], 1)))
        return x


def _graph(setting: Setting, size: GraphSize, width: int) -> Graph:
    ends = setting.tokens(2, size.edges, vocab_size=size.nodes)
    x = setting.normal(size.nodes, width)
    return Graph(size, x, ends[0], ends[1], setting.normal(size.edges) / 2)


def gnn(setting: Setting) -> Call:
    """A call for each of 8 graphs of 700 to 7,900 nodes; each counts as a part of one call."""
    width = setting.size(128, 8)
    network = setting.built(lambda: GraphNetwork(width, setting.size(4, 2)))
    network.requires_grad_(False)
    sizes = [GraphSize(*size) for size in setting.size(GRAPHS, SMALL_GRAPHS)]
    graphs = [_graph(setting, size, width) for size in sizes]
    if setting.variant == JAX:
        return in_turn([_jax_gnn(network, graph) for graph in graphs])

    def call_of(step: Callable[..., Any], graph: Graph) -> Call:
        return lambda: step(graph.x, graph.sources, graph.targets, graph.weights)

    if not setting.is_weft:
        step = torch.no_grad()(setting.compiled(network, dynamic=True))
        return in_turn([call_of(step, graph) for graph in graphs])
    params = dict(network.named_parameters())

    def padded(params: dict[str, Tensor], graph: Graph) -> Nodes:
        arguments = (graph.x, graph.sources, graph.targets, graph.weights)
        return Nodes(torch.func.functional_call(network, params, arguments))

    ladder = [GraphSize(*size) for size in setting.size(CLASSES, SMALL_CLASSES)]
    padded_step = setting.graphified(padded, ladder=ladder)

    def padded_call(graph: Graph) -> Call:
        return lambda: padded_step(params, graph).x

    return in_turn([padded_call(graph) for graph in graphs])


class Layer(nn.Module):
    """A layer of four parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale + self.shift


def mlp(setting: Setting) -> Call:
    """An MLP of 250 layers of 4 parameters, on 8 rows: the time is the host's."""
    width = setting.size(64, 8)
    count = setting.size(250, 10)
    module = setting.built(lambda: nn.Sequential(*(Layer(width) for _ in range(count))))
    x = setting.normal(8, width)
    if setting.variant == JAX:
        return _jax_mlp(module, x)
    return setting.inference(module, x)


def _jax() -> Any:
    try:
        return importlib.import_module("jax")
    except ModuleNotFoundError:
        raise RuntimeError("no jax") from None


def _jax_arrays(jax: Any, *tensors: Tensor) -> list[Any]:
    return [jax.numpy.asarray(x.detach().cpu().numpy()) for x in tensors]


def _jax_mlp(module: Any, x: Tensor) -> Call:
    jax = _jax()
    params = [
        _jax_arrays(jax, layer.linear.weight, layer.linear.bias, layer.scale, layer.shift)
        for layer in module
    ]
    [rows] = _jax_arrays(jax, x)

    def run(params: Any, x: Any) -> Any:
        for weight, bias, scale, shift in params:
            x = x + jax.numpy.tanh(x @ weight.T + bias) * scale + shift
        return x

    jitted = jax.jit(run)
    return lambda: jitted(params, rows)


def _jax_gnn(network: Any, graph: Graph) -> Call:
    jax = _jax()
    layers = [
        _jax_arrays(jax, message.weight, message.bias, update.weight, update.bias)
        for message, update in zip(network.messages, network.updates, strict=True)
    ]
    inputs = _jax_arrays(jax, graph.x, graph.sources, graph.targets, graph.weights)

    def run(layers: Any, x: Any, sources: Any, targets: Any, weights: Any) -> Any:
        for message, message_bias, update, update_bias in layers:
            sent = jax.nn.silu(x @ message.T + message_bias)[sources] * weights[:, None]
            received = jax.numpy.zeros_like(x).at[targets].add(sent)
            both = jax.numpy.concatenate([x, received], 1)
            x = x + jax.nn.silu(both @ update.T + update_bias)
        return x

    jitted = jax.jit(run)
    return lambda: jitted(layers, *inputs)
