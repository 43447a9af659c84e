"""The wire: a TCP connection between every two ranks, by which their hosts send each other bytes.

Both ends of a connection prove that they hold the run's secret, and each frame carries a tag that
only they can make. The wire does not use `multiprocessing.connection`, which does not sign frames,
and whose listener serves one client at a time and waits for it without a limit, so that a silent
client keeps ranks from connecting.
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

from weft.torchapi.distributed import listen
from weft.transforms.pipelines.transports.messaging.network import Secret

_NONCE = 32
_TAG = 16
# Seconds in which a new connection must prove that it is a rank.
_HELLO = 2.0
# The most connections that may be unproven at a time; the oldest one is closed if there are more.
_MOST_UNPROVEN = 64
# Seconds to wait before the next connection is accepted, after accepting one failed.
_PAUSE = 0.05
# Seconds between two calls of the function `look` during a wait.
_LOOK = 0.1
# The most bytes of a frame.
_MOST = 2**31


class RefusedError(ConnectionError):
    """The other end does not hold the run's secret."""


@attrs.define(eq=False)
class _Connection:
    """A connection to one rank, after both ends have proved that they hold the secret."""

    socket: socket.socket
    secret: Secret
    sent: int = 0
    received: int = 0
    buffer: bytearray = attrs.field(factory=bytearray)


