"""`Vocabulary`: the texts and the bytes of single tokens."""

import functools
import json
from collections.abc import Sequence
from typing import Any

import attrs
from tokenizers import Tokenizer

from weft.transforms.engine.detokenizing import byte_of, special_ids, text_between, text_offsets


def _parts(part: Any) -> list[dict[str, Any]]:
    """All objects in a part of the tokenizer's JSON, at any depth."""
    if isinstance(part, list):
        return [each for child in part for each in _parts(child)]
    if not isinstance(part, dict):
        return []
    return [part, *(each for child in part.values() for each in _parts(child))]


def _types(part: Any) -> set[Any]:
    return {component.get("type") for component in _parts(part)}


def _most_joined(normalizer: Any) -> int | None:
    """The most characters that a normalizer may turn into one; None if that is not known."""
    types = _types(normalizer)
    if not types <= {"Sequence", "Prepend", "Replace", "NFD", "NFKD", "NFC", "ByteLevel", None}:
        return None
    for replacement in (each for each in _parts(normalizer) if each.get("type") == "Replace"):
        written = replacement["pattern"].get("String")
        if written is None or len(replacement["content"]) < len(written):
            return None
    return 4 if "NFC" in types else 1  # four characters may compose to one, as in U+1F82


@attrs.frozen(eq=False)
class Vocabulary:
    """The tokens of a model.

    Args:
        tokenizer: the model's tokenizer.
        size: the number of tokens of the model; the tokenizer may have fewer.
    """

    tokenizer: Tokenizer
    size: int
    _file: dict[str, Any] = attrs.field(init=False, repr=False)
    _texts: dict[int, str] = attrs.field(init=False, factory=dict, repr=False)

    @_file.default
    def _read(self) -> dict[str, Any]:
        file: dict[str, Any] = json.loads(self.tokenizer.to_str())
        # Without its two large lists, which nothing here needs.
        file["model"] = {
            name: value for name, value in file["model"].items() if name not in ("vocab", "merges")
        }
        return file

    @functools.cached_property
    def kind(self) -> str:
        """How tokens spell bytes: `byte_level`, `byte_fallback` or `raw`."""
        kinds = _types(self._file.get("decoder"))
        if "ByteLevel" in kinds:
            return "byte_level"
        if "ByteFallback" in kinds:
            return "byte_fallback"
        return "raw"

    @functools.cached_property
    def longest(self) -> int | None:
        """The most characters of a text that one token can stand for.

        None: there is no bound, because the tokenizer drops spaces, or has one token for all
        unknown words.
        """
        file = self._file
        model = self._file["model"]
        joined = _most_joined(file.get("normalizer"))
        dropped = any("Removed" in entry.values() for entry in _parts(file.get("pre_tokenizer")))
        dropped |= any(
            entry.get("lstrip") or entry.get("rstrip") for entry in file.get("added_tokens", ())
        )
        if self.kind == "byte_level":
            knows_all = all(self.tokenizer.token_to_id(char) is not None for char in byte_of())
        else:
            knows_all = self.kind == "byte_fallback" and bool(model.get("byte_fallback"))
        spaces = _types(file.get("pre_tokenizer")) & {
            "Whitespace",
            "WhitespaceSplit",
            "BertPreTokenizer",
        }
        if joined is None or dropped or spaces or not knows_all:
            return None
        return joined * max(len(self.written(token)) for token in range(self.size))

    def text(self, token: int) -> str:
        """The token's text as between other tokens: with its space, and with U+FFFD for bytes that
        are no whole character."""
        if token not in self._texts:
            self._texts[token] = text_between(self.tokenizer, token)
        return self._texts[token]

    def text_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """For each token, the offset of its text in the text of them all, which omits special
        tokens."""
        return text_offsets(self.tokenizer, token_ids, special_ids(self.tokenizer))

    def written(self, token: int) -> str:
        """The token as written in the tokenizer's file; empty if the tokenizer does not have it."""
        return self.tokenizer.id_to_token(token) or ""

    def bytes_of(self, token: int) -> list[int]:
        """The token's bytes."""
        written = self.written(token)
        table = byte_of()
        if self.kind == "byte_level" and all(char in table for char in written):
            return [table[char] for char in written]
        if (
            self.kind == "byte_fallback"
            and len(written) == 6
            and written.startswith("<0x")
            and written.endswith(">")
        ):
            return [int(written[3:5], 16)]
        return list(self.text(token).encode())
