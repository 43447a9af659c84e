"""Ctrl-C, exceptions from outside, and several threads, at any line of an engine's calls."""

import asyncio
import functools
import inspect
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import attrs
import pytest

from weft.batches.sampling import SamplingParams
from weft.errors import EngineError, RequestError
from weft.proofs._laws.engine.completions import alone
from weft.proofs._strategies.engine.engines import small_model
from weft.proofs._strategies.engine.interrupts import Outside, Places, press_ctrl_c, raise_outside
from weft.transforms.engine import calls
from weft.transforms.engine.engine import Engine, is_under_way, num_unfinished
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.outputs import OutputProcessor, RequestOutput
from weft.transforms.engine.requests.host_state import HostState, sample_seeds
from weft.transforms.engine.requests.pages import Pages
from weft.transforms.engine.scheduler import add

SMALL = EngineLimits(max_num_reqs=4, max_num_tokens=16, max_model_len=24, page_size=4, num_pages=16)
GREEDY = SamplingParams(temperature=0.0)
CALLS = "step", "add", "abort"
# They change the engine, too.
OTHER_CALLS = "launch", "update", "reset_prefix_cache", "warm_up", "stream"
READS = "graphs", "is_idle", "stats"
_MOST_STEPS = 300
_ENGINE = "weft.transforms.engine."
PLACES = Places(
    [
        "weft.",
        _ENGINE,
        *sorted(
            {
                each.__module__
                for each in (Engine, calls.Calls, HostState, OutputProcessor, add, Pages)
            }
        ),
    ]
)


def test_each_call_of_an_engine_is_among_those_that_are_interrupted_or_reads_alone() -> None:
    public = {name for name, _ in inspect.getmembers(Engine) if not name.startswith("_")}
    assert public == {*CALLS, *OTHER_CALLS, *READS}


@attrs.define
class Session:
    """An engine whose calls are interrupted, and what it has returned.

    Args:
        draw: what is called, and where it is interrupted.
        happens: the interrupt.
        expects: what it raises.
        engine: the engine.
        within: the calls that are interrupted.
        places: where they are.

    Attributes:
        interrupted: where interrupts came, by call.
        lost: the error that says that the engine is gone.
    """

    draw: random.Random
    happens: Callable[[], None]
    expects: type[BaseException]
    engine: Engine
    within: Sequence[str] = CALLS
    places: Places = PLACES
    requests: dict[str, tuple[tuple[int, ...], SamplingParams, int]] = attrs.field(factory=dict)
    tokens: dict[tuple[str, int], list[int]] = attrs.field(factory=dict)
    reasons: dict[tuple[str, int], str] = attrs.field(factory=dict)
    interrupted: dict[str, list[str]] = attrs.field(factory=lambda: {name: [] for name in CALLS})
    lost: EngineError | None = None

    @classmethod
    def drawn(
        cls,
        seed: int,
        happens: Callable[[], None],
        expects: type[BaseException],
        within: Sequence[str],
    ) -> "Session":
        draw = random.Random(seed)
        options = {"pipeline": draw.choice((1, 1, 3)), "run_ahead": draw.randrange(3), "seed": 0}
        return cls(
            draw, happens, expects, Engine(small_model(), SMALL, graph="none", **options), within
        )

    def call(self, name: str, do: Callable[[], Any]) -> Any:
        """Make a call that is interrupted at a drawn line."""
        if name not in self.within:
            return do()
        interrupt = self.places.draw(self.draw, name, self.happens)
        try:
            with interrupt.within():
                return do()
        except self.expects:
            return None
        finally:
            self.places.note(name, interrupt)
            if interrupt.place:
                self.interrupted[name].append(interrupt.place)

    def add(self) -> None:
        name = f"own {len(self.requests)}"
        prompt = tuple(self.draw.choices(range(12), k=self.draw.randrange(1, 8)))
        sampling = self.draw.choice(
            (GREEDY, SamplingParams(temperature=1.0, seed=len(self.requests), n=2))
        )
        most = self.draw.randrange(1, 9)
        self.requests[name] = prompt, sampling, most
        self.call("add", lambda: self.engine.add(prompt, sampling, max_tokens=most, id=name))
        if not is_under_way(self.engine, name):  # nothing of it is there: the same name is free
            del self.requests[name]
            if self.draw.random() < 0.5:
                self.engine.add(prompt, sampling, max_tokens=most, id=name)
                self.requests[name] = prompt, sampling, most

    def abort(self) -> None:
        open_ones = [name for name in self.requests if is_under_way(self.engine, name)]
        if open_ones:
            name = self.draw.choice(open_ones)
            self.take(self.call("abort", lambda: self.engine.abort(name)) or [])

    def step(self) -> None:
        self.take(self.call("step", self.engine.step) or [])

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            key = output.id, output.index
            assert key not in self.reasons, f"{key} has ended before"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            assert self.tokens[key] == output.track.token_ids, (
                "no token is returned twice, and none is lost"
            )
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason

    def finish(self) -> None:
        """Go on without interrupts, and compare all with what each request says alone."""
        for _ in range(_MOST_STEPS):
            if self.engine.is_idle:
                break
            self.take(self.engine.step())
        assert self.engine.is_idle
        assert self.engine.stats().pages_held == 0
        for name, (prompt, sampling, most) in self.requests.items():
            for index, seed in enumerate(sample_seeds(sampling.seed or 0, sampling.n)):
                expected, reason = alone(prompt, attrs.evolve(sampling, n=1, seed=seed), most)
                tokens = self.tokens.get((name, index), [])
                if self.reasons[name, index] == "abort":
                    expected = expected[: len(tokens)]
                    reason = "abort"
                assert (tokens, self.reasons[name, index]) == (expected, reason)


