"""The transport `Distributed`: a process for each rank, under torchrun or `weft.transforms.launch`."""

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

# The least number of seconds that processes have to find each other.
_START = 30.0
# Seconds between two looks at an event that the host waits for.
_PAUSE = 2e-5
_LAUNCHERS = "torchrun --nproc-per-node N script.py, or weft.transforms.launch(function, N)"


class Distributed:
    """A transport between processes, each of which is one rank.

    Every rank makes it, in the same order: under `torchrun`, or under another launcher that sets
    its variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), on any number of nodes. It neither
    needs nor makes a default process group.

    On one machine it listens only on the loopback interface. Across machines, each node names the
    address at which the others reach it (`WEFT_ADDRESS`), and all hold one secret (`WEFT_SECRET`).
    A process that does not hold it is refused, and nothing that ranks tell each other is ever
    unpickled or executed. The tensors themselves, by gloo or NCCL, are neither encrypted nor
    signed: use a network that you trust.

    On a GPU a step returns before it is done, and a rank that fails leaves the others' results
    unfilled. Call `synchronize()` before the host reads results: it raises the error of the failed
    rank. If the host makes no call that could raise it, the process ends with that error.

    Args:
        device: of this rank's tensors; None: `cuda:LOCAL_RANK` if there is one, else the CPU.
        backend: `gloo` for the CPU, `nccl` or `peer` for GPUs; None: by the device. `peer` stores
            into the neighbour's memory (symmetric memory, on GPUs of one node that reach each
            other).
        timeout: seconds that a rank may keep another one waiting before that raises RankError. A
            rank may take half an hour to its first step, while it loads and captures, as long as
            its process runs.

    Raises:
        ProgramError: not under a launcher; or ranks on several nodes without a secret or an
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
        self._session: object = None  # the mail of the session that has messages under way
        with shared_secret(network.secret, store, self.rank) as secret:
            places = _make_places(network, secret, prefix, self.rank, self.num_ranks)
            records = Records(store, self.rank, root_store(store), secret, _host(), prefix, places)
            self.monitor = Monitor(records, self.num_ranks, timeout)
            end = _make_end(self.backend, self.monitor, self.device, network)
            wire = Wire(self.rank, self.num_ranks, secret, network.address)
            self._agreement = Agreement(self.rank)
            self._link = ProcessLink(end, self.monitor, wire, self._agreement, self.device)
            apart = store.clone()  # whoever waits on a connection holds it
            beside = attrs.evolve(records, store=apart, exits=root_store(apart))
            self._watchdog = Watchdog(
                self.monitor, beside, end if isinstance(end, DeviceEnd) else None
            ).start()
            self._close = weakref.finalize(
                self, _close_all, end, wire, self._watchdog, self.monitor
            )
            atexit.register(self._close)  # Python 3.13 drops finalizers in processes that it forks
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
                for peer in range(self.rank):
                    wire.connect(peer, addresses[peer], timeout)
                wire.await_ranks(timeout)
                self._link.end.connect(timeout)
                if places is not None:
                    places.meet()
                wire.meet()

            monitor.connect_together(connect, timeout)
            if places is not None:
                places.unlink()
        except RankError as error:
            self._watchdog.stand_down(error)
            raise

    @property
    def end(self) -> ProcessEnd:
        """This rank's ends of the edges, which carry its tensors."""
        return self._link.end

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
        """The values of all ranks, in order, on every rank. All ranks call it, in the same order.

        Args:
            value: numbers, texts, and tuples, lists, dicts, attrs classes and dataclasses of them.

        Raises:
            ProgramError: a value of another kind.
        """
        values = []
        # The lower one of two ranks sends first, so that they do not wait for each other.
        for peer in range(self.num_ranks):
            if self.rank < peer:
                self._send_value(peer, value)
            values.append(value if peer == self.rank else self._recv_value(peer))
            if self.rank > peer:
                self._send_value(peer, value)
        return values

    def _send_value(self, peer: int, value: Any) -> None:
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
                self.monitor.move_to(index, lines[index])
                worker.perform(effect, self._link)
                self._watchdog.launched(self.monitor.here)
            self.monitor.move_to(stop, lines[stop])
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Tell the others that this rank failed, and close its connections; raises the reason if
        its watchdog knew one."""
        reason = self._watchdog.stand_down(error)
        self.monitor.fail(reason)
        self._link.end.close(failed=True)
        self._link.wire.close()
        if reason is not error:
            raise reason from error

    def check(self) -> None:
        """Raise RankError if a rank is known to have failed, and ProgramError if one was asked for
        something else."""
        self._confirm(self._link.compare_arrived)

    def received(self, last: int | None = None, /) -> Callable[[], None]:
        """A function to call before the host reads what its device computes from the messages
        received so far. It waits for their headers from the senders' hosts, and raises as `check`
        does.

        Args:
            last: in a session, the number of the last job whose messages count; None: all count.
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
        """Wait until this rank's device has done all its work, replays of graphs included. Only
        then are its results valid.

        Raises:
            RankError: a rank has failed, so that this rank's work never ends, or used messages that
                never arrived.
            ProgramError: a rank was asked for something else.
        """
        if isinstance(self.end, DeviceEnd):
            self.monitor.move_to_sync()
            event = self._watchdog.launched(self.monitor.here)
            while event is not None and not event.query():
                self._watchdog.check()
                time.sleep(_PAUSE)
        self.received()()

    def close(self) -> None:
        """Close the connections."""
        self._close()

    def __repr__(self) -> str:
        return f"Distributed(device='{self.device}', backend={self.backend!r})"


def _find_rank() -> tuple[int, int]:
    """This process's rank, and the number of ranks.

    Raises:
        ProgramError: not under a launcher, or its variables are wrong.
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
    """The prefix of the keys of the store that the ranks share, and the store.

    Raises:
        ProgramError: the environment does not say where it is.
        RankError: it is not there.
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
    """The places of the ranks, in files whose names only the ranks of the run know; None: on
    several machines, or where no such file can be made."""
    names = [
        secret.tag(b"place", prefix.encode(), str(one).encode()).hex() for one in range(num_ranks)
    ]
    try:
        if network.one_node:
            return Places([private_folder() / name for name in names], rank)
        return None
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
    """Close the connections. The watchdog ends the call if another rank's failure keeps it from
    returning."""
    with suppress(RankError), watchdog.during(monitor.here):
        end.close()
    wire.close()
    watchdog.close()
    if (places := monitor.records.places) is not None:
        places.unlink()


def _check(backend: str, device: torch.device) -> None:
    """Raise DeviceError unless the device is there and the back end can serve it."""
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
    from weft.transforms.pipelines.transports.ends.peer import PeerEnd  # it imports triton

    return PeerEnd(monitor, device, network.address)
