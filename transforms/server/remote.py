"""`RemoteHost` and `run_engine`: clients and an engine in two processes, connected by a socket.

The reason is Python's global interpreter lock: an event loop in the engine's process would take
time from the thread that prepares steps, which would wait for the lock at each torch operator.
"""

import asyncio
import contextlib
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, cast

from weft.errors import RequestError
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.server.commands import Add, Command, MakeMask, Stop
from weft.transforms.server.host import Host
from weft.transforms.server.loop import Ended, EngineLoop, Message

_LENGTH = struct.Struct("!I")
_BUFFER = 2**20


def pack(message: Any) -> bytes:
    """A message as bytes: its length (4 bytes, big-endian), then its pickle."""
    raw = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(raw)) + raw


class Unpacker:
    """Reassembles messages from bytes that arrive in arbitrary pieces.

    >>> unpacker, raw = Unpacker(), pack([1, 2]) + pack("a")
    >>> [*unpacker.feed(raw[:7])], [*unpacker.feed(raw[7:])]
    ([], [[1, 2], 'a'])
    """

    def __init__(self) -> None:
        self._left = bytearray()

    def feed(self, raw: bytes) -> Iterator[Any]:
        """Yield the messages that these bytes complete."""
        left = self._left
        left += raw
        start = 0
        while len(left) - start >= 4:
            stop = start + 4 + _LENGTH.unpack_from(left, start)[0]
            if len(left) < stop:
                break
            # Safe: the peer is another process of this server, not a client.
            yield pickle.loads(left[start + 4 : stop])
            start = stop
        del left[:start]


class RemoteHost(Host, asyncio.Protocol):
    """An engine in the process at the other end of a socket.

    Args:
        sock: the connection to `run_engine`.
        model, max_model_len, max_open: as in `Host`.
    """

    def __init__(
        self, sock: socket.socket, model: Model, max_model_len: int, max_open: int
    ) -> None:
        super().__init__(model, max_model_len, max_open)
        self._socket = sock
        self._unpacker = Unpacker()
        self._ended = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None

    async def open(self) -> None:
        """Listen to the engine."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._socket)

    async def close(self) -> None:
        """Accept no more requests, and wait until the engine's loop has ended."""
        self.stop()
        if not self.is_final:
            await self._ended.wait()

    def send(self, command: Command) -> None:
        # A closed transport drops what is written to it, and asyncio soon logs a warning for each
        # write.
        if self._transport is not None and not self._ended.is_set():
            self._transport.write(pack(command))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        # A cast, not an assertion: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        for message in self._unpacker.feed(data):
            self.receive(message)
            if isinstance(message, Ended):
                self._ended.set()

    def connection_lost(self, _: Exception | None) -> None:
        """Called by the event loop."""
        if not self._ended.is_set():
            self.receive(Ended("the process of the engine has ended", is_final=True))
            self._ended.set()


def run_engine(
    sock: socket.socket, engine: Engine, make_mask: MakeMask, *, num_ranks: int = 1
) -> BaseException | None:
    """Run an engine in this thread for the `RemoteHost` at the other end of a socket, until that
    sends `Stop` or disconnects.

    Args:
        sock: the connection to the `RemoteHost`.
        engine, make_mask, num_ranks: as in `EngineLoop`.

    Returns:
        The error that a step raised; None: no step raised.
    """
    messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    loop = EngineLoop(engine, make_mask, messages.put, num_ranks=num_ranks)

    def read() -> None:
        unpacker = Unpacker()
        with contextlib.suppress(OSError):
            while raw := sock.recv(_BUFFER):
                for command in unpacker.feed(raw):
                    if isinstance(command, Add) and command.grammar is not None:
                        # Read the grammar into the cache in this thread: the engine's thread would
                        # delay a step. It meets the same error again, and reports it.
                        with contextlib.suppress(RequestError):
                            make_mask(command.grammar)
                    loop.inbox.put(command)
        loop.inbox.put(Stop())  # the other process has closed the socket, or has ended

    def write() -> None:
        with contextlib.suppress(OSError):
            while (message := messages.get()) is not None:
                sock.sendall(pack(message))

    # A daemon: it waits in `recv` until the other process closes the socket, which may be after the
    # end of this one's work.
    threading.Thread(target=read, name="weft commands", daemon=True).start()
    writer = threading.Thread(target=write, name="weft outputs", daemon=True)
    writer.start()
    loop.run()
    messages.put(None)
    # Without this, the process could exit before `Ended` is sent, and the server would report a
    # crash.
    writer.join()
    return loop.fault
