"""Clients of ill will, one by one: pages in browsers, bodies that nest, lists that cost time,
grammars that block."""

import asyncio
import contextlib
import functools
import ipaddress
import json
import socket
import string
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import attrs
import pytest
from hypothesis import example, given, settings, strategies as st
from serving import BODY, Served, ask, served, standing_still, until

from weft.stages.checkpoints.chat import ChatTemplate
from weft.stages.model import Model
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.requests.mask_budget import MaskBudget
from weft.transforms.server import app, host, templates
from weft.transforms.server.bodies import ServerLimits, UnfinishedBodies
from weft.transforms.server.browsers import is_loopback, refuse_browsers
from weft.transforms.server.grammars.compiling import Compiler, GrammarUse
from weft.transforms.server.grammars.masks import Masks, ModelGrammars
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
        ({"host": "[::1].evil:8000"}, "forbidden_host"),
        ({"host": "[::1]evil"}, "forbidden_host"),
        ({"host": "localhost:8000.evil"}, "forbidden_host"),
        ({"host": "[::1]"}, None),
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
    with pytest.raises(Refusal) as error:
        refuse_browsers(headers, is_local=True)
    assert error.value.status == 403
    assert error.value.body["error"]["code"] == code


ADDRESSES = (
    "localhost",
    "a.localhost",
    "127.0.0.1",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "::1",
    "evil",
    "[evil]",
    "10.0.0.1",
)
# What a client may be made to send: names, and every mark that some parser of addresses reads.
PARTS = st.one_of(
    st.sampled_from(["", ":80", ".evil", "evil"]), st.sampled_from(string.punctuation + " \t")
)


@given(st.tuples(PARTS, st.sampled_from(ADDRESSES), PARTS, PARTS).map("".join))
@settings(max_examples=1000)
@example("#a.localhost")
def test_a_host_that_is_taken_for_this_machine_is_this_machine(host: str) -> None:
    try:
        refuse_browsers({"host": host}, is_local=True)
    except Refusal:
        return
    name = httpx.URL(f"http://{host.strip().rstrip('/')}").host.rstrip(".")
    assert (
        name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name).is_loopback
    )


def test_a_server_for_others_has_any_name_but_refuses_pages_of_other_sites() -> None:
    refuse_browsers({"host": "gpu7.lab:8000"}, is_local=False)
    refuse_browsers({"host": "gpu7.lab:8000", "origin": "http://gpu7.lab:8000"}, is_local=False)
    with pytest.raises(Refusal):
        refuse_browsers({"host": "gpu7.lab:8000", "origin": "https://evil.example"}, is_local=False)
    assert not is_loopback("0.0.0.0")


@pytest.mark.slow
def test_what_curl_sends_is_answered_and_what_a_page_sends_is_not(model: Model) -> None:
    with served(model, is_local=True) as server:
        form = {"content-type": "application/x-www-form-urlencoded"}  # what `curl -d` writes
        assert ask(server, headers=form).status_code == 200
        for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
            response = ask(server, headers={"content-type": "text/plain", **headers})
            assert response.status_code == 403
            assert "start" in response.text or "key" in response.text
    with served(model, is_local=True, api_key="secret") as server:  # no page knows the key
        authorized_headers = {"authorization": "Bearer secret", "origin": "http://evil.example"}
        assert ask(server, headers=authorized_headers).status_code == 200


@pytest.mark.parametrize("depth", [127, 128, 129, 5000])
@pytest.mark.parametrize("field", ["metadata", "messages", "response_format"])
def test_bodies_that_nest(server: Served, depth: int, field: str) -> None:
    nested = b'{"a":' * (depth - 1) + b"1" + b"}" * (depth - 1)
    response = ask(server, b'{"prompt":"a","max_tokens":1,"%s":%s}' % (field.encode(), nested))
    assert response.status_code == (200 if field == "metadata" and depth <= 128 else 400)
    if depth > 128:
        assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_halves_of_surrogate_pairs(server: Served, path: str) -> None:
    message = rb'"messages":[{"role":"user","content":"\ud800"}]'
    response = ask(
        server, b"{%s}" % (rb'"prompt":"\udfff"' if path == "/v1/completions" else message), path
    )
    assert response.status_code == 400
    assert "half of a surrogate pair" in response.json()["error"]["message"]
    whole = ask(server, rb'{"prompt":"\ud83d\ude00"}', "/tokenize")
    assert whole.json()["count"] == 4


