"""What a request has said so far, for its user: tokens, logprobs, and text that never splits a character."""

import attrs
from tokenizers import Tokenizer

from weft.transforms.engine.detokenizing import Detokenizer
from weft.transforms.engine.reading import Told
from weft.transforms.engine.requests import Request

TopLogprobs = dict[int, float]


@attrs.define(eq=False)
class Track:
    """A request's completion, as it grows.

    Args:
        request: what was asked.
        tokenizer: None: completions have no text.
        special: its tokens that no text shows.
        token_ids, logprobs, top_logprobs: of each token that was generated.
        prompt_logprobs, prompt_top_logprobs: of each token of the prompt but the first, as far as it was computed.
        text: what may be shown: characters that are whole, and that no stop text begins with.
        reason: why it ended; empty: it has not.
    """

    request: Request
    tokenizer: Tokenizer | None = attrs.field(repr=False)
    special: frozenset[int] = attrs.field(default=frozenset(), repr=False)
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    top_logprobs: list[TopLogprobs] = attrs.field(factory=list)
    prompt_logprobs: list[float] = attrs.field(factory=list)
    prompt_top_logprobs: list[TopLogprobs] = attrs.field(factory=list)
    text: str = ""
    reason: str = ""
    _decoded: str = ""
    _stopped: bool = False
    _searched: int = 0  # so many characters hold no stop text that ends the request
    _stream: Detokenizer = attrs.field(init=False, repr=False)

    @_stream.default
    def _fresh(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    def of_same_prompt(self, request: Request) -> "Track":
        """A track of another completion of the prompt, whose logprobs are the same."""
        made = Track(request, self.tokenizer, self.special)
        made.prompt_logprobs, made.prompt_top_logprobs = self.prompt_logprobs, self.prompt_top_logprobs
        return made

    def take(self, told: Told, row: int, index: int = 0) -> bool:
        """Add a token of a row of a step; returns whether a stop text ends the request with it."""
        token = told.token_ids[row][index]
        self.token_ids.append(token)
        self.logprobs.append(told.logprobs[row][index])
        wanted = self.request.sampling.logprobs
        if wanted is not None:
            self.top_logprobs.append(dict(told.top[row][index][:wanted]) if told.top else {})
        if self.tokenizer is None:
            return False
        self._decoded += self._stream.add(token, special=token in self.special)
        return self._show()

    def take_prompt(self, told: Told, first: int, start: int, count: int) -> None:
        """Add the logprobs of a chunk of the prompt: of the `count` tokens behind those from `start` on, which are from
        `first` on in the step's batch. What is computed again is not added again."""
        wanted = self.request.sampling.prompt_logprobs or 0
        for offset in range(count):
            if len(self.prompt_logprobs) == start + offset < len(self.request.prompt) - 1:
                self.prompt_logprobs.append(told.prompt_logprobs[first + offset])
                self.prompt_top_logprobs.append(dict(told.prompt_top[first + offset][:wanted]) if wanted else {})

    def _show(self) -> bool:
        params = self.request.sampling
        if not params.stop:
            self.text = self._decoded
            return False
        stops = params.stop if len(self.token_ids) >= params.min_tokens else ()
        starts = [self._decoded.find(stop, max(self._searched - len(stop) + 1, 0)) for stop in stops]
        self._searched = len(self._decoded)
        found = min((start for start in starts if start >= 0), default=None)
        if found is not None:
            self.text, self._stopped = self._decoded[:found], True
            return True
        held = max((_overlap(self._decoded, stop) for stop in params.stop), default=0)
        self.text = self._decoded[: len(self._decoded) - held]
        return False

    def end(self, reason: str) -> None:
        """It has ended: what was held back is shown, and a character that was never completed as one that is wrong."""
        self.reason = reason
        if self.tokenizer is not None and not self._stopped:
            whole = str(self.tokenizer.decode(self.token_ids, skip_special_tokens=True))
            self.text = whole if whole.startswith(self.text) else self._decoded + self._stream.end()


def _overlap(text: str, stop: str) -> int:
    """The longest beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
