"""dispatch against its definition, by brute force: total, least, deterministic, each rung reachable."""

from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.descriptor import BatchDescriptor as B
from weft.proofs.strategies import descriptors
from weft.transforms.dispatch import Decision, dispatch

FAST = settings(deadline=None, max_examples=80)
LADDERS = st.lists(descriptors(), max_size=8)


@FAST
@given(descriptors(), LADDERS)
def test_total_and_least(own: B, ladder: list[B]) -> None:
    decision = dispatch(own, ladder)
    covering = [d for d in ladder if d.covers(own)]
    if not covering:
        assert (decision.mode, decision.descriptor) == ("none", own)
        assert decision.reason == f"no captured class covers '{own}'"
        return
    assert decision.mode == "full"
    assert decision.descriptor in covering
    assert not any(decision.descriptor.covers(d) and d != decision.descriptor for d in covering)


@FAST
@given(descriptors(), LADDERS)
def test_deterministic_and_blind_to_copies(own: B, ladder: list[B]) -> None:
    again = dispatch(attrs.evolve(own), tuple(attrs.evolve(d) for d in ladder))
    assert again == dispatch(own, ladder)
    assert dispatch(own, [d for d in ladder for _ in range(2)]) == again


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
def test_a_rung_that_does_not_cover_changes_nothing(own: B, ladder: list[B], other: B) -> None:
    if not other.covers(own):
        assert dispatch(own, [*ladder, other]) == dispatch(own, [other, *ladder]) == dispatch(own, ladder)


def test_of_incomparable_rungs_the_later() -> None:
    wide, tall = B(8, 2), B(4, 4)
    assert dispatch(B(2, 2), [wide, tall]).descriptor == tall
    assert dispatch(B(2, 2), [tall, wide]).descriptor == wide


def test_a_prefill_of_one_token_each_is_no_decode() -> None:
    decision = dispatch(B(2, 2), [B.uniform(4), B.uniform(2)])
    assert decision.mode == "none"
    assert decision.reason == "no captured class covers 'ragged 2 tokens, 2 reqs'"


def test_a_decode_prefers_its_own_class_to_a_ragged_one_of_its_size() -> None:
    for ladder in ([B.uniform(4), B(4, 4)], [B(4, 4), B.uniform(4)]):
        assert dispatch(B.uniform(3), ladder).descriptor == B.uniform(4)


@attrs.frozen
class Image:
    """A shape class that is no batch of requests."""

    height: int
    width: int

    def covers(self, other: "Image") -> bool:
        return self.height >= other.height and self.width >= other.width


@FAST
@given(st.data())
def test_any_descriptor_type(data: Any) -> None:
    images = st.builds(Image, st.integers(1, 4), st.integers(1, 4))
    own, ladder = data.draw(images), data.draw(st.lists(images, max_size=6))
    decision: Decision[Image] = dispatch(own, ladder)
    assert (decision.mode == "none") == (not any(d.covers(own) for d in ladder))
    assert not any(decision.descriptor.covers(d) and d != decision.descriptor and d.covers(own) for d in ladder)
