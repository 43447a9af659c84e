"""Reads of tensors on the host that never reach the dispatcher: found by the Python functions that make them."""

import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi import READ_BY_PICKLE, FunctionMode, in_pickle, is_higher_order, off_fast_path, uncompiled
from weft.transforms.graphs.backends.operators import tensors_in

REMEDY_OF_COPIES = "copy it before the call, or after it: x.to(device)"
REMEDY = "compute it with tensor operations (torch.where), pass it as a static argument, or move it out of the function"
_READS = {
    *("item", "tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
}
_SHOWN = {"__repr__", "__format__"}
_RUN_PYTHON = {torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_}
_SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}
_NEW_TENSORS = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}
_FROM_LISTS = {torch.asarray, torch.Tensor.new}
_PACKED = {"_pack_padded_sequence", "_pad_packed_sequence"}
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_SKIPPED = ("torch", "functools", "contextlib", "pickle", "copyreg", "weft")


class HostReads(FunctionMode):
    """Refuses the reads that never reach the dispatcher, and tells all of them apart by name.

    Args:
        call: how the function is called in error messages.
        is_argument: whether a tensor is one of the arguments themselves, not made of one.
        is_own: whether a tensor was made inside the function.
    """

    def __init__(self, call: str, is_argument: Callable[[Tensor], bool], is_own: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.call = call
        self.is_argument, self.is_own = is_argument, is_own
        self.attends = False

    @uncompiled
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":
            return self._look(func, args)
        if found := _fault(func, name, args, kwargs):
            raise refusal(self.call, *found)
        if name in _ATTENTION:
            self.attends = True
            if off_fast_path():
                fault = "the fast path of torch.nn's attention, which this capture cannot take"
                raise refusal(self.call, fault, "torch.backends.mha.set_fastpath_enabled(False) before, for all calls")
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if not is_higher_order(func) or "HigherOrderOperator" not in str(error):
                raise
            instead = f"torch.where, with both branches computed; or call torch.{func} outside the function"
            raise refusal(self.call, f"torch.{func} chooses what runs, which a graph cannot", instead) from None

    def _look(self, func: Any, args: tuple[Any, ...]) -> Any:
        """An attribute of a tensor."""
        of, seen = getattr(func, "__self__", None), func(*args)
        if of is torch.Tensor.grad and (self.is_argument(args[0]) if seen is None else not self.is_own(seen)):
            instead = "pass the gradients as an argument of their own, {name: p.grad for name, p in ...}"
            raise refusal(self.call, ".grad of a tensor from outside is no argument, and is not seen again", instead)
        if of is READ_BY_PICKLE and in_pickle():
            raise refusal(self.call, "pickle (torch.save) reads a tensor on the host", "x.clone(), or save it outside")
        return seen


def _fault(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """What a function reads on the host, and the remedy; None if nothing."""
    if name in _READS and getattr(torch.Tensor, name, None) is func:
        what = "a branch on a tensor's value" if name == "__bool__" else f"Tensor.{name} reads a tensor on the host"
        show = "call it inside weft.no_capture(replay=False), where it may print; or " if name in _SHOWN else ""
        return what, show + REMEDY
    if func in _RUN_PYTHON:
        return f"Tensor.{name} runs Python on each element, on the host", REMEDY
    if func in _SPLITS and _any_tensor(args[1:], kwargs):
        return f"{name} at places that a tensor holds reads them on the host", REMEDY
    if func is torch.tensordot and _any_tensor(args[2:], kwargs.get("dims")):
        return "tensordot over dims that a tensor holds reads them on the host", f"dims as ints; or {REMEDY}"
    if func in _NEW_TENSORS and _any_tensor(args[func is torch.Tensor.new_tensor :], kwargs):
        return f"{name} of tensors reads them on the host", f"torch.stack or torch.cat; or {REMEDY}"
    if func in _FROM_LISTS and _any_tensor([x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple)]):
        return f"{name} of a list of tensors reads them on the host", f"torch.stack or torch.cat; or {REMEDY}"
    if func in _INDEXING and _is_list_of_tensors(args[1]):
        return "an index that is a list of tensors reads them on the host", f"x[torch.stack([i, j])]; or {REMEDY}"
    if name in _PACKED:
        return f"{name} reads the lengths of sequences on the host", f"padded sequences and a mask; or {REMEDY}"
    return None


def _any_tensor(*values: Any) -> bool:
    return any(True for _ in tensors_in(*values))


def _is_list_of_tensors(index: Any) -> bool:
    """Whether a part of an index is a list that holds tensors. (A list of tensors, by itself, is a tuple.)"""
    parts = index if isinstance(index, tuple | list) else ()
    return any(_any_tensor(part) for part in parts if isinstance(part, list | tuple))


def refusal(call: str, fault: str, instead: str, error: BaseException | None = None) -> CaptureError:
    """The error for something that cannot be captured, with the user's source line: the one that runs, or where an
    `error` is given the one that raised it."""
    frames = _running() if error is None else [*_raised_in(error), *_running()]
    remedy = next(filter(None, map(_known_remedy, frames)), instead)
    return CaptureError(call, f"{fault}\n       at {_line_of(frames)}", remedy)


def user_line() -> str:
    """File, line and text of the innermost frame that is neither torch's nor weft's."""
    return _line_of(_running())


Frame = tuple[types.FrameType, int]
"""A frame, and the line in it."""


def _running() -> list[Frame]:
    """The frames that run, the innermost first."""
    return [*traceback.walk_stack(sys._getframe(1))]


def _raised_in(error: BaseException) -> list[Frame]:
    """The frames that an error left, the innermost first."""
    return [*traceback.walk_tb(error.__traceback__)][::-1]


def _line_of(frames: Iterable[Frame]) -> str:
    for frame, line in frames:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _SKIPPED:
            text = linecache.getline(frame.f_code.co_filename, line).strip()
            return f"{frame.f_code.co_filename}:{line}: {text}"
    return "an unknown line"


def _known_remedy(at: Frame) -> str:
    """What to write where other people's code, which has another way, reads on the host; empty if that is not known."""
    frame, _ = at
    if frame.f_code.co_name == "_detect_is_causal_mask":
        return "is_causal=True or False beside the mask (tgt_is_causal=... in a decoder), so that it is not compared"
    if "Experts" not in type(module := frame.f_locals.get("self")).__name__:
        return ""
    if (experts := getattr(getattr(module, "config", None), "_experts_implementation", None)) is None:
        return ""
    other = "grouped_mm" if experts == "eager" else "batched_mm"
    return f"model.set_experts_implementation({other!r}): {experts!r} has the host know which tokens go to which expert"
