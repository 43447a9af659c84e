"""Steps with prompts keep within a number of seconds: what fits, what is measured, and what an engine makes of it."""

from typing import Any
from unittest import mock

import pytest
from hypothesis import assume, given, strategies as st

from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.requests.step_time import StepTime, fit, pairs
from weft.transforms.engine.scheduler import schedule
from weft.transforms.pipelines.transports.local import Local

_SMALL = st.floats(0, 1e-3) | st.just(0.0)
_PROMPTS = [[(7 * row + place) % 200 for place in range(40 + 9 * row)] for row in range(5)]
_SECONDS = "weft.transforms.engine.step_limit._seconds"


@given(_SMALL, _SMALL, st.floats(0, 1), st.integers(0, 500))
def test_the_most_tokens_fit_and_one_more_does_not(per_token: float, per_pair: float, limit: float, past: int) -> None:
    time = StepTime(limit, 0.0, per_token, per_pair)
    most = time.most_tokens(time.room, past)
    assert most >= 0
    if most:
        assert time.seconds(most, past) <= limit
    if limit and most < 2**31:
        assert time.seconds(most + 1, past) >= limit * (1 - 1e-12)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 20))
def test_the_pairs_of_chunks_are_those_of_the_whole(chunks: list[int], past: int) -> None:
    starts = [past + sum(chunks[:place]) for place in range(len(chunks))]
    assert sum(map(pairs, chunks, starts)) == pairs(sum(chunks), past)
    assert pairs(chunks[0], past) == sum(past + place + 1 for place in range(chunks[0]))


@given(st.floats(1e-4, 1e-1), _SMALL, st.floats(0, 1e-6))
def test_a_line_is_found_again(fixed: float, per_token: float, per_pair: float) -> None:
    assume(per_token > 1e-7)
    sizes = 256, 1024, 2048, 4096
    found = fit([(n, fixed + per_token * n + per_pair * pairs(n, 0)) for n in sizes], 1.0)
    for tokens in (1, 300, 3000):
        true = fixed + per_token * tokens + per_pair * pairs(tokens, 0)
        assert found.fixed + found.seconds(tokens, 0) == pytest.approx(true, rel=1e-3)


def test_where_the_host_bounds_small_steps_nothing_is_negative() -> None:
    found = fit([(512, 0.012), (2048, 0.012), (4096, 0.0125), (8192, 0.019)], 0.015)
    assert min(found.fixed, found.per_token, found.per_pair) >= 0
    for tokens, took in ((512, 0.012), (2048, 0.012), (8192, 0.019)):
        assert found.fixed + found.seconds(tokens, 0) == pytest.approx(took, rel=0.15)


def _served(engine: Engine) -> tuple[dict[str, list[int]], list[Any]]:
    for prompt in _PROMPTS:
        engine.add(prompt, max_tokens=4)
    works: list[Any] = []

    def noted(*args: Any) -> Any:
        host, more = schedule(*args)
        works.extend(more)
        return host, more

    with mock.patch("weft.transforms.engine.engine.schedule", noted):
        outputs = {output.id: [*output.token_ids] for output in engine if output.finish_reason}
    return outputs, works


def test_an_engine_has_shorter_steps_and_the_same_tokens() -> None:
    model = load(DEMO, "cpu")
    limits = EngineLimits(max_num_reqs=4, max_step_seconds=0.05)
    with mock.patch(_SECONDS, lambda engine, tokens: 0.01 + 0.0005 * tokens + 1e-5 * pairs(tokens, 0)):
        engine = Engine(model, limits, graph="none", seed=0)
    assert engine.stats().tokens == 0
    time = engine.limits.budget.step_time
    assert time is not None
    assert (time.per_token, time.per_pair) == (pytest.approx(0.0005), pytest.approx(1e-5))
    tokens, works = _served(engine)
    took = [
        time.fixed + sum(map(time.seconds, map(len, work.token_ids), work.starts)) for work in works if work.token_ids
    ]
    assert max(took) <= 0.05
    assert min(took[:3]) > 0.04, "while there is enough to do, no step is much shorter than it may be"
    other, fewer = _served(Engine(model, EngineLimits(max_num_reqs=4), graph="none", seed=0))
    assert tokens == other
    assert len(fewer) < len(works)


def test_steps_are_measured() -> None:
    engine = Engine(load(DEMO, "cpu"), EngineLimits(max_num_reqs=2, max_step_seconds=60.0), graph="none")
    time = engine.limits.budget.step_time
    assert time is not None
    assert 0 < time.fixed + time.seconds(500, 0) < 60
    assert engine.is_idle
    assert engine.add([1, 2], max_tokens=1) == "request 0"


def test_ranks_keep_the_slowest_ones_time() -> None:
    class Two(Local):
        def collect(self, value: Any) -> list[Any]:
            return [[0.03, 0.01, 0.02, 0.02], value] if isinstance(value, list) else [value]

    own = dict(zip(sizes := [31, 127, 255, 511], (0.01, 0.02, 0.025, 0.04), strict=True))
    with mock.patch(_SECONDS, lambda _, tokens: own[tokens]):
        limits = EngineLimits(max_num_reqs=2, max_step_seconds=0.1)
        engine = Engine(load(DEMO, "cpu"), limits, transport=Two(), graph="none")
    slowest = fit(zip(sizes, (0.03, 0.02, 0.025, 0.04), strict=True), 0.1)
    assert engine.limits.budget.step_time == slowest


def test_what_cannot_be_kept_is_refused() -> None:
    model = load(DEMO, "cpu")
    said = r"max_step_seconds=0.5\)\n  saw: a step of one page of 16 tokens takes 1 s"
    with mock.patch(_SECONDS, return_value=1.0), pytest.raises(RequestError, match=said):
        Engine(model, EngineLimits(max_num_reqs=2, max_step_seconds=0.5), graph="none")
    wrong: list[Any] = [0, -1.0, float("nan"), float("inf"), "1"]
    for value in wrong:
        with pytest.raises(RequestError, match="a positive number of seconds, or None"):
            EngineLimits(max_step_seconds=value)
