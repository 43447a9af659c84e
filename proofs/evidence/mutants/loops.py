"""Planted bugs of `while_loop`."""

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor

from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.torchapi.private import storage_id
from weft.transforms.graphs.backends.constants import Constants, _Step
from weft.transforms.graphs.backends.randomness import Randomness, may_draw
from weft.transforms.graphs.backends.tape import Loop, _run_all
from weft.transforms.graphs.while_loop import _Loop

_WHILE = "weft.transforms.graphs.while_loop"
_INDEXING = "weft.transforms.graphs.backends.indexing"
_record = _Loop.record


# Right for a loop that ends after one step or none, and for every eager loop.
def _once(self: Loop) -> None:
    if bool(self.flag):
        _run_all(self.operations)


# A loop of C's `do`: only one whose condition is false at the start shows it.
def _at_least_once(self: Loop) -> None:
    while True:
        _run_all(self.operations)
        if not bool(self.flag):
            return


def _unbounded(self: _Loop, *args: Any) -> Any:
    # A loop that ends by itself before the limit stays right.
    self.max_steps = None
    return _record(self, *args)


def _one_after_the_other(buffers: Sequence[Any], values: Sequence[Any]) -> None:
    # A new value may be a view of another slot of the carry, as where two slots change places; this
    # overwrites it before it is read. Slots that are computed anew do not show it.
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


def _begin_with_constants(self: Constants, _: Iterable[int]) -> None:
    # Without the storages of the carry, what is computed from it is a constant of the capture: an
    # index that the counter chooses is the same in each step.
    self._steps.append(_Step(set()))


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    # A transposed view has the storage of the carry, and may have its shape, but has other values.
    # Bodies without views are right.
    return storage_id(a) == storage_id(b)


def _draws_by_its_tags(self: Randomness, func: Any) -> None:
    # Too strict: attention without dropout is tagged as random, and is refused. A test of refusals
    # alone passes.
    if self.repeats and may_draw(func):
        raise self.refuse(f"{func} draws random numbers", "draw them before the loop")


def _along_from_the_start(_: Tensor, parts: list[Any], place: int) -> tuple[Any, ...]:
    # An ellipsis counts as no more than the index says: right where it stands for one dimension.
    dims = sum(part is not None for part in parts[:place])
    return (*[slice(None)] * dims, parts[place][None])


_PYTHONS = find("L1", "loops are Python's")
_BODIES = find("L1", "loops are Python's, on drawn bodies")

# The bugs of `while_loop` and of its replay on a tape.
LOOPS = (
    Mutant("a loop runs one step", _PYTHONS, partial(mock.patch.object, Loop, "run", _once)),
    Mutant(
        "a loop runs a step whatever holds",
        _PYTHONS,
        partial(mock.patch.object, Loop, "run", _at_least_once),
    ),
    Mutant(
        "a graph ignores max_steps",
        _PYTHONS,
        partial(mock.patch.object, _Loop, "record", _unbounded),
    ),
    Mutant(
        "a carry is overwritten before it is read",
        _PYTHONS,
        replace(_WHILE, "_write", _one_after_the_other),
    ),
    Mutant(
        "a loop's counter is a constant",
        _BODIES,
        partial(mock.patch.object, Constants, "begin_step", _begin_with_constants),
    ),
    Mutant(
        "a view of the carry is the carry", _BODIES, replace(_WHILE, "_is_same", _is_same_memory)
    ),
    Mutant(
        # The result then shares memory with an argument of the loop. Its values are right until one
        # of them is written.
        "a result is what the loop starts from",
        _BODIES,
        partial(mock.patch.object, _Loop, "_owned", lambda _, carry, taken: carry),
    ),
    Mutant(
        # Only a loop inside `shard` inside a graph has two places where its steps can be recorded.
        "a loop on a rank is recorded in the capture around it",
        _BODIES,
        replace("weft.transforms.shards.tracing", "looping", lambda _: contextlib.nullcontext()),
    ),
    Mutant(
        "an index counts no dimensions for ...",
        _BODIES,
        replace(_INDEXING, "_along", _along_from_the_start),
    ),
    Mutant(
        "what may draw counts as a draw",
        _BODIES,
        partial(mock.patch.object, Randomness, "after_operator", _draws_by_its_tags),
    ),
)
