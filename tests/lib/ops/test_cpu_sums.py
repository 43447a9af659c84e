"""L20 of single operators on the CPU under settings of torch: the number of threads, autocast, and
other products."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.errors import DeviceError
from weft.ops.attention.paged import paged_attention
from weft.ops.experts.products import run_experts
from weft.ops.experts.routing import route
from weft.ops.norm import add_rms_norm, rms_norm
from weft.ops.products.fp8 import quantize
from weft.ops.products.gate import silu_mul
from weft.ops.products.linear import fp8_linear, linear
from weft.ops.products.lora import add_lora
from weft.ops.rotary import turn_tables
from weft.ops.sampling.sample import sample, token_logprobs

Operator = Callable[[], Any]


@pytest.fixture(autouse=True)
def invariant() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    with weft.batch_invariant():
        yield
    torch.set_num_threads(threads)


def product(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Operator:
    x, weight = torch.randn(3, columns).to(dtype), torch.randn(rows, columns).to(dtype)
    return lambda: linear(x, weight)


def product_in_fp8() -> Operator:
    x, weight = quantize(torch.randn(3, 7680)), torch.randn(128, 7680).to(torch.float8_e4m3fn)
    scale = torch.rand(1, 60)
    return lambda: fp8_linear(x, weight, scale, dtype=torch.float32)


def adapted() -> Operator:
    x, a, b = torch.randn(2, 7777), torch.randn(1, 1, 17, 7777), torch.randn(1, 8, 17)
    slots, active = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    return lambda: add_lora(torch.zeros(2, 8), x, a, b, slots, active, [0, 8])


def experts() -> Operator:
    x, gate_up, down = torch.randn(2, 7777), torch.randn(2, 18, 7777), torch.randn(2, 7777, 9)
    weights, chosen = route(torch.randn(2, 2), 2, True, torch.float32)
    return lambda: run_experts(x, gate_up, down, weights, chosen, dtype=torch.float32)


def attention(heads: int, kv_heads: int, length: int) -> Operator:
    pages, q = torch.randn(2, 1, length, kv_heads, 64), torch.randn(1, heads, 64)
    table, ends = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    starts, slots = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    return lambda: paged_attention(q, None, None, pages, slots, table, starts, ends, 1, 0.125)


def norm(columns: int) -> Operator:
    x, weight = torch.randn(1, columns), torch.randn(columns)
    return lambda: (rms_norm(x, weight, 1e-6), *add_rms_norm(x, x, weight, 1e-6))


def draw(count: int) -> Operator:
    logits, seeds = torch.randn(count, 151_936) * 3, torch.arange(count)
    temperature = torch.ones(count)
    return lambda: (
        *sample(logits, temperature, seeds, seeds),
        token_logprobs(logits, seeds[:, None]),
    )


def angles() -> Operator:
    inv_freq, positions = torch.rand(64), torch.arange(1001)
    return lambda: turn_tables(inv_freq, positions, 1.0, torch.float32)


def gate() -> Operator:
    x = torch.randn(7, 2 * 9001)
    return lambda: silu_mul(x, torch.float32)


OPERATORS: dict[str, Callable[[], Operator]] = {
    "a wide product": lambda: product(151, 8192),
    "a wide product of odd sizes": lambda: product(17, 7777),
    "a wide product in bfloat16": lambda: product(17, 7777, torch.bfloat16),
    "a wide product in float16": lambda: product(17, 7777, torch.float16),
    "a product of many rows": lambda: product(20_000, 65),
    "a product in FP8": product_in_fp8,
    "an adapter": adapted,
    "experts": experts,
    "attention, seven heads a key head": lambda: attention(7, 1, 300),
    "attention, a head a key head": lambda: attention(3, 3, 5000),
    "a norm of a wide row": lambda: norm(151_936),
    "a norm of a row that is a little less wide": lambda: norm(40_001),
    "one draw": lambda: draw(1),
    "draws": lambda: draw(3),
    "angles": angles,
    "the gate": gate,
}


def equal(result: Any, expected: Any) -> bool:
    if isinstance(result, Tensor):
        return result.dtype == expected.dtype and torch.equal(result, expected)
    return all(equal(*pair) for pair in zip(result, expected, strict=True))


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    run = OPERATORS[name]()
    torch.set_num_threads(1)
    alone = run()
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert equal(run(), alone), f"{threads} threads"
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    run = OPERATORS[name]()
    alone = run()
    with torch.autocast("cpu", dtype):
        assert equal(run(), alone)
        assert torch.is_autocast_enabled("cpu")


def test_a_row_has_its_bits_among_others_whatever_the_number_of_threads() -> None:
    x = torch.randn(3, 40_001)
    weight = torch.randn(40_001)
    for threads in (1, 2, 8):
        torch.set_num_threads(threads)
        assert torch.equal(rms_norm(x, weight, 1e-6)[:1], rms_norm(x[:1], weight, 1e-6))


def test_captured_and_compiled_functions_have_the_bits_of_one_thread() -> None:
    x, weight = torch.randn(3, 7777), torch.randn(17, 7777)
    step = weft.graphify(linear)
    compiled = torch.compile(lambda x: linear(x, weight), backend="aot_eager")
    torch.set_num_threads(1)
    alone = linear(x, weight)
    torch.set_num_threads(8)
    assert all(torch.equal(step(x, weight), alone) for _ in range(3))
    assert all(torch.equal(compiled(x), alone) for _ in range(2))


def test_each_thread_keeps_its_number_of_threads() -> None:
    run, results = product(151, 8192), list[Tensor]()
    torch.set_num_threads(1)
    alone = run()

    def work(threads: int) -> None:
        torch.get_num_threads()  # a new thread takes the number last set by any thread when it first asks, and keeps it
        torch.set_num_threads(threads)
        with weft.batch_invariant():
            for _ in range(20):
                results.append(run())
                assert torch.get_num_threads() == threads

    workers = [threading.Thread(target=work, args=(threads,)) for threads in (2, 3, 8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 60
    assert all(torch.equal(one, alone) for one in results)


@pytest.mark.parametrize("kept", ["high", "medium"])
def test_another_precision_of_products_is_refused(kept: str) -> None:
    run = product(17, 64)
    torch.set_float32_matmul_precision(kept)
    try:
        with pytest.raises(DeviceError) as error:
            run()
        with weft.batch_invariant(False):
            run()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert "linear(…) in weft.batch_invariant(), on the CPU\n  saw: torch.backends.mkldnn" in str(
        error.value
    )
    assert "instead: torch.set_float32_matmul_precision('highest')" in str(error.value)
    run()


def test_another_library_of_products_is_refused() -> None:
    run = product(17, 64)
    # By a context: torch's own tests, of which others here import a part, forbid to set the flag
    # otherwise.
    with torch.backends.mkldnn.flags(enabled=False), pytest.raises(DeviceError) as error:
        run()
    assert (
        "saw: torch.backends.mkldnn.enabled = False, with which products round differently"
        in str(error.value)
    )
    assert "instead: torch.backends.mkldnn.enabled = True" in str(error.value)
    run()
