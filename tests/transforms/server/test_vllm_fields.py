"""Fields of vLLM's server that OpenAI's API does not have: they mean what they mean in the library."""

import base64
import json
from typing import Any

import attrs
import httpx
import pytest
import torch
from serving import Served, served

from weft.batches.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.engine.generate import Completion, generate
from weft.transforms.server.bodies import ServerLimits
from weft.transforms.server.protocol import Sampled

PROMPT = "The function returns"
# The sampling parameters that a client does not give, each with the reason.
NOT_OF_CLIENTS = {
    "bad_token_ids": "vLLM's clients have bad_words",
    "detokenize": "the server chooses",
    "logprobs": "the two routes have different fields for it",
}
# A value of each other sampling parameter that is not its default.
OF_CLIENTS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "n": 2,
    "stop": ("a",),
    "seed": 4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {3: 2.0},
    "min_tokens": 2,
    "stop_token_ids": (5,),
    "include_stop_str_in_output": True,
    "allowed_token_ids": (1, 2),
    "bad_words": ("b",),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 2,
}


def first_choice(server: Served, route: str = "completions", **body: Any) -> Any:
    prompt = (
        {"prompt": PROMPT}
        if route == "completions"
        else {"messages": [{"role": "user", "content": "A list"}]}
    )
    answer = httpx.post(
        f"{server.url}/v1/{route}", json={"temperature": 0, "max_tokens": 16, **prompt, **body}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def said(model: Model, **sampling: Any) -> Completion:
    [completion] = generate(model, [PROMPT], max_tokens=16, sampling=SamplingParams(**sampling))
    return completion


def test_every_sampling_parameter_is_a_clients_or_the_servers() -> None:
    names = {field.name for field in attrs.fields(SamplingParams)}
    assert names == {*OF_CLIENTS, *NOT_OF_CLIENTS}


@pytest.mark.parametrize("name", OF_CLIENTS)
def test_a_sampling_parameter_of_a_client_reaches_the_engine(name: str) -> None:
    body = Sampled.model_validate_json(json.dumps({name: OF_CLIENTS[name]}))
    params = body.sampling(logprobs=None, prompt_logprobs=body.prompt_logprobs)
    assert getattr(params, name) == OF_CLIENTS[name]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("include", [False, True])
def test_what_stopped_it(server: Served, model: Model, include: bool) -> None:
    whole = said(model)
    assert whole.text is not None
    for stops in ({"stop": whole.text[4:6]}, {"stop_token_ids": whole.token_ids[5:6]}):
        choice = first_choice(server, include_stop_str_in_output=include, **stops)
        expected = said(model, include_stop_str_in_output=include, **stops)
        assert (choice["text"], choice["stop_reason"]) == (expected.text, expected.stop_reason)
        assert choice["stop_reason"] in (whole.text[4:6], whole.token_ids[5])
    assert first_choice(server)["stop_reason"] is None
    chat = first_choice(server, "chat/completions", stop_token_ids=[*range(40, 120)])
    assert chat["stop_reason"] in range(40, 120)


def test_a_stream_says_what_stopped_it_in_its_last_chunk(server: Served, model: Model) -> None:
    stop = (said(model).text or "")[4:6]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, "stop": stop, "stream": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [f'"stop_reason":"{stop}"' in line for line in lines] == [
        *[False] * (len(lines) - 1),
        True,
    ]


def test_bad_words(server: Served, model: Model) -> None:
    words = [(said(model).text or "")[2:5]]
    text = first_choice(server, bad_words=words)["text"]
    assert text == said(model, bad_words=words).text
    assert words[0] not in text


def test_ranks_of_a_prompt(server: Served, model: Model) -> None:
    expected = said(model, prompt_logprobs=2)
    logprobs = first_choice(server, prompt_logprobs=2)["prompt_logprobs"]
    ids = model.encode(PROMPT)
    assert logprobs[0] is None
    assert [
        token_logprobs[str(token)]["rank"]
        for token_logprobs, token in zip(logprobs[1:], ids[1:], strict=True)
    ] == expected.prompt_ranks
    for token_logprobs, top in zip(logprobs[1:], expected.prompt_top_logprobs or (), strict=True):
        assert [token_logprobs[str(token)]["logprob"] for token in top] == pytest.approx(
            [*top.values()], abs=1e-5
        )


def test_a_salt_keeps_pages_apart(server: Served, model: Model) -> None:
    """A long prompt is found again under its own salt, and not under another."""
    body = {"prompt": [*range(32, 100)], "max_tokens": 1}
    expected = []
    for salt in ("one", "one", "other", None):
        before = server.host.engine.stats().prefix_tokens
        first_choice(server, **body, cache_salt=salt)
        expected.append(server.host.engine.stats().prefix_tokens - before)
    assert expected == [0, 64, 0, 0], "the last page is not full, and its request has ended"


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_null_is_a_fields_default(server: Served, route: str) -> None:
    """As in OpenAI's API, also for fields that take no null by themselves."""
    nulls = dict.fromkeys(
        ("top_p", "n", "stream", "presence_penalty", "frequency_penalty", "stop", "seed", "weft")
    )
    if route == "completions":
        nulls |= {"max_tokens": None}  # whose default is 16
    prompt_field = "messages" if route.startswith("chat") else "prompt"
    key = "message" if route.startswith("chat") else "text"
    assert first_choice(server, route, **nulls)[key] == first_choice(server, route)[key]
    answer = httpx.post(f"{server.url}/v1/{route}", json={prompt_field: None})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, prompt_field)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"guided_json": {}}, '"json_schema"'),
        ({"guided_choice": ["a"]}, '"regex"'),
        ({"structured_outputs": {"json": {}}}, "response_format"),
        ({"best_of": 3}, "instead: n,"),
        ({"tools": [{"type": "function"}]}, "this server calls no tools"),
        ({"tool_choice": "auto"}, "this server calls no tools"),
        ({"max_token": 3}, "instead: max_tokens"),
        ({"nothing_like_it": 3}, "this server has no such field"),
        ({"a" * 3_000_000: 3}, "this server has no such field"),
        ({"top_p": "high"}, "a valid number"),
    ],
    ids=lambda argument: f"{argument!s:.40}",
)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_what_to_write_instead(
    server: Served, route: str, field: dict[str, Any], words: str
) -> None:
    prompt = (
        {"messages": [{"role": "user", "content": "a"}]}
        if route.startswith("chat")
        else {"prompt": "a"}
    )
    answer = httpx.post(f"{server.url}/v1/{route}", json={**prompt, **field})
    [(name, value)] = field.items()
    error = answer.json()["error"]
    where = error["param"].split(".")[0], error["weft"]["call"].split(".")[0]
    assert (answer.status_code, *where) == (400, name[:200], name[:200])
    assert words in error["message"]
    assert error["weft"]["instead"] in error["message"]
    assert error["weft"]["seen"].strip("'") in f"{value}"


