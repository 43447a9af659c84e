"""The loop that all products of weights and activations share, in Triton. Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.blocks_triton import quantize_rows


@triton.jit
def multiply(
    x, x_scales, token, live, weight, scale, row, low, high, columns,
    FP8: tl.constexpr, QUANTIZE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Products over the columns low:high, in float32: `[ROWS, TOKENS]` with SWAP, else `[TOKENS, ROWS]`.

    Args:
        x, x_scales: `[.., columns]`, and in FP8 a scale for every 128 of them, or none where x is quantised here.
        token, live: `[TOKENS]` which rows of x, and whether they count.
        weight, scale: of this expert, with one scale for every 128 by 128.
        row: `[ROWS]` which rows of the weights, all of them there.
    """
    blocks = tl.cdiv(columns, 128)
    step = tl.arange(0, COLUMNS)
    x_rows = x + token.to(tl.int64)[:, None] * columns + step[None, :]
    w_rows = weight + row.to(tl.int64)[:, None] * columns + step[None, :]
    acc = tl.zeros([ROWS, TOKENS] if SWAP else [TOKENS, ROWS], tl.float32)
    for k in range(low, high, COLUMNS):
        if EVEN:
            w = tl.load(w_rows + k)
            a = tl.load(x_rows + k, mask=live[:, None], other=0.0)
        else:
            inside = (k + step < columns)[None, :]
            w = tl.load(w_rows + k, mask=inside, other=0.0)
            a = tl.load(x_rows + k, mask=live[:, None] & inside, other=0.0)
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
