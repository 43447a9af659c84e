"""A tokenizer and a chat template, from the metadata of a GGUF."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from weft.arguments.checks import is_number
from weft.arguments.json_text import Fields
from weft.errors import CheckpointError, ConfigError, ConfigWarning
from weft.stages.checkpoints.chat import TOKENS, ChatTemplate
from weft.stages.checkpoints.gguf.file import GgufFile
from weft.stages.checkpoints.tokenizer import tokenizer_failures

_PREFIX = "tokenizer.ggml."
# Types of tokens, as llama.cpp numbers them.
_CONTROL = 3
_USER_DEFINED = 4
# The keys of special tokens that are not named as in transformers. The format itself misspells
# "separator".
_IDS = {
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
}
# SentencePiece's character for a space.
_SPACE = "\u2581"

# Source: the regular expressions in the models' tokenizer.json, which are equal to llama.cpp's
# (llama-vocab.cpp).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@attrs.frozen
class _PreTokenizer:
    """How a byte-level BPE vocabulary splits a text into words.

    Args:
        splits: regular expressions, each of which splits the pieces of the one before.
        whole_words: whether a word that is a token becomes that token, regardless of the merges.
        add_bos: whether a text begins with the BOS token if the file does not say.
        nfc: whether a text is first normalised to NFC.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_LLAMA_BPE = _PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2 = _PreTokenizer((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),), nfc=True)
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "default": _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def tokenizer_of(file: GgufFile, call: str, *, strict: bool = False) -> Tokenizer | None:
    """The tokenizer of a file; None if it has none, or, with a `ConfigWarning`, if weft does not
    know it.

    Args:
        strict: whether an unknown tokenizer is an error.

    Raises:
        ConfigError: values of other types than the format says; or an unknown tokenizer, if
            `strict`.
        CheckpointError: tokens and merges from which no tokenizer can be built.
    """
    fields = _fields(file, call)
    build, unknown = _builder(fields)
    if unknown:
        problem = f"{file.path.name} has {unknown}"
        instead = "prompts of token ids, or a file that was converted anew"
        if strict:
            raise ConfigError(call, f"{problem}, which weft does not know", instead)
        text = (
            f"weft does not know the tokenizer of this file, and loads none: {problem}. Instead:"
            f" {instead}."
        )
        warnings.warn(text, ConfigWarning, stacklevel=3)
    if build is None:
        return None
    problem = f"the tokenizer of {file.path.name} cannot be built"
    with tokenizer_failures(
        CheckpointError, call, problem, f"copy {file.path.name} again from where it came from"
    ):
        return build(fields)


def chat_template_of(file: GgufFile, call: str) -> ChatTemplate | None:
    """The chat template of a file; None if it has none.

    Raises:
        ConfigError: it is not a string, or the id of a special token is not a token.
    """
    key = "tokenizer.chat_template"
    whole = Fields(file.metadata, call, file.path.name)
    source = whole.value(key, None, lambda one: isinstance(one, str | None), "a text")
    if source is None:
        return None
    fields = _fields(file, call)
    tokens = _strings(fields, "tokens")
    ids = {name: _token_id(fields, _IDS.get(name, f"{name}_id"), tokens) for name in TOKENS}
    return ChatTemplate(
        source, {name: tokens[token] for name, token in ids.items() if token is not None}
    )


def _fields(file: GgufFile, call: str) -> Fields:
    tokenizer_metadata = {
        name.removeprefix(_PREFIX): one
        for name, one in file.metadata.items()
        if name.startswith(_PREFIX)
    }
    return Fields(tokenizer_metadata, call, file.path.name, _PREFIX)


def _builder(fields: Fields) -> tuple[Callable[[Fields], Tokenizer] | None, str]:
    """The function that builds the tokenizer, or None; and the key that weft does not know, or an
    empty string."""
    kind = fields.raw.get("model")
    pre = fields.raw.get("pre")
    if kind in (None, "no_vocab", "none"):
        return None, ""
    if kind == "llama":
        return _sentencepiece, ""
    if kind != "gpt2":
        return None, f"{_PREFIX}model={kind!r:.60}"
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        return None, f"{_PREFIX}pre={pre!r:.60}" if "pre" in fields.raw else f"no {_PREFIX}pre"
    return _byte_level, ""


