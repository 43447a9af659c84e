"""The memo of graphs: contexts that control captures, eviction, full memory, logging, and threads."""

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft.batches.descriptor import BatchDescriptor
from weft.errors import CacheMissError, CaptureError, DonatedError, TooManyCapturesError
from weft.proofs.strategies import Rows
from weft.transforms.graphs.backends.tape import TapeBackend
from weft.transforms.graphs.cache import NO_REPLAY, make_plan
from weft.transforms.graphs.explain import INLINE, OTHER_REASONS
from weft.transforms.graphs.graphified import Graphified, clear_caches
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Ladder

LADDER = [BatchDescriptor(n, n) for n in (8, 4, 2)]


def double(x: Tensor) -> Tensor:
    return x * 2


def rows(n: int) -> Rows:
    return Rows(BatchDescriptor(n, n), torch.arange(float(n * 2)).reshape(n, 2))


def double_rows(batch: Rows) -> Rows:
    return Rows(batch.descriptor, batch.x * 2)


def counts(g: Graphified[..., Any]) -> tuple[int, int, int, int]:
    info = g.cache_info()
    return info.captures, info.replays, info.eager, info.currsize


def check(g: Graphified[..., Any], n: int) -> None:
    assert torch.equal(g(rows(n)).x, rows(n).x * 2)


@pytest.fixture
def switches() -> Iterator[Any]:
    yield weft.config
    weft.config.explain_cache_misses = weft.config.log_captures = False


# Contexts
# ------------------------------------------------------------------------------------------------------------


def test_nothing_is_captured_inside_no_capture() -> None:
    g = graphify(double)
    with weft.no_capture():
        for _ in range(3):
            assert torch.equal(g(torch.ones(2)), torch.full((2,), 2.0))
        assert str(g.explain(torch.ones(2))) == "runs eagerly: inside weft.no_capture()"
    assert counts(g) == (0, 0, 3, 0)
    for _ in range(3):
        g(torch.ones(2))
    assert counts(g) == (1, 3, 3, 1)


def test_inside_no_capture_a_larger_graph_at_hand_is_used() -> None:
    g = graphify(double_rows, ladder=LADDER)
    check(g, 7)
    with weft.no_capture():
        check(g, 2)
        assert "inside weft.no_capture()" in str(g.explain(rows(2)))
        assert g.explain(rows(2)).decision.descriptor == LADDER[0]
    assert counts(g) == (1, 2, 0, 1)
    check(g, 2)
    assert counts(g) == (2, 3, 0, 2)


def test_without_replay_every_call_runs_the_function() -> None:
    calls: list[str] = []

    def noisy(x: Tensor) -> Tensor:
        calls.append("x")
        return x * 2

    g = graphify(noisy)
    for _ in range(3):
        g(torch.ones(2))
    before = len(calls)
    with weft.no_capture(replay=False), weft.no_capture():
        for _ in range(3):
            g(torch.ones(2))
    assert len(calls) == before + 3
    g(torch.ones(2))
    assert len(calls) == before + 3


def test_no_capture_holds_in_its_own_thread_only() -> None:
    g = graphify(double)
    with weft.no_capture():
        thread = threading.Thread(target=lambda: g(torch.ones(2)))
        thread.start()
        thread.join()
    assert counts(g) == (1, 1, 0, 1)


def test_one_capture_too_many_raises_before_it_begins() -> None:
    g = graphify(double)
    with weft.assert_max_captures(2):
        g(torch.ones(2))
        with weft.assert_max_captures(1):
            for _ in range(3):
                g(torch.ones(3))
        with pytest.raises(TooManyCapturesError) as raised:
            g(torch.ones(4))
    text = str(raised.value)
    assert text.startswith(
        "with weft.assert_max_captures(2): double\n  saw: one capture more (x: shape (4,), captured"
    )
    assert "after: double; double" in text
    assert isinstance(raised.value, AssertionError)
    assert counts(g) == (2, 4, 0, 2)
    g(torch.ones(4))


def test_clear_caches_clears_all() -> None:
    both = graphify(double), graphify(double)
    for g in both:
        g(torch.ones(2))
        g.freeze()
    clear_caches()
    for g in both:
        assert counts(g) == (0, 0, 0, 0)
        g(torch.ones(2))
        assert counts(g) == (1, 1, 0, 1)


