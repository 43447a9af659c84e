"""The transport `Distributed`: a process per rank, under torchrun or `weft.transforms.launch`."""

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
from weft.torchapi.distributed import rendezvous_store, root_store
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.transports.agreement import Agreement
from weft.transforms.pipelines.transports.ends.gloo import GlooEnd
from weft.transforms.pipelines.transports.ends.nccl import NcclEnd
from weft.transforms.pipelines.transports.messaging import json_values
from weft.transforms.pipelines.transports.messaging.messages import (
    DeviceEnd,
    ProcessEnd,
    ProcessLink,
)
from weft.transforms.pipelines.transports.messaging.network import (
    Network,
    Secret,
    private_folder,
    shared_secret,
)
from weft.transforms.pipelines.transports.messaging.wire import Wire
from weft.transforms.pipelines.transports.watching.failures import check_timeout
from weft.transforms.pipelines.transports.watching.monitor import END, Monitor
from weft.transforms.pipelines.transports.watching.places import Places
from weft.transforms.pipelines.transports.watching.records import START, Records
from weft.transforms.pipelines.transports.watching.watchdog import Watchdog
from weft.transforms.pipelines.worker import Worker

BackendName = Literal["gloo", "nccl", "peer"]

# Seconds that processes have to find each other, if the time-out is shorter.
_START = 30.0
# Seconds between two queries of an event that the host waits for.
_PAUSE = 2e-5
_LAUNCHERS = "torchrun --nproc-per-node N script.py, or weft.transforms.launch(function, N)"


