"""Custom classes of batches, and batches of them, as a user would write them."""

import dataclasses
from collections import UserDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

import weft


@attrs.frozen
class Length:
    """A custom class of batches."""

    steps: int

    def covers(self, other: "Length") -> bool:
        return self.steps >= other.steps


@weft.pytree
@attrs.frozen(eq=False)
class Signal:
    """A batch of a custom class: x [steps], with as much behind it as its class has more."""

    length: Length = attrs.field(metadata=weft.descriptor_field())
    x: Tensor = attrs.field(metadata=weft.axes("steps"))


@dataclasses.dataclass(frozen=True)
class Documents:
    """A class of ragged batches."""

    num_docs: int
    num_words: int

    def covers(self, other: "Documents") -> bool:
        return self.num_docs >= other.num_docs and self.num_words >= other.num_words


@weft.pytree
@attrs.frozen(eq=False)
class Corpus:
    """A ragged batch: words [num_words] of documents that start at starts [num_docs + 1]. The
    weights are shared."""

    documents: Documents = attrs.field(metadata=weft.descriptor_field())
    words: Tensor = attrs.field(metadata=weft.axes("num_words"))
    starts: Tensor = attrs.field(metadata=weft.axes("num_docs+1", pad="last"))
    titles: Tensor = attrs.field(metadata=weft.axes("num_docs"))
    weights: Tensor | None = None

    @classmethod
    def of(cls, *lengths: int) -> "Corpus":
        starts = torch.tensor([0, *lengths]).cumsum(0)
        words = torch.arange(float(starts[-1]))
        titles = torch.arange(len(lengths)) * 10.0
        documents = Documents(len(lengths), int(starts[-1]))
        return cls(documents, words, starts, titles, torch.full((3,), 2.0))


@attrs.frozen
class GraphSize(weft.Descriptor):
    """A class of graphs."""

    num_nodes: int
    num_edges: int


@weft.pytree
@attrs.frozen(eq=False)
class Graph:
    """A graph: x [num_nodes], and edges from `source` to `target` [num_edges]."""

    size: GraphSize = attrs.field(metadata=weft.descriptor_field())
    x: Tensor = attrs.field(metadata=weft.axes("num_nodes"))
    source: Tensor = attrs.field(metadata=weft.axes("num_edges"))
    target: Tensor = attrs.field(metadata=weft.axes("num_edges"))

    @classmethod
    def ring(cls, num_nodes: int) -> "Graph":
        nodes = torch.arange(num_nodes)
        return cls(GraphSize(num_nodes, num_nodes), nodes + 1.0, nodes, nodes.roll(1))


@weft.pytree
@attrs.frozen(eq=False)
class SplitGraph(Graph):
    """A graph that is cut by the targets of its edges. A part has all nodes that its edges read, in
    any order, so that the outputs of parts overlap: `join` adds them."""

    def split(self, parts: int) -> tuple["SplitGraph", ...]:
        bounds = [len(self.source) * i // parts for i in range(parts + 1)]
        return tuple(
            SplitGraph(GraphSize(len(self.x), b - a), self.x, self.source[a:b], self.target[a:b])
            for a, b in pairwise(bounds)
        )

    def join(self, outputs: list[Tensor]) -> Tensor:
        return torch.stack(outputs).sum(0)


@weft.pytree
@attrs.frozen(eq=False)
class Graphs:
    """Graphs in one: their nodes and edges begin at `first_node` and `first_edge` [num_graphs + 1]."""

    x: Tensor = attrs.field(metadata=weft.axes("num_nodes"))
    source: Tensor = attrs.field(metadata=weft.axes("num_edges"))
    target: Tensor = attrs.field(metadata=weft.axes("num_edges"))
    first_node: Tensor = attrs.field(metadata=weft.axes("num_graphs+1", pad="last"))
    first_edge: Tensor = attrs.field(metadata=weft.axes("num_graphs+1", pad="last"))

    @classmethod
    def of(cls, *graphs: Graph) -> "Graphs":
        x, source, target = (
            torch.cat([getattr(graph, name) for graph in graphs])
            for name in ("x", "source", "target")
        )
        starts = (
            torch.tensor([0, *(len(getattr(graph, name)) for graph in graphs)]).cumsum(0)
            for name in ("x", "source")
        )
        return cls(x, source, target, *starts)


def neighbours(graph: Graph) -> Tensor:
    """For each node the sum over its neighbours."""
    return torch.zeros_like(graph.x).index_add(0, graph.target, graph.x[graph.source])


@attrs.frozen
class Pair:
    """A batch in an attrs class that nobody registered as a pytree."""

    x: Tensor
    y: Tensor
    name: str = "pair"


@dataclasses.dataclass
class Data:
    """The same as a dataclass, with a field that is computed."""

    x: Tensor
    y: Tensor
    count: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.x)


class Named(NamedTuple):
    """The same as a named tuple."""

    x: Tensor
    y: Tensor


class Encoding(UserDict[str, Tensor]):
    """The same as a mapping, such as the BatchEncoding of transformers."""


X, Y = torch.arange(12.0).view(6, 2), torch.arange(6.0)


def _product(batch: Any) -> Tensor:
    x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch.x, batch.y)
    product: Tensor = x * y[:, None]
    return product


def _words(batch: Corpus) -> dict[str, Tensor]:
    """For each word its place among all that the batch has before it in its document, and for each
    document a sum."""
    owner = torch.searchsorted(
        batch.starts[1:].contiguous(), torch.arange(len(batch.words)), right=True
    )
    sums = torch.zeros_like(batch.titles).index_add(0, owner, batch.words)
    assert batch.weights is not None
    return {"words": batch.words * batch.weights[0] + batch.titles[owner], "sums": sums}


# Batches that are split, and a step on each that is separable by its rows.
OWN_BATCHES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "one axis": (Signal(Length(6), Y), lambda batch: batch.x * 2),
    "one axis, returned": (Signal(Length(6), Y), lambda batch: attrs.evolve(batch, x=batch.x * 2)),
    "two axes": (Corpus.of(2, 3, 1, 4), _words),
    "attrs": (Pair(X, Y), _product),
    "dataclass": (Data(X, Y), _product),
    "named tuple": (Named(X, Y), _product),
    "dict": ({"x": X, "y": Y}, _product),
    "mapping": (Encoding(x=X, y=Y), _product),
    "nested": (
        {"one": Pair(X, Y), "two": [X]},
        lambda batch: _product(batch["one"]) + batch["two"][0],
    ),
    "split and join": (
        SplitGraph(GraphSize(6, 6), *attrs.astuple(Graph.ring(6), recurse=False)[1:]),
        neighbours,
    ),
}

# Batches that pass whole, and that nobody says how to split.
WHOLE_BATCHES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a graph": (Graph.ring(6), neighbours),
    "other lengths": ([X, Y[:3]], lambda batch: batch[0] * batch[1].sum()),
    "a scalar": ({"x": X, "t": torch.tensor(3.0)}, lambda batch: batch["x"] * batch["t"]),
    "a list of values": (
        {"x": X, "names": list("abcdef")},
        lambda batch: batch["x"] * len(batch["names"]),
    ),
    "no tensor": (None, lambda batch: torch.ones(2)),
    "a text": ("text", lambda batch: torch.ones(2)),
}
