"""`Detokenizer`: decodes a completion token by token, to the text that the tokenizer makes of
prompt and completion together.

A decoder of the `tokenizers` package is a chain of steps. Each step turns a list of chunks into
another list; the first list holds the tokens, and the last one, joined, is the text. Here each step
takes chunks one by one, and returns the chunks that no later token can change. So the cost of a
token does not depend on how many tokens came before it.
"""

import codecs
import copy
import functools
import itertools
import json
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, Self

from tokenizers import Tokenizer, decoders

# The character that a decoder writes for bytes that are not, or not yet, a character.
REPLACEMENT = "\ufffd"
# The number of tokens, at the beginning and at the end of a prompt, that can change the text of
# what follows.
_CONTEXT = 16
# If at most this many chunks are held back, `num_chars` counts their text too.
_MOST_LOOKED_AT = 256
# A chunk that no decoder changes, to stand before another one.
_NEUTRAL = "\0"
# A chunk that `ByteFallback` reads as a byte. It parses the digits with Rust's integer parser,
# which accepts a plus sign.
_BYTE_CHUNK = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


@functools.cache
def byte_of() -> dict[str, int]:
    """The byte that each character stands for in byte-level BPE (GPT-2, Radford et al. 2019)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


def special_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """The special tokens of a tokenizer, which the text omits."""
    if tokenizer is None:
        added = {}
    else:
        added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, how in added.items() if how.special)


def overlap(text: str, pattern: str) -> int:
    """Length of the longest proper prefix of `pattern` that `text` ends with."""
    tail = text[max(len(text) - len(pattern) + 1, 0) :]
    start = tail.find(pattern[0])
    while start >= 0 and not pattern.startswith(tail[start:]):
        start = tail.find(pattern[0], start + 1)
    if start >= 0:
        return len(tail) - start
    return 0


class _Step:
    """A decoder of a chain, fed one chunk at a time. This base class changes nothing, as `Fuse`.

    Attributes:
        needs_all: whether its state depends on more than the first and the last few chunks.
    """

    needs_all = False

    def feed(self, chunk: str) -> Sequence[str]:
        """Take a chunk; returns the chunks of the result that no later chunk can change."""
        return (chunk,)

    def end(self) -> Sequence[str]:
        """The remaining chunks of the result, if no more are fed. The state does not change."""
        return ()

    @property
    def num_held(self) -> int:
        """Chunks that were fed but whose text may still change."""
        return 0

    def fork(self) -> Self:
        """An independent copy of the step in its present state."""
        return copy.copy(self)


class _Spaced(_Step):
    """What a tokenizer without a decoder does: it puts spaces between tokens."""

    _is_first = True

    def feed(self, chunk: str) -> Sequence[str]:
        if self._is_first:
            self._is_first = False
            return (chunk,)
        return (f" {chunk}",)


class _Each(_Step):
    """A decoder that changes each chunk by itself: `Replace` and `Strip`. For a text in pieces, a
    decoder that changes each character by itself."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def feed(self, chunk: str) -> Sequence[str]:
        return (self._decoder.decode([chunk]),)


class _Placed(_Step):
    """A decoder that treats the first chunk differently from the others: `Metaspace` and
    `WordPiece`."""

    _is_first = True

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def feed(self, chunk: str) -> Sequence[str]:
        if self._is_first:
            self._is_first = False
            return (self._decoder.decode([chunk]),)
        # The empty chunk takes the first place, and adds no text.
        return (self._decoder.decode(["", chunk]),)


class _LastDiffers(_Step):
    """A decoder that treats the last chunk differently from the others: `BPEDecoder`."""

    _last: str | None = None

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def feed(self, chunk: str) -> Sequence[str]:
        before = self._last
        self._last = chunk
        if before is None:
            return ()
        return (self._decoder.decode([before, ""]),)

    def end(self) -> Sequence[str]:
        if self._last is None:
            return ()
        return (self._decoder.decode([self._last]),)

    @property
    def num_held(self) -> int:
        return int(self._last is not None)


class _Distinct(_Step):
    """A decoder that drops a chunk equal to the previous one, and chunks that become empty:
    `CTC`."""

    _before: str | None = None

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def feed(self, chunk: str) -> Sequence[str]:
        if chunk == self._before:
            return ()
        self._before = chunk
        changed = self._decoder.decode([chunk])
        if changed:
            return (changed,)
        return ()


