"""`weft::paged_attention`: the CPU reference and the Triton kernels against dense attention, written out in float64."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import DescriptorError, DeviceError
from weft.ops import paged_attention as module
from weft.ops.paged_attention import paged_attention
from weft.ops.table import OpBackend, backends

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@attrs.frozen
class Request:
    """`past` positions in the cache, `new` live tokens, then `dead` tokens of slot -1; or, `padded`, a seq_len of 0."""

    past: int = 0
    new: int = 0
    dead: int = 0
    padded: bool = False


@attrs.frozen
class Shape:
    """A batch to draw: its requests, `tail` tokens past the last, and the sizes of the model."""

    requests: tuple[Request, ...]
    tail: int = 0
    kv_heads: int = 2
    group: int = 3
    dim: int = 8
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __str__(self) -> str:
        longest = max([0, *(r.new + r.dead for r in self.requests)])
        sizes = f"{self.kv_heads}x{self.group}x{self.dim}-page{self.page_size}"
        return f"{len(self.requests)}reqs-upto{longest}-{sizes}-{str(self.dtype).removeprefix('torch.')}"


@attrs.frozen
class Case:
    """The arguments of the op, in order, and what it should return and leave in kv_pages."""

    args: tuple[Any, ...]
    out: Tensor
    pages: Tensor


def dense(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The last len(queries) positions of one request attend to its history: a head and a query at a time, float64."""
    group = queries.shape[1] // keys.shape[1]
    out = torch.empty(queries.shape, dtype=torch.float64)
    for i in range(len(queries)):
        seen = len(keys) - len(queries) + i + 1
        for head in range(queries.shape[1]):
            scores = keys[:seen, head // group].double() @ queries[i, head].double() * scale
            weights = (scores - scores.max()).exp()
            out[i, head] = weights @ values[:seen, head // group].double() / weights.sum()
    return out


@attrs.frozen
class Rows:
    """Tokens: what the op is given of them, and what it should return."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: list[int]
    out: Tensor


def padding(shape: Shape, slots: list[int]) -> Rows:
    """Tokens that hold NaN and whose output is 0."""
    q = torch.full((len(slots), shape.kv_heads * shape.group, shape.dim), float("nan"), dtype=shape.dtype)
    k = q[:, : shape.kv_heads]
    return Rows(q, k, k, slots, torch.zeros(q.shape, dtype=torch.float64))


def draw_table(shape: Shape, random: torch.Generator) -> tuple[Tensor, int]:
    """A block table of distinct pages in random order, a column wider than needed, and a page that no one owns."""
    needed = [math.ceil((r.past + r.new + r.dead) / shape.page_size) for r in shape.requests]
    order = torch.randperm(sum(needed) + 2, generator=random)
    table = order[-1].int().repeat(len(needed), max([1, *needed]) + 1)
    for row, pages in zip(table, order[:-2].split(needed), strict=True):
        row[: len(pages)] = pages
    return table, int(order[-2])


def draw_request(
    shape: Shape, request: Request, table: list[int], pages: Tensor, expected: Tensor, random: torch.Generator
) -> list[Rows]:
    """A request's tokens; its past goes to `pages` and `expected`, and what the op should write to `expected`."""
    live = request.past + request.new
    history = torch.randn(2, live, shape.kv_heads, shape.dim, generator=random).to(shape.dtype)
    q = torch.randn(request.new, shape.kv_heads * shape.group, shape.dim, generator=random).to(shape.dtype)
    slots = [table[i // shape.page_size] * shape.page_size + i % shape.page_size for i in range(live)]
    pages.flatten(1, 2)[:, slots[: request.past]] = history[:, : request.past]
    kept = request.past if request.padded else live
    expected.flatten(1, 2)[:, slots[:kept]] = history[:, :kept]
    out = dense(q, history[0], history[1], shape.dim**-0.5)
    keys, values = history[:, request.past :]
    new = Rows(q, keys, values, slots[request.past :], out * 0 if request.padded else out)
    return [new, padding(shape, [-1] * request.dead)]


def draw_case(shape: Shape) -> Case:
    """Random data for a shape, NaN wherever nothing may read."""
    random = torch.Generator().manual_seed(shape.seed)
    table, free = draw_table(shape, random)
    num_pages = max([free, *table.flatten().tolist()]) + 2
    pages = torch.full((2, num_pages, shape.page_size, shape.kv_heads, shape.dim), float("nan"), dtype=shape.dtype)
    expected = pages.clone()
    drawn = [
        draw_request(shape, request, row, pages, expected, random)
        for request, row in zip(shape.requests, table.tolist(), strict=True)
    ]
    # A slot of the tail may be -1 or any old value; nothing is written either way.
    tail = padding(shape, [free * shape.page_size if i % 2 else -1 for i in range(shape.tail)])
    rows = [*itertools.chain(*drawn), tail]
    lengths = [sum(len(part.slots) for part in parts) for parts in drawn]
    seq_lens = [0 if r.padded else r.past + r.new + r.dead for r in shape.requests]
    args = (
        *(torch.cat([getattr(part, name) for part in rows]) for name in ("q", "k", "v")),
        pages,
        torch.tensor([slot for part in rows for slot in part.slots], dtype=torch.int64),
        table,
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        max([1, *lengths]),
        shape.dim**-0.5,
    )
    return Case(args, torch.cat([part.out for part in rows]), expected)


def bits(x: Tensor) -> Tensor:
    """`x` as integers, so that NaN equals itself and -0 differs from 0."""
    return x.contiguous().cpu().view({2: torch.int16, 4: torch.int32}[x.element_size()])


TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_matches(case: Case, out: Tensor, pages: Tensor) -> None:
    assert out.dtype == case.args[0].dtype
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.cpu().double(), case.out, rtol=tolerance, atol=tolerance)
    zero = (case.out == 0).flatten(1).all(1)
    assert not bits(out)[zero].any(), "padding must be exactly 0"
    assert torch.equal(bits(pages), bits(case.pages)), "kv_pages changed where no slot points, or not where one does"


requests = st.builds(Request, st.integers(0, 13), st.integers(0, 6), st.sampled_from([0, 0, 0, 2]), st.booleans()) | (
    st.builds(Request, st.integers(0, 13), st.just(1))
)
shapes = st.builds(
    Shape,
    st.lists(requests, max_size=5).map(tuple),
    st.integers(0, 3),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3, 7]),
    st.sampled_from([1, 8, 24]),
    st.sampled_from([1, 3, 4, 16]),
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**31),
)

