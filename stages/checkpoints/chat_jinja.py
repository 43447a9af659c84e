"""Jinja for chat templates: the environment in which a template runs, and a process that renders
chats for another process.

A template is a program, and a loop in it cannot be interrupted from within its process. `python -P
chat_jinja.py FD` forks a process for each chat that it receives. That process ends when it is told
to, or by itself if it takes too long. This file imports nothing of weft, so that the process is
small, and a fork takes two milliseconds.
"""

import contextlib
import datetime
import functools
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("!Q")
COMMAND = struct.Struct("!cQ")
# The interval at which ended processes are reaped.
_REAP_SECONDS = 0.5
# The most characters of a rendered chat, in a process for it.
MAX_CHARS = 2**24
# The memory limit of that process.
_MAX_BYTES = 2**30
# The CPU time in which most chats are rendered: one of 1,000 messages took 8 ms. A process that takes
# longer gets the lowest priority.
_QUICK_SECONDS = 0.01


class Stream(Protocol):
    """A stream of bytes for reading, writing, or both."""

    def read(self, size: int, /) -> bytes:
        """Read `size` bytes, or fewer at the end."""

    def write(self, raw: bytes, /) -> object:
        """Write these bytes."""

    def flush(self) -> None:
        """Send the bytes written so far."""


class _Refused(Exception):
    """A template refuses its messages."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says; in a prompt it changes nothing."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def compiled(source: str) -> Any:
    """A compiled template, in a sandbox with the functions that transformers provides."""
    extensions = [_Generation, loopcontrols]
    # Templates are written for these two options: without them, each line of a block would leave
    # its indentation and its line break in the prompt.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    # Jinja's own filter escapes `<`, `>`, `&` and `'` for HTML, and sorts keys: another prompt than
    # the model was trained on.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def said(error: BaseException) -> str:
    """The text for an error that a template raised."""
    return f"the checkpoint's chat template raised {type(error).__name__}: {error!s:.300}"


def packed(message: Mapping[str, Any]) -> bytes:
    """The message as JSON, preceded by its length."""
    raw = json.dumps(message).encode()
    return LENGTH.pack(len(raw)) + raw


def write_message(stream: Stream, message: Mapping[str, Any]) -> None:
    """Write a message, and send it."""
    stream.write(packed(message))
    stream.flush()


def read_message(stream: Stream) -> dict[str, Any] | None:
    """Read a message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    size = LENGTH.unpack(head)[0]
    raw = stream.read(size)
    if len(raw) < size:
        return None
    message: dict[str, Any] = json.loads(raw)
    return message


def _rendered(source: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text = str(compiled(source).render(variables))
    except Exception as error:
        return {"error": said(error)}
    if len(text) > MAX_CHARS:
        return {
            "error": (
                f"the checkpoint's chat template made {len(text)} characters; at most {MAX_CHARS}"
            )
        }
    return {"text": text}


def _limit_memory() -> None:
    """Limit the memory of this process and of its forks."""
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))


def _lower_priority() -> None:
    """Run when no other process wants the processor."""
    if hasattr(os, "SCHED_IDLE"):  # on Linux: beside `nice`, others would wait for a time slice
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def _limit_time(seconds: float) -> None:
    """Limit the time of this process, and lower its priority after `_QUICK_SECONDS`."""
    # ITIMER_VIRTUAL counts CPU time, ITIMER_REAL wall time; SIGALRM ends the process by default.
    signal.signal(signal.SIGVTALRM, lambda *_: _lower_priority())
    signal.setitimer(signal.ITIMER_VIRTUAL, _QUICK_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _can_be_compiled(source: str, seconds: float) -> bool:
    """Whether a template can be compiled within the limits. A fork tries it, as the compiler
    computes constants such as `"a" * 10**10`. If it fails, each chat reports the error."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    code = 1
    with contextlib.suppress(Exception):
        _limit_time(seconds)
        compiled(source)
        code = 0
    # Not `sys.exit`: a fork must neither flush buffers nor run exit handlers that are its parent's.
    os._exit(code)


def _render_one(source: str, seconds: float, connection: socket.socket) -> None:
    """Render the chat that a connection sends, and send the answer."""
    with connection, connection.makefile("rwb") as stream:
        message = read_message(stream)
        if message is not None:
            _limit_time(seconds)
            write_message(stream, _rendered(source, message))


def main() -> None:
    """Render chats until the other end of a socket is closed. The first argument is the socket's
    file descriptor.

    The standard input has the template, and the time limit of each chat in seconds. A command on
    the socket is a letter and a number: `r` renders the chat from the socket that is sent with it,
    and `k` kills the process of that number.
    """
    # An interrupt from the terminal is for the parent to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    control = socket.socket(fileno=int(sys.argv[1]))
    start = read_message(sys.stdin.buffer)
    children: dict[int, int] = {}
    if start is None:
        return
    if _can_be_compiled(start["source"], start["seconds"]):
        # Cached before any fork, so that no fork compiles it again.
        compiled(start["source"])
    while True:
        # With children it wakes up to reap them; without, it sleeps until a command comes.
        ready, _, _ = select.select([control], [], [], _REAP_SECONDS if children else None)
        for number, pid in [*children.items()]:
            if os.waitpid(pid, os.WNOHANG)[0]:
                del children[number]
        if not ready:
            continue
        raw, sockets, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if len(raw) < COMMAND.size:
            break
        letter, number = COMMAND.unpack(raw)
        if letter == b"k" and number in children:
            # Safe: a child is in `children` until it is reaped, and its process id is not reused
            # before that.
            os.kill(children[number], signal.SIGKILL)
        if letter == b"r":
            connection = socket.socket(fileno=sockets[0])
            pid = os.fork()
            if pid == 0:
                control.close()
                # An OSError means that nobody waits for the answer any more.
                with contextlib.suppress(OSError):
                    _render_one(start["source"], start["seconds"], connection)
                os._exit(0)
            children[number] = pid
            # Closed here, as the receiver sees the end of the stream only once no process has the
            # socket open.
            connection.close()
    for pid in children.values():
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
