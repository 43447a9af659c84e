"""Steps of prompts within a number of seconds: measured when an engine is made, the same on all ranks."""

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any, Protocol

import attrs

from weft.errors import RequestError
from weft.stages.model import Model
from weft.transforms.engine.options import ResolvedLimits
from weft.transforms.engine.requests.step_time import fit
from weft.transforms.pipelines.transports import Transport

_SHARES = 1, 2, 4, 16
"""Prompts of the most tokens that one step takes, and of these parts of it, are measured."""
_REPEATS = 3
"""After a first one, which compiles and allocates."""


class _Engine(Protocol):
    """The parts of `weft.Engine` that are needed here."""

    limits: ResolvedLimits
    model: Model
    transport: Transport

    def add(self, prompt: list[int], *, max_tokens: int) -> str: ...

    def __iter__(self) -> Iterator[Any]: ...


def limit_steps(engine: _Engine, seconds: float) -> ResolvedLimits:
    """The limits of an idle engine, with a time for its steps, measured by steps of one prompt each.

    Raises:
        RequestError: a step of one page of tokens takes as long as that.
    """
    limits, page = engine.limits, engine.limits.page_size
    kept = min(limits.budget.max_pages, limits.num_pages) * page
    longest = min(limits.budget.max_num_tokens, kept - 1, engine.model.config.max_position_embeddings - 1)
    sizes = sorted({max(1, longest // share) for share in _SHARES})
    ranks = engine.transport.collect([_seconds(engine, tokens) for tokens in sizes])
    found = fit(zip(sizes, map(max, *ranks, [0.0] * len(sizes)), strict=True), seconds)
    if found.most_tokens(found.room, context=0) < page:
        call, least = f"weft.EngineLimits(max_step_seconds={seconds!r})", found.fixed + found.seconds(page, 0)
        raise RequestError(call, f"a step of one page of {page} tokens takes {least:.2g} s", f"{2 * least:.2g} or more")
    return attrs.evolve(limits, budget=attrs.evolve(limits.budget, step_time=found))


def _seconds(engine: _Engine, tokens: int) -> float:
    """The seconds from the launch of a step with one prompt of so many tokens until its token is read, the median."""
    draw, vocabulary, times = random.Random(tokens), range(engine.model.config.vocab_size), list[float]()
    for _ in range(1 + _REPEATS):
        engine.add(draw.choices(vocabulary, k=tokens), max_tokens=1)
        start = time.perf_counter()
        for _ in engine:
            pass
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