def run_session(
    seed: int,
    happens: Callable[[], None],
    expects: type[BaseException],
    within: Sequence[str] = CALLS,
    places: Places | None = None,
) -> Session:
    session = Session.drawn(seed, happens, expects, within)
    try:
        if places is not None:
            session.places = places
        for _ in range(12):
            for do in session.draw.sample(
                (session.add, session.step, session.abort, session.step), 4
            ):
                do()
        session.finish()
    except EngineError as error:
        session.lost = error
    return session


def check_interrupts(count: int) -> dict[str, list[str]]:
    """Press Ctrl-C so often in each call: no engine is lost, and nothing is wrong."""
    places_by_call: dict[str, list[str]] = {name: [] for name in CALLS}
    seed = 0
    while min(map(len, places_by_call.values())) < count:
        session = run_session(seed, press_ctrl_c, KeyboardInterrupt)
        assert session.lost is None
        for name, places in session.interrupted.items():
            places_by_call[name] += places
        seed += 1
    return places_by_call


def test_ctrl_c_at_any_line_loses_nothing(runs_nightly: bool) -> None:
    places_by_call = check_interrupts(200 if runs_nightly else 8)
    for name, places in places_by_call.items():
        print(
            f"Ctrl-C in {name}: {len(places)} times at {len({*places})} places, 0 engines lost, 0"
            " wrong"
        )
    assert all(len({*places}) > 5 for places in places_by_call.values())


def test_an_exception_from_outside_at_any_line_of_add_loses_nothing(runs_nightly: bool) -> None:
    """All of the request is in the engine, or nothing."""
    most = 200 if runs_nightly else 20
    seed = count = 0
    while count < most:
        session = run_session(seed, raise_outside, Outside, ["add"])
        assert session.lost is None
        count += len(session.interrupted["add"])
        seed += 1
    print(f"an exception in add: {count} times, 0 engines lost, 0 wrong")


