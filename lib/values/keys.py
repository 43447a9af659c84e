"""`value_key`: Python values as parts of a cache key that tells apart values that `==` does not."""

import dataclasses
from typing import Any, NoReturn

import attrs
import torch

# For values of these types, equal means the same in every respect.
EXACT = frozenset(
    (
        bool,
        int,
        str,
        bytes,
        type(None),
        type(...),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)


def value_key(value: Any) -> Any:
    """A hashable stand-in for a Python value that tells apart what `==` does not: 1, 1.0 and True;
    0.0 and -0.0; also inside tuples, frozensets, ranges, slices, complex numbers, dataclasses and
    attrs classes.

    An object that is compared by identity stands for itself. For an object with its own `==`, the
    stand-in also holds the state that pickle would write; if pickle cannot write it, hashing the
    stand-in raises TypeError.

    Returns:
        The type, then the value or its stand-in.

    >>> value_key(1) == value_key(True), value_key((0.0, 2)) == value_key((-0.0, 2))
    (False, False)
    >>> value_key((0.0, 2)) == value_key((0.0, 2))
    True
    """
    kind = type(value)
    if kind in EXACT:
        return (kind, value)
    if isinstance(value, float):
        # The text tells 0.0 from -0.0, and makes nan equal to itself.
        return (kind, value.hex())
    # The text again; a complex number has no `hex`.
    if isinstance(value, complex):
        return (kind, repr(value))
    if isinstance(value, slice):
        return (kind, tuple(value_key(v) for v in (value.start, value.stop, value.step)))
    if isinstance(value, tuple):
        return (kind, tuple(value_key(v) for v in value))
    if by_identity(kind) or kind.__hash__ is None or isinstance(value, torch.Tensor):
        return (kind, value)
    return (kind, value, _contents(value))


def by_identity(kind: Any) -> bool:
    """Whether objects of a class are equal only to themselves."""
    return kind.__eq__ is object.__eq__


def _contents(value: Any) -> Any:
    """The contents of an object that has its own `==`."""
    if isinstance(value, frozenset):
        return frozenset(value_key(v) for v in value)
    if dataclasses.is_dataclass(value) or attrs.has(type(value)):
        if attrs.has(type(value)):
            fields = attrs.fields(type(value))
        else:
            fields = dataclasses.fields(value)
        return tuple(value_key(getattr(value, field.name)) for field in fields)
    try:
        return _state(value.__reduce_ex__(2)[1:])
    except Exception:
        return Indistinct(type(value))


def _state(state: Any) -> Any:
    """`value_key` of a state that pickle writes, which may hold dicts and lists."""
    if isinstance(state, dict):
        return (dict, tuple((value_key(key), _state(value)) for key, value in state.items()))
    if isinstance(state, list | tuple):
        return (type(state), tuple(_state(v) for v in state))
    return value_key(state)


@attrs.frozen(hash=False)
class Indistinct:
    """Stands in for the contents of an object of class `kind` that cannot be compared."""

    kind: type

    def __hash__(self) -> NoReturn:
        raise TypeError(
            f"a {self.kind.__name__} is compared by its own ==, which may take unlike ones for"
            " equal"
        )
