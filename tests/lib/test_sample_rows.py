"""Sampling by a table: the operator against requests alone, its distribution, its kernels, and the count of tokens."""

import math
import os
import subprocess
import sys
from collections import Counter
from importlib import import_module
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.donation import clone
from weft.errors import DeviceError, RequestError
from weft.ops.logits import (
    ALLOWED,
    FEATURES,
    MARGIN,
    STOPS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    adjust,
    keep_min_p,
    keep_top_k,
    process,
)
from weft.ops.sample import sample
from weft.ops.sample_rows import count_tokens, sample_rows
from weft.ops.table import backends
from weft.proofs.laws import assert_equal
from weft.proofs.strategies import sampling_params
from weft.sampling import SamplingParams
from weft.sampling_table import SamplingTable, write_rows
from weft.transforms.graphify import graphify
from weft.trees import tree_leaves, tree_map

FAST = settings(deadline=None, max_examples=60)
VOCAB = 40


@attrs.frozen(eq=False)
class Case:
    """What `sample_rows` takes."""

    logits: Tensor
    table: SamplingTable
    rows: Tensor
    positions: Tensor
    token_mask: Tensor | None = None

    def drawn(self) -> tuple[Tensor, Tensor]:
        return sample_rows(self.logits, self.table, self.rows, self.positions, self.token_mask)

    def of(self, index: list[int]) -> "Case":
        """Some of its requests, in an order."""
        mask = None if self.token_mask is None else self.token_mask[index]
        return Case(self.logits[index], self.table, self.rows[index], self.positions[index], mask)

    def to(self, device: str) -> "Case":
        move = lambda x: None if x is None else x.to(device)  # noqa: E731
        table = tree_map(move, self.table)
        return Case(move(self.logits), table, move(self.rows), move(self.positions), move(self.token_mask))


