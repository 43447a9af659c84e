"""Collectives by stores into the other ranks' memory, in Triton: one kernel sends, waits, and sums
or joins. `exchange`, at the end of this file, launches it.

In an *exchange* each rank sends a piece of its tensor to every other rank: the same piece to all,
or a different one to each. It joins the pieces that it receives, or sums them in float32 (`_sum`)
and rounds once, so that all ranks get the same bits.

Small pieces: each word travels with the number of the exchange
(`weft.ops.transfers.peer_packed_triton`) into an inbox; a rank has one inbox for each other rank.
An inbox has two slots, which alternate, and needs no acknowledgement. A rank that has received all
words of exchange k knows that every other rank has sent them, and so has read exchange k - 1, whose
slot exchange k + 1 will overwrite.

Large pieces: a program of the kernel moves a share of each piece, chunk by chunk, through a ring of
SLOTS chunks. A flag beside the ring counts the chunks that have arrived. A program sends chunk c,
then reads chunk c - AHEAD, then sends c + 1, and reads all chunks before it ends. So the chunks
acknowledge one another: before it sends c, it has read chunk c - 1 - AHEAD of every other rank,
which that rank sent after it had read chunk c - 2 - 2 AHEAD. Chunk c takes the slot of c - SLOTS,
and SLOTS = 2 + 2 AHEAD. Stores before a release at system scope are visible after the acquire that
reads it.

The programs of a launch wait for the programs with the same number on other ranks. All of them must
run at the same time, so there are few. A program whose wait is aborted stores nothing more.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import kernel
from weft.ops.tiles.tile import cdiv
from weft.ops.transfers import peer_packed_triton as packed
from weft.ops.transfers.peer_packed_triton import MOST, REGION, block_of, shares_of

# The programs of a launch for large pieces, all of which must be resident at the same time. With
# _MAX_REGISTERS a multiprocessor has room for two, and every GPU whose memory other GPUs can reach
# has at least 64 multiprocessors.
PROGRAMS = 128
# The number of chunks that a program sends before it reads the first.
AHEAD = 3
# The chunks in a ring; the module's docstring says why so many.
SLOTS = 2 + 2 * AHEAD
# The words of a chunk.
BLOCK = 2048
_PACKED_SLOTS = 2
_RING_AT = 8 * _PACKED_SLOTS * MOST
_FLAGS_AT = _RING_AT + 4 * PROGRAMS * SLOTS * BLOCK
# The bytes of the inbox that a rank has for each other rank: 10 MiB.
INBOX = _FLAGS_AT + 8 * PROGRAMS
# The number of counters that a rank keeps for each group of ranks.
COUNTS = packed.PROGRAMS + PROGRAMS
_WARPS = 8
_MAX_REGISTERS = 128
# A share is a multiple of this many words.
_ALIGNED = 16
# The dtypes with two values in a word of 4 bytes.
_PAIRS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@attrs.frozen(eq=False)
class Group:
    """A rank's side of the exchanges among some ranks.

    Args:
        outs: [ranks] int64: for each rank, the address in its memory of the inbox for this rank;
            the entry of this rank is not used.
        ins: [ranks] int64: for each rank, the address in this rank's memory of the inbox into which
            that rank stores; the entry of this rank is not used.
        counts: [COUNTS] int64, this rank's counters of exchanges and chunks so far. All inboxes
            must be zero before the first exchange.
        abort: [1] int32: a value other than 0 ends every wait.
        own_rank: this rank's place in the group.
    """

    outs: Tensor
    ins: Tensor
    counts: Tensor
    abort: Tensor
    own_rank: int

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self.outs.numel())


@attrs.frozen
class Pieces:
    """The layout of the pieces of an exchange.

    Args:
        words: the words of 4 bytes in each piece.
        source_run: the source has a piece for each rank, and the pieces alternate after this many
            words: this is `words` if the pieces lie along the first dimension, and less along a
            later one. None: the source is one piece, which goes to all ranks.
        target_run: likewise for the target; None: the target is the sum.

    Words of a piece beyond the end of the source are zeros; words beyond the end of the target are
    dropped.
    """

    words: int
    source_run: int | None
    target_run: int | None


@triton.jit
def _value(word, half: tl.constexpr, PAIR: tl.constexpr):
    """The value of a word, or of one of its halves, as float32."""
    if PAIR is None:
        return word.to(tl.float32, bitcast=True)
    else:
        return ((word >> (16 * half)) & 0xFFFF).to(tl.int16).to(PAIR, bitcast=True).to(tl.float32)


@triton.constexpr_function
def _left(count):
    """The ranks in the left part of a balanced tree: a power of two."""
    return 1 << ((count - 1).bit_length() - 1)


@triton.jit
def _sum(words, half: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, PAIR: tl.constexpr):
    """The sum of one value of each of COUNT ranks, starting at FIRST, as the balanced tree that
    `weft.meshes.placements.reduced` defines."""
    if COUNT > 1:
        LEFT: tl.constexpr = _left(COUNT)
        left = _sum(words, half, FIRST, LEFT, PAIR)
        return left + _sum(words, half, FIRST + LEFT, COUNT - LEFT, PAIR)
    else:
        return _value(words[FIRST], half, PAIR)


@triton.jit
def _reduced(words, RANKS: tl.constexpr, PAIR: tl.constexpr):
    """The words of the sum, from a tuple with the words of each rank."""
    if PAIR is None:
        return _sum(words, 0, 0, RANKS, PAIR).to(tl.int32, bitcast=True)
    else:
        low = (
            _sum(words, 0, 0, RANKS, PAIR).to(PAIR).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        )
        high = (
            _sum(words, 1, 0, RANKS, PAIR).to(PAIR).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        )
        return low | (high << 16)


@triton.jit
def _place(offsets, rank: tl.constexpr, run, RANKS: tl.constexpr, ALTERNATE: tl.constexpr):
    """The places, in a tensor laid out as `Pieces` says, of some words of a rank's piece."""
    if ALTERNATE:
        return (offsets // run) * (run * RANKS) + rank * run + offsets % run
    else:
        return offsets


@kernel(do_not_specialize=["words", "source_words", "source_run", "target_words", "target_run"])
def _small_kernel(
    source,
    target,
    outs,
    ins,
    counts,
    abort,
    words,
    share,
    source_words,
    source_run,
    target_words,
    target_run,
    OWN: tl.constexpr,
    RANKS: tl.constexpr,
    SCATTER: tl.constexpr,
    SUM: tl.constexpr,
    PAIR: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.load(counts + program) + 1
    flag = number & 0x7FFFFFFF
    within = tl.arange(0, BLOCK)
    offsets = program * share + within
    inside = (within < share) & (offsets < words)
    slot = (number % SLOTS) * MOST + program * REGION + within
    for peer in tl.static_range(RANKS):
        if peer != OWN:
            at = _place(offsets, peer, source_run, RANKS, SCATTER)
            word = tl.load(source + at, mask=inside & (at < source_words), other=0)
            sent = (word.to(tl.int64) & 0xFFFFFFFF) | (flag << 32)
            tl.store(tl.load(outs + peer).to(tl.pointer_type(tl.int64)) + slot, sent, mask=inside)
    there = inside
    for peer in tl.static_range(RANKS):
        if peer == OWN:
            at = _place(offsets, peer, source_run, RANKS, SCATTER)
            theirs = tl.load(source + at, mask=inside & (at < source_words), other=0)
        else:
            inbox = tl.load(ins + peer).to(tl.pointer_type(tl.int64))
            got = tl.zeros([BLOCK], dtype=tl.int64)
            waiting = True
            while waiting:
                got = tl.load(inbox + slot, mask=inside, other=0, volatile=True)
                late = tl.sum((inside & ((got >> 32) != flag)).to(tl.int32), 0)
                waiting = (late > 0) and (tl.load(abort, volatile=True) == 0)
            there = there & ((got >> 32) == flag)
            theirs = got.to(tl.int32)
        if not SUM:
            to = _place(offsets, peer, target_run, RANKS, True)
            tl.store(target + to, theirs, mask=there & (to < target_words))
        elif peer == 0:
            every = (theirs,)
        else:
            every = every + (theirs,)  # noqa: RUF005 - Triton has no unpacking
    if SUM:
        tl.store(
            target + offsets, _reduced(every, RANKS, PAIR), mask=there & (offsets < target_words)
        )
    # Count the exchange only if it was not aborted, and after all threads have stored their words.
    if tl.sum((inside & (~there)).to(tl.int32), 0) == 0:
        tl.debug_barrier()
        tl.store(counts + program, number)


@triton.jit
def _wait(flag, number, abort):
    """Wait until a flag has reached a number, and return True, or False if the wait was aborted."""
    there = False
    waiting = True
    while waiting:
        # Adding 0 is a load with acquire semantics, which `tl.load` does not offer.
        there = tl.atomic_add(flag, 0, sem="acquire", scope="sys") >= number
        waiting = (not there) and (tl.load(abort, volatile=True) == 0)
    return there


@triton.jit
def _chunk(program, step, number, share, words, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """The words of a program's chunk: their places in the piece, which of them exist, and their
    places in a ring."""
    within = tl.arange(0, BLOCK)
    inside = step * BLOCK + within < share
    offsets = program * share + step * BLOCK + within
    slot = program * SLOTS + (number % SLOTS).to(tl.int32)
    return offsets, inside & (offsets < words), slot * BLOCK + within


@kernel()
def _large_kernel(
    source,
    target,
    outs,
    ins,
    counts,
    abort,
    words,
    share,
    source_words,
    source_run,
    target_words,
    target_run,
    OWN: tl.constexpr,
    RANKS: tl.constexpr,
    SCATTER: tl.constexpr,
    SUM: tl.constexpr,
    PAIR: tl.constexpr,
    RING_AT: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    SLOTS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    count = tl.load(counts + program)
    steps = tl.cdiv(share, BLOCK)
    alive = tl.load(abort, volatile=True) == 0
    for step in range(steps + AHEAD):
        if alive and step < steps:
            number = count + step + 1
            offsets, inside, slot = _chunk(program, step, number, share, words, SLOTS, BLOCK)
            for peer in tl.static_range(RANKS):
                if peer != OWN:
                    ring = (tl.load(outs + peer) + RING_AT).to(tl.pointer_type(tl.int32))
                    at = _place(offsets, peer, source_run, RANKS, SCATTER)
                    word = tl.load(source + at, mask=inside & (at < source_words), other=0)
                    tl.store(tl.multiple_of(ring + slot, 16), word, mask=inside)
            # The flags must follow the stores of all threads of the program.
            tl.debug_barrier()
            for peer in tl.static_range(RANKS):
                if peer != OWN:
                    flags = (tl.load(outs + peer) + FLAGS_AT).to(tl.pointer_type(tl.int64))
                    tl.atomic_xchg(flags + program, number, sem="release", scope="sys")
        if alive and step >= AHEAD:
            number = count + step - AHEAD + 1
            offsets, inside, slot = _chunk(
                program, step - AHEAD, number, share, words, SLOTS, BLOCK
            )
            for peer in tl.static_range(RANKS):
                if peer != OWN:
                    flags = (tl.load(ins + peer) + FLAGS_AT).to(tl.pointer_type(tl.int64))
                    alive = _wait(flags + program, number, abort) and alive
            if alive:
                for peer in tl.static_range(RANKS):
                    if peer == OWN:
                        at = _place(offsets, peer, source_run, RANKS, SCATTER)
                        theirs = tl.load(source + at, mask=inside & (at < source_words), other=0)
                    else:
                        ring = (tl.load(ins + peer) + RING_AT).to(tl.pointer_type(tl.int32))
                        from_ring = tl.multiple_of(ring + slot, 16)
                        theirs = tl.load(from_ring, mask=inside, other=0, cache_modifier=".cg")
                    if not SUM:
                        to = _place(offsets, peer, target_run, RANKS, True)
                        tl.store(target + to, theirs, mask=inside & (to < target_words))
                    elif peer == 0:
                        every = (theirs,)
                    else:
                        every = every + (theirs,)  # noqa: RUF005 - Triton has no unpacking
                if SUM:
                    summed = _reduced(every, RANKS, PAIR)
                    tl.store(target + offsets, summed, mask=inside & (offsets < target_words))
    if alive:
        tl.debug_barrier()
        tl.store(counts + program, count + steps)


def exchange(
    source: Tensor, target: Tensor, pieces: Pieces, group: Group, dtype: torch.dtype | None = None
) -> None:
    """Send each rank its piece of the source, and join or sum the pieces that arrive; all ranks
    must make the same call.

    Args:
        source, target: [words] int32, contiguous, without overlap.
        pieces: the layout of the source and the target.
        group: the ranks.
        dtype: the dtype of the values that are summed: float32, float16 or bfloat16. None: join the
            pieces.
    """
    assert (dtype is None) == (pieces.target_run is not None), "pieces are joined or summed"
    addresses = group.outs, group.ins
    small = group.counts[: packed.PROGRAMS]
    large = group.counts[packed.PROGRAMS :]
    layout = (
        source.numel(),
        pieces.source_run or pieces.words,
        target.numel(),
        pieces.target_run or pieces.words,
    )
    kind = {
        "OWN": group.own_rank,
        "RANKS": group.ranks,
        "SCATTER": pieces.source_run is not None,
        "SUM": dtype is not None,
        "PAIR": None if dtype is None else _PAIRS.get(dtype),
    }
    if pieces.words <= MOST:
        programs, share = shares_of(pieces.words)
        _small_kernel[(programs,)](
            source,
            target,
            *addresses,
            small,
            group.abort,
            pieces.words,
            share,
            *layout,
            **kind,
            SLOTS=_PACKED_SLOTS,
            REGION=REGION,
            BLOCK=block_of(share),
            MOST=MOST,
            num_warps=_WARPS,
        )
    else:
        share = cdiv(cdiv(pieces.words, PROGRAMS), _ALIGNED) * _ALIGNED
        _large_kernel[(PROGRAMS,)](
            source,
            target,
            *addresses,
            large,
            group.abort,
            pieces.words,
            share,
            *layout,
            **kind,
            RING_AT=_RING_AT,
            FLAGS_AT=_FLAGS_AT,
            SLOTS=SLOTS,
            AHEAD=AHEAD,
            BLOCK=BLOCK,
            num_warps=_WARPS,
            maxnreg=_MAX_REGISTERS,
        )


__all__ = ["COUNTS", "INBOX", "Group", "Pieces", "exchange"]
