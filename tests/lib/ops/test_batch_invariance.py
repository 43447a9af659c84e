"""L20 of single operators: a token's result is the same bits alone, among any others, and however a
prompt is cut."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.ops.attention.paged import paged_attention
from weft.ops.experts.products import run_experts
from weft.ops.experts.routing import route
from weft.ops.products.fp8 import quantize
from weft.ops.products.gate import silu_mul
from weft.ops.products.linear import fp8_linear, linear, swiglu
from weft.ops.products.lora import add_lora
from weft.ops.products.parts import sum_parts
from weft.ops.sampling.sample import sample, token_logprobs
from weft.ops.tiles.tile import Tile

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = (1, 2, 5, 16, 17, 40, 64, 65, 128, 129, 300, 700)
# Weights for which tiles were measured, and others.
SHAPES = ((1024, 2048), (4096, 1024), (128, 2048), (40, 96), (200, 1000))


@pytest.fixture(autouse=True)
def invariant() -> Iterator[None]:
    torch.manual_seed(0)
    with weft.batch_invariant():
        yield


def check_counts(run: Callable[[Tensor], Tensor], most: int) -> None:
    """Raise unless the rows that `run` computes for some tokens of `most` are those that it
    computes for all."""
    order = torch.randperm(most)
    whole = run(order)
    for count in (one for one in COUNTS if one <= most):
        start = int(torch.randint(most - count + 1, ()))
        part = run(order[start : start + count])
        assert torch.equal(part, whole[start : start + count]), f"{count} of {most} tokens"


def few(device: str) -> int:
    return 700 if device == "cuda" else 130


@pytest.mark.one_of(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = (
        torch.randn(shape, device=device, dtype=dtype),
        torch.randn(shape[0], device=device, dtype=dtype),
    )
    x = torch.randn(few(device), shape[1], device=device, dtype=dtype)
    check_counts(lambda index: sum_parts(linear(x[index.to(device)], weight, bias), dtype), len(x))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2048, 4096), (5120, 2048), (100, 300)], ids=str)
def test_linear_in_fp8(device: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), device=device)
    x = torch.randn(few(device), shape[1], device=device, dtype=torch.bfloat16)

    def run(index: Tensor) -> Tensor:
        return sum_parts(
            fp8_linear(quantize(x[index.to(device)]), weight, scale, dtype=x.dtype), x.dtype
        )

    check_counts(run, len(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(few(device), 2 * 37, device=device, dtype=dtype)
    check_counts(lambda index: silu_mul(x[index.to(device)], dtype), len(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_and_its_gate(device: str, dtype: torch.dtype) -> None:
    x, weight = (
        torch.randn(shape, device=device, dtype=dtype)
        for shape in ((few(device), 1000), (2 * 260, 1000))
    )
    check_counts(lambda index: swiglu(x[index.to(device)], weight), len(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [2, 8, 64])
def test_adapters(device: str, dtype: torch.dtype, rank: int) -> None:
    check_adapters(device, dtype, rank)


def check_adapters(device: str, dtype: torch.dtype, rank: int) -> None:
    columns = 1000
    rows = 520
    x, weight, a, b = (
        torch.randn(shape).to(device, dtype)
        for shape in (
            (few(device), columns),
            (rows, columns),
            (3, 1, rank, columns),
            (3, rows, rank),
        )
    )
    slots = torch.randint(-1, 3, (len(x),), dtype=torch.int32).to(device)

    def run(index: Tensor) -> Tensor:
        token_slots = slots[index.to(device)]
        active = token_slots.unique()
        inputs = x[index.to(device)]
        return add_lora(linear(inputs, weight), inputs, a, b, token_slots, active, [0, rows])

    check_counts(run, len(x))


@pytest.mark.parametrize("is_of_b", [False, True])
def test_adapters_in_another_order_are_found(
    is_of_b: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> Tensor:
        halves = 2 if len(x) > 2 and (weight.shape[1] == 8) == is_of_b else 1
        share = -(-x.shape[1] // halves)
        pairs = zip(x.split(share, 1), weight.split(share, 1), strict=True)
        return sum(plain(*pair, None, batch_invariant) for pair in pairs)

    module: Any = importlib.import_module("weft.ops.products.lora")
    plain = module.multiply
    monkeypatch.setattr(module, "multiply", multiply)
    with pytest.raises(AssertionError, match="of 130 tokens"):
        check_adapters("cpu", torch.float32, 8)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("sizes", [(128, 256, 256, 8), (6, 128, 128, 2)], ids=str)
def test_experts(device: str, fp8: bool, sizes: tuple[int, int, int, int]) -> None:
    num_experts, hidden, inner, top_k = sizes
    x = torch.randn(few(device), hidden, device=device, dtype=torch.bfloat16)
    gate_up, down = (
        torch.randn(num_experts, 2 * inner, hidden),
        torch.randn(num_experts, hidden, inner),
    )
    kind = torch.float8_e4m3fn if fp8 else x.dtype
    gate_up, down = gate_up.to(device, kind), down.to(device, kind)
    blocks = hidden // 128, inner // 128
    scales = torch.rand(num_experts, 2 * blocks[1], blocks[0]), torch.rand(num_experts, *blocks)
    scale_args = (
        {"gate_up_scale": scales[0].to(device), "down_scale": scales[1].to(device)} if fp8 else {}
    )
    router = torch.randn(num_experts, hidden, device=device, dtype=x.dtype)

    def run(index: Tensor) -> Tensor:
        inputs = x[index.to(device)]
        weights, experts = route(linear(inputs, router), top_k, True, x.dtype)
        products = run_experts(
            quantize(inputs) if fp8 else inputs,
            gate_up,
            down,
            weights,
            experts,
            dtype=x.dtype,
            **scale_args,
        )
        return sum_parts(products, x.dtype)

    check_counts(run, len(x))


PAGE = 16


class Context:
    """Requests with their keys and values in pages, whose attention is asked for in pieces."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        lengths: list[int],
        window: int,
    ) -> None:
        self.device = device
        self.lengths = lengths
        self.window = window
        most = -(-max(lengths) // PAGE)
        self.table = (
            torch.randperm(len(lengths) * most, dtype=torch.int32)
            .view(len(lengths), most)
            .to(device)
        )
        self.pages = torch.randn(2, len(lengths) * most, PAGE, 2, 64).to(device, kv_dtype)
        self.q = [torch.randn(length, 8, 64, device=device, dtype=dtype) for length in lengths]

    def attend(self, pieces: list[tuple[int, int, int]], uniform: int = 0) -> list[Tensor]:
        """The results of some queries start:end of some requests, in one call."""
        q = torch.cat([self.q[request][start:end] for request, start, end in pieces])
        counts = torch.tensor([0, *(end - start for _, start, end in pieces)])
        requests = torch.tensor([request for request, *_ in pieces], device=self.device)
        slots = torch.zeros(len(q), dtype=torch.int64, device=self.device)
        lengths = torch.tensor([end for *_, end in pieces], dtype=torch.int32, device=self.device)
        starts = counts.cumsum(0).to(self.device, torch.int32)
        args = slots, self.table[requests], starts, lengths, uniform or len(q), 0.125, self.window
        return list(paged_attention(q, None, None, self.pages, *args).split(counts[1:].tolist()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
)
def test_attention(device: str, window: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    lengths = [1500, 1100, 513, 512, 300, 64, 40, 1] if device == "cuda" else [90, 33, 16, 1]
    context = Context(device, *dtypes, lengths, window)
    whole = context.attend([(request, 0, length) for request, length in enumerate(lengths)])
    last = [(request, length - 1, length) for request, length in enumerate(lengths)]
    for request, (_, start, end) in enumerate(last):
        alone = context.attend([last[request]], uniform=1)[0]
        assert torch.equal(alone, whole[request][start:end]), (
            f"request {request} of {end} tokens, alone"
        )
    for copies in (1, 3, 40):
        together = context.attend(last * copies, uniform=1)
        for request, output in enumerate(together):
            assert torch.equal(output, whole[request % len(last)][-1:]), (
                f"decodes, {copies} of each"
            )
    drafts = [
        (request, max(length - 4, 0), length)
        for request, length in enumerate(lengths)
        if length > 4
    ]
    for (request, start, end), output in zip(
        drafts, context.attend(drafts, uniform=4), strict=True
    ):
        assert torch.equal(output, whole[request][start:end]), f"request {request}, four queries"
    for chunk in (7, 100, 511):
        for start in range(0, lengths[0], chunk):
            end = min(start + chunk, lengths[0])
            chunked, *_ = context.attend([(0, start, end), *last[1:]])
            assert torch.equal(chunked, whole[0][start:end]), f"{start}:{end}, in chunks of {chunk}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [11, 5000, pytest.param(151_936, marks=pytest.mark.nightly)])
def test_draws_and_logprobs(device: str, vocab: int) -> None:
    logits = torch.randn(few(device), vocab, device=device).mul(3).to(torch.bfloat16)
    seeds, positions = (
        torch.arange(len(logits), device=device),
        torch.arange(len(logits), device=device) * 3,
    )
    temperature = torch.linspace(0, 1.5, len(logits), device=device)

    def run(index: Tensor) -> Tensor:
        rows = index.to(device)
        ids, logprobs = sample(logits[rows], temperature[rows], seeds[rows], positions[rows])
        assert torch.equal(token_logprobs(logits[rows], ids[:, None])[:, 0], logprobs), (
            "drawn and scored"
        )
        return torch.stack((ids.double(), logprobs.double()), 1)

    check_counts(run, len(logits))


def test_a_derivative_is_the_reference_s_and_the_value_the_operator_s() -> None:
    x = torch.randn(5, 96, requires_grad=True)
    weight = torch.randn(40, 96, requires_grad=True)
    result = linear(x, weight)
    assert torch.equal(result[:1], linear(x.detach()[:1], weight.detach()))
    upstream = torch.randn(5, 40)
    grads = torch.autograd.grad(result, (x, weight), upstream)
    for grad, expected in zip(grads, (upstream @ weight, upstream.T @ x), strict=True):
        torch.testing.assert_close(grad, expected)


def test_transforms_of_torch_func_follow_the_operator_s_values() -> None:
    x, weight = torch.randn(5, 96), torch.randn(40, 96)

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        output = linear(x, weight)
        return output.square().sum(), output

    for grad in (
        torch.func.grad(loss, has_aux=True),
        lambda x: torch.func.vjp(loss, x, has_aux=True)[1:],
    ):
        output = grad(x)[-1]
        assert torch.equal(output[:1], linear(x[:1], weight))
    expected = 2 * (x @ weight.T) @ weight
    torch.testing.assert_close(torch.func.grad(lambda x: loss(x)[0])(x), expected)
    second = torch.func.hessian(lambda x: loss(x)[0])(x[:1])
    torch.testing.assert_close(second[0, :, 0], 2 * weight.T @ weight)
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(lambda x: loss(x[None])[0]))(x), expected
    )


def test_a_graph_of_the_context_is_not_one_of_its_surroundings() -> None:
    x = torch.randn(1, 256)
    weight = torch.randn(40, 256)
    step = weft.graphify(linear)
    inside = [step(x, weight) for _ in range(3)]
    with weft.batch_invariant(False):
        outside = [step(x, weight) for _ in range(3)]
    assert all(torch.equal(one, linear(x, weight)) for one in inside)
    assert all(torch.equal(one, torch.nn.functional.linear(x, weight)) for one in outside)
    assert step.cache_info().captures == 2


def test_a_compiled_function_is_batch_invariant_in_the_context() -> None:
    x, weight = torch.randn(5, 256), torch.randn(40, 256)
    traced: list[str] = []

    def backend(module: Any, _: Any) -> Any:
        traced.append(module.code)
        return module

    step = torch.compile(lambda x: linear(x, weight), backend=backend, fullgraph=True)
    assert torch.equal(step(x)[:1], linear(x[:1], weight))
    assert "weft.linear.batch_invariant" in traced[0]


def test_a_compiled_function_is_compiled_once_for_any_number_of_contexts() -> None:
    x, weight = torch.randn(5, 256), torch.randn(40, 256)
    compiled: list[Any] = []

    def backend(module: Any, _: Any) -> Any:
        compiled.append(module)
        return module

    step = torch.compile(lambda x: linear(x, weight), backend=backend, fullgraph=True)
    step(x)
    with weft.batch_invariant(), weft.batch_invariant():
        step(x)
    assert len(compiled) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 1024), (2048, 8192)], ids=str)
