"""Steps of prompts within a number of seconds: measured when an engine is made, the same on all ranks."""

import operator
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs

from weft.errors import RequestError
from weft.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.engine.options import ResolvedLimits
from weft.transforms.engine.requests.step_time import step_time
from weft.transforms.pipelines.transports import Transport

_SHARES = 1, 2, 4, 8, 16, 32
"""Steps of the most tokens that one takes, and of these parts of it, are measured."""
_REPEATS = 5
"""Steps that follow a first one, which compiles and allocates."""
_DECODES = 8
_FEWER = 4
"""What a pair takes is told by so many times fewer, longer prompts of as many tokens."""
_GREEDY = SamplingParams(ignore_eos=True)


class _Engine(Protocol):
    """The parts of `weft.Engine` that are needed here."""

    limits: ResolvedLimits
    model: Model
    transport: Transport

    def add(self, prompt: list[int], sampling: SamplingParams, *, max_tokens: int) -> str: ...

    def __iter__(self) -> Iterator[Any]: ...


def limit_steps(engine: _Engine, seconds: float, captured: int) -> ResolvedLimits:
    """The limits of an idle engine, with a time for its steps, measured by prompts alone and decodes alone.

    Args:
        engine: has served nothing.
        seconds: the limit.
        captured: the most tokens of a step with prompts that has a graph. A token more may take longer: a step's
            launches then take the host's time.

    Raises:
        RequestError: a step of one page of tokens takes as long as that.
    """
    limits, page = engine.limits, engine.limits.page_size
    sizes, many, few = prompt_lengths(limits, engine.model.config.max_position_embeddings, captured)
    ones = [1] * len(few)
    own = [_step_seconds(engine, lengths) for lengths in (*sizes, many, few)]
    own += [_decode_seconds(engine, lengths) for lengths in (ones, few)]
    *steps, sooner, later = map(max, zip(*engine.transport.collect(own), strict=True))
    times = [*zip((*sizes, many, few), steps, strict=True)]
    found = step_time(seconds, times[:-2], times[-2:], (sooner, later))
    if (least := found.seconds(page)) > seconds:
        call = f"weft.EngineLimits(max_step_seconds={seconds!r})"
        raise RequestError(call, f"a step of one page of {page} tokens takes {least:.2g} s", f"{2 * least:.2g} or more")
    return attrs.evolve(limits, budget=attrs.evolve(limits.budget, step_time=found))


def prompt_lengths(
    limits: ResolvedLimits, max_positions: int, captured: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """The lengths of the prompts of each step that is measured: for several numbers of tokens as few as hold them, with
    the most that a graph has and one more; and for one number many of them, and a few of the greatest length."""
    budget, page = limits.budget, limits.page_size
    room = min(min(budget.max_pages, limits.num_pages) * page, max_positions) - 1 - _DECODES
    longest = max(1, min(budget.max_num_tokens, room))
    pages = limits.num_pages // budget.num_cohorts
    # Half of what there is room for, since a step's prompts are there until the next step has been launched.
    count = max(1, min(budget.cohort_size, pages // -(-(longest + 1 + _DECODES) // page)) // 2)
    most = min(budget.max_num_tokens, count * longest)
    few = [longest] * max(1, min(most // longest, count // _FEWER))
    wanted = *(most // share for share in _SHARES), *((captured, captured + 1) if captured else ())
    tokens = sorted({min(most, max(budget.cohort_size, size)) for size in wanted})
    many = _split(sum(few), min(_FEWER * len(few), count, sum(few)))
    return [_split(size, -(-size // longest)) for size in tokens], many, few


def _split(tokens: int, count: int) -> list[int]:
    """So many tokens as prompts of one length, or nearly so."""
    return [tokens // count + (place < tokens % count) for place in range(count)]


def _step_seconds(engine: _Engine, lengths: Sequence[int]) -> float:
    """The seconds from one step of a cohort to its next, where each has prompts of these lengths: the median."""
    limits, cohorts = engine.limits, engine.limits.budget.num_cohorts
    most = max(sum(lengths), limits.budget.cohort_size)
    engine.limits = attrs.evolve(limits, budget=attrs.evolve(limits.budget, max_num_tokens=most))
    try:
        read = _serve(engine, [*lengths] * (cohorts * (1 + _REPEATS)), 1)
    finally:
        engine.limits = limits
    ends = read[len(lengths) - 1 :: len(lengths)]
    return cohorts * statistics.median(map(operator.sub, ends[cohorts:], ends[cohorts - 1 :])) if read else 0.0


def _decode_seconds(engine: _Engine, lengths: Sequence[int]) -> float:
    """The seconds from one token of a cohort's requests to the next, after prompts of these lengths."""
    read = _serve(engine, [*lengths] * engine.limits.budget.num_cohorts, 1 + _DECODES)
    return (read[-1] - read[0]) / _DECODES if read else 0.0


def _serve(engine: _Engine, lengths: Sequence[int], max_tokens: int) -> list[float]:
    """When the host read each token of prompts of these lengths, in seconds."""
    draw, vocabulary = random.Random(str(lengths)), range(engine.model.config.vocab_size)
    for length in lengths:
        engine.add(draw.choices(vocabulary, k=length), _GREEDY, max_tokens=max_tokens)
    return [time.perf_counter() for _ in engine]
