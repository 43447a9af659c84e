"""Tokenizers of GGUFs: vocabularies that the tokenizers library trained, against that tokenizer,
llama.cpp's regular expressions and transformers' reading of the file."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

import weft
from weft.errors import ConfigError, ConfigWarning, RequestError
from weft.stages.checkpoints.gguf.file import open_gguf
from weft.stages.checkpoints.gguf.tokenizer import tokenizer_of

pytest.importorskip("gguf")

from gguf import GGMLQuantizationType
from gguf_files import quantized, scrambled, write_file, write_model

SAMPLES = (
    (
        "The quick brown fox doesn't jump; it's 12345 years OLD, isn't it?\r\n\n  And WE'LL see:"
        " 3.14159!"
    ),
    "Der Übermut der Größe, señor, ça va où? Ångström, naïve",
    "Съешь ещё этих мягких французских булок, да выпей чаю 2024",
    "いろはにほへと ちりぬるを\u3002漢字かな交じり文\u3001\uff11\uff12\uff13",
    "天地玄黃\uff0c宇宙洪荒\u3002日月盈昃\uff0c辰宿列張\u3002",
    "עברית מימין לשמאל ומספר 77, العربية من اليمين ١٢٣",
    "हिन्दी में लिखा हुआ पाठ, ไทยไม่มีเว้นวรรค, 한국어 문장입니다.",
    "def f(x):\n\treturn x ** 2  # 🙂👩‍👩‍👧 e\u0301 \u00a0 ½ Ⅳ x² <|x|>",
)
SPECIAL = ["<|begin|>", "<|end|>", "<|pad|>", "<tool>"]
# The last one is a token of the user's, which stays in a text.
KINDS = [3, 3, 3, 4]
# llama-vocab.cpp of llama.cpp, `llm_tokenizer_bpe`, which matches one after the other; without
# `(?i:`, as there.
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA_CPP = {
    "llama-bpe": [rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"],
    "qwen2": [rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"],
    "smollm": [r"\p{N}", _OF_GPT2],
    "gpt-2": [_OF_GPT2],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _OF_GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}
# Letters that Python knows: the libraries' tables of Unicode differ in newer ones.
letters = st.characters(exclude_categories=("Cs", "Cn"))
texts = st.lists(
    st.sampled_from([*SAMPLES, *SPECIAL, " ", "  ", "\n", "\t ", "'S", "'ll", "123", "e\u0301"])
    | st.text(letters, max_size=8)
    | st.builds(lambda text, at: text[at : at + 9], st.sampled_from(SAMPLES), st.integers(0, 40)),
    max_size=6,
).map("".join)


def their_pre_tokenizer(pre: str) -> Any:
    """The part of the models' own tokenizer.json."""
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm")
    )
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre == "gpt-2":
        return byte_level
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in LLAMA_CPP[pre]
    ]
    return pre_tokenizers.Sequence([*splits, byte_level])


def trained(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = their_pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SAMPLES, trainer)
    tokenizer.add_special_tokens(SPECIAL[:3])
    tokenizer.add_tokens(SPECIAL[3:])
    return tokenizer


def metadata_of(tokenizer: Tokenizer, model: str, **more: Any) -> dict[str, Any]:
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = [dict(zip(SPECIAL, KINDS, strict=True)).get(token, 1) for token in tokens]
    named = {"model": model, "tokens": tokens, "token_type": kinds, **more}
    named |= {"bos_token_id": vocab[SPECIAL[0]], "eos_token_id": vocab[SPECIAL[1]]}
    return {f"tokenizer.ggml.{name}": value for name, value in named.items()}


def merges_of(tokenizer: Tokenizer) -> list[str]:
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


@pytest.fixture(scope="module", params=LLAMA_CPP)
def byte_level(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Tokenizer]:
    file = tmp_path_factory.mktemp("bpe") / "a.gguf"
    tokenizer = trained(request.param)
    more = {"pre": request.param, "merges": merges_of(tokenizer), "add_bos_token": False}
    write_file(file, "llama", metadata_of(tokenizer, "gpt2", **more), {})
    return request.param, file, tokenizer


@given(texts)
def test_byte_level_bpe(byte_level: tuple[str, Path, Tokenizer], text: str) -> None:
    pre, file, theirs = byte_level
    ours = opened(file)
    assert ours.encode(text).ids == theirs.encode(text).ids
    assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
    if pre == "qwen2":
        return  # llama.cpp does not normalise a text
    pieces = [text]
    for pattern in LLAMA_CPP[pre]:
        pieces = [piece for one in pieces for piece in cut(pattern, one)]
    assert ours.pre_tokenizer is not None
    words = ours.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in words] == pieces


def cut(pattern: str, text: str) -> list[str]:
    """The matches in a text, and what is between them."""
    pieces = []
    at = 0
    for match in regex.finditer(pattern, text):
        pieces += [text[at : match.start()], match.group()]
        at = match.end()
    return [piece for piece in (*pieces, text[at:]) if piece]


_OPENED: dict[Path, Tokenizer] = {}