# Logging
# -------------------------------------------------------------------------------------------------------------


def test_misses_are_explained(switches: Any, caplog: pytest.LogCaptureFixture) -> None:
    g = graphify(double)
    g(torch.ones(2))
    switches.explain_cache_misses = True
    g(torch.ones(2))
    g(torch.ones(3))
    assert [r.getMessage() for r in caplog.records] == [
        "double: no graph for this call: x: shape (3,), captured (2,)",
    ]
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.records[0].name == "weft"


def test_captures_are_logged(switches: Any, caplog: pytest.LogCaptureFixture) -> None:
    switches.log_captures = True
    g = graphify(double_rows, ladder=LADDER)
    for _ in range(2):
        check(g, 3)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("captured double_rows for 'ragged 4 tokens, 4 reqs', full: ")
    assert text.endswith("MiB")


def test_each_class_that_no_graph_covers_is_logged_once_and_counted(
    switches: Any, caplog: pytest.LogCaptureFixture
) -> None:
    switches.explain_cache_misses = True
    g = graphify(double_rows, ladder=LADDER)
    for n in (9, 8, 10, 9, 10, 9):
        check(g, n)
    reasons = {
        f"no captured class covers 'ragged {n} tokens, {n} reqs'": count
        for n, count in ((9, 3), (10, 2))
    }
    assert [r.getMessage() for r in caplog.records] == [
        f"double_rows: runs without a graph: {reason}" for reason in reasons
    ]
    assert g.cache_info().eager_reasons == reasons
    assert counts(g) == (1, 1, 5, 1)
    g.cache_clear()
    assert g.cache_info().eager_reasons == {}
    check(g, 9)
    assert len(caplog.records) == 3


def test_eager_calls_are_logged_with_either_switch_and_not_without(
    switches: Any, caplog: pytest.LogCaptureFixture
) -> None:
    check(graphify(double_rows, ladder=LADDER), 9)
    assert not caplog.records
    switches.log_captures = True
    check(graphify(double_rows, ladder=LADDER), 9)
    assert len(caplog.records) == 1


def test_every_eager_call_has_a_reason() -> None:
    g = graphify(double_rows, ladder=LADDER)
    with weft.no_capture():
        check(g, 3)
    with weft.no_capture(replay=False):
        check(g, 3)
    check(g, 9)
    batch = rows(3)
    batch.x.requires_grad_()
    g(batch)
    assert g.cache_info().eager_reasons == {
        "inside weft.no_capture(): no captured class covers 'ragged 3 tokens, 3 reqs'": 2,
        "no captured class covers 'ragged 9 tokens, 9 reqs'": 1,
        INLINE: 1,
    }
    check(g, 3)
    with weft.no_capture(replay=False):
        check(g, 3)
    assert g.cache_info().eager_reasons[NO_REPLAY] == 1
    assert sum(g.cache_info().eager_reasons.values()) == g.cache_info().eager == 5


def test_the_reasons_are_bounded(switches: Any, caplog: pytest.LogCaptureFixture) -> None:
    switches.explain_cache_misses = True
    g = graphify(double_rows, ladder=LADDER)
    for n in range(9, 9 + 70):
        check(g, n)
    reasons = g.cache_info().eager_reasons
    assert len(reasons) == 65
    assert reasons[OTHER_REASONS] == 6
    assert len(caplog.records) == 65


# Signatures
# ----------------------------------------------------------------------------------------------------------


def test_signatures_are_bounded_with_the_plans_that_entries_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.transforms.graphs.cache._MAX_SIGNATURES", 3)
    g = graphify(double_rows, ladder=[BatchDescriptor(8, 8)])
    sizes = []
    for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10):  # the last two have no graph
        check(g, n)
        entries = g._cache.entries.values()
        sizes.append((len(g._cache._plans), sum(len(entry.plans) for entry in entries)))
    assert sizes == [(1, 1), (2, 2), (3, 3), (1, 1), (2, 2), (3, 3), (1, 1), (2, 2), (3, 2), (1, 0)]
    for n in (1, 9, 8):
        check(g, n)
    assert counts(g) == (1, 10, 3, 1)


