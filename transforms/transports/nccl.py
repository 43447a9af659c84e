"""The end of a rank's edges by NCCL, for tensors on GPUs."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.torchapi import process_group
from weft.transforms.transports.watch import Watch

_CLOSING = 2.0
"""Seconds to wait for a communicator to end."""


class NcclEnd:
    """Sends and receives in the order of the stream, on streams of NCCL's own; nothing waits on the host.

    What stages send (up, to the next rank) and what returns (down, from the last) go by different communicators: on
    one, a receive that was started early would hold up the sends behind it.
    """

    def __init__(self, watch: Watch, device: torch.device) -> None:
        self.watch = watch
        self.device = device
        names = ("up", "down")
        self._groups = {
            name: process_group("nccl", name, watch.store, watch.rank, watch.num_ranks, watch.timeout) for name in names
        }
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._connect()

    def _connect(self) -> None:
        """Make the communicator of every pair, all ranks in the same order: the first message of a pair blocks."""
        last, token = self.watch.num_ranks - 1, torch.zeros(1, dtype=torch.uint8, device=self.device)
        for source, to in (*((r, r + 1) for r in range(last)), *((last, r) for r in range(last))):
            if self.watch.rank == source:
                self._group(to).send([token], to, 0).wait()
            elif self.watch.rank == to:
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
            work = self._group(peer).send([_bytes(tensor)], peer, 0)
            if capturing:
                work.wait()  # a graph ends on one stream
            else:
                self._under_way.append((work, tensor))

    def recv(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        for tensor in tensors:
            self._group(peer, sending=False).recv([_bytes(tensor)], peer, 0).wait()

    def drain(self) -> None:
        """Make the stream wait for all that is under way: what follows may overwrite it."""
        for work, _ in self._under_way:
            work.wait()

    def close(self, failed: bool = False) -> None:
        """End the communicators: aborted if a rank failed, so that no kernel waits for it any more.

        NCCL ends none that a graph still holds: then this returns, and the communicator goes with the graph, or with
        the process.
        """
        groups, self._groups = self._groups, {}
        self._under_way.clear()
        ends = [group.abort if failed else group.shutdown for group in groups.values()]
        threads = [threading.Thread(target=end, name="weft closes NCCL", daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_CLOSING)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
