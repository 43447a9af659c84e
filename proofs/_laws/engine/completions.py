"""L11 and L19 over the whole engine: each completion is the same as when served alone, no matter
how far the host runs ahead."""

import functools
from collections.abc import Callable, Mapping, Sequence

import attrs
from torch import Tensor

from weft.batches.sampling import SamplingParams
from weft.proofs._strategies.engine.engines import Half, Load, small_adapters, small_model
from weft.proofs.checks.difference import LawViolation
from weft.proofs.serving import check_ends
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine, is_under_way, num_unfinished
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.requests.host_state import sample_seeds
from weft.transforms.engine.requests.masks import Mask
from weft.transforms.engine.requests.prompts import EmbedsPrompt

# (index of the call, index of the completion) -> its tokens and its finish reason.
Said = Mapping[tuple[int, int], tuple[list[int], str]]


def engine_serves_as_alone(load: Load) -> None:
    """L11: each completion has the tokens of an eager run by itself (an aborted one has a prefix of
    them), its mask allows each token, and no page is held at the end."""
    engine = load.engine()
    said = run("L11 an engine serves as alone", load, engine)
    check_nothing_is_left(engine)
    _compare("L11 an engine serves as alone", load, said)
    for (index, sample), (tokens, _) in said.items():
        if (mask := load.calls[index].mask) is not None:
            _check_allowed(f"completion {sample} of call {index}", mask, tokens)


def _check_allowed(name: str, mask: Half, tokens: Sequence[int]) -> None:
    for count, token in enumerate(tokens):
        allowed = mask.allowed(tokens[:count])
        if allowed is not None and token not in allowed:
            raise LawViolation(
                f"L11 masks hold: {name} is {tokens}, where {allowed} may follow {count} tokens"
            )


def run_ahead_is_none(load: Load) -> None:
    """L19: an engine whose host runs any number of steps ahead gives the same completions as one
    whose host reads each step before it launches the next."""
    near, far = (
        run("L19 run-ahead is none", load, load.engine(ahead)) for ahead in (0, load.run_ahead)
    )
    for key, (tokens, reason) in near.items():
        ahead_tokens, other = far[key]
        # An abort comes at a step, by which the two engines may have read different numbers of
        # tokens: compare the tokens that both have.
        if "abort" in (reason, other):
            same = min(len(tokens), len(ahead_tokens))
        else:
            same = max(len(tokens), len(ahead_tokens))
        if tokens[:same] != ahead_tokens[:same] or (
            reason != other and "abort" not in (reason, other)
        ):
            problem = (
                f"{tokens}, {reason}, and {load.run_ahead} steps ahead {ahead_tokens}, {other}"
            )
            raise LawViolation(f"L19 run-ahead is none: completion {key} is {problem}")


def run(
    law: str,
    load: Load,
    engine: Engine,
    before: Callable[[int], None] = lambda step: None,
    extras: Sequence[Mapping[str, Tensor] | None] = (),
    tracks: dict[tuple[int, int], CompletionState] | None = None,
    prompts: Sequence[EmbedsPrompt | None] = (),
) -> Said:
    """Add each call at its step, make the aborts, and run until all requests have ended.

    Args:
        before: called before each step.
        extras: the extras of each call.
        tracks: a dict to fill with the completions.
        prompts: for each call, a prompt that replaces the call's, or None to keep it.
    """
    tracks = {} if tracks is None else tracks
    last = max(call.step for call in load.calls)
    step = 0
    while step <= last or num_unfinished(engine):
        check_ends(law, step - last)
        outputs = []
        before(step)
        for index, call in enumerate(load.calls):
            if call.step == step:
                if prompts:
                    prompt = prompts[index]
                else:
                    prompt = None
                engine.add(
                    call.prompt if prompt is None else prompt,
                    call.sampling,
                    max_tokens=call.max_tokens,
                    id=str(index),
                    priority=call.priority,
                    adapter=call.adapter,
                    mask=call.mask,
                    extras=extras[index] if extras else None,
                )
            if call.aborted == step and is_under_way(engine, str(index)):
                outputs += engine.abort(str(index))
        for output in [*outputs, *engine.step()]:
            tracks[int(output.id), output.index] = output.track
        step += 1
    # Steps may still be in flight after the last request has ended.
    while not engine.is_idle:
        engine.step()
    return {key: (track.token_ids, track.reason) for key, track in tracks.items()}


def check_nothing_is_left(engine: Engine) -> None:
    """Raise LawViolation if an idle engine still has requests or holds pages."""
    stats = engine.stats()
    if (stats.running, stats.waiting, stats.pages_held) != (0, 0, 0):
        raise LawViolation(f"L11 nothing is left: {stats}")


def _compare(law: str, load: Load, said: Said) -> None:
    for index, call in enumerate(load.calls):
        seeds = sample_seeds(call.sampling.seed or 0, call.sampling.n)
        for sample, seed in enumerate(seeds):
            tokens, reason = said[index, sample]
            sampling = attrs.evolve(call.sampling, seed=seed, n=1)
            expected, ended = alone(call.prompt, sampling, call.max_tokens, call.adapter, call.mask)
            # An abort that the load did not ask for is compared as any other end.
            whole = reason != "abort" or call.aborted is None
            if tokens != (expected if whole else expected[: len(tokens)]) or (
                whole and reason != ended
            ):
                problem = f"{tokens}, {reason}, and alone {expected}, {ended}"
                raise LawViolation(f"{law}: completion {sample} of call {index} is {problem}")


def alone(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    max_tokens: int,
    adapter: str | None = None,
    mask: Mask | None = None,
    weights: int = 0,
    adapters: int = 0,
) -> tuple[list[int], str]:
    """The tokens and finish reason of one completion alone in an engine, run eagerly on one stage.

    Args:
        weights: the seed of the small model's weights.
        adapters: the version of the model's adapters.
    """
    request_sampling = attrs.evolve(sampling, prompt_logprobs=None)
    track = complete(
        _engine_for_one(adapter, weights, adapters),
        prompt,
        request_sampling,
        max_tokens,
        adapter,
        mask,
    )
    return track.token_ids, track.reason


def complete(
    engine: Engine,
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_tokens: int,
    adapter: str | None = None,
    mask: Mask | None = None,
) -> CompletionState:
    """The completion of one request in an engine that has no other request.

    Raises:
        WeftError: the mask raised or allowed no token, or the logits were NaN.
    """
    engine.add(prompt, sampling, max_tokens=max_tokens, adapter=adapter, mask=mask)
    *_, output = engine
    if output.error is not None:
        raise output.error
    return output.track


@functools.cache
def _engine_for_one(adapter: str | None, weights: int, version: int) -> Engine:
    limits = EngineLimits(max_num_reqs=1, max_num_tokens=24, page_size=24, num_pages=1)
    if adapter is None:
        adapters = None
    else:
        adapters = {adapter: small_adapters(version)[adapter]}
    return Engine(small_model(weights), limits, graph="none", run_ahead=0, adapters=adapters)
