"""Calls in CUDA graphs, and the device's time for one of them."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

# Bytes of weights for calls to read in turn, so that no call finds its weights in a cache of 50 MB.
LEAST_BYTES = 2**28
# The time after which a graph is not replayed again.
_MOST_SECONDS = 0.01
_REPLAYS = 5


def run_seconds(run: Callable[[], Any], times: int = 1) -> float:
    """The device's time for a run, by events around `times` of them on the current stream."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def graph_seconds(calls: Sequence[Callable[[], Any]], device: str, repeats: int = 20) -> float:
    """The median over five rounds of the device's time for one call, replayed in a graph of at
    least 16 calls; without a GPU, by the host's clock. Each call's result has memory of its own."""
    if device != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    # A graph's launch takes some microseconds, which several calls share.
    calls = list(calls) * max(1, 16 // len(calls))
    results = list[Any]()

    def hold(call: Callable[[], Any]) -> None:
        # Kept, or the allocator would give the next call the same memory, which is then in the
        # cache.
        results.append(call())

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        # Kernels are compiled before the capture. Two calls are enough: the others differ in
        # weights alone.
        for call in calls[:2]:
            hold(call)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = captured([partial(hold, call) for call in calls])
        rounds = list[float]()
        times = max(1, repeats // len(calls))
        for _ in range(5):
            graph.replay()  # so that the device is busy while the host launches those that are timed
            rounds.append(run_seconds(graph.replay, times) / len(calls))
    return sorted(rounds)[2]


def captured(calls: Sequence[Callable[[], Any]], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of calls that have run before, captured on the current stream, which is not the
    default one. Unlike `torch.cuda.graph` it neither waits for the device nor empties the
    allocator's cache."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as those that compile, may call CUDA meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for call in calls:
            call()
    finally:
        graph.capture_end()
    return graph


class Graphs:
    """Captures calls; all graphs have one memory pool. It sets the current stream."""

    def __init__(self) -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        self._pool = torch.cuda.graph_pool_handle()
        # Without a graph in it, the pool would be freed whenever no other graph is alive.
        self._kept = self.capture([lambda: torch.empty(2**20, device="cuda")])
        """A graph that keeps the memory pool."""

    def capture(self, calls: Sequence[Callable[[], Any]]) -> "Replays":
        """A graph of the calls, which have run before. A result's memory is that of later ones, if
        nothing holds it."""
        return Replays(captured(calls, self._pool), len(calls))


class Replays:
    """A graph, and its seconds per call: at first the least of two replays, then the median of
    five."""

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int) -> None:
        self._graph = graph
        self._calls = calls
        self._is_first = True

    def __call__(self) -> float:
        """Replay it."""
        timings = list[float]()
        is_first = self._is_first
        # Most choices are far from the best one, which two replays tell.
        replays, most = (2, _MOST_SECONDS / 5) if is_first else (_REPLAYS, _MOST_SECONDS)
        self._is_first = False
        while len(timings) < replays and sum(timings) < most:
            timings.append(run_seconds(self._graph.replay))
        # Of two, the larger one may be a hiccup.
        return (min(timings) if is_first else sorted(timings)[len(timings) // 2]) / self._calls
