"""The kernels that sample by a table, interpreted on the CPU, compiled, captured and on a GPU."""

import math
from typing import Any

import pytest
import torch
from interpreting import interpret
from sample_cases import VOCAB, Case, make_case, random_logits
from torch import Tensor, library

from weft.batches.sampling import SamplingParams
from weft.batches.sampling_rows import write_rows
from weft.ops.backends import backends
from weft.ops.sampling.logits import (
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
from weft.ops.sampling.sample import count_tokens, sample_rows
from weft.ops.sampling.table import SamplingTable
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.values.trees import tree_leaves

# The operators and their kernels
# --------------------------------------------------------------------------------------

_INTERPRETED = """
import sys, torch
from weft.ops.sampling.sample_rows_triton import count, draw_rows, process_rows
from weft.batches.sampling_rows import SamplingTable
draws, counts = torch.load(sys.argv[1])
drawn, found = [], []
for logits, table, rows, at, mask in draws:
    drawn.append(draw_rows(logits, rows, at, *table, mask))
    _, _, processed = process_rows(logits.contiguous(), rows, at, SamplingTable(*table), mask)
    found.append((processed.kinds, processed.adjusted, processed.peaks, processed.bounds))
for case in counts:
    count(*case)
torch.save((drawn, found, [case[0] for case in counts]), sys.argv[2])
"""

SEEDED = {"temperature": 1.0, "seed": 5, "stop_token_ids": (2, 3)}
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
    cases = [
        make_case(params, random_logits(count, vocab, vocab), vocab)
        for vocab in (7, 64, 2048, 2049, 5000)
    ]
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


def _barred() -> Case:
    """A mask that allows no token to every other request."""
    params = [
        SamplingParams(**SEEDED | changes)
        for changes in MIXED
        if "allowed_token_ids" not in changes
    ]
    case = make_case(
        [each for each in params for _ in range(2)],
        random_logits(2 * len(params), 2100, 8),
        8,
        mask=True,
    )
    assert case.token_mask is not None
    case.token_mask[::2] = 0
    return case


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
def interpreted(
    tmp_path_factory: pytest.TempPathFactory, runs_all: bool
) -> tuple[list[Any], list[Any], list[Tensor]]:
    """The results of the interpreted kernels for all cases; in a short run, for the first."""
    special = _barred(), _without_numbers(math.nan), _without_numbers(-math.inf)
    cases = (*_cases(), *special) if runs_all else _cases()[:1]
    draws = [(c.logits, tree_leaves(c.table), c.rows, c.positions, c.token_mask) for c in cases]
    inputs = (draws, _count_cases())
    results: tuple[list[Any], list[Any], list[Tensor]] = interpret(
        _INTERPRETED, inputs, tmp_path_factory.mktemp("rows")
    )
    return results


def assert_same_draws(case: Case, drawn: Any) -> None:
    """The tokens equal the reference's, except where another score is within 1e-4 of the best, or
    where the edge of top_p or of a tie falls between two sums that differ by rounding: at most one
    request in 100."""
    ids, logprobs = (x[case.rows >= 0] for x in case.drawn())
    drawn_ids, drawn_logprobs = (x[case.rows >= 0] for x in drawn)
    same = drawn_ids == ids
    assert int((~same).sum()) <= len(same) // 100, (same.nonzero(), ids, drawn_ids)
    torch.testing.assert_close(drawn_logprobs[same], logprobs[same], atol=5e-5, rtol=5e-5)


@pytest.mark.one_of(12)
@pytest.mark.parametrize("index", range(12))
def test_the_kernels_interpreted_draw_what_the_reference_draws(
    index: int, interpreted: Any
) -> None:
    assert_same_draws(_cases()[index], interpreted[0][index])


def assert_only_what_is_allowed(case: Case, drawn: Any) -> None:
    """The id is always valid, and the logprob is -inf exactly if no token is left."""
    ids, logprobs = drawn
    processed = process(case.logits, case.table.rules(case.rows), case.positions, case.token_mask)
    is_left = (processed > -math.inf).any(1)
    assert torch.equal(logprobs == -math.inf, ~is_left)
    assert is_left.sum() == (~is_left).sum() > 10
    assert not logprobs.isnan().any()
    assert bool(((ids >= 0) & (ids < case.logits.shape[1])).all())
    assert (processed.gather(1, ids[:, None])[:, 0] > -math.inf).equal(is_left)


def test_where_no_token_is_left_there_is_no_logprob() -> None:
    case = _barred()
    assert_only_what_is_allowed(case, case.drawn())


@pytest.mark.slow
def test_where_no_token_is_left_the_kernels_interpreted_give_no_logprob(interpreted: Any) -> None:
    assert_only_what_is_allowed(_barred(), interpreted[0][-3])


def _without_numbers(value: float) -> Case:
    """The logits are all -inf, or the one of a token that is barred is NaN."""
    params = [
        SamplingParams(temperature=t, seed=1, bad_token_ids=bad)
        for t in (0.0, 1.0)
        for bad in ([], [0])
    ]
    case = make_case(params, random_logits(4, 9))
    case.logits[:, : 9 if value < 0 else 1] = value
    return case


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_are_no_numbers_have_that_logprob(value: float) -> None:
    """This holds even if the logit is barred; a request ends at such a step, and says which it was."""
    assert str(_without_numbers(value).drawn()[1].tolist()) == str([value] * 4)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "value"), [(-2, math.nan), (-1, -math.inf)])
