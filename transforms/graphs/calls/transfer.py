"""What goes into a replay and what comes out of it: input buffers are filled, and results are safe or borrowed.

Each copy costs a launch, so that copies go together: on a GPU, all that are copies of bytes in one (`weft.ops.copies`).
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import attrs
from torch import Tensor

from weft.ops.byte_copies import MOST_REPEATED, Copies, same_bytes
from weft.ops.copies import plan_copies_of_bytes, uses_kernel
from weft.padding import last_entry
from weft.torchapi import copy_all, storage_id
from weft.transforms.graphs.calls.clones import Cloner, lend_outputs
from weft.transforms.graphs.calls.reader import write_builder
from weft.transforms.graphs.calls.results import Outputs
from weft.trees import Axes

Fill = Callable[[Sequence[Any]], None]
"""Fills buffers from all leaves of a call, those by reference first."""


@attrs.frozen(eq=False)
class CopyIn:
    """How the buffers of a graph are filled from the leaves of calls of one signature, padding and all.

    Nothing survives that a buffer held before: of a padded buffer, the corner is the value's and all the rest is filled
    anew, as `weft.padding.write_padded` does. No step reads what another one writes.
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
    first: int,
) -> CopyIn | None:
    """Plan how to fill `buffers` from calls like one of which `leaves[first:]` are the copied leaves.

    Args:
        buffers: of a graph; other values than tensors among them are left alone.
        padding_sources: for each buffer that is padded with one number, a tensor like it that holds nothing else.
        specs: which dimensions of each buffer are padded, and with what.
        leaves: all leaves of the example call; only their shapes, strides and dtypes matter.
        first: the index of the first copied leaf.

    Returns:
        None if there is nothing to fill.
    """
    work = _Work([], [], [], [])
    for index, (buffer, padding_source, spec) in enumerate(zip(buffers, padding_sources, specs, strict=True), first):
        if isinstance(buffer, Tensor):
            _add(work, buffer, padding_source, spec, index, leaves[index])
    steps = [*_steps_by_kernel(work, leaves), *_steps_together(work, leaves)]
    steps += [_repeating(tail, index, spec) for tail, index, spec in work.repeats]
    steps += [_filling(tail, number) for tail, number in work.fills]
    return CopyIn(tuple(steps)) if steps else None


@attrs.frozen(eq=False)
class _Work:
    """What there is to do.

    Args:
        values: (target, index of a leaf).
        constants: (target, source): padding that is the same in every call.
        repeats: (tail, index of a leaf, its axes): padding that repeats the last entry of a value.
        fills: (tail, number): large padding.
    """

    values: list[tuple[Tensor, int]]
    constants: list[tuple[Tensor, Tensor]]
    repeats: list[tuple[Tensor, int, Axes]]
    fills: list[tuple[Tensor, float]]

    def drop(self, done: Sequence[Any]) -> None:
        """Leave out what is done: these very items."""
        ids = {id(item) for item in done}
        self.values[:] = [item for item in self.values if id(item) not in ids]
        self.constants[:] = [item for item in self.constants if id(item) not in ids]
        self.repeats[:] = [item for item in self.repeats if id(item) not in ids]


def _add(
    work: _Work, buffer: Tensor, padding_source: Tensor | None, spec: Axes | None, index: int, leaf: Tensor
) -> None:
    """Add what it takes to fill one buffer from `leaf`, the one at `index`."""
    if spec is None:
        work.values.append((buffer, index))
        return
    work.values.append((corner(buffer, leaf.shape), index))
    found = tuple(tails(buffer, leaf.shape))
    if isinstance(spec.pad, str):
        work.repeats.extend((tail, index, spec) for tail in found)
    elif padding_source is None:
        work.fills.extend((tail, spec.pad) for tail in found)
    else:
        work.constants.extend(zip(found, tails(padding_source, leaf.shape), strict=True))


