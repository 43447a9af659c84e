"""The loop that all products of weights and activations share, in Triton. Import it only where triton is installed."""

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
def load_step(x_rows, w_rows, live, k, columns, EVEN: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns k:k + COLUMNS of the activations and of the weights, by pointers to their first COLUMNS."""
    if EVEN:
        w = tl.load(w_rows + k)
        a = tl.load(x_rows + k, mask=live[:, None], other=0.0)
    else:
        inside = (k + tl.arange(0, COLUMNS) < columns)[None, :]
        w = tl.load(w_rows + k, mask=inside, other=0.0)
        a = tl.load(x_rows + k, mask=live[:, None] & inside, other=0.0)
    return a, w


@triton.jit
def multiply_step(
    acc, a, w, x_scales, scale, token, live, row, k, columns,
    FP8: tl.constexpr, QUANTIZE: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """`acc` and the products of `load_step`, in float32: `[rows, tokens]` with SWAP, else `[tokens, rows]`.

    Args:
        x_scales: in FP8, of the activations, or none where they are quantised here.
        scale: of this expert's weights, one for every 128 by 128.
        token, live: which rows of the activations, and whether they count.
        row: which rows of the weights.
    """
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


@triton.jit
def multiply(
    x, x_scales, token, live, weight, scale, row, low, high, columns,
    FP8: tl.constexpr, QUANTIZE: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Products over the columns low:high, as `multiply_step` adds them up.

    Args:
        x: `[.., columns]`.
        weight: `[.., columns]` of this expert; all of `row` are there.
    """
    step = tl.arange(0, COLUMNS)
    x_rows = x + token.to(tl.int64)[:, None] * columns + step[None, :]
    w_rows = weight + row.to(tl.int64)[:, None] * columns + step[None, :]
    acc = zeros(ROWS, TOKENS, SWAP)
    for k in range(low, high, COLUMNS):
        a, w = load_step(x_rows, w_rows, live, k, columns, EVEN, COLUMNS)
        acc = multiply_step(acc, a, w, x_scales, scale, token, live, row, k, columns, FP8, QUANTIZE, SWAP)
    return acc