class Distributed:
    """A transport between processes, each of which is one rank.

    Every rank makes its transports in the same order, under `torchrun` or another launcher that
    sets the same variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), on any number of nodes.
    `Distributed` neither needs nor makes a default process group.

    On one machine it listens only on the loopback interface. Across machines, each node names the
    address at which the others reach it (`WEFT_ADDRESS`), and all nodes share one secret
    (`WEFT_SECRET`). A process without the secret is refused, and messages between ranks are never
    unpickled or executed. Tensors sent by gloo or NCCL are neither encrypted nor signed: use a
    trusted network.

    On a GPU a step returns before it is done, and a rank that fails leaves the others' results
    unfilled. Call `synchronize()` before the host reads results: it raises the error of the failed
    rank. If the host makes no call that could raise this error, the process ends with it.

    Args:
        device: the device of this rank's tensors. None: `cuda:LOCAL_RANK` if it exists, otherwise
            the CPU.
        backend: `gloo` for the CPU, `nccl` or `peer` for GPUs. None: `gloo` on the CPU, `nccl` on
            a GPU. `peer` stores into the neighbour's memory (symmetric memory, on GPUs of one node
            that can access each other).
        timeout: seconds that a rank may keep another rank waiting before the waiting rank raises
            RankError. A rank may take half an hour until its first step, while it loads and
            captures, as long as its process runs.

    Raises:
        ProgramError: there is no launcher; or the ranks are on several nodes without a secret or an
            address.
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
        self.rank, self.num_ranks = _find_rank()
        self.device = _device(device)
        self.backend = backend or ("gloo" if self.device.type == "cpu" else "nccl")
        self.timeout = timeout
        _check(self.backend, self.device)
        start = max(timeout, _START)
        network = Network.of(os.environ, self.num_ranks)
        prefix, store = _find_store(self.rank, self.num_ranks, start)
        self._busy = threading.Lock()
        # The mail of the session that has messages under way
        self._session: object = None
        with shared_secret(network.secret, store, self.rank) as secret:
            places = _make_places(network, secret, prefix, self.rank, self.num_ranks)
            records = Records(store, self.rank, root_store(store), secret, _host(), prefix, places)
            self.monitor = Monitor(records, self.num_ranks, timeout)
            end = _make_end(self.backend, self.monitor, self.device, network)
            wire = Wire(self.rank, self.num_ranks, secret, network.address)
            self._agreement = Agreement(self.rank)
            self._link = ProcessLink(end, self.monitor, wire, self._agreement, self.device)
            # The watchdog needs a separate connection to the store: a thread that waits on a
            # connection blocks all others that use it.
            apart = store.clone()
            beside = attrs.evolve(records, store=apart, exits=root_store(apart))
            self._watchdog = Watchdog(
                self.monitor, beside, end if isinstance(end, DeviceEnd) else None
            ).start()
            self._close = weakref.finalize(
                self, _close_all, end, wire, self._watchdog, self.monitor
            )
            # Also by `atexit`, since Python 3.13 drops finalizers in processes that it forks
            atexit.register(self._close)
            self._connect(wire, start)

    def _connect(self, wire: Wire, timeout: float) -> None:
        monitor = self.monitor
        places = self.monitor.records.places
        try:
            monitor.records.write(f"wire/{self.rank}", wire.address)
            addresses = [
                monitor.wait(f"wire/{peer}", peer, timeout) for peer in range(self.num_ranks)
            ]

            def connect() -> None:
                # Every rank connects to the ranks below it, so that a pair connects once.
                for peer in range(self.rank):
                    wire.connect(peer, addresses[peer], timeout)
                wire.await_ranks(timeout)
                self._link.end.connect(timeout)
                if places is not None:
                    places.meet()
                wire.meet()

            monitor.connect_together(connect, timeout)
            # All ranks have opened the files: without names, nothing is left after a crash.
            if places is not None:
                places.unlink()
        except RankError as error:
            self._watchdog.stand_down(error)
            raise

    @property
    def member(self) -> int:
        return self._link.member

    def ranks(self, num_ranks: int) -> Sequence[int]:
        if num_ranks != self.num_ranks:
            problem = f"{num_ranks} ranks and {self.num_ranks} processes"
            raise ProgramError(
                f"pipeline(..., transport={self!r})", problem, "a process for each rank"
            )
        return (self.rank,)

    def share(self, value: Any) -> Any:
        if self.rank:
            return self._recv_value(0)
        for peer in range(1, self.num_ranks):
            self._send_value(peer, value)
        return value

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks, in order, on every rank. All ranks make these calls in the same
        order.

        Args:
            value: numbers, texts, and tuples, lists, dicts, attrs classes and dataclasses of these.

        Raises:
            ProgramError: a value of another kind.
        """
        values = []
        # The lower rank of a pair sends first, so that the two do not wait for each other.
        for peer in range(self.num_ranks):
            if self.rank < peer:
                self._send_value(peer, value)
            values.append(value if peer == self.rank else self._recv_value(peer))
            if self.rank > peer:
                self._send_value(peer, value)
        return values

    def _send_value(self, peer: int, value: Any) -> None:
        # A tuple, so that a rank that receives the header of a step instead can tell.
        self._link.send_bytes(peer, json_values.dumps(("value", value), f"{self!r}.collect(value)"))

    def _recv_value(self, peer: int) -> Any:
        heard = json_values.loads(self._link.recv_bytes(peer))
        if not isinstance(heard, tuple):
            problem = f"a message of a step from rank {peer}, where its value was to come"
            raise ProgramError(
                f"{self!r}.collect(value)",
                problem,
                "the same calls in the same order on every rank",
            )
        return heard[1]

    def assert_equal(self, subject: str, value: str) -> None:
        self._agreement.add(subject, value)

    def mail(self, _: int, /) -> object:
        return object()

    def run(self, checked: CheckedPrograms, workers: Sequence[Worker], mail: object, /) -> None:
        left = self._session is not None and self._session is not mail
        # Without blocking: a call from inside another one, in the same thread, would wait for
        # itself.
        if left or not self._busy.acquire(blocking=False):
            problem = "a call while another one is under way, in another thread or around this one"
            instead = (
                "one call after the other, in the same order on every rank; or a transport for each"
            )
            if left:
                problem = (
                    "messages under way of a session that was not closed, which this call would"
                    " receive"
                )
                instead = "session.close() first, on every rank; or a transport for each"
            raise ProgramError(f"pipeline(..., transport={self!r})", problem, instead)
        try:
            self._run(checked, workers[0])
            self._session = mail if checked.leaves_messages else None
            if self._session is None:
                self._agreement.end()
        finally:
            self._busy.release()

    def _run(self, checked: CheckedPrograms, worker: Worker) -> None:
        try:
            self._watchdog.check()
            self.monitor.begin(checked)
            if self.monitor.here.step == 1:
                self.monitor.await_first_step()
            self._link.begin(checked, worker.first)
            effects = checked.programs[self.rank].effects
            lines = (*checked.lines[self.rank], END)
            start, stop = checked.span(self.rank)
            for index, effect in enumerate(effects[start:stop], start):
                # Before the effect: if it never ends, the others read here where this rank is.
                self.monitor.move_to(index, lines[index])
                worker.perform(effect, self._link)
                self._watchdog.launched(self.monitor.here)
            self.monitor.move_to(stop, lines[stop])
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Tell the others that this rank failed, and close its connections. Raises the reason if
        the watchdog knew one."""
        # First, since the watchdog also hears of the failure that is written next
        reason = self._watchdog.stand_down(error)
        self.monitor.fail(reason)
        self._link.end.close(failed=True)
        self._link.wire.close()
        if reason is not error:
            raise reason from error

    def check(self) -> None:
        """Raise RankError if a rank is known to have failed, and ProgramError if a rank was asked
        to do something else than this rank."""
        self._confirm(self._link.compare_arrived)

    def received(self, last: int | None = None, /) -> Callable[[], None]:
        """A function to call before the host reads results that its device computes from the
        messages received so far. It waits for the headers from the senders' hosts, and raises the
        same errors as `check`.

        Args:
            last: in a session, the number of the last job whose messages count. None: all count.
        """
        return partial(self._confirm, self._link.received(last))

    def _confirm(self, compare: Callable[[], None]) -> None:
        self._watchdog.check()
        try:
            self.monitor.raise_failure()
            compare()
        except BaseException as error:
            self._fail(error)
            raise

    def synchronize(self) -> None:
        """Wait until this rank's device has done all its work, including replays of graphs. Its
        results are valid only after that.

        Raises:
            RankError: a rank has failed, so that this rank's work never ends or has used messages
                that never arrived.
            ProgramError: a rank was asked to do something else than this rank.
        """
        if isinstance(self._link.end, DeviceEnd):
            self.monitor.move_to_sync()
            event = self._watchdog.launched(self.monitor.here)
            # Poll: a blocking wait may not return if another rank fails.
            while event is not None and not event.query():
                self._watchdog.check()
                time.sleep(_PAUSE)
        self.received()()

    def close(self) -> None:
        """Close the connections."""
        self._close()

    def __repr__(self) -> str:
        return f"Distributed(device='{self.device}', backend={self.backend!r})"


def end_of(transport: Distributed) -> ProcessEnd:
    """This rank's ends of the edges, which carry its tensors."""
    return transport._link.end


