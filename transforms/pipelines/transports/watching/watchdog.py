"""The watchdog: a thread beside a rank, which shows the others that its process runs, and watches
its device.

On a device, a rank that fails shows as a kernel that never ends on the others. The host launches
work and goes on; events of the device's stream mark what it launched. The watchdog looks at the
oldest event that is not done, and at the records. Once another rank has failed, or nothing was done
for too long, it knows the reason and ends what waits on the device, and whatever the host next asks
of the transport raises that error.
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

# Seconds between two looks at a device.
_POLL = 0.05
# The most seconds between two heartbeats of a rank without a device.
_BEAT = 0.2
# Seconds in which the host must ask for a known failure, before its process is ended.
_GRACE = 5.0


@attrs.frozen(eq=False)
class Launch:
    """One effect on the device, or a call in which the host waits."""

    position: Position
    is_done: Callable[[], bool]


def end_process(error: RankError) -> None:
    """Print the error and end the process: nothing else ends a host that waits in a call for its
    device, which is why torch's own NCCL watchdog aborts as well."""
    print(described(error), file=sys.stderr, flush=True)
    os._exit(1)


class Watchdog:
    """A thread that beats, and watches the work of a rank's device. If the device, or without one
    the host, does not move on for long, it also reads the heartbeats of the others, to know which
    of them still run.

    Args:
        monitor: the host's view of the other ranks.
        records: which only this thread uses.
        device: the rank's end of its edges; None: the host works on the CPU, and finds failures
            itself.
        poll: seconds between two looks; None: by whether there is a device.
        grace: seconds in which the host must ask for a known failure while something is still to be
            done: it may hang, or read results that were never received.
        last_resort: called if it does not ask.
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
        """Watch for all work launched so far, `position` included; returns its event, if there is
        one."""
        if self._device is None:
            event = None
        else:
            event = self._device.record_event()
        if event is not None:
            self._launches.append(Launch(position, event.query))
        return event

    @contextmanager
    def during(self, position: Position) -> Iterator[None]:
        """Watch a call of the host, which may not return if another rank fails."""
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
        """Note that the host has failed with `error`, and so need not be told. Returns the reason:
        the failure that the watchdog knew before, or else `error`. Call it before the others hear
        of `error`, as the watchdog hears it too."""
        self._told.set()
        if self.error is None or isinstance(error, RankError):
            return error
        return self.error

    def close(self) -> None:
        """End the thread; and the process, if the device hangs, or if the host never asked for the
        failure."""
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
        while (error := self.look()) is None:
            if self._closed.wait(self._poll):
                return
        if self._hangs and not self._told.wait(self._grace):
            self._last_resort(error)

    def look(self) -> RankError | None:
        """Beat, and look whether a rank has failed; a failure ends what waits on the device."""
        try:
            error = self._find_failure()
        except RankError as lost:  # the records are gone
            error = lost
        except RuntimeError as broken:
            error = self._broken(broken)
        if error is not None and self._device is not None:
            self._hangs = bool(self._launches)
            self.error = error
            threading.Thread(
                target=self._device.abort, name="weft abort", daemon=True
            ).start()  # which may hang too
        return error

    def _broken(self, error: RuntimeError) -> RankError:
        """The error for a device that has itself failed, as its events say."""
        where = self._launches[0].position.instruction
        cause = f"its device failed: {str(error).splitlines()[0]:.120}"
        failure = Failure(self.monitor.rank, where, cause)
        return self.monitor.write_failure(failure).for_rank(self.monitor.rank, where)

    def _is_done(self) -> bool:
        """Whether the device has done all its work, and the host is in no call that is watched."""
        while self._launches and self._launches[0].is_done():
            self._launches.popleft()
            self._since = self.monitor.clock.now()
        return not self._launches

    def _has_moved(self) -> bool:
        """Whether the device, or without one the host, has moved on since the last look, or has
        nothing to do."""
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