def test_more_completions_than_ever_fit(model: Model) -> None:
    with served(model, max_waiting=3) as server:
        response = ask(server, {**BODY, "prompt": ["a", "b"], "n": 4})
        assert response.status_code == 400, "asking again would not help"
        assert (
            "2 prompts with n=4 are 8 completions; at most 7 at once"
            in response.json()["error"]["message"]
        )


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"stop": ["a"] * 129}, "stop", "129 stop texts; at most 128"),
        (
            {"logit_bias": {str(token): 1 for token in range(300)}},
            "logit_bias",
            "more of logit_bias than",
        ),
        (
            {"stop_token_ids": [5] * 300},
            "stop_token_ids",
            "more of stop_token_ids than the model has tokens",
        ),
        (
            {"allowed_token_ids": [5] * 300},
            "allowed_token_ids",
            "more of allowed_token_ids than the model has tokens",
        ),
    ],
    ids=["stops", "biases", "stop tokens", "allowed tokens"],
)
def test_lists_that_cost_time_at_each_token(
    server: Served, body: Any, param: str, words: str
) -> None:
    error = ask(server, {**BODY, **body}).json()["error"]
    assert (error["param"], words in error["message"]) == (param, True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_text_that_cannot_fit_is_not_encoded(
    server: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "encode", lambda *_: pytest.fail("it was encoded"))
    text = "a" * 3_000_000
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    error = ask(server, body, path).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert (
        "This model's maximum context length is 128 tokens. However, you requested at least"
        in error["message"]
    )


def test_metrics_are_served_while_the_server_drains(model: Model) -> None:
    with served(model) as server:
        server.host.refuse_requests()
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        response = ask(server)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "closed")
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


@pytest.mark.slow
def test_a_grammar_that_takes_its_time_keeps_nobody_waiting(model: Model) -> None:
    rules = "\n".join(f'r{i} ::= r{i + 1} | "{i}"' for i in range(3000))
    form = {"type": "grammar", "grammar": f'root ::= r0\n{rules}\nr3000 ::= "a"'}
    with served(model) as server:
        assert (
            ask(
                server, {"prompt": "A", "response_format": {"type": "regex", "regex": "a"}}
            ).status_code
            == 200
        )
        responses: list[Any] = []
        slow = threading.Thread(
            target=lambda: responses.append(ask(server, {**BODY, "response_format": form}))
        )
        slow.start()
        count = 0
        while slow.is_alive():
            assert ask(server, {**BODY, "max_tokens": 5}).status_code == 200
            count += 1
        slow.join()
        assert responses[0].status_code == 400
        assert count > 5, "others were served meanwhile"


@pytest.mark.slow
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
        assert (
            ask(server, headers={"authorization": "Bearer schlüssel".encode()}).status_code == 200
        )


@pytest.mark.parametrize("field", ["bad_words", "stop", "cache_salt", "prompt"])
def test_half_a_surrogate_pair_in_bytes_is_no_json(server: Served, field: str) -> None:
    """`json.loads` takes it, where it comes as bytes and not escaped; and UTF-16 by itself."""
    value = (
        b'["\xed\xa0\x80"]'
        if field in ("bad_words", "stop")
        else b'"' + b"a " * 40 + b'\xed\xa0\x80"'
    )
    prompt = b"" if field == "prompt" else b'"prompt": "a", '
    body = b"{" + prompt + b'"max_tokens": 2, "' + field.encode() + b'": ' + value + b"}"
    for raw in (body, '{"prompt": "a", "cache_salt": "\ud800"}'.encode("utf-16", "surrogatepass")):
        response = httpx.post(f"{server.url}/v1/completions", content=raw)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert (
        httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}
        ).status_code
        == 200
    )


@pytest.mark.parametrize("field", ["bad_words", "stop"])
def test_lists_that_cost_time_at_each_token_have_limits(server: Served, field: str) -> None:
    for texts, words in ((["x"] * 129, "129 "), (["x" * 513], "of 513 characters; at most 512")):
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", field: texts})
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]


# Attacks beside innocents
# ---------------------------------------------------------------------------------------------

