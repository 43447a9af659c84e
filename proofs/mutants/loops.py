"""Planted bugs of `while_loop`."""

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

from weft.proofs.mutants.mutant import Mutant, replace
from weft.proofs.suite import find
from weft.transforms.graphs.backends.tape import Loop, _run_all
from weft.transforms.graphs.while_loop import _Loop

_WHILE = "weft.transforms.graphs.while_loop"
_record = _Loop.record


def _once(self: Loop) -> None:
    if bool(self.flag):
        _run_all(self.operations)


def _at_least_once(self: Loop) -> None:
    while True:
        _run_all(self.operations)
        if not bool(self.flag):
            return


def _unbounded(self: _Loop, *args: Any) -> Any:
    self.max_steps = None
    return _record(self, *args)


def _one_after_the_other(buffers: Sequence[Any], made: Sequence[Any]) -> None:
    for buffer, value in zip(buffers, made, strict=True):
        buffer.copy_(value)


_PYTHONS = find("L1", "loops are Python's")

LOOPS = (
    Mutant("a loop runs one step", _PYTHONS, partial(mock.patch.object, Loop, "run", _once)),
    Mutant("a loop runs a step whatever holds", _PYTHONS, partial(mock.patch.object, Loop, "run", _at_least_once)),
    Mutant("a graph ignores max_steps", _PYTHONS, partial(mock.patch.object, _Loop, "record", _unbounded)),
    Mutant("a carry is overwritten before it is read", _PYTHONS, replace(_WHILE, "_write", _one_after_the_other)),
)
"""The bugs of `while_loop` and of its replay on a tape."""
