"""What goes into a replay and what comes out of it: input buffers are filled, and results are safe or borrowed.

Each copy costs a launch, so that tensors of one dtype are copied together.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import attrs
from torch import Tensor

from weft.padding import last_entry
from weft.torchapi import clone_all, copy_all, storage_id
from weft.transforms.reader import write_builder
from weft.transforms.results import Outputs
from weft.trees import Axes


@attrs.frozen(eq=False)
class Together:
    """Tensors of one dtype that one launch copies: to `targets` from what `pick` takes of the leaves, then `blanks`."""

    targets: tuple[Tensor, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    blanks: tuple[Tensor, ...]

    def copy(self, leaves: Sequence[Any]) -> None:
        if len(self.targets) == 1:
            (value,) = self.pick(leaves) or self.blanks
            self.targets[0].copy_(value)
        elif self.blanks:
            copy_all(self.targets, self.pick(leaves) + self.blanks)
        else:
            copy_all(self.targets, self.pick(leaves))


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """`itemgetter` that returns a tuple of any length."""
    return itemgetter(*indices) if len(indices) > 1 else lambda leaves: tuple(leaves[i] for i in indices)


@attrs.frozen(eq=False)
class CopyIn:
    """How the buffers of a graph are filled from the leaves of calls of one signature, padding and all.

    Nothing survives that a buffer held before: of a padded buffer, the corner is the value's and all the rest is filled
    anew, as `weft.padding.write_padded` does.

    Args:
        together: values, and padding that is the same in every call.
        repeats: (tails, index, axes) of padding that repeats the last entry of a value.
        fills: (tail, number) of large padding.
    """

    together: tuple[Together, ...]
    repeats: tuple[tuple[tuple[Tensor, ...], int, Axes], ...]
    fills: tuple[tuple[Tensor, float], ...]

    def fill(self, leaves: Sequence[Any]) -> None:
        """Fill the buffers from all leaves of a call."""
        for group in self.together:
            group.copy(leaves)
        for tails, index, spec in self.repeats:
            last = last_entry(leaves[index], spec)
            for tail in tails:
                tail.copy_(last)
        for tail, number in self.fills:
            tail.fill_(number)


def plan_copies(
    buffers: Sequence[Any],
    blanks: Sequence[Tensor | None],
    specs: Sequence[Axes | None],
    leaves: Sequence[Any],
    first: int,
) -> CopyIn | None:
    """Plan how to fill `buffers` from calls like one of which `leaves[first:]` are the copied leaves.

    Args:
        buffers: of a graph; other values than tensors among them are left alone.
        blanks: for each buffer that is padded with one number, a tensor like it that holds nothing else.
        specs: which dimensions of each buffer are padded, and with what.
        leaves: all leaves of the example call; only their shapes matter.
        first: the index of the first copied leaf.

    Returns:
        None if there is nothing to fill.
    """
    pairs: list[tuple[Tensor, int | Tensor]] = []
    repeats, fills = [], []
    for index, (buffer, blank, spec) in enumerate(zip(buffers, blanks, specs, strict=True), first):
        if not isinstance(buffer, Tensor):
            continue
        shape = leaves[index].shape
        pairs.append((corner(buffer, shape) if spec is not None else buffer, index))
        found = tuple(tails(buffer, shape)) if spec is not None else ()
        if spec is None or not found:
            continue
        if isinstance(spec.pad, str):
            repeats.append((found, index, spec))
        elif blank is None:
            fills += [(tail, spec.pad) for tail in found]
        else:
            pairs += zip(found, tails(blank, shape), strict=True)
    if not pairs:
        return None
    return CopyIn(_together(pairs, leaves), tuple(repeats), tuple(fills))


def corner(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """The leading part of `buffer` that a value of this shape fills."""
    return buffer if buffer.shape == shape else buffer[tuple(slice(size) for size in shape)]


def tails(buffer: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    """All of `buffer` but that corner, in parts that do not overlap."""
    for dim, size in enumerate(shape):
        if size < buffer.shape[dim]:
            yield buffer[(*(slice(s) for s in shape[:dim]), slice(size, None))]


def _together(pairs: Sequence[tuple[Tensor, int | Tensor]], leaves: Sequence[Any]) -> tuple[Together, ...]:
    groups: dict[Any, list[tuple[Tensor, int | Tensor]]] = {}
    for place, (target, source) in enumerate(pairs):
        value = source if isinstance(source, Tensor) else leaves[source]
        # One launch takes tensors of one dtype, with the strides of their targets; others go one by one.
        fits = target.stride() == value.stride() and not (value.is_conj() or value.is_neg())
        kind = (target.device, value.device, target.dtype) if fits else place
        if target.numel():
            groups.setdefault(kind, []).append((target, source))
    together = []
    for group in groups.values():
        members = [p for p in group if isinstance(p[1], int)] + [p for p in group if isinstance(p[1], Tensor)]
        indices = tuple(source for _, source in members if isinstance(source, int))
        blanks = tuple(source for _, source in members if isinstance(source, Tensor))
        together.append(Together(tuple(target for target, _ in members), _picker(indices), blanks))
    return tuple(together)


@attrs.frozen(eq=False)
class Handover:
    """How the caller's result is made after a replay.

    Args:
        made: the recording's own output tensors.
        build: `(copies of made, the caller's own leaves) -> result`.
        copies: `cloned`, so that no later replay changes the result; or `borrowed`.
    """

    made: tuple[Tensor, ...]
    build: Callable[[Sequence[Tensor], Sequence[Any]], Any]
    copies: Callable[[tuple[Tensor, ...]], Sequence[Tensor]]


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
    lent = [borrow and storage_id(x) not in inputs for x in made]
    return Handover(tuple(made), build, borrowed if all(lent) else some_borrowed(lent) if any(lent) else cloning(made))


def borrowed(made: tuple[Tensor, ...]) -> Sequence[Tensor]:
    """The graph's own buffers, which the next replay overwrites; as new tensors, so that no caller's `t_()` or donation
    reaches the next caller."""
    return [x.detach() for x in made]


def some_borrowed(lent: Sequence[bool]) -> Callable[[tuple[Tensor, ...]], Sequence[Tensor]]:
    """Borrow those for which `lent` says so, and clone the rest."""
    return lambda made: [x.detach() if ok else x.clone() for x, ok in zip(made, lent, strict=True)]


def cloning(made: Sequence[Tensor]) -> Callable[[tuple[Tensor, ...]], Sequence[Tensor]]:
    """How to clone these outputs with few launches."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(made):
        plain = type(x) is Tensor and x.numel() and not (x.is_conj() or x.is_neg() or x._is_zerotensor())
        dense = plain and x.is_contiguous()
        groups.setdefault((x.dtype, x.device) if dense else i, []).append(i)
    if len(groups) == len(made):
        return cloned
    if len(groups) == 1:
        return clone_all
    order = [i for group in groups.values() for i in group]
    places = [order.index(i) for i in range(len(made))]
    picks = [itemgetter(*group) if len(group) > 1 else group[0] for group in groups.values()]

    def clone_groups(made: tuple[Tensor, ...]) -> Sequence[Tensor]:
        found: list[Tensor] = []
        for pick in picks:
            if isinstance(pick, int):
                found.append(made[pick].clone())
            else:
                found += clone_all(pick(made))
        return [found[i] for i in places]

    return clone_groups


def cloned(made: tuple[Tensor, ...]) -> Sequence[Tensor]:
    """A clone of each, one by one."""
    return [x.clone() for x in made]
