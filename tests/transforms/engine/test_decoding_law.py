"""The text of a completion is what the tokenizer says of prompt and completion, less what it says
of the prompt: for every kind of decoder, streamed and whole, at a cost that does not grow."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from hypothesis import Phase, assume, find, given, settings, strategies as st
from hypothesis.errors import NoSuchExample
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from weft.batches.sampling import SamplingParams
from weft.proofs._strategies.decoders import (
    CHAINS,
    FAMILIES,
    SIMPLE,
    VOCABULARY,
    Decoding,
    decodings,
    kinds,
    tokenizer_of,
)
from weft.transforms.engine import detokenizing
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.detokenizing import (
    Detokenizer,
    byte_of,
    special_ids,
    text_between,
    text_offsets,
)
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.steps.results import StepResult


def texts(case: Decoding) -> list[str]:
    """What the tokenizer says after each token; cases in which it panics are not drawn."""
    try:
        return [case.decode(count) for count in range(len(case.token_ids) + 1)]
    except BaseException as error:  # a panic of Rust is no Exception
        assume(type(error).__name__ != "PanicException")
        raise


def hidden(case: Decoding) -> frozenset[int]:
    return special_ids(case.tokenizer) if case.hides else frozenset()


def holds(case: Decoding) -> bool:
    """After each token, what was said and what is held back are the text; so nothing is taken back."""
    stream = Detokenizer(case.tokenizer, case.prompt, hidden(case))
    said = ""
    for count, text in enumerate(texts(case)):
        if count:
            said += stream.add(case.token_ids[count - 1])
        if said + stream.end() != text:
            return False
    return True


def complete(case: Decoding, **params: Any) -> tuple[CompletionState, list[str]]:
    """A completion of these tokens, and the new text of each and of the end."""
    sampling = SamplingParams(skip_special_tokens=case.hides, **params)
    request = Request("a", (*case.prompt, 0)[: len(case.prompt) or 1], 99, sampling)
    state = CompletionState(request, case.tokenizer, special_ids(case.tokenizer))
    pieces = list[str]()
    has_stopped = False
    for token in case.token_ids:
        has_stopped = state.append(StepResult([[token]], [[0.0]], [], [], []), 0)
        pieces.append(state.take_text())
        if has_stopped:
            break
    state.end("stop" if has_stopped else "length")
    return state, [*pieces, state.take_text()]


def test_every_kind_of_decoder_is_drawn() -> None:
    assert {*SIMPLE, "Sequence"} == kinds()
    for name, strategy in {**SIMPLE, "Sequence": CHAINS}.items():
        decoder = find(
            strategy, lambda _: True, settings=settings(max_examples=1, phases=[Phase.generate])
        )
        assert json.loads(decoder.__getstate__())["type"] == name
        assert detokenizing.steps_of(decoder), name


@given(decodings())
@settings(max_examples=500, deadline=None)
def test_text_is_that_of_prompt_and_completion_by_any_decoder(case: Decoding) -> None:
    assert holds(case)


def test_two_bytes_that_are_no_character_have_the_text_of_the_tokenizer() -> None:
    """Of any two bytes beyond ASCII: some are the beginning of a character, and some never are."""
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(byte_of())}, []))
    tokenizer.decoder = decoders.ByteLevel()
    id_of = {byte: tokenizer.token_to_id(char) for char, byte in byte_of().items()}
    for pair in itertools.product(range(0x80, 0x100), repeat=2):
        stream = Detokenizer(tokenizer, [id_of[0x61]])
        token_ids = [id_of[byte] for byte in pair]
        text = "".join(map(stream.add, token_ids)) + stream.end()
        assert "a" + text == tokenizer.decode([id_of[0x61], *token_ids]), pair


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data())
@settings(max_examples=500, deadline=None)
def test_forced_sequences_have_the_text_of_transformers(family: str, data: st.DataObject) -> None:
    case = data.draw(decodings(st.just(FAMILIES[family])).filter(lambda drawn: drawn.prompt))
    oracle = PreTrainedTokenizerFast(
        tokenizer_object=case.tokenizer, clean_up_tokenization_spaces=False
    )
    before = oracle.decode(case.prompt, skip_special_tokens=case.hides)
    whole = oracle.decode([*case.prompt, *case.token_ids], skip_special_tokens=case.hides)
    state, pieces = complete(case)
    assert "".join(pieces) == state.text == case.decode()
    if whole.startswith(
        before
    ):  # else the last bytes of the prompt are a character with those that follow
        assert state.text == whole[len(before) :]
    assert len(state.text_offsets) == len(case.token_ids)
    assert state.text_offsets == sorted(state.text_offsets)


@pytest.mark.parametrize("family", FAMILIES)
@given(
    st.data(),
    st.sets(
        st.sampled_from(["a", " a", "☂", "aa", "the", " the", "é☂", "."]), min_size=1, max_size=3
    ),
)
@settings(max_examples=200, deadline=None)
def test_a_stop_text_ends_at_the_first_token_whose_text_has_it(
    family: str, data: st.DataObject, stops: set[str]
) -> None:
    case = data.draw(decodings(st.just(FAMILIES[family])).filter(lambda drawn: drawn.prompt))
    state, pieces = complete(case, stop=tuple(sorted(stops)))
    assert "".join(pieces) == state.text
    # U+FFFD at the end stands for bytes that may yet be a character.
    so_far = [text.rstrip("\ufffd") for text in texts(case)]
    ends = [
        count for count, text in enumerate(so_far) if count and any(stop in text for stop in stops)
    ]
    if not ends:
        assert state.text == case.decode()
        return
    text = case.decode(ends[0])
    assert state.token_ids == case.token_ids[: ends[0]]
    assert state.text == text[: min(text.find(stop) for stop in stops if stop in text)]


@pytest.mark.parametrize("family", FAMILIES)
@given(st.data(), st.integers(1, 90))
@settings(max_examples=100, deadline=None)
def test_of_a_long_prompt_its_two_ends_fix_the_text(
    family: str, data: st.DataObject, count: int
) -> None:
    token = VOCABULARY[data.draw(st.sampled_from(["the", "▁the", "<0x61>", "<pad>", "▁", "a"]))]
    case = data.draw(decodings(st.just(FAMILIES[family])))
    more = data.draw(decodings(st.just(FAMILIES[family]))).prompt
    case.prompt[:] = [*more, *[token] * count, *case.prompt]
    assert holds(case)
    numbers = mock.Mock(wraps=case.tokenizer.id_to_token)
    counting = mock.Mock(decoder=case.tokenizer.decoder, id_to_token=numbers)
    Detokenizer(counting, [VOCABULARY["the"]] * 10_000).end()
    assert numbers.call_count <= 32


# Cost: a token's work does not depend on how many came before
# ---------------------------------------------------------


class _Counting:
    """A decoder that counts the characters that it is given."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.num_chars = 0

    def decode(self, chunks: list[str]) -> str:
        self.num_chars += sum(map(len, chunks))
        return str(self.decoder.decode(chunks))


