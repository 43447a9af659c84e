"""L21: an engine over custom stages gives each request what these stages give it alone."""

import functools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from weft.proofs._laws.engine.completions import check_nothing_is_left, run
from weft.proofs._strategies.engine.attention import OtherAttention
from weft.proofs._strategies.engine.engines import Call, Load, small_model
from weft.proofs._strategies.engine.own_stages import Extras, OwnStages
from weft.proofs.checks.difference import ATOL, RTOL, LawViolation
from weft.stages.model import Model
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.requests.host_state import sample_seeds
from weft.values.trees import tree_map

_LAW = "L21 own stages serve as alone"


def own_stages_serve_as_alone(
    load: Load,
    stages: OwnStages | OtherAttention,
    extras: Sequence[Extras | None],
    device: str = "cpu",
) -> None:
    """L21: with custom functions in its stages, in any batch, split and mode, an engine gives each
    completion the tokens and captured values of an eager run by itself.

    In that run the functions have the request's extras as constants, and compute what the request
    carries from all of its tokens at each step. An aborted completion has a prefix of the tokens.

    Args:
        extras: one entry per call.
    """
    model = _on(device)
    engine = load.engine(model=stages.apply(model))
    tracks: dict[tuple[int, int], CompletionState] = {}
    run(_LAW, load, engine, extras=extras, tracks=tracks)
    check_nothing_is_left(engine)
    for index, (call, call_extras) in enumerate(zip(load.calls, extras, strict=True)):
        for sample, seed in enumerate(sample_seeds(call.sampling.seed or 0, call.sampling.n)):
            name = f"completion {sample} of call {index}"
            track = tracks[index, sample]
            _compare(name, call, track, _alone(stages, model, call, call_extras, seed))


@functools.cache
def _on(device: str) -> Model:
    """The small model on a device."""
    model = small_model()
    return attrs.evolve(
        model, params=tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, model.params)
    )


def _alone(
    stages: OwnStages | OtherAttention, model: Model, call: Call, extras: Extras | None, seed: int
) -> CompletionState:
    """The completion of a request run alone, with its extras as constants of the functions."""
    limits = EngineLimits(max_num_reqs=1, max_num_tokens=24, page_size=24, num_pages=1)
    engine = Engine(stages.apply(model, extras or {}), limits, graph="none", run_ahead=0)
    sampling = attrs.evolve(call.sampling, seed=seed, n=1, prompt_logprobs=None)
    engine.add(call.prompt, sampling, max_tokens=call.max_tokens)
    *_, output = engine
    return output.track


def _compare(name: str, call: Call, track: CompletionState, alone: CompletionState) -> None:
    whole = track.reason != "abort" or call.aborted is None
    tokens = track.token_ids
    expected = alone.token_ids
    if tokens != (expected if whole else expected[: len(tokens)]):
        raise LawViolation(f"{_LAW}: {name} is {tokens}, and alone {expected}")
    captured = track.captured
    expected_captured = alone.captured
    if whole and captured.keys() != expected_captured.keys():
        raise LawViolation(
            f"{_LAW}: {name} captures {sorted(captured)}, and alone {sorted(expected_captured)}"
        )
    for key, values in captured.items():
        reference = expected_captured[key][: len(values)]
        if len(values) != len(expected_captured[key]) and whole:
            raise LawViolation(
                f"{_LAW}: {name} captures {key} of {len(values)} tokens, and alone of"
                f" {len(expected_captured[key])}"
            )
        # Batches of other sizes may round differently. Tokens are compared exactly.
        if not torch.allclose(values[: len(reference)], reference, RTOL, ATOL):
            token = int((values[: len(reference)] - reference).abs().sum(-1).argmax())
            raise LawViolation(
                f"{_LAW}: {name} captures other values of {key} at token {token} than alone"
            )
