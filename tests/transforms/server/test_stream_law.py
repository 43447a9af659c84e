"""What is streamed, put together, is what is returned whole: text, tokens, logprobs, ends, usage;
drawn requests."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings, strategies as st
from serving import served

from weft.stages.model import Model
from weft.transforms.engine.options import EngineLimits
from weft.transforms.server.answers import Choice
from weft.transforms.server.forms import ChatForm, TextForm

httpx = pytest.importorskip("httpx")
Post = Callable[[str, Any], Any]
PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


@pytest.fixture(scope="module")
def post(model: Model) -> Iterator[Post]:
    limits = EngineLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=128)

    def ask(path: str, body: Any) -> Any:
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response

    with (
        served(model, limits=limits) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield ask


texts = st.sampled_from(
    ["The function returns", "A list is", "é", "日本", "💥 x", "def f(x):\n    "]
) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
token_ids = st.lists(st.integers(3, 250), min_size=1, max_size=8)
sampling = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 20),
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "seed": st.integers(0, 999),
    },
    optional={
        "n": st.integers(1, 3),
        "stop": st.lists(st.text("aeorst ,.é", min_size=1, max_size=3), min_size=1, max_size=3),
        "top_p": st.sampled_from([0.5, 0.95]),
        "frequency_penalty": st.sampled_from([0.5, -0.5]),
        "ignore_eos": st.just(True),
        "logit_bias": st.just(
            {str(token): 6.0 for token in range(128, 250)}
        ),  # bytes of characters of several
        "min_tokens": st.integers(0, 1),
        "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()})
        | st.fixed_dictionaries(
            {"include_usage": st.just(True), "continuous_usage_stats": st.booleans()}
        ),
    },
)
completions = st.builds(
    lambda first, second: {**first, **second},
    sampling,
    st.fixed_dictionaries(
        {"prompt": st.one_of(texts, token_ids, st.lists(texts, min_size=1, max_size=3))},
        optional={
            "logprobs": st.integers(0, 3),
            "echo": st.booleans(),
            "prompt_logprobs": st.integers(0, 2),
            "return_tokens_as_token_ids": st.booleans(),
        },
    ),
)
message = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "system"]),
    texts,
)
chats = st.builds(
    lambda first, second: {**first, **second},
    sampling,
    st.builds(
        lambda messages, logprobs: {"messages": messages} | logprobs,
        st.lists(message, min_size=1, max_size=3),
        st.sampled_from([{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}]),
    ),
)
bodies = completions | chats


def put_together(chunks: list[Any]) -> dict[int, Any]:
    """The choices of a stream, in the form of those of a whole answer."""
    choices: dict[int, Any] = {}
    for chunk in chunks:
        for chunk_choice in chunk["choices"]:
            first = {
                "text": "",
                "role": None,
                "logprobs": None,
                "finish_reason": None,
                "prompt_logprobs": None,
            }
            choice = choices.setdefault(chunk_choice["index"], first)
            delta = chunk_choice.get("delta", {})
            assert choice["finish_reason"] is None, "a choice goes on after its end"
            choice["text"] += chunk_choice.get("text", delta.get("content")) or ""
            choice["role"] = delta.get("role") or choice["role"]
            choice["finish_reason"] = chunk_choice["finish_reason"]
            choice["prompt_logprobs"] = (
                chunk_choice.get("prompt_logprobs") or choice["prompt_logprobs"]
            )
            if chunk_choice["logprobs"] is not None:
                before = choice["logprobs"] or {}
                kept = {
                    name: value
                    for name, value in chunk_choice["logprobs"].items()
                    if isinstance(value, list)
                }
                choice["logprobs"] = {
                    name: [*before.get(name, []), *value] for name, value in kept.items()
                }
    return choices


def of_whole(choice: Any) -> Any:
    """A choice of a whole answer, as `put_together` writes it."""
    message = choice.get("message", {})
    logprobs = choice["logprobs"] and {
        n: values for n, values in choice["logprobs"].items() if isinstance(values, list)
    }
    return {
        "text": choice["text"] if "text" in choice else message["content"],
        "role": message.get("role"),
        "logprobs": logprobs,
        "finish_reason": choice["finish_reason"],
        "prompt_logprobs": choice.get("prompt_logprobs"),
    }


def same(left: Any, right: Any) -> bool:
    """Whether values are equal, numbers but for rounding: what the prefix cache has was summed in
    another order."""
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, abs_tol=1e-4)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            same(value, right[name]) for name, value in left.items()
        )
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def streamed_is_whole(post: Post, body: Any) -> None:
    """The law, for one request."""
    path = PATHS["prompt" if "prompt" in body else "messages"]
    whole = post(
        path, {name: value for name, value in body.items() if name != "stream_options"}
    ).json()
    *lines, last = [
        line for line in post(path, {**body, "stream": True}).text.split("\n\n") if line
    ]
    assert last == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    expected = {choice["index"]: of_whole(choice) for choice in whole["choices"]}
    streamed = put_together(chunks)
    assert streamed.keys() == expected.keys()
    for index, choice in expected.items():
        assert same(streamed[index], choice), f"streamed {streamed[index]}\nwhole {choice}"
    if body.get("stream_options", {}).get("include_usage"):
        assert chunks[-1]["usage"] == whole["usage"]
        assert chunks[-1]["choices"] == []


@given(bodies)
@settings(max_examples=120, deadline=None)
def test_what_is_streamed_is_what_is_returned_whole(post: Post, body: Any) -> None:
    streamed_is_whole(post, body)


def _text_lost(form: TextForm, part: Any) -> Any:
    return [
        form.chunk(form.kind, {**form.choice(part, part.start == 0), "text": part.text[:1]}, part)
    ]


def _no_end(form: ChatForm, part: Any) -> Any:
    chunks = CHUNKS_OF_CHAT(form, part)
    chunks[-1]["choices"][0]["finish_reason"] = None
    return chunks


def _logprobs_twice(choice: Choice, output: Any) -> Any:
    part = ADD(choice, output)
    object.__setattr__(part, "start", max(part.start - 1, 0))
    return part


CHUNKS_OF_CHAT = ChatForm.chunks
ADD = Choice.add


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (TextForm, "chunks", _text_lost),
        (ChatForm, "chunks", _no_end),
        (Choice, "add", _logprobs_twice),
        (
            TextForm,
            "usage_chunk",
            property(lambda form: form.writer.answer(form.kind, [], {"total_tokens": 0})),
        ),
    ],
    ids=[
        "text that comes at once is cut",
        "a chat does not end",
        "a token comes twice",
        "another usage",
    ],
)
def test_the_law_catches(
    post: Post, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, bug: Any
) -> None:
    @settings(
        max_examples=300, deadline=None, database=None, phases=[Phase.generate], derandomize=True
    )
    @given(bodies)
    def law(body: Any) -> None:
        streamed_is_whole(post, body)

    monkeypatch.setattr(place, name, bug)
    with pytest.raises(AssertionError):
        law()
