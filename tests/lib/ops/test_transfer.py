"""Transfers as operators, and the interpreted kernels for peer memory: every message arrives."""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from interpreting import run_interpreted
from torch import Tensor

from weft.errors import CaptureError, ProgramError
from weft.ops.transfers import transfer
from weft.transforms.graphs.graphify import graphify


class Mirror:
    """Both ends in one: a message sent to a peer is received from it."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, list[Tensor]]] = []

    def send(self, tensors: Sequence[Tensor], _: int, tag: int, /) -> None:
        self.kept.append((tag, [t.clone() for t in tensors]))

    def recv(self, tensors: Sequence[Tensor], _: int, tag: int, /) -> None:
        sent_tag, values = self.kept.pop(0)
        assert sent_tag == tag
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def test_an_end_is_found_by_its_number() -> None:
    end = Mirror()
    number = transfer.register(end)
    a = torch.arange(3)
    b = torch.zeros(3, dtype=torch.int64)
    transfer.send([a, a + 1], number, peer=1, tag=7)
    transfer.recv([b, c := torch.zeros_like(a)], number, peer=1, tag=7)
    assert (b.tolist(), c.tolist()) == ([0, 1, 2], [1, 2, 3])


def test_an_end_that_is_gone_is_named() -> None:
    number = transfer.register(Mirror())
    with pytest.raises(ProgramError, match="a transport that is closed"):
        transfer.send([torch.ones(1)], number, peer=0, tag=0)


def test_a_graph_repeats_its_transfers_where_it_may_hold_some() -> None:
    end = Mirror()
    number = transfer.register(end)

    def there_and_back(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        transfer.send([2 * x], number, peer=1, tag=3)
        transfer.recv([y], number, peer=1, tag=3)
        return y + 1

    step = graphify(there_and_back, collectives=True)
    assert [step(torch.full((2,), float(i))).tolist() for i in range(4)] == [
        [2.0 * i + 1] * 2 for i in range(4)
    ]
    assert step.cache_info().captures == 1
    with pytest.raises(CaptureError, match=r"weft\.send\.default is a collective operation"):
        graphify(there_and_back)(torch.ones(2))


_INTERPRETED = """
import random, sys, torch
from weft.ops.transfers import peer_triton as peer

random.seed(int(sys.argv[1]))
slot_bytes = peer.PROGRAMS * 4096
SLOTS = random.choice([2, 5])
slots = torch.zeros(SLOTS, slot_bytes, dtype=torch.uint8)
flags, acks = (torch.zeros(peer.PROGRAMS, dtype=torch.int64) for _ in range(2))
mine, yours = (torch.zeros(peer.PROGRAMS, dtype=torch.int64) for _ in range(2))
abort = torch.zeros(1, dtype=torch.int32)
under_way = []
for _ in range(30):
    if len(under_way) < SLOTS and random.random() < 0.6:
        dtype = random.choice([torch.int32, torch.uint8])
        most = peer.capacity(slot_bytes, dtype)
        n = random.choice([1, 3, 5, 1023, 1025, 4099, 3 * peer.PROGRAMS + 1, most - 1, most])
        x = torch.randint(0, 255, (n,), dtype=dtype)
        peer.send(x, slots.view(dtype), flags, acks, mine, abort)
        under_way.append(x)
    elif under_way:
        x = under_way.pop(0)
        y = torch.full_like(x, 77)
        peer.recv(y, slots.view(x.dtype), flags, acks, yours, abort)
        assert torch.equal(x, y), (x.shape, (x != y).nonzero()[:4])
for x in under_way:
    peer.recv(torch.empty_like(x), slots.view(x.dtype), flags, acks, yours, abort)
abort.fill_(1)
words = torch.arange(5, dtype=torch.int32)
y = torch.full_like(words, 77)
peer.recv(y, slots.view(torch.int32), flags, acks, yours, abort)  # ends, and stores nothing
assert y.eq(77).all()
for _ in range(SLOTS):  # there is room
    peer.send(words, slots.view(torch.int32), flags, acks, mine, abort)
before = slots.clone(), flags.clone(), mine.clone()
peer.send(words + 1, slots.view(torch.int32), flags, acks, mine, abort)  # ends, and overwrites nothing
assert all(map(torch.equal, before, (slots, flags, mine)))
print("right")
"""


_PACKED = """
import random, sys, torch
from weft.ops.transfers import peer_packed_triton as peer

random.seed(int(sys.argv[1]))
SLOTS = random.choice([2, 5])
slots = torch.zeros(SLOTS, peer.MOST, dtype=torch.int64)
acks, mine, yours = (torch.zeros(peer.PROGRAMS, dtype=torch.int64) for _ in range(3))
abort = torch.zeros(1, dtype=torch.int32)
under_way = []
for _ in range(40):
    if len(under_way) < SLOTS and random.random() < 0.6:
        n = random.choice([1, 3, 5, 1023, 1025, 4099, 3 * peer.PROGRAMS + 1, peer.MOST - 1, peer.MOST])
        x = torch.randint(-(2**31), 2**31 - 1, (n,)).to(torch.int32)
        peer.send(x, slots, acks, mine, abort)
        under_way.append(x)
    elif under_way:
        x = under_way.pop(0)
        y = torch.full_like(x, 77)
        peer.recv(y, slots, acks, yours, abort)
        assert torch.equal(x, y), (x.shape, (x != y).nonzero()[:4])
abort.fill_(1)
peer.recv(torch.empty(5, dtype=torch.int32), slots, acks, yours, abort)  # ends
print("right")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize("script", [_INTERPRETED, _PACKED], ids=["bulk", "packed"])
def test_the_kernels_of_symmetric_memory_interpreted(script: str, tmp_path: Path) -> None:
    assert (
        run_interpreted(script, tmp_path, random.Random(0).randrange(99), seconds=120).strip()
        == "right"
    )
