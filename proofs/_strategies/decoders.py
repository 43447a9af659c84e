"""Tokenizers with random decoders, and tokens for them: `decodings()`.

These tokenizers only decode; nothing encodes with them.
"""

from collections.abc import Mapping
from typing import Any

import attrs
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

# Characters of one to four bytes in UTF-8, including those that decoders remove or add.
CHARACTERS = "abé☂👍 ▁\n"
# The first and the last character of each length in UTF-8, and those around the surrogates: their
# bytes are the bounds of what may follow what.
BOUNDS = "\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff"
WORDS = (
    *(
        "the",
        "re",
        "do not",
        "n't",
        "'s",
        ".",
        ",",
        " .",
        "a  b",
        "  ",
        "aa",
        "aba",
        "ab",
        "\ufffd",
        "",
    ),
    *(
        "▁",
        "▁▁",
        "▁the",
        "▁a▁",
        "##re",
        "##",
        "</w>",
        "the</w>",
        "a</w>b",
        "<pad>",
        "<pad>a",
        "|",
        "a|b",
    ),
    *("<0x+F>", "<0x6", "1>", "<0xé>"),
)


def _byte_level() -> list[str]:
    """The characters that stand for bytes of `CHARACTERS` and `BOUNDS`, and eight that stand for
    others, in the alphabet of byte-level tokenizers."""
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = map(byte_level.pre_tokenizer.pre_tokenize_str, CHARACTERS + BOUNDS)
    spelled = [char for [(written, _)] in pieces for char in written]
    unspelled = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {*spelled})
    return [*dict.fromkeys(spelled), *unspelled[-8:]]


_RAW = sorted({*(CHARACTERS + BOUNDS).encode(), 0xFF})
_BYTE_LEVEL = _byte_level()
# Texts that have a meaning for some decoder, and bytes in the two spellings of tokens: `<0xE2>` and
# the byte-level alphabet.
_TEXTS = (*CHARACTERS, *WORDS, *(f"<0x{byte:02X}>" for byte in _RAW), *_BYTE_LEVEL)
VOCABULARY = {text: id for id, text in enumerate(dict.fromkeys(_TEXTS))}
BYTES = [id for text, id in VOCABULARY.items() if text.startswith("<0x")]
BYTE_LEVEL = [VOCABULARY[char] for char in _BYTE_LEVEL]
_PATTERNS = st.sampled_from(["▁", "a", "aa", "aba", "ab", "</w>", " ", "  ", "☂"])
_CONTENTS = st.sampled_from(["", " ", "a", "ab", "▁", "xyz"])
_REGEXES = st.sampled_from(["a+", "^a", "a$", " (?=a)"]).map(Regex)
_REPLACES = st.builds(decoders.Replace, _PATTERNS | _PATTERNS | _REGEXES, _CONTENTS)
# `Strip` never strips both sides here: `tokenizers` panics where the two stripped parts meet.
_STRIPS = st.sampled_from([(1, 0), (3, 0), (0, 1), (0, 0)]).flatmap(
    lambda sides: st.builds(
        decoders.Strip, st.sampled_from([" ", "▁", "a"]), st.just(sides[0]), st.just(sides[1])
    )
)
# The decoders of each kind, by the name of the class.
SIMPLE: Mapping[str, st.SearchStrategy[Any]] = {
    "BPEDecoder": st.builds(decoders.BPEDecoder, st.sampled_from(["</w>", "a"])),
    "ByteFallback": st.builds(decoders.ByteFallback),
    "ByteLevel": st.builds(decoders.ByteLevel),
    "CTC": st.builds(decoders.CTC, cleanup=st.booleans()),
    "Fuse": st.builds(decoders.Fuse),
    "Metaspace": st.builds(
        decoders.Metaspace,
        prepend_scheme=st.sampled_from(["always", "never", "first"]),
        split=st.booleans(),
    ),
    "Replace": _REPLACES,
    "Strip": _STRIPS,
    "WordPiece": st.builds(decoders.WordPiece, cleanup=st.booleans()),
}
_FALLBACK = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
# Decoders of released models.
FAMILIES: Mapping[str, Any] = {
    "byte level, as GPT-2's, Llama 3's and Qwen's": decoders.ByteLevel(),
    "byte fallback, as Llama 2's and TinyLlama's": decoders.Sequence(_FALLBACK),
    "byte fallback that keeps spaces, as Gemma's": decoders.Sequence(_FALLBACK[:3]),
    "metaspace, as T5's": decoders.Metaspace(prepend_scheme="first"),
    "word pieces, as BERT's": decoders.WordPiece(),
    "ends of words, as GPT's": decoders.BPEDecoder(),
    "CTC, as Wav2Vec2's": decoders.CTC(),
}
CHAINS = st.lists(st.one_of(*SIMPLE.values()), min_size=1, max_size=4).map(decoders.Sequence)
# Chains that begin with `Fuse`: the decoders after it see one growing text rather than tokens.
_TEXT_CHAINS = st.builds(
    lambda change, rest: decoders.Sequence([decoders.Fuse(), change, *rest]),
    _REPLACES | _STRIPS,
    st.lists(st.one_of(*SIMPLE.values()), max_size=2),
)
_SHAPES: Mapping[str, st.SearchStrategy[Any]] = {
    "none": st.none(),
    "released": st.sampled_from([*FAMILIES.values()]),
    "simple": st.one_of(*SIMPLE.values()),
    "chain": CHAINS | st.lists(CHAINS, max_size=2).map(decoders.Sequence),
    "text": _TEXT_CHAINS,
}
# The shape is drawn first. Hypothesis flattens `one_of`, which would draw each of the many simple
# kinds as often as all chains together.
DECODERS = st.sampled_from(sorted(_SHAPES)).flatmap(_SHAPES.__getitem__)


