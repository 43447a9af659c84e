"""The Triton kernels of `weft::paged_attention`, interpreted on the CPU and on a GPU."""

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, strategies as st
from interpreting import chosen, interpret
from paged_cases import (
    DECODE,
    FIXED,
    TOLERANCE,
    Case,
    Request,
    Shape,
    assert_matches,
    bits,
    draw_case,
)
from torch import Tensor

from weft.ops.attention.launch import plan_launch
from weft.ops.attention.paged import paged_attention, paged_attention_quantized
from weft.ops.products.fp8 import quantize, reference_quantize

# The Triton kernels, interpreted on the CPU

_INTERPRETED = """
import sys, torch
from weft.ops.attention.paged_triton import attend
torch.set_deterministic_debug_mode("error")  # NaN in all memory that nothing has written yet
batches = torch.load(sys.argv[1])
done = [(args[3], attend(*args), attend(*args, batch_invariant=True)) for args in batches]
# Now that keys and values are in the pages.
for args, (_, *outs) in zip(batches, done):
    for batch_invariant, out in enumerate(outs):
        again = attend(args[0], None, None, *args[3:], batch_invariant=bool(batch_invariant))
        assert torch.equal(again, out) and not again.isnan().any()
torch.save(done, sys.argv[2])
"""


# Without `--nightly`, one shape of so many is interpreted.
EVERY = 4


@pytest.fixture(scope="module")
def interpreted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Case, list[Tensor]]]:
    """The shapes of FIXED that this run has, by index, run by the kernels: the pages, and the
    result of both modes."""
    indices = chosen(request)
    cases = [draw_case(FIXED[index]) for index in indices]
    results = interpret(
        _INTERPRETED, [case.args for case in cases], tmp_path_factory.mktemp("interpreted")
    )
    return {
        index: (case, list(result))
        for index, case, result in zip(indices, cases, results, strict=True)
    }


@pytest.mark.one_of(EVERY, EVERY)
@pytest.mark.parametrize("index", range(len(FIXED)), ids=map(str, FIXED))
def test_kernels_interpreted_equal_dense_attention(
    index: int, interpreted: dict[int, tuple[Case, list[Tensor]]]
) -> None:
    case, (pages, *outs) = interpreted[index]
    for out in outs:
        assert_matches(case, out, pages)


_SCALED = """
import sys, torch
from weft.ops.attention.paged_triton import attend
torch.save([attend(*args) for args in torch.load(sys.argv[1])], sys.argv[2])
"""


def test_a_scale_may_be_negative_or_next_to_nothing(tmp_path: Path) -> None:
    shape = Shape((Request(100, 20), Request(0, 90), *DECODE), dim=16, page_size=16)
    calls = [(*draw_case(shape).args[:-2], scale, 0) for scale in (-0.3, -1e-46, 0.0, 1e-39, 0.3)]
    for args, result in zip(calls, interpret(_SCALED, calls, tmp_path), strict=True):
        torch.testing.assert_close(result, paged_attention(*args), rtol=2e-5, atol=2e-5)


_QUANTIZED = """
import sys, torch
from weft.ops.attention.paged_triton import attend, attend_quantized
torch.set_deterministic_debug_mode("error")
batches = torch.load(sys.argv[1])
torch.save([(attend(*args), *attend_quantized(*args)) for args in batches], sys.argv[2])
"""


