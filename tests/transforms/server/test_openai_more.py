"""More of the `openai` package against `weft serve`: parsed answers, errors, retries, time-outs,
raw answers."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from serving import Served, served

from weft.errors import EngineError
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.server.bodies import ServerLimits

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
PROMPT = "The function returns"
ASKED: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 8,
}
# White space between the parts of JSON has no bound: these tokens are barred, and each answer ends.
PARSED: dict[str, Any] = {**CHAT, "max_tokens": 220, "temperature": 1.0}
PARSED["logit_bias"] = {str(token): -100 for token in b"\t\n\r "}
LONG: dict[str, Any] = {**ASKED, "max_tokens": 100, "extra_body": {"ignore_eos": True}}


class Size(pydantic.BaseModel):
    """A model of pydantic's, as users have them."""

    name: str = pydantic.Field(max_length=6)
    n: int = pydantic.Field(ge=0, le=99)
    kind: Literal["a", "b"]
    parts: list[Literal["x", "y"]] = pydantic.Field(max_length=2)
    unit: str | None = pydantic.Field(pattern="^[a-z]{2}$")


class Circle(pydantic.BaseModel):
    kind: Literal["circle"]
    radius: int = pydantic.Field(ge=0, le=99)


class Square(pydantic.BaseModel):
    kind: Literal["square"]
    side: int = pydantic.Field(ge=0, le=99)


class Shape(pydantic.BaseModel):
    shape: Circle | Square = pydantic.Field(discriminator="kind")


@pytest.fixture(scope="module")
def wide(model: Model) -> Iterator[Served]:
    limits = EngineLimits(max_num_reqs=4, max_num_tokens=64, max_model_len=256)
    with served(model, limits=limits) as running_server:
        yield running_server


def open_client(server: Served, **options: Any) -> Any:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", **{"api_key": "none", "max_retries": 0, **options}
    )


@pytest.fixture
def client(wide: Served) -> Iterator[Any]:
    with open_client(wide) as openai_client:
        yield openai_client


@pytest.mark.one_of(4)
@pytest.mark.parametrize("kind", [Size, Shape], ids=["fields", "a union"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_parsed_chat(client: Any, kind: Any, seed: int) -> None:
    completion = client.chat.completions.parse(**PARSED, seed=seed, response_format=kind)
    assert isinstance(completion.choices[0].message.parsed, kind)


def test_a_parsed_chat_as_a_stream(client: Any) -> None:
    with client.chat.completions.stream(**PARSED, seed=3, response_format=Size) as events:
        kinds = {event.type for event in events}
        completion = events.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(completion.choices[0].message.parsed, Size)


def test_a_parsed_chat_that_is_cut(client: Any) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as error:
        client.chat.completions.parse(**CHAT, response_format=Size)
    assert error.value.completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "text"},
        {
            "type": "json_schema",
            "json_schema": {
                "name": "n",
                "strict": True,
                "schema": {"type": "integer", "maximum": 9},
            },
        },
    ],
    ids=lambda argument: argument["type"],
)
def test_response_formats(client: Any, form: Any) -> None:
    completion = client.chat.completions.create(
        **{**CHAT, "max_tokens": 60}, response_format=form, temperature=0
    )
    text = completion.choices[0].message.content
    if form["type"] == "json_schema":
        assert int(text) <= 9
    elif form["type"] == "json_object":
        assert text.lstrip().startswith("{")


def test_a_schema_that_is_not_kept_to(client: Any) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(
        openai.BadRequestError, match=r"400 - unsupported keywords \[\"uniqueItems\"\]; instead: a"
    ):
        client.chat.completions.create(**CHAT, response_format=form)


def test_models_by_name(client: Any) -> None:
    assert client.models.retrieve("demo").id == "demo"
    assert [model_card.id for model_card in client.models.list()] == ["demo"]
    with pytest.raises(openai.NotFoundError, match="does not exist; this server has demo") as error:
        client.models.retrieve("a/b")
    assert error.value.code == "model_not_found"


def test_other_routes_are_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        client.embeddings.create(model="demo", input="a")


def test_raw_answers(client: Any) -> None:
    response = client.completions.with_raw_response.create(**ASKED)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    assert response.parse().choices[0].text == json.loads(response.text)["choices"][0]["text"]
    with client.completions.with_streaming_response.create(**ASKED) as streamed:
        assert streamed.json()["choices"][0]["text"] == response.parse().choices[0].text


