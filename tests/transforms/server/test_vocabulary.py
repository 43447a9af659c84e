"""`Vocabulary.longest`: a text that is refused for its length alone has that many tokens."""

from hypothesis import example, given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.stages.checkpoints.loading import load
from weft.stages.checkpoints.tokenizer import token_ids
from weft.transforms.server.vocabulary import Vocabulary


def byte_level(
    normalizer: object = None, added: tuple[AddedToken, ...] = (), lacks: str = ""
) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            {
                char: id
                for id, char in enumerate(set(pre_tokenizers.ByteLevel.alphabet()) - {*lacks})
            },
            [],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([*added])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's: spaces are ▁, and what has no token is bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


KNOWN = {
    "the demo": load("demo", "cpu").tokenizer,
    "composed": byte_level(normalizers.NFC()),
    "decomposed": byte_level(normalizers.NFD()),
    "bytes": byte_fallback(),
}
UNKNOWN = {
    "words": words(),
    "lower": byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
    "joined spaces": byte_level(normalizers.Replace(Regex(" +"), " ")),
    "shortened": byte_level(normalizers.Replace("aaa", "a")),
    "compatible": byte_level(normalizers.NFKC()),
    "a byte is dropped": byte_level(lacks="a"),
    "spaces before a mask": byte_level(added=(AddedToken("<mask>", lstrip=True),)),
}


def test_where_a_text_may_shrink_no_length_is_refused() -> None:
    assert {
        name: Vocabulary(tokenizer, tokenizer.get_vocab_size()).longest
        for name, tokenizer in UNKNOWN.items()
    } == dict.fromkeys(UNKNOWN)


@given(
    st.sampled_from(sorted(KNOWN)),
    st.text(max_size=40) | st.text("a \u0301\u0313\u0300\u0345\u03b1\u1100\u1161\u11a8"),
)
@example("composed", "\u03b1\u0313\u0300\u0345")
@settings(deadline=None)
def test_a_token_stands_for_no_more_characters(name: str, text: str) -> None:
    tokenizer = KNOWN[name]
    assert tokenizer is not None
    longest = Vocabulary(tokenizer, tokenizer.get_vocab_size()).longest
    assert longest is not None
    assert len(text) <= longest * len(tokenizer.encode(text).ids)


@given(st.text("a b\u0301"), st.integers(4000, 5000), st.booleans())
@settings(deadline=None, max_examples=20)
def test_long_texts_have_the_tokens_of_the_library(text: str, length: int, special: bool) -> None:
    tokenizer = byte_fallback()
    text = (text * length)[:length]
    assert (
        token_ids(tokenizer, text, special=special)
        == tokenizer.encode(text, add_special_tokens=special).ids
    )
