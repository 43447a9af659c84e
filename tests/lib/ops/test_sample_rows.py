"""Sampling by a table: the operator against requests alone, the distribution, and counts."""

import math
from collections import Counter

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sample_cases import VOCAB, make_case, random_logits

from weft.batches.sampling import SamplingParams
from weft.batches.sampling_rows import write_rows
from weft.errors import RequestError
from weft.ops.sampling.logits import ALLOWED, FEATURES, process
from weft.ops.sampling.sample import count_tokens, sample, sample_rows
from weft.ops.sampling.table import SamplingTable
from weft.proofs import assert_equal
from weft.proofs.strategies import sampling_params
from weft.values.donation import clone
from weft.values.trees import tree_map

FAST = settings(deadline=None, max_examples=60)


PARAMS = st.lists(sampling_params(VOCAB), min_size=1, max_size=5)


@FAST
@given(PARAMS, st.integers(0, 99), st.booleans())
def test_a_request_draws_what_it_draws_alone(
    params: list[SamplingParams], seed: int, mask: bool
) -> None:
    """A request draws the same in any batch and at any place, from the logits that `process`
    returns, greedy or not."""
    case = make_case(params, random_logits(len(params), VOCAB, seed), seed, mask)
    ids, logprobs = case.drawn()
    order = list(range(len(params)))[::-1]
    assert_equal("order", case.of(order).drawn(), (ids[order], logprobs[order]))
    for i in order:
        assert_equal("alone", case.of([i]).drawn(), (ids[i : i + 1], logprobs[i : i + 1]))
        alone = case.of([i])
        processed = process(
            alone.logits, case.table.rules(alone.rows), alone.positions, alone.token_mask
        )
        if not params[i].temperature:
            assert ids[i] == processed.argmax()
        assert processed[0, ids[i]] > -math.inf
    torch.testing.assert_close(logprobs, case.logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])


@FAST
@given(st.lists(st.sampled_from((0.0, 0.5, 1.0, 2.0)), min_size=1, max_size=4), st.integers(0, 99))
def test_requests_that_use_nothing_draw_as_sample_does(
    temperatures: list[float], seed: int
) -> None:
    params = [SamplingParams(temperature=t, seed=seed + i) for i, t in enumerate(temperatures)]
    case = make_case(params, random_logits(len(params), VOCAB, seed))
    plain = sample(
        case.logits, torch.tensor(temperatures), torch.arange(len(params)) + seed, case.positions
    )
    assert_equal("plain", case.drawn(), plain)


def test_padding_is_not_processed() -> None:
    params = [
        SamplingParams(temperature=0.0, bad_token_ids=[1]),
        SamplingParams(temperature=0.0, bad_token_ids=[1]),
    ]
    case = make_case(params, torch.tensor([[0.0, 1.0, 0.5]] * 2), padding=1)
    case.table.ints[-1, FEATURES] = ALLOWED
    case.table.allowed[-1] = 0
    assert case.drawn()[0].tolist() == [2, 1]


def test_a_table_or_a_mask_of_another_vocabulary_is_refused() -> None:
    case = make_case([SamplingParams(temperature=1.0, seed=1)], random_logits(1, VOCAB))
    with pytest.raises(
        RequestError, match=r"a table of vocab_size=40\n  instead: State.zeros\(..., vocab_size=41"
    ):
        attrs.evolve(case, logits=random_logits(1, VOCAB + 1)).drawn()
    with pytest.raises(
        RequestError, match=r"saw: a mask of shape \(1, 1\)\n  instead: one of \(1, 2\), int32"
    ):
        attrs.evolve(case, token_mask=torch.zeros(1, 1, dtype=torch.int32)).drawn()


# Distribution
# ---------------------------------------------------------------------------------------------------------

DRAWS = 20000
ASKED = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {0: 1.5, 3: -2.0}, "bad_token_ids": [1]},
    "all": {
        "temperature": 1.3,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "logit_bias": {2: 1},
        "bad_token_ids": [0],
    },
}


