"""Interrupts of an engine's calls: an outside exception or Ctrl-C at any line that a call
executes."""

import dis
import functools
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import attrs

# CPython checks for signals only at these instructions, so none arrives at a line without them.
_LOOKS = "CALL", "JUMP_BACKWARD", "RESUME", "SEND", "FOR_ITER", "WITH"


def press_ctrl_c() -> None:
    """Raise SIGINT, as a terminal does."""
    signal.raise_signal(signal.SIGINT)


class Outside(BaseException):
    """An exception set by another thread or raised by a timeout."""


def raise_outside() -> None:
    """Raise `Outside` here."""
    raise Outside


@attrs.define
class Interrupt:
    """Something that happens at one line of weft that a call executes.

    Args:
        line: the number of lines that the call executes before it.
        happens: the function to call there.
        modules: the prefix of the names of the modules whose lines count.

    Attributes:
        place: the module and line where it happened; empty if the call had fewer lines.
        count: the number of such lines executed so far.
    """

    line: int
    happens: Callable[[], None]
    modules: str = "weft."
    place: str = ""
    count: int = 0

    @contextmanager
    def within(self) -> Iterator["Interrupt"]:
        """The context in which to make the call."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield self
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        # Lines of the test itself do not count.
        if event != "call" or not name.startswith(self.modules) or name.startswith("weft.proofs"):
            return None
        lines = _lines_of(frame.f_code)
        may_come = False

        def look(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal may_come
            if event == "line":
                was_look = may_come
                may_come = frame.f_lineno in lines
                self._count(frame, may_come or was_look)
            return look

        return look

    def _count(self, frame: FrameType, may_come: bool) -> None:
        self.count += 1
        if self.count > self.line and not self.place and may_come:
            self.place = f"{frame.f_globals['__name__']}:{frame.f_lineno}"
            self.happens()


@attrs.frozen
class Places:
    """Draws a line of a call: first a prefix of modules' names, then one of the lines that earlier
    such calls executed there.

    Most lines of a call belong to operators. In a single draw over all lines, the few that change
    the engine's bookkeeping would hardly ever come up.

    Args:
        modules: prefixes of modules' names.
    """

    modules: Sequence[str]
    _most: dict[tuple[str, str], int] = attrs.field(factory=dict, init=False)

    def draw(self, draw: random.Random, call: str, happens: Callable[[], None]) -> Interrupt:
        """An interrupt at a drawn line of a call."""
        modules = draw.choice(self.modules)
        # 40 lines until a call that ran to its end has shown how many there are.
        return Interrupt(draw.randrange(self._most.get((call, modules), 40)), happens, modules)

    def note(self, call: str, interrupt: Interrupt) -> None:
        """Note how many lines a call executed."""
        # An interrupted call does not show its number of lines. If it was interrupted at the last
        # line of the range, it may have more: double the range.
        if not interrupt.place:
            self._most[call, interrupt.modules] = max(interrupt.count, 1)
        elif interrupt.line + 1 == self._most.get((call, interrupt.modules), 40):
            self._most[call, interrupt.modules] = 2 * (interrupt.line + 1)


@functools.cache
def _lines_of(code: CodeType) -> frozenset[int]:
    """The lines of a function at which an outside exception may arrive."""
    lines = set[int]()
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        if positions is not None and positions.lineno is not None:
            line = positions.lineno
        if any(name in instruction.opname for name in _LOOKS):
            lines.add(line)
    return frozenset(lines)
