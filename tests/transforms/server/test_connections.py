"""Connections, one by one: heads that do not come, answers that nobody reads, requests at once,
clients that go."""

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from unittest import mock

import pytest
from serving import BODY, Served, ask, served, standing_still, until
from starlette.requests import ClientDisconnect

from weft.proofs.evidence.http.process import read_answers, request_bytes
from weft.stages.model import Model
from weft.transforms.engine.options import EngineLimits
from weft.transforms.server import app, bodies, listening
from weft.transforms.server.listening import Listener

httpx = pytest.importorskip("httpx")


@pytest.fixture
def listener(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with `Listener`'s connections, whose clocks are short."""
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(listening, "STALL_SECONDS", 0.5)
    with served(
        model, limits=EngineLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=512)
    ) as inner:
        uvicorn_server, bound = Listener(inner.server.app(), inner.host, "demo"), socket.socket()
        bound.bind(("127.0.0.1", 0))
        thread = threading.Thread(
            target=lambda: asyncio.run(uvicorn_server._serve([bound])), daemon=True
        )
        thread.start()
        until(lambda: uvicorn_server.started)
        # Or the system takes answers in for slow clients
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        port = bound.getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", port, inner.host, inner.server, inner.stop)
        uvicorn_server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\na: "], ids=str
)
def test_a_head_that_does_not_come_closes_its_connection(listener: Served, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.sendall(sent)
        client.settimeout(10)
        begin = time.monotonic()
        assert client.recv(100) == b""
        assert time.monotonic() - begin > 0.2
    assert httpx.get(f"{listener.url}/health").status_code == 200


def test_a_second_head_on_a_connection_has_its_time_too(listener: Served) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.sendall(request_bytes("/health"))
        client.settimeout(10)
        [first] = read_answers(client)
        assert first.status == 200
        client.sendall(b"GET /hea")
        assert client.recv(100) == b""


@pytest.mark.one_of(2)
@pytest.mark.parametrize("path", ["/nothing", "/v1/completions"])
def test_a_body_that_goes_on_after_its_answer_closes_the_connection(
    listener: Served, path: str
) -> None:
    """404 of a path that is not there, and 413 of a body that is too large, are answered before the
    body has come."""
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999\r\n\r\n".encode()
        )
        client.settimeout(10)
        begin = time.monotonic()
        read = bytearray()
        while more := client.recv(4096):
            read += more
            client.sendall(b" ")
        assert time.monotonic() - begin > 0.2
        assert read.split()[1] in (b"404", b"413")


@pytest.mark.slow
def test_an_answer_that_takes_longer_than_a_head_is_whole(
    listener: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = listener.host.engine.step
    monkeypatch.setattr(listener.host.engine, "step", lambda: (time.sleep(0.01), step())[1])
    response = ask(listener)
    assert (response.status_code, response.json()["usage"]["completion_tokens"]) == (200, 100)


@pytest.mark.slow
def test_a_client_that_does_not_read_is_left_and_keeps_nobody_waiting(listener: Served) -> None:
    body = {**BODY, "max_tokens": 400, "n": 4, "logprobs": 5, "stream": True}
    raw = request_bytes("/v1/completions", json.dumps(body).encode())
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", listener.port))
        slow.sendall(raw)
        until(lambda: listener.host.num_open == 4)
        assert ask(listener, {**BODY, "max_tokens": 5}).status_code == 200
        # Its completions end although nobody reads them
        until(lambda: listener.host.engine.is_idle)
        assert ask(listener, {**BODY, "max_tokens": 5}).status_code == 200
        time.sleep(1.0)
        slow.settimeout(10)
        read = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while more := slow.recv(65536):
                read += more
        assert read.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" not in read, "it was left before its end"
    assert listener.host.engine.stats().pages_held == 0


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "raw",
    [b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"A" * 70_000],
    ids=["TLS", "two hosts", "a long line"],
)
def test_what_is_not_http_is_told_so_in_json(listener: Served, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.sendall(raw + b"\r\n\r\n")
        client.settimeout(10)
        [response] = read_answers(client)
    assert response.status == 400
    assert response.json["error"] == {
        "message": "Invalid HTTP request received.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }


def test_an_upgrade_is_not_taken_and_the_request_is_answered(listener: Served) -> None:
    """Java's client asks for HTTP/2 in each first request of a connection, with a body."""
    raw = json.dumps({**BODY, "max_tokens": 5}).encode()
    upgrade = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.settimeout(10)
        for more in (upgrade, "", upgrade):
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{more}content-length:"
                f" {len(raw)}\r\n\r\n"
            )
            client.sendall(head.encode() + raw[:7])
            time.sleep(0.05)
            client.sendall(raw[7:])
            [response] = read_answers(client)
            assert (response.status, response.json["usage"]["completion_tokens"]) == (200, 5)


def test_a_body_that_ends_after_its_answer_leaves_no_connection_without_a_clock(
    listener: Served,
) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.settimeout(10)
        client.sendall(b"POST /nothing HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5\r\n\r\n")
        read = b""
        while not read.endswith(b"}}"):
            read += client.recv(4096)
        assert read.split()[1] == b"404"
        client.sendall(b"12345")
        assert client.recv(100) == b""


def test_of_requests_at_once_the_first_is_answered_and_the_connection_closes(
    listener: Served,
) -> None:
    """Each could otherwise wait in memory, and the first one would not hear that its client has
    gone."""
    many = request_bytes("/health") * 5000
    for follows in (b"", b"\x01 no request\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", listener.port)) as client:
            client.settimeout(10)
            raw = request_bytes(
                "/v1/completions", json.dumps({**BODY, "max_tokens": 20, "stream": True}).encode()
            )
            with contextlib.suppress(ConnectionError):
                client.sendall(raw + (follows or many))
            [response] = read_answers(client)
        assert response.status == 200
        assert response.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.one_of(2)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_after_a_second_request_ends_the_first(
    listener: Served, stream: bool
) -> None:
    body = {**BODY, "max_tokens": 450, "n": 4, "stream": stream}
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.sendall(
            request_bytes("/v1/completions", json.dumps(body).encode()) + request_bytes("/health")
        )
        until(lambda: listener.host.num_open == 4)
        client.sendall(request_bytes("/health"))
    until(lambda: listener.host.num_open == 0)
    until(lambda: listener.host.engine.is_idle)
    assert listener.host.engine.stats().tokens < 1000


