"""`HostReads` refuses host reads of tensors that never reach the dispatcher; it recognizes the
Python functions that make them. `refusal` makes the error, with the user's line."""

import linecache
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi.frames import READ_BY_PICKLE, drops_padding, in_pickle
from weft.torchapi.private import FunctionMode, innermost_storage_id, is_higher_order, uncompiled
from weft.transforms.graphs.backends.constants import Constants
from weft.transforms.graphs.backends.indexing import Gathers
from weft.transforms.graphs.backends.operators import tensors_in

REMEDY_OF_COPIES = "copy it before the call, or after it: x.to(device)"
REMEDY = (
    "compute it with tensor operations (torch.where), pass it as a static argument, or move it out"
    " of the function"
)
# A part of torch's internal error when it would have to pass a zero tensor without dimensions to
# Python code.
_NUMBER_ON_A_GPU = "tensor._is_zerotensor() && tensor.dim() == 0"
# The methods of a tensor that read it on the host.
READS = {
    *("item", "tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
}
# They give access to the tensor's memory, not a copy of its value now.
_SHARED = {"numpy", "__array__", "__dlpack__"}
_SHOWN = {"__repr__", "__format__"}
_RUN_PYTHON = {torch.Tensor.apply_, torch.Tensor.map_, torch.Tensor.map2_}
_SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}
_NEW_TENSORS = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}
_FROM_LISTS = {torch.asarray, torch.Tensor.new}
_PACKED = {"_pack_padded_sequence", "_pad_packed_sequence"}
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_CLASS: Any = torch.Tensor
_SETS_DATA = {_CLASS.data.__set__}
_WITHOUT_OPERATOR = {torch.max_pool1d, torch.nn.functional.max_pool1d}
_ALLOCATE = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}
# The functions whose kernel torch chooses by settings that a key must then hold.
_ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward"}
# Packages whose lines tell a user nothing: the error names the innermost line of other code.
_SKIPPED = ("torch", "functools", "contextlib", "pickle", "copyreg", "weft")


class HostReads(FunctionMode):
    """A function mode that refuses host reads that never reach the dispatcher, and names the
    function that reads.

    Args:
        refuse: makes the error for a fault and its remedy.
        is_argument: whether a tensor is itself an argument, and not a view or result of one.
        is_own: whether a tensor was made inside the function.
        constants: the tensors that are made from Python numbers alone, and so are the same at each
            call.
        gathers: performs indexing by tensors.
        asked_for: collects the storages of tensors that the function makes without values
            (`torch.empty`).
    """

    def __init__(
        self,
        refuse: Callable[..., CaptureError],
        is_argument: Callable[[Tensor], bool],
        is_own: Callable[[Tensor], bool],
        constants: Constants,
        gathers: Gathers,
        asked_for: set[int],
    ) -> None:
        super().__init__()
        self.refuse = refuse
        self.is_argument = is_argument
        self.is_own = is_own
        self.constants = constants
        self.gathers = gathers
        self.asked_for = asked_for
        self.without_gradient: list[Tensor] = []
        """The tensors from outside whose `grad` the run read and found None."""
        self.calls_attention = False
        self.fills = False
        """Whether `x[index] = number` is running, for which torch makes a tensor without an
        operator."""

    @uncompiled
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # `x.grad`, `x.data` and the like arrive as the getter of a property, without a name.
        if name == "__get__":
            return self._read_attribute(func, args)
        if fault_and_remedy := _fault(func, name, args, kwargs, self.constants):
            raise self.refuse(*fault_and_remedy)
        if name in _ATTENTION:
            self.calls_attention = True
            if drops_padding():
                fault = (
                    "nn.TransformerEncoder takes the padding out, and returns zeros there, which a"
                    " capture cannot do"
                )
                instead = "nn.TransformerEncoder(..., enable_nested_tensor=False), or "
                instead += "torch.backends.mha.set_fastpath_enabled(False) before all calls"
                raise self.refuse(fault, instead)
        if func in _SETS_DATA and not self.is_own(args[0]):
            fault = "x.data = ... on a tensor from outside it, which a replay does not repeat"
            raise self.refuse(fault, "x.copy_(...); or a new tensor that it returns")
        if func in _INDEXING and (index := self.gathers.index_of(*args[:2])) is not None:
            if len(args) == 2:
                return self.gathers.get(args[0], index)
            return self.gathers.set(args[0], index, args[2])
        if func in _WITHOUT_OPERATOR:
            return _max_pool1d(func, args, kwargs)
        try:
            self.fills = func is torch.Tensor.__setitem__ and not isinstance(args[2], Tensor)
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            # An operator that the user has not implemented for a device raises the same class of
            # error.
            if not is_higher_order(func) or "HigherOrderOperator" not in str(error):
                raise
            raise self.refuse(*_branching_fault(str(func))) from None
        finally:
            self.fills = False
        if name in _ALLOCATE and isinstance(result, Tensor):
            # A function may leave memory unwritten that it asked for itself; elsewhere that is refused.
            self.asked_for.add(innermost_storage_id(result))
        if func in _NEW_TENSORS and not _any_tensor(args, kwargs) and result.is_cpu:
            self.constants.add(innermost_storage_id(result))  # as_tensor calls no operator
        return result

    def _read_attribute(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Read an attribute of a tensor; refuse one that a replay would have to read again."""
        attribute = getattr(func, "__self__", None)
        value = func(*args)
        if attribute is torch.Tensor.grad and (
            self.is_argument(args[0]) if value is None else not self.is_own(value)
        ):
            instead = "pass the gradients as a separate argument, {name: p.grad for name, p in ...}"
            fault = (
                ".grad of a tensor from outside is not an argument, so a replay does not read it"
                " again"
            )
            raise self.refuse(fault, instead)
        if (
            attribute is torch.Tensor.grad
            and value is None
            and args[0].is_leaf
            and not self.is_own(args[0])
        ):
            self.without_gradient.append(args[0])
        if attribute is READ_BY_PICKLE and in_pickle():
            raise self.refuse(
                "pickle (torch.save) reads a tensor on the host", "x.clone(), or save it outside"
            )
        return value


def _max_pool1d(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `max_pool1d` by an operator; on its usual path torch writes to memory without one."""
    if func is torch.max_pool1d:
        return torch.max_pool1d_with_indices(*args, **kwargs)[0]
    if kwargs.get("return_indices"):
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "return_indices": True})[0]


