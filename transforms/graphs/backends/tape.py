"""The CPU back end: a tape of operators that has the hazards of a CUDA graph on purpose.

Addresses are fixed, Python values are frozen at capture, a replay overwrites the outputs of the
previous one, host reads are refused, and torch reports during a capture that CUDA is capturing. A
law that fails on the tape would fail on a graph too, so the laws can be tested without a GPU.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi.patches import signal_capture
from weft.torchapi.private import (
    BelowAutograd,
    WithoutAutocast,
    WithoutFunctionModes,
    set_grad_mode,
    storage_id,
    unowned,
    unseen,
)
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends.audit import Audit, External
from weft.transforms.graphs.backends.compiled import NotCompiled
from weft.transforms.graphs.backends.loops import looping, split_in_loop
from weft.transforms.graphs.backends.operators import (
    ONLY_MEMORY,
    TRANSFERS,
    flat_tensors,
    is_sparse,
    map_tensors,
    reads_shapes,
    sparse_parts,
    tensors_in,
    unread,
    written,
)
from weft.transforms.graphs.backends.randomness import UnknownGenerator
from weft.transforms.graphs.backends.unwritten import UnwrittenMemory
from weft.transforms.graphs.calls.buffers import InputBufferPool
from weft.transforms.graphs.calls.results import Outputs
from weft.values.trees import tree_leaves

_CPU, _NOTHING = torch.device("cpu"), nullcontext()


@attrs.frozen
class Operation:
    """One recorded operator, with the tensors that it read and wrote.

    Args:
        computed: (index, tensor) of the results that are neither inputs nor views of inputs: a
            replay computes them again and copies them to the addresses that they had at capture.
        sparse: the same for sparse results, with the tensors of indices and values that each
            consists of.
        grad: whether grad mode was on; some operators depend on it.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    computed: tuple[tuple[int, Tensor], ...]
    sparse: tuple[tuple[int, tuple[Tensor, ...]], ...]
    grad: bool

    def run(self) -> None:
        results = list(tensors_in(self.func(*self.args, **self.kwargs)))
        for index, tensor in self.computed:
            self._write(tensor, results[index])
        for index, parts in self.sparse:
            for part, value in zip(parts, sparse_parts(results[index]), strict=True):
                self._write(part, value)

    def _write(self, tensor: Tensor, value: Tensor) -> None:
        # `copy_` would broadcast.
        if value.shape != tensor.shape:
            raise self._reshaped(tuple(value.shape), tuple(tensor.shape))
        tensor.copy_(value)

    def _reshaped(self, replayed: tuple[int, ...], captured: tuple[int, ...]) -> CaptureError:
        seen_text = (
            f"a result of shape {replayed}, which had shape {captured} at the capture, so it depends on"
            " data"
        )
        return CaptureError(
            f"a replay of {self.func}",
            seen_text,
            "call that operator outside the graphified function",
        )


@attrs.frozen
class Loop:
    """Recorded operators that a replay repeats while a flag holds.

    Args:
        flag: [] bool, which the operators write.
        operations: the operators of one step, including inner loops.
        grad: whether grad mode was on.
    """

    flag: Tensor
    operations: "tuple[Operation | Loop, ...]"
    grad: bool

    def run(self) -> None:
        while bool(self.flag):
            _run_all(self.operations)


def _run_all(operations: "Sequence[Operation | Loop]") -> None:
    for operation in operations:
        # A plain setter: a context manager for each operator would double a replay's time.
        set_grad_mode(operation.grad)
        operation.run()


def _flat(operations: "Sequence[Operation | Loop]") -> Iterator[Operation]:
    for operation in operations:
        if isinstance(operation, Loop):
            yield from _flat(operation.operations)
        else:
            yield operation


