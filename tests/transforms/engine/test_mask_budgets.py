"""Masks that take their time: the request ends, alone, on all ranks; by a clock that the masks
themselves move."""

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import attrs
import pytest
from hypothesis import example, given, strategies as st

from weft.batches.sampling import SamplingParams, for_request
from weft.errors import RequestError
from weft.proofs._laws.engine.completions import alone
from weft.proofs._strategies.engine.engines import Half, small_model
from weft.transforms.engine import outputs as outputs_module
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.outputs import MaskClock, OutputProcessor, RequestOutput
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.requests.mask_budget import MaskBudget
from weft.transforms.engine.steps.step import Edits, Work
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.launch import launch

SMALL = EngineLimits(max_num_reqs=4, max_num_tokens=16, max_model_len=24, page_size=4, num_pages=24)
GREEDY = SamplingParams(temperature=0.0)
BUDGET = MaskBudget(step_seconds=1.0, burst_seconds=4.0)


class Clock:
    """The time that masks have taken."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def mask(
        self, seconds: Callable[[int], float], budget: MaskBudget | None = BUDGET
    ) -> "SlowMask":
        """A mask that takes so long after so many tokens."""
        return SlowMask(self, seconds, budget)


@attrs.frozen(eq=False)
class SlowMask:
    """A mask that moves the clock."""

    clock: Clock
    seconds: Callable[[int], float]
    budget: MaskBudget | None

    def __call__(self, said: Sequence[int]) -> list[int]:
        self.clock.seconds += self.seconds(len(said))
        return [7, 8]


@pytest.fixture(scope="module")
def clock() -> Any:
    fake_clock = Clock()
    with mock.patch.object(MaskClock, "now", side_effect=lambda: fake_clock.seconds):
        yield fake_clock


def ended(engine: Engine) -> dict[tuple[str, int], RequestOutput]:
    return {
        (output.id, output.index): output for output in engine if output.finish_reason is not None
    }


def expected_end(
    seconds: Sequence[float], n: int, num_other_requests: int, budget: MaskBudget
) -> int | None:
    """After how many tokens a request ends whose `n` masks take so long at each; None: it does not."""
    requests = 1 + num_other_requests
    debt = 0.0
    for count, each in enumerate(seconds):
        debt = max(0.0, debt + n * each - budget.step_seconds / requests)
        if debt > max(budget.burst_seconds / requests, budget.step_seconds):
            return count
    return None


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]), min_size=8, max_size=8),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 1]),
    st.sampled_from([1, 3]),
)
@example([1.0] * 8, 1, 0, 1)
@example([2.0] * 8, 3, 0, 3)
def test_the_masks_of_all_completions_of_a_request_share_a_budget(
    clock: Clock, seconds: list[float], n: int, num_other_requests: int, pipeline: int
) -> None:
    """Against a loop over the steps, one token each."""
    engine = Engine(small_model(), SMALL, graph="none", pipeline=pipeline)
    sampling = SamplingParams(temperature=1.0, seed=1, n=n)
    engine.add(
        [1, 2], sampling, max_tokens=8, id="odd", mask=clock.mask(lambda count: seconds[count])
    )
    if num_other_requests:
        engine.add([1, 5], GREEDY, max_tokens=8, id="quick", mask=clock.mask(lambda _: 0.0))
    engine.add([3, 4], GREEDY, max_tokens=8, id="good")
    outputs = ended(engine)
    assert outputs["good", 0].track.token_ids == alone((3, 4), GREEDY, 8)[0]
    assert engine.stats().pages_held == 0
    if num_other_requests:
        assert outputs["quick", 0].finish_reason == "length"
    reasons = {outputs["odd", index].finish_reason for index in range(n)}
    assert len(reasons) == 1, "all of its completions end"
    if n == 1 and pipeline == 1:  # else completions begin in different steps
        count = expected_end(seconds, n, num_other_requests, BUDGET)
        assert reasons == ({"length"} if count is None else {"error"})
        assert len(outputs["odd", 0].track.token_ids) == (8 if count is None else count)
    elif n * sum(seconds) <= BUDGET.share(1 + num_other_requests).burst_seconds:
        assert reasons == {"length"}
    elif min(seconds) * n > BUDGET.step_seconds + BUDGET.burst_seconds:
        assert reasons == {"error"}


def test_the_error_says_which_masks_and_how_long(clock: Clock) -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    engine.add([1, 2], GREEDY, max_tokens=8, id="odd", mask=clock.mask(lambda _: 3.0))
    error = ended(engine)["odd", 0].error
    assert isinstance(error, RequestError)
    assert error.call == "the masks of request 'odd', after 2 tokens"
    assert (
        error.problem
        == "its masks took 3 s in this step and were 4 s over in earlier ones; allowed: 1 s a step,"
        " 4 s over in total"
    )
    assert error.instead.startswith(
        "a grammar with fewer repetitions within repetitions, fewer completions, or"
    )


def test_a_mask_without_a_budget_takes_any_time(clock: Clock) -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    engine.add([1, 2], max_tokens=3, id="slow", mask=clock.mask(lambda _: 1e9, None))
    assert ended(engine)["slow", 0].finish_reason == "length"


def processor(mask: SlowMask) -> OutputProcessor:
    """A rank's outputs, of one request with two completions."""
    output_processor = OutputProcessor(None, 12)
    params = for_request(GREEDY, (), 0)
    requests = [Request(name, (1, 2), 4, params, is_masked=True) for name in ("a", "a[1]")]
    output_processor.add("a", requests, 0, mask)
    output_processor.add(
        "b", [Request("b", (1, 2), 4, params, is_masked=True)], 0, mask.clock.mask(lambda _: 0.0)
    )
    return output_processor


