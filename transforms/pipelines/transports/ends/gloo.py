"""The gloo end: carries tensors on the CPU."""

import contextlib
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from weft.errors import ProgramError, RankError
from weft.meshes.collectives import Collective, cut, goes, join
from weft.torchapi.distributed import gloo_group
from weft.transforms.pipelines.transports.messaging.messages import as_bytes
from weft.transforms.pipelines.transports.watching.monitor import CAPACITY, Monitor


class GlooEnd:
    """One rank's ends of the edges, carried by gloo. It sends copies in the background, and
    receives in order. Each message begins with its number on the edge and its tag."""

    def __init__(self, monitor: Monitor, address: str) -> None:
        self.monitor = monitor
        self._address = address
        self._group: Any = None
        self._under_way: dict[int, deque[tuple[list[Any], Sequence[Tensor]]]] = defaultdict(deque)
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    def connect(self, timeout: float, /) -> None:
        monitor = self.monitor
        self._group = gloo_group(
            "gloo", monitor.records.store, monitor.rank, monitor.num_ranks, timeout, self._address
        )

    def perform(self, effect: Collective, x: Tensor, tag: int, /) -> Tensor:
        """Send each other rank its part of the tensor (or the whole), and join the received parts
        in the order of the ranks."""
        place = effect.ranks.index(self.monitor.rank)
        parts = cut(effect, x)
        if x.numel():
            other_places = [other for other in range(len(effect.ranks)) if other != place]
        else:
            other_places = []
        for other in other_places:
            # All sends before the first receive: two ranks that both received first would wait for
            # each other. Sends go on in the background.
            if goes(effect, place, other):
                self.send([parts[other].contiguous()], effect.ranks[other], tag)
        mine = parts[place].contiguous()
        every = [
            mine if other == place else torch.empty_like(mine) for other in range(len(effect.ranks))
        ]
        for other in other_places:
            if goes(effect, other, place):
                self.recv([every[other]], effect.ranks[other], tag)
        return join(effect, every, place).clone(memory_format=torch.contiguous_format)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> None:
        # Without a bound, a rank that runs ahead would hold a copy of every message.
        if len(self._under_way[peer]) >= self._capacity(peer):
            self._wait(self._under_way[peer].popleft()[0], peer)
        parts = (
            torch.tensor([self._sent[peer], tag]),
            torch.cat([as_bytes(tensor) for tensor in tensors]),
        )
        with self.monitor.explaining(peer):
            works = [self._group.send([part], peer, 0) for part in parts]
        self._sent[peer] += 1
        self._under_way[peer].append((works, parts))

    def _capacity(self, peer: int) -> int:
        """The number of messages that may be under way to a rank. For outputs that return, it is
        larger than the number of jobs that the rank may run ahead, since the rank may receive them
        in a later run."""
        if peer > self.monitor.rank:
            return CAPACITY
        return self.monitor.num_ranks + CAPACITY

    def drain(self) -> None:
        """Do nothing: sends use copies."""

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> None:
        header = torch.empty(2, dtype=torch.int64)
        self._fill(header, peer)
        # gloo pairs messages by their order alone (its tag is always 0 here), so that the header
        # has to tell whether the sender is in the same step.
        number, received_tag = header.tolist()
        if (number, received_tag) != (self._received[peer], tag):
            raise ProgramError(
                f"rank {self.monitor.rank}: message {self._received[peer]} from rank {peer}, tag"
                f" {tag:x}",
                f"message {number}, tag {received_tag:x}: rank {peer} is in another step or at another"
                " micro-batch",
                "the same batches, in the same order, on every rank",
            )
        self._received[peer] += 1
        body = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
        self._fill(body, peer)
        for tensor, part in zip(
            tensors, body.split([tensor.nbytes for tensor in tensors]), strict=True
        ):
            as_bytes(tensor).copy_(part)

    def _fill(self, part: Tensor, peer: int) -> None:
        with self.monitor.explaining(peer):
            self._group.recv([part], peer, 0).wait(timedelta(seconds=self.monitor.timeout))

    def _wait(self, works: Sequence[Any], peer: int) -> None:
        with self.monitor.explaining(peer):
            for work in works:
                work.wait(timedelta(seconds=self.monitor.timeout))

    def close(self, failed: bool = False) -> None:
        """Close the connections after everything that was sent has left. If this rank failed, close
        them at once, so that the others notice."""
        if not failed:
            # A RankError can be ignored: the receiver finds the reason itself.
            with contextlib.suppress(RankError):
                for peer, under_way in self._under_way.items():
                    self._wait([work for works, _ in under_way for work in works], peer)
        self._under_way.clear()
        self._group = None
