"""L20: with `batch_invariant=True` the bits of a request's tokens and logprobs depend only on that
request."""

import functools
from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.sampling import SamplingParams
from weft.ops.requests import EMBEDDED
from weft.proofs._laws.engine.completions import check_nothing_is_left, run
from weft.proofs._strategies.engine.engines import Call, adapters_of
from weft.proofs._strategies.engine.invariant import MAX_LEN, InvariantLoad, invariant_model
from weft.proofs.checks.difference import LawViolation
from weft.stages.model import Model
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.requests.host_state import sample_seeds
from weft.transforms.engine.requests.prompts import EmbedsPrompt, ids_of
from weft.transforms.pipelines.transports import Transport
from weft.transforms.pipelines.transports.threads import Threads
from weft.values.trees import tree_map

_LAW = "L20 same bits"
_FIELDS = (
    "token_ids",
    "logprobs",
    "top_logprobs",
    "ranks",
    "prompt_logprobs",
    "prompt_top_logprobs",
    "prompt_ranks",
)
# Seconds that other threads wait while one compiles or captures.
_TIMEOUT = 120.0


def bits_are_of_the_request(
    case: InvariantLoad, device: str = "cpu", transport: Transport | None = None
) -> None:
    """L20: a completion has bit for bit the tokens and logprobs of its request run alone, eagerly,
    on one stage.

    This holds in any batch, order, chunking, mode and split, over any transport, after preemption,
    with drafts, and with pages shared with other requests. An aborted completion has a prefix of
    them. The logprobs also equal those of one pass over prompt and completion. A prompt with
    embeddings has no prompt logprobs, so there it is one pass for each token.

    Args:
        transport: where the stages run. None: in this process, in threads if the case asks for
            them.
    """
    model = _on(case.kind, device)
    tracks: dict[tuple[int, int], CompletionState] = {}
    if case.has_threads and transport is None:
        threads = Threads(timeout=_TIMEOUT)
    else:
        threads = None
    with nullcontext() if threads is None else closing(threads):
        engine = case.load.engine(model=model, transport=threads or transport)
        run(_LAW, case.load, engine, tracks=tracks, prompts=case.prompts)
    check_nothing_is_left(engine)
    for (index, sample), track in tracks.items():
        call = case.load.calls[index]
        prompt = case.prompt(index)
        seed = sample_seeds(call.sampling.seed or 0, call.sampling.n)[sample]
        sampling = attrs.evolve(call.sampling, seed=seed, n=1)
        expected = _complete(case.kind, device, call, sampling, prompt, call.max_tokens)
        name = f"completion {sample} of call {index}, of {case.kind}"
        for field in _FIELDS:
            values = getattr(track, field)
            expected_values = getattr(expected, field)
            if values != (
                expected_values[: len(values)] if track.reason == "abort" else expected_values
            ):
                raise LawViolation(
                    f"{_LAW}: {field} of {name}, are {values}, and alone {expected_values}"
                )
        forced = _forced(case.kind, device, call, prompt, expected.token_ids)
        if forced != expected.logprobs:
            raise LawViolation(
                f"{_LAW}: {name} decoded has logprobs {expected.logprobs}, and in one pass {forced}"
            )


def _forced(
    kind: str,
    device: str,
    call: Call,
    prompt: tuple[int, ...] | EmbedsPrompt,
    tokens: Sequence[int],
) -> list[float]:
    """The logprobs of a completion's tokens, from one pass over the prompt and the completion.

    If the prompt has embeddings, each token takes its own pass over what precedes it, and is the
    only token allowed next.
    """
    if isinstance(prompt, EmbedsPrompt) and EMBEDDED in ids_of(prompt):
        told = [SamplingParams(temperature=0.0, allowed_token_ids=[token]) for token in tokens]
        before = [_longer(prompt, tokens[:count]) for count in range(len(tokens))]
        passes = (_complete(kind, device, call, *one, 1) for one in zip(told, before, strict=True))
        return [logprob for track in passes for logprob in track.logprobs]
    if not tokens:
        return []
    scored = SamplingParams(temperature=0.0, prompt_logprobs=0)
    return _complete(kind, device, call, scored, _longer(prompt, tokens), 1).prompt_logprobs[
        len(prompt) - 1 :
    ]


def _longer(
    prompt: tuple[int, ...] | EmbedsPrompt, tokens: Sequence[int]
) -> tuple[int, ...] | EmbedsPrompt:
    """The prompt with tokens appended, at the positions that they get when generated."""
    if not isinstance(prompt, EmbedsPrompt):
        return (*prompt, *tokens)
    embeds = prompt.inputs_embeds
    positions = prompt.positions
    assert embeds is not None, "drawn"
    assert positions is not None, "drawn"
    embeds = torch.cat((embeds, embeds.new_zeros(len(tokens), embeds.shape[1])))
    after = (positions.max() + 1 + torch.arange(len(tokens))).expand(3, -1)
    return EmbedsPrompt([*ids_of(prompt), *tokens], embeds, torch.cat((positions, after), dim=1))


def _complete(
    kind: str,
    device: str,
    call: Call,
    sampling: SamplingParams,
    prompt: tuple[int, ...] | EmbedsPrompt,
    max_tokens: int,
) -> CompletionState:
    engine = _engine_for_one(kind, device, call.adapter)
    # Pages of an earlier request would shorten this one's pass.
    engine.reset_prefix_cache()
    engine.add(prompt, sampling, max_tokens=max_tokens, adapter=call.adapter, mask=call.mask)
    *_, output = engine
    if output.error is not None:
        raise output.error
    return output.track


@functools.cache
def _on(kind: str, device: str) -> Model:
    model = invariant_model(kind)
    return attrs.evolve(
        model, params=tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, model.params)
    )


@functools.cache
def _engine_for_one(kind: str, device: str, adapter: str | None) -> Engine:
    model = _on(kind, device)
    options = dict[str, Any](graph="none", run_ahead=0, num_logprobs=3)
    if adapter is None:
        adapters = None
    else:
        adapters = {adapter: adapters_of(model.config)[adapter]}
    limits = EngineLimits(
        max_num_reqs=1, max_num_tokens=MAX_LEN, page_size=64, num_pages=MAX_LEN // 64
    )
    return Engine(model, limits, adapters=adapters, **options)