def _fault(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], constants: Constants
) -> tuple[str, str] | None:
    """(the host read that a function makes, the remedy); None if it reads nothing on the host."""
    if name in READS and getattr(torch.Tensor, name, None) is func:
        if name not in _SHARED and constants.read(innermost_storage_id(args[0])):
            return None
        if name == "__bool__":
            fault = "a branch on a tensor's value"
        else:
            fault = f"Tensor.{name} reads a tensor on the host"
        if name in _SHOWN:
            print_remedy = "call it inside weft.no_capture(replay=False), where it may print; or "
        else:
            print_remedy = ""
        return fault, print_remedy + REMEDY
    if func in _RUN_PYTHON:
        return f"Tensor.{name} runs Python on each element, on the host", REMEDY
    if func in _SPLITS and _any_tensor(args[1:], kwargs):
        return f"{name} with a tensor of indices reads it on the host", REMEDY
    if func is torch.tensordot and _any_tensor(args[2:], kwargs.get("dims")):
        return "tensordot with a tensor of dims reads it on the host", f"dims as ints; or {REMEDY}"
    if func is torch.as_tensor and args and isinstance(args[0], Tensor):
        return None  # the tensor itself, or x.to(...)
    if func in _NEW_TENSORS and _any_tensor(args[func is torch.Tensor.new_tensor :], kwargs):
        return f"{name} of tensors reads them on the host", f"torch.stack or torch.cat; or {REMEDY}"
    if func in _FROM_LISTS and _any_tensor(
        [x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple)]
    ):
        return (
            f"{name} of a list of tensors reads them on the host",
            f"torch.stack or torch.cat; or {REMEDY}",
        )
    if func in _INDEXING and _is_list_of_tensors(args[1]):
        return (
            "an index that is a list of tensors reads them on the host",
            f"x[torch.stack([i, j])]; or {REMEDY}",
        )
    # Lengths that are made from Python numbers are the same at each call.
    if name in _PACKED and not constants.read(innermost_storage_id(args[1])):
        return (
            f"{name} reads the lengths of sequences on the host",
            f"padded sequences and a mask; or {REMEDY}",
        )
    return None


def _branching_fault(name: str) -> tuple[str, str]:
    instead = f"torch.where, with both branches computed; or call torch.{name} outside the function"
    if name == "while_loop":
        instead = "weft.while_loop(cond_fun, body_fun, carry), which a graph repeats"
    return f"torch.{name} chooses a branch, which a graph cannot do", instead


