"""The persistent kernel: a program for each multiprocessor, which all run the same instructions one after the other.

An instruction is a row of a table on the device (`weft.ops.persistent.instructions`), and its work is cut into items,
which the programs share. Between two instructions all programs wait for one another: a step of a hundred and more
instructions then costs one launch, and as many waits of about a microsecond. While they wait, their weights of the next
product are on the way to the L2 cache.

The programs must all run at once: they are launched as a cooperative grid, which starts whole or not at all. In
Triton's interpreter, which runs one program after another, each instruction is launched by itself.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.attention.block_triton import attend_tiles
from weft.ops.blocks_triton import clamp_to_fp8, multiply
from weft.ops.kernel_triton import INTERPRETED, kernel
from weft.ops.persistent.instructions import FIELDS, Linear, Norm

_FIELDS = tl.constexpr(FIELDS)
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
            _fetch_ahead(row + _FIELDS, at + 1 < last, program, PROGRAMS, ROWS, TYPE)
        if opcode == _LINEAR:
            if ONE:
                _linear_of_one(row, arrived, ended, program, PROGRAMS, ROWS, CHUNK, WIDTH, TYPE)
            else:
                _linear(
                    row, arrived, ended, scratch, tokens, program, PROGRAMS, TOKENS, ROWS, COLUMNS, WIDTH, EVEN, TYPE
                )
        elif opcode == _NORM:
            _norm(row, arrived, ended, tokens, program, PROGRAMS, WIDTH, TYPE)
        else:
            if HEADS > 0:
                _attend(
                    row, arrived, ended, arrivals, shares, maxima, sums, tokens, splits, program, PROGRAMS, TYPE,
                    HEADS, KV_HEADS, DIM, PAGE_SIZE, KV_TYPE, HEAD_NORM, GROUP, KEYS, SPLITS,
                )  # fmt: skip
        if not INTERPRETED:
            _arrive(arrived, (last - first) * PROGRAMS)


@triton.jit
def _arrive(arrived, most):
    """Tell the other programs that this one has ended an instruction; the last of all resets the count."""
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == most - 1:
        tl.store(arrived, 0)


@triton.jit
def _wait(arrived, count):
    """Wait until `count` ends of instructions were told, and see what they wrote. An instruction first reads its own
    fields, which no program writes."""
    if not INTERPRETED:
        while tl.load(arrived, volatile=True) < count:
            pass
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.b32 $0, 0;", "=r,r", [count.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _fetch_ahead(row, exists, program, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, TYPE: tl.constexpr):
    """Fetch the weights of this program's first item of an instruction into the L2 cache, if it is a product."""
    LINES: tl.constexpr = 32
    LINE: tl.constexpr = 128 // (TYPE.primitive_bitwidth // 8)  # elements of a cache line
    if exists:  # noqa: SIM102 (Triton's `and` reads both sides)
        if tl.load(row) == _LINEAR:
            weight = tl.load(row + 6).to(tl.pointer_type(TYPE))
            rows, columns = tl.load(row + 9), tl.load(row + 10)
            parts, gate = tl.load(row + 11), tl.load(row + 12)
            row_tiles = tl.cdiv(rows, ROWS)
            if program < row_tiles * parts:
                n = _rows_of(program % row_tiles, rows, gate, ROWS)
                share = columns // parts
                low = program // row_tiles * share
                start = weight + tl.minimum(n, rows - 1)[:, None] * columns
                line = tl.arange(0, LINES) * LINE
                for k in range(low, low + share, LINES * LINE):
                    at = start + tl.minimum(k + line, low + share - 1)[None, :]
                    tl.inline_asm_elementwise(
                        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)],
                        dtype=tl.int32, is_pure=False, pack=1,
                    )  # fmt: skip


