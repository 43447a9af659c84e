"""make_ladder: what a mode may capture under its limits."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.descriptor import BatchDescriptor as B
from weft.errors import DescriptorError
from weft.transforms.dispatch import dispatch
from weft.transforms.ladder import MODES, Limits, make_ladder, rungs

FAST = settings(deadline=None, max_examples=60)
LIMITS = st.builds(
    Limits, st.integers(1, 40), st.integers(1, 90), st.lists(st.integers(1, 4), min_size=1, unique=True).map(tuple)
)
GRAPHED = st.sampled_from([m for m in MODES if m != "none"])


@FAST
@given(GRAPHED, LIMITS)
def test_every_rung_is_within_the_limits_once_and_reachable(mode: str, limits: Limits) -> None:
    ladder = make_ladder(mode, limits)
    assert len(set(ladder)) == len(ladder)
    for rung in ladder:
        assert 1 <= rung.num_reqs <= limits.max_num_reqs
        assert rung.num_reqs <= rung.num_tokens <= limits.max_num_tokens
        assert rung.query_len in (None, *limits.query_lens)
        assert dispatch(rung, ladder).descriptor == rung
        assert mode == "full" or rung.is_uniform


@FAST
@given(GRAPHED, LIMITS)
def test_largest_first(mode: str, limits: Limits) -> None:
    ladder = make_ladder(mode, limits)
    for i, larger in enumerate(ladder):
        assert not any(smaller.covers(larger) for smaller in ladder[i + 1 :])


@FAST
@given(GRAPHED, LIMITS)
def test_every_decode_batch_within_the_limits_has_a_rung_of_its_class(mode: str, limits: Limits) -> None:
    ladder = make_ladder(mode, limits)
    for query_len in limits.query_lens:
        fits = [n for n in range(1, limits.max_num_reqs + 1) if n * query_len <= limits.max_num_tokens]
        covered = [n for n in fits if dispatch(B.uniform(n, query_len), ladder).mode == "full"]
        # What the limits on tokens cut off between two rungs may run eagerly, but not beneath the largest rung.
        largest = max((d.num_reqs for d in ladder if d.query_len == query_len), default=0)
        assert covered[: sum(n <= largest for n in fits)] == [n for n in fits if n <= largest]


@FAST
@given(LIMITS)
def test_full_takes_every_mixed_batch_up_to_its_tokens(limits: Limits) -> None:
    ladder = make_ladder("full", limits)
    most = min(limits.max_num_reqs * max(limits.query_lens), limits.max_num_tokens)
    for tokens in range(1, most + 1):
        for reqs in {1, min(tokens, limits.max_num_reqs)}:
            assert dispatch(B(tokens, reqs), ladder).mode == "full"
        assert dispatch(B(most + tokens, 1), ladder).mode == "none"


@given(st.integers(1, 700))
def test_rungs_are_increasing_end_at_the_limit_and_stay_close(limit: int) -> None:
    sizes = rungs(limit)
    assert sizes[-1] == limit
    assert list(sizes) == sorted(set(sizes))
    assert all(b - a <= max(8, a) and b - a <= 16 for a, b in pairwise(sizes))


def test_rungs_by_hand() -> None:
    assert (rungs(0), rungs(1), rungs(3), rungs(9)) == ((), (1,), (1, 2, 3), (1, 2, 4, 8, 9))
    assert rungs(300)[-5:] == (248, 256, 272, 288, 300)


def test_none_is_no_graph_and_pure() -> None:
    limits = Limits(8, 64)
    assert make_ladder("none", limits) == ()
    assert make_ladder("full", limits) == make_ladder("full", Limits(8, 64, (1,)))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(DescriptorError) as error:
        make_ladder("fulll", Limits(1, 1))
    assert str(error.value) == (
        "make_ladder('fulll', ...)\n  saw: an unknown mode\n  instead: one of none, full_decode_only, full"
    )


def test_sizes_of_ones_own() -> None:
    ladder = make_ladder("full_decode_only", Limits(8, 64, (1, 2)), sizes=(8, 3))
    assert [str(d) for d in ladder] == ["uniform x2, 8 reqs", "uniform x1, 8 reqs", "uniform x2, 3 reqs",
                                        "uniform x1, 3 reqs"]  # fmt: skip


def test_no_size_at_all_is_not_every_size() -> None:
    assert make_ladder("full", Limits(8, 64), sizes=()) == ()


def test_a_size_twice_is_one_rung() -> None:
    assert make_ladder("full_decode_only", Limits(8, 64), sizes=(4, 4)) == (B.uniform(4),)


@pytest.mark.parametrize("sizes", [(0,), (-1,), (4, 0)])
def test_a_size_that_no_batch_can_have_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(DescriptorError, match=str(min(sizes))):
        make_ladder("full_decode_only", Limits(8, 16), sizes=sizes)


@pytest.mark.parametrize("limits", [Limits(8, 8, ()), Limits(8, 8, (0,)), Limits(8, 8, (1, -1))])
def test_query_lengths_that_no_batch_can_have_are_refused(limits: Limits) -> None:
    with pytest.raises(DescriptorError):
        make_ladder("full", limits)
