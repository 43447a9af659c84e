"""`NcclEnd` with fake communicators: what it keeps of a message, and for how long."""

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.transforms.pipelines.transports.ends.nccl import NcclEnd


class Work:
    """A send that lasts until the test ends it; like NCCL's, it holds the tensor that it sends."""

    def __init__(self, sent: Sequence[Tensor]) -> None:
        self.sent = sent
        self.has_ended = False

    def is_completed(self) -> bool:
        return self.has_ended


class Group:
    """Sends nothing."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def send(self, tensors: Sequence[Tensor], _peer: int, _tag: int) -> Work:
        self.works.append(Work(tensors))
        return self.works[-1]


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> tuple[NcclEnd, Group]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monitor: Any = SimpleNamespace(rank=0, num_ranks=2)
    end = NcclEnd(monitor, torch.device("cpu"), None)
    group = Group()
    end._groups["up"] = group
    return end, group


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_send_keeps_the_memory_and_not_the_tensor(
    sender: tuple[NcclEnd, Group], mode: Any
) -> None:
    """A step's tensors are freed when it returns; otherwise its capture as one graph would be
    refused."""
    end, group = sender
    with mode():
        message = torch.arange(8.0).view(2, 4) + 1
        expected = message.clone()
        reference = weakref.ref(message)
        end.send([message], 1, 0)
        del message
        assert reference() is None
        [sent] = group.works[0].sent
        assert sent.view(torch.float32).tolist() == expected.reshape(-1).tolist()


def test_memory_is_kept_until_a_later_send_finds_the_first_one_ended(
    sender: tuple[NcclEnd, Group],
) -> None:
    end, group = sender
    for _ in range(2):
        end.send([torch.ones(3)], 1, 0)
    assert len(end._under_way) == 2
    group.works[0].has_ended = True
    end.send([torch.ones(3)], 1, 0)
    assert [work for work, _ in end._under_way] == group.works[1:]
