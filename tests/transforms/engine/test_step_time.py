"""Steps with prompts keep within a number of seconds: what fits, what is measured, and what an
engine makes of it."""

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from time import sleep
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from weft.errors import RequestError
from weft.ops.requests import LAST_TOKEN
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms.engine import step_limit
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.requests.step_time import StepTime, pairs_of, step_time
from weft.transforms.engine.scheduler import schedule
from weft.transforms.engine.step_limit import prompt_lengths
from weft.transforms.engine.steps.executor import PipelineExecutor, StepExecutor
from weft.transforms.pipelines.transports.local import Local

_PROMPTS = [[(7 * row + place) % 200 for place in range(40 + 9 * row)] for row in range(5)]
_STEPS, _DECODES = (
    f"weft.transforms.engine.step_limit._{name}_seconds" for name in ("step", "decode")
)
_COSTS = st.floats(0, 1e-4) | st.just(0.0)


@st.composite
def _step_times(draw: st.DrawFn) -> StepTime:
    sizes = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=5)))
    seconds = itertools.accumulate(draw(st.lists(_COSTS, min_size=len(sizes), max_size=len(sizes))))
    return StepTime(
        draw(st.floats(0, 0.01)),
        tuple(zip(sizes, seconds, strict=True)),
        draw(_COSTS),
        draw(_COSTS),
    )


@given(
    _step_times(), st.integers(0, 300), st.integers(0, 100), st.integers(0, 50), st.integers(0, 9)
)
def test_the_most_tokens_fit_and_one_more_does_not(
    time: StepTime, num_tokens: int, context: int, tokens: int, reads: int
) -> None:
    most = time.most_tokens(num_tokens, context, tokens, 7.0, reads)
    fits = [
        time.seconds(tokens + n, 7.0 + pairs_of(n, context), reads) <= time.limit
        for n in range(1, num_tokens + 1)
    ]
    assert most == fits.index(False) if False in fits else most == num_tokens


@given(_step_times(), st.integers(0, 500))
def test_more_tokens_never_take_less(time: StepTime, tokens: int) -> None:
    assert time.seconds(tokens) <= time.seconds(tokens + 1) * (1 + 1e-12)
    for measured, seconds in time.measured:
        assert time.seconds(measured, 3.0, 2) == pytest.approx(
            seconds + 3 * time.per_pair + 2 * time.per_read
        )


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 20))
def test_the_pairs_of_chunks_are_those_of_the_whole(chunks: list[int], past: int) -> None:
    starts = [past + sum(chunks[:place]) for place in range(len(chunks))]
    assert sum(map(pairs_of, chunks, starts)) == pairs_of(sum(chunks), past)
    assert pairs_of(chunks[0], past) == sum(past + place + 1 for place in range(chunks[0]))


def _curve(tokens: int) -> float:
    """A host's share, a graph's and, with more than 1,000 tokens, eager steps."""
    return max(0.004, 1e-5 * tokens) + 0.003 * (tokens > 1000)


def test_what_is_measured_is_found_again() -> None:
    def took(lengths: list[int]) -> float:
        return _curve(sum(lengths)) + 1e-8 * sum(pairs_of(n, 0) for n in lengths)

    short = [[16] * (2**power) for power in range(2, 8)]
    long = [1024, 1024]
    fitted = step_time(
        1.0,
        [(n, took(n)) for n in short],
        [(short[-1], took(short[-1])), (long, took(long))],
        (0.004, 0.004 + 2046e-7),
    )
    assert fitted.per_pair == pytest.approx(1e-8)
    assert fitted.per_read == pytest.approx(1e-7)
    for lengths in (*short, long, [500], [700, 300, 5], [1500]):
        seconds = fitted.seconds(sum(lengths), sum(pairs_of(n, 0) for n in lengths))
        assert seconds == pytest.approx(
            took(lengths), rel=0.3 if 1000 < sum(lengths) < 2000 else 0.1
        )


