"""The contents of answers: growing choices, logprobs in OpenAI's and vLLM's forms, usage,
captures."""

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from weft.transforms.engine.completion import CompletionState
from weft.transforms.server.streams import Output
from weft.transforms.server.vocabulary import Vocabulary


@attrs.define(eq=False)
class Choice:
    """A completion as the client sees it, while it grows.

    Args:
        index: its place among all choices of the answer.
        prompt: the tokens of its prompt.
        text: the text so far.
        num_tokens: the number of tokens so far.
        track: the tokens and logprobs so far; None before the first output.
        captured: what the stages captured, once the completion has ended.
        finish_reason: why it ended; None: it has not.
    """

    index: int
    prompt: Sequence[int]
    text: str = ""
    num_tokens: int = 0
    track: CompletionState | None = None
    captured: Mapping[str, Tensor] = attrs.field(factory=dict)
    finish_reason: str | None = None

    def add(self, output: Output) -> "Part":
        """Add an output, and return the new part."""
        start = self.num_tokens
        self.track = output.progress.state
        self.captured = output.progress.captured
        new = output.text or ""
        part = Part(self, new, start, start + len(output.token_ids), output.finish_reason)
        self.text = self.text + new
        self.num_tokens = part.stop
        self.finish_reason = output.finish_reason
        return part

    def whole(self) -> "Part":
        """Everything so far as one part."""
        return Part(self, self.text, 0, self.num_tokens, self.finish_reason)


@attrs.frozen(eq=False)
class Part:
    """A part of a choice: the tokens `start:stop`, and their text."""

    choice: Choice
    text: str
    start: int
    stop: int
    finish_reason: str | None

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token or stop text that ended the choice, as in vLLM; None: the model's own
        end-of-sequence token, or it has not ended."""
        if self.finish_reason is None or self.choice.track is None:
            return None
        return self.choice.track.stop_reason

    @property
    def tokens(self) -> list[tuple[int, float, dict[int, float]]]:
        """For each token: its id, its logprob, and the likeliest tokens with theirs."""
        track = self.choice.track
        if track is None:
            return []
        place = slice(self.start, self.stop)
        top = track.top_logprobs[place] or [{}] * (self.stop - self.start)
        return list(zip(track.token_ids[place], track.logprobs[place], top, strict=True))

    @property
    def text_offsets(self) -> list[int]:
        """For each token, the offset of its text in the choice's text; empty without text."""
        if self.choice.track is None:
            return []
        return self.choice.track.text_offsets[self.start : self.stop]

    @property
    def prompt_tokens(self) -> list[tuple[int, float | None, dict[int, float] | None]]:
        """As `tokens`, for the prompt; its first token has no logprob."""
        track = self.choice.track
        if track is None:
            logprobs = []
        else:
            logprobs = track.prompt_logprobs
        if track is None:
            top = []
        else:
            top = track.prompt_top_logprobs
        return list(zip(self.choice.prompt, [None, *logprobs], [None, *top], strict=False))


