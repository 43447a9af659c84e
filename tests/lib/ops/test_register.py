"""The decorator of operators: its signature, its call, and the check before it."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weft.errors import DescriptorError
from weft.ops.norm import rms_norm
from weft.ops.products.linear import linear
from weft.ops.products.lora import add_lora
from weft.ops.rotary import _rotate_and_keep
from weft.torchapi.private import overload_of


def schema(name: str) -> str:
    return str(overload_of(f"weft::{name}")._schema)


def test_annotations_are_the_signature() -> None:
    import_module("weft.ops.sampling.sample")  # registers count_tokens
    assert schema("rms_norm") == "weft::rms_norm(Tensor x, Tensor weight, float eps) -> Tensor"
    # Without defaults: torch leaves out arguments that equal their default when it calls a kernel.
    assert (
        schema("linear")
        == "weft::linear(Tensor x, Tensor weight, Tensor? bias, SymInt leaves) -> Tensor"
    )
    assert schema("linear.batch_invariant") == schema("linear").replace(
        "linear(", "linear.batch_invariant("
    )
    counts = "Tensor(a0!) counts, Tensor ints, Tensor rows, Tensor token_ids, Tensor kept"
    assert schema("count_tokens") == f"weft::count_tokens({counts}) -> ()"


def test_an_operator_may_have_the_parameters_of_another_function() -> None:
    parameters = ", ".join(
        argument.name for argument in overload_of("weft::rotate_and_keep")._schema.arguments
    )
    assert (
        parameters
        == "qkv, q_norm, k_norm, eps, cos, sin, slot_mapping, kv_pages, num_heads, starts"
    )
    assert list(inspect.signature(_rotate_and_keep.reference).parameters) == ["args"]


def test_a_call_takes_defaults_and_names_as_the_function_does() -> None:
    x = torch.randn(2, 3)
    weight = torch.randn(4, 3)
    bias = torch.randn(4)
    assert torch.equal(linear(x, weight), linear(bias=None, weight=weight, x=x))
    assert torch.equal(linear(x, weight, bias=bias), linear.reference(x, weight, bias))
    assert inspect.signature(rms_norm) == inspect.signature(rms_norm.reference)
    assert list(inspect.signature(linear).parameters) == ["x", "weight", "bias", "leaves"]
    assert (linear.__name__, linear.__module__) == ("linear", "weft.ops.products.linear")
    with pytest.raises(TypeError, match="eps"):
        rms_norm(x, torch.ones(3))  # type: ignore[call-arg]


def test_a_call_is_checked_unless_it_is_unchecked() -> None:
    x = torch.ones(1, 2)
    a = torch.ones(1, 1, 1, 2)
    b = torch.ones(1, 3, 1)
    slots = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(DescriptorError, match="add_lora"):
        add_lora(torch.zeros(1, 4), x, a, b, slots, slots, (0, 3))
    assert add_lora(torch.zeros(1, 3), x, a, b, slots, slots, (0, 3)).tolist() == [[2.0] * 3]
    assert add_lora.unchecked(torch.zeros(1, 3), x, a, b, slots, slots, (0, 3)).tolist() == [
        [2.0] * 3
    ]
    assert linear.unchecked is linear


def test_a_compiled_function_calls_the_operator() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight) + rms_norm(x, weight[0], eps=1e-3).sum()

    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    expected = linear.reference(x, weight) + rms_norm.reference(x, weight[0], 1e-3).sum()
    torch.testing.assert_close(step(x, weight), expected)


KERNELS = sorted(
    {
        keyword.value.value
        for path in (Path(__file__).parents[3] / "lib" / "ops").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "operator"
        for keyword in node.keywords
        if keyword.arg == "kernel" and isinstance(keyword.value, ast.Constant)
    }
)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_of_an_operator_exists(kernel: str) -> None:
    # An operator imports its kernel at the first call on a GPU.
    pytest.importorskip("triton")
    module, _, function = kernel.partition(":")
    assert callable(getattr(import_module(module), function))


def test_kernels_are_found() -> None:
    assert len(KERNELS) > 10
