"""The device's time for calls in short graphs, over weights that take turns; and kernels that processes compile."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

PROCESSES = 15
LEAST_BYTES = 2**28
"""Bytes of weights that a graph reads, so that none is found in a cache of 50 MB."""
_MOST_SECONDS = 0.01
"""The time after which a graph is not replayed again."""
_REPLAYS = 5
_ARENA = 2**31
"""Elements from which all weights of a dtype are cut."""
K = TypeVar("K")
V = TypeVar("V")


def compile_all(kinds: Iterable[K], compile_kind: Callable[[K], tuple[K, V]], limit: float) -> dict[K, V]:
    """Compile kernels in several processes, for at most `limit` seconds, into Triton's cache on disk; the first ones
    first.

    Returns:
        What the function returned for each kind that was reached.
    """
    until, found, kinds = time.time() + limit, dict[K, V](), list(kinds)
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        made = pool.imap_unordered(compile_kind, kinds)
        for _ in kinds:
            try:
                kind, compiled = made.next(max(until - time.time(), 0.1))
            except multiprocessing.TimeoutError:
                break
            found[kind] = compiled
    return found


class Graphs:
    """Captures calls; all graphs have one memory pool. It sets the current stream."""

    def __init__(self) -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        self._pool = torch.cuda.graph_pool_handle()
        self._kept = self.capture([lambda: torch.empty(2**20, device="cuda")])
        """A graph that keeps the memory pool."""

    def capture(self, calls: Sequence[Callable[[], Any]]) -> "Replays":
        """A graph of the calls, which have run before."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return Replays(graph, len(calls))


class Replays:
    """A graph, and its seconds per call: at first the least of two replays, then the median of five."""

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int) -> None:
        self._graph, self._calls, self._is_first = graph, calls, True

    def __call__(self) -> float:
        """Replay it."""
        seen, is_first = list[float](), self._is_first
        replays, most = (2, _MOST_SECONDS / 5) if is_first else (_REPLAYS, _MOST_SECONDS)
        self._is_first = False
        while len(seen) < replays and sum(seen) < most:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            seen.append(begin.elapsed_time(end) / 1e3)
        return (min(seen) if is_first else sorted(seen)[len(seen) // 2]) / self._calls


def drawn(dtype: torch.dtype) -> Tensor:
    """Random elements, from which weights are cut."""
    arena = torch.empty(_ARENA, dtype=dtype, device="cuda")
    for some in arena.split(2**27):
        some.copy_(torch.randn(len(some), device="cuda") * (16 if arena.itemsize == 1 else 1))
    return arena


def device_facts() -> Iterator[tuple[str, Any]]:
    """What a model of the device's time may depend on: its multiprocessors, caches, bandwidth and peak."""
    properties = torch.cuda.get_device_properties(0)
    yield "processors", properties.multi_processor_count
    yield "cache_bytes", properties.L2_cache_size
    yield "memory_bytes", properties.total_memory
    large = torch.zeros(2**30, device="cuda", dtype=torch.bfloat16)
    yield "read_bytes_per_second", large.nbytes / _seconds(lambda: large.sum())
    other = torch.empty_like(large)
    yield "copy_bytes_per_second", 2 * large.nbytes / _seconds(lambda: other.copy_(large))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    yield "bf16_flops_per_second", 2 * 8192**3 / _seconds(lambda: a @ a)


def _seconds(call: Callable[[], Any], repeats: int = 10) -> float:
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats
