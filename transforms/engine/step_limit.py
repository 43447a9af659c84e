"""Limits the seconds of steps with prompts, from measurements when an engine is made; the result is
the same on all ranks."""

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs

from weft.batches.sampling import SamplingParams
from weft.errors import RequestError
from weft.stages.model import Model
from weft.transforms.engine.options import ResolvedLimits
from weft.transforms.engine.requests.step_time import step_time
from weft.transforms.pipelines.transports import Transport

# Measured are steps of the most tokens, divided by each of these numbers.
_SHARES = 1, 2, 4, 8, 16, 32
# The number of steps by which the run of several steps is longer than the run of one.
_REPEATS = 5
# The number of runs of several steps, and of decodes, of which the fastest counts; and the number
# of full measurements before a limit is refused. Another process may slow down any one of them.
_TRIES = 2
# The most decode steps that are measured after a step of prompts.
_DECODES = 8
# To find the cost of a pair, many short prompts are compared with this many times fewer, longer
# ones.
_FEWER = 4
_GREEDY = SamplingParams(ignore_eos=True)


class _Engine(Protocol):
    """The parts of `weft.Engine` that are needed here."""

    limits: ResolvedLimits
    model: Model
    transport: Transport
    run_ahead: int

    def add(self, prompt: list[int], sampling: SamplingParams, *, max_tokens: int) -> str: ...

    def __iter__(self) -> Iterator[Any]: ...

    def reset_prefix_cache(self) -> int: ...


def limit_steps(engine: _Engine, seconds: float, captured: int) -> ResolvedLimits:
    """The limits of an idle engine, with an estimate of its steps' time (`step_time`), measured on
    prompts alone and on decodes alone.

    Args:
        engine: one that has served nothing yet.
        seconds: the limit.
        captured: the most tokens of a step with prompts that has a graph. One more token can take
            much longer, since the host then launches each kernel of the step.

    Raises:
        RequestError: a step of one page of tokens takes longer than the limit.
    """
    limits = engine.limits
    page = engine.limits.page_size
    draw = random.Random(0)
    sizes, many, few = prompt_lengths(
        limits, engine.model.config.max_position_embeddings, captured, engine.run_ahead
    )
    for _ in range(_TRIES):
        local_seconds = [_step_seconds(engine, draw, lengths) for lengths in (*sizes, many, few)]
        local_seconds += [
            _decode_seconds(engine, draw, lengths) for lengths in ([1] * len(few), few)
        ]
        # The slowest rank counts, and all ranks get the same estimate.
        *steps, sooner, later = map(max, zip(*engine.transport.collect(local_seconds), strict=True))
        # The random prompts must not stay in the cache.
        engine.reset_prefix_cache()
        times = [*zip((*sizes, many, few), steps, strict=True)]
        estimate = step_time(seconds, times[:-2], times[-2:], (sooner, later))
        if (least := estimate.seconds(page)) <= seconds:
            return attrs.evolve(limits, budget=attrs.evolve(limits.budget, step_time=estimate))
    call = f"weft.EngineLimits(max_step_seconds={seconds!r})"
    raise RequestError(
        call, f"a step of one page of {page} tokens takes {least:.2g} s", f"{2 * least:.2g} or more"
    )


def prompt_lengths(
    limits: ResolvedLimits, max_positions: int, captured: int, run_ahead: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """The lengths of the prompts of each measured step. The first list is for several numbers of
    tokens, among them the most that a graph has and one more, each in as few prompts as can hold
    them. The other two have one number of tokens in many short prompts, and in a few of the
    greatest length."""
    budget = limits.budget
    page = limits.page_size
    room = _most_positions(limits, max_positions)
    longest = max(1, min(budget.max_num_tokens, room - 1 - _DECODES))
    pages = limits.num_pages // budget.num_cohorts
    # The prompts of a step hold their pages until it is read, and so do those of the steps that run
    # ahead.
    count = min(budget.cohort_size, pages // -(-min(room, longest + 1 + _DECODES) // page)) // (
        1 + run_ahead
    )
    most = min(budget.max_num_tokens, max(1, count) * longest)
    few = [longest] * max(1, min(most // longest, count // _FEWER))
    candidate_sizes = (
        min(page, longest),
        *(most // share for share in _SHARES),
        *((captured, captured + 1) if captured else ()),
    )
    tokens = sorted({min(most, max(1, size)) for size in candidate_sizes})
    many = _split(sum(few), max(1, min(_FEWER * len(few), count, sum(few))))
    return [_split(size, -(-size // longest)) for size in tokens], many, few


def _most_positions(limits: ResolvedLimits, max_positions: int) -> int:
    """The most tokens of a request."""
    return min(min(limits.budget.max_pages, limits.num_pages) * limits.page_size, max_positions)


def _split(tokens: int, count: int) -> list[int]:
    """`count` prompts of nearly equal lengths, `tokens` in all."""
    return [tokens // count + (place < tokens % count) for place in range(count)]


def _step_seconds(engine: _Engine, draw: random.Random, lengths: Sequence[int]) -> float:
    """The seconds from one step of a cohort to its next, if each has prompts of these lengths: the
    extra time of a run of several steps over a run of one, per step. A step of fewer tokens than a
    cohort has requests is measured alone."""
    limits = engine.limits
    cohorts = engine.limits.budget.num_cohorts
    most = max(sum(lengths), limits.budget.cohort_size)
    # So that a step takes exactly these prompts; a budget has at least a token for each request.
    engine.limits = attrs.evolve(limits, budget=attrs.evolve(limits.budget, max_num_tokens=most))
    try:
        _, *alone = (_serve(engine, draw, [*lengths] * cohorts, 1)[1] for _ in range(3))
        if most > sum(lengths):
            return min(alone)
        several = min(
            _serve(engine, draw, [*lengths] * (cohorts * (1 + _REPEATS)), 1)[1]
            for _ in range(_TRIES)
        )
    finally:
        engine.limits = limits
    more = several - min(alone)
    # Noise can make the run of one step the slower one.
    if more > 0:
        return more / _REPEATS
    return several / (1 + _REPEATS)


def _decode_seconds(engine: _Engine, draw: random.Random, lengths: Sequence[int]) -> float:
    """The seconds from one token to the next of a cohort's requests, after prompts of these
    lengths; 0 if requests have no room for more tokens."""
    room = _most_positions(engine.limits, engine.model.config.max_position_embeddings)
    count = max(0, min(_DECODES, room - 1 - max(lengths)))
    prompts = [*lengths] * engine.limits.budget.num_cohorts
    runs = [_serve(engine, draw, prompts, 1 + count) for _ in range(_TRIES)]
    if count:
        return min(last - first for first, last in runs) / count
    return 0.0


def _serve(
    engine: _Engine, draw: random.Random, lengths: Sequence[int], max_tokens: int
) -> tuple[float, float]:
    """The seconds from the launch until the host has read the first and the last token of prompts
    of these lengths."""
    vocabulary = range(engine.model.config.vocab_size)
    for length in lengths:
        engine.add(draw.choices(vocabulary, k=length), _GREEDY, max_tokens=max_tokens)
    start = time.perf_counter()
    first = None
    for _ in engine:
        if first is None:
            first = time.perf_counter()
    end = time.perf_counter()
    return (end if first is None else first) - start, end - start
