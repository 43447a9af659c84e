"""What travels between processes: values as tensors, whose layout the receiver learns once."""

import hashlib
import pickle
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from weft.alike import alike
from weft.effects import Broadcast, Fence, Recv, Schema, Send
from weft.errors import ProgramError
from weft.ops import transfer
from weft.transforms.checker import Step, puts
from weft.transforms.transports.plan import Plan
from weft.transforms.transports.watch import Watch
from weft.trees import TreeSpec, tree_flatten, tree_unflatten


@attrs.frozen
class Told:
    """A tensor as the receiver must make it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen
class Constant:
    """A leaf that is no tensor, and travels with the layout. Unlike values differ though they be equal: 1 and True."""

    value: Any = attrs.field(eq=alike)


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

    def __reduce__(self) -> Any:
        """As the value with its leaves told: torch deprecates what pickling a structure does."""
        return _rebuilt, (tree_unflatten(self.leaves, self.structure), self.schema)

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


def _rebuilt(value: Any, schema: Schema) -> Layout:
    leaves, structure = tree_flatten(value)
    return Layout(structure, tuple(leaves), schema)


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
    """One rank's ends of the edges between processes."""

    def __init__(self, end: ProcessEnd, watch: Watch, device: torch.device) -> None:
        self.end = end
        self.watch = watch
        self.device = device
        self.plan: Plan | None = None
        self._number = transfer.register(end)
        self._layouts: dict[str, Layout] = {}
        self._first = 0

    def begin(self, plan: Plan, first: int) -> None:
        """A run begins, whose micro-batch 0 is the `first` of all runs that it goes on from."""
        self.plan = plan
        self._first = first
        if plan.lends:  # what the run before sent last has no fence in this one
            self._drain()

    def send(self, effect: Send | Broadcast, value: Any) -> None:
        tensors = [x for x in tree_flatten(value)[0] if isinstance(x, Tensor)]
        for tensor in tensors:
            self._refuse_odd(effect, tensor)
        leaves = [dense(x) for x in tensors if x.numel()]
        key = self._key(effect, self.watch.rank)
        self._publish(effect, key, Layout.of(value))
        for edge in puts(Step(self.watch.rank, effect), self.watch.num_ranks):
            if leaves:
                transfer.send(leaves, self._number, edge.to, _tag(key, self._first + effect.microbatch))

    def recv(self, effect: Recv | Broadcast) -> Any:
        source = effect.source if isinstance(effect, Recv) else effect.root
        key = self._key(effect, source)
        if key not in self._layouts:
            self._layouts[key] = pickle.loads(self.watch.wait(key, source))
        layout = self._layouts[key]
        tensors = layout.empty(self.device)
        if filled := [x for x in tensors if x.numel()]:
            transfer.recv(filled, self._number, source, _tag(key, self._first + effect.microbatch))
        return layout.build(tensors)

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

    def _publish(self, effect: Send | Broadcast, key: str, layout: Layout) -> None:
        known = self._layouts.get(key)
        if known is None:
            self._layouts[key] = layout
            self.watch.board.write(key, pickle.dumps(layout))
        elif known != layout:
            raise ProgramError(
                f"rank {self.watch.rank}: '{effect}'",
                f"{layout}, where for the same class of batch it sent {known}",
                "shapes that follow from the batch's class alone"
                if known.tensors() != layout.tensors()
                else "what is no tensor by the batch's class alone, or else as a tensor",
            )


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
