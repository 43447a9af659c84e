"""The peer end: carries tensors by stores into another GPU's symmetric memory, with a flag for each
message, and without multicast."""

import itertools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from weft.errors import MeshError
from weft.meshes.collectives import Collective
from weft.ops.kernel_triton import compiling
from weft.ops.transfers import (
    peer_exchange_triton as meeting,
    peer_packed_triton as packed,
    peer_triton as bulk,
)
from weft.ops.transfers.peer_triton import PROGRAMS
from weft.torchapi.distributed import symmetric_memory
from weft.transforms.pipelines.transports.ends.peer_group import PeerGroup
from weft.transforms.pipelines.transports.messaging.messages import DeviceEvent, as_bytes
from weft.transforms.pipelines.transports.watching.monitor import CAPACITY, Monitor

# The bytes of a slot; a longer message is sent in parts.
SLOT_BYTES = 2**24
_COUNTS = PROGRAMS * 8


@attrs.frozen(eq=False)
class Channel:
    """One end of an edge: the receiver's slots and flags, the sender's acknowledgements, and the
    number of messages so far. Small messages have separate slots, acknowledgements and numbers
    (`packed`); each of their words travels with its own flag."""

    slots: Tensor
    flags: Tensor
    acks: Tensor
    counts: Tensor
    packed_slots: Tensor
    packed_acks: Tensor
    packed_counts: Tensor


