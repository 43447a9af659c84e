"""The CPU back end: a tape of operators with the hazards of a CUDA graph, on purpose.

Addresses are fixed, Python values are frozen at capture, a replay overwrites the outputs of the one before, and host
reads are refused. A law that the tape breaks, a graph would break; what holds here can be tested without a GPU.
"""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.torchapi import DispatchMode, storage_address
from weft.transforms.backends.audit import Audit, tensors_in, written

_UNINITIALISED = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
}


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
            tensor.copy_(results[index])


class _Recorder(DispatchMode):
    """Runs a function under the audit's rules and writes the tape."""

    def __init__(self, audit: Audit) -> None:
        super().__init__()
        self.audit = audit
        self.tape: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {storage_address(t) for t in tensors_in(args, kwargs)}
        fresh = [(i, t) for i, t in enumerate(tensors_in(result)) if storage_address(t) not in inputs]
        writes = any(True for _ in written(func, args, kwargs))
        if (fresh or writes) and func.overloadpacket not in _UNINITIALISED:
            self.tape.append(Operation(func, args, kwargs, tuple(fresh)))
        return result


@attrs.frozen
class TapeRecording:
    """A tape and the tensors that it writes to."""

    operations: tuple[Operation, ...]
    outputs: Any

    def replay(self) -> None:
        with torch.no_grad():
            for operation in self.operations:
                operation.run()


@attrs.frozen
class TapeBackend:
    """Records operators below autograd and functorch, and replays them one by one."""

    name: str = "tape"

    def capture(self, fn: Callable[[], Any], audit: Audit) -> TapeRecording:
        recorder = _Recorder(audit)
        with torch.no_grad(), recorder, audit:
            outputs = fn()
        return TapeRecording(tuple(recorder.tape), outputs)
