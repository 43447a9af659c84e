"""The NCCL end: carries tensors on GPUs."""

import atexit
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.meshes.collectives import AllGather, AllReduce, Collective, PPermute, cut, join
from weft.torchapi.distributed import nccl_group
from weft.transforms.graphs.graphified import clear_caches
from weft.transforms.pipelines.transports.messaging.messages import DeviceEvent, as_bytes
from weft.transforms.pipelines.transports.watching.monitor import Monitor

# Seconds that ranks have to make a communicator, if the time-out is shorter
_MEETING = 30.0
# Seconds to wait for communicators to end
_CLOSING = 2.0


@attrs.frozen(eq=False)
class StreamEvent:
    """An event of the stream, and the sends under way, which run on NCCL's own streams."""

    event: torch.cuda.Event
    sends: tuple[Any, ...]

    def query(self) -> bool:
        return self.event.query() and all(work.is_completed() for work in self.sends)


class NcclEnd:
    """One rank's ends of the edges, carried by NCCL. Transfers run on NCCL's own streams, in the
    order of the current stream; the host never waits.

    Results of stages (up, to the next rank) and returning outputs (down, from the last rank) use
    different communicators. On a single communicator, a receive that starts early would block the
    sends after it.
    """

    def __init__(self, monitor: Monitor, device: torch.device, interface: str | None) -> None:
        self.monitor = monitor
        self._interface = interface
        self.device = device
        self._groups: dict[str, Any] = {}
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def connect(self, timeout: float, /) -> None:
        """Make the communicators of all pairs, in the same order on all ranks, by sending a token.
        The order matters, since the first message of a pair blocks."""
        monitor = self.monitor
        torch.cuda.set_device(self.device)
        for name in ("up", "down"):
            self._groups[name] = nccl_group(
                name,
                monitor.records.store,
                monitor.rank,
                monitor.num_ranks,
                timeout,
                self._interface,
            )
        last = monitor.num_ranks - 1
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for source, to in (*((r, r + 1) for r in range(last)), *((last, r) for r in range(last))):
            if monitor.rank == source:
                self._group(to).send([token], to, 0).wait()
            elif monitor.rank == to:
                self._group(source, sending=False).recv([token], source, 0).wait()
        torch.cuda.synchronize(self.device)

    def _group(self, peer: int, sending: bool = True) -> Any:
        up = (peer > self.monitor.rank) == sending
        return self._groups["up" if up else "down"]

    def perform(self, effect: Collective, x: Tensor, _: int, /) -> Tensor:
        """Exchange the parts of the tensors, and join them in the order of the ranks, so that all
        ranks get the same bits. PPermute gathers all tensors."""
        group = self._members(effect.ranks)
        parts = cut(effect, x)
        every = torch.empty(parts.shape, dtype=x.dtype, device=x.device)
        if x.numel() and isinstance(effect, AllReduce | AllGather | PPermute):
            group._allgather_base(every, x.contiguous()).wait()
        elif x.numel():
            group.alltoall_base(every, parts.contiguous(), [], []).wait()
        return join(effect, list(every), effect.ranks.index(self.monitor.rank)).contiguous()

    def _members(self, ranks: tuple[int, ...]) -> Any:
        """The communicator of the ranks of a collective, made at their first collective."""
        name = f"ranks {','.join(map(str, ranks))}"
        if name not in self._groups:
            rank_and_size = ranks.index(self.monitor.rank), len(ranks)
            store = self.monitor.records.store
            timeout = max(self.monitor.timeout, _MEETING)
            self._groups[name] = nccl_group(name, store, *rank_and_size, timeout, self._interface)
        return self._groups[name]

    def send(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        # Free the buffers of completed sends. During a capture, a query of an event is an error.
        while not capturing and self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        for tensor in tensors:
            # Keep a detached alias of the memory: the capture of a function refuses tensors that
            # the function leaves somewhere.
            detached = tensor.detach()
            work = self._group(peer).send([as_bytes(detached)], peer, 0)
            if capturing:
                # Rejoin NCCL's stream: a graph must end on the stream on which it began.
                work.wait()
            else:
                self._under_way.append((work, detached))

    def recv(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        for tensor in tensors:
            self._group(peer, sending=False).recv([as_bytes(tensor)], peer, 0).wait()

    def drain(self) -> None:
        """Make the stream wait for all sends under way, so that later work may overwrite their
        tensors."""
        for work, _ in self._under_way:
            work.wait()

    def record_event(self) -> DeviceEvent | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event()
        event.record()
        return StreamEvent(event, tuple(work for work, _ in self._under_way))

    def abort(self) -> None:
        _end_all([group.abort for group in list(self._groups.values())])

    def close(self, failed: bool = False) -> None:
        """End the communicators, or abort them if a rank failed, so that no kernel waits for it.

        NCCL does not end a communicator that a graph holds. In this case the method returns after a
        while, and the communicator ends together with the graph, at the latest when all graphs are
        dropped before the interpreter ends.
        """
        groups = dict(self._groups)
        self._groups.clear()
        self._under_way.clear()
        # Unreachable graphs may be in reference cycles, and still hold their communicators.
        gc.collect()
        _end_all([group.abort if failed else group.shutdown for group in groups.values()])


def _end_all(ends: Sequence[Callable[[], Any]]) -> None:
    """Call each function in a thread, since it may wait for a graph to be freed. Wait a while for
    all of them."""
    threads = [threading.Thread(target=end, name="weft ends NCCL", daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    if _still_run(threads):
        atexit.register(_end_at_exit, threads)


def _still_run(threads: Sequence[threading.Thread]) -> bool:
    """Wait for these threads for a while. Returns whether one of them still runs."""
    end = time.monotonic() + _CLOSING
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return any(thread.is_alive() for thread in threads)


def _end_at_exit(threads: Sequence[threading.Thread]) -> None:
    """Drop all graphs, so that the communicators end now. A thread that returned from NCCL during
    the interpreter's shutdown would abort the process."""
    if _still_run(threads):
        clear_caches()
        gc.collect()
        _still_run(threads)