@pytest.mark.parametrize("call", ["step", "abort"])
def test_an_exception_from_outside_in_a_step_or_an_abort_loses_an_engine_by_name_or_nothing(
    call: str, runs_nightly: bool
) -> None:
    most = 200 if runs_nightly else 8
    seed = count = lost = 0
    while count < most:
        session = run_session(seed, raise_outside, Outside, [call])
        if session.lost is not None:
            lost += 1
            assert session.lost.problem.startswith(f"an earlier {call} that ")
            assert session.lost.instead == "another weft.Engine(...), and its requests again"
        count += len(session.interrupted[call])
        seed += 1
    print(f"an exception in {call}: {count} times, {lost} engines lost by name, 0 silently")
    assert lost


def planted() -> dict[str, tuple[Any, str, Any, Callable[[], None], type[BaseException]]]:
    """Engines with a bug, by its name: where it is, and what shows it."""
    ctrl_c = press_ctrl_c, KeyboardInterrupt
    outside = raise_outside, Outside
    step = Engine._step

    def loses_outputs(engine: Engine) -> None:
        engine._unreturned = []
        step(engine)

    return {
        "Ctrl-C is not held": (calls, "hold_interrupt", lambda _: None, *ctrl_c),
        "outputs of an interrupted step are lost": (Engine, "_step", loses_outputs, *ctrl_c),
        "an interrupted add leaves its completions": (
            OutputProcessor,
            "forget",
            lambda *_: None,
            *outside,
        ),
        "an interrupted add leaves its requests": (
            "weft.transforms.engine.engine",
            "forget",
            lambda host, _: host,
            *outside,
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("bug", planted())
def test_planted_bugs_are_found(bug: str) -> None:
    home, name, value, happens, expects = planted()[bug]
    target = f"{home}.{name}" if isinstance(home, str) else None
    with mock.patch(target, value) if target else mock.patch.object(home, name, value):
        places = Places([Engine.__module__])
        for seed in range(60):
            try:
                within = CALLS if expects is KeyboardInterrupt else ["add"]
                session = run_session(seed, happens, expects, within, places)
            except (AssertionError, KeyError, RequestError, ValueError):
                return
            if session.lost is not None:
                return
    pytest.fail("nothing shows it")


def test_a_second_ctrl_c_ends_a_step_at_once_and_the_engine_says_so() -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    gone_on = []

    def pressed_twice(said: Sequence[int]) -> list[int]:
        press_ctrl_c()
        gone_on.append("after the first")
        press_ctrl_c()
        gone_on.append("after the second")
        return [1]

    engine.add([1, 2], max_tokens=3, mask=pressed_twice, id="a")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert gone_on == ["after the first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(
        EngineError,
        match="an earlier step that raised KeyboardInterrupt; how far its requests came",
    ):
        engine.step()
    assert [output.finish_reason for output in engine.abort("a")] == ["abort"]


def test_ctrl_c_is_raised_when_the_step_has_ended_and_the_next_one_has_its_outputs() -> None:
    engine = Engine(small_model(), SMALL, graph="none", run_ahead=0)
    calls_of_mask = 0

    def pressed(said: Sequence[int]) -> list[int]:
        nonlocal calls_of_mask
        calls_of_mask += 1
        if calls_of_mask == 2:
            press_ctrl_c()
        return [7]

    engine.add([1, 2], max_tokens=5, mask=pressed, id="a")
    engine.add([3, 4], GREEDY, max_tokens=5, id="b")
    outputs: list[RequestOutput] = []
    interrupts = 0
    while not engine.is_idle:
        try:
            outputs += engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    said = {
        name: [token for output in outputs if output.id == name for token in output.token_ids]
        for name in "ab"
    }
    assert said == {"a": [7] * 5, "b": alone((3, 4), GREEDY, 5)[0]}


def test_an_iteration_goes_on_after_ctrl_c_and_after_break() -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    for first in (1, 3, 5):
        engine.add([first, 2], GREEDY, max_tokens=5, id=str(first))
    said: dict[str, list[int]] = {}
    while not engine.is_idle:
        for output in engine:  # outputs of the same step stay for the next iteration
            said.setdefault(output.id, []).extend(output.token_ids)
            break
    assert said == {str(first): alone((first, 2), GREEDY, 5)[0] for first in (1, 3, 5)}


def test_an_own_handler_of_ctrl_c_is_called_when_the_call_has_ended() -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    states: list[int] = []

    def pressed(said: Sequence[int]) -> list[int]:
        press_ctrl_c()
        assert not states
        return [7]

    before = signal.signal(signal.SIGINT, lambda *_: states.append(num_unfinished(engine)))
    try:
        engine.add([1, 2], max_tokens=1, mask=pressed)
        engine.step()
        assert states == [0]
    finally:
        signal.signal(signal.SIGINT, before)


class Presser:
    """A thread that presses Ctrl-C once within each call, at a moment of the operating system's
    choice."""

    def __init__(self) -> None:
        self.count = 0
        self._main = threading.get_ident()
        self._is_inside = False
        self._begins = threading.Event()
        self._has_pressed = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._press, daemon=True)
        self._before = signal.signal(signal.SIGINT, self._raise)
        self._thread.start()

    def _raise(self, *_: Any) -> None:
        if self._is_inside:
            self._is_inside = False
            raise KeyboardInterrupt

    def _press(self) -> None:
        draw = random.Random(0)
        while self._begins.wait() and not self._ends:
            self._begins.clear()
            time.sleep(draw.uniform(0, 0.01))
            signal.pthread_kill(self._main, signal.SIGINT)
            self._has_pressed.set()

    def call(self, do: Callable[[], Any]) -> Any:
        """What a call returns; None if it was interrupted."""
        self._begins.set()
        result = None
        try:
            self._is_inside = True
            result = do()
            self._is_inside = False
        except KeyboardInterrupt:
            self.count += 1
        self._has_pressed.wait()  # it may come too late for this call, and would be the second of the next
        self._has_pressed.clear()
        return result

    def close(self) -> None:
        """End the thread."""
        self._ends = True
        self._begins.set()
        self._thread.join()
        signal.signal(signal.SIGINT, self._before)


def test_signals_of_the_system(runs_nightly: bool) -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    presser = Presser()
    deadline = time.monotonic() + (300 if runs_nightly else 20)
    number = 0
    try:
        while presser.count < (200 if runs_nightly else 10) and time.monotonic() < deadline:
            said: dict[str, list[int]] = {}
            names = {f"{number} {first}": (first, 2) for first in (1, 3, 5)}
            number += 1
            for name, prompt in names.items():
                presser.call(functools.partial(engine.add, prompt, GREEDY, max_tokens=6, id=name))
                assert is_under_way(engine, name)
            while not engine.is_idle:
                for output in presser.call(engine.step) or ():
                    said.setdefault(output.id, []).extend(output.token_ids)
            assert said == {name: alone(prompt, GREEDY, 6)[0] for name, prompt in names.items()}
    finally:
        presser.close()
    assert presser.count
    assert engine.stats().pages_held == 0


class Waits:
    """A mask that waits within a step until it is told to go on."""

    def __init__(self) -> None:
        self.is_inside = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self, _: Sequence[int]) -> list[int]:
        self.is_inside.set()
        assert self.may_go_on.wait(60)
        return [7]