def test_logits_that_are_no_numbers_have_that_logprob_by_the_kernels_interpreted(
    place: int, value: float, interpreted: Any
) -> None:
    assert str(interpreted[0][place][1].tolist()) == str([value] * 4)


def assert_same_processed(case: Case, processed: Any) -> None:
    """The adjusted logits and the largest one equal the reference bitwise. So do the kept tokens,
    except at the edge, where the mass above a token is within 1e-5 of top_p."""
    kinds, adjusted, peaks, bounds = processed
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
            assert not (wrong & (edge_of_top_p(before[i], rules, i) > 1e-5)).any(), (
                i,
                wrong.nonzero(),
            )


def edge_of_top_p(logits: Tensor, rules: Any, i: int) -> Tensor:
    """For each token, the distance between the mass of the likelier tokens and top_p."""
    scaled = logits / rules.floats[i, TEMPERATURE]
    kept = keep_top_k(
        keep_min_p(scaled[None], rules.floats[i : i + 1, MARGIN]), rules.ints[i : i + 1, TOP_K]
    )[0]
    ordered, order = kept.double().softmax(0).sort(descending=True)
    above = torch.empty_like(ordered)
    above[order] = ordered.cumsum(0) - ordered
    return (above - rules.floats[i, TOP_P]).abs()


@pytest.mark.one_of(12)
@pytest.mark.parametrize("index", range(12))
def test_the_kernel_interpreted_processes_as_the_reference_does(
    index: int, interpreted: Any
) -> None:
    assert_same_processed(_cases()[index], interpreted[1][index])


def test_the_kernel_interpreted_counts_what_the_reference_counts(interpreted: Any) -> None:
    for case, counts in zip(_count_cases(), interpreted[2], strict=True):
        torch.ops.weft.count_tokens(*case)
        assert torch.equal(counts, case[0])


POINTERS = {
    "i16": ["counts"],
    "i1": ["kept"],
    "fp32": [
        "floats",
        "bias",
        "adjusted",
        "temperatures",
        "temperature",
        "peaks",
        "bounds",
        "best",
        "chosen",
        "maxima",
        "sums",
        "logprobs",
    ],
    "i32": ["allowed", "stops", "bias_ids", "token_mask", "kinds", "indices"],
    "i64": ["rows", "positions", "ints", "seeds", "token_ids"],
}


def compiles(fn: Any, logits: str = "bf16", **constants: Any) -> bool:
    """Whether Triton makes code of a kernel for an H100."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names}
    signature |= {"logits": f"*{logits}"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn, {name: signature.get(name, "i32") for name in fn.arg_names}, constants)
    return bool(
        compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}).asm["ptx"]
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernels_compile_where_there_is_no_gpu() -> None:
    """Compile the kernels too: the interpreter accepts a variable that changes its type in a loop."""
    pytest.importorskip("triton")
    from weft.ops.sampling import sample_rows_triton as ours, sample_triton as drawn

    for mask in (False, True):
        assert compiles(ours._process_kernel.jit, HAS_MASK=mask, COLUMNS=2048, BIASED=512)
    assert compiles(ours._count_kernel.jit, BLOCK=256)
    for processed in (False, True):
        assert compiles(drawn._part_kernel.jit, "fp32", SPLITS=4, BLOCK=2048, PROCESSED=processed)
        assert compiles(drawn._combine_kernel.jit, SPLITS=4, PROCESSED=processed)


def _flat(case: Case) -> tuple[Tensor | None, ...]:
    return case.logits, case.rows, case.positions, *tree_leaves(case.table), case.token_mask


def test_they_are_operators() -> None:
    for case in (_cases()[0], _cases()[5]):
        library.opcheck(torch.ops.weft.sample_rows.default, _flat(case))
    library.opcheck(torch.ops.weft.count_tokens.default, _count_cases()[0])


def test_captured_they_follow_the_table() -> None:
    """One graph serves all sampling parameters, since they are not part of its key."""

    def step(
        logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor
    ) -> tuple[SamplingTable, Tensor]:
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
            other, captured_ids = g(logits, other, *where)
            assert_equal("captured", (other, captured_ids), (table, ids))
    assert g.cache_info().captures == 1


def test_the_table_of_operators_has_them() -> None:
    for device, implementation in (("cpu", "reference"), ("cuda", ("triton ", "missing"))):
        implementations = {row.op: row.implementation for row in backends(device)}
        assert implementations["sample_rows"].startswith(implementation)
        assert implementations["count_tokens"].startswith(implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(12))
def test_the_kernels_draw_what_the_reference_draws(index: int) -> None:
    case = _cases()[index]
    assert_same_draws(case, [x.cpu() for x in case.to("cuda").drawn()])


@pytest.mark.gpu
def test_where_no_token_is_left_the_kernels_say_so() -> None:
    case = _barred()
    assert_only_what_is_allowed(case, [x.cpu() for x in case.to("cuda").drawn()])


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(12))
def test_the_kernels_process_as_the_reference_does(index: int) -> None:
    from weft.ops.sampling.sample_rows_triton import process_rows

    case = _cases()[index]
    there = case.to("cuda")
    *_, processed = process_rows(
        there.logits.contiguous(), there.rows, there.positions, there.table, there.token_mask
    )
    assert_same_processed(
        case,
        [x.cpu() for x in (processed.kinds, processed.adjusted, processed.peaks, processed.bounds)],
    )


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
        gpu_args = [x.cuda() for x in case]
        torch.ops.weft.count_tokens(*gpu_args)
        torch.ops.weft.count_tokens(*case)
        assert torch.equal(gpu_args[0].cpu(), case[0])
