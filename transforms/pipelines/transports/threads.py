"""The transport `Threads`: one process with a thread for each rank, optionally each on its own
device."""

import contextvars
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values
from weft.effects import Broadcast, Fence, Recv, Send
from weft.errors import CaptureError, ProgramError, RankError
from weft.meshes.collectives import Collective, combine, with_schema
from weft.ops.transfers import transfer
from weft.torchapi.ambient import surroundings
from weft.torchapi.private import function_modes, in_dispatch_mode
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.machine import Edge, Step
from weft.transforms.pipelines.transports.shared_run import Queue, SharedRun
from weft.transforms.pipelines.transports.watching.failures import Failure, check_timeout, described
from weft.transforms.pipelines.worker import Worker
from weft.values.trees import tree_map

_DEVICES: Rule = (
    lambda devices: not isinstance(devices, str | torch.device),
    "a list of them, one for each stage",
)


class Threads:
    """A transport with a thread for each rank, which lives as long as the transport: stages compile
    and capture in these threads.

    The threads take over the caller's context: grad and inference mode, autocast, the default
    device, hooks on saved tensors (which run in these threads), CUDA's current stream, weft's
    contexts. Function modes, dispatch modes and captures are refused. Between calls the threads
    hold no batch and no result.

    Args:
        devices: one per rank. Batches and messages are moved to the rank's device, and outputs are
            returned on the device of rank 0. Params and state must already be on their devices.
            None: tensors stay where they are.
        timeout: seconds that a rank may keep the others waiting without any progress before they
            raise RankError. Compilation and capture in the first call of a step count too.
    """

    def __init__(
        self, *, devices: Sequence[torch.device | str] | None = None, timeout: float = 30.0
    ) -> None:
        check_values(
            f"Threads(devices={devices!r})",
            {"devices": _DEVICES},
            {"devices": devices},
            ProgramError,
        )
        check_timeout("Threads", timeout)
        self.devices = None if devices is None else tuple(torch.device(d) for d in devices)
        self.timeout = timeout
        self._tasks: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._broken: Failure | None = None
        self._lock = threading.Lock()

    @property
    def member(self) -> None:
        return None

    def ranks(self, num_ranks: int) -> Sequence[int]:
        if self.devices is not None and len(self.devices) != num_ranks:
            problem = f"{len(self.devices)} devices for {num_ranks} ranks"
            raise ProgramError(
                f"pipeline(..., transport={self!r})", problem, "a device for each rank"
            )
        return range(num_ranks)

    def share(self, value: Any) -> Any:
        return value

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def assert_equal(self, subject: str, value: str) -> None:
        """Do nothing: one process decides for all ranks."""

    def check(self) -> None:
        """Do nothing: a run returns when all its threads are done, or raises what one of them
        raised."""

    def received(self, _: int | None = None, /) -> Callable[[], None]:
        return lambda: None

    def mail(self, _: int, /) -> dict[Edge, Queue]:
        return {}

    def run(
        self, checked: CheckedPrograms, workers: Sequence[Worker], mail: dict[Edge, Queue], /
    ) -> None:
        call = f"pipeline(..., transport={self!r})"
        _refuse_unseen(call)
        if threading.current_thread() in self._threads:
            problem = (
                "a call in a thread of this transport, which would have to run the inner stages"
                " while it waits for them"
            )
            raise ProgramError(
                f"{call} in a stage",
                problem,
                "another Threads() for the inner pipeline, or Local()",
            )
        # One run at a time: two callers would queue their tasks in different orders on the ranks,
        # which then wait for each other for ever.
        with self._lock:
            if self._broken is not None:
                raise self._broken.for_rank(0, "the next step")
            shared = SharedRun(checked, self.timeout, mail, workers[0].first)
            self._start(len(workers))
            for worker in workers:
                self._tasks[worker.rank].put(self._task(checked, worker, shared))
            self._join(shared)

    def _join(self, shared: SharedRun) -> None:
        try:
            shared.join()
        except BaseException as error:
            # Ctrl-C in the caller: end the waits of all ranks.
            shared.fail(Failure(0, "the caller's wait", repr(error)))
            raise
        failure = shared.failure
        if failure is None:
            return
        # Keep the error out of `shared`. A thread that is still running holds `shared`, and an
        # error holds its frames, with their batches and this transport. The transport would then
        # never be freed.
        cause = failure.error
        shared.failure = attrs.evolve(failure, error=None)
        if shared.left:
            self._broken = shared.failure
        try:
            if cause is None:
                raise failure.for_rank(0, "the whole step")
            cause.add_note(f"on rank {failure.rank}, at '{failure.instruction}'")
            raise cause
        finally:
            del cause, failure

    def _start(self, count: int) -> None:
        while len(self._tasks) < count:
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            name = f"weft rank {len(self._tasks)}"
            # A daemon: a stage that never returns must not keep the process from ending.
            thread = threading.Thread(target=_run_tasks, args=(tasks,), name=name, daemon=True)
            self._threads.append(thread)
            self._tasks.append(tasks)
            thread.start()

    def close(self) -> None:
        """End the threads."""
        for tasks in self._tasks:
            tasks.put(None)
        self._tasks = []
        self._threads = []

    def __del__(self) -> None:
        # `_tasks` is missing if __init__ raised.
        if hasattr(self, "_tasks"):
            self.close()

    def _task(
        self, checked: CheckedPrograms, worker: Worker, shared: SharedRun
    ) -> Callable[[], None]:
        rank = worker.rank
        if self.devices is None:
            device = None
        else:
            device = self.devices[rank]
        link = ThreadLink(rank, shared, device, checked.lends)
        # Made in the caller's thread, whose context they carry over to the rank's.
        inside, context = thread_context(device), contextvars.copy_context()

        def perform() -> None:
            if device is not None:
                worker.batches, worker.later = (
                    [tree_map(lambda x: to_device(x, device), batch) for batch in batches]
                    for batches in (worker.batches, worker.later)
                )
            for effect in checked.programs[rank].effects[slice(*checked.span(rank))]:
                worker.perform(effect, link)
                shared.at[rank] += 1

        def task() -> None:
            try:
                with inside():
                    context.run(perform)
            except RankError as error:
                shared.fail(Failure(rank, shared.instruction(rank), str(error), error))
            except BaseException as error:
                shared.fail(Failure(rank, shared.instruction(rank), described(error), error))
            finally:
                shared.end()

        return task

    def __repr__(self) -> str:
        if self.devices is None:
            return "Threads()"
        return f"Threads(devices={[str(d) for d in self.devices]})"


