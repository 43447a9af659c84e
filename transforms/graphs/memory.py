"""The memory of graphs: measured at capture, graph by graph, or estimated beforehand from a few
trial captures."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
from torch import Tensor

from weft.batches.padding import padded_shape
from weft.display.durations import duration
from weft.display.plots import GREY, new_axes, rows
from weft.display.tables import COLOURS, Table, Tabled
from weft.torchapi.inductor import Compiler, compiler_name
from weft.torchapi.private import storage_id
from weft.transforms.graphs.backends import Backend
from weft.transforms.graphs.calls.buffers import PADDING_SOURCE_BYTES, is_dense
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.calls.key import CacheInfo, Key, LeafKey
from weft.transforms.graphs.capture import Graph, capture
from weft.transforms.graphs.compiler.compilations import Compilations
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.options import Graphable
from weft.values.trees import leaf_axes

# The number of classes of each mode that an estimate captures.
# Each sample costs a capture, and the memory of a class is nearly linear in its size.
_SAMPLES = 5


@attrs.frozen
class MemoryAnalysis:
    """The memory of captured graphs, in bytes.

    Args:
        num_graphs: the number of graphs.
        buffer_bytes: the input buffers, which the graphs share, and their padding sources.
        graph_bytes: outputs and intermediate tensors: on a GPU the pool that the graphs share, on
            the CPU the tensors that the tapes hold; of what a compiler made for the CPU, the
            outputs alone, since it frees the others when a call ends.
        output_bytes: the outputs, a part of `graph_bytes`.
        driver_bytes: the rest of the decrease in a GPU's free memory. The driver reuses the memory
            of dropped graphs, so this is smaller if a graph was dropped before.
    """

    num_graphs: int
    buffer_bytes: int
    graph_bytes: int
    output_bytes: int
    driver_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of buffers, graph tensors and driver memory."""
        return self.buffer_bytes + self.graph_bytes + self.driver_bytes

    def __str__(self) -> str:
        rest = (
            f"tensors {size_text(self.graph_bytes)}, of which outputs"
            f" {size_text(self.output_bytes)}"
        )
        rest += f", driver {size_text(self.driver_bytes)}" if self.driver_bytes else ""
        return (
            f"{self.num_graphs} graphs, {size_text(self.total_bytes)}: buffers"
            f" {size_text(self.buffer_bytes)}, {rest}"
        )


@attrs.frozen
class MemoryEstimate:
    """The estimated memory of graphs that are not captured yet, in bytes.

    Args:
        num_graphs: the number of graphs.
        buffer_bytes: the input buffers and their padding sources, computed from the classes alone.
        graph_bytes: outputs and intermediate tensors.
        driver_bytes: the memory that a GPU's driver takes; accurate only if no graph was dropped
            before.
        num_measured: the number of classes that were captured, and dropped, for the estimate.
    """

    num_graphs: int
    buffer_bytes: int
    graph_bytes: int
    driver_bytes: int
    num_measured: int

    @property
    def total_bytes(self) -> int:
        """The sum of buffers, graph tensors and driver memory."""
        return self.buffer_bytes + self.graph_bytes + self.driver_bytes

    def __str__(self) -> str:
        return (
            f"{self.num_graphs} graphs, {size_text(self.total_bytes)}: estimated from"
            f" {self.num_measured} of them"
        )


def analysis_of(graphs: Iterable[Graph]) -> MemoryAnalysis:
    """Add up the memory of these graphs."""
    graphs = list(graphs)
    outputs = [x for g in graphs for x in g.outputs.leaves if isinstance(x, Tensor)]
    return MemoryAnalysis(
        len(graphs),
        _buffers_held(graphs),
        sum(g.recording.nbytes for g in graphs),
        sum(x.nbytes for x in outputs),
        sum(g.recording.driver_bytes for g in graphs),
    )


