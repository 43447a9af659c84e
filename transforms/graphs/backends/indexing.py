"""Indices that are 0-dim tensors, such as a loop's counter: in a graph they become gathers on the
device.

Torch reads such an index on the host, and returns a view. A replay would not read it again, so a
capture gathers the elements instead, which makes a copy. If a view would behave differently from
the copy, `Gathers` refuses the capture.
"""

import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi.private import innermost_storage_id
from weft.transforms.graphs.backends.constants import Constants

_MASKS = (torch.bool, torch.uint8)
_WRITTEN = (
    "a write to x[i], where i is a tensor: a graph has a copy of these elements, and not a view"
)
_STALE = (
    "a read of x[i], where i is a tensor, after a write to x: a graph has the elements from before"
)
_CLONE = "x[i].clone() before the write; or x[i] once more after it"
_Index = tuple[Any, ...]


@attrs.define
class _Step:
    """A step of a loop.

    Args:
        before: the copies from before the step.
        read: those of them that the step has read.
    """

    before: set[int]
    read: set[int] = attrs.field(factory=set)


class Gathers:
    """The copies in one run that stand for views by tensor indices.

    Args:
        refuse: makes the error for a fault and its remedy.
        constants: the tensors that the host may read; an index by one of them stays a view.
    """

    def __init__(self, refuse: Callable[[str, str], CaptureError], constants: Constants) -> None:
        self._refuse = refuse
        self._constants = constants
        self._sources: dict[int, int | None] = {}
        self._indices: dict[
            int, list[Any]
        ] = {}  # by weak references: the audit refuses tensors that stay alive
        self._stale = set[int]()
        self._written: int | None = None
        self._steps: list[_Step] = []

    def clear(self) -> None:
        """Forget all, before another run."""
        self._sources.clear()
        self._indices.clear()
        self._stale.clear()
        self._steps.clear()
        self._written = None

    def index_of(self, x: Any, index: Any) -> _Index | None:
        """The parts of an index if it must be gathered; None for any other index."""
        if isinstance(index, tuple):
            parts = index
        else:
            parts = (index,)
        if (
            not isinstance(x, Tensor)
            or x.layout is not torch.strided
            or not all(map(_is_known, parts))
        ):
            return None
        scalars = [part for part in parts if _is_scalar(part)]
        variable = [
            part
            for part in scalars
            if not self._constants.contains_all([innermost_storage_id(part)])
        ]
        if any(part.device != x.device for part in variable):
            return None  # torch reads it on the host, which the audit refuses
        if variable and _num_dims(parts) <= x.dim():
            return parts
        return None

    def get(self, x: Tensor, index: _Index) -> Tensor:
        """The copy that stands for `x[index]`."""
        source = innermost_storage_id(x)
        parts = list(index)
        for place, part in enumerate(parts):
            if _is_scalar(part):
                x = x[_along(x, parts, place)]
                parts[place] = 0
        result = x[tuple(parts)]
        storage = innermost_storage_id(result)
        self._sources[storage] = source
        self._indices[storage] = [
            weakref.ref(part) if isinstance(part, Tensor) else part for part in index
        ]
        return result

    def set(self, x: Tensor, index: _Index, value: Any) -> None:
        """Perform `x[index] = value`. If it is the second half of `x[index] += 1`, it writes back
        the copy, so the write to the copy is allowed."""
        if isinstance(value, Tensor):
            copy = innermost_storage_id(value)
        else:
            copy = 0
        writes_back = copy in self._sources and self._sources[copy] == innermost_storage_id(x)
        writes_back = writes_back and _is_index(self._indices[copy], index)
        if writes_back and self._written == copy:
            self._written = None
        _put(x, list(index), value)
        if writes_back:
            self._stale.discard(copy)

    def before_operator(self, inputs: Set[int]) -> None:
        """Raise CaptureError if an operator is about to read copies in these storages where views
        would have other values."""
        if self._written is not None:
            raise self._refuse(_WRITTEN, "x[i] = value; or x[i].clone(), which is a copy anywhere")
        copies = self._sources.keys() & inputs
        if not self._stale.isdisjoint(copies):
            raise self._refuse(_STALE, _CLONE)
        for step in self._steps:
            step.read |= copies & step.before

    def begin_step(self) -> None:
        """Begin a step of a loop, which a replay repeats."""
        self._steps.append(_Step(set(self._sources)))

    def end_step(self) -> None:
        """End the step; raise CaptureError if it read a copy from before the step and then made
        that copy stale: the next step would read it again."""
        step = self._steps.pop()
        if not self._stale.isdisjoint(step.read):
            raise self._refuse(_STALE, _CLONE)

    def after_operator(self, new: Set[int], written: Set[int]) -> None:
        """Note the storages that an operator made (`new`) and that it wrote in place
        (`written`)."""
        if not self._sources:
            return
        for storage in new & self._sources.keys():  # a freed storage may have had the same number
            del self._sources[storage], self._indices[storage]
            self._stale.discard(storage)
            for step in self._steps:
                step.before.discard(storage)
        for copy, source in self._sources.items():
            if source in new:
                self._sources[copy] = None
            elif source in written:
                self._stale.add(copy)
        self._written = next(iter(written & self._sources.keys()), self._written)


def _is_scalar(part: Any) -> bool:
    if not isinstance(part, Tensor) or part.dim() or part.dtype in _MASKS:
        return False
    return not part.is_floating_point() and not part.is_complex()


def _is_known(part: Any) -> bool:
    """Whether a part of an index is of a kind whose number of dimensions is known."""
    return part is None or part is ... or isinstance(part, int | slice | Tensor)


def _dims_of(part: Any) -> int:
    """The number of dimensions of the tensor that a part of an index consumes; 0 for `...`."""
    if part is None or part is ... or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in _MASKS:
        return part.dim()
    return 1


def _num_dims(parts: Iterable[Any]) -> int:
    return sum(map(_dims_of, parts))


def _along(x: Tensor, parts: list[Any], place: int) -> _Index:
    """The index that gathers along the dimension of one part, and keeps that dimension with size
    1."""
    is_counted_from_the_end = any(part is ... for part in parts[:place])
    if is_counted_from_the_end:
        dim = x.dim() - _num_dims(parts[place:])
    else:
        dim = _num_dims(parts[:place])
    return (*[slice(None)] * dim, parts[place][None])


def _put(x: Tensor, parts: list[Any], value: Any) -> None:
    place = next((place for place, part in enumerate(parts) if _is_scalar(part)), None)
    if place is None:
        x[tuple(parts)] = value
        return
    along = _along(x, parts, place)
    block = x[along]
    _put(block, [*parts[:place], 0, *parts[place + 1 :]], value)
    x[along] = block


def _is_index(noted: list[Any], index: _Index) -> bool:
    """Whether an index has the same tensors as an earlier one, noted by weak references, and equal
    other parts."""
    if len(noted) != len(index):
        return False
    pairs = zip(noted, index, strict=True)
    return all(
        a() is b if isinstance(a, weakref.ref) else not isinstance(b, Tensor) and a == b
        for a, b in pairs
    )
