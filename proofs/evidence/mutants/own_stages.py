"""Planted bugs of custom stages: extras, captures and carried values that reach the wrong
request or token."""

from functools import partial
from typing import Any
from unittest import mock

import attrs
import torch
from torch import Tensor

from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.carried import Carried
from weft.batches.outputs import PerRequest, PerToken
from weft.batches.state import State, admit, resolve
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.stages.custom.sown import Sown
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.requests import prefix_cache
from weft.transforms.engine.requests.host_state import Request, salt
from weft.transforms.engine.requests.prompts import with_token_extras
from weft.transforms.engine.steps.step import batch_token_extras

_REQUESTS = "weft.transforms.engine.requests.host_state"
_STEP = "weft.transforms.engine.steps.step"
_PREFIX_CACHE = "weft.transforms.engine.requests.prefix_cache"


def _of_the_row_below(state: State, batch: Batch) -> ResolvedBatch:
    """Each request has the extras of the one after it in the batch."""
    resolved = resolve(state, batch)
    return attrs.evolve(
        resolved,
        # A batch of one request, and requests with equal extras, stay right.
        extras={name: PerRequest(x.values.roll(-1, 0)) for name, x in resolved.extras.items()},
    )


def _of_the_row(state: State, batch: Batch) -> ResolvedBatch:
    """Requests have the extras of the first rows, whichever rows they are in."""
    resolved = resolve(state, batch)
    # Right as long as requests are in the first rows in order, which is so until one ends before
    # another.
    first = torch.arange(len(batch.rows), device=batch.rows.device).clamp(
        max=len(state.positions) - 1
    )
    return attrs.evolve(
        resolved, extras={name: PerRequest(x[first]) for name, x in state.extras.items()}
    )


# The same tokens with other extras have other keys and values; here they share pages. Two requests
# with one beginning are needed, at a time when the pages of the first are still there.
def _salt_without_extras(request: Request, version: int) -> bytes:
    return salt(attrs.evolve(request, extras=None), version)


def _lost_when_it_starts_again(*args: Any, generated: Any, extras: Any, **options: Any) -> State:
    """A request that was preempted comes back with the defaults."""
    # Only a request that has generated tokens comes back with them, so the first admission is
    # right: the engine must be so short of pages that it preempts.
    kept_extras = [{} if said else values for said, values in zip(generated, extras, strict=True)]
    return admit(*args, generated=generated, extras=kept_extras, **options)


def _left_in_the_row(*args: Any, extras: Any, **options: Any) -> State:
    """A request without an extra has that of the last one in its row."""
    state: State = args[0]
    before = {name: x.clone() for name, x in state.extras.items()}
    after = admit(*args, extras=extras, **options)
    rows = args[1]
    for name, old in before.items():
        for row, values in zip(rows, extras, strict=True):
            # A request that names each of its extras overwrites what is there.
            if name not in values:
                after.extras[name][row] = old[row]
    return after


_LOOKUP = prefix_cache.lookup_prefix


def _finds_it_anyway(pages: Any, req: Any) -> Any:
    """The prefix of a request whose tokens are captured or carry something is skipped if the cache
    has it."""
    # The tokens are right, since the pages are. What is lost is what the skipped tokens would have
    # had captured, or carried on.
    plain = attrs.evolve(req.request, prefix_caching="full")
    with mock.patch.object(req, "request", plain):
        return _LOOKUP(pages, req)


def _again(
    self: CompletionState, values: Any, first: int, count: int = 1, start: int | None = None
) -> None:
    """Tokens that are computed a second time, such as those of a preempted request, are appended
    again."""
    # None says that these tokens are the next ones; only a preempted request has them already.
    _APPEND(self, values, first, count, None)


_APPEND = CompletionState.append_captured


def _of_the_token_before(self: Sown, *args: Any) -> dict[str, PerToken]:
    """Each token has what was captured of the one before it in the batch."""
    # The values are right and belong to other tokens: a test that counts them, or sums them up,
    # passes.
    return {name: PerToken(value.values.roll(1, 0)) for name, value in _AFTER(self, *args).items()}


_AFTER = Sown.after


def _only_here(self: Sown, x: Any, *args: Any) -> dict[str, PerToken]:
    """The captures of earlier stages are dropped."""
    # With one stage, or where the last stage alone captures, nothing is lost.
    return _AFTER(self, None, *args)


def _of_the_last_draft(self: Carried, batch: ResolvedBatch, page_size: int, values: Any) -> Carried:
    """What a request carries is that of the last token that a step read, right or wrong."""
    carried = _WRITE(self, batch, page_size, values)
    for name, new in values.items():
        old = carried.values[name][batch.rows]
        # Padding writes nothing, as in the right version: the bug is only which token a request
        # carries on. Without drafts the last token of a step is always right.
        kept = (batch.rows >= 0).view(-1, *[1] * (old.dim() - 1))
        carried.values[name][batch.rows] = torch.where(kept, new[batch.last_index][:, None], old)
    return carried


_WRITE = Carried.write
_ADMIT = Carried.admit
_READ = Carried.read


def _of_the_first_token(
    self: Carried, batch: ResolvedBatch, page_size: int, values: Any
) -> Carried:
    """What is carried on is that of a request's first token in the step."""
    # In a decode without drafts the first token of a step is also the last: chunks of prompts show
    # it.
    first = batch.query_start_loc[:-1].to(torch.int64).clamp(max=len(batch.input_ids) - 1)
    return _WRITE(
        self, batch, page_size, {name: batch.per_token(new[first]) for name, new in values.items()}
    )


