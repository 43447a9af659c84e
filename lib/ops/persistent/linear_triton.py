"""The instructions `Linear` and `Norm` of a persistent kernel. Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.persistent.instructions import COLUMNS, FIELDS, ROWS
from weft.ops.persistent.shared_triton import added, eights, load_words, masked, numbers_of, wait

_FIELDS, _HALF = tl.constexpr(FIELDS), tl.constexpr(ROWS // 2)
_LANES = tl.constexpr(128)
"""Words of a row that a warp reads at once: 16 bytes of each thread, if numbers have two. A word is two numbers next to
each other, because a register is: tiles that go from step to step take half of them."""
_WORDS = tl.constexpr(COLUMNS // 2)


@triton.jit
def linear(
    row, arrived, ended, program, turn, a0, b0, a1, b1, weight, n1, k1, stride, apart, end, share, columns, rows, ahead,
    w, size, cut, distance, scratch, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """A product. It takes a stream of weights (see `begin`) after the last product's steps, and returns it after its
    own.

    An item is 16 rows of one part: with a gate 8 of each half. A step is 1,024 columns of an item, as two tiles `[8, 4,
    128]` of words, of which each warp has a row; so no warp needs another's numbers. Each program makes a step or more.
    """
    x, residual, gain, total = tl.load(row + 1), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    x_parts = tl.load(row + 2).to(tl.int32)
    bias, out = tl.load(row + 7), tl.load(row + 8)
    own_size, own_cut = tl.load(row + 9), tl.load(row + 10)
    eps = tl.load(row + 11).to(tl.int32).to(tl.float32, bitcast=True)
    _, n, k, own_stride, own_apart, own_end, own_share, own_columns, own_rows = _point(
        tl.load(row + 6), own_size, own_cut, program, PROGRAMS, TYPE
    )
    gate = own_cut >> 62
    first = tl.where(program >= _programs(own_cut, PROGRAMS), own_share, 0)
    own_share, own_columns, first = eights(own_share), eights(own_columns), eights(first)
    word = _words()
    scale = _gain(gain, tl.arange(0, WIDTH), 2 * own_columns, TYPE)
    wait(arrived, ended)
    if gain != 0:
        own = scratch + program * WIDTH
        place = tl.where(program == PROGRAMS - 1, total, 0)  # it has the fewest items
        _normalize(x, x_parts, residual, gain, scale, place, own.to(tl.int64), 2 * own_columns, eps, WIDTH, TYPE)
        x = own.to(tl.int64)
        tl.debug_barrier()
    even, odd = numbers_of(load_words(x, first + word, word < own_share, TYPE), TYPE)
    a_sum, b_sum = tl.zeros([_HALF, _LANES], tl.float32), tl.zeros([_HALF, _LANES], tl.float32)
    goes = True
    while goes:
        # Tiles do not change places: a register cannot be copied before what is on the way to it is there.
        if turn == 0:
            a_sum, b_sum = _multiplied(a_sum, a0, even, odd, TYPE), _multiplied(b_sum, b0, even, odd, TYPE)
            a0, b0 = _weights(weight, n1, k1, apart, end, share, columns, rows, TYPE)
        else:
            a_sum, b_sum = _multiplied(a_sum, a1, even, odd, TYPE), _multiplied(b_sum, b1, even, odd, TYPE)
            a1, b1 = _weights(weight, n1, k1, apart, end, share, columns, rows, TYPE)
        turn = 1 - turn
        weight, n1, k1, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance = _advance(
            weight, n1, k1, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance, program,
            PROGRAMS, TYPE,
        )  # fmt: skip
        if k + _WORDS >= own_share:
            _store(
                tl.sum(a_sum, 1), tl.sum(b_sum, 1), n, own_apart, own_end, own_rows, first, own_share < own_columns,
                gate, bias, out, TYPE,
            )  # fmt: skip
            a_sum, b_sum = tl.zeros([_HALF, _LANES], tl.float32), tl.zeros([_HALF, _LANES], tl.float32)
        n, k = _next(n, k, own_stride, own_share)
        goes = n < own_end
        if own_share > _WORDS:
            later = eights(k) + word
            even, odd = numbers_of(load_words(x, first + later, later < own_share, TYPE), TYPE)
    return turn, a0, b0, a1, b1, weight, n1, k1, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance


@triton.jit
def _multiplied(total, words, even, odd, TYPE: tl.constexpr):
    """Sums `[8, 128]` with products of a tile and the numbers of a step's columns."""
    first, second = numbers_of(words, TYPE)
    return total + tl.sum(first * even + second * odd, 1)


