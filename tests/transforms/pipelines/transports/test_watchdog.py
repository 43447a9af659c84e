"""The watchdog of a device, with fakes for events and for the end that carries messages, without a
GPU."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from clocks import FakeTime
from ranks import scale

from weft.errors import RankError
from weft.meshes.collectives import AllReduce
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports.messaging.network import Secret
from weft.transforms.pipelines.transports.watching.failures import Clock, Failure
from weft.transforms.pipelines.transports.watching.monitor import SYNC, Monitor
from weft.transforms.pipelines.transports.watching.records import (
    START,
    Exit,
    Position,
    Records,
    write_exit,
)
from weft.transforms.pipelines.transports.watching.watchdog import Watchdog

SECRET = Secret.fresh()
PROGRAMS = CheckedPrograms(pipeline([scale] * 2).programs(1))


class Event:
    """A device event that the test completes."""

    def __init__(self) -> None:
        self.done = False
        self.broken: str | None = None

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError(self.broken)
        return self.done


class Device:
    """An end with pending work; an abort ends the work, unless the end is deaf."""

    def __init__(self, deaf: bool = False) -> None:
        self.deaf = deaf
        self.aborted = threading.Event()
        self.pending: list[Event] = []

    def record_event(self) -> Event:
        self.pending.append(Event())
        return self.pending[-1]

    def abort(self) -> None:
        self.aborted.set()
        for event in self.pending if not self.deaf else []:
            event.done = True

    def send(self, *_: Any) -> None: ...
    def recv(self, *_: Any) -> None: ...
    def connect(self, _: float, /) -> None: ...
    def drain(self) -> None: ...
    def close(self, failed: bool = False) -> None: ...


class Run:
    """Two ranks of a step, their devices, and the watchdog of each rank, which checks while the
    run's time passes.

    Args:
        threads: whether the watchdogs are threads that use the real clock.
    """

    def __init__(
        self, timeout: float = 0.3, grace: float = 0.3, deaf: bool = False, threads: bool = False
    ) -> None:
        self.store = dist.HashStore()
        self.time = FakeTime()
        self.ended: list[RankError] = []
        self.devices = [Device(deaf) for _ in range(2)]
        clock = Clock() if threads else self.time.clock
        records = [Records(self.store, rank, self.store, SECRET) for rank in range(2)]
        self.monitors = [Monitor(rank_records, 2, timeout, clock) for rank_records in records]
        for monitor in self.monitors:
            monitor.begin(PROGRAMS)
        self.watchdogs = [
            Watchdog(
                monitor,
                monitor.records,
                device,
                poll=0.01,
                grace=grace,
                last_resort=self.ended.append,
            )
            for monitor, device in zip(self.monitors, self.devices, strict=True)
        ]
        self.looking = [0, 1]
        if threads:
            for watchdog in self.watchdogs:
                watchdog.start()
        else:
            self.time.meanwhile.append(self.look)

    def look(self) -> None:
        """Each watchdog checks once, unless it knows of a failure."""
        for rank in self.looking:
            if self.watchdogs[rank].error is None:
                self.watchdogs[rank].look()

    def launch(self, rank: int, index: int) -> Event:
        """The rank's host moves to the next effect, and its device gets one more effect."""
        monitor = self.monitors[rank]
        effects = PROGRAMS.programs[rank].effects
        monitor.move_to(index, effects[index])
        event = self.watchdogs[rank].launched(monitor.here)
        monitor.move_to(index + 1, effects[index + 1] if index + 1 < len(effects) else "its end")
        assert isinstance(event, Event)
        return event

    def error_of(self, rank: int) -> RankError:
        """The error that a rank's watchdog detects."""
        while self.watchdogs[rank].error is None:
            assert self.time.now < 5.0, "the watchdog finds nothing"
            self.time.sleep(0.02)
        with pytest.raises(RankError) as error:
            self.watchdogs[rank].check()
        return error.value

    def close(self) -> None:
        for device in self.devices:
            for event in device.pending:
                event.broken = None
                event.done = True
        for watchdog in self.watchdogs:
            watchdog.close()


@pytest.fixture
def runs() -> Iterator[Callable[..., Run]]:
    started: list[Run] = []

    def make(**options: Any) -> Run:
        started.append(Run(**options))
        return started[-1]

    yield make
    for run in started:
        run.close()