DECODE = tuple(Request(past, 1) for past in (0, 3, 4, 40, 17))
RAGGED = (
    Request(0, 9),
    Request(6, 1),
    Request(),
    Request(5, 4, 1),
    Request(2, 3, padded=True),
    Request(70, 7),
    Request(1, 0, 2),
)
FIXED = [
    Shape(DECODE),
    Shape((*DECODE, Request(0, 1, padded=True), Request()), tail=2, group=7, dim=24, page_size=16),
    Shape((Request(90, 1),), kv_heads=1, group=1, page_size=2),
    Shape((Request(90, 3), Request(2, 2)), kv_heads=1, group=2, dim=16, page_size=3),
    Shape(RAGGED, tail=3),
    Shape(RAGGED, group=1, dim=80, page_size=1),
    Shape((Request(3, 40), Request(0, 23), Request(64, 1)), tail=1, kv_heads=1, group=7, dim=24, page_size=16),
    Shape((Request(0, 2),), group=20, dim=1),
    Shape((), tail=2),
    Shape(()),
    Shape(RAGGED, tail=3, dtype=torch.float16),
    Shape(DECODE, dtype=torch.float16),
]


# The reference, on the CPU


@settings(deadline=None, max_examples=100)
@given(shapes)
def test_reference_equals_dense_attention(shape: Shape) -> None:
    case = draw_case(shape)
    out = paged_attention(*case.args)
    assert_matches(case, out, case.args[3])


@pytest.mark.parametrize("shape", FIXED, ids=str)
def test_reference_on_the_shapes_that_the_kernels_run(shape: Shape) -> None:
    case = draw_case(shape)
    assert_matches(case, paged_attention(*case.args), case.args[3])


def test_long_prompts_are_attended_in_blocks_of_queries() -> None:
    case = draw_case(Shape((Request(5, module._QUERY_BLOCK + 30),), kv_heads=1, group=1))
    assert_matches(case, paged_attention(*case.args), case.args[3])


