"""dispatch against its definition, by brute force: total, least, deterministic, each rung
reachable."""

from typing import Any, NamedTuple

import attrs
import pytest
from hypothesis import given, settings, strategies as st

from weft.batches.descriptor import BatchDescriptor as B
from weft.errors import DescriptorError
from weft.proofs._strategies.images import Resolution
from weft.proofs.strategies import descriptors
from weft.transforms.graphs.dispatch import Decision, dispatch, dispatch_table
from weft.transforms.graphs.ladder import MODES, Limits, make_ladder

FAST = settings(deadline=None, max_examples=80)
LADDERS = st.lists(descriptors(), max_size=8)


@FAST
@given(descriptors(), LADDERS)
def test_total_and_least(descriptor: B, ladder: list[B]) -> None:
    decision = dispatch(descriptor, ladder)
    covering = [d for d in ladder if d.covers(descriptor)]
    if not covering:
        assert (decision.mode, decision.descriptor) == ("none", descriptor)
        assert decision.reason == f"no captured class covers '{descriptor}'"
        return
    assert decision.mode == "full"
    assert decision.descriptor in covering
    assert not any(decision.descriptor.covers(d) and d != decision.descriptor for d in covering)


@FAST
@given(descriptors(), LADDERS)
def test_deterministic_and_blind_to_copies(descriptor: B, ladder: list[B]) -> None:
    again = dispatch(attrs.evolve(descriptor), tuple(attrs.evolve(d) for d in ladder))
    assert again == dispatch(descriptor, ladder)
    assert dispatch(descriptor, [d for d in ladder for _ in range(2)]) == again


@FAST
@given(LADDERS)
def test_each_rung_is_reachable_by_a_batch_of_its_own_class(ladder: list[B]) -> None:
    for rung in ladder:
        decision = dispatch(rung, ladder)
        assert decision.descriptor == rung
        assert decision.reason == f"'{rung}' runs under '{rung}', exactly"


@FAST
@given(descriptors(), descriptors(), LADDERS)
def test_monotone_where_rungs_form_a_chain(a: B, b: B, ladder: list[B]) -> None:
    chain: list[B] = []
    for d in ladder:
        if all(d.covers(c) or c.covers(d) for c in chain):
            chain.append(d)
    if a.covers(b) and dispatch(a, chain).mode == "full":
        assert dispatch(a, chain).descriptor.covers(dispatch(b, chain).descriptor)


@FAST
@given(descriptors(), LADDERS, descriptors())
def test_a_rung_that_does_not_cover_changes_nothing(
    descriptor: B, ladder: list[B], other: B
) -> None:
    if not other.covers(descriptor):
        assert (
            dispatch(descriptor, [*ladder, other])
            == dispatch(descriptor, [other, *ladder])
            == dispatch(descriptor, ladder)
        )


def test_of_incomparable_rungs_the_one_that_pads_less() -> None:
    wide = B(8, 2)
    tall = B(4, 4)
    for ladder in ([wide, tall], [tall, wide]):
        assert dispatch(B(2, 2), ladder).descriptor == tall
    few = B(4, 4, None, 1)
    many = B(4, 3, None, 2)
    for ladder in ([few, many], [many, few]):
        assert dispatch(B(2, 2), ladder).descriptor == many


@FAST
@given(descriptors(), LADDERS)
def test_the_padding_is_what_is_padded(descriptor: B, ladder: list[B]) -> None:
    decision = dispatch(descriptor, ladder)
    chosen = decision.descriptor
    sizes = ("num_tokens", "num_reqs", "num_active_loras")
    assert dict(decision.padding) == {
        n: m for n in sizes if (m := getattr(chosen, n) - getattr(descriptor, n))
    }
    assert str(decision).startswith(decision.reason)
    assert ("padded by" in str(decision)) == bool(decision.padding)


def test_what_is_padded_in_words() -> None:
    padded = "the least of the ladder that covers it; padded by 5 tokens, 1 req"
    assert str(dispatch(B.uniform(3), [B(8, 4)])).endswith(padded)


def test_a_prefill_of_one_token_each_is_no_decode() -> None:
    decision = dispatch(B(2, 2), [B.uniform(4), B.uniform(2)])
    assert decision.mode == "none"
    assert decision.reason == "no captured class covers 'ragged 2 tokens, 2 reqs'"


