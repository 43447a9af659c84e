"""Results of steps (`StepResult`): copied to the host without blocking the device, and read
later."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.outputs import Output
from weft.errors import LogitsError, RequestError, WeftError
from weft.transforms.engine.steps.step import Work

# Pause between two polls of the device.
_POLL_SECONDS = 2e-5
# Pause between two checks of the other ranks.
_CHECK_SECONDS = 0.05
_CAPTURED = "captured "
# Whether a number is above -inf; False for NaN. A bound method: it runs for every logprob.
_is_above = (-math.inf).__lt__

# Finished work, and the last stage's output; None if the step returns nothing.
FinishedWork = tuple[Work, Output | None]


@attrs.frozen(eq=False)
class StepResult:
    """One step's sampled tokens and logprobs on the host: one entry per batch row, and for prompts
    one per token.

    Args:
        token_ids, logprobs: the new tokens: one, or with drafts the accepted ones and one more;
            fewer, or none, in a row with a fault.
        top_logprobs: the likeliest tokens and their logprobs, for each of those tokens or for more;
            empty if no request asked.
        ranks: the ranks of the new tokens; empty if no request asked.
        prompt_logprobs, prompt_top_logprobs, prompt_ranks: for each token of the batch; empty if no
            request asked.
        num_drafts: the number of drafts that were verified.
        faults: for each row in which no further token could be drawn, the logprob that says so: NaN
            or -inf.
        captured: [num_tokens, ...] by name: what the stages captured for each token of the batch.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    top_logprobs: list[list[list[tuple[int, float]]]]
    prompt_logprobs: list[float]
    prompt_top_logprobs: list[list[tuple[int, float]]]
    num_drafts: int = 0
    faults: dict[int, float] = attrs.field(factory=dict)
    captured: dict[str, Tensor] = attrs.field(factory=dict)
    ranks: list[list[int]] = attrs.field(factory=list)
    prompt_ranks: list[int] = attrs.field(factory=list)

    def error(self, row: int, id: str, num_tokens: int) -> WeftError:
        """The error of a request in whose row no token could be drawn.

        Args:
            id: of the request.
            num_tokens: the tokens before the missing one, the prompt included.
        """
        if math.isnan(self.faults[row]):
            problem = "logits that are NaN"
            instead = "look for weights that are not finite, or for an overflow of the dtype"
            return LogitsError(f"request {id!r}", f"{problem} after {num_tokens} tokens", instead)
        problem = (
            f"no token that can be drawn after {num_tokens} tokens: those that the request allows"
            " have logits of -inf"
        )
        return RequestError(
            f"request {id!r}", problem, "allow another token, or look at the model's logits"
        )


class PendingResults:
    """Results of finished work that are being copied to the host.

    Args:
        finished: works, and their outputs.
        confirm: called once the copies are complete, before they are read; raises if they are
            invalid.
    """

    def __init__(self, finished: Sequence[FinishedWork], confirm: Callable[[], None]) -> None:
        self._confirm = confirm
        outputs = [out for _, out in finished]
        self.works = tuple(work for work, _ in finished)
        self._copies = [
            None if out is None else {n: _to_host(x) for n, x in _tensors(out)} for out in outputs
        ]
        on_gpu = any(out is not None and out.token_ids.is_cuda for out in outputs)
        self._copied = torch.cuda.Event() if on_gpu else None
        if self._copied is not None:
            self._copied.record()

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._copied is None or self._copied.query()

    def wait(
        self, check: Callable[[], None] | None = None
    ) -> Iterator[tuple[Work, StepResult | None]]:
        """Wait for the copies; then yield each work with its result, or with None if it returned
        nothing.

        Args:
            check: called periodically while waiting, if the device may wait for a rank that has
                failed; raises if so.
        """
        if self._copied is not None and check is None:
            self._copied.synchronize()
        elif self._copied is not None and check is not None:
            _wait(self._copied, check)
        self._confirm()
        results = (None if copied is None else _step_result(copied) for copied in self._copies)
        return zip(self.works, results, strict=True)


def _wait(event: torch.cuda.Event, check: Callable[[], None]) -> None:
    last_check = time.monotonic()
    # Poll instead of `synchronize`, in which the host could not notice that a rank has failed.
    while not event.query():
        time.sleep(_POLL_SECONDS)
        if time.monotonic() - last_check > _CHECK_SECONDS:
            check()
            last_check = time.monotonic()


def _tensors(out: Output) -> list[tuple[str, Tensor]]:
    names = [
        field.name for field in attrs.fields(Output) if field.name not in ("logits", "captured")
    ]
    fields = [(name, value) for name in names if (value := getattr(out, name)) is not None]
    return [
        *fields,
        *((_CAPTURED + name, per_token.values) for name, per_token in out.captured.items()),
    ]


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x
    # Only a copy to pinned memory does not block the host.
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def _step_result(copied: dict[str, Tensor]) -> StepResult:
    with_drafts = "num_tokens" in copied
    counts = copied["num_tokens"].tolist() if with_drafts else []

    def by_row(name: str) -> list[Any]:
        rows = copied[name].tolist()
        if with_drafts:
            return [values[:count] for values, count in zip(rows, counts, strict=True)]
        return [[x] for x in rows]

    top = "top_ids" in copied
    prompt_top = "prompt_top_ids" in copied
    pairs = zip(by_row("top_ids"), by_row("top_logprobs"), strict=True) if top else ()
    token_ids = by_row("token_ids")
    logprobs = by_row("logprobs")
    faults = find_faults(logprobs)
    for row, index in faults.items():
        token_ids[row] = token_ids[row][:index]
    return StepResult(
        token_ids,
        logprobs,
        [_pairs(ids, logprobs) for ids, logprobs in pairs],
        copied["prompt_logprobs"].tolist() if "prompt_logprobs" in copied else [],
        (
            _pairs(copied["prompt_top_ids"].tolist(), copied["prompt_top_logprobs"].tolist())
            if prompt_top
            else []
        ),
        int(copied["num_drafts"].sum()) if "num_drafts" in copied else 0,
        {row: logprobs[row][index] for row, index in faults.items()},
        # Users may keep these: clone them, to give the pinned memory back.
        {
            name.removeprefix(_CAPTURED): x.clone()
            for name, x in copied.items()
            if name.startswith(_CAPTURED)
        },
        by_row("ranks") if top else [],
        copied["prompt_ranks"].tolist() if prompt_top else [],
    )


def _pairs(ids: list[list[int]], logprobs: list[list[float]]) -> list[list[tuple[int, float]]]:
    return [list(zip(*each, strict=True)) for each in zip(ids, logprobs, strict=True)]


def is_fault(logprob: float) -> bool:
    """Whether a logprob says that no token was drawn: NaN (from NaN logits) or -inf."""
    return not logprob > -math.inf


def find_faults(logprobs: Sequence[Sequence[float]]) -> dict[int, int]:
    """The rows with a fault, and the index of the first fault in each."""
    if all(map(_is_above, itertools.chain.from_iterable(logprobs))):
        return {}  # nearly always
    faults = [
        (row, i)
        for row, row_logprobs in enumerate(logprobs)
        for i, x in enumerate(row_logprobs)
        if is_fault(x)
    ]
    # Reversed, so that a row's first fault is the one that stays.
    return dict(reversed(faults))
