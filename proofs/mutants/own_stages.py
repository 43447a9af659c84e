"""Planted bugs of stages of one's own: extras and captures that reach the wrong request or token."""

from functools import partial
from typing import Any
from unittest import mock

import attrs
import torch

from weft.batch import Batch, ResolvedBatch
from weft.outputs import PerToken
from weft.proofs.mutants.mutant import Mutant, replace
from weft.proofs.suite import find
from weft.stages.functions import Sown
from weft.state import State, admit, resolve
from weft.transforms.engine import scheduler
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.prompts import RequestExtras
from weft.transforms.engine.requests import salt

_REQUESTS, _STEP = "weft.transforms.engine.requests", "weft.transforms.engine.step"
_SCHEDULER = "weft.transforms.engine.scheduler"


def _of_the_row_below(state: State, batch: Batch) -> ResolvedBatch:
    """Each request has the extras of the one after it in the batch."""
    found = resolve(state, batch)
    return attrs.evolve(found, extras={name: x.roll(-1, 0) for name, x in found.extras.items()})


def _of_the_row(state: State, batch: Batch) -> ResolvedBatch:
    """Requests have the extras of the first rows, whichever rows they are in."""
    found = resolve(state, batch)
    first = torch.arange(len(batch.rows), device=batch.rows.device).clamp(max=len(state.positions) - 1)
    return attrs.evolve(found, extras={name: x[first] for name, x in state.extras.items()})


def _salt_without_extras(adapter: int, version: int, extras: RequestExtras | None) -> bytes:
    return salt(adapter, version)


def _lost_when_it_starts_again(*args: Any, generated: Any, extras: Any, **options: Any) -> State:
    """A request that was preempted comes back with the defaults."""
    own = [{} if said else given for said, given in zip(generated, extras, strict=True)]
    return admit(*args, generated=generated, extras=own, **options)


def _left_in_the_row(*args: Any, extras: Any, **options: Any) -> State:
    """A request without an extra has that of the last one in its row."""
    state: State = args[0]
    before = {name: x.clone() for name, x in state.extras.items()}
    after, rows = admit(*args, extras=extras, **options), args[1]
    for name, old in before.items():
        for row, given in zip(rows, extras, strict=True):
            if name not in given:
                after.extras[name][row] = old[row]
    return after


_LOOKUP = scheduler._lookup_prefix


def _finds_it_anyway(pages: Any, req: Any) -> Any:
    """The prefix of a request whose tokens are captured is taken from the cache."""
    plain = attrs.evolve(req.request, is_captured=False)
    with mock.patch.object(req, "request", plain):
        return _LOOKUP(pages, req)


def _again(self: CompletionState, values: Any, first: int, count: int, start: int | None) -> None:
    """Tokens that are computed a second time, such as those of a preempted request, are appended again."""
    _APPEND(self, values, first, count, None)


_APPEND = CompletionState.append_captured


def _of_the_token_before(self: Sown, *args: Any) -> dict[str, PerToken]:
    """Each token has what was captured of the one before it in the batch."""
    return {name: PerToken(own.values.roll(1, 0)) for name, own in _AFTER(self, *args).items()}


_AFTER = Sown.after


def _only_here(self: Sown, x: Any, *args: Any) -> dict[str, PerToken]:
    """The captures of earlier stages are dropped."""
    return _AFTER(self, None, *args)


_OWN, _DECODER = find("L21"), "weft.stages.decoder"

OWN_STAGES = (
    Mutant("a request has the extras of its neighbour", _OWN, replace(_DECODER, "resolve", _of_the_row_below)),
    Mutant("extras go with the place in the batch", _OWN, replace(_DECODER, "resolve", _of_the_row)),
    Mutant("a page is known without its extras", _OWN, replace(_REQUESTS, "salt", _salt_without_extras)),
    Mutant("a preempted request loses its extras", _OWN, replace(_STEP, "admit", _lost_when_it_starts_again)),
    Mutant("an extra stays in the row of its request", _OWN, replace(_STEP, "admit", _left_in_the_row)),
    Mutant("a prefix that is found is not captured", _OWN, replace(_SCHEDULER, "_lookup_prefix", _finds_it_anyway)),
    Mutant(
        "what is computed twice is captured twice",
        _OWN,
        partial(mock.patch.object, CompletionState, "append_captured", _again),
    ),
    Mutant("captures are of the token before", _OWN, partial(mock.patch.object, Sown, "after", _of_the_token_before)),
    Mutant("captures of earlier stages are lost", _OWN, partial(mock.patch.object, Sown, "after", _only_here)),
)