class _ByteRuns(_Step):
    """`ByteFallback`: a run of bytes becomes one chunk if all of it is valid UTF-8, and otherwise
    U+FFFD for each byte. So a run is held back until it ends, or until it can no longer be
    valid."""

    def __init__(self) -> None:
        self._run = bytearray()
        self._num_whole = 0  # leading bytes of the run that are whole characters
        self._is_broken = False

    def feed(self, chunk: str) -> Sequence[str]:
        written = _BYTE_CHUNK.fullmatch(chunk)
        if written is None:
            ended = self.end()
            self._run.clear()
            self._num_whole = 0
            self._is_broken = False
            return (*ended, chunk)
        if self._is_broken:
            return (REPLACEMENT,)
        self._run.append(int(written[1], 16))
        try:
            self._run[self._num_whole :].decode()
            self._num_whole = len(self._run)
        except UnicodeDecodeError as error:
            # With that reason, more bytes can still complete the character.
            if error.reason != "unexpected end of data":
                self._is_broken = True
                return (REPLACEMENT,) * len(self._run)
        return ()

    def end(self) -> Sequence[str]:
        if self._is_broken or not self._run:
            return ()
        if self._num_whole < len(self._run):
            return (REPLACEMENT,) * len(self._run)
        return (self._run.decode(),)

    @property
    def num_held(self) -> int:
        if self._is_broken:
            return 0
        return len(self._run)

    def fork(self) -> Self:
        other = copy.copy(self)
        # `copy.copy` would share the bytes, which `feed` changes.
        other._run = self._run[:]
        return other


class _ByteLevel(_Step):
    """`ByteLevel`: the characters of a chunk stand for bytes; if one of them does not, the chunk is
    plain text."""

    _left = b""

    def feed(self, chunk: str) -> Sequence[str]:
        table = byte_of()
        try:
            raw = bytes([table[char] for char in chunk])
        except KeyError:
            raw = chunk.encode()
        raw = self._left + raw
        text, num_read = codecs.utf_8_decode(raw, "replace", False)
        self._left = raw[num_read:]
        if text:
            return (text,)
        return ()

    def end(self) -> Sequence[str]:
        # Python holds back half of a surrogate, too, which stands for two characters.
        text = self._left.decode(errors="replace")
        if text:
            return (text,)
        return ()

    @property
    def num_held(self) -> int:
        return len(self._left)


class _ReplaceInText(_Step):
    """`Replace` of a pattern of several characters, in a text that comes in pieces."""

    _pending = ""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self.needs_all = len(pattern) > _CONTEXT or overlap(pattern[1:], pattern) > 0

    def feed(self, chunk: str) -> Sequence[str]:
        *before, last = (self._pending + chunk).split(self._pattern)
        stop = len(last) - overlap(last, self._pattern)
        self._pending = last[stop:]
        return (self._content.join((*before, last[:stop])),)

    def end(self) -> Sequence[str]:
        return (self._pending,)

    @property
    def num_held(self) -> int:
        return len(self._pending)


class _StripText(_Step):
    """`Strip`, of a text that comes in pieces."""

    _pending = ""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start  # characters that may still be removed from the beginning
        self._stop = stop
        self.needs_all = start > _CONTEXT or stop > _CONTEXT

    def feed(self, chunk: str) -> Sequence[str]:
        if not chunk:
            return ()
        if self._start:
            num_removed = 0
            while (
                num_removed < min(self._start, len(chunk)) and chunk[num_removed] == self._content
            ):
                num_removed += 1
            chunk = chunk[num_removed:]
            self._start = 0 if chunk else self._start - num_removed
        text = self._pending + chunk
        stop = len(text)
        while stop and len(text) - stop < self._stop and text[stop - 1] == self._content:
            stop -= 1
        self._pending = text[stop:]
        return (text[:stop],)

    @property
    def num_held(self) -> int:
        return len(self._pending)


class _Whole(_Step):
    """Any other decoder: its result is known only at the end."""

    needs_all = True

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._chunks: list[str] = []

    def feed(self, chunk: str) -> Sequence[str]:
        self._chunks.append(chunk)
        return ()

    def end(self) -> Sequence[str]:
        if self._chunks:
            return (self._decoder.decode(self._chunks),)
        return ()

    @property
    def num_held(self) -> int:
        return len(self._chunks)

    def fork(self) -> Self:
        other = copy.copy(self)
        other._chunks = [*self._chunks]
        return other


