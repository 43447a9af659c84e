"""Collectives by symmetric memory on two GPUs: the bits of `combine`, eagerly and in graphs."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    ReduceScatter,
    combine,
)
from weft.transforms.pipelines.transports.distributed import Distributed, end_of
from weft.transforms.pipelines.transports.launch import launch
from weft.transforms.pipelines.transports.messaging.messages import as_bytes

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

AMONG = (0, 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Words of a piece that is sent as one small message
MOST = 2**17
# Elements: of 16 bits up to 20 MB.
COUNTS = (
    1,
    2,
    3,
    7,
    255,
    4097,
    2 * MOST - 1,
    2 * MOST,
    2 * MOST + 1,
    2 * MOST + 2,
    2**19 + 34,
    5 * 2**20,
    10 * 2**20,
)
SHAPES = ((2, 2), (2, 6), (4, 10, 3), (64, 2048), (66, 8192), (128, 75968), (2, 75968), (514, 1022))
ROUNDS = 5


def cases() -> Iterator[tuple[Collective, tuple[int, ...], torch.dtype]]:
    """Collectives with the shape and dtype of each rank's tensor."""
    for count in COUNTS:
        for dtype in DTYPES:
            yield AllReduce(AMONG), (count,), dtype
        yield AllReduce(AMONG, reduce_op="max"), (count,), torch.bfloat16
        yield AllGather(AMONG), (count,), random.choice((torch.uint8, torch.bfloat16, torch.int64))
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            yield AllGather(AMONG, dim=1), shape, dtype
            yield ReduceScatter(AMONG, dim=0), shape, dtype
            yield ReduceScatter(AMONG, dim=1), shape, dtype
            yield AllToAll(AMONG, split_dim=0, concat_dim=1), shape, dtype
            yield AllToAll(AMONG, split_dim=1, concat_dim=0), shape, dtype


def drawn(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device
) -> list[Tensor]:
    """The tensors of both ranks, equal on each rank. Their magnitudes make the order of a sum
    matter."""
    chance = torch.Generator(device).manual_seed(seed)
    values = torch.randn(2, *shape, generator=chance, device=device)
    if not dtype.is_floating_point:
        return list((values * 50).abs().to(dtype))
    scale = torch.randint(-4, 4, values.shape, generator=chance, device=device)
    return list(torch.ldexp(values, scale).to(dtype))


def wait(turns: int, device: torch.device) -> None:
    """Keep the device busy."""
    x = torch.ones(1024, 1024, device=device)
    for _ in range(turns):
        x = x @ x


def differs(result: Tensor, expected: Tensor) -> bool:
    """Whether any bit differs."""
    same = result.shape == expected.shape and result.dtype == expected.dtype
    return not same or not torch.equal(as_bytes(result), as_bytes(expected.contiguous()))


def run_cases(seed: int) -> list[str]:
    """On each rank: the cases whose results differ, run eagerly and replayed with other inputs."""
    transport = Distributed(backend="peer", timeout=60)
    wrong = []
    rank = transport.rank
    device = transport.device
    end = end_of(transport)
    random.seed(seed)
    chosen = list(cases())
    random.shuffle(chosen)
    for number, (effect, shape, dtype) in enumerate(chosen):
        x = drawn(shape, dtype, 0, device)[rank]
        tiny = torch.full((3,), float(rank + 1), device=device)
        eager = end.perform(effect, x, 0)
        if differs(eager, combine(effect, drawn(shape, dtype, 0, device))[rank]):
            wrong.append(f"eager {effect} of {shape} {dtype}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            first = end.perform(effect, x, 0)
            between = end.perform(AllReduce(AMONG), tiny, 0)
            second = end.perform(effect, x, 0)
        for turn in range(1, ROUNDS):
            every = drawn(shape, dtype, turn, device)
            x.copy_(every[rank])
            wait((number * turn * (1 + 2 * rank)) % 3, device)
            graph.replay()
            expected = combine(effect, every)[rank]
            if (
                differs(first, expected)
                or differs(second, expected)
                or between.tolist() != [3.0] * 3
            ):
                wrong.append(f"replay {turn} of {effect} of {shape} {dtype}")
        graph.reset()
    transport.close()
    return wrong


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("seed", range(2))
def test_on_gpus_a_collective_has_the_bits_of_its_definition(seed: int) -> None:
    assert launch(run_cases, 2, seed, timeout=60) == [[], []]


def run_many(replays: int) -> int:
    """On each rank: the replays with a wrong bit, of a graph of many small and large collectives.
    Ranks wait at random places, and nothing waits for the host."""
    transport = Distributed(backend="peer", timeout=60)
    rank = transport.rank
    device = transport.device
    end = end_of(transport)
    effect = AllReduce(AMONG)
    among = random.Random(rank)
    sizes = [2048 * n for n in (1, 128, 256, 300, 512, 2048, 1, 700)]
    xs = [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in sizes]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for x in xs:
        end.perform(effect, x, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for x in xs:
            reduced = end.perform(effect, x, 0)
            wrong += (reduced != 2 * x + (10 if rank == 0 else -10)).any()  # rank 1 has 10 more
    for replay in range(replays):
        wait(among.choice((0, 0, 0, 1, 3)), device)
        for index, x in enumerate(xs):
            # Sums of up to 256, which bfloat16 represents exactly
            x.fill_((replay + index) % 80 + 10 * rank)
        graph.replay()
    torch.cuda.synchronize()
    transport.close()
    return int(wrong)


@pytest.mark.gpu
@two_gpus
def test_ranks_that_run_apart_overwrite_nothing_that_is_still_read() -> None:
    assert launch(run_many, 2, 2000, timeout=60) == [0, 0]


def run_alone(count: int) -> float:
    """On rank 0: the seconds that a collective takes to end once its wait is aborted; rank 1 takes
    no part."""
    transport = Distributed(backend="peer", timeout=60)
    end: Any = end_of(transport)
    x = torch.ones(count, device=transport.device)
    assert float(end.perform(AllReduce(AMONG), x, 0).sum()) == 2 * count
    torch.cuda.synchronize()
    seconds = 0.0
    if transport.rank == 0:
        end.perform(AllReduce(AMONG), x, 0)
        ended = torch.cuda.Event()
        ended.record()
        time.sleep(0.5)
        assert not ended.query()
        start = time.monotonic()
        end.abort()
        ended.synchronize()
        seconds = time.monotonic() - start
    transport.collect(seconds)
    transport.close()
    return seconds


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("count", [1000, 2**22])
def test_an_abort_ends_a_collective_that_waits_for_a_rank(count: int) -> None:
    seconds, _ = launch(run_alone, 2, count, timeout=60)
    assert seconds < 2
