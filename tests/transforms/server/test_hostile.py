"""Clients of ill will, one by one: pages in browsers, connections that stall, bodies that nest, grammars that block."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from serving import Served, served
from starlette.requests import ClientDisconnect

from weft.proofs.http.process import read_answers, request_bytes
from weft.stages.model import Model
from weft.transforms.engine.options import EngineLimits
from weft.transforms.server import app, bodies, listening
from weft.transforms.server.browsers import is_loopback, refuse_browsers
from weft.transforms.server.listening import Listener
from weft.transforms.server.refusals import Refusal

httpx = pytest.importorskip("httpx")
BODY = {"prompt": "The function returns", "temperature": 0, "max_tokens": 100, "ignore_eos": True}


def ask(server: Served, body: Any = BODY, path: str = "/v1/completions", **options: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}{path}", content=content, timeout=60, **options)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "127.0.0.1:8000"}, None),
        ({"host": "localhost"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"host": "my.localhost:1"}, None),
        ({"host": "evil.example"}, "forbidden_host"),
        ({"host": "127.0.0.1.evil.example"}, "forbidden_host"),
        ({"host": "localhost.evil.example:8000"}, "forbidden_host"),
        ({"host": ""}, "forbidden_host"),
        ({}, "forbidden_host"),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, None),
        ({"host": "localhost:8000", "origin": "http://evil.example"}, "forbidden_origin"),
        ({"host": "localhost:8000", "origin": "http://localhost.evil.example"}, "forbidden_origin"),
        ({"host": "localhost:8000", "origin": "null"}, "forbidden_origin"),
        ({"host": "localhost:8000", "origin": ""}, "forbidden_origin"),
    ],
    ids=str,
)
def test_pages_of_other_sites(headers: dict[str, str], code: str | None) -> None:
    if code is None:
        refuse_browsers(headers, is_local=True)
        return
    with pytest.raises(Refusal) as found:
        refuse_browsers(headers, is_local=True)
    assert found.value.status == 403
    assert found.value.body["error"]["code"] == code


def test_a_server_for_others_has_any_name_but_refuses_pages_of_other_sites() -> None:
    refuse_browsers({"host": "gpu7.lab:8000"}, is_local=False)
    refuse_browsers({"host": "gpu7.lab:8000", "origin": "http://gpu7.lab:8000"}, is_local=False)
    with pytest.raises(Refusal):
        refuse_browsers({"host": "gpu7.lab:8000", "origin": "https://evil.example"}, is_local=False)
    assert not is_loopback("0.0.0.0")


def test_what_curl_sends_is_answered_and_what_a_page_sends_is_not(model: Model) -> None:
    with served(model, is_local=True) as server:
        form = {"content-type": "application/x-www-form-urlencoded"}  # what `curl -d` writes
        assert ask(server, headers=form).status_code == 200
        for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
            found = ask(server, headers={"content-type": "text/plain", **headers})
            assert found.status_code == 403
            assert "start" in found.text or "key" in found.text
    with served(model, is_local=True, api_key="secret") as server:  # no page knows the key
        known = {"authorization": "Bearer secret", "origin": "http://evil.example"}
        assert ask(server, headers=known).status_code == 200


@pytest.mark.parametrize("depth", [127, 128, 129, 5000])
@pytest.mark.parametrize("field", ["metadata", "messages", "response_format"])
def test_bodies_that_nest(server: Served, depth: int, field: str) -> None:
    nested = b'{"a":' * (depth - 1) + b"1" + b"}" * (depth - 1)
    found = ask(server, b'{"prompt":"a","max_tokens":1,"%s":%s}' % (field.encode(), nested))
    assert found.status_code == (200 if field == "metadata" and depth <= 128 else 400)
    if depth > 128:
        assert found.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_halves_of_surrogate_pairs(server: Served, path: str) -> None:
    message = rb'"messages":[{"role":"user","content":"\ud800"}]'
    found = ask(server, b"{%s}" % (rb'"prompt":"\udfff"' if path == "/v1/completions" else message), path)
    assert found.status_code == 400
    assert "half of a surrogate pair" in found.json()["error"]["message"]
    whole = ask(server, rb'{"prompt":"\ud83d\ude00"}', "/tokenize")
    assert whole.json()["count"] == 4


def test_more_completions_than_ever_fit(model: Model) -> None:
    with served(model, max_waiting=3) as server:
        found = ask(server, {**BODY, "prompt": ["a", "b"], "n": 4})
        assert found.status_code == 400, "asking again would not help"
        assert "2 prompts with n=4 are 8 completions; at most 7 at once" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"stop": ["a"] * 129}, "stop", "129 stop texts; at most 128"),
        (
            {"logit_bias": {str(token): 1 for token in range(300)}},
            "logit_bias",
            "more of logit_bias than",
        ),
        ({"stop_token_ids": [5] * 300}, "stop_token_ids", "more of stop_token_ids than the model has tokens"),
        ({"allowed_token_ids": [5] * 300}, "allowed_token_ids", "more of allowed_token_ids than the model has tokens"),
    ],
    ids=["stops", "biases", "stop tokens", "allowed tokens"],
)
def test_lists_that_cost_time_at_each_token(server: Served, body: Any, param: str, words: str) -> None:
    error = ask(server, {**BODY, **body}).json()["error"]
    assert (error["param"], words in error["message"]) == (param, True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_text_that_cannot_fit_is_not_encoded(server: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "encode", lambda *_: pytest.fail("it was encoded"))
    text = "a" * 3_000_000
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    error = ask(server, body, path).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 128 tokens. However, you requested at least" in error["message"]


def test_metrics_are_served_while_the_server_drains(model: Model) -> None:
    with served(model) as server:
        server.host.refuse_requests()
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        found = ask(server)
        assert (found.status_code, found.json()["error"]["code"]) == (503, "closed")
        assert httpx.get(f"{server.url}/health").status_code == 503


def test_an_error_of_the_server_is_logged_with_its_traceback(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise ArithmeticError("nothing that a client could mend")

    with served(model) as server:
        assert ask(server, b"no JSON").status_code == 400
        assert not caplog.records
        monkeypatch.setattr(app.Server, "_adapter", fails)
        assert ask(server).status_code == 500
    assert "ArithmeticError: nothing that a client could mend" in caplog.text
    assert "Traceback" in caplog.text


@pytest.fixture
def listener(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with `Listener`'s connections, whose clocks are short."""
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(listening, "STALL_SECONDS", 0.5)
    with served(model, limits=EngineLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=512)) as inner:
        found, bound = Listener(inner.server.app(), inner.host, "demo"), socket.socket()
        bound.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(found._serve([bound])), daemon=True)
        thread.start()
        until(lambda: found.started)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # or the system takes answers in for slow clients
        port = bound.getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", port, inner.host, inner.server, inner.stop)
        found.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\na: "], ids=str)
