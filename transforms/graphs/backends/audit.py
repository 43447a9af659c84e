"""What may not stand in a captured function, found while it runs once: host reads, shapes that depend on data, writes
to tensors that are not its own. The error names the user's line."""

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import attrs
import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi import DispatchMode, in_compiled, signal_capture, storage_id, uncompiled
from weft.transforms.graphs.backends.host_reads import REMEDY, REMEDY_OF_COPIES, HostReads, refusal
from weft.transforms.graphs.backends.operators import (
    COPY,
    ONLY_MEMORY,
    PINS,
    data_dependence,
    flat_tensors,
    is_collective,
    is_harmless,
    reach,
    tensors_in,
    written,
)
from weft.transforms.graphs.backends.randomness import Randomness

_CONSULT_SWITCHES = ("convolution", "cudnn", "scaled_dot_product", "batch_norm", "native_multi_head", "encoder", "rnn")


@attrs.frozen(eq=False)
class Inputs:
    """The tensors that a function starts from.

    Args:
        writable: those whose storage it may write (donated arguments).
        names: the other arguments, by name, for the error about a write to one.
        buffers: those of the arguments that a replay fills anew.
        lent: those that are the caller's own, captured by reference, and that a recording need not keep alive.
        generators: random generators among the arguments.
        arguments: the very tensors that the runs were given, as weak references.
    """

    writable: Sequence[Tensor] = ()
    names: Sequence[tuple[str, Tensor]] = ()
    buffers: Sequence[Tensor] = ()
    lent: Sequence[Tensor] = ()
    generators: Sequence[torch.Generator] = ()
    arguments: Sequence[weakref.ref[Tensor]] = ()