def test_a_request_reads_what_another_writes_in_the_same_call() -> None:
    q, kv = torch.zeros(2, 1, 2), torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]])
    pages = torch.full((2, 2, 1, 1, 2), float("nan"))
    table = torch.tensor([[1, 0], [0, 0]], dtype=torch.int32)  # request 0 shares the page that request 1 fills
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    # Request 0's token is at position 1, whose page is 0: give it page 1's slot, so that page 0 is the other's.
    out = paged_attention(q, kv, kv, pages, torch.tensor([1, 0]), table, *lengths, 1, 1.0)
    assert out[:, 0].tolist() == [[2.0, 4.0], [3.0, 6.0]]


def alone(case: Case, request: int) -> tuple[Tensor, Tensor]:
    """The rows of one request from the whole batch, and from a batch of it alone."""
    q, k, v, pages, slots, table, starts, lens, longest, scale = case.args
    rows = slice(int(starts[request]), int(starts[request + 1]))
    span = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
    one = (q[rows], k[rows], v[rows], pages.clone(), slots[rows], table[request : request + 1], span)
    batch = paged_attention(q, k, v, pages.clone(), slots, table, starts, lens, longest, scale)
    return batch[rows], paged_attention(*one, lens[request : request + 1], longest, scale)


@settings(deadline=None, max_examples=40)
@given(shapes.filter(lambda shape: len(shape.requests) > 1))
def test_reference_is_batch_invariant_bitwise(shape: Shape) -> None:
    case = draw_case(shape)
    for request in range(len(shape.requests)):
        batched, single = alone(case, request)
        assert torch.equal(bits(batched), bits(single))


@pytest.mark.parametrize("dim", [64, 20])
def test_reference_is_batch_invariant_at_the_size_of_a_model(dim: int) -> None:
    requests = (Request(300, 1), Request(0, 130), Request(17, 1), Request(511, 1), Request(40, 33))
    case = draw_case(Shape(requests, tail=5, kv_heads=4, group=2, dim=dim, page_size=16))
    for request in range(len(requests)):
        batched, single = alone(case, request)
        assert torch.equal(bits(batched), bits(single))


@pytest.mark.parametrize("shape", [Shape(DECODE, tail=1), Shape(RAGGED, tail=1)])
def test_the_op_declares_what_it_does(shape: Shape) -> None:
    case = draw_case(shape)
    # opcheck compares the arguments before and after by value, so no NaN here.
    args = tuple(x.nan_to_num() if isinstance(x, Tensor) else x for x in case.args)
    torch.library.opcheck(torch.ops.weft.paged_attention.default, args)


@pytest.mark.parametrize("shape", FIXED, ids=map(str, FIXED))
def test_keys_and_values_may_have_been_written_before(shape: Shape) -> None:
    case = draw_case(shape)
    q, k, v, pages, *rest = case.args
    out = paged_attention(q, k, v, pages, *rest)
    kept = pages.clone()
    assert torch.equal(paged_attention(q, None, None, pages, *rest), out)
    assert torch.equal(bits(pages), bits(kept))
    with pytest.raises(DescriptorError, match="pass both k and v, or None for both"):
        paged_attention(q, None, v, pages, *rest)


def test_q_k_v_may_be_slices_and_the_pages_a_layer() -> None:
    case = draw_case(Shape(RAGGED, tail=2))
    q, k, v, pages, *rest = case.args
    layers = torch.zeros(3, *pages.shape)
    layers[1] = pages
    fused = torch.cat([q, k, v], dim=1)
    q, k, v = torch.split(fused, [q.shape[1], k.shape[1], v.shape[1]], dim=1)
    out = paged_attention(q, k, v, layers[1], *rest)
    assert out.is_contiguous()
    assert_matches(case, out, layers[1])
    assert not layers[0].any()
    assert not layers[2].any()


# Errors


def refusal(changes: dict[int, object], error: type[Exception] = DescriptorError) -> str:
    args = list(draw_case(Shape(DECODE)).args)
    for index, value in changes.items():
        args[index] = value
    with pytest.raises(error) as caught:
        paged_attention(*args)
    return str(caught.value)


