"""The instructions `Linear` and `Norm` of a persistent kernel. Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.blocks_triton import multiply
from weft.ops.persistent.shared_triton import added, wait


@triton.jit
def rows_of(tile, rows, gate, ROWS: tl.constexpr):
    """The rows of weights of an item: with a gate half of them, and the rows of `up` that belong to them."""
    i = tl.arange(0, ROWS)
    HALF: tl.constexpr = ROWS // 2
    return tl.where(gate != 0, tile * HALF + i % HALF + i // HALF * (rows // 2), tile * ROWS + i)


@triton.jit
def _fields_of(row, TYPE: tl.constexpr):
    """The fields of `Linear`, in order."""
    x, residual, gain, total = tl.load(row + 1), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    x_parts = tl.load(row + 2).to(tl.int32)
    weight, bias, out = tl.load(row + 6).to(tl.pointer_type(TYPE)), tl.load(row + 7), tl.load(row + 8)
    rows, columns = tl.load(row + 9).to(tl.int32), tl.load(row + 10).to(tl.int32)
    parts, gate = tl.load(row + 11).to(tl.int32), tl.load(row + 12)
    eps = tl.load(row + 13).to(tl.int32).to(tl.float32, bitcast=True)
    return x, x_parts, residual, gain, total, weight, bias, out, rows, columns, parts, gate, eps


@triton.jit
def linear(
    row, arrived, ended, scratch, tokens, program, PROGRAMS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """A product; an item is ROWS rows of one part."""
    x, x_parts, residual, gain, total, weight, bias, out, rows, columns, parts, gate, eps = _fields_of(row, TYPE)
    weight, columns = tl.multiple_of(weight, 16), tl.multiple_of(columns, 16)
    wait(arrived, ended)
    row_tiles = tl.cdiv(rows, ROWS)
    items = row_tiles * parts
    if program < items:
        source = tl.multiple_of(x.to(tl.pointer_type(TYPE)), 16)
        if gain != 0:
            source = tl.multiple_of(scratch + program * (WIDTH * TOKENS), 16)
            for token in range(tokens):
                _norm_token(
                    x, x_parts, residual, gain, total, source.to(tl.int64), token, tokens, columns, eps,
                    (program == 0) & (total != 0), WIDTH, TYPE,
                )  # fmt: skip
            tl.debug_barrier()
        share = tl.multiple_of(columns // parts, 16)
        t = tl.arange(0, TOKENS)
        for item in range(program, items, PROGRAMS):
            n = rows_of(item % row_tiles, rows, gate, ROWS)
            part = item // row_tiles
            low = tl.multiple_of(part * share, 16)
            acc = multiply(
                source, source, t, t < tokens, weight, weight, tl.minimum(n, rows - 1), low, low + share, columns,
                False, False, EVEN, ROWS, TOKENS, COLUMNS, True,
            )  # fmt: skip
            if (bias != 0) & (part == 0):
                added = tl.load(bias.to(tl.pointer_type(TYPE)) + n, mask=n < rows, other=0.0)
                acc += added.to(tl.float32)[:, None]
            if gate != 0:
                _store_gated(acc, out, item, rows // 2, t, tokens, ROWS, TOKENS, TYPE)
            else:
                mask = (n < rows)[:, None] & (t < tokens)[None, :]
                place = t[None, :] * rows + n[:, None]
                if parts == 1:
                    tl.store(out.to(tl.pointer_type(TYPE)) + place, acc.to(TYPE), mask=mask)
                else:
                    tl.store(out.to(tl.pointer_type(tl.float32)) + part * tokens * rows + place, acc, mask=mask)


@triton.jit
def linear_of_one(
    row, arrived, ended, program, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """`linear` of one token. The first weights are on the way to registers before what they are multiplied with is
    there."""
    x, x_parts, residual, gain, total, weight, bias, out, rows, columns, parts, gate, eps = _fields_of(row, TYPE)
    weight, columns = tl.multiple_of(weight, 16), tl.multiple_of(columns, 16)
    row_tiles = tl.cdiv(rows, ROWS)
    items = row_tiles * parts
    share = tl.multiple_of(columns // parts, 16)
    step = tl.arange(0, CHUNK)
    low = tl.multiple_of(program // row_tiles * share, 16)
    n = rows_of(program % row_tiles, rows, gate, ROWS)
    at = weight + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * columns + step[None, :]
    count = tl.where(program < items, share, 0)
    first = tl.load(at + low, mask=(step < count)[None, :], other=0.0)
    second = tl.load(at + (low + CHUNK), mask=(CHUNK + step < count)[None, :], other=0.0)
    wait(arrived, ended)
    if program < items:
        factor = 1.0
        if gain != 0:
            column = tl.arange(0, WIDTH)
            whole = added(x, x_parts, residual, column, columns, column < columns, TYPE)
            factor = 1 / tl.sqrt(tl.sum(whole * whole, 0) / columns + eps)
            if (program == 0) & (total != 0):
                place = tl.multiple_of(total.to(tl.pointer_type(TYPE)), 16) + column
                tl.store(place, whole.to(TYPE), mask=column < columns)
        for item in range(program, items, PROGRAMS):
            n = rows_of(item % row_tiles, rows, gate, ROWS)
            part = item // row_tiles
            low = tl.multiple_of(part * share, 16)
            if item != program:
                at = weight + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * columns + step[None, :]
                first = tl.load(at + low, mask=(step < share)[None, :], other=0.0)
                second = tl.load(at + (low + CHUNK), mask=(CHUNK + step < share)[None, :], other=0.0)
            sums = tl.zeros([ROWS, CHUNK // 8], tl.float32)
            value = _input(x, x_parts, residual, gain, factor, low + step, columns, step < share, TYPE)
            for k in range(0, share, CHUNK):
                third = tl.load(at + (low + k + 2 * CHUNK), mask=(k + 2 * CHUNK + step < share)[None, :], other=0.0)
                there = k + CHUNK + step < share
                following = _input(x, x_parts, residual, gain, factor, low + k + CHUNK + step, columns, there, TYPE)
                # Eight neighbours are in the registers of one thread.
                sums += tl.sum(tl.reshape(first.to(tl.float32) * value[None, :], (ROWS, CHUNK // 8, 8)), 2)
                first = second
                second = third
                value = following
            acc = tl.sum(sums, 1)
            if (bias != 0) & (part == 0):
                acc += tl.load(bias.to(tl.pointer_type(TYPE)) + n, mask=n < rows, other=0.0).to(tl.float32)
            if gate != 0:
                HALF: tl.constexpr = ROWS // 2
                left, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF)), (1, 0)))
                left, up = left.to(TYPE).to(tl.float32), up.to(TYPE).to(tl.float32)
                inner = item * HALF + tl.arange(0, HALF)
                place = out.to(tl.pointer_type(TYPE)) + inner
                tl.store(place, (left / (1 + tl.exp(-left)) * up).to(TYPE), mask=inner < rows // 2)
            elif parts == 1:
                tl.store(out.to(tl.pointer_type(TYPE)) + n, acc.to(TYPE), mask=n < rows)
            else:
                tl.store(out.to(tl.pointer_type(tl.float32)) + part * rows + n, acc, mask=n < rows)


@triton.jit
def _input(x, x_parts, residual, gain, factor, column, columns, inside, TYPE: tl.constexpr):
    """Some columns of the only token, normalised if there is a gain, in float32."""
    value = added(x, x_parts, residual, column, columns, inside, TYPE)
    if gain != 0:
        scale = tl.load(tl.multiple_of(gain.to(tl.pointer_type(TYPE)), 16) + column, mask=inside, other=0.0)
        value = (value * factor * scale.to(tl.float32)).to(TYPE).to(tl.float32)
    return value


@triton.jit
def _store_gated(
    acc, out, item, inner, t, tokens, ROWS: tl.constexpr, TOKENS: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """Store `silu(gate) * up` of an item, whose first half of rows is the gate's."""
    HALF: tl.constexpr = ROWS // 2
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, HALF, TOKENS)), (1, 2, 0)))
    gate, up = gate.to(TYPE).to(tl.float32), up.to(TYPE).to(tl.float32)
    n = item * HALF + tl.arange(0, HALF)
    mask = (n < inner)[:, None] & (t < tokens)[None, :]
    place = out.to(tl.pointer_type(TYPE)) + t[None, :] * inner + n[:, None]
    tl.store(place, (gate / (1 + tl.exp(-gate)) * up).to(TYPE), mask=mask)


