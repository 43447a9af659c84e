"""A chat template's Jinja: the environment in which it runs, and a process that renders for another
one.

A template is a program, and a loop in it cannot be interrupted from within its process. `python -P
chat_jinja.py FD` renders each chat that it is sent in a process of its own, which ends when it is
told to, or by itself if it takes too long. It imports nothing of weft, so that it is small: a copy
of it is made in two milliseconds.
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
# Between two looks at the processes that have ended.
_REAP_SECONDS = 0.5
# Characters of a rendered chat, in a process for it.
MAX_CHARS = 2**24
# Memory of that process.
_MAX_BYTES = 2**30
# Seconds of a processor in which chats are rendered; what takes longer gives way to everything
# else.
_QUICK_SECONDS = 0.1


class Stream(Protocol):
    """A stream of bytes, which is read, written, or both."""

    def read(self, size: int, /) -> bytes:
        """So many bytes, or fewer at the end."""

    def write(self, raw: bytes, /) -> object:
        """Write them."""

    def flush(self) -> None:
        """Send them."""


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
    """A template, in a sandbox with what transformers gives it."""
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


def said(error: BaseException) -> str:
    """What a template raised, in words."""
    return f"the checkpoint's chat template raised {type(error).__name__}: {error!s:.300}"


def packed(message: Mapping[str, Any]) -> bytes:
    """JSON after its length."""
    raw = json.dumps(message).encode()
    return LENGTH.pack(len(raw)) + raw


def write_message(stream: Stream, message: Mapping[str, Any]) -> None:
    """Write it."""
    stream.write(packed(message))
    stream.flush()


def read_message(stream: Stream) -> dict[str, Any] | None:
    """Read it; None at the end."""
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
    """Limit the memory of this process and of its copies."""
    import resource

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))


def _limit_time(seconds: float) -> None:
    """Limit the time of this process, and how long it goes before everything else of the machine."""
    signal.signal(signal.SIGVTALRM, lambda *_: os.nice(19))
    signal.setitimer(signal.ITIMER_VIRTUAL, _QUICK_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _can_be_compiled(source: str, seconds: float) -> bool:
    """Whether a template can be compiled within the limits, which a copy of this process tries:
    constants such as `"a" * 10**10` are computed then. What is wrong with it is told with each
    chat."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    code = 1
    with contextlib.suppress(Exception):
        _limit_time(seconds)
        compiled(source)
        code = 0
    os._exit(code)


def _render_one(source: str, seconds: float, connection: socket.socket) -> None:
    """Render what a connection sends, and answer."""
    with connection, connection.makefile("rwb") as stream:
        message = read_message(stream)
        if message is not None:
            _limit_time(seconds)
            write_message(stream, _rendered(source, message))


def main() -> None:
    """Render until the other end of a socket is closed. Its number is the first argument.

    The standard input has the template, and the seconds of each chat. A command on the socket is a
    letter and a number: `r` renders what comes from the socket that is sent with it, `k` ends that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is its parent's
    _limit_memory()
    control = socket.socket(fileno=int(sys.argv[1]))
    start = read_message(sys.stdin.buffer)
    children: dict[int, int] = {}
    if start is None:
        return
    if _can_be_compiled(start["source"], start["seconds"]):
        compiled(start["source"])  # here, so that the copies have it
    while True:
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
            os.kill(children[number], signal.SIGKILL)
        if letter == b"r":
            connection = socket.socket(fileno=sockets[0])
            pid = os.fork()
            if pid == 0:
                control.close()
                with contextlib.suppress(OSError):  # nobody waits any more
                    _render_one(start["source"], start["seconds"], connection)
                os._exit(0)
            children[number] = pid
            connection.close()
    for pid in children.values():
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