@pytest.mark.slow
def test_calls_of_ever_new_signatures_do_not_fill_the_memory() -> None:
    g = graphify(lambda batch, n: batch.x, ladder=[BatchDescriptor(1, 1)], static_argnames="n")
    batch = rows(2)
    most = 0
    for n in range(4100):
        g(batch, n)
        most = max(most, len(g._cache._plans))
    assert (most, len(g._cache._plans)) == (4096, 4)


# Eviction
# ------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_graph_is_dropped() -> None:
    g = graphify(double, max_captures=2)
    for n in (1, 2, 1, 3):  # 2 was used least recently
        assert torch.equal(g(torch.ones(n)), torch.full((n,), 2.0))
    assert counts(g) == (3, 4, 0, 2)
    with weft.assert_max_captures(0):
        g(torch.ones(1))
        g(torch.ones(3))
    g(torch.ones(2))
    assert counts(g) == (4, 7, 0, 2)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2, 2, 1, 3, 3, 3, 1)])
def test_with_room_for_one_every_answer_is_right(order: tuple[int, ...]) -> None:
    g = graphify(lambda x, k: x * k, max_captures=1)
    kept = []
    for turn, n in enumerate(order * 4):
        x = torch.arange(float(n)) + turn
        kept.append((g(x, 3), x * 3))
        assert g.cache_info().currsize == 1
    for result, expected in kept:
        assert torch.equal(result, expected)


def test_a_dropped_graph_is_let_go() -> None:
    import gc
    import weakref

    g = graphify(double, max_captures=1)
    for _ in range(3):
        g(torch.ones(2))
    (graph,) = g._cache.graphs()
    gone = weakref.ref(graph.buffers[0])
    del graph
    g(torch.ones(3))
    gc.collect()
    assert gone() is None


def test_a_compiled_graph_outlives_its_eviction() -> None:
    g = graphify(double, max_captures=1)
    compiled = g.lower(torch.ones(2)).compile()
    for n in (3, 4, 5):
        g(torch.ones(n))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_a_borrowed_result_survives_the_eviction_of_its_graph() -> None:
    g = graphify(double, max_captures=1, outputs="borrow")
    lent = g(torch.ones(2))
    g(torch.zeros(3))
    assert torch.equal(lent, torch.full((2,), 2.0))


def test_a_ladder_larger_than_max_captures_is_not_captured_at_once() -> None:
    g = graphify(double_rows, ladder=LADDER, max_captures=2)
    with pytest.raises(CaptureError, match=r"a ladder of 3 classes, and max_captures=2"):
        g.capture(rows(1))
    for n in (8, 4, 2, 8, 1):
        check(g, n)
    assert g.cache_info().currsize == 2


@pytest.mark.parametrize("most", [0, -1, 1.5, True])
def test_max_captures_is_a_number_of_graphs(most: Any) -> None:
    with pytest.raises(CaptureError, match="an int >= 1, or None"):
        graphify(double, max_captures=most)


# A full memory
# -------------------------------------------------------------------------------------------------------


