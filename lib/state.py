"""`State`: everything that changes from step to step, on the device; and the pure functions that read and advance
it."""

from collections.abc import Sequence
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from weft.batch import Batch, ResolvedBatch
from weft.donation import donatable, donates
from weft.drafting import Drafting
from weft.errors import RequestError
from weft.ops.requests import move_on, resolve_tokens
from weft.ops.sampling.sample import count_tokens
from weft.outputs import Output
from weft.placing import place
from weft.sampling import SamplingParams
from weft.sampling_table import MAX_BIASED, SamplingTable, write_rows
from weft.summary import Summarized
from weft.trees import pytree


@donatable
@pytree
@attrs.frozen(eq=False, repr=False)
class State(Summarized):
    """The paged KV cache of one stage and the table of requests, which is the same on every stage.

    A value: a step takes it (its storage is donated) and returns the next one. Row `max_num_reqs`, the last, is
    scratch: padding points there.

    Args:
        kv_pages: [num_layers, 2, num_pages, page_size, num_kv_heads, head_dim], keys then values; the model's dtype.
        block_table: [max_num_reqs + 1, max_pages] int32, each request's pages in order.
        positions: [max_num_reqs + 1] int64, tokens already in the cache: the sequence length, and the place of the next
            token, and so the counter of the request's random stream.
        last_tokens: [max_num_reqs + 1] int64, the token sampled last.
        adapters: [max_num_reqs + 1] int32, the slot of each request's LoRA adapter; -1: none.
        mrope_position_deltas: [max_num_reqs + 1] int64, how far the positions of each request's tokens behind its
            prompt are from their places, in a model with mRoPE; transformers' `rope_deltas`.
        sampling: max_num_reqs + 1 rows; as wide as the vocabulary only on the stage that samples.
        drafting: what the stage knows of its requests to speculate; None: the steps draft nothing.
    """

    kv_pages: Tensor
    block_table: Tensor
    positions: Tensor
    last_tokens: Tensor
    adapters: Tensor
    mrope_position_deltas: Tensor
    sampling: SamplingTable
    drafting: Drafting | None = None
    _taken_by: str = attrs.field(default="", init=False, repr=False, metadata={"weft.static": True})

    @classmethod
    def zeros(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        max_num_reqs: int,
        num_pages: int,
        max_pages: int,
        page_size: int = 16,
        vocab_size: int = 0,
        max_biased: int = MAX_BIASED,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """A state with no request in it: `num_pages` pages in all, at most `max_pages` of them a request.

        A stage that samples says its `vocab_size`, and the most tokens that a request may have in its `logit_bias`: a
        row of its sampling table takes 2.25 bytes a token of the vocabulary.
        """
        rows = max_num_reqs + 1
        return cls(
            torch.zeros(num_layers, 2, num_pages, page_size, num_kv_heads, head_dim, dtype=dtype, device=device),
            torch.zeros(rows, max_pages, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            SamplingTable.zeros(rows, vocab_size, max_biased, device),
        )


@donates("state")
def admit(
    state: State,
    rows: Sequence[int],
    pages: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    *,
    generated: Sequence[Sequence[int]] | None = None,
    positions: Sequence[int] | None = None,
    adapters: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    mrope_position_deltas: Sequence[int] | None = None,
) -> State:
    """Start requests in rows of the state: their pages, sampling parameters, and where they begin.

    Args:
        state: donated.
        rows: one row a request.
        pages: the pages that each may fill, in order.
        sampling: one a request, with its seed and all tokens that end it (`SamplingParams.for_request`).
        prompts: the token ids of each, which penalties count; EMBEDDED (-2) where there is none.
        generated: what each had generated before, if it is started again and reads that behind its prompt. None:
            nothing.
        positions: tokens that are in each one's pages already; None: 0.
        adapters: the slot of each one's LoRA adapter, -1 for none (`weft.stages.adapters`); None: none has one.
        limits: the most tokens that each may have, its prompt included; None: what its row of the block table holds.
            Only a state with `drafting` keeps them.
        mrope_position_deltas: of a model with mRoPE, of each whose prompt has positions of its own the delta
            (`weft.stages.mrope.mrope_position_delta`); None: 0.

    Raises:
        RequestError: lengths differ, a row is not the state's or stands twice, a page is not the state's, or more of
            them than its table holds; a token that the model does not have, or no seed for a request that draws.
    """
    count = len(rows)
    said = [()] * count if generated is None else generated
    starts = [0] * count if positions is None else list(positions)
    slots = [-1] * count if adapters is None else list(adapters)
    room = [state.block_table.shape[1] * state.kv_pages.shape[3]] * count
    most = room if limits is None else list(limits)
    deltas = [0] * count if mrope_position_deltas is None else list(mrope_position_deltas)
    _check_admission(state, rows, pages, (sampling, prompts, said, starts, slots, most, deltas))
    write_rows(state.sampling, rows, sampling, prompts, said)
    device = state.positions.device
    table = torch.zeros(count, state.block_table.shape[1], dtype=torch.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)
    columns = place(torch.tensor([list(rows), starts, slots, deltas], dtype=torch.int64), device)
    index, begins, own_slots, own_deltas = columns
    state.block_table[index] = place(table, device)
    state.positions[index] = begins
    state.last_tokens[index] = 0
    state.adapters[index] = own_slots.to(torch.int32)
    state.mrope_position_deltas[index] = own_deltas
    if state.drafting is not None:
        state.drafting.admit(index, [[*a, *b] for a, b in zip(prompts, said, strict=True)], most)
    return state


def _check_admission(
    state: State, rows: Sequence[int], pages: Sequence[Sequence[int]], others: Sequence[Sequence[Any]]
) -> None:
    asked, prompts = len(others[0]), len(others[1])
    call = f"admit(state, rows={list(rows)}, <{len(pages)} lists of pages>, <{asked} sampling>, <{prompts} prompts>)"
    num_rows, (_, most), num_pages = len(state.positions) - 1, state.block_table.shape, state.kv_pages.shape[2]
    if any(len(other) != len(rows) for other in (pages, *others)):
        raise RequestError(call, "numbers that differ", "pages, SamplingParams and a prompt for each row")
    if len(set(rows)) != len(rows) or any(not 0 <= row < num_rows for row in rows):
        raise RequestError(
            call, "a row that stands twice or is not the state's", f"different rows from 0 to {num_rows - 1}"
        )
    for own in pages:
        if len(own) > most or any(not 0 <= page < num_pages for page in own):
            seen = f"pages {list(own)[: most + 1]}"
            raise RequestError(call, seen, f"at most {most} pages a request, from 0 to {num_pages - 1}")


@donates("state")
def grow(state: State, more: Sequence[tuple[int, int, Sequence[int]]]) -> State:
    """Give requests more pages.

    Args:
        state: donated.
        more: for each request its row, the number of pages that it has, and those that follow.

    Raises:
        RequestError: a row or a page that is not the state's, or more pages than a row of its table holds.
    """
    (num_rows, most), num_pages = state.block_table.shape, state.kv_pages.shape[2]
    for row, start, pages in more:
        outside = any(not 0 <= page < num_pages for page in pages)
        if not 0 <= row < num_rows - 1 or not 0 <= start <= most - len(pages) or outside:
            instead = f"rows below {num_rows - 1}, at most {most} pages a request, pages below {num_pages}"
            raise RequestError("grow(state, more)", f"row {row}, pages {list(pages)} behind {start}", instead)
    places = [(row, start + i, page) for row, start, pages in more for i, page in enumerate(pages)]
    row, column, page = place(torch.tensor(places, dtype=torch.int64).T.contiguous(), state.block_table.device)
    state.block_table[row, column] = page.to(torch.int32)
    return state


@donates("state")
def copy_pages(state: State, sources: Sequence[int], targets: Sequence[int]) -> State:
    """Copy pages of the KV cache, in all layers, those of a draft model included.

    Args:
        state: donated.
        sources, targets: pages, none of them in both.

    Raises:
        RequestError: a page that is not the state's, or is in both.
    """
    num_pages = state.kv_pages.shape[2]
    if set(sources) & set(targets) or any(not 0 <= page < num_pages for page in (*sources, *targets)):
        call = f"copy_pages(state, {list(sources)}, {list(targets)})"
        raise RequestError(call, "a page that is in both, or not the state's", f"pages from 0 to {num_pages - 1}")
    source, target = place(torch.tensor([list(sources), list(targets)], dtype=torch.int64), state.kv_pages.device)
    for pages in (state.kv_pages, None if state.drafting is None else state.drafting.kv_pages):
        if pages is not None:
            pages[:, :, target] = pages[:, :, source]
    return state


def resolve(state: State, batch: Batch) -> ResolvedBatch:
    """Read from the state what the batch leaves open. Pure, and without a host read.

    Each token finds its request by a search in `query_start_loc`; tokens behind its end belong to nobody. On a GPU it
    is one kernel.
    """
    limits = None if state.drafting is None else state.drafting.limits
    ids, positions, slots, seq_lens, block_table, last_index = resolve_tokens(
        batch.rows, batch.input_ids, batch.query_start_loc, state.positions, state.last_tokens, state.block_table,
        limits, state.kv_pages.shape[3],
    )  # fmt: skip
    adapters, active = _find_adapters(state, batch)
    return ResolvedBatch(
        batch.descriptor, batch.rows, ids, positions, batch.query_start_loc, seq_lens, block_table, slots, last_index,
        adapters, active,
    )  # fmt: skip


def _find_adapters(state: State, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """The slot of each token's adapter [num_tokens], and those slots, each once [num_active_loras]; None for a batch
    without adapters."""
    count = batch.descriptor.num_active_loras
    if not count:
        return None, None
    of_requests = torch.where(batch.rows >= 0, state.adapters[batch.rows], -1)
    ordered = of_requests.sort().values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    first &= ordered >= 0
    place = torch.where(first, first.cumsum(0) - 1, count).clamp(max=count)  # the last place is for the others
    active = torch.full((count + 1,), -1, dtype=torch.int32, device=ordered.device).scatter(0, place, ordered)
    owner, place = batch.owners()
    is_token = place < (batch.query_start_loc[1:] - batch.query_start_loc[:-1])[owner]
    return torch.where(is_token, of_requests[owner], -1), active[:count]


@donates("state")
def advance(state: State, batch: Batch, out: Output | None) -> State:
    """The next state's table of requests: positions move on, sampled tokens become the last ones, and are counted.

    Every stage does this with the same batch and the same tokens, so that all tables stay equal.

    Args:
        state: donated.
        batch: the batch that was run.
        out: what the last stage returned for it; None where no request samples.
    """
    if out is not None and out.num_tokens is not None:
        return _advance_verified(state, batch, out, out.num_tokens)
    ids = None if out is None else out.token_ids
    positions, last_tokens = move_on(
        state.positions, state.last_tokens, batch.rows, batch.query_start_loc, batch.samples, ids
    )
    table = state.sampling if ids is None else count_tokens(state.sampling, batch.rows, ids, batch.samples)
    if positions is state.positions and table is state.sampling:
        return state
    return attrs.evolve(state, positions=positions, last_tokens=last_tokens, sampling=table)


def _advance_verified(state: State, batch: Batch, out: Output, num_tokens: Tensor) -> State:
    """`advance` by the `num_tokens` [num_reqs] that hold of what was sampled: that many, and not the tokens that were
    read, is how far a request moves on; keys and values of drafts that were wrong lie behind its position, and are
    written over.

    A request that has drafts has no penalties, so that of several tokens none is to be counted.
    """
    starts, rows = batch.query_start_loc, batch.rows
    old, kept = state.positions[rows], rows >= 0
    read = torch.where(batch.goes_on, 1, starts[1:] - starts[:-1])
    moved = old + read + torch.where(batch.samples, num_tokens - 1, 0)
    state.positions[rows] = torch.where(kept, moved, old)
    ids = out.token_ids
    said = kept & batch.samples & (num_tokens > 0)
    newest = ids.gather(1, (num_tokens - 1).clamp(min=0)[:, None])[:, 0]
    state.last_tokens[rows] = torch.where(said, newest, state.last_tokens[rows])
    table = count_tokens(state.sampling, rows, ids[:, 0].contiguous(), said)
    state = state if table is state.sampling else attrs.evolve(state, sampling=table)
    if state.drafting is not None:
        state.drafting.append(rows, old + read, ids, said)
    return state
