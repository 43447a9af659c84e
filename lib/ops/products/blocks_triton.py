"""Functions that several Triton kernels share: sums of parts, FP8 blocks of 128 columns, and the
loop of a product.

Import this module only where triton is installed. If TRITON_INTERPRET=1 was set before, kernels run
on CPU tensors, for tests; not in bfloat16, whose products Triton's interpreter computes wrongly
(https://github.com/triton-lang/triton/issues/11584).
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes; its tuples
# grow in a loop.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

import torch
import triton
import triton.language as tl

from weft.ops.kernel_triton import INTERPRETED, begin
from weft.ops.products.fp8 import LEAST, MOST

# A kernel may read a global variable only if it is a `constexpr`.
_MOST = tl.constexpr(MOST)
_LEAST = tl.constexpr(LEAST)

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def load_sum(x, offsets, mask, stride, PARTS: tl.constexpr, TYPE: tl.constexpr):
    """The sum of the parts at `offsets`, rounded to TYPE and returned in float32; with 0 parts, x
    is the finished sum."""
    total = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        total += tl.load(x + i * tl.cast(stride, tl.int64) + offsets, mask=mask, other=0.0).to(
            tl.float32
        )
    return total.to(TYPE).to(tl.float32)


@triton.jit
def grouped(place, row_tiles, token_tiles, GROUP: tl.constexpr):
    """The tile of rows and the tile of tokens of the program `place`.

    Each tile of weights is multiplied with GROUP tiles of tokens before the next one. So programs
    that run at the same time share tiles of both, which stay in the cache.
    """
    first = place // (GROUP * row_tiles) * GROUP
    size = tl.minimum(token_tiles - first, GROUP)
    place = place % (GROUP * row_tiles)
    return place // size, first + place % size


@triton.jit
def gated(gate, up):
    """`silu(gate) * up`, of float32."""
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def to_fp8(x):
    """Convert float32 values in range to float8_e4m3fn, rounded to nearest, ties to even."""
    # The interpreter rounds ties and subnormals to FP8 wrongly:
    # https://github.com/triton-lang/triton/pull/11897
    if INTERPRETED:
        size = tl.abs(x)
        step = tl.exp2(tl.maximum(tl.floor(tl.log2(tl.maximum(size, 1e-30))), -6.0) - 3.0)
        down = tl.floor(size / step)
        rest = size / step - down
        odd = down - 2 * tl.floor(down / 2)
        size = (down + tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1)), 1.0, 0.0)) * step
        x = tl.where(x < 0, -size, size)
    return x.to(tl.float8e4nv)


@triton.jit
def clamp_to_fp8(x):
    """Convert values to float8_e4m3fn, with those beyond its range clamped to it."""
    wide = x.to(tl.float32)
    clamped = tl.minimum(tl.maximum(wide, -_MOST), _MOST)
    # Keep NaN, which the minimum and maximum would replace.
    return to_fp8(tl.where(wide == wide, clamped, wide))


# `largest` is a tensor, by `tl.full`: in the interpreter of Triton 3.8 a constexpr plus a tensor is
# a constexpr, which `div_rn` does not take.
@triton.jit
def quantize_rows(x):
    """FP8 values and scales `[R]` of float32 rows `[R, 128]`, as `reference_quantize` defines
    them."""
    most = tl.maximum(tl.max(tl.abs(x), 1), _LEAST)
    largest = tl.full(most.shape, _MOST, tl.float32)
    scaled = x * tl.div_rn(largest, most)[:, None]
    values = to_fp8(tl.minimum(tl.maximum(scaled, -_MOST), _MOST))
    return values, tl.div_rn(most, largest)


# Only the weights are loaded early: on an H100, loading their scales before `begin` was slower.
@triton.jit
def _multiply_first(
    x,
    x_scales,
    token,
    live,
    weight,
    scale,
    row,
    low,
    high,
    columns,
    FP8: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The product `[rows, tokens]` over the first tiles of columns of low:high, whose weights are
    all loaded before the activations."""
    # In bfloat16 the tiles are one wide tile. In FP8 they stay separate, since each has a scale.
    WIDTH: tl.constexpr = COLUMNS if FP8 else TILES * COLUMNS
    COUNT: tl.constexpr = TILES if FP8 else 1
    step = low + tl.arange(0, WIDTH)
    x_rows = x + token.to(tl.int64)[:, None] * columns + step[None, :]
    w_rows = weight + row.to(tl.int64)[:, None] * columns + step[None, :]
    weights = ()
    for i in tl.static_range(COUNT):
        inside = step + i * WIDTH < high
        weights += (
            tl.load(w_rows + i * WIDTH, mask=inside[None, :], other=0.0, cache_modifier=".cg"),
        )
    if EARLY:
        begin()
    values = ()
    for i in tl.static_range(COUNT):
        inside = step + i * WIDTH < high
        values += (tl.load(x_rows + i * WIDTH, mask=live[:, None] & inside[None, :], other=0.0),)
    acc = tl.zeros([row.shape[0], token.shape[0]], tl.float32)
    if FP8:
        blocks = tl.cdiv(columns, 128)
        for i in tl.static_range(COUNT):
            # Past the last block, values and weights are 0, so any scale will do.
            block = tl.minimum(low // 128 + i, blocks - 1)
            factor = tl.load(x_scales + token.to(tl.int64) * blocks + block, mask=live, other=0.0)
            by_row = tl.load(scale + row // 128 * blocks + block)
            acc += tl.dot(weights[i], tl.trans(values[i])) * (by_row[:, None] * factor[None, :])
    else:
        acc = tl.dot(weights[0], tl.trans(values[0]), acc, input_precision="ieee")
    return acc


@triton.jit
def multiply(
    x,
    x_scales,
    token,
    live,
    weight,
    scale,
    row,
    low,
    high,
    columns,
    FP8: tl.constexpr,
    QUANTIZE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SWAP: tl.constexpr,
    AHEAD: tl.constexpr = 0,
    ALL: tl.constexpr = False,
    EARLY: tl.constexpr = False,
):
    """The product of weights and activations over the columns low:high, in float32.

    The result is `[rows, tokens]` with SWAP, otherwise `[tokens, rows]`.

    Args:
        x: the activations, `[…, columns]`.
        x_scales: the FP8 scales of the activations; not read with QUANTIZE, which quantises them
            here.
        token, live: the rows of the activations, and whether each of them counts.
        weight: `[…, columns]` of this expert, which contains all of `row`.
        scale: the scales of this expert's weights, one for every 128 by 128.
        row: the rows of the weights.
        AHEAD: the number of first tiles of columns whose weights are loaded together; only with
            SWAP.
        ALL: there are no further tiles.
        EARLY: call `begin` only after loading these weights, since nothing writes them.
    """
    if AHEAD:
        first = _multiply_first(
            x,
            x_scales,
            token,
            live,
            weight,
            scale,
            row,
            low,
            high,
            columns,
            FP8,
            COLUMNS,
            AHEAD,
            EARLY,
        )
        if ALL:
            return first
    step = tl.arange(0, COLUMNS)
    x_rows = x + token.to(tl.int64)[:, None] * columns + step[None, :]
    w_rows = weight + row.to(tl.int64)[:, None] * columns + step[None, :]
    acc = first if AHEAD else tl.zeros([ROWS, TOKENS] if SWAP else [TOKENS, ROWS], tl.float32)
    for k in range(low + AHEAD * COLUMNS, high, COLUMNS):
        inside = (k + step < high)[None, :]
        w = tl.load(w_rows + k) if EVEN else tl.load(w_rows + k, mask=inside, other=0.0)
        a = tl.load(x_rows + k, mask=live[:, None] if EVEN else live[:, None] & inside, other=0.0)
        if FP8:
            blocks = tl.cdiv(columns, 128)
            if QUANTIZE:
                a, factor = quantize_rows(a.to(tl.float32))
            else:
                factor = tl.load(
                    x_scales + token.to(tl.int64) * blocks + k // 128, mask=live, other=0.0
                )
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
