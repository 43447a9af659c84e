"""`listen`: an HTTP listener that limits the time and number of connections, until a signal."""

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

# Seconds in which the head of a request must arrive, counted from the connection's start for the
# first one.
HEAD_SECONDS = 30.0
# Seconds that an answer may wait for a client that has stopped reading.
STALL_SECONDS = 120.0
MAX_CONNECTIONS = 16_384
# The most bytes of a request's head, or of anything else between two parts of a body, such as chunk
# sizes.
MAX_HEAD = 2**16
_INVALID = "Invalid HTTP request received."
_LOG = logging.getLogger("weft.server.http")
# A warning for each malformed request would let anybody fill the log.
_LOG.setLevel(logging.ERROR)
# File descriptors that are kept free for everything but connections.
SPARE_FILES = 128
# The server does not start if its file limit leaves room for fewer connections.
MIN_CONNECTIONS = 64
# Seconds after a signal in which requests may still begin, once their grammars are compiled.
PREPARE_SECONDS = 10
# Seconds that connections have to close after all completions have ended.
SHUTDOWN_SECONDS = 5


class Connection(HttpToolsProtocol):
    """Uvicorn's connection with time limits, a bound on unparsed bytes, and errors in JSON.

    It is closed if its client sends no request in time, or does not read the answer.

    One request is under way at a time. If another follows before the answer, the first is still
    answered, and then the connection closes; the client is to send the others again (RFC 9112,
    9.3.2). Uvicorn would queue them without bound, and would not notice that the client of the
    first one has gone.
    """

    max_connections = MAX_CONNECTIONS
    logger: logging.Logger
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    # The head of a request has arrived, and the end of its body has not.
    _is_in_request = False
    # The connection closes after the current answer; what the client sends meanwhile is dropped.
    _is_last = False
    # Bytes received since the parser last completed a head, a part of a body, or a request.
    _num_unread = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = _LOG

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(
                Refusal(
                    503, f"{counted(self.max_connections, 'connection')} at most", "server_error"
                )
            )
        self._set_head()

    def data_received(self, data: bytes) -> None:
        """Parse the bytes. Unless an answer is under way, the client's time runs from now on."""
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
        """Parse the bytes, and ignore a request to upgrade to another protocol.

        Java's HTTP client asks for HTTP/2 in this way. The parser reads no body after an upgrade,
        so a new one parses the same request without that header.
        """
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
        """Whether no answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _set_head(self) -> None:
        """Start the timer for the rest of a request, or for the next one; stop it while an answer
        is under way."""
        if self.transport.is_closing() or not self._is_answered:
            _stop(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def on_message_begin(self) -> None:
        """Called by the parser; an error is answered by 400."""
        if not self._is_answered:
            raise ValueError("a request before the answer to the last one")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser. Ignores trailers, which are no headers of the request (RFC 9110,
        6.5.1)."""
        if not self._is_in_request:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser. Refuses a request that does not name exactly one host (RFC 9112,
        3.2)."""
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
        # An HTTP/1.0 client does not know the interim response 100 (RFC 9110, 10.1.1).
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
        """Called at the end of an answer. A client that has not read all of it has `STALL_SECONDS`
        to do so."""
        if self.transport.get_write_buffer_size():
            self._start_stall()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        _stop(self._head)
        _stop(self._stall)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called when the write buffer is full. The client has `STALL_SECONDS` to read it."""
        super().pause_writing()
        self._start_stall()

    def resume_writing(self) -> None:
        """Called when the client has read enough of the write buffer."""
        super().resume_writing()
        # A closing connection keeps its timer: the rest of the buffer must still be read in time.
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
        """Answer malformed bytes. If a whole request is still being answered, only close the
        connection after that."""
        if self._is_answered or self._is_in_request:
            self._refuse(Refusal(400, msg, code="invalid_http"))
        else:
            self._is_last, self.cycle.keep_alive = True, False

    def _refuse(self, refusal: Refusal) -> None:
        if self.transport.is_closing():
            return
        # Once an answer to this request has begun, an error would stand in the middle of it.
        if not (self._is_in_request and self.cycle.response_started):
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
    """A Uvicorn server that prints its address, and on a signal finishes requests before it exits.

    Args:
        app: the application.
        engine_host: the application's host.
        name: the model's name, which is printed with the address.
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
        """Within, `handle_exit` handles SIGINT and SIGTERM. Unlike Uvicorn's method, it does not
        raise them again afterwards, so the process exits normally."""
        signals = signal.SIGINT, signal.SIGTERM
        before = {each: signal.signal(each, self.handle_exit) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Accept no more requests; on the second signal, end the process."""
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
        """End with the engine's process; or after a signal, once no completion is under way and no
        request may begin one. Until then new requests are answered by 503."""
        host = self.engine_host
        if host.is_closing and self._watching is None:
            self._watching = asyncio.create_task(self._end_if_still())
        may_begin = self.server_state.tasks and time.monotonic() < self._prepare_until
        if host.is_final or (host.is_closing and not host.num_open and not may_begin):
            self.should_exit = True
        return await super().on_tick(counter)

    async def _end_if_still(self) -> None:
        """After a signal, end as soon as the engine is stuck, since no completion can end then."""
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
        """Listen, and print the addresses."""
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
    """Make a listener, with the process's file limit raised; its `run(sockets)` serves."""
    Connection.max_connections = min(MAX_CONNECTIONS, raise_file_limit() - SPARE_FILES)
    return Listener(app, engine_host, name)


def raise_file_limit() -> int:
    """Raise the limit of open files as far as needed and allowed; return the number to rely on."""
    try:
        import resource
    except ImportError:  # on Windows
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
