"""What runs beside a rank. A heart beats, so that others see that its process runs; a guard, where the work runs on a
device, does that and more: there, a rank that fails shows as a kernel that never ends.

The host launches and goes on; what it launched is marked by events of the device's stream. A thread looks at the oldest
event that is not done, and at the board. Once another rank has failed, or nothing was done for too long, it knows the
reason, ends what waits on the device, and whatever the host next asks of the transport raises it.
"""

import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import attrs

from weft.errors import RankError
from weft.transforms.pipelines.transports.board import Board, Position
from weft.transforms.pipelines.transports.failures import Failure, described
from weft.transforms.pipelines.transports.messages import DeviceEnd, Marked
from weft.transforms.pipelines.transports.watch import END, Watch

_POLL = 0.05
"""Seconds between two looks."""
_BEAT = 0.2
"""The most seconds between two beats."""
_GRACE = 5.0
"""Seconds that the host has to hear of a failure, before the process is ended."""


@attrs.frozen(eq=False)
class Mark:
    """What the device was told to do before `event`: one effect, or what the host waits for in a call."""

    position: Position
    event: Marked


class Call:
    """A call of the host that may not return, as an event."""

    def __init__(self) -> None:
        self.returned = False

    def query(self) -> bool:
        return self.returned


def end_process(error: RankError) -> None:
    """The last resort, where the host or the device cannot be reached: say why, and end."""
    print(described(error), file=sys.stderr, flush=True)
    os._exit(1)


class Heart:
    """A thread that beats; and that feels the pulse of the others where its host has not moved on for long, so that it
    knows which of them no longer run if it waits in vain.

    Args:
        watch: the host's; its place is read.
        board: for this thread alone.
    """

    def __init__(self, watch: Watch, board: Board) -> None:
        self._watch, self._board = watch, board
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name=f"weft heart of rank {watch.rank}", daemon=True).start()

    def _run(self) -> None:
        watch, here, since = self._watch, None, 0.0
        with suppress(RankError):  # the store is gone, which whoever waits sees
            for count in itertools.count():
                self._board.beat(count, None)
                if watch.here is not here:
                    here, since = watch.here, time.monotonic()
                elif time.monotonic() - since > watch.timeout / 2 and here.instruction != END:
                    watch.pulse.feel(self._board, range(watch.num_ranks))
                if self._stopped.wait(min(_BEAT, watch.timeout / 10)):
                    return

    def close(self) -> None:
        self._stopped.set()


class Guard:
    """A thread that watches what a rank's device was told to do.

    Args:
        watch: the rank's view of the others, for this thread alone (`Watch.beside`).
        end: the rank's end of its edges.
        poll: seconds between two looks.
        grace: seconds that the host has, once a failure is known, to ask for it, where something is still to be done:
            it may hang, or read what was never received.
        last: called where it does not ask.
    """

    def __init__(
        self,
        watch: Watch,
        end: DeviceEnd,
        *,
        poll: float = _POLL,
        grace: float = _GRACE,
        last: Callable[[RankError], None] = end_process,
    ) -> None:
        self.watch = watch
        self.error: RankError | None = None
        self.end = end
        self._poll, self._grace, self._last = poll, grace, last
        self._marks: deque[Mark] = deque()
        self._count, self._since = 0, time.monotonic()
        self._closed, self._told = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weft guard of rank {watch.rank}", daemon=True)
        self._thread.start()

    def launched(self, position: Position) -> Marked | None:
        """Watch for what the device was told so far, `position` included; what ends when it has done it."""
        event = self.end.mark()
        if event is not None:
            self._marks.append(Mark(position, event))
        return event

    @contextmanager
    def during(self, position: Position) -> Iterator[None]:
        """Watch a call of the host, which the failure of another rank may keep from returning."""
        call = Call()
        self._marks.append(Mark(position, call))
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
        """The host has failed, and need not be told: why, which is what the guard knew before, or else that error. The
        host asks before it says to others that it failed, which the guard hears too."""
        self._told.set()
        return error if self.error is None or isinstance(error, RankError) else self.error

    def close(self) -> None:
        """End the thread; and the process, if the device hangs, or the host never asked how it ended."""
        self._closed.set()
        self._thread.join(self._poll + self._grace)
        if self.error is not None and not self._done():
            self._last(self.error)

    def _run(self) -> None:
        while not self._closed.wait(self._poll):
            try:
                error = self._look()
            except RankError as lost:  # the board is gone
                error = lost
            except RuntimeError as broken:
                error = self._broken(broken)
            if error is not None:
                self._fail(error)
                return

    def _broken(self, error: RuntimeError) -> RankError:
        """The error for a device that has failed itself, as its events tell."""
        where = self._marks[0].position.instruction
        cause = f"its device failed: {str(error).splitlines()[0]:.120}"
        return self.watch.post(Failure(self.watch.rank, where, cause)).for_rank(self.watch.rank, where)

    def _fail(self, error: RankError) -> None:
        hangs = bool(self._marks)
        self.error = error
        threading.Thread(target=self.end.abort, name="weft abort", daemon=True).start()  # which may hang too
        if hangs and not self._told.wait(self._grace):
            self._last(error)

    def _done(self) -> bool:
        """Whether the device has done all that it was told, and the host is in no call that it watches."""
        while self._marks and self._marks[0].event.query():
            self._marks.popleft()
            self._since = time.monotonic()
        return not self._marks

    def _look(self) -> RankError | None:
        """Say where the device is, and see whether some rank has failed."""
        if self._done():
            self._since = time.monotonic()
        oldest = self._marks[0].position if self._marks else None
        self._count += 1
        self.watch.board.beat(self._count, oldest)
        waiting = "the next step" if oldest is None else oldest.instruction
        if (failure := self.watch.board.failure()) is not None:
            return failure.for_rank(self.watch.rank, waiting)
        for peer in range(self.watch.num_ranks):
            ended = self.watch.board.exit(peer)
            if ended is not None and not ended.clean:
                return self.watch.explain(peer, "its process ended", closed=True, waiting=waiting)
        late = time.monotonic() - self._since
        if oldest is None or late < self.watch.timeout / 2:
            return None
        self.watch.pulse.feel(self.watch.board, range(self.watch.num_ranks))
        if late < self.watch.timeout:
            return None
        return self.watch.explain(self.watch.rank, f"no progress for {self.watch.timeout:g} s", waiting=waiting)
