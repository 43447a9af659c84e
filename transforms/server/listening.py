"""`listen`: a server on a port, with limits of time and number for connections, until a signal."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from weft.display.quantities import counted
from weft.transforms.server.host import GIVE_UP_SECONDS, Host
from weft.transforms.server.refusals import Refusal, as_json

# Seconds in which the head of a request must come, also of a connection's first one.
HEAD_SECONDS = 30.0
# Seconds that an answer may wait for a client that does not read it.
STALL_SECONDS = 120.0
MAX_CONNECTIONS = 16_384
# Bytes of a request's head, or of anything else between two parts of a body, that came in several
# pieces.
MAX_HEAD = 2**16
_INVALID = "Invalid HTTP request received."
_LOG = logging.getLogger("weft.server.http")
# A warning for each request that is none would let anybody fill the log
_LOG.setLevel(logging.ERROR)
# File descriptors that connections leave to everything else.
SPARE_FILES = 128
# Connections that a server must be able to have.
MIN_CONNECTIONS = 64
# Seconds after a signal in which requests may still begin, once their grammars are compiled.
PREPARE_SECONDS = 10
# Seconds that connections have to end after all completions have ended.
SHUTDOWN_SECONDS = 5


class Connection(HttpToolsProtocol):
    """Uvicorn's connection, closed if it sends no request in time or does not read its answer; with
    a bound for what is read before it means something; errors are JSON.

    One request is under way at a time. If another one follows before the answer, the first one is
    answered, and the connection closes: its client sends the others again (RFC 9112, 9.3.2).
    Uvicorn would queue them without bound, and not tell the first one that its client has gone.
    """

    max_connections = MAX_CONNECTIONS
    logger: logging.Logger
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    # The head of a request has come, its end has not.
    _is_in_request = False
    # The connection closes after the answer under way; what the client sends meanwhile is dropped.
    _is_last = False
    # Bytes since the last head, part of a body, or end.
    _num_unread = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = _LOG

    def connection_made(self, transport: Any) -> None:
        """Take the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(
                Refusal(
                    503, f"{counted(self.max_connections, 'connection')} at most", "server_error"
                )
            )
        self._set_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes. Unless an answer is under way, a clock runs from now on."""
        if self._is_last:
            return
        self._num_unread += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response(_INVALID)
        if self._num_unread > MAX_HEAD:
            self.send_400_response(_INVALID)
        self._set_head()

    def _feed(self, data: bytes) -> None:
        """Parse bytes. An upgrade to another protocol is not taken (Java's client asks for HTTP/2):
        as the parser then reads no body, the same request is parsed without it."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method = self.parser.get_method()
            version = self.parser.get_http_version().encode()
            lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))
            self.parser = httptools.HttpRequestParser(self)
            self._feed(head + data[upgrade.args[0] :])

    @property
    def _is_answered(self) -> bool:
        """No answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _set_head(self) -> None:
        """Start the clock of a head, or of what goes on after an answer; stop it while an answer is
        under way."""
        if self.transport.is_closing() or not self._is_answered:
            _stop(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def on_message_begin(self) -> None:
        """Called by the parser; errors make the answer 400."""
        if not self._is_answered:
            raise ValueError("a request before the answer to the last one")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser. A field after the body is none of the request's (RFC 9110, 6.5.1)."""
        if not self._is_in_request:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser. A request names one host (RFC 9112, 3.2)."""
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this server is no proxy")
        if self.parser.should_upgrade():
            return
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        version = self.parser.get_http_version()
        if num_hosts > 1 or (not num_hosts and version == "1.1"):
            raise ValueError(f"{num_hosts} hosts")
        self._num_unread = 0
        self._is_in_request = True
        self.expect_100_continue &= version == "1.1"
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._num_unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self.parser.should_upgrade():
            return
        self._num_unread = 0
        self._is_in_request = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called at the end of an answer. If the client has not read it all, it has some time to do
        so."""
        if self.transport.get_write_buffer_size():
            self._start_stall()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        _stop(self._head)
        _stop(self._stall)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has not read what was sent: it has some time to do so."""
        super().pause_writing()
        self._start_stall()

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        if not self.transport.is_closing():
            _stop(self._stall)
            self._stall = None

    def _start_stall(self) -> None:
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_SECONDS, self._end_if_stalled)

    def _end_if_stalled(self) -> None:
        self._stall = None
        if self.flow.write_paused or self.transport.is_closing():
            self.transport.abort()
        elif self.transport.get_write_buffer_size():
            self._start_stall()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request. After a request that is under way they are not
        answered."""
        if self._is_answered or self._is_in_request:
            self._refuse(Refusal(400, msg, code="invalid_http"))
        else:
            self._is_last, self.cycle.keep_alive = True, False

    def _refuse(self, refusal: Refusal) -> None:
        if self.transport.is_closing():
            return
        if not (
            self._is_in_request and self.cycle.response_started
        ):  # else it would stand in or after an answer
            raw = as_json(refusal.body)
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
                % len(raw)
            )
            self.transport.write(STATUS_LINE[refusal.status] + head + raw)
        self.transport.close()


