"""Reading what steps return, behind the device: copies that nobody waits for until they are wanted."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.outputs import Output
from weft.transforms.engine.faults import find_faults
from weft.transforms.engine.work import Work

_PAUSE = 2e-5
"""Seconds between two looks at the device."""
_ASK = 0.05
"""Seconds between two looks at the other ranks."""


@attrs.frozen(eq=False)
class Told:
    """What a step said, on the host, by row of its batch; prompts' by token.

    Args:
        token_ids, logprobs: of what was sampled and is a request's next: a token, or several of one that had drafts, or
            none; up to a fault.
        top: the likeliest tokens and their logprobs, of each of those or of more; empty where nobody asked.
        prompt_logprobs, prompt_top: of each token of the batch; empty where nobody asked.
        num_drafts: that were verified, in all.
        faults: of each row in which no token was drawn behind those, the logprob that says so: NaN, or -inf.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    top: list[list[list[tuple[int, float]]]]
    prompt_logprobs: list[float]
    prompt_top: list[list[tuple[int, float]]]
    num_drafts: int = 0
    faults: dict[int, float] = attrs.field(factory=dict)


class Reading:
    """Outputs on their way to the host.

    Args:
        done: what was done, and what each work returned.
        confirm: called when they are there, before they are read; it raises where they are not to be believed.
    """

    def __init__(self, done: Sequence[tuple[Work, Output | None]], confirm: Callable[[], None]) -> None:
        self._confirm = confirm
        outputs = [out for _, out in done]
        self.works = tuple(work for work, _ in done)
        self._copies = [None if out is None else {n: _to_host(x) for n, x in _tensors(out)} for out in outputs]
        on_gpu = any(out is not None and out.token_ids.is_cuda for out in outputs)
        self._done = torch.cuda.Event() if on_gpu else None
        if self._done is not None:
            self._done.record()

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done is None or self._done.query()

    def wait(self, check: Callable[[], None] | None = None) -> list[tuple[Work, Told | None]]:
        """What each said; None where nothing returned.

        Args:
            check: asked now and then, where a device may wait for another one in vain: raises if it does.
        """
        if self._done is not None and check is None:
            self._done.synchronize()
        elif self._done is not None and check is not None:
            _wait(self._done, check)
        self._confirm()
        told = (None if copied is None else _told(copied) for copied in self._copies)
        return list(zip(self.works, told, strict=True))


def _wait(event: torch.cuda.Event, check: Callable[[], None]) -> None:
    asked = time.monotonic()
    while not event.query():
        time.sleep(_PAUSE)
        if time.monotonic() - asked > _ASK:
            check()
            asked = time.monotonic()


def _tensors(out: Output) -> list[tuple[str, Tensor]]:
    names = [field.name for field in attrs.fields(Output) if field.name != "logits"]
    return [(name, value) for name in names if (value := getattr(out, name)) is not None]


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def _told(copied: dict[str, Tensor]) -> Told:
    several = "num_tokens" in copied
    counts = copied["num_tokens"].tolist() if several else [1] * len(copied["token_ids"])

    def of_rows(name: str) -> list[Any]:
        found = copied[name] if several else copied[name][:, None]
        return [own[:count] for own, count in zip(found.tolist(), counts, strict=True)]

    top, prompt_top = "top_ids" in copied, "prompt_top_ids" in copied
    pairs = zip(of_rows("top_ids"), of_rows("top_logprobs"), strict=True) if top else ()
    token_ids, logprobs = of_rows("token_ids"), of_rows("logprobs")
    faults = find_faults(logprobs)
    for row, place in faults.items():
        token_ids[row] = token_ids[row][:place]
    return Told(
        token_ids,
        logprobs,
        [_pairs(ids, logprobs) for ids, logprobs in pairs],
        copied["prompt_logprobs"].tolist() if "prompt_logprobs" in copied else [],
        _pairs(copied["prompt_top_ids"].tolist(), copied["prompt_top_logprobs"].tolist()) if prompt_top else [],
        int(copied["num_drafts"].sum()) if "num_drafts" in copied else 0,
        {row: logprobs[row][place] for row, place in faults.items()},
    )


def _pairs(ids: list[list[int]], logprobs: list[list[float]]) -> list[list[tuple[int, float]]]:
    return [list(zip(*each, strict=True)) for each in zip(ids, logprobs, strict=True)]
