"""What a step reads of the table of requests, and what it writes there: an op each, so that neither takes dozens of
launches."""

from typing import Any

import torch
from torch import Tensor

from weft.batch import DRAFT, LAST_TOKEN, find_owners
from weft.ops.register import register


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
    """Each token's id, place and slot, and each request's context, pages and last token.

    Args:
        rows: [num_reqs] int64, of the table; negative: padding, which has none.
        input_ids: [num_tokens] int64.
        query_start_loc: [num_reqs + 1] int32.
        positions, last_tokens: [rows of the table] int64.
        block_table: [rows of the table, max_pages] int32.
        limits: [rows of the table] int64, the most tokens of each; None: no token is beyond them.

    Returns:
        `input_ids`, `positions`, `slot_mapping`, `seq_lens`, `block_table` and `last_index` of a
        `weft.batch.ResolvedBatch`. On CUDA a row or a place that the table does not have gives the id -1, at which the
        embedding's lookup fails, as indexing does elsewhere.
    """
    found: tuple[Tensor, ...] = _resolve_tokens(
        rows, input_ids, query_start_loc, positions, last_tokens, block_table, limits, page_size
    )
    return found


def move_on(
    positions: Tensor, last_tokens: Tensor, rows: Tensor, query_start_loc: Tensor, samples: Tensor, ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Move requests behind the tokens that a step read of them, and keep those that it sampled.

    Args:
        positions, last_tokens: [rows of the table] int64.
        rows: [num_reqs] int64, no two alike but padding's, which are negative.
        query_start_loc: [num_reqs + 1] int32.
        samples: [num_reqs] bool, whose token is kept.
        ids: [num_reqs] int64; None: none was sampled.

    Returns:
        `positions` and `last_tokens`: those given, written in place; inside a transform of torch.func others.
    """
    made = _move_on(positions, last_tokens, rows, query_start_loc, samples, ids)
    return (positions, last_tokens) if made is None else made[1:]


def reference_resolve_tokens(
    rows: Tensor,
    input_ids: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    block_table: Tensor,
    limits: Tensor | None,
    page_size: int,
) -> tuple[Tensor, ...]:
    """`weft::resolve_tokens` in plain torch, on any device."""
    starts, (owner, place) = query_start_loc, find_owners(query_start_loc, len(input_ids))
    row = rows[owner]
    valid = (place < starts[1:][owner] - starts[owner]) & (row >= 0)
    position = torch.where(valid, positions[row] + place, 0)
    ids = torch.where(valid, torch.where(input_ids == LAST_TOKEN, last_tokens[row], input_ids), 0)
    page = block_table[row, position // page_size].to(torch.int64)
    kept = valid
    if limits is not None:
        ids = torch.where(ids == DRAFT, last_tokens[row], ids)  # which is read anyway, so that nothing new is NaN
        kept = valid & (position < limits[row] - 1)  # nothing follows a request's last token
    slot = torch.where(kept, page * page_size + position % page_size, -1)
    query_lens = starts[1:] - starts[:-1]
    seq_lens = torch.where(rows >= 0, positions[rows] + query_lens, 0).to(torch.int32)
    last_index = (starts[1:].to(torch.int64) - 1).clamp(min=0)
    return ids, position, slot, seq_lens, block_table[rows], last_index


def reference_move_on(
    positions: Tensor, last_tokens: Tensor, rows: Tensor, query_start_loc: Tensor, samples: Tensor, ids: Tensor | None
) -> None:
    """`weft::move_on` in plain torch, on any device."""
    _, moved, said = functional_move_on(positions, last_tokens, rows, query_start_loc, samples, ids)
    positions.copy_(moved)
    last_tokens.copy_(said)


def functional_move_on(
    positions: Tensor, last_tokens: Tensor, rows: Tensor, query_start_loc: Tensor, samples: Tensor, ids: Tensor | None
) -> tuple[None, Tensor, Tensor]:
    """The same with positions and last tokens of its own, which it returns."""
    old, kept = positions[rows], rows >= 0
    moved = torch.where(kept, old + (query_start_loc[1:] - query_start_loc[:-1]), old)
    if ids is not None:
        last_tokens = last_tokens.index_put((rows,), torch.where(kept & samples, ids, last_tokens[rows]))
    return None, positions.index_put((rows,), moved), last_tokens


def _fake_resolve(rows: Tensor, input_ids: Tensor, *others: Any) -> tuple[Tensor, ...]:
    block_table = others[3]
    of_tokens = (torch.empty_like(input_ids) for _ in range(3))
    table = block_table.new_empty((rows.shape[0], block_table.shape[1]))
    return *of_tokens, torch.empty_like(rows, dtype=torch.int32), table, torch.empty_like(rows)


_resolve_tokens = register(
    "resolve_tokens",
    "(Tensor rows, Tensor input_ids, Tensor query_start_loc, Tensor positions, Tensor last_tokens, "
    "Tensor block_table, Tensor? limits, int page_size) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=reference_resolve_tokens, fake=_fake_resolve, kernel="weft.ops.requests_triton:resolve_tokens",
)  # fmt: skip
_move_on = register(
    "move_on",
    "(Tensor(a!) positions, Tensor(b!) last_tokens, Tensor rows, Tensor query_start_loc, Tensor samples, "
    "Tensor? ids) -> ()",
    cpu=reference_move_on, fake=lambda *tensors: None, kernel="weft.ops.requests_triton:move_on",
    functional=functional_move_on,
)  # fmt: skip
