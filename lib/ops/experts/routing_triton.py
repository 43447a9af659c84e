"""The CUDA implementation of `weft::route`, in Triton, and the search for the pairs of each expert.

`weft::route` is one kernel with a program per token: softmax, top-k and division. A pair is a token
and one of its experts; pair p is slot `p % top_k` of token `p // top_k`. The products with the
experts need each expert's pairs: either the pairs are sorted beforehand (`align`), or each program
finds its own (`find_expert`, `scan`).

Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import at_once, begin, early, kernel, release
from weft.ops.products.blocks_triton import TRITON_DTYPES, load_sum
from weft.ops.products.parts import num_parts
from weft.ops.tiles.tile import power_of_two

# Up to each number of pairs, how many of them `_align_kernel` reads at a time, and its warps.
_CHUNKS = {512: (512, 4), 4096: (1024, 4)}
# The same for larger numbers of pairs.
_MANY = (4096, 16)


@kernel(do_not_specialize=["at_once"])
def _route_kernel(
    logits,
    weights,
    experts,
    num_experts,
    stride,
    part_stride,
    at_once,
    PARTS: tl.constexpr,
    TYPE: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    begin(at_once)
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < num_experts
    left = load_sum(logits, token * stride + expert, inside, part_stride, PARTS, TYPE)
    left = tl.where(inside, left, float("-inf"))
    top = tl.max(left, 0)
    total = tl.sum(tl.exp(left - top), 0)
    slot = tl.arange(0, SLOTS)
    best = tl.full([SLOTS], float("-inf"), tl.float32)
    chosen = tl.zeros([SLOTS], tl.int32)
    for i in tl.static_range(TOP_K):
        value, index = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(slot == i, value, best)
        chosen = tl.where(slot == i, index, chosen)
        left = tl.where(expert == index, float("-inf"), left)
    release()
    powers = tl.where(slot < TOP_K, tl.exp(best - top), 0.0)
    if RENORMALIZE:
        total = tl.sum(powers, 0)
    tl.store(weights + token * TOP_K + slot, powers / total, mask=slot < TOP_K)
    # Stay in range even if a logit is NaN.
    tl.store(experts + token * TOP_K + slot, tl.minimum(chosen, num_experts - 1), mask=slot < TOP_K)


def route(
    logits: Tensor, top_k: int, renormalize: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`weft::route`."""
    tokens, num_experts = logits.shape[-2:]
    logits = logits.contiguous()
    weights = logits.new_empty((tokens, top_k), dtype=torch.float32)
    experts = logits.new_empty((tokens, top_k), dtype=torch.int32)
    with torch.cuda.device_of(logits):
        if tokens:
            _route_kernel[(tokens,)](
                logits,
                weights,
                experts,
                num_experts,
                num_experts,
                tokens * num_experts,
                at_once(tokens),
                PARTS=num_parts(logits),
                TYPE=TRITON_DTYPES[dtype],
                TOP_K=top_k,
                SLOTS=power_of_two(top_k),
                BLOCK=power_of_two(num_experts),
                RENORMALIZE=renormalize,
                num_warps=1,
                **early(logits),
            )
    return weights, experts


