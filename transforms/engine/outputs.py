"""`RequestOutput`: what a request gets in a step."""

import attrs

from weft.errors import WeftError
from weft.transforms.engine.tracking import Track


@attrs.frozen(eq=False)
class RequestOutput:
    """What one completion of a request got in a step of the engine.

    Args:
        id: of the request.
        index: which of its completions (`SamplingParams.n`), from 0 on.
        token_ids: the new tokens.
        text: the new text; None where the checkpoint has no tokenizer.
        finish_reason: None: it goes on. `stop` (a token or a text that ends it), `length`, `abort`, or `error`.
        track: all that it has said so far: tokens, logprobs, text.
        error: with the reason `error`, what went wrong with this request alone.
    """

    id: str
    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    track: Track = attrs.field(repr=False)
    error: WeftError | None = None


@attrs.define(eq=False)
class Sample:
    """A completion under way, and how much of its text was shown.

    Args:
        id, index: of its outputs.
        track: what it has said.
        first_job: works before that one were of others.
    """

    id: str
    index: int
    track: Track
    first_job: int
    _shown: int = 0

    def output(self, reason: str | None, tokens: list[int]) -> RequestOutput:
        """What is new, with the tokens."""
        track, start = self.track, self._shown
        self._shown = len(track.text)
        text = None if track.tokenizer is None else track.text[start:]
        return RequestOutput(self.id, self.index, tokens, text, reason, track)


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two outputs of one completion, one after the other, as one."""
    text = None if second.text is None else f"{first.text or ''}{second.text}"
    return attrs.evolve(second, token_ids=[*first.token_ids, *second.token_ids], text=text)