def test_fields_after_a_body_are_none_of_the_request(
    listener: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener.server, "_key", "secret")
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.settimeout(10)
        chunk = json.dumps({"prompt": "a"}).encode()
        head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
        client.sendall(
            head + b"%x\r\n%b\r\n0\r\nauthorization: Bearer secret\r\n\r\n" % (len(chunk), chunk)
        )
        assert client.recv(4096).split()[1] == b"401"


def test_a_stream_to_a_client_of_http_1_0_has_no_chunks(listener: Served) -> None:
    raw = json.dumps({**BODY, "max_tokens": 5, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.settimeout(10)
        head = (
            "POST /v1/completions HTTP/1.0\r\nhost: 127.0.0.1\r\ncontent-length:"
            f" {len(raw)}\r\n\r\n"
        )
        client.sendall(head.encode() + raw)
        read = bytearray()
        while more := client.recv(4096):
            read += more
    answered, _, body = bytes(read).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answered
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_goes_as_an_output_comes_is_not_missed(turns: int) -> None:
    """With a time limit, the output and the end of the client may come in one turn of the event
    loop."""

    async def run() -> int:
        gone, came, count = asyncio.Event(), asyncio.Event(), 0

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def outputs() -> AsyncGenerator[Any, None]:
            for _ in range(50):
                await came.wait()
                came.clear()
                yield []

        async def feed() -> None:
            for place in range(50):
                came.set()
                if place == 3:
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    gone.set()
                await asyncio.sleep(0.001)

        feeding = asyncio.create_task(feed())
        with contextlib.suppress(ClientDisconnect):
            async with bodies.while_connected(receive):
                async for _ in app._within(outputs(), 60):
                    count += 1
        feeding.cancel()
        return count

    assert asyncio.run(run()) <= 5


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "sent", [b"", b"transfer-encoding: chunked\r\n\r\n0\r\n"], ids=["a head", "trailers"]
)
def test_fields_without_end_are_refused(listener: Served, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        client.settimeout(10)
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + sent)
        count = 0
        has_ended = False
        while not has_ended and count < 2**24:
            try:
                client.sendall(b"a: " + b"b" * 4000 + b"\r\n")
                count += 4000
            except ConnectionError:
                has_ended = True
        assert has_ended
    assert ask(listener, {**BODY, "max_tokens": 5}).status_code == 200


def test_more_connections_than_may_be_are_refused(
    listener: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening.Connection, "max_connections", 3)
    clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(3)]
    until(lambda: ask(listener).status_code == 503)  # once the server has accepted all three
    for client in clients:
        client.close()
    until(lambda: ask(listener, {**BODY, "max_tokens": 1}).status_code == 200)


@pytest.mark.slow
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_an_end_of_an_answer_that_nobody_reads_has_a_clock(
    listener: Served, connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is too short to pause writing, and a connection that is being closed waits until it has
    been read."""
    ended = threading.Event()
    lost = listening.Connection.connection_lost
    monkeypatch.setattr(
        listening.Connection, "connection_lost", lambda self, exc: (lost(self, exc), ended.set())[0]
    )
    body = json.dumps({**BODY, "logprobs": 5}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", listener.port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: {connection}\r\n"
        slow.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert ended.wait(15)


def test_a_signal_ends_a_server_whose_engine_stands_still(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No completion under way will end. A second signal is not needed."""
    monkeypatch.setattr(listening, "GIVE_UP_SECONDS", 0.3)
    with served(model) as inner, standing_still(inner) as goes_on:
        listener = Listener(inner.server.app(), inner.host, "demo")
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        server = Served(
            f"http://127.0.0.1:{bound.getsockname()[1]}", 0, inner.host, inner.server, inner.stop
        )
        serving = threading.Thread(
            target=lambda: asyncio.run(listener._serve([bound])), daemon=True
        )
        serving.start()
        answers = list[Any]()
        asking = threading.Thread(target=lambda: answers.append(ask(server)), daemon=True)
        try:
            until(lambda: listener.started)
            asking.start()
            until(lambda: inner.host.num_open == 1)
            listener.handle_exit(signal.SIGTERM, None)
            asking.join(10)
            assert [answer.status_code for answer in answers] == [500]
            assert listener.should_exit
        finally:
            goes_on.set()
            listener.should_exit = True
            serving.join(20)
            asking.join(20)
        assert not serving.is_alive()


@pytest.mark.slow
def test_a_planted_server_that_waits_for_an_engine_that_stands_still_is_found(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Listener, "_end_if_still", mock.AsyncMock())
    with pytest.raises(AssertionError):
        test_a_signal_ends_a_server_whose_engine_stands_still(model, monkeypatch)
