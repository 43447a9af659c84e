"""The CUDA implementation of `weft::resolve_tokens` and `weft::move_on`, in Triton. Import it only
where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import begin, early, kernel
from weft.ops.requests import DRAFT, LAST_TOKEN
from weft.ops.tiles.tile import cdiv

_LAST_TOKEN, _DRAFT = tl.constexpr(LAST_TOKEN), tl.constexpr(DRAFT)
# The tokens of a program, the requests that it searches at a time, and the pages that it copies at
# a time.
_BLOCK = 128


@triton.jit
def _resolve_request(
    request,
    rows,
    starts,
    positions,
    block_table,
    seq_lens,
    tables,
    last_index,
    num_rows,
    max_pages,
    BLOCK: tl.constexpr,
):
    """Read one request from the table: its context length, pages and last token."""
    row = tl.load(rows + request)
    # Padding reads the last row, as the index -1 does in the reference.
    safe_row = tl.where((row < 0) | (row >= num_rows), num_rows - 1, row)
    end = tl.load(starts + request + 1)
    length = tl.load(positions + safe_row) + end - tl.load(starts + request)
    tl.store(seq_lens + request, tl.where(safe_row == row, length, 0).to(tl.int32))
    tl.store(last_index + request, tl.maximum(end - 1, 0).to(tl.int64))
    for start in range(0, max_pages, BLOCK):
        page = start + tl.arange(0, BLOCK)
        page_ids = tl.load(
            block_table + safe_row * max_pages + page, mask=page < max_pages, other=0
        )
        tl.store(tables + request.to(tl.int64) * max_pages + page, page_ids, mask=page < max_pages)


@kernel(do_not_specialize=["num_reqs", "num_tokens", "num_rows"])
def _resolve_kernel(
    rows,
    input_ids,
    starts,
    positions,
    last_tokens,
    block_table,
    limits,
    ids,
    places,
    slots,
    seq_lens,
    tables,
    last_index,
    num_reqs,
    num_tokens,
    num_rows,
    max_pages,
    PAGE_SIZE: tl.constexpr,
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first programs serve one request each, the others one block of tokens each."""
    begin()
    if tl.program_id(0) < num_reqs:
        _resolve_request(
            tl.program_id(0),
            rows,
            starts,
            positions,
            block_table,
            seq_lens,
            tables,
            last_index,
            num_rows,
            max_pages,
            BLOCK,
        )
    else:
        token = (tl.program_id(0) - num_reqs) * BLOCK + tl.arange(0, BLOCK)
        inside = token < num_tokens
        # A token's owner is the number of requests that end at or before it.
        owner = tl.zeros([BLOCK], tl.int32)
        for base in range(0, num_reqs, BLOCK):
            request = base + tl.arange(0, BLOCK)
            end = tl.load(starts + request + 1, mask=request < num_reqs, other=2147483647)
            owner += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), 1)
        owner = tl.minimum(owner, num_reqs - 1)
        row = tl.load(rows + owner)
        place = token - tl.load(starts + owner)
        valid = inside & (token < tl.load(starts + owner + 1)) & (row >= 0)
        there = valid & (row < num_rows)
        position = tl.where(there, tl.load(positions + row, mask=there, other=0) + place, 0)
        there &= position < max_pages * PAGE_SIZE
        token_id = tl.load(input_ids + token, mask=inside, other=0)
        last = tl.load(last_tokens + row, mask=there, other=0)
        token_id = tl.where(valid, tl.where(token_id == _LAST_TOKEN, last, token_id), 0)
        page = tl.load(
            block_table + row * max_pages + position // PAGE_SIZE, mask=there, other=0
        ).to(tl.int64)
        kept = there
        if LIMITED:
            token_id = tl.where(token_id == _DRAFT, last, token_id)
            kept = there & (position < tl.load(limits + row, mask=there, other=0) - 1)
        tl.store(ids + token, tl.where(valid & ~there, -1, token_id), mask=inside)
        tl.store(places + token, position, mask=inside)
        tl.store(
            slots + token, tl.where(kept, page * PAGE_SIZE + position % PAGE_SIZE, -1), mask=inside
        )


def resolve_tokens(
    rows: Tensor,
    input_ids: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    block_table: Tensor,
    limits: Tensor | None,
    page_size: int,
) -> tuple[Tensor, ...]:
    """`weft::resolve_tokens`."""
    num_reqs = len(rows)
    num_tokens = len(input_ids)
    max_pages = block_table.shape[1]
    ids, places, slots = (torch.empty_like(input_ids) for _ in range(3))
    seq_lens = torch.empty_like(rows, dtype=torch.int32)
    last_index = torch.empty_like(rows)
    tables = block_table.new_empty((num_reqs, max_pages))
    with torch.cuda.device_of(rows):
        if num_reqs:
            _resolve_kernel[(num_reqs + cdiv(num_tokens, _BLOCK),)](
                rows.contiguous(),
                input_ids.contiguous(),
                query_start_loc.contiguous(),
                positions,
                last_tokens,
                block_table.contiguous(),
                positions if limits is None else limits,
                ids,
                places,
                slots,
                seq_lens,
                tables,
                last_index,
                num_reqs,
                num_tokens,
                len(positions),
                max_pages,
                PAGE_SIZE=page_size,
                LIMITED=limits is not None,
                BLOCK=_BLOCK,
                **early(rows),
            )
    return ids, places, slots, seq_lens, tables, last_index


@kernel(do_not_specialize=["num_reqs", "num_rows"])
def _move_on_kernel(
    positions,
    last_tokens,
    rows,
    starts,
    samples,
    ids,
    num_reqs,
    num_rows,
    SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin()
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_reqs
    row = tl.load(rows + request, mask=inside, other=-1)
    kept = inside & (row >= 0) & (row < num_rows)
    read = tl.load(starts + request + 1, mask=kept, other=0) - tl.load(
        starts + request, mask=kept, other=0
    )
    tl.store(positions + row, tl.load(positions + row, mask=kept, other=0) + read, mask=kept)
    if SAMPLED:
        said = kept & (tl.load(samples + request, mask=kept, other=0) != 0)
        tl.store(last_tokens + row, tl.load(ids + request, mask=said, other=0), mask=said)


def move_on(
    positions: Tensor,
    last_tokens: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    samples: Tensor,
    ids: Tensor | None,
) -> None:
    """`weft::move_on`."""
    with torch.cuda.device_of(positions):
        if num_reqs := len(rows):
            _move_on_kernel[(cdiv(num_reqs, _BLOCK),)](
                positions,
                last_tokens,
                rows.contiguous(),
                query_start_loc.contiguous(),
                samples.contiguous(),
                rows if ids is None else ids.contiguous(),
                num_reqs,
                len(positions),
                SAMPLED=ids is not None,
                BLOCK=_BLOCK,
                **early(positions),
            )
