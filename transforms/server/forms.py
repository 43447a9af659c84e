"""`TextForm` and `ChatForm`: the JSON of a completion and of a chat, whole or in chunks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import attrs

from weft.transforms.server.answers import Choice, Part, Writer, captured_of, usage_of
from weft.transforms.server.commands import Add
from weft.transforms.server.protocol import ChatRequest, CompletionRequest, Sampled
from weft.transforms.server.refusals import as_json, event

# The placeholder for the text in a frame; the NUL characters keep it apart from any other value.
_PLACE = "\0text\0"


@attrs.frozen(eq=False)
class Asked:
    """A checked request for completions.

    Args:
        body: the request's body.
        requests: the engine's requests, one for each prompt.
        writer: writes the answer.
    """

    body: Sampled
    requests: Sequence[Add]
    writer: Writer

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The token ids of each prompt."""
        return [request.prompt for request in self.requests]

    def choices(self) -> list[Choice]:
        """The choices of the answer, in order."""
        n = self.body.n
        return [
            Choice(place * n + index, prompt)
            for place, prompt in enumerate(self.prompts)
            for index in range(n)
        ]


class Form(ABC):
    """The JSON of an answer, from the parts of its choices."""

    kind: str

    def __init__(self, checked_request: Asked, has_logprobs: bool) -> None:
        self.checked_request = checked_request
        self.choices = checked_request.choices()
        self.writer = checked_request.writer
        options = checked_request.body.stream_options
        # With logprobs or running usage, chunks differ in more than their text.
        self._is_plain = not (
            has_logprobs or (options is not None and options.continuous_usage_stats)
        )
        self._frames: dict[int, Sequence[bytes]] = {}

    def written(self, parts: Sequence[Part]) -> bytes:
        """The server-sent events of parts, followed by the end of the stream after the last."""
        raw = b"".join(map(self.events, parts))
        if any(choice.finish_reason is None for choice in self.choices):
            return raw
        if (chunk := self.usage_chunk) is None:
            usage = b""
        else:
            usage = event(chunk)
        return raw + usage + b"data: [DONE]\n\n"

    def events(self, part: Part) -> bytes:
        """The server-sent events of a part.

        Most chunks of a choice differ in their text alone: it is inserted into bytes that are
        encoded once.
        """
        # The first and the last chunk of a choice have other fields, such as the role and the
        # reason.
        if not self._is_plain or part.start == 0 or part.finish_reason is not None:
            return b"".join(event(chunk) for chunk in self.chunks(part))
        if (frame := self._frames.get(part.choice.index)) is None:
            [chunk] = self.chunks(Part(part.choice, _PLACE, 1, 1, None))
            frame = self._frames[part.choice.index] = event(chunk).split(as_json(_PLACE))
        return as_json(part.text).join(frame)

    @abstractmethod
    def choice(self, part: Part) -> dict[str, Any]:
        """A whole choice."""

    def whole(self) -> dict[str, Any]:
        """The answer."""
        choices = [self._with_ours(self.choice(choice.whole()), choice) for choice in self.choices]
        return self.writer.answer(
            self.kind, choices, usage_of(self.choices, self.checked_request.prompts)
        )

    def _with_ours(self, written: dict[str, Any], choice: Choice) -> dict[str, Any]:
        if self.checked_request.body.weft.captured:
            written["weft"] = {"captured": captured_of(choice)}
        return written

    @abstractmethod
    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """The chunks of a part."""

    def chunk(self, kind: str, choice: dict[str, Any], part: Part) -> dict[str, Any]:
        """A chunk of a stream."""
        options = self.checked_request.body.stream_options
        if options and options.continuous_usage_stats:
            usage = usage_of(self.choices, self.checked_request.prompts)
        else:
            usage = None
        if part.finish_reason is not None:
            self._with_ours(choice, part.choice)
        return self.writer.answer(kind, [choice], usage)

    @property
    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk, if the client asked for the usage."""
        options = self.checked_request.body.stream_options
        has_usage = options is not None and options.include_usage
        if self.kind == "text_completion":
            kind = "text_completion"
        else:
            kind = f"{self.kind}.chunk"
        if has_usage:
            return self.writer.answer(
                kind, [], usage_of(self.choices, self.checked_request.prompts)
            )
        return None


class TextForm(Form):
    kind = "text_completion"

    def __init__(
        self, checked_request: Asked, body: CompletionRequest, echoed: Sequence[str]
    ) -> None:
        super().__init__(checked_request, body.logprobs is not None)
        self.body = body
        self.echoed = echoed

    def choice(self, part: Part, is_first: bool = True) -> dict[str, Any]:
        """The choice, or its new part."""
        body = self.body
        place = part.choice.index
        logprobs = None
        echoed = self.echoed[place // body.n]
        if body.logprobs is not None:
            shown = is_first and body.echo
            as_ids = body.return_tokens_as_token_ids
            logprobs = self.writer.text_logprobs(part, as_ids, shown, echoed)
        if is_first:
            text = echoed + part.text
        else:
            text = part.text
        written = {"index": place, "text": text, "logprobs": logprobs}
        written |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if body.prompt_logprobs is not None and is_first:
            written["prompt_logprobs"] = self.writer.prompt_logprobs(part)
        return written

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """One chunk."""
        return [self.chunk(self.kind, self.choice(part, part.start == 0), part)]


class ChatForm(Form):
    kind = "chat.completion"

    def __init__(self, checked_request: Asked, body: ChatRequest) -> None:
        super().__init__(checked_request, bool(body.logprobs))
        self.body = body

    def _logprobs(self, part: Part) -> dict[str, Any] | None:
        if self.body.logprobs:
            return self.writer.chat_logprobs(part, self.body.top_logprobs or 0)
        return None

    def choice(self, part: Part) -> dict[str, Any]:
        """The whole choice, with its message."""
        written = {
            "index": part.choice.index,
            "message": {"role": "assistant", "content": part.text, "refusal": None},
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            written["prompt_logprobs"] = self.writer.prompt_logprobs(part)
        return written

    def chunks(self, part: Part) -> list[dict[str, Any]]:
        """One chunk; a choice's first part also has a chunk before it that gives the role."""
        kind = f"{self.kind}.chunk"
        chunks = list[dict[str, Any]]()
        choice: dict[str, Any] = {
            "index": part.choice.index,
            "logprobs": None,
            "finish_reason": None,
        }
        if part.start == 0:
            chunks.append(
                self.writer.answer(
                    kind, [{**choice, "delta": {"role": "assistant", "content": ""}}], None
                )
            )
        choice |= {"logprobs": self._logprobs(part), "finish_reason": part.finish_reason}
        choice |= {"stop_reason": part.stop_reason}
        return [*chunks, self.chunk(kind, {**choice, "delta": {"content": part.text}}, part)]
