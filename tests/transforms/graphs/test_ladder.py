"""make_ladder: the classes that a mode captures under its limits."""

from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from refusal import refused

from weft.batches.descriptor import BatchDescriptor as B, Descriptor
from weft.errors import DescriptorError, LoweredModeWarning
from weft.ops.attention.capabilities import CAPABILITIES
from weft.proofs._strategies.images import Image, Resolution
from weft.transforms.graphs.dispatch import dispatch
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import (
    MODES,
    Ladder,
    Limits,
    lora_rungs,
    make_ladder,
    rungs,
    token_rungs,
)

FAST = settings(deadline=None, max_examples=60)
LIMITS = st.builds(
    Limits,
    st.integers(1, 40),
    st.integers(1, 90),
    st.lists(st.integers(1, 4), min_size=1, unique=True).map(tuple),
    st.integers(0, 9).map(lora_rungs),
)
GRAPHED = st.sampled_from([m for m in MODES if m != "none"])


UNIFORM = ("full_decode_only", "full", "full_and_piecewise")


@FAST
@given(GRAPHED, LIMITS)
def test_every_rung_is_within_the_limits_once_and_reachable(mode: str, limits: Limits) -> None:
    ladder = make_ladder(mode, limits)
    for way, classes in (("full", ladder.full), ("piecewise", ladder.piecewise)):
        assert len(set(classes)) == len(classes)
        for rung in classes:
            assert 1 <= rung.num_reqs <= limits.max_num_reqs
            assert rung.num_reqs <= rung.num_tokens <= limits.max_num_tokens
            assert rung.query_len in (None, *limits.query_lens)
            assert rung.num_active_loras in limits.active_loras
            assert (dispatch(rung, ladder).mode, dispatch(rung, ladder).descriptor) == (way, rung)


@FAST
@given(GRAPHED, LIMITS)
def test_what_each_mode_holds(mode: str, limits: Limits) -> None:
    ladder = make_ladder(mode, limits)
    assert any(d.is_uniform for d in ladder.full) == (
        mode in UNIFORM and min(limits.query_lens) <= limits.max_num_tokens
    )
    assert all(d.is_uniform or mode == "full" for d in ladder.full)
    assert bool(ladder.piecewise) == ("piecewise" in mode)
    whole = make_ladder("full_decode_only", limits).full
    assert [d for d in ladder.piecewise if d.is_uniform] == [
        d for d in whole if mode == "piecewise"
    ]


@FAST
@given(LIMITS)
def test_there_is_one_ragged_class_in_pieces_a_number_of_tokens(limits: Limits) -> None:
    classes = [d for d in make_ladder("piecewise", limits).piecewise if not d.is_uniform]
    by_loras = {(d.num_tokens, d.num_active_loras) for d in classes}
    assert len(by_loras) == len(classes)
    for tokens in range(1, limits.max_num_tokens + 1):
        for reqs in {1, min(tokens, limits.max_num_reqs)}:
            assert dispatch(B(tokens, reqs), Ladder(piecewise=classes)).mode == "piecewise"


@FAST
@given(LIMITS, st.integers(1, 90))
def test_cutting_one_ladder_never_cuts_the_other(limits: Limits, tokens: int) -> None:
    cut = attrs.evolve(limits, max_num_reqs=1)
    whole = make_ladder("full_and_piecewise", limits)
    fewer = make_ladder("full_and_piecewise", cut)
    assert {d.num_tokens for d in whole.piecewise} == {d.num_tokens for d in fewer.piecewise}


@FAST
@given(GRAPHED, LIMITS)
def test_largest_first(mode: str, limits: Limits) -> None:
    ladder = make_ladder(mode, limits)
    for classes in (ladder.full, ladder.piecewise):
        for i, larger in enumerate(classes):
            assert not any(smaller.covers(larger) for smaller in classes[i + 1 :])