def test_a_field_that_shares_a_word_with_another_is_not_taken_for_it(server: Served) -> None:
    """llama.cpp's `cache_prompt` is no `prompt`."""
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "cache_prompt": True})
    assert answer.json()["error"]["message"] == "cache_prompt: this server has no such field"


def test_fields_that_ask_for_nothing(server: Served) -> None:
    first_choice(server, best_of=1, suffix="", parallel_tool_calls=True, user="somebody")
    first_choice(server, "chat/completions", tools=[], tool_choice="none")


@pytest.mark.slow
def test_priorities_are_for_servers_that_have_them(model: Model) -> None:
    for has, status in ((False, 400), (True, 200)):
        with served(model, limits_of=ServerLimits(has_priorities=has)) as server:
            answer = httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": "a", "max_tokens": 1, "priority": -1},
            )
            assert answer.status_code == status
            assert (
                httpx.post(
                    f"{server.url}/v1/completions", json={"prompt": "a", "priority": 0}
                ).status_code
                == 200
            )
        assert (
            has
            or "by `weft serve --scheduling-policy priority`" in answer.json()["error"]["message"]
        )


def test_metrics_that_only_grow_are_counters(server: Served) -> None:
    first_choice(server)
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    kinds = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    assert {
        kinds[f"weft_{name}"]
        for name in ("running", "waiting", "pages_held", "pages_free", "kv_cache_bytes")
    } == {"gauge"}
    assert {kinds[f"weft_{name}_total"] for name in ("preempted", "prefix_tokens", "captures")} == {
        "counter"
    }


def test_more_logprobs_than_the_server_has(model: Model) -> None:
    with served(model, limits_of=ServerLimits(max_logprobs=5)) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "logprobs": 6})
    said = "6 logprobs of a token; at most 5, by `weft serve --max-logprobs`"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extras_have_the_dtype_of_the_models_default(model: Model, dtype: torch.dtype) -> None:
    """As numbers, and in the form in which captures come back."""

    def shifted(logits: torch.Tensor, _: torch.Tensor, extras: Any) -> torch.Tensor:
        return logits + extras["bias"].to(logits.dtype)

    bias = torch.zeros(model.config.vocab_size, dtype=dtype)
    biased_model = model.with_stages(logits=shifted, extras={"bias": bias})
    request_bias = torch.zeros(model.config.vocab_size)
    request_bias[65] = 100.0
    raw = {
        "dtype": "float32",
        "shape": [len(request_bias)],
        "base64": base64.b64encode(request_bias.numpy().tobytes()).decode(),
    }
    with served(biased_model) as server:
        for value in (request_bias.tolist(), raw):
            assert first_choice(server, weft={"extras": {"bias": value}})["text"] == "A" * 16
        for wrong in (
            {"dtype": "float32"},
            raw | {"dtype": "object"},
            raw | {"base64": "?"},
            raw | {"shape": [3]},
            "a",
        ):
            body = {"prompt": "a", "weft": {"extras": {"bias": wrong}}}
            answer = httpx.post(f"{server.url}/v1/completions", json=body)
            assert answer.status_code == 400
            assert '"base64": "..."' in answer.json()["error"]["message"]
