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
def arrive(arrived, most):
    """Tell the other programs that this one has ended an instruction; the last of all resets the count."""
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == most - 1:
        tl.store(arrived, 0)


@triton.jit
def wait(arrived, count):
    """Wait until `count` ends of instructions were told, and see what they wrote. An instruction first reads its own
    fields, which no program writes."""
    if not INTERPRETED:
        while tl.atomic_add(arrived, 0, sem="acquire") < count:  # by one thread: a load would be one of each warp's
            pass


@triton.jit
def added(x, x_parts, residual, place, stride, mask, TYPE: tl.constexpr):
    """The sum of the parts at the address x and of the residual, if there is one, rounded to TYPE, in float32."""
    if x_parts == 0:
        value = tl.load(tl.multiple_of(x.to(tl.pointer_type(TYPE)), 16) + place, mask=mask, other=0.0).to(tl.float32)
    else:
        value = sum_parts(x, x_parts, place, stride, mask, TYPE)
    if residual != 0:
        more = tl.load(tl.multiple_of(residual.to(tl.pointer_type(TYPE)), 16) + place, mask=mask, other=0.0)
        value = (value + more.to(tl.float32)).to(TYPE).to(tl.float32)
    return value


@triton.jit
def sum_parts(x, parts, place, stride, mask, TYPE: tl.constexpr):
    """The sum of float32 parts at the address x, first to last, rounded to TYPE, in float32."""
    start = tl.multiple_of(x.to(tl.pointer_type(tl.float32)), 16)
    total = tl.load(start + place, mask=mask, other=0.0)
    for part in tl.static_range(1, MOST_PARTS):  # in a loop each load would wait for the one before it
        there = tl.where(part < parts, mask, False)  # in the interpreter `&` makes integers of these
        total += tl.load(start + tl.multiple_of(part * stride, 16) + place, mask=there, other=0.0)
    return total.to(TYPE).to(tl.float32)