def _buffers_held(graphs: Iterable[Graph]) -> int:
    """The bytes of the graphs' buffers and padding sources; a shared block counts once, in full."""
    tensors = [x for g in graphs for x in (*g.buffers, *g.padding_sources) if isinstance(x, Tensor)]
    # Buffers of small classes are views into those of larger ones: by storage, each byte counts
    # once.
    sizes = {storage_id(x): _bytes_held(x) for x in tensors}
    return sum(sizes.values())


def _bytes_held(buffer: Tensor) -> int:
    storage_bytes = buffer.untyped_storage().nbytes()
    if buffer.is_contiguous():
        return storage_bytes
    # A strided buffer may be a view into a tensor that is not the graph's.
    return min(storage_bytes, buffer.nbytes)


def estimate(
    graphable: Graphable,
    call: Call,
    rungs: Sequence[Decision[Any]],
    new_backend: Callable[[], Backend],
    compilations: Compilations | None = None,
) -> MemoryEstimate:
    """Capture a few classes of each mode, in the order of the ladder and in one pool, and
    interpolate the others.

    The memory of a class between two captured ones is interpolated by the size of its inputs. The
    first capture of a process also loads kernels, which stay loaded. So the first class is captured
    twice, and only the second capture counts. With `compilations`, what is captured is compiled
    first, as it will be, and later captures share these compilations.
    """
    if not rungs:
        return MemoryEstimate(0, 0, 0, 0, 0)
    trial = partial(capture, graphable, call, compilations=compilations)
    trial(rungs[0].mode, rungs[0].descriptor, new_backend())
    backend = new_backend()
    graph_bytes = 0
    driver_bytes = 0
    kept: list[
        Graph
    ] = []  # alive until the end, so that each shares the pool with earlier ones, as in the ladder
    # Modes in the order of the ladder, since the first capture of the whole pays for the pool.
    for mode in dict.fromkeys(rung.mode for rung in rungs):
        group = [rung for rung in rungs if rung.mode == mode]
        graphs = {i: trial(mode, group[i].descriptor, backend) for i in sample_indices(len(group))}
        kept += graphs.values()
        sizes = [input_bytes(call, rung.descriptor) for rung in group]
        # Without the first class, which pays for the shared pool.
        points = [(sizes[i], graph.recording.nbytes) for i, graph in graphs.items() if i > 0]
        for i, size in enumerate(sizes):
            # A class that was captured counts as measured.
            graph_bytes += graphs[i].recording.nbytes if i in graphs else interpolate(points, size)
        driver_bytes += (
            sum(g.recording.driver_bytes for g in graphs.values()) * len(group) // len(graphs)
        )
    input_buffer_bytes = buffer_bytes(call, [rung.descriptor for rung in rungs])
    return MemoryEstimate(len(rungs), input_buffer_bytes, graph_bytes, driver_bytes, len(kept))