def make_case(
    params: list[SamplingParams], logits: Tensor, seed: int = 0, mask: bool = False, padding: int = 0
) -> Case:
    """Requests of these parameters in a table full of old data, in an order that is not its own."""
    generator = torch.Generator().manual_seed(seed)
    count, vocab = logits.shape
    table = SamplingTable.zeros(count + 3, vocab, 5, "cpu")
    table.counts.random_(-100, 100, generator=generator)
    for old in (table.allowed, table.stops):
        old.random_(-(2**31), 2**31 - 1, generator=generator)
    prompts = torch.randint(0, vocab, (count, 9), generator=generator).tolist()
    said = [ids[: n % 7] for n, ids in enumerate(torch.randint(0, vocab, (count, 9), generator=generator).tolist())]
    rows = torch.randperm(count + 2, generator=generator)[:count]
    write_rows(table, rows.tolist(), params, prompts, said)
    positions = torch.tensor([8 + len(own) for own in said])
    rows[count - padding :] = -1
    bits = torch.randint(-(2**31), 2**31 - 1, (count, -(-vocab // 32)), generator=generator)
    return Case(logits, table, rows, positions, bits.to(torch.int32) if mask else None)


def random_logits(rows: int, vocab: int, seed: int = 0, width: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * width


PARAMS = st.lists(sampling_params(VOCAB), min_size=1, max_size=5)


@FAST
@given(PARAMS, st.integers(0, 99), st.booleans())
def test_a_request_draws_what_it_draws_alone(params: list[SamplingParams], seed: int, mask: bool) -> None:
    """Whatever its company and its place; and from what `process` makes of its logits, greedy or not."""
    case = make_case(params, random_logits(len(params), VOCAB, seed), seed, mask)
    ids, logprobs = case.drawn()
    order = list(range(len(params)))[::-1]
    assert_equal("order", case.of(order).drawn(), (ids[order], logprobs[order]))
    for i in order:
        assert_equal("alone", case.of([i]).drawn(), (ids[i : i + 1], logprobs[i : i + 1]))
        alone = case.of([i])
        processed = process(alone.logits, case.table.rules(alone.rows), alone.positions, alone.token_mask)
        if not params[i].temperature:
            assert ids[i] == processed.argmax()
        assert processed[0, ids[i]] > -math.inf
    torch.testing.assert_close(logprobs, case.logits.log_softmax(-1).gather(1, ids[:, None])[:, 0])


@FAST
@given(st.lists(st.sampled_from((0.0, 0.5, 1.0, 2.0)), min_size=1, max_size=4), st.integers(0, 99))
def test_requests_that_use_nothing_draw_as_sample_does(temperatures: list[float], seed: int) -> None:
    params = [SamplingParams(temperature=t, seed=seed + i) for i, t in enumerate(temperatures)]
    case = make_case(params, random_logits(len(params), VOCAB, seed))
    plain = sample(case.logits, torch.tensor(temperatures), torch.arange(len(params)) + seed, case.positions)
    assert_equal("plain", case.drawn(), plain)


def test_padding_is_not_processed() -> None:
    params = [SamplingParams(temperature=0.0, bad_token_ids=[1]), SamplingParams(temperature=0.0, bad_token_ids=[1])]
    case = make_case(params, torch.tensor([[0.0, 1.0, 0.5]] * 2), padding=1)
    case.table.ints[-1, FEATURES] = ALLOWED
    case.table.allowed[-1] = 0
    assert case.drawn()[0].tolist() == [2, 1]


def test_a_table_or_a_mask_of_another_vocabulary_is_refused() -> None:
    case = make_case([SamplingParams(seed=1)], random_logits(1, VOCAB))
    with pytest.raises(RequestError, match=r"a table of vocab_size=40\n  instead: State.zeros\(..., vocab_size=41"):
        attrs.evolve(case, logits=random_logits(1, VOCAB + 1)).drawn()
    with pytest.raises(RequestError, match=r"saw: a mask of shape \(1, 1\)\n  instead: one of \(1, 2\), int32"):
        attrs.evolve(case, token_mask=torch.zeros(1, 1, dtype=torch.int32)).drawn()


# Distribution ---------------------------------------------------------------------------------------------------------

DRAWS = 20000
ASKED = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {0: 1.5, 3: -2.0}, "bad_token_ids": [1]},
    "all": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "logit_bias": {2: 1}, "bad_token_ids": [0]},
}


@pytest.mark.parametrize("name", ASKED)
def test_tokens_are_distributed_as_what_process_makes(name: str) -> None:
    """Pearson's chi-square over many seeds; the statistic's own deviation is sqrt(2 k)."""
    logits = random_logits(1, 12, seed=3, width=1.0)
    table = SamplingTable.zeros(2, 12, 5, "cpu")
    write_rows(table, [0], [SamplingParams(**ASKED[name], seed=0)], [[4, 5, 4]], [[6, 6, 7]])
    expected = process(logits, table.rules(torch.tensor([0])), torch.tensor([5]))[0].softmax(-1)
    many = tree_map(lambda x: x[:1].expand(DRAWS, *x.shape[1:]).contiguous(), table)
    many.ints[:, 0] = torch.arange(DRAWS) * 7919
    ids, _ = sample_rows(logits.expand(DRAWS, -1), many, torch.arange(DRAWS), torch.full((DRAWS,), 5))
    counts = torch.bincount(ids, minlength=12)
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - DRAWS * expected)[possible] ** 2 / (DRAWS * expected[possible])).sum().item()
    freedom = int(possible.sum()) - 1
    assert freedom >= 2
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), (counts, DRAWS * expected)


# Counts ---------------------------------------------------------------------------------------------------------------


@FAST
@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=4, max_size=4), max_size=8))
def test_counts_are_those_of_what_was_generated(steps: list[list[tuple[int, bool]]]) -> None:
    """Of rows that have penalties; a table that the host writes anew from all tokens is the same."""
    params = [SamplingParams(temperature=0.0, presence_penalty=p) for p in (1.0, 0.0, -1.0, 2.0)]
    prompts = [[0, 1], [2], [3], [5, 5]]
    table, rows = SamplingTable.zeros(5, 6, 2, "cpu"), torch.tensor([3, 1, 0, -1])
    write_rows(table, range(4), params, prompts, [[]] * 4)
    said: list[list[int]] = [[] for _ in range(4)]
    for step in steps:
        count_tokens(table, rows, torch.tensor([t for t, _ in step]), torch.tensor([kept for _, kept in step]))
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
    write_rows(table, [0], [SamplingParams(temperature=0.0, presence_penalty=1.0)], [[2]], [[1] * 40000 + [2] * 32766])
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


