"""The host's side of a run of `generate`: what each request has said so far, and why it ended."""

from collections.abc import Callable, Sequence

import torch

from weft.batch import Batch
from weft.outputs import Output
from weft.sampling import SamplingParams


class Requests:
    """Requests in rows 0, 1, ... of a state.

    Args:
        most: the most tokens that each request may generate.
        sampling: of each, with all tokens that end it (`SamplingParams.for_request`).
        decode: token ids to text, for requests that end at a text; None: the checkpoint has no tokenizer.
    """

    def __init__(
        self,
        most: Sequence[int],
        sampling: Sequence[SamplingParams],
        decode: Callable[[list[int]], str | None] | None = None,
    ) -> None:
        self.most = most
        self.sampling = sampling
        self._decode = decode
        self.token_ids: list[list[int]] = [[] for _ in most]
        self.logprobs: list[list[float]] = [[] for _ in most]
        self.top_logprobs: list[list[dict[int, float]]] = [[] for _ in most]
        self.reasons: list[str | None] = [None] * len(most)

    @property
    def running(self) -> list[int]:
        """The rows of the requests that have not ended."""
        return [row for row, reason in enumerate(self.reasons) if reason is None]

    def take(self, batch: Batch, out: Output) -> None:
        """Read what a step said: the one point where the host waits for the device."""
        columns = (batch.rows, batch.samples, out.token_ids, out.logprobs)
        tops = [] if out.top_ids is None or out.top_logprobs is None else [out.top_ids, out.top_logprobs]
        table = torch.cat([*(c.double()[:, None] for c in columns), *(x.double() for x in tops)], 1)
        for row, sampled, token, logprob, *likeliest in table.tolist():
            if sampled:
                ids, logprobs = likeliest[: len(likeliest) // 2], likeliest[len(likeliest) // 2 :]
                self._add(int(row), int(token), logprob, list(zip(map(int, ids), logprobs, strict=True)))

    def _add(self, row: int, token: int, logprob: float, likeliest: list[tuple[int, float]]) -> None:
        params, own = self.sampling[row], self.token_ids[row]
        own.append(token)
        self.logprobs[row].append(logprob)
        self.top_logprobs[row].append(dict(likeliest[: params.logprobs or 0]))
        if token in params.stop_token_ids or self._end_of_text(row) is not None:
            self.reasons[row] = "stop"
        elif len(own) == self.most[row]:
            self.reasons[row] = "length"

    def _end_of_text(self, row: int) -> int | None:
        """Where the first of the request's stop texts starts in what it has said."""
        params, own = self.sampling[row], self.token_ids[row]
        if self._decode is None or not params.stop or len(own) < params.min_tokens:
            return None
        text = self._decode(own) or ""
        return min((at for stop in params.stop if (at := text.find(stop)) >= 0), default=None)

    def text(self, row: int) -> str | None:
        """What the request has said, up to a stop text; None without a tokenizer."""
        text = None if self._decode is None else self._decode(self.token_ids[row])
        return None if text is None else text[: self._end_of_text(row)]
