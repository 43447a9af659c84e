"""The wire: a TCP connection between every two ranks, for what their hosts tell each other.

Both ends of a connection prove that they hold the run's secret, and each frame carries a tag that only they can make.
What travels is bytes; nothing in them is executed.
"""

import hmac
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import attrs

from weft.torchdist import listen
from weft.transforms.pipelines.transports.secret import Secret

_NONCE = 32
_TAG = 16
_HELLO = 2.0
"""Seconds that a stranger has to prove that he is a rank."""
_MOST_STRANGERS = 64
"""Connections at a time that have not proved themselves: of more, the oldest is closed."""
_PAUSE = 0.05
"""Seconds before another connection is accepted where this process cannot hold one more."""
_LOOK = 0.1
"""Seconds between two calls of what a wait asks."""
_MOST = 2**31
"""Bytes of a frame at most."""


class RefusedError(ConnectionError):
    """The other end does not hold the run's secret."""


@attrs.define(eq=False)
class _Line:
    """A connection to one rank, after both ends have proved themselves."""

    socket: socket.socket
    secret: Secret
    sent: int = 0
    received: int = 0
    buffer: bytearray = attrs.field(factory=bytearray)


class Wire:
    """One rank's connections to all others.

    Args:
        rank: whose.
        num_ranks: how many there are.
        secret: the run's.
        address: of this machine, where the others find this rank.
    """

    def __init__(self, rank: int, num_ranks: int, secret: Secret, address: str) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._secret = secret
        self._lines: dict[int, _Line] = {}
        self._arrived = threading.Condition()
        self._refused = 0
        self._strangers: deque[socket.socket] = deque()
        self._closed = self._is_deaf = False
        self._listener = listen(address)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"{address} {self.port}"
        threading.Thread(target=self._accept, name=f"weft wire of rank {rank}", daemon=True).start()

    def connect(self, peer: int, address: str, timeout: float) -> None:
        """Connect to a rank below this one.

        Raises:
            RefusedError: it does not hold the same secret.
            OSError: it is not there.
        """
        host, port = address.rsplit(" ", 1)
        own = socket.create_connection((host, int(port)), timeout)
        try:
            theirs = _read_exactly(own, _NONCE)
            mine = os.urandom(_NONCE)
            who = self.rank.to_bytes(4, "little"), peer.to_bytes(4, "little")
            own.sendall(who[0] + mine + self._secret.tag(b"connects", *who, theirs, mine))
            try:
                answer = _read_exactly(own, _TAG)
            except OSError as error:
                raise RefusedError("it closed the connection when this rank proved that it holds the secret") from error
            if not hmac.compare_digest(answer, self._secret.tag(b"accepts", *who, theirs, mine)):
                raise RefusedError("it cannot prove that it holds the secret")
        except BaseException:
            own.close()
            raise
        self._lines[peer] = _line(own, self._secret.derived(*who, theirs, mine))

    def await_ranks(self, timeout: float) -> None:
        """Wait until all ranks above this one have connected.

        Raises:
            TimeoutError: one has not.
        """
        above = range(self.rank + 1, self.num_ranks)
        with self._arrived:
            if not self._arrived.wait_for(lambda: all(peer in self._lines for peer in above), timeout):
                missing = [peer for peer in above if peer not in self._lines]
                refused = f"; {self._refused} connections were refused: another secret" * bool(self._refused)
                raise TimeoutError(f"no connection from rank {missing[0]} within {timeout:g} s{refused}")
        self._stop_listening()

    def _accept(self) -> None:
        while not self._is_deaf:
            try:
                own, _ = self._listener.accept()
                with self._arrived:
                    self._strangers.append(own)
                    oldest = self._strangers.popleft() if len(self._strangers) > _MOST_STRANGERS else None
                if oldest is not None:
                    _hang_up(oldest)
                threading.Thread(target=self._welcome, args=(own,), daemon=True).start()
            except (OSError, RuntimeError):  # the listener was closed; or too many files, or threads, are open for now
                time.sleep(_PAUSE)

    def _welcome(self, own: socket.socket) -> None:
        """Let one connection prove that it is a rank; whatever else it sends, it is closed."""
        try:
            end = time.monotonic() + _HELLO
            own.settimeout(_HELLO)
            mine = os.urandom(_NONCE)
            own.sendall(mine)
            hello = _read_exactly(own, 4 + _NONCE + _TAG, end)
            who, theirs, tag = hello[:4], hello[4 : 4 + _NONCE], hello[4 + _NONCE :]
            parts = who, self.rank.to_bytes(4, "little"), mine, theirs
            peer = int.from_bytes(who, "little")
            if not hmac.compare_digest(tag, self._secret.tag(b"connects", *parts)):
                raise RefusedError
            with self._arrived:
                if not self.rank < peer < self.num_ranks or peer in self._lines or self._closed:
                    raise RefusedError
                if own not in self._strangers:  # it was sent away as the oldest of too many
                    raise RefusedError
                self._strangers.remove(own)
                own.sendall(self._secret.tag(b"accepts", *parts))
                self._lines[peer] = _line(own, self._secret.derived(*parts))
                self._arrived.notify_all()
        except (OSError, RefusedError):
            self._refused += 1
            own.close()
        finally:
            with self._arrived, suppress(ValueError):  # it has proved itself, or was sent away
                self._strangers.remove(own)

    def send(self, peer: int, payload: bytes) -> None:
        """Send a frame. It waits only where the peer has left megabytes unread.

        Raises:
            OSError: the connection is closed.
        """
        line = self._line(peer)
        frame = len(payload).to_bytes(4, "little") + _frame_tag(line.secret, self.rank, line.sent, payload) + payload
        line.sent += 1
        line.socket.settimeout(None)
        line.socket.sendall(frame)

    def recv(self, peer: int, ask: Callable[[], None]) -> bytes:
        """The next frame that a rank sent.

        Args:
            ask: called now and then while there is none; it raises where none will come.

        Raises:
            ConnectionError: the connection is closed, or carries what the rank did not send.
        """
        line, asked = self._line(peer), time.monotonic() + _LOOK
        while (payload := self._take(line, peer)) is None:
            if not select.select([line.socket], [], [], max(asked - time.monotonic(), 0))[0]:
                ask()
                asked = time.monotonic() + _LOOK
                continue
            self._fill(line, peer)
        return payload

    def poll(self, peer: int) -> bytes | None:
        """The next frame that a rank sent; None where there is none yet.

        Raises:
            ConnectionError: as `recv`.
        """
        line = self._line(peer)
        while (payload := self._take(line, peer)) is None and select.select([line.socket], [], [], 0)[0]:
            self._fill(line, peer)
        return payload

    def _fill(self, line: _Line, peer: int) -> None:
        if not (more := line.socket.recv(2**16)):
            raise ConnectionError(f"rank {peer} closed its connection")
        line.buffer += more

    def _line(self, peer: int) -> _Line:
        if (line := self._lines.get(peer)) is None or self._closed:
            raise ConnectionError(f"no connection to rank {peer}")
        return line

    def _take(self, line: _Line, peer: int) -> bytes | None:
        """The frame that the buffer begins with; None where it is not there as a whole."""
        buffer = line.buffer
        if len(buffer) < 4 + _TAG:
            return None
        length = int.from_bytes(buffer[:4], "little")
        if length > _MOST:
            raise ConnectionError(f"a frame of {length} bytes from rank {peer}")
        end = 4 + _TAG + length
        if len(buffer) < end:
            return None
        tag, payload = bytes(buffer[4 : 4 + _TAG]), bytes(buffer[4 + _TAG : end])
        if not hmac.compare_digest(tag, _frame_tag(line.secret, peer, line.received, payload)):
            raise ConnectionError(f"a frame that rank {peer} did not send")
        line.received += 1
        del buffer[:end]
        return payload

    def close(self) -> None:
        """Close all connections; who waits at the other end of one learns of it."""
        with self._arrived:
            self._closed = True
        self._stop_listening()
        for line in self._lines.values():
            _hang_up(line.socket)

    def _stop_listening(self) -> None:
        self._is_deaf = True
        with suppress(OSError):  # wakes the thread in accept()
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _line(own: socket.socket, secret: Secret) -> _Line:
    own.settimeout(None)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _Line(own, secret)


def _frame_tag(secret: Secret, sender: int, number: int, payload: bytes) -> bytes:
    return secret.tag(sender.to_bytes(4, "little"), number.to_bytes(8, "little"), payload)


def _hang_up(own: socket.socket) -> None:
    """Close a connection that another thread may be reading from."""
    with suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)
    own.close()


def _read_exactly(own: socket.socket, count: int, end: float | None = None) -> bytes:
    """So many bytes, by a time of `time.monotonic()`."""
    found = b""
    while len(found) < count:
        if end is not None:
            own.settimeout(max(end - time.monotonic(), 1e-3))
        if not (more := own.recv(count - len(found))):
            raise ConnectionError("the other end closed the connection")
        found += more
    return found
