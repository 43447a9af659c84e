"""The input buffers of graphs, and the copies that fill them, padding included, from the leaves of
a call.

Graphs that replay one at a time can share their buffers, because each replay fills its buffers
completely, and results are never views of them. Each copy costs a launch, so copies are grouped: on
a GPU, all plain copies of bytes are one launch (`weft.ops.copying.copies`).
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.padding import last_entry
from weft.ops.copying.byte_copies import MOST_REPEATED, Copies, same_bytes
from weft.ops.copying.copies import plan_copies_of_bytes, uses_kernel
from weft.torchapi.private import copy_all, seen_as
from weft.transforms.graphs.calls.aliasing import overlaps_itself
from weft.values.trees import Axes

# The bytes that the buffer of a strided argument may span to keep the argument's strides; a span of
# up to four times the argument's own size is allowed too.
SPARSE_BYTES = 2**26
# The size in bytes up to which a buffer's padding is copied from a padding source, in the same
# launch as the values; larger padding is filled in a separate launch.
PADDING_SOURCE_BYTES = 2**20


# Vector loads begin at a multiple of this many bytes, so kernels sum in another order if a tensor
# does not begin there. A buffer therefore has the same address as its argument modulo ALIGNMENT.
ALIGNMENT = 16


def offset_of(value: Tensor) -> int:
    """The address of a tensor's first element modulo `ALIGNMENT`; 0 if it has fewer than two
    elements or no address."""
    strided = value.layout is torch.strided and not value.is_meta and value.numel() > 1
    if strided:
        return value.data_ptr() % ALIGNMENT
    return 0


def buffer_like(value: Tensor) -> Tensor:
    """Copy a tensor with its strides and its alignment, so that kernels that depend on them compute
    the same bits. The copy is dense if the elements cover little of the memory that they span."""
    span = _span(value)
    # A column of a large matrix spans all of it.
    sparse = span * value.element_size() > max(SPARSE_BYTES, 4 * value.nbytes)
    overlapping = overlaps_itself(value)
    if (
        value.numel() == 0
        or value.is_meta
        or sparse
        or (overlapping and (value.is_conj() or value.is_neg()))
    ):
        return torch.empty_like(value).copy_(value)
    first = offset_of(value) // value.element_size()
    memory = torch.empty(first + span, dtype=value.dtype, device=value.device)
    buffer = memory.as_strided(value.shape, value.stride(), first)
    if overlapping:
        in_a_row(buffer).copy_(in_a_row(value))
        return buffer
    return seen_as(buffer, value).copy_(value)


def _span(x: Tensor) -> int:
    """The number of elements in memory from the first to the last one, gaps included."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1