@pytest.mark.slow
def test_results_in_fp8_are_those_that_would_be_quantised(tmp_path: Path) -> None:
    cases = [
        draw_case(attrs.evolve(shape, dim=128, kv_heads=2, group=2))
        for shape in (*FIXED[:11], FIXED[12], FIXED[-1])
    ]
    for case, (out, values, scales) in zip(
        cases, interpret(_QUANTIZED, [case.args for case in cases], tmp_path), strict=True
    ):
        expected, by = reference_quantize(out.flatten(1))
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8)), case
        assert torch.equal(scales, by), case


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 20))
def test_the_blocks_of_a_ragged_launch_are_enough_and_apart(
    lengths: list[int], queries: int
) -> None:
    # The formula of plan_launch: request r begins at block start // queries + r.
    starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
    first = [start // queries + r for r, start in enumerate(starts)]
    for r, length in enumerate(lengths):
        assert first[r] + math.ceil(length / queries) <= first[r + 1]
    assert first[-1] == starts[-1] // queries + len(lengths)


@given(
    st.integers(1, 9000),
    st.integers(1, 512),
    st.integers(1, 128),
    st.integers(1, 8),
    st.integers(1, 512),
    st.integers(1, 1 << 17),
    st.integers(1, 9000),
    st.sampled_from([(2, 2), (4, 4), (2, 1), (4, 1)]),
)
def test_launches_keep_their_bounds(
    tokens: int,
    reqs: int,
    group: int,
    kv_heads: int,
    dim: int,
    context: int,
    longest: int,
    sizes: tuple[int, int],
) -> None:
    plan = plan_launch(tokens, reqs, group, kv_heads, dim, context, longest, *sizes, 132)
    assert plan.queries >= 1
    assert plan.queries * group <= plan.rows
    assert plan.one_block == (longest <= plan.queries)
    assert not plan.shared or plan.share_rows
    assert plan.share_rows in ((0, plan.rows) if plan.one_block else (0, 16))
    assert plan.splits & (plan.splits - 1) == 0
    assert plan.programs >= max(reqs * plan.splits, plan.parts)
    assert plan.places >= 2 * plan.parts
    assert plan.registers is None or plan.rows * plan.dims <= 64 * 32 * plan.warps, (
        "accumulators take half of them"
    )
    for power in (plan.rows, plan.keys, plan.dims):
        assert power & (power - 1) == 0


# The Triton kernels on a GPU


def on_cuda(case: Case) -> tuple[Any, ...]:
    return tuple(x.cuda() if isinstance(x, Tensor) else x for x in case.args)


GPU_SHAPES = [
    *FIXED,
    *(attrs.evolve(shape, dtype=torch.bfloat16) for shape in FIXED),
    Shape(
        tuple(Request(past, 1) for past in range(0, 900, 150)),
        kv_heads=4,
        group=8,
        dim=128,
        page_size=16,
    ),
    Shape((Request(2000, 1),), kv_heads=2, group=5, dim=128, page_size=16, dtype=torch.bfloat16),
    Shape((Request(0, 200), Request(100, 77), *DECODE), 9, 2, 4, 128, 16, torch.bfloat16),
    Shape(
        (Request(0, 200), Request(100, 77), Request(150, 2), *DECODE),
        9,
        2,
        4,
        128,
        16,
        torch.bfloat16,
        window=90,
    ),
    Shape((Request(0, 100), Request(10, 30)), 1, 1, 2, 256, 32, torch.float32),
    Shape((Request(0, 20), Request(10, 1)), 1, 1, 3, 512, 32, torch.float32),
]


@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.gpu
def test_kernels_on_a_gpu_equal_dense_attention_and_the_reference(shape: Shape) -> None:
    case = draw_case(shape)
    args = on_cuda(case)
    out = paged_attention(*args)
    assert_matches(case, out, args[3])
    reference = paged_attention(*case.args)
    torch.testing.assert_close(
        out.cpu(), reference, rtol=TOLERANCE[shape.dtype], atol=TOLERANCE[shape.dtype]
    )


@pytest.mark.parametrize(
    "shape", [attrs.evolve(s, dim=128, group=8) for s in GPU_SHAPES[: 2 * len(FIXED)]], ids=str
)
@pytest.mark.gpu
def test_results_in_fp8_on_a_gpu_are_those_that_would_be_quantised(shape: Shape) -> None:
    args = on_cuda(draw_case(shape))
    result = paged_attention_quantized(*args)
    expected = quantize(paged_attention(*args).flatten(1))
    assert torch.equal(result.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(result.scales, expected.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("longest", [1, 12])
@pytest.mark.gpu
def test_a_captured_call_replays_on_other_inputs(dtype: torch.dtype, longest: int) -> None:
    def batch(seed: int) -> Case:
        random = torch.Generator().manual_seed(seed)
        pasts = torch.randint(0, 60, (4,), generator=random).tolist()
        news = [1, 1, 1, 1] if longest == 1 else [seed % 4 + 1, 1, 11 - seed % 4, 3]
        requests = tuple(Request(past, new) for past, new in zip(pasts, news, strict=True))
        # The longest request fixes the width of the block table and the number of pages, for every
        # seed.
        return draw_case(
            Shape((*requests, Request(100 - seed, 1, 0), Request(seed, 0)), dtype=dtype, seed=seed)
        )

    def padded(case: Case) -> list[Any]:
        args = list(on_cuda(case))
        pages = torch.full((2, 160, *args[3].shape[2:]), float("nan"), dtype=dtype, device="cuda")
        pages[:, : args[3].shape[1]] = args[3]
        table = torch.zeros(args[5].shape[0], 40, dtype=torch.int32, device="cuda")
        table[:, : args[5].shape[1]] = args[5]
        args[3], args[5], args[8] = pages, table, longest
        return args

    static = padded(batch(0))
    paged_attention(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*static)
    for seed in (1, 2, 3, 0):
        case = batch(seed)
        fresh = padded(case)
        for destination, source in zip(static, fresh, strict=True):
            if isinstance(destination, Tensor):
                destination.copy_(source)
        out.fill_(float("nan"))
        graph.replay()
        eager = paged_attention(*fresh)
        assert torch.equal(bits(out), bits(eager))
        assert_matches(case, out, static[3][:, : case.pages.shape[1]].contiguous())