LOOPS = ChatTemplate(
    "{% for m in messages %}{% if m.content == 'loop' %}{% for a in range(99999) %}{% for b in"
    " range(99999) %}{% endfor %}{% endfor %}{% elif m.content == 'memory' %}{{ m.content *"
    " 300000000 }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}


def largest_gap(server: Served) -> float:
    """Seconds between two parts of a stream, at most."""
    body = {**BODY, "stream": True}
    gaps = list[float]()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        before = None
        for _ in stream.iter_raw():
            now = time.monotonic()
            if before is not None:
                gaps.append(now - before)
            before = now
    return max(gaps)


@contextlib.contextmanager
def attacked(attack: Callable[[], Any], count: int) -> Iterator[list[Any]]:
    """What so many threads do at once, and what came of it."""
    results = list[Any]()
    threads = [threading.Thread(target=lambda: results.append(attack())) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield results
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.slow
def test_a_chat_template_that_loops_ends_one_request(model: Model) -> None:
    """Each of them is refused; and others have their chats, their streams and their end meanwhile."""
    looping = attrs.evolve(model, chat_template=LOOPS)
    with (
        served(looping, chat_template=LOOPS) as server,
        mock.patch.object(server.server._renderer, "_seconds", 2.0),
    ):
        assert ask(server, chat("a"), "/v1/chat/completions").status_code == 200
        with attacked(lambda: ask(server, chat("loop"), "/v1/chat/completions"), 12) as refused:
            until(lambda: len(server.server._renderer._busy) == templates.MOST_AT_ONCE)
            for _ in range(3):
                assert ask(server, chat("a"), "/v1/chat/completions").status_code == 200
            assert ask(server, {**BODY, "max_tokens": 5}).status_code == 200
        assert {response.status_code for response in refused} == {400}
        words = "a chat template that had not rendered these messages after"
        assert all(words in response.json()["error"]["message"] for response in refused)
        too_large = ask(server, chat("memory"), "/v1/chat/completions")
        assert too_large.status_code == 400
        assert "MemoryError" in too_large.json()["error"]["message"]
        assert ask(server, chat("a"), "/v1/chat/completions").status_code == 200


def test_a_template_that_is_computed_where_it_is_compiled_is_refused(model: Model) -> None:
    constant = ChatTemplate("{{ 'a' * 2000000000 }}")
    with served(attrs.evolve(model, chat_template=constant), chat_template=constant) as server:
        assert ask(server, chat("a"), "/v1/chat/completions").status_code == 400
        assert ask(server, {**BODY, "max_tokens": 2}).status_code == 200


def test_a_server_whose_template_loops_ends_at_once(model: Model) -> None:
    begin = 0.0
    with served(attrs.evolve(model, chat_template=LOOPS), chat_template=LOOPS) as server:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/chat/completions", json=chat("loop"), timeout=0.5)
        process = server.server._renderer._process
        begin = time.monotonic()
    assert time.monotonic() - begin < templates.TEMPLATE_SECONDS
    assert process.poll() is not None


def test_a_chat_waits_for_loops_no_longer_than_their_patience(model: Model) -> None:
    """All places are taken by chats that have much time left: the one that began first is ended,
    and no other."""
    with served(attrs.evolve(model, chat_template=LOOPS), chat_template=LOOPS) as server:
        renderer = server.server._renderer
        loop = functools.partial(ask, server, chat("loop"), "/v1/chat/completions")
        with (
            mock.patch.object(renderer, "_seconds", 12.0),
            attacked(loop, templates.MOST_AT_ONCE) as refused,
        ):
            until(lambda: len(renderer._busy) == templates.MOST_AT_ONCE)
            start = min(rendering.since for rendering in renderer._busy)
            assert ask(server, chat("a"), "/v1/chat/completions").status_code == 200
            # A process ends by itself after this time.
            assert time.monotonic() - start < templates.TEMPLATE_SECONDS, (
                "it waited for the end of a loop"
            )
            num_left = len(renderer._busy)
            for rendering in [*renderer._busy]:
                server.host._loop.call_soon_threadsafe(renderer._end, rendering)
        assert num_left == templates.MOST_AT_ONCE - 1
        assert {response.status_code for response in refused} == {400}


def test_the_body_that_began_first_makes_room(model: Model) -> None:
    """Many bodies that do not end, each of less than a body may have."""
    limits = ServerLimits(max_body=100_000, max_unfinished=200_000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 90000\r\n\r\n"
    with served(model, limits_of=limits) as server:
        unfinished = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(6)]
        for connection in unfinished:
            connection.sendall(head + b" " * 60_000)
            until(lambda: server.server._bodies._num_bytes > 0)
        whole = {**BODY, "max_tokens": 3, "prompt": "a", "stop": [" " * 400] * 100}
        assert len(json.dumps(whole)) > 40_000
        for _ in range(3):
            assert ask(server, whole).status_code == 200
            assert server.server._bodies._num_bytes <= 200_000
        unfinished[0].settimeout(10)
        answer = unfinished[0].recv(4096)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"200000 bytes of unfinished bodies, of which this one had begun first" in answer
        for connection in unfinished:
            connection.close()
        until(lambda: server.server._bodies._num_bytes == 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), max_size=30))
