"""Texts over HTTP, by tokenizers that decode a token by what is before it: the space of a first
word, characters of several tokens; in completions, echoes, offsets and the bytes of chats."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import attrs
import pytest
from serving import Served, ask, served
from tokenizers import Tokenizer, decoders, models, normalizers

from weft.stages.model import Model
from weft.transforms.engine.detokenizing import Detokenizer
from weft.transforms.server.answers import Part
from weft.transforms.server.vocabulary import Vocabulary

PROMPT = "the capital"


def sentencepiece(model: Model, kind: str) -> Model:
    """The model with a tokenizer as Llama 2's or T5's, of as many tokens."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(0x41, 0x5B)] + ["<0xE2>", "<0x98>", "<0x82>"]
    vocab = ["<unk>", *bytes_, "▁", "▁the", "▁capital", "▁Paris", "▁▁", "x", "the", "☂"]
    tokenizer = Tokenizer(
        models.Unigram(
            [(token, -1.0 if token[0] == "▁" else -9.0) for token in vocab],
            unk_id=0,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    metaspace = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    tokenizer.decoder = decoders.Sequence(parts if kind == "strip" else metaspace)
    return attrs.evolve(model, tokenizer=tokenizer)


@pytest.fixture(scope="module", params=["strip", "metaspace"])
def server_and_model(
    request: pytest.FixtureRequest, model: Model
) -> Iterator[tuple[Served, Model]]:
    spaced = sentencepiece(model, request.param)
    with served(spaced) as server:
        yield server, spaced


@pytest.mark.one_of(2)
def test_a_completion_keeps_its_first_space(server_and_model: tuple[Served, Model]) -> None:
    server, model = server_and_model
    assert model.tokenizer is not None
    for token, text in (("▁Paris", " Paris Paris Paris"), ("▁▁", "      ")):
        chosen = model.tokenizer.token_to_id(token)
        body = {"prompt": PROMPT, "max_tokens": 3, "allowed_token_ids": [chosen]}
        assert ask(server, body).json()["choices"][0]["text"] == text
        assert ask(server, {**body, "echo": True}).json()["choices"][0]["text"] == PROMPT + text
        streamed = ask(server, {**body, "stream": True}).text.split("\n\n")
        chunks = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    chosen = model.tokenizer.token_to_id("▁Paris")
    stopped = ask(
        server, {"prompt": PROMPT, "allowed_token_ids": [chosen], "stop": " Paris"}
    ).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == (
        "",
        "stop",
        " Paris",
    )


@pytest.mark.one_of(4)
@pytest.mark.parametrize("stop", [None, "never"])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_count_the_text(
    server_and_model: tuple[Served, Model], echo: bool, stop: str | None
) -> None:
    server, model = server_and_model
    assert model.tokenizer is not None
    for token, steps in (("▁Paris", [0, 6, 12]), ("☂", [0, 1, 2]), ("<0x41>", [0, 1, 2])):
        chosen = model.tokenizer.token_to_id(token)
        body = {
            "prompt": PROMPT,
            "max_tokens": 3,
            "allowed_token_ids": [chosen],
            "logprobs": 0,
            "echo": echo,
        }
        choice = ask(server, {**body, "stop": stop}).json()["choices"][0]
        offsets = choice["logprobs"]["text_offset"]
        base = len(PROMPT) if echo else 0
        assert offsets[-3:] == [base + step for step in steps]
        assert offsets[:-3] == ([0, 3] if echo else [])
        ends = [*offsets[1:], len(choice["text"])]
        pieces = [choice["text"][start:end] for start, end in zip(offsets, ends, strict=True)]
        assert "".join(pieces) == choice["text"]


def test_the_bytes_of_a_chat_are_its_text(server_and_model: tuple[Served, Model]) -> None:
    server, model = server_and_model
    assert model.tokenizer is not None
    for token in ("▁Paris", "☂", "<0x41>", "▁▁"):
        chosen = model.tokenizer.token_to_id(token)
        body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 3, "logprobs": True}
        choice = ask(
            server, {**body, "allowed_token_ids": [chosen]}, "/v1/chat/completions"
        ).json()["choices"][0]
        raw = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
        assert raw.decode() == choice["message"]["content"]


# Planted bugs
# ---------------------------------------------------------------------------------------------------------


def _sum_of_lengths(part: Part) -> list[int]:
    """Each token's text begins where the texts of those before it end, each decoded by itself."""
    track = part.choice.track
    if track is None or track.tokenizer is None:
        return []
    lengths = [len(track.tokenizer.decode([token])) for token in track.token_ids]
    return [sum(lengths[:place]) for place in range(part.start, part.stop)]


def _stripped(vocabulary: Vocabulary, token: int) -> list[int]:
    return [*vocabulary.text(token).strip().encode()]


BUGS: dict[
    str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[tuple[Served, Model]], None]]
] = {
    "the prompt is not read": (
        lambda: mock.patch.object(Detokenizer, "_context", return_value=()),
        test_a_completion_keeps_its_first_space,
    ),
    "offsets count the lengths of tokens": (
        lambda: mock.patch.object(Part, "text_offsets", property(_sum_of_lengths)),
        lambda server_and_model: test_offsets_count_the_text(
            server_and_model, echo=False, stop=None
        ),
    ),
    "bytes are those of the stripped token": (
        lambda: mock.patch.object(Vocabulary, "bytes_of", _stripped),
        test_the_bytes_of_a_chat_are_its_text,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(server_and_model: tuple[Served, Model], bug: str) -> None:
    planted, check = BUGS[bug]
    with planted(), pytest.raises(AssertionError):
        check(server_and_model)
    check(server_and_model)
