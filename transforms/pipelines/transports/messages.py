"""What travels between processes: values as tensors, whose layout the receiver learns once."""

import hashlib
import json
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from weft.effects import Broadcast, Fence, Recv, Schema, Send
from weft.errors import ProgramError
from weft.ops.transfers import transfer
from weft.transforms.pipelines.checker import Step, puts
from weft.transforms.pipelines.transports import plain
from weft.transforms.pipelines.transports.agreement import Agreement, Expected, dumped
from weft.transforms.pipelines.transports.plan import Plan
from weft.transforms.pipelines.transports.watch import Watch
from weft.transforms.pipelines.transports.wire import Wire
from weft.trees import TreeSpec, tree_flatten, tree_unflatten
from weft.value_keys import value_key

_MAX_LAYOUTS = 1024
"""Layouts that an edge keeps."""


@attrs.frozen
class Told:
    """A tensor as the receiver must make it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen
class Constant:
    """A leaf that is no tensor, and travels with the layout. Unlike values differ though they be equal: 1 and True."""

    value: Any = attrs.field(eq=value_key)


@attrs.frozen
class Layout:
    """How to put a value together from tensors: its structure, and what to know of each leaf."""

    structure: TreeSpec
    leaves: tuple[Told | Constant, ...]
    schema: Schema

    @classmethod
    def of(cls, value: Any) -> "Layout":
        leaves, structure = tree_flatten(value)
        told = (Told(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else Constant(x) for x in leaves)
        return cls(structure, tuple(told), Schema.of(value))

    def dumps(self, call: str) -> str:
        """As text. Raises ProgramError for a constant that is no plain value; `call` is how the error names it."""
        return plain.dumps((tree_unflatten(self.leaves, self.structure), self.schema), call).decode()

    @classmethod
    def loads(cls, text: str) -> "Layout":
        """The layout that `dumps` made this text of."""
        value, schema = plain.loads(text.encode())
        leaves, structure = tree_flatten(value)
        return cls(structure, tuple(leaves), schema)

    def tensors(self) -> list[Told]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Told)]

    def empty(self, device: torch.device) -> list[Tensor]:
        """Tensors to receive into."""
        return [torch.empty(told.shape, dtype=told.dtype, device=device) for told in self.tensors()]

    def build(self, tensors: list[Tensor]) -> Any:
        """The value, of received tensors."""
        parts = iter(tensors)
        leaves = [leaf.value if isinstance(leaf, Constant) else next(parts) for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)

    def __str__(self) -> str:
        values = [leaf.value for leaf in self.leaves if isinstance(leaf, Constant) and leaf.value is not None]
        return (
            f"{self.schema}, of shapes {[told.shape for told in self.tensors()]}{f', beside {values}' * bool(values)}"
        )


class Marked(Protocol):
    """What a device is to get done, as an event of its stream."""

    def query(self) -> bool:
        """Whether it is done."""


class ProcessEnd(transfer.End, Protocol):
    """An end between processes."""

    def connect(self, timeout: float, /) -> None:
        """Meet the other ranks: all of them call it."""

    def drain(self) -> None:
        """Return when all that was sent may be overwritten by what follows on this rank."""

    def close(self, failed: bool = False) -> None:
        """Break the connections, if they are not broken."""


@runtime_checkable
class DeviceEnd(ProcessEnd, Protocol):
    """An end whose sends and receives return before they are done, in the order of a device's stream: a guard waits for
    them."""

    def mark(self) -> Marked | None:
        """What is done when all that was launched so far is; None where it was only captured."""

    def abort(self) -> None:
        """End every wait on the device; what was to be received is lost. In any thread, at any time."""


class ProcessLink:
    """One rank's ends of the edges between processes. A message is a head on the wire, which the receiver compares
    with its own journal, and tensors by the end.

    On the CPU the head is read before the tensors. A device runs ahead of no host: there, the head of a message whose
    layout is known may be read later, but before anybody reads what was computed (`received`).

    Args:
        end: what carries the tensors.
        watch: the rank's view of the others.
        wire: what carries the heads.
        agreement: this rank's journal.
        device: where tensors are received.
    """

    def __init__(self, end: ProcessEnd, watch: Watch, wire: Wire, agreement: Agreement, device: torch.device) -> None:
        self.end = end
        self.watch = watch
        self.wire = wire
        self.agreement = agreement
        self.device = device
        self.plan: Plan | None = None
        self._number = transfer.register(end)
        self._layouts: dict[str, Layout] = {}  # of what this rank sends
        self._told: dict[int, dict[str, None]] = {}  # to a peer, these of them
        self._received: dict[int, dict[str, Layout]] = {}
        self._awaited: dict[int, deque[tuple[int, str, Expected]]] = {}  # from a peer, heads still to be read
        self._count = 0
        self._first = 0

    def begin(self, plan: Plan, first: int) -> None:
        """A run begins, whose micro-batch 0 is the `first` of all runs that it goes on from."""
        self.plan = plan
        self._first = first
        self.agreement.begin(plan, first, self.watch.here.step)
        if plan.lends:  # what the run before sent last has no fence in this one
            self._drain()

    def send(self, effect: Send | Broadcast, value: Any) -> None:
        tensors = [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
        for tensor in tensors:
            self._refuse_odd(effect, tensor)
        leaves = [dense(x) for x in tensors if x.numel()]
        key = self._key(effect, self.watch.rank)
        layout = self._layout(effect, key, Layout.of(value))
        for edge in puts(Step(self.watch.rank, effect), self.watch.num_ranks):
            head = self.agreement.head(edge.to, self._first + effect.microbatch, isinstance(effect, Broadcast))
            if key not in (told := self._told.setdefault(edge.to, {})):
                head["layout"] = layout.dumps(f"rank {self.watch.rank}: '{effect}'")
                _put(told, key, None)
            self.tell(edge.to, dumped(head))
            if leaves:
                transfer.send(leaves, self._number, edge.to, _tag(key, self._first + effect.microbatch))

    def recv(self, effect: Recv | Broadcast) -> Any:
        source = effect.source if isinstance(effect, Recv) else effect.root
        key, microbatch = self._key(effect, source), self._first + effect.microbatch
        layouts = self._received.setdefault(source, {})
        self._count += 1
        expected = self.agreement.expect(microbatch, isinstance(effect, Broadcast))
        self._awaited.setdefault(source, deque()).append((self._count, key, expected))
        if isinstance(self.end, DeviceEnd) and key in layouts:
            self.compare_arrived()
        else:
            self._compare(source, self._count)
        layout = layouts[key]
        tensors = layout.empty(self.device)
        if filled := [x for x in tensors if x.numel()]:
            transfer.recv(filled, self._number, source, _tag(key, microbatch))
        return layout.build(tensors)

    def compare_arrived(self) -> None:
        """Compare the heads that have arrived. Raises as `hear` does, and ProgramError for one that differs."""
        for source, awaited in self._awaited.items():
            while awaited and (payload := self._hear_at_once(source)) is not None:
                self._compare_head(source, payload)

    def received(self, last: int | None = None) -> Callable[[], None]:
        """A function that waits for the heads of messages received so far, and compares them; it raises as
        `compare_arrived` does.

        Args:
            last: of micro-batches up to this number; None: of all.
        """
        heads = [head for awaited in self._awaited.values() for head in awaited]
        count = max((own for own, _, head in heads if last is None or head.microbatch <= last), default=0)

        def compare() -> None:
            for source in self._awaited:
                self._compare(source, count)

        return compare

    def _compare(self, source: int, count: int) -> None:
        """Compare the heads from a rank, up to that of message `count` of all."""
        awaited = self._awaited[source]
        while awaited and awaited[0][0] <= count:
            self._compare_head(source, self._hear(source))

    def _compare_head(self, source: int, payload: bytes) -> None:
        _, key, expected = self._awaited[source].popleft()
        head = json.loads(payload)
        self.agreement.compare(source, expected, head)
        if "layout" in head:
            _put(self._received[source], key, Layout.loads(head["layout"]))

    def tell(self, peer: int, payload: bytes) -> None:
        """Send bytes to a rank's host.

        Raises:
            RankError: it has gone.
        """
        try:
            self.wire.send(peer, payload)
        except OSError as error:
            raise self.watch.closed(peer, error) from error

    def hear(self, peer: int) -> bytes:
        """The next bytes that a rank's host sent to this one, after the heads of all messages.

        Raises:
            RankError: it has gone, or keeps this one waiting for too long.
            ProgramError: it runs another program.
        """
        self.received()()
        return self._hear(peer)

    def _hear(self, peer: int) -> bytes:
        try:
            with self.watch.ask(peer) as look:
                return self.wire.recv(peer, look)
        except OSError as error:
            raise self.watch.closed(peer, error) from error

    def _hear_at_once(self, peer: int) -> bytes | None:
        try:
            return self.wire.poll(peer)
        except OSError as error:
            raise self.watch.closed(peer, error) from error

    def fence(self, _: Fence, /) -> None:
        self._drain()

    def _drain(self) -> None:
        """Wait for what stages sent. What returns is a copy (`Worker.keeps`), and may be received in a later run."""
        if self.watch.rank < self.watch.num_ranks - 1:
            self.end.drain()

    def _refuse_odd(self, effect: Send | Broadcast, tensor: Tensor) -> None:
        """Raise ProgramError for a tensor that is more than its bytes, or whose gradient would be lost."""
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else tensor.dtype if tensor.is_quantized else tensor.layout
            seen, instead = f"a tensor that is {kind}".replace("torch.", ""), "return plain tensors from the stage"
        elif tensor.device.type != self.device.type:
            seen, instead = f"a tensor on '{tensor.device}'", f"return tensors on '{self.device}' from the stage"
        elif tensor.requires_grad and torch.is_grad_enabled():
            seen = "a tensor that requires grad, which does not come back from another process"
            instead = "torch.no_grad() around the call, or detach() in the stage; for gradients transport=Local()"
        else:
            return
        raise ProgramError(f"rank {self.watch.rank}: '{effect}'", seen, instead)

    def _key(self, effect: Send | Recv | Broadcast, source: int) -> str:
        """The name of a message's layout: the same for all of the same class from the same place of a pipeline."""
        assert self.plan is not None, "a step has begun"
        classes = self.plan.programs[source].classes
        text = f"{isinstance(effect, Broadcast)} {classes[effect.microbatch] if classes else ''} {self.plan.stages}"
        return f"layout/{source}/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def _layout(self, effect: Send | Broadcast, key: str, layout: Layout) -> Layout:
        """The layout that was sent for this class of message before, which this one must be."""
        known = self._layouts.get(key)
        if known is None:
            _put(self._layouts, key, layout)
        elif known != layout:
            raise ProgramError(
                f"rank {self.watch.rank}: '{effect}'",
                f"{layout}, where for the same class of batch it sent {known}",
                "shapes that follow from the batch's class alone"
                if known.tensors() != layout.tensors()
                else "what is no tensor by the batch's class alone, or else as a tensor",
            )
        return layout


def _put(known: dict[str, Any], key: str, value: Any) -> None:
    """Keep a value; of too many the oldest goes. Both ends of an edge keep the same, in the same order."""
    known[key] = value
    if len(known) > _MAX_LAYOUTS:
        del known[next(iter(known))]


def dense(tensor: Tensor) -> Tensor:
    """A tensor as its bytes lie in memory, one behind the other: what torch left for later is done."""
    found = tensor.resolve_conj().resolve_neg().contiguous()
    return found.as_strided((1,), (1,)) if found.numel() == 1 else found  # one value may have any stride


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _tag(key: str, microbatch: int) -> int:
    """What both ends know of a message: the class, the sender, the micro-batch."""
    digest = hashlib.blake2b(f"{key} {microbatch}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