def work_of(decoder: Any, token: str, count: int) -> int:
    """Characters and chunks that the steps of a decoder handle for so many equal tokens."""
    counting = list[_Counting]()

    def make(part: dict[str, Any]) -> _Counting:
        fuse = decoders.Fuse()
        fuse.__setstate__(json.dumps(part).encode())
        counting.append(_Counting(fuse))
        return counting[-1]

    num_fed = 0
    fed = detokenizing._fed

    def feed(steps: Any, chunk: str) -> str:
        nonlocal num_fed
        num_fed += 1
        return fed(steps, chunk)

    detokenizing._steps_of_state.cache_clear()
    with (
        mock.patch.object(detokenizing, "_decoder", make),
        mock.patch.object(detokenizing, "_fed", feed),
    ):
        stream = Detokenizer(tokenizer_of(decoder), [VOCABULARY["the"]])
        for _ in range(count):
            stream.add(VOCABULARY[token])
    detokenizing._steps_of_state.cache_clear()
    return num_fed + sum(one.num_chars for one in counting)


@pytest.mark.parametrize(
    "token", ["the", "▁", "a", "</w>", "<0x61>", "<0x80>", "<0xC3>", "<pad>", " "]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_work_for_twice_the_tokens_is_twice_the_work(family: str, token: str) -> None:
    once = work_of(FAMILIES[family], token, 1000)
    assert work_of(FAMILIES[family], token, 2000) <= 2.1 * once


def test_a_completion_copies_its_text_once() -> None:
    """Each text that is shown is one of the pieces, and pieces are joined when the text is read."""
    state, pieces = complete(
        Decoding(tokenizer_of(decoders.ByteLevel()), [0], [VOCABULARY["the"]] * 500, True)
    )
    assert state._shown == [piece for piece in pieces if piece]
    stopping, _ = complete(
        Decoding(tokenizer_of(decoders.ByteLevel()), [0], [VOCABULARY["the"]] * 500, True),
        stop=("thethx", "e."),
    )
    assert len(stopping._recent) == 5, "as much as a stop text may continue"


# Single tokens
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "token", "text"),
    [
        ("byte fallback, as Llama 2's and TinyLlama's", "▁the", " the"),
        ("metaspace, as T5's", "▁the", " the"),
        ("word pieces, as BERT's", "##re", "re"),
        ("word pieces, as BERT's", "the", " the"),
        ("ends of words, as GPT's", "the</w>", "the"),
        ("byte level, as GPT-2's, Llama 3's and Qwen's", "Ġ", " "),
        ("byte fallback, as Llama 2's and TinyLlama's", "<0x61>", "a"),
        ("byte fallback, as Llama 2's and TinyLlama's", "<0xE2>", "\ufffd"),
    ],
)
def test_a_token_between_others_has_its_space(family: str, token: str, text: str) -> None:
    assert text_between(tokenizer_of(FAMILIES[family]), VOCABULARY[token]) == text