@triton.jit
def _rows_of(tile, rows, gate, ROWS: tl.constexpr):
    """The rows of weights of an item: with a gate half of them, and the rows of `up` that belong to them."""
    i = tl.arange(0, ROWS)
    HALF: tl.constexpr = ROWS // 2
    return tl.where(gate != 0, tile * HALF + i % HALF + i // HALF * (rows // 2), tile * ROWS + i)


@triton.jit
def _linear(
    row, arrived, ended, scratch, tokens, program, PROGRAMS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The fields are those of `Linear`, in order. An item is ROWS rows of one part."""
    x, x_parts, residual, gain, total = (
        tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    )  # fmt: skip
    weight = tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(TYPE)), 16)
    bias, out = tl.load(row + 7), tl.load(row + 8)
    rows = tl.load(row + 9)
    columns = tl.multiple_of(tl.load(row + 10), 16)
    parts, gate = tl.load(row + 11), tl.load(row + 12)
    eps = tl.load(row + 13).to(tl.int32).to(tl.float32, bitcast=True)
    _wait(arrived, ended)
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
            n = _rows_of(item % row_tiles, rows, gate, ROWS)
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
def _linear_of_one(
    row, arrived, ended, program, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    WIDTH: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """`_linear` of one token. The first weights are on the way to registers before what they are multiplied with is
    there."""
    x, x_parts, residual, gain, total = (
        tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    )  # fmt: skip
    weight = tl.multiple_of(tl.load(row + 6).to(tl.pointer_type(TYPE)), 16)
    bias, out = tl.load(row + 7), tl.load(row + 8)
    rows = tl.load(row + 9)
    columns = tl.multiple_of(tl.load(row + 10), 16)
    parts, gate = tl.load(row + 11), tl.load(row + 12)
    eps = tl.load(row + 13).to(tl.int32).to(tl.float32, bitcast=True)
    row_tiles = tl.cdiv(rows, ROWS)
    items = row_tiles * parts
    share = tl.multiple_of(columns // parts, 16)
    step = tl.arange(0, CHUNK)
    low = tl.multiple_of(program // row_tiles * share, 16)
    at = (
        weight
        + tl.minimum(_rows_of(program % row_tiles, rows, gate, ROWS), rows - 1)[:, None] * columns
        + step[None, :]
    )
    count = tl.where(program < items, share, 0)
    first = tl.load(at + low, mask=(step < count)[None, :], other=0.0)
    second = tl.load(at + (low + CHUNK), mask=(CHUNK + step < count)[None, :], other=0.0)
    _wait(arrived, ended)
    if program < items:
        factor = 1.0
        if gain != 0:
            column = tl.arange(0, WIDTH)
            value = _added(x, x_parts, residual, column, columns, column < columns, TYPE)
            factor = 1 / tl.sqrt(tl.sum(value * value, 0) / columns + eps)
            if (program == 0) & (total != 0):
                place = tl.multiple_of(total.to(tl.pointer_type(TYPE)), 16) + column
                tl.store(place, value.to(TYPE), mask=column < columns)
        for item in range(program, items, PROGRAMS):
            n = _rows_of(item % row_tiles, rows, gate, ROWS)
            part = item // row_tiles
            low = tl.multiple_of(part * share, 16)
            if item != program:
                at = weight + tl.minimum(n, rows - 1)[:, None] * columns + step[None, :]
                first = tl.load(at + low, mask=(step < share)[None, :], other=0.0)
                second = tl.load(at + (low + CHUNK), mask=(CHUNK + step < share)[None, :], other=0.0)
            sums = tl.zeros([ROWS, CHUNK // 8], tl.float32)
            for k in range(0, share, CHUNK):
                third = tl.load(at + (low + k + 2 * CHUNK), mask=(k + 2 * CHUNK + step < share)[None, :], other=0.0)
                column = low + k + step
                inside = k + step < share
                value = _added(x, x_parts, residual, column, columns, inside, TYPE)
                if gain != 0:
                    scale = tl.load(tl.multiple_of(gain.to(tl.pointer_type(TYPE)), 16) + column, mask=inside, other=0.0)
                    value = (value * factor * scale.to(tl.float32)).to(TYPE).to(tl.float32)
                # Eight neighbours are in the registers of one thread.
                sums += tl.sum(tl.reshape(first.to(tl.float32) * value[None, :], (ROWS, CHUNK // 8, 8)), 2)
                first = second
                second = third
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
def _norm(row, arrived, ended, tokens, program, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr):
    """The fields are those of `Norm`, in order. An item is a token."""
    x, x_parts, residual, gain, total = (
        tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    )  # fmt: skip
    out, columns = tl.load(row + 6), tl.multiple_of(tl.load(row + 7), 16)
    eps = tl.load(row + 8).to(tl.int32).to(tl.float32, bitcast=True)
    _wait(arrived, ended)
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
    value = _added(x, x_parts, residual, place, tokens * columns, inside, TYPE)
    if keeps:
        tl.store(tl.multiple_of(total.to(tl.pointer_type(TYPE)), 16) + place, value.to(TYPE), mask=inside)
    if gain != 0:
        weight = tl.load(tl.multiple_of(gain.to(tl.pointer_type(TYPE)), 16) + column, mask=inside, other=0.0)
        value = value * (1 / tl.sqrt(tl.sum(value * value, 0) / columns + eps)) * weight.to(tl.float32)
        tl.store(tl.multiple_of(out.to(tl.pointer_type(TYPE)), 16) + place, value.to(TYPE), mask=inside)


@triton.jit
def _added(x, x_parts, residual, place, stride, mask, TYPE: tl.constexpr):
    """The sum of the parts at the address x and of the residual, if there is one, rounded to TYPE, in float32."""
    if x_parts == 0:
        value = tl.load(tl.multiple_of(x.to(tl.pointer_type(TYPE)), 16) + place, mask=mask, other=0.0).to(tl.float32)
    else:
        value = _sum_parts(x, x_parts, place, stride, mask, TYPE)
    if residual != 0:
        more = tl.load(tl.multiple_of(residual.to(tl.pointer_type(TYPE)), 16) + place, mask=mask, other=0.0)
        value = (value + more.to(tl.float32)).to(TYPE).to(tl.float32)
    return value


@triton.jit
def _sum_parts(x, parts, place, stride, mask, TYPE: tl.constexpr):
    """The sum of float32 parts at the address x, first to last, rounded to TYPE, in float32."""
    start = tl.multiple_of(x.to(tl.pointer_type(tl.float32)), 16)
    total = tl.load(start + place, mask=mask, other=0.0)
    for part in range(1, parts):
        total += tl.load(start + tl.multiple_of(part * stride, 16) + place, mask=mask, other=0.0)
    return total.to(TYPE).to(tl.float32)


@triton.jit
def _attend(
    row, arrived, ended, arrivals, shares, maxima, sums, tokens, splits, program, PROGRAMS: tl.constexpr,
    TYPE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    KV_TYPE: tl.constexpr, HEAD_NORM: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The fields are those of `Attend`, in order. An item is a share of the context of one request and key head.

    The share with the last position also keeps the new key and value, and reads them. The share that is the last to
    end joins them all.
    """
    qkv, parts, q_norm, k_norm = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    cos, sin = tl.load(row + 5).to(tl.pointer_type(TYPE)), tl.load(row + 6).to(tl.pointer_type(TYPE))
    slots = tl.load(row + 7).to(tl.pointer_type(tl.int64))
    kv_pages = tl.multiple_of(tl.load(row + 8).to(tl.pointer_type(KV_TYPE)), 16)
    block_table = tl.load(row + 9).to(tl.pointer_type(tl.int32))
    query_start_loc = tl.load(row + 10).to(tl.pointer_type(tl.int32))
    seq_lens = tl.load(row + 11).to(tl.pointer_type(tl.int32))
    out = tl.load(row + 12).to(tl.pointer_type(TYPE))
    columns, table_stride, value_stride = tl.load(row + 13), tl.load(row + 14), tl.multiple_of(tl.load(row + 15), 16)
    k_start, v_start = tl.load(row + 16), tl.load(row + 17)
    eps = tl.load(row + 18).to(tl.int32).to(tl.float32, bitcast=True)
    scale = tl.load(row + 19).to(tl.int32).to(tl.float32, bitcast=True)
    _wait(arrived, ended)
    EACH: tl.constexpr = HEADS // KV_HEADS
    HALF: tl.constexpr = DIM // 2
    group, dim = tl.arange(0, GROUP), tl.arange(0, DIM)
    for item in range(program, tokens * KV_HEADS * splits, PROGRAMS):
        split, head, request = item % splits, item // splits % KV_HEADS, item // splits // KV_HEADS
        token = tl.load(query_start_loc + request).to(tl.int64)
        has = tl.load(query_start_loc + request + 1) > token
        seq_len = tl.load(seq_lens + request)
        slot = tl.load(slots + token, mask=has, other=-1)
        own = (head * EACH + group)[:, None] * DIM + dim[None, :]
        shown = (group < EACH)[:, None] & (dim >= 0)[None, :]
        if (split == 0) & (request >= tl.load(query_start_loc + tokens)):  # a token after those of all requests
            tl.store(out + request * (HEADS * DIM) + own, tl.zeros([GROUP, DIM], TYPE), mask=shown)
        if has & ((seq_len == 0) | (slot < 0)):
            if split == 0:
                tl.store(out + token * (HEADS * DIM) + own, tl.zeros([GROUP, DIM], TYPE), mask=shown)
        elif has:
            share = tl.cdiv(tl.cdiv(seq_len, KEYS), splits) * KEYS
            used = tl.cdiv(seq_len, share)
            if split < used:
                query = _turned(
                    qkv, parts, tokens, token * columns, (head * EACH + group) * DIM, group < EACH, columns, q_norm,
                    cos + token * HALF, sin + token * HALF, eps, HEAD_NORM, DIM, TYPE,
                )  # fmt: skip
                if split == used - 1:
                    _keep(
                        qkv, parts, tokens, token * columns, k_start + head * DIM, v_start + head * DIM, columns,
                        k_norm, cos + token * HALF, sin + token * HALF, eps, kv_pages,
                        (slot * KV_HEADS + head) * DIM, value_stride, HEAD_NORM, DIM, TYPE,
                    )  # fmt: skip
                    tl.debug_barrier()
                if KV_TYPE != TYPE and tl.bfloat16 == TYPE:  # of FP8, as in `attend_block`
                    given = tl.clamp(query.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
                else:
                    given = query
                m, s, acc = attend_tiles(
                    tl.full([GROUP], float("-inf"), tl.float32), tl.zeros([GROUP], tl.float32),
                    tl.zeros([GROUP, DIM], tl.float32), given, tl.zeros([GROUP], tl.int32) + seq_len - 1, kv_pages,
                    value_stride, block_table + request * table_stride, head, split * share,
                    tl.minimum((split + 1) * share, seq_len), scale, KV_HEADS, DIM, PAGE_SIZE, KEYS, DIM, 0, True,
                )  # fmt: skip
                if used == 1:
                    tl.store(out + token * (HEADS * DIM) + own, (acc / s[:, None]).to(TYPE), mask=shown)
                else:
                    cell = (token * HEADS + head * EACH + group) * SPLITS + split
                    tl.store(maxima + cell, m, mask=group < EACH)
                    tl.store(sums + cell, s, mask=group < EACH)
                    tl.store(shares + cell[:, None] * DIM + dim[None, :], acc, mask=shown)
                    tl.debug_barrier()
                    if tl.atomic_add(arrivals + request * KV_HEADS + head, 1, sem="acq_rel") == used - 1:
                        tl.store(arrivals + request * KV_HEADS + head, 0)
                        for one in tl.static_range(EACH):
                            _join(
                                shares, maxima, sums, (token * HEADS + head * EACH + one) * SPLITS, used,
                                out + (token * HEADS + head * EACH + one) * DIM, DIM, SPLITS, TYPE,
                            )  # fmt: skip


@triton.jit
def _halves(qkv, parts, tokens, offsets, mask, columns, HALF: tl.constexpr, TYPE: tl.constexpr):
    """The left and the right half of heads that begin at some columns of a token, in float32."""
    if parts == 0:
        start = qkv.to(tl.pointer_type(TYPE))
        left = tl.load(start + offsets, mask=mask, other=0.0).to(tl.float32)
        right = tl.load(start + offsets + HALF, mask=mask, other=0.0).to(tl.float32)
    else:
        left = _sum_parts(qkv, parts, offsets, tokens * columns, mask, TYPE)
        right = _sum_parts(qkv, parts, offsets + HALF, tokens * columns, mask, TYPE)
    return left, right


@triton.jit
def _turned(
    qkv, parts, tokens, first, starts, shown, columns, norm, cos, sin, eps,
    HEAD_NORM: tl.constexpr, DIM: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The heads `[R, DIM]` that begin at the columns `starts` `[R]`, normalised and rotated."""
    HALF: tl.constexpr = DIM // 2
    pair = tl.arange(0, HALF)
    mask = shown[:, None] & (pair >= 0)[None, :]
    left, right = _halves(qkv, parts, tokens, first + starts[:, None] + pair[None, :], mask, columns, HALF, TYPE)
    if HEAD_NORM:
        weight = norm.to(tl.pointer_type(TYPE)) + pair
        gain = 1 / tl.sqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / DIM + eps)
        left *= gain[:, None] * tl.load(weight).to(tl.float32)[None, :]
        right *= gain[:, None] * tl.load(weight + HALF).to(tl.float32)[None, :]
    c, s = tl.load(cos + pair).to(tl.float32)[None, :], tl.load(sin + pair).to(tl.float32)[None, :]
    both = tl.join(left * c - right * s, right * c + left * s)
    return tl.reshape(tl.permute(both, (0, 2, 1)), (starts.shape[0], DIM)).to(TYPE)


@triton.jit
def _keep(
    qkv, parts, tokens, first, k_start, v_start, columns, norm, cos, sin, eps, kv_pages, place, value_stride,
    HEAD_NORM: tl.constexpr, DIM: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Write a token's key, normalised and rotated, and its value to their slot."""
    one, dim = tl.arange(0, 1), tl.arange(0, DIM)
    key = _turned(
        qkv, parts, tokens, first, k_start + one, one == 0, columns, norm, cos, sin, eps, HEAD_NORM, DIM, TYPE
    )
    value = tl.zeros([1, DIM], tl.float32)
    offsets = first + v_start + one[:, None] + dim[None, :]
    if parts == 0:
        value = tl.load(qkv.to(tl.pointer_type(TYPE)) + offsets).to(tl.float32)
    else:
        value = _sum_parts(qkv, parts, offsets, tokens * columns, offsets >= 0, TYPE)
    at = kv_pages + place + one[:, None] + dim[None, :]
    if kv_pages.dtype.element_ty == tl.float8e4nv:
        tl.store(at, clamp_to_fp8(key))
        tl.store(at + value_stride, clamp_to_fp8(value))
    else:
        tl.store(at, key)
        tl.store(at + value_stride, value.to(TYPE))


@triton.jit
def _join(shares, maxima, sums, first, used, out, DIM: tl.constexpr, SPLITS: tl.constexpr, TYPE: tl.constexpr):
    """Join the shares of one head's context, as `combine_kernel` does."""
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    inside = split < used
    m = tl.load(maxima + first + split, mask=inside, other=float("-inf"))
    weight = tl.exp2(m - tl.max(m, 0))
    total = tl.sum(weight * tl.load(sums + first + split, mask=inside, other=0.0), 0)
    share = tl.load(shares + (first + split)[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0.0)
    tl.store(out + dim, (tl.sum(share * weight[:, None], 0) / total).to(TYPE))
