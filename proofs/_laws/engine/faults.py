"""L11 for faulty requests: if `Engine.add` accepts one, it breaks no step, ends only itself, and
gets no forbidden token."""

import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from weft.batches.sampling import SamplingParams
from weft.errors import RequestError, WeftError
from weft.proofs._laws.engine.completions import alone, check_nothing_is_left
from weft.proofs._strategies.engine.engines import VOCABULARY
from weft.proofs._strategies.engine.odd import MUTE, OddCall, OddLoad, OddMask
from weft.proofs.checks.difference import LawViolation
from weft.proofs.serving import check_ends
from weft.transforms.engine.engine import Engine, is_under_way, num_unfinished
from weft.transforms.engine.outputs import RequestOutput

# The largest embedding value that cannot make the logits NaN. Larger ones may overflow when
# squared.
_LARGEST_EMBEDDING = 1e9


@attrs.define
class Tally:
    """Counts of requests and their outcomes.

    Args:
        refused: requests refused by `SamplingParams` or by `add`.
        accepted: requests accepted by `add`; `masked` have a mask, `embedded` have embeddings.
        tokens: tokens generated.
        ended: completions by finish reason.
        errors: completions that ended by an error, by the kind of problem.
    """

    refused: int = 0
    accepted: int = 0
    masked: int = 0
    embedded: int = 0
    tokens: int = 0
    ended: Counter[str] = attrs.field(factory=Counter)
    errors: Counter[str] = attrs.field(factory=Counter)


def faults_end_their_own_request(load: OddLoad, tally: Tally | None = None) -> None:
    """L11: no step raises, whatever requests were accepted.

    Each completion ends once, with a reason, and one that ends by an error has a cause. Every token
    is allowed by the sampling parameters and the mask. A well-formed request in the same batches
    gets the tokens that it gets alone. At the end no page is held.

    Args:
        load: the options of an engine, and requests.
        tally: the outcomes of the requests are added to it.
    """
    tally = Tally() if tally is None else tally
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine warns of end tokens beyond the vocabulary
        engine = load.engine()
    # Without `MUTE`, which some tokenizers cannot decode: this request must not end by an error.
    careful = SamplingParams(temperature=0.0, ignore_eos=True, bad_token_ids=[MUTE])
    witness = engine.add((1, 2, 3), careful, max_tokens=5)
    calls, outputs = _run(load, engine, tally)
    check_nothing_is_left(engine)
    for (name, index), completion_outputs in outputs.items():
        last = _last(f"completion {index} of {name!r}", completion_outputs)
        if name == witness:
            expected = alone((1, 2, 3), careful, 5)
            if (last.track.token_ids, last.finish_reason) != expected:
                raise LawViolation(
                    f"L11 faults: a careful request got {last.track.token_ids}, and alone"
                    f" {expected}"
                )
            continue
        _check_said(load, calls[name], last)
        tally.tokens += len(last.track.token_ids)
        tally.ended[str(last.finish_reason)] += 1
        if last.error is not None:
            # Without the numbers that follow, so that errors of one kind are counted together.
            tally.errors[re.split(r"[:\d\[]", last.error.problem)[0]] += 1
    missing = {
        name: call for name, call in calls.items() if not any(key[0] == name for key in outputs)
    }
    if missing:
        raise LawViolation(f"L11 faults: nothing came of {missing}")


Outputs = dict[tuple[str, int], list[RequestOutput]]


def _run(load: OddLoad, engine: Engine, tally: Tally) -> tuple[dict[str, OddCall], Outputs]:
    """Run a load to its end, and return the accepted requests and the outputs of each completion."""
    calls: dict[str, OddCall] = {}
    outputs: Outputs = {}
    step = 0
    last = max(call.step for call in load.calls)
    while step <= last or num_unfinished(engine):
        check_ends("L11 faults", step - last)
        got = []
        for index, call in enumerate(load.calls):
            if call.step == step and (name := _add(engine, index, call, tally)) is not None:
                calls[name] = call
            got += [
                o
                for name, accepted in calls.items()
                if accepted is call and call.aborted == step
                for o in (engine.abort(name) if is_under_way(engine, name) else ())
            ]
        try:
            got += engine.step()
        except Exception as error:
            raise LawViolation(
                f"L11 faults: a step raised {type(error).__name__}: {error}"
            ) from error
        for output in got:
            outputs.setdefault((output.id, output.index), []).append(output)
        step += 1
    while not engine.is_idle:
        engine.step()
    return calls, outputs


