"""`ONE_AT_A_TIME`: the lock that allows one capture at a time; a thread that would wait for it for
ever gets an error."""

import sys
import threading
import time

from weft.errors import CaptureError

# Seconds after which a capture that waits for another thread is suspected of a deadlock: that
# thread may be the one that wants to capture.
STANDSTILL = 20.0

# Seconds between two looks at the capturing thread; never more than `STANDSTILL / 2`.
_LOOK = 0.5


class CaptureLock:
    """A reentrant lock. A waiting thread gets an error once the holder of the lock has stood still
    in `threading` for `STANDSTILL` seconds, in a `join` or in a wait for a future or a queue."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: threading.Thread | None = None
        """The last thread that got the lock; while another thread waits, it still has the lock."""

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wait()
        self._holder = threading.current_thread()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def _wait(self) -> None:
        standing_since = None
        while not self._lock.acquire(timeout=min(_LOOK, STANDSTILL / 2)):
            holder = self._holder
            if holder is None or not _waits_for_a_thread(holder):
                standing_since = None
            elif standing_since is None:
                standing_since = time.monotonic()
            elif time.monotonic() - standing_since > STANDSTILL:
                raise CaptureError(
                    f"a capture in thread {threading.current_thread().name!r}",
                    f"another capture, in thread {holder.name!r}, has waited for a thread for"
                    f" {STANDSTILL:g} s; if it waits for this one, neither would ever end",
                    "call one graphified function inside another in the same thread, or do not join"
                    " the thread there",
                )


def _waits_for_a_thread(thread: threading.Thread) -> bool:
    """Whether the innermost Python frame of a thread is in `threading`."""
    if thread.ident is None:
        frame = None
    else:
        frame = sys._current_frames().get(thread.ident)
    return frame is not None and frame.f_code.co_filename == threading.__file__


# Held during a capture, because captures in all threads set the state of the same random
# generators.
ONE_AT_A_TIME = CaptureLock()