def compiling_fault(caller: types.FrameType) -> tuple[str, str]:
    """The fault of a function of torch that compiles the functions that it is given, and the
    remedy."""
    name = caller.f_code.co_name
    if name in ("cond", "while_loop"):
        return _branching_fault(name)
    return (
        f"{name} compiles its functions, which is not possible during a capture",
        f"call {name} outside it",
    )


def _any_tensor(*values: Any) -> bool:
    return any(True for _ in tensors_in(*values))


def _is_list_of_tensors(index: Any) -> bool:
    """Whether a part of an index is a list that holds tensors (torch takes a top-level list of
    tensors as a tuple)."""
    if isinstance(index, tuple | list):
        parts = index
    else:
        parts = ()
    return any(_any_tensor(part) for part in parts if isinstance(part, list | tuple))


def refusal(
    call: str, fault: str, instead: str, error: BaseException | None = None
) -> CaptureError:
    """The error for an operation that cannot be captured, with the user's source line: the line
    that is running, or the line that raised `error`."""
    if error is None:
        frames = _running()
    else:
        # The innermost frame of the error is the line that the user wants to see.
        frames = [*_raised_in(error), *_running()]
    remedy = next(filter(None, map(_known_remedy, frames)), instead)
    return CaptureError(call, f"{fault}\n       at {_line_of(frames)}", remedy)


class Refusals:
    """The refusals of a run. The first one ends it, even if the function swallows it (`except
    Exception`).

    Args:
        call: the call in error messages, as the user writes it.
    """

    def __init__(self, call: str) -> None:
        self.call = call
        self.errors: list[CaptureError] = []

    def refuse(self, fault: str, instead: str, error: BaseException | None = None) -> CaptureError:
        """The error for something that a replay cannot repeat."""
        self.errors.append(refusal(self.call, fault, instead, error))
        return self.errors[-1]

    def raise_swallowed(self, error: BaseException | None) -> None:
        """Raise the first refusal of a run that ended with `error`, unless `error` is that refusal
        or an interrupt. An error of torch that the audit itself causes counts as a refusal."""
        if _NUMBER_ON_A_GPU in str(error):
            fault = (
                "torch passes a number on a GPU from one operator to the next, which Python code"
                " cannot receive"
            )
            raise self.refuse(fault, REMEDY) from error
        first = next(iter(self.errors), None)
        self.errors = []
        try:
            if (
                first is not None
                and error is not first
                and (error is None or isinstance(error, Exception))
            ):
                # A function that catches the refusal and goes on would be captured half.
                raise first from error
        finally:
            # An error holds its frames. If a frame held the error too, the cycle would live until
            # the next garbage collection: with it the caller's tensors, and generators whose
            # closing releases something.
            del first, error


def user_line() -> str:
    """The file, line and text of the innermost frame outside torch and weft."""
    return _line_of(_running())


# A frame, and the line number in it.
Frame = tuple[types.FrameType, int]


def _running() -> list[Frame]:
    """The running frames, innermost first."""
    return [*traceback.walk_stack(sys._getframe(1))]


def _raised_in(error: BaseException) -> list[Frame]:
    """The frames that an error passed through, innermost first."""
    return [*traceback.walk_tb(error.__traceback__)][::-1]


def _line_of(frames: Iterable[Frame]) -> str:
    for frame, line in frames:
        # Code that torch generates for a graph is in no module.
        module = frame.f_globals.get("__name__", "torch")
        if module.split(".")[0] not in _SKIPPED:
            # `linecache` also has the cells of notebooks.
            text = linecache.getline(frame.f_code.co_filename, line).strip()
            return f"{frame.f_code.co_filename}:{line}: {text}"
    return "an unknown line"


def _known_remedy(at: Frame) -> str:
    """The remedy for a host read in code of torch.nn or transformers that a setting avoids; else
    empty."""
    frame, _ = at
    # Torch compares the mask with a causal one on the host, unless it is told.
    if frame.f_code.co_name == "_detect_is_causal_mask":
        return (
            "is_causal=True or False with the mask (tgt_is_causal=... in a decoder), so that torch"
            " need not compare it"
        )
    # transformers' mixture-of-experts modules, whose class names all have this word.
    if "Experts" not in type(module := frame.f_locals.get("self")).__name__:
        return ""
    if (
        experts := getattr(getattr(module, "config", None), "_experts_implementation", None)
    ) is None:
        return ""
    if experts == "eager":
        other = "grouped_mm"
    else:
        other = "batched_mm"
    return (
        f"model.set_experts_implementation({other!r}): {experts!r} reads on the host which tokens"
        " go to which expert"
    )
