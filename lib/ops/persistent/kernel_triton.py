"""The persistent kernel: a program for each multiprocessor, which all run the same instructions one after the other.

An instruction is a row of a table on the device (`weft.ops.persistent.instructions`), and its work is cut into items,
which the programs share. Between two instructions all programs wait for one another: a step of a hundred and more
instructions then costs one launch, and as many waits of about a microsecond. All the time, weights of the product after
the next are on the way to the L2 cache.

The programs must all run at once: they are launched as a cooperative grid, which starts whole or not at all. In
Triton's interpreter, which runs one program after another, each instruction is launched by itself.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.kernel_triton import INTERPRETED, kernel
from weft.ops.persistent.attend_triton import attend
from weft.ops.persistent.instructions import FIELDS, Linear, Norm
from weft.ops.persistent.linear_triton import linear, linear_of_one, norm, rows_of
from weft.ops.persistent.shared_triton import arrive

_FIELDS = tl.constexpr(FIELDS)
_AHEAD = tl.constexpr(1024)
"""Columns of an item that are fetched ahead: of two products 17 MB in 16 bits, which the cache holds."""
_LINEAR, _NORM = tl.constexpr(Linear.opcode), tl.constexpr(Norm.opcode)


@kernel(do_not_specialize=["first", "last", "tokens", "splits"])
def run_kernel(
    table, arrived, arrivals, scratch, shares, maxima, sums, first, last, tokens, splits,
    PROGRAMS: tl.constexpr, TOKENS: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_TYPE: tl.constexpr,
    HEAD_NORM: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Run the instructions first:last of a table `[n, FIELDS]` int64.

    Args:
        arrived: `[1]` int32, the programs that have ended an instruction, summed over instructions; 0 before and after.
        arrivals: `[tokens, KV_HEADS]` int32, the shares of a context that are there; zeros before and after.
        scratch: `[PROGRAMS, TOKENS, WIDTH]` of TYPE, for what a program normalises for its own product.
        shares, maxima, sums: `[tokens, HEADS, SPLITS, DIM]` and `[tokens, HEADS, SPLITS]` float32, of attention.
        WIDTH: the most columns of a norm, rounded up to a power of two.
        ONE: whether there is one token, whose products are then made by vectors, CHUNK columns at a time.
        EVEN: whether COLUMNS divides the columns of each part of all products.
        splits: the shares of a request's context, at most SPLITS.
        GROUP: the rows of a tile of queries, at least HEADS / KV_HEADS.
        HEADS: 0 if there is no attention.
    """
    program = tl.program_id(0)
    for at in range(first, last):
        row = table + at * _FIELDS
        opcode = tl.load(row)
        ended = (at - first) * PROGRAMS  # what `arrived` is when the last instruction has ended
        if not INTERPRETED:
            if (at == first) & (at + 1 < last):
                _fetch_ahead(row + _FIELDS, program, ROWS, TYPE)
            if at + 2 < last:
                _fetch_ahead(row + 2 * _FIELDS, program, ROWS, TYPE)
        if opcode == _LINEAR:
            if ONE:
                linear_of_one(row, arrived, ended, program, PROGRAMS, ROWS, CHUNK, WIDTH, TYPE)
            else:
                linear(
                    row, arrived, ended, scratch, tokens, program, PROGRAMS, TOKENS, ROWS, COLUMNS, WIDTH, EVEN, TYPE
                )
        elif opcode == _NORM:
            norm(row, arrived, ended, tokens, program, PROGRAMS, WIDTH, TYPE)
        else:
            if HEADS > 0:
                attend(
                    row, arrived, ended, arrivals, shares, maxima, sums, tokens, splits, program, PROGRAMS, TYPE,
                    HEADS, KV_HEADS, DIM, PAGE_SIZE, KV_TYPE, HEAD_NORM, GROUP, KEYS, SPLITS,
                )  # fmt: skip
        if not INTERPRETED:
            arrive(arrived, (last - first) * PROGRAMS)


@triton.jit
def _fetch_ahead(row, program, ROWS: tl.constexpr, TYPE: tl.constexpr):
    """Fetch weights of this program's first item of an instruction into the L2 cache, if it is a product."""
    LINES: tl.constexpr = 16
    LINE: tl.constexpr = 128 // (TYPE.primitive_bitwidth // 8)  # elements of a cache line
    if tl.load(row) == _LINEAR:
        weight = tl.load(row + 6).to(tl.pointer_type(TYPE))
        rows, columns = tl.load(row + 9).to(tl.int32), tl.load(row + 10).to(tl.int32)
        parts, gate = tl.load(row + 11).to(tl.int32), tl.load(row + 12)
        row_tiles = tl.cdiv(rows, ROWS)
        if program < row_tiles * parts:
            n = rows_of(program % row_tiles, rows, gate, ROWS)
            share = columns // parts
            low = program // row_tiles * share
            start = weight + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * columns
            line = tl.arange(0, LINES) * LINE
            high = low + tl.minimum(share, _AHEAD)
            for k in range(low, high, LINES * LINE):
                at = start + tl.minimum(k + line, high - 1)[None, :]
                tl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
