"""The CUDA implementation of `weft::linear` and `weft::fp8_linear`, in Triton. Import it only where triton is
installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from weft.ops.blocks_triton import multiply
from weft.ops.kernel_triton import begin, early, kernel, release
from weft.ops.norm_triton import quantize
from weft.ops.tiles import Tile, cdiv, linear_tile, segment_columns

_WIDE = Tile(64, 64, 32, 4, 2)
"""The tile of batch-invariant products in float32."""


@kernel(do_not_specialize=["tokens"])
def _linear_kernel(
    x, x_scales, weight, scale, bias, out, tokens, rows, columns, share,
    FP8: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    begin()
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    low = part * share
    acc = multiply(
        x, x_scales, t, t < tokens, weight, scale, tl.minimum(n, rows - 1), low, tl.minimum(low + share, columns),
        columns, FP8, False, EVEN, ROWS, TOKENS, COLUMNS, SWAP,
    )  # fmt: skip
    if BIAS:  # added to the first part
        add = tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32) * (part == 0)
        acc += add[:, None] if SWAP else add[None, :]
    for _ in tl.static_range(1, SEGMENTS):
        low += share
        acc += multiply(
            x, x_scales, t, t < tokens, weight, scale, tl.minimum(n, rows - 1), low, tl.minimum(low + share, columns),
            columns, FP8, False, EVEN, ROWS, TOKENS, COLUMNS, SWAP,
        )  # fmt: skip
    release()
    first = out + part.to(tl.int64) * tokens * rows
    if SWAP:
        place = first + t.to(tl.int64)[None, :] * rows + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(n < rows)[:, None] & (t < tokens)[None, :])
    else:
        place = first + t.to(tl.int64)[:, None] * rows + n[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (n < rows)[None, :])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> Tensor:
    """`weft::linear`."""
    tile = linear_tile(x.shape[0], *weight.shape, False, batch_invariant) if x.itemsize == 2 else None
    if batch_invariant and tile is None:
        tile = _WIDE
    return F.linear(x, weight, bias) if tile is None else run_tile(x, None, weight, None, bias, x.dtype, tile)


def fp8_linear(
    values: Tensor,
    scales: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """`weft::fp8_linear`."""
    tile = linear_tile(values.shape[0], *weight.shape, True, batch_invariant)
    assert tile is not None, "torch has no such product"
    if scales is None:
        values, scales = quantize(values)
    return run_tile(values, scales, weight, scale, bias, dtype, tile)


def run_tile(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """A linear layer with this tile, in FP8 if the weights and x have scales."""
    (tokens, columns), rows, fp8 = x.shape, weight.shape[0], scale is not None
    if tile.segments > 1:
        share = segment_columns(columns, tile.segments)
        parts, segments = tile.parts, tile.segments // tile.parts
    else:
        share = cdiv(cdiv(columns, tile.columns), tile.parts) * tile.columns
        parts, segments = cdiv(columns, share), 1
    shape = (tokens, rows) if parts == 1 else (parts, tokens, rows)
    out = x.new_empty(shape, dtype=dtype if parts == 1 else torch.float32)
    with torch.cuda.device_of(x):
        if tokens:
            _linear_kernel[(cdiv(rows, tile.rows), cdiv(tokens, tile.tokens), parts)](
                x.contiguous(), out if x_scales is None else x_scales, weight, out if scale is None else scale,
                out if bias is None else bias, out, tokens, rows, columns, share,
                FP8=fp8, BIAS=bias is not None, EVEN=columns % tile.columns == 0,
                ROWS=tile.rows, TOKENS=tile.tokens, COLUMNS=tile.columns, SWAP=tile.tokens < 64, SEGMENTS=segments,
                num_warps=tile.warps, num_stages=tile.stages, **early(x),
            )  # fmt: skip
    return out
