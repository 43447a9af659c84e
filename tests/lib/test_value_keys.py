"""Keys of Python values: different values have different keys, whatever `==` says."""

import dataclasses
import enum
from fractions import Fraction
from typing import Any

import attrs
import pytest
import torch

from weft.value_keys import value_key


class Word(str):
    """Text, and what was written beside it."""

    note = ""


class Half(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Data:
    n: Any


@attrs.frozen
class Attrs:
    n: Any


class Lax:
    """An object that is equal to every other, whatever it holds."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lax)

    def __hash__(self) -> int:
        return 0


class Sealed(Lax):
    """An object whose content cannot be inspected."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot be pickled")


EQUAL: dict[str, tuple[Any, Any]] = {
    "1 and True": (1, True),
    "1 and 1.0": (1, 1.0),
    "1 and an enum's": (1, Half.ONE),
    "zeros of either sign": (0.0, -0.0),
    "complex zeros": (complex(-1, 0.0), complex(-1, -0.0)),
    "inside a tuple": ((1, (0.0,)), (1, (-0.0,))),
    "inside a frozenset": (frozenset({1}), frozenset({1.0})),
    "ranges of the same numbers": (range(0, 3, 2), range(0, 4, 2)),
    "a dataclass": (Data(1), Data(1.0)),
    "a dataclass in an attrs class": (Attrs(Data(0.0)), Attrs(Data(-0.0))),
    "a lax ==": (Lax(1), Lax(2)),
    "fractions and ints": (Fraction(1), 1),
    "text of a subclass": (Word("a"), "a"),
}


@pytest.mark.parametrize("case", EQUAL)
def test_equal_values_that_are_not_alike(case: str) -> None:
    one, other = EQUAL[case]
    assert one == other
    assert value_key(one) != value_key(other)


@pytest.mark.parametrize("case", EQUAL)
def test_a_value_is_like_itself(case: str) -> None:
    for value in EQUAL[case]:
        assert value_key(value) == value_key(value)
        assert hash(value_key(value)) == hash(value_key(value))


def test_values_made_anew_are_alike() -> None:
    def make() -> tuple[Any, ...]:
        return (1, "a", 0.5, (2, None), frozenset({1, "b"}), Data((1, 2)), Attrs(range(3)), Lax(3), torch.float32)

    assert value_key(make()) == value_key(make())
    assert hash(value_key(make())) == hash(value_key(make()))


def test_an_object_is_like_itself_alone() -> None:
    one, other = object(), object()
    assert value_key(one) == value_key(one)
    assert value_key(one) != value_key(other)


def test_what_cannot_be_told_apart_cannot_be_hashed() -> None:
    with pytest.raises(TypeError, match="a Sealed is compared by its own ==, which may take unlike ones for equal"):
        hash(value_key(Sealed(1)))
