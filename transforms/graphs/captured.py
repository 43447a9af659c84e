"""`CapturedGraphs` shows the graphs that a function holds: each one's class, pieces, operators, bytes and seconds."""

from collections.abc import Iterable
from typing import Any

import attrs

from weft.display.durations import duration
from weft.display.plots import GREY, new_axes, rows
from weft.display.tables import COLOURS, Table, Tabled
from weft.transforms.graphs.calls.key import CacheInfo, Key, LeafKey
from weft.transforms.graphs.capture import Entry
from weft.transforms.graphs.memory import size_text, size_unit

HEADER = ("mode", "of", "pieces", "operators", "buffers", "tensors", "captured in")


@attrs.frozen
class CapturedGraph:
    """One graph that a function holds.

    Args:
        mode: `full` or `piecewise`.
        of: the class that it was captured for; without a ladder, the shapes of the copied arguments.
        pieces: the number of pieces.
        operators: the number of operators that a replay repeats: those that compute or write. On a GPU each is one
            kernel or a few.
        buffer_bytes: the bytes that this graph added to the input buffers and padding sources: the buffers of a class
            lie inside the larger ones of another class.
        graph_bytes: its outputs and intermediate tensors; if graphs share a pool, the bytes that this one added.
        seconds: the duration of its capture.
    """

    mode: str
    of: str
    pieces: int
    operators: int
    buffer_bytes: int
    graph_bytes: int
    seconds: float

    @classmethod
    def make(cls, key: Key, entry: Entry) -> "CapturedGraph":
        """Make one from an entry of the memo."""
        of = _shapes(key) if key.descriptor is None else str(key.descriptor)
        recording, sizes = entry.recording, (entry.buffer_bytes, entry.recording.nbytes)
        return cls(key.mode, of, recording.num_pieces, entry.operators, *sizes, entry.seconds)

    def cells(self) -> tuple[str, ...]:
        """The cells of its row as text, one per column of `HEADER`."""
        counts, sizes = (f"{self.pieces}", f"{self.operators}"), (self.buffer_bytes, self.graph_bytes)
        return self.mode, self.of, *counts, *map(size_text, sizes), f"{self.seconds * 1e3:.1f} ms"


def _shapes(key: Key) -> str:
    """The dtypes and shapes of the tensors that are copied in, as text."""
    tensors = [leaf for leaf in key.copied.leaves if isinstance(leaf, LeafKey)]
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" for x in tensors) or "nothing copied in"


@attrs.frozen(repr=False)
class CapturedGraphs(Tabled):
    """The graphs that a function holds, as `graphified.graphs()` returns them; a table in print and in notebooks.

    Args:
        name: the function's name.
        graphs: the graphs, in the order of capture.
        info: the function's counts.

    >>> import torch, weft
    >>> double = weft.graphify(lambda x: torch.sin(x) * 2)
    >>> y = double(torch.ones(3))
    >>> print(double.graphs())  # doctest: +ELLIPSIS
    graphify(<lambda>): 1 graph, 1 replay, 0 eager calls
    mode  of          pieces  operators   buffers   tensors  captured in
    full  float32[3]       1          2  12 bytes  24 bytes  ...
    """

    name: str
    graphs: tuple[CapturedGraph, ...]
    info: CacheInfo

    def table(self) -> Table:
        """A table with one row per graph."""
        counts = (len(self.graphs), "graph"), (self.info.replays, "replay"), (self.info.eager, "eager call")
        counts_text = ", ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts)
        return Table(HEADER, tuple(graph.cells() for graph in self.graphs), f"graphify({self.name}): {counts_text}")

    def plot(self) -> Any:
        """Draw the seconds and the bytes of each graph side by side (matplotlib).

        Returns:
            The figure.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        high = 1.6 + 0.26 * len(self.graphs)
        figure, (left, right) = new_axes("graphified.graphs().plot()", 9.0, high, ncols=2, sharey=True)
        total = sum(graph.buffer_bytes + graph.graph_bytes for graph in self.graphs)
        unit, name = size_unit(total)
        buffers = [graph.buffer_bytes / unit for graph in self.graphs]
        tensors = [graph.graph_bytes / unit for graph in self.graphs]
        names = [f"{graph.of}, {graph.mode}" for graph in self.graphs]
        rows(left, ([graph.seconds * 1e3 for graph in self.graphs], COLOURS[0], ""), names=names)
        rows(right, (buffers, COLOURS[2], "input buffers"), (tensors, COLOURS[1], "outputs, intermediate tensors"))
        left.set(xlabel="capture, ms", title=f"{duration(sum(graph.seconds for graph in self.graphs))} in all")
        right.set(xlabel=name, title=f"{size_text(total)} in all")
        figure.suptitle(f"graphify({self.name})", color=GREY)
        figure.legend(
            *right.get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False, labelcolor=GREY
        )
        return figure


def captured_graphs(name: str, memo: Iterable[tuple[Key, Entry]], info: CacheInfo) -> CapturedGraphs:
    """List the graphs of a memo, in the order of capture."""
    return CapturedGraphs(name, tuple(CapturedGraph.make(key, entry) for key, entry in memo), info)