def test_chats_of_several_choices(client: Any) -> None:
    completion = client.chat.completions.create(**CHAT, n=3, seed=1)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert completion.usage.completion_tokens <= 24
    again = client.chat.completions.create(**CHAT, n=3, seed=1)
    assert [choice.message.content for choice in again.choices] == [
        choice.message.content for choice in completion.choices
    ]


def test_the_same_seed_is_the_same_text_and_another_is_not(client: Any) -> None:
    request = {**ASKED, "temperature": 1.0, "max_tokens": 24}
    texts = [client.completions.create(**request, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_of_chats(client: Any, top: int) -> None:
    completion = client.chat.completions.create(
        **CHAT, logprobs=True, top_logprobs=top, temperature=0
    )
    content = completion.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == completion.choices[0].message.content
    assert all(len(entry.top_logprobs) == top for entry in content)
    if top:
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content), "greedy"


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_logit_bias(client: Any, model: Model, bias: float) -> None:
    [token] = model.encode("q")
    text = client.completions.create(**ASKED, logit_bias={str(token): bias}).choices[0].text
    assert (text == "q" * 8) if bias > 0 else ("q" not in text)


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("kind", ["completions", "chats"])
def test_the_usage_of_a_stream(client: Any, kind: str, usage: bool) -> None:
    create, request = (
        (client.completions.create, ASKED)
        if kind == "completions"
        else (client.chat.completions.create, CHAT)
    )
    chunks = [*create(**request, stream=True, stream_options={"include_usage": usage})]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].usage is not None) == usage
    assert (chunks[-1].choices == []) == usage


@pytest.mark.parametrize("stop", ["e", ["zzz", "r"], [" "]], ids=str)
def test_stops_are_not_in_the_text(client: Any, stop: Any) -> None:
    choice = client.completions.create(**{**ASKED, "max_tokens": 40}, stop=stop).choices[0]
    assert not any(
        stop_string in choice.text for stop_string in ([stop] if isinstance(stop, str) else stop)
    )
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "kind", "status"),
    [
        ({"model": "other"}, openai.NotFoundError, 404),
        ({"max_tokens": 10**6}, openai.BadRequestError, 400),
        ({"prompt": "a" * 2000}, openai.BadRequestError, 400),
        ({"n": 0}, openai.BadRequestError, 400),
        ({"top_p": 2}, openai.BadRequestError, 400),
        ({"seed": "x"}, openai.BadRequestError, 400),
        ({"stream": "perhaps"}, openai.BadRequestError, 400),
        ({"prompt": "\ud800"}, openai.BadRequestError, 400),
        ({"prompt": ["a"] * 300}, openai.BadRequestError, 400),
        ({"prompt": ["a"] * 60, "n": 2}, openai.BadRequestError, 400),
        ({"extra_body": {"unknown": 1}}, openai.BadRequestError, 400),
    ],
    ids=lambda argument: str(argument)[:30],
)
def test_errors_are_of_their_classes(client: Any, fields: Any, kind: Any, status: int) -> None:
    if fields.get("prompt") == "\ud800":  # the client itself cannot encode it, another one can
        fields = {"extra_body": {"prompt": "x"}, "extra_headers": {"x-raw": "1"}}
        response = client.with_options()._client.post(
            "completions", content=b'{"prompt": "\\ud800"}'
        )
        assert response.status_code == status
        assert "half of a surrogate pair" in response.json()["error"]["message"]
        return
    with pytest.raises(kind) as error:
        client.completions.create(**{**ASKED, **fields})
    assert error.value.status_code == status
    assert error.value.type == "invalid_request_error"


def test_a_context_that_is_too_long_has_openais_code(client: Any) -> None:
    with pytest.raises(
        openai.BadRequestError, match="This model's maximum context length is 256 tokens"
    ) as error:
        client.chat.completions.create(
            **{**CHAT, "messages": [{"role": "user", "content": "a" * 300}]}
        )
    assert error.value.code == "context_length_exceeded"


MESSAGES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "nothing": ([{}], "messages[0] has no role, but nothing"),
    "a typo in content": (
        [{"role": "user", "contents": "Hi"}],
        "messages[0] has no content, but 'role', 'contents'",
    ),
    "a typo in role": (
        [{"role": "user", "content": "Hi"}, {"rol": "user", "content": "Hi"}],
        "messages[1] has no role, but 'rol', 'content'",
    ),
    "a role that is a number": ([{"role": 5, "content": "Hi"}], "messages[0] has the role 5"),
    "no text": ([{"role": "user", "content": None}], "messages[0] has null as its content"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_lacks_something_is_refused(client: Any, name: str) -> None:
    messages, problem = MESSAGES[name]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{**CHAT, "messages": messages})
    assert problem in error.value.message


