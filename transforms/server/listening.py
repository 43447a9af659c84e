"""`listen`: a server on a port, with limits of time and number for connections, until a signal."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.display.quantities import counted
from weft.transforms.server.host import Host
from weft.transforms.server.refusals import Refusal, as_json

HEAD_SECONDS = 30.0
"""Seconds in which the head of a request must come, also of a connection's first one."""
STALL_SECONDS = 120.0
"""Seconds that an answer may wait for a client that does not read it."""
MAX_CONNECTIONS = 16_384
_LOG = logging.getLogger("weft.server.http")
_LOG.setLevel(logging.ERROR)  # a warning for each request that is none would let anybody fill the log
_SPARE_FILES = 128
"""File descriptors that connections leave to everything else."""


class Connection(H11Protocol):
    """Uvicorn's connection, closed if it sends no request in time or does not read its answer; errors are JSON."""

    max_connections = MAX_CONNECTIONS
    logger: logging.Logger
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = _LOG

    def connection_made(self, transport: Any) -> None:
        """Take the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(Refusal(503, f"{counted(self.max_connections, 'connection')} at most", "server_error"))
            return
        self._head = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the clock of a head runs while one is incomplete, and while a body goes on that was answered."""
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # bytes that are no request, in the middle of an answer
            self.transport.close()
        is_answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not (is_answered and self.conn.their_state is h11.SEND_BODY):
            _stop(self._head)
            self._head = None
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        _stop(self._head)
        _stop(self._stall)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has not read what was sent: it has some time to do so."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads."""
        super().resume_writing()
        _stop(self._stall)
        self._stall = None

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request."""
        self._refuse(Refusal(400, msg, code="invalid_http"))

    def _refuse(self, refusal: Refusal) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            raw = as_json(refusal.body)
            headers = [("content-type", "application/json"), ("content-length", str(len(raw))), ("connection", "close")]
            for event in (
                h11.Response(status_code=refusal.status, headers=headers),
                h11.Data(data=raw),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _stop(clock: asyncio.TimerHandle | None) -> None:
    if clock is not None:
        clock.cancel()


class Listener(uvicorn.Server):
    """A server that says where it listens, and that a signal ends once the requests under way have ended.

    Args:
        app: the application.
        engine_host: of the application.
        name: of the model.
    """

    def __init__(self, app: Starlette, engine_host: Host, name: str) -> None:
        logs: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(app, http=Connection, ws="none", **logs))
        self.engine_host, self.name = engine_host, name

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
        name, open_ones = signal.Signals(sig).name, counted(self.engine_host.num_open, "completion")
        print(f"{name}: {open_ones} under way may end; a second signal ends at once", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        """End with the engine's process, or after a signal when no completion is under way. Until then requests are
        answered, by 503."""
        if self.engine_host.is_final or (self.engine_host.is_closing and not self.engine_host.num_open):
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for own in self.servers:
            for socket in own.sockets:
                address, port = socket.getsockname()[:2]
                place = f"[{address}]" if ":" in address else address
                print(f"{self.name} is served at http://{place}:{port}/v1", flush=True)


def listen(app: Starlette, engine_host: Host, name: str) -> Listener:
    """A listener with as many file descriptors as the system allows; `run(sockets)` serves."""
    Connection.max_connections = min(MAX_CONNECTIONS, _raise_file_limit() - _SPARE_FILES)
    return Listener(app, engine_host, name)


def _raise_file_limit() -> int:
    """The number of files that this process may have open, raised to the system's limit."""
    try:
        import resource
    except ImportError:  # Windows
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _SPARE_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return wanted if soft == resource.RLIM_INFINITY else soft
