"""Results of `torch.compile` that a captured function calls: which are captured, which are refused.

A rehearsal runs outside of a capture, so a function may compile there; it is repeated until none
does. During a recording, a compilation is an error."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi.compiled import GRAPH
from weft.torchapi.private import without_function_mode
from weft.torchapi.watching import OperatorWatch
from weft.transforms.graphs.backends.host_reads import (
    HostReads,
    Refusals,
    compiling_fault,
    user_line,
)


class NotCompiled(CaptureError):
    """A recorded run would compile, and there was no rehearsal to do so."""


class InGraph(OperatorWatch):
    """Watches the operators that Inductor's code of a graph calls itself, beside its kernels."""

    def __init__(self, check: Callable[..., None]) -> None:
        self.check = check

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.check(func, args, kwargs)
        return self.pass_on(func, args, kwargs)


@attrs.define(eq=False)
class CompiledCalls:
    """The calls of compiled functions in the runs of one capture.

    Args:
        refusals: the refusals of the runs.
        host_reads: the function mode of the runs, which Dynamo must not see.
        add_constant: takes a new tensor on the CPU whose value is a number in Python.
        caches_casts: whether autocast caches the casts of weights around the call.
        runs: the calls of Inductor's code in the present run.
        has_compiled: whether the present rehearsal has compiled.
        is_entered: whether any run has called a compiled function.
        last_reason: why a frame was compiled last, in words; may be empty.
    """

    refusals: Refusals
    host_reads: HostReads
    add_constant: Callable[[Tensor], None]
    caches_casts: bool = True
    runs: list[Any] = attrs.field(factory=list)
    has_compiled: bool = False
    is_entered: bool = False
    last_reason: str = ""
    _is_recorded: bool = False
    _refusal: CaptureError | None = None

    def begin_rehearsal(self) -> None:
        """Begin a run in which functions may compile."""
        self._is_recorded = False
        self.has_compiled = False
        self.runs = []

    def begin_recording(self) -> None:
        """Begin a run in which none may."""
        self._is_recorded = True
        self.runs = []

    def run(self, watch: OperatorWatch, pass_on: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run Inductor's code of a graph, whose own operators the watch sees."""
        run = args[0]
        run.watch = watch
        try:
            result = pass_on(GRAPH, args, {})
        finally:
            run.watch = None
        self.runs.append(run)
        return result

    def begins(self, caller: types.FrameType, *, by_torch: bool, cuda_graphs: str | None) -> bool:
        """A compiled function is called; return whether it may run."""
        self.is_entered = True
        if by_torch:
            self._refusal = self.refusals.refuse(*compiling_fault(caller))
            return False
        if cuda_graphs is not None:
            fault = (
                f"it calls a result of torch.compile with CUDA graphs of its own ({cuda_graphs})"
            )
            instead = "torch.compile(..., mode='default') or mode='max-autotune-no-cudagraphs'"
            self._refusal = self.refusals.refuse(fault, instead)
            return False
        return True

    def refused(self) -> BaseException:
        """The error of a call that may not run."""
        # An error that is raised holds its frames, which hold this object.
        refusal = self._refusal
        self._refusal = None
        return refusal or self.refusals.errors[0]

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """The surroundings of the call without a capture."""
        caches_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(self.caches_casts)
        try:
            with without_function_mode(self.host_reads):
                yield
        finally:
            torch.set_autocast_cache_enabled(caches_casts)

    def compiles(self, reason: str) -> None:
        """A frame is about to be compiled, which a recorded run refuses."""
        self.has_compiled = True
        self.last_reason = f", since {reason}" if reason else ""
        if not self._is_recorded:
            return
        fault = "a result of torch.compile compiles once more while it is captured"
        error = NotCompiled(
            self.refusals.call,
            f"{fault}{self.last_reason}\n       at {user_line()}",
            "a function that needs no new compilation for a call like the one before",
        )
        self.refusals.errors.append(error)
        raise error

    def broken(self) -> BaseException:
        """The refusal of a function of which parts are not compiled."""
        fault = (
            "it calls a result of torch.compile that has graph breaks: Python runs between the"
            " compiled parts, which a capture cannot follow"
        )
        return self.refusals.refuse(fault, _WHOLE)

    def makes_constant(self, tensor: Tensor) -> None:
        """Dynamo has made a tensor of a number in Python."""
        self.add_constant(tensor)

    def ends(self, num_graphs: int) -> None:
        """A compiled function has returned. One that ran no graph may have run its operators by
        Python, which no watch has seen."""
        if num_graphs:
            return
        fault = (
            "it calls a result of torch.compile of which nothing is compiled: a transform of"
            " torch.func is around it, or Dynamo skips its code"
        )
        instead = f"compile the transform, torch.compile(torch.func.grad(f)); or {_WHOLE}"
        raise self.refusals.refuse(fault, instead)


_WHOLE = "torch.compile(..., fullgraph=True), which names what breaks the graph"
