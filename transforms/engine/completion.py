"""A completion as it grows: its tokens and what came with them (`CompletionState`), and their text (`Detokenizer`)."""

import time
from collections.abc import Container, Iterator, Mapping

import attrs
import torch
from tokenizers import Tokenizer
from torch import Tensor

from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.steps.results import StepResult

TopLogprobs = dict[int, float]

_REPLACEMENT = "\ufffd"
"""The character that a decoder writes for bytes that are not a character, or not yet."""
_MAX_LENT = 1024
_MAX_ROWS_LENT = 2**17
"""The steps whose tensors a completion keeps for its part of them before it copies that part, and their tokens in all:
a decode among prompts has one of thousands."""
_MAX_HELD = 8
"""Tokens held back until a character is complete. A character has at most four bytes, so of more tokens than these all
but the last three can be shown."""


@attrs.define
class RequestTimes:
    """The moments of a completion, in seconds of `time.monotonic()`; None: not yet. Any two are equal, so that equal
    completions are.

    Args:
        added: it was added to the engine.
        admitted: it was given a row and pages, for the first time.
        first_token: the host read its first token.
        finished: it ended.
    """

    added: float = attrs.field(factory=time.monotonic, eq=False)
    admitted: float | None = attrs.field(default=None, eq=False)
    first_token: float | None = attrs.field(default=None, eq=False)
    finished: float | None = attrs.field(default=None, eq=False)


# `tokenizers.decoders.DecodeStream` (0.23.3) does not replace this class: on 4,000 random sequences of a byte-fallback
# tokenizer it raised in 610; and a token took 36 µs after 200 invalid bytes and 190 µs after 800, here 4 µs.
@attrs.define(eq=False)
class Detokenizer:
    """Turns a completion's tokens into text, one at a time, without special tokens.

    A token is decoded after those shown last, because its text depends on them (a space, a part of a word). A token
    that ends inside a character waits for the next one. Bytes that can no longer become a character are shown as
    U+FFFD. If the decoder would change text that was already shown, decoding starts anew from there.

    Args:
        tokenizer: None: tokens have no text.
        skip_special_tokens: whether the text of what is decoded leaves them out.
    """

    tokenizer: Tokenizer | None
    skip_special_tokens: bool = True
    _before: list[int] = attrs.field(factory=list)
    _held: list[int] = attrs.field(factory=list)

    def add(self, token: int, *, special: bool = False) -> str:
        """The text that this token completes; empty for a special token."""
        if special:
            return ""
        self._held.append(token)
        text = self._decode(self._before + self._held)
        if not text.endswith(_REPLACEMENT):
            return self._show(len(self._held))
        return self._show(len(self._held) - 3) if len(self._held) > _MAX_HELD else ""

    def end(self) -> str:
        """The rest: an incomplete character is shown as U+FFFD."""
        return self._show(len(self._held))

    def _show(self, count: int) -> str:
        shown = self._held[:count]
        before, text = self._decode(self._before), self._decode(self._before + shown)
        if not text.startswith(before):
            new = self._decode(shown)
        elif not (new := text[len(before) :]):
            self._held = self._held[-_MAX_HELD:]
            return ""  # such as the space that a decoder drops at the beginning: the next token's text depends on it
        self._before, self._held = shown, self._held[count:]
        return new

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None or not token_ids:
            return ""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens))


def special_ids(tokenizer: Tokenizer | None) -> frozenset[int]:
    """The special tokens of a tokenizer, which text does not show."""
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, how in added.items() if how.special)


