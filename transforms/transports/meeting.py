"""How ranks meet before their first step: all must be there, and then all connect."""

import itertools
import queue
import threading
import time
from collections.abc import Callable

from weft.errors import RankError
from weft.transforms.transports.board import START
from weft.transforms.transports.failures import Failure
from weft.transforms.transports.watch import Watch

CONNECT = "connect"
"""What ranks do before their first step."""
_POLL = 0.025
"""Seconds between two looks at the board."""


def gather(watch: Watch, timeout: float) -> None:
    """Wait until all ranks are there.

    Raises:
        RankError: one does not come.
    """
    watch.board.place(watch.here)
    for peer in range(watch.num_ranks):
        watch.wait(f"at/{peer}", peer, timeout)


def attend(watch: Watch, connect: Callable[[], None]) -> None:
    """Call what all ranks take part in: in a thread beside, for it may not return where one has gone.

    Raises:
        RankError: one has gone, or does not come, or it failed.
    """
    watch.at(0, CONNECT)
    errors: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: errors.put(_attempt(connect)), name=CONNECT, daemon=True).start()
    end = time.monotonic() + watch.timeout
    for count in itertools.count():
        watch.board.beat(count, None)
        try:
            error = errors.get(timeout=_POLL)
        except queue.Empty:
            watch.raise_failure()
            if time.monotonic() < end and not any(watch.board.exit(peer) for peer in _others(watch)):
                continue
            error = TimeoutError(f"no progress for {watch.timeout:g} s")
        if error is not None:
            raise _lost(watch, error) from error
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


def _lost(watch: Watch, error: Exception) -> RankError:
    """The error of a rank that could not connect: it names one that has gone, or one that no longer moves, or this."""
    board, cause = watch.board, f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"
    try:
        still = [peer for peer in _others(watch) if board.position(peer).instruction in (START, CONNECT)]
        before = [board.heard(peer) for peer in still]
        found = watch.gone(_others(watch), Failure(watch.rank, CONNECT, cause))
        silent = [peer for peer, beat in zip(still, before, strict=True) if board.heard(peer) == beat]
        if found.rank == watch.rank and silent:
            found = Failure(silent[0], board.position(silent[0]).instruction, cause)
    except RankError as gone:
        return gone
    return watch.post(found).for_rank(watch.rank, CONNECT)