def test_a_head_that_does_not_come_closes_its_connection(listener: Served, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.sendall(sent)
        own.settimeout(10)
        begin = time.monotonic()
        assert own.recv(100) == b""
        assert time.monotonic() - begin > 0.2
    assert httpx.get(f"{listener.url}/health").status_code == 200


def test_a_second_head_on_a_connection_has_its_time_too(listener: Served) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.sendall(request_bytes("/health"))
        own.settimeout(10)
        [first] = read_answers(own)
        assert first.status == 200
        own.sendall(b"GET /hea")
        assert own.recv(100) == b""


@pytest.mark.parametrize("path", ["/nothing", "/v1/completions"])
def test_a_body_that_goes_on_after_its_answer_closes_the_connection(listener: Served, path: str) -> None:
    """404 of a path that is not there, and 413 of a body that is too large, are answered before the body has come."""
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.sendall(f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999\r\n\r\n".encode())
        own.settimeout(10)
        begin, read = time.monotonic(), bytearray()
        while more := own.recv(4096):
            read += more
            own.sendall(b" ")
        assert time.monotonic() - begin > 0.2
        assert read.split()[1] in (b"404", b"413")


def test_an_answer_that_takes_longer_than_a_head_is_whole(listener: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    step = listener.host.engine.step
    monkeypatch.setattr(listener.host.engine, "step", lambda: (time.sleep(0.01), step())[1])
    found = ask(listener)
    assert (found.status_code, found.json()["usage"]["completion_tokens"]) == (200, 100)


def test_a_client_that_does_not_read_is_left_and_keeps_nobody_waiting(listener: Served) -> None:
    body = {**BODY, "max_tokens": 400, "n": 4, "logprobs": 5, "stream": True}
    raw = request_bytes("/v1/completions", json.dumps(body).encode())
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", listener.port))
        slow.sendall(raw)
        until(lambda: listener.host.num_open == 4)
        assert ask(listener, {**BODY, "max_tokens": 5}).status_code == 200
        until(lambda: listener.host.engine.is_idle)  # its completions end although nobody reads them
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


@pytest.mark.parametrize(
    "raw",
    [b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"A" * 70_000],
    ids=["TLS", "two hosts", "a long line"],
)
def test_what_is_not_http_is_told_so_in_json(listener: Served, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.sendall(raw + b"\r\n\r\n")
        own.settimeout(10)
        [found] = read_answers(own)
    assert found.status == 400
    assert found.json["error"] == {
        "message": "Invalid HTTP request received.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }


def test_an_upgrade_is_not_taken_and_the_request_is_answered(listener: Served) -> None:
    """Java's client asks for HTTP/2 in each first request of a connection, with a body."""
    raw = json.dumps({**BODY, "max_tokens": 5}).encode()
    upgrade = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.settimeout(10)
        for more in (upgrade, "", upgrade):
            head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{more}content-length: {len(raw)}\r\n\r\n"
            own.sendall(head.encode() + raw[:7])
            time.sleep(0.05)
            own.sendall(raw[7:])
            [found] = read_answers(own)
            assert (found.status, found.json["usage"]["completion_tokens"]) == (200, 5)


def test_a_body_that_ends_after_its_answer_leaves_no_connection_without_a_clock(listener: Served) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.settimeout(10)
        own.sendall(b"POST /nothing HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5\r\n\r\n")
        read = b""
        while not read.endswith(b"}}"):
            read += own.recv(4096)
        assert read.split()[1] == b"404"
        own.sendall(b"12345")
        assert own.recv(100) == b""


def test_of_requests_at_once_the_first_is_answered_and_the_connection_closes(listener: Served) -> None:
    """Each could otherwise wait in memory, and the first one would not hear that its client has gone."""
    many = request_bytes("/health") * 5000
    for follows in (b"", b"\x01 no request\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", listener.port)) as own:
            own.settimeout(10)
            raw = request_bytes("/v1/completions", json.dumps({**BODY, "max_tokens": 20, "stream": True}).encode())
            with contextlib.suppress(ConnectionError):
                own.sendall(raw + (follows or many))
            [found] = read_answers(own)
        assert found.status == 200
        assert found.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_after_a_second_request_ends_the_first(listener: Served, stream: bool) -> None:
    body = {**BODY, "max_tokens": 450, "n": 4, "stream": stream}
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.sendall(request_bytes("/v1/completions", json.dumps(body).encode()) + request_bytes("/health"))
        until(lambda: listener.host.num_open == 4)
        own.sendall(request_bytes("/health"))
    until(lambda: listener.host.num_open == 0)
    until(lambda: listener.host.engine.is_idle)
    assert listener.host.engine.stats().tokens < 1000


def test_fields_after_a_body_are_none_of_the_request(listener: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener.server, "_key", "secret")
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.settimeout(10)
        chunk = json.dumps({"prompt": "a"}).encode()
        head = b"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
        own.sendall(head + b"%x\r\n%b\r\n0\r\nauthorization: Bearer secret\r\n\r\n" % (len(chunk), chunk))
        assert own.recv(4096).split()[1] == b"401"


def test_a_stream_to_a_client_of_http_1_0_has_no_chunks(listener: Served) -> None:
    raw = json.dumps({**BODY, "max_tokens": 5, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.settimeout(10)
        head = f"POST /v1/completions HTTP/1.0\r\nhost: 127.0.0.1\r\ncontent-length: {len(raw)}\r\n\r\n"
        own.sendall(head.encode() + raw)
        read = bytearray()
        while more := own.recv(4096):
            read += more
    answered, _, body = bytes(read).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answered
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_goes_as_an_output_comes_is_not_missed(turns: int) -> None:
    """With a time limit, the output and the end of the client may come in one turn of the event loop."""

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


@pytest.mark.parametrize("sent", [b"", b"transfer-encoding: chunked\r\n\r\n0\r\n"], ids=["a head", "trailers"])
def test_fields_without_end_are_refused(listener: Served, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as own:
        own.settimeout(10)
        own.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n" + sent)
        count, has_ended = 0, False
        while not has_ended and count < 2**24:
            try:
                own.sendall(b"a: " + b"b" * 4000 + b"\r\n")
                count += 4000
            except ConnectionError:
                has_ended = True
        assert has_ended
    assert ask(listener, {**BODY, "max_tokens": 5}).status_code == 200


def test_more_connections_than_may_be_are_refused(listener: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening.Connection, "max_connections", 3)
    held = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(3)]
    time.sleep(0.1)
    assert ask(listener).status_code == 503
    for own in held:
        own.close()
    until(lambda: ask(listener, {**BODY, "max_tokens": 1}).status_code == 200)


def test_a_grammar_that_takes_its_time_keeps_nobody_waiting(model: Model) -> None:
    rules = "\n".join(f'r{i} ::= r{i + 1} | "{i}"' for i in range(3000))
    form = {"type": "grammar", "grammar": f'root ::= r0\n{rules}\nr3000 ::= "a"'}
    with served(model) as server:
        assert ask(server, {"prompt": "A", "response_format": {"type": "regex", "regex": "a"}}).status_code == 200
        found: list[Any] = []
        slow = threading.Thread(target=lambda: found.append(ask(server, {**BODY, "response_format": form})))
        slow.start()
        count = 0
        while slow.is_alive():
            assert ask(server, {**BODY, "max_tokens": 5}).status_code == 200
            count += 1
        slow.join()
        assert found[0].status_code == 400
        assert count > 5, "others were served meanwhile"


def test_authorization_of_odd_forms(model: Model) -> None:
    with served(model, api_key="schlüssel") as server:
        for value in (
            b"",
            b"Bearer",
            b"Basic c2VjcmV0",
            b"Bearer schlussel",
            b"\xff\xfe",
            b"Bearer x" * 500,
        ):
            assert ask(server, headers={"authorization": value}).status_code == 401
        assert ask(server, headers={"authorization": "Bearer schlüssel".encode()}).status_code == 200


@pytest.mark.parametrize("field", ["bad_words", "stop", "cache_salt", "prompt"])
def test_half_a_surrogate_pair_in_bytes_is_no_json(server: Served, field: str) -> None:
    """`json.loads` takes it, where it comes as bytes and not escaped; and UTF-16 by itself."""
    value = b'["\xed\xa0\x80"]' if field in ("bad_words", "stop") else b'"' + b"a " * 40 + b'\xed\xa0\x80"'
    prompt = b"" if field == "prompt" else b'"prompt": "a", '
    body = b"{" + prompt + b'"max_tokens": 2, "' + field.encode() + b'": ' + value + b"}"
    for raw in (body, '{"prompt": "a", "cache_salt": "\ud800"}'.encode("utf-16", "surrogatepass")):
        found = httpx.post(f"{server.url}/v1/completions", content=raw)
        assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_json")
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("field", ["bad_words", "stop"])
def test_lists_that_cost_time_at_each_token_have_limits(server: Served, field: str) -> None:
    for texts, words in ((["x"] * 129, "129 "), (["x" * 513], "of 513 characters; at most 512")):
        found = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", field: texts})
        assert found.status_code == 400
        assert words in found.json()["error"]["message"]
