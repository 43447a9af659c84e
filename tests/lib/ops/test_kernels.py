"""The Triton kernels of a decoder layer, interpreted on the CPU, against the references of their
ops.

Not in bfloat16: triton's interpreter truncates to it, and gets its products wrong.
"""

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import chosen, interpret
from kernel_cases import CASES, FP8, Case, randn
from torch import Tensor

from weft.errors import DeviceError
from weft.ops import register
from weft.ops.backends import backends
from weft.ops.products.fp8 import reference_quantize
from weft.ops.products.linear import swiglu
from weft.ops.products.parts import sum_parts
from weft.ops.tiles.linear import gated_tile

# The operators' kernels without a case in `kernel_cases.py`, and the file of tests here that compares
# each with its reference.
TESTED_IN = {
    "attention.backends:attend_by_handle": "test_flashinfer.py",
    "attention.paged_triton:attend": "test_paged_attention_triton.py",
    "attention.paged_triton:attend_quantized": "test_paged_attention_triton.py",
    "experts.products_triton:run_experts": "test_experts.py",
    "norm_triton:add_norm_quantized": "test_kernels.py",
    "norm_triton:norm_quantized": "test_kernels.py",
    "products.gate_triton:silu_mul_quantized": "test_kernels.py",
    "sampling.sample_rows_triton:count": "test_sample_rows_triton.py",
    "sampling.sample_rows_triton:draw_rows": "test_sample_rows_triton.py",
    "sampling.sample_triton:draw": "test_sample.py",
    "sampling.sample_triton:score": "test_sample_rows_triton.py",
}
_INTERPRETED = """
import sys, torch
from importlib import import_module
done = []
for kernel, args in torch.load(sys.argv[1], weights_only=False):
    module, _, function = kernel.partition(":")
    try:
        done.append((getattr(import_module(module), function)(*args), args))
    except Exception as error:
        done.append((repr(error), args))
torch.save(done, sys.argv[2])
"""


# Without `--nightly`, one case of so many is interpreted.
EVERY = 7


@pytest.fixture(scope="module")
def interpreted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Any, tuple[Any, ...]]]:
    """The cases of this run, by index, in one process: triton takes seconds to import."""
    indices = chosen(request)
    cases = [CASES[index] for index in indices]
    calls = [
        (case.kernel, (*(case.args if case.kernel_args is None else case.kernel_args), *case.more))
        for case in cases
    ]
    return dict(
        zip(
            indices,
            interpret(_INTERPRETED, calls, tmp_path_factory.mktemp("interpreted")),
            strict=True,
        )
    )


def assert_near(result: Tensor, expected: Tensor, tolerance: float) -> None:
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    if result.dtype == FP8 or not result.is_floating_point():
        assert torch.equal(result.float(), expected.float())
        return
    error = (result.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) <= tolerance  # false for NaN


def test_every_kernel_of_an_operator_has_a_case() -> None:
    """In `kernel_cases.py`, or in the file that `TESTED_IN` names."""
    folder = Path(register.__file__).parent
    texts = [file.read_text(encoding="utf-8") for file in folder.rglob("*.py")]
    kernels = {*re.findall(r'kernel="weft\.ops\.([\w.]+:\w+)"', "\n".join(texts))}
    assert len(kernels) > 20
    cases = {case.kernel.removeprefix("weft.ops.") for case in CASES}
    assert kernels - cases == {*TESTED_IN}


def op_of(case: Case) -> Callable[..., Any]:
    """The module defines the function."""
    module, _, name = case.op.partition(":")
    import_module(f"weft.ops.{module}")
    op: Callable[..., Any] = getattr(torch.ops.weft, name)
    return op


def beside_the_reference(
    case: Case, result: Any, args: Sequence[Any]
) -> tuple[list[Any], list[tuple[Tensor, Tensor]]]:
    """The reference's arguments, and each result and written argument of the kernel, with parts
    added up, next to the reference's."""
    reference_args = [x.clone() if isinstance(x, Tensor) else x for x in case.args]
    expected = op_of(case)(*reference_args)
    pairs = list(zip(*map(results, (result, expected)), strict=True))
    pairs += [(args[place], reference_args[place]) for place in case.written]
    return reference_args, [
        (sum_parts(a, b.dtype) if a.dim() > b.dim() else a, b) for a, b in pairs
    ]


@pytest.mark.one_of(EVERY, EVERY)
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_kernels_interpreted_equal_the_reference(
    index: int, interpreted: dict[int, tuple[Any, tuple[Any, ...]]]
) -> None:
    case, (result, args) = CASES[index], interpreted[index]
    assert not isinstance(result, str), result
    reference_args, pairs = beside_the_reference(case, result, args)
    assert not any(torch.equal(reference_args[place], case.args[place]) for place in case.written)
    for one, other in pairs:
        assert_near(one, other, case.tolerance)
    for place, (before, after) in enumerate(zip(case.args, reference_args, strict=True)):
        if isinstance(before, Tensor) and place not in case.written:
            assert torch.equal(before.float().nan_to_num(), after.float().nan_to_num()), (
                f"argument {place} is written"
            )


def results(returned: Any) -> tuple[Tensor, ...]:
    return () if returned is None else (returned,) if isinstance(returned, Tensor) else returned