def corner(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """The leading part of `buffer` that a value of this shape fills."""
    return buffer if buffer.shape == shape else buffer[tuple(slice(size) for size in shape)]


def tails(buffer: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    """All of `buffer` but that corner, in parts that do not overlap."""
    for dim, size in enumerate(shape):
        if size < buffer.shape[dim]:
            yield buffer[(*(slice(s) for s in shape[:dim]), slice(size, None))]


def _steps_by_kernel(work: _Work, leaves: Sequence[Any]) -> Iterator[Fill]:
    """Take from `work` what the kernel can copy: one step a device, with everything of it in one launch."""
    values = [pair for pair in work.values if same_bytes(pair[0], leaves[pair[1]]) and uses_kernel(pair[0].device)]
    for device in dict.fromkeys(target.device for target, _ in values):
        mine = [pair for pair in values if pair[0].device == device]
        constants = [pair for pair in work.constants if pair[0].device == device and same_bytes(*pair)]
        places = {index: place for place, (_, index) in enumerate(mine)}
        repeats = [r for r in work.repeats if r[1] in places and _repeats_bytes(r[0], leaves[r[1]])]
        work.drop((*mine, *constants, *repeats))
        copies = Copies(
            tuple(target for target, _ in mine),
            True,
            tuple(constants),
            tuple((tail, places[index], leaves[index][:1].nbytes) for tail, index, _ in repeats),
        )
        yield _picking([index for _, index in mine], len(leaves), plan_copies_of_bytes(copies))


def _picking(indices: Sequence[int], count: int, copy: Fill) -> Fill:
    """`copy` for some of the leaves, which are `count`."""
    if indices == [*range(count)]:
        return copy
    pick = _picker(indices)

    def picked(leaves: Sequence[Any]) -> None:
        copy(pick(leaves))

    return picked


def _repeats_bytes(tail: Tensor, value: Tensor) -> bool:
    """Whether `tail` is filled with the last bytes of `value`: both contiguous, and of entries of one size."""
    alike = tail.shape[1:] == value.shape[1:] and tail.dtype == value.dtype and value.numel() > 0
    return alike and tail.is_contiguous() and value.is_contiguous() and tail.nbytes <= MOST_REPEATED


def _steps_together(work: _Work, leaves: Sequence[Any]) -> Iterator[Fill]:
    """The rest of the values and constants: those of one dtype together, where their strides allow it."""
    groups: dict[Any, list[tuple[Tensor, int | Tensor]]] = {}
    pairs: list[tuple[Tensor, int | Tensor]] = [*work.values, *work.constants]
    for place, (target, source) in enumerate(pairs):
        value = source if isinstance(source, Tensor) else leaves[source]
        fits = target.stride() == value.stride() and not (value.is_conj() or value.is_neg())
        kind = (target.device, value.device, target.dtype) if fits else place
        if target.numel():
            groups.setdefault(kind, []).append((target, source))
    for group in groups.values():
        indices = tuple(source for _, source in group if isinstance(source, int))
        padding_sources = tuple(source for _, source in group if isinstance(source, Tensor))
        yield Together(tuple(target for target, _ in group), _picker(indices), padding_sources).copy


@attrs.frozen(eq=False)
class Together:
    """One `copy_all`: to `targets`, from the leaves that `pick` takes and then from `padding_sources`."""

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
    """`itemgetter` that returns a tuple of any length."""
    return itemgetter(*indices) if len(indices) > 1 else lambda leaves: tuple(leaves[i] for i in indices)


def _repeating(tail: Tensor, index: int, spec: Axes) -> Fill:
    def repeat(leaves: Sequence[Any]) -> None:
        tail.copy_(last_entry(leaves[index], spec))

    return repeat


def _filling(tail: Tensor, number: float) -> Fill:
    def fill(leaves: Sequence[Any]) -> None:
        tail.fill_(number)

    return fill


@attrs.frozen(eq=False)
class Handover:
    """How the caller's result is made after a replay.

    Args:
        made: the recording's own output tensors.
        build: `(copies of made, the caller's own leaves) -> result`.
        copies: clones them, so that no later replay changes the result; or lends them.
    """

    made: tuple[Tensor, ...]
    build: Callable[[Sequence[Tensor], Sequence[Any]], Any]
    copies: Cloner


def hand_over(outputs: Outputs, buffers: Sequence[Any], borrow: bool) -> Handover:
    """Plan how the results of a recording reach the caller.

    Args:
        outputs: of the recording, or views of them.
        buffers: what the recording reads its copied inputs from. An output that lies in one of them is never lent: as
            the input of the next call it could be overwritten while it is read.
        borrow: lend the others, instead of clones.
    """
    made: list[Tensor] = []
    expressions, names = [], {}
    for i, (leaf, reference) in enumerate(zip(outputs.leaves, outputs.references, strict=True)):
        if reference is not None:
            expressions.append(f"references[{reference}]")
        elif isinstance(leaf, Tensor):
            expressions.append(f"made[{len(made)}]")
            made.append(leaf)
        else:
            names[f"value{i}"] = leaf
            expressions.append(f"value{i}")
    build = write_builder(outputs.structure, expressions, names)
    inputs = {storage_id(x) for x in buffers if isinstance(x, Tensor)}
    kept = [i for i, x in enumerate(made) if not borrow or storage_id(x) in inputs]
    return Handover(tuple(made), build, lend_outputs(made, kept))
