"""A fake device on the CPU: a thread sends and receives in order, while the host continues."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.meshes.collectives import Collective, combine
from weft.proofs.evidence.runs import failures
from weft.transforms.pipelines.transports import distributed
from weft.transforms.pipelines.transports.messaging.messages import DeviceEnd
from weft.transforms.pipelines.transports.messaging.network import Network
from weft.transforms.pipelines.transports.watching.monitor import Monitor


class Done:
    """An event of the thread."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()


class StreamEnd:
    """An end over the store, whose calls return at once on the host, as on a GPU."""

    def __init__(self, monitor: Monitor, closing: float) -> None:
        self.monitor = monitor
        self.closing = closing
        store: Any = monitor.records.store
        self.store = store.clone()
        self.tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.counts = {way: [0] * monitor.num_ranks for way in ("send", "recv")}
        self.aborted = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self.tasks.get()()

    def connect(self, _: float, /) -> None: ...
    def drain(self) -> None: ...

    def send(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        key = self._key("send", peer)
        self.tasks.put(lambda: self.store.set(key, b"".join(t.numpy().tobytes() for t in tensors)))

    def recv(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        key = self._key("recv", peer)

        def receive() -> None:
            while not self.store.check([key]):
                if self.aborted.is_set():
                    return
                time.sleep(0.005)
            data = torch.frombuffer(bytearray(self.store.get(key)), dtype=torch.uint8)
            parts = data.split([t.nbytes for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.reshape(-1).view(torch.uint8).copy_(part)

        self.tasks.put(receive)

    def perform(self, effect: Collective, x: Tensor, _: int, /) -> Tensor:
        every, own_index = (
            [torch.empty_like(x) for _ in effect.ranks],
            effect.ranks.index(self.monitor.rank),
        )
        for peer in effect.ranks:
            if peer != self.monitor.rank:
                self.send([x], peer, 0)
        self.tasks.put(lambda: every[own_index].copy_(x))
        for place, peer in enumerate(effect.ranks):
            if peer != self.monitor.rank:
                self.recv([every[place]], peer, 0)
        out = combine(effect, every)[own_index].clone()
        self.tasks.put(lambda: out.copy_(combine(effect, every)[own_index]))
        return out

    def _key(self, way: str, peer: int) -> str:
        self.counts[way][peer] += 1
        source, to = (self.monitor.rank, peer) if way == "send" else (peer, self.monitor.rank)
        return f"message/{source}/{to}/{self.counts[way][peer]}"

    def record_event(self) -> Done:
        done = Done()
        self.tasks.put(done.reached.set)
        return done

    def abort(self) -> None:
        self.aborted.set()

    def close(self, failed: bool = False) -> None:
        if failed:
            self.abort()
            time.sleep(self.closing)
            return
        done = self.record_event()
        while not done.query():
            time.sleep(0.005)


def run_rank(case: failures.Case, folder: Path) -> None:
    """A rank of the proof of failures, on the fake device."""
    _on_streams(case, folder)


def run_slowly_closing_rank(case: failures.Case, folder: Path) -> None:
    """The same, but the failed rank takes long to close, so that the others and its own watchdog
    notice."""
    _on_streams(case, folder, closing=0.5)


def use_streams(closing: float = 0.0) -> None:
    """Give the fake device to all transports that this process makes from now on."""

    def make_end(_: str, monitor: Monitor, device: torch.device, network: Network) -> DeviceEnd:
        return StreamEnd(monitor, closing)

    distributed._make_end = make_end


def _on_streams(case: failures.Case, folder: Path, closing: float = 0.0) -> None:
    use_streams(closing)
    failures.run_rank(case, folder)