class PeerEnd:
    """One rank's ends of the edges in symmetric memory. A send is one kernel, and so is a receive;
    both run in the order of the stream, and can be captured in a graph.

    Each rank's symmetric memory holds slots and flags for messages from below (results of stages)
    and from above (returning outputs), acknowledgements for each rank that it sends to, and for
    each other rank an inbox of 10 MiB for collectives.
    """

    def __init__(
        self, monitor: Monitor, device: torch.device, address: str, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self.monitor = monitor
        self._address = address
        self.device = device
        self.slot_bytes = slot_bytes
        # Outputs that return from above may be received in a later run, so there must be a slot for
        # every job that a rank may run ahead.
        self._slots = {"below": CAPACITY, "above": monitor.num_ranks + CAPACITY}
        self._outbox = (_COUNTS, 8 * packed.PROGRAMS)
        self._abort = torch.zeros(1, dtype=torch.int32, device=device)
        self._aside = torch.cuda.Stream(device)
        self._views: list[Tensor] = []
        self._sends: dict[int, Channel] = {}
        self._recvs: dict[int, Channel] = {}
        self._groups: dict[tuple[int, ...], PeerGroup] = {}

    def connect(self, _: float, /) -> None:
        monitor = self.monitor
        torch.cuda.set_device(self.device)
        self._met_at = sum(map(sum, map(self._inbox, self._slots))) + monitor.num_ranks * sum(
            self._outbox
        )
        nbytes = self._met_at + (monitor.num_ranks - 1) * meeting.INBOX
        self._views = symmetric_memory(
            "peer",
            monitor.records.store,
            monitor.rank,
            monitor.num_ranks,
            nbytes,
            self.device,
            self._address,
        )
        for peer in range(monitor.num_ranks):
            if peer != monitor.rank:
                self._sends[peer] = self._channel(monitor.rank, peer)
                self._recvs[peer] = self._channel(peer, monitor.rank)
        self._compile()

    def _compile(self) -> None:
        """Compile the kernels for messages of any number of words, aligned to 16 bytes, before the
        first message is sent. Long messages have two kernels: one for multiples of 16 words, and
        one for other numbers."""
        with compiling():
            for peer, words in itertools.product(
                self._sends, (*packed.LENGTHS, packed.MOST + 1, packed.MOST + 16)
            ):
                message = torch.empty(words, dtype=torch.int32, device=self.device)
                self._put(message, self._sends[peer])
                self._take(message, self._recvs[peer])

    def perform(self, effect: Collective, x: Tensor, _: int, /) -> Tensor:
        """This rank's result of a collective; no host waits for it."""
        ranks = effect.ranks
        group = self._groups.get(ranks) or self._groups.setdefault(ranks, self._group(ranks))
        return group.perform(effect, x)

    def _group(self, ranks: tuple[int, ...]) -> PeerGroup:
        """The ranks of a collective, with their inboxes."""
        own_rank = self.monitor.rank
        # A pair of ranks has one inbox for collectives. Two groups with this pair would count its
        # messages separately, and overwrite each other's.
        if shared := next((other for other in self._groups if len({*other} & {*ranks}) > 1), None):
            problem = (
                f"collectives among {ranks} and among {shared}, which share more than one rank"
            )
            raise MeshError(
                f"a mesh over {self.monitor.num_ranks} ranks", problem, "one mesh for a transport"
            )
        outs = [0 if rank == own_rank else self._meeting_place(rank, own_rank) for rank in ranks]
        ins = [0 if rank == own_rank else self._meeting_place(own_rank, rank) for rank in ranks]
        addresses = torch.tensor([outs, ins], dtype=torch.int64, device=self.device)
        counts = torch.zeros(meeting.COUNTS, dtype=torch.int64, device=self.device)
        return PeerGroup(
            meeting.Group(addresses[0], addresses[1], counts, self._abort, ranks.index(own_rank))
        )

    def _meeting_place(self, rank: int, source: int) -> int:
        """The address of a rank's inbox for the pieces that `source` sends in collectives."""
        return (
            self._views[rank].data_ptr() + self._met_at + (source - (source > rank)) * meeting.INBOX
        )

    def _inbox(self, side: str) -> tuple[int, int, int]:
        """For messages from one side, the bytes of the slots, of the flags, and of the slots for
        small messages."""
        slots = self._slots[side]
        return slots * self.slot_bytes, _COUNTS, 8 * slots * packed.MOST

    def _channel(self, source: int, to: int) -> Channel:
        """The edge from one rank to another. Each rank has one inbox for messages from below, and
        one for messages from above."""
        below = self._inbox("below")
        above = self._inbox("above")
        inboxes = sum(below) + sum(above)
        outbox = sum(self._outbox)
        side, count = (
            (below, self._slots["below"]) if source < to else (above, self._slots["above"])
        )
        first = 0 if source < to else sum(below)
        slots, flags, packed_slots = self._views[to][first : first + sum(side)].split(side)
        mine = self._views[source][inboxes + to * outbox : inboxes + (to + 1) * outbox]
        acks, packed_acks = mine.split(self._outbox)
        counts, packed_counts = torch.zeros(
            PROGRAMS + packed.PROGRAMS, dtype=torch.int64, device=self.device
        ).split([PROGRAMS, packed.PROGRAMS])
        return Channel(
            slots.view(count, self.slot_bytes),
            flags.view(torch.int64),
            acks.view(torch.int64),
            counts,
            packed_slots.view(torch.int64).view(count, packed.MOST),
            packed_acks.view(torch.int64),
            packed_counts,
        )

    def send(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        for part in self._parts(_joined(tensors)):
            self._put(part, self._sends[peer])

    def _put(self, part: Tensor, to: Channel) -> None:
        if _is_small(part):
            packed.send(part, to.packed_slots, to.packed_acks, to.packed_counts, self._abort)
        else:
            bulk.send(part, to.slots.view(part.dtype), to.flags, to.acks, to.counts, self._abort)

    def recv(self, tensors: Sequence[Tensor], peer: int, _: int, /) -> None:
        if len(tensors) != 1 or not _is_aligned(as_bytes(tensors[0])):
            whole = torch.empty(
                sum(x.nbytes for x in tensors), dtype=torch.uint8, device=self.device
            )
            self._fill(whole, self._recvs[peer])
            for tensor, part in zip(tensors, whole.split([x.nbytes for x in tensors]), strict=True):
                as_bytes(tensor).copy_(part)
        else:
            self._fill(as_bytes(tensors[0]), self._recvs[peer])

    def _fill(self, message: Tensor, source: Channel) -> None:
        for part in self._parts(message):
            self._take(part, source)

    def _take(self, part: Tensor, source: Channel) -> None:
        if _is_small(part):
            packed.recv(
                part, source.packed_slots, source.packed_acks, source.packed_counts, self._abort
            )
        else:
            bulk.recv(
                part,
                source.slots.view(part.dtype),
                source.flags,
                source.acks,
                source.counts,
                self._abort,
            )

    def _parts(self, message: Tensor) -> Sequence[Tensor]:
        """A message of bytes as words of 4 bytes (of 1 byte if its length is not a multiple of 4),
        in parts that fit a slot. The parts depend only on its size, so that both ends agree."""
        words = message.view(torch.int32) if message.numel() % 4 == 0 else message
        most = bulk.capacity(self.slot_bytes, words.dtype)
        return words.split(most) if words.numel() > most else (words,)

    def drain(self) -> None:
        """Do nothing: a send has left its buffer when its kernel ends."""

    def record_event(self) -> DeviceEvent | None:
        # An event that is recorded in a capture becomes part of the graph, and cannot be queried.
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def abort(self) -> None:
        """End every kernel that waits on this rank's device."""
        # From another stream: the current one is blocked by the waiting kernel.
        with torch.cuda.stream(self._aside):
            self._abort.fill_(1)

    def close(self, failed: bool = False) -> None:
        """If a rank failed, end the kernels that wait; otherwise wait until all work is done."""
        if failed:
            self.abort()
        else:
            torch.cuda.synchronize(self.device)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors of a message, in order, joined because a message takes one slot."""
    parts = [as_bytes(tensor) for tensor in tensors]
    if len(parts) == 1 and _is_aligned(parts[0]):
        return parts[0]
    return torch.cat(parts)


def _is_aligned(message: Tensor) -> bool:
    return not message.storage_offset() % 4


def _is_small(part: Tensor) -> bool:
    return part.dtype == torch.int32 and part.numel() <= packed.MOST
