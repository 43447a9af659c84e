"""The rules on logits: each function against transformers' processor of the same kind, or against
its definition."""

import math
from collections import Counter
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from weft.batches.sampling import SamplingParams
from weft.batches.sampling_rows import write_rows
from weft.ops.sampling import logits as ops
from weft.ops.sampling.table import SamplingTable
from weft.proofs.strategies import sampling_params

transformers = pytest.importorskip("transformers")
theirs: Any = pytest.importorskip("transformers.generation.logits_process")

FAST = settings(deadline=None, max_examples=60)
VOCAB = 40
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)


@st.composite
def logit_rows(draw: st.DrawFn) -> Tensor:
    """A row of logits, some of them equal, some perhaps -inf."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    row = torch.randn(1, VOCAB, generator=generator) * draw(st.sampled_from((0.1, 3.0, 20.0)))
    if draw(st.booleans()):
        row = row.round()
    if draw(st.booleans()):
        row[0, draw(TOKENS)[: VOCAB // 2]] = -math.inf
        row[0, draw(st.integers(0, VOCAB - 1))] = 1.0
    return row


def one(value: float) -> Tensor:
    return torch.tensor([value])


@FAST
@given(st.lists(st.integers(0, 99), unique=True), st.integers(100, 130))
def test_bits_are_packed_and_unpacked(ids: list[int], vocab: int) -> None:
    mask = ops.pack_bits(ids, vocab)
    assert (mask.shape, mask.dtype) == ((-(-vocab // 32),), torch.int32)
    assert ops.unpack_bits(mask[None], vocab)[0].nonzero()[:, 0].tolist() == sorted(ids)
    for i in ids:
        assert (mask[i // 32].item() >> (i % 32)) & 1


@FAST
@given(logit_rows(), TOKENS, st.floats(0.125, 10, width=32))
def test_repetition_is_that_of_transformers(logits: Tensor, ids: list[int], penalty: float) -> None:
    present = torch.zeros(1, VOCAB, dtype=torch.bool)
    present[0, ids] = True
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits)
    assert torch.equal(ops.penalise_repetition(logits, present, one(penalty)), expected)


@FAST
@given(logit_rows(), TOKENS, st.floats(-2, 2, width=32))
def test_frequency_and_presence_are_openais_sums(
    logits: Tensor, ids: list[int], penalty: float
) -> None:
    """mu[j] - c[j] * alpha_frequency, and mu[j] - float(c[j] > 0) * alpha_presence
    (platform.openai.com)."""
    counts = Counter(ids)
    generated = torch.tensor([[float(counts[token]) for token in range(VOCAB)]])
    frequency = ops.penalise_frequency(logits, generated, one(penalty))
    presence = ops.penalise_presence(logits, generated, one(penalty))
    for token, value in enumerate(logits[0].double().tolist()):
        assert frequency[0, token].item() == pytest.approx(
            value - counts[token] * penalty, rel=1e-6, abs=1e-5
        )
        assert presence[0, token].item() == pytest.approx(
            value - (token in counts) * penalty, rel=1e-6, abs=1e-5
        )


@FAST
@given(
    logit_rows(),
    st.dictionaries(
        st.integers(0, VOCAB - 1), st.floats(-50, 50, width=32), min_size=1, max_size=4
    ),
)
def test_bias_is_that_of_transformers(logits: Tensor, bias: dict[int, float]) -> None:
    ids = torch.full((1, 6), -1)
    values = torch.full((1, 6), 7.0)
    ids[0, : len(bias)], values[0, : len(bias)] = (
        torch.tensor(list(bias)),
        torch.tensor(list(bias.values())),
    )
    sequences = [[[token], value] for token, value in bias.items()]
    expected = theirs.SequenceBiasLogitsProcessor(sequences)(torch.tensor([[0]]), logits)
    assert torch.equal(ops.add_bias(logits, ids, values), expected)


@FAST
@given(logit_rows(), st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB - 1))
def test_bad_tokens_are_those_of_transformers(logits: Tensor, bad: set[int]) -> None:
    allowed = ops.pack_bits(set(range(VOCAB)) - bad, VOCAB)
    expected = (
        theirs.SuppressTokensLogitsProcessor(sorted(bad))(torch.tensor([[0]]), logits)
        if bad
        else logits
    )
    assert torch.equal(ops.bar(logits, ~ops.unpack_bits(allowed[None], VOCAB)), expected)


@FAST
@given(logit_rows(), st.floats(2**-7, 10, width=32))
def test_temperature_is_that_of_transformers_up_to_a_constant(
    logits: Tensor, temperature: float
) -> None:
    expected = theirs.TemperatureLogitsWarper(temperature)(None, logits)
    scaled = ops.scale(logits, one(temperature))
    torch.testing.assert_close(
        scaled, expected - expected.max(), rtol=1e-5, atol=1e-5 / temperature
    )
    assert torch.equal(ops.scale(logits, one(0.0)), logits)


@FAST
@given(logit_rows(), st.integers(1, VOCAB + 9))
def test_top_k_is_that_of_transformers(logits: Tensor, k: int) -> None:
    assert torch.equal(
        ops.keep_top_k(logits, torch.tensor([k])), theirs.TopKLogitsWarper(k)(None, logits)
    )
    assert torch.equal(ops.keep_top_k(logits, torch.tensor([0])), logits)


def differs_at_the_edge(
    logits: Tensor, result: Tensor, expected: Tensor, edge: Tensor, bound: float
) -> None:
    """The same tokens are kept, except those with `edge` within `bound` of 0, and those that tie
    with a kept one."""
    kept = result > -math.inf
    expected_kept = expected > -math.inf
    ties = (logits[:, :, None] == logits[:, None, :]) & expected_kept[:, None, :]
    assert not ((kept != expected_kept) & (edge.abs() > bound) & ~ties.any(-1)).any()
    assert torch.equal(result[kept], logits[kept])


@FAST
@given(logit_rows(), st.floats(2**-13, 1 - 2**-13, width=32))
def test_top_p_is_that_of_transformers(logits: Tensor, p: float) -> None:
    """Equal except for ties with the last kept token, which weft keeps, and where float32 sums
    reach p exactly."""
    probabilities = logits.double().softmax(-1)
    above = torch.where(
        probabilities[:, None, :] > probabilities[:, :, None], probabilities[:, None, :], 0
    ).sum(-1)
    result = ops.keep_top_p(logits, one(p))
    expected = theirs.TopPLogitsWarper(p)(None, logits)
    differs_at_the_edge(logits, result, expected, above - p, 1e-6)
    assert (
        torch.equal(result > -math.inf, (above < p) & (logits > -math.inf))
        or (above - p).abs().min() < 1e-6
    )
    assert torch.equal(ops.keep_top_p(logits, one(1.0)), logits)


@FAST
@given(logit_rows(), st.one_of(st.floats(2**-13, 1, width=32), st.just(1.0)))
def test_min_p_is_that_of_transformers(logits: Tensor, p: float) -> None:
    ratio = (logits - logits.max()).double()
    result = ops.keep_min_p(logits, one(-math.log(p)))
    expected = theirs.MinPLogitsWarper(p)(None, logits)
    differs_at_the_edge(logits, result, expected, ratio - math.log(p), 1e-5)
    assert torch.equal(ops.keep_min_p(logits, one(math.inf)), logits)


def chain(params: SamplingParams, prompt: list[int], said: list[int], logits: Tensor) -> Tensor:
    """The same by transformers' processors in vLLM's order; rules that transformers lacks, by their
    definitions."""
    ids = torch.tensor([prompt + said])
    counts = Counter(said)
    if params.allowed_token_ids is not None:
        barred = sorted(set(range(VOCAB)) - set(params.allowed_token_ids))
        logits = theirs.SuppressTokensLogitsProcessor(barred)(ids, logits) if barred else logits
    if params.bad_token_ids:
        logits = theirs.SuppressTokensLogitsProcessor(list(params.bad_token_ids))(ids, logits)
    if params.min_tokens:
        stops = list(params.stop_token_ids)
        short = theirs.MinNewTokensLengthLogitsProcessor(
            len(prompt), params.min_tokens, stops, device="cpu"
        )
        logits = short(ids, logits)
    if params.logit_bias:
        logits = theirs.SequenceBiasLogitsProcessor(
            [[[t], v] for t, v in params.logit_bias.items()]
        )(ids, logits)
    logits = theirs.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(
        ids, logits.clone()
    )
    logits = logits - params.frequency_penalty * torch.tensor(
        [float(counts[t]) for t in range(VOCAB)]
    )
    logits = logits - params.presence_penalty * torch.tensor(
        [float(counts[t] > 0) for t in range(VOCAB)]
    )
    if not params.temperature:
        return logits
    logits = theirs.TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.min_p:
        logits = theirs.MinPLogitsWarper(params.min_p)(ids, logits)
    if params.top_k:
        logits = theirs.TopKLogitsWarper(params.top_k)(ids, logits)
    return theirs.TopPLogitsWarper(params.top_p)(ids, logits) if params.top_p < 1 else logits


@settings(deadline=None, max_examples=200)
@given(
    sampling_params(VOCAB),
    TOKENS,
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.integers(0, 999),
)
def test_process_is_the_chain_of_transformers(
    params: SamplingParams, prompt: list[int], said: list[int], seed: int
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    table = SamplingTable.zeros(2, VOCAB, 4, "cpu")
    write_rows(table, [0], [params], [prompt], [said])
    result = ops.process(
        logits, table.rules(torch.tensor([0])), torch.tensor([len(prompt + said) - 1])
    )
    expected = chain(params, prompt, said, logits)
    if not params.temperature:
        assert torch.equal(result, expected)
        return
    assert torch.equal(result > -math.inf, expected > -math.inf)
    torch.testing.assert_close(result.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


def test_what_a_request_does_not_use_is_not_read() -> None:
    """The result does not depend on old data in its row or in the scratch row."""
    table = SamplingTable.zeros(2, VOCAB, 3, "cpu")
    for field in attrs.fields(SamplingTable):
        getattr(table, field.name)[:] = 5
    write_rows(table, [0], [SamplingParams(temperature=0.0)], [[1, 2]], [[3]])
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        ops.process(logits, table.rules(torch.tensor([0])), torch.tensor([0])), logits
    )


def test_the_mask_of_a_grammar_comes_first() -> None:
    table = SamplingTable.zeros(2, VOCAB, 3, "cpu")
    write_rows(table, [0], [SamplingParams(temperature=0.0, logit_bias={3: 100.0})], [[1]], [[]])
    mask = ops.pack_bits([1, 39], VOCAB)[None]
    result = ops.process(
        torch.zeros(1, VOCAB), table.rules(torch.tensor([0])), torch.tensor([0]), mask
    )
    assert (result[0] > -math.inf).nonzero()[:, 0].tolist() == [1, 39]


def test_where_all_is_barred_nothing_is_nan() -> None:
    for t in (0.0, 1.0):
        assert torch.equal(
            ops.scale(torch.full((1, 4), -math.inf), one(t)), torch.full((1, 4), -math.inf)
        )
