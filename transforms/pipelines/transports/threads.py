"""The transport `Threads`: one process, and a thread for each rank, each on its own device if there are several."""

import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import Rule, check_values
from weft.effects import Broadcast, Fence, Recv, Send
from weft.errors import CaptureError, ProgramError, RankError
from weft.torchapi.private import function_modes, in_dispatch_mode
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.machine import Edge, Step, puts, takes
from weft.transforms.pipelines.transports.failures import Failure, blockers, check_timeout, culprit, described
from weft.transforms.pipelines.worker import Worker
from weft.trees import tree_map

_DEVICES: Rule = (
    lambda devices: not isinstance(devices, str | torch.device),
    "a list of them, one for each stage",
)

_CAPACITY = 2
"""Messages that an edge between threads holds; a sender waits if there are more."""
_AUTOCAST = ("cpu", "cuda")
"""The devices whose autocast a rank's thread takes over."""

Queue = deque[tuple[int, Any]]
"""The messages on an edge, each with the number of its micro-batch."""


class Threads:
    """A transport with a thread for each rank, which lives as long as the transport: a stage compiles and captures in
    it.

    Args:
        devices: one per rank. Batches and messages are moved there, and outputs come back on rank 0's. Params and state
            must already be there. None: tensors stay where they are.
        timeout: seconds that a rank may keep the others waiting without any progress before they raise RankError. The
            first call of a step that compiles or captures counts too.
    """

    def __init__(self, *, devices: Sequence[torch.device | str] | None = None, timeout: float = 30.0) -> None:
        check_values(f"Threads(devices={devices!r})", {"devices": _DEVICES}, {"devices": devices}, ProgramError)
        check_timeout("Threads", timeout)
        self.devices = None if devices is None else tuple(torch.device(d) for d in devices)
        self.timeout = timeout
        self._tasks: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._broken: Failure | None = None
        self._lock = threading.Lock()

    def ranks(self, num_ranks: int) -> Sequence[int]:
        if self.devices is not None and len(self.devices) != num_ranks:
            seen = f"{len(self.devices)} devices for {num_ranks} ranks"
            raise ProgramError(f"pipeline(..., transport={self!r})", seen, "a device for each rank")
        return range(num_ranks)

    def share(self, value: Any) -> Any:
        return value

    def collect(self, value: Any) -> list[Any]:
        return [value]

    def assert_equal(self, subject: str, value: str) -> None:
        """Do nothing: one process decides for all ranks."""

    def check(self) -> None:
        """Do nothing: a run returns when all its threads are done, or raises what one of them raised."""

    def received(self, _: int | None = None, /) -> Callable[[], None]:
        return lambda: None

    def mail(self, _: int, /) -> dict[Edge, Queue]:
        return {}

    def run(self, checked: CheckedPrograms, workers: Sequence[Worker], mail: dict[Edge, Queue], /) -> None:
        call = f"pipeline(..., transport={self!r})"
        _refuse_unseen(call)
        if threading.current_thread() in self._threads:
            seen = "a thread of this transport, which is to run the other stages and would wait for itself"
            raise ProgramError(f"{call} in a stage", seen, "a Threads() of its own for the inner pipeline, or Local()")
        with self._lock:
            if self._broken is not None:
                raise self._broken.for_rank(0, "the next step")
            shared = SharedRun(checked, self.timeout, mail, workers[0].first)
            self._start(len(workers))
            for worker in workers:
                self._tasks[worker.rank].put(self._task(checked, worker, shared))
            self._join(shared)

    def _join(self, shared: "SharedRun") -> None:
        try:
            shared.join()
        except BaseException as error:  # Ctrl-C: no rank may wait for one that is told to stop
            shared.fail(Failure(0, "the caller's wait", repr(error)))
            raise
        failure = shared.failure
        if failure is None:
            return
        if shared.left:
            self._broken = failure
        own = failure.error
        if own is not None:
            own.add_note(f"on rank {failure.rank}, at '{failure.instruction}'")
        raise failure.for_rank(0, "the whole step") if own is None else own

    def _start(self, count: int) -> None:
        while len(self._tasks) < count:
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            name = f"weft rank {len(self._tasks)}"
            thread = threading.Thread(target=_run_tasks, args=(tasks,), name=name, daemon=True)
            self._threads.append(thread)
            self._tasks.append(tasks)
            thread.start()

    def close(self) -> None:
        """End the threads."""
        for tasks in self._tasks:
            tasks.put(None)
        self._tasks, self._threads = [], []

    def __del__(self) -> None:
        if hasattr(self, "_tasks"):  # not if __init__ raised
            self.close()

    def _task(self, checked: CheckedPrograms, worker: Worker, shared: "SharedRun") -> Callable[[], None]:
        rank = worker.rank
        device = None if self.devices is None else self.devices[rank]
        link = ThreadLink(rank, shared, device, checked.lends)
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
        return "Threads()" if self.devices is None else f"Threads(devices={[str(d) for d in self.devices]})"


