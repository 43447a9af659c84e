"""The memory of graphs, measured at their capture, or estimated beforehand from a few trial captures."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
from torch import Tensor

from weft.padding import padded_shape
from weft.torchapi.private import storage_id
from weft.transforms.graphs.backends import Backend
from weft.transforms.graphs.calls.buffers import PADDING_SOURCE_BYTES, is_dense
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.capture import Entry, capture
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.options import Graphable
from weft.trees import leaf_axes

_SAMPLES = 5
"""The number of classes of each mode that an estimate captures."""


@attrs.frozen
class MemoryAnalysis:
    """The memory of captured graphs, in bytes.

    Args:
        num_graphs: the number of graphs.
        buffer_bytes: the input buffers, which the graphs share, and their padding sources.
        graph_bytes: outputs and intermediate tensors: on a GPU the pool that the graphs share, on the CPU the tensors
            that the tapes hold.
        output_bytes: the outputs, a part of `graph_bytes`.
        driver_bytes: the rest of the decrease in a GPU's free memory. The driver keeps the memory of a dropped graph
            for later ones, so this is smaller if there was another graph before.
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
        rest = f"tensors {size_text(self.graph_bytes)}, of which outputs {size_text(self.output_bytes)}"
        rest += f", driver {size_text(self.driver_bytes)}" if self.driver_bytes else ""
        return (
            f"{self.num_graphs} graphs, {size_text(self.total_bytes)}: buffers {size_text(self.buffer_bytes)}, {rest}"
        )


@attrs.frozen
class MemoryEstimate:
    """The estimated memory of graphs that are not captured yet, in bytes.

    Args:
        num_graphs: the number of graphs.
        buffer_bytes: the input buffers and their padding sources, computed from the classes alone.
        graph_bytes: outputs and intermediate tensors.
        driver_bytes: the memory that a GPU's driver takes; accurate only if no graph was dropped before.
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
        return f"{self.num_graphs} graphs, {size_text(self.total_bytes)}: estimated from {self.num_measured} of them"


def analysis_of(entries: Iterable[Entry]) -> MemoryAnalysis:
    """Add up the memory of these graphs."""
    entries = list(entries)
    outputs = [x for e in entries for x in e.outputs.leaves if isinstance(x, Tensor)]
    return MemoryAnalysis(
        len(entries),
        _buffers_held(entries),
        sum(e.recording.nbytes for e in entries),
        sum(x.nbytes for x in outputs),
        sum(e.recording.driver_bytes for e in entries),
    )


def _buffers_held(entries: Iterable[Entry]) -> int:
    """The bytes of the graphs' buffers and padding sources; a shared block counts once, with its full size."""
    held = [x for e in entries for x in (*e.buffers, *e.padding_sources) if isinstance(x, Tensor)]
    sizes = {storage_id(x): x.untyped_storage().nbytes() if x.is_contiguous() else x.nbytes for x in held}
    return sum(sizes.values())


def estimate(
    graphable: Graphable, call: Call, rungs: Sequence[Decision[Any]], new_backend: Callable[[], Backend]
) -> MemoryEstimate:
    """Capture a few classes of each mode, in the order of the ladder and in one pool, and interpolate the others.

    The memory of a class between two captured ones is interpolated by the size of its inputs. The first capture of a
    process also loads kernels, which stay loaded, so the first class is captured twice and the second capture counts.
    """
    if not rungs:
        return MemoryEstimate(0, 0, 0, 0, 0)
    capture(graphable, call, rungs[0].mode, rungs[0].descriptor, new_backend())
    backend, graph_bytes, driver_bytes = new_backend(), 0, 0
    entries: list[Entry] = []  # kept until the end, so that each shares the pool with those before it, as in the ladder
    for mode in dict.fromkeys(rung.mode for rung in rungs):
        group = [rung for rung in rungs if rung.mode == mode]
        found = {i: capture(graphable, call, mode, group[i].descriptor, backend) for i in sample_indices(len(group))}
        entries += found.values()
        sizes = [input_bytes(call, rung.descriptor) for rung in group]
        points = [(sizes[i], entry.recording.nbytes) for i, entry in found.items() if i > 0]
        for i, size in enumerate(sizes):
            graph_bytes += found[i].recording.nbytes if i in found else interpolate(points, size)
        driver_bytes += sum(e.recording.driver_bytes for e in found.values()) * len(group) // len(found)
    input_buffer_bytes = buffer_bytes(call, [rung.descriptor for rung in rungs])
    return MemoryEstimate(len(rungs), input_buffer_bytes, graph_bytes, driver_bytes, len(entries))


def sample_indices(count: int) -> tuple[int, ...]:
    """The indices of the classes to capture out of `count`: all if they are few; else the first two, the last, and some
    between.

    The first class pays for the pool that the others share, so the second shows the cost of one more.

    >>> sample_indices(3), sample_indices(35)
    ((0, 1, 2), (0, 1, 12, 23, 34))
    """
    if count <= _SAMPLES:
        return tuple(range(count))
    inner = _SAMPLES - 2
    return (0, *(1 + (count - 2) * i // inner for i in range(inner + 1)))


def interpolate(points: Sequence[tuple[int, int]], size: int) -> int:
    """Interpolate linearly between points (size, value), rounded up; beyond the ends, take the nearest point.

    >>> interpolate([(8, 40), (2, 10)], 4), interpolate([(8, 40), (2, 10)], 9)
    (20, 40)
    """
    points = sorted(points)
    index = bisect_left(points, (size, 0))
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[index - 1 : index + 1]
    return y0 + -(-(y1 - y0) * (size - x0) // (x1 - x0))


def input_bytes(call: Call, descriptor: Any) -> int:
    """The bytes of a call's copied tensors, padded to a class."""
    return sum(size for size, _, _ in _padded(call, descriptor))


def buffer_bytes(call: Call, descriptors: Iterable[Any]) -> int:
    """The bytes of input buffers and padding sources of graphs of these classes, captured in this order. A buffer that
    is part of a shared block (`InputBufferPool`) counts only as far as the block must grow."""
    blocks: dict[tuple[int, bool], int] = {}
    total = 0
    for descriptor in descriptors:
        for index, (size, has_padding_source, dense) in enumerate(_padded(call, descriptor)):
            for padding_source in (False, True)[: 1 + has_padding_source]:
                if not dense or size > blocks.get((index, padding_source), 0):
                    blocks[index, padding_source] = size
                    total += size
    return total


def _padded(call: Call, descriptor: Any) -> Iterator[tuple[int, bool, bool]]:
    """Yield (bytes, whether it has a padding source, whether it is dense) for each buffer."""
    for leaf, spec in zip(call.copied_leaves, leaf_axes(call.copied), strict=True):
        if isinstance(leaf, Tensor):
            padded = spec is not None and descriptor is not None
            shape = padded_shape(leaf, spec, descriptor) if spec is not None and padded else tuple(leaf.shape)
            size = math.prod(shape) * leaf.element_size()
            has_padding_source = (
                padded and spec is not None and not isinstance(spec.pad, str) and size <= PADDING_SOURCE_BYTES
            )
            yield size, has_padding_source, padded or is_dense(leaf)


def size_text(count: int) -> str:
    """A number of bytes as text, in a suitable unit.

    >>> size_text(2048)
    '2.00 KiB'
    """
    unit, name = size_unit(count)
    return f"{count / unit:.2f} {name}" if unit > 1 else f"{count} bytes"


def size_unit(count: int) -> tuple[int, str]:
    """The suitable unit for a number of bytes: (bytes per unit, its name)."""
    return next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= u), (1, "bytes"))