def test_noise_makes_no_step_slower_than_a_larger_one() -> None:
    short = [([4], 0.02), ([4, 4], 0.01), ([8, 8], 0.03)]
    fitted = step_time(1.0, short, [short[-1], ([16], 0.025)], (0.005, 0.004))
    assert fitted == StepTime(1.0, ((4, 0.01), (8, 0.01), (16, 0.03)))
    assert step_time(1.0, short, [short[-1], ([8, 8], 0.05)], (0.005, 0.005)).per_pair == 0


def test_a_long_step_that_was_slow_once_makes_no_step_free() -> None:
    """As it was seen: 512 tokens took twice as long as before, and all steps would have taken no
    time."""
    steps = [
        ([16], 0.00173),
        ([32], 0.00169),
        ([64], 0.00188),
        ([128], 0.00222),
        ([256], 0.00411),
        ([512], 0.01182),
    ]
    fitted = step_time(0.0001, steps, (([256, 256], 0.00608), ([512], 0.01231)), (0.00102, 0.00102))
    assert min(seconds for _, seconds in fitted.measured) >= 0.89 * 0.00169
    for lengths, took in steps:
        assert fitted.seconds(sum(lengths), pairs_of(sum(lengths), 0)) == pytest.approx(
            took, rel=0.25
        )


def test_a_limit_is_measured_again_before_it_is_refused() -> None:
    slow = iter([9.0] * 9)
    with _taking(lambda lengths: next(slow, 0.001), lambda lengths: 0.001):
        engine = Engine(
            load(DEMO, "cpu"), EngineLimits(max_num_reqs=2, max_step_seconds=0.5), graph="none"
        )
    assert engine.limits.budget.step_time is not None
    assert engine.limits.budget.step_time.seconds(500) < 0.01


def test_a_run_of_several_steps_that_took_no_longer_than_one_counts_as_a_whole() -> None:
    engine = Engine(load(DEMO, "cpu"), EngineLimits(max_num_reqs=2), graph="none")
    with mock.patch("weft.transforms.engine.step_limit._serve", return_value=(0.1, 0.6)):
        assert step_limit._step_seconds(engine, random.Random(0), [5]) == pytest.approx(0.1)


@contextlib.contextmanager
def _noted() -> Iterator[list[Any]]:
    """The works that are scheduled in the meantime."""
    works: list[Any] = []

    def noted(*args: Any) -> Any:
        host, more = schedule(*args)
        works.extend(more)
        return host, more

    with mock.patch("weft.transforms.engine.engine.schedule", noted):
        yield works


def _served(engine: Engine) -> tuple[dict[str, list[int]], list[Any]]:
    for prompt in _PROMPTS:
        engine.add(prompt, max_tokens=4)
    with _noted() as works:
        outputs = {output.id: [*output.token_ids] for output in engine if output.finish_reason}
    return outputs, works


@contextlib.contextmanager
def _taking(
    step: Callable[[list[int]], float], decode: Callable[[list[int]], float]
) -> Iterator[None]:
    with (
        mock.patch(_STEPS, lambda _, __, lengths: step(lengths)),
        mock.patch(_DECODES, lambda _, __, lengths: decode(lengths)),
    ):
        yield


def test_an_engine_has_shorter_steps_and_the_same_tokens() -> None:
    model = load(DEMO, "cpu")
    limits = EngineLimits(max_num_reqs=4, max_step_seconds=0.05)
    step, decode = (
        lambda lengths: 0.01 + sum(0.0005 * n + 1e-5 * pairs_of(n, 0) for n in lengths),
        lambda lengths: 1e-5 * (sum(lengths) - len(lengths)),
    )
    with _taking(step, decode):
        engine = Engine(model, limits, graph="none", seed=0)
    assert engine.stats().tokens == 0
    time = engine.limits.budget.step_time
    assert time is not None
    assert time.seconds(503) - time.seconds(251) == pytest.approx(0.0005 * 252)
    assert (time.per_pair, time.per_read) == (pytest.approx(1e-5), pytest.approx(1e-5))
    tokens, works = _served(engine)
    prompts = [work for work in works if work.token_ids]
    took = [_of_work(time, work) for work in prompts]
    page = engine.limits.page_size
    assert max(took) <= 0.06
    assert all(
        one <= 0.05 or max(map(len, work.token_ids)) <= page
        for one, work in zip(took, prompts, strict=True)
    )
    assert min(took[:3]) > 0.04, (
        "while there is enough to do, no step is much shorter than it may be"
    )
    other, fewer = _served(Engine(model, EngineLimits(max_num_reqs=4), graph="none", seed=0))
    assert tokens == other
    assert len(fewer) < len(works)


