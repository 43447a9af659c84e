"""The head: the last stage's logits, the tokens sampled from them, their logprobs, and the
verification of drafts.

A step over `[last token, d_1 … d_k]` samples `t_0 … t_k`, each with the noise that a decode step
would draw at its position: the sampler's noise depends only on the request's seed and on the
position. So `t_0` is the request's next token, and `t_i` is the one after it as long as each draft
`d_i` equals the token sampled in its place, `t_{i-1}`. Sampled or greedy, the tokens are therefore
those of decoding one by one, whatever the drafts (Daliri et al., 2024, "Coupling without
communication and drafter-invariant speculative decoding", arXiv 2408.07978). A rejection sampler
(Leviathan et al., 2023, arXiv 2211.17192) preserves only their distribution.
"""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import kind_of
from weft.batches.batch import Batch, ResolvedBatch, continues
from weft.batches.outputs import Output, PerToken
from weft.batches.state import State
from weft.errors import ProgramError, RequestError
from weft.ops.norm import rms_norm
from weft.ops.products.linear import linear
from weft.ops.products.parts import sum_parts
from weft.ops.requests import DRAFT, find_owners
from weft.ops.sampling.sample import sample_rows, token_logprobs
from weft.ops.sampling.table import SamplingTable
from weft.settings import is_batch_invariant
from weft.stages.config import ModelConfig
from weft.stages.custom.functions import ChangeLogits, LogitsAt
from weft.stages.custom.results import blamed_on
from weft.stages.custom.sown import sowing_nothing
from weft.stages.params import DecoderParams
from weft.stages.shares import SharedRows, TensorRanks

NO_CAPTURES: Mapping[str, Any] = MappingProxyType({})
# The logits of at most this many tokens of a prompt are in memory at a time: each is vocab_size
# wide, in float32.
_TOKENS_AT_ONCE = 256


def head(config: ModelConfig, params: DecoderParams, hidden: Tensor, leaves: int = 0) -> Tensor:
    """The logits [n, vocab_size] of the last layer's hidden states [n, hidden_size]; with a rank's
    share of the head, [n, columns]. Last stage only."""
    assert params.norm is not None, "only the last stage's parameters hold the norm and the head"
    assert params.head is not None
    return project(rms_norm(hidden, params.norm, config.rms_norm_eps), params.head, leaves)


def project(normed: Tensor, lm_head: Tensor, leaves: int = 0) -> Tensor:
    """Like `head`, for normalised hidden states [n, hidden_size]. With 1 leaf, the bits are the
    same for any share of the head."""
    return sum_parts(linear(normed, lm_head, None, leaves), normed.dtype)


def finish(
    config: ModelConfig,
    params: DecoderParams,
    table: SamplingTable,
    batch: Batch,
    resolved: ResolvedBatch,
    hidden: Tensor,
    keep_logits: bool = False,
    num_logprobs: int = 0,
    where: Tensor | None = None,
    change: ChangeLogits | None = None,
    captured: Mapping[str, PerToken] = NO_CAPTURES,
    beside: Mapping[str, LogitsAt] = NO_CAPTURES,
    ranks: TensorRanks | None = None,
    leaves: int = 0,
) -> Output:
    """The last stage's output, from the last layer's hidden states [num_tokens, hidden_size].

    Each request gets a token after its last one, or after each of the tokens at `where` [num_reqs,
    n].
    """
    index, rows = (
        (resolved.last_index, batch.rows) if where is None else _of_tokens(batch.rows, where)
    )
    # With several ranks, each computes the logits of its share of the vocabulary for all rows, and
    # then samples whole logits of its share of the rows.
    shared = SharedRows(len(index), ranks)
    logits = shared.exchange(head(config, params, hidden[index], leaves))
    index = shared.local_rows(index)
    rows = shared.local_rows(rows)
    if change is not None:
        count = 1 if where is None else where.shape[1]
        reads = extras_of(
            resolved,
            lambda x: shared.local_rows(x if count == 1 else x.repeat_interleave(count, 0)),
        )
        logits = changed_logits(
            change, logits, rows, Extras({**reads, **_at(captured, beside, index)})
        )
    mask = None if batch.token_mask is None else shared.local_rows(batch.token_mask)
    drawn = sample_rows(logits, table, rows, resolved.positions[index], mask)
    top = top_logprobs(logits, *drawn, num_logprobs) if num_logprobs else ()
    ids, logprobs, *more = shared.gather_all(*drawn, *top)
    prompt: tuple[Tensor | None, ...] = (None, None, None, None)
    if batch.targets is not None:
        assert params.norm is not None, (
            "only the last stage's parameters hold the norm and the head"
        )
        assert params.head is not None
        normed = rms_norm(hidden, params.norm, config.rms_norm_eps)
        changed = (
            None
            if change is None
            else functools.partial(_changed_prompt, change, resolved, captured, beside)
        )
        prompt = prompt_logprobs(
            normed, params.head, batch.targets, num_logprobs, changed, ranks, leaves
        )
    whole = shared.gather(logits).float() if keep_logits else None
    sampled: tuple[Any, ...] = (ids, logprobs, whole, *(more or (None, None, None)))
    # The rows of one request side by side, as `verify` reads them.
    if where is not None:
        sampled = tuple(None if x is None else x.unflatten(0, where.shape) for x in sampled)
    return Output(*sampled, *prompt)


