"""A search shows its progress where somebody looks, and uses the user's Hypothesis settings and
database."""

import io
import pickle
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.database import InMemoryExampleDatabase
from rich.console import Console

from weft.errors import CheckError
from weft.proofs._laws.engine.completions import run_ahead_is_none
from weft.proofs._strategies.engine.engines import Load, loads
from weft.proofs.checks import search as module
from weft.proofs.checks.check import check
from weft.proofs.checks.difference import LawViolation
from weft.proofs.checks.equivalence import Counterexample, assert_equivalent
from weft.proofs.checks.search import search
from weft.proofs.strategies import tensors
from weft.transforms.engine.engine import Engine

NUMBERS = st.integers(0, 10_000)


@pytest.fixture
def user() -> Iterator[settings]:
    """Settings of a user, with a database, as the active profile."""
    before = settings.get_current_profile_name()
    profile = settings(
        database=InMemoryExampleDatabase(),
        max_examples=30,
        derandomize=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.register_profile("a user's", profile)
    settings.load_profile("a user's")
    yield profile
    settings.load_profile(before)


def is_small(number: int) -> None:
    assert number < 17


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "seconds", "shows"),
    [(Terminal, 0, True), (Terminal, 60, False), (io.StringIO, 0, False)],
)
def test_a_terminal_shows_a_search_that_takes_long(
    stream: type[io.StringIO], seconds: float, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BAR_AFTER", seconds)
    file = stream()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert search(lambda _: None, NUMBERS, "looks at numbers", max_examples=20).error is None
    written = file.getvalue()
    assert ("looks at numbers" in written) == shows
    assert shows or not written


def test_what_failed_is_tried_first_the_next_time(user: settings) -> None:
    first, again = (search(is_small, NUMBERS, "numbers") for _ in range(2))
    assert first.error is not None
    assert again.error is not None
    assert again.examples == 1
    assert search(is_small, NUMBERS, "other numbers").error is not None
    assert isinstance(user.database, InMemoryExampleDatabase)
    keys = {key for key in user.database.data if not key.endswith(b".secondary")}
    assert len(keys) == 2, "each title has its own key"


def test_functions_of_one_name_do_not_share_their_failures(user: settings) -> None:
    doubled, tripled = (lambda number: number * 2), (lambda number: number * 3)
    assert doubled.__qualname__ == tripled.__qualname__
    first = search(is_small, NUMBERS, "times", (doubled,))
    assert search(lambda _: None, NUMBERS, "times", (tripled,)).error is None
    again = search(is_small, NUMBERS, "times", (doubled,))
    assert first.error is not None
    assert again.examples == 1, "a search of another function has not deleted what failed"


def test_a_profile_that_generates_nothing_is_evidence_of_nothing(user: settings) -> None:
    settings.register_profile("nothing", user, phases=[Phase.explicit])
    settings.load_profile("nothing")
    with pytest.raises(CheckError, match=r"Phase\.generate"):
        assert_equivalent(torch.exp, torch.exp, args=(tensors(2),))
    shown = io.StringIO()
    check(lambda x: x.tanh(), (tensors(2),), laws="pure", console=Console(file=shown, width=120))
    assert "not searched" in shown.getvalue()


def test_an_engine_that_never_ends_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.proofs.serving.MOST_STEPS", 20)
    monkeypatch.setattr(Engine, "step", lambda self: [])

    @settings(max_examples=1, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(loads())
    def runs(load: Load) -> None:
        with pytest.raises(LawViolation, match="20 steps after"):
            run_ahead_is_none(load)

    runs()


def test_a_counterexample_reaches_another_process() -> None:
    with pytest.raises(Counterexample) as caught:
        assert_equivalent(torch.exp, torch.sin, args=(torch.ones(2),))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_the_users_phases_and_number_of_examples_hold(user: settings) -> None:
    tried: list[int] = []
    search(tried.append, NUMBERS, "all numbers")
    assert len(tried) == user.max_examples
    search(is_small, NUMBERS, "numbers")
    settings.register_profile("only what failed", user, phases=[Phase.reuse])
    settings.load_profile("only what failed")
    replayed: list[int] = []
    assert search(replayed.append, NUMBERS, "numbers").error is None
    assert 17 in replayed
    assert len(replayed) < user.max_examples