def _add(engine: Engine, index: int, call: OddCall, tally: Tally) -> str | None:
    """Add a request, and return its name, or None if it was refused."""
    if call.id is None:
        name = None
    else:
        name = f"{call.id}{index}"
    options: dict[str, Any] = {
        "max_tokens": call.max_tokens,
        "priority": call.priority,
        "adapter": call.adapter,
        "mask": call.mask,
    }
    try:
        request_id = engine.add(
            call.prompt_input, SamplingParams(**call.sampling), id=name, **options
        )
    except RequestError:
        tally.refused += 1
        return None
    except Exception as error:
        raise LawViolation(f"L11 faults: add raised {type(error).__name__}: {error}") from error
    tally.accepted += 1
    tally.masked += call.mask is not None
    tally.embedded += bool(call.embeds)
    return request_id


def _last(name: str, outputs: Sequence[RequestOutput]) -> RequestOutput:
    """The output that ends a completion."""
    reasons = [output.finish_reason for output in outputs]
    if reasons[-1] not in ("stop", "length", "abort", "error") or any(reasons[:-1]):
        raise LawViolation(f"L11 faults: {name} ended by {reasons}")
    said = [token for output in outputs for token in output.token_ids]
    if said != outputs[-1].track.token_ids:
        raise LawViolation(
            f"L11 faults: {name} got {said} in parts, and {outputs[-1].track.token_ids} in all"
        )
    return outputs[-1]


def _check_said(load: OddLoad, call: OddCall, last: RequestOutput) -> None:
    """Raise LawViolation unless every token is allowed and the finish reason has a cause."""
    tokens = last.track.token_ids
    reason = last.finish_reason
    params = SamplingParams(**call.sampling)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else load.ends)}
    for count, token in enumerate(tokens):
        allowed = _allowed(params, stops, call.mask, tokens[:count])
        if token not in allowed:
            problem = f"{token} after {tokens[:count]}, where {sorted(allowed)} are allowed"
            raise LawViolation(f"L11 faults: a forbidden token: {problem}")
        if token in stops and count + 1 < len(tokens):
            raise LawViolation(f"L11 faults: {tokens} go on behind an end, of {stops}")
    causes = {
        "stop": (
            bool(stops & set(tokens[-1:]))
            or any(stop in _text(load, tokens) for stop in params.stop)
        ),
        # 24 is `max_model_len` of the drawn engines.
        "length": len(tokens) == min(call.max_tokens, 24 - len(call.prompt)),
        "abort": call.aborted is not None,
        "error": isinstance(last.error, WeftError) and _may_fail(load, call, params, stops, tokens),
    }
    if not causes[str(reason)] or (last.error is not None) != (reason == "error"):
        raise LawViolation(f"L11 faults: {tokens} ended by {reason} without a cause, {last.error}")


def _allowed(
    params: SamplingParams, stops: set[int], mask: OddMask | None, said: Sequence[int]
) -> set[int]:
    """The tokens allowed next for a request, by brute force."""
    allowed = set(range(VOCABULARY))
    if params.allowed_token_ids is not None:
        allowed &= set(params.allowed_token_ids)
    allowed -= set(params.bad_token_ids)
    if len(said) < params.min_tokens:
        allowed -= stops
    if mask is None:
        return allowed
    return allowed & _answer(mask, said)


def _answer(mask: OddMask, said: Sequence[int]) -> set[int]:
    """The tokens that a mask allows; the empty set if it raises or returns something invalid."""
    everything = set(range(VOCABULARY))
    try:
        allowed = mask(said)
        if allowed is None:
            return everything
        if isinstance(allowed, torch.Tensor):
            fits = (
                allowed.dtype == torch.int32
                and allowed.shape == (1,)
                and allowed.layout == torch.strided
            )
            return {token for token in everything if fits and int(allowed[0]) >> token & 1}
        ids = list(allowed)
    except Exception:
        return set()
    # By type, since True is an int by `isinstance`, and no token.
    if all(type(one) is int and one in everything for one in ids):
        return set(ids)
    return set()


def _may_fail(
    load: OddLoad, call: OddCall, params: SamplingParams, stops: set[int], tokens: Sequence[int]
) -> bool:
    """Whether a request with these generated tokens may end by an error: no token is allowed next,
    a token of it or its prompt cannot be decoded, or the logits may be NaN."""
    large = any(
        not math.isfinite(value) or abs(value) > _LARGEST_EMBEDDING
        for value in call.embeds.values()
    )
    mute = load.decodes == "most" and MUTE in (*call.prompt, *tokens)
    return large or mute or not _allowed(params, stops, call.mask, tokens)


def _text(load: OddLoad, tokens: Sequence[int]) -> str:
    if load.decodes == "nothing":
        return ""
    return "".join(chr(97 + token) for token in tokens)