@settings(max_examples=100, deadline=None)
def test_bodies_together_stay_within_their_limit(chunks: list[tuple[int, int]]) -> None:
    """Whoever sends what: the count is that of the bodies that were not refused, and never above
    the limit."""

    async def run() -> None:
        unfinished = UnfinishedBodies(100)
        queues = [asyncio.Queue[int]() for _ in range(5)]

        async def read(queue: asyncio.Queue[int]) -> str:
            try:
                async with unfinished.reading(60) as count:
                    while (size := await queue.get()) > 0:
                        count(size)
            except Refusal as refusal:
                return str(refusal.body["error"]["code"])
            return "whole"

        tasks = [asyncio.create_task(read(queue)) for queue in queues]
        await asyncio.sleep(0)
        for place, size in chunks:
            queues[place].put_nowait(size)
            await asyncio.sleep(0)
            assert 0 <= unfinished._num_bytes <= 100
        for queue in queues:
            queue.put_nowait(0)
        assert {*await asyncio.gather(*tasks)} <= {"whole", "bodies_too_large"}
        assert unfinished._num_bytes == 0

    asyncio.run(run())


def test_health_is_not_200_while_the_engine_stands_still(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "STILL_SECONDS", 0.3)
    with served(model) as server, standing_still(server) as goes_on:
        with attacked(lambda: ask(server, {**BODY, "max_tokens": 2}), 1) as responses:
            until(lambda: server.host.num_open == 1)
            health = httpx.get(f"{server.url}/health", timeout=20)
            assert health.status_code == 503
            assert health.json()["error"]["code"] == "engine_stands_still"
            goes_on.set()
        assert responses[0].status_code == 200
        assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200


def test_an_engine_that_stands_still_is_given_up(model: Model) -> None:
    with served(model) as server, standing_still(server):
        with attacked(lambda: ask(server), 1) as responses:
            until(lambda: server.host.num_open == 1)
            loop = server.host._loop
            # It moves until it has begun the step.
            until(
                lambda: (
                    not asyncio.run_coroutine_threadsafe(server.host.is_moving(0.2), loop).result(
                        20
                    )
                )
            )
            loop.call_soon_threadsafe(server.host.give_up)
        assert responses[0].status_code == 500
        assert f"stood still for {host.GIVE_UP_SECONDS:g} s" in responses[0].text


# Planted bugs
# ---------------------------------------------------------------------------------------------------------


def _count_alone(self: UnfinishedBodies, body: Any, count: int) -> None:
    body.num_bytes += count
    self._num_bytes += count