def kinds() -> set[str]:
    """The kinds of decoders that the package `tokenizers` has."""
    classes = {name: cls for name, cls in vars(decoders).items() if isinstance(cls, type)}
    return {
        name
        for name, cls in classes.items()
        if issubclass(cls, decoders.Decoder) and cls is not decoders.Decoder
    }


def tokenizer_of(decoder: Any) -> Tokenizer:
    """A tokenizer with this decoder, whose last two tokens are added ones, the second of them
    special."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    tokenizer.add_tokens([AddedToken("<added>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@attrs.frozen(eq=False)
class Decoding:
    """A tokenizer, a prompt, and the tokens that follow it.

    Args:
        hides: whether special tokens are left out of the text.
    """

    tokenizer: Tokenizer = attrs.field(repr=lambda value: str(value.decoder))
    prompt: list[int]
    token_ids: list[int]
    hides: bool

    def decode(self, count: int | None = None) -> str:
        """The text of the first `count` tokens (None: all): the text of the prompt and these
        tokens, without its longest common prefix with the text of the prompt."""
        before = str(self.tokenizer.decode(self.prompt, skip_special_tokens=self.hides))
        ids = [*self.prompt, *self.token_ids[:count]]
        whole = str(self.tokenizer.decode(ids, skip_special_tokens=self.hides))
        # A slow definition: all is decoded anew. The incremental detokenizer shares no code with
        # it.
        place = 0
        while place < min(len(before), len(whole)) and before[place] == whole[place]:
            place += 1
        return whole[place:]


_COUNT = len(VOCABULARY)
# The greatest id is one beyond the last added token, so no tokenizer has it.
TOKENS = st.one_of(st.integers(0, _COUNT + 2), st.sampled_from(BYTES))
# Random bytes would seldom make a character, and random tokens seldom repeat, so both have
# strategies of their own.
_PIECES = st.one_of(
    st.text("ab ▁", min_size=1, max_size=8).map(lambda text: [VOCABULARY[char] for char in text]),
    st.lists(TOKENS, min_size=1, max_size=6),
    st.lists(st.sampled_from(BYTES), min_size=1, max_size=12),
    st.tuples(TOKENS, st.integers(1, 20)).map(lambda pair: [pair[0]] * pair[1]),
    st.text(CHARACTERS, min_size=1, max_size=5).map(
        lambda text: [VOCABULARY[f"<0x{byte:02X}>"] for byte in text.encode()]
    ),
    st.lists(st.sampled_from(BYTE_LEVEL), min_size=1, max_size=12),
)


def _joined(parts: list[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


def decodings(of: st.SearchStrategy[Any] = DECODERS) -> st.SearchStrategy[Decoding]:
    """Random decoders, with special tokens, tokens that do not exist, parts of characters, and
    invalid bytes.

    Args:
        of: draws the decoder.
    """
    prompts = st.lists(_PIECES, max_size=3).map(_joined)
    completions = st.lists(_PIECES, min_size=1, max_size=5).map(_joined)
    return st.builds(Decoding, of.map(tokenizer_of), prompts, completions, st.booleans())
