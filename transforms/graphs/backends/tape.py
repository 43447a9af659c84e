"""The CPU back end: a tape of operators with the hazards of a CUDA graph, on purpose.

Addresses are fixed, Python values are frozen at capture, a replay overwrites the outputs of the one before, host reads
are refused, and whoever asks torch whether CUDA is capturing is told so. A law that the tape breaks, a graph would
break; what holds here can be tested without a GPU.
"""

from collections.abc import Callable, Set
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi import DispatchMode, signal_capture, storage_id, unowned
from weft.transforms.graphs.backends.audit import Audit
from weft.transforms.graphs.backends.operators import ONLY_MEMORY, TRANSFERS, tensors_in, written
from weft.transforms.graphs.backends.randomness import UnknownGenerator
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.trees import tree_map

_CPU = torch.device("cpu")


@attrs.frozen
class Operation:
    """One recorded operator: the very tensors it read and wrote.

    `fresh` are its results that are neither inputs nor views of them: a replay computes them again and copies them to
    the addresses that they had at capture.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[tuple[int, Tensor], ...]

    def run(self) -> None:
        results = list(tensors_in(self.func(*self.args, **self.kwargs)))
        for index, tensor in self.fresh:
            if results[index].shape != tensor.shape:
                raise self._reshaped(tuple(results[index].shape), tuple(tensor.shape))
            tensor.copy_(results[index])

    def _reshaped(self, seen: tuple[int, ...], captured: tuple[int, ...]) -> CaptureError:
        seen_text = f"a result of shape {seen}, which was {captured} at the capture, so that it depends on data"
        return CaptureError(f"a replay of {self.func}", seen_text, "call that operator outside the graphified function")


class _Recorder(DispatchMode):
    """Runs a function under the audit's rules and writes the tape."""

    def __init__(self, audit: Audit, split_at: frozenset[str]) -> None:
        super().__init__()
        self.audit = audit
        self.tape: list[Operation] = []
        self.split_at = split_at
        self.num_pieces = 1
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.num_pieces += func._schema.name in self.split_at
        result = func(*args, **kwargs)
        inputs = {storage_id(t) for t in tensors_in(args, kwargs)}
        fresh = [(i, _as_it_is(t)) for i, t in enumerate(tensors_in(result)) if _is_fresh(t, inputs)]
        self._made.update(storage_id(t) for _, t in fresh)
        writes = func._schema.name in TRANSFERS or any(True for _ in written(func, args, kwargs))
        checks = not func._schema.returns  # such as the one by which linalg.inv raises
        repeated = func.overloadpacket not in ONLY_MEMORY and torch.Tag.inplace_view not in func.tags
        if (fresh or writes or checks) and repeated:
            args, kwargs = tree_map(self._held, (args, kwargs))
            self.tape.append(Operation(func, args, kwargs, tuple(fresh)))
        return result

    def _held(self, value: Any) -> Any:
        """What the tape keeps of an argument: what is captured by reference is there whenever it is replayed."""
        if isinstance(value, Tensor) and storage_id(value) in self.audit.lent and _has_address(value):
            return unowned(value)
        return _as_it_is(value)

    def nbytes(self) -> int:
        """Bytes of the tensors that the tape keeps of those that the function made."""
        kept = tensors_in(*((o.args, o.kwargs, [t for _, t in o.fresh]) for o in self.tape))
        sizes = {storage_id(t): t.untyped_storage().nbytes() for t in kept}
        return sum(size for place, size in sizes.items() if place in self._made)


def _is_fresh(result: Tensor, inputs: set[int]) -> bool:
    # Autograd's lazy zeros have no memory to write to, and nothing that could change.
    return storage_id(result) not in inputs and not result._is_zerotensor()


def _as_it_is(value: Any) -> Any:
    """The same storage under a tensor of the tape's own, whose shape no later `t_()` or `resize_()` changes."""
    return value.detach() if isinstance(value, Tensor) else value


def _has_address(value: Tensor) -> bool:
    return not (value.is_meta or value.is_conj() or value.is_neg()) and value.untyped_storage().nbytes() > 0


@attrs.frozen
class TapeRecording:
    """A tape and the tensors that it writes to. In pieces it is the same tape: every operator runs by itself anyway."""

    operations: tuple[Operation, ...]
    outputs: Any
    num_pieces: int
    nbytes: int
    driver_bytes: int = 0

    def replay(self) -> None:
        with torch.no_grad():
            for operation in self.operations:
                operation.run()


@attrs.frozen
class TapeBackend:
    """Records operators below autograd and functorch, and replays them one by one."""

    name: str = "tape"
    device: torch.device = _CPU
    enter: None = None
    input_buffers: InputBufferPool = attrs.field(factory=InputBufferPool)
    _warm: list[bool] = attrs.field(factory=list)

    def capture(self, fn: Callable[[], Any], audit: Audit, split_at: frozenset[str] = frozenset()) -> TapeRecording:
        with torch.no_grad():
            if not self._warm:
                self._warm.append(True)
                audit.rehearse(fn)
            try:
                return _record(fn, audit, split_at)
            except UnknownGenerator:  # one that is met for the first time, or that the function makes
                audit.rehearse(fn)
                return _record(fn, audit, split_at)

    def lend_memory(self, recording: TapeRecording, _: Set[int]) -> TapeRecording:
        """As it is: a tape's memory is no pool's."""
        return recording


def _record(fn: Callable[[], Any], audit: Audit, split_at: frozenset[str]) -> TapeRecording:
    recorder = _Recorder(audit, split_at)
    audit.restart()
    with signal_capture(), recorder, audit:
        outputs = fn()
    return TapeRecording(tuple(recorder.tape), outputs, recorder.num_pieces, recorder.nbytes())
