"""The table of requests: `weft::resolve_tokens` reads it before a step, and `weft::move_on` writes
it after; and the ids below 0, which stand for tokens whose ids the host does not have.

Each is one operator, because torch's own operations would take dozens of launches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.ops.register import operator

LAST_TOKEN = -1
"""In `Batch.input_ids`: the request's last sampled token, which only the state knows."""

EMBEDDED = -2
"""In `Batch.input_ids`: a token without an id; its embedding is in `Batch.inputs_embeds`."""

DRAFT = -3
"""In `Batch.input_ids`: a place for a draft, which the step itself fills in. It is no token's id, so
a place that is left as it is never equals a sampled token."""


def find_owners(query_start_loc: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The request that each token belongs to, and its place among that request's tokens, both
    [num_tokens].

    Tokens after the end of `query_start_loc` [num_reqs + 1] int32 belong to no request; they are
    given the last one.
    """
    starts = query_start_loc
    index = torch.arange(num_tokens, device=starts.device, dtype=starts.dtype)
    # `right=True`: a token at a boundary belongs to the request that starts there.
    owner = torch.searchsorted(starts[1:].contiguous(), index, right=True).clamp(
        max=len(starts) - 2
    )
    return owner, index - starts[owner]


def _empty_resolved(rows: Tensor, input_ids: Tensor, block_table: Tensor) -> tuple[Tensor, ...]:
    of_tokens = (torch.empty_like(input_ids) for _ in range(3))
    table = block_table.new_empty((rows.shape[0], block_table.shape[1]))
    return *of_tokens, torch.empty_like(rows, dtype=torch.int32), table, torch.empty_like(rows)


@operator(kernel="weft.ops.requests_triton:resolve_tokens", fake=_empty_resolved)
def resolve_tokens(
    rows: Tensor,
    input_ids: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    block_table: Tensor,
    limits: Tensor | None,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Each token's id, position and slot, and each request's context, pages and last token.

    Args:
        rows: [num_reqs] int64, the table's row of each request; negative for padding, which has
            none.
        input_ids: [num_tokens] int64.
        query_start_loc: [num_reqs + 1] int32.
        positions, last_tokens: [rows of the table] int64.
        block_table: [rows of the table, max_pages] int32.
        limits: [rows of the table] int64, the most tokens of each request; None: no limit.

    Returns:
        `input_ids`, `positions`, `slot_mapping`, `seq_lens`, `block_table` and `last_index` of a
        `weft.batches.batch.ResolvedBatch`. On CUDA a row or a position outside the table gives the
        id -1, which makes the embedding's lookup fail; on other devices the indexing here fails.
    """
    starts, (owner, place) = query_start_loc, find_owners(query_start_loc, len(input_ids))
    row = rows[owner]
    valid = (place < starts[1:][owner] - starts[owner]) & (row >= 0)
    position = torch.where(valid, positions[row] + place, 0)
    ids = torch.where(valid, torch.where(input_ids == LAST_TOKEN, last_tokens[row], input_ids), 0)
    # In int64, as a slot, `page * page_size`, may be too large for int32.
    page = block_table[row, position // page_size].to(torch.int64)
    kept = valid
    if limits is not None:
        # A draft past the limit embeds a token that the batch reads anyway, so it adds no NaN.
        ids = torch.where(ids == DRAFT, last_tokens[row], ids)
        # No token follows a request's last one, so its key and value are never read.
        kept = valid & (position < limits[row] - 1)
    slot = torch.where(kept, page * page_size + position % page_size, -1)
    query_lens = starts[1:] - starts[:-1]
    seq_lens = torch.where(rows >= 0, positions[rows] + query_lens, 0).to(torch.int32)
    last_index = (starts[1:].to(torch.int64) - 1).clamp(min=0)
    return ids, position, slot, seq_lens, block_table[rows], last_index


def move_on(
    positions: Tensor,
    last_tokens: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    samples: Tensor,
    ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Advance requests past the tokens that a step read, and store the tokens that it sampled.

    Args:
        positions, last_tokens: [rows of the table] int64.
        rows: [num_reqs] int64, distinct except for padding, which is negative.
        query_start_loc: [num_reqs + 1] int32.
        samples: [num_reqs] bool: whether each request's token is stored.
        ids: [num_reqs] int64, the sampled tokens; None: the step sampled none.

    Returns:
        `positions` and `last_tokens`, written in place; inside a transform of torch.func, new
        tensors.
    """
    call: Callable[..., Any] = _move_on  # the functional form returns more than the operator
    outputs = call(positions, last_tokens, rows, query_start_loc, samples, ids)
    if outputs is None:
        return (positions, last_tokens)
    return (outputs[1], outputs[2])


def functional_move_on(
    positions: Tensor,
    last_tokens: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    samples: Tensor,
    ids: Tensor | None,
) -> tuple[None, Tensor, Tensor]:
    """`move_on` with new positions and last tokens, which it returns."""
    old = positions[rows]
    kept = rows >= 0
    moved = torch.where(kept, old + (query_start_loc[1:] - query_start_loc[:-1]), old)
    if ids is not None:
        last_tokens = last_tokens.index_put(
            (rows,), torch.where(kept & samples, ids, last_tokens[rows])
        )
    return None, positions.index_put((rows,), moved), last_tokens


@operator(
    parameters=move_on,
    writes=("positions", "last_tokens"),
    kernel="weft.ops.requests_triton:move_on",
    fake=lambda: None,
    functional=functional_move_on,
)
def _move_on(positions: Tensor, last_tokens: Tensor, *batch: Any) -> None:
    """The operator of `move_on`."""
    _, moved, said = functional_move_on(positions, last_tokens, *batch)
    positions.copy_(moved)
    last_tokens.copy_(said)