@pytest.mark.nightly
def test_planted_bugs_of_the_limits_are_found(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # nobody is refused for the sum of all
        patch.setattr(
            UnfinishedBodies,
            "_add",
            lambda self, body, count: setattr(self, "_num_bytes", self._num_bytes + count),
        )
        with pytest.raises((AssertionError, ExceptionGroup)):
            test_bodies_together_stay_within_their_limit()
    with monkeypatch.context() as patch:  # any name in brackets, whatever follows
        patch.setattr(
            "weft.transforms.server.browsers._name_of",
            lambda place: place.lstrip("[").partition("]")[0],
        )
        with pytest.raises((AssertionError, ValueError, httpx.InvalidURL, ExceptionGroup)):
            test_a_host_that_is_taken_for_this_machine_is_this_machine()
    with monkeypatch.context() as patch:  # an engine is never seen to stand still
        patch.setattr(host.Host, "is_moving", mock.AsyncMock(return_value=True))
        with pytest.raises(AssertionError):
            test_health_is_not_200_while_the_engine_stands_still(model, patch)


@pytest.mark.slow
def test_a_planted_template_that_has_all_its_time_is_found(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "PATIENCE_SECONDS", 1e9)
    with pytest.raises(AssertionError):
        test_a_chat_waits_for_loops_no_longer_than_their_patience(model)


AMBIGUOUS = {"type": "grammar", "grammar": 'root ::= root root | "a" | "ab" | "b"'}


def check_full_pool(model: Model, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A grammar that was compiled is answered within so many seconds, while slow ones take all
    places."""
    quick = {
        **BODY,
        "max_tokens": 2,
        "response_format": {"type": "regex", "regex": "[ab]+"},
        "ignore_eos": False,
    }
    may_go_on = threading.Event()
    compile_one = Compiler.compile

    def waits(compiler: Compiler, call: str, kind: str, source: str, use: GrammarUse) -> str:
        if "s" in source:
            assert may_go_on.wait(120)
        return compile_one(compiler, call, kind, source, use)

    with served(model) as server:
        assert ask(server, quick).status_code == 200
        monkeypatch.setattr(Compiler, "compile", waits)
        slow = [
            {**quick, "response_format": {"type": "regex", "regex": f"s{index}"}}
            for index in range(10)
        ]
        threads = [threading.Thread(target=ask, args=(server, body), daemon=True) for body in slow]
        for thread in threads:
            thread.start()
        until(lambda: server.server._num_compiling == len(slow))
        try:
            assert ask(server, quick, timeout=seconds).status_code == 200
        finally:
            may_go_on.set()
            for thread in threads:
                thread.join()


def test_a_grammar_that_was_compiled_is_found_while_slow_ones_fill_the_pool(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_full_pool(model, monkeypatch, 60)


@pytest.mark.slow
def test_a_planted_pool_that_is_asked_first_is_found(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that was compiled waits for those that are being compiled."""
    monkeypatch.setattr(ModelGrammars, "find", lambda *_: None)
    with pytest.raises(httpx.ReadTimeout, match="timed out"):
        check_full_pool(model, monkeypatch, 3)


@pytest.mark.slow
def test_masks_that_grow_slower_end_their_request_and_no_other(model: Model) -> None:
    """The grammar passes its trial for each request by itself; together they take the steps of all
    others."""
    make = Masks.mask

    def hasty(masks: Masks, compiled: str) -> Any:
        mask: Any = make(masks, compiled)
        mask.budget = MaskBudget(step_seconds=1e-6, burst_seconds=1e-6)
        return mask

    with served(
        model, limits=EngineLimits(max_num_reqs=16, max_num_tokens=64, max_model_len=128)
    ) as server:
        odd = {
            **BODY,
            "ignore_eos": False,
            "response_format": AMBIGUOUS,
            "n": 4,
            "max_tokens": 40,
            "temperature": 1,
        }
        assert ask(server, {**odd, "max_tokens": 2}).status_code == 200  # what makes masks is there
        responses: list[Any] = []
        with mock.patch.object(Masks, "mask", hasty):
            threads = [
                threading.Thread(target=lambda: responses.append(ask(server, odd)))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            good = ask(server, BODY)
            for thread in threads:
                thread.join()
        assert good.status_code == 200
        assert good.json()["choices"][0]["text"] == ask(server, BODY).json()["choices"][0]["text"]
        assert any("its masks took" in each.text for each in responses)


@pytest.mark.slow
def test_a_grammar_that_grows_is_refused_beside_an_innocent_stream(model: Model) -> None:
    """After 200 tokens its masks take milliseconds for each of 60 completions: many times what
    a step may take, on a faster machine too."""
    limits = EngineLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=256)
    with served(model, limits=limits) as server:
        warm = {**BODY, "ignore_eos": False, "response_format": {"type": "regex", "regex": "a"}}
        assert ask(server, warm).status_code == 200
        responses: list[Any] = []
        body = {
            **BODY,
            "response_format": AMBIGUOUS,
            "n": 60,
            "max_tokens": 220,
            "ignore_eos": False,
        }
        attack = threading.Thread(target=lambda: responses.append(ask(server, body)))
        attack.start()
        assert ask(server).status_code == 200
        attack.join()
    assert responses[0].status_code == 400
    assert "for each of 60 completions after" in responses[0].json()["error"]["message"]