class _Recorder(OperatorWatch):
    """Records the operators of a function on a tape while it runs under the audit."""

    def __init__(self, audit: Audit, split_at: frozenset[str]) -> None:
        self.audit = audit
        self.tape: list[Operation | Loop] = []
        self.split_at = split_at
        self.num_pieces = 1
        self.inference = False
        self.unwritten = UnwrittenMemory(audit.refuse, audit.asked_for)
        self._computed_storages: set[int] = set()

    unable: str | None = None

    def loop(self, flag: Tensor, carry: Sequence[Tensor], step: Callable[[], None]) -> None:
        """Record the operators of `step` on a separate tape, which a replay repeats."""
        outer = self.tape
        self.tape = []
        try:
            with self.audit.steps.step(carry):
                step()
        finally:
            inner = self.tape
            self.tape = outer
        with unseen():
            self.tape.append(Loop(_alias(flag), tuple(inner), torch.is_grad_enabled()))

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.audit.steps.repeats and func._schema.name in self.split_at:
            raise self.audit.refuse(*split_in_loop(func))
        # Only counted, so that a test on a CPU sees as many pieces as a GPU has.
        self.num_pieces += func._schema.name in self.split_at
        # One operator in inference mode makes tensors that only that mode may write.
        self.inference |= torch.is_inference_mode_enabled()
        result = self.pass_on(func, args, kwargs)
        inputs = {storage_id(t) for t in flat_tensors(args, kwargs)}
        outputs = (result,) if isinstance(result, Tensor) else tensors_in(result)
        results = [(i, t) for i, t in enumerate(outputs) if _is_computed(t, inputs)]
        if any(type(t) is Tensor and t.is_nested for _, t in results):
            fault = (
                f"{func} makes a nested tensor of strided layout, which a replay on a CPU cannot"
                " fill"
            )
            raise self.audit.refuse(fault, "layout=torch.jagged, or a padded tensor and a mask")
        computed = [(i, _alias(t)) for i, t in results if not is_sparse(t)]
        sparse = [(i, tuple(map(_alias, sparse_parts(t)))) for i, t in results if is_sparse(t)]
        self._computed_storages.update(storage_id(t) for _, t in computed)
        targets = {storage_id(t) for t in written(func, args, kwargs)}
        writes = bool(targets) or func._schema.name in TRANSFERS
        checks = not func._schema.returns  # such as the operator by which linalg.inv raises
        repeated = (
            func.overloadpacket not in ONLY_MEMORY and torch.Tag.inplace_view not in func.tags
        )
        if torch.Tag.inplace_view not in func.tags:
            self.unwritten.written(targets.union(storage_id(t) for _, t in results))
        if func.overloadpacket in ONLY_MEMORY and results:
            self.unwritten.allocated(result)
        # A custom operator that returns an argument's memory may have written to it, whatever its
        # schema says.
        foreign = func.namespace != "aten" and bool(outputs)
        if (results or writes or checks or foreign) and repeated:
            if func.namespace != "aten":  # a custom operator may write more than it declares
                self.unwritten.written(inputs)
            # An operator that reads only sizes may be given memory that nobody has written.
            if not reads_shapes(func):
                self.unwritten.check_read(inputs - {storage_id(x) for x in unread(func, args)})
            taped = map_tensors(self._tape_argument, args)
            named = map_tensors(self._tape_argument, kwargs)
            self.tape.append(
                Operation(
                    func, taped, named, tuple(computed), tuple(sparse), torch.is_grad_enabled()
                )
            )
        return result

    def _tape_argument(self, value: Tensor) -> Tensor:
        """An argument as the tape keeps it: unowned if it is captured by reference, because its
        owner outlives replays."""
        if storage_id(value) in self.audit.by_reference and _has_address(value):
            return unowned(value)
        return _alias(value)

    def nbytes(self) -> int:
        """The bytes of the tensors that the function made and the tape keeps."""
        tensors = tensors_in(
            *((o.args, o.kwargs, [t for _, t in o.computed]) for o in _flat(self.tape))
        )
        sizes = {
            storage_id(t): t.untyped_storage().nbytes()
            for t in tensors
            if t.layout is torch.strided
        }
        # Arguments and closed-over tensors are the caller's memory.
        return sum(size for storage, size in sizes.items() if storage in self._computed_storages)


def _is_computed(result: Tensor, inputs: set[int]) -> bool:
    # Autograd's lazy zeros have no memory to write to, and never change.
    return storage_id(result) not in inputs and not result._is_zerotensor()


def _alias(value: Tensor) -> Tensor:
    """A new tensor object on the same storage, so that a later `t_()` or `resize_()` does not
    change the shapes on the tape."""
    return value.detach()


def _has_address(value: Tensor) -> bool:
    if value.layout is not torch.strided or value.is_meta or value.is_conj() or value.is_neg():
        return False
    return value.untyped_storage().nbytes() > 0


@attrs.frozen
class TapeRecording:
    """A tape and the tensors that it writes. Pieces need no separate tapes, because operators
    replay one by one."""

    operations: tuple[Operation | Loop, ...]
    outputs: Any
    num_pieces: int
    nbytes: int
    driver_bytes: int = 0
    inference: bool = False

    def replay(self) -> None:
        inference = torch.inference_mode() if self.inference else _NOTHING
        with BelowAutograd(), WithoutAutocast(), WithoutFunctionModes(), torch.no_grad(), inference:
            _run_all(self.operations)


@attrs.frozen
class TapeBackend:
    """Records operators below autograd and functorch, and replays them one by one."""

    name: str = "tape"
    device: torch.device = _CPU
    wait_for_last_replay: None = None
    unable_to_loop: None = None
    input_buffers: InputBufferPool = attrs.field(factory=InputBufferPool)
    _warm: list[bool] = attrs.field(factory=list)
    _external: External = attrs.field(factory=External)

    def allocating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(
        self, fn: Callable[[], Any], audit: Audit, split_at: frozenset[str] = frozenset()
    ) -> TapeRecording:
        audit.read_earlier = self._external
        # The tape stands for kernels; what autograd records is decided outside it.
        with torch.no_grad():
            if not self._warm:
                self._warm.append(True)
                audit.rehearse(fn)
            # A generator that is used for the first time, or that the function makes; or a
            # compiled function that is not yet compiled for these arguments.
            with suppress(UnknownGenerator, NotCompiled):
                recording = _record(fn, audit, split_at)
                if not audit.has_unknown:
                    return recording
                del recording
            audit.rehearse(fn)
            return _record(fn, audit, split_at)

    def release_output_memory(self, recording: TapeRecording, _: Set[int]) -> TapeRecording:
        """Return the recording unchanged: a tape's memory is not in a pool."""
        return recording


def _record(fn: Callable[[], Any], audit: Audit, split_at: frozenset[str]) -> TapeRecording:
    recorder = _Recorder(audit, split_at)
    audit.restart()
    with signal_capture(), audit.random.private_draws(), recorder, looping(recorder), audit:
        outputs = fn()
        leaves = outputs.leaves if isinstance(outputs, Outputs) else tree_leaves(outputs)
        recorder.unwritten.check_read({storage_id(x) for x in leaves if isinstance(x, Tensor)})
    tape = tuple(recorder.tape)
    pieces = recorder.num_pieces
    return TapeRecording(tape, outputs, pieces, recorder.nbytes(), inference=recorder.inference)