@kernel(do_not_specialize=["pairs", "num_blocks", "first_expert"])
def _align_kernel(
    experts,
    order,
    owners,
    pairs,
    num_blocks,
    first_expert,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write expert e's pairs, in ascending order and padded with -1, to its blocks of `order`, and
    e to `owners` of these blocks.

    Experts are counted from `first_expert` on; pairs of other experts are in no block. The program
    after the last expert marks the unused blocks with -1.
    """
    begin()
    expert = tl.program_id(0)
    num_local_experts = tl.num_programs(0) - 1
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        ids = (
            tl.load(experts + start + lane, mask=start + lane < pairs, other=first_expert)
            - first_expert
        )
        ids = tl.where((ids >= 0) & (ids < num_local_experts), ids, num_local_experts)
        # Lanes past the end were loaded as expert 0: subtract them.
        counts += tl.histogram(ids, BINS) - tl.where(
            bins == 0, tl.maximum(start + CHUNK - pairs, 0), 0
        )
    blocks = (counts + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    last = expert == num_local_experts
    end = tl.where(last, num_blocks, first + (count + BLOCK - 1) // BLOCK)
    for start in range(first, end, CHUNK):
        tl.store(owners + start + lane, tl.where(last, -1, expert), mask=start + lane < end)
    for start in range(first * BLOCK + count, tl.where(last, first, end) * BLOCK, CHUNK):
        tl.store(order + start + lane, -1, mask=start + lane < end * BLOCK)
    release()
    cursor = first * BLOCK
    for start in range(0, tl.where(last, 0, pairs), CHUNK):
        ids = tl.load(experts + start + lane, mask=start + lane < pairs, other=-1)
        mine = (ids == first_expert + expert).to(tl.int32)
        tl.store(order + cursor + tl.cumsum(mine, 0) - 1, start + lane, mask=mine != 0)
        cursor += tl.sum(mine, 0)


@triton.jit
def find_expert(experts, first_expert, pairs, num_experts, PAIRS: tl.constexpr):
    """This program's expert, counted from `first_expert` on, and the number of its pairs.

    If there are fewer pairs than experts, this is the expert of pair `program_id(0)`, and the
    number is 0 unless that pair is the expert's first and the expert is one of the `num_experts`.
    Otherwise it is the expert `program_id(0)`.
    """
    pair = tl.arange(0, PAIRS)
    ids = tl.load(experts + pair, mask=pair < pairs, other=-1)
    program = tl.program_id(0)
    expert = program
    if pairs < num_experts:
        expert = tl.load(experts + program) - first_expert
    mine = ids == first_expert + expert
    count = tl.sum(mine.to(tl.int32), 0)
    if pairs < num_experts:
        elsewhere = (expert < 0) | (expert >= num_experts)
        count = tl.where(
            elsewhere | (tl.sum((mine & (pair < program)).to(tl.int32), 0) > 0), 0, count
        )
    return expert, count


@triton.jit
def scan(experts, expert, pairs, start, PAIRS: tl.constexpr, TOKENS: tl.constexpr):
    """TOKENS pairs of the expert, starting at its pair number `start`, and which of them exist."""
    pair = tl.arange(0, PAIRS)
    mine = tl.load(experts + pair, mask=pair < pairs, other=-1) == expert
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1 - start
    here = (rank[None, :] == tl.arange(0, TOKENS)[:, None]) & mine[None, :]
    return tl.sum(tl.where(here, pair[None, :], 0), 1), tl.sum(here.to(tl.int32), 1) > 0


@attrs.frozen(eq=False)
class Aligned:
    """Pairs sorted by expert, in blocks: `order` `[blocks * block]`, and in `owners` the expert of
    each block, or -1."""

    order: Tensor
    owners: Tensor


def align(experts: Tensor, num_experts: int, block: int, first: int = 0) -> Aligned:
    """Sort the pairs of `experts` `[T, top_k]` that chose one of the `num_experts` from `first` on.

    Nothing is read on the host, so the tensors have room for the worst case.
    """
    pairs = experts.numel()
    # Each expert that has pairs may leave its last block partly empty.
    blocks = pairs // block + min(pairs, num_experts)
    order = experts.new_empty(blocks * block)
    owners = experts.new_empty(blocks)
    chunk, warps = next((one for most, one in _CHUNKS.items() if pairs <= most), _MANY)
    _align_kernel[(num_experts + 1,)](
        experts,
        order,
        owners,
        pairs,
        blocks,
        first,
        BINS=power_of_two(num_experts + 1),
        BLOCK=block,
        CHUNK=chunk,
        num_warps=warps,
        **early(experts),
    )
    return Aligned(order, owners)
