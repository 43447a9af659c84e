"""`Calls`: lets one thread at a time call an engine. Ctrl-C waits for the end of a call that
changes the engine; any other exception in the middle of a change ends the engine, and later errors
name it."""

import signal
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import Any

from weft.errors import EngineError

_UNDER_WAY = "under way"
_NOT_KNOWN = "how far its requests came is not known"
_NEW_ENGINE = "another weft.Engine(...), and its requests again"


class Calls:
    """The calls of one engine.

    A call enters by a single dict operation, which is atomic for other threads and for signal
    handlers; it is then the owner. Meanwhile a call of another thread is refused, and so is a
    nested call that would change what the owner changes.
    """

    def __init__(self) -> None:
        self._owner: dict[str, Call] = {}
        self._broken = ""

    def enter(
        self, call: str, *, nests: bool = False, needs_whole: bool = True, defers: bool = True
    ) -> "Call":
        """A context for a call of the engine, for use in the method that the user called.

        Args:
            call: as the user wrote it, for errors.
            nests: whether it may be made from within another call, such as by a mask in a step.
            needs_whole: whether it is refused once an exception interrupted a change.
            defers: whether Ctrl-C waits until its end.

        Raises:
            EngineError: on entry, if the call is refused.
        """
        return Call(self, call, nests=nests, needs_whole=needs_whole, defers=defers)

    @property
    def is_broken(self) -> bool:
        """Whether an exception interrupted a change."""
        return bool(self._broken)

    def mark_broken(self, problem: str) -> None:
        """Refuse later calls that need a whole engine."""
        self._broken = problem

    def check_whole(self, call: str) -> None:
        """Raise EngineError if an exception interrupted a change."""
        if self._broken:
            raise EngineError(call, self._broken, _NEW_ENGINE)

    def claim(self, entered: "Call") -> bool:
        """Make a call the owner; False if it is nested in the call that already is.

        Raises:
            EngineError: it may not be nested, or another thread's call is under way.
        """
        # Try again after a stale owner is removed, since another thread may be faster.
        while (owner := self._owner.setdefault(_UNDER_WAY, entered)) is not entered:
            is_same_thread = owner.thread is entered.thread
            if owner.is_under_way():
                if not is_same_thread:
                    problem = (
                        f"thread {entered.thread.name!r}, while thread {owner.thread.name!r} is"
                        f" inside {owner.call}"
                    )
                    raise EngineError(
                        entered.call,
                        problem,
                        "calls from one thread at a time, such as with a lock",
                    )
                if not entered.nests:
                    raise EngineError(
                        entered.call,
                        "a call from within a step",
                        "a mask that leaves the engine alone",
                    )
                return False
            # The owner's method has returned: an asynchronous exception kept it from leaving.
            if self._owner.get(_UNDER_WAY) is owner:
                if owner.changing and not self._broken:
                    self.mark_broken(
                        f"an earlier {owner.changing} that was interrupted; {_NOT_KNOWN}"
                    )
                self._owner.pop(_UNDER_WAY, None)
        return True

    def leave(self, entered: "Call") -> None:
        """Let others enter."""
        if self._owner.get(_UNDER_WAY) is entered:
            del self._owner[_UNDER_WAY]


class Call:
    """A call of an engine, as the context in which it runs.

    Attributes:
        changing: what an exception would leave half done, such as "step"; empty: nothing. Whoever
            sets it clears it once the change is complete.
    """

    def __init__(
        self, calls: Calls, call: str, *, nests: bool, needs_whole: bool, defers: bool
    ) -> None:
        self.call = call
        self.nests = nests
        self.thread = threading.current_thread()
        self.changing = ""
        self._calls = calls
        self._needs_whole = needs_whole
        self._defers = defers
        self._interrupt: HeldInterrupt | None = None
        self._frame: FrameType | None = None

    def __enter__(self) -> "Call":
        self._frame = sys._getframe(1)  # tells a nested call from one after an interrupt
        if self._defers:
            self._interrupt = hold_interrupt(self)
        try:
            self._calls.claim(self)
            if self._needs_whole:
                self._calls.check_whole(self.call)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.changing:
            raised = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
            self._calls.mark_broken(
                f"an earlier {self.changing} that raised {raised}; {_NOT_KNOWN}"
            )
        self._leave()

    def _leave(self) -> None:
        self._calls.leave(self)
        frame = self._frame
        self._frame = None
        if self._interrupt is not None:
            self._interrupt.release(frame)

    def is_under_way(self) -> bool:
        """Whether its method is still on its thread's stack."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False


class HeldInterrupt:
    """A SIGINT handler that holds the first signal until `release`. A second signal goes through at
    once: someone who presses Ctrl-C twice does not want to wait.

    Args:
        call: until whose end it is kept.
        handler: the one before.
    """

    def __init__(self, call: Call, handler: Any) -> None:
        self.call = call
        self.handler = handler
        self._has_come = False
        self._goes_through = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._has_come or self._goes_through or not self.call.is_under_way():
            self._has_come = False
            self._goes_through = True
            self.handler(number, frame)
        else:
            self._has_come = True

    def release(self, frame: FrameType | None) -> None:
        """Restore the previous handler, and pass it a held signal as if it came in that frame."""
        handler = self.handler
        # User code may have set another handler meanwhile.
        if signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, handler)
        if self._has_come:
            self._has_come = False
            handler(signal.SIGINT, frame)


def hold_interrupt(call: Call) -> HeldInterrupt | None:
    """Hold SIGINT for a call. None if it is held already, if Python does not handle it, or outside
    the main thread, since Python runs signal handlers only there."""
    if call.thread is not threading.main_thread():
        return None
    handler: Any = signal.getsignal(signal.SIGINT)
    while isinstance(handler, HeldInterrupt) and not handler.call.is_under_way():
        handler = handler.handler  # an asynchronous exception kept that call from releasing it
    if not callable(handler) or isinstance(handler, HeldInterrupt):
        return None
    interrupt = HeldInterrupt(call, handler)
    signal.signal(signal.SIGINT, interrupt)
    return interrupt