def _run_tasks(tasks: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        # It holds the batches and the state, and the next task may never come.
        del task


@attrs.frozen(eq=False)
class ThreadLink:
    """One rank's ends of the edges, and its place in collectives, in its thread."""

    rank: int
    shared: SharedRun
    device: torch.device | None
    lends: bool

    @functools.cached_property
    def member(self) -> int:
        return transfer.register(self)

    def perform(self, effect: Collective, x: Tensor, /) -> Tensor:
        if in_dispatch_mode():
            problem = "a capture in a thread, which captures of the other ranks would wait for"
            raise CaptureError(
                f"rank {self.rank}: '{effect}'", problem, "Distributed(): a process for each rank"
            )
        # A clone: other ranks may read it after this rank has overwritten `x`.
        every = self.shared.meet(self.rank, with_schema(effect, x), self._message(x.clone()))
        return combine(effect, [self._to_device(message) for message in every])[
            effect.ranks.index(self.rank)
        ].contiguous()

    def _message(self, value: Any) -> tuple[Any, torch.cuda.Event | None]:
        """A value, and the CUDA event after which it is ready (None: now)."""
        ready = None
        if self.device is not None and self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return value, ready

    def send(self, effect: Send | Broadcast, value: Any) -> None:
        self.shared.put(Step(self.rank, effect), self._message(value))

    def recv(self, effect: Recv | Broadcast) -> Any:
        return self.shared.take(Step(self.rank, effect), self._to_device)

    def fence(self, effect: Fence, /) -> None:
        self.shared.await_received(Step(self.rank, effect))

    def _to_device(self, message: tuple[Any, torch.cuda.Event | None]) -> Any:
        """The value of a message, on this rank's device."""
        value, ready = message
        if ready is not None:
            # The sender may use another stream.
            torch.cuda.current_stream().wait_event(ready)
        return tree_map(lambda x: to_device(x, self.device, copy=self.lends), value)


def to_device(leaf: Any, device: torch.device | None, copy: bool = False) -> Any:
    """A tensor on the device (None: where it is), copied if `copy`; other leaves are unchanged."""
    if not isinstance(leaf, Tensor):
        return leaf
    if device is not None:
        return leaf.to(device, non_blocking=True, copy=copy)
    if copy:
        return leaf.clone()
    return leaf


def _refuse_unseen(call: str) -> None:
    """Raise CaptureError if a capture or a torch function mode is active in this thread: neither
    can be carried over to another thread."""
    modes = [type(mode).__name__ for mode in function_modes() if not isinstance(mode, str)]
    if in_dispatch_mode():
        where = "inside a captured function"
        problem = (
            "Threads() runs stages in other threads, which this thread's capture cannot record"
        )
        instead = (
            "pipeline(map(graphify, stages), transport=Threads()), or transport=Local() inside"
            " graphify"
        )
    elif modes:
        where = "under a torch function mode"
        problem = (
            f"Threads() runs stages in other threads, which this thread's {modes[0]} cannot see"
        )
        instead = "transport=Local()"
    else:
        return
    raise CaptureError(f"{call} {where}", problem, instead)


def thread_context(device: torch.device | None) -> Callable[[], AbstractContextManager[None]]:
    """A context manager that carries this thread's context (`surroundings`) over to another thread.
    Work on `device` is ordered after this thread's stream, and that stream waits for it."""
    inherited = surroundings()
    if device is not None and device.type == "cuda":
        here = torch.cuda.current_stream()
    else:
        here = None

    @contextmanager
    def inside() -> Iterator[None]:
        with inherited():
            if here is None:
                yield
                return
            with torch.cuda.device(device):
                torch.cuda.current_stream().wait_stream(here)
                yield
                here.wait_stream(torch.cuda.current_stream())

    return inside
