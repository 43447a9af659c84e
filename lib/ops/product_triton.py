"""A step of the loop that all products of weights and activations share, in Triton. Import it only where triton is
installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.blocks_triton import quantize_rows


@triton.jit
def zeros(ROWS: tl.constexpr, TOKENS: tl.constexpr, SWAP: tl.constexpr):
    """What `multiply_step` starts from."""
    return tl.zeros([ROWS, TOKENS] if SWAP else [TOKENS, ROWS], tl.float32)


@triton.jit
def multiply_step(
    acc, x, x_scales, token, live, weight, scale, row, k, columns,
    FP8: tl.constexpr, QUANTIZE: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """`acc` and the products over the columns k:k + COLUMNS, in float32: `[rows, tokens]` with SWAP, else
    `[tokens, rows]`.

    Args:
        x, x_scales: `[.., columns]`, and in FP8 a scale for every 128 of them, or none where x is quantised here.
        token, live: which rows of x, and whether they count.
        weight, scale: of this expert, with one scale for every 128 by 128.
        row: which rows of the weights, all of them there.
    """
    step = k + tl.arange(0, COLUMNS)
    blocks = tl.cdiv(columns, 128)
    x_rows = x + token.to(tl.int64)[:, None] * columns + step[None, :]
    w_rows = weight + row.to(tl.int64)[:, None] * columns + step[None, :]
    if EVEN:
        w = tl.load(w_rows)
        a = tl.load(x_rows, mask=live[:, None], other=0.0)
    else:
        inside = (step < columns)[None, :]
        w = tl.load(w_rows, mask=inside, other=0.0)
        a = tl.load(x_rows, mask=live[:, None] & inside, other=0.0)
    if FP8:
        if QUANTIZE:
            a, factor = quantize_rows(a.to(tl.float32))
        else:
            factor = tl.load(x_scales + token.to(tl.int64) * blocks + k // 128, mask=live, other=0.0)
        by_row = tl.load(scale + row // 128 * blocks + k // 128)
        if SWAP:
            acc += tl.dot(w, tl.trans(a)) * (by_row[:, None] * factor[None, :])
        else:
            acc += tl.dot(a, tl.trans(w)) * (factor[:, None] * by_row[None, :])
    elif SWAP:
        acc = tl.dot(w, tl.trans(a), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    return acc
