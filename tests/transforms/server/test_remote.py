"""Clients and the engine at two ends of a socket, as `weft serve` has them: nothing that a client
gets differs."""

import asyncio
import json
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st
from serving import Served, served
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from weft.batches.sampling import SamplingParams
from weft.errors import RequestError
from weft.stages.model import Model
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.server.answers import Choice, Writer
from weft.transforms.server.commands import Add
from weft.transforms.server.forms import Asked, ChatForm, Form, TextForm
from weft.transforms.server.loop import PER_PROMPT, PER_TOKEN
from weft.transforms.server.protocol import ChatRequest, CompletionRequest
from weft.transforms.server.refusals import event
from weft.transforms.server.remote import Unpacker, pack
from weft.transforms.server.streams import Progress

httpx = pytest.importorskip("httpx")
BODY = {"prompt": "The function returns", "temperature": 0, "max_tokens": 40}
BODIES = [
    BODY,
    {**BODY, "prompt": ["The function", "A list is"], "n": 2, "seed": 3, "temperature": 1.0},
    {**BODY, "logprobs": 2, "echo": True},
    {**BODY, "prompt_logprobs": 1},
    {**BODY, "stop": ["str", "t"]},
    {**BODY, "stop": "str", "logprobs": 1, "min_tokens": 9},
    {**BODY, "max_tokens": 10_000},
    {**BODY, "prompt": ["A", ""]},
    {**BODY, "response_format": {"type": "regex", "regex": "[a-c]{6}"}},
    {**BODY, "response_format": {"type": "regex", "regex": "[a-"}},
]


@pytest.fixture(scope="module")
def remote(model: Model) -> Iterator[Served]:
    with served(model, remote=socket.socketpair()) as running_server:
        yield running_server


def post(server: Served, body: Any = BODY) -> Any:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def without_names(response: Any) -> Any:
    return {name: value for name, value in response.json().items() if name not in ("id", "created")}


@pytest.mark.one_of(10, 3)
@pytest.mark.parametrize("body", BODIES, ids=str)
def test_an_answer_is_that_of_one_process(
    server: Served, remote: Served, body: dict[str, Any]
) -> None:
    if "response_format" in body:
        pytest.importorskip("llguidance")
    response = post(remote, body)
    other = post(server, body)
    assert response.status_code == other.status_code
    if response.status_code != 200:  # requests are named in the order of their arrival
        assert response.json()["error"]["type"] == other.json()["error"]["type"]
        return
    left = without_names(response)
    right = without_names(other)
    for choice, against in zip(left["choices"], right["choices"], strict=True):
        numbers, other_numbers = (
            entry.pop("logprobs") or {"token_logprobs": []} for entry in (choice, against)
        )
        assert numbers["token_logprobs"] == pytest.approx(other_numbers["token_logprobs"], abs=1e-5)
        assert numbers.get("tokens") == other_numbers.get("tokens")
        assert len(choice.pop("prompt_logprobs", [])) == len(against.pop("prompt_logprobs", []))
    assert left == right


def test_counts_and_bounds(remote: Served) -> None:
    assert post(remote).status_code == 200
    metrics = httpx.get(f"{remote.url}/metrics").text
    assert 'weft_running{model_name="demo"} 0.0' in metrics
    assert httpx.get(f"{remote.url}/health").status_code == 200


