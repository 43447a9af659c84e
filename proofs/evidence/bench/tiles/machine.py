"""The machine of a search: kernels that its processes compile, and facts of its device."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from weft.proofs.evidence.bench.graphs import run_seconds

PROCESSES = 15
K = TypeVar("K")
V = TypeVar("V")


def compile_all(
    kinds: Iterable[K], compile_kind: Callable[[K], tuple[K, V]], limit: float
) -> dict[K, V]:
    """Compile kernels in several processes, for at most `limit` seconds, into Triton's cache on
    disk; the first ones first.

    Returns:
        What the function returned for each kind that was reached.
    """
    until = time.time() + limit
    results = dict[K, V]()
    kinds = list(kinds)
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pending = pool.imap_unordered(compile_kind, kinds)
        for _ in kinds:
            try:
                # What is not compiled by then is not timed.
                kind, compiled = pending.next(max(until - time.time(), 0.1))
            except multiprocessing.TimeoutError:
                break
            results[kind] = compiled
    return results


def device_facts() -> Iterator[tuple[str, Any]]:
    """The facts of a device on which a model of its times may depend: multiprocessors, caches,
    bandwidth, peak."""
    properties = torch.cuda.get_device_properties(0)
    yield "processors", properties.multi_processor_count
    yield "cache_bytes", properties.L2_cache_size
    yield "memory_bytes", properties.total_memory
    # 2 GiB, many times the cache.
    large = torch.zeros(2**30, device="cuda", dtype=torch.bfloat16)
    yield "read_bytes_per_second", large.nbytes / _seconds(lambda: large.sum())
    other = torch.empty_like(large)
    yield "copy_bytes_per_second", 2 * large.nbytes / _seconds(lambda: other.copy_(large))
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    yield "bf16_flops_per_second", 2 * 8192**3 / _seconds(lambda: a @ a)


def _seconds(call: Callable[[], Any]) -> float:
    call()
    return run_seconds(call, 10)