def test_torch_s_product_takes_the_kernel_s_place_only_with_its_bits(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("weft.ops.products.linear_triton")
    monkeypatch.setattr(module, "_AGREED", agreed := dict[Any, bool]())
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    bias = weight[:, 0].contiguous()
    x = torch.randn(8000, shape[1], device="cuda", dtype=torch.bfloat16)
    for optional_bias in (None, bias):
        whole = linear(x, weight, optional_bias)
        for start in (0, 4095, 7999):
            assert torch.equal(
                sum_parts(linear(x[start : start + 1], weight, optional_bias), x.dtype)[0],
                whole[start],
            )
    assert any(agreed.values()), f"in no case: {agreed}"

    def in_another_order(
        x: Tensor, weight: Tensor, bias: Tensor | None, segments: int, out: Tensor
    ) -> None:
        half = x.shape[1] // 4
        out.copy_(
            x[:, half:].float() @ weight[:, half:].t().float()
            + x[:, :half].float() @ weight[:, :half].t().float()
        )

    monkeypatch.setattr(module, "_AGREED", agreed := dict[Any, bool]())
    monkeypatch.setattr(module, "_multiply_segments", in_another_order)
    assert torch.equal(linear(x, weight, bias), whole)
    assert [*agreed.values()] == [False] * len(agreed)
    assert agreed
    monkeypatch.setattr(module, "_AGREED", agreed := dict[Any, bool]())
    assert not linear(x, torch.zeros_like(weight)).any()
    assert not any(agreed.values()), (
        "weights of zeros have the same sum in any order, which tells nothing"
    )
    assert torch.equal(linear(x, weight, bias), whole)
    monkeypatch.undo()
    monkeypatch.setattr(module, "_AGREED", agreed := dict[Any, bool]())
    odd = torch.cat((weight.flatten()[:1], weight.flatten()))[1:].view_as(weight)
    with torch.autocast("cuda", torch.float16):
        assert torch.equal(linear(x, weight, bias), whole)
    assert torch.equal(linear(x, odd, bias), whole)
    assert not agreed, "no trial under autocast, and of a weight that is aligned otherwise"


def test_a_trial_of_torch_s_product_decides_only_where_kernels_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from weft.ops.kernel_triton import compiling

    module: Any = importlib.import_module("weft.ops.products.linear_triton")
    monkeypatch.setattr(module, "_AGREED", agreed := dict[Any, bool]())
    monkeypatch.setattr(
        module, "run_tile", lambda x, _, weight, *rest: (x @ weight.T) * rest[-1].segments
    )
    monkeypatch.setattr(
        module, "_multiply_segments", lambda x, weight, bias, n, out: out.copy_(x @ weight.T)
    )
    monkeypatch.setattr(module, "_TELLING", 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, weight, tile = torch.randn(4, 16), torch.randn(8, 16), Tile(64, 16, 64, 4, 3)
    size = module._BLOCKS[-1]
    with compiling():
        assert not module._agrees(size, x, weight, None, tile)
    assert not agreed
    assert module._agrees(size, x, weight, None, tile)
    assert [*agreed.values()] == [True]


def test_torch_s_product_takes_no_place_under_settings_that_no_trial_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    module: Any = importlib.import_module("weft.ops.products.linear_triton")
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    memory = torch.empty(4096, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    x, weight, odd = (
        memory[start + at :][:512].view(torch.bfloat16).view(16, 16) for at in (0, 512, 1026)
    )
    assert module._may_stand_in(x, weight, None)
    assert module._may_stand_in(x, weight, weight[0])
    assert not module._may_stand_in(x, odd, None)
    assert not module._may_stand_in(odd, weight, None)
    assert not module._may_stand_in(x, weight, odd[0])
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert not module._may_stand_in(x, weight, None)
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: True)
    assert not module._may_stand_in(x, weight, None)