Read = Callable[[], Tensor]


class Extras(Mapping[str, Tensor]):
    """The named inputs of a function on logits, each [n, ...], computed when first read.

    Args:
        reads: for each name, a function that computes its value.
    """

    def __init__(self, reads: Mapping[str, Read]) -> None:
        self._reads = reads
        self._values = dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        # Lazily, because most functions on logits read none, and a capture of a long prompt is
        # large.
        if name not in self._values:
            self._values[name] = self._reads[name]()
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._reads)

    def __len__(self) -> int:
        return len(self._reads)


def changed_logits(change: ChangeLogits, logits: Tensor, rows: Tensor, extras: Extras) -> Tensor:
    """The logits after a custom function on logits.

    Args:
        logits: [n, vocab_size].
        rows: [n] int64, the row of the state that each belongs to.
        extras: [n, ...] by name: the extras of its request, the values that the layers captured of
            its token, and the logits that other models give its token.

    Raises:
        ProgramError: the function returns something else than logits of that shape.
    """
    # `sow` in a function on logits would capture one value a request and not one a token.
    with blamed_on("logits", extras), sowing_nothing("logits"):
        changed: Any = change(logits, rows, extras)
    if (
        isinstance(changed, Tensor)
        and changed.shape == logits.shape
        and changed.is_floating_point()
    ):
        return changed
    if isinstance(changed, Tensor):
        returned = f"{list(changed.shape)}, {changed.dtype}"
    else:
        returned = kind_of(changed)
    instead = f"logits of all tokens, {list(logits.shape)}, as the given ones"
    raise ProgramError("logits of with_stages(logits=...)", f"it returned {returned}", instead)


def extras_of(
    batch: ResolvedBatch, spread: Callable[[Tensor], Tensor] = lambda x: x
) -> dict[str, Read]:
    """The extras of a batch's requests by name, expanded to one row for each row of logits."""
    return {name: functools.partial(spread, extra.values) for name, extra in batch.extras.items()}


def _changed_prompt(
    change: ChangeLogits,
    batch: ResolvedBatch,
    captured: Mapping[str, PerToken],
    beside: Mapping[str, LogitsAt],
    logits: Tensor,
    start: int,
) -> Tensor:
    """The changed logits of the batch's tokens from `start` on."""
    owners = find_owners(batch.query_start_loc, len(batch.input_ids))[0][
        start : start + len(logits)
    ]
    reads = extras_of(batch, operator.itemgetter(owners))
    reads |= _at(captured, beside, slice(start, start + len(logits)))
    return changed_logits(change, logits, batch.rows[owners], Extras(reads))


def _at(
    captured: Mapping[str, PerToken], beside: Mapping[str, LogitsAt], tokens: Tensor | slice
) -> dict[str, Read]:
    """The captures of some tokens, and the logits that other models give them, by name."""
    captures = {
        name: functools.partial(Tensor.__getitem__, value.values, tokens)
        for name, value in captured.items()
    }
    return {
        **captures,
        **{name: functools.partial(logits_at, tokens) for name, logits_at in beside.items()},
    }