def _run_tasks(tasks: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()


@attrs.frozen(eq=False)
class ThreadLink:
    """One rank's ends of the edges, in its thread."""

    rank: int
    shared: "SharedRun"
    device: torch.device | None
    lends: bool

    def send(self, effect: Send | Broadcast, value: Any) -> None:
        made = None
        if self.device is not None and self.device.type == "cuda":
            made = torch.cuda.Event()
            made.record()
        self.shared.put(Step(self.rank, effect), (value, made))

    def recv(self, effect: Recv | Broadcast) -> Any:
        return self.shared.take(Step(self.rank, effect), self._own)

    def fence(self, effect: Fence, /) -> None:
        self.shared.await_received(Step(self.rank, effect))

    def _own(self, message: tuple[Any, torch.cuda.Event | None]) -> Any:
        """The value of a message on this rank's device."""
        value, made = message
        if made is not None:
            torch.cuda.current_stream().wait_event(made)
        return tree_map(lambda x: to_device(x, self.device, copy=self.lends), value)


def to_device(leaf: Any, device: torch.device | None, copy: bool = False) -> Any:
    """A tensor on the device (None: where it is), copied if `copy`; anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device, non_blocking=True, copy=copy) if device is not None else leaf.clone() if copy else leaf


class SharedRun:
    """The state that the threads of a run share: the edges, each rank's position, and the first failure.

    Args:
        checked: the programs of the run.
        timeout: seconds without progress after which a rank has stalled.
        edges: with the messages that earlier runs sent and this one receives.
        first: the number, over all runs, of the first micro-batch of this one.
    """

    def __init__(self, checked: CheckedPrograms, timeout: float, edges: dict[Edge, Queue], first: int) -> None:
        self.programs = checked.programs
        self.num_ranks = self.left = len(checked.programs)
        self.timeout = timeout
        self.failure: Failure | None = None
        self.at, self.ends = map(list, zip(*map(checked.span, range(self.num_ranks)), strict=True))
        self._edges = edges
        self._first = first
        self._changed = threading.Condition()

    def put(self, step: Step, value: Any) -> None:
        """Put a message on its edges, when there is room."""
        for edge in puts(step, self.num_ranks):
            with self._changed:
                queue = self._edges.setdefault(edge, deque())
                if edge.carries == "stages":  # what returns may be received in a later run
                    self._wait(step, partial(_has_room, queue), edge.to)
                queue.append((self._first + step.effect.microbatch, value))
                self._changed.notify_all()

    def take(self, step: Step, copied: Callable[[Any], Any]) -> Any:
        """Take a message off its edge, when there is one; `copied` makes it the receiver's."""
        edge = takes(step)
        assert edge is not None, "only an effect that takes is received"
        with self._changed:
            queue = self._edges.setdefault(edge, deque())
            self._wait(step, lambda: bool(queue), edge.source)
            value = copied(queue[0][1])
            queue.popleft()
            self._changed.notify_all()
        return value

    def await_received(self, step: Step) -> None:
        """Wait until the next rank has received what this rank's stage sent of a micro-batch. What returns is a copy
        (`StageRun.copies_results`), and may be received in a later run."""
        mb = self._first + step.effect.microbatch
        with self._changed:
            for edge in [e for e in self._edges if e.source == step.rank and e.carries == "stages"]:
                queue = self._edges[edge]
                self._wait(step, partial(_holds_none, queue, mb), edge.to)

    def fail(self, failure: Failure) -> None:
        """Note a failure, unless there is one."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def end(self) -> None:
        """Note that a rank has come to its end, well or not."""
        with self._changed:
            self.left -= 1
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for all ranks; after a failure no longer than the time-out, since a rank may never end."""
        with self._changed:
            self._progress(lambda: self.left == 0, self._unfinished)
            if self.failure is not None:
                self._changed.wait_for(lambda: self.left == 0, self.timeout if self.failure.error is not None else 0.1)

    def _wait(self, step: Step, ready: Callable[[], bool], peer: int) -> None:
        """Wait until `ready()`, which depends on `peer`."""
        self._progress(ready, lambda: peer)
        if not ready():
            assert self.failure is not None, "without one it waits"
            raise self.failure.for_rank(step.rank, str(step.effect))

    def _progress(self, ready: Callable[[], bool], peer: Callable[[], int]) -> None:
        """Wait until `ready()`, or a failure. If no rank makes progress for the time-out, a rank has stalled."""
        start, seen = time.monotonic(), list(self.at)
        while not ready() and self.failure is None:
            if self.at != seen:
                start, seen = time.monotonic(), list(self.at)
            left = start + self.timeout - time.monotonic()
            if left <= 0:
                self.failure = self._stalled(peer())
                self._changed.notify_all()
            else:
                self._changed.wait(left)

    def _unfinished(self) -> int:
        """A rank that is not at its end."""
        return next((rank for rank, end in enumerate(self.ends) if self.at[rank] < end), 0)

    def instruction(self, rank: int) -> str:
        """The next effect of a rank."""
        effects, index = self.programs[rank].effects, self.at[rank]
        return str(effects[index]) if index < len(effects) else "its end"

    def _stalled(self, peer: int) -> Failure:
        rank = culprit(peer, lambda waiting: blockers(self.programs, self.at, waiting, _CAPACITY))
        return Failure(rank, self.instruction(rank), f"no progress for {self.timeout:g} s")


def _has_room(queue: Queue) -> bool:
    return len(queue) < _CAPACITY


def _holds_none(queue: Queue, microbatch: int) -> bool:
    return all(sent != microbatch for sent, _ in queue)


def _refuse_unseen(call: str) -> None:
    """Raise CaptureError if something is in force in this thread that cannot be in force in another one: a capture, or
    a torch function mode."""
    modes = [type(mode).__name__ for mode in function_modes() if not isinstance(mode, str)]
    if in_dispatch_mode():
        where, force = "inside a captured function", "capture"
        instead = "pipeline(map(graphify, stages), transport=Threads()), or transport=Local() inside graphify"
    elif modes:
        where, force, instead = "under a torch function mode", modes[0], "transport=Local()"
    else:
        return
    raise CaptureError(f"{call} {where}", f"threads, whose work the {force} of this one does not see", instead)


def thread_context(device: torch.device | None) -> Callable[[], AbstractContextManager[None]]:
    """A context that puts in force, in another thread, what is in force in this one: grad and inference mode, autocast,
    and the default device. Work on `device` follows this thread's stream.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     here = thread_context(None)
    >>> with here():
    ...     torch.is_autocast_enabled("cpu")
    True
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST if torch.is_autocast_enabled(kind)]
    cached, default = torch.is_autocast_cache_enabled(), torch.get_default_device()
    here = torch.cuda.current_stream() if device is not None and device.type == "cuda" else None

    @contextmanager
    def inside() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            if default != torch.get_default_device():
                stack.enter_context(default)
            if here is None:
                yield
                return
            with torch.cuda.device(device):
                torch.cuda.current_stream().wait_stream(here)
                yield
                here.wait_stream(torch.cuda.current_stream())

    return inside
