"""Ranks of collectives in the interpreter: processes that share their inboxes, each with its own
kernels."""

import mmap
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from weft.ops.transfers import peer_exchange_triton as peer
from weft.transforms.pipelines.transports.ends import peer_group
from weft.transforms.pipelines.transports.ends.peer_group import PeerGroup


@contextmanager
def small_geometry(most: int = 96, programs: int = 3, block: int = 32) -> Iterator[None]:
    """Few words make a large piece, of few chunks: the interpreter is slow."""
    kept = peer.MOST, peer_group.MOST, peer.PROGRAMS, peer.BLOCK
    peer.MOST = peer_group.MOST = most
    peer.PROGRAMS = programs
    peer.BLOCK = block
    yield
    peer.MOST, peer_group.MOST, peer.PROGRAMS, peer.BLOCK = kept


class Ranks:
    """Inboxes and abort flags that processes share, since they are forked after this is made."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        shape = ranks, ranks, peer.INBOX  # [of a rank, from a rank]
        self.inboxes = torch.frombuffer(
            mmap.mmap(-1, ranks * ranks * peer.INBOX), dtype=torch.uint8
        ).view(shape)
        # Each in memory of its own: the interpreter writes whole storages of arguments back, with
        # what they had before.
        self.aborts = [torch.frombuffer(mmap.mmap(-1, 4), dtype=torch.int32) for _ in range(ranks)]

    def abort(self) -> None:
        """End all waits."""
        for abort in self.aborts:
            abort.fill_(1)

    def group(self, own_rank: int) -> PeerGroup:
        """One rank's side, before the first collective."""
        outs = torch.tensor([self.inboxes[rank, own_rank].data_ptr() for rank in range(self.ranks)])
        ins = torch.tensor([self.inboxes[own_rank, rank].data_ptr() for rank in range(self.ranks)])
        counts = torch.zeros(peer.COUNTS, dtype=torch.int64)
        return PeerGroup(peer.Group(outs, ins, counts, self.aborts[own_rank], own_rank))

    def run(self, part: Callable[[PeerGroup], None]) -> None:
        """Call a function once in a process for each rank, and wait for all."""
        children = []
        for rank in range(self.ranks):
            if (child := os.fork()) == 0:
                try:
                    part(self.group(rank))
                except BaseException:
                    traceback.print_exc()
                    self.abort()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * self.ranks, codes


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Values whose sums are exact in bfloat16, which the interpreter cuts and does not round; all
    bits otherwise."""
    chance = torch.Generator().manual_seed(seed)
    if dtype in (torch.float32, torch.float16):
        return torch.randn(shape, generator=chance).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=chance).to(dtype)
    return torch.randint(-20 if dtype.is_signed else 0, 20, shape, generator=chance).to(dtype)
