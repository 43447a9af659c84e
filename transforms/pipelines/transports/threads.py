"""The transport `threads`: one process, and a thread for each rank, each on its own device where there are some."""

import contextvars
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.effects import Broadcast, Fence, Recv, Send
from weft.errors import ProgramError, RankError
from weft.transforms.pipelines.checker import Edge, Step
from weft.transforms.pipelines.transports.exchange import Exchange, Queue
from weft.transforms.pipelines.transports.failures import Failure, check_timeout, described
from weft.transforms.pipelines.transports.plan import Plan
from weft.transforms.pipelines.transports.surroundings import refuse_unseen, surroundings
from weft.transforms.pipelines.transports.worker import Worker
from weft.trees import tree_map


@attrs.frozen(eq=False)
class ThreadLink:
    """One rank's ends of the edges, in its thread."""

    rank: int
    exchange: Exchange
    device: torch.device | None
    lends: bool

    def send(self, effect: Send | Broadcast, value: Any) -> None:
        made = None
        if self.device is not None and self.device.type == "cuda":
            made = torch.cuda.Event()
            made.record()
        self.exchange.put(Step(self.rank, effect), (value, made))

    def recv(self, effect: Recv | Broadcast) -> Any:
        return self.exchange.take(Step(self.rank, effect), self._own)

    def fence(self, effect: Fence, /) -> None:
        self.exchange.drained(Step(self.rank, effect))

    def _own(self, message: tuple[Any, torch.cuda.Event | None]) -> Any:
        value, made = message
        if made is not None:
            torch.cuda.current_stream().wait_event(made)
        return tree_map(lambda x: to_device(x, self.device, copy=self.lends), value)


def to_device(leaf: Any, device: torch.device | None, copy: bool = False) -> Any:
    """A tensor on the device (None: where it is), copied if it must be; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device, non_blocking=True, copy=copy) if device is not None else leaf.clone() if copy else leaf


class Threads:
    """A thread for each rank, which lives as long as the transport: a stage compiles and captures in its own.

    Args:
        devices: one a rank: batches and messages are moved there, outputs come back on that of rank 0. Params and state
            must be there already. None: all where they are.
        timeout: seconds that a rank may keep the others waiting without any progress before they raise RankError. The
            first call of a step that compiles or captures counts too.
    """

    def __init__(self, *, devices: Sequence[torch.device | str] | None = None, timeout: float = 30.0) -> None:
        if isinstance(devices, str | torch.device):
            raise ProgramError(f"Threads(devices={devices!r})", "one device", "a list of them, one for each stage")
        check_timeout("Threads", timeout)
        self.devices = None if devices is None else tuple(torch.device(d) for d in devices)
        self.timeout = timeout
        self._tasks: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._broken: Failure | None = None
        self._lock = threading.Lock()

    def ranks(self, num_ranks: int) -> Sequence[int]:
        if self.devices is not None and len(self.devices) != num_ranks:
            seen = f"{len(self.devices)} devices for {num_ranks} stages"
            raise ProgramError(f"pipeline(..., transport={self!r})", seen, "a device for each stage")
        return range(num_ranks)

    def share(self, value: Any) -> Any:
        return value

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def assert_equal(self, subject: str, value: str) -> None:
        """All ranks are in this process, and say the same."""

    def check(self) -> None:
        """A run returns when all its threads are done, or raises what one raised."""

    def received(self, _: int | None = None, /) -> Callable[[], None]:
        return lambda: None

    def mail(self, _: int, /) -> dict[Edge, Queue]:
        return {}

    def run(self, plan: Plan, workers: Sequence[Worker], mail: dict[Edge, Queue], /) -> None:
        call = f"pipeline(..., transport={self!r})"
        refuse_unseen(
            call, "pipeline(map(graphify, stages), transport=Threads()), or transport=Local() inside graphify"
        )
        if threading.current_thread() in self._threads:
            seen = "a thread of this transport, which is to run the other stages and would wait for itself"
            raise ProgramError(f"{call} in a stage", seen, "a Threads() of its own for the inner pipeline, or Local()")
        with self._lock:
            if self._broken is not None:
                raise self._broken.for_rank(0, "the next step")
            exchange = Exchange(plan, self.timeout, mail, workers[0].first)
            self._start(len(workers))
            for worker in workers:
                self._tasks[worker.rank].put(self._task(plan, worker, exchange))
            self._join(exchange)

    def _join(self, exchange: Exchange) -> None:
        try:
            exchange.join()
        except BaseException as error:  # Ctrl-C: no rank may wait for one that is told to stop
            exchange.fail(Failure(0, "the caller's wait", repr(error)))
            raise
        failure = exchange.failure
        if failure is None:
            return
        if exchange.left:
            self._broken = failure
        if failure.error is None:
            raise failure.for_rank(0, "the whole step")
        failure.error.add_note(f"on rank {failure.rank}, at '{failure.instruction}'")
        raise failure.error

    def _start(self, count: int) -> None:
        while len(self._tasks) < count:
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            name = f"weft rank {len(self._tasks)}"
            thread = threading.Thread(target=_serve, args=(tasks,), name=name, daemon=True)
            self._threads.append(thread)
            self._tasks.append(tasks)
            thread.start()

    def close(self) -> None:
        """End the threads."""
        for tasks in self._tasks:
            tasks.put(None)
        self._tasks, self._threads = [], []

    def __del__(self) -> None:
        if hasattr(self, "_tasks"):  # not where __init__ raised
            self.close()

    def _task(self, plan: Plan, worker: Worker, exchange: Exchange) -> Callable[[], None]:
        rank = worker.rank
        device = None if self.devices is None else self.devices[rank]
        link = ThreadLink(rank, exchange, device, plan.lends)
        inside, context = surroundings(device), contextvars.copy_context()

        def perform() -> None:
            if device is not None:
                worker.batches = [tree_map(lambda x: to_device(x, device), batch) for batch in worker.batches]
            for effect in plan.programs[rank].effects[slice(*plan.span(rank))]:
                worker.perform(effect, link)
                exchange.at[rank] += 1

        def task() -> None:
            try:
                with inside():
                    context.run(perform)
            except RankError as error:
                exchange.fail(Failure(rank, exchange.instruction(rank), str(error), error))
            except BaseException as error:
                exchange.fail(Failure(rank, exchange.instruction(rank), described(error), error))
            finally:
                exchange.end()

        return task

    def __repr__(self) -> str:
        return "Threads()" if self.devices is None else f"Threads(devices={[str(d) for d in self.devices]})"


def _serve(tasks: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
