"""L20: with `batch_invariant=True` a request's tokens and logprobs are bits of that request alone."""

import functools
from typing import Any

import attrs
from torch import Tensor

from weft.proofs.checks.difference import LawViolation
from weft.proofs.laws.engine.completions import check_nothing_is_left, run
from weft.proofs.strategies.engine.engines import VOCABULARY, Call, Load, adapters_of, invariant_model
from weft.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.requests import sample_seeds
from weft.trees import tree_map

_LAW = "L20 same bits"
_FIELDS = "token_ids", "logprobs", "top_logprobs", "ranks", "prompt_logprobs", "prompt_top_logprobs", "prompt_ranks"


def bits_are_of_the_request(load: Load, kind: str, device: str = "cpu") -> None:
    """L20: in any batch, order, chunks, mode and split, after preemption, with drafts, and with pages of others, a
    completion has the tokens and the logprobs of a run by itself, eagerly, on one stage, bit for bit. (An aborted one
    has the first of them.) They are also those of one pass over prompt and completion.

    Args:
        kind: of the model, one of `INVARIANT_MODELS`.
    """
    model = _on(kind, device)
    tracks: dict[tuple[int, int], CompletionState] = {}
    engine = load.engine(model=model)
    run(_LAW, load, engine, tracks=tracks)
    check_nothing_is_left(engine)
    for (index, sample), track in tracks.items():
        call = load.calls[index]
        seed = sample_seeds(call.sampling.seed or 0, call.sampling.n)[sample]
        expected = _complete(
            kind, device, call, attrs.evolve(call.sampling, seed=seed, n=1), call.prompt, call.max_tokens
        )
        for field in _FIELDS:
            found, wanted = getattr(track, field), getattr(expected, field)
            if found != (wanted[: len(found)] if track.reason == "abort" else wanted):
                seen = f"{found}, and alone {wanted}"
                raise LawViolation(f"{_LAW}: {field} of completion {sample} of call {index}, of {kind}, are {seen}")
        _forced(kind, device, call, expected, f"completion {sample} of call {index}, of {kind}")


def _forced(kind: str, device: str, call: Call, expected: CompletionState, name: str) -> None:
    """Raise LawViolation unless one pass over the prompt and the completion gives the logprobs of its tokens."""
    given, told = (*call.prompt, *expected.token_ids), SamplingParams(temperature=0.0, prompt_logprobs=0)
    if not expected.token_ids or max(given) >= VOCABULARY:
        return
    forced = _complete(kind, device, call, told, given, 1).prompt_logprobs[len(call.prompt) - 1 :]
    if forced != expected.logprobs:
        raise LawViolation(f"{_LAW}: {name} decoded has logprobs {expected.logprobs}, and in one pass {forced}")


def _complete(
    kind: str, device: str, call: Call, sampling: SamplingParams, prompt: tuple[int, ...], max_tokens: int
) -> CompletionState:
    engine = _engine_for_one(kind, device, call.adapter)
    engine.reset_prefix_cache()
    engine.add(prompt, sampling, max_tokens=max_tokens, adapter=call.adapter, mask=call.mask)
    *_, output = engine
    if output.error is not None:
        raise output.error
    return output.track


@functools.cache
def _on(kind: str, device: str) -> Model:
    model = invariant_model(kind)
    return attrs.evolve(model, params=tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, model.params))


@functools.cache
def _engine_for_one(kind: str, device: str, adapter: str | None) -> Engine:
    model, options = _on(kind, device), dict[str, Any](graph="none", run_ahead=0, num_logprobs=1)
    own = None if adapter is None else {adapter: adapters_of(model.config)[adapter]}
    limits = EngineLimits(max_num_reqs=1, max_num_tokens=24, page_size=24, num_pages=1)
    return Engine(model, limits, adapters=own, **options)
