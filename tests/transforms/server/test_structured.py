"""`response_format`: an answer that ended by itself parses under its schema, whatever the model
would have said."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from hypothesis import given, settings, strategies as st
from refusal import refused
from serving import Served, served

from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms.engine.options import EngineLimits
from weft.transforms.server.grammars.masks import grammar_compiler

httpx = pytest.importorskip("httpx")
jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    limits = EngineLimits(max_num_reqs=8, max_num_tokens=64, max_model_len=256)
    with served(load(DEMO, "cpu", "float32"), limits=limits) as running_server:
        yield running_server


def ask(server: Served, **body: Any) -> Any:
    response = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "The function", **body}, timeout=300
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"]


scalars = st.sampled_from(
    [{"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"enum": ["red", "green", 3]}]
)
names = st.sampled_from(["a", "size", "is_new", "list of", "x-y"])


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def closed_object(properties: dict[str, Any]) -> dict[str, Any]:
        closed = {"type": "object", "properties": properties, "additionalProperties": False}
        return {**closed, "required": [*properties]}

    arrays = st.builds(
        lambda items, most: {"type": "array", "items": items, "maxItems": most},
        parts,
        st.integers(0, 3),
    )
    return st.dictionaries(names, parts, min_size=1, max_size=3).map(closed_object) | arrays


schemas = objects(st.recursive(scalars, objects, max_leaves=4))


@given(schemas, st.integers(0, 99), st.sampled_from([0.0, 1.0]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_an_answer_parses_under_its_schema(
    server: Served, schema: dict[str, Any], seed: int, temperature: float, streams: bool
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "drawn", "schema": schema}}
    body = {
        "response_format": form,
        "max_tokens": 80,
        "seed": seed,
        "temperature": temperature,
        "n": 2,
    }
    if streams:
        sent = {"prompt": "The function", "stream": True, **body}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=sent, timeout=300
        ) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
        assert lines[-1] == "[DONE]"
        texts = ["".join(c["text"] for c in chunks if c["index"] == index) for index in range(2)]
        ends = {c["index"]: c["finish_reason"] for c in chunks}
        choices = [{"text": text, "finish_reason": ends[index]} for index, text in enumerate(texts)]
    else:
        choices = ask(server, **body)
    for choice in choices:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema)


def test_other_grammars(server: Served) -> None:
    digits = {"type": "regex", "regex": "[0-9]{3}-[a-c]+"}
    [choice] = ask(server, response_format=digits, max_tokens=12, temperature=1, seed=1)
    assert re.fullmatch("[0-9]{3}-[a-c]+", choice["text"])
    grammar = {"type": "grammar", "grammar": 'root ::= "yes" | "no"'}
    [choice] = ask(server, response_format=grammar, max_tokens=12, temperature=0)
    assert (choice["text"], choice["finish_reason"]) in (("yes", "stop"), ("no", "stop"))
    [choice] = ask(server, response_format={"type": "json_object"}, max_tokens=40, temperature=0)
    assert choice["text"].lstrip().startswith("{")
    assert ask(server, response_format={"type": "text"}, max_tokens=4) != []


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "regex", "regex": "a+"}])
def test_a_model_without_an_end_is_refused_at_once(form: dict[str, str]) -> None:
    """After a complete answer the mask would allow no token."""
    model = load(DEMO, "cpu", "float32")
    endless = attrs.evolve(model, config=attrs.evolve(model.config, eos_token_ids=()))
    problem = "<any>, which has no end-of-sequence token that could follow a complete answer"
    instead = (
        "a checkpoint with eos_token_id in generation_config.json or config.json; or no"
        " response_format"
    )
    with refused(RequestError, f"response_format of type '{form['type']}'", problem, instead):
        grammar_compiler(endless)(form)
    with served(
        endless, limits=EngineLimits(max_num_reqs=2, max_num_tokens=64, max_model_len=64)
    ) as server:
        body = {"prompt": "The function", "max_tokens": 4}
        response = httpx.post(
            f"{server.url}/v1/completions", json={**body, "response_format": form}, timeout=300
        )
        assert (response.status_code, instead in response.text) == (400, True)
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).status_code == 200


@pytest.fixture
def compiler(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars are compiled once the event is set."""
    event = threading.Event()
    compiled = server.server._compile_grammar

    class Late:
        def find(self, form: Any, use: Any) -> str | None:
            return compiled.find(form, use)

        def __call__(self, form: Any, use: Any) -> str:
            assert event.wait(20)
            return compiled(form, use)

    monkeypatch.setattr(server.server, "_compile_grammar", Late())
    yield event
    event.set()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_request_whose_grammar_is_compiled_is_under_way(
    server: Served, compiler: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is told to stop lets it end, and refuses those that come after."""
    form, results = {"type": "regex", "regex": "ab"}, list[Any]()
    asking = threading.Thread(target=lambda: results.append(ask(server, response_format=form)))
    asking.start()
    until(lambda: server.server._num_compiling == 1)
    monkeypatch.setattr(server.host, "is_closing", True)
    late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "A"})
    assert (late.status_code, late.json()["error"]["code"]) == (503, "closed")
    compiler.set()
    asking.join(20)
    assert [choice["text"] for choice in results[0]] == ["ab"]


def test_a_client_that_goes_while_its_grammar_is_compiled(
    server: Served, compiler: threading.Event
) -> None:
    raw = json.dumps({"prompt": "A", "response_format": {"type": "regex", "regex": "a"}}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % len(raw)
            + raw
        )
        until(lambda: server.server._num_compiling == 1)
    until(lambda: server.server._num_compiling == 0)
    assert server.host.num_open == 0


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"type": "json_schema"}, "no schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
            "nothing",
        ),
        (
            {"type": "grammar", "grammar": "root ::= ("},
            "a schema or grammar that llguidance enforces",
        ),
        ({"type": "regex", "regex": "(("}, "unclosed group"),
        ({"type": "xml"}, "response_format.type"),
    ],
    ids=str,
)
def test_forms_that_are_none(server: Served, form: dict[str, Any], words: str) -> None:
    response = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": "A", "response_format": form}, timeout=300
    )
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
