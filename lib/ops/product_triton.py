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
    """Products over the columns low:high, in float32: `[rows, tokens]` with SWAP, else `[tokens, rows]`.

    Args:
        x: `[.., columns]`.
        x_scales: in FP8, of the activations, or none where they are quantised here.
        token, live: which rows of the activations, and whether they count.
        weight: `[.., columns]` of this expert; all of `row` are there.
        scale: of this expert's weights, one for every 128 by 128.
        row: which rows of the weights.
    """
    step = tl.arange(0, COLUMNS)
    x_rows = x + token.to(tl.int64)[:, None] * columns + step[None, :]
    w_rows = weight + row.to(tl.int64)[:, None] * columns + step[None, :]
    acc = tl.zeros([ROWS, TOKENS] if SWAP else [TOKENS, ROWS], tl.float32)
    for k in range(low, high, COLUMNS):
        inside = (k + step < columns)[None, :]
        w = tl.load(w_rows + k) if EVEN else tl.load(w_rows + k, mask=inside, other=0.0)
        a = tl.load(x_rows + k, mask=live[:, None] if EVEN else live[:, None] & inside, other=0.0)
        if FP8:
            blocks = tl.cdiv(columns, 128)
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
