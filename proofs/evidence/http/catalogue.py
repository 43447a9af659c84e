"""The requests of a load: completions and chats of all kinds, each with one right answer."""

import json
import random
from collections.abc import Sequence
from typing import Any

import attrs

from weft.proofs.evidence.http.process import Answer

_WORDS = [
    "the",
    "function",
    "returns",
    "a",
    "list",
    "of",
    "all",
    "values",
    "that",
    "are",
    "in",
    "order",
    "and",
    "each",
    "one",
    "is",
    "not",
    "None",
    "if",
    "x",
    "else",
    "return",
]
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
# The first two end by themselves; a JSON object may go on until the limit of tokens.
_FORMS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    {"type": "regex", "regex": "[a-z]{3}-[0-9]{1,4}"},
    {"type": "json_object"},
]


@attrs.frozen
class Asked:
    """A request.

    Args:
        kind: of it.
        path, body: without `stream`.
    """

    kind: str
    path: str
    body: dict[str, Any]


def catalogue(count: int, seed: int) -> list[Asked]:
    """So many requests, drawn by seed. Each is greedy or has a seed, so that its answer is known."""
    drawn = random.Random(seed)
    return [_draw(drawn) for _ in range(count)]


def _draw(drawn: random.Random) -> Asked:
    kind = drawn.choice(
        [
            "quick",
            "quick",
            "long",
            "several",
            "logprobs",
            "echo",
            "prompts",
            "chat",
            "structured",
            "stop",
        ]
    )
    prompt = " ".join(
        drawn.choices(_WORDS, k=drawn.choice([2, 3, 4, 8, 20]) if kind != "quick" else 3)
    )
    # Greedy or by a seed: without one of them an answer under load could not be compared with one
    # alone.
    sampling: dict[str, Any] = {"temperature": 0.0}
    # Several greedy completions of one prompt would all be the same, and hide one that is
    # another's.
    if kind == "several" or drawn.random() < 0.5:
        sampling = {
            "temperature": 1.0,
            "seed": drawn.randrange(10**6),
            "top_p": drawn.choice([0.8, 1.0]),
        }
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": drawn.randint(4, 40), **sampling}
    more: dict[str, dict[str, Any]] = {
        "quick": {"max_tokens": 8},
        # Long enough that it holds its pages while others want them, and is preempted.
        "long": {"max_tokens": 100, "ignore_eos": True},
        "several": {"n": drawn.randint(2, 4)},
        "logprobs": {"logprobs": 3},
        "echo": {"echo": True, "logprobs": 2},
        # Three that differ, so that an answer in another's place shows.
        "prompts": {"prompt": [prompt, prompt[::-1], "a b"], "n": drawn.randint(1, 2)},
        "structured": {"response_format": drawn.choice(_FORMS), "max_tokens": 48},
        "stop": {"stop": ["e ", "xy"], "max_tokens": 60},
        "chat": {},
    }
    if kind == "chat":
        del body["prompt"]
        messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": prompt}]
        body |= {"messages": messages[drawn.randint(0, 1) :], "logprobs": drawn.random() < 0.5}
    if kind == "chat":
        path = "/v1/chat/completions"
    else:
        path = "/v1/completions"
    return Asked(kind, path, {**body, **more[kind]})


@attrs.define
class Said:
    """One choice of an answer.

    Args:
        text: of a completion or a message.
        tokens: of its logprobs, if there are any.
        logprobs: of these.
        finish_reason: None: it did not end.
    """

    text: str = ""
    tokens: list[str] = attrs.field(factory=list)
    logprobs: list[float | None] = attrs.field(factory=list)
    finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Add a choice, or a chunk of it."""
        message = choice.get("message") or choice.get("delta") or {}
        self.text += choice.get("text") or message.get("content") or ""
        logprobs = choice.get("logprobs") or {}
        for each in logprobs.get("content") or ():
            self.tokens.append(each["token"])
            self.logprobs.append(each["logprob"])
        self.tokens += logprobs.get("tokens") or []
        self.logprobs += logprobs.get("token_logprobs") or []
        # In a stream only the last chunk has a reason.
        self.finish_reason = choice["finish_reason"] or self.finish_reason

    def difference(self, other: "Said") -> str:
        """How this differs from another one; an empty text if it does not. Logprobs may differ by
        rounding, since batches have other shapes."""
        for name in ("text", "tokens", "finish_reason"):
            if getattr(self, name) != getattr(other, name):
                return (
                    f"{name}: {getattr(self, name)!r:.200}, and alone {getattr(other, name)!r:.200}"
                )
        for place, (a, b) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            # The first token of a prompt that is echoed has no logprob, and must have none in both.
            if (a is None) != (b is None) or abs((a or 0.0) - (b or 0.0)) > 1e-3:
                return f"logprob {place}: {a}, and alone {b}"
        return ""


def said(answer: Answer) -> list[Said]:
    """The choices of an answer, whole or of a stream, in order.

    Raises:
        ValueError: the stream has an error, or does not end as it should.
    """
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _choices([answer.json])
    *chunks, last = answer.events
    # A stream that breaks off looks like one that ended to a client that only joins the pieces.
    if last != "[DONE]":
        raise ValueError(f"a stream that ends with {last:.300}")
    return _choices([json.loads(chunk) for chunk in chunks])


def _choices(bodies: Sequence[dict[str, Any]]) -> list[Said]:
    choices: dict[int, Said] = {}
    for body in bodies:
        for choice in body["choices"]:
            choices.setdefault(choice["index"], Said()).add(choice)
    return [choices[index] for index in sorted(choices)]
