"""The transport `distributed`: a process for each rank, under torchrun or `weft.transforms.launch`."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import attrs
import torch

from weft.errors import DeviceError, ProgramError, RankError
from weft.torchdist import rendezvous_store, root_store
from weft.transforms.pipelines.transports import plain
from weft.transforms.pipelines.transports.agreement import Agreement
from weft.transforms.pipelines.transports.board import START, Board
from weft.transforms.pipelines.transports.failures import check_timeout
from weft.transforms.pipelines.transports.gloo import GlooEnd
from weft.transforms.pipelines.transports.guard import Guard, Heart
from weft.transforms.pipelines.transports.meeting import attend, gather
from weft.transforms.pipelines.transports.messages import DeviceEnd, ProcessEnd, ProcessLink
from weft.transforms.pipelines.transports.nccl import NcclEnd
from weft.transforms.pipelines.transports.network import Network
from weft.transforms.pipelines.transports.plan import Plan
from weft.transforms.pipelines.transports.secret import shared_secret
from weft.transforms.pipelines.transports.watch import END, Watch
from weft.transforms.pipelines.transports.wire import Wire
from weft.transforms.pipelines.transports.worker import Worker

BackendName = Literal["gloo", "nccl", "peer"]

_START = 30.0
"""Seconds that the processes have, at least, to find each other."""
_PAUSE = 2e-5
"""Seconds between two looks at an event by a host that waits for it."""
_LAUNCHERS = "torchrun --nproc-per-node N script.py, or weft.transforms.launch(function, N)"


class Distributed:
    """This process is one rank; its messages go by torch.distributed.

    Made by every rank, in the same order. Under `torchrun`, or a launcher that sets its variables (RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT), on any number of nodes. It keeps to itself: no default process group is needed, or made.

    On one machine it listens on the loopback interface alone. Across machines each node names the address at which the
    others reach it (`WEFT_ADDRESS`), and all hold one secret (`WEFT_SECRET`): a process that does not hold it is
    refused, and nothing that ranks tell each other is ever unpickled or executed. The tensors themselves, by gloo or
    NCCL, are neither encrypted nor signed: use a network that you trust.

    With a GPU a step returns before it is done, and a rank that fails leaves the others' results unfilled: call
    `synchronize()` before results are read on the host. Where nobody asks, the process ends with the named error.

    Args:
        device: where this rank's tensors are; None: `cuda:LOCAL_RANK` where there is one, else the CPU.
        backend: `gloo` for the CPU, `nccl` or `peer` for GPUs; None: by the device. `peer` stores into the neighbour's
            memory (symmetric memory, GPUs of one node that reach each other).
        timeout: seconds that a rank may keep another one waiting before that raises RankError. Before its first step,
            where it loads and captures, it may take half an hour, as long as its process runs.

    Raises:
        ProgramError: not under a launcher; ranks on several nodes without a secret or an address.
        DeviceError: the back end cannot serve the device.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        backend: BackendName | None = None,
        timeout: float = 30.0,
    ) -> None:
        check_timeout("Distributed", timeout)
        self.rank, self.num_ranks = _place()
        self.device = _device(device)
        self.backend = backend or ("gloo" if self.device.type == "cpu" else "nccl")
        self.timeout = timeout
        _check(self.backend, self.device)
        start = max(timeout, _START)
        network = Network.of(os.environ, self.num_ranks)
        prefix, store = _find_store(self.rank, self.num_ranks, start)
        self._busy = threading.Lock()
        self._open: object = None  # the mail of a session that has messages under way
        with shared_secret(network.secret, store, self.rank) as secret:
            board = Board(store, self.rank, root_store(store), secret, _host(), prefix)
            self.watch = Watch(board, self.num_ranks, timeout)
            end = _make_end(self.backend, self.watch, self.device, network)
            wire = Wire(self.rank, self.num_ranks, secret, network.address)
            self._agreement = Agreement(self.rank)
            self._link = ProcessLink(end, self.watch, wire, self._agreement, self.device)
            apart = store.clone()  # a connection is held as long as somebody waits on it
            beside = attrs.evolve(board, store=apart, exits=root_store(apart))
            self._guard = _make_guard(end, self.watch, beside)
            self._close = weakref.finalize(self, _shut, end, wire, self._guard, self.watch)
            atexit.register(self._close)  # Python 3.13 forgets finalizers in processes that it forks
            self._connect(wire, start)

    def _connect(self, wire: Wire, timeout: float) -> None:
        watch = self.watch
        try:
            watch.board.write(f"wire/{self.rank}", wire.address)
            gather(watch, timeout)
            found = {peer: watch.board.read(f"wire/{peer}") for peer in range(self.rank)}

            def connect() -> None:
                for peer, address in found.items():
                    wire.connect(peer, address, timeout)
                wire.await_ranks(timeout)
                self._link.end.connect(timeout)

            attend(watch, connect, timeout)
        except RankError as error:
            if isinstance(self._guard, Guard):
                self._guard.stand_down(error)
            raise

    @property
    def end(self) -> ProcessEnd:
        """This rank's ends of the edges."""
        return self._link.end

    def ranks(self, num_ranks: int) -> Sequence[int]:
        if num_ranks != self.num_ranks:
            seen = f"{num_ranks} stages and {self.num_ranks} processes"
            raise ProgramError(f"pipeline(..., transport={self!r})", seen, "a process for each stage")
        return (self.rank,)

    def share(self, value: Any) -> Any:
        if self.rank:
            return self._hear(0)
        for peer in range(1, self.num_ranks):
            self._tell(peer, value)
        return value

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, in order, on every rank. Each calls it, in the same order.

        Args:
            value: numbers, texts, and tuples, lists, dicts, attrs classes and dataclasses of these.

        Raises:
            ProgramError: a value of another kind.
        """
        found = []
        for peer in range(self.num_ranks):  # of two ranks the lower one speaks first, so that none waits in a circle
            if self.rank < peer:
                self._tell(peer, value)
            found.append(value if peer == self.rank else self._hear(peer))
            if self.rank > peer:
                self._tell(peer, value)
        return found

    def _tell(self, peer: int, value: Any) -> None:
        self._link.tell(peer, plain.dumps(("value", value), f"{self!r}.collect(value)"))

    def _hear(self, peer: int) -> Any:
        heard = plain.loads(self._link.hear(peer))
        if not isinstance(heard, tuple):
            seen = f"a message of a step from rank {peer}, where its value was to come"
            raise ProgramError(f"{self!r}.collect(value)", seen, "the same calls in the same order on every rank")
        return heard[1]

    def assert_equal(self, subject: str, value: str) -> None:
        self._agreement.add(subject, value)

    def mail(self, _: int, /) -> object:
        return object()

    def run(self, plan: Plan, workers: Sequence[Worker], mail: object, /) -> None:
        call = f"pipeline(..., transport={self!r})"
        if self._open is not None and self._open is not mail:
            seen = "messages under way of a session that was not closed, which this call would receive"
            raise ProgramError(call, seen, "session.close() first, on every rank; or a transport for each")
        if not self._busy.acquire(blocking=False):
            seen = "a call while another one is under way, in another thread or around this one"
            raise ProgramError(
                call, seen, "one call after the other, in the same order on every rank; or a transport for each"
            )
        try:
            self._run(plan, workers[0])
            self._open = mail if plan.leaves else None
            if self._open is None:
                self._agreement.end()
        finally:
            self._busy.release()

    def _run(self, plan: Plan, worker: Worker) -> None:
        try:
            if isinstance(self._guard, Guard):
                self._guard.check()
            self.watch.begin(plan)
            if self.watch.here.step == 1:
                self.watch.await_ranks()
            self._link.begin(plan, worker.first)
            effects, (start, stop) = plan.programs[self.rank].effects, plan.span(self.rank)
            for index, effect in enumerate(effects[start:stop], start):
                self.watch.at(index, effect)
                worker.perform(effect, self._link)
                if isinstance(self._guard, Guard):
                    self._guard.launched(self.watch.here)
            self.watch.at(stop, effects[stop] if stop < len(effects) else END)
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Tell the others that this rank failed, and close its connections; raises what its guard knew before."""
        reason = self._guard.stand_down(error) if isinstance(self._guard, Guard) else error
        self.watch.fail(reason)
        self._link.end.close(failed=True)
        self._link.wire.close()
        if reason is not error:
            raise reason from error

    def check(self) -> None:
        """Raise RankError if a rank is known to have failed, and ProgramError if one was asked for something else."""
        self._confirm(self._link.compare_arrived)

    def received(self, last: int | None = None, /) -> Callable[[], None]:
        """A function to call before a host reads what its device computes of what was received so far: it waits for
        what the senders' hosts say of these messages, and raises as `check` does.

        Args:
            last: of a session, the number of the job up to which they are meant; None: all.
        """
        return partial(self._confirm, self._link.received(last))

    def _confirm(self, compare: Callable[[], None]) -> None:
        if isinstance(self._guard, Guard):
            self._guard.check()
        self.watch.raise_failure()
        try:
            compare()
        except BaseException as error:
            self._fail(error)
            raise

    def synchronize(self) -> None:
        """Wait until this rank's device has done what it was told, replays of graphs included: only then is what it
        computed to be believed.

        Raises:
            RankError: a rank has failed, so that it never will, or that it did not receive what it computed with.
            ProgramError: a rank was asked for something else.
        """
        if isinstance(self._guard, Guard):
            self.watch.at_sync()
            event = self._guard.launched(self.watch.here)
            while event is not None and not event.query():
                self._guard.check()
                time.sleep(_PAUSE)
        self.received()()

    def close(self) -> None:
        """Close the connections."""
        self._close()

    def __repr__(self) -> str:
        return f"Distributed(device='{self.device}', backend={self.backend!r})"