@pytest.mark.parametrize("name", ASKED)
def test_tokens_are_distributed_as_what_process_makes(name: str) -> None:
    """Pearson's chi-square over many seeds; the statistic's own deviation is sqrt(2 k)."""
    logits = random_logits(1, 12, seed=3, width=1.0)
    table = SamplingTable.zeros(2, 12, 5, "cpu")
    write_rows(
        table,
        [0],
        [SamplingParams(**{"temperature": 1.0, "seed": 0} | ASKED[name])],
        [[4, 5, 4]],
        [[6, 6, 7]],
    )
    expected = process(logits, table.rules(torch.tensor([0])), torch.tensor([5]))[0].softmax(-1)
    many = tree_map(lambda x: x[:1].expand(DRAWS, *x.shape[1:]).contiguous(), table)
    many.ints[:, 0] = torch.arange(DRAWS) * 7919
    ids, _ = sample_rows(
        logits.expand(DRAWS, -1), many, torch.arange(DRAWS), torch.full((DRAWS,), 5)
    )
    counts = torch.bincount(ids, minlength=12)
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = (
        ((counts - DRAWS * expected)[possible] ** 2 / (DRAWS * expected[possible])).sum().item()
    )
    freedom = int(possible.sum()) - 1
    assert freedom >= 2
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), (counts, DRAWS * expected)


# Counts
# ---------------------------------------------------------------------------------------------------------------


@FAST
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=4, max_size=4), max_size=8
    )
)
def test_counts_are_those_of_what_was_generated(steps: list[list[tuple[int, bool]]]) -> None:
    """Tokens are counted for rows with penalties; a table that the host writes anew from all tokens
    is the same."""
    params = [SamplingParams(temperature=0.0, presence_penalty=p) for p in (1.0, 0.0, -1.0, 2.0)]
    prompts = [[0, 1], [2], [3], [5, 5]]
    table = SamplingTable.zeros(5, 6, 2, "cpu")
    rows = torch.tensor([3, 1, 0, -1])
    write_rows(table, range(4), params, prompts, [[]] * 4)
    said: list[list[int]] = [[] for _ in range(4)]
    for step in steps:
        count_tokens(
            table,
            rows,
            torch.tensor([t for t, _ in step]),
            torch.tensor([kept for _, kept in step]),
        )
        for row, (token, kept) in zip(rows.tolist(), step, strict=True):
            if kept and row >= 0:
                said[row].append(token)
    fresh = SamplingTable.zeros(5, 6, 2, "cpu")
    write_rows(fresh, range(4), params, prompts, said)
    assert_equal("counts", table, fresh)
    for row in (0, 2, 3):
        counts = Counter(said[row])
        assert (table.counts[row] & 32767).tolist() == [counts[token] for token in range(6)]
        assert (table.counts[row] < 0).nonzero()[:, 0].tolist() == sorted(set(prompts[row]))


def test_counts_end_at_the_most() -> None:
    table = SamplingTable.zeros(2, 3, 1, "cpu")
    write_rows(
        table,
        [0],
        [SamplingParams(temperature=0.0, presence_penalty=1.0)],
        [[2]],
        [[1] * 40000 + [2] * 32766],
    )
    assert table.counts[0].tolist() == [0, 32767, -2]
    for _ in range(3):
        for token in (1, 2):
            count_tokens(table, torch.tensor([0]), torch.tensor([token]), torch.tensor([True]))
    assert table.counts[0].tolist() == [0, 32767, -1]


def test_a_stage_that_does_not_sample_counts_nothing() -> None:
    table = SamplingTable.zeros(2, 0, 3, "cpu")
    before = clone(table)
    count_tokens(table, torch.tensor([0]), torch.tensor([1000]), torch.tensor([True]))
    assert_equal("nothing is counted", table, before)
