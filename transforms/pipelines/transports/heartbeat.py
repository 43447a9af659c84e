"""The threads beside a rank: `Heartbeat` shows the others that its process runs; `Watchdog` watches its device.

On a device, a rank that fails shows as a kernel that never ends on the others. The host launches work and goes on;
events of the device's stream mark what it launched. The watchdog looks at the oldest event that is not done, and at the
records. Once another rank has failed, or nothing was done for too long, it knows the reason and ends what waits on the
device, and whatever the host next asks of the transport raises that error.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

import attrs

from weft.errors import RankError
from weft.transforms.pipelines.transports.failures import Failure, described
from weft.transforms.pipelines.transports.messages import DeviceEnd, DeviceEvent
from weft.transforms.pipelines.transports.monitor import END, Monitor
from weft.transforms.pipelines.transports.records import Position, Records

_POLL = 0.05
"""Seconds between two looks of a watchdog."""
_BEAT = 0.2
"""The most seconds between two heartbeats."""
_GRACE = 5.0
"""Seconds in which the host must ask for a known failure, before its process is ended."""


@attrs.frozen(eq=False)
class Launch:
    """The work that ends with `event`: one effect on the device, or a call in which the host waits."""

    position: Position
    event: DeviceEvent


class HostCall:
    """A call of the host that may not return, as an event."""

    def __init__(self) -> None:
        self.returned = False

    def query(self) -> bool:
        """Whether the call has returned."""
        return self.returned


def end_process(error: RankError) -> None:
    """Print the error and end the process: nothing else ends a host that waits in a call for its device, which is why
    torch's own NCCL watchdog aborts as well."""
    print(described(error), file=sys.stderr, flush=True)
    os._exit(1)


class Heartbeat:
    """A thread that beats. If its host does not move on for long, it also reads the heartbeats of the others, so that
    it knows which of them still run if the host waits in vain.

    Args:
        monitor: the host's; its place is read.
        records: which only this thread uses.
    """

    def __init__(self, monitor: Monitor, records: Records) -> None:
        self._monitor, self._records = monitor, records
        self._count = 0
        self._here: Position | None = None
        self._since = 0.0
        self._stopped = threading.Event()

    def start(self) -> Self:
        """Start the thread."""
        name = f"weft heartbeat of rank {self._monitor.rank}"
        threading.Thread(target=self._run, name=name, daemon=True).start()
        return self

    def _run(self) -> None:
        with suppress(RankError):  # the store is gone, which is seen by whoever waits
            self.beat()
            while not self._stopped.wait(min(_BEAT, self._monitor.timeout / 10)):
                self.beat()

    def beat(self) -> None:
        """Write one heartbeat, and look at the others' if the host has not moved for half the time-out."""
        monitor, now = self._monitor, self._monitor.clock.now()
        self._records.write_beat(self._count, None)
        self._count += 1
        if monitor.here is not self._here:
            self._here, self._since = monitor.here, now
        elif now - self._since > monitor.timeout / 2 and self._here.instruction != END:
            monitor.liveness.observe(self._records, range(monitor.num_ranks))

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()


class Watchdog:
    """A thread that watches the work of a rank's device.

    Args:
        monitor: the rank's view of the others, which only this thread uses (`Monitor.for_thread`).
        end: the rank's end of its edges.
        poll: seconds between two looks.
        grace: seconds in which the host must ask for a known failure while something is still to be done: it may hang,
            or read results that were never received.
        last_resort: called if it does not ask.
    """

    def __init__(
        self,
        monitor: Monitor,
        end: DeviceEnd,
        *,
        poll: float = _POLL,
        grace: float = _GRACE,
        last_resort: Callable[[RankError], None] = end_process,
    ) -> None:
        self.monitor = monitor
        self.error: RankError | None = None
        self.end = end
        self._poll, self._grace, self._last_resort = poll, grace, last_resort
        self._launches: deque[Launch] = deque()
        self._count, self._since = 0, monitor.clock.now()
        self._hangs = False
        self._closed, self._told = threading.Event(), threading.Event()
        name = f"weft watchdog of rank {monitor.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def launched(self, position: Position) -> DeviceEvent | None:
        """Watch for all work launched so far, `position` included; returns its event, if there is one."""
        event = self.end.record_event()
        if event is not None:
            self._launches.append(Launch(position, event))
        return event

    @contextmanager
    def during(self, position: Position) -> Iterator[None]:
        """Watch a call of the host, which may not return if another rank fails."""
        call = HostCall()
        self._launches.append(Launch(position, call))
        try:
            yield
        finally:
            call.returned = True
        self.check()

    def check(self) -> None:
        """Raise RankError if a failure is known."""
        if self.error is not None:
            self._told.set()
            raise self.error

    def stand_down(self, error: BaseException) -> BaseException:
        """Note that the host has failed with `error`, and so need not be told. Returns the reason: the failure that the
        watchdog knew before, or else `error`. Call it before the others hear of `error`, as the watchdog hears it
        too."""
        self._told.set()
        return error if self.error is None or isinstance(error, RankError) else self.error

    def close(self) -> None:
        """End the thread; and the process, if the device hangs, or if the host never asked for the failure."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(self._poll + self._grace)
        deadline = time.monotonic() + self._grace  # an abort takes the device a moment
        while self.error is not None and not self._is_done():
            if time.monotonic() >= deadline:
                self._last_resort(self.error)
                return
            time.sleep(self._poll / 10)

    def _run(self) -> None:
        while not self._closed.wait(self._poll):
            if (error := self.look()) is not None:
                if self._hangs and not self._told.wait(self._grace):
                    self._last_resort(error)
                return

    def look(self) -> RankError | None:
        """Write where the device is, and look whether a rank has failed; a failure ends what waits on the device."""
        try:
            error = self._find_failure()
        except RankError as lost:  # the records are gone
            error = lost
        except RuntimeError as broken:
            error = self._broken(broken)
        if error is not None:
            self._hangs, self.error = bool(self._launches), error
            threading.Thread(target=self.end.abort, name="weft abort", daemon=True).start()  # an abort may hang too
        return error

    def _broken(self, error: RuntimeError) -> RankError:
        """The error for a device that has itself failed, as its events say."""
        where = self._launches[0].position.instruction
        cause = f"its device failed: {str(error).splitlines()[0]:.120}"
        failure = Failure(self.monitor.rank, where, cause)
        return self.monitor.write_failure(failure).for_rank(self.monitor.rank, where)

    def _is_done(self) -> bool:
        """Whether the device has done all its work, and the host is in no call that is watched."""
        while self._launches and self._launches[0].event.query():
            self._launches.popleft()
            self._since = self.monitor.clock.now()
        return not self._launches

    def _find_failure(self) -> RankError | None:
        monitor, records = self.monitor, self.monitor.records
        if self._is_done():
            self._since = monitor.clock.now()
        oldest = self._launches[0].position if self._launches else None
        self._count += 1
        records.write_beat(self._count, oldest)
        waiting = "the next step" if oldest is None else oldest.instruction
        if (failure := records.failure()) is not None:
            return failure.for_rank(monitor.rank, waiting)
        for peer in range(monitor.num_ranks):
            ended = records.exit(peer)
            if ended is not None and not ended.clean:
                return monitor.explain(peer, "its process ended", closed=True, waiting=waiting)
        late = monitor.clock.now() - self._since
        if oldest is None or late < monitor.timeout / 2:
            return None
        monitor.liveness.observe(records, range(monitor.num_ranks))
        if late < monitor.timeout:
            return None
        return monitor.explain(monitor.rank, f"no progress for {monitor.timeout:g} s", waiting=waiting)
