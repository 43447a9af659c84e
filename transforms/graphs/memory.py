"""The memory of graphs: what they will take, estimated from a few that are captured for the purpose, and what they do
take."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
from torch import Tensor

from weft.padding import padded_shape
from weft.torchapi import storage_id
from weft.transforms.graphs.backends import Backend
from weft.transforms.graphs.calls.buffers import PADDING_SOURCE_BYTES, is_dense
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.capture import Entry, capture
from weft.transforms.graphs.dispatch import Decision
from weft.transforms.graphs.options import Graphable
from weft.trees import leaf_axes

_SAMPLES = 5
"""Classes of each mode that an estimate captures."""


@attrs.frozen
class MemoryAnalysis:
    """What graphs take, in bytes.

    Args:
        num_graphs: how many they are.
        buffer_bytes: their input buffers, which they share, and the padding beside these.
        graph_bytes: outputs and intermediate tensors: on a GPU the pool that the graphs share, on the CPU what tapes
            hold.
        output_bytes: the part of that which is outputs.
        driver_bytes: what the free memory of a GPU fell by beside that. Its driver keeps what a dropped graph took for
            later ones, so that this is less where there was another graph before.
    """

    num_graphs: int
    buffer_bytes: int
    graph_bytes: int
    output_bytes: int
    driver_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Buffers, tensors of the graphs, and the driver's own."""
        return self.buffer_bytes + self.graph_bytes + self.driver_bytes

    def __str__(self) -> str:
        rest = f"tensors {size_text(self.graph_bytes)}, of which outputs {size_text(self.output_bytes)}"
        rest += f", driver {size_text(self.driver_bytes)}" if self.driver_bytes else ""
        return (
            f"{self.num_graphs} graphs, {size_text(self.total_bytes)}: buffers {size_text(self.buffer_bytes)}, {rest}"
        )


@attrs.frozen
class MemoryEstimate:
    """What graphs will take, in bytes.

    Args:
        num_graphs: how many there will be.
        buffer_bytes: their input buffers and the padding beside these, which follow from the classes alone.
        graph_bytes: their outputs and intermediate tensors.
        driver_bytes: what a GPU's driver takes for them; estimated well only where no graph was dropped before.
        num_measured: classes that were captured, and dropped, to know.
    """

    num_graphs: int
    buffer_bytes: int
    graph_bytes: int
    driver_bytes: int
    num_measured: int

    @property
    def total_bytes(self) -> int:
        """Buffers, tensors of the graphs, and the driver's own."""
        return self.buffer_bytes + self.graph_bytes + self.driver_bytes

    def __str__(self) -> str:
        return f"{self.num_graphs} graphs, {size_text(self.total_bytes)}: estimated from {self.num_measured} of them"


def analysis_of(entries: Iterable[Entry]) -> MemoryAnalysis:
    """What these graphs take."""
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
    """Bytes of the buffers of graphs, and of the padding beside them; what they share, once and whole."""
    held = [x for e in entries for x in (*e.buffers, *e.padding_sources) if isinstance(x, Tensor)]
    sizes = {storage_id(x): x.untyped_storage().nbytes() if x.is_contiguous() else x.nbytes for x in held}
    return sum(sizes.values())