def _stop(clock: asyncio.TimerHandle | None) -> None:
    if clock is not None:
        clock.cancel()


class Listener(uvicorn.Server):
    """A server that says where it listens, and that a signal ends once the requests under way have
    ended.

    Args:
        app: the application.
        engine_host: of the application.
        name: of the model.
    """

    def __init__(self, app: Starlette, engine_host: Host, name: str) -> None:
        options: dict[str, Any] = {
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
        }
        options["timeout_graceful_shutdown"] = SHUTDOWN_SECONDS
        super().__init__(uvicorn.Config(app, http=Connection, ws="none", **options))
        self.engine_host = engine_host
        self.name = name
        self._watching: asyncio.Task[None] | None = None
        self._prepare_until = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM go to `handle_exit`, and are no failure of the process."""
        signals = signal.SIGINT, signal.SIGTERM
        before = {each: signal.signal(each, self.handle_exit) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Take no more requests; the second signal ends the process."""
        if self.engine_host.is_closing:
            os._exit(128 + sig)
        self.engine_host.refuse_requests()
        self._prepare_until = time.monotonic() + PREPARE_SECONDS
        name = signal.Signals(sig).name
        open_ones = counted(self.engine_host.num_open, "completion")
        print(
            f"{name}: {open_ones} under way may end; a second signal ends at once",
            file=sys.stderr,
            flush=True,
        )

    async def on_tick(self, counter: int) -> bool:
        """End with the engine's process, or after a signal when no completion is under way and no
        request may begin one. Until then requests are answered, by 503."""
        host = self.engine_host
        if host.is_closing and self._watching is None:
            self._watching = asyncio.create_task(self._end_if_still())
        may_begin = self.server_state.tasks and time.monotonic() < self._prepare_until
        if host.is_final or (host.is_closing and not host.num_open and not may_begin):
            self.should_exit = True
        return await super().on_tick(counter)

    async def _end_if_still(self) -> None:
        """After a signal, end as soon as the engine stands still: no completion under way will end
        then."""
        while await self.engine_host.is_moving(GIVE_UP_SECONDS):
            await asyncio.sleep(1.0)
        if not self.engine_host.has_ended:
            print(
                "error: the engine stands still; completions under way are given up",
                file=sys.stderr,
                flush=True,
            )
        self.engine_host.give_up()
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for server in self.servers:
            for socket in server.sockets:
                address, port = socket.getsockname()[:2]
                if ":" in address:
                    place = f"[{address}]"
                else:
                    place = address
                print(f"{self.name} is served at http://{place}:{port}/v1", flush=True)


def listen(app: Starlette, engine_host: Host, name: str) -> Listener:
    """A listener with as many file descriptors as the system allows; `run(sockets)` serves."""
    Connection.max_connections = min(MAX_CONNECTIONS, raise_file_limit() - SPARE_FILES)
    return Listener(app, engine_host, name)


def raise_file_limit() -> int:
    """The number of files that this process may have open, raised to the system's limit."""
    try:
        import resource
    except ImportError:  # Windows
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_CONNECTIONS + SPARE_FILES
    if hard == resource.RLIM_INFINITY:
        most = target
    else:
        most = min(target, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft == resource.RLIM_INFINITY:
        return target
    return soft