def test_a_decode_prefers_its_own_class_to_a_ragged_one_of_its_size() -> None:
    for ladder in ([B.uniform(4), B(4, 4)], [B(4, 4), B.uniform(4)]):
        assert dispatch(B.uniform(3), ladder).descriptor == B.uniform(4)


@FAST
@given(st.data())
def test_any_descriptor_type(data: Any) -> None:
    images = st.builds(Resolution, st.integers(1, 4), st.integers(1, 4))
    descriptor = data.draw(images)
    ladder = data.draw(st.lists(images, max_size=6))
    decision: Decision[Resolution] = dispatch(descriptor, ladder)
    assert (decision.mode == "none") == (not any(d.covers(descriptor) for d in ladder))
    assert not any(
        decision.descriptor.covers(d) and d != decision.descriptor and d.covers(descriptor)
        for d in ladder
    )
    assert sum(more for _, more in decision.padding) == (
        decision.descriptor.height
        - descriptor.height
        + decision.descriptor.width
        - descriptor.width
    )


class Plain(NamedTuple):
    """A shape class that is a named tuple."""

    size: int

    def covers(self, other: "Plain") -> bool:
        return self.size >= other.size


class Bare:
    """A plain Python class as a shape class."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._note = 7

    def covers(self, other: "Bare") -> bool:
        return self.size >= other.size

    def __hash__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bare) and self.size == other.size


@pytest.mark.parametrize("cls", [Plain, Bare])
def test_the_padding_of_classes_made_in_other_ways(cls: Any) -> None:
    assert dispatch(cls(3), [cls(8), cls(5)]).padding == (("size", 2),)


@attrs.frozen
class Pixels(Resolution):
    """A shape class that counts its padding in its own way."""

    def excess(self, descriptor: Resolution) -> dict[str, int]:
        return {"pixels": self.height * self.width - descriptor.height * descriptor.width}


def test_a_class_may_count_its_padding_itself() -> None:
    flat = Pixels(1, 30)
    square = Pixels(5, 5)
    for ladder in ([flat, square], [square, flat]):
        assert dispatch(Pixels(1, 5), ladder).descriptor == square
        assert dispatch(Pixels(1, 5), ladder).padding == (("pixels", 20),)


@attrs.frozen
class Loop:
    """A shape class whose values all cover each other, which is not an order."""

    name: str

    def covers(self, _: "Loop") -> bool:
        return True


def test_no_order_no_decision() -> None:
    with pytest.raises(DescriptorError) as error:
        dispatch(Loop("x"), [Loop("a"), Loop("b")])
    assert (
        error.value.problem
        == "'Loop(name='a')' and 'Loop(name='b')' cover each other and are not equal"
    )
    assert (
        error.value.instead
        == "make covers a partial order, in which two classes that cover each other are equal"
    )


def test_the_table() -> None:
    table = dispatch_table(Limits(4, 8), [B.uniform(3), B(5, 2), B(9, 2)])
    least = "the least of the ladder that covers it"
    assert str(table).splitlines() == [
        "batch                    mode       class                    padding           reason",
        f"uniform x1, 3 reqs       full       uniform x1, 4 reqs       1 token, 1 req    {least}",
        f"ragged 5 tokens, 2 reqs  piecewise  ragged 8 tokens, 4 reqs  3 tokens, 2 reqs  {least}",
        (
            "ragged 9 tokens, 2 reqs  none                                                  no"
            " captured class covers it"
        ),
    ]
    assert repr(table) == str(table)
    assert [row.decision.mode for row in table.rows] == ["full", "piecewise", "none"]


def test_the_table_takes_any_ladder_and_mode() -> None:
    batch_descriptors = [B.uniform(3), B(5, 2)]
    for mode in MODES:
        ladder = make_ladder(mode, Limits(4, 8))
        table = dispatch_table(Limits(4, 8), batch_descriptors, mode=mode)
        assert table == dispatch_table(ladder, batch_descriptors)
        assert [row.decision for row in table.rows] == [
            dispatch(d, ladder) for d in batch_descriptors
        ]
    assert len(str(dispatch_table([], [])).splitlines()) == 1


def test_the_table_in_a_notebook() -> None:
    html = dispatch_table([Plain(5)], [Plain(3)])._repr_html_()
    assert html.count("<tr>") == 2
    assert ">1 size</td>" not in html
    assert ">2 size</td>" in html
    named = dispatch_table([Loop("<b>")], [Loop("<b>")])._repr_html_()
    assert "&lt;b&gt;" in named
    assert "<b>" not in named
