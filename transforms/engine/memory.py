"""The memory of an engine: pages of the KV cache, and how many fit beside the graphs."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from weft.batches.state import State
from weft.display.quantities import byte_size
from weft.errors import RequestError
from weft.stages.model import Model, cache_dtype, rank_config
from weft.transforms.engine.steps.executor import Executor, estimate_all
from weft.transforms.pipelines.timing.hardware import MEMORY_SHARE
from weft.values.trees import tree_leaves

# A KV cache that takes a smaller share of the free memory leaves room for any graphs, so these are
# not estimated.
_SMALL_CACHE_SHARE = 0.25
# Factor on the estimate of the graphs' memory, which is interpolated. With a draft model, whose
# classes differ in more than size, graphs were measured to take up to a fifth more.
_GRAPHS_MARGIN = 1.25
# The most that the KV cache takes on a CPU.
_CPU_BYTES = 2**30


def empty_pages(model: Model, num_pages: int, page_size: int) -> Tensor:
    """Empty pages for a whole model that runs beside the engine's, [num_layers, 2, num_pages,
    page_size, num_kv_heads, head_dim]."""
    config = model.config
    shape = config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.head_dim
    return torch.zeros(shape, dtype=cache_dtype(model), device=model.device)


def page_bytes(model: Model, num_layers: int, page_size: int) -> int:
    """Bytes of one page of the KV cache, over `num_layers` of the model's layers."""
    config = rank_config(model)
    return (
        2
        * num_layers
        * page_size
        * config.num_kv_heads
        * config.head_dim
        * cache_dtype(model).itemsize
    )


def cache_bytes(states: Iterable[State]) -> int:
    """Bytes of the KV cache of these stages: the pages of the model, of the models beside it, of a
    draft model, and what pages keep of carried values."""
    tensors = list[Tensor | None]()
    for state in states:
        tensors += [state.kv_pages, *state.beside.values()]
        if state.drafting is not None:
            tensors.append(state.drafting.kv_pages)
        if state.carried is not None and state.carried.snapshots is not None:
            tensors += state.carried.snapshots.values()
    return sum(x.nbytes for x in tensors if x is not None)


def fitting_pages(
    device: torch.device, page_bytes: int, most: int, reserved: Callable[[], int]
) -> int:
    """The number of pages that fit into memory beside the `reserved` bytes, at least 1."""
    free = free_bytes(device)
    if free is None:
        return max(1, _CPU_BYTES // page_bytes)
    # `reserved` compiles all kernels to estimate the graphs, which a cache that is small beside the
    # free memory is not worth.
    if page_bytes * most <= _SMALL_CACHE_SHARE * free:
        return most
    num_bytes = reserved()  # this allocates, so query the free memory afterwards
    return max(1, int(MEMORY_SHARE * (free_bytes(device) or 0) - num_bytes) // page_bytes)


def check_room(
    device: torch.device, num_pages: int, page_bytes: int, least: Callable[[int], int]
) -> None:
    """Refuse a number of pages that does not fit into memory, before any rank allocates them.

    Args:
        least: takes a number that each rank has, and returns the smallest.

    Raises:
        RequestError: the pages take more memory than is free.
    """
    free = available_bytes(device)
    if free is None:
        here = num_pages
    else:
        here = min(num_pages, free // page_bytes)
    if (fitting := least(here)) < num_pages:
        if fitting < here:
            room = f"another rank with room for {fitting}"
        else:
            room = f"{byte_size(free or 0)} free on {device}"
        problem = (
            f"pages of {byte_size(num_pages * page_bytes)}, {byte_size(page_bytes)} each, and"
            f" {room}"
        )
        instead = f"num_pages={max(fitting, 1)} or fewer; None: as many as fit beside the graphs"
        raise RequestError(f"weft.EngineLimits(num_pages={num_pages})", problem, instead)


def available_bytes(device: torch.device) -> int | None:
    """The memory that pages can take: on a GPU what is free, plus what torch's allocator caches
    unused; on a CPU what Linux has available, swap included. None: unknown."""
    if device.type == "cuda":
        return (
            (free_bytes(device) or 0)
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    sizes = re.findall(r"^(?:MemAvailable|SwapFree):\s+(\d+) kB$", text, re.MULTILINE)
    if sizes:
        return 1024 * sum(map(int, sizes))
    return None


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a GPU; None for a CPU, where an engine takes a fixed amount."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()  # give back the memory of dropped tensors and graphs
    return torch.cuda.mem_get_info(device)[0]


def reserved_bytes(executor: Executor | None) -> int:
    """The memory that an executor needs beside pages: its tables, and its graphs once they are
    captured."""
    if executor is None:
        return 0
    tables = sum(x.nbytes for x in tree_leaves(executor.state) if isinstance(x, Tensor))
    return tables + int(
        _GRAPHS_MARGIN * sum(estimate.total_bytes for estimate in estimate_all(executor))
    )
