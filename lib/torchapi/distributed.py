"""The parts of torch.distributed that torch does not export, or exports without types: stores,
private process groups, symmetric memory."""

import contextlib
import functools
import itertools
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "gloo_group",
    "host_store",
    "listen",
    "nccl_group",
    "rendezvous_store",
    "root_store",
    "symmetric_memory",
]


_RUNS = itertools.count()
_DIST: Any = dist  # its stores are documented, but not exported for type checkers


def rendezvous_store(rank: int, timeout: float) -> tuple[str, Any]:
    """A prefix for keys, different in each call, and a `torch.distributed.Store` with that prefix
    that all processes of a launcher share: that of the default process group if there is one, else
    the one at MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: the environment names no store.
        RuntimeError: there is no store, or rank 0 cannot host it.
    """
    if dist.is_initialized():
        whole = dist.distributed_c10d._get_default_store()
    else:
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise ValueError(f"no {' and no '.join(missing)} in the environment")
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        whole = _root(address, port, rank == 0 and not agent, timeout).clone()
    # The store of a torchelastic agent outlives a restart of its ranks, whose old keys would be
    # read again without the number of the attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"weft/{attempt}/{next(_RUNS)}"
    return prefix, _DIST.PrefixStore(prefix, whole)


@functools.cache
def _root(address: str, port: int, hosts: bool, timeout: float) -> Any:
    """The connection of this process to the store of its launcher, which it hosts if `hosts`. It is
    cached, so each process has one."""
    if hosts:
        return _hosted(address, port, timeout)
    return _DIST.TCPStore(
        address, port, None, False, timedelta(seconds=timeout), wait_for_workers=False
    )


def root_store(store: Any) -> Any:
    """The store below all prefixes, into which a launcher writes."""
    while isinstance(store, _DIST.PrefixStore):
        store = store.underlying_store
    return store


def host_store(address: str, timeout: float) -> Any:
    """A store that this process hosts for a launcher's ranks, at a free port of one address (its
    `port`)."""
    return _hosted(address, 0, timeout)


def _hosted(address: str, port: int, timeout: float) -> Any:
    """A store on a socket that we open, because TCPStore itself would listen on every interface,
    whatever address it is given."""
    try:
        socket = listen(address, port)
    except OSError as error:
        raise RuntimeError(f"{address}:{port}: {error}") from error
    port = socket.getsockname()[1]
    wait = timedelta(seconds=timeout)
    return _DIST.TCPStore(
        address, port, None, True, wait, wait_for_workers=False, master_listen_fd=socket.detach()
    )


def listen(address: str, port: int = 0) -> socket.socket:
    """A TCP socket that listens only at one address; `port` 0 takes a free port.

    Raises:
        OSError: this machine does not have the address, or the port is taken.
    """
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, port), family=family, backlog=512)


def gloo_group(
    name: str, store: Any, rank: int, num_ranks: int, timeout: float, address: str
) -> Any:
    """A gloo process group for `send(tensors, peer, tag)` and `recv(...)` that is not registered
    with torch.

    Args:
        name: different for each group of a store.
        timeout: in seconds, also for making the connections.
        address: the only address of this machine at which the connections listen.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout)
    return gloo(_apart(name, store, timeout), rank, num_ranks, options)


def nccl_group(
    name: str, store: Any, rank: int, num_ranks: int, timeout: float, interface: str | None
) -> Any:
    """An NCCL process group for `send(tensors, peer, tag)` and `recv(...)` that is not registered
    with torch. Its watchdog does not end the process, as it would without naming a rank; the caller
    watches instead.

    Args:
        name, timeout: as for `gloo_group`.
        interface: the only network interface on which NCCL listens, unless NCCL_SOCKET_IFNAME says
            otherwise; None: NCCL chooses.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout + 60)
    if interface is not None:
        # NCCL reads it when the first communicator connects, so it must stay set.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    # The constructor reads this one, so it need not stay set.
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return dist.ProcessGroupNCCL(_apart(name, store, timeout), rank, num_ranks, options)


def _apart(name: str, store: Any, timeout: float) -> Any:
    """A separate connection to a store, with a separate timeout: a wait on it neither delays nor
    shortens the waits of others."""
    apart = store.clone()
    apart.set_timeout(timedelta(seconds=timeout))
    return _DIST.PrefixStore(name, apart)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the context."""
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
    name: str,
    store: Any,
    rank: int,
    num_ranks: int,
    nbytes: int,
    device: torch.device,
    address: str,
) -> list[Tensor]:
    """Allocate `nbytes` zero bytes on every rank's GPU, and return this rank's view of each rank's
    memory: one tensor [nbytes] uint8 per rank. `address` is as for `gloo_group`.

    It is collective: every rank calls it with the same size. The memory lives as long as the views.
    """
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    own_store = _DIST.PrefixStore(name, store)
    # The registry of groups belongs to the process, so the name must be new. Every rank makes the
    # same calls, so all of them get the same number.
    unique: Any = f"weft/{name}/{next(_RUNS)}"
    group = dist.ProcessGroup(own_store, rank, num_ranks)
    gloo = gloo_group("gloo", own_store, rank, num_ranks, 60.0, address)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    _register_process_group(unique, group)
    _SymmetricMemory.set_group_info(unique, rank, num_ranks, own_store)
    buffer = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device, unique)
    buffer.zero_()
    # The zeros must be written before another rank can reach the buffer.
    torch.cuda.synchronize(device)
    handle = _SymmetricMemory.rendezvous(buffer)
    views = [handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(num_ranks)]
    handle.barrier()
    torch.cuda.synchronize(device)
    return [_with_owner(view, (buffer, handle)) for view in views]


def _with_owner(view: Tensor, owner: Any) -> Tensor:
    # A view does not keep symmetric memory alive by itself.
    vars(view)["__weft_owner__"] = owner
    return view
