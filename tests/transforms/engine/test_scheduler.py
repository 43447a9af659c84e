"""The scheduler without a device, called in any order: its books are always right, and nothing is
left at the end."""

from collections import Counter
from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.batches.sampling import SamplingParams
from weft.errors import RequestError
from weft.ops.requests import LAST_TOKEN
from weft.proofs._laws.engine.fairness import check_time
from weft.proofs._strategies.engine.traces import step_times
from weft.transforms.engine.requests.host_state import Budget, HostState, Request, RequestState
from weft.transforms.engine.requests.step_time import StepTime
from weft.transforms.engine.scheduler import add, finish, observe, outdate, schedule
from weft.transforms.engine.steps.step import Work

STOP = 3
# The content of a slot that a rejected draft wrote.
WRONG = -9
GREEDY = SamplingParams(temperature=0.0, seed=0, stop_token_ids=[STOP])


def request(
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int,
    priority: int = 0,
    told: bool = False,
    penalty: float = 0.0,
) -> Request:
    told_of = 0 if told else None
    sampling = attrs.evolve(GREEDY, prompt_logprobs=told_of, presence_penalty=penalty)
    return Request(name, prompt, max_tokens, sampling, priority)


class HostMachine(RuleBasedStateMachine):
    """Requests are added, follow others, are aborted; steps are scheduled, and read later, in
    order.

    The model is a device that knows what is in each page, and that looks at every step. It knows
    the tokens that it samples before the host does, and how many: some drafts are right, and some
    are not.
    """

    @initialize(
        rows=st.integers(1, 4),
        cohorts=st.integers(1, 3),
        more=st.sampled_from((0, 9, 2, 20)),
        pages=st.integers(4, 9),
        mixed=st.booleans(),
        query_lens=st.sampled_from(((1,), (1, 2), (1, 3, 5))),
        time=st.none() | step_times(40),
    )
    def begin(
        self,
        rows: int,
        cohorts: int,
        more: int,
        pages: int,
        mixed: bool,
        query_lens: tuple[int, ...],
        time: StepTime | None,
    ) -> None:
        self.budget = Budget(rows, -(-rows // cohorts) + more, 4, cohorts, mixed, query_lens, time)
        self.host = HostState.empty(self.budget, pages, 2)
        self.count = self.ticks = 0
        self.unread: list[tuple[Work, list[list[int]]]] = []
        self.ended: dict[str, str] = {}
        self.said: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.content: dict[int, list[int | None]] = {page: [None, None] for page in range(pages)}
        self.truth: dict[
            str, list[int]
        ] = {}  # the tokens of each request, as the device has sampled them
        self.places: dict[int, int] = {}  # of each row, the tokens in the cache
        self.rows: dict[int, list[int]] = {}  # the pages of each row, as the device was told

    @rule(
        begin=st.sampled_from(((), (1, 1), (1, 1, 2, 2))),
        rest=st.lists(st.integers(0, 2), max_size=2),
        most=st.sampled_from((1, 5, 3, 2, 5)),
        priority=st.sampled_from((0, 0, 1)),
        told=st.sampled_from((False, False, True)),
        samples=st.sampled_from((1, 2, 3)),
        penalty=st.sampled_from((0.0, 0.0, 1.0)),
    )
    def come(
        self,
        begin: tuple[int, ...],
        rest: list[int],
        most: int,
        priority: int,
        told: bool,
        samples: int,
        penalty: float,
    ) -> None:
        prompt = (*begin, *rest) or (1,)
        first = f"r{self.count}"
        for index in range(samples):
            name = first if index == 0 else f"{first}[{index}]"
            new_request = request(
                name, prompt, most, priority, told and index == 0, 0 if index % 2 else penalty
            )
            if -(-(len(prompt) + most) // 2) > min(4, self.host.pages.num_pages):
                with pytest.raises(RequestError, match="fewer max_tokens, or a greater"):
                    add(self.host, new_request, self.budget)
                return
            self.host = add(self.host, new_request, self.budget, behind=first if index else None)
            self.requests[name], self.said[name], self.truth[name] = new_request, [], [*prompt]
        self.count += 1

    @precondition(lambda self: self.host.requests)
    @rule(data=st.data(), reason=st.sampled_from(("abort", "error")))
    def end(self, data: st.DataObject, reason: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.host.requests)))
        self.host = finish(self.host, name, reason)
        self.ended[name] = reason
        with pytest.raises(RequestError, match="no request of that id"):
            finish(self.host, name, reason)

    @precondition(lambda self: len(self.unread) < 5)
    @rule(
        tokens=st.lists(st.sampled_from((0, 1, 2, STOP)), min_size=9, max_size=9),
        right=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    )
    def tick(self, tokens: list[int], right: list[int]) -> None:
        cohort = self.ticks % self.budget.num_cohorts
        self.ticks += 1
        self.host, works = schedule(self.host, self.budget)
        for work in works:
            self.check(work, cohort)
            sampled = [
                self.look(work, index, tokens[index:], right[index])
                for index in range(len(work.rows))
            ]
            if work.feeds:
                self.unread.append((work, sampled))

    @precondition(lambda self: self.unread)
    @rule()
    def read(self) -> None:
        work, sampled = self.unread.pop(0)
        self.host, got = observe(self.host, work.job, sampled)
        for place, req, count in got:
            name = req.request.id
            tokens = sampled[place]
            assert name not in self.ended, "what has ended gets nothing"
            assert (work.requests[place], work.samples[place]) == (name, True)
            self.said[name] += tokens[:count]
            assert STOP not in tokens[: count - 1], "nothing after an end"
            assert req.reason or count == len(tokens)
            if req.reason:
                assert (req.reason == "stop") == (tokens[count - 1] == STOP)
                assert (
                    req.reason == "stop" or len(self.said[name]) == self.requests[name].max_tokens
                )
                self.ended[name] = req.reason

    def check(self, work: Work, cohort: int) -> None:
        """Edit the tables, as a device would."""
        assert work.num_tokens <= self.budget.max_num_tokens
        if self.budget.step_time is not None and work.kind != "decode":
            check_time([work], self.budget.step_time, page_size=2)
        assert len(work.rows) == len(set(work.rows)) <= self.budget.cohort_size
        assert all(self.host.requests[name].cohort == cohort for name in work.requests), (
            "of those under way"
        )
        for source, target in work.edits.copies:
            self.content[target] = [*self.content[source]]
        for each in work.edits.admissions:
            self.rows[each.row], self.places[each.row] = list(each.pages), each.computed
        for growth in work.edits.growths:
            assert len(self.rows[growth.row]) == growth.start
            self.rows[growth.row] += growth.pages

    def look(self, work: Work, index: int, tokens: list[int], right: int) -> list[int]:
        """Read the cache and write a request's tokens to it, as a device would; what it samples."""
        name = work.requests[index]
        row = work.rows[index]
        start = self.places[row]
        truth = self.truth[name]
        limit = len(self.requests[name].prompt)
        limit += self.requests[name].max_tokens
        assert self.rows[row] == self.host.requests[name].pages[: len(self.rows[row])]
        ids = work.token_ids[index] if work.token_ids else (LAST_TOKEN,)
        for place in range(start):
            cached_token = self.content[self.rows[row][place // 2]][place % 2]
            assert cached_token == truth[place], (
                f"{name} reads what is another's, or a wrong draft's"
            )
        if ids != (LAST_TOKEN,):
            assert (start, list(ids)) == (work.starts[index], truth[start : start + len(ids)])
            written = list(ids)
            sampled = tokens[: work.samples[index]]
        else:
            assert start <= work.starts[index], "of a decode, at most"
            assert start == len(truth) - 1
            right = (
                0
                if self.requests[name].sampling.presence_penalty
                else min(right, work.query_len - 1)
            )
            sampled = tokens[: min(1 + right, limit - 1 - start)]
            written = [truth[-1], *sampled[:-1], *[WRONG] * (work.query_len - max(len(sampled), 1))]
        for place, token in enumerate(written, start):
            if place < limit - 1:
                self.content[self.rows[row][place // 2]][place % 2] = token
        truth += sampled
        self.places[row] = start + len(ids) if ids != (LAST_TOKEN,) else start + len(sampled)
        return sampled

    @invariant()
    def every_page_is_held_by_whom_it_says(self) -> None:
        if not hasattr(self, "host"):
            return
        host = self.host
        refcounts = Counter(page for req in host.running.values() for page in req.pages)
        assert {page: refcounts[page] for page in range(host.pages.num_pages)} == dict(
            enumerate(host.pages._refcounts)
        )
        rows = [req.row for req in host.running.values()]
        assert sorted([*rows, *host.free_rows]) == list(range(self.budget.max_num_reqs)), (
            "no row twice, none lost"
        )
        following = [f for req in host.requests.values() for f in req.followers]
        everyone: list[RequestState] = [*host.running.values(), *host.waiting, *following]
        assert (
            sorted(r.request.id for r in everyone)
            == sorted(host.requests)
            == sorted(set(self.requests) - set(self.ended))
        )
        assert sorted(map(id, host.running.values())) == sorted(
            id(r) for mine in host.cohorts for r in mine
        )
        assert all(
            mine == sorted(mine, key=lambda r: r.turn) for mine in (*host.cohorts, host.waiting)
        )
        assert all(len(mine) <= self.budget.cohort_size for mine in host.cohorts)
        for req in host.requests.values():
            assert req.tokens == [*req.request.prompt, *self.said[req.request.id]]
            assert req.num_computed <= len(req.pages) * 2 <= req.max_len + 1
            assert req.num_unread or not req.max_unread
            if req.on_device:
                place = self.places[req.row]
                assert place <= req.num_computed, "a bound"
                assert req.num_unread or place == req.num_computed, (
                    "which is the truth once all is read"
                )

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        for _ in range(600):
            if self.host.is_idle:
                break
            self.tick([0, 1, 2, 0, 0, 1, 2, 2, 1], [0, 1, 4, 2])
            while self.unread:
                self.read()
        assert self.host.is_idle, "everything ends"
        while self.unread:
            self.read()
        assert self.host.pages.num_held == 0
        assert not self.host.unread
        self.every_page_is_held_by_whom_it_says()


TestHost: Any = HostMachine.TestCase
TestHost.settings = settings(max_examples=120, stateful_step_count=40)


def served(prompts: dict[str, tuple[int, ...]], budget: Budget, num_pages: int = 64) -> list[Work]:
    """All work for some requests of two tokens each."""
    host = HostState.empty(budget, num_pages, 4)
    for name, prompt in prompts.items():
        host = add(host, request(name, prompt, 2), budget)
    works: list[Work] = []
    while not host.is_idle:
        host, more = schedule(host, budget)
        works += more
        for work in more:
            if work.feeds:
                host, _ = observe(host, work.job, [[0]] * len(work.rows))
    return works


@pytest.mark.parametrize("budget", range(3, 13))
def test_chunks_are_the_prompts(budget: int) -> None:
    """Every token once and in order, each batch but the last full, and only a prompt's last chunk
    samples."""
    prompts = {name: tuple(range(10 * n, 11 * n)) for n, name in ((5, "a"), (1, "b"), (7, "c"))}
    works = [work for work in served(prompts, Budget(3, budget, 9)) if work.kind == "prompts"]
    prefilled: dict[str, tuple[int, ...]] = dict.fromkeys(prompts, ())
    for work in works:
        for name, ids, samples in zip(work.requests, work.token_ids, work.samples, strict=True):
            prefilled[name] += ids
            assert samples == (prefilled[name] == prompts[name])
    assert prefilled == prompts
    assert all(work.num_tokens == budget for work in works[:-1])


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    step_times(400, 20, 60),
    st.booleans(),
)
@example([60, 60], StepTime(200, ((1, 0),), 1), True)
@example([8, 9, 30, 60], StepTime(24, ((1, 1), (2, 2))), True)
@example([30, 60], StepTime(40, ((1, 1), (2, 2)), 0, 1), True)
def test_steps_with_prompts_keep_within_their_time(
    lengths: list[int], time: StepTime, mixed: bool
) -> None:
    prompts = {
        str(row): tuple(range(100 * row, 100 * row + length)) for row, length in enumerate(lengths)
    }
    prefilled: dict[str, tuple[int, ...]] = dict.fromkeys(prompts, ())
    for work in served(prompts, Budget(4, 64, 16, mixed=mixed, step_time=time)):
        if work.kind != "decode":
            check_time([work], time, page_size=4)
            for name, ids in zip(work.requests, work.token_ids, strict=True):
                prefilled[name] += ids if ids != (LAST_TOKEN,) else ()
    assert prefilled == prompts


@pytest.mark.parametrize("mixed", [True, False])
def test_a_prompt_has_the_time_that_decodes_leave(mixed: bool) -> None:
    """A second for each token, 12 in all: a decode leaves 11, which are two pages of 4 tokens and
    not three."""
    budget = Budget(2, 64, 16, mixed=mixed, step_time=StepTime(12, ((1, 1), (100, 100))))
    host = add(HostState.empty(budget, 64, 4), request("a", (1, 2), 9), budget)
    host, (first,) = schedule(host, budget)
    host, _ = observe(host, first.job, [[0]])
    host, works = schedule(add(host, request("b", tuple(range(1, 21)), 2), budget), budget)
    assert len(works) == 2 - mixed
    assert [len(ids) for ids in works[-1].token_ids] == [1] * mixed + [8]


def test_cohorts_are_balanced() -> None:
    works = served({str(i): (1, 2, 3, i) for i in range(10)}, Budget(10, 64, 9, num_cohorts=3))
    assert sorted(len(work.rows) for work in works if work.kind == "decode") == [2, 4, 4]


def test_followers_copy_the_page_that_the_prompt_fills_in_part_and_share_the_others() -> None:
    budget = Budget(3, 16, 9)
    host = add(HostState.empty(budget, 20, 4), request("a", (1, 2, 3, 4, 5, 6, 7), 4), budget)
    for name in ("b", "c"):
        host = add(host, request(name, (1, 2, 3, 4, 5, 6, 7), 4), budget, behind="a")
    host, (first,) = schedule(host, budget)
    assert first.requests == ("a",)
    host, (_, second) = schedule(host, budget)
    pages = {name: host.requests[name].pages for name in "abc"}
    assert len({page_ids[0] for page_ids in pages.values()}) == 1
    assert len({page_ids[1] for page_ids in pages.values()}) == 3
    assert second.edits.copies == ((pages["a"][1], pages["b"][1]), (pages["a"][1], pages["c"][1]))
    assert second.token_ids == ((7,), (7,)), "of each only the last token is computed again"
    assert host.num_found == 12


_TOO_LONG = "a prompt of 30 tokens, and 7 to generate; "


def test_a_request_without_a_token_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"Request\(id='b', ...\)\n  saw: tokens of the prompt=0"
    ):
        request("b", (), 1)
    with pytest.raises(RequestError, match="max_tokens=0\n  instead: a whole number >= 1"):
        request("b", (1,), 0)


@pytest.mark.parametrize(
    ("new_request", "problem"),
    [
        (request("a", (1,), 1), "a request of that id that has not ended"),
        (
            request("b", (1,) * 30, 7),
            _TOO_LONG + "a request may have 36, by EngineLimits.max_model_len",
        ),
    ],
)
def test_what_could_never_be_served_is_refused(new_request: Request, problem: str) -> None:
    budget = Budget(2, 16, 9)
    host = add(HostState.empty(budget, 20, 4), request("a", (1,), 1), budget)
    with pytest.raises(RequestError) as error:
        add(host, new_request, budget)
    assert error.value.problem == problem
    assert list(host.requests) == ["a"]


def test_more_than_all_pages_is_refused_by_their_name() -> None:
    budget = Budget(2, 16, 20)
    with pytest.raises(RequestError) as error:
        add(HostState.empty(budget, 8, 4), request("b", (1,) * 30, 7), budget)
    assert error.value.problem == _TOO_LONG + "there are 32, by EngineLimits.num_pages"
    assert error.value.instead == "a shorter prompt, fewer max_tokens, or a greater num_pages"


@pytest.mark.parametrize("changed", [False, True])
def test_pages_of_parameters_that_have_changed_are_found_by_nobody(changed: bool) -> None:
    budget = Budget(max_num_reqs=2, max_num_tokens=16, max_pages=8)
    host = add(
        HostState.empty(budget, num_pages=16, page_size=2), request("a", (1, 2, 4, 5, 6), 2), budget
    )
    host, [work] = schedule(host, budget)
    host, _ = observe(host, work.job, [[7]])
    if changed:
        host = outdate(host)
        assert not host.running
        host, [again] = schedule(host, budget)
        assert [
            (admission.computed, admission.generated) for admission in again.edits.admissions
        ] == [(0, (7,))]
        host, _ = observe(host, again.job, [[7]])
        host = outdate(host)
    host = add(host, request("b", (1, 2, 4, 5, 6), 2), budget)
    admissions = []
    while not host.is_idle:
        host, works = schedule(host, budget)
        for each in works:
            admissions += [
                (admission.row, admission.computed)
                for admission in each.edits.admissions
                if len(admission.prompt) == 5
            ]
            host, _ = observe(host, each.job, [[STOP]] * len(each.rows))
    assert all(computed == 0 for _, computed in admissions) == changed