class Wire:
    """One rank's connections to all others.

    Args:
        rank: this rank.
        num_ranks: the number of ranks.
        secret: the secret of the run.
        address: the address of this machine at which the others reach this rank.
    """

    def __init__(self, rank: int, num_ranks: int, secret: Secret, address: str) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._secret = secret
        self._connections: dict[int, _Connection] = {}
        self._arrived = threading.Condition()
        self._refused = 0
        self._unproven: deque[socket.socket] = deque()
        self._closed = self._has_stopped_listening = False
        self._listener = listen(address)
        self.port: int = self._listener.getsockname()[1]
        self.address = f"{address} {self.port}"
        threading.Thread(target=self._accept, name=f"weft wire of rank {rank}", daemon=True).start()

    def connect(self, peer: int, address: str, timeout: float) -> None:
        """Connect to a rank below this one.

        Raises:
            RefusedError: the other end does not hold the same secret.
            OSError: the rank cannot be reached.
        """
        host, port = address.rsplit(" ", 1)
        sock = socket.create_connection((host, int(port)), timeout)
        try:
            # Both ends choose a nonce, so that neither proof can be a replay of an earlier one.
            theirs = _read_exactly(sock, _NONCE)
            mine = os.urandom(_NONCE)
            who = self.rank.to_bytes(4, "little"), peer.to_bytes(4, "little")
            sock.sendall(who[0] + mine + self._secret.tag(b"connects", *who, theirs, mine))
            answer = b""
            # The other end closes the connection if it refuses this rank's proof.
            with suppress(OSError):
                answer = _read_exactly(sock, _TAG)
            if not hmac.compare_digest(answer, self._secret.tag(b"accepts", *who, theirs, mine)):
                if not answer:
                    closed = "closed the connection when this rank proved"
                else:
                    closed = "cannot prove"
                raise RefusedError(f"it {closed} that it holds the secret")
        except BaseException:
            sock.close()
            raise
        self._connections[peer] = _connection(sock, self._secret.derived(*who, theirs, mine))

    def await_ranks(self, timeout: float) -> None:
        """Wait until all ranks above this one have connected.

        Raises:
            TimeoutError: a rank has not connected in time.
        """
        above = range(self.rank + 1, self.num_ranks)
        with self._arrived:
            if not self._arrived.wait_for(
                lambda: all(peer in self._connections for peer in above), timeout
            ):
                missing = [peer for peer in above if peer not in self._connections]
                refused = f"; {self._refused} connections were refused: another secret" * bool(
                    self._refused
                )
                raise TimeoutError(
                    f"no connection from rank {missing[0]} within {timeout:g} s{refused}"
                )
        self._stop_listening()

    def _accept(self) -> None:
        while not self._has_stopped_listening:
            try:
                sock, _ = self._listener.accept()
                with self._arrived:
                    self._unproven.append(sock)
                    if len(self._unproven) > _MOST_UNPROVEN:
                        oldest = self._unproven.popleft()
                    else:
                        oldest = None
                if oldest is not None:
                    _close_socket(oldest)
                threading.Thread(target=self._welcome, args=(sock,), daemon=True).start()
            except (OSError, RuntimeError):
                # The listener was closed; or there are too many open files or threads at present.
                time.sleep(_PAUSE)

    def _welcome(self, sock: socket.socket) -> None:
        """Keep a connection if it proves that it is a rank; close it if it sends anything else."""
        try:
            # A deadline for the whole proof: a time-out for each read would let a client that sends
            # byte by byte hold the connection.
            end = time.monotonic() + _HELLO
            sock.settimeout(_HELLO)
            mine = os.urandom(_NONCE)
            sock.sendall(mine)
            hello = _read_exactly(sock, 4 + _NONCE + _TAG, end)
            who = hello[:4]
            theirs = hello[4 : 4 + _NONCE]
            tag = hello[4 + _NONCE :]
            parts = who, self.rank.to_bytes(4, "little"), mine, theirs
            peer = int.from_bytes(who, "little")
            proves = hmac.compare_digest(tag, self._secret.tag(b"connects", *parts))
            with self._arrived:
                fits = (
                    self.rank < peer < self.num_ranks
                    and peer not in self._connections
                    and not self._closed
                )
                # A socket that is no longer in `_unproven` was closed as the oldest of too many.
                if not (proves and fits and sock in self._unproven):
                    raise RefusedError
                self._unproven.remove(sock)
                sock.sendall(self._secret.tag(b"accepts", *parts))
                self._connections[peer] = _connection(sock, self._secret.derived(*parts))
                self._arrived.notify_all()
        except (OSError, RefusedError):
            self._refused += 1
            sock.close()
        finally:
            # ValueError: the socket has been removed, since it was proven or was closed.
            with self._arrived, suppress(ValueError):
                self._unproven.remove(sock)

    def send(self, peer: int, payload: bytes) -> None:
        """Send a frame. This waits only if the peer has left megabytes unread.

        Raises:
            OSError: the connection is closed.
        """
        connection = self._connection(peer)
        frame = (
            len(payload).to_bytes(4, "little")
            + _frame_tag(connection.secret, self.rank, connection.sent, payload)
            + payload
        )
        connection.sent += 1
        connection.socket.settimeout(None)
        connection.socket.sendall(frame)

    def recv(self, peer: int, look: Callable[[], None]) -> bytes:
        """The next frame from a rank.

        Args:
            look: called now and then during the wait; it raises if no frame will come.

        Raises:
            ConnectionError: the connection is closed, or carries bytes that the rank did not send.
        """
        connection = self._connection(peer)
        next_look = time.monotonic() + _LOOK
        while (payload := self._take(connection, peer)) is None:
            if not select.select([connection.socket], [], [], max(next_look - time.monotonic(), 0))[
                0
            ]:
                look()
                next_look = time.monotonic() + _LOOK
                continue
            self._fill(connection, peer)
        return payload

    def meet(self) -> None:
        """Wait until every rank has called this. Otherwise a rank that finishes at once could close
        its connections while another rank is still connecting."""
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        for peer in peers:
            self.send(peer, b"")
        for peer in peers:
            self.recv(peer, lambda: None)

    def poll(self, peer: int) -> bytes | None:
        """The next frame from a rank; None if there is none yet.

        Raises:
            ConnectionError: as for `recv`.
        """
        connection = self._connection(peer)
        while (payload := self._take(connection, peer)) is None and select.select(
            [connection.socket], [], [], 0
        )[0]:
            self._fill(connection, peer)
        return payload

    def _fill(self, connection: _Connection, peer: int) -> None:
        if not (more := connection.socket.recv(2**16)):
            raise ConnectionError(f"rank {peer} closed its connection")
        connection.buffer += more

    def _connection(self, peer: int) -> _Connection:
        if (connection := self._connections.get(peer)) is None or self._closed:
            raise ConnectionError(f"no connection to rank {peer}")
        return connection

    def _take(self, connection: _Connection, peer: int) -> bytes | None:
        """The first frame in the buffer; None if it is not complete."""
        buffer = connection.buffer
        if len(buffer) < 4 + _TAG:
            return None
        # A length above `_MOST` is not waited for: its frame is cut short here, and its tag fails.
        end = 4 + _TAG + int.from_bytes(buffer[:4], "little")
        if len(buffer) < end <= _MOST:
            return None
        tag = bytes(buffer[4 : 4 + _TAG])
        payload = bytes(buffer[4 + _TAG : end])
        if not hmac.compare_digest(
            tag, _frame_tag(connection.secret, peer, connection.received, payload)
        ):
            raise ConnectionError(f"a frame that rank {peer} did not send")
        connection.received += 1
        del buffer[:end]
        return payload

    def close(self) -> None:
        """Close all connections. A rank that waits at the other end notices at once."""
        with self._arrived:
            self._closed = True
        self._stop_listening()
        for connection in self._connections.values():
            _close_socket(connection.socket)

    def _stop_listening(self) -> None:
        self._has_stopped_listening = True
        # Wakes the thread in accept()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _connection(sock: socket.socket, secret: Secret) -> _Connection:
    sock.settimeout(None)
    # Headers are small and latency counts: send each at once.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _Connection(sock, secret)


def _frame_tag(secret: Secret, sender: int, number: int, payload: bytes) -> bytes:
    # The sender and the number keep a frame from being reflected, replayed or reordered.
    return secret.tag(sender.to_bytes(4, "little"), number.to_bytes(8, "little"), payload)


def _close_socket(sock: socket.socket) -> None:
    """Close a connection that another thread may be reading from."""
    # `close` alone would not wake a thread that waits in `recv`.
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _read_exactly(sock: socket.socket, count: int, end: float | None = None) -> bytes:
    """The next `count` bytes, which must arrive before `end`, a time of `time.monotonic()`."""
    data = b""
    while len(data) < count:
        if end is not None:
            sock.settimeout(max(end - time.monotonic(), 1e-3))
        if not (more := sock.recv(count - len(data))):
            raise ConnectionError("the other end closed the connection")
        data += more
    return data