def test_a_client_that_goes_frees_its_pages(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = list[str]()
    abort = Engine.abort

    def noted(engine: Engine, id: str) -> Any:
        aborted.append(id)
        return abort(engine, id)

    monkeypatch.setattr(Engine, "abort", noted)
    with served(model, remote=socket.socketpair()) as server:
        raw = json.dumps(
            {**BODY, "max_tokens": 100, "ignore_eos": True, "n": 4, "stream": True}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head + raw)
            assert client.recv(10)
        until(lambda: bool(aborted))
        assert post(server).status_code == 200


def test_a_step_that_raises_is_told_to_all(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(model, remote=socket.socketpair()) as server:
        assert post(server).status_code == 200

        def step(_: Engine) -> Any:
            raise ArithmeticError("the device is gone")

        monkeypatch.setattr(Engine, "step", step)
        first = post(server)
        assert (first.status_code, "ArithmeticError: the device is gone" in first.text) == (
            500,
            True,
        )
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert not server.host.is_final, "it goes on to say so"


def test_an_engine_whose_process_has_gone(model: Model) -> None:
    ours, theirs = socket.socketpair()
    with served(model, remote=(ours, theirs)) as server:
        assert post(server).status_code == 200
        theirs.shutdown(socket.SHUT_RDWR)
        until(lambda: server.host.is_final)
        again = post(server)
        assert again.status_code == 503
        assert "the process of the engine has ended" in again.json()["error"]["message"]


@given(st.lists(st.binary(max_size=40) | st.lists(st.integers())), st.integers(1, 30))
def test_messages_in_any_pieces(messages: list[Any], size: int) -> None:
    raw = b"".join(map(pack, messages))
    unpacker = Unpacker()
    pieces = [raw[place : place + size] for place in range(0, len(raw), size)]
    assert [message for piece in pieces for message in unpacker.feed(piece)] == messages


def test_errors_travel() -> None:
    error = RequestError("a call", "seen", "instead")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.problem) == (RequestError, str(error), "seen")


@given(st.lists(st.lists(st.integers(0, 255), max_size=6), min_size=1, max_size=12))
def test_the_text_of_tokens_is_the_engines(model: Model, parts: list[list[int]]) -> None:
    """In whatever pieces tokens come, their texts together are that of the whole."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    add = Add(name="x", prompt=[1], sampling=SamplingParams(detokenize=False), max_tokens=100)
    progress = Progress(add, 0, 0, tokenizer, frozenset())
    texts = [progress.add([("x", 0, tokens, None, None, {})]).text for tokens in parts]
    texts.append(progress.add([("x", 0, [], None, "length", {})]).text)
    whole = CompletionState(Request("x", (1,), 100, SamplingParams()), tokenizer)
    for token in (token for tokens in parts for token in tokens):
        whole.token_ids.append(token)
        whole.append_text(token)
    whole.end("length")
    assert "".join(text or "" for text in texts) == whole.text


def test_all_lists_of_a_completion_travel() -> None:
    """A list that `CompletionState` gains is one that clients may ask for, unless it is made of the
    tokens."""
    lists = {field.name for field in attrs.fields(CompletionState) if "list[" in str(field.type)}
    # No answer has ranks of generated tokens
    internal = {
        "token_ids",
        "_captured",
        "_shown",
        "ranks",
    }
    assert lists - internal == {*PER_TOKEN, *PER_PROMPT}


@pytest.mark.parametrize(("kind", "body"), [(TextForm, CompletionRequest), (ChatForm, ChatRequest)])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 1},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
    ids=str,
)
def test_events_are_the_chunks(kind: Any, body: Any, more: dict[str, Any]) -> None:
    if kind is ChatForm:
        options = {"logprobs": True} if "logprobs" in more else more
        request = body.model_validate({"messages": [{"role": "user", "content": "a"}], **options})
    else:
        request = body.model_validate({"prompt": "a", "n": 2, **more})
    add = Add(
        prompt=[1], sampling=SamplingParams(temperature=1.0, n=2, detokenize=False), max_tokens=9
    )
    checked_request = Asked(request, [add], Writer("id", "demo", None, created=1))
    form: Form = (
        kind(checked_request, request, [""]) if kind is TextForm else kind(checked_request, request)
    )
    progress = Progress(add, 0, 0, None, frozenset())
    for text, reason in (("a", None), ('"\n\u00e9\U0001f600\0', None), ("", None), ("end", "stop")):
        extra = {"logprobs": [-1.0], "top_logprobs": [{5: -1.0}]} if "logprobs" in more else {}
        part = form.choices[0].add(progress.add([("x", 0, [5], text, reason, extra)]))
        events = form.events(part)
        assert events == b"".join(map(event, form.chunks(part)))


def test_outputs_that_were_not_taken_are_one(model: Model) -> None:
    """A client that reads nothing keeps nobody waiting, and finds all tokens in one output."""

    async def ask(server: Served) -> list[int]:
        add = Add(
            prompt=[5, 6], sampling=SamplingParams(ignore_eos=True, detokenize=False), max_tokens=30
        )
        sizes = list[int]()
        async for outputs in server.host.stream([add]):
            sizes += [len(output.token_ids) for output in outputs]
            await asyncio.sleep(0.2)
        return sizes

    with served(model) as server:
        loop = server.host._loop
        sizes = asyncio.run_coroutine_threadsafe(ask(server), loop).result(30)
    assert sum(sizes) == 30
    assert max(sizes) > 1


def test_a_choice_has_what_its_output_has() -> None:
    choice = Choice(0, [1])
    add = Add(prompt=[1], sampling=SamplingParams(detokenize=False), max_tokens=9)
    part = choice.add(
        Progress(add, 0, 0, None, frozenset()).add([("x", 0, [5, 6], None, "stop", {})])
    )
    assert (part.text, part.start, part.stop, choice.finish_reason) == ("", 0, 2, "stop")


def test_tokens_without_special_ones_as_vllm_bench_serve_asks_for_them(model: Model) -> None:
    assert model.tokenizer is not None
    tokenizer = Tokenizer.from_str(model.tokenizer.to_str())
    tokenizer.post_processor = TemplateProcessing(
        single="a $A", special_tokens=[("a", model.encode("a")[0])]
    )
    with served(attrs.evolve(model, tokenizer=tokenizer)) as server:
        for special, text in ((True, "aThe"), (False, "The")):
            body = {"model": "demo", "prompt": "The", "add_special_tokens": special}
            tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
            assert model.decode(tokens) == text
