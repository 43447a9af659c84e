"""Functions that the instructions of a persistent kernel share: waits for the other programs, and sums at addresses.

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from weft.ops.kernel_triton import INTERPRETED
from weft.ops.persistent.instructions import MOST_PARTS as _MOST_PARTS

MOST_PARTS = tl.constexpr(_MOST_PARTS)


@triton.jit
def arrive(arrived, is_last, most):
    """Tell the other programs that this one has ended an instruction. After the last one, the last of all resets the
    count."""
    tl.debug_barrier()
    if is_last:
        if tl.atomic_add(arrived, 1, sem="acq_rel") == most - 1:
            tl.store(arrived, 0)
    else:
        tl.atomic_add(arrived, 1, sem="release")


@triton.jit
def wait(arrived, count):
    """Wait until `count` ends of instructions were told, and see what they wrote. An instruction first reads its own
    fields, which no program writes."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(  # one thread of the program asks
            """{
            .reg .pred p;
            .reg .u32 seen;
            mov.u32 seen, %tid.x;
            setp.ne.u32 p, seen, 0;
            @p bra there;
            again:
            ld.acquire.gpu.global.u32 seen, [$1];
            setp.lt.u32 p, seen, $2;
            @p bra again;
            there:
            mov.b32 $0, 0;
            }""", "=r,l,r", [arrived.to(tl.int64), count], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def masked(mask, condition):
    """A mask where a condition holds, else none of it. (The interpreter makes integers of `&` with a number.)"""
    return tl.where(condition, mask, False)


@triton.jit
def eights(x):
    """A multiple of 8, as one that the compiler knows to be one. (It forgets what is said of a number that goes through
    a loop.)"""
    return (x >> 3) << 3


@triton.jit
def added(x, x_parts, residual, place, stride, mask, TYPE: tl.constexpr):
    """The sum of the parts at the address x and of the residual, if there is one, rounded to TYPE, in float32.

    No load waits for another, as it would in a branch.
    """
    value = of_parts(x, x_parts, place, eights(stride), mask, TYPE)
    start = tl.multiple_of(residual.to(tl.pointer_type(TYPE)), 16)
    more = tl.load(start + place, mask=masked(mask, residual != 0), other=0.0)
    return (value + more.to(tl.float32)).to(TYPE).to(tl.float32)


@triton.jit
def of_parts(x, parts, place, stride, mask, TYPE: tl.constexpr):
    """Numbers at the address x; or the sum of float32 parts there, first to last, rounded to TYPE. In float32."""
    whole = tl.load(tl.multiple_of(x.to(tl.pointer_type(TYPE)), 16) + place, mask=masked(mask, parts == 0), other=0.0)
    start = tl.multiple_of(x.to(tl.pointer_type(tl.float32)), 16)
    total = tl.load(start + place, mask=masked(mask, parts > 0), other=0.0)
    for part in tl.static_range(1, MOST_PARTS):
        total += tl.load(start + part * stride + place, mask=masked(mask, part < parts), other=0.0)
    return tl.where(parts == 0, whole, total.to(TYPE)).to(tl.float32)


@triton.jit
def load_words(address, place, mask, TYPE: tl.constexpr):
    """Words at an address, each of two numbers next to each other; zeros outside of the mask."""
    if tl.float32 == TYPE:
        start = address.to(tl.pointer_type(tl.int64))
    elif tl.float8e4nv == TYPE:
        start = address.to(tl.pointer_type(tl.int16))
    else:
        start = address.to(tl.pointer_type(tl.int32))
    return tl.load(tl.multiple_of(start, 16) + place, mask=mask, other=0)


@triton.jit
def numbers_of(word, TYPE: tl.constexpr):
    """The first and the second numbers of words, in float32."""
    if tl.float32 == TYPE:
        return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif tl.float8e4nv == TYPE:
        first, second = word.to(tl.int8).to(TYPE, bitcast=True), (word >> 8).to(tl.int8).to(TYPE, bitcast=True)
        return first.to(tl.float32), second.to(tl.float32)
    elif tl.bfloat16 == TYPE:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        first, second = word.to(tl.int16).to(TYPE, bitcast=True), (word >> 16).to(tl.int16).to(TYPE, bitcast=True)
        return first.to(tl.float32), second.to(tl.float32)