def _find_rank() -> tuple[int, int]:
    """This process's rank, and the number of ranks.

    Raises:
        ProgramError: there is no launcher, or its variables are wrong.
    """
    variables = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if len(variables) < 2:
        problem = "no RANK and WORLD_SIZE"
        instead = _LAUNCHERS
    elif all(text.isdecimal() for text in variables.values()) and int(variables["RANK"]) < int(
        variables["WORLD_SIZE"]
    ):
        return int(variables["RANK"]), int(variables["WORLD_SIZE"])
    else:
        problem = ", ".join(f"{name}={text!r}" for name, text in variables.items())
        instead = f"0 <= RANK < WORLD_SIZE: {_LAUNCHERS}"
    raise ProgramError("Distributed()", f"{problem} in the environment", instead)


def _find_store(rank: int, num_ranks: int, timeout: float) -> tuple[str, Any]:
    """The store that the ranks share, preceded by the prefix of its keys.

    Raises:
        ProgramError: the environment does not say where the store is.
        RankError: the store is not there.
    """
    call = f"Distributed() on rank {rank} of {num_ranks}"
    try:
        return rendezvous_store(rank, timeout)
    except ValueError as error:
        raise ProgramError(call, str(error).splitlines()[0], _LAUNCHERS) from error
    except RuntimeError as error:
        cause = f"the store of the run was not found ({str(error).splitlines()[0]:.120})"
        raise RankError(
            call, cause, "look whether rank 0, or its launcher, has started", 0, START, cause
        ) from error


def _make_places(
    network: Network, secret: Secret, prefix: str, rank: int, num_ranks: int
) -> Places | None:
    """The places of the ranks, in files whose names only the ranks of the run know. None if the
    ranks are on several machines, or if no such file can be made."""
    names = [
        secret.tag(b"place", prefix.encode(), str(one).encode()).hex() for one in range(num_ranks)
    ]
    try:
        if network.one_node:
            return Places([private_folder() / name for name in names], rank)
        return None
    # Files are only faster: without them, ranks write their positions to the store.
    except (OSError, ProgramError):
        return None


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.is_available() and local < torch.cuda.device_count()
    if on_gpu:
        return torch.device("cuda", local)
    return torch.device("cpu")


def _host() -> int | None:
    """The rank whose process hosts the store; None: the launcher's process does."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return 0


def _close_all(end: ProcessEnd, wire: Wire, watchdog: Watchdog, monitor: Monitor) -> None:
    """Close the connections. If another rank's failure keeps `end.close` from returning, the
    watchdog ends it."""
    with suppress(RankError), watchdog.during(monitor.here):
        end.close()
    wire.close()
    watchdog.close()
    if (places := monitor.records.places) is not None:
        places.unlink()


def _check(backend: str, device: torch.device) -> None:
    """Raise DeviceError unless the device exists and the back end can serve it."""
    if (backend, device.type) not in (("gloo", "cpu"), ("nccl", "cuda"), ("peer", "cuda")):
        problem = f"backend={backend!r} for a device of type {device.type}"
        instead = "gloo with the CPU, or nccl or peer with a GPU"
    elif device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        problem = f"{torch.cuda.device_count()} GPUs"
        instead = "a device for each process of the machine"
    else:
        return
    raise DeviceError(f"Distributed(backend={backend!r}, device='{device}')", problem, instead)


def _make_end(backend: str, monitor: Monitor, device: torch.device, network: Network) -> ProcessEnd:
    if backend == "gloo":
        return GlooEnd(monitor, network.address)
    torch.cuda.set_device(device)
    if backend == "nccl":
        return NcclEnd(monitor, device, "lo" if network.one_node else None)
    # Imported here, since it imports triton
    from weft.transforms.pipelines.transports.ends.peer import PeerEnd

    return PeerEnd(monitor, device, network.address)