def test_work_that_is_done_in_time_is_not_a_failure(runs: Callable[..., Run]) -> None:
    run = runs(timeout=0.6)
    for index in (0, 1):
        event = run.launch(0, index)
        run.time.run(0.4)
        event.done = True
    run.time.run(0.7)
    for watchdog in run.watchdogs:
        watchdog.check()
    assert not any(device.aborted.is_set() for device in run.devices)


def test_a_kernel_that_never_ends_is_blamed_on_its_rank_by_both(runs: Callable[..., Run]) -> None:
    """Rank 0's device hangs in its stage, though its host is at the end; rank 1's device waits to
    receive."""
    run = runs()
    run.launch(0, 0)
    run.launch(0, 1)
    run.launch(1, 0)
    run.launch(1, 1)
    for rank, waiting in enumerate(("run stage 0", "recv from 0")):
        error = run.error_of(rank)
        assert (error.rank, error.instruction) == (0, "run stage 0 [mb 0]")
        assert error.cause == "no progress for 0.3 s"
        assert error.call == f"rank {rank}: '{waiting} [mb 0]'"
        assert run.devices[rank].aborted.wait(1)
    assert 0.3 <= run.time.now < 0.4
    assert run.ended == []


def test_a_host_that_stalls_is_blamed_though_its_device_is_idle(runs: Callable[..., Run]) -> None:
    run = runs()
    run.monitors[0].move_to(0, PROGRAMS.programs[0].effects[0])
    run.launch(1, 0)
    error = run.error_of(1)
    assert (error.rank, error.instruction) == (0, "run stage 0 [mb 0]")
    assert (run.error_of(0).rank, run.ended) == (0, [])  # it hears of itself


def test_a_rank_whose_watchdog_is_gone_is_blamed_where_its_host_was(
    runs: Callable[..., Run],
) -> None:
    run = runs(timeout=0.8)
    run.launch(0, 0)  # the device is in its stage, the host about to send
    run.time.run(0.1)
    run.looking.remove(0)  # as if its process had been killed
    run.launch(1, 0)
    error = run.error_of(1)
    assert (error.rank, error.instruction) == (0, "send to 1 [mb 0]")
    assert error.cause == "no progress for 0.8 s: its process ended, or was stopped"


def test_of_replays_the_rank_that_waits_less_often_for_its_device_is_blamed(
    runs: Callable[..., Run],
) -> None:
    """A replay writes no records; rank 0 stalls before its second one."""
    run = runs()
    for rank, times in ((0, 1), (1, 2)):
        for count in range(times):
            run.monitors[rank].move_to_sync()
            event = run.watchdogs[rank].launched(run.monitors[rank].here)
            assert isinstance(event, Event)
            event.done = count == 0
    for rank in range(2):
        error = run.error_of(rank)
        assert (error.rank, error.instruction) == (0, SYNC)


def test_a_failure_that_is_written_down_is_heard_at_once(runs: Callable[..., Run]) -> None:
    run = runs(timeout=60)
    run.launch(1, 0)
    run.monitors[0].records.write_failure(Failure(0, "run stage 0 [mb 0]", "ValueError: no"))
    error = run.error_of(1)
    assert str(error).startswith(
        "rank 1: 'recv from 0 [mb 0]'\n  saw: rank 0 failed at 'run stage 0 [mb 0]': ValueError: no"
    )
    assert run.devices[1].aborted.wait(1)


def test_an_end_that_the_launcher_saw_is_heard_at_once(runs: Callable[..., Run]) -> None:
    run = runs(timeout=60)
    run.monitors[0].move_to(0, PROGRAMS.programs[0].effects[0])
    run.launch(1, 0)
    # This is not a failure
    write_exit(run.store, 1, Exit(True, "its function returned"), secret=SECRET)
    run.time.run(0.1)
    run.watchdogs[1].check()
    write_exit(run.store, 0, Exit(False, "SIGKILL"), secret=SECRET)
    error = run.error_of(1)
    assert (error.rank, error.instruction, error.cause) == (
        0,
        "run stage 0 [mb 0]",
        "its process ended: SIGKILL",
    )