@attrs.define(eq=False)
class _Captured:
    """What was captured of the tokens `first:stop` of each of some steps. A decode's token has the same place in many
    steps: one entry covers them, so that the garbage collector has fewer objects to visit."""

    first: int
    stop: int
    steps: list[Mapping[str, Tensor]]

    @property
    def size(self) -> int:
        """The number of tokens."""
        return (self.stop - self.first) * len(self.steps)

    def values(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """The values of the tokens `start:stop` of these, in parts."""
        each = self.stop - self.first
        for index in range(start // each, -(-stop // each)):
            begin, end = max(start - index * each, 0), min(stop - index * each, each)
            yield self.steps[index][name][self.first + begin : self.first + end]


@attrs.define(eq=False)
class CompletionState:
    """A completion as it grows: tokens, logprobs, and text that never splits a character.

    Args:
        request: what the user asked for.
        tokenizer: None: completions have no text.
        special_ids: the tokens that text does not show, unless the request wants to see them.
        eos_ids: the model's own ends.
        token_ids, logprobs: one entry for each generated token.
        top_logprobs: the same where the request asks for logprobs.
        ranks: the same where it asks for one or more.
        prompt_logprobs, prompt_top_logprobs, prompt_ranks: one entry for each token of the prompt but the first, as far
            as computed.
        text_offsets: for each generated token, where its text begins in the text so far.
        text: the text to show: whole characters, without an end that may be the beginning of a stop text.
        reason: why it ended; empty: it has not.
        stop_reason: the token or the text that ended it; None: the model's own end, or nothing of the kind.
        times: when it was added, admitted, first heard of, and finished.
        num_captured: the number of tokens of which the stages' captures have come.
    """

    request: Request
    tokenizer: Tokenizer | None = attrs.field(repr=False)
    special_ids: frozenset[int] = attrs.field(default=frozenset(), repr=False)
    eos_ids: Container[int] = attrs.field(default=(), repr=False)
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    top_logprobs: list[TopLogprobs] = attrs.field(factory=list)
    ranks: list[int] = attrs.field(factory=list)
    prompt_logprobs: list[float] = attrs.field(factory=list)
    prompt_top_logprobs: list[TopLogprobs] = attrs.field(factory=list)
    prompt_ranks: list[int] = attrs.field(factory=list)
    text_offsets: list[int] = attrs.field(factory=list)
    text: str = ""
    reason: str = ""
    stop_reason: int | str | None = None
    times: RequestTimes = attrs.field(factory=RequestTimes, repr=False)
    num_captured: int = 0
    _captured: list[_Captured] = attrs.field(factory=list, repr=False)
    _num_owned: int = 0  # of the first of these
    _num_lent: int = 0  # steps of the others, which are parts of whole steps' tensors
    _rows_lent: int = 0  # tokens of these steps, those of other requests included
    _decoded: str = ""
    _stopped: bool = False
    _hides_last: bool = False  # the text of the token that ended it
    _num_searched: int = 0  # leading characters without a stop text that ends the request
    _detokenizer: Detokenizer = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        params = self.request.sampling
        if not params.detokenize:
            self.tokenizer = None
        if not params.skip_special_tokens:
            self.special_ids = frozenset()
        self._detokenizer = Detokenizer(self.tokenizer, params.skip_special_tokens)

    @property
    def cumulative_logprob(self) -> float:
        """The natural logarithm of the model's probability of all generated tokens."""
        return sum(self.logprobs)

    def append(self, result: StepResult, row: int, index: int = 0, *, is_stop: bool = False) -> bool:
        """Append token `index` of a row of a step; returns whether a stop text ends the request with it.

        Args:
            is_stop: it is a token that ends the request.
        """
        token, asked = result.token_ids[row][index], self.request.sampling.logprobs
        self.token_ids.append(token)
        self.logprobs.append(result.logprobs[row][index])
        if asked is not None:
            top = result.top_logprobs[row][index][:asked] if result.top_logprobs else ()
            self.top_logprobs.append(dict(top))
            if asked:
                self.ranks.append(result.ranks[row][index])
        if self.times.first_token is None:
            self.times.first_token = time.monotonic()
        return (is_stop or self.tokenizer is not None) and self.append_text(token, is_stop=is_stop)

    def append_text(self, token: int, *, is_stop: bool = False) -> bool:
        """Append the text of the last token; returns whether a stop text ends the request with it.

        Args:
            is_stop: it is a token that ends the request.
        """
        params = self.request.sampling
        if is_stop:
            is_own = token in self.eos_ids and not params.ignore_eos
            self.stop_reason = None if is_own else token
            self._hides_last = not params.include_stop_str_in_output
        if self.tokenizer is None:
            return False
        self.text_offsets.append(len(self._decoded))
        self._decoded += self._detokenizer.add(token, special=token in self.special_ids or self._hides_last)
        return self._update_text()

    def append_captured(
        self, values: Mapping[str, Tensor], first: int, count: int = 1, start: int | None = None
    ) -> None:
        """Append what was captured of `count` tokens; what comes a second time is skipped.

        Args:
            values: of all tokens of a step, by name.
            first: the first token's place in the step.
            start: its index in the request; None: it is the next.
        """
        skipped = 0 if start is None else self.num_captured - start
        if count > skipped:
            place = first + skipped, first + count
            if self._num_lent and (self._captured[-1].first, self._captured[-1].stop) == place:
                self._captured[-1].steps.append(values)
            else:
                self._captured.append(_Captured(*place, [values]))
            self.num_captured += count - skipped
            self._num_lent += 1
            self._rows_lent += len(next(iter(values.values())))
            if self._num_lent == _MAX_LENT or self._rows_lent > _MAX_ROWS_LENT:
                self._own_captured()

    def _own_captured(self) -> None:
        """Copy what was captured out of the tensors of whole steps, which hold other requests' values too."""
        lent = self._captured[self._num_owned :]
        names = lent[0].steps[0]
        owned = {name: torch.cat([x for own in lent for x in own.values(name, 0, own.size)]) for name in names}
        self._captured[self._num_owned :] = [_Captured(0, sum(own.size for own in lent), [owned])]
        self._num_owned, self._num_lent, self._rows_lent = self._num_owned + 1, 0, 0

    @property
    def captured(self) -> dict[str, Tensor]:
        """The captures of the tokens that were read, which are all but the last: [n, ...] by name."""
        return self.captured_of(0, self.num_captured)

    def captured_of(self, start: int, stop: int) -> dict[str, Tensor]:
        """The captures of those of the tokens `start:stop` that were read: [n, ...] by name."""
        most = min(self.num_captured, len(self.request.prompt) + len(self.token_ids) - 1)
        stop = min(stop, most)
        found, place = list[tuple[_Captured, int, int]](), 0
        for own in self._captured:
            begin, end = max(start - place, 0), min(stop - place, own.size)
            if begin < end:
                found.append((own, begin, end))
            place += own.size
        names = self._captured[0].steps[0] if self._captured else {}
        return {
            name: torch.cat([x for own, *part in found for x in own.values(name, *part)]) if found else values[:0]
            for name, values in names.items()
        }

    def append_prompt_logprobs(self, result: StepResult, first: int, start: int, count: int) -> None:
        """Append the logprobs of a chunk of the prompt; those computed a second time are skipped.

        Args:
            result: of the step that computed the chunk.
            first: the chunk's first token in the step's batch.
            start: the same token's index in the prompt.
            count: tokens of the chunk; each has the logprob of the prompt token after it.
        """
        wanted = self.request.sampling.prompt_logprobs or 0
        for offset in range(count):
            if len(self.prompt_logprobs) == start + offset < len(self.request.prompt) - 1:
                top = dict(result.prompt_top_logprobs[first + offset][:wanted]) if wanted else {}
                self.prompt_logprobs.append(result.prompt_logprobs[first + offset])
                self.prompt_top_logprobs.append(top)
                self.prompt_ranks.append(result.prompt_ranks[first + offset])

    def _update_text(self) -> bool:
        """Search for stop texts; returns whether there is one."""
        params = self.request.sampling
        if not params.stop:
            self.text = self._decoded
            return False
        stops = params.stop if len(self.token_ids) >= params.min_tokens else ()
        starts = [(self._decoded.find(stop, max(self._num_searched - len(stop) + 1, 0)), stop) for stop in stops]
        self._num_searched = len(self._decoded)
        start, stop = min((own for own in starts if own[0] >= 0), key=lambda own: own[0], default=(-1, ""))
        if stop:
            end = start + len(stop) * params.include_stop_str_in_output
            self.text, self.stop_reason, self._stopped = self._decoded[:end], stop, True
            return True
        held = max((_overlap(self._decoded, stop) for stop in params.stop), default=0)
        self.text = self._decoded[: len(self._decoded) - held]
        return False

    def end(self, reason: str) -> None:
        """End it: text that was held back is shown, an incomplete character as U+FFFD."""
        self.reason, self.times.finished = reason, time.monotonic()
        if self.tokenizer is not None and not self._stopped:
            shown = self.token_ids[:-1] if self._hides_last else self.token_ids
            skips = self.request.sampling.skip_special_tokens
            whole = str(self.tokenizer.decode(shown, skip_special_tokens=skips))
            self.text = whole if whole.startswith(self.text) else self._decoded + self._detokenizer.end()
        self.text_offsets = [min(offset, len(self.text)) for offset in self.text_offsets]
        if self._hides_last and self.text_offsets:
            self.text_offsets[-1] = len(self.text)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop` that `text` ends with."""
    tail = text[max(len(text) - len(stop) + 1, 0) :]
    start = tail.find(stop[0])
    while start >= 0 and not stop.startswith(tail[start:]):
        start = tail.find(stop[0], start + 1)
    return len(tail) - start if start >= 0 else 0
