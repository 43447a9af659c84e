"""The persistent kernel: a program for each multiprocessor, which all run the same instructions one after the other.

An instruction is a row of a table on the device (`weft.ops.persistent.instructions`), and its work is cut into items,
which the programs share. Between two instructions all programs wait for one another: a step of a hundred and more
instructions then costs one launch, and as many waits of about a microsecond. A program's weights are one stream over
all products, of which the next two steps are always on the way to registers.

The programs must all run at once: they are launched as a cooperative grid, which starts whole or not at all. In
Triton's interpreter, which runs one program after another, each instruction is launched by itself.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton.language as tl

from weft.ops.kernel_triton import INTERPRETED, kernel
from weft.ops.persistent.attend_triton import attend, place
from weft.ops.persistent.instructions import FIELDS, Linear, Norm
from weft.ops.persistent.linear_triton import begin, linear, norm
from weft.ops.persistent.shared_triton import arrive

_FIELDS = tl.constexpr(FIELDS)
_LINEAR, _NORM = tl.constexpr(Linear.opcode), tl.constexpr(Norm.opcode)


@kernel(do_not_specialize=["first", "last", "splits"])
def run_kernel(
    table, arrived, arrivals, scratch, shares, maxima, sums, cos, sin, slots, block_table, query_start_loc, seq_lens,
    first, last, splits, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_TYPE: tl.constexpr,
    HEAD_NORM: tl.constexpr, GROUP: tl.constexpr, MADE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Run the instructions first:last of a table `[n, FIELDS]` int64.

    Args:
        arrived: `[1]` int32, the programs that have ended an instruction, summed over instructions; 0 before and after.
        arrivals: `[KV_HEADS]` int32, the shares of a context that are there; zeros before and after.
        scratch: `[PROGRAMS, WIDTH]` of TYPE, for what a program normalises, and its queries, new key and value.
        shares, maxima, sums: `[cells, GROUP, DIM]` and `[cells, GROUP]` float32, of attention: ROWS cells of each
            program, then SPLITS of each key head.
        cos, sin, slots, block_table, query_start_loc, seq_lens: of all attention.
        WIDTH: a power of two that no norm has more columns than, and no key head more numbers of queries, key, value.
        splits: the shares of the context, at most SPLITS.
        GROUP, MADE: at least HEADS / KV_HEADS, and 2 more: powers of two.
        ROWS, KEYS: of a tile of keys: those that warps read side by side, and all.
        HEADS: 0 if there is no attention.
    """
    program = tl.program_id(0)
    turn, a0, b0, a1, b1, weight, n, k, stride, apart, end, share, columns, rows, ahead, w, size, cut, distance = begin(
        table + first * _FIELDS, tl.load(table + first * _FIELDS) == _LINEAR, program, PROGRAMS, TYPE
    )
    if HEADS > 0:
        split, head, live, used, low, high, target = place(
            program, splits, seq_lens, query_start_loc, slots, KV_HEADS, DIM, KEYS
        )
        dim = tl.arange(0, DIM)
        cosines = tl.load(cos + dim % (DIM // 2)).to(tl.float32)
        sines = tl.load(sin + dim % (DIM // 2)).to(tl.float32)
        sines = tl.where(dim < DIM // 2, -sines, sines)
    for at in range(first, last):
        row = table + at * _FIELDS
        opcode = tl.load(row)
        ended = (at - first) * PROGRAMS  # what `arrived` is when the last instruction has ended
        if opcode == _LINEAR:
            (
                turn, a0, b0, a1, b1, weight, n, k, stride, apart, end, share, columns, rows, ahead, w, size, cut,
                distance,
            ) = linear(
                row, arrived, ended, program, turn, a0, b0, a1, b1, weight, n, k, stride, apart, end, share, columns,
                rows, ahead, w, size, cut, distance, scratch, PROGRAMS, WIDTH, TYPE,
            )  # fmt: skip
        elif opcode == _NORM:
            norm(row, arrived, ended, program, WIDTH, TYPE)
        else:
            if HEADS > 0:
                attend(
                    row, arrived, ended, arrivals, scratch + program * WIDTH, shares, maxima, sums, cosines, sines,
                    block_table, split, head, live, used, low, high, target, PROGRAMS, TYPE, HEADS, KV_HEADS, DIM,
                    PAGE_SIZE, KV_TYPE, HEAD_NORM, GROUP, MADE, ROWS, KEYS, SPLITS,
                )  # fmt: skip
        if not INTERPRETED:
            arrive(arrived, at + 1 == last, (last - first) * PROGRAMS)