def _full_above(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures of more than `rows` rows run out of memory."""
    capture = TapeBackend.capture

    def scarce(
        self: TapeBackend, fn: Callable[[], Any], audit: Any, split_at: Any = frozenset()
    ) -> Any:
        recording = capture(self, fn, audit, split_at)
        if any(isinstance(x, Tensor) and x.shape[0] > rows for x in recording.outputs.leaves):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return recording

    monkeypatch.setattr(TapeBackend, "capture", scarce)


def test_without_memory_the_graphs_at_hand_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    g = graphify(double_rows, ladder=LADDER)
    check(g, 8)
    _full_above(3, monkeypatch)
    with pytest.warns(
        RuntimeWarning,
        match=r"double_rows: the device's memory was full when 'ragged 4 tokens, 4 reqs'",
    ):
        check(g, 4)
    assert counts(g) == (1, 2, 0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (1, 2, 4, 8) * 2:  # the smallest would fit, but no more captures are tried
            check(g, n)
    assert counts(g) == (1, 10, 0, 1)
    assert "the device's memory was full" in str(g.explain(rows(1)))
    g.cache_clear()
    check(g, 1)
    assert counts(g) == (1, 1, 0, 1)


def test_without_memory_and_graphs_the_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    _full_above(1, monkeypatch)
    g = graphify(double)
    with pytest.warns(
        RuntimeWarning, match="the device's memory was full when a call was to be captured"
    ):
        assert torch.equal(g(torch.ones(2)), torch.full((2,), 2.0))
    g(torch.ones(2))
    assert counts(g) == (0, 0, 2, 0)


def test_capture_of_a_ladder_stops_where_the_memory_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _full_above(3, monkeypatch)
    split = graphify(double_rows, ladder=Ladder(full=LADDER[::-1]))
    with pytest.warns(RuntimeWarning, match="it uses the 1 graphs that it has"):
        assert split.capture(rows(1)).currsize == 1
    check(split, 1)
    assert counts(split) == (1, 1, 0, 1)


def test_the_state_is_as_it_was_where_the_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    g = graphify(lambda s, x: (s.add_(x), x * 2), donate_argnames=("s",))
    _full_above(1, monkeypatch)
    state = torch.zeros(2)
    with pytest.warns(RuntimeWarning):
        state, _ = g(state, torch.ones(2))
    assert torch.equal(state, torch.ones(2))


def test_a_frozen_function_says_what_it_missed_and_does_not_fall_back() -> None:
    g = graphify(double_rows, ladder=LADDER)
    check(g, 8)
    g.freeze()
    with pytest.raises(CacheMissError, match="a miss after freeze"):
        check(g, 2)
    with weft.no_capture():
        check(g, 2)


def test_a_batch_that_no_class_covers_leaves_the_state_where_it_was() -> None:
    def step(state: dict[str, Tensor], batch: Rows) -> tuple[dict[str, Tensor], Rows]:
        return {"n": state["n"] + 1}, Rows(batch.descriptor, batch.x * 2)

    g = graphify(step, ladder=[BatchDescriptor(2, 2)], donate_argnames="state")
    state = {"n": torch.zeros(())}
    g.capture(state, rows(2))
    g.freeze()
    for turn, n in enumerate((2, 3, 2, 3, 3, 2), 1):
        old = state
        state, out = g(state, rows(n))
        assert int(state["n"]) == turn
        assert torch.equal(out.x, rows(n).x * 2)
        with pytest.raises(DonatedError):
            g(old, rows(n))
    assert counts(g) == (1, 3, 3, 1)
    with weft.no_capture(replay=False):
        state, _ = g(state, rows(2))
    state, _ = g(state, rows(2))
    assert int(state["n"]) == 8


# Threads
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [None, 2])
def test_threads_get_right_answers(most: int | None) -> None:
    g = graphify(lambda x, k: x * k + 1, max_captures=most)
    faults: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for turn in range(60):
            x = torch.randn(1 + (seed + turn) % 4, generator=generator)
            result = g(x, 2.0)
            if not torch.equal(result, x * 2.0 + 1):
                faults.append(f"thread {seed}, call {turn}: {result}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    info = g.cache_info()
    assert info.replays == 360
    assert info.captures == 4 if most is None else info.captures >= 4


def test_copies_are_planned_where_the_back_end_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has tables on the device, which a replay may still read when another thread drops its
    graph."""
    events: list[str] = []

    class Backend(TapeBackend):
        @contextmanager
        def allocating(self) -> Iterator[None]:
            events.append("enter")
            yield
            events.append("exit")

    def planned(*args: Any) -> Any:
        events.append("plan")
        return make_plan(*args)

    monkeypatch.setattr("weft.transforms.graphs.cache.make_backend", lambda *_: Backend())
    monkeypatch.setattr(import_module("weft.transforms.graphs.cache"), "make_plan", planned)
    g = graphify(lambda x: x * 2)
    g(torch.ones(2))
    assert events == [
        "enter",
        "exit",
        "enter",
        "exit",
        "enter",
        "plan",
        "exit",
    ], "buffers, padding sources, copies"
    events.clear()
    g.lower(torch.ones(2)).compile()
    assert events == ["enter", "plan", "exit"]