def on_cuda(values: tuple[Any, ...]) -> list[Any]:
    return [x.cuda() if isinstance(x, Tensor) else x for x in values]


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_kernels_on_a_gpu_equal_the_reference(index: int) -> None:
    """The tensor cores add up products in FP8 with fewer bits than float32 has; a value between two
    products of experts that this puts on the other side of a step in FP8 then differs by up to an
    eighth."""
    case = CASES[index]
    module, _, function = case.kernel.partition(":")
    args = on_cuda((*(case.args if case.kernel_args is None else case.kernel_args), *case.more))
    result = getattr(import_module(module), function)(*args)
    _, pairs = beside_the_reference(case, result, args)
    in_fp8 = any(isinstance(x, Tensor) and x.dtype == FP8 for x in case.args)
    for one, other in pairs:
        assert_near(one.cpu(), other, 2e-2 if in_fp8 else 10 * case.tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape", [(6144, 1024), (16384, 2048), (28672, 4096), (1000, 300)], ids=str
)
def test_a_product_that_ends_with_a_gate_has_the_bits_of_both(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    from weft.ops.products.gate_triton import silu_mul
    from weft.ops.products.linear_triton import run_tile

    rows, columns = shape
    weight, bias = (
        torch.randn(one, device="cuda", dtype=dtype) / columns**0.5 for one in (shape, rows)
    )
    num_gated = 0
    for tokens in (1, 2, 7, 16, 17, 40, 64, 96, 128):
        tile = gated_tile(tokens, rows, columns)
        if tile is None:
            continue
        x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
        num_gated = num_gated + 1
        gated = run_tile(x, None, weight, None, bias, dtype, tile, gate=True)
        assert torch.equal(
            gated, silu_mul(run_tile(x, None, weight, None, bias, dtype, tile), dtype)
        ), tokens
        assert torch.equal(gated, swiglu(x, weight, bias)), tokens
    assert num_gated >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(16384, 2048), (28672, 4096), (34816, 5120)], ids=str)
def test_a_gated_product_of_many_tokens_is_no_less_exact_than_torchs(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.ops.products import linear_triton

    rows, columns = shape
    weight, bias = (
        torch.randn(one, device="cuda", dtype=dtype) / columns**0.5 for one in (shape, rows)
    )
    calls: list[int] = []
    many = linear_triton.swiglu_many
    monkeypatch.setattr(linear_triton, "swiglu_many", lambda *args: calls.append(1) or many(*args))
    for tokens in (3000, 4096):
        x = torch.randn(tokens, columns, device="cuda", dtype=dtype)
        gate, up = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).chunk(
            2, 1
        )
        exact = torch.nn.functional.silu(gate) * up
        result = swiglu(x, weight, bias)
        other = linear_triton.silu_mul(torch.nn.functional.linear(x, weight, bias), dtype)
        errors = [(one.double() - exact).square().mean() for one in (result, other)]
        assert errors[0] <= 1.02 * errors[1]
        assert torch.equal(result[:700], swiglu(x, weight, bias)[:700])
    assert len(calls) == 4
    assert linear_triton.takes(x, weight)
    assert not linear_triton.takes(x[1:, 8:], weight[:, 8:])


def fused() -> list[tuple[str, tuple[Any, ...]]]:
    """Kernels that also quantise, each after the one that does not."""
    kernel_calls = []
    for columns, dtype in ((300, torch.float16), (1024, torch.float32)):
        x = randn(2, 3, columns)
        residual = randn(3, columns, dtype=dtype)
        weight = randn(columns, dtype=dtype)
        calls = [
            ("norm_triton:norm", (residual, weight, 1e-5)),
            ("norm_triton:add_norm", (x, residual, weight, 1e-5)),
            ("products.gate_triton:silu_mul", (x, dtype)),
        ]
        for name, args in calls:
            kernel_calls += [(f"weft.ops.{name}", args), (f"weft.ops.{name}_quantized", args)]
    return kernel_calls


def test_what_is_quantised_with_another_kernel_is_quantised_by_definition(tmp_path: Path) -> None:
    """The result equals the quantiser's for the plain kernel's result, bit for bit."""
    results = [result for result, _ in interpret(_INTERPRETED, fused(), tmp_path)]
    for plain, both in zip(results[::2], results[1::2], strict=True):
        assert not isinstance(plain, str), plain
        assert not isinstance(both, str), both
        first = plain if isinstance(plain, Tensor) else plain[0]
        values, scales = reference_quantize(first)
        quantized = [
            one
            for one in both
            if one.dtype == FP8 or (one.shape == scales.shape and one.dtype == torch.float32)
        ]
        assert torch.equal(quantized[0].float(), values.float())
        assert torch.equal(quantized[1], scales)
        assert all(
            torch.equal(one, other)
            for one, other in zip(both[:1], [first], strict=True)
            if one.dtype != FP8
        )


def test_the_table_of_ops_says_what_runs_between_attention_calls() -> None:
    ops = [
        "norms",
        "silu_mul",
        "rotate_and_keep",
        "quantize",
        "route",
        "linear",
        "fp8_linear",
        "run_experts",
    ]
    ops += ["add_lora", "sum_leaves", "resolve_tokens", "move_on", "turn_tables"]
    for device, implementation in (("cpu", "reference"), ("cuda", "triton ")):
        rows = {row.op: row for row in backends(device)}
        assert all(rows[op].implementation.startswith(implementation) for op in ops)
    assert rows["run_experts"].reason.endswith("else by rule")


def test_a_kernel_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "triton_version", lambda: None)
    (row,) = [one for one in backends("cuda") if one.op == "run_experts"]
    assert row.implementation.startswith("triton ")
    with pytest.raises(DeviceError, match=r"f\(…\) on CUDA(.|\n)*pip install 'triton>="):
        register.cuda_implementation("f", "weft.ops.products.gate_triton:silu_mul")()
