"""The products of `weft::run_experts` with tiles of 64 pairs or more, in Triton.

The tensor cores are the bound here. So tokens are the left operand, a program takes two blocks of
the weights' rows, and the tensor memory accelerator (TMA) of sm_90 fetches the weights, which saves
registers and address arithmetic.

Measured on an H200 with 2,048 tokens of Qwen3-30B-A3B in FP8: 177 and 118 us for the two products
(582 and 437 TFLOP/s, padding not counted); `weft.ops.experts.products_triton` takes 327 and 258 us.
Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.ops.experts.routing_triton import Aligned
from weft.ops.kernel_triton import LINE, begin, early, kernel, release
from weft.ops.products.blocks_triton import TRITON_DTYPES, gated
from weft.ops.tiles.tile import Tile, cdiv, leaf_columns


@triton.jit
def _step(acc, a, w, factor, scale, FP8: tl.constexpr):
    """Add to `acc` `[TOKENS, WIDTH]` a product over one block of columns, which in FP8 is
    multiplied by the scales of tokens and block."""
    if FP8:
        acc += tl.dot(a, tl.trans(w)) * (factor * tl.load(scale))[:, None]
    else:
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _store_gated(gate, up, out, pair, live, first, inner, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """Store `silu(gate) * up` in the pairs' rows, from column `first` on."""
    column = first + tl.arange(0, WIDTH)
    result = gated(gate, up).to(TYPE)
    mask = live[:, None] & (column < inner)[None, :]
    tl.store(out + pair.to(tl.int64)[:, None] * inner + column[None, :], result, mask=mask)


@triton.jit
def _store_weighted(
    acc,
    out,
    by,
    pair,
    live,
    first,
    leaf,
    inner,
    tokens,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Store a block times the pairs' weights, each in the part of its slot and leaf."""
    column = first + tl.arange(0, WIDTH)
    row = (leaf * TOP_K + pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
    mask = live[:, None] & (column < inner)[None, :]
    tl.store(out + row[:, None] * inner + column[None, :], (acc * by[:, None]).to(TYPE), mask=mask)


@kernel(do_not_specialize=["tokens"])
def _many_kernel(
    x,
    x_scales,
    weight,
    scale,
    weights,
    order,
    owners,
    out,
    tokens,
    columns,
    share,
    inner,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    FP8: tl.constexpr,
    EVEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Multiply a tile of an expert's pairs with two blocks of its rows, over the `share` columns of
    a leaf; the blocks are gates and the matching ups, or neighbours.

    `weight` describes `[E * rows, columns]`; `inner` is the number of columns of the result. Rows
    past the expert's last one belong to another expert, and nothing is stored for them.
    """
    begin()
    expert = tl.load(owners + tl.program_id(0))
    if expert >= 0:
        pair = tl.load(order + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))
        live = pair >= 0
        pair = tl.maximum(pair, 0)
        first = tl.program_id(1) * (WIDTH if GATED else 2 * WIDTH)
        second = first + (inner if GATED else WIDTH)
        height = 2 * inner if GATED else inner
        source = pair // TOP_K if GATED else pair
        blocks = tl.cdiv(columns, 128)
        first_scale = scale + (expert * tl.cdiv(height, 128) + first // 128) * blocks
        # The second block may begin past the expert's last row: keep its scale's address in range.
        second_scale = (
            scale + (expert * tl.cdiv(height, 128) + tl.minimum(second, height - 1) // 128) * blocks
        )
        column = tl.arange(0, COLUMNS)
        x_rows = x + source.to(tl.int64)[:, None] * columns + column[None, :]
        factor = live.to(tl.float32)
        left = tl.zeros([TOKENS, WIDTH], tl.float32)
        right = tl.zeros([TOKENS, WIDTH], tl.float32)
        leaf = tl.program_id(2)
        high = (leaf + 1) * share
        for k in range(leaf * share, high, COLUMNS):
            inside = live[:, None] if EVEN else live[:, None] & (k + column < high)[None, :]
            a = tl.load(x_rows + k, mask=inside, other=0.0)
            if FP8:
                factor = tl.load(
                    x_scales + source.to(tl.int64) * blocks + k // 128, mask=live, other=0.0
                )
            left = _step(
                left,
                a,
                weight.load([expert * height + first, k]),
                factor,
                first_scale + k // 128,
                FP8,
            )
            right = _step(
                right,
                a,
                weight.load([expert * height + second, k]),
                factor,
                second_scale + k // 128,
                FP8,
            )
        release()
        if GATED:
            _store_gated(left, right, out, pair, live, first, inner, WIDTH, TYPE)
        else:
            by = tl.load(weights + pair, mask=live, other=0.0)
            _store_weighted(
                left, out, by, pair, live, first, leaf, inner, tokens, TOP_K, WIDTH, TYPE
            )
            _store_weighted(
                right, out, by, pair, live, second, leaf, inner, tokens, TOP_K, WIDTH, TYPE
            )


def takes(tile: Tile, weight: Tensor) -> bool:
    """Whether `launch` supports a product with this tile."""
    return tile.sort and tile.tokens >= 64 and weight.shape[-1] * weight.itemsize % LINE == 0


def launch(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    weights: Tensor | None,
    experts: Tensor,
    aligned: Aligned,
    out: Tensor,
    tile: Tile,
    leaves: int = 0,
) -> None:
    """One product of sorted pairs: tokens with gate and up if `weights` is None, otherwise pairs
    with `down`.

    Args:
        x, x_scales: quantised if `weight` is.
    """
    (num_experts, height, columns), inner, width = weight.shape, out.shape[-1], tile.rows // 2
    rows = TensorDescriptor(
        weight, [num_experts * height, columns], [columns, 1], [width, tile.columns]
    )
    absent = experts
    grid = (
        aligned.owners.shape[0],
        cdiv(inner, width if weights is None else tile.rows),
        max(leaves, 1),
    )
    share = leaf_columns(columns, leaves)
    _many_kernel[grid](
        x,
        absent if x_scales is None else x_scales,
        rows,
        absent if scale is None else scale,
        absent if weights is None else weights,
        aligned.order,
        aligned.owners,
        out,
        experts.shape[0],
        columns,
        share,
        inner,
        TOP_K=experts.shape[1],
        GATED=weights is None,
        FP8=scale is not None,
        EVEN=share % tile.columns == 0,
        WIDTH=width,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        TYPE=TRITON_DTYPES[out.dtype],
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early(x),
    )
