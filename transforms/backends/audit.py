"""What may not stand in a captured function, found while it runs once: host reads, shapes that depend on data, writes
to tensors that are not its own. The error names the user's line."""

import functools
import gc
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi import DispatchMode, FunctionMode, is_higher_order, storage_id

_HOST_READS = {
    *("item", "tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
}
_SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}
_NEW_TENSORS = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}
_PINS = {"aten::pin_memory", "aten::_pin_memory"}
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
TRANSFERS = {"weft::send", "weft::recv"}
"""Between ranks: collective, and repeated although they compute nothing."""
_BATCH_NORMS = {torch.ops.aten.native_batch_norm, torch.ops.aten.cudnn_batch_norm, torch.ops.aten.miopen_batch_norm}
_SHOWN = {"__repr__", "__format__"}
_REMEDY = (
    "compute it with tensor operations (torch.where), pass it as a static argument, or move it out of the function"
)


class Audit(DispatchMode):
    """A dispatch mode that lets through what a replay can repeat, refuses the rest, and keeps what it must keep alive:
    `external`, tensors from outside, and `generators`, with the states that they had. It notes which operators were
    `called`.

    Args:
        call: how the function is called in error messages.
        writable: tensors whose storage the function may write (donated arguments).
        names: the other arguments, by name, for the error about a write to one.
        collectives: whether operations of torch.distributed are let through.
        on_device: whether it is a GPU that repeats the function, so that nothing on the CPU may be read.
    """

    def __init__(
        self,
        call: str,
        writable: Iterable[Tensor],
        names: Iterable[tuple[str, Tensor]],
        *,
        collectives: bool = False,
        on_device: bool = False,
    ) -> None:
        super().__init__()
        self.call = call
        self.on_device = on_device
        self.collectives = collectives
        self._writable = {storage_id(t) for t in writable}
        self.own = set(self._writable)
        self._results: list[weakref.ref[Tensor]] = []
        self.names = {storage_id(t): name for name, t in names}
        self.external: dict[int, Tensor] = {}
        self.called: set[str] = set()
        self.generators: dict[torch.Generator, Tensor] = {}
        self._reads = _HostReads(call)

    def __enter__(self) -> Self:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.called.add(func._schema.name)
        inputs = {storage_id(t): t for t in _flat_tensors(args, kwargs)}
        self._check(func, args, kwargs, inputs)
        if func is torch.ops.aten.lift_fresh.default:
            # A constant written in the function: each replay starts from its value, whatever was then done to it.
            func = torch.ops.aten.clone.default
        result = func(*args, **kwargs)
        for place, tensor in inputs.items():
            if place not in self.own and place not in self.names:
                self.external.setdefault(place, tensor)
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            self._results.append(weakref.ref(tensor))
            if (place := storage_id(tensor)) not in inputs:
                self.own.add(place)
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: dict[int, Tensor]) -> None:
        """Raise CaptureError if a replay could not repeat this operation."""
        if kwargs:
            self._check_keywords(func, kwargs)
        if not _is_harmless(func):
            self._check_suspect(func, args, kwargs)
        if self.on_device:
            self._refuse_host_arguments(inputs)

    def _check_suspect(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if fault := _data_dependence(func, args, kwargs):
            raise refusal(self.call, fault, _REMEDY)
        if func._schema.name in _PINS:
            raise self._pinned(func)
        if _is_collective(func) and not self.collectives:
            instead = "graphify(..., collectives=True) on every rank, with captures and replays in the same order"
            raise refusal(self.call, f"{func} is a collective operation, which waits for other ranks", instead)
        for tensor in written(func, args, kwargs):
            if (place := storage_id(tensor)) not in self.own:
                name = self.names.get(place, "a tensor from outside it")
                fault = f"{func} writes to {name} of shape {tuple(tensor.shape)}, which it does not own"
                how = "" if place in self.names else "pass it in (a module's: weft.stages.from_module) and "
                instead = f"return a new tensor, or {how}donate the argument (donate_argnames=...)"
                raise refusal(self.call, fault, instead)

    def _check_keywords(self, func: Any, kwargs: dict[str, Any]) -> None:
        if (generator := kwargs.get("generator")) is not None and generator not in self.generators:
            self.generators[generator] = generator.get_state()
        if kwargs.get("pin_memory"):
            raise self._pinned(func)

    def _pinned(self, func: Any) -> CaptureError:
        return refusal(self.call, f"{func} makes pinned memory of the host", "make it once, before the call")

    def restart(self) -> None:
        """Forget what a run did, for another one; the generators that it named are still to be restored."""
        self.own = set(self._writable)
        self.external, self._results = {}, []

    def refuse_leaks(self, outputs: Any) -> None:
        """Raise CaptureError if a tensor that the function made is alive somewhere but in its outputs: a replay would
        overwrite it, or never have made it."""
        returned = {storage_id(t) for t in tensors_in(outputs)} | self._writable
        if self._leaked(returned):
            gc.collect()  # a cycle of references is no leak
        if found := self._leaked(returned):
            if holder := next((x for x in outputs if _holds(x, found)), None):
                seen = f"it returns a {type(holder).__name__}, which is no pytree and holds a tensor that it made"
                instead = "return the tensors, or make its class a pytree (@weft.pytree above @attrs.frozen)"
                raise CaptureError(self.call, seen, instead)
            shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in found[:3])
            raise CaptureError(
                self.call,
                f"a tensor that it made is kept and not returned ({shapes}): in a cache, a global or an attribute",
                "make it before the call and pass it in, or return it",
            )
        self._results = []

    def _leaked(self, returned: set[int]) -> list[Tensor]:
        alive = (found for reference in self._results if (found := reference()) is not None)
        return [t for t in alive if (place := storage_id(t)) in self.own and place not in returned]

    def restore_generators(self) -> None:
        """Give the random generators that the function named the states that they had before it ran."""
        for generator, state in self.generators.items():
            generator.set_state(state)

    def _refuse_host_arguments(self, inputs: dict[int, Tensor]) -> None:
        """In a graph of a GPU nothing that the CPU does runs again: what is read there would be frozen."""
        for place, tensor in inputs.items():
            if tensor.is_cpu and (place in self._writable or place not in self.own):
                name = self.names.get(place, "a tensor from outside it")
                fault = f"{name} is on the CPU, in a call with tensors on a GPU, so that its value would be frozen"
                raise refusal(self.call, fault, f"move {name} to the device before the call")


