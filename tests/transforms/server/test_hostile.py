"""Clients of ill will, one by one: pages in browsers, bodies that nest, lists that cost time, grammars that block."""

import threading
from typing import Any

import pytest
from serving import BODY, Served, ask, served

from weft.stages.model import Model
from weft.transforms.server import app
from weft.transforms.server.browsers import is_loopback, refuse_browsers
from weft.transforms.server.refusals import Refusal

httpx = pytest.importorskip("httpx")


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