def estimate(
    of: Graphable, call: Call, rungs: Sequence[Decision[Any]], new_backend: Callable[[], Backend]
) -> MemoryEstimate:
    """Capture a few classes of each mode, in the order of the ladder and in one pool, and infer the rest.

    A class between two that were captured takes what lies between theirs, by the size of its inputs. The first capture
    of a process also loads kernels, which stay: so the first class is captured twice, and the second time counts.
    """
    if not rungs:
        return MemoryEstimate(0, 0, 0, 0, 0)
    capture(of, call, rungs[0].mode, rungs[0].descriptor, new_backend())
    backend, graph_bytes, driver_bytes = new_backend(), 0, 0
    entries: list[Entry] = []  # kept until the end: what one leaves in the pool the next may use, as in the ladder
    for mode in dict.fromkeys(rung.mode for rung in rungs):
        group = [rung for rung in rungs if rung.mode == mode]
        found = {i: capture(of, call, mode, group[i].descriptor, backend) for i in spread(len(group))}
        entries += found.values()
        sizes = [input_bytes(call, rung.descriptor) for rung in group]
        points = [(sizes[i], entry.recording.nbytes) for i, entry in found.items() if i > 0]
        for i, size in enumerate(sizes):
            graph_bytes += found[i].recording.nbytes if i in found else between(points, size)
        driver_bytes += sum(e.recording.driver_bytes for e in found.values()) * len(group) // len(found)
    made = buffer_bytes(call, [rung.descriptor for rung in rungs])
    return MemoryEstimate(len(rungs), made, graph_bytes, driver_bytes, len(entries))


def spread(count: int) -> tuple[int, ...]:
    """Which of `count` classes to capture: all if there are few; else the first two, the last, and some between.

    The first makes the pool that the others share, so that the second says what one more takes.

    >>> spread(3), spread(35)
    ((0, 1, 2), (0, 1, 12, 23, 34))
    """
    if count <= _SAMPLES:
        return tuple(range(count))
    inner = _SAMPLES - 2
    return (0, *(1 + (count - 2) * i // inner for i in range(inner + 1)))


def between(points: Sequence[tuple[int, int]], size: int) -> int:
    """The value at `size` on the straight lines through (size, value), rounded up; beyond them, the nearest point's.

    >>> between([(8, 40), (2, 10)], 4), between([(8, 40), (2, 10)], 9)
    (20, 40)
    """
    points = sorted(points)
    place = bisect_left(points, (size, 0))
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[place - 1 : place + 1]
    return y0 + -(-(y1 - y0) * (size - x0) // (x1 - x0))


def input_bytes(call: Call, descriptor: Any) -> int:
    """Bytes of the copied tensors of a call, padded to a class."""
    return sum(size for size, _, _ in _padded(call, descriptor))


def buffer_bytes(call: Call, descriptors: Iterable[Any]) -> int:
    """Bytes of the input buffers, and of the padding beside them, of graphs of these classes, captured in this order:
    those that are part of a shared block (`InputBufferPool`) count as far as the block must grow."""
    input_buffers: dict[tuple[int, bool], int] = {}
    total = 0
    for descriptor in descriptors:
        for place, (size, has_blank, dense) in enumerate(_padded(call, descriptor)):
            for padding_source in (False, True)[: 1 + has_blank]:
                if not dense or size > input_buffers.get((place, padding_source), 0):
                    input_buffers[place, padding_source] = size
                    total += size
    return total


def _padded(call: Call, descriptor: Any) -> Iterator[tuple[int, bool, bool]]:
    """For each buffer its bytes, whether there is padding for it to copy, and whether it is dense."""
    for leaf, spec in zip(call.copied_leaves, leaf_axes(call.copied), strict=True):
        if isinstance(leaf, Tensor):
            padded = spec is not None and descriptor is not None
            shape = padded_shape(leaf, spec, descriptor) if spec is not None and padded else tuple(leaf.shape)
            size = math.prod(shape) * leaf.element_size()
            padding_source = (
                padded and spec is not None and not isinstance(spec.pad, str) and size <= PADDING_SOURCE_BYTES
            )
            yield size, padding_source, padded or is_dense(leaf)


def size_text(count: int) -> str:
    """A number of bytes in a unit that suits it.

    >>> size_text(2048)
    '2.00 KiB'
    """
    unit, name = size_unit(count)
    return f"{count / unit:.2f} {name}" if unit > 1 else f"{count} bytes"


def size_unit(count: int) -> tuple[int, str]:
    """The unit that suits a number of bytes, and how many bytes it has."""
    return next(((u, n) for u, n in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if count >= u), (1, "bytes"))
