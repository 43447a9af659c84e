"""Collectives among the ranks of a group, by exchanges of pieces in symmetric memory: each rank
gets only the pieces that it needs."""

import math

import attrs
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
    join,
)
from weft.meshes.placements import reduced
from weft.ops.tiles.tile import cdiv
from weft.ops.transfers.peer_exchange_triton import Group, Pieces, exchange
from weft.ops.transfers.peer_packed_triton import MOST
from weft.transforms.pipelines.transports.messaging.messages import as_bytes

# The dtypes that an exchange can sum
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)
# Pieces whose number of words is a multiple of this move in vectors.
_ALIGNED = 16


@attrs.frozen(eq=False)
class PeerGroup:
    """A rank in a group of ranks of a mesh, with which it performs collectives.

    Args:
        group: the inboxes of this rank and of the others.
    """

    group: Group

    def perform(self, effect: Collective, x: Tensor) -> Tensor:
        """This rank's result of a collective, in new memory. It takes one kernel, or two for a
        large all-reduce among more than two ranks. Values that do not fill whole words of 4 bytes
        are widened first."""
        ranks = self.group.ranks
        if not x.numel():
            return combine(effect, [x] * ranks)[self.group.own_rank].clone(
                memory_format=torch.contiguous_format
            )
        match effect:
            case AllGather(dim=dim):
                return self._joined(x, None, dim)
            case AllToAll(split_dim=split, concat_dim=dim):
                return self._joined(x, split, dim)
            case AllReduce(reduce_op=reduce_op):
                return self._reduced(x, None, reduce_op)
            case ReduceScatter(reduce_op=reduce_op, dim=dim):
                return self._reduced(x, dim, reduce_op)
            case PPermute():
                return join(effect, self._joined(x[None], None, 0).unbind(0), self.group.own_rank)

    def _reduced(self, x: Tensor, split: int | None, reduce_op: str) -> Tensor:
        """The sum, maximum or minimum of the pieces for this rank."""
        if reduce_op == "sum" and x.dtype in _SUMMED:
            return self._summed(x, split)
        every = self._joined(x[None], None if split is None else split % x.ndim + 1, 0)
        return reduced(every.unbind(0), reduce_op)

    def _joined(self, x: Tensor, split: int | None, dim: int) -> Tensor:
        """The pieces for this rank, joined along `dim`: each rank's whole tensor, or its part along
        `split`."""
        ranks = self.group.ranks
        piece = _piece(x, split, ranks)
        dim %= x.ndim
        shape = torch.Size([size * ranks if d == dim else size for d, size in enumerate(piece)])
        runs = [math.prod(piece[d:]) for d in (split % x.ndim if split is not None else 0, dim)]
        words = _words(x, runs)
        if words is None:
            narrow = {1: torch.uint8, 2: torch.int16}[x.itemsize]
            return self._joined(x.view(narrow).to(torch.int32), split, dim).to(narrow).view(x.dtype)
        source_run, target_run = (run * x.itemsize // 4 for run in runs)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        pieces = Pieces(
            math.prod(piece) * x.itemsize // 4, None if split is None else source_run, target_run
        )
        exchange(words, as_bytes(out).view(torch.int32), pieces, self.group)
        return out

    def _summed(self, x: Tensor, split: int | None) -> Tensor:
        """The sum of the pieces for this rank."""
        ranks = self.group.ranks
        piece = _piece(x, split, ranks)
        run = math.prod(piece[0 if split is None else split % x.ndim :])
        source = _words(x, [run])
        if source is None:
            return self._summed(x.float(), split).to(x.dtype)
        out = torch.empty(piece, dtype=x.dtype, device=x.device)
        total = as_bytes(out).view(torch.int32)
        words = math.prod(piece) * x.itemsize // 4
        # Reduce-scatter and all-gather: each rank sums a part and sends it to all, which moves
        # fewer bytes than sending whole tensors.
        if split is None and ranks > 2 and words > MOST:
            words = cdiv(cdiv(words, ranks), _ALIGNED) * _ALIGNED
            part = torch.empty(words, dtype=torch.int32, device=x.device)
            exchange(source, part, Pieces(words, words, None), self.group, x.dtype)
            exchange(part, total, Pieces(words, None, words), self.group)
        else:
            pieces = Pieces(words, None if split is None else run * x.itemsize // 4, None)
            exchange(source, total, pieces, self.group, x.dtype)
        return out


def _piece(x: Tensor, split: int | None, ranks: int) -> torch.Size:
    """The shape of a piece: the whole tensor's, or that of a rank's part along a dimension."""
    if split is None:
        return x.shape
    return torch.Size(
        [size // ranks if d == split % x.ndim else size for d, size in enumerate(x.shape)]
    )


def _words(x: Tensor, runs: list[int]) -> Tensor | None:
    """A tensor's memory as words of 4 bytes; None if one of its runs of elements does not fill
    whole words."""
    flat = as_bytes(x.contiguous())
    if any(run * x.itemsize % 4 for run in runs) or flat.storage_offset() % 4:
        return None
    return flat.view(torch.int32)