@attrs.frozen(eq=False)
class Writer:
    """Writes the answers to one request.

    Args:
        id, model: the values of these fields in the answer.
        vocabulary: the model's; None: there is no text.
        created: seconds since the epoch.
    """

    id: str
    model: str
    vocabulary: Vocabulary | None
    created: int = attrs.field(factory=lambda: int(time.time()))

    def answer(
        self, kind: str, choices: list[Any], usage: dict[str, Any] | None, **more: Any
    ) -> dict[str, Any]:
        """The body of an answer, or of one chunk of it."""
        body = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }
        if usage is None:
            return body
        return body | {"usage": usage}

    def token(self, token: int, as_id: bool = False) -> str:
        """A token as text, or as `token_id:N`."""
        if as_id or self.vocabulary is None:
            return f"token_id:{token}"
        return self.vocabulary.text(token)

    def text_logprobs(
        self, part: Part, as_ids: bool, with_prompt: bool, echoed: str = ""
    ) -> dict[str, Any]:
        """The `logprobs` of a text completion: parallel lists, with one entry per token.

        `top_logprobs` always includes the chosen token, even if no others were requested.
        `text_offset` is the offset of a token's text in the text of the answer; tokens that make
        up one character all have the offset of that character.

        Args:
            with_prompt: put the prompt's tokens first.
            echoed: the text of the prompt, if the text of the answer begins with it.
        """
        if with_prompt:
            prompt = part.prompt_tokens
        else:
            prompt = []
        tokens = [*prompt, *part.tokens]
        names = [self.token(token, as_ids) for token, *_ in tokens]
        offsets = list[int]()
        if prompt and self.vocabulary is not None:
            ids = [token for token, *_ in prompt]
            # Decoding the prompt's tokens may give more text than the client sent.
            offsets += [min(offset, len(echoed)) for offset in self.vocabulary.text_offsets(ids)]
        offsets += [len(echoed) + offset for offset in part.text_offsets]
        offsets += [0] * (len(tokens) - len(offsets))  # without a tokenizer there is no text
        top = [
            None if alternatives is None else self._top(token, logprob, alternatives, as_ids)
            for token, logprob, alternatives in tokens
        ]
        return {
            "tokens": names,
            "token_logprobs": [logprob for _, logprob, _ in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _top(
        self, token: int, logprob: float | None, alternatives: dict[int, float], as_ids: bool
    ) -> dict[str, float]:
        """The logprobs of the likeliest tokens and of the chosen one, by the tokens' texts.

        The chosen token's entry has the same bits as its logprob elsewhere. If several tokens have
        the same text, as parts of characters do, all but the first are named by their ids.
        """
        if logprob is None:
            all_of = alternatives
        else:
            all_of = {**alternatives, token: logprob}
        by_text = dict[str, float]()
        for each, value in all_of.items():
            name = self.token(each, as_ids)
            by_text[self.token(each, True) if name in by_text else name] = value
        return by_text

    def chat_logprobs(self, part: Part, num_top: int) -> dict[str, Any]:
        """The `logprobs` of a chat message: one object per token."""
        content = []
        for token, logprob, top in part.tokens:
            # Both entries of the chosen token must have the same bits.
            logprobs = {each: logprob if each == token else value for each, value in top.items()}
            likeliest = sorted(logprobs.items(), key=lambda pair: -pair[1])[
                : None if num_top < 0 else num_top
            ]
            top_logprobs = [self._chat_token(*each) for each in likeliest]
            content.append({**self._chat_token(token, logprob), "top_logprobs": top_logprobs})
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        if self.vocabulary is None:
            raw = None
        else:
            raw = self.vocabulary.bytes_of(token)
        return {"token": self.token(token), "logprob": logprob, "bytes": raw}

    def prompt_logprobs(self, part: Part) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token of the prompt, an object keyed by token id; None
        for the first token."""
        entries = list[dict[str, Any] | None]()
        ranks = [None, *(part.choice.track.prompt_ranks if part.choice.track is not None else ())]
        for (token, logprob, top), rank in zip(part.prompt_tokens, ranks, strict=False):
            if logprob is None or top is None:
                entries.append(None)
                continue
            # `top` is in order of likelihood, so a place in it is a rank. The prompt's own token
            # may be beyond it.
            places: dict[int, int | None] = {each: place for place, each in enumerate(top, 1)} | {
                token: rank
            }
            entries.append(
                {
                    str(each): {
                        "logprob": value,
                        "rank": places[each],
                        "decoded_token": self.token(each),
                    }
                    for each, value in sorted(
                        {**top, token: logprob}.items(), key=lambda pair: -pair[1]
                    )
                }
            )
        return entries


def usage_of(choices: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """The `usage` of an answer; a prompt counts once, however many completions it has."""
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def captured_of(choice: Choice) -> dict[str, Any]:
    """The captures by name, for each token that the model has read: little-endian bytes in base64,
    with their dtype and shape."""
    return {name: _encoded(x) for name, x in choice.captured.items()}


def _encoded(x: Tensor) -> dict[str, Any]:
    x = x.detach().cpu()
    if x.is_floating_point():  # NumPy has no bfloat16
        x = x.float()
    raw = x.contiguous().numpy().tobytes()
    kind = str(x.dtype).removeprefix("torch.")
    return {"dtype": kind, "shape": [*x.shape], "base64": base64.b64encode(raw).decode()}
