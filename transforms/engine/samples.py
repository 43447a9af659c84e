"""The completions under way: whose request each is of, what it has said, and what it may say next."""

import math
from collections.abc import Sequence

import attrs
from tokenizers import Tokenizer

from weft.errors import LogitsError, RequestError
from weft.transforms.engine.detokenizing import special_ids
from weft.transforms.engine.masks import Mask, read_mask
from weft.transforms.engine.outputs import RequestOutput, Sample
from weft.transforms.engine.reading import Told
from weft.transforms.engine.requests import Request
from weft.transforms.engine.tracking import Track
from weft.transforms.engine.work import Work


class Samples:
    """Completions by name; a request's first one has the request's own.

    Args:
        tokenizer: None: they have no text.
        vocab_size: of the masks.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._special = tokenizer, special_ids(tokenizer)
        self._vocab_size = vocab_size
        self._found: dict[str, Sample] = {}
        self._names: dict[str, list[str]] = {}
        self._masks: dict[str, Mask] = {}

    def __len__(self) -> int:
        """Requests under way."""
        return len(self._names)

    def __contains__(self, id: object) -> bool:
        return id in self._names

    def names(self, id: str) -> list[str]:
        """The completions of a request that have not ended."""
        return list(self._names[id])

    def add(self, id: str, requests: Sequence[Request], first_job: int, mask: Mask | None) -> None:
        """The completions of a request; the first one's prompt is the one whose logprobs are told."""
        track = Track(requests[0], self._tokenizer, self._special)
        for index, request in enumerate(requests):
            own = track.of_same_prompt(request) if index else track
            self._found[request.id] = Sample(id, index, own, first_job)
            if mask is not None:
                self._masks[request.id] = mask
        self._names[id] = [request.id for request in requests]

    def masked(self, work: Work) -> tuple[Work, dict[str, RequestError]]:
        """Work, with what its requests may say next; and those whose masks failed, why."""
        failed: dict[str, RequestError] = {}
        if not self._masks:
            return work, failed
        rows = zip(work.requests, work.samples, strict=True)
        masks = tuple(self._mask(name, failed) if sampled and name in self._masks else None for name, sampled in rows)
        return (work if all(mask is None for mask in masks) else attrs.evolve(work, masks=masks)), failed

    def _mask(self, name: str, failed: dict[str, RequestError]) -> bytes | None:
        sample = self._found[name]
        try:
            return read_mask(sample.id, self._masks[name], sample.track.token_ids, self._vocab_size)
        except RequestError as error:
            failed[name] = error
            return None

    def take_prompts(self, work: Work, told: Told) -> None:
        """Read the logprobs of the prompts that a step computed."""
        first = 0
        for name, targets, start in zip(work.requests, work.targets, work.starts, strict=True):
            sample = self._found.get(name)
            of_it = sample is not None and work.job >= sample.first_job  # and not of one that had its name before
            if sample is not None and of_it and sample.track.request.sampling.prompt_logprobs is not None:
                sample.track.take_prompt(told, first, start, len(targets))
            first += len(targets)

    def take(self, name: str, told: Told, row: int, count: int) -> tuple[str, list[int]]:
        """Read the first `count` tokens that a completion got in a row of a step: all of them, or up to an error or a
        stop text, which is then the reason for which it ends."""
        sample, tokens = self._found[name], told.token_ids[row][:count]
        for index in range(count):
            stopped = sample.track.take(told, row, index)
            if math.isnan(told.logprobs[row][index]):
                return "error", tokens[: index + 1]
            if stopped:
                return "stop", tokens[: index + 1]
        return "", tokens

    def output(self, name: str, tokens: list[int]) -> RequestOutput:
        """What is new of a completion that goes on."""
        return self._found[name].output(None, tokens)

    def end(self, name: str, reason: str, tokens: list[int], error: RequestError | None = None) -> RequestOutput:
        """A completion's last output; it is no longer under way.

        Args:
            error: what went wrong, of the reason `error`; None: its logits were NaN.
        """
        sample = self._found.pop(name)
        self._masks.pop(name, None)
        sample.track.end(reason)
        others = self._names[sample.id]
        others.remove(name)
        if not others:
            del self._names[sample.id]
        output = sample.output(reason, tokens)
        return output if reason != "error" else attrs.evolve(output, error=error or _not_a_number(sample))


def _not_a_number(sample: Sample) -> LogitsError:
    count = len(sample.track.request.prompt) + len(sample.track.token_ids) - 1
    call, seen = f"request {sample.id!r}", f"logits that are NaN behind {count} tokens"
    return LogitsError(call, seen, "look for weights that are not finite, or for an overflow of the dtype")
