"""The `openai` package, unchanged, against `weft serve`: what it gets is what the library returns."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Served

from weft.batches.sampling import SamplingParams
from weft.stages.model import Model
from weft.transforms.engine.generate import Completion, generate

openai = pytest.importorskip("openai")
PROMPT = "The function returns"
OTHER = "A list is"


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def said(model: Model, prompt: Any, **options: Any) -> Completion:
    sampling = SamplingParams(**{"temperature": 0.0, **options.pop("sampling", {})})
    [completion] = generate(model, [prompt], sampling=sampling, **{"max_tokens": 16, **options})
    return completion


def test_a_completion(client: Any, model: Model) -> None:
    completion = client.completions.create(
        model="demo", prompt=PROMPT, temperature=0, max_tokens=16
    )
    expected = said(model, PROMPT)
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, choice.index) == (
        expected.text,
        expected.finish_reason,
        0,
    )
    count = len(model.encode(PROMPT))
    assert completion.usage.to_dict() == {
        "prompt_tokens": count,
        "completion_tokens": 16,
        "total_tokens": count + 16,
    }
    assert (completion.object, completion.model) == ("text_completion", "demo")


@pytest.mark.one_of(7)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 3},
        {"temperature": 1.0, "top_p": 0.8, "seed": 4},
        {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logit_bias": {32: -100.0}},
        {"temperature": 0.0, "stop": ["t", "q"]},
        {"temperature": 0.0, "stop": "str"},
    ],
    ids=str,
)
def test_parameters_mean_what_they_mean_in_the_library(
    client: Any, model: Model, options: dict[str, Any]
) -> None:
    request = {
        **options,
        "logit_bias": {str(k): v for k, v in options.get("logit_bias", {}).items()},
    }
    choice = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=16, **request
    ).choices[0]
    expected = said(model, PROMPT, sampling=options)
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)


@pytest.mark.one_of(7)
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3, "seed": 1, "temperature": 1.0},
        {"min_p": 0.2, "seed": 1, "temperature": 1.0},
        {"repetition_penalty": 1.3},
        {"min_tokens": 9, "stop": ["t"]},
        {"ignore_eos": True},
        {"allowed_token_ids": [5, 6, 7]},
        {"stop_token_ids": [5, 6, 7]},
    ],
    ids=str,
)
def test_parameters_of_vllm(client: Any, model: Model, options: dict[str, Any]) -> None:
    openai_options = {
        name: options[name] for name in ("seed", "temperature", "stop") if name in options
    }
    more = {name: value for name, value in options.items() if name not in openai_options}
    request = {"temperature": 0.0, **openai_options}
    choice = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=16, extra_body=more, **request
    ).choices[0]
    expected = said(model, PROMPT, sampling=options)
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)


def test_prompts_of_all_forms(client: Any, model: Model) -> None:
    ids = [model.encode(PROMPT), model.encode(OTHER)]
    for prompt, expected in (
        ([PROMPT, OTHER], [PROMPT, OTHER]),
        (ids[0], [PROMPT]),
        (ids, [PROMPT, OTHER]),
        ([PROMPT], [PROMPT]),
    ):
        completion = client.completions.create(
            model="demo", prompt=prompt, temperature=0, max_tokens=8
        )
        assert [c.text for c in completion.choices] == [
            said(model, text, max_tokens=8).text for text in expected
        ]
        assert [c.index for c in completion.choices] == [*range(len(expected))]


def test_several_completions_of_a_prompt(client: Any, model: Model) -> None:
    completion = client.completions.create(
        model="demo", prompt=[PROMPT, OTHER], n=3, seed=2, max_tokens=8
    )
    sampling = SamplingParams(temperature=1.0, n=3, seed=2)
    expected = generate(model, [PROMPT, OTHER], sampling=sampling, max_tokens=8)
    assert [c.text for c in completion.choices] == [c.text for c in expected]
    assert len({c.text for c in completion.choices}) > 2


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "options", [{}, {"stop": ["str", "t"]}, {"seed": 7, "n": 2}, {"echo": True}], ids=str
)
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_is_what_is_returned_whole(
    client: Any, options: dict[str, Any], logprobs: int | None
) -> None:
    request: dict[str, Any] = {
        "model": "demo",
        "prompt": [PROMPT, OTHER],
        "max_tokens": 12,
        "logprobs": logprobs,
    }
    request |= {"temperature": 1.0 if "seed" in options else 0.0, **options}
    whole = client.completions.create(**request)
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    tokens: dict[int, list[Any]] = {}
    usage = None
    for chunk in client.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
            if choice.logprobs is not None:
                choice_logprobs = choice.logprobs
                tokens.setdefault(choice.index, []).extend(
                    zip(
                        choice_logprobs.tokens,
                        choice_logprobs.token_logprobs,
                        choice_logprobs.text_offset,
                        strict=True,
                    )
                )
    assert texts == {c.index: c.text for c in whole.choices}
    assert reasons == {c.index: c.finish_reason for c in whole.choices}
    assert usage == whole.usage
    for choice in whole.choices if logprobs else ():
        choice_logprobs = choice.logprobs
        streamed = tokens[choice.index]
        assert [(text, offset) for text, _, offset in streamed] == [
            *zip(choice_logprobs.tokens, choice_logprobs.text_offset, strict=True)
        ]
        assert [value for _, value, _ in streamed] == [
            pytest.approx(value, abs=1e-5) for value in choice_logprobs.token_logprobs
        ]


@pytest.mark.parametrize("echo", [False, True])
def test_no_logprobs_beside_the_chosen_ones(client: Any, echo: bool) -> None:
    """As vLLM answers `logprobs: 0`."""
    logprobs = (
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=4, logprobs=0, echo=echo)
        .choices[0]
        .logprobs
    )
    pairs = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    assert [top for _, _, top in pairs] == [
        None if value is None else {token: value}
        for token, value in zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
    ]


def test_logprobs_with_the_prompt_as_lm_eval_reads_them(client: Any, model: Model) -> None:
    ids = model.encode(PROMPT)
    request = {
        "model": "demo",
        "prompt": [ids],
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
    }
    logprobs = client.completions.create(**request).choices[0].logprobs
    expected = said(model, ids, max_tokens=1, sampling={"prompt_logprobs": 1, "logprobs": 1})
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == [*expected.prompt_logprobs, *expected.logprobs]
    for place, (logprob, top) in enumerate(
        zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
    ):
        best = max(
            [*expected.prompt_top_logprobs, *expected.top_logprobs][place].items(),
            key=lambda x: x[1],
        )[0]
        is_greedy = ([*ids[1:], *expected.token_ids][place]) == best
        assert (logprob == max(top.values())) == is_greedy


def test_a_chat(client: Any, model: Model) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    completion = client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_tokens=12
    )
    text = "system: Be short.\nuser: Hello\nassistant:"
    expected = said(
        model, list(model.tokenizer.encode(text, add_special_tokens=False).ids), max_tokens=12
    )
    assert completion.choices[0].message.content == expected.text
    assert completion.choices[0].message.role == "assistant"
    parts = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
        }
    ]
    again = client.chat.completions.create(
        model="demo", messages=[messages[0], *parts], temperature=0, max_completion_tokens=12
    )
    assert again.choices[0].message.content == expected.text


def test_a_streamed_chat(client: Any) -> None:
    request: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 12,
    }
    request |= {"temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**request).choices[0]
    chunks = [*client.chat.completions.create(**request, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason
    tokens = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    # The second time the prompt is found in the prefix cache, and sums are made in another order.
    assert [entry.token for entry in tokens] == [entry.token for entry in whole.logprobs.content]
    assert [entry.logprob for entry in tokens] == pytest.approx(
        [entry.logprob for entry in whole.logprobs.content], abs=1e-5
    )
    assert all(
        len(entry.top_logprobs) == 2 and bytes(entry.bytes).decode() == entry.token
        for entry in tokens
    )


@pytest.mark.slow
def test_asynchronous_clients_at_once(server: Served, model: Model) -> None:
    prompts = [f"{PROMPT} {number}" for number in range(12)]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            requests = (
                client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=9)
                for prompt in prompts
            )
            return [completion.choices[0].text for completion in await asyncio.gather(*requests)]

    assert asyncio.run(ask()) == [said(model, prompt, max_tokens=9).text for prompt in prompts]


@pytest.mark.parametrize(
    ("fields", "kind", "param", "words"),
    [
        ({"model": "other"}, "NotFoundError", "model", "does not exist; this server has demo"),
        ({"temperature": -1}, "BadRequestError", None, "a finite number >= 0"),
        ({"max_tokens": 0}, "BadRequestError", "max_tokens", "a whole number >= 1"),
        (
            {"max_tokens": 1000},
            "BadRequestError",
            "max_tokens",
            "maximum context length is 128 tokens",
        ),
        (
            {"prompt": "a" * 400},
            "BadRequestError",
            "max_tokens",
            "maximum context length is 128 tokens",
        ),
        ({"prompt": []}, "BadRequestError", "prompt", "at least 1"),
        ({"prompt": ""}, "BadRequestError", None, "has 0 tokens"),
        ({"prompt": [10**9]}, "BadRequestError", None, "token ids are ints"),
        ({"n": 1000}, "BadRequestError", "n", "at most 128"),
        ({"logprobs": 50}, "BadRequestError", None, "num_logprobs=50"),
        (
            {"logit_bias": {"a": 1}},
            "BadRequestError",
            "logit_bias",
            "logit_bias: the key 'a'; instead: token ids, as",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "BadRequestError",
            "stream_options",
            "write stream=true",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "BadRequestError",
            "stream_options.continuous_usage_stats",
            "without include_usage: write include_usage=true",
        ),
        (
            {"extra_body": {"cache_salt": ""}},
            "BadRequestError",
            "cache_salt",
            "at least 1 character",
        ),
        (
            {"extra_body": {"temprature": 1}},
            "BadRequestError",
            "temprature",
            "this server has no such field; instead: temperature",
        ),
        ({"extra_body": {"weft": {"extras": {"v": [1.0]}}}}, "BadRequestError", None, "extras"),
    ],
    ids=str,
)
def test_errors_in_the_form_of_openai(
    client: Any, fields: dict[str, Any], kind: str, param: Any, words: str
) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(**{"model": "demo", "prompt": PROMPT, "max_tokens": 4, **fields})
    assert type(error.value).__name__ == kind
    assert error.value.param == param
    assert words in error.value.body["message"]


def test_models(client: Any) -> None:
    [model_card] = client.models.list().data
    assert (model_card.id, model_card.max_model_len) == ("demo", 128)