def test_errors_name_the_argument_and_say_what_to_pass() -> None:
    q, k, _, pages, *_ = draw_case(Shape(DECODE)).args
    assert "k has shape [5, 3, 8]" in refusal({1: torch.zeros(5, 3, 8)})
    assert "instead: pass k of shape [5, 2, 8]" in refusal({1: torch.zeros(5, 3, 8)})
    assert "instead: pass q of shape [T, H, D]" in refusal({0: q[0]})
    assert "5 heads, 2 key heads" in refusal({0: q[:, :5]})
    assert "seq_lens has shape [3]" in refusal({7: torch.ones(3, dtype=torch.int32)})
    assert "v has dtype torch.float16 beside q's torch.float32" in refusal({2: k.half()})
    assert "q has dtype torch.float64" in refusal({0: q.double()})
    assert "pass seq_lens as torch.int32" in refusal({7: torch.ones(5, dtype=torch.int64)})
    assert "strides" in refusal({3: pages.transpose(2, 3).contiguous().transpose(2, 3)})
    assert "k on meta, q on cpu" in refusal({1: k.to("meta")}, DeviceError)
    assert "no request could have a token" in refusal({8: 0})


def test_the_reference_looks_at_the_lengths_too() -> None:
    lens = torch.tensor([1, 4, 5, 41, 0], dtype=torch.int32)
    assert "request 3 has context 4000, its pages hold" in refusal({7: lens.index_fill(0, torch.tensor(3), 4000)})
    assert "request 0 has -1 queries" in refusal({6: torch.tensor([1, 0, 2, 3, 4, 5], dtype=torch.int32)})
    assert "leaves the 5 tokens" in refusal({6: torch.tensor([0, 1, 2, 3, 4, 6], dtype=torch.int32)})
    assert "request 3 has 2 queries, context 41" in refusal({6: torch.tensor([0, 1, 2, 3, 5, 5], dtype=torch.int32)})
    assert "request 1 has 2 queries, context 1" in refusal(
        {6: torch.tensor([0, 0, 2, 3, 4, 5], dtype=torch.int32), 7: torch.ones(5, dtype=torch.int32), 8: 2}
    )


# Without triton, and the table


def test_without_triton_the_cpu_works_and_cuda_says_what_to_install() -> None:
    code = """
import sys
sys.modules["triton"] = None  # every import of it fails
import torch
from weft.ops.paged_attention import no_triton, triton_version
from weft.ops.table import backends
assert triton_version() is None
print(backends("cuda")[0].implementation, "|", backends("cuda")[0].reason, "|", no_triton("f()"))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("missing | triton cannot be imported")
    assert shown.count("pip install 'weft[cuda]'") == 2


def test_the_cuda_kernel_raises_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "triton_version", lambda: None)
    case = draw_case(Shape(DECODE))
    with pytest.raises(DeviceError, match=r"weft\[cuda\]"):
        module._on_cuda(*case.args)


def test_the_table_says_what_runs_where_and_why() -> None:
    cpu, *_ = backends("cpu")
    assert cpu == OpBackend("paged_attention", "reference", cpu.reason)
    cuda, flashinfer, *_ = backends(torch.device("cuda", 1))
    assert cuda.implementation.startswith(("triton ", "missing"))
    assert flashinfer.implementation == "flashinfer: not used"
    assert "host" in flashinfer.reason
    with pytest.raises(DeviceError, match="weft has no kernels for 'meta'"):
        backends("meta")


# The Triton kernels, interpreted on the CPU

_INTERPRETED = """
import sys, torch
from weft.ops.paged_attention_triton import attend
batches = torch.load(sys.argv[1])
done = [(attend(*args), args[3]) for args in batches]
# Now that keys and values are in the pages.
for args, (out, _) in zip(batches, done):
    again = attend(args[0], None, None, *args[3:])
    assert torch.equal(again, out) and not again.isnan().any()
