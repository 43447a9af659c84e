"""Planted bugs of speculative decoding."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.batches.batch import Batch, continues
from weft.batches.outputs import Output
from weft.batches.state import State, _advance_verified
from weft.ops.sampling.sample import sample_rows
from weft.ops.sampling.table import SamplingTable
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.stages.head import count_right
from weft.transforms.engine.requests.host_state import HostState, RequestState
from weft.transforms.engine.scheduler import _pages_needed

_HEAD = "weft.stages.head"
_STATE = "weft.batches.state"
_DRAFTING = "weft.stages.drafters.drafting"
_SCHEDULER = "weft.transforms.engine.scheduler"
_REQUESTS = "weft.transforms.engine.requests.host_state"


def _one_more(token_ids: Tensor, drafts: Tensor) -> Tensor:
    """The draft after the last right one is accepted too."""
    right = count_right(token_ids, drafts)
    there = (drafts >= 0).cumprod(1).sum(1)
    # Never more than there are drafts: the step would then fail, and any test would notice.
    return torch.minimum(right + 1, there)


def _all_right(token_ids: Tensor, drafts: Tensor) -> Tensor:
    """The draft model's tokens are accepted without verification."""
    return (drafts >= 0).cumprod(1).sum(1)


def _any_right(token_ids: Tensor, drafts: Tensor) -> Tensor:
    """Right drafts after a wrong one are counted."""
    # Right as long as no draft is right after a wrong one. A drafter that is always or never right
    # does not show it.
    return (drafts == token_ids[:, :-1]).sum(1)


def _noise_of_the_first(
    logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, mask: Any
) -> Any:
    """All tokens of a request are drawn with the noise of one position."""
    same = torch.ones_like(rows, dtype=torch.bool)
    same[1:] = rows[1:] != rows[:-1]
    first = torch.where(same, torch.arange(len(rows), device=rows.device), 0).cummax(0).values
    # Greedy requests draw no noise and stay right, as does a step in which a request has one token.
    return sample_rows(logits, table, rows, positions[first], mask)


def _moved_by_all(state: State, batch: Batch, out: Output, num_tokens: Tensor) -> State:
    """A request advances by all tokens that were read, though not to its end, where it would get no
    more tokens."""
    assert state.drafting is not None, "it drafts"
    read = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    old = state.positions[batch.rows]
    most = state.drafting.limits[batch.rows] - 2
    state = _advance_verified(state, batch, out, num_tokens)
    # Chunks of prompts advance by what they read, and rightly so: only continued requests are
    # moved.
    wrong = continues(batch) & (batch.rows >= 0) & (old <= most)
    moved = torch.where(wrong, torch.minimum(old + read, most), state.positions[batch.rows])
    state.positions[batch.rows] = moved
    return state


def _first_stages_move_by_one(state: State, batch: Batch, out: Output, num_tokens: Tensor) -> State:
    """Only the last stage gets the number of right drafts."""
    # Only the last stage has a table of sampling, so a vocabulary of 0 tells the others. With one
    # stage nothing changes: the law must split the model.
    alone = state.sampling.vocab_size == 0
    return _advance_verified(state, batch, out, num_tokens.clamp(max=1) if alone else num_tokens)


def _pages_of_one_token(host: HostState, req: RequestState, query_len: int) -> int:
    """A step gets pages only up to its last token, so the drafts after it may have none."""
    # A request whose last token is not near the end of a page has room for its drafts by chance.
    return _pages_needed(host, req, 1)


@contextmanager
def _penalised_too() -> Iterator[None]:
    # Each token changes the penalties of the next one, so that one step cannot verify several. The
    # host and the device both refuse to draft, and one of them would be enough.
    with replace(_DRAFTING, "PENALTIES", 0)(), replace(_REQUESTS, "PENALTIES", 0)():
        yield


_LOOKUP, _MODEL = find("L12", "lookup"), find("L12", "model")

DRAFTS = (
    Mutant(
        "one more draft is accepted than is right",
        _LOOKUP,
        replace(_HEAD, "count_right", _one_more),
    ),
    Mutant(
        "drafts after a wrong one are accepted", _LOOKUP, replace(_HEAD, "count_right", _any_right)
    ),
    Mutant(
        "a request has the noise of one position",
        _LOOKUP,
        replace(_HEAD, "sample_rows", _noise_of_the_first),
    ),
    Mutant(
        "wrong drafts stay in the context",
        _LOOKUP,
        replace(_STATE, "_advance_verified", _moved_by_all),
    ),
    Mutant(
        "the first rank does not learn how many drafts were right",
        _LOOKUP,
        replace(_STATE, "_advance_verified", _first_stages_move_by_one),
    ),
    Mutant("requests with penalties draft", _LOOKUP, _penalised_too),
    Mutant(
        "drafts have no pages", _LOOKUP, replace(_SCHEDULER, "_pages_needed", _pages_of_one_token)
    ),
    Mutant("a model's drafts are not verified", _MODEL, replace(_HEAD, "count_right", _all_right)),
)