THREADED: dict[str, Callable[[Engine], Any]] = {
    "engine.step()": lambda engine: engine.step(),
    "engine.launch()": lambda engine: engine.launch(),
    "engine.add(...)": lambda engine: engine.add([3, 4], max_tokens=2),
    "engine.abort('a')": lambda engine: engine.abort("a"),
    "engine.update()": lambda engine: engine.update(),
    "engine.reset_prefix_cache()": lambda engine: engine.reset_prefix_cache(),
    "engine.warm_up()": lambda engine: engine.warm_up(),
}


@pytest.mark.parametrize("call", THREADED)
def test_a_call_that_finds_another_thread_inside_is_refused_by_both_names(call: str) -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    mask = Waits()
    engine.add([1, 2], max_tokens=2, mask=mask, id="a")
    outputs: list[RequestOutput] = []
    other = threading.Thread(target=lambda: outputs.extend(engine), name="the one that steps")
    other.start()
    try:
        assert mask.is_inside.wait(60)
        with pytest.raises(EngineError) as error:
            THREADED[call](engine)
    finally:
        mask.may_go_on.set()
        other.join()
    assert error.value.call == call
    assert (
        error.value.problem
        == "thread 'MainThread', while thread 'the one that steps' is inside engine.step()"
    )
    assert error.value.instead == "calls from one thread at a time, such as with a lock"
    assert [token for output in outputs for token in output.token_ids] == [7, 7]
    engine.add([3, 4], GREEDY, max_tokens=2, id="b")
    assert [token for output in engine for token in output.token_ids] == alone((3, 4), GREEDY, 2)[0]


