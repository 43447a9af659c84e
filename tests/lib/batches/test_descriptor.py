"""BatchDescriptor: a partial order of valid values."""

import dataclasses
from typing import Any

import attrs
import pytest
from hypothesis import given, settings, strategies as st
from refusal import refused

from weft.batches.descriptor import BatchDescriptor, Descriptor
from weft.errors import DescriptorError
from weft.proofs.strategies import descriptors

FAST = settings(deadline=None, max_examples=100)
# So that equal, covering and incomparable pairs are all frequent
SMALL = descriptors(max_reqs=3, max_query_len=2)


@FAST
@given(descriptors())
def test_covers_is_reflexive(a: BatchDescriptor) -> None:
    assert a.covers(a)
    assert a.covers(attrs.evolve(a))


@FAST
@given(SMALL, SMALL)
def test_covers_is_antisymmetric(a: BatchDescriptor, b: BatchDescriptor) -> None:
    assert (a.covers(b) and b.covers(a)) == (a == b)
    assert a != b or hash(a) == hash(b)


@FAST
@given(SMALL, SMALL, SMALL)
def test_covers_is_transitive(a: BatchDescriptor, b: BatchDescriptor, c: BatchDescriptor) -> None:
    if a.covers(b) and b.covers(c):
        assert a.covers(c)


@FAST
@given(SMALL, SMALL)
def test_covers_by_its_definition(a: BatchDescriptor, b: BatchDescriptor) -> None:
    room = all(
        getattr(a, f) >= getattr(b, f) for f in ("num_tokens", "num_reqs", "num_active_loras")
    )
    assert a.covers(b) == (
        room and (not a.is_uniform or (b.is_uniform and a.query_len == b.query_len))
    )


@FAST
@given(SMALL)
def test_every_field_counts(a: BatchDescriptor) -> None:
    """A descriptor that is larger in any one field is not covered, so `covers` compares every
    field."""
    for field in attrs.fields(BatchDescriptor):
        if field.name == "query_len":
            continue
        ragged = attrs.evolve(a, query_len=None)
        larger = attrs.evolve(ragged, **{field.name: getattr(a, field.name) + 1})
        assert larger.covers(ragged)
        assert not ragged.covers(larger)


@given(st.integers(1, 9), st.integers(1, 4))
def test_equal_shape_is_not_equal_class(reqs: int, query_len: int) -> None:
    uniform = BatchDescriptor.uniform(reqs, query_len)
    ragged = attrs.evolve(uniform, query_len=None)
    assert uniform != ragged
    assert (ragged.covers(uniform), uniform.covers(ragged)) == (True, False)
    assert (uniform.is_uniform, ragged.is_uniform) == (True, False)
    assert not BatchDescriptor.uniform(9 * 4, query_len + 1).covers(uniform)


NEGATIVE = "pass whole numbers of tokens and requests"
UNEVEN = "query_len=None"
INVALID: list[tuple[tuple[Any, ...], str, str]] = [
    ((-1, 1), "num_tokens=-1 is not an int >= 0", NEGATIVE),
    ((1, -1), "num_reqs=-1 is not an int >= 0", NEGATIVE),
    ((1, 1, None, -1), "num_active_loras=-1 is not an int >= 0", NEGATIVE),
    ((1.0, 1), "num_tokens=1.0 is not an int >= 0", NEGATIVE),
    ((1, True), "num_reqs=True is not an int >= 0", NEGATIVE),
    (("4", 1), "num_tokens='4' is not an int >= 0", NEGATIVE),
    ((2, 2, 0), "query_len=0 is neither None nor an int >= 1", "pass None for a ragged batch"),
    ((2, 2, -1), "query_len=-1 is neither None nor an int >= 1", "pass None for a ragged batch"),
    (
        (2, 2, True),
        "query_len=True is neither None nor an int >= 1",
        "pass None for a ragged batch",
    ),
    ((2, 2, 1.0), "query_len=1.0 is neither None nor an int >= 1", "pass None for a ragged batch"),
    (
        (5, 2, 2),
        "num_tokens=5 is not num_reqs*query_len=2*2",
        "BatchDescriptor.uniform(num_reqs=2, query_len=2), or query_len=None",
    ),
]


@pytest.mark.parametrize(("args", "problem", "instead"), INVALID)
def test_what_contradicts_itself_is_refused(
    args: tuple[Any, ...], problem: str, instead: str
) -> None:
    with pytest.raises(DescriptorError) as error:
        BatchDescriptor(*args)
    query_len = args[2] if len(args) > 2 else None
    assert (
        str(error.value)
        == f"BatchDescriptor({args[0]!r}, {args[1]!r}, query_len={query_len!r})\n  saw: {problem}\n "
        f" instead: {instead}"
    )
    assert isinstance(error.value, ValueError)


def test_evolve_is_checked_too() -> None:
    with pytest.raises(DescriptorError, match=r"num_tokens=9 is not num_reqs\*query_len=2\*1"):
        attrs.evolve(BatchDescriptor.uniform(2), num_tokens=9)


def test_it_is_frozen_and_satisfies_the_protocol() -> None:
    d = BatchDescriptor(3, 2)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        d.num_tokens = 4  # type: ignore[misc]
    assert isinstance(d, Descriptor)
    assert {d: 1}[BatchDescriptor(3, 2)] == 1


@FAST
@given(descriptors(), descriptors())
def test_text_tells_different_classes_apart(a: BatchDescriptor, b: BatchDescriptor) -> None:
    assert (str(a) == str(b)) == (a == b)
    assert eval(repr(a)) == a


def test_text() -> None:
    assert str(BatchDescriptor(7, 3)) == "ragged 7 tokens, 3 reqs"
    assert str(BatchDescriptor.uniform(3, 2, 1)) == "uniform x2, 3 reqs, 1 LoRAs"


@attrs.frozen
class Size(Descriptor):
    """A class with an order by its sizes."""

    a: int
    b: int


@attrs.frozen
class Labelled(Descriptor):
    """A class with an argument that is not a size."""

    a: int
    label: str = "x"


@dataclasses.dataclass(frozen=True)
class Nothing(Descriptor):
    """A class without arguments."""


@given(*[st.builds(Size, st.integers(0, 3), st.integers(0, 3))] * 3)
def test_the_inherited_order_is_partial_and_by_each_size(x: Size, y: Size, z: Size) -> None:
    assert x.covers(y) == (x.a >= y.a and x.b >= y.b)
    assert x.covers(x)
    assert not (x.covers(y) and y.covers(x)) or x == y
    assert not (x.covers(y) and y.covers(z)) or x.covers(z)
    assert isinstance(x, Descriptor)


def test_an_inherited_order_of_what_is_not_a_size() -> None:
    instead = "in class Labelled arguments that are ints, or a method covers(self, other)"
    with refused(
        DescriptorError, "Labelled(a=1, label='x').covers(...)", "label='x', not a size", instead
    ):
        Labelled(1).covers(Labelled(1))
    with refused(
        DescriptorError, "Nothing().covers(...)", "no sizes", instead.replace("Labelled", "Nothing")
    ):
        Nothing().covers(Nothing())
    problem = "descriptors of two classes"
    instead = "descriptors of one class in one ladder"
    other: Any = BatchDescriptor(1, 1)
    with refused(DescriptorError, f"Size(a=1, b=1).covers({other!r:.60})", problem, instead):
        Size(1, 1).covers(other)
