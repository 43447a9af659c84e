"""Keys of Python values: different values have different keys, whatever `==` says."""

import dataclasses
import enum
import functools
from decimal import Decimal
from fractions import Fraction
from typing import Any

import attrs
import pytest
import torch

from weft.values.keys import value_key


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

    def __init__(self, n: Any) -> None:
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
    "decimals of other precision": (Decimal("1.0"), Decimal("1.00")),
    "slices": (slice(1), slice(True)),
    "inside a list of an object's own ==": (Lax([1]), Lax([1.0])),
    "inside a dict of an object's own ==": (Lax({"a": 0.0}), Lax({"a": -0.0})),
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
        return (
            1,
            "a",
            0.5,
            (2, None),
            frozenset({1, "b"}),
            Data((1, 2)),
            Attrs(range(3)),
            Lax(3),
            torch.float32,
        )

    assert value_key(make()) == value_key(make())
    assert hash(value_key(make())) == hash(value_key(make()))


def test_an_object_is_like_itself_alone() -> None:
    one = object()
    other = object()
    assert value_key(one) == value_key(one)
    assert value_key(one) != value_key(other)


@dataclasses.dataclass(frozen=True)
class DataWithMore:
    n: int

    @functools.cached_property
    def more(self) -> int:
        return self.n + 1


@attrs.frozen(slots=False)
class AttrsWithMore:
    n: int

    @functools.cached_property
    def more(self) -> int:
        return self.n + 1


@pytest.mark.parametrize("kind", [DataWithMore, AttrsWithMore])
def test_what_a_class_of_fields_computed_is_no_part_of_its_key(kind: Any) -> None:
    before = kind(1)
    key = value_key(before)
    assert before.more == 2
    assert value_key(before) == key == value_key(kind(1))


class Plain:
    """An object that is compared by identity."""

    n: Any = 1


class Unhashable:
    """An object that nothing can be looked up by."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


def test_an_object_that_changes_stays_itself() -> None:
    value = Plain()
    key = value_key(value)
    value.n = 2
    assert value_key(value) == key
    assert hash(value_key(value)) == hash(key)


def test_a_tensor_stands_for_itself_and_is_not_read() -> None:
    x = torch.ones(2, device="meta")
    assert value_key(x) == (torch.Tensor, x)


def test_what_has_no_hash_has_a_key_without_one() -> None:
    with pytest.raises(TypeError, match="unhashable type: 'Unhashable'"):
        hash(value_key(Unhashable()))


def test_what_cannot_be_told_apart_cannot_be_hashed() -> None:
    with pytest.raises(
        TypeError, match="a Sealed is compared by its own ==, which may take unlike ones for equal"
    ):
        hash(value_key(Sealed(1)))
