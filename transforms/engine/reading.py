"""Reading what steps return, behind the device: copies that nobody waits for until they are wanted."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.outputs import Output
from weft.transforms.engine.work import Work


@attrs.frozen(eq=False)
class Told:
    """What a step said, on the host, by row of its batch; prompts' by token.

    Args:
        token_ids, logprobs: of what was sampled and is a request's next: a token, or several of one that had drafts, or
            none.
        top: the likeliest tokens and their logprobs, of each of those or of more; empty where nobody asked.
        prompt_logprobs, prompt_top: of each token of the batch; empty where nobody asked.
        num_drafts: that were verified, in all.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    top: list[list[list[tuple[int, float]]]]
    prompt_logprobs: list[float]
    prompt_top: list[list[tuple[int, float]]]
    num_drafts: int = 0


class Reading:
    """Outputs on their way to the host.

    Args:
        works: what was done.
        outputs: what each returned.
    """

    def __init__(self, works: Sequence[Work], outputs: Sequence[Output | None]) -> None:
        self.works = tuple(works)
        self._copies = [None if out is None else {n: _to_host(x) for n, x in _tensors(out)} for out in outputs]
        on_gpu = any(out is not None and out.token_ids.is_cuda for out in outputs)
        self._done = torch.cuda.Event() if on_gpu else None
        if self._done is not None:
            self._done.record()

    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done is None or self._done.query()

    def wait(self) -> list[tuple[Work, Told | None]]:
        """What each said; None where nothing returned."""
        if self._done is not None:
            self._done.synchronize()
        told = (None if copied is None else _told(copied) for copied in self._copies)
        return list(zip(self.works, told, strict=True))


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
    return Told(
        of_rows("token_ids"),
        of_rows("logprobs"),
        [_pairs(ids, logprobs) for ids, logprobs in pairs],
        copied["prompt_logprobs"].tolist() if "prompt_logprobs" in copied else [],
        _pairs(copied["prompt_top_ids"].tolist(), copied["prompt_top_logprobs"].tolist()) if prompt_top else [],
        int(copied["num_drafts"].sum()) if "num_drafts" in copied else 0,
    )


def _pairs(ids: list[list[int]], logprobs: list[list[float]]) -> list[list[tuple[int, float]]]:
    return [list(zip(*each, strict=True)) for each in zip(ids, logprobs, strict=True)]