torch.save(done, sys.argv[2])
"""


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Case, Tensor, Tensor]]:
    """FIXED run by the kernels in another process: triton reads its flag where the kernels are defined."""
    pytest.importorskip("triton")
    folder: Path = tmp_path_factory.mktemp("interpreted")
    cases = [draw_case(shape) for shape in FIXED]
    torch.save([case.args for case in cases], folder / "in.pt")
    command = [sys.executable, "-c", _INTERPRETED, str(folder / "in.pt"), str(folder / "out.pt")]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    results = torch.load(folder / "out.pt")
    return [(case, *result) for case, result in zip(cases, results, strict=True)]


@pytest.mark.parametrize("index", range(len(FIXED)), ids=map(str, FIXED))
def test_kernels_interpreted_equal_dense_attention(index: int, interpreted: list[tuple[Case, Tensor, Tensor]]) -> None:
    assert_matches(*interpreted[index])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 20))
def test_the_blocks_of_a_ragged_launch_are_enough_and_apart(lengths: list[int], queries: int) -> None:
    # The formula of plan_launch, without triton: request r begins at block start // queries + r.
    starts = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
    first = [start // queries + r for r, start in enumerate(starts)]
    for r, length in enumerate(lengths):
        assert first[r] + math.ceil(length / queries) <= first[r + 1]
    assert first[-1] == starts[-1] // queries + len(lengths)


@given(
    st.integers(1, 9000),
    st.integers(1, 512),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(1, 512),
    st.integers(1, 1 << 17),
    st.integers(1, 9000),
    st.sampled_from([2, 4]),
)
def test_launches_keep_their_bounds(
    tokens: int, reqs: int, group: int, kv_heads: int, dim: int, context: int, longest: int, itemsize: int
) -> None:
    pytest.importorskip("triton")
    from weft.ops.paged_attention_triton import plan_launch

    plan = plan_launch(tokens, reqs, group, kv_heads, dim, context, longest, itemsize, 132)
    assert plan.queries >= 1
    assert plan.queries * group <= plan.rows
    assert plan.one_block == (longest <= plan.queries)
    assert plan.splits == 1 or plan.one_block
    for power in (plan.rows, plan.keys, plan.dims, plan.splits):
        assert power & (power - 1) == 0


# The Triton kernels on a GPU


def on_cuda(case: Case) -> tuple[Any, ...]:
    return tuple(x.cuda() if isinstance(x, Tensor) else x for x in case.args)


GPU_SHAPES = [
    *FIXED,
    *(attrs.evolve(shape, dtype=torch.bfloat16) for shape in FIXED),
    Shape(tuple(Request(past, 1) for past in range(0, 900, 150)), kv_heads=4, group=8, dim=128, page_size=16),
    Shape((Request(2000, 1),), kv_heads=2, group=5, dim=128, page_size=16, dtype=torch.bfloat16),
    Shape((Request(0, 200), Request(100, 77), *DECODE), 9, 2, 4, 128, 16, torch.bfloat16),
    Shape((Request(0, 100), Request(10, 30)), 1, 1, 2, 256, 32, torch.float32),
    Shape((Request(0, 20), Request(10, 1)), 1, 1, 3, 512, 32, torch.float32),
]


@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.gpu
@needs_gpu
def test_kernels_on_a_gpu_equal_dense_attention_and_the_reference(shape: Shape) -> None:
    case = draw_case(shape)
    args = on_cuda(case)
    out = paged_attention(*args)
    assert_matches(case, out, args[3])
    reference = paged_attention(*case.args)
    torch.testing.assert_close(out.cpu(), reference, rtol=TOLERANCE[shape.dtype], atol=TOLERANCE[shape.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("longest", [1, 12])
@pytest.mark.gpu
@needs_gpu
def test_a_captured_call_replays_on_other_inputs(dtype: torch.dtype, longest: int) -> None:
    def batch(seed: int) -> Case:
        random = torch.Generator().manual_seed(seed)
        pasts = torch.randint(0, 60, (4,), generator=random).tolist()
        news = [1, 1, 1, 1] if longest == 1 else [seed % 4 + 1, 1, 11 - seed % 4, 3]
        requests = tuple(Request(past, new) for past, new in zip(pasts, news, strict=True))
        # The longest request fixes the width of the block table and the number of pages, for every seed.
        return draw_case(Shape((*requests, Request(100 - seed, 1, 0), Request(seed, 0)), dtype=dtype, seed=seed))

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