def in_a_row(x: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, as one dimension, in which each address
    occurs once although elements of the tensor may overlap."""
    return x.as_strided((_span(x),), (1,), x.storage_offset())


@attrs.define
class InputBufferPool:
    """Memory for the input buffers of graphs that replay one at a time: one block per input index,
    as large as the largest buffer of that input; smaller buffers are its leading part.

    Args:
        nbytes: the bytes allocated so far for buffers and padding sources.
    """

    nbytes: int = 0
    _blocks: dict[Any, Tensor] = attrs.field(factory=dict, init=False)

    def buffer(self, index: int, value: Tensor) -> Tensor:
        """Make the buffer for the input at `index`, filled with `value`; a dense buffer is part of
        a shared block."""
        if is_dense(value):
            return self._block_part(("buffer", index), value).copy_(value)
        self.nbytes += value.nbytes
        return buffer_like(value)

    def padding_source(self, index: int, buffer: Any, spec: Axes | None) -> Tensor | None:
        """Make a tensor of a buffer's size, full of its padding; None if the padding is not one
        number, or if the buffer is large."""
        # For a small buffer, a copy from a prepared source joins the launch that copies the values;
        # filling would be one more.
        if spec is None or isinstance(spec.pad, str) or buffer.nbytes > PADDING_SOURCE_BYTES:
            return None
        if is_dense(buffer):
            return self._block_part(("padding", index, spec.pad), buffer).fill_(
                spec.padding(buffer.dtype)
            )
        self.nbytes += buffer.nbytes
        return torch.full_like(buffer, spec.padding(buffer.dtype))

    def _block_part(self, key: tuple[Any, ...], like: Tensor) -> Tensor:
        # An inference tensor cannot be written outside inference mode, so it has its own block.
        key = *key, like.dtype, like.device, torch.is_inference_mode_enabled()
        # Earlier graphs keep the smaller block, so ladders are captured with the largest class
        # first.
        if (block := self._blocks.get(key)) is None or block.numel() < like.numel():
            block = self._blocks[key] = torch.empty(
                like.numel(), dtype=like.dtype, device=like.device
            )
            self.nbytes += block.nbytes
        return block.as_strided(like.shape, like.stride())


def is_dense(value: Tensor) -> bool:
    """Whether a buffer like `value` may be part of a shared block: contiguous, aligned, and without
    a lazy conjugate or negative bit."""
    lazy = value.is_meta or value.is_conj() or value.is_neg()
    plain = type(value) is Tensor and not lazy and value.is_contiguous() and value.numel() > 0
    return plain and not offset_of(value)


# Fills input buffers from all leaves of a call, those by reference first.
Fill = Callable[[Sequence[Any]], None]


@attrs.frozen(eq=False)
class CopyIn:
    """The steps that fill a graph's input buffers, padding included, from the leaves of calls of
    one signature.

    Every element of a buffer is overwritten: in a padded buffer the value takes the leading corner,
    and padding is written to the rest, as in `weft.batches.padding.write_padded`. No step reads
    what another one writes.
    """

    steps: tuple[Fill, ...]

    def fill(self, leaves: Sequence[Any]) -> None:
        """Fill the buffers from all leaves of a call."""
        for step in self.steps:
            step(leaves)


def plan_copies(
    buffers: Sequence[Any],
    padding_sources: Sequence[Tensor | None],
    specs: Sequence[Axes | None],
    leaves: Sequence[Any],
    num_references: int,
) -> CopyIn | None:
    """Plan how to fill `buffers` from calls like the one with these `leaves`.

    Args:
        buffers: a graph's input buffers; values that are not tensors are skipped.
        padding_sources: for each buffer that is padded with one number, a tensor like it that is
            full of that number.
        specs: the padded dimensions of each buffer, and their padding.
        leaves: all leaves of the example call; only their shapes, strides and dtypes matter.
        num_references: the number of leaves by reference, which come before the copied ones.

    Returns:
        None if there is nothing to fill.
    """
    pending = _PendingCopies([], [], [], [], [])
    inputs = enumerate(zip(buffers, padding_sources, specs, strict=True), num_references)
    for index, (buffer, padding_source, spec) in inputs:
        if isinstance(buffer, Tensor):
            _plan_buffer(pending, buffer, padding_source, spec, index, leaves[index])
    # In this order, because each takes from `pending` what it can do.
    steps = [*_steps_by_kernel(pending, leaves), *_steps_by_group(pending, leaves)]
    steps += [_repeating(tail, index, spec) for tail, index, spec in pending.repeats]
    steps += [_filling(tail, number) for tail, number in pending.fills]
    steps += [_in_a_row(in_a_row(buffer), index) for buffer, index in pending.overlapping]
    if steps:
        return CopyIn(tuple(steps))
    return None


@attrs.frozen(eq=False)
class _PendingCopies:
    """The copies that no step performs yet.

    Args:
        values: (target, index of a leaf).
        constants: (target, source): padding that is the same in every call.
        repeats: (tail, index of a leaf, axes of the leaf): padding that repeats the last entry of a
            value.
        fills: (tail, number): padding that is too large for a padding source.
        overlapping: (buffer, index of a leaf) for buffers whose elements overlap, such as expanded
            ones.
    """

    values: list[tuple[Tensor, int]]
    constants: list[tuple[Tensor, Tensor]]
    repeats: list[tuple[Tensor, int, Axes]]
    fills: list[tuple[Tensor, float]]
    overlapping: list[tuple[Tensor, int]]

    def drop(self, done: Sequence[Any]) -> None:
        """Remove these copies, by identity."""
        ids = {id(item) for item in done}
        self.values[:] = [item for item in self.values if id(item) not in ids]
        self.constants[:] = [item for item in self.constants if id(item) not in ids]
        self.repeats[:] = [item for item in self.repeats if id(item) not in ids]


def _plan_buffer(
    pending: _PendingCopies,
    buffer: Tensor,
    padding_source: Tensor | None,
    spec: Axes | None,
    index: int,
    leaf: Tensor,
) -> None:
    """Add the copies that fill one buffer from `leaf`, the leaf at `index`."""
    if spec is None:
        (pending.overlapping if overlaps_itself(buffer) else pending.values).append((buffer, index))
        return
    pending.values.append((corner(buffer, leaf.shape), index))
    padded = tuple(tails(buffer, leaf.shape))
    if isinstance(spec.pad, str):
        pending.repeats.extend((tail, index, spec) for tail in padded)
    elif padding_source is None:
        pending.fills.extend((tail, spec.padding(tail.dtype)) for tail in padded)
    else:
        pending.constants.extend(zip(padded, tails(padding_source, leaf.shape), strict=True))


def corner(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """The leading part of `buffer` that a value of this shape fills."""
    if buffer.shape == shape:
        return buffer
    return buffer[tuple(slice(size) for size in shape)]


def tails(buffer: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    """The rest of `buffer` outside the corner of this shape, in parts that do not overlap."""
    for dim, size in enumerate(shape):
        if size < buffer.shape[dim]:
            yield buffer[(*(slice(s) for s in shape[:dim]), slice(size, None))]


def _steps_by_kernel(pending: _PendingCopies, leaves: Sequence[Any]) -> Iterator[Fill]:
    """Take from `pending` the copies that the kernel can do: one step per device, which is one
    launch."""
    values = [
        pair
        for pair in pending.values
        if same_bytes(pair[0], leaves[pair[1]]) and uses_kernel(pair[0].device)
    ]
    for device in dict.fromkeys(target.device for target, _ in values):
        on_device = [pair for pair in values if pair[0].device == device]
        constants = [
            pair for pair in pending.constants if pair[0].device == device and same_bytes(*pair)
        ]
        positions = {index: position for position, (_, index) in enumerate(on_device)}
        repeats = [
            r for r in pending.repeats if r[1] in positions and _repeats_bytes(r[0], leaves[r[1]])
        ]
        pending.drop((*on_device, *constants, *repeats))
        copies = Copies(
            tuple(target for target, _ in on_device),
            True,
            tuple(constants),
            tuple((tail, positions[index], leaves[index][:1].nbytes) for tail, index, _ in repeats),
        )
        yield _on_leaves(
            [index for _, index in on_device], len(leaves), plan_copies_of_bytes(copies)
        )


def _on_leaves(indices: Sequence[int], count: int, copy: Fill) -> Fill:
    """Apply `copy` to the leaves at `indices`, of `count` leaves."""
    if indices == [*range(count)]:
        return copy
    pick = _picker(indices)

    def picked(leaves: Sequence[Any]) -> None:
        copy(pick(leaves))

    return picked


def _repeats_bytes(tail: Tensor, value: Tensor) -> bool:
    """Whether copying the last bytes of `value` fills `tail`: both are contiguous and have entries
    of one size."""
    same_entries = (
        tail.shape[1:] == value.shape[1:] and tail.dtype == value.dtype and value.numel() > 0
    )
    return (
        same_entries
        and tail.is_contiguous()
        and value.is_contiguous()
        and tail.nbytes <= MOST_REPEATED
    )


def _steps_by_group(pending: _PendingCopies, leaves: Sequence[Any]) -> Iterator[Fill]:
    """Copy the remaining values and constants: one step per dtype where the strides agree, else one
    step per copy."""
    groups: dict[Any, list[tuple[Tensor, int | Tensor]]] = {}
    pairs: list[tuple[Tensor, int | Tensor]] = [*pending.values, *pending.constants]
    for position, (target, source) in enumerate(pairs):
        value = source if isinstance(source, Tensor) else leaves[source]
        # `torch._foreach_copy_` is fast only where the strides agree.
        fits = target.stride() == value.stride() and not (value.is_conj() or value.is_neg())
        kind = (target.device, value.device, target.dtype) if fits else position
        if target.numel():
            groups.setdefault(kind, []).append((target, source))
    for group in groups.values():
        indices = tuple(source for _, source in group if isinstance(source, int))
        padding_sources = tuple(source for _, source in group if isinstance(source, Tensor))
        yield GroupedCopy(
            tuple(target for target, _ in group), _picker(indices), padding_sources
        ).copy


@attrs.frozen(eq=False)
class GroupedCopy:
    """One `copy_all` to `targets`: first from the leaves that `pick` selects, then from
    `padding_sources`."""

    targets: tuple[Tensor, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    padding_sources: tuple[Tensor, ...]

    def copy(self, leaves: Sequence[Any]) -> None:
        if len(self.targets) == 1:
            (value,) = self.pick(leaves) or self.padding_sources
            self.targets[0].copy_(value)
        else:
            copy_all(self.targets, self.pick(leaves) + self.padding_sources)


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """An `itemgetter` that returns a tuple also for one index or none."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda leaves: tuple(leaves[i] for i in indices)


def _repeating(tail: Tensor, index: int, spec: Axes) -> Fill:
    def repeat(leaves: Sequence[Any]) -> None:
        tail.copy_(last_entry(leaves[index], spec))

    return repeat


def _in_a_row(target: Tensor, index: int) -> Fill:
    def copy(leaves: Sequence[Any]) -> None:
        target.copy_(in_a_row(leaves[index]))

    return copy


def _filling(tail: Tensor, number: float) -> Fill:
    def fill(leaves: Sequence[Any]) -> None:
        tail.fill_(number)

    return fill