def test_a_message_of_an_assistant_may_be_null(client: Any) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": None}, *CHAT["messages"]]
    assert client.chat.completions.create(**{**CHAT, "messages": messages}).choices


def test_a_key(model: Model) -> None:
    with served(model, api_key="secret") as server:
        with open_client(server, api_key="secret") as client:
            assert client.completions.create(**ASKED).choices[0].text
        with (
            open_client(server, api_key="other") as client,
            pytest.raises(openai.AuthenticationError) as error,
        ):
            client.models.list()
        assert error.value.code == "invalid_api_key"


@pytest.mark.slow
def test_a_busy_server_is_asked_again(model: Model) -> None:
    with served(
        model, max_waiting=0, limits=EngineLimits(max_num_reqs=1, max_model_len=128)
    ) as server:

        async def ask(retries: int) -> list[Any]:
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=retries
            ) as client:
                requests = (client.completions.create(**LONG) for _ in range(3))
                return await asyncio.gather(*requests, return_exceptions=True)

        refused = [result for result in asyncio.run(ask(0)) if isinstance(result, Exception)]
        assert refused
        assert {type(result) for result in refused} == {openai.RateLimitError}
        assert {result.response.headers["retry-after"] for result in refused} == {"1"}
        assert len({result.choices[0].text for result in asyncio.run(ask(8))}) == 1


def test_a_time_out_of_the_client_ends_its_request(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: (time.sleep(0.05), step(engine))[1])
    with served(model) as server, open_client(server, timeout=0.5) as client:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(**LONG)
        end = time.monotonic() + 20
        while not server.host.engine.is_idle:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert server.host.engine.stats().ended == {"abort": 1}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_that_is_closed_ends_its_request(wide: Served, is_async: bool) -> None:
    before = wide.host.engine.stats().ended.get("abort", 0)

    async def begin() -> None:
        async with openai.AsyncOpenAI(base_url=f"{wide.url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                **{**LONG, "max_tokens": 200, "n": 4}, stream=True
            )
            await anext(stream)
            await stream.close()

    if is_async:
        asyncio.run(begin())
    else:
        with open_client(wide) as client:
            stream = client.completions.create(**{**LONG, "max_tokens": 200, "n": 4}, stream=True)
            next(stream)
            stream.close()
    end = time.monotonic() + 20
    while not wide.host.engine.is_idle:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert wide.host.engine.stats().ended["abort"] > before


def test_a_cancelled_task_ends_its_request(wide: Served) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{wide.url}/v1", api_key="none") as client:
            task = asyncio.create_task(
                client.completions.create(**{**LONG, "max_tokens": 200, "n": 4})
            )
            while not wide.host.num_open:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask())
    end = time.monotonic() + 20
    while wide.host.num_open:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_asynchronous_stream_of_a_chat(wide: Served) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{wide.url}/v1", api_key="none") as client:
            chunks = await client.chat.completions.create(**CHAT, temperature=0, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    with open_client(wide) as client:
        assert (
            asyncio.run(ask())
            == client.chat.completions.create(**CHAT, temperature=0).choices[0].message.content
        )


def test_a_request_that_takes_too_long(model: Model) -> None:
    with (
        served(model, limits_of=ServerLimits(timeout=0.01)) as server,
        open_client(server) as client,
    ):
        with pytest.raises(openai.InternalServerError, match=r"no end within 0.01 s") as error:
            client.completions.create(**LONG)
        assert error.value.status_code == 504
        with pytest.raises(openai.APIError, match=r"no end within 0.01 s"):
            [*client.completions.create(**{**LONG, "n": 4}, stream=True)]


def test_an_engine_that_fails(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(_: Engine) -> Any:
        raise EngineError("engine.step()", "a device that is gone", "another one")

    with served(model) as server, open_client(server) as client:
        monkeypatch.setattr(Engine, "step", step)
        with pytest.raises(openai.InternalServerError, match="a device that is gone"):
            client.completions.create(**LONG)
        with pytest.raises(openai.InternalServerError, match="a device that is gone") as error:
            client.completions.create(**LONG)
        assert (error.value.status_code, error.value.response.headers["retry-after"]) == (503, "1")


def test_fields_that_say_nothing_about_the_completion(client: Any) -> None:
    completion = client.chat.completions.create(
        **CHAT, user="me", metadata={"a": "b"}, store=False, temperature=0
    )
    assert completion.choices[0].message.role == "assistant"
    assert completion.system_fingerprint is None or isinstance(completion.system_fingerprint, str)
