"""`Matcher.allowed` against all words of a drawn language, for any tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from weft.transforms.server.grammars.compiling import grammar_of
from weft.transforms.server.grammars.matching import Matchers, Tokens

pytest.importorskip("llguidance")

words = st.text("abc", max_size=4)
# Around the words of 32 bits of a mask; the vocabularies of most models fill the last word.
sizes = st.builds(lambda count, more: 32 * count + more, st.integers(1, 4), st.integers(-1, 1))
# A model may have more rows than its tokenizer has tokens: those are of no text.
vocabularies = sizes.flatmap(
    lambda size: st.lists(st.text("abc", max_size=3).map(str.encode), min_size=size, max_size=size)
)


def allowed(bits: Sequence[int], size: int) -> set[int]:
    """The tokens whose bits are set."""
    assert len(bits) == -(-size // 32)
    return {token for token in range(size) if bits[token // 32] >> (token % 32) & 1}


@given(st.sets(words, min_size=1, max_size=6), vocabularies, st.data())
@settings(deadline=None)
def test_the_tokens_that_lead_to_a_word(
    language: set[str], tokens: list[bytes], data: st.DataObject
) -> None:
    size = len(tokens)
    stops = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=2).map(sorted))
    matchers = Matchers(Tokens(tokens, stops, stops))
    matcher = matchers.matcher(grammar_of("regex", "|".join(sorted(language))))
    text = ""
    while True:
        expected = {
            token
            for token in range(size)
            if token not in stops
            and tokens[token]
            and any(word.startswith(text + tokens[token].decode()) for word in language)
        }
        if text in language:
            expected |= {*stops}
        if not expected:
            return
        assert allowed(matcher.allowed().tolist(), size) == expected
        token = data.draw(st.sampled_from(sorted(expected)))
        if token in stops:
            return
        matcher.accept(token)
        text += tokens[token].decode()
