"""`State`: everything on the device that changes from step to step, and the functions that read and
advance it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from weft.batches.batch import Batch, ResolvedBatch, continues, owners_of
from weft.batches.carried import Carried
from weft.batches.outputs import Output, PerRequest
from weft.batches.sampling import SamplingParams
from weft.batches.sampling_rows import MAX_BIASED, write_rows
from weft.display.summary import Summarized
from weft.errors import RequestError
from weft.ops.requests import move_on, resolve_tokens
from weft.ops.sampling.sample import count_tokens
from weft.ops.sampling.table import SamplingTable
from weft.torchapi.private import to_device
from weft.values.donation import donatable, donates
from weft.values.trees import OF_THIS_VALUE, pytree


@pytree
@attrs.frozen(eq=False, repr=False)
class Drafting(Summarized):
    """The part of a state that drafting and verifying need: one row for each request, and a last
    scratch row.

    Args:
        limits: [rows] int64, the most tokens of a request, prompt included; it neither drafts nor
            returns tokens beyond.
        tokens: [rows, most] int32, the request's tokens, on a stage that looks up drafts in them;
            elsewhere the width is 0.
        kv_pages: the KV cache of the draft model, with the layout and page numbers of
            `State.kv_pages`; only on the stage that drafts with a model.
    """

    limits: Tensor
    tokens: Tensor
    kv_pages: Tensor | None = None

    @classmethod
    def zeros(
        cls,
        num_rows: int,
        *,
        max_tokens: int = 0,
        kv_pages: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Rows without requests.

        Args:
            num_rows: the state's rows, scratch row included.
            max_tokens: the most tokens of a request plus those of one step; 0 if this stage does
                not look up drafts.
        """
        limits = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return cls(
            limits, torch.zeros(num_rows, max_tokens, dtype=torch.int32, device=device), kv_pages
        )

    def admit(
        self, rows: Tensor, token_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> None:
        """Write the tokens and the token limits of requests into rows [num_reqs] int64, in
        place."""
        device = self.limits.device
        self.limits[rows] = to_device(torch.tensor(limits, dtype=torch.int64), device)
        if not self.tokens.shape[1]:
            return
        table = torch.zeros(len(token_ids), self.tokens.shape[1], dtype=torch.int32)
        for row, tokens in zip(table, token_ids, strict=True):
            row[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.tokens[rows] = to_device(table, device)

    def append(self, rows: Tensor, places: Tensor, token_ids: Tensor, kept: Tensor) -> None:
        """Write sampled tokens in place. Entries after a request's tokens are never read.

        Args:
            rows: [num_reqs] int64; -1 for padding.
            places: [num_reqs] int64, the place of each request's first new token.
            token_ids: [num_reqs, n] int64.
            kept: [num_reqs] bool, whether the request keeps any of them.
        """
        if not self.tokens.shape[1]:
            return
        index = places[:, None] + torch.arange(token_ids.shape[1], device=places.device)
        row = rows[:, None].expand_as(index)
        # Masked by `where`: a boolean index would make the host wait for the number of entries.
        old = self.tokens[row, index]
        self.tokens[row, index] = torch.where(kept[:, None], token_ids.to(torch.int32), old)


@donatable
@pytree
@attrs.frozen(eq=False, repr=False)
class State(Summarized):
    """The paged KV cache of one stage and the table of requests, which is the same on every stage.

    It is a value: a step takes it (its storage is donated) and returns the next one. The last row,
    `max_num_reqs`, is scratch, to which padding points.

    Args:
        kv_pages: [num_layers, 2, num_pages, page_size, num_kv_heads, head_dim], keys then values;
            the model's dtype.
        block_table: [max_num_reqs + 1, max_pages] int32, each request's pages in order.
        positions: [max_num_reqs + 1] int64, the number of tokens in the cache. It is the sequence
            length, the place of the next token, and so the counter of the request's random stream.
        last_tokens: [max_num_reqs + 1] int64, the last sampled token.
        adapters: [max_num_reqs + 1] int32, the slot of each request's LoRA adapter; -1: none.
        mrope_position_deltas: [max_num_reqs + 1] int64, in a model with mRoPE, position minus place
            of the tokens after a request's prompt; transformers' `rope_deltas`.
        sampling: max_num_reqs + 1 rows; as wide as the vocabulary only on the stage that samples.
        drafting: the part that speculation needs; None: the steps do not draft.
        extras: [max_num_reqs + 1, ...] by name: per-request inputs for stages that take extra ones;
            the last row holds the defaults.
        carried: the values that each request carries from token to token; None if the stage carries
            none.
        num_recomputed_tokens: [max_num_reqs + 1] int64, how many leading tokens of each request are
            already in its pages but computed again. Their keys and values are not written, because
            the pages are shared. The last page of such a state is scratch. None: no request
            computes such tokens.
        beside: by name, the pages of other models that read the same tokens; shaped like `kv_pages`
            except for their own layers and heads. On the last stage only.
    """

    kv_pages: Tensor
    block_table: Tensor
    positions: Tensor
    last_tokens: Tensor
    adapters: Tensor
    mrope_position_deltas: Tensor
    sampling: SamplingTable
    drafting: Drafting | None = None
    extras: dict[str, Tensor] = attrs.field(factory=dict)
    carried: Carried | None = None
    num_recomputed_tokens: Tensor | None = None
    beside: dict[str, Tensor] = attrs.field(factory=dict)
    _taken_by: str = attrs.field(default="", init=False, repr=False, metadata=OF_THIS_VALUE)

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
        extras: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """A state without requests: `num_pages` pages in all, at most `max_pages` for each request.

        `extras` has the defaults of the per-request inputs. A stage that samples passes its
        `vocab_size` and `max_biased`, the most tokens in a request's `logit_bias`. A row of its
        sampling table takes 2.25 bytes for each token of the vocabulary.
        """
        rows = max_num_reqs + 1
        return cls(
            torch.zeros(
                num_layers,
                2,
                num_pages,
                page_size,
                num_kv_heads,
                head_dim,
                dtype=dtype,
                device=device,
            ),
            torch.zeros(rows, max_pages, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            SamplingTable.zeros(rows, vocab_size, max_biased, device),
            extras={
                name: x.to(device).repeat(rows, *[1] * x.dim())
                for name, x in (extras or {}).items()
            },
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
    extras: Sequence[Mapping[str, Tensor]] | None = None,
    num_recomputed_tokens: Sequence[int] | None = None,
) -> State:
    """Start requests in rows of the state: their pages, sampling parameters, and first positions.

    A request that starts at its first token carries the default values; one that starts later
    carries the values in the snapshot of its last full page (`weft.batches.carried.Carried`).

    Args:
        state: donated.
        rows: the row of each request.
        pages: the pages that each request may fill, in order.
        sampling: each request's parameters, with its seed and all tokens that end it
            (`weft.batches.sampling.for_request`).
        prompts: each request's token ids, which penalties count; EMBEDDED (-2) in place of an
            embedding.
        generated: the tokens that each request generated before it was preempted, and now reads
            again after its prompt. None: no tokens.
        positions: the number of tokens already in each request's pages; None: 0.
        adapters: the slot of each request's LoRA adapter, -1 for none (`weft.stages.adapters`);
            None: none.
        limits: the most tokens of each request, prompt included; None: as many as its row of the
            block table holds. Only a state with `drafting` stores the limits.
        mrope_position_deltas: in a model with mRoPE, the delta of each request whose prompt has
            explicit positions (`weft.stages.attention.rope.mrope_position_delta`); None: 0.
        extras: each request's values for some of the state's `extras`; None: the defaults.
        num_recomputed_tokens: how many tokens already in each request's pages it computes again
            (`State.num_recomputed_tokens`); None: 0.

    Raises:
        RequestError: the lengths differ; a row is listed twice or outside the state; a page is
            outside the state, or a request has more pages than the table holds; the model does not
            have a token; a request that draws has no seed.
    """
    count = len(rows)
    said = [()] * count if generated is None else generated
    starts = [0] * count if positions is None else list(positions)
    slots = [-1] * count if adapters is None else list(adapters)
    room = [state.block_table.shape[1] * state.kv_pages.shape[3]] * count
    most = room if limits is None else list(limits)
    if mrope_position_deltas is None:
        deltas = [0] * count
    else:
        deltas = list(mrope_position_deltas)
    own_extras = [{}] * count if extras is None else list(extras)
    shared = [0] * count if num_recomputed_tokens is None else list(num_recomputed_tokens)
    _check_admission(
        state,
        rows,
        {
            "pages": pages,
            "sampling": sampling,
            "prompts": prompts,
            "generated": said,
            "positions": starts,
            "adapters": slots,
            "limits": most,
            "mrope_position_deltas": deltas,
            "extras": own_extras,
            "num_recomputed_tokens": shared,
        },
    )
    write_rows(state.sampling, rows, sampling, prompts, said)
    device = state.positions.device
    table = torch.zeros(count, state.block_table.shape[1], dtype=torch.int32)
    for row, entry in zip(table, pages, strict=True):
        row[: len(entry)] = torch.tensor(entry, dtype=torch.int32)
    # All per-request numbers in one tensor, so that they take one copy to the device.
    columns = to_device(
        torch.tensor([list(rows), starts, slots, deltas, shared], dtype=torch.int64), device
    )
    index, begins, own_slots, own_deltas, own_found = columns
    state.block_table[index] = to_device(table, device)
    state.positions[index] = begins
    # Not `[index] = 0`: that copies the 0 to the device and waits for all work there.
    state.last_tokens.index_fill_(0, index, 0)
    state.adapters[index] = own_slots.to(torch.int32)
    state.mrope_position_deltas[index] = own_deltas
    if state.drafting is not None:
        state.drafting.admit(index, [[*a, *b] for a, b in zip(prompts, said, strict=True)], most)
    for name, values in state.extras.items():
        # The row may have values of an earlier request.
        values[index] = values[-1].clone()
        if with_extra := [place for place, entry in enumerate(own_extras) if name in entry]:
            stacked = torch.stack([own_extras[place][name] for place in with_extra]).to(
                values.dtype
            )
            places = to_device(
                torch.tensor([rows[place] for place in with_extra], dtype=torch.int64), device
            )
            values[places] = to_device(stacked, device)
    if state.num_recomputed_tokens is not None:
        state.num_recomputed_tokens[index] = own_found
    if state.carried is not None:
        size = state.kv_pages.shape[3]
        last = [
            entry[start // size - 1] if start >= size else -1
            for entry, start in zip(pages, starts, strict=True)
        ]
        state.carried.admit(index, starts, last)
    return state


def _check_admission(
    state: State,
    rows: Sequence[int],
    per_request: Mapping[str, Sequence[Any]],
) -> None:
    pages: Sequence[Sequence[int]] = per_request["pages"]
    call = (
        f"admit(state, rows={list(rows)}, <{len(pages)} lists of pages>,"
        f" <{len(per_request['sampling'])} sampling>, <{len(per_request['prompts'])} prompts>)"
    )
    if len(set(rows)) != len(rows):
        twice = next(row for row in rows if list(rows).count(row) > 1)
        raise RequestError(call, f"row {twice} is listed twice", "a different row for each request")
    for name, values in per_request.items():
        if len(values) != len(rows):
            problem = f"{name} has {len(values)} entries, and rows has {len(rows)}"
            raise RequestError(call, problem, f"one entry of {name} for each row")
    _check_pages(
        call, state, ((row, 0, row_pages) for row, row_pages in zip(rows, pages, strict=True))
    )


def _check_pages(call: str, state: State, more: Iterable[tuple[int, int, Sequence[int]]]) -> None:
    """Raise RequestError for a row or a page outside the state, and for more pages than a row of
    the table holds. `more` is as in `grow`."""
    num_rows, most = state.block_table.shape
    num_pages = state.kv_pages.shape[2]
    # The last row is scratch.
    last_row = num_rows - 2
    for row, start, pages in more:
        if not 0 <= row <= last_row:
            problem = f"row {row} of a state with rows 0 to {last_row}"
            raise RequestError(call, problem, f"rows from 0 to {last_row}")
        if not 0 <= start <= most - len(pages):
            problem = f"{len(pages)} pages after {start} pages in row {row}, which holds {most}"
            raise RequestError(call, problem, f"at most {most} pages a request")
        for page in pages:
            if not 0 <= page < num_pages:
                problem = f"page {page} for row {row}, of a state with pages 0 to {num_pages - 1}"
                raise RequestError(call, problem, f"pages from 0 to {num_pages - 1}")


@donates("state")
def grow(state: State, more: Sequence[tuple[int, int, Sequence[int]]]) -> State:
    """Give requests more pages.

    Args:
        state: donated.
        more: for each request, its row, the number of pages that it has, and the pages to add.

    Raises:
        RequestError: a row or a page is outside the state, or a row of the table does not hold so
            many pages.
    """
    _check_pages("grow(state, more)", state, more)
    places = [(row, start + i, page) for row, start, pages in more for i, page in enumerate(pages)]
    row, column, page = to_device(
        torch.tensor(places, dtype=torch.int64).T.contiguous(), state.block_table.device
    )
    state.block_table[row, column] = page.to(torch.int32)
    return state


@donates("state")
def copy_pages(state: State, sources: Sequence[int], targets: Sequence[int]) -> State:
    """Copy pages of the KV cache in all layers, including the layers of a draft model.

    Args:
        state: donated.
        sources, targets: pages; no page is in both.

    Raises:
        RequestError: a page is in both, or outside the state.
    """
    num_pages = state.kv_pages.shape[2]
    both = set(sources) & set(targets)
    outside = [page for page in (*sources, *targets) if not 0 <= page < num_pages]
    if both or outside:
        call = f"copy_pages(state, {list(sources)}, {list(targets)})"
        if both:
            problem = f"page {min(both)} is both a source and a target"
        else:
            problem = f"page {outside[0]} of a state with pages 0 to {num_pages - 1}"
        raise RequestError(call, problem, f"different pages from 0 to {num_pages - 1}")
    source, target = to_device(
        torch.tensor([list(sources), list(targets)], dtype=torch.int64), state.kv_pages.device
    )
    if state.drafting is None:
        drafting = None
    else:
        drafting = state.drafting.kv_pages
    for pages in (state.kv_pages, drafting, *state.beside.values()):
        if pages is not None:
            pages[:, :, target] = pages[:, :, source]
    return state


def resolve(state: State, batch: Batch) -> ResolvedBatch:
    """Fill in from the state what the batch leaves open, without a host read.

    A search in `query_start_loc` finds each token's request; tokens after its end belong to no
    request. On a GPU this is one kernel.
    """
    if state.drafting is None:
        limits = None
    else:
        limits = state.drafting.limits
    ids, positions, slots, seq_lens, block_table, last_index = resolve_tokens(
        batch.rows,
        batch.input_ids,
        batch.query_start_loc,
        state.positions,
        state.last_tokens,
        state.block_table,
        limits,
        state.kv_pages.shape[3],
    )
    adapters, active = _find_adapters(state, batch)
    if state.num_recomputed_tokens is not None:
        slots = _written(batch, state.num_recomputed_tokens, positions, slots, state.kv_pages)
    if state.carried is None:
        carried = {}
    else:
        carried = state.carried.read(batch.rows, state.positions[batch.rows])
    return ResolvedBatch(
        batch.descriptor,
        batch.rows,
        ids,
        positions,
        batch.query_start_loc,
        seq_lens,
        block_table,
        slots,
        last_index,
        adapters,
        active,
        {name: PerRequest(values[batch.rows]) for name, values in state.extras.items()},
        carried,
    )


def _written(
    batch: Batch, num_recomputed_tokens: Tensor, positions: Tensor, slots: Tensor, kv_pages: Tensor
) -> Tensor:
    """The slot [num_tokens] that each token is written to. A recomputed token goes to the last
    page, which is scratch."""
    num_pages, page_size = kv_pages.shape[2:4]
    owner, _ = owners_of(batch)
    is_found = (slots >= 0) & (positions < num_recomputed_tokens[batch.rows][owner])
    return torch.where(is_found, (num_pages - 1) * page_size + positions % page_size, slots)


def _find_adapters(state: State, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """The slot of each token's adapter [num_tokens], and the distinct slots [num_active_loras];
    None without adapters."""
    count = batch.descriptor.num_active_loras
    if not count:
        return None, None
    of_requests = torch.where(batch.rows >= 0, state.adapters[batch.rows], -1)
    # Not `torch.unique`: the shape of its result depends on values, so the host would wait for it.
    ordered = of_requests.sort().values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    first &= ordered >= 0
    # Entries that repeat a slot, or have no adapter, share one extra place, which is cut off below.
    place = torch.where(first, first.cumsum(0) - 1, count).clamp(max=count)
    active = torch.full((count + 1,), -1, dtype=torch.int32, device=ordered.device).scatter(
        0, place, ordered
    )
    owner, place = owners_of(batch)
    is_token = place < (batch.query_start_loc[1:] - batch.query_start_loc[:-1])[owner]
    return torch.where(is_token, of_requests[owner], -1), active[:count]


@donates("state")
def advance(state: State, batch: Batch, out: Output | None) -> State:
    """The state after a step: positions advance, and the sampled tokens become the last tokens and
    are counted.

    Every stage calls this with the same batch and the same tokens, so that all tables stay equal.

    Args:
        state: donated.
        batch: the step's batch.
        out: the last stage's output for it; None if no request samples.
    """
    if out is not None and out.num_tokens is not None:
        return _advance_verified(state, batch, out, out.num_tokens)
    if out is None:
        ids = None
    else:
        ids = out.token_ids
    positions, last_tokens = move_on(
        state.positions, state.last_tokens, batch.rows, batch.query_start_loc, batch.samples, ids
    )
    if ids is None:
        table = state.sampling
    else:
        table = count_tokens(state.sampling, batch.rows, ids, batch.samples)
    # Everything was written in place; only inside a transform of torch.func are there new tensors.
    if positions is state.positions and table is state.sampling:
        return state
    return attrs.evolve(state, positions=positions, last_tokens=last_tokens, sampling=table)


def _advance_verified(state: State, batch: Batch, out: Output, num_tokens: Tensor) -> State:
    """`advance` by the `num_tokens` [num_reqs] that each request keeps, rather than by the tokens
    that were read. Keys and values of rejected drafts lie after the new position, where later steps
    overwrite them.

    A request with drafts has no penalties, so its tokens after the first need not be counted.
    """
    starts = batch.query_start_loc
    rows = batch.rows
    old = state.positions[rows]
    # Padding writes the scratch row back unchanged.
    kept = rows >= 0
    # A request that continues has read one token for certain: its last one. The tokens after it are
    # drafts, of which `num_tokens - 1` are kept.
    read = torch.where(continues(batch), 1, starts[1:] - starts[:-1])
    moved = old + read + torch.where(batch.samples, num_tokens - 1, 0)
    state.positions[rows] = torch.where(kept, moved, old)
    ids = out.token_ids
    said = kept & batch.samples & (num_tokens > 0)
    # The clamp keeps the index valid for requests that keep no token; `said` leaves them out.
    newest = ids.gather(1, (num_tokens - 1).clamp(min=0)[:, None])[:, 0]
    state.last_tokens[rows] = torch.where(said, newest, state.last_tokens[rows])
    table = count_tokens(state.sampling, rows, ids[:, 0].contiguous(), said)
    if table is not state.sampling:
        state = attrs.evolve(state, sampling=table)
    if state.drafting is not None:
        state.drafting.append(rows, old + read, ids, said)
    return state