def test_a_token_that_does_not_exist_has_no_text() -> None:
    assert text_between(tokenizer_of(None), 10_000) == ""


@given(decodings())
@settings(max_examples=100, deadline=None)
def test_offsets_of_a_prompt_are_in_its_text(case: Decoding) -> None:
    texts(case)
    offsets = text_offsets(case.tokenizer, case.token_ids, hidden(case))
    assert len(offsets) == len(case.token_ids)
    assert offsets == sorted(offsets)
    assert all(offset == 0 for offset in offsets[:1])


def test_a_decoder_in_python_has_its_text_at_the_end() -> None:
    class Shouting:
        def decode_chain(self, chunks: list[str]) -> list[str]:
            return [chunk.upper() for chunk in chunks]

    case = Decoding(
        tokenizer_of(decoders.Decoder.custom(Shouting())),
        [0],
        [VOCABULARY["the"], VOCABULARY["a"]],
        True,
    )
    stream = Detokenizer(case.tokenizer, case.prompt)
    assert [stream.add(token) for token in case.token_ids] == ["", ""]
    assert stream.end() == "THEA"


# Planted bugs
# ---------------------------------------------------------------------------------------------------------

Plant = Callable[[], AbstractContextManager[Any]]


def _without_prompt(self: Detokenizer, _: Any) -> Iterator[str]:
    return iter(())


def _at_once(self: Any, chunk: str) -> Any:
    written = detokenizing._BYTE_CHUNK.fullmatch(chunk)
    return (chunk if written is None else bytes([int(written[1], 16)]).decode(errors="replace"),)


def _first(self: Any, chunk: str) -> Any:
    return (self._decoder.decode([chunk]),)


def _all_pieces(self: Any, chunk: str) -> Any:
    return (chunk.replace(self._pattern, self._content),)


def _each_piece(self: Any, chunk: str) -> Any:
    return (chunk[1:] if self._start and chunk.startswith(self._content) else chunk,)


def _always(self: Any, chunk: str) -> Any:
    changed = self._decoder.decode([chunk])
    return (changed,) if changed else ()


def _step(name: str, method: Any) -> Plant:
    return lambda: mock.patch.object(getattr(detokenizing, name), "feed", method)


PLANTS: dict[str, Plant] = {
    "the prompt is not read, so that the first space is lost": lambda: mock.patch.object(
        Detokenizer, "_context", _without_prompt
    ),
    "what the prompt held back is said again": lambda: mock.patch.object(
        detokenizing, "_num_common", return_value=0
    ),
    "each byte is decoded by itself": _step("_ByteRuns", _at_once),
    "a chunk is always the first": _step("_Placed", _first),
    "equal tokens are kept": _step("_Distinct", _always),
    "a text that is replaced lies in one piece": _step("_ReplaceInText", _all_pieces),
    "every piece of a text is stripped": _step("_StripText", _each_piece),
    "what is held back is not said": lambda: mock.patch.object(
        detokenizing, "_ended", return_value=""
    ),
    "the end changes the steps": lambda: mock.patch.object(
        detokenizing._Step, "fork", lambda self: self
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str) -> None:
    def breaks(case: Decoding) -> bool:
        detokenizing._steps_of_state.cache_clear()  # without `fork`, a case would change the next
        with PLANTS[plant]():
            return not holds(case)

    options = settings(
        max_examples=2000, phases=[Phase.generate], deadline=None, database=None, derandomize=True
    )
    try:
        counterexample = find(decodings(), breaks, settings=options)
    except NoSuchExample:
        pytest.fail("no case was found")
    finally:
        detokenizing._steps_of_state.cache_clear()  # the bug may have changed what is kept
    assert holds(counterexample), "without the bug"


@pytest.mark.parametrize(
    "family", ["byte fallback, as Llama 2's and TinyLlama's", "metaspace, as T5's"]
)
def test_a_stop_text_whose_first_space_is_lost_is_found(family: str) -> None:
    token = VOCABULARY["▁the"]
    case = Decoding(tokenizer_of(FAMILIES[family]), [token], [token, token], hides=True)

    def is_stopped() -> bool:
        state, _ = complete(case, stop=(" the",))
        return (state.text, state.token_ids) == ("", [token])

    assert is_stopped()
    with PLANTS["the prompt is not read, so that the first space is lost"]():
        assert not is_stopped()
