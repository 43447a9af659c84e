"""Python values as parts of a key: told apart where `==` is too lax to do so."""

import dataclasses
from typing import Any, NoReturn

import attrs
import torch

EXACT = frozenset((bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Values of one of these types are equal only if nothing can tell them apart."""


def alike(value: Any) -> Any:
    """A hashable stand-in for a Python value that tells apart what `==` does not: 1, 1.0 and True; 0.0 and -0.0; also
    inside tuples, frozensets, ranges, complex numbers, dataclasses and attrs classes.

    An object that is compared by identity stands for itself. One with an `==` of its own is told apart by what pickle
    would write of it; where there is no telling, hashing the stand-in raises TypeError.

    Returns:
        The type, then the value or what stands for it.

    >>> alike(1) == alike(True), alike((0.0, 2)) == alike((-0.0, 2)), alike((0.0, 2)) == alike((0.0, 2))
    (False, False, True)
    """
    kind = type(value)
    if kind in EXACT:
        return (kind, value)
    if isinstance(value, float):
        return (kind, value.hex())
    if isinstance(value, complex):
        return (kind, repr(value))
    if isinstance(value, tuple):
        return (kind, tuple(alike(v) for v in value))
    if by_identity(kind) or kind.__hash__ is None or isinstance(value, torch.Tensor):
        return (kind, value)
    return (kind, value, _contents(value))


def by_identity(kind: Any) -> bool:
    """Whether objects of a class are equal only to themselves."""
    return kind.__eq__ is object.__eq__


def _contents(value: Any) -> Any:
    """What an object with an `==` of its own holds."""
    if isinstance(value, frozenset):
        return frozenset(alike(v) for v in value)
    if dataclasses.is_dataclass(value) or attrs.has(type(value)):
        fields = attrs.fields(type(value)) if attrs.has(type(value)) else dataclasses.fields(value)
        return tuple(alike(getattr(value, field.name)) for field in fields)
    try:
        return _state(value.__reduce_ex__(2)[1:])
    except Exception:
        return Indistinct(type(value))


def _state(state: Any) -> Any:
    """`alike`, for the states that pickle writes: those may hold dicts and lists."""
    if isinstance(state, dict):
        return (dict, tuple((alike(key), _state(value)) for key, value in state.items()))
    if isinstance(state, list | tuple):
        return (type(state), tuple(_state(v) for v in state))
    return alike(state)


@attrs.frozen(hash=False)
class Indistinct:
    """Stands for what an object of class `kind` holds, which cannot be told."""

    kind: type

    def __hash__(self) -> NoReturn:
        raise TypeError(f"a {self.kind.__name__} is compared by its own ==, which may take unlike ones for equal")