@triton.jit
def begin(row, is_product, program, PROGRAMS: tl.constexpr, TYPE: tl.constexpr):
    """The stream of weights from an instruction on. Of the steps of this program in all products, one after the other,
    it has: which of the next two tiles' places is the first, (a0, b0) or (a1, b1), and these tiles, on the way to
    registers; the place of the third; and the fields of the product after that of the third."""
    ahead, distance = row, tl.load(row + (_FIELDS - 1))
    if is_product:
        w, size, cut = tl.load(ahead + 6), tl.load(ahead + 9), tl.load(ahead + 10)
    else:
        w, size, cut, distance, ahead = _fields_after(ahead, distance)
    weight, n, k, stride, apart, end, share, columns, rows = _point(w, size, cut, program, PROGRAMS, TYPE)
    w, size, cut, distance, ahead = _fields_after(ahead, distance)
    a0, b0 = _weights(weight, n, k, apart, end, share, columns, rows, TYPE)
    weight, n, k, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance = _advance(
        weight, n, k, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance, program, PROGRAMS, TYPE
    )
    a1, b1 = _weights(weight, n, k, apart, end, share, columns, rows, TYPE)
    weight, n, k, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance = _advance(
        weight, n, k, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance, program, PROGRAMS, TYPE
    )
    return 0, a0, b0, a1, b1, weight, n, k, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance


@triton.jit
def _fields_after(ahead, distance):
    """The fields of the product that is so many rows on, and its row; zeros if that is none."""
    there = distance != 0
    ahead += distance * _FIELDS
    w = tl.load(ahead + 6, mask=there, other=0)
    size = tl.load(ahead + 9, mask=there, other=0)
    cut = tl.load(ahead + 10, mask=there, other=0)
    return w, size, cut, tl.load(ahead + (_FIELDS - 1), mask=there, other=0), ahead


