"""Reading what steps return, behind the device: copies that nobody waits for until they are wanted."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from weft.outputs import Output
from weft.transforms.engine.work import Work


@attrs.frozen(eq=False)
class Told:
    """What a step said, on the host, by row of its batch; prompts' by token.

    Args:
        token_ids, logprobs: of what was sampled.
        top: the likeliest tokens and their logprobs; empty where nobody asked.
        prompt_logprobs, prompt_top: of each token of the batch; empty where nobody asked.
    """

    token_ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    prompt_logprobs: list[float]
    prompt_top: list[list[tuple[int, float]]]


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
    def pairs(ids: str, logprobs: str) -> list[list[tuple[int, float]]]:
        if ids not in copied:
            return []
        rows = zip(copied[ids].tolist(), copied[logprobs].tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]

    prompt = copied.get("prompt_logprobs")
    return Told(
        copied["token_ids"].tolist(),
        copied["logprobs"].tolist(),
        pairs("top_ids", "top_logprobs"),
        [] if prompt is None else prompt.tolist(),
        pairs("prompt_top_ids", "prompt_top_logprobs"),
    )