# The operators and their kernels --------------------------------------------------------------------------------------

_INTERPRETED = """
import sys, torch
from weft.ops.sample_rows_triton import count, draw_rows, process_rows
from weft.sampling_table import SamplingTable
draws, counts = torch.load(sys.argv[1])
drawn, found = [], []
for logits, table, rows, at, mask in draws:
    drawn.append(draw_rows(logits, rows, at, SamplingTable(*table), mask))
    _, _, processed = process_rows(logits.contiguous(), rows, at, SamplingTable(*table), mask)
    found.append((processed.kinds, processed.adjusted, processed.peaks, processed.bounds))
for case in counts:
    count(*case)
torch.save((drawn, found, [case[0] for case in counts]), sys.argv[2])
"""

SEEDED = {"seed": 5, "stop_token_ids": (2, 3)}
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 3},
    {"top_p": 0.7, "temperature": 0.8},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.01, "temperature": 2.0},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": 1.1, "frequency_penalty": -0.7},
    {"temperature": 0.0, "logit_bias": {0: 5.0, 6: -3.25, 2: 1.5}},
    {"logit_bias": {1: 9.0}, "frequency_penalty": 0.9, "top_p": 0.5},
    {"allowed_token_ids": [0, 4, 5, 6]},
    {"bad_token_ids": [0, 1], "top_k": 2},
    {"min_tokens": 9},
    {"min_tokens": 1, "temperature": 0.0},
    {"top_k": 100000, "top_p": 0.999},
    {"top_p": 1e-9},
    {"top_p": 0.5, "temperature": 1e-6},
]


def _cases() -> list[Case]:
    params = [SamplingParams(**SEEDED | changes) for changes in MIXED]
    count = len(params)
    cases = [make_case(params, random_logits(count, vocab, vocab), vocab) for vocab in (7, 64, 2048, 2049, 5000)]
    cases.append(make_case(params, random_logits(count, 333), 1, mask=True, padding=2))
    cases.append(make_case(params, random_logits(count, 3000).half(), 2))
    cases.append(make_case(params, (random_logits(count, 3000) * 2).round(), 3))  # many ties
    barred = random_logits(count, 2100, 4)
    barred[:, 5:2090] = -math.inf
    cases.append(make_case(params, barred, 4))
    cases.append(make_case(params, torch.zeros(count, 2500), 5))
    cases.append(make_case(params, random_logits(3000, count).t(), 6))
    cases.append(make_case(params * 9, random_logits(count * 9, 50), 7))
    return cases


