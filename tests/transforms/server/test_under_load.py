"""The server under load and under attack: bounds, time limits, clients that go, engines that fail."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from serving import Served, served

from weft.stages.model import Model
from weft.transforms.engine.engine import Engine, num_unfinished
from weft.transforms.engine.options import EngineLimits
from weft.transforms.server.bodies import ServerLimits

httpx = pytest.importorskip("httpx")
BODY = {"prompt": "The function returns", "temperature": 0, "max_tokens": 100, "ignore_eos": True}


def post(server: Served, body: Any = BODY, path: str = "/v1/completions", **options: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **options)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_idle(server: Served) -> bool:
    return server.host.engine.is_idle and server.host.engine.stats().pages_held == 0


@pytest.mark.slow
def test_more_requests_than_may_wait_are_refused(model: Model) -> None:
    async def ask(url: str) -> list[Any]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(
                *(client.post(f"{url}/v1/completions", json=BODY) for _ in range(20))
            )

    with served(model, max_waiting=3) as server:
        responses = asyncio.run(ask(server.url))
        refused = [each for each in responses if each.status_code != 200]
        assert len(refused) == 20 - 4 - 3
        assert {each.status_code for each in refused} == {429}
        assert {each.headers["retry-after"] for each in refused} == {"1"}
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        until(lambda: is_idle(server))
        assert post(server).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_pages(server: Served, stream: bool) -> None:
    before = server.host.engine.stats().ended.get("abort", 0)
    raw = json.dumps({**BODY, "n": 4, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    )
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head + raw)
        until(lambda: num_unfinished(server.host.engine) > 0)
    until(lambda: is_idle(server))
    assert server.host.engine.stats().ended.get("abort", 0) > before


def test_a_client_that_goes_while_it_waits_for_its_first_token(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(engine: Engine) -> Any:
        time.sleep(0.03)
        return step(engine)

    step = Engine.step
    monkeypatch.setattr(Engine, "step", slow)
    raw = json.dumps({**BODY, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    )
    with served(model, limits=EngineLimits(max_num_reqs=1, max_model_len=128)) as server:
        engine = server.host.engine
        with socket.create_connection(("127.0.0.1", server.port)) as first:
            first.sendall(head + raw)
            until(lambda: num_unfinished(engine) == 1)
            with socket.create_connection(("127.0.0.1", server.port)) as second:
                second.sendall(head + raw)
                until(lambda: num_unfinished(engine) == 2)
            until(lambda: num_unfinished(engine) == 1)
            assert engine.stats().ended == {"abort": 1}, "the first one goes on"


def test_a_time_limit(model: Model) -> None:
    with served(model, limits_of=ServerLimits(timeout=0.02)) as server:
        response = post(server)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
        until(lambda: is_idle(server))
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**BODY, "stream": True}
        ) as streamed:
            *_, last = [line for line in streamed.iter_lines() if line]
        assert "no end within 0.02 s" in last


def test_a_key(model: Model) -> None:
    with served(model, api_key="secret") as server:
        for headers in (
            {},
            {"authorization": "Bearer other"},
            {"authorization": "secret"},
            {"authorization": "é"},
        ):
            raw = {name: value.encode() for name, value in headers.items()}
            response = post(server, headers=raw)
            assert (response.status_code, response.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
            assert httpx.get(f"{server.url}/metrics", headers=raw).status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert post(server, headers={"authorization": "Bearer secret"}).status_code == 200


def test_bodies_have_a_limit(model: Model) -> None:
    with served(model, limits_of=ServerLimits(max_body=500, body_timeout=0.3)) as server:
        assert post(server, {**BODY, "user": "u" * 600}).status_code == 413

        def chunks() -> Iterator[bytes]:
            for _ in range(100):
                yield b"a" * 50

        response = httpx.post(f"{server.url}/v1/completions", content=chunks())
        assert response.status_code == 413
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 400\r\n\r\n{"
            )
            slow.settimeout(10)
            assert slow.recv(4000).startswith(b"HTTP/1.1 408")
        assert post(server).status_code == 200


def test_an_engine_that_fails_says_why(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(model) as server:
        assert post(server).status_code == 200

        def step(_: Engine) -> Any:
            raise ArithmeticError("the device is gone")

        monkeypatch.setattr(Engine, "step", step)
        response = post(server)
        assert response.status_code == 500
        assert "ArithmeticError: the device is gone" in response.json()["error"]["message"]
        for again in (post(server), httpx.get(f"{server.url}/health")):
            assert again.status_code == 503
            assert "ArithmeticError: the device is gone" in again.json()["error"]["message"]
        assert httpx.get(f"{server.url}/metrics").status_code == 200


def test_metrics_count(server: Served) -> None:
    def read() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if not line.startswith("#")
        }

    before = read()
    post(server)
    after = read()
    labels = '{model_name="demo"}'
    assert (
        after[f"weft_generation_tokens_total{labels}"]
        - before[f"weft_generation_tokens_total{labels}"]
        == 100
    )
    assert (
        after[f"weft_request_seconds_count{labels}"] - before[f"weft_request_seconds_count{labels}"]
        == 1
    )
    assert after[f"weft_pages_held{labels}"] == 0


def test_tokens_and_back(server: Served, model: Model) -> None:
    tokenized = post(server, {"prompt": "The function"}, "/tokenize").json()
    assert tokenized == {"tokens": model.encode("The function"), "count": 12, "max_model_len": 128}
    assert post(server, {"tokens": tokenized["tokens"]}, "/detokenize").json() == {
        "prompt": "The function"
    }
    chat = post(server, {"messages": [{"role": "user", "content": "Hi"}]}, "/tokenize").json()
    assert model.decode(chat["tokens"]) == "user: Hi\nassistant:"
    assert post(server, {}, "/tokenize").status_code == 400


def test_a_server_that_is_stopped_lets_requests_end(model: Model) -> None:
    async def ask(url: str, stop: Callable[[], None]) -> Any:
        async with httpx.AsyncClient(timeout=60) as client:
            request = asyncio.create_task(client.post(f"{url}/v1/completions", json=BODY))
            await asyncio.sleep(0.05)
            stop()
            return await request

    with served(model) as server:
        response = asyncio.run(ask(server.url, server.stop))
    assert (response.status_code, response.json()["usage"]["completion_tokens"]) == (200, 100)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda fields: (
        st.lists(fields, max_size=3) | st.dictionaries(st.text(max_size=8), fields, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [
    *(
        "prompt",
        "messages",
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "stop",
        "seed",
        "logprobs",
    ),
    *(
        "echo",
        "stream",
        "stream_options",
        "logit_bias",
        "response_format",
        "weft",
        "priority",
        "stop_token_ids",
    ),
    *("min_tokens", "best_of", "suffix", "tools", "chat_template_kwargs"),
]
bodies = st.dictionaries(
    st.sampled_from(FIELDS), json_values | st.sampled_from(["A", [1], 2, True]), max_size=5
)
raws = st.one_of(
    st.binary(max_size=60),
    bodies.map(lambda fields: json.dumps(fields).encode()),
    st.builds(
        lambda fields, cut: json.dumps({**BODY, **fields}).encode()[: cut or None],
        bodies,
        st.integers(-9, 0),
    ),
    st.builds(
        lambda fields, kind: json.dumps({**BODY, **fields}).encode(kind),
        bodies,
        st.sampled_from(["utf-16", "utf-32"]),
    ),
    st.integers(1, 3000).map(lambda depth: b'{"prompt":' + b"[" * depth),
)


@given(
    raws,
    st.sampled_from(
        ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/none"]
    ),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_sent_is_answered(server: Served, raw: bytes, path: str) -> None:
    response = httpx.post(f"{server.url}{path}", content=raw, timeout=60)
    assert response.status_code in (200, 400, 404, 413, 422)
    if response.status_code != 200:
        assert {"message", "type", "param", "code"} <= response.json()["error"].keys()
    until(lambda: is_idle(server))


@given(
    st.binary(min_size=1, max_size=80)
    | st.sampled_from([b"POST /v1/completions HTTP/1.1\r\n", b"GET / HTTP/9.9\r\n\r\n"])
)
@settings(max_examples=50, deadline=None)
def test_bytes_that_are_no_request(server: Served, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        client.settimeout(10)
        client.recv(4000)
    assert httpx.get(f"{server.url}/health").status_code == 200