def _place() -> tuple[int, int]:
    """This process's rank, and of how many.

    Raises:
        ProgramError: not under a launcher, or its variables cannot be.
    """
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if len(found) < 2:
        raise ProgramError("Distributed()", "no RANK and WORLD_SIZE in the environment", _LAUNCHERS)
    if not all(text.isdecimal() for text in found.values()) or not int(found["RANK"]) < int(found["WORLD_SIZE"]):
        seen = ", ".join(f"{name}={text!r}" for name, text in found.items())
        raise ProgramError("Distributed()", f"{seen} in the environment", f"0 <= RANK < WORLD_SIZE: {_LAUNCHERS}")
    return int(found["RANK"]), int(found["WORLD_SIZE"])


def _find_store(rank: int, num_ranks: int, timeout: float) -> tuple[str, Any]:
    """The prefix of the keys of the store that the ranks share, and the store.

    Raises:
        ProgramError: the environment does not say where.
        RankError: there is none.
    """
    call = f"Distributed() on rank {rank} of {num_ranks}"
    try:
        return rendezvous_store(rank, num_ranks, timeout)
    except ValueError as error:
        raise ProgramError(call, str(error).splitlines()[0], _LAUNCHERS) from error
    except RuntimeError as error:
        cause = f"the store of the run was not found ({str(error).splitlines()[0]:.120})"
        raise RankError(call, cause, "look whether rank 0, or its launcher, has started", 0, START, cause) from error


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    return torch.device("cuda", local) if on_gpu else torch.device("cpu")