def _count_cases() -> list[tuple[Tensor, ...]]:
    """300 requests of 400 rows, and padding."""
    generator = torch.Generator().manual_seed(0)
    table = SamplingTable.zeros(400, 6, 1, "cpu")
    table.ints[:, FEATURES] = torch.randint(0, 4, (400,), generator=generator)
    table.counts[:] = torch.tensor([-32768, -1, 0, 1, 32766, 32767])
    rows = torch.randperm(399, generator=generator)[:300]
    rows[-20:] = -1
    tokens, kept = torch.randint(0, 6, (2, 300), generator=generator)
    return [(table.counts, table.ints, rows, tokens, kept > 2)]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any], list[Tensor]]:
    """What the interpreted kernels make of all cases."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("sample_rows")
    draws = [(c.logits, tree_leaves(c.table), c.rows, c.positions, c.token_mask) for c in _cases()]
    torch.save((draws, _count_cases()), folder / "in.pt")
    command = [sys.executable, "-c", _INTERPRETED, str(folder / "in.pt"), str(folder / "out.pt")]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    made: tuple[list[Any], list[Any], list[Tensor]] = torch.load(folder / "out.pt")
    return made


def assert_same_draws(case: Case, drawn: Any) -> None:
    """The reference's tokens, but where another score is within 1e-4 of the best, or where the edge of top_p or of a
    tie falls between two sums that differ by rounding: of 100 requests, at most one."""
    ids, logprobs = (x[case.rows >= 0] for x in case.drawn())
    seen_ids, seen = (x[case.rows >= 0] for x in drawn)
    same = seen_ids == ids
    assert int((~same).sum()) <= len(same) // 100, (same.nonzero(), ids, seen_ids)
    torch.testing.assert_close(seen[same], logprobs[same], atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("index", range(12))
def test_the_kernels_interpreted_draw_what_the_reference_draws(index: int, interpreted: Any) -> None:
    assert_same_draws(_cases()[index], interpreted[0][index])


def assert_same_processed(case: Case, found: Any) -> None:
    """What penalties, bias and masks make of the logits, to the bit; the largest; and the tokens that are kept, but for
    those at the edge: whose mass above is within 1e-5 of top_p."""
    kinds, adjusted, peaks, bounds = found
    rules = case.table.rules(case.rows)
    expected = process(case.logits, rules, case.positions, case.token_mask)
    before = adjust(case.logits.float(), rules, case.positions, case.token_mask)
    used = rules.ints[:, FEATURES]
    for i in (case.rows >= 0).nonzero()[:, 0].tolist():
        assert (kinds[i] == 0) <= (case.token_mask is None and not (used[i] & ~STOPS))
        if kinds[i] == 2:
            assert torch.equal(adjusted[i], before[i])
        if kinds[i] and rules.floats[i, TEMPERATURE]:
            assert peaks[i] == before[i].max()
            kept = peaks[i] - before[i] <= bounds[i]
            wrong = (kept != (expected[i] > -math.inf)) & (before[i] > -math.inf)
            assert not (wrong & (edge_of_top_p(before[i], rules, i) > 1e-5)).any(), (i, wrong.nonzero())


def edge_of_top_p(logits: Tensor, rules: Any, i: int) -> Tensor:
    """How far the mass of the likelier tokens is from top_p, of each token."""
    scaled = logits / rules.floats[i, TEMPERATURE]
    kept = keep_top_k(keep_min_p(scaled[None], rules.floats[i : i + 1, MARGIN]), rules.ints[i : i + 1, TOP_K])[0]
    ordered, order = kept.double().softmax(0).sort(descending=True)
    above = torch.empty_like(ordered)
    above[order] = ordered.cumsum(0) - ordered
    return (above - rules.floats[i, TOP_P]).abs()


@pytest.mark.parametrize("index", range(12))
def test_the_kernel_interpreted_processes_as_the_reference_does(index: int, interpreted: Any) -> None:
    assert_same_processed(_cases()[index], interpreted[1][index])


def test_the_kernel_interpreted_counts_what_the_reference_counts(interpreted: Any) -> None:
    for case, seen in zip(_count_cases(), interpreted[2], strict=True):
        torch.ops.weft.count_tokens(*case)
        assert torch.equal(seen, case[0])


_COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weft.ops import sample_rows_triton as ours, sample_triton as drawn
TYPES = {"i16": ["counts"], "i1": ["kept"],
         "fp32": ["floats", "bias", "adjusted", "temperatures", "temperature", "peaks", "bounds", "best", "chosen",
                  "maxima", "sums", "logprobs"],
         "i32": ["allowed", "stops", "bias_ids", "token_mask", "kinds", "indices"],
         "i64": ["rows", "positions", "ints", "seeds", "token_ids"]}
POINTERS = {name: "*" + kind for kind, names in TYPES.items() for name in names}
def build(fn, logits="*bf16", **constants):
    known = POINTERS | {"logits": logits} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn, {name: known.get(name, "i32") for name in fn.arg_names}, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}).asm["ptx"]
for mask in (False, True):
    build(ours._process_kernel, HAS_MASK=mask, COLUMNS=2048, BIASED=512)
build(ours._count_kernel, BLOCK=256)
for processed in (False, True):
    build(drawn._part_kernel, "*fp32", SPLITS=4, BLOCK=2048, PROCESSED=processed)
    build(drawn._combine_kernel, SPLITS=4, PROCESSED=processed)
"""


