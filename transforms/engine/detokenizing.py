"""Text of tokens as they come: never a part of a character, and never an error, whatever is said."""

import attrs
from tokenizers import Tokenizer

_SPLIT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""
_MOST_HELD = 8
"""Tokens that wait for a character to be completed; of UTF-8's four bytes the last three tokens may hold some."""


@attrs.define(eq=False)
class Detokenizer:
    """The text of a completion, token by token, without special tokens.

    A token is decoded behind those that were shown last, for what it reads as depends on them (a space, a part of a
    word). One that ends amid a character waits for the next. Bytes that no token can make a character of any more are
    shown as U+FFFD; where a decoder would for their sake take back what was shown before, it is decoded from there on.

    Args:
        tokenizer: whose tokens; None: they have no text.
    """

    tokenizer: Tokenizer | None
    _before: list[int] = attrs.field(factory=list)
    _held: list[int] = attrs.field(factory=list)

    def add(self, token: int, *, special: bool = False) -> str:
        """The text that is whole with this token; a special one has none."""
        if special:
            return ""
        self._held.append(token)
        text = self._decode(self._before + self._held)
        if not text.endswith(_SPLIT):
            return self._show(len(self._held))
        return self._show(len(self._held) - 3) if len(self._held) > _MOST_HELD else ""

    def end(self) -> str:
        """The rest: a character that was never completed is one that is wrong."""
        return self._show(len(self._held))

    def _show(self, count: int) -> str:
        shown = self._held[:count]
        before, text = self._decode(self._before), self._decode(self._before + shown)
        if not text.startswith(before):
            new = self._decode(shown)
        elif not (new := text[len(before) :]):
            self._held = self._held[-_MOST_HELD:]
            return ""  # such as the space that a text does not begin with, which the next token is told by
        self._before, self._held = shown, self._held[count:]
        return new

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None or not token_ids:
            return ""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def special_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens of a tokenizer that no text shows."""
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, how in added.items() if how.special)
