"""Splitting a sized value into parts along the axes that its fields name."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import attrs
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi.private import in_dispatch_mode
from weft.values.trees import Axes, map_sized, replaced

# The start and the end of a part along each axis, by the axis name.
Spans = Mapping[str, tuple[int, int]]


def find_bounds(count: int, parts: int) -> list[int]:
    """The start of each part of `count` entries, and the end of the last; at most one part per
    entry.

    >>> find_bounds(5, 2), find_bounds(2, 3), find_bounds(0, 3)
    ([0, 2, 5], [0, 1, 2], [0, 0])
    """
    parts = min(parts, count) or 1
    return [count * i // parts for i in range(parts + 1)]


def read_starts(call: str, starts: Tensor) -> list[int]:
    """A tensor of starts as numbers on the host. Raises CaptureError inside a captured function."""
    if in_dispatch_mode():
        instead = "capture the parts: pipeline(map(graphify, stages))"
        raise CaptureError(
            f"{call} inside a captured function", "parts whose sizes only its tensors say", instead
        )
    return [int(start) for start in starts.tolist()]


def cut_sized(batch: Any, spans: Spans, descriptor: Any, starts: str | None = None) -> Any:
    """The part of a sized value: each field cut along the axes that it names.

    Args:
        batch: a value whose fields name axes.
        spans: the part. An axis "a+1" ends one entry later than the axis "a".
        descriptor: the descriptor of the part; None if the batch has none.
        starts: the name of a field that holds offsets along another axis, such as
            `query_start_loc`; they are shifted so that the part's first one is 0.
    """

    def cut(value: Tensor, spec: Axes) -> Tensor:
        return value[tuple(_span(spans, name) for name in spec.dims)]

    part = map_sized(cut, batch, descriptor)
    if starts is None:
        return part
    offsets = getattr(part, starts)
    return replaced(part, {starts: offsets - offsets[:1]})


def _span(spans: Spans, name: str | None) -> slice:
    if name is None:
        return slice(None)
    axis, more = parse_axis(name)
    start, end = spans[axis]
    return slice(start, end + more)


@cache
def parse_axis(name: str) -> tuple[str, int]:
    """The axis and the constant in the name of a dimension.

    >>> parse_axis("num_reqs+1"), parse_axis("num_tokens")
    (('num_reqs', 1), ('num_tokens', 0))
    """
    axis, _, more = name.partition("+")
    return axis, int(more or 0)


def resized(descriptor: Any, sizes: Mapping[str, int]) -> Any:
    """A descriptor with other sizes; None for None."""
    if descriptor is None:
        return None
    if attrs.has(type(descriptor)):
        return attrs.evolve(descriptor, **sizes)
    if hasattr(descriptor, "_replace"):
        return descriptor._replace(**sizes)
    return replace(descriptor, **sizes)


def sized_tensors(batch: Any) -> list[tuple[Tensor, Axes]]:
    """The sized fields of a batch that hold tensors, with their axes."""
    tensors = list[tuple[Tensor, Axes]]()
    map_sized(lambda value, spec: tensors.append((value, spec)), batch)
    return tensors


def axis_sizes(batch: Any, descriptor: Any) -> dict[str, int]:
    """The size of each axis that the fields of a batch name: from its descriptor, or, if that is
    None, from the first tensor with the axis."""
    sizes: dict[str, int] = {}
    for value, spec in sized_tensors(batch):
        for dim, name in enumerate(spec.dims):
            axis, more = parse_axis(name or "")
            if axis and axis not in sizes:
                size = value.shape[dim] if descriptor is None else spec.extent(dim, descriptor)
                sizes[axis] = (size or 0) - more
    return sizes
