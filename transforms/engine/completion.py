"""`CompletionState`: a growing completion: its tokens, their text, their logprobs, and what stages
captured."""

import time
from collections.abc import Container, Iterator, Mapping

import attrs
import torch
from tokenizers import Tokenizer
from torch import Tensor

from weft.transforms.engine.detokenizing import REPLACEMENT, Detokenizer, overlap
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.steps.results import StepResult

TopLogprobs = dict[int, float]

_MAX_LENT = 1024
# Captured values are views into tensors of whole steps. A completion copies its part out once it
# references this many steps, or steps of this many tokens in all: a decode that shares a step with
# prompts keeps thousands of rows alive for its one.
_MAX_ROWS_LENT = 2**17


@attrs.define
class RequestTimes:
    """The timestamps of a completion, in seconds of `time.monotonic()`; None: not yet. They take no
    part in comparisons, so that completions with equal tokens are equal.

    Args:
        added: it was added to the engine.
        admitted: it was first given a row and pages.
        first_token: the host read its first token.
        finished: it ended.
    """

    added: float = attrs.field(factory=time.monotonic, eq=False)
    admitted: float | None = attrs.field(default=None, eq=False)
    first_token: float | None = attrs.field(default=None, eq=False)
    finished: float | None = attrs.field(default=None, eq=False)


