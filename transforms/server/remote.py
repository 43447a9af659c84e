"""`RemoteHost` and `run_engine`: clients and an engine in two processes, connected by a socket.

Python runs one thread of a process at a time. An event loop beside the engine would take the time
in which the engine's thread prepares steps, and that thread would wait for its turn at each
operator of torch.
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
    """A message as bytes: its length, and its pickle."""
    raw = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(raw)) + raw


class Unpacker:
    """Makes messages of bytes that come in any pieces.

    >>> unpacker, raw = Unpacker(), pack([1, 2]) + pack("a")
    >>> [*unpacker.feed(raw[:7])], [*unpacker.feed(raw[7:])]
    ([], [[1, 2], 'a'])
    """

    def __init__(self) -> None:
        self._left = bytearray()

    def feed(self, raw: bytes) -> Iterator[Any]:
        """The messages that these bytes complete."""
        left = self._left
        left += raw
        start = 0
        while len(left) - start >= 4:
            stop = start + 4 + _LENGTH.unpack_from(left, start)[0]
            if len(left) < stop:
                break
            yield pickle.loads(left[start + 4 : stop])
            start = stop
        del left[:start]


class RemoteHost(Host, asyncio.Protocol):
    """An engine in the process at the other end of a socket.

    Args:
        sock: to `run_engine`.
        model, max_model_len, max_open: as `Host` takes them.
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
        """Take no more requests, and wait until the engine's loop has ended."""
        self.stop()
        if not self.is_final:
            await self._ended.wait()

    def send(self, command: Command) -> None:
        if self._transport is not None and not self._ended.is_set():
            self._transport.write(pack(command))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclasses

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
    """Run an engine in this thread for the `RemoteHost` at the other end of a socket, until it says
    `Stop` or has gone.

    Args:
        sock, engine, make_mask, num_ranks: as `EngineLoop` takes them.

    Returns:
        What a step raised; None: nothing.
    """
    messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    loop = EngineLoop(engine, make_mask, messages.put, num_ranks=num_ranks)

    def read() -> None:
        unpacker = Unpacker()
        with contextlib.suppress(OSError):
            while raw := sock.recv(_BUFFER):
                for command in unpacker.feed(raw):
                    if isinstance(command, Add) and command.grammar is not None:
                        with contextlib.suppress(
                            RequestError
                        ):  # it is read here, and kept; a step would wait
                            make_mask(command.grammar)
                    loop.inbox.put(command)
        loop.inbox.put(Stop())

    def write() -> None:
        with contextlib.suppress(OSError):
            while (message := messages.get()) is not None:
                sock.sendall(pack(message))

    threading.Thread(target=read, name="weft commands", daemon=True).start()
    writer = threading.Thread(target=write, name="weft outputs", daemon=True)
    writer.start()
    loop.run()
    messages.put(None)
    writer.join()
    return loop.fault
