"""`BoundedDict`: what it drops, and that threads may share it."""

import copy
import pickle
import sys
import threading

import pytest
from hypothesis import given, strategies as st

from weft.values.bounded import BoundedDict


@given(st.integers(1, 5), st.lists(st.integers(0, 9)))
def test_the_newest_keys_are_kept(limit: int, keys: list[int]) -> None:
    bounded = BoundedDict[int, int](limit)
    kept: list[int] = []
    for place, key in enumerate(keys):
        bounded[key] = place
        if key not in kept:
            kept = [*kept, key][-limit:]
        assert list(bounded) == kept
        assert bounded[key] == place


def test_a_key_that_is_moved_to_the_end_outlives_newer_ones() -> None:
    bounded = BoundedDict[str, int](2)
    bounded["a"] = 1
    bounded["b"] = 2
    bounded.move_to_end("a")
    bounded["c"] = 3
    assert dict(bounded) == {"a": 1, "c": 3}


def test_a_size_counts_something_else_and_an_entry_that_never_fits_is_dropped() -> None:
    texts = BoundedDict[str, str](5, lambda texts: sum(map(len, texts.values())))
    for key, text in {"a": "12", "b": "34", "c": "56"}.items():
        texts[key] = text
    assert dict(texts) == {"b": "34", "c": "56"}
    texts["b"] = "3456"
    assert dict(texts) == {"c": "56"}
    texts["d"] = "123456"
    assert dict(texts) == {}


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_has_the_same_limit(again: object) -> None:
    bounded = BoundedDict[int, list[int]](2)
    bounded[1] = [1]
    assert callable(again)
    copied = again(bounded)
    assert copied == bounded
    copied[2] = [2]
    copied[3] = [3]
    assert list(copied) == [2, 3]
    assert list(bounded) == [1]


def test_threads_may_read_and_add_at_the_same_time() -> None:
    bounded = BoundedDict[int, int](8)
    errors: list[Exception] = []

    def run(start: int) -> None:
        try:
            for number in range(start, start + 20_000):
                key = number % 11
                if bounded.get(key) is None:
                    bounded[key] = number
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert len(bounded) <= 8