class _WholeText(_Whole):
    """Any other decoder, of a text that comes in pieces."""

    def end(self) -> Sequence[str]:
        return (self._decoder.decode(["".join(self._chunks)]),)


def _of_chunks(part: dict[str, Any]) -> _Step | None:
    """The step of a decoder whose chunks are whole tokens; None if the decoder is unknown."""
    match part["type"]:
        case "Replace" | "Strip":
            return _Each(_decoder(part))
        case "Metaspace" | "WordPiece":
            return _Placed(_decoder(part))
        case "BPEDecoder":
            return _LastDiffers(_decoder(part))
        case "CTC":
            return _Distinct(_decoder(part))
        case "ByteFallback":
            return _ByteRuns()
        case "ByteLevel":
            return _ByteLevel()
        case "Fuse":
            return _Step()
        case _:
            return None


def _of_text(part: dict[str, Any]) -> _Step:
    """The step of a decoder after the chunks were fused: its only chunk is the text, which comes in
    pieces."""
    match part:
        case {"type": "Fuse"}:
            return _Step()
        case {"type": "Metaspace"}:  # the text counts as the first chunk
            return _Each(_decoder(part))
        case {"type": "Replace", "pattern": {"String": str(pattern)}} if len(pattern) == 1:
            return _Each(_decoder(part))
        case {
            "type": "Replace",
            "pattern": {"String": str(pattern)},
            "content": content,
        } if pattern:
            return _ReplaceInText(pattern, content)
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return _StripText(content, start, stop)
        case _:
            return _WholeText(_decoder(part))


def _decoder(part: dict[str, Any]) -> Any:
    """The decoder that a part of a tokenizer's file describes."""
    decoder = decoders.Fuse()
    # Unpickling makes a decoder of any kind from its JSON, whatever kind it was before.
    decoder.__setstate__(json.dumps(part).encode())
    return decoder


def _flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoders of a chain, with nested chains flattened."""
    if part["type"] != "Sequence":
        return [part]
    return [each for inner in part["decoders"] for each in _flat(inner)]


@functools.lru_cache(maxsize=64)
def _steps_of_state(state: bytes) -> tuple[_Step, ...] | None:
    """The steps of a decoder from its JSON; None if one of them is of an unknown kind."""
    steps = list[_Step]()
    is_text = False
    for part in _flat(json.loads(state)):
        step = _of_text(part) if is_text else _of_chunks(part)
        if step is None:
            return None
        steps.append(step)
        is_text |= part["type"] in ("Fuse", "ByteLevel")
    return tuple(steps)


def steps_of(decoder: Any) -> tuple[_Step, ...]:
    """The steps of a decoder; they are cached, so fork them before you feed them.

    Args:
        decoder: a tokenizer's decoder; None: it has none.
    """
    if decoder is None:
        return (_Spaced(),)
    try:
        state = decoder.__getstate__()
    except Exception:  # a decoder written in Python
        return (_Whole(decoder),)
    steps = _steps_of_state(bytes(state))
    if steps is None:
        return (_Whole(decoder),)
    return steps


def _fed(steps: Iterable[_Step], chunk: str) -> str:
    """Feed one more chunk to a chain; returns the text that is now certain."""
    chunks: Sequence[str] = (chunk,)
    for step in steps:
        chunks = [piece for each in chunks for piece in step.feed(each)]
    return "".join(chunks)


def _ended(steps: Iterable[_Step]) -> str:
    """The text that a chain adds if nothing follows. The steps do not change."""
    chunks = list[str]()
    for step in steps:
        if not chunks:
            chunks = [*step.end()]
            continue
        forked = step.fork()
        fed = [piece for each in chunks for piece in forked.feed(each)]
        chunks = [*fed, *forked.end()]
    return "".join(chunks)


def _num_common(first: str, second: str) -> int:
    """Length of the longest common prefix of two texts."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