def _of_tokens(rows: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens at `where`, and the rows of their requests, both [num_reqs * n]."""
    return where.flatten(), rows.repeat_interleave(where.shape[1])


def top_logprobs(
    logits: Tensor, token_ids: Tensor, logprobs: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens [num_reqs, count] int64, likeliest first, and their logprobs, float32;
    and the ranks of the chosen tokens [num_reqs] int64.

    The logarithm of the softmax's sum is taken from the chosen tokens' logprobs, so the logits are
    not summed again. In a batch-invariant model, the logprobs are computed as in `prompt_logprobs`.

    Args:
        logits: [num_reqs, vocab_size].
        token_ids, logprobs: [num_reqs], as `sample` returned them; no chosen token has probability
            0.
        count: at most vocab_size.
    """
    ids = _likeliest(logits, count)
    chosen = logits.gather(1, token_ids[:, None])
    if is_batch_invariant():
        return ids, token_logprobs(logits, ids), ranks_of(chosen, logits)
    best = logits.gather(1, ids).float()
    return ids, best - (chosen.float() - logprobs[:, None]), ranks_of(chosen, logits)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """The likeliest tokens [n, count] int64, likeliest first. In a batch-invariant model, the
    smaller of two tied tokens is first; otherwise the order of ties may depend on `count`, which is
    the most that a request of the engine may ask for."""
    # `topk` does not order ties; a stable sort of the whole row does, and is slower.
    if is_batch_invariant() and count:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return logits.topk(count, -1).indices


def ranks_of(chosen: Tensor, logits: Tensor) -> Tensor:
    """The ranks [n] int64 of tokens with the logits `chosen` [n, 1] among all tokens [n,
    vocab_size]: 1 + the number of greater logits, so that tied tokens share a rank."""
    return (logits > chosen).sum(-1) + 1


def prompt_logprobs(
    normed: Tensor,
    lm_head: Tensor,
    targets: Tensor,
    count: int,
    changed: Callable[[Tensor, int], Tensor] | None = None,
    ranks: TensorRanks | None = None,
    leaves: int = 0,
) -> tuple[Tensor, ...]:
    """The logprobs [num_tokens] of `targets`, each of which is the token after its position, and of
    the `count` likeliest tokens there.

    Args:
        normed: [num_tokens, hidden_size], the last layer's hidden states, normalised.
        lm_head: [vocab_size, hidden_size], or a rank's share of its rows.
        targets: [num_tokens] int64.
        changed: `(logits, start) -> logits`: changes the logits of the tokens from `start` on.
        ranks, leaves: as `project` takes them.

    Returns:
        [num_tokens] float32; [num_tokens, count] int64 and float32, likeliest first; the targets'
        ranks [num_tokens] int64.
    """
    parts: list[tuple[Tensor, ...]] = []
    # In chunks, as the logits of a long prompt would not fit (`_TOKENS_AT_ONCE`).
    for states, whole in zip(
        normed.split(_TOKENS_AT_ONCE), targets.split(_TOKENS_AT_ONCE), strict=True
    ):
        shared = SharedRows(len(states), ranks)
        logits = shared.exchange(project(states, lm_head, leaves))
        target_ids = shared.local_rows(whole)[:, None]
        if changed is not None:
            logits = changed(
                logits, sum(len(chunk_logprobs) for chunk_logprobs, *_ in parts) + shared.first
            )
        ids = _likeliest(logits, count)
        logprobs = token_logprobs(logits, torch.cat((target_ids, ids), 1))
        ranked = ranks_of(logits.gather(1, target_ids), logits)
        parts.append(shared.gather_all(logprobs[:, 0], ids, logprobs[:, 1:], ranked))
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def read_at(batch: Batch, num_drafts: int) -> Tensor:
    """The tokens of a batch after which the step samples, [num_reqs, n] int64: every token of a
    request that is decoding, and the last token of one that reads its prompt. A row with fewer than
    n tokens is filled with its last.

    In a uniform class, n is its query length. With a `token_mask`, n is 1 and drafts are ignored:
    the tokens that a grammar allows after a draft depend on the draft, which only the device knows.

    Args:
        num_drafts: the most drafts of a request.
    """
    count = batch.descriptor.query_len or num_drafts + 1
    if batch.token_mask is not None:
        count = 1
    starts = batch.query_start_loc.to(torch.int64)
    last = starts[1:, None] - 1
    first = torch.where(continues(batch)[:, None], starts[:-1, None], last)
    ahead = torch.arange(count, device=starts.device)
    # Padding rows are empty, so that their last token would be -1.
    return torch.minimum(first + ahead, last).clamp(min=0)


def check_drafting(state: State, num_drafts: int) -> None:
    """Raise RequestError if the stage verifies drafts and the state has no `drafting`."""
    if num_drafts and state.drafting is None:
        problem = "a state without `drafting`"
        instead = "attrs.evolve(state, drafting=weft.batches.state.Drafting.zeros(...))"
        raise RequestError("a stage that verifies drafts", problem, instead)


def verify(state: State, batch: Batch, where: Tensor, out: Output) -> Output:
    """The output, with the number of tokens that each request keeps.

    Args:
        state: the state before the step.
        batch: the step's batch, with the drafts filled in; negative where there is no draft.
        where: the result of `read_at`.
        out: the output, with one sampled token for each of these tokens.
    """
    assert state.drafting is not None, "a stage that verifies has a state with drafting"
    # `read_at` fills a row with its last token; such repeats are not drafts.
    again = where[:, 1:] == where[:, :-1]
    drafts = torch.where(again, DRAFT, batch.input_ids[where[:, 1:]])
    # A run-ahead step may find a request that an earlier step has completed: it keeps nothing.
    has_all = state.positions[batch.rows] >= state.drafting.limits[batch.rows] - 1
    num_tokens = torch.where(has_all, 0, count_right(out.token_ids, drafts) + 1)
    return attrs.evolve(out, num_tokens=num_tokens, num_drafts=(drafts >= 0).cumprod(1).sum(1))


def count_right(token_ids: Tensor, drafts: Tensor) -> Tensor:
    """The number of drafts before the first that differs from the token sampled in its place:
    [num_reqs] int64.

    Args:
        token_ids: [num_reqs, k + 1], the tokens sampled after each token that was read.
        drafts: [num_reqs, k].
    """
    # A product that stays 0 after the first difference: no branch, so a graph can hold it.
    return (drafts == token_ids[:, :-1]).cumprod(1).sum(1)
