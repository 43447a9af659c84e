"""Messages between processes, sent and received by `ProcessLink`. The header travels by `wire`, and
tensors travel by the operators `weft::send` and `weft::recv` (`weft.ops.transfers.transfer`), which
call the `ProcessEnd` of gloo, NCCL or peer memory.

The header of the first message of its kind contains the value's layout, which the receiver keeps.
"""

import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from weft.effects import Broadcast, Fence, Recv, Send
from weft.errors import ProgramError
from weft.meshes.collectives import Collective, with_schema
from weft.ops.transfers import transfer
from weft.transforms.pipelines.checker import CheckedPrograms
from weft.transforms.pipelines.machine import Step, puts, stage_sent
from weft.transforms.pipelines.transports.agreement import (
    Agreement,
    Expected,
    Meeting,
    header_bytes,
)
from weft.transforms.pipelines.transports.messaging import json_values
from weft.transforms.pipelines.transports.messaging.wire import Wire
from weft.transforms.pipelines.transports.watching.monitor import Monitor
from weft.values.bounded import BoundedDict
from weft.values.keys import value_key
from weft.values.schema import Schema
from weft.values.trees import TreeSpec, tree_flatten, tree_unflatten

# How many layouts each end of an edge keeps
_MAX_LAYOUTS = 1024


@attrs.frozen
class TensorSpec:
    """The shape and dtype of a tensor that the receiver must allocate."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen
class Constant:
    """A leaf that is not a tensor; it travels in the layout. Values that compare equal but have
    different types, such as 1 and True, count as different."""

    value: Any = attrs.field(eq=value_key)


@attrs.frozen
class MessageLayout:
    """The structure of a value and the kind of each leaf, from which a receiver rebuilds the value
    with the tensors that it gets."""

    structure: TreeSpec
    leaves: tuple[TensorSpec | Constant, ...]
    schema: Schema

    @classmethod
    def of(cls, value: Any, leaves: Sequence[Any], structure: TreeSpec) -> "MessageLayout":
        """The layout of a value with these leaves."""
        return cls(structure, _specs(leaves), Schema.of(value))

    def is_of(self, leaves: Sequence[Any], structure: TreeSpec) -> bool:
        """Whether a value with these leaves has this layout. The schema need not be compared, since
        it follows from the leaves."""
        return self.leaves == _specs(leaves) and self.structure == structure

    def dumps(self, call: str) -> str:
        """The layout as text. Raises ProgramError, which names `call`, for a constant that JSON
        cannot hold."""
        return json_values.dumps(
            (tree_unflatten(self.leaves, self.structure), self.schema), call
        ).decode()

    @classmethod
    def loads(cls, text: str) -> "MessageLayout":
        """The layout from its text, made by `dumps`."""
        value, schema = json_values.loads(text.encode())
        leaves, structure = tree_flatten(value)
        return cls(structure, tuple(leaves), schema)

    def tensors(self) -> list[TensorSpec]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    def empty(self, device: torch.device) -> list[Tensor]:
        """New tensors to receive into."""
        return [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in self.tensors()]

    def build(self, tensors: list[Tensor]) -> Any:
        """The value, rebuilt with the received tensors."""
        received = iter(tensors)
        leaves = [
            leaf.value if isinstance(leaf, Constant) else next(received) for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)

    def __str__(self) -> str:
        values = [
            leaf.value
            for leaf in self.leaves
            if isinstance(leaf, Constant) and leaf.value is not None
        ]
        return (
            f"{self.schema}, of shapes"
            f" {[spec.shape for spec in self.tensors()]}{f', beside {values}' * bool(values)}"
        )


def _specs(leaves: Sequence[Any]) -> tuple[TensorSpec | Constant, ...]:
    return tuple(
        [
            TensorSpec(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else Constant(x)
            for x in leaves
        ]
    )


class DeviceEvent(Protocol):
    """An event of a device's stream, recorded after the work launched so far."""

    def query(self) -> bool:
        """Whether that work is done."""