@FAST
@given(st.sampled_from(UNIFORM), LIMITS)
def test_every_decode_batch_within_the_limits_is_a_whole_graph(mode: str, limits: Limits) -> None:
    ladder = make_ladder(mode, limits)
    for query_len in limits.query_lens:
        for n in range(1, min(limits.max_num_reqs, limits.max_num_tokens // query_len) + 1):
            decision = dispatch(B.uniform(n, query_len), ladder)
            assert decision.mode == "full"
            # In mode full a ragged class may take it with less padding.
            assert decision.descriptor.query_len == query_len or mode == "full"


def test_one_number_of_tokens_and_two_query_lengths_are_two_graphs() -> None:
    ladder = make_ladder("full_and_piecewise", Limits(8, 64, (2, 4)))
    assert dispatch(B.uniform(4, 2), ladder).descriptor == B.uniform(4, 2)
    assert dispatch(B.uniform(2, 4), ladder).descriptor == B.uniform(2, 4)


def test_numbers_of_loras_have_graphs_of_their_own() -> None:
    ladder = make_ladder("full_decode_only", Limits(2, 64, active_loras=lora_rungs(4)))
    assert {d.num_active_loras for d in ladder.full} == {0, 1, 2, 4}
    assert dispatch(B.uniform(2, 1, 3), ladder).descriptor == B.uniform(2, 1, 4)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("query_lens", [(1,), (1, 3)])
def test_a_mode_that_the_attention_cannot_is_an_error(
    capability: str, mode: str, query_lens: tuple[int, ...]
) -> None:
    able = {
        "none": ["none"],
        "piecewise": ["none", "piecewise"],
        "uniform_single_token": [
            *("none", "piecewise", "full_and_piecewise"),
            *(["full_decode_only"] * (query_lens == (1,))),
        ],
        "uniform": ["none", "piecewise", "full_decode_only", "full_and_piecewise"],
        "full": list(MODES),
    }[capability]
    limits = Limits(4, 16, query_lens)
    if mode in able:
        ladder = make_ladder(mode, limits, capability=capability)
        whole = make_ladder(mode, limits)
        assert {*ladder} == {*whole}
        longest = {"uniform_single_token": 1, "uniform": 3, "full": 3}.get(capability, 0)
        assert all(
            (d.query_len or 1) <= longest and (d.is_uniform or capability == "full")
            for d in ladder.full
        )
        assert all(d in ladder.full or (d.query_len or 0) > longest for d in whole.full)
        return
    with pytest.raises(DescriptorError, match=f"capability '{capability}'; this mode needs"):
        make_ladder(mode, limits, capability=capability)
    order = ["full", "full_and_piecewise", "piecewise", "none"]
    after = order[order.index(mode) + 1 :] if mode in order else order[2:]
    lower = next(one for one in after if one in able)
    with pytest.warns(
        LoweredModeWarning, match=f"'{mode}' is lowered to '{lower}': .* this mode needs"
    ):
        lowered = make_ladder(mode, limits, capability=capability, strict=False)
    assert lowered == make_ladder(lower, limits, capability=capability)


@FAST
@given(LIMITS)
def test_full_takes_every_mixed_batch_up_to_its_tokens(limits: Limits) -> None:
    ladder = make_ladder("full", limits)
    most = min(limits.max_num_reqs * max(limits.query_lens), limits.max_num_tokens)
    for tokens in range(1, most + 1):
        for reqs in {1, min(tokens, limits.max_num_reqs)}:
            assert dispatch(B(tokens, reqs), ladder).mode == "full"
    largest = max(d.num_tokens for d in ladder if not d.is_uniform)
    assert largest == next(rung for rung in token_rungs(limits.max_num_tokens) if rung >= most)
    assert dispatch(B(largest + 1, 1), ladder).mode == "none"


@given(LIMITS)
def test_all_modes_have_classes_of_pieces(limits: Limits) -> None:
    pieces = make_ladder("piecewise", limits).piecewise
    for mode in MODES:
        ladder = make_ladder(mode, limits)
        assert {*ladder} <= {*pieces}
        assert mode != "full_and_piecewise" or {*ladder} == {*pieces}


@given(st.integers(1, 700))
def test_rungs_are_increasing_end_at_the_limit_and_stay_close(limit: int) -> None:
    sizes = rungs(limit)
    assert sizes[-1] == limit
    assert list(sizes) == sorted(set(sizes))
    assert all(b - a <= max(8, a // 8) for a, b in pairwise(sizes))
    sizes = token_rungs(limit)
    assert sizes[-1] == limit
    assert list(sizes) == sorted(set(sizes))
    assert all(b - a <= (a if a < 128 else a // 4) for a, b in pairwise(sizes))


def test_rungs_by_hand() -> None:
    assert (rungs(0), rungs(1), rungs(3), rungs(9)) == ((), (1,), (1, 2, 3), (1, 2, 4, 8, 9))
    assert rungs(300)[-5:] == (224, 240, 256, 288, 300)
    assert (token_rungs(0), token_rungs(1), token_rungs(3), token_rungs(9)) == (
        (),
        (1,),
        (1, 2, 3),
        (1, 2, 4, 8, 9),
    )
    assert token_rungs(520)[-10:] == (128, 160, 192, 224, 256, 320, 384, 448, 512, 520)


def test_none_is_no_graph_and_pure() -> None:
    limits = Limits(8, 64)
    assert make_ladder("none", limits) == Ladder()
    assert make_ladder("full", limits) == make_ladder("full", Limits(8, 64, (1,)))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(DescriptorError) as error:
        make_ladder("fulll", Limits(1, 1))
    assert error.value.call.startswith(
        "make_ladder('fulll', Limits(max_num_reqs=1, max_num_tokens=1"
    )
    assert (error.value.problem, error.value.instead) == (
        "an unknown mode",
        f"one of {', '.join(MODES)}",
    )


def test_sizes_of_ones_own() -> None:
    ladder = make_ladder("full_decode_only", Limits(8, 64, (1, 2)), sizes=(8, 3))
    assert [str(d) for d in ladder] == [
        "uniform x2, 8 reqs",
        "uniform x1, 8 reqs",
        "uniform x2, 3 reqs",
        "uniform x1, 3 reqs",
    ]


def test_no_size_at_all_is_not_every_size() -> None:
    assert make_ladder("full", Limits(8, 64), sizes=()) == Ladder()


def test_a_size_twice_is_one_rung() -> None:
    assert make_ladder("full_decode_only", Limits(8, 64), sizes=(4, 4)) == Ladder(
        full=(B.uniform(4),)
    )


@pytest.mark.parametrize("sizes", [(0,), (-1,), (4, 0)])
def test_a_size_that_no_batch_can_have_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(DescriptorError, match=str(min(sizes))):
        make_ladder("full_decode_only", Limits(8, 16), sizes=sizes)


@pytest.mark.parametrize("sizes", [[100], (9, 10), 3, "8", [1.5], ["1"]])
def test_sizes_beyond_the_limits_or_no_sizes_are_refused(sizes: Any) -> None:
    with pytest.raises(DescriptorError, match=r"only sizes that no batch|not a list of ints"):
        make_ladder("full_decode_only", Limits(8, 64), sizes=sizes)
    assert make_ladder("none", Limits(8, 64), sizes=[100]) == Ladder()


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ((-4, 8), "max_num_reqs=-4"),
        ((0, 0), "max_num_reqs=0"),
        (("4", 8), "max_num_reqs='4'"),
        ((4, 0), "max_num_tokens=0"),
        ((4, 8.0), "max_num_tokens=8.0"),
        ((4, True), "max_num_tokens=True"),
    ],
)
def test_limits_that_no_batch_meets_are_refused(limits: tuple[Any, Any], problem: str) -> None:
    with pytest.raises(DescriptorError) as error:
        Limits(*limits)
    assert str(error.value) == (
        f"weft.Limits({limits[0]!r}, {limits[1]!r})\n  saw: {problem}\n"
        "  instead: whole numbers of requests and tokens, at least 1"
    )


@pytest.mark.parametrize("limits", [Limits(8, 8, ()), Limits(8, 8, (0,)), Limits(8, 8, (1, -1))])
def test_query_lengths_that_no_batch_can_have_are_refused(limits: Limits) -> None:
    with pytest.raises(DescriptorError):
        make_ladder("full", limits)


SIDES = st.lists(st.integers(0, 9), min_size=1, max_size=4)


@FAST
@given(SIDES, SIDES, st.integers(0, 10), st.integers(0, 10))
def test_a_product_has_each_combination_once_and_dispatch_takes_the_least_side(
    heights: list[int], widths: list[int], height: int, width: int
) -> None:
    ladder = Ladder.product(Resolution, height=heights, width=widths)
    assert sorted((d.height, d.width) for d in ladder) == sorted(
        {(h, w) for h in heights for w in widths}
    )
    assert not any(b.covers(a) for a, b in pairwise(ladder.full))
    decision = dispatch(Resolution(height, width), ladder)
    sides = [
        min((side for side in sizes if side >= size), default=None)
        for sizes, size in ((heights, height), (widths, width))
    ]
    if None in sides:
        assert (decision.mode, decision.descriptor) == ("none", Resolution(height, width))
    else:
        assert (decision.mode, (decision.descriptor.height, decision.descriptor.width)) == (
            "full",
            tuple(sides),
        )
        assert decision.padding == tuple(
            (name, side - size)
            for name, side, size in zip(("height", "width"), sides, (height, width), strict=True)
            if side is not None and side > size
        )


@attrs.frozen(kw_only=True)
class Volume(Descriptor):
    """A class whose arguments have names only, and a default."""

    depth: int
    height: int
    channels: int = 3


def test_a_product_of_one_size_of_a_range_and_of_defaults() -> None:
    ladder = Ladder.product(Volume, depth=range(1, 3), height=4)
    assert ladder.full == (Volume(depth=2, height=4), Volume(depth=1, height=4))
    assert dispatch(Volume(depth=1, height=3), ladder).padding == (("height", 1),)
    assert dispatch(Volume(depth=1, height=3, channels=4), ladder).mode == "none"


def test_a_graph_for_each_image_of_a_product() -> None:
    ladder = Ladder.product(Resolution, height=(4, 8), width=(4, 8))
    double = graphify(lambda image: attrs.evolve(image, pixels=2 * image.pixels), ladder=ladder)
    for height, width, captures in ((3, 4, 1), (3, 5, 2), (4, 4, 2), (8, 1, 3), (9, 1, 3)):
        image = Image(
            Resolution(height, width), torch.rand(height, width, 3), torch.ones(height, width) > 0
        )
        assert torch.equal(double(image).pixels, 2 * image.pixels)
        assert double.cache_info().captures == captures
    assert double.cache_info().eager == 1


@attrs.frozen
class Square(Descriptor):
    """A class that not every combination makes."""

    height: int
    width: int = attrs.field()

    @width.validator
    def _check(self, _: Any, width: int) -> None:
        if width != self.height:
            raise ValueError("not a square")


class Plain:
    """A class without an order."""


@pytest.mark.parametrize(
    ("kind", "sizes", "problem", "instead"),
    [
        (Resolution, {}, "no sizes", "the sizes of height, width"),
        (
            Resolution,
            {"height": (4,), "depth": 2},
            "Resolution has no depth",
            "the sizes of height, width",
        ),
        (Resolution, {"height": (), "width": 2}, "height=()", "one or more ints: height=(64, 128)"),
        (
            Resolution,
            {"height": (1.5,), "width": 2},
            "height=(1.5,)",
            "one or more ints: height=(64, 128)",
        ),
        (
            Resolution,
            {"height": "64", "width": 2},
            "height='64'",
            "one or more ints: height=(64, 128)",
        ),
        (Resolution, {"height": -1, "width": 2}, "height=-1", "one or more ints: height=(64, 128)"),
        (
            Plain,
            {"n": 1},
            "Plain, not a class of descriptors",
            "class Plain(weft.Descriptor), which has covers",
        ),
        (
            3,
            {"n": 1},
            "3, not a class of descriptors",
            "class Resolution(weft.Descriptor), which has covers",
        ),
    ],
)
def test_a_product_that_makes_no_descriptors(
    kind: Any, sizes: Any, problem: str, instead: str
) -> None:
    name = getattr(kind, "__name__", kind)
    written = ", ".join([str(name), *(f"{name}={size!r}" for name, size in sizes.items())])
    with refused(DescriptorError, f"Ladder.product({written})", problem, instead):
        Ladder.product(kind, **sizes)


@pytest.mark.parametrize(
    ("sizes", "call", "problem"),
    [
        (
            {"height": (2, 3), "width": 2},
            "Ladder.product(Square, height=3, width=2)",
            "ValueError: not a square",
        ),
        ({"height": (2, 3)}, "Ladder.product(Square, height=2)", "TypeError: <any>"),
    ],
)
def test_a_product_with_a_combination_that_the_class_refuses(
    sizes: Any, call: str, problem: str
) -> None:
    with refused(
        DescriptorError, call, problem, "sizes that all go together, or a list of the descriptors"
    ):
        Ladder.product(Square, **sizes)
