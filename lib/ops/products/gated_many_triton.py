"""`weft::swiglu` for many tokens, in Triton: the product is limited by the tensor cores, and ends
with the gate.

The tensor memory accelerator (TMA) of sm_90 fetches both operands and writes the result. A program
takes equally many rows of the gate and of up: one tensor descriptor, of the weights as `[2, I, K]`,
loads both. So each step is one product of 128 by 256, and a thread holds the gate and the up of the
same column.

Measured on an H100 under its power cap with 8,192 tokens: 2.92 ms for gate and up of 28,672x4,096,
and 4.39 ms for 34,816x5,120; torch's product and a separate kernel for the gate take 3.03 and
4.53 ms. Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.ops.kernel_triton import LINE, begin, early, kernel, release
from weft.ops.products.blocks_triton import gated, grouped
from weft.ops.tiles.tile import Tile, cdiv

# The tiles of tokens that are multiplied with one tile of weights before the next.
_GROUP = 16


@kernel(do_not_specialize=["tokens"])
def _gated_many_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    inner,
    columns,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    begin()
    # If the loop could be skipped, ptxas would wait for each product before the next.
    tl.assume(columns > 0)
    row_tile, token_tile = grouped(
        tl.program_id(0), tl.cdiv(inner, WIDTH), tl.cdiv(tokens, TOKENS), GROUP
    )
    row = row_tile * WIDTH
    token = token_tile * TOKENS
    acc = tl.zeros([TOKENS, 2 * WIDTH], tl.float32)
    for k in range(0, columns, COLUMNS):
        both = tl.reshape(weight.load([0, row, k]), (2 * WIDTH, COLUMNS))
        acc = tl.dot(x.load([token, k]), tl.trans(both), acc, input_precision="ieee")
    if BIAS:
        i = tl.arange(0, 2 * WIDTH)
        n = row + i % WIDTH
        acc += tl.load(bias + i // WIDTH * inner + n, mask=n < inner, other=0.0).to(tl.float32)[
            None, :
        ]
    release()
    pairs = tl.permute(tl.reshape(acc, (TOKENS, 2, WIDTH)), (0, 2, 1)).to(out.dtype).to(tl.float32)
    gate, up = tl.split(pairs)
    out.store([token, row], gated(gate, up).to(out.dtype))


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `swiglu_many` supports these tensors on this GPU: TMA needs aligned rows."""
    aligned = all(one.data_ptr() % LINE == 0 and one.is_contiguous() for one in (x, weight))
    rows_aligned = x.shape[1] * x.itemsize % LINE == weight.shape[0] // 2 * x.itemsize % LINE == 0
    return (
        aligned
        and rows_aligned
        and (not x.is_cuda or torch.cuda.get_device_capability(x.device) == (9, 0))
    )


def swiglu_many(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """`weft::swiglu` with this tile, half of whose rows are of the gate and half of up."""
    (tokens, columns), inner = x.shape, len(weight) // 2
    width = tile.rows // 2
    out = x.new_empty(tokens, inner)
    tokens_of = TensorDescriptor(x, [tokens, columns], [columns, 1], [tile.tokens, tile.columns])
    rows = TensorDescriptor(
        weight, [2, inner, columns], [inner * columns, columns, 1], [2, width, tile.columns]
    )
    results = TensorDescriptor(out, [tokens, inner], [inner, 1], [tile.tokens, width])
    with torch.cuda.device_of(x):
        _gated_many_kernel[(cdiv(tokens, tile.tokens) * cdiv(inner, width),)](
            tokens_of,
            rows,
            out if bias is None else bias.contiguous(),
            results,
            tokens,
            inner,
            columns,
            BIAS=bias is not None,
            TOKENS=tile.tokens,
            WIDTH=width,
            COLUMNS=tile.columns,
            GROUP=_GROUP,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **early(x),
        )
    return out