def _byte_level(fields: Fields) -> Tokenizer:
    """Byte-level BPE, as in GPT-2."""
    pre_tokenizer = _PRE_TOKENIZERS[fields.raw["pre"]]
    tokens = _strings(fields, "tokens")
    merges = [
        (left, right)
        # Byte-level tokens contain no space (it is written as another character), so the first
        # separates.
        for left, _, right in (one.partition(" ") for one in _strings(fields, "merges"))
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=pre_tokenizer.whole_words)
    )
    if pre_tokenizer.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(one), behavior="isolated") for one in pre_tokenizer.splits
    ]
    # Without its regular expression, which is GPT-2's: the splits before it take its place.
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special_tokens(tokenizer, fields, tokens, add_bos=pre_tokenizer.add_bos)


def _sentencepiece(fields: Fields) -> Tokenizer:
    """SentencePiece's BPE, with bytes for characters that are not tokens."""
    tokens = _strings(fields, "tokens")
    spaced = fields.flag("add_space_prefix", True)
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_by_score(fields, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    scheme: Any = "first" if spaced else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    # Removes the space that encoding puts before the first word.
    steps += [decoders.Strip(" ", left=1)] if spaced else []
    tokenizer.decoder = decoders.Sequence(steps)
    return _with_special_tokens(tokenizer, fields, tokens, add_bos=True)


def _merges_by_score(fields: Fields, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges in order: SentencePiece first merges the pair whose token has the highest score.
    Pairs of the same token, or of tokens with the same score, are in the order of transformers'
    `generate_merges`."""
    scores = fields.value("scores", [], lambda one: _is_list(one, float), "a list of numbers")
    fields.check(
        len(scores) == len(fields.raw["tokens"]),
        {"scores": len(scores)},
        "one score for each token",
    )
    pairs = []
    for token, index in vocab.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        merges = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        merges.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        pairs += [(scores[index], len(left), len(right), left, right) for left, right in merges]
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    return [(left, right) for *_, left, right in pairs]


def _with_special_tokens(
    tokenizer: Tokenizer, fields: Fields, tokens: Sequence[str], *, add_bos: bool
) -> Tokenizer:
    """The tokenizer with the tokens that are matched whole in any text, and with those that begin
    and end a text."""
    kinds = fields.value(
        "token_type", [], lambda one: _is_list(one, int), "a list of whole numbers"
    )
    fields.check(
        len(kinds) in (0, len(tokens)), {"token_type": len(kinds)}, "one type for each token"
    )
    pairs = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if token]
    # Not normalised: they are matched in the text as it is written, before NFC changes it.
    tokenizer.add_special_tokens(
        [
            AddedToken(content, normalized=False, special=True)
            for content, k in pairs
            if k == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(content, normalized=False) for content, kind in pairs if kind == _USER_DEFINED]
    )
    around = []
    for name, default in (("bos", add_bos), ("eos", False)):
        token = _token_id(fields, f"{name}_token_id", tokens)
        is_added = fields.flag(f"add_{name}_token", default and token is not None)
        fields.check(
            token is not None or not is_added,
            f"{name}_token_id",
            "the token that the file says to add",
        )
        around.append([(tokens[token], token)] if is_added and token is not None else [])
    begin, end = around
    if begin or end:
        single: Any = [*(text for text, _ in begin), "$A", *(text for text, _ in end)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[*begin, *end]
        )
    return tokenizer


def _strings(fields: Fields, name: str) -> list[str]:
    texts: list[str] = fields.value(name, None, lambda one: _is_list(one, str), "a list of texts")
    return texts


def _token_id(fields: Fields, name: str, tokens: Sequence[str]) -> int | None:
    def fits(one: Any) -> bool:
        return one is None or (type(one) is int and 0 <= one < len(tokens))

    token_id: int | None = fields.value(name, None, fits, f"one of {len(tokens)} tokens")
    return token_id


def _is_list(value: Any, kind: type) -> bool:
    def fits(one: Any) -> bool:
        if kind is float:
            # Finite: a file has scores in float32, whose largest number is about 3.4e38.
            return is_number(one, -3.5e38, 3.5e38)
        return type(one) is kind

    return isinstance(value, list) and all(map(fits, value))
