"""Transfers by stores into another GPU's memory, in Triton: one kernel sends, one receives.

A graph may capture both, since everything that changes from one message to the next is counted on
the device.

A message is cut into shares, one for each program. The two programs of a share, the sender's and
the receiver's, work independently of other shares. The sender's program waits until the slot is
free, stores its share there, and then sets the share's flag to the message's number. The receiver's
program waits for that number, reads the share, and acknowledges it in the sender's memory. No
program waits for another one of its own kernel. A program whose wait is aborted stores nothing,
since a slot that is not free is still to be read. Stores before a release at system scope are
visible after the acquire that reads it (PTX ISA, "Memory Consistency Model").
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import torch
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import kernel
from weft.ops.tiles.tile import cdiv

# The most programs of a launch: the most shares of a message, and the number of flags of an edge.
PROGRAMS = 64
# The words that a program moves, or more if the message is too long for this. A slot has room for
# at least this many words of each program.
_SHARE = 1024
_BLOCK = 1024
# A share is a multiple of this many words.
_ALIGNED = 16
_WARPS = 8


@kernel()
def _send_kernel(
    source,
    slots,
    flags,
    acks,
    counts,
    abort,
    words,
    share,
    region,
    slot_words,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(counts + program) + 1
    free = False
    waiting = True
    while waiting:
        # Adding 0 is a load with acquire semantics, which `tl.load` does not offer.
        free = tl.atomic_add(acks + program, 0, sem="acquire", scope="sys") >= number - SLOTS
        waiting = (not free) and (tl.load(abort, volatile=True) == 0)
    if free:
        first = program * share
        slot = slots + (number % SLOTS) * slot_words + program * region
        for start in range(0, share, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = (offsets < share) & (first + offsets < words)
            tl.store(slot + offsets, tl.load(source + first + offsets, mask=inside), mask=inside)
        # The flag must follow the stores of all threads of the program.
        tl.debug_barrier()
        tl.atomic_xchg(flags + program, number, sem="release", scope="sys")
        tl.store(counts + program, number)


@kernel()
def _recv_kernel(
    target,
    slots,
    flags,
    acks,
    counts,
    abort,
    words,
    share,
    region,
    slot_words,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(counts + program) + 1
    there = False
    waiting = True
    while waiting:
        there = tl.atomic_add(flags + program, 0, sem="acquire", scope="sys") >= number
        waiting = (not there) and (tl.load(abort, volatile=True) == 0)
    if there:
        first = program * share
        slot = slots + (number % SLOTS) * slot_words + program * region
        for start in range(0, share, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = (offsets < share) & (first + offsets < words)
            tl.store(
                target + first + offsets,
                tl.load(slot + offsets, mask=inside, cache_modifier=".cg"),
                mask=inside,
            )
        # The acknowledgement must follow the reads of all threads of the program.
        tl.debug_barrier()
        tl.atomic_xchg(acks + program, number, sem="release", scope="sys")
        tl.store(counts + program, number)


def plan(words: int) -> tuple[int, int]:
    """The programs of a launch and the words of each share (a multiple of 16), for a message of
    this many words; both ends compute the same."""
    programs = max(1, min(PROGRAMS, cdiv(words, _SHARE)))
    share = cdiv(cdiv(words, programs), _ALIGNED) * _ALIGNED
    return cdiv(words, share) if words else 1, share


def send(
    source: Tensor, slots: Tensor, flags: Tensor, acks: Tensor, counts: Tensor, abort: Tensor
) -> None:
    """Store a message into the receiver's slots, once one of them is free.

    Args:
        source: [words], contiguous, of the slots' dtype.
        slots: [messages that the edge holds, slot_words] in the receiver's memory.
        flags: [PROGRAMS] int64 in the receiver's memory.
        acks: [PROGRAMS] int64 in the sender's memory.
        counts: [PROGRAMS] int64, the sender's counters of messages so far.
        abort: [1] int32: a value other than 0 ends every wait.
    """
    programs, share, region = _shares(source, slots)
    _send_kernel[(programs,)](
        source,
        slots,
        flags,
        acks,
        counts,
        abort,
        source.numel(),
        share,
        region,
        slots.shape[1],
        SLOTS=slots.shape[0],
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def recv(
    target: Tensor, slots: Tensor, flags: Tensor, acks: Tensor, counts: Tensor, abort: Tensor
) -> None:
    """Wait for a message and copy it out of its slot.

    The arguments are those of `send`, seen from the other side: `slots` and `flags` are the
    receiver's own memory, and `acks` the sender's.
    """
    programs, share, region = _shares(target, slots)
    _recv_kernel[(programs,)](
        target,
        slots,
        flags,
        acks,
        counts,
        abort,
        target.numel(),
        share,
        region,
        slots.shape[1],
        SLOTS=slots.shape[0],
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def _shares(message: Tensor, slots: Tensor) -> tuple[int, int, int]:
    programs, share = plan(message.numel())
    region = slots.shape[1] // PROGRAMS
    assert slots.dtype == message.dtype, "a message is of the slots' dtype"
    assert share <= region, "a message fits its slot"
    return programs, share, region


def capacity(slot_bytes: int, dtype: torch.dtype) -> int:
    """The most elements of a message in slots of `slot_bytes`, such that each share fits in its
    region of a slot."""
    region = slot_bytes // dtype.itemsize // PROGRAMS // _ALIGNED * _ALIGNED
    assert region >= _SHARE, "a slot holds a share of every program"
    return region * PROGRAMS
