"""The CUDA implementation of `weft::fp8_linear`, in Triton. Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.product_triton import multiply
from weft.ops.tiles import Tile, linear_tile


@triton.jit
def _linear_kernel(
    values, scales, weight, scale, bias, out, tokens, rows, columns, share,
    BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    low = part * share
    high = tl.minimum(low + share, columns)
    acc = multiply(
        values, scales, t, t < tokens, weight, scale, tl.minimum(n, rows - 1), low, high, columns,
        True, False, EVEN, ROWS, TOKENS, COLUMNS, SWAP,
    )  # fmt: skip
    first = out + part.to(tl.int64) * tokens * rows
    if BIAS:  # the first part's
        add = tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32) * (part == 0)
        acc += add[:, None] if SWAP else add[None, :]
    if SWAP:
        place = first + t.to(tl.int64)[None, :] * rows + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(n < rows)[:, None] & (t < tokens)[None, :])
    else:
        place = first + t.to(tl.int64)[:, None] * rows + n[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (n < rows)[None, :])


def fp8_linear(
    values: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`weft::fp8_linear`."""
    tile = linear_tile(values.shape[0], *weight.shape)
    return run_tile(values, scales, weight, scale, bias, dtype, tile)


def run_tile(
    values: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, tile: Tile
) -> Tensor:
    """`fp8_linear` with this tile."""
    (tokens, columns), rows = values.shape, weight.shape[0]
    steps = triton.cdiv(columns, tile.columns)
    share = triton.cdiv(steps, tile.parts) * tile.columns
    parts = triton.cdiv(columns, share)
    shape = (tokens, rows) if parts == 1 else (parts, tokens, rows)
    out = values.new_empty(shape, dtype=dtype if parts == 1 else torch.float32)
    with torch.cuda.device_of(values):
        if tokens:
            _linear_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(tokens, tile.tokens), parts)](
                values.contiguous(), scales, weight, scale, scale if bias is None else bias, out,
                tokens, rows, columns, share,
                BIAS=bias is not None, EVEN=columns % tile.columns == 0,
                ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tile.columns, SWAP=tile.tokens < 64,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
    return out
