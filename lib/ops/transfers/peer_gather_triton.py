"""Collectives by stores into the other ranks' memory, in Triton: one kernel sends, waits, and sums or gathers.

Each rank stores its words, each with the number of the collective (`weft.ops.transfers.peer_packed_triton`), into an
inbox of every other rank, and waits until those of all others are there. The sum of 16-bit values is made in float32,
as a balanced tree over the ranks in their order, and rounded once, so that all ranks get the same bits (one-shot
all-reduce).

An inbox has two slots, which take turns, and needs no acknowledgement: a rank that has all words of collective k knows
that every other rank has sent them, and so has read those of k - 1, in whose slot those of k + 1 will be.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import kernel
from weft.ops.transfers.peer_packed_triton import MOST, PROGRAMS, REGION, block_of, shares_of

SLOTS = 2
INBOX = SLOTS * MOST
"""Words of 8 bytes in the inbox that a rank has for each other rank."""
_WARPS = 8
_PAIRS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""The dtypes of which a word of 4 bytes holds two values."""


@triton.constexpr_function
def _half(count):
    """The ranks in the left part of a balanced tree: a power of two."""
    return 1 << ((count - 1).bit_length() - 1)


@triton.jit
def _receive(word, ins, slot, inside, flag, abort, PEER: tl.constexpr, OWN: tl.constexpr):
    """A rank's words, once they are there, and which of them are."""
    if PEER == OWN:
        return word, inside
    else:
        inbox = tl.load(ins + PEER).to(tl.pointer_type(tl.int64))
        late = 1
        waiting = True
        packed = tl.zeros_like(slot)
        while waiting:
            packed = tl.load(inbox + slot, mask=inside, other=0, volatile=True)
            late = tl.sum((inside & ((packed >> 32) != flag)).to(tl.int32), 0)
            waiting = (late > 0) and (tl.load(abort, volatile=True) == 0)
        return packed.to(tl.int32), inside & ((packed >> 32) == flag)


@triton.jit
def _sum(
    word, ins, slot, inside, flag, abort, FIRST: tl.constexpr, COUNT: tl.constexpr, OWN: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """The sum of the words of COUNT ranks from FIRST on, as a balanced tree: the low and the high value of a word, or
    the same twice if a word is one value; and which words are there."""
    if COUNT > 1:
        HALF: tl.constexpr = _half(COUNT)
        low, high, there = _sum(word, ins, slot, inside, flag, abort, FIRST, HALF, OWN, PAIR)
        more, most, too = _sum(word, ins, slot, inside, flag, abort, FIRST + HALF, COUNT - HALF, OWN, PAIR)
        return low + more, high + most, there & too
    else:
        theirs, there = _receive(word, ins, slot, inside, flag, abort, FIRST, OWN)
        if PAIR is None:
            value = theirs.to(tl.float32, bitcast=True)
            return value, value, there
        else:
            one = (theirs & 0xFFFF).to(tl.int16).to(PAIR, bitcast=True).to(tl.float32)
            two = ((theirs >> 16) & 0xFFFF).to(tl.int16).to(PAIR, bitcast=True).to(tl.float32)
            return one, two, there


@kernel(do_not_specialize=["words"])
def _gather_kernel(
    source, target, outs, ins, counts, abort, words, share,
    OWN: tl.constexpr, RANKS: tl.constexpr, SUM: tl.constexpr, PAIR: tl.constexpr,
    SLOTS: tl.constexpr, REGION: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    number = tl.load(counts + program) + 1
    flag = number & 0x7FFFFFFF
    offsets = tl.arange(0, BLOCK)
    inside = (offsets < share) & (program * share + offsets < words)
    word = tl.load(source + program * share + offsets, mask=inside, other=0)
    packed = (word.to(tl.int64) & 0xFFFFFFFF) | (flag << 32)
    slot = (number % SLOTS) * MOST + program * REGION + offsets
    for peer in tl.static_range(RANKS):
        if peer != OWN:
            tl.store(tl.load(outs + peer).to(tl.pointer_type(tl.int64)) + slot, packed, mask=inside)
    there = inside
    if not SUM:
        for peer in tl.static_range(RANKS):
            theirs, came = _receive(word, ins, slot, inside, flag, abort, peer, OWN)
            there = there & came
            tl.store(target + peer * words + program * share + offsets, theirs, mask=there)
    else:
        low, high, there = _sum(word, ins, slot, inside, flag, abort, 0, RANKS, OWN, PAIR)
        if PAIR is None:
            total = low.to(tl.int32, bitcast=True)
        else:
            first = low.to(PAIR).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            second = high.to(PAIR).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            total = first | (second << 16)
        tl.store(target + program * share + offsets, total, mask=there)
    if tl.sum((inside & (~there)).to(tl.int32), 0) == 0:
        tl.debug_barrier()
        tl.store(counts + program, number)


def gather(
    source: Tensor, target: Tensor, outs: Tensor, ins: Tensor, counts: Tensor, abort: Tensor, own: int, ranks: int
) -> None:
    """Gather the words of all ranks, in their order.

    Args:
        source: [words] int32, contiguous, at most MOST of them; the same number on all ranks.
        target: [ranks, words] int32.
        outs: [ranks] int64, for each rank the address there of the inbox for this one.
        ins: [ranks] int64, for each rank the address here of the inbox for it.
        counts: [PROGRAMS] int64, this rank's own: collectives so far.
        abort: [1] int32: not 0 ends every wait.
        own, ranks: this rank's place, and the number of ranks.
    """
    _launch(source, target, outs, ins, counts, abort, own, ranks, None, summed=False)


def all_reduce(
    source: Tensor, target: Tensor, outs: Tensor, ins: Tensor, counts: Tensor, abort: Tensor, own: int, ranks: int
) -> None:
    """The sum of the tensors of all ranks, as `gather` takes them.

    Args:
        source, target: [n] float32, or float16 or bfloat16 with an even n; contiguous, aligned to 4 bytes.
    """
    pair = _PAIRS.get(source.dtype)
    words, total = source.view(torch.int32), target.view(torch.int32)
    _launch(words, total, outs, ins, counts, abort, own, ranks, pair, summed=True)


def _launch(source, target, outs, ins, counts, abort, own, ranks, pair, *, summed) -> None:
    programs, share = shares_of(source)
    _gather_kernel[(programs,)](
        source, target, outs, ins, counts, abort, source.numel(), share,
        OWN=own, RANKS=ranks, SUM=summed, PAIR=pair,
        SLOTS=SLOTS, REGION=REGION, BLOCK=block_of(share), MOST=MOST, num_warps=_WARPS,
    )  # fmt: skip


__all__ = ["INBOX", "PROGRAMS", "all_reduce", "gather"]