@triton.jit
def _programs(cut, PROGRAMS: tl.constexpr):
    """The programs of each part: there are one or two."""
    return tl.where(((cut >> 32) & 3) == 2, PROGRAMS // 2, PROGRAMS)


@triton.jit
def _point(w, size, cut, program, PROGRAMS: tl.constexpr, TYPE: tl.constexpr):
    """A program's first step in a product with these fields: the weights of its part, the first row and column, the
    rows from an item to its next one and from an item's first tile to its second, the end of the rows; and the columns
    of a part and of all, and the rows. Columns are counted in words."""
    rows, columns = size.to(tl.int32), (size >> 32).to(tl.int32)
    share, each, gate = cut.to(tl.int32), _programs(cut, PROGRAMS), (cut >> 62) != 0
    part = (program >= each).to(tl.int32)
    own = program - part * each
    between = tl.where(gate, _HALF, 2 * _HALF)
    end = tl.where(gate, rows // 2, rows)
    end = tl.where((own < each) & (part * share < columns), end, 0)
    return (
        w + (part * share).to(tl.int64) * (TYPE.primitive_bitwidth // 4), own * between, 0, each * between,
        tl.where(gate, rows // 2, _HALF), end, share, columns, rows
    )  # fmt: skip


@triton.jit
def _next(n, k, stride, share):
    """The rows and columns of the next step of a product."""
    is_last = k + _WORDS >= share
    return tl.where(is_last, n + stride, n), tl.where(is_last, 0, k + _WORDS)


@triton.jit
def _advance(
    weight, n, k, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance, program,
    PROGRAMS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The place of the next step, which may be in the next product."""
    n, k = _next(n, k, stride, share)
    if n >= end:
        weight, n, k, stride, apart, end, share, columns, rows = _point(w, size, cut, program, PROGRAMS, TYPE)
        w, size, cut, distance, ahead = _fields_after(ahead, distance)
    return weight, n, k, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance


@triton.jit
def _words():
    """The words of a step, `[8, 4, 128]`, of which a tile has one row for each warp."""
    row = tl.arange(0, _HALF)[:, None, None] * 0
    return row + (tl.arange(0, _WORDS // _LANES) * _LANES)[None, :, None] + tl.arange(0, _LANES)[None, None, :]


@triton.jit
def _weights(weight, n, k, apart, end, share, columns, rows, TYPE: tl.constexpr):
    """The words of both tiles of a step; zeros after the last."""
    own, word = n + tl.arange(0, _HALF)[:, None, None], _words()
    weight, k, columns = eights(weight >> 1) << 1, eights(k), eights(columns)
    inside = k + word < eights(tl.where(n < end, share, 0))
    left = tl.minimum(own, rows - 1).to(tl.int64) * columns + (k + word)
    right = tl.minimum(own + apart, rows - 1).to(tl.int64) * columns + (k + word)
    return load_words(weight, left, inside, TYPE), load_words(weight, right, inside, TYPE)


@triton.jit
def _store(a, b, n, apart, end, rows, first, is_part, gate, bias, out, TYPE: tl.constexpr):
    """Store an item's results, `[8]` and `[8]`; with a gate, `silu(a) * b`."""
    # One thread of each warp has its row's result, so that none goes from a warp to another.
    lane = tl.arange(0, 32)[None, :]
    n = n + tl.arange(0, _HALF)[:, None] + lane
    only = (lane == 0) & (n < end)
    a, b = a[:, None] + lane * 0.0, b[:, None] + lane * 0.0
    if (bias != 0) & (first == 0):
        start = bias.to(tl.pointer_type(TYPE)) + n
        a += tl.load(start, mask=only, other=0.0).to(tl.float32)
        b += tl.load(start + apart, mask=only & (n + apart < rows), other=0.0).to(tl.float32)
    if gate != 0:
        a, b = a.to(TYPE).to(tl.float32), b.to(TYPE).to(tl.float32)
        tl.store(out.to(tl.pointer_type(TYPE)) + n, (a / (1 + tl.exp(-a)) * b).to(TYPE), mask=only)
    elif is_part:
        start = out.to(tl.pointer_type(tl.float32)) + tl.where(first > 0, rows, 0) + n
        tl.store(start, a, mask=only)
        tl.store(start + apart, b, mask=only & (n + apart < rows))
    else:
        tl.store(out.to(tl.pointer_type(TYPE)) + n, a.to(TYPE), mask=only)
        tl.store(out.to(tl.pointer_type(TYPE)) + n + apart, b.to(TYPE), mask=only & (n + apart < rows))


@triton.jit
def norm(row, arrived, ended, program, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """The fields are those of `Norm`, in order. The first program makes it."""
    x, residual, gain, total = tl.load(row + 1), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    x_parts = tl.load(row + 2).to(tl.int32)
    out, columns = tl.load(row + 6), tl.load(row + 7).to(tl.int32)
    eps = tl.load(row + 8).to(tl.int32).to(tl.float32, bitcast=True)
    scale = _gain(gain, tl.arange(0, WIDTH), columns, TYPE)
    wait(arrived, ended)
    if program == 0:
        _normalize(x, x_parts, residual, gain, scale, total, out, columns, eps, WIDTH, TYPE)


@triton.jit
def _gain(gain, column, columns, TYPE: tl.constexpr):
    start = tl.multiple_of(gain.to(tl.pointer_type(TYPE)), 16)
    return tl.load(start + column, mask=masked(column < eights(columns), gain != 0), other=1.0)


@triton.jit
def _normalize(x, x_parts, residual, gain, scale, total, out, columns, eps, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """Write the sum of x's parts and the residual to `total`, and normalised to `out`; not to an address of 0."""
    column = tl.arange(0, WIDTH)
    columns = eights(columns)
    inside = column < columns
    value = added(x, x_parts, residual, column, columns, inside, TYPE)
    start = tl.multiple_of(total.to(tl.pointer_type(TYPE)), 16)
    tl.store(start + column, value.to(TYPE), mask=masked(inside, total != 0))
    value = value * (1 / tl.sqrt(tl.sum(value * value, 0) / columns + eps)) * scale.to(tl.float32)
    start = tl.multiple_of(out.to(tl.pointer_type(TYPE)), 16)
    tl.store(start + column, value.to(TYPE), mask=masked(inside, gain != 0))
