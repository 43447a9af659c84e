"""The end of a rank's edges in symmetric memory: stores into the neighbour's GPU, and a flag; no multicast."""

from collections.abc import Iterator, Sequence

import attrs
import torch
from torch import Tensor

from weft.ops import peer_triton
from weft.ops.peer_triton import PROGRAMS, SLOTS
from weft.torchapi import symmetric_memory
from weft.transforms.transports.watch import Watch

SLOT_BYTES = 2**24
"""Bytes of a slot; a longer message goes in parts."""
_FLAG_BYTES = PROGRAMS * 8


@attrs.frozen(eq=False)
class Channel:
    """One end of an edge: where the receiver's slots and flags are, where the sender's acknowledgements, and how many
    messages there were."""

    slots: Tensor
    flags: Tensor
    acks: Tensor
    counts: Tensor


class PeerEnd:
    """Sends with one kernel, and receives with one, in the order of the stream; both may stand in a graph.

    Each rank's symmetric memory holds, for what comes from below (stages) and from above (what returns), slots and
    flags; and acknowledgements, for each rank that it sends to.
    """

    def __init__(self, watch: Watch, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        self.watch = watch
        self.device = device
        self.slot_bytes = slot_bytes
        edge = SLOTS * slot_bytes + _FLAG_BYTES
        nbytes = 2 * edge + watch.num_ranks * _FLAG_BYTES
        self._views = symmetric_memory("peer", watch.store, watch.rank, watch.num_ranks, nbytes, device)
        self._abort = torch.zeros(1, dtype=torch.int32, device=device)
        self._aside = torch.cuda.Stream(device)
        self._sends = {peer: self._channel(watch.rank, peer) for peer in range(watch.num_ranks) if peer != watch.rank}
        self._recvs = {peer: self._channel(peer, watch.rank) for peer in range(watch.num_ranks) if peer != watch.rank}

    def _channel(self, source: int, to: int) -> Channel:
        """The edge from one rank to another: a rank has one from below, and one from above."""
        inbox, outbox = self._views[to], self._views[source]
        edge = SLOTS * self.slot_bytes + _FLAG_BYTES
        start = 0 if source < to else edge
        slots = inbox[start : start + SLOTS * self.slot_bytes].view(SLOTS, self.slot_bytes)
        flags = inbox[start + SLOTS * self.slot_bytes : start + edge].view(torch.int64)
        first = 2 * edge + to * _FLAG_BYTES
        acks = outbox[first : first + _FLAG_BYTES].view(torch.int64)
        return Channel(slots, flags, acks, torch.zeros(PROGRAMS, dtype=torch.int64, device=self.device))

    def send(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        channel = self._sends[peer]
        for part in self._parts(tensors):
            slots = channel.slots.view(part.dtype)
            peer_triton.send(part, slots, channel.flags, channel.acks, channel.counts, self._abort)

    def recv(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        channel = self._recvs[peer]
        for part in self._parts(tensors):
            slots = channel.slots.view(part.dtype)
            peer_triton.recv(part, slots, channel.flags, channel.acks, channel.counts, self._abort)

    def _parts(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Each tensor as words of 4 bytes (of 1, where it is no multiple), in parts that fit a slot."""
        for tensor in tensors:
            words = tensor.reshape(-1).view(torch.uint8)
            words = words.view(torch.int32) if tensor.nbytes % 4 == 0 and tensor.data_ptr() % 4 == 0 else words
            most = peer_triton.capacity(self.slot_bytes, words.dtype)
            yield from words.split(most) if words.numel() > most else (words,)

    def drain(self) -> None:
        """Nothing to wait for: a send has left its buffer when its kernel ends."""

    def abort(self) -> None:
        """End every kernel that waits here, from a stream of its own."""
        with torch.cuda.stream(self._aside):
            self._abort.fill_(1)

    def close(self, failed: bool = False) -> None:
        """End what waits, if a rank failed; else wait for what is under way."""
        if failed:
            self.abort()
        else:
            torch.cuda.synchronize(self.device)
