"""Contexts end with their blocks, in whatever order and thread the blocks end."""

import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings, strategies as st

import weft
import weft.transforms
from weft.blocks import Blocks, _Block
from weft.settings import is_batch_invariant, may_capture, may_replay
from weft.transforms.graphs.calls.borrowing import watches_borrows
from weft.transforms.pipelines.timing.timeline import measuring

# weft's public contexts, each with a function that says whether it is in force.
CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], Any]]] = {
    "batch_invariant": (weft.batch_invariant, is_batch_invariant),
    "no_capture": (weft.no_capture, lambda: not may_capture()),
    "no_capture(replay=False)": (lambda: weft.no_capture(replay=False), lambda: not may_replay()),
    "assert_max_captures": (lambda: weft.assert_max_captures(0), lambda: _captures_are_refused()),
    "check_borrowed": (weft.check_borrowed, watches_borrows),
    "measure": (weft.transforms.measure, lambda: measuring() is not None),
}


def _captures_are_refused() -> bool:
    try:
        weft.graphify(lambda x: x + 1)(torch.ones(1))
    except AssertionError:
        return True
    return False


def _is_context(value: Any) -> bool:
    return inspect.isgeneratorfunction(getattr(value, "__wrapped__", None))


def test_all_public_contexts_are_in_the_table() -> None:
    public = {
        name: getattr(module, name) for module in (weft, weft.transforms) for name in module.__all__
    }
    names = {name for name, value in public.items() if _is_context(value)}
    assert names == {name.partition("(")[0] for name in CONTEXTS}


def _generator(context: Callable[[], AbstractContextManager[Any]]) -> Generator[None, None, None]:
    with context():
        yield


def _in_a_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@st.composite
def _closings(draw: st.DrawFn) -> tuple[int, list[tuple[int, bool]]]:
    """A number of blocks, and the order in which they end, each in this thread or in another one."""
    count = draw(st.integers(1, 3))
    order = draw(st.permutations(range(count)))
    return count, [(index, draw(st.booleans())) for index in order]


@pytest.mark.parametrize("name", CONTEXTS)
@settings(max_examples=10, deadline=None)
@given(closings=_closings())
def test_a_context_is_in_force_until_its_last_block_ends(
    name: str, closings: tuple[int, list[tuple[int, bool]]]
) -> None:
    check_closings(name, *closings)


def check_closings(name: str, count: int, order: list[tuple[int, bool]]) -> None:
    make, in_force = CONTEXTS[name]

    def run() -> None:
        assert not in_force()
        generators = [_generator(make) for _ in range(count)]
        for generator in generators:
            next(generator)
        for index, elsewhere in order:
            assert in_force()
            if (
                elsewhere and name != "check_borrowed"
            ):  # a function mode of torch, which ends in its own thread
                _in_a_thread(generators[index].close)
            else:
                generators[index].close()
        assert not in_force()

    contextvars.copy_context().run(run)


def test_the_innermost_open_block_says_what_is_in_force() -> None:
    def run() -> None:
        outer = _generator(weft.batch_invariant)
        inner = _generator(lambda: weft.batch_invariant(False))
        next(outer)
        next(inner)
        assert not is_batch_invariant()
        inner.close()
        assert is_batch_invariant()
        outer.close()
        assert not is_batch_invariant()

    contextvars.copy_context().run(run)


def test_compiled_functions_are_told_when_the_last_block_has_ended() -> None:
    from weft.settings import ANYWHERE

    generators = [_generator(weft.batch_invariant) for _ in range(2)]
    for generator in generators:
        next(generator)
    for generator in generators:
        assert ANYWHERE[0]
        generator.close()
    assert not ANYWHERE[0]


def test_a_block_that_is_left_by_an_error_has_ended() -> None:
    blocks = Blocks[int]("test")
    with contextlib.suppress(ZeroDivisionError), blocks.block(1), blocks.block(2):
        assert blocks.values() == (1, 2)
        raise ZeroDivisionError
    assert blocks.values() == ()


class _Resetting(Blocks[Any]):
    """The planted bug: a block that brings back what was in force when it began."""

    @contextmanager
    def block(self, value: Any) -> Iterator[None]:
        before = self._around.get()
        self._around.set((*before, _Block(value)))
        try:
            yield
        finally:
            self._around.set(before)


def test_the_test_above_finds_a_context_that_brings_back_what_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.settings._BATCH_INVARIANT", _Resetting("test"))
    check_closings("batch_invariant", 2, [(1, False), (0, False)])
    with pytest.raises(AssertionError):
        check_closings("batch_invariant", 2, [(0, False), (1, False)])


def test_a_drawn_order_of_ends_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.settings._BATCH_INVARIANT", _Resetting("test"))

    def breaks(closings: tuple[int, list[tuple[int, bool]]]) -> bool:
        try:
            check_closings("batch_invariant", *closings)
        except AssertionError:
            return True
        return False

    count, _ = find(_closings(), breaks, settings=settings(database=None, deadline=None))
    assert count == 2
