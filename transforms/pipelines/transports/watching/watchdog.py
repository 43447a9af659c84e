"""The watchdog: a thread beside a rank, which shows the others that its process runs, and watches
its device.

On devices, the failure of a rank shows on the other ranks as a kernel that never ends. The host
launches work without waiting for it; events of the device's stream mark the launched work. The
watchdog looks at the oldest event that is not done, and at the records. Once another rank has
failed, or nothing was done for too long, the watchdog finds the reason and ends the kernels that
wait on the device. The host's next call of the transport then raises that error.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import attrs

from weft.errors import RankError
from weft.transforms.pipelines.transports.messaging.messages import DeviceEnd, DeviceEvent
from weft.transforms.pipelines.transports.watching.failures import Failure, described
from weft.transforms.pipelines.transports.watching.monitor import END, Monitor
from weft.transforms.pipelines.transports.watching.records import Position, Records

# Seconds between two checks of a device
_POLL = 0.05
# The most seconds between two heartbeats of a rank without a device
_BEAT = 0.2
# Seconds that the host has to ask for a known failure before its process is ended
_GRACE = 5.0


@attrs.frozen(eq=False)
class Launch:
    """An effect that runs on the device, or a call in which the host waits."""

    position: Position
    is_done: Callable[[], bool]


def end_process(error: RankError) -> None:
    """Print the error and end the process. Nothing else can end a host that waits for its device
    inside a call; torch's own NCCL watchdog aborts the process for the same reason."""
    print(described(error), file=sys.stderr, flush=True)
    os._exit(1)


class Watchdog:
    """A thread that writes heartbeats and watches the work of a rank's device. If the device (or
    the host, if there is no device) makes no progress for long, the thread also reads the
    heartbeats of the other ranks, to know which of them still run.

    Args:
        monitor: the host's view of the other ranks.
        records: access to the records that only this thread uses.
        device: the rank's end of its edges. None: the host works on the CPU, and finds failures
            itself.
        poll: seconds between two checks. None: the default with or without a device.
        grace: seconds that the host has to ask for a known failure while work is unfinished. A host
            that does not ask may hang, or read results that were never received.
        last_resort: called if the host does not ask in time.
    """

    def __init__(
        self,
        monitor: Monitor,
        records: Records,
        device: DeviceEnd | None,
        *,
        poll: float | None = None,
        grace: float = _GRACE,
        last_resort: Callable[[RankError], None] = end_process,
    ) -> None:
        self.monitor = monitor.for_thread(records)
        self.error: RankError | None = None
        self._host = monitor
        self._device = device
        self._here: Position | None = None
        self._poll = poll or (min(_BEAT, monitor.timeout / 10) if device is None else _POLL)
        self._grace = grace
        self._last_resort = last_resort
        self._launches: deque[Launch] = deque()
        self._count = 0
        self._since = monitor.clock.now()
        self._hangs = False
        self._closed = threading.Event()
        self._told = threading.Event()
        name = f"weft watchdog of rank {monitor.rank}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def launched(self, position: Position) -> DeviceEvent | None:
        """Watch all work launched so far, up to and including `position`. Returns the event that
        marks its end, or None if there is none."""
        if self._device is None:
            event = None
        else:
            event = self._device.record_event()
        if event is not None:
            self._launches.append(Launch(position, event.query))
        return event

    @contextmanager
    def during(self, position: Position) -> Iterator[None]:
        """Watch a call of the host that may not return if another rank fails."""
        returned = threading.Event()
        self._launches.append(Launch(position, returned.is_set))
        try:
            yield
        finally:
            returned.set()
        self.check()

    def check(self) -> None:
        """Raise RankError if a failure is known."""
        if self.error is not None:
            self._told.set()
            raise self.error

    def stand_down(self, error: BaseException) -> BaseException:
        """Note that the host has failed with `error`, and therefore need not be told of a failure.
        Returns the reason: the failure that the watchdog knew before, or else `error`. Call this
        before `error` is written for the others, since the watchdog reads it too."""
        self._told.set()
        if self.error is None or isinstance(error, RankError):
            return error
        return self.error

    def close(self) -> None:
        """End the thread. Also end the process if the device hangs after a failure, or if the host
        never asked for it."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(self._poll + self._grace)
        # An abort takes the device a moment.
        deadline = time.monotonic() + self._grace
        while self.error is not None and not self._is_done():
            if time.monotonic() >= deadline:
                self._last_resort(self.error)
                return
            time.sleep(self._poll / 10)

    def _run(self) -> None:
        while (error := self.look()) is None:
            if self._closed.wait(self._poll):
                return
        if self._hangs and not self._told.wait(self._grace):
            self._last_resort(error)

    def look(self) -> RankError | None:
        """Write a heartbeat and check whether a rank has failed. After a failure, end every wait on
        the device."""
        try:
            error = self._find_failure()
        except RankError as lost:
            # The records are gone.
            error = lost
        except RuntimeError as broken:
            error = self._broken(broken)
        if error is not None and self._device is not None:
            self._hangs = bool(self._launches)
            self.error = error
            # In a thread, since an abort may hang too
            threading.Thread(target=self._device.abort, name="weft abort", daemon=True).start()
        return error

    def _broken(self, error: RuntimeError) -> RankError:
        """The error for a device that has itself failed, which its events report."""
        where = self._launches[0].position.instruction
        cause = f"its device failed: {str(error).splitlines()[0]:.120}"
        failure = Failure(self.monitor.rank, where, cause)
        return self.monitor.write_failure(failure).for_rank(self.monitor.rank, where)

    def _is_done(self) -> bool:
        """Whether the device has done all its work, and the host is in no watched call."""
        while self._launches and self._launches[0].is_done():
            self._launches.popleft()
            self._since = self.monitor.clock.now()
        return not self._launches

    def _has_moved(self) -> bool:
        """Whether the device (or the host, if there is no device) has made progress since the last
        check, or has nothing to do."""
        if self._device is not None:
            return self._is_done()
        before = self._here
        self._here = self._host.here
        return self._here is not before or self._here.instruction == END

    def _find_failure(self) -> RankError | None:
        monitor = self.monitor
        records = self.monitor.records
        if self._has_moved():
            self._since = monitor.clock.now()
        if self._launches:
            oldest = self._launches[0].position
        else:
            oldest = None
        self._count += 1
        records.write_beat(self._count, oldest)
        late = monitor.clock.now() - self._since
        # Only two looks, some time apart, can tell that a heartbeat has stopped, so the first one
        # comes at half of the time-out. Each costs round trips to the store for every rank.
        if late >= monitor.timeout / 2:
            monitor.liveness.observe(records, range(monitor.num_ranks))
        if self._device is None:
            return None
        if oldest is None:
            waiting = "the next step"
        else:
            waiting = oldest.instruction
        if (failure := records.failure()) is not None:
            return failure.for_rank(monitor.rank, waiting)
        for peer in range(monitor.num_ranks):
            ended = records.exit(peer)
            if ended is not None and not ended.clean:
                return monitor.explain(peer, "its process ended", gone=[peer], waiting=waiting)
        if oldest is None or late < monitor.timeout:
            return None
        return monitor.explain(
            monitor.rank, f"no progress for {monitor.timeout:g} s", waiting=waiting
        )
