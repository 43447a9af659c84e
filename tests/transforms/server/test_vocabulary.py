"""`Vocabulary.longest`: a text that is refused for its length alone has that many tokens."""

from hypothesis import example, given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.stages.checkpoints.loading import load
from weft.stages.checkpoints.tokenizer import token_ids
from weft.transforms.server.vocabulary import Vocabulary


def byte_level(
    normalizer: object = None, added: tuple[AddedToken, ...] = (), lacks: str = ""
) -> Tokenizer:
    own = Tokenizer(
        models.BPE(
            {
                char: id
                for id, char in enumerate(set(pre_tokenizers.ByteLevel.alphabet()) - {*lacks})
            },
            [],
        )
    )
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    if normalizer is not None:
        own.normalizer = normalizer
    own.add_tokens([*added])
    return own


def byte_fallback() -> Tokenizer:
    """As Llama 2's: spaces are ▁, and what has no token is bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    own = Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return own


def words() -> Tokenizer:
    own = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return own


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
        name: Vocabulary(own, own.get_vocab_size()).longest for name, own in UNKNOWN.items()
    } == dict.fromkeys(UNKNOWN)


@given(
    st.sampled_from(sorted(KNOWN)),
    st.text(max_size=40) | st.text("a \u0301\u0313\u0300\u0345\u03b1\u1100\u1161\u11a8"),
)
@example("composed", "\u03b1\u0313\u0300\u0345")
@settings(deadline=None)
def test_a_token_stands_for_no_more_characters(name: str, text: str) -> None:
    own = KNOWN[name]
    assert own is not None
    longest = Vocabulary(own, own.get_vocab_size()).longest
    assert longest is not None
    assert len(text) <= longest * len(own.encode(text).ids)


@given(st.text("a b\u0301"), st.integers(4000, 5000), st.booleans())
@settings(deadline=None, max_examples=20)
def test_long_texts_have_the_tokens_of_the_library(text: str, length: int, special: bool) -> None:
    own = byte_fallback()
    text = (text * length)[:length]
    assert token_ids(own, text, special=special) == own.encode(text, add_special_tokens=special).ids