def _of_work(time: StepTime, work: Any) -> float:
    """The seconds of a step, of which requests without tokens of their own are decodes."""
    lengths = [*map(len, work.token_ids)]
    decodes = [tokens == (LAST_TOKEN,) for tokens in work.token_ids]
    pairs = sum(
        pairs_of(n, at)
        for n, at, is_one in zip(lengths, work.starts, decodes, strict=True)
        if not is_one
    )
    return time.seconds(sum(lengths), pairs, sum(itertools.compress(work.starts, decodes)))


@pytest.mark.slow
def test_steps_are_measured() -> None:
    engine = Engine(
        load(DEMO, "cpu"), EngineLimits(max_num_reqs=2, max_step_seconds=60.0), graph="none"
    )
    time = engine.limits.budget.step_time
    assert time is not None
    assert 0 < time.seconds(500) < 60
    assert engine.is_idle
    assert engine.add([1, 2], max_tokens=1) == "request 0"


@pytest.mark.slow
@pytest.mark.one_of(1, 4)
@pytest.mark.parametrize("options", [{}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("graph", ["none", "full_and_piecewise"])
def test_each_measured_step_has_all_of_its_prompts(graph: str, options: dict[str, Any]) -> None:
    limits = EngineLimits(
        max_num_reqs=12, max_model_len=100, max_num_tokens=400, max_step_seconds=60.0
    )
    with (
        mock.patch("weft.transforms.engine.steps.classes._MOST_CAPTURED_IF_SMALL", 64),
        _noted() as works,
    ):
        engine = Engine(load(DEMO, "cpu"), limits, graph=graph, **options)
    budget = engine.limits.budget
    captured = 0 if graph == "none" else 64
    counts = Counter(tuple(map(len, work.token_ids)) for work in works if work.token_ids)
    sizes, many, few = prompt_lengths(engine.limits, 512, captured, run_ahead=1)
    page, *_ = sizes
    times = {
        sum(query_lens): 3 if query_lens == page and budget.cohort_size > 16 else 15
        for query_lens in (*sizes, many, few)
    }
    measured = Counter(
        tuple(query_lens)
        for query_lens in (*sizes, many, few)
        for _ in range(times[sum(query_lens)])
    )
    measured += Counter([tuple(few), (1,) * len(few)] * 2)
    assert counts == {lengths: budget.num_cohorts * count for lengths, count in measured.items()}
    totals = {16, 9, 19, 38, 77, 154, 309} if options else {16, 12, 25, 50, 100, 200, 400}
    assert [*map(sum, sizes)] == sorted(totals | ({64, 65} if captured else set()))
    assert few == [103] * max(1, budget.cohort_size // 8)
    assert (sum(many), len(many)) == (sum(few), min(4, budget.cohort_size // 2))
    decodes = [work for work in works if not work.token_ids]
    assert len(decodes) == 2 * 2 * 8 * budget.num_cohorts
    stats = engine.stats()
    assert (stats.pages_kept, stats.prefix_tokens, stats.ended, stats.steps, stats.tokens) == (
        0,
        0,
        {},
        {},
        0,
    )


@pytest.mark.slow
def test_no_measured_prompt_is_found_in_the_prefix_cache() -> None:
    limits = EngineLimits(
        max_num_reqs=16, max_model_len=200, max_num_tokens=64, max_step_seconds=60.0
    )
    with _noted() as works:
        engine = Engine(load(DEMO, "cpu"), limits, graph="none")
    sizes, many, few = prompt_lengths(engine.limits, 512, 0, run_ahead=1)
    assert few in sizes, "measured twice"
    taken = {sum(map(len, work.token_ids)) for work in works if work.token_ids}
    assert taken == {sum(query_lens) for query_lens in (*sizes, many, few, [1] * len(few))}


_SLEEP = 0.01


@pytest.mark.one_of(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "cohorts"),
    [
        ({}, 1),
        ({"run_ahead": 4}, 1),
        ({"num_cohorts": 3}, 3),
        ({"pipeline": 2}, 2),
        ({"pipeline": 2, "num_cohorts": 1}, 1),
    ],
    ids=str,
)
def test_the_time_of_a_step_is_that_of_all_cohorts(options: dict[str, Any], cohorts: int) -> None:
    """Each step sleeps, so that it cannot take less."""

    def slowly(run: Any) -> Any:
        def called(self: Any, works: Any) -> Any:
            sleep(_SLEEP * len(works))
            return run(self, works)

        return called

    kinds = StepExecutor, PipelineExecutor
    limits = EngineLimits(
        max_num_reqs=16,
        max_model_len=64,
        max_num_tokens=64,
        num_cohorts=options.pop("num_cohorts", None),
        max_step_seconds=60.0,
    )
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "__call__", slowly(kind.__call__)))
        engine = Engine(load(DEMO, "cpu"), limits, graph="none", **options)
    time = engine.limits.budget.step_time
    assert engine.limits.budget.num_cohorts == cohorts
    assert time is not None
    assert min(seconds for _, seconds in time.measured) >= 0.9 * _SLEEP * cohorts


@pytest.mark.one_of(6, 2)
@pytest.mark.parametrize(
    "sizes",
    [(2, 1, 9), (3, 1, 3), (10, 16, None), (17, 16, 2), (64, 16, 4)],
    ids=["2 tokens", "3 pages of 1", "10 tokens", "2 pages", "as many as a step has"],
)
def test_small_limits_are_measured_too(sizes: tuple[int, int, int | None]) -> None:
    max_model_len, page_size, num_pages = sizes
    size_options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "page_size": page_size,
        "num_pages": num_pages,
    }
    limits = EngineLimits(max_num_reqs=4, max_num_tokens=64, max_step_seconds=60.0, **size_options)
    engine = Engine(load(DEMO, "cpu"), limits, graph="none")
    assert engine.limits.budget.step_time is not None
    engine.add([5], max_tokens=1)
    assert len([*engine]) == 1


def test_ranks_keep_the_slowest_ones_time() -> None:
    class Two(Local):
        def collect(self, value: Any) -> list[Any]:
            if not isinstance(value, list):
                return [value]
            # Its decodes after long prompts are slower
            return [
                [*value[:-1], value[-1] + 0.01],
                value,
            ]

    with _taking(lambda lengths: 0.01 + 1e-4 * sum(lengths), lambda lengths: 0.01):
        limits = EngineLimits(max_num_reqs=2, max_step_seconds=0.5)
        engine = Engine(load(DEMO, "cpu"), limits, transport=Two(), graph="none")
    assert engine.limits.budget.step_time is not None
    measured = engine.limits.budget.step_time.measured
    assert [tokens for tokens, _ in measured] == [15, 16, 31, 62, 125, 251, 503]
    assert [seconds for _, seconds in measured] == pytest.approx(
        [0.01 + 1e-4 * tokens for tokens, _ in measured]
    )
    assert engine.limits.budget.step_time.per_read == pytest.approx(0.01 / 502)


def test_what_cannot_be_kept_is_refused() -> None:
    model = load(DEMO, "cpu")
    said = r"max_step_seconds=0.5\)\n  saw: a step of one page of 16 tokens takes 1 s"
    with _taking(lambda _: 1.0, lambda _: 1.0), pytest.raises(RequestError, match=said):
        Engine(model, EngineLimits(max_num_reqs=2, max_step_seconds=0.5), graph="none")
    wrong: list[Any] = [0, True, -1.0, float("nan"), float("inf"), "1"]
    for value in wrong:
        with pytest.raises(RequestError, match="a positive number of seconds, or None"):
            EngineLimits(max_step_seconds=value)