def test_completions_of_one_step_count_together(clock: Clock) -> None:
    """Two masks of 1.5 s are 3 s. The request's share is 0.5 s and 2 s more: one of them would not
    be too much."""
    outputs = processor(clock.mask(lambda _: 1.5))
    work = Work(0, Edits(), ("a", "b", "a[1]"), (0, 1, 2), (), (True,) * 3, None)
    _, failed = outputs.apply_masks([work], lambda _: None)
    assert [*failed] == ["a", "a[1]"]
    one = attrs.evolve(work, requests=("a", "b"), rows=(0, 1), samples=(True, True))
    _, failed = processor(clock.mask(lambda _: 1.5)).apply_masks([one], lambda _: None)
    assert not failed


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_rank_0_decides_what_takes_too_long(clock: Clock, slow_rank: int) -> None:
    """Ranks measure different times. They must decide the same, and send the same work through the
    pipeline."""
    masks = [clock.mask(lambda _, r=rank: 9.0 * (r == slow_rank)) for rank in range(2)]  # type: ignore[misc]
    ranks = [processor(mask) for mask in masks]
    work = Work(0, Edits(), ("a", "b", "a[1]"), (0, 1, 2), (), (True,) * 3, None)
    told: list[Any] = []
    results = [
        ranks[0].apply_masks([work], told.append),
        ranks[1].apply_masks([work], lambda _: told[0], decides=False),
    ]
    assert [[*failed] for _, failed in results] == [["a", "a[1]"] if slow_rank == 0 else []] * 2
    assert len({each.summary for works, _ in results for each in works}) == 1


class Spins:
    """A mask that takes ever more of the processor's time on rank 0, and sleeps for as long on
    others."""

    budget = MaskBudget(step_seconds=0.01, burst_seconds=0.02)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, said: Sequence[int]) -> list[int]:
        end = time.thread_time() + 0.02 * len(said)
        while self.rank == 0 and time.thread_time() < end:
            pass
        return [7, 8]


def serve_on_a_rank() -> dict[str, Any]:
    """A request whose masks take too long on one rank, one with quick masks, and one that runs
    ahead."""
    transport = Distributed(timeout=60)
    engine = Engine(
        small_model(), SMALL, graph="none", pipeline=2, transport=transport, run_ahead=2, seed=0
    )
    params = SamplingParams(temperature=1.0, seed=1, n=2)
    engine.add([1, 2], params, max_tokens=12, id="odd", mask=Spins(transport.rank))
    engine.add([1, 5], GREEDY, max_tokens=12, id="quick", mask=Half(1))
    engine.add([3, 4], GREEDY, max_tokens=12, id="good")
    return {
        f"{output.id} {output.index}": (output.finish_reason, output.track.token_ids)
        for output in engine
        if output.finish_reason is not None
    }


def test_processes_end_the_same_request() -> None:
    for completions in launch(serve_on_a_rank, 2, timeout=120):
        assert completions["odd 0"][0] == completions["odd 1"][0] == "error"
        assert completions["quick 0"] == ("length", alone((1, 5), GREEDY, 12, mask=Half(1))[0])
        assert completions["good 0"] == ("length", alone((3, 4), GREEDY, 12)[0])


class _EachForItself(MaskClock):
    """A completion's masks count by themselves."""

    def note(self, id: str, begin: float) -> None:
        self.seconds[id] = self.now() - begin


class _Unshared(MaskClock):
    """Each request has the whole step."""

    def budget(self, budget: MaskBudget) -> MaskBudget:
        return budget


BUGS: dict[str, tuple[Any, str, Any]] = {
    "a completion counts by itself": (outputs_module, "MaskClock", _EachForItself),
    "each request has the whole step": (outputs_module, "MaskClock", _Unshared),
    "nothing is owed": (
        MaskBudget,
        "owed",
        lambda _self, _debt, seconds: max(0.0, seconds - BUDGET.step_seconds),
    ),
    "no budget": (MaskBudget, "is_exceeded", lambda *_: False),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(clock: Clock, bug: str) -> None:
    check = test_the_masks_of_all_completions_of_a_request_share_a_budget.hypothesis.inner_test  # type: ignore[attr-defined]
    cases = ([1.0] * 8, 1, 1), ([2.0] * 8, 1, 0), ([8.0] * 8, 1, 0)

    def check_all() -> None:
        test_completions_of_one_step_count_together(clock)
        for seconds, n, num_other_requests in cases:
            check(clock, seconds, n, num_other_requests, 1)

    with mock.patch.object(*BUGS[bug]), pytest.raises(AssertionError):
        check_all()
    check_all()