class Audit(DispatchMode):
    """A dispatch mode that lets through what a replay can repeat, refuses the rest, and keeps what it must keep alive:
    `external`, tensors from outside. It notes which operators were `called`, and watches random generators.

    A run is a rehearsal, unless `restart()` was called before it: then it is the one that is recorded.

    Args:
        call: how the function is called in error messages.
        inputs: what it starts from.
        rewind: gives what it wrote its values back.
        collectives: whether operations of torch.distributed are let through.
        on_device: the GPU that repeats the function, if it is one: then nothing on the CPU may be read.
    """

    def __init__(
        self,
        call: str,
        inputs: Inputs,
        *,
        rewind: Callable[[], None] = lambda: None,
        collectives: bool = False,
        on_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.call = call
        self._rewind = rewind
        self.on_device = on_device
        self.collectives = collectives
        self.lent = {storage_id(t) for t in inputs.lent}
        self.names = {storage_id(t): name for name, t in inputs.names}
        self._buffers = {storage_id(t) for t in inputs.buffers}
        self._dense = {storage_id(t): _dense_bytes(t) for t in inputs.buffers}
        self._writable = {storage_id(t) for t in inputs.writable}
        self.own = set(self._writable)
        self._arguments = inputs.arguments
        self._results: list[weakref.ref[Tensor]] = []
        self.external: dict[int, Tensor] = {}
        self.called: set[str] = set()
        self.launches = 0
        self.random = Randomness(call, _default_generators(on_device), inputs.generators)
        self._reads = HostReads(call, self._is_argument, lambda t: storage_id(t) in self.own)

    def __enter__(self) -> Self:
        self.random.begin()
        self._casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a weight that was cast before, or in a rehearsal, would be a constant
        torch.clear_autocast_cache()
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._casts)
        if error[0] is None:
            self.random.end()

    @uncompiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if in_compiled("weft.transforms.graphs.calls.call"):
            fault = "it calls what torch.compile made, which cannot compile while it is watched"
            raise refusal(self.call, fault, "call the function that was compiled")
        self.called.add(func._schema.name)
        self.random.before_operator(func, kwargs.get("generator"))
        inputs = {storage_id(t): t for t in flat_tensors(args, kwargs)}
        self._check(func, args, kwargs, inputs)
        if func is torch.ops.aten.lift_fresh.default:
            # A constant written in the function: each replay starts from its value, whatever was then done to it.
            func = torch.ops.aten.clone.default
        result, fresh = func(*args, **kwargs), False
        self.random.after_operator(func)
        for place, tensor in inputs.items():
            if place not in self.own and place not in self.names:
                self.external.setdefault(place, tensor)
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            self._results.append(weakref.ref(tensor))
            if (place := storage_id(tensor)) not in inputs:
                self.own.add(place)
                fresh = True
        self.launches += (fresh or func._schema.is_mutable) and func.overloadpacket not in ONLY_MEMORY
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: dict[int, Tensor]) -> None:
        """Raise CaptureError if a replay could not repeat this operation."""
        if kwargs.get("pin_memory"):
            raise self._pinned(func)
        if not is_harmless(func):
            self._check_suspect(func, args, kwargs)
        if self.on_device is not None and func is not torch.ops.aten.lift_fresh.default:  # of a constant
            self._refuse_host_arguments(inputs)

    def _check_suspect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if fault := data_dependence(func, args, kwargs):
            raise refusal(self.call, fault, REMEDY_OF_COPIES if fault.startswith(COPY) else REMEDY)
        if func._schema.name in PINS:
            raise self._pinned(func)
        if is_collective(func) and not self.collectives:
            instead = "graphify(..., collectives=True) on every rank, with captures and replays in the same order"
            raise refusal(self.call, f"{func} is a collective operation, which waits for other ranks", instead)
        if (seen := reach(func, args, kwargs)) and seen[1] > self._dense.get(seen[0], math.inf):
            does = func._schema.name.removeprefix("aten::")
            fault = f"{does} of {self.names[seen[0]]}, of whose storage a replay has its elements only"
            raise refusal(self.call, fault, "x.contiguous() first, or pass the whole tensor that it is a view of")
        for tensor in written(func, args, kwargs):
            if (place := storage_id(tensor)) not in self.own:
                name = self.names.get(place, "a tensor from outside it")
                fault = f"{func} writes to {name} of shape {tuple(tensor.shape)}, which it does not own"
                how = "" if place in self.names else "pass it in (a module's: weft.stages.from_module) and "
                instead = f"return a new tensor, or {how}donate the argument (donate_argnames=...)"
                raise refusal(self.call, fault, instead)

    def _pinned(self, func: Any) -> CaptureError:
        return refusal(self.call, f"{func} makes pinned memory of the host", "make it once, before the call")

    def rehearse(self, fn: Callable[[], Any]) -> None:
        """Run the function before its capture, so that kernels compile and what is made once is made.

        Libraries refuse to make it where `torch.cuda.is_current_stream_capturing()`; others read tensors on the host
        where not. So the run is a plain one; and if that is refused, one more is as in the capture.
        """
        self.random.rehearse()
        try:
            with self:
                fn()
            return
        except CaptureError:
            self._undo()
        with signal_capture(), self:
            fn()

    def restart(self) -> None:
        """Forget what a run did, and undo it: the next one is recorded. Random generators are still to be restored."""
        self._undo()
        self.random.record()

    def _undo(self) -> None:
        self._rewind()
        self.own = set(self._writable)
        self.external, self._results, self.launches = {}, [], 0

    def consults_switches(self) -> bool:
        """Whether it called operators that choose their kernels by `weft.torchapi.backend_switches`."""
        return self._reads.attends or any(part in name for name in self.called for part in _CONSULT_SWITCHES)

    def refuse_leaks(self, outputs: Any) -> None:
        """Raise CaptureError if a tensor that the function made is alive somewhere but in its outputs: a replay would
        overwrite it, or never have made it. The same for what it was given to read its arguments from."""
        returned = [t for t in outputs if isinstance(t, Tensor)]
        if self._leaked(returned):
            gc.collect()  # a cycle of references is no leak
        if found := self._leaked(returned):
            shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in found[:3])
            what, instead = "a tensor that it made is", "make it before the call and pass it in, or return it"
            if all(storage_id(t) in self._buffers for t in found):
                what, instead = "an argument, or a view of one, is", "keep a clone of it outside the function"
            seen = f"{what} kept and not returned ({shapes}): in a cache, a global or an attribute"
            raise CaptureError(self.call, seen, instead)
        self._results = []

    def _leaked(self, returned: Sequence[Tensor]) -> list[Tensor]:
        places = {storage_id(t) for t in returned} | self._writable
        ours = self.own | self._buffers
        results = [found for reference in self._results if (found := reference()) is not None]
        kept = [t for t in results if (place := storage_id(t)) in ours and place not in places]
        if kept:
            return kept
        handed_out = {id(x) for t in returned for x in (t, t._base)}
        given = [found for reference in self._arguments if (found := reference()) is not None]
        return [t for t in given if storage_id(t) in self._buffers and id(t) not in handed_out]

    def _is_argument(self, tensor: Tensor) -> bool:
        return any(reference() is tensor for reference in self._arguments)

    def _refuse_host_arguments(self, inputs: dict[int, Tensor]) -> None:
        """In a graph of a GPU nothing that the CPU does runs again: what is read there would be frozen."""
        for place, tensor in inputs.items():
            if tensor.is_cpu and (place in self._writable or place not in self.own):
                name = self.names.get(place, "a tensor from outside it")
                fault = f"{name} is on the CPU, in a call with tensors on a GPU, so that its value would be frozen"
                raise refusal(self.call, fault, f"move {name} to the device before the call")


def _dense_bytes(buffer: Tensor) -> int:
    """How many of the first bytes of its storage hold its elements, and nothing else."""
    fills = buffer.nbytes == buffer.untyped_storage().nbytes()
    return buffer.nbytes if fills or (buffer.is_contiguous() and buffer.storage_offset() == 0) else 0


def _default_generators(device: torch.device | None) -> list[torch.Generator]:
    found = [torch.default_generator]
    if device is not None:
        found.append(torch.cuda.default_generators[device.index or 0])
    return found
