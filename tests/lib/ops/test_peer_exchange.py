"""The collectives of symmetric memory, interpreted: each rank is a process, and `combine` defines
the results."""

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from interpreting import run_interpreted

_COLLECTIVES = """
import random, sys, time, torch
from exchanging import Ranks, drawn, small_geometry
from weft.meshes.collectives import AllGather, AllReduce, AllToAll, PPermute, ReduceScatter, combine

RANKS, SEED = int(sys.argv[1]), int(sys.argv[2])
among = (*range(RANKS),)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def draw(number):
    chance = random.Random(f"{SEED} {number}")
    rows, size, last = RANKS * chance.choice([1, 2]), RANKS * chance.choice([1, 8, 21]), chance.choice([1, 3, 16])
    shape, dim, to = (rows, size, last), chance.choice([0, 1, -2]), chance.choice([0, 1, 2, -1])
    op = chance.choice(["sum", "sum", "max"])
    effect = chance.choice([
        AllReduce(among, reduce_op=op), AllGather(among, dim=to),
        ReduceScatter(among, reduce_op=op, dim=dim), AllToAll(among, split_dim=dim, concat_dim=to),
        PPermute(among, pairs=((RANKS - 1, 0), (0, 1))),
    ])
    dtype = chance.choice(DTYPES[:3] if isinstance(effect, AllReduce) and op == "sum" else DTYPES)
    every = [drawn(shape, dtype, chance.randrange(2**31)) for _ in among]
    return effect, every, chance.choice([True, False]), [chance.random() * 0.03 for _ in among]


def part(group):
    own = group.group.own_rank
    for number in range(24):
        effect, every, whole, pauses = draw(number)
        x = every[own]
        if not whole:  # in the middle of other memory, aligned to its dtype alone
            x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        time.sleep(pauses[own])
        expected, made = combine(effect, every)[own], group.perform(effect, x)
        assert made.shape == expected.shape and made.dtype == expected.dtype, (effect, made.shape, expected.shape)
        assert torch.equal(made, expected), (number, effect, x.dtype, x.shape, whole)


with small_geometry():
    Ranks(RANKS).run(part)
print("right")
"""

_ABORTED = """
import sys, threading, torch
from exchanging import Ranks, small_geometry
from weft.meshes.collectives import AllReduce

count, effect = int(sys.argv[1]), AllReduce((0, 1))
x = torch.arange(float(count))


def part(group):
    assert torch.equal(group.perform(effect, x), 2 * x)
    if group.group.own_rank == 0:  # and rank 1 takes no part
        before = group.group.counts.clone()
        threading.Timer(0.3, group.group.abort.fill_, [1]).start()
        group.perform(effect, x)
        assert group.group.abort == 1 and torch.equal(group.group.counts, before)


with small_geometry():
    Ranks(2).run(part)
print("right")
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")


@linux
@pytest.mark.slow
@pytest.mark.one_of(1, 3)
@pytest.mark.parametrize("ranks", [2, 3, 1])
def test_a_collective_is_what_combine_defines(ranks: int, tmp_path: Path) -> None:
    seed = random.Random(ranks).randrange(99)
    assert run_interpreted(_COLLECTIVES, tmp_path, ranks, seed).strip() == "right"


@linux
@pytest.mark.slow
@pytest.mark.one_of(1, 2)
@pytest.mark.parametrize("count", [500, 10], ids=["large", "small"])
def test_an_abort_ends_the_wait_for_a_rank_that_takes_no_part(count: int, tmp_path: Path) -> None:
    assert run_interpreted(_ABORTED, tmp_path, count, seconds=60).strip() == "right"


def overwrites(ranks: int, launches: Sequence[int], ahead: int, slots: int) -> bool:
    """Whether some order of events lets a rank send into a slot that another one has yet to read,
    by trying all.

    Args:
        launches: chunks of each launch.
        ahead, slots: of the protocol that `weft.ops.transfers.peer_exchange_triton` describes.
    """
    program = list[tuple[str, int]]()
    first = 0
    for chunks in launches:
        for step in range(chunks + ahead):
            program += [("send", first + step)] * (step < chunks) + [
                ("read", first + step - ahead)
            ] * (step >= ahead)
        first += chunks
    # The sends and the reads among the first events of a rank, by the number of these.
    done = {
        kind: [0, *itertools.accumulate(event == kind for event, _ in program)]
        for kind in ("send", "read")
    }
    visited = set[tuple[int, ...]]()
    left = [(0,) * ranks]
    while left:
        places = left.pop()
        for rank, place in enumerate(places):
            if place == len(program):
                continue
            kind, chunk = program[place]
            other_places = [other for r, other in enumerate(places) if r != rank]
            if kind == "read" and any(done["send"][other] <= chunk for other in other_places):
                continue
            if kind == "send" and any(
                done["read"][other] <= chunk - slots for other in other_places
            ):
                return True
            after = (*places[:rank], place + 1, *places[rank + 1 :])
            if after not in visited:
                visited.add(after)
                left.append(after)
    assert (len(program),) * ranks in visited, "it ends"
    return False


@pytest.mark.parametrize("launches", [[30], [1] * 20, [2, 9, 1, 1, 4, 3, 12], [3, 4, 5, 1, 8]])
@pytest.mark.parametrize("ahead", range(5))
def test_a_ring_has_as_many_slots_as_it_needs(ahead: int, launches: list[int]) -> None:
    assert not overwrites(2, launches, ahead, 2 + 2 * ahead)
    if max(launches) > 2 * ahead:
        assert overwrites(2, launches, ahead, 1 + 2 * ahead)


def test_three_ranks_need_no_more_slots() -> None:
    assert not overwrites(3, [2, 9, 1], 1, 4)
    assert overwrites(3, [2, 9, 1], 1, 3)