def test_the_kernels_compile_where_there_is_no_gpu() -> None:
    """The interpreter takes what the compiler does not: a variable that changes its type in a loop."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _COMPILED], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def _flat(case: Case) -> tuple[Tensor | None, ...]:
    return case.logits, case.rows, case.positions, *tree_leaves(case.table), case.token_mask


def test_they_are_operators() -> None:
    for case in (_cases()[0], _cases()[5]):
        torch.library.opcheck(torch.ops.weft.sample_rows.default, _flat(case))
    torch.library.opcheck(torch.ops.weft.count_tokens.default, _count_cases()[0])


def test_captured_they_follow_the_table() -> None:
    """One graph, whatever the requests ask: parameters are no part of its key."""

    def step(logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor) -> tuple[SamplingTable, Tensor]:
        ids, _ = sample_rows(logits, table, rows, positions)
        count_tokens(table, rows, ids, torch.ones_like(rows, dtype=torch.bool))
        return table, ids

    g = graphify(step, donate_argnames=("table",))
    logits = random_logits(2, VOCAB)
    table, other = SamplingTable.zeros(3, VOCAB, 4, "cpu"), SamplingTable.zeros(3, VOCAB, 4, "cpu")
    for changes in MIXED:
        params = [SamplingParams(**SEEDED | changes)] * 2
        for each in (table, other):
            write_rows(each, [0, 1], params, [[1, 2], [3]], [[], [4]])
        for position in (2, 3):
            where = torch.tensor([0, 1]), torch.full((2,), position)
            table, ids = step(logits, table, *where)
            other, seen = g(logits, other, *where)
            assert_equal("captured", (other, seen), (table, ids))
    assert g.cache_info().captures == 1


@pytest.mark.parametrize("name", ["_sample_on_cuda", "_count_on_cuda"])
def test_the_cuda_kernels_raise_without_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("weft.ops.sample_rows")
    monkeypatch.setattr(module, "triton_version", lambda: None)
    arguments = _flat(_cases()[0]) if name == "_sample_on_cuda" else _count_cases()[0]
    with pytest.raises(DeviceError, match=r"weft\[cuda\]"):
        getattr(module, name)(*arguments)


def test_the_table_of_operators_has_them() -> None:
    for device, implementation in (("cpu", "reference"), ("cuda", ("triton ", "missing"))):
        found = {row.op: row.implementation for row in backends(device)}
        assert found["sample_rows"].startswith(implementation)
        assert found["count_tokens"].startswith(implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(12))
def test_the_kernels_draw_what_the_reference_draws(index: int) -> None:
    case = _cases()[index]
    assert_same_draws(case, [x.cpu() for x in case.to("cuda").drawn()])


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(12))
def test_the_kernels_process_as_the_reference_does(index: int) -> None:
    from weft.ops.sample_rows_triton import process_rows

    case = _cases()[index]
    there = case.to("cuda")
    *_, found = process_rows(there.logits.contiguous(), there.rows, there.positions, there.table, there.token_mask)
    assert_same_processed(case, [x.cpu() for x in (found.kinds, found.adjusted, found.peaks, found.bounds)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_serve_a_large_vocabulary(dtype: torch.dtype) -> None:
    params = [SamplingParams(**SEEDED | MIXED[i % len(MIXED)]) for i in range(64)]
    case = make_case(params, random_logits(64, 151936).to(dtype))
    there = case.to("cuda")
    assert_same_draws(case, [x.cpu() for x in there.drawn()])
    alone = [there.of([i]).drawn()[0] for i in range(64)]
    assert torch.equal(torch.cat(alone), there.drawn()[0])


@pytest.mark.gpu
def test_the_kernel_counts_what_the_reference_counts() -> None:
    for case in _count_cases():
        seen = [x.cuda() for x in case]
        torch.ops.weft.count_tokens(*seen)
        torch.ops.weft.count_tokens(*case)
        assert torch.equal(seen[0].cpu(), case[0])
