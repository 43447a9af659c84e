"""Which pairs of a token and one of its experts belong to an expert, in Triton: sorted beforehand, or found by each
program. Pair p is slot `p % top_k` of token `p // top_k`. Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import attrs
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.early_triton import begin, early, release
from weft.ops.kernel_triton import kernel
from weft.ops.tiles import power_of_two

_CHUNKS = {512: (512, 4), 4096: (1024, 4)}
"""Of so many pairs at most: those that `_align_kernel` looks at at a time, and its warps."""
_MANY = (4096, 16)
"""Of more pairs."""


@kernel(do_not_specialize=["pairs", "num_blocks"])
def _align_kernel(
    experts, order, owners, pairs, num_blocks,
    BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Expert e's pairs, in ascending order, to its blocks of `order`, -1 behind them; and e to these blocks' `owners`.

    The program behind the last expert marks the blocks behind the last one with -1.
    """
    begin()
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        ids = tl.load(experts + start + lane, mask=start + lane < pairs, other=0)
        # Lanes behind the end count as expert 0's.
        counts += tl.histogram(ids, BINS) - tl.where(bins == 0, tl.maximum(start + CHUNK - pairs, 0), 0)
    blocks = (counts + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    last = expert == tl.num_programs(0) - 1
    end = tl.where(last, num_blocks, first + (count + BLOCK - 1) // BLOCK)
    for start in range(first, end, CHUNK):
        tl.store(owners + start + lane, tl.where(last, -1, expert), mask=start + lane < end)
    for start in range(first * BLOCK + count, tl.where(last, first, end) * BLOCK, CHUNK):
        tl.store(order + start + lane, -1, mask=start + lane < end * BLOCK)
    release()
    found = first * BLOCK
    for start in range(0, tl.where(last, 0, pairs), CHUNK):
        ids = tl.load(experts + start + lane, mask=start + lane < pairs, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(order + found + tl.cumsum(mine, 0) - 1, start + lane, mask=mine != 0)
        found += tl.sum(mine, 0)


@triton.jit
def find_expert(experts, pairs, num_experts, PAIRS: tl.constexpr):
    """This program's expert and how many pairs it has: with fewer pairs than experts, that of pair `program_id(0)`,
    and 0 unless it is the expert's first pair; else the expert `program_id(0)`."""
    pair = tl.arange(0, PAIRS)
    ids = tl.load(experts + pair, mask=pair < pairs, other=-1)
    own = tl.program_id(0)
    expert = own
    if pairs < num_experts:
        expert = tl.load(experts + own)
    mine = ids == expert
    count = tl.sum(mine.to(tl.int32), 0)
    if pairs < num_experts:
        count = tl.where(tl.sum((mine & (pair < own)).to(tl.int32), 0) > 0, 0, count)
    return expert, count


@triton.jit
def scan(experts, expert, pairs, start, PAIRS: tl.constexpr, TOKENS: tl.constexpr):
    """The expert's pairs number start, start + 1, …, and which of them there are."""
    pair = tl.arange(0, PAIRS)
    mine = tl.load(experts + pair, mask=pair < pairs, other=-1) == expert
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1 - start
    here = (rank[None, :] == tl.arange(0, TOKENS)[:, None]) & mine[None, :]
    return tl.sum(tl.where(here, pair[None, :], 0), 1), tl.sum(here.to(tl.int32), 1) > 0


@attrs.frozen(eq=False)
class Aligned:
    """Pairs sorted by expert, in blocks: `order` `[blocks * block]`, and the expert of each block, or -1."""

    order: Tensor
    owners: Tensor


def align(experts: Tensor, num_experts: int, block: int) -> Aligned:
    """Sort the pairs of `experts` `[T, top_k]`, without a host read; there is room for the worst case."""
    pairs = experts.numel()
    blocks = pairs // block + min(pairs, num_experts)
    order = experts.new_empty(blocks * block)
    owners = experts.new_empty(blocks)
    chunk, warps = next((one for most, one in _CHUNKS.items() if pairs <= most), _MANY)
    _align_kernel[(num_experts + 1,)](
        experts, order, owners, pairs, blocks,
        BINS=power_of_two(num_experts + 1), BLOCK=block, CHUNK=chunk, num_warps=warps,
        **early(experts),
    )  # fmt: skip
    return Aligned(order, owners)