class ProcessEnd(transfer.End, Protocol):
    """One rank's end of the edges between processes: it carries the tensors of messages."""

    def connect(self, timeout: float, /) -> None:
        """Connect to the other ranks. All ranks call this."""

    def perform(self, effect: Collective, x: Tensor, tag: int, /) -> Tensor:
        """This rank's result of a collective, in new memory. `x` is this rank's dense tensor. All
        ranks of the collective call this with the same tag."""

    def drain(self) -> None:
        """Wait until later work of this rank may overwrite everything that was sent."""

    def close(self, failed: bool = False) -> None:
        """Close the connections, if they are open."""


@runtime_checkable
class DeviceEnd(ProcessEnd, Protocol):
    """An end whose sends and receives return before they are done. They run in the order of a
    device's stream, which a watchdog watches."""

    def record_event(self) -> DeviceEvent | None:
        """An event after all work launched so far; None if the work was only captured."""

    def abort(self) -> None:
        """End every wait on the device. Any thread may call this at any time. The awaited messages
        are lost."""


class ProcessLink:
    """One rank's ends of the edges between processes. A message is a header, sent by the wire, and
    tensors, sent by the end. The receiver compares the header with its own journal.

    On the CPU the header is read before the tensors. With a device, the host must not wait, so it
    may read the header of a message with a known layout later, but not later than it reads results
    computed from the message (`received`).

    Args:
        end: carries the tensors.
        monitor: the rank's view of the others.
        wire: carries the headers.
        agreement: this rank's journal.
        device: where tensors are received.
    """

    def __init__(
        self,
        end: ProcessEnd,
        monitor: Monitor,
        wire: Wire,
        agreement: Agreement,
        device: torch.device,
    ) -> None:
        self.end = end
        self.monitor = monitor
        self.wire = wire
        self.agreement = agreement
        self.device = device
        self.checked: CheckedPrograms | None = None
        self._on_device = isinstance(end, DeviceEnd)
        self._number = transfer.register(end)
        # The keys of layouts, by what each is computed from
        self._keys = BoundedDict[Any, str](_MAX_LAYOUTS)
        # The layouts of the messages that this rank sends
        self._layouts_by_key = BoundedDict[str, MessageLayout](_MAX_LAYOUTS)
        # By peer: the keys of the layouts that it knows from this rank. Both ends of an edge add the
        # same layouts in the same order and drop the oldest, so a sender knows which layouts the
        # receiver still has.
        self._layouts_sent: dict[int, BoundedDict[str, None]] = {}
        self._layouts_received: dict[int, BoundedDict[str, MessageLayout]] = {}
        # By peer: the headers still to be read. Each entry is the message's number over all peers,
        # the key of its layout, and what the header must say.
        self._awaited: dict[int, deque[tuple[int, str, Expected | Meeting]]] = {}
        self._count = 0
        self._meetings = 0
        self._first = 0

    def begin(self, checked: CheckedPrograms, first: int) -> None:
        """Begin a run. Its micro-batch 0 has the number `first`, counted over this run and the runs
        that it continues."""
        self.checked = checked
        self._first = first
        self.agreement.begin(checked, first, self.monitor.here.step)
        # This run's programs have no fence for the last messages of the previous run.
        if checked.lends:
            self._drain()

    def send(self, effect: Send | Broadcast, value: Any) -> None:
        edges = puts(Step(self.monitor.rank, effect), self.monitor.num_ranks)
        # In a pipeline of one rank, no other rank gets the output.
        if not edges:
            return
        every, structure = tree_flatten(value)
        tensors = [x for x in every if isinstance(x, Tensor)]
        for tensor in tensors:
            self._refuse_odd(effect, tensor)
        leaves = [dense(x) for x in tensors if x.numel()]
        key = self._key(effect, self.monitor.rank)
        layout = self._layout(effect, key, value, every, structure)
        for edge in edges:
            header = self.agreement.header(
                edge.to, self._first + effect.microbatch, isinstance(effect, Broadcast)
            )
            sent = self._layouts_sent.setdefault(edge.to, BoundedDict(_MAX_LAYOUTS))
            if key not in sent:
                header["layout"] = layout.dumps(f"rank {self.monitor.rank}: '{effect}'")
                sent[key] = None
            self.send_bytes(edge.to, header_bytes(header))
            if leaves:
                transfer.send(
                    leaves, self._number, edge.to, _tag(key, self._first + effect.microbatch)
                )

    def recv(self, effect: Recv | Broadcast) -> Any:
        if isinstance(effect, Recv):
            source = effect.source
        else:
            source = effect.root
        key = self._key(effect, source)
        microbatch = self._first + effect.microbatch
        layouts = self._layouts_received.setdefault(source, BoundedDict(_MAX_LAYOUTS))
        self._count += 1
        expected = self.agreement.expect(microbatch, isinstance(effect, Broadcast))
        self._awaited.setdefault(source, deque()).append((self._count, key, expected))
        # Without the layout, the host must wait for the header, which contains it.
        if self._on_device and key in layouts:
            self.compare_arrived()
        else:
            self._compare(source, self._count)
        layout = layouts[key]
        tensors = layout.empty(self.device)
        if filled := [x for x in tensors if x.numel()]:
            transfer.recv(filled, self._number, source, _tag(key, microbatch))
        return layout.build(tensors)

    @functools.cached_property
    def member(self) -> int:
        return transfer.register(self)

    def perform(self, effect: Collective, x: Tensor, /) -> Tensor:
        """This rank's result of a collective. Each rank sends all others a header that says where
        it is, and the end moves the tensors. On the CPU, that begins only after the headers were
        compared."""
        effect = with_schema(effect, x)
        self._refuse_odd(effect, x)
        self._meetings += 1
        met = self.agreement.meet(str(effect), self._meetings)
        peers = set(effect.ranks) - {self.monitor.rank}
        with self.monitor.at_collective(effect, self._meetings):
            # Send to all before waiting for any, so that ranks do not wait for each other.
            for peer in sorted(peers):
                self.send_bytes(peer, header_bytes(self.agreement.meeting_header(peer, met)))
            for peer in sorted(peers):
                self._count += 1
                self._awaited.setdefault(peer, deque()).append((self._count, "", met))
                if not self._on_device:
                    self._compare(peer, self._count)
            if self._on_device:
                self.compare_arrived()
            return self.end.perform(
                effect, dense(x).view(x.shape), _tag(str(effect), self._meetings)
            )

    def compare_arrived(self) -> None:
        """Compare the headers that have arrived. Raises the errors of `recv_bytes`, and
        ProgramError for a header that differs."""
        for source, awaited in self._awaited.items():
            while awaited and (payload := self._poll(source)) is not None:
                self._compare_head(source, payload)

    def received(self, last: int | None = None) -> Callable[[], None]:
        """A function that waits for the headers of the messages received so far, and compares them.
        It raises the errors of `compare_arrived`.

        Args:
            last: the number of the last micro-batch that counts. None: all count.
        """
        headers = [header for awaited in self._awaited.values() for header in awaited]
        counted = (
            number
            for number, _, header in headers
            if last is None or not isinstance(header, Expected) or header.microbatch <= last
        )
        count = max(counted, default=0)

        def compare() -> None:
            for source in self._awaited:
                self._compare(source, count)

        return compare

    def _compare(self, source: int, count: int) -> None:
        """Compare the headers from a rank, up to that of message number `count` (counted over all
        ranks)."""
        awaited = self._awaited[source]
        while awaited and awaited[0][0] <= count:
            self._compare_head(source, self._recv_bytes(source))

    def _compare_head(self, source: int, payload: bytes) -> None:
        _, key, expected = self._awaited[source].popleft()
        header = json.loads(payload)
        self.agreement.compare(source, expected, header)
        if "layout" in header:
            self._layouts_received[source][key] = MessageLayout.loads(header["layout"])

    def send_bytes(self, peer: int, payload: bytes) -> None:
        """Send bytes to a rank's host.

        Raises:
            RankError: the rank has gone.
        """
        with self.monitor.explaining(peer):
            self.wire.send(peer, payload)

    def recv_bytes(self, peer: int) -> bytes:
        """The next bytes that a rank's host sent to this rank by `send_bytes`.

        Raises:
            RankError: the rank has gone, or keeps this rank waiting for too long.
        """
        # Headers come by the same connection: read those of all earlier messages first.
        self.received()()
        return self._recv_bytes(peer)

    def _recv_bytes(self, peer: int) -> bytes:
        with self.monitor.explaining(peer), self.monitor.waiting_for(peer) as look:
            return self.wire.recv(peer, look)

    def _poll(self, peer: int) -> bytes | None:
        with self.monitor.explaining(peer):
            return self.wire.poll(peer)

    def fence(self, _: Fence, /) -> None:
        self._drain()

    def _drain(self) -> None:
        """Wait until the results that stages sent may be overwritten. Returning outputs do not
        matter: they are copies (`StageRun.copies_results`), and may be received in a later run."""
        assert self.checked is not None, "a run has begun"
        # A rank that does not send on sends only returning outputs.
        if self.checked.sends_on(self.monitor.rank):
            self.end.drain()

    def _refuse_odd(self, effect: Send | Broadcast | Collective, tensor: Tensor) -> None:
        """Raise ProgramError for a tensor that cannot be sent as bytes, is on another device, or
        would lose its gradient."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = (
                "nested"
                if tensor.is_nested
                else tensor.dtype
                if tensor.is_quantized
                else tensor.layout
            )
            problem = f"a tensor that is {kind}".replace("torch.", "")
            instead = "return plain tensors from the stage"
        elif tensor.device.type != self.device.type:
            problem = f"a tensor on '{tensor.device}'"
            instead = f"return tensors on '{self.device}' from the stage"
        elif tensor.requires_grad and torch.is_grad_enabled():
            problem = "a tensor that requires grad, which does not come back from another process"
            instead = (
                "torch.no_grad() around the call, or detach() in the stage; for gradients"
                " transport=Local()"
            )
        else:
            return
        raise ProgramError(f"rank {self.monitor.rank}: '{effect}'", problem, instead)

    def _key(self, effect: Send | Recv | Broadcast, source: int) -> str:
        """The name of a message's layout. It is the same for all batches of a class that come from
        the same stage of the same pipeline."""
        assert self.checked is not None, "a run has begun"
        classes = self.checked.programs[source].classes
        if classes:
            described = classes[effect.microbatch]
        else:
            described = ""
        sent_stage = stage_sent(Step(self.monitor.rank, effect))
        of = self.checked.read_sources, isinstance(effect, Broadcast), described, source, sent_stage
        if (name := self._keys.get(of)) is None:
            if sent_stage in (None, source):
                stage = ""
            else:
                stage = f" stage {sent_stage}"
            text = (
                f"{isinstance(effect, Broadcast)} {described} {self.checked.read_sources()}{stage}"
            )
            name = f"layout/{source}/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
            self._keys[of] = name
        return name

    def _layout(
        self,
        effect: Send | Broadcast,
        key: str,
        value: Any,
        leaves: Sequence[Any],
        structure: TreeSpec,
    ) -> MessageLayout:
        """The layout of this message. It must equal the layout of the earlier messages with the
        same key, because receivers get each layout only once."""
        earlier = self._layouts_by_key.get(key)
        if earlier is not None and earlier.is_of(leaves, structure):
            return earlier
        layout = MessageLayout.of(value, leaves, structure)
        if earlier is None:
            self._layouts_by_key[key] = layout
        else:
            raise ProgramError(
                f"rank {self.monitor.rank}: '{effect}'",
                f"{layout}, where for the same class of batch it sent {earlier}",
                (
                    "shapes that depend on the batch's class only"
                    if earlier.tensors() != layout.tensors()
                    else (
                        "values other than tensors that depend on the batch's class only; or"
                        " tensors in their place"
                    )
                ),
            )
        return layout


def dense(tensor: Tensor) -> Tensor:
    """A contiguous tensor with the same values, with pending conjugations and negations done."""
    result = tensor.resolve_conj().resolve_neg().contiguous()
    # A tensor of one value counts as contiguous with any strides.
    if result.numel() == 1:
        return result.as_strided((1,), (1,))
    return result


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _tag(key: str, microbatch: int) -> int:
    """A number for a message that both ends compute, from the key of its layout and the number of
    its micro-batch (or from a collective and its number)."""
    digest = hashlib.blake2b(f"{key} {microbatch}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
