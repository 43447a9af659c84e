"""The CUDA implementation of `weft::add_lora`, in Triton: one kernel for `a` and one for `b`, for
any mix of slots.

A program takes a block of tokens in the order of the batch, and masks tokens of other slots. Each
result has one writer, and sums have a fixed order, so that a token's result does not depend on the
rest of the batch. Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from itertools import pairwise

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import begin, early, kernel
from weft.ops.products.blocks_triton import TRITON_DTYPES, load_sum
from weft.ops.products.parts import num_parts
from weft.ops.tiles.tile import cdiv, leaf_columns, power_of_two

_TOKENS = 16
_ROWS = 64
_COLUMNS = 128
# The largest adapter rank in a block; a larger rank takes several steps.
_MOST_RANK = 64
# The most columns of x that a program multiplies. Several programs share a wider x, and the second
# kernel adds their sums.
_SHARE = 1024


@kernel(do_not_specialize=["tokens"])
def _shrink_kernel(
    x,
    a,
    slots,
    active,
    low,
    tokens,
    ranks,
    columns,
    share,
    splits,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    begin()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    r = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    split = tl.program_id(2) % splits
    slot = tl.load(active + tl.program_id(2) // splits)
    owner = tl.load(slots + t, mask=t < tokens, other=-1)
    mine = (owner == slot) & (owner >= 0)
    if tl.max(mine.to(tl.int32), 0) > 0:
        acc = tl.zeros([TOKENS, RANKS], tl.float32)
        x_rows = x + t.to(tl.int64)[:, None] * columns
        a_rows = a + slot.to(tl.int64) * ranks * columns + r[:, None] * columns
        end = tl.minimum((split + 1) * share, columns)
        for k in range(split * share, end, COLUMNS):
            c = (k + tl.arange(0, COLUMNS))[None, :]
            left = tl.load(x_rows + c, mask=mine[:, None] & (c < end), other=0.0)
            right = tl.load(a_rows + c, mask=(r < ranks)[:, None] & (c < end), other=0.0)
            acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        place = low + (split.to(tl.int64) * tokens + t[:, None]) * ranks + r[None, :]
        tl.store(place, acc, mask=mine[:, None] & (r < ranks)[None, :])


@kernel(do_not_specialize=["tokens"])
def _expand_kernel(
    y,
    low,
    b,
    slots,
    active,
    out,
    tokens,
    rows,
    rank,
    pairs,
    splits,
    num_active,
    start1,
    start2,
    blocks,
    PARTS: tl.constexpr,
    TYPE: tl.constexpr,
    TOKENS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    begin()
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    leaf = tl.program_id(2)
    pair = tl.program_id(1) // blocks
    start = tl.where(pair == 0, 0, tl.where(pair == 1, start1, start2))
    end = tl.where(pair == pairs - 1, rows, tl.where(pair == 0, start1, start2))
    n = start + tl.program_id(1) % blocks * ROWS + tl.arange(0, ROWS)
    inside = (t < tokens)[:, None] & (n < end)[None, :]
    owner = tl.load(slots + t, mask=t < tokens, other=-1)
    delta = tl.zeros([TOKENS, ROWS], tl.float32)
    for i in range(num_active):
        slot = tl.load(active + i)
        mine = (owner == slot) & (owner >= 0)
        if tl.max(mine.to(tl.int32), 0) > 0:
            for first in range(0, rank, RANKS):
                r = (first + tl.arange(0, RANKS))[None, :]
                places = low + t.to(tl.int64)[:, None] * pairs * rank + pair * rank + r
                left = tl.zeros([TOKENS, RANKS], tl.float32)
                for split in range(leaf * splits, (leaf + 1) * splits):
                    more = places + tl.cast(split, tl.int64) * tokens * pairs * rank
                    left += tl.load(more, mask=mine[:, None] & (r < rank), other=0.0)
                b_rows = b + (slot.to(tl.int64) * rows + n[:, None]) * rank
                right = tl.load(b_rows + r, mask=(n < end)[:, None] & (r < rank), other=0.0)
                delta = tl.dot(left.to(right.dtype), tl.trans(right), delta, input_precision="ieee")
    place = (leaf.to(tl.int64) * tokens + t[:, None]) * rows + n[None, :]
    total = load_sum(y, place, inside, tokens * rows, PARTS, TYPE) + delta
    tl.store(out + place, total.to(TYPE), mask=inside)


def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    active: Tensor,
    starts: list[int],
    leaves: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """`weft::add_lora`, which is always batch invariant."""
    (tokens, columns), (_, pairs, rank, _), rows = x.shape, a.shape, b.shape[1]
    assert pairs <= 3, "no more linear layers than three are one product"
    out = (
        x.new_empty((leaves, tokens, rows), dtype=torch.float32)
        if leaves
        else x.new_empty((tokens, rows))
    )
    share = (
        leaf_columns(columns, leaves) if leaves else cdiv(min(_SHARE, columns), _COLUMNS) * _COLUMNS
    )
    splits = cdiv(columns, share)
    num_active = active.shape[0]
    low = x.new_empty((splits, tokens, pairs * rank), dtype=torch.float32)
    token_blocks = cdiv(tokens, _TOKENS)
    # `tl.dot` takes no fewer than 16 columns; those beyond the rank are masked.
    ranks = max(16, min(power_of_two(rank), _MOST_RANK))
    blocks = cdiv(max(end - start for start, end in pairwise(starts)), _ROWS)
    with torch.cuda.device_of(x):
        if tokens and num_active:
            _shrink_kernel[(token_blocks, cdiv(pairs * rank, ranks), num_active * splits)](
                x.contiguous(),
                a,
                slots,
                active,
                low,
                tokens,
                pairs * rank,
                columns,
                share,
                splits,
                TOKENS=_TOKENS,
                RANKS=ranks,
                COLUMNS=_COLUMNS,
                num_warps=4,
                **early(x),
            )
        if tokens:
            _expand_kernel[(token_blocks, pairs * blocks, max(leaves, 1))](
                y.contiguous(),
                low,
                b,
                slots,
                active,
                out,
                tokens,
                rows,
                rank,
                pairs,
                splits // max(leaves, 1),
                num_active,
                *(*starts[1:-1], 0, 0)[:2],
                blocks,
                PARTS=0 if leaves else num_parts(y),
                TYPE=TRITON_DTYPES[out.dtype],
                TOKENS=_TOKENS,
                RANKS=ranks,
                ROWS=_ROWS,
                num_warps=4,
                **early(x),
            )
    return out