class Detokenizer:
    """Turns the tokens of a completion into text: exactly what `tokenizer.decode(prompt +
    completion)` has after its longest common prefix with `tokenizer.decode(prompt)`, for any
    decoder.

    Text is returned once no later token can change it. So bytes that are not yet a character are
    held back; byte tokens of `ByteFallback` are held back until another token follows, since one
    wrong byte turns the whole run into U+FFFD; with `BPEDecoder`, which treats the last token
    differently, the text of a token comes with the next one. With a decoder that needs the whole
    text (`Replace` of a regular expression after `Fuse`, or a decoder written in Python), all text
    comes at the end.

    Args:
        tokenizer: None: tokens have no text.
        prompt: the tokens before the completion; negative ones, which stand for embeddings, have no
            text. Of a long prompt, only the beginning and the end are read if they determine what
            follows.
        hidden: tokens to omit, such as special ones.

    Attributes:
        num_chars: the length of the text so far, including whole characters that are held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int] = (),
        hidden: Container[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._prompt: Sequence[int] | None = prompt
        self._steps: tuple[_Step, ...] = ()
        self._left_of_prompt = ""
        self._num_settled = 0
        self.num_chars = 0

    def add(self, token: int) -> str:
        """Take a token; returns the text that is now certain and was not returned before."""
        self._read_prompt()
        chunk = self._chunk(token)
        if chunk is None:
            return ""
        text = _fed(self._steps, chunk)
        if text and self._left_of_prompt:
            # The prompt's end, which was not certain yet, comes with this text: drop what is equal.
            count = _num_common(text, self._left_of_prompt)
            self._left_of_prompt = self._left_of_prompt[count:] if count == len(text) else ""
            text = text[count:]
        self._num_settled += len(text)
        num_held = sum(step.num_held for step in self._steps)
        if 0 < num_held <= _MOST_LOOKED_AT:
            pending_text = self.end().rstrip(REPLACEMENT)
        else:
            pending_text = ""
        self.num_chars = max(self.num_chars, self._num_settled + len(pending_text))
        return text

    def end(self) -> str:
        """The text that is held back, as it is if nothing follows. The state does not change."""
        self._read_prompt()
        text = _ended(self._steps)
        if self._left_of_prompt:
            return text[_num_common(text, self._left_of_prompt) :]
        return text

    def _read_prompt(self) -> None:
        """Read the prompt when the first token comes, so that an exception ends only this
        completion."""
        if self._prompt is None:
            return
        if self._tokenizer is not None:
            self._steps = tuple(step.fork() for step in steps_of(self._tokenizer.decoder))
            for chunk in self._context(self._prompt):
                _fed(self._steps, chunk)
            self._left_of_prompt = _ended(self._steps)
        self._prompt = None

    def _chunk(self, token: int) -> str | None:
        """The chunk of a token; None if the token has no text."""
        if self._tokenizer is None or token in self._hidden:
            return None
        return self._tokenizer.id_to_token(token)

    def _context(self, prompt: Sequence[int]) -> Iterable[str]:
        """The chunks of a prompt that determine the text of what follows. At the beginning, a
        decoder may remove spaces. At the end, there may be bytes of an incomplete character, and a
        run of bytes has to be read from its start."""
        if any(step.needs_all for step in self._steps):
            return self._chunks(prompt)
        last = list[str]()
        start = len(prompt)
        while start and (len(last) < _CONTEXT or _BYTE_CHUNK.fullmatch(last[-1])):
            start -= 1
            last += self._chunks(prompt[start : start + 1])
        first = itertools.islice(self._chunks(itertools.islice(prompt, start)), _CONTEXT)
        return itertools.chain(first, reversed(last))

    def _chunks(self, tokens: Iterable[int]) -> Iterator[str]:
        for token in tokens:
            if token < 0:
                chunk = None
            else:
                chunk = self._chunk(token)
            if chunk is not None:
                yield chunk


def text_between(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token inside a text, neither first nor last: with its leading space, and with
    U+FFFD for bytes that are no character by themselves."""
    chunk = tokenizer.id_to_token(token)
    if chunk is None:
        return ""
    steps = [step.fork() for step in steps_of(tokenizer.decoder)]
    settled = _fed(steps, _NEUTRAL)
    before = settled + _ended(steps)
    text = settled + _fed(steps, chunk) + _ended(steps)
    return text.removeprefix(before)


def text_offsets(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], hidden: Container[int]
) -> list[int]:
    """For each token, the offset of its text in the text of all tokens."""
    stream = Detokenizer(tokenizer, (), hidden)
    offsets = list[int]()
    for token in token_ids:
        offsets.append(stream.num_chars)
        if token >= 0:
            stream.add(token)
    return offsets
