"""Transfers of small messages by stores into another GPU's memory, in Triton: each word travels
with its flag.

A store of 8 aligned bytes is visible as a whole or not at all. So a word of 4 bytes is stored
together with the number of its message, which avoids a fence between data and flag; the fence would
cost more than the words. The receiver reads the words until all of them belong to the message that
it waits for. NCCL's low-latency protocol does the same (Hu et al., 2025, arXiv 2507.04786, section
on protocols). This moves twice the bytes, so long messages go by `peer_triton`. As there,
everything that changes from one message to the next is counted on the device, and a program whose
wait is aborted stores nothing.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import kernel
from weft.ops.tiles.tile import cdiv

# The most programs of a launch, each of which moves a share of a message.
PROGRAMS = 64
# The words of each program in a slot.
REGION = 2048
# The most words of a message.
MOST = PROGRAMS * REGION
# The words that a program moves, or more if the message is too long for this.
_SHARE = 1024
# A share is a multiple of this many words.
_ALIGNED = 16
_BLOCKS = (256, 1024, REGION)
# Messages of these lengths need all of the compiled kernels; messages of other lengths with the
# same alignment need no further ones.
LENGTHS = (_BLOCKS[0], _SHARE, MOST)
_WARPS = 8


# A flag has 31 bits: packed above a word, it leaves the sign bit 0, so that the arithmetic shift of
# the receiver returns the flag itself.
@kernel(do_not_specialize=["words"])
def _send_kernel(
    source,
    slots,
    acks,
    counts,
    abort,
    words,
    share,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(counts + program) + 1
    offsets = tl.arange(0, BLOCK)
    inside = (offsets < share) & (program * share + offsets < words)
    word = (
        tl.load(source + program * share + offsets, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    )
    free = False
    waiting = True
    while waiting:
        free = tl.load(acks + program, volatile=True) >= number - SLOTS
        waiting = (not free) and (tl.load(abort, volatile=True) == 0)
    if free:
        slot = slots + (number % SLOTS) * MOST + program * REGION
        tl.store(slot + offsets, word | ((number & 0x7FFFFFFF) << 32), mask=inside)
        tl.debug_barrier()
        tl.store(counts + program, number)


@kernel(do_not_specialize=["words"])
def _recv_kernel(
    target,
    slots,
    acks,
    counts,
    abort,
    words,
    share,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(counts + program) + 1
    offsets = tl.arange(0, BLOCK)
    inside = (offsets < share) & (program * share + offsets < words)
    slot = slots + (number % SLOTS) * MOST + program * REGION
    flag = number & 0x7FFFFFFF
    packed = tl.zeros([BLOCK], dtype=tl.int64)
    missing = 1
    waiting = True
    while waiting:
        packed = tl.load(slot + offsets, mask=inside, other=0, volatile=True)
        missing = tl.sum((inside & ((packed >> 32) != flag)).to(tl.int32), 0)
        waiting = (missing > 0) and (tl.load(abort, volatile=True) == 0)
    if missing == 0:
        tl.store(target + program * share + offsets, packed.to(tl.int32), mask=inside)
        tl.debug_barrier()
        tl.store(acks + program, number)
        tl.store(counts + program, number)


def send(source: Tensor, slots: Tensor, acks: Tensor, counts: Tensor, abort: Tensor) -> None:
    """Store a message into the receiver's slots, once one of them is free.

    Args:
        source: [words] int32, contiguous, with at most MOST words.
        slots: [messages that the edge holds, MOST] int64 in the receiver's memory, zero before the
            first message.
        acks: [PROGRAMS] int64 in the sender's memory.
        counts: [PROGRAMS] int64, the sender's counters of messages so far.
        abort: [1] int32: a value other than 0 ends every wait.
    """
    programs, share = shares_of(source.numel())
    _send_kernel[(programs,)](
        source,
        slots,
        acks,
        counts,
        abort,
        source.numel(),
        share,
        SLOTS=slots.shape[0],
        REGION=REGION,
        BLOCK=block_of(share),
        MOST=MOST,
        num_warps=_WARPS,
    )


def recv(target: Tensor, slots: Tensor, acks: Tensor, counts: Tensor, abort: Tensor) -> None:
    """Wait for a message and copy it out of its slot.

    The arguments are those of `send`, seen from the other side: `slots` is the receiver's own
    memory, and `acks` the sender's.
    """
    programs, share = shares_of(target.numel())
    _recv_kernel[(programs,)](
        target,
        slots,
        acks,
        counts,
        abort,
        target.numel(),
        share,
        SLOTS=slots.shape[0],
        REGION=REGION,
        BLOCK=block_of(share),
        MOST=MOST,
        num_warps=_WARPS,
    )


def block_of(share: int) -> int:
    """The words that a program moves at once: one of three sizes, so that few kernels are
    compiled."""
    return next(block for block in _BLOCKS if share <= block)


def shares_of(words: int) -> tuple[int, int]:
    """The programs of a launch and the words of each share, for a message of this many words; both
    ends compute the same."""
    assert words <= MOST, "a longer message goes by peer_triton"
    programs = max(1, min(PROGRAMS, cdiv(words, _SHARE)))
    share = max(cdiv(cdiv(words, programs), _ALIGNED), 1) * _ALIGNED
    return cdiv(words, share) if words else 1, share
