"""The wire: messages between ranks arrive in order, and peers without the secret are refused."""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from weft.transforms.pipelines.transports.messaging import wire as module
from weft.transforms.pipelines.transports.messaging.network import LOOPBACK, Secret
from weft.transforms.pipelines.transports.messaging.wire import RefusedError, Wire

SECRET = Secret.fresh()


def nobody() -> None:
    """A `look` that does nothing."""


def wires(num_ranks: int, secrets: list[Secret] | None = None) -> list[Wire]:
    return [
        Wire(rank, num_ranks, (secrets or [SECRET] * num_ranks)[rank], LOOPBACK)
        for rank in range(num_ranks)
    ]


@pytest.fixture
def pair() -> Iterator[list[Wire]]:
    both = wires(2)
    both[1].connect(0, both[0].address, 5)
    both[0].await_ranks(5)
    yield both
    for wire in both:
        wire.close()


def test_frames_of_any_length_arrive_in_order(pair: list[Wire]) -> None:
    zero, one = pair
    frames = [b"", b"a", os.urandom(70_000), b"\x80\x04pickle", os.urandom(9_000_000)]
    sender = threading.Thread(target=lambda: [zero.send(1, frame) for frame in frames])
    sender.start()
    assert [one.recv(0, nobody) for _ in frames] == frames
    sender.join()
    one.send(0, b"back")
    assert zero.recv(1, nobody) == b"back"


def test_all_ranks_are_connected_with_all_others() -> None:
    three = wires(3)
    for wire in three:
        for peer in range(wire.rank):
            wire.connect(peer, three[peer].address, 5)
    for wire in three:
        wire.await_ranks(5)
        for peer in {0, 1, 2} - {wire.rank}:
            wire.send(peer, b"%d to %d" % (wire.rank, peer))
    for wire in three:
        for peer in {0, 1, 2} - {wire.rank}:
            assert wire.recv(peer, nobody) == b"%d to %d" % (peer, wire.rank)
    for wire in three:
        wire.close()


def test_a_rank_that_is_done_at_once_waits_until_all_have_connected(pair: list[Wire]) -> None:
    zero, one = pair
    first = threading.Thread(target=lambda: (one.meet(), one.close()))
    first.start()
    first.join(0.2)
    assert first.is_alive()
    zero.meet()
    first.join()


def test_a_rank_with_another_secret_is_refused() -> None:
    zero, one = wires(2, [SECRET, Secret.fresh()])
    with pytest.raises(
        RefusedError,
        match="it closed the connection when this rank proved that it holds the secret",
    ):
        one.connect(0, zero.address, 5)
    with pytest.raises(
        TimeoutError, match=r"no connection from rank 1 within 0.1 s; 1 connections were refused"
    ):
        zero.await_ranks(0.1)
    zero.close()
    one.close()


def test_a_listener_that_does_not_hold_the_secret_is_refused() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(100)
                connection.sendall(bytes(16))

        threading.Thread(target=pretend, daemon=True).start()
        one = Wire(1, 2, SECRET, LOOPBACK)
        with pytest.raises(RefusedError, match="it cannot prove that it holds the secret"):
            one.connect(0, f"{LOOPBACK} {listener.getsockname()[1]}", 5)
        one.close()


def test_unproven_keep_no_rank_from_connecting() -> None:
    """Some strangers send nothing, some send nonsense, and some repeat the messages of another
    run's rank."""
    zero, one = wires(2)
    strangers = [socket.create_connection((LOOPBACK, zero.port)) for _ in range(8)]
    for number, stranger in enumerate(strangers[2:]):
        stranger.sendall(os.urandom(52) if number % 2 else b"GET / HTTP/1.1\r\n\r\n" + bytes(60))
    one.connect(0, zero.address, 5)
    zero.await_ranks(5)
    zero.send(1, b"here")
    assert one.recv(0, nobody) == b"here"
    with pytest.raises(OSError, match="refused"):
        # Once all ranks are connected, nothing listens
        socket.create_connection((LOOPBACK, zero.port))
    for each in (*strangers, zero, one):
        each.close()


def test_a_process_that_can_open_no_more_files_accepts_again_when_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero, one = wires(2)
    listener: Any = zero._listener

    class Full:
        """A listener that fails 20 times, as if there were too many open files."""

        left = 20

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

        def accept(self) -> Any:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

    monkeypatch.setattr(zero, "_listener", Full())
    monkeypatch.setattr(module, "_PAUSE", 1e-3)
    socket.create_connection(
        (LOOPBACK, zero.port)
    ).close()  # wakes the thread that waits at the listener
    one.connect(0, zero.address, 5)
    zero.await_ranks(5)
    assert not zero._listener.left
    for each in (zero, one):
        each.close()


def test_whoever_proves_nothing_is_sent_away_in_time_however_slowly_he_speaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_HELLO", 0.3)
    (zero,) = wires(1)
    with socket.create_connection((LOOPBACK, zero.port)) as stranger:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < 5:
                stranger.sendall(b"a")
                time.sleep(0.1)
        assert time.monotonic() - begin < 3
    zero.close()


def test_of_too_many_unproven_the_oldest_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_UNPROVEN", 4)
    zero, one = wires(2)
    strangers = [socket.create_connection((LOOPBACK, zero.port)) for _ in range(5)]
    strangers[0].settimeout(5)
    assert len(strangers[0].recv(100)) == 32
    with contextlib.suppress(ConnectionResetError):
        assert strangers[0].recv(100) == b""
    one.connect(0, zero.address, 5)
    zero.await_ranks(5)
    for each in (*strangers, zero, one):
        each.close()


def test_a_frame_that_the_rank_did_not_send_is_refused(pair: list[Wire]) -> None:
    zero, one = pair
    line: Any = zero._connections[1]
    line.socket.sendall((6).to_bytes(4, "little") + bytes(16) + b"forged")
    with pytest.raises(ConnectionError, match="a frame that rank 0 did not send"):
        one.recv(0, nobody)


def test_a_frame_that_is_repeated_is_refused(pair: list[Wire]) -> None:
    zero, one = pair
    zero.send(1, b"once")
    line: Any = zero._connections[1]
    line.sent = 0
    zero.send(1, b"once")
    assert one.recv(0, nobody) == b"once"
    with pytest.raises(ConnectionError, match="a frame that rank 0 did not send"):
        one.recv(0, nobody)


def test_who_waits_learns_that_the_other_end_closed(pair: list[Wire]) -> None:
    zero, one = pair
    zero.send(1, b"last")
    zero.close()
    assert one.recv(0, nobody) == b"last"
    with pytest.raises(ConnectionError, match="rank 0 closed its connection"):
        one.recv(0, nobody)


def test_who_waits_is_asked_whether_to_go_on(pair: list[Wire]) -> None:
    class EnoughError(Exception):
        """The wait was long enough."""

    calls: list[int] = []

    def ask() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise EnoughError

    with pytest.raises(EnoughError):
        pair[0].recv(1, ask)