@triton.jit
def norm(row, arrived, ended, tokens, program, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """The fields are those of `Norm`, in order. An item is a token."""
    x, residual, gain, total = tl.load(row + 1), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    x_parts = tl.load(row + 2).to(tl.int32)
    out, columns = tl.load(row + 6), tl.multiple_of(tl.load(row + 7).to(tl.int32), 16)
    eps = tl.load(row + 8).to(tl.int32).to(tl.float32, bitcast=True)
    wait(arrived, ended)
    for token in range(program, tokens, PROGRAMS):
        _norm_token(x, x_parts, residual, gain, total, out, token, tokens, columns, eps, total != 0, WIDTH, TYPE)


@triton.jit
def _norm_token(
    x, x_parts, residual, gain, total, out, token, tokens, columns, eps, keeps, WIDTH: tl.constexpr, TYPE: tl.constexpr
):
    """Add a token's parts and its residual, store the sum if `keeps`, and normalise it into `out` if it has a gain."""
    column = tl.arange(0, WIDTH)
    inside = column < columns
    place = token * columns + column
    value = added(x, x_parts, residual, place, tokens * columns, inside, TYPE)
    if keeps:
        tl.store(tl.multiple_of(total.to(tl.pointer_type(TYPE)), 16) + place, value.to(TYPE), mask=inside)
    if gain != 0:
        weight = tl.load(tl.multiple_of(gain.to(tl.pointer_type(TYPE)), 16) + column, mask=inside, other=0.0)
        value = value * (1 / tl.sqrt(tl.sum(value * value, 0) / columns + eps)) * weight.to(tl.float32)
        tl.store(tl.multiple_of(out.to(tl.pointer_type(TYPE)), 16) + place, value.to(TYPE), mask=inside)
