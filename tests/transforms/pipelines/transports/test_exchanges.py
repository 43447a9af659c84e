"""Collectives between processes, by gloo and by an NCCL that is none: their results are those of the definition, and an
exchange moves no more than its parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.meshes.collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter, combine
from weft.transforms.pipelines.transports.distributed import Distributed
from weft.transforms.pipelines.transports.gloo import GlooEnd
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.nccl import NcclEnd

RANKS = (0, 1, 2)
SHAPE, ITEMS = (6, 9), 54
EFFECTS: list[tuple[Collective, int]] = [
    (AllReduce(RANKS), 2 * ITEMS),
    (AllReduce(RANKS, reduce_op="max"), 2 * ITEMS),
    (AllGather(RANKS, dim=1), 2 * ITEMS),
    (ReduceScatter(RANKS, dim=-1), 2 * ITEMS // 3),
    (ReduceScatter(RANKS, reduce_op="min"), 2 * ITEMS // 3),
    (AllToAll(RANKS, split_dim=0, concat_dim=1), 2 * ITEMS // 3),
    (AllToAll(RANKS, split_dim=-1, concat_dim=0), 2 * ITEMS // 3),
    (AllToAll(RANKS, split_dim=1, concat_dim=1), 2 * ITEMS // 3),
]
"""Each with the number of values that a rank sends to the others."""


def inputs() -> list[Tensor]:
    return [torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank)) for rank in RANKS]


def on_gloo() -> list[tuple[Tensor, int]]:
    """This rank's result of each collective, and the values that it sent for it."""
    transport = Distributed(timeout=20)
    end, found = transport.end, []
    assert isinstance(end, GlooEnd)
    send, sent = end.send, list[int]()

    def counted(tensors: Any, peer: int, tag: int) -> None:
        sent.extend(x.nbytes // 4 for x in tensors)
        send(tensors, peer, tag)

    end.send = counted  # type: ignore[method-assign]
    for tag, (effect, _) in enumerate(EFFECTS):
        sent.clear()
        found.append((end.perform(effect, inputs()[transport.rank], tag), sum(sent)))
    assert end.perform(EFFECTS[-1][0], torch.empty(0, 3), 0).shape == (0, 3)
    transport.close()
    return found


def test_gloo_sends_each_rank_its_part() -> None:
    every = launch(on_gloo, len(RANKS))
    for index, (effect, count) in enumerate(EFFECTS):
        for rank, expected in enumerate(combine(effect, inputs())):
            made, sent = every[rank][index]
            assert torch.equal(made, expected), (effect, rank)
            assert made.is_contiguous()
            assert sent == count, (effect, rank)


class Group:
    """A communicator to which the others have come already."""

    def __init__(self, rank: int, others: list[Tensor]) -> None:
        self.rank, self.others, self.received = rank, others, 0

    def _fill(self, out: Tensor, received: list[Tensor]) -> Any:
        for row, part in zip(out, received, strict=True):
            row.copy_(part)
        self.received = sum(part.numel() for i, part in enumerate(received) if i != self.rank)
        return SimpleNamespace(wait=lambda: None)

    def _allgather_base(self, out: Tensor, given: Tensor) -> Any:
        return self._fill(out, [given if i == self.rank else x for i, x in enumerate(self.others)])

    def alltoall_base(self, out: Tensor, given: Tensor, *sizes: list[int]) -> Any:
        assert sizes == ([], [])
        assert out.is_contiguous()
        assert given.is_contiguous()
        assert len(given) == len(self.others), "cut by the first dimension"
        return self._fill(out, [given[self.rank] if i == self.rank else x for i, x in enumerate(self.others)])


@pytest.mark.parametrize(("effect", "count"), EFFECTS, ids=[str(effect) for effect, _ in EFFECTS])
@pytest.mark.parametrize("rank", RANKS)
def test_nccl_receives_a_part_of_each_rank(effect: Collective, count: int, rank: int) -> None:
    others = inputs()
    if isinstance(effect, AllToAll | ReduceScatter):
        dim = effect.dim if isinstance(effect, ReduceScatter) else effect.split_dim
        others = [x.chunk(len(RANKS), dim)[rank] for x in others]
    group, monitor = Group(rank, others), SimpleNamespace(rank=rank, num_ranks=len(RANKS))
    given: Any = monitor
    end = NcclEnd(given, torch.device("cpu"), None)
    end._groups["ranks 0,1,2"] = group
    assert torch.equal(end.perform(effect, inputs()[rank], 0), combine(effect, inputs())[rank])
    assert group.received == count
