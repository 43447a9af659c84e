"""The completions under way: whose request each is of, what it has said, and what it may say next."""

from collections.abc import Sequence

import attrs
from tokenizers import Tokenizer

from weft.errors import RequestError, WeftError
from weft.transforms.engine.detokenizing import special_ids
from weft.transforms.engine.faults import blame, fault_of
from weft.transforms.engine.masks import Mask, Masked, read_mask
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
        self._masks: dict[str, Masked] = {}

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
        masked = None if mask is None else Masked.of(mask, requests[0].sampling, self._vocab_size)
        for index, request in enumerate(requests):
            own = track.of_same_prompt(request) if index else track
            self._found[request.id] = Sample(id, index, own, first_job)
            if masked is not None:
                self._masks[request.id] = masked
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

    def take(self, name: str, told: Told, row: int, count: int) -> tuple[str, list[int], WeftError | None]:
        """Read the first `count` tokens that a completion got in a row of a step: all of them, or up to a stop text or
        to one that cannot be decoded.

        Returns:
            The reason for which it ends, if that is one of its own; the tokens; and with the reason `error` what went
            wrong.
        """
        sample, tokens = self._found[name], told.token_ids[row][:count]
        for index in range(count):
            try:
                stopped = sample.track.take(told, row, index)
            except BaseException as error:
                return "error", tokens[: index + 1], _undecodable(sample, error)
            if stopped:
                return "stop", tokens[: index + 1], None
        return "", tokens, None

    def fault(self, name: str, logprob: float) -> WeftError:
        """The error of a completion in whose next token's place there is this logprob."""
        sample = self._found[name]
        return fault_of(sample.id, logprob, len(sample.track.request.prompt) + len(sample.track.token_ids))

    def output(self, name: str, tokens: list[int]) -> RequestOutput:
        """What is new of a completion that goes on."""
        return self._found[name].output(None, tokens)

    def end(self, name: str, reason: str, tokens: list[int], error: WeftError | None = None) -> RequestOutput:
        """A completion's last output; it is no longer under way. If its text cannot be decoded, its reason is `error`.

        Args:
            error: what went wrong, of the reason `error`.
        """
        sample = self._found.pop(name)
        self._masks.pop(name, None)
        try:
            sample.track.end(reason)
        except BaseException as fault:
            sample.track.reason, error = "error", error or _undecodable(sample, fault)
        others = self._names[sample.id]
        others.remove(name)
        if not others:
            del self._names[sample.id]
        return attrs.evolve(sample.output(sample.track.reason, tokens), error=error)


def _undecodable(sample: Sample, error: BaseException) -> RequestError:
    call = f"the text of request {sample.id!r}, of {len(sample.track.token_ids)} tokens"
    return blame(error, call, "a tokenizer that decodes every token of the model, or a model without one")
