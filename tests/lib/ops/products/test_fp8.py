"""FP8: the quantiser against its definition, value by value; products against exact arithmetic."""

import math
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from weft.errors import DescriptorError
from weft.ops.products.fp8 import Quantized, dequantize, dequantize_weight, quantize
from weft.ops.products.linear import fp8_linear

FP8 = torch.float8_e4m3fn
# All 127 magnitudes of the format: sign, 4 bits of exponent with bias 7, 3 bits of mantissa, NaN in
# the last place.
MAGNITUDES = [
    math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    for exponent in range(16)
    for mantissa in range(8)
][:127]


def single(x: float) -> float:
    """A number rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


def nearest(x: float) -> float:
    """The nearest value of the format; of two equally near ones, the one with the even mantissa."""
    size = min(abs(x), 448.0)
    index = min(range(127), key=lambda i: (abs(MAGNITUDES[i] - size), i % 2))
    return math.copysign(MAGNITUDES[index], x)


def by_brute_force(row: list[float]) -> tuple[list[float], float]:
    """One block by the definition, in Python floats rounded to float32 after each operation."""
    most = single(max(max(map(abs, row)), single(1e-10)))
    inverse = single(448.0 / most)
    return [nearest(single(x * inverse)) for x in row], single(most / 448.0)


finite = st.floats(-1e4, 1e4, width=32) | st.sampled_from(
    [0.0, -0.0, 1e-12, 1e-30, 448.0, 17.0, 1e30]
)


@given(st.lists(st.lists(finite, min_size=3, max_size=3), min_size=1, max_size=3))
@settings(max_examples=60)
def test_the_quantiser_is_its_definition(rows: list[list[float]]) -> None:
    quantized = quantize(torch.tensor(rows, dtype=torch.float32))
    for row, values, scale in zip(
        rows, quantized.values.float().tolist(), quantized.scales[:, 0].tolist(), strict=True
    ):
        assert (values, scale) == by_brute_force([single(x) for x in row])


def test_every_boundary_between_two_values_rounds_to_even() -> None:
    middles = [(a + b) / 2 for a, b in pairwise(MAGNITUDES)]
    row = torch.tensor([[448.0, *middles]])  # the scale is 1
    assert quantize(row).values[0, 1:].float().tolist() == [nearest(x) for x in middles]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 127, 128, 129, 300])
def test_blocks_of_128_columns(dtype: torch.dtype, columns: int) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    quantized = quantize(x)
    assert quantized.values.shape == x.shape
    assert quantized.scales.shape == (3, -(-columns // 128))
    for start in range(0, columns, 128):
        block = x[:, start : start + 128].float()
        for row, values, scale in zip(
            block, quantized.values[:, start : start + 128], quantized.scales, strict=True
        ):
            assert (values.float().tolist(), float(scale[start // 128])) == by_brute_force(
                row.tolist()
            )
    # Half a step of 3 bits of mantissa: the greatest error relative to a value, or of the smallest
    # step.
    error = (dequantize(quantized) - x.float()).abs()
    steps = quantized.scales.repeat_interleave(128, 1)[:, :columns] * 2**-9
    assert (error <= torch.maximum(x.float().abs() / 16, steps / 2) * 1.001).all()


def drawn(tokens: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, columns, generator=generator)
    weight = (torch.randn(rows, columns, generator=generator) * 16).to(FP8)
    return x, weight, torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) / 16


def test_dequantised_weights_are_scaled_a_block_at_a_time() -> None:
    _, weight, scale = drawn(1, 130, 300)
    wide = dequantize_weight(weight, scale)
    for n, k in ((0, 0), (127, 127), (127, 128), (128, 127), (129, 299)):
        assert wide[n, k] == weight[n, k].float() * scale[n // 128, k // 128]
    assert torch.equal(
        dequantize_weight(weight[None].repeat(2, 1, 1), scale[None].repeat(2, 1, 1))[1], wide
    )


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (130, 300), (7, 20)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_layer_is_the_exact_product_of_what_was_quantised(
    rows: int, columns: int, biased: bool
) -> None:
    x, weight, scale = drawn(5, rows, columns)
    bias = torch.randn(rows) if biased else None
    quantized = quantize(x)
    exact = dequantize(quantized).double() @ dequantize_weight(weight, scale).double().T
    exact = exact if bias is None else exact + bias.double()
    out = fp8_linear(quantized, weight, scale, bias, dtype=torch.float32)
    assert torch.allclose(out.double(), exact, rtol=1e-5, atol=1e-5)
    plain = x.double() @ dequantize_weight(weight, scale).double().T + (
        0 if bias is None else bias.double()
    )
    # Relative errors of at most 2 ** -4 with random signs leave about 2.6 percent in a sum.
    assert float((out - plain).norm() / plain.norm()) < 0.05


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (2, 3)), (FP8, (1, 3)), (FP8, (2, 2))]
)
def test_weights_and_scales_that_do_not_fit(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight, _ = drawn(5, 130, 300)
    with pytest.raises(
        DescriptorError, match=r"float8_e4m3fn \[N, 300\], and a scale for every 128 by 128 of it"
    ):
        fp8_linear(quantize(x), weight.to(dtype), torch.ones(shape), dtype=torch.float32)


def test_quantized_is_a_tree_of_two_tensors() -> None:
    quantized = quantize(torch.ones(1, 4))
    assert isinstance(quantized, Quantized)
    assert torch.equal(dequantize(quantized), torch.ones(1, 4))