def _host() -> int | None:
    """The rank whose process hosts the store; None: its launcher's."""
    return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0


def _make_guard(end: ProcessEnd, watch: Watch, board: Board) -> Guard | Heart:
    """What runs beside a rank: for work on a device a guard, which beats too."""
    return Guard(watch.beside(board), end) if isinstance(end, DeviceEnd) else Heart(watch, board)


def _shut(end: ProcessEnd, wire: Wire, guard: Guard | Heart, watch: Watch) -> None:
    """Close the connections; where a guard knows better, in vain, and then it says so."""
    if isinstance(guard, Guard):
        with suppress(RankError), guard.during(watch.here):
            end.close()
    else:
        end.close()
    wire.close()
    guard.close()


def _check(backend: str, device: torch.device) -> None:
    """Raise DeviceError unless the back end can serve the device, and the device is there."""
    call = f"Distributed(backend={backend!r}, device='{device}')"
    if (backend, device.type) not in (("gloo", "cpu"), ("nccl", "cuda"), ("peer", "cuda")):
        seen = f"backend={backend!r} for a device of type {device.type}"
        raise DeviceError(call, seen, "gloo with the CPU, or nccl or peer with a GPU")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(call, f"{torch.cuda.device_count()} GPUs", "a device for each process of the machine")


def _make_end(backend: str, watch: Watch, device: torch.device, network: Network) -> ProcessEnd:
    if backend == "gloo":
        return GlooEnd(watch, network.address)
    torch.cuda.set_device(device)
    if backend == "nccl":
        return NcclEnd(watch, device, "lo" if network.one_node else None)
    from weft.transforms.pipelines.transports.peer import PeerEnd  # it imports triton

    return PeerEnd(watch, device, network.address)
