"""The device's time for a call inside a CUDA graph."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def graph_seconds(calls: Sequence[Callable[[], Any]], device: str, repeats: int = 20) -> float:
    """The median over five rounds of the device's time for one call, replayed in a graph of at least 16 calls; without
    a GPU, by the host's clock."""
    if device != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    calls = list(calls) * max(1, 16 // len(calls))
    held = [call() for call in calls[:2]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held += [call() for call in calls]
    rounds: list[float] = []
    times = max(1, repeats // len(calls))
    for _ in range(5):
        graph.replay()
        start_event, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start_event.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        rounds.append(start_event.elapsed_time(end) / 1e3 / times / len(calls))
    return sorted(rounds)[2]