def test_a_device_that_fails_itself_is_named(runs: Callable[..., Run]) -> None:
    run = runs(timeout=60)
    run.launch(0, 0).broken = "CUDA error: an illegal memory access was encountered\nand more"
    for rank in range(2):
        error = run.error_of(rank)
        assert (error.rank, error.instruction) == (0, "run stage 0 [mb 0]")
        assert (
            error.cause == "its device failed: CUDA error: an illegal memory access was encountered"
        )


def test_a_host_that_stays_in_a_collective_is_seen_there_by_the_others(
    runs: Callable[..., Run],
) -> None:
    run = runs(timeout=60)
    host = run.monitors[0]
    records = run.monitors[1].records
    host.move_to(0, PROGRAMS.programs[0].effects[0])
    with host.at_collective(AllReduce((0, 1)), 7):
        assert records.position(0).instruction == "all_reduce sum among 0, 1 [mb 0], number 7"
    assert (records.position(0).instruction, records.position(0).meetings) == (
        "run stage 0 [mb 0]",
        7,
    )
    with host.at_collective(AllReduce((0, 1)), 8):
        write_exit(run.store, 0, Exit(False, "SIGKILL"), secret=SECRET)
        assert run.error_of(1).instruction == "all_reduce sum among 0, 1 [mb 0], number 8"


def test_a_host_that_does_not_ask_is_ended_with_the_named_error(runs: Callable[..., Run]) -> None:
    run = runs(timeout=0.2, grace=0.1, threads=True)
    run.launch(1, 0)
    end = time.monotonic() + 5
    while not run.ended and time.monotonic() < end:
        time.sleep(0.01)
    assert [(error.rank, error.instruction) for error in run.ended] == [(0, START)]


def test_a_host_that_failed_itself_is_not_ended(runs: Callable[..., Run]) -> None:
    run = runs(timeout=60, grace=0.1, threads=True)
    run.launch(0, 0)
    mine = ValueError("mine")
    assert run.watchdogs[0].stand_down(mine) is mine
    run.monitors[0].fail(mine)
    time.sleep(0.4)
    assert run.ended == []


def test_what_a_host_raises_for_an_abort_is_explained(runs: Callable[..., Run]) -> None:
    run = runs(timeout=60)
    run.launch(1, 0)
    run.monitors[0].records.write_failure(Failure(0, "run stage 0 [mb 0]", "ValueError: no"))
    run.error_of(1)
    aborted = RuntimeError("NCCL communicator was aborted")
    reason = run.watchdogs[1].stand_down(aborted)
    assert isinstance(reason, RankError)
    assert reason.cause == "ValueError: no"


def test_a_call_that_does_not_return_is_watched(runs: Callable[..., Run]) -> None:
    run = runs(timeout=0.2)
    with (
        pytest.raises(RankError) as error,
        run.watchdogs[1].during(Position(instruction="connect")),
    ):
        run.time.run(0.3)
    assert run.devices[1].aborted.wait(5)
    assert error.value.call == "rank 1: 'connect'"


def test_a_device_that_hangs_to_the_end_ends_the_process(runs: Callable[..., Run]) -> None:
    run = runs(timeout=0.2, deaf=True)
    run.launch(1, 0)
    error = run.error_of(1)
    assert run.ended == []
    run.watchdogs[1].close()
    assert run.ended == [error]


def test_a_device_that_ends_soon_after_its_abort_does_not_end_the_process(
    runs: Callable[..., Run],
) -> None:
    run = runs(timeout=0.2, grace=5.0, deaf=True)
    event = run.launch(1, 0)
    run.error_of(1)

    def end() -> None:
        event.done = True

    threading.Timer(0.1, end).start()
    run.watchdogs[1].close()
    assert run.ended == []


def test_a_board_that_is_gone_is_an_error_too(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs(timeout=60)
    run.launch(1, 0)

    def gone(*_: Any) -> Any:
        raise RuntimeError("Connection reset by peer")

    class Gone:
        set = get = check = compare_set = gone

    run.watchdogs[1].monitor.records = Records(Gone(), 1, Gone(), SECRET)
    error = run.error_of(1)
    assert (
        "the launcher, which hosts the store of the run, has ended (Connection reset by peer)"
        in str(error)
    )
