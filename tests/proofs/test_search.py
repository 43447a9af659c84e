"""A search shows its progress where somebody looks, and uses the user's Hypothesis settings and database."""

import io
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.database import InMemoryExampleDatabase

from weft.proofs.checks import search as module
from weft.proofs.checks.search import search

NUMBERS = st.integers(0, 10_000)


@pytest.fixture
def user() -> Iterator[settings]:
    """Settings of a user, with a database, as the active profile."""
    before = settings.get_current_profile_name()
    own = settings(
        database=InMemoryExampleDatabase(),
        max_examples=30,
        derandomize=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.register_profile("a user's", own)
    settings.load_profile("a user's")
    yield own
    settings.load_profile(before)


def is_small(number: int) -> None:
    assert number < 17


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "seconds", "shows"), [(Terminal, 0, True), (Terminal, 60, False), (io.StringIO, 0, False)]
)
def test_a_terminal_shows_a_search_that_takes_long(
    stream: type[io.StringIO], seconds: float, shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BAR_AFTER", seconds)
    file = stream()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert search(lambda _: None, NUMBERS, "looks at numbers", 20).error is None
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
    assert {b"weft.proofs: numbers", b"weft.proofs: other numbers"} <= {*user.database.data}, "each has its own key"


def test_the_users_phases_and_number_of_examples_hold(user: settings) -> None:
    tried: list[int] = []
    search(tried.append, NUMBERS, "all numbers")
    assert len(tried) == user.max_examples
    search(is_small, NUMBERS, "numbers")
    settings.register_profile("only what failed", user, phases=[Phase.reuse])
    settings.load_profile("only what failed")
    found: list[int] = []
    assert search(found.append, NUMBERS, "numbers").error is None
    assert 17 in found
    assert len(found) < user.max_examples
