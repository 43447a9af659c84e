"""Request bodies, in OpenAI's form with vLLM's additions, and the sampling parameters they give."""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from weft.batches.sampling import SamplingParams
from weft.errors import RequestError

# Fields of OpenAI's API that do not affect the completion; they are accepted and dropped.
_UNUSED = (
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
    "parallel_tool_calls",
)
_NO_TOOLS = "messages alone: this server calls no tools; response_format makes the answer JSON"
# Fields of vLLM or of OpenAI's API that this server refuses, and what to write instead.
INSTEAD = {
    "guided_json": 'response_format={"type": "json_schema", "json_schema": {"schema": ...}}',
    "guided_regex": 'response_format={"type": "regex", "regex": ...}',
    "guided_choice": 'response_format={"type": "regex", "regex": "(one|other)"}',
    "guided_grammar": 'response_format={"type": "grammar", "grammar": ...}',
    "structured_outputs": "response_format, of type json_schema, json_object, regex or grammar",
    "best_of": "n, and the choice with the best logprobs",
    "chat_template": "weft serve --chat-template FILE",
    "extra_body": "its fields, beside the others",
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), _NO_TOOLS),
}


def _without_unused(body: Any) -> Any:
    if isinstance(body, Mapping):
        return {k: v for k, v in body.items() if k not in _UNUSED}
    return body


# Strict, so that `true` is not read as the token 1.
TokenIds = list[Annotated[int, Field(strict=True)]]
Text = Annotated[str, Field(strict=True)]


def _by_token_ids(biases: dict[str, float]) -> dict[str, float]:
    """Check that the keys are token ids, and return the biases unchanged."""
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            problem = f"the key {key!r:.60}; instead: token ids, as strings of digits"
            raise PydanticCustomError("no_token_id", "{seen}", {"seen": problem})
    return biases


class _Body(BaseModel):
    """The base of all bodies: unknown fields, infinities and NaN are refused."""

    # vLLM accepts unknown fields and logs them. Then a misspelt field has no effect, and its sender
    # never learns of it.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Drop fields that are null, which means a field's default in OpenAI's API, whatever its
        type."""
        if not isinstance(body, Mapping):
            return body
        return {
            name: value
            for name, value in body.items()
            if value is not None or name not in _with_defaults(cls)
        }


@functools.cache
def _with_defaults(kind: type[BaseModel]) -> frozenset[str]:
    fields = kind.model_fields.items()
    return frozenset(name for name, field in fields if not field.is_required())


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(_Body):
    """The `json_schema` object of `response_format`."""

    name: str = ""
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(_Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "grammar", "regex"]
    json_schema: JsonSchema | None = None
    grammar: str | None = None
    regex: str | None = None


class WeftField(_Body):
    """The field `weft`: extra inputs for the model's stages, and whether to return their captures.

    Args:
        extras: by name (`model.with_stages(..., extras=...)`), numbers or lists of numbers, read in
            the dtype of the model's default; or the base64 form in which captures are returned.
        captured: return what the stages captured for each token.
    """

    extras: dict[str, Any] = Field(default_factory=dict)
    captured: bool = False


class Sampled(_Body):
    """The fields that text and chat completions share."""

    model: Text | None = None
    # OpenAI's default, unlike the 0 of `weft.generate`.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    stop: Text | list[Text] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], AfterValidator(_by_token_ids)] | None = None
    min_tokens: int = 0
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    allowed_token_ids: TokenIds | None = None
    bad_words: list[Text] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: int = 0
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None
    weft: WeftField = Field(default_factory=WeftField)

    def sampling(self, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's sampling parameters.

        Raises:
            RequestError: a value is out of range.
        """
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            n=self.n,
            stop=self.stop or (),
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids or (),
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words or (),
            ignore_eos=self.ignore_eos,
            # The engine needs text only to find stop texts. All other text is made in the process
            # that answers the client, which leaves the engine's thread to the steps.
            detokenize=bool(self.stop),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _one_or_more(prompt: Any) -> Any:
    """A list of prompts from one text, one list of token ids, or a list of these."""
    one = isinstance(prompt, str) or (
        isinstance(prompt, list) and prompt and all(isinstance(x, int) for x in prompt)
    )
    if one:
        return [prompt]
    return prompt


class CompletionRequest(Sampled):
    """The body of `/v1/completions`."""

    prompt: Annotated[list[Text | TokenIds], BeforeValidator(_one_or_more)] = Field(min_length=1)
    # OpenAI's default for this endpoint.
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    # Of these fields, only values that change nothing are supported.
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None
    return_tokens_as_token_ids: bool = False


class ChatRequest(Sampled):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: Literal[False] = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    # Values that ask for no tools are accepted, since a client may always send these fields.
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none"] | None = None


class TokenizeRequest(_Body):
    """The body of `/tokenize`: a text, or a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = True


class DetokenizeRequest(_Body):
    """The body of `/detokenize`."""

    model: Text | None = None
    tokens: TokenIds


def checked(kind: type[BaseModel], body: Any) -> Any:
    """Validate a parsed body as an instance of `kind`.

    Raises:
        pydantic.ValidationError: a field is unknown or of the wrong type.
    """
    return kind.model_validate(_without_unused(body))


def texts_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each content as one text, which joins OpenAI's lists of `text` parts.

    Raises:
        RequestError: a message has no role or no content (null is allowed for an assistant only),
            or a part of another type, such as an image.
    """
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    return [{**message, "content": _text_of(message.get("content"))} for message in messages]


def _check_message(message: Mapping[str, Any], path: str) -> None:
    fields = ", ".join(map(repr, message)) or "nothing"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        if "role" in message:
            problem = f"the role {role!r:.80}"
        else:
            problem = f"no role, but {fields:.200}"
        raise RequestError(
            "messages",
            f"{path} has {problem}",
            "a role by its name: 'system', 'user' or 'assistant'",
        )
    if message.get("content") is None and (role != "assistant" or "content" not in message):
        if "content" in message:
            problem = "null as its content"
        else:
            problem = f"no content, but {fields:.200}"
        raise RequestError(
            "messages",
            f"{path} has {problem}",
            'a text, or a list of {"type": "text", "text": ...}',
        )


def _text_of(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = content
    else:
        parts = [content]
    for part in parts:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise RequestError(
                "messages",
                f"content {part!r:.80}",
                'a text, or a list of {"type": "text", "text": ...}',
            )
    return "".join(part["text"] for part in parts)
