"""How ranks meet before their first step: all must be there, and then all connect."""

import queue
import threading
import time
from collections.abc import Callable, Collection

from weft.errors import RankError
from weft.transforms.pipelines.transports.board import START, Pulse
from weft.transforms.pipelines.transports.failures import Failure
from weft.transforms.pipelines.transports.watch import Watch

CONNECT = "connect"
"""What ranks do before their first step."""
_POLL = 0.025
"""Seconds between two looks at the board."""
_SILENT = 0.5
"""Seconds without a beat after which a rank counts as one that no longer moves."""


def gather(watch: Watch, timeout: float) -> None:
    """Wait until all ranks are there.

    Raises:
        RankError: one does not come.
    """
    watch.board.place(watch.here)
    for peer in range(watch.num_ranks):
        watch.wait(f"at/{peer}", peer, timeout)


def attend(watch: Watch, connect: Callable[[], None], timeout: float) -> None:
    """Call what all ranks take part in: in a thread beside, for it may not return where one has gone.

    Raises:
        RankError: one has gone, or does not come, or it failed.
    """
    watch.at(0, CONNECT)
    errors: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: errors.put(_attempt(connect)), name=CONNECT, daemon=True).start()
    end, pulse = time.monotonic() + timeout, Pulse()
    while True:
        pulse.feel(watch.board, _others(watch))
        try:
            error = errors.get(timeout=_POLL)
        except queue.Empty:
            watch.raise_failure()
            if time.monotonic() < end and not any(watch.board.exit(peer) for peer in _others(watch)):
                continue
            error = TimeoutError(f"no progress for {timeout:g} s")
        if error is not None:
            raise _lost(watch, error, pulse.silent(_SILENT)) from error
        watch.at(0, START)
        return


def _attempt(fn: Callable[[], None]) -> Exception | None:
    """What `fn()` raises."""
    try:
        fn()
    except Exception as error:
        return error
    return None


def _others(watch: Watch) -> list[int]:
    return [peer for peer in range(watch.num_ranks) if peer != watch.rank]


def _lost(watch: Watch, error: Exception, silent: Collection[int]) -> RankError:
    """The error of a rank that could not connect: it names one that has gone, or one that no longer moves, or this."""
    board, cause = watch.board, f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"
    try:
        still = [peer for peer in silent if board.position(peer).instruction in (START, CONNECT)]
        rank = still[0] if still else watch.rank
        found = watch.gone(_others(watch), Failure(rank, board.position(rank).instruction, cause))
    except RankError as gone:
        return gone
    return watch.post(found).for_rank(watch.rank, CONNECT)