class _HostReads(FunctionMode):
    """Refuses the reads that never reach the dispatcher, and tells all of them apart by name."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS and getattr(torch.Tensor, name, None) is func:
            what = "a branch on a tensor's value" if name == "__bool__" else f"Tensor.{name} reads a tensor on the host"
            show = "call it inside weft.no_capture(replay=False), where it may print; or " if name in _SHOWN else ""
            raise refusal(self.call, what, show + _REMEDY)
        if func in _SPLITS and any(True for _ in tensors_in(args[1:], kwargs)):
            raise refusal(self.call, f"{name} at places that a tensor holds reads them on the host", _REMEDY)
        if func in _NEW_TENSORS and any(True for _ in tensors_in(args[func is torch.Tensor.new_tensor :], kwargs)):
            raise refusal(
                self.call, f"{name} of tensors reads them on the host", f"torch.stack or torch.cat; or {_REMEDY}"
            )
        try:
            return func(*args, **(kwargs or {}))
        except NotImplementedError as error:
            if not is_higher_order(func) or "HigherOrderOperator" not in str(error):
                raise
            instead = f"torch.where, with both branches computed; or call torch.{func} outside the function"
            raise refusal(self.call, f"torch.{func} chooses what runs, which a graph cannot", instead) from None


def _holds(value: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether an object that is no tensor holds one of these tensors in an attribute."""
    held = tensors_in(*getattr(value, "__dict__", {}).values()) if not isinstance(value, Tensor) else ()
    return not {storage_id(t) for t in held}.isdisjoint(storage_id(t) for t in tensors)


def refusal(call: str, fault: str, instead: str) -> CaptureError:
    """The error for something that cannot be captured, with the user's source line."""
    return CaptureError(call, f"{fault}\n       at {user_line()}", instead)


def user_line() -> str:
    """File, line and text of the innermost frame that is neither torch's nor weft's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("torch", "functools", "contextlib", "weft"):
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            return f"{frame.f_code.co_filename}:{frame.f_lineno}: {text}"
        frame = frame.f_back
    return "an unknown line"


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors among operator arguments or results: those are flat, but for lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def _flat_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """`tensors_in`, for arguments that are mostly tensors and numbers."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors_in(*value)
    return found


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an operator writes, by its schema."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes."""
    for index, name in _written_arguments(func):
        yield from tensors_in(args[index] if index < len(args) else kwargs.get(name))
    # Batch normalisation in training updates its running statistics, which its schema does not say.
    if func.overloadpacket in _BATCH_NORMS:
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if named.get("training") or named.get("train"):
            yield from tensors_in(named.get("running_mean"), named.get("running_var"))


@functools.cache
def _is_harmless(func: Any) -> bool:
    """Whether calls of an operator may be let through whatever its arguments are: it writes nothing, depends on no
    data, and is neither collective nor makes pinned memory."""
    aten = torch.ops.aten
    watched = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._local_scalar_dense)
    copies = (aten._to_copy.default, aten.copy_.default)
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    suspect = func.overloadpacket in (*watched, *_BATCH_NORMS) or func in copies or any(t in func.tags for t in tags)
    suspect = suspect or func._schema.name in _PINS or _is_collective(func)
    return not suspect and not _written_arguments(func)


def _is_collective(func: Any) -> bool:
    return func.namespace in _COLLECTIVES or func._schema.name in TRANSFERS


def _data_dependence(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a replay could not repeat the operator, or None."""
    aten = torch.ops.aten
    if func is aten._local_scalar_dense.default:
        return "a tensor's value is read on the host"
    if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        indices = args[1] if len(args) > 1 else kwargs["indices"]
        if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return "indexing with a boolean mask, whose result depends on data in shape or in work"
        return None
    if func in (aten._to_copy.default, aten.copy_.default):
        return _crossing(func, args, kwargs)
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        return f"{func} has a result whose shape or value on the host depends on data"
    return None


def _crossing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a copy is between host and device, or None: inside a graph it would move what the host held at capture."""
    if func is torch.ops.aten.copy_.default:
        source, target = args[1].device, args[0].device
    else:
        source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
    if source.type == target.type:
        return None
    return f"a copy from {source.type} to {target.type} inside the function"
