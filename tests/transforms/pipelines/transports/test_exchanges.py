"""Collectives between processes, by gloo, by a fake NCCL, and on GPUs: their results are those of
the definition, and an exchange moves no more than its parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    ReduceScatter,
    combine,
)
from weft.transforms.pipelines.transports.distributed import Distributed, end_of
from weft.transforms.pipelines.transports.ends.gloo import GlooEnd
from weft.transforms.pipelines.transports.ends.nccl import NcclEnd
from weft.transforms.pipelines.transports.launch import launch

RANKS = (0, 1, 2)


def effects(ranks: tuple[int, ...]) -> list[tuple[Collective, int]]:
    """Collectives of `inputs`, each with the number of values that a rank sends to the others."""
    num_peers = len(ranks) - 1
    whole = 6 * len(ranks) ** 2
    part = whole // len(ranks)
    return [
        (AllReduce(ranks), num_peers * whole),
        (AllReduce(ranks, reduce_op="max"), num_peers * whole),
        (AllGather(ranks, dim=1), num_peers * whole),
        (ReduceScatter(ranks, dim=-1), num_peers * part),
        (ReduceScatter(ranks, reduce_op="min"), num_peers * part),
        (AllToAll(ranks, split_dim=0, concat_dim=1), num_peers * part),
        (AllToAll(ranks, split_dim=-1, concat_dim=0), num_peers * part),
        (AllToAll(ranks, split_dim=1, concat_dim=1), num_peers * part),
        (PPermute(ranks, pairs=tuple((i, (i + 1) % len(ranks)) for i in range(len(ranks)))), whole),
    ]


def inputs(count: int = len(RANKS)) -> list[Tensor]:
    """A matrix of each rank."""
    shape = 2 * count, 3 * count
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(count)
    ]


def on_gloo() -> list[tuple[Tensor, int]]:
    """This rank's result of each collective, and the values that it sent for it."""
    transport = Distributed(timeout=20)
    end = end_of(transport)
    results = []
    assert isinstance(end, GlooEnd)
    send, sent = end.send, list[int]()

    def counted(tensors: Any, peer: int, tag: int) -> None:
        sent.extend(x.nbytes // 4 for x in tensors)
        send(tensors, peer, tag)

    end.send = counted  # type: ignore[method-assign]
    for tag, (effect, _) in enumerate(effects(RANKS)):
        sent.clear()
        results.append((end.perform(effect, inputs()[transport.rank], tag), sum(sent)))
    assert end.perform(AllToAll(RANKS), torch.empty(0, 3), 0).shape == (0, 3)
    transport.close()
    return results


def test_gloo_sends_each_rank_its_part() -> None:
    every = launch(on_gloo, len(RANKS))
    for index, (effect, count) in enumerate(effects(RANKS)):
        for rank, expected in enumerate(combine(effect, inputs())):
            result, sent = every[rank][index]
            assert torch.equal(result, expected), (effect, rank)
            assert result.is_contiguous()
            assert sent == count, (effect, rank)


def on_gpus(backend: Any, dtype: torch.dtype) -> list[str]:
    """The collectives whose results on this rank, eagerly or in a graph, differ from the
    definition."""
    transport = Distributed(backend=backend, timeout=60)
    count = transport.num_ranks
    rank = transport.rank
    device = transport.device
    wrong = []
    rank_inputs = [x.to(device, dtype) for x in inputs(count)]
    for effect, _ in effects(tuple(range(count))):
        expected = combine(effect, rank_inputs)[rank]
        eager = end_of(transport).perform(effect, rank_inputs[rank], 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = end_of(transport).perform(effect, rank_inputs[rank], 0)
        graph.replay()
        transport.synchronize()
        wrong += [f"{effect}"] * (
            not (torch.equal(eager, expected) and torch.equal(captured, expected))
        )
        del graph
    transport.close()
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", "peer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 4])
def test_gpus_get_what_is_defined(count: int, backend: str, dtype: torch.dtype) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    assert launch(on_gpus, count, backend, dtype, timeout=60) == [[]] * count


class Group:
    """A communicator that the other ranks have already reached."""

    def __init__(self, rank: int, rank_tensors: list[Tensor]) -> None:
        self.rank = rank
        self.rank_tensors = rank_tensors
        self.received = 0

    def _fill(self, out: Tensor, received: list[Tensor]) -> Any:
        for row, part in zip(out, received, strict=True):
            row.copy_(part)
        self.received = sum(part.numel() for i, part in enumerate(received) if i != self.rank)
        return SimpleNamespace(wait=lambda: None)

    def _allgather_base(self, out: Tensor, tensor: Tensor) -> Any:
        return self._fill(
            out, [tensor if i == self.rank else x for i, x in enumerate(self.rank_tensors)]
        )

    def alltoall_base(self, out: Tensor, tensor: Tensor, *sizes: list[int]) -> Any:
        assert sizes == ([], [])
        assert out.is_contiguous()
        assert tensor.is_contiguous()
        assert len(tensor) == len(self.rank_tensors), "cut by the first dimension"
        return self._fill(
            out,
            [tensor[self.rank] if i == self.rank else x for i, x in enumerate(self.rank_tensors)],
        )


@pytest.mark.parametrize(("effect", "count"), effects(RANKS), ids=map(str, dict(effects(RANKS))))
@pytest.mark.parametrize("rank", RANKS)
def test_nccl_receives_a_part_of_each_rank(effect: Collective, count: int, rank: int) -> None:
    rank_tensors = inputs()
    if isinstance(effect, AllToAll | ReduceScatter):
        dim = effect.dim if isinstance(effect, ReduceScatter) else effect.split_dim
        rank_tensors = [x.chunk(len(RANKS), dim)[rank] for x in rank_tensors]
    group = Group(rank, rank_tensors)
    monitor = SimpleNamespace(rank=rank, num_ranks=len(RANKS))
    untyped_monitor: Any = monitor
    end = NcclEnd(untyped_monitor, torch.device("cpu"), None)
    end._groups["ranks 0,1,2"] = group
    assert torch.equal(end.perform(effect, inputs()[rank], 0), combine(effect, inputs())[rank])
    if isinstance(effect, PPermute):  # which NCCL gathers
        count *= len(RANKS) - 1
    assert group.received == count