def sample_indices(count: int) -> tuple[int, ...]:
    """The indices of the classes to capture out of `count`: all if there are few; else the first
    two, the last, and some between.

    The first class pays for the pool that the others share, so the second shows the cost of one
    more.

    >>> sample_indices(3), sample_indices(35)
    ((0, 1, 2), (0, 1, 12, 23, 34))
    """
    if count <= _SAMPLES:
        return tuple(range(count))
    inner = _SAMPLES - 2
    return (0, *(1 + (count - 2) * i // inner for i in range(inner + 1)))


def interpolate(points: Sequence[tuple[int, int]], size: int) -> int:
    """Interpolate linearly between points (size, value), rounded up; beyond the ends, take the
    nearest point.

    >>> interpolate([(8, 40), (2, 10)], 4), interpolate([(8, 40), (2, 10)], 9)
    (20, 40)
    """
    points = sorted(points)
    # Values are not negative, so 0 finds the first point of an equal size.
    index = bisect_left(points, (size, 0))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[index - 1 : index + 1]
    # Rounded up in whole numbers: floats are not exact beyond 2**53.
    return y0 + -(-(y1 - y0) * (size - x0) // (x1 - x0))


def input_bytes(call: Call, descriptor: Any) -> int:
    """The bytes of a call's copied tensors, padded to a class."""
    return sum(size for size, _, _ in _padded(call, descriptor))


def buffer_bytes(call: Call, descriptors: Iterable[Any]) -> int:
    """The bytes of input buffers and padding sources of graphs of these classes, captured in this
    order. For a buffer in a shared block (`InputBufferPool`), only the growth of the block counts.
    """
    blocks: dict[tuple[int, bool], int] = {}
    total = 0
    for descriptor in descriptors:
        for index, (size, has_padding_source, dense) in enumerate(_padded(call, descriptor)):
            # A buffer and its padding source lie in blocks of their own, which grow separately.
            for padding_source in (False, True)[: 1 + has_padding_source]:
                if not dense or size > blocks.get((index, padding_source), 0):
                    blocks[index, padding_source] = size
                    total += size
    return total


def _padded(call: Call, descriptor: Any) -> Iterator[tuple[int, bool, bool]]:
    """Yield (bytes, whether it has a padding source, whether it is dense) for each buffer, as
    `InputBufferPool` would make it."""
    for leaf, spec in zip(call.copied_leaves, leaf_axes(call.copied), strict=True):
        if isinstance(leaf, Tensor):
            padded = spec is not None and descriptor is not None
            if spec is not None and padded:
                shape = padded_shape(leaf, spec, descriptor)
            else:
                shape = tuple(leaf.shape)
            size = math.prod(shape) * leaf.element_size()
            has_padding_source = (
                padded
                and spec is not None
                # Padding that repeats the last entry depends on the batch, so it has no source.
                and not isinstance(spec.pad, str)
                and size <= PADDING_SOURCE_BYTES
            )
            yield size, has_padding_source, padded or is_dense(leaf)


def size_text(count: int) -> str:
    """A number of bytes as text, in a suitable unit.

    >>> size_text(2048)
    '2.00 KiB'
    """
    unit, name = size_unit(count)
    if unit > 1:
        return f"{count / unit:.2f} {name}"
    return f"{count} bytes"


def size_unit(count: int) -> tuple[int, str]:
    """The suitable unit for a number of bytes: (bytes per unit, its name)."""
    return next(
        ((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= u),
        (1, "bytes"),
    )


HEADER = ("mode", "of", "pieces", "operators", "buffers", "tensors", "captured in")


@attrs.frozen
class CapturedGraph:
    """One graph that a function holds.

    Args:
        mode: `full` or `piecewise`.
        of: the class that it was captured for; without a ladder, the shapes of the copied
            arguments.
        pieces: the number of pieces.
        operators: the number of operators that a replay repeats, or that it was compiled from:
            those that compute or write. On a GPU each is one kernel or a few, unless compiled.
        buffer_bytes: the bytes that this graph added to the input buffers and padding sources;
            often few, because the buffers of a class lie inside those of a larger one.
        graph_bytes: its outputs and intermediate tensors; if graphs share a pool, the bytes that
            this one added.
        seconds: the duration of its capture.
        compiled: the compiler, and the first graph that has the same compilation, if that is an
            earlier one; or why it is not compiled; empty if there is no compiler.
    """

    mode: str
    of: str
    pieces: int
    operators: int
    buffer_bytes: int
    graph_bytes: int
    seconds: float
    compiled: str = ""

    @classmethod
    def make(cls, key: Key, graph: Graph, compiled: str) -> "CapturedGraph":
        """Make one from a graph, its key, and what a compiler made of it."""
        recording = graph.recording
        counts = (recording.num_pieces, graph.operators)
        sizes = (graph.buffer_bytes, graph.recording.nbytes)
        return cls(key.mode, class_of(key), *counts, *sizes, graph.seconds, compiled)

    def cells(self) -> tuple[str, ...]:
        """The cells of its row as text, one per column of `HEADER`."""
        counts = (f"{self.pieces}", f"{self.operators}")
        sizes = (self.buffer_bytes, self.graph_bytes)
        return self.mode, self.of, *counts, *map(size_text, sizes), f"{self.seconds * 1e3:.1f} ms"


def class_of(key: Key) -> str:
    """The class for which a graph is captured; without a ladder, the shapes of what it copies."""
    if key.descriptor is None:
        return _shapes(key)
    return str(key.descriptor)


def _shapes(key: Key) -> str:
    """The dtypes and shapes of the tensors that are copied in, as text."""
    tensors = [leaf for leaf in key.copied.leaves if isinstance(leaf, LeafKey)]
    return (
        ", ".join(f"{str(x.dtype).removeprefix('torch.')}{[*x.shape]}" for x in tensors)
        or "nothing copied in"
    )


@attrs.frozen(repr=False)
class CapturedGraphs(Tabled):
    """The graphs that a function holds, as `graphified.graphs()` returns them; a table in print and
    in notebooks.

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

    def _table(self) -> Table:
        """A table with one row per graph."""
        counts = (
            (len(self.graphs), "graph"),
            (self.info.replays, "replay"),
            (self.info.eager, "eager call"),
        )
        counts_text = ", ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts)
        header: tuple[str, ...] = HEADER
        rows: list[tuple[str, ...]] = [graph.cells() for graph in self.graphs]
        if any(graph.compiled for graph in self.graphs):
            header = (*header, "compiled by")
            rows = [(*row, x.compiled) for row, x in zip(rows, self.graphs, strict=True)]
        return Table(
            header,
            tuple(rows),
            f"graphify({self.name}): {counts_text}",
        )

    def plot(self) -> Any:
        """Draw the seconds and the bytes of each graph side by side (matplotlib).

        Returns:
            The figure.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        high = 1.6 + 0.26 * len(self.graphs)
        figure, (left, right) = new_axes(
            "graphified.graphs().plot()", 9.0, high, ncols=2, sharey=True
        )
        total = sum(graph.buffer_bytes + graph.graph_bytes for graph in self.graphs)
        unit, name = size_unit(total)
        buffers = [graph.buffer_bytes / unit for graph in self.graphs]
        tensors = [graph.graph_bytes / unit for graph in self.graphs]
        names = [f"{graph.of}, {graph.mode}" for graph in self.graphs]
        rows(left, ([graph.seconds * 1e3 for graph in self.graphs], COLOURS[0], ""), names=names)
        rows(
            right,
            (buffers, COLOURS[2], "input buffers"),
            (tensors, COLOURS[1], "outputs, intermediate tensors"),
        )
        left.set(
            xlabel="capture, ms",
            title=f"{duration(sum(graph.seconds for graph in self.graphs))} in all",
        )
        right.set(xlabel=name, title=f"{size_text(total)} in all")
        figure.suptitle(f"graphify({self.name})", color=GREY)
        figure.legend(
            *right.get_legend_handles_labels(),
            loc="outside lower right",
            ncols=2,
            frameon=False,
            labelcolor=GREY,
        )
        return figure


def captured_graphs(
    name: str,
    graphs: Iterable[tuple[Key, Graph]],
    info: CacheInfo,
    compiler: Compiler | None = None,
) -> CapturedGraphs:
    """List the graphs, in the order of capture."""
    pairs = [*graphs]
    rows = [CapturedGraph.make(*pair, _compiled(pair[1], pairs, compiler)) for pair in pairs]
    return CapturedGraphs(name, tuple(rows), info)


def _compiled(graph: Graph, graphs: Sequence[tuple[Key, Graph]], compiler: Compiler | None) -> str:
    """Whether, and by what, one of these graphs is compiled, as text."""
    if compiler is None:
        return ""
    if graph.program is None:
        return f"nothing: {graph.why_not_compiled}"
    first_key, first = next(pair for pair in graphs if pair[1].program is graph.program)
    if first is graph:
        return compiler_name(compiler)
    return f"{compiler_name(compiler)}, with {class_of(first_key)}"