def _with_padding(self: Carried, batch: ResolvedBatch, page_size: int, values: Any) -> Carried:
    """Padding, too, writes a row: that of the defaults."""
    carried = _WRITE(self, batch, page_size, values)
    for name, new in values.items():
        # The last row holds the defaults, from which requests start: what is wrong is read only
        # when the next one is admitted.
        carried.values[name][-1] = new[-1]
    return carried


def _of_the_first_page(self: Carried, rows: Tensor, positions: Any, last_pages: Any) -> None:
    """A request that starts after found pages has the snapshot of any page."""
    # Right where the found pages end with page 0, which is the first that an engine gives out.
    _ADMIT(self, rows, positions, [0 if page >= 0 else -1 for page in last_pages])


def _not_started(self: Carried, rows: Tensor, positions: Any, last_pages: Any) -> None:
    """A request goes on from what the last one in its row left."""
    before = {name: old.clone() for name, old in self.values.items()}
    _ADMIT(self, rows, positions, last_pages)
    for row, page in zip(rows.tolist(), last_pages, strict=True):
        for name, old in before.items():
            # A request that starts after found pages has a snapshot. The others must start from the
            # defaults, and the first one in each row does.
            self.values[name][row] = old[row] if page < 0 else self.values[name][row]


def _of_the_neighbour(self: Carried, rows: Tensor, positions: Tensor) -> dict[str, PerRequest]:
    return {
        name: PerRequest(value.values.roll(1, 0))
        for name, value in _READ(self, rows, positions).items()
    }


def _carried(name: str, method: str, bug: Any) -> Mutant:
    return Mutant(name, _OWN, partial(mock.patch.object, Carried, method, bug))


def _without_digests(content: Any, defaults: Any, token_extras: Any, num_tokens: int) -> Any:
    """The inputs of a prompt's tokens are no part of its pages' names."""
    extended = with_token_extras(content, defaults, token_extras, num_tokens)
    if extended is None:
        return None
    # The inputs still reach the stages, so each request alone is right: only one that finds the
    # pages of another with the same tokens goes wrong.
    return attrs.evolve(extended, contents=(b"",) * num_tokens)


def _from_the_first(contents: Any, starts: Any, token_ids: Any, device: Any) -> Any:
    """A chunk of a prompt has the inputs of the prompt's first tokens."""
    # A prompt that is read in one chunk starts at 0 anyway.
    return batch_token_extras(contents, [0] * len(starts), token_ids, device)


# The inputs are dropped where the batch goes on to the next stage: one stage stays right.
def _on_the_first_stage(self: Batch) -> Batch:
    batch = _AFTER_FIRST(self)
    if batch.token_extras:
        return attrs.evolve(batch, token_extras={})
    return batch


_AFTER_FIRST = Batch.after_first


def _last_for_the_rest(contents: Any, starts: Any, token_ids: Any, device: Any) -> Any:
    """Tokens without inputs of their own have those of a prompt's last token."""
    changed = [
        content and attrs.evolve(content, token_extras=_ending_twice(content.token_extras))
        for content in contents
    ]
    return batch_token_extras(changed, starts, token_ids, device)


def _ending_twice(extras: Any) -> dict[str, Tensor]:
    return {name: torch.cat((values[:-1], values[-2:-1])) for name, values in extras.items()}


_OWN = find("L21", "own stages serve as alone")
_INPUTS = "weft.stages.inputs"
_OF_TOKENS = find("L21", "with inputs of tokens")

OWN_STAGES = (
    Mutant(
        "a request has the extras of its neighbour",
        _OWN,
        replace(_INPUTS, "resolve", _of_the_row_below),
    ),
    Mutant("extras go with the place in the batch", _OWN, replace(_INPUTS, "resolve", _of_the_row)),
    Mutant(
        "a page is known without its extras", _OWN, replace(_REQUESTS, "salt", _salt_without_extras)
    ),
    Mutant(
        "a preempted request loses its extras",
        _OWN,
        replace(_STEP, "admit", _lost_when_it_starts_again),
    ),
    Mutant(
        "an extra stays in the row of its request", _OWN, replace(_STEP, "admit", _left_in_the_row)
    ),
    Mutant(
        "a prefix that is found is not captured",
        _OWN,
        replace(_PREFIX_CACHE, "lookup_prefix", _finds_it_anyway),
    ),
    Mutant(
        "what is computed twice is captured twice",
        _OWN,
        partial(mock.patch.object, CompletionState, "append_captured", _again),
    ),
    Mutant(
        "captures are of the token before",
        _OWN,
        partial(mock.patch.object, Sown, "after", _of_the_token_before),
    ),
    Mutant(
        "captures of earlier stages are lost",
        _OWN,
        partial(mock.patch.object, Sown, "after", _only_here),
    ),
    _carried("a wrong draft is carried on", "write", _of_the_last_draft),
    _carried("the first token of a step is carried on", "write", _of_the_first_token),
    _carried("padding writes what is carried", "write", _with_padding),
    _carried("a snapshot is of another page", "admit", _of_the_first_page),
    _carried("what is carried stays in the row of its request", "admit", _not_started),
    _carried("what is carried is the neighbour's", "read", _of_the_neighbour),
    Mutant(
        "a page is known without its tokens' inputs",
        _OF_TOKENS,
        replace("weft.transforms.engine.requests.inputs", "with_token_extras", _without_digests),
    ),
    Mutant(
        "a chunk has the first tokens' inputs",
        _OF_TOKENS,
        replace(_STEP, "batch_token_extras", _from_the_first),
    ),
    Mutant(
        "other tokens have the last input",
        _OF_TOKENS,
        replace(_STEP, "batch_token_extras", _last_for_the_rest),
    ),
    Mutant(
        "inputs of tokens reach the first stage alone",
        _OF_TOKENS,
        partial(mock.patch.object, Batch, "after_first", _on_the_first_stage),
    ),
)