def test_threads_that_call_as_they_like_are_served_or_refused(runs_nightly: bool) -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    said: dict[str, list[int]] = {}
    refused: list[EngineError] = []
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10 if runs_nightly else 3):
                name = f"{number} {turn}"
                while True:
                    try:
                        engine.add([number, 2], GREEDY, max_tokens=4, id=name)
                        break
                    except EngineError as error:
                        refused.append(error)
                        time.sleep(0.001)
                while is_under_way(engine, name):
                    try:
                        for output in engine.step():
                            said.setdefault(output.id, []).extend(output.token_ids)
                    except EngineError as error:
                        refused.append(error)
                        time.sleep(0.001)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert all("is inside engine." in error.problem for error in refused)
    assert said == {name: alone((int(name.split()[0]), 2), GREEDY, 4)[0] for name in said}
    assert len(said) == 3 * (10 if runs_nightly else 3)
    assert engine.stats().pages_held == 0


def test_streams_of_two_event_loops_are_refused() -> None:
    engine = Engine(small_model(), SMALL, graph="none")
    mask = Waits()

    async def read(prompt: list[int], **options: Any) -> list[int]:
        return [
            token
            async for output in engine.stream(prompt, max_tokens=2, **options)
            for token in output.token_ids
        ]

    other = threading.Thread(target=lambda: asyncio.run(read([1, 2], mask=mask)))
    other.start()
    try:
        assert mask.is_inside.wait(60)
        with pytest.raises(
            EngineError, match="an event loop, while one of another thread steps the engine"
        ):
            asyncio.run(read([3, 4]))
    finally:
        mask.may_go_on.set()
        other.join()
    assert asyncio.run(read([3, 4], sampling=GREEDY)) == alone((3, 4), GREEDY, 2)[0]


@pytest.mark.parametrize("is_changing", [True, False])
def test_an_exception_from_outside_within_the_guard_itself(
    is_changing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has not left. The next one finds that it is not under way, and that it was done, or
    was not."""
    engine = Engine(small_model(), SMALL, graph="none")
    engine.add([1, 2], GREEDY, max_tokens=2, id="a")
    with monkeypatch.context() as patched:
        patched.setattr(calls.Calls, "leave", lambda *_: raise_outside())
        if is_changing:
            patched.setattr(Engine, "_launch", lambda *_: raise_outside())
        with pytest.raises(Outside):
            engine.step()
    press_ctrl_c_outside()
    if is_changing:
        with pytest.raises(EngineError, match="an earlier step that raised"):
            engine.step()
    else:
        assert [token for output in engine for token in output.token_ids] == alone(
            (1, 2), GREEDY, 2
        )[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def press_ctrl_c_outside() -> None:
    """Beside all calls of an engine it is raised at once."""
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