@attrs.define(eq=False)
class _Captured:
    """What was captured for the tokens `first:stop` of each of several steps. The token of a decode
    has the same place in many consecutive steps; one entry covers them all, so that the garbage
    collector has fewer objects to visit."""

    first: int
    stop: int
    steps: list[Mapping[str, Tensor]]

    @property
    def size(self) -> int:
        """The number of tokens."""
        return (self.stop - self.first) * len(self.steps)

    def values(self, name: str, start: int, stop: int) -> Iterator[Tensor]:
        """The values of this entry's tokens `start:stop`, in parts."""
        each = self.stop - self.first
        for index in range(start // each, -(-stop // each)):
            begin = max(start - index * each, 0)
            end = min(stop - index * each, each)
            yield self.steps[index][name][self.first + begin : self.first + end]


@attrs.define(eq=False)
class CompletionState:
    """A completion as it grows: tokens, logprobs, and text that never splits a character.

    Args:
        request: what the user asked for.
        tokenizer: None: completions have no text.
        special_ids: special tokens, which the text omits unless the request asks for them.
        eos_ids: the model's end-of-sequence tokens.
        token_ids, logprobs: one entry for each generated token.
        top_logprobs: the same where the request asks for logprobs.
        ranks: the same where it asks for one or more.
        prompt_logprobs, prompt_top_logprobs, prompt_ranks: one entry for each prompt token that was
            computed so far, except the first.
        text_offsets: for each generated token, the offset of its text in the text so far.
        reason: why it ended; empty: it has not ended.
        stop_reason: the stop token or the stop text that ended it; None: the model's own
            end-of-sequence token did, or no token or text.
        times: when it was added, was admitted, had its first token, and finished.
        num_captured: the number of tokens whose captured values have arrived.
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
    reason: str = ""
    stop_reason: int | str | None = None
    times: RequestTimes = attrs.field(factory=RequestTimes, repr=False)
    num_captured: int = 0
    _captured: list[_Captured] = attrs.field(factory=list, repr=False)
    _num_owned: int = 0  # leading entries of `_captured` that are copied
    _num_lent: int = 0  # steps in the other entries, which are views of whole steps' tensors
    _rows_lent: int = 0  # tokens of these steps, including other requests'
    _shown: list[str] = attrs.field(factory=list, repr=False)
    _num_taken: int = 0  # leading pieces that `take_text` has returned
    _num_shown: int = 0  # characters in all pieces
    _recent: str = ""  # the last certain characters: as many as may begin a stop text
    _tentative: str = ""  # characters after these that a later token may still change
    _num_certain: int = 0
    _num_searched: int = 0  # leading characters without a stop text that ends the request
    _stopped: bool = False
    _hides_last: bool = False  # the text of the stop token is not shown
    _detokenizer: Detokenizer = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        params = self.request.sampling
        if not params.detokenize:
            self.tokenizer = None
        if not params.skip_special_tokens:
            self.special_ids = frozenset()
        self._detokenizer = Detokenizer(self.tokenizer, self.request.prompt, self.special_ids)

    @property
    def text(self) -> str:
        """The text to show: what no later token can change, minus a tail that may begin a stop
        text."""
        return "".join(self._shown)

    def take_text(self) -> str:
        """The text that was added since the last call."""
        new = "".join(self._shown[self._num_taken :])
        self._num_taken = len(self._shown)
        return new

    def append(
        self, result: StepResult, row: int, index: int = 0, *, is_stop: bool = False
    ) -> bool:
        """Append token `index` of a step's row; returns whether a stop text ends the request there.

        Args:
            is_stop: it is a token that ends the request.
        """
        token = result.token_ids[row][index]
        num_logprobs = self.request.sampling.logprobs
        self.token_ids.append(token)
        self.logprobs.append(result.logprobs[row][index])
        if num_logprobs is not None:
            top = result.top_logprobs[row][index][:num_logprobs] if result.top_logprobs else ()
            self.top_logprobs.append(dict(top))
            if num_logprobs:
                self.ranks.append(result.ranks[row][index])
        if self.times.first_token is None:
            self.times.first_token = time.monotonic()
        # Without a tokenizer, only the token that ends it matters: `stop_reason`.
        return (is_stop or self.tokenizer is not None) and self.append_text(token, is_stop=is_stop)

    def append_text(self, token: int, *, is_stop: bool = False) -> bool:
        """Append the text of the last token; returns whether a stop text ends the request there.

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
        self.text_offsets.append(self._detokenizer.num_chars)
        if self._hides_last:
            new = ""
        else:
            new = self._detokenizer.add(token)
        if not params.stop:
            self._show(new)
            return False
        return self._search(new)

    def append_captured(
        self, values: Mapping[str, Tensor], first: int, count: int = 1, start: int | None = None
    ) -> None:
        """Append what was captured for `count` tokens, and skip tokens that are already there:
        after a preemption, tokens are computed again.

        Args:
            values: of all tokens of a step, by name.
            first: the first token's place in the step.
            start: its index in the request; None: it is the next.
        """
        if start is None:
            skipped = 0
        else:
            skipped = self.num_captured - start
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
        """Copy the captured values out of the whole steps' tensors, which also keep other requests'
        values in memory."""
        lent = self._captured[self._num_owned :]
        names = lent[0].steps[0]
        owned = {
            name: torch.cat([x for capture in lent for x in capture.values(name, 0, capture.size)])
            for name in names
        }
        self._captured[self._num_owned :] = [
            _Captured(0, sum(capture.size for capture in lent), [owned])
        ]
        self._num_owned = self._num_owned + 1
        self._num_lent = 0
        self._rows_lent = 0

    @property
    def captured(self) -> dict[str, Tensor]:
        """The captures of the tokens that the model has processed, which are all but the last: [n,
        ...] by name."""
        return self.captured_of(0, self.num_captured)

    def captured_of(self, start: int, stop: int) -> dict[str, Tensor]:
        """The captures of the tokens `start:stop`, as far as the model has processed them: [n, ...]
        by name."""
        # A step with drafts may also have captured tokens after the one that ended the request.
        most = min(self.num_captured, len(self.request.prompt) + len(self.token_ids) - 1)
        stop = min(stop, most)
        overlaps = list[tuple[_Captured, int, int]]()
        place = 0
        for capture in self._captured:
            begin = max(start - place, 0)
            end = min(stop - place, capture.size)
            if begin < end:
                overlaps.append((capture, begin, end))
            place += capture.size
        if self._captured:
            names = self._captured[0].steps[0]
        else:
            names = {}
        return {
            name: (
                torch.cat([x for capture, *part in overlaps for x in capture.values(name, *part)])
                if overlaps
                else values[:0]
            )
            for name, values in names.items()
        }

    def append_prompt_logprobs(
        self, result: StepResult, first: int, start: int, count: int
    ) -> None:
        """Append the logprobs of a chunk of the prompt, and skip those already there: after a
        preemption, the prompt is computed again.

        Args:
            result: of the step that computed the chunk.
            first: the chunk's first token in the step's batch.
            start: the same token's index in the prompt.
            count: tokens of the chunk; each has the logprob of the prompt token after it.
        """
        num_logprobs = self.request.sampling.prompt_logprobs or 0
        for offset in range(count):
            if len(self.prompt_logprobs) == start + offset < len(self.request.prompt) - 1:
                if num_logprobs:
                    top = dict(result.prompt_top_logprobs[first + offset][:num_logprobs])
                else:
                    top = {}
                self.prompt_logprobs.append(result.prompt_logprobs[first + offset])
                self.prompt_top_logprobs.append(top)
                self.prompt_ranks.append(result.prompt_ranks[first + offset])

    def _show(self, text: str) -> None:
        if text:
            self._shown.append(text)
            self._num_shown += len(text)

    def _search(self, new: str) -> bool:
        """Search for stop texts in this new text and in the tail that may still change; returns
        whether one was found."""
        params = self.request.sampling
        tentative = self._detokenizer.end().rstrip(REPLACEMENT)
        # A later token has changed the tentative tail, so the search of that tail no longer counts.
        if not (new + tentative).startswith(self._tentative):
            self._num_searched = min(self._num_searched, self._num_certain)
        text = self._recent + new
        begin = self._num_certain - len(self._recent)
        self._num_certain += len(new)
        match = self._find(text + tentative, begin)
        self._num_searched = self._num_certain + len(tentative)
        self._tentative = tentative
        if match is not None:
            start, stop = match
            end = start + len(stop) * params.include_stop_str_in_output
            self._show((text + tentative)[self._num_shown - begin : end - begin])
            self.stop_reason = stop
            self._stopped = True
            return True
        # Hold back a tail that may be the beginning of a stop text.
        num_held = max(overlap(text, stop) for stop in params.stop)
        self._show(text[self._num_shown - begin : len(text) - num_held])
        num_kept = max(map(len, params.stop)) - 1
        self._recent = text[max(len(text) - num_kept, 0) :]
        return False

    def _find(self, text: str, begin: int) -> tuple[int, str] | None:
        """The stop text that begins first, with its offset in the whole text; None: there is none.

        Args:
            text: the end of the whole text.
            begin: where it begins in the whole text.
        """
        params = self.request.sampling
        first: tuple[int, str] | None = None
        if len(self.token_ids) < params.min_tokens:
            return None
        for stop in params.stop:
            start = text.find(stop, max(self._num_searched - len(stop) + 1 - begin, 0))
            if start >= 0 and (first is None or begin + start < first[0]):
                first = (begin + start, stop)
        return first

    def end(self, reason: str) -> None:
        """End the completion and show the text that was held back, an incomplete character as
        U+FFFD."""
        self.reason = reason
        self.times.finished = time.monotonic()
        if self.tokenizer is not None and not self._stopped:
            if self.request.sampling.stop:
                num_held = self._num_certain - self._num_shown
            else:
                num_held = 0
            pending_text = self._recent[len(self._recent) - num_held :]
            self._show(pending_text + self._detokenizer.end())
        self.text_offsets = [min(offset, self._num_shown) for offset in self.text_offsets]
        if self._hides_last and self.text_offsets:
            self.text_offsets[-1] = self._num_shown
