"""What weft takes of torch.distributed that torch does not export, or that it exports without types: stores, process
groups that nobody else knows of, symmetric memory."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "host_store",
    "process_group",
    "rendezvous_store",
    "root_store",
    "symmetric_memory",
]


_RUNS = itertools.count()
_DIST: Any = dist  # whose stores are documented, and not exported for type checkers


def rendezvous_store(rank: int, num_ranks: int, timeout: float) -> Any:
    """A `torch.distributed.Store` that all processes of a launcher share, and that no earlier call returned; of the
    default process group where there is one, else found by the launcher's variables (`env://`)."""
    if dist.is_initialized():
        whole = dist.distributed_c10d._get_default_store()
    else:
        whole, _, _ = next(_DIST.rendezvous("env://", rank, num_ranks, timeout=timedelta(seconds=timeout)))
    return _DIST.PrefixStore(f"weft/{next(_RUNS)}", whole)


def root_store(store: Any) -> Any:
    """The store below all prefixes: what a launcher writes into."""
    while isinstance(store, _DIST.PrefixStore):
        store = store.underlying_store
    return store


def host_store(address: str, timeout: float) -> Any:
    """A store that this process hosts, at a free `port`, for a launcher's ranks to find."""
    return _DIST.TCPStore(address, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)


def process_group(backend: str, name: str, store: Any, rank: int, num_ranks: int, timeout: float) -> Any:
    """A process group of torch.distributed for `send(tensors, peer, tag)` and `recv(...)`, known to nobody else.

    Args:
        backend: `gloo` or `nccl`; that one's own watchdog, which ends the process without naming a rank, leaves it to
            the caller's.
        name: different for each of a store.
        timeout: seconds; of gloo, for the connections too.
    """
    apart = store.clone()  # it may wait for as long, and nobody else's wait on the store is cut short
    apart.set_timeout(timedelta(seconds=timeout))
    own = _DIST.PrefixStore(name, apart)
    if backend == "gloo":
        return dist.ProcessGroupGloo(own, rank, num_ranks, timedelta(seconds=timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout + 60)
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(own, rank, num_ranks, options)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """An environment variable set for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def symmetric_memory(
    name: str, store: Any, rank: int, num_ranks: int, nbytes: int, device: torch.device
) -> list[Tensor]:
    """`nbytes` bytes of zeros on every rank's GPU, and a view of each rank's from here: [nbytes] uint8, one a rank.

    Collective: every rank calls it with the same size. The memory lives as long as the views.
    """
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    own_store = _DIST.PrefixStore(name, store)
    unique: Any = f"weft/{name}/{next(_RUNS)}"  # the registry is the process's; every rank counts alike
    group = dist.ProcessGroup(own_store, rank, num_ranks)
    gloo = dist.ProcessGroupGloo(own_store, rank, num_ranks, timedelta(seconds=60))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    _register_process_group(unique, group)
    _SymmetricMemory.set_group_info(unique, rank, num_ranks, own_store)
    own = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, unique)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = _SymmetricMemory.rendezvous(own)
    views = [handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(num_ranks)]
    handle.barrier()
    torch.cuda.synchronize(device)
    return [_with_owner(view, (own, handle)) for view in views]


def _with_owner(view: Tensor, owner: Any) -> Tensor:
    vars(view)["__weft_owner__"] = owner
    return view
