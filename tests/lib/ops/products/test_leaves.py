"""Sums that ranks share: some columns, rows or heads give the bits that they have among all, and
leaves add up."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import weft
from weft.errors import DescriptorError
from weft.meshes.placements import reduced
from weft.ops.attention.paged import paged_attention
from weft.ops.experts.products import run_experts
from weft.ops.experts.routing import route
from weft.ops.products.fp8 import quantize
from weft.ops.products.leaves import sum_leaves
from weft.ops.products.linear import fp8_linear, linear
from weft.ops.products.lora import add_lora
from weft.ops.products.parts import sum_parts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LEAVES = 4
COUNTS = (1, 5, 17, 64, 130)
SHAPES = ((4096, 1024), (128, 2048), (40, 96), (200, 1000))


def check_shares(run: Callable[[Tensor, slice, int], Tensor], tokens: int, columns: int) -> None:
    """Raise unless the leaves `run(index, columns, leaves)` of some tokens, on 1, 2 and 4 ranks,
    add up to those of all tokens on one rank."""
    order = torch.randperm(tokens)
    whole = sum_leaves(run(order, slice(0, columns), LEAVES), LEAVES, torch.float32)
    for count in (*(one for one in COUNTS if one <= tokens), tokens):
        for ranks in (1, 2, 4):
            width = columns // ranks
            leaves = LEAVES // ranks
            cuts = [slice(rank * width, (rank + 1) * width) for rank in range(ranks)]
            result = reduced(
                [
                    sum_leaves(run(order[:count], cut, leaves), leaves, torch.float32)
                    for cut in cuts
                ],
                "sum",
            )
            assert torch.equal(result, whole[:count]), (
                f"{count} of {tokens} tokens on {ranks} ranks"
            )


@pytest.mark.one_of(12, 3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = (
        torch.randn(shape, device=device, dtype=dtype),
        torch.randn(shape[0], device=device, dtype=dtype),
    )
    x = torch.randn(300, shape[1], device=device, dtype=dtype)

    def run(index: Tensor, cut: slice, leaves: int) -> Tensor:
        rank_bias = bias if cut.start == 0 else torch.zeros_like(bias)  # as the ranks hold it
        return linear(x[index.to(device), cut], weight[:, cut].contiguous(), rank_bias, leaves)

    with weft.batch_invariant():
        check_shares(run, len(x), shape[1])
        rows = linear(x, weight, bias, 1)
        for count in (2, 4, 8):
            parts = zip(weight.chunk(count), bias.chunk(count), strict=True)
            assert torch.equal(torch.cat([linear(x, *part, 1) for part in parts], -1), rows), (
                f"{count} parts of rows"
            )
    exact = x.double() @ weight.double().T + bias.double()
    result = sum_leaves(linear(x, weight, bias, LEAVES), LEAVES, torch.float32).double()
    assert result.dtype == torch.float64
    assert ((result - exact).norm() / exact.norm()).item() < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2048, 1024), (100, 512)], ids=str)
def test_linear_in_fp8(device: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), device=device)
    x = torch.randn(300, shape[1], device=device, dtype=torch.bfloat16)

    def run(index: Tensor, cut: slice, leaves: int) -> Tensor:
        rank_weight = (
            weight[:, cut].contiguous(),
            scale[:, cut.start // 128 : cut.stop // 128].contiguous(),
        )
        return fp8_linear(
            quantize(x[index.to(device), cut].contiguous()),
            *rank_weight,
            dtype=x.dtype,
            leaves=leaves,
        )

    with weft.batch_invariant():
        check_shares(run, len(x), shape[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adapters(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    columns = 1000
    rows = 520
    rank = 8
    x, weight, a, b = (
        torch.randn(shape).to(device, dtype)
        for shape in ((300, columns), (rows, columns), (3, 1, rank, columns), (3, rows, rank))
    )
    slots = torch.randint(-1, 3, (len(x),), dtype=torch.int32).to(device)

    def run(index: Tensor, cut: slice, leaves: int) -> Tensor:
        inputs = x[index.to(device), cut].contiguous()
        token_slots = slots[index.to(device)]
        products = linear(inputs, weight[:, cut].contiguous(), None, leaves)
        return add_lora(
            products,
            inputs,
            a[..., cut].contiguous(),
            b,
            token_slots,
            token_slots.unique(),
            [0, rows],
            leaves,
        )

    with weft.batch_invariant():
        check_shares(run, len(x), columns)


@pytest.mark.one_of(8, 2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("sizes", [(32, 256, 512, 4), (6, 128, 512, 2)], ids=str)
def test_experts(device: str, fp8: bool, sizes: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    num_experts, hidden, inner, top_k = sizes
    x = torch.randn(300 if device == "cpu" else 2000, hidden, device=device, dtype=torch.bfloat16)
    kind = torch.float8_e4m3fn if fp8 else x.dtype
    gates, ups, down = (
        torch.randn(num_experts, *shape).to(device, kind)
        for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
    )
    scales = torch.rand(2, num_experts, inner // 128, hidden // 128, device=device)
    router = torch.randn(num_experts, hidden, device=device, dtype=x.dtype)

    def run(index: Tensor, cut: slice, leaves: int) -> Tensor:
        inputs = x[index.to(device)]
        blocks = slice(cut.start // 128, cut.stop // 128)
        weights, experts = route(linear(inputs, router), top_k, True, x.dtype)
        products = torch.cat((gates[:, cut], ups[:, cut]), 1), down[:, :, cut].contiguous()
        block_scales = {}
        if fp8:
            block_scales["gate_up_scale"] = torch.cat([one[:, blocks] for one in scales], 1)
            block_scales["down_scale"] = scales[0].transpose(1, 2)[:, :, blocks].contiguous()
        quantized_inputs = quantize(inputs) if fp8 else inputs
        return run_experts(
            quantized_inputs,
            *products,
            weights,
            experts,
            dtype=x.dtype,
            leaves=leaves,
            gate_up_scale=block_scales.get("gate_up_scale"),
            down_scale=block_scales.get("down_scale"),
        )

    with weft.batch_invariant():
        check_shares(run, len(x), inner)
        whole, uncut = (
            run(torch.arange(len(x)), slice(0, inner), leaves) for leaves in (LEAVES, 0)
        )
    expected = sum_parts(uncut, torch.float32)
    assert (
        (sum_leaves(whole, LEAVES, torch.float32) - expected).norm() / expected.norm()
    ).item() < 1e-2


@pytest.mark.one_of(12, 3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (4, 4), (3, 3)], ids=str)
@pytest.mark.parametrize("dim", [16, 6, 128])
def test_attention_of_some_heads(
    device: str, dtype: torch.dtype, heads: tuple[int, int], dim: int
) -> None:
    """Each rank's heads, with the keys and values that these read."""
    if device == "cuda" and dim == 6:
        pytest.skip("the kernel has no such heads")
    torch.manual_seed(0)
    (num_heads, kv_heads), page, lengths = heads, 16, [40, 1, 17, 600 if device == "cuda" else 70]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    count = -(-max(lengths) // page)
    table = (
        torch.randperm(count * len(lengths), dtype=torch.int32).view(len(lengths), count).to(device)
    )
    pages = torch.randn(2, table.numel(), page, kv_heads, dim).to(device, dtype)
    q = torch.randn(int(starts[-1]), num_heads, dim).to(device, dtype)
    slots = torch.zeros(len(q), dtype=torch.int64, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)

    def attend(first: int, end: int) -> Tensor:
        group = num_heads // kv_heads
        rank_pages = pages[:, :, :, first // group : (end - 1) // group + 1].contiguous()
        args = q[:, first:end].contiguous(), None, None, rank_pages, slots, table, starts, seq_lens
        return paged_attention(*args, max(lengths), dim**-0.5, 0)

    with weft.batch_invariant():
        whole = attend(0, num_heads)
        for ranks in (
            one
            for one in (2, 3, 4, 8)
            if num_heads % one == 0 and max(one, kv_heads) % min(one, kv_heads) == 0
        ):
            each = num_heads // ranks
            result = torch.cat(
                [attend(start, start + each) for start in range(0, num_heads, each)], 1
            )
            assert torch.equal(result, whole), f"{ranks} ranks"


def brute_force(values: list[float]) -> float:
    """The sum of float32 values as a tree, one addition at a time."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    both = torch.tensor(
        [brute_force(values[:half]), brute_force(values[half:])], dtype=torch.float32
    )
    return float(both[0] + both[1])


@given(st.sampled_from((1, 2, 4, 8, 16)), st.integers(0, 99))
def test_leaves_are_a_balanced_tree(leaves: int, seed: int) -> None:
    x = torch.randn(leaves, 2, 3, generator=torch.Generator().manual_seed(seed))
    expected = [[brute_force(x[:, i, j].tolist()) for j in range(3)] for i in range(2)]
    assert sum_leaves(x, leaves, torch.float32).tolist() == expected


def test_columns_that_are_no_multiple_are_refused() -> None:
    with pytest.raises(DescriptorError, match=r"leaves=4(.|\n)*saw: 6 columns"):
        linear(torch.zeros(2, 6), torch.zeros(3, 6), None, 4)
    weight = torch.zeros(3, 256).to(torch.float8_e4m3fn)
    scale = torch.ones(1, 2)
    with pytest.raises(
        DescriptorError, match=r"leaves=4(.|\n)*saw: 256 columns(.|\n)*multiple of 128"
    ):
        fp8_linear(torch.zeros(2, 256), weight, scale, dtype=torch.float32, leaves=4)
