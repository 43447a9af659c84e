"""The end of a rank's edges by NCCL, for tensors on GPUs."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.torchdist import nccl_group
from weft.transforms.pipelines.transports.messages import Marked, as_bytes
from weft.transforms.pipelines.transports.watch import Watch

_CLOSING = 2.0
"""Seconds to wait for a communicator to end."""


@attrs.frozen(eq=False)
class Launched:
    """What the stream got to do, and the sends beside it."""

    event: torch.cuda.Event
    sends: tuple[Any, ...]

    def query(self) -> bool:
        return self.event.query() and all(work.is_completed() for work in self.sends)


class NcclEnd:
    """Sends and receives in the order of the stream, on streams of NCCL's own; nothing waits on the host.

    What stages send (up, to the next rank) and what returns (down, from the last) go by different communicators: on
    one, a receive that was started early would hold up the sends behind it.
    """

    def __init__(self, watch: Watch, device: torch.device, interface: str | None) -> None:
        self.watch = watch
        self._interface = interface
        self.device = device
        self._groups: dict[str, Any] = {}
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def connect(self, timeout: float, /) -> None:
        """Make the communicator of every pair, all ranks in the same order: the first message of a pair blocks."""
        watch = self.watch
        torch.cuda.set_device(self.device)
        for name in ("up", "down"):
            self._groups[name] = nccl_group(
                name, watch.board.store, watch.rank, watch.num_ranks, timeout, self._interface
            )
        last, token = watch.num_ranks - 1, torch.zeros(1, dtype=torch.uint8, device=self.device)
        for source, to in (*((r, r + 1) for r in range(last)), *((last, r) for r in range(last))):
            if watch.rank == source:
                self._group(to).send([token], to, 0).wait()
            elif watch.rank == to:
                self._group(source, sending=False).recv([token], source, 0).wait()
        torch.cuda.synchronize(self.device)

    def _group(self, peer: int, sending: bool = True) -> Any:
        up = (peer > self.watch.rank) == sending
        return self._groups["up" if up else "down"]

    def send(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        while not capturing and self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()
        for tensor in tensors:
            work = self._group(peer).send([as_bytes(tensor)], peer, 0)
            if capturing:
                work.wait()  # a graph ends on one stream
            else:
                self._under_way.append((work, tensor))

    def recv(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        for tensor in tensors:
            self._group(peer, sending=False).recv([as_bytes(tensor)], peer, 0).wait()

    def drain(self) -> None:
        """Make the stream wait for all that is under way: what follows may overwrite it."""
        for work, _ in self._under_way:
            work.wait()

    def mark(self) -> Marked | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event()
        event.record()
        return Launched(event, tuple(work for work, _ in self._under_way))

    def abort(self) -> None:
        _end_all([group.abort for group in list(self._groups.values())])

    def close(self, failed: bool = False) -> None:
        """End the communicators: aborted if a rank failed, so that no kernel waits for it any more.

        NCCL ends none that a graph still holds: then this returns, and the communicator goes with the graph, or with
        the process.
        """
        groups = dict(self._groups)
        self._groups.clear()
        self._under_way.clear()
        _end_all([group.abort if failed else group.shutdown for group in groups.values()])


def _end_all(ends: Sequence[Callable[[], Any]]) -> None:
    """Call each in a thread, which may have to wait for a graph to go; wait a while for them."""
    threads = [threading.Thread(target=end, name="weft ends NCCL", daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_CLOSING)
