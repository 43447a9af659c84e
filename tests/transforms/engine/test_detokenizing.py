"""Text of a completion, token by token: never part of a character, nothing taken back, no error for
any tokens."""

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from weft.batches.sampling import SamplingParams
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.detokenizing import overlap, special_ids
from weft.transforms.engine.generate import generate
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.steps.results import StepResult

TEXTS = ("สวัสดีครับ ผม", "👩‍👩‍👧‍👦👍🏽", "the thé naïve", " a  b\n", "☂")


def byte_level() -> Tokenizer:
    """Like GPT-2's, Llama 3's and Qwen's: merges of bytes, across the borders of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2's and Gemma's: characters, and bytes for characters without a token."""
    names = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁the",
        "the",
        "a",
        "é",
        "▁é",
        "👍",
        "▁▁",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {name: id for id, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.add_special_tokens(["<unk>", AddedToken("</s>", special=True)])
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def word_piece() -> Tokenizer:
    """Like BERT's, whose decoder removes the space before a comma."""
    names = ["[UNK]", "the", "##re", ".", ",", "'", "s", "do", "n", "'t", "##é", "👍"]
    tokenizer = Tokenizer(
        models.WordPiece({name: id for id, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


KINDS = {"byte level": byte_level(), "byte fallback": byte_fallback(), "word piece": word_piece()}


def prompt_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """A prompt whose text no token changes."""
    return tuple(id for id in map(tokenizer.token_to_id, ("a", "the")) if id is not None)[:1]


def complete(
    tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...] = (), min_tokens: int = 0
) -> tuple[CompletionState, list[str]]:
    """A completion of these tokens, up to the one that completes a stop text; and the text shown
    after each token, and at the end."""
    params = SamplingParams(stop=stop, min_tokens=min_tokens)
    state = CompletionState(
        Request("a", prompt_of(tokenizer), len(token_ids), params),
        tokenizer,
        special_ids(tokenizer),
    )
    shown = [""]
    for token in token_ids:
        stopped = state.append(StepResult([[token]], [[0.0]], [], [], []), 0)
        shown.append(state.text)
        if stopped:
            break
    state.end("stop" if len(shown) <= len(token_ids) else "length")
    return state, [*shown, state.text]


def said(
    tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...] = (), min_tokens: int = 0
) -> list[str]:
    """The text shown after each token, and at the end."""
    return complete(tokenizer, token_ids, stop, min_tokens)[1]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), st.sampled_from(((), ("a",), ("the", "é"))))
@settings(max_examples=200)
def test_offsets_divide_the_text_among_the_tokens(
    kind: str, data: st.DataObject, stop: tuple[str, ...]
) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(
        st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), min_size=1, max_size=30)
    )
    state, _ = complete(tokenizer, ids, stop)
    assert len(state.text_offsets) == len(state.token_ids)
    assert state.text_offsets[0] == 0
    pieces = [
        state.text[start:end] for start, end in pairwise((*state.text_offsets, len(state.text)))
    ]
    assert "".join(pieces) == state.text
    assert state.text_offsets == sorted(state.text_offsets)


def test_an_offset_is_the_length_of_the_text_before() -> None:
    tokenizer = KINDS["byte fallback"]
    ids = [
        tokenizer.token_to_id(token)
        for token in ("a", "▁the", "</s>", "▁▁", "<0xF0>", "<0x9F>", "<0x91>", "<0x8D>", "é")
    ]
    state, _ = complete(tokenizer, ids)
    assert state.text == "a the  👍é"
    assert state.text_offsets == [0, 1, 5, 5, 7, 7, 7, 7, 8]
    stopped, _ = complete(tokenizer, ids, ("e ",))
    assert (stopped.text, stopped.text_offsets) == ("a th", [0, 1, 4, 4])


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=300)
def test_whatever_is_said_is_shown_and_nothing_taken_back(kind: str, data: st.DataObject) -> None:
    """Random tokens: parts of characters, invalid bytes, special tokens, tokens that do not exist.
    (With invalid bytes, `tokenizers.decoders.DecodeStream` raises.)"""
    tokenizer = KINDS[kind]
    ids = data.draw(
        st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), min_size=1, max_size=30)
    )
    shown = said(tokenizer, ids)
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    prompt = prompt_of(tokenizer)
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=True)
    assert shown[-1] == whole[len(before) :]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\ufffd▁"), max_size=12),
    st.sampled_from(TEXTS),
)
@settings(max_examples=200)
def test_characters_are_shown_whole(kind: str, text: str, more: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text + more, add_special_tokens=False).ids
    shown = said(tokenizer, ids)
    assert not any("\ufffd" in each for each in shown)
    assert (
        shown[-1] == tokenizer.decode([*prompt_of(tokenizer), *ids], skip_special_tokens=True)[1:]
    )


@given(
    st.text("ab", min_size=1, max_size=14),
    st.sets(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
@settings(max_examples=300)
def test_stop_texts_end_a_request_at_the_first_token_that_completes_one(
    text: str, stops: set[str]
) -> None:
    tokenizer = KINDS["byte level"]
    ids = [tokenizer.token_to_id(character) for character in text]
    for min_tokens in (0, 3, 9):
        shown = said(tokenizer, ids, tuple(sorted(stops)), min_tokens)
        assert all(later.startswith(earlier) for earlier, later in pairwise(shown)), (
            "what was shown stays"
        )
        least = max(min_tokens, 1)  # a text that was complete before ends nothing, and is shown
        ends = [
            n for n in range(least, len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)
        ]
        if not ends:
            assert shown[-1] == text
            continue
        starts = (ends[0] - len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        assert (shown[-1], len(shown) - 2) == (text[: min(starts)], ends[0])


def test_a_request_without_texts_has_the_same_tokens() -> None:
    model = load(DEMO, "cpu", "float32")
    [plain] = generate(model, ["The function"], max_tokens=9)
    [bare] = generate(
        model,
        ["The function"],
        sampling=SamplingParams(temperature=0.0, detokenize=False),
        max_tokens=9,
    )
    assert (bare.token_ids, bare.text, bare.text_offsets) == (plain.token_ids, None, None)


@given(st.text("ab", max_size=9), st.text("ab", min_size=1, max_size=6))
def test_an_overlap_is_the_longest_beginning_of_a_stop_text_at_the_end(
    text: str, stop: str
) -> None:
    counts = [n for n in range(min(len(stop) - 1, len(text)) + 1) if text.endswith(stop[:n])]
    assert overlap(text, stop) == max(counts)
