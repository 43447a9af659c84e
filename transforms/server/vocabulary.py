"""`Vocabulary`: the text and the bytes of single tokens."""

import functools
import json
from typing import Any

import attrs
from tokenizers import Tokenizer


@functools.cache
def _byte_of() -> dict[str, int]:
    """The bytes by the characters that stand for them in byte-level BPE (GPT-2, Radford et al. 2019)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _kinds(part: Any) -> set[str]:
    """The types of a tokenizer's part, and of the parts in it."""
    if isinstance(part, list):
        return set().union(*map(_kinds, part)) if part else set()
    if not isinstance(part, dict):
        return set()
    return {str(part.get("type"))}.union(*(_kinds(own) for own in part.values()))


@attrs.frozen(eq=False)
class Vocabulary:
    """The tokens of a model.

    Args:
        tokenizer: of the model.
        size: the number of tokens of the model, of which a tokenizer may have fewer.
        kind: `byte_level`, `byte_fallback` or `raw`: how the tokenizer writes bytes in its tokens.
    """

    tokenizer: Tokenizer
    size: int
    kind: str = attrs.field(init=False)
    _texts: dict[int, str] = attrs.field(init=False, factory=dict, repr=False)

    @kind.default
    def _kind_of_decoder(self) -> str:
        kinds = _kinds(json.loads(self.tokenizer.to_str()).get("decoder"))
        return "byte_level" if "ByteLevel" in kinds else "byte_fallback" if "ByteFallback" in kinds else "raw"

    @functools.cached_property
    def longest(self) -> int:
        """The most characters that a token stands for; a longer text has more tokens than one."""
        return max(len(self.written(token)) for token in range(self.size))

    def text(self, token: int) -> str:
        """The token as text, with U+FFFD for bytes that are no character by themselves."""
        if token not in self._texts:
            self._texts[token] = str(self.tokenizer.decode([token], skip_special_tokens=False))
        return self._texts[token]

    def written(self, token: int) -> str:
        """The token as the tokenizer's file writes it; empty for one that it does not have."""
        return self.tokenizer.id_to_token(token) or ""

    def bytes_of(self, token: int) -> list[int]:
        """The token's bytes."""
        written, table = self.written(token), _byte_of()
        if self.kind == "byte_level" and all(char in table for char in written):
            return [table[char] for char in written]
        if self.kind == "byte_fallback" and len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            return [int(written[3:5], 16)]
        return list(self.text(token).encode())