def opened(file: Path) -> Tokenizer:
    if file not in _OPENED:
        tokenizer = tokenizer_of(open_gguf(file, "open"), "open", strict=True)
        assert tokenizer is not None
        _OPENED[file] = tokenizer
    return _OPENED[file]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary with scores and bytes, as of SentencePiece."""
    tokenizer = Tokenizer(models.BPE(fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    words = [
        " ".join(random.Random(seed).sample(" ".join(SAMPLES).split(), 20)) for seed in range(20)
    ]
    tokenizer.train_from_iterator([*SAMPLES, *words], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    metadata = metadata_of(
        tokenizer, "llama", scores=[float(-index) for index in range(tokenizer.get_vocab_size())]
    )
    metadata["tokenizer.ggml.token_type"][:257] = [2] + [6] * 256
    file = tmp_path_factory.mktemp("spm") / "a.gguf"
    write_file(file, "llama", metadata | {"tokenizer.ggml.unknown_token_id": 0}, {})
    return file


@pytest.fixture(scope="module")
def theirs(scored: Path) -> Any:
    return AutoTokenizer.from_pretrained(scored.parent, gguf_file=scored.name)


@given(texts)
def test_sentencepiece(scored: Path, theirs: Any, text: str) -> None:
    ours = opened(scored)
    ids = theirs(text)["input_ids"]
    assert ours.encode(text).ids == ids
    # Where the file is silent, such a text begins with BOS
    assert ids[0] == ours.token_to_id(SPECIAL[0])
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
@pytest.mark.parametrize("add", [(None, None), (True, False), (False, True), (True, True)])
def test_what_stands_around_a_text(
    pre: str, add: tuple[bool | None, bool | None], tmp_path: Path
) -> None:
    tokenizer = trained(pre)
    flags = {
        f"add_{name}_token": flag
        for name, flag in zip(("bos", "eos"), add, strict=True)
        if flag is not None
    }
    write_file(
        tmp_path / "a.gguf",
        "llama",
        metadata_of(tokenizer, "gpt2", pre=pre, merges=merges_of(tokenizer), **flags),
        {},
    )
    ours, (begin, end) = (
        opened(tmp_path / "a.gguf"),
        (tokenizer.token_to_id(token) for token in SPECIAL[:2]),
    )
    has_begin = pre == "llama-bpe" if add[0] is None else add[0]  # llama.cpp's own default
    inner = tokenizer.encode("Hello 12").ids
    assert ours.encode("Hello 12").ids == [begin] * has_begin + inner + [end] * bool(add[1])
    assert ours.encode("Hello 12", add_special_tokens=False).ids == inner


def test_a_word_of_llama_3_is_the_token_that_it_is(tmp_path: Path) -> None:
    """Whatever the merges make of it: `ignore_merges` of its tokenizer.json."""
    tokenizer = trained("llama-bpe")
    metadata = metadata_of(
        tokenizer, "gpt2", pre="llama-bpe", merges=merges_of(tokenizer), add_bos_token=False
    )
    metadata["tokenizer.ggml.tokens"].append("zqxzqx")
    metadata["tokenizer.ggml.token_type"].append(1)
    write_file(tmp_path / "a.gguf", "llama", metadata, {})
    assert opened(tmp_path / "a.gguf").encode("zqxzqx").ids == [
        len(metadata["tokenizer.ggml.tokens"]) - 1
    ]


UNKNOWN = {
    "tokenizer.ggml.pre='tekken'": {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"},
    "no tokenizer.ggml.pre": {"tokenizer.ggml.model": "gpt2"},
    "tokenizer.ggml.model='t5'": {"tokenizer.ggml.model": "t5"},
}


@pytest.mark.parametrize("problem", UNKNOWN)
def test_an_unknown_tokenizer_leaves_token_ids(problem: str, tmp_path: Path) -> None:
    write_model(
        tmp_path / "a.gguf",
        "llama",
        scrambled("llama"),
        quantized(GGMLQuantizationType.F32),
        **UNKNOWN[problem],
    )
    with pytest.warns(
        ConfigWarning,
        match=rf"does not know the tokenizer of this file.*: a.gguf has {problem}\. Instead",
    ):
        model = weft.load(tmp_path, "cpu")
    assert len(weft.generate(model, [[1, 2]], max_tokens=2)[0].token_ids) == 2
    with pytest.raises(
        RequestError, match=r"a.gguf holds no tokenizer that weft knows\n  instead: pass token ids"
    ):
        model.encode("text")
    with pytest.raises(ConfigError, match=rf"a.gguf has {problem}, which weft does not know"):
        weft.load(tmp_path, "cpu", strict=True)


def test_values_of_other_types(tmp_path: Path) -> None:
    tokenizer = trained("gpt-2")
    sound = metadata_of(tokenizer, "gpt2", pre="gpt-2", merges=merges_of(tokenizer))
    for name, wrong, problem in (
        ("tokens", 3, "tokens=3"),
        ("merges", "a b", "merges='a b'"),
        ("token_type", [1, 1], "token_type=2"),
        ("bos_token_id", 10**6, "bos_token_id=1000000"),
        ("add_bos_token", 1, "add_bos_token=1"),
    ):
        write_file(tmp_path / "a.gguf", "llama", sound | {f"tokenizer.ggml.{name}": wrong}, {})
        file = open_gguf(tmp_path / "a.gguf", "open")
        with pytest.raises(ConfigError, match=rf"saw: a.gguf has tokenizer.ggml.{problem}"):
            tokenizer_of(file, "open")
