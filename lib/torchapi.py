"""The one module that imports torch's private names, so that a new torch breaks one file."""

from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DispatchMode",
    "FunctionMode",
    "borrowed",
    "function_modes",
    "in_dispatch_mode",
    "in_functorch_transform",
    "pytree",
    "storage_id",
]


class DispatchMode(TorchDispatchMode):
    """`TorchDispatchMode` with types; a subclass defines `__torch_dispatch__(func, types, args, kwargs)`."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __enter__(self) -> Self:
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self, *error)


class FunctionMode(TorchFunctionMode):
    """`TorchFunctionMode` with types; a subclass defines `__torch_function__(func, types, args, kwargs)`."""

    def __enter__(self) -> Self:
        TorchFunctionMode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode is active in this thread: a capture, a trace, fake tensors, a counter of operators."""
    return _len_torch_dispatch_stack() > 0


def in_functorch_transform() -> bool:
    """Whether an outer torch.func transform (vmap, grad, jvp, functionalize) or a forward-mode level is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def function_modes() -> tuple[Any, ...]:
    """What the torch function modes in force change: a default device by its name, any other mode by itself."""
    if _len_torch_function_stack() == 0:
        return ()
    return tuple(str(getattr(mode, "device", mode)) for mode in _get_current_function_mode_stack())


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same place that does not keep the memory: whoever uses it must know that somebody else does."""
    storage = tensor.untyped_storage()
    held = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(held, tensor.storage_offset(), tensor.size(), tensor.stride())


def storage_id(tensor: torch.Tensor) -> int:
    """An identity of the storage that `tensor` is a view of, as long as the storage lives; a resize keeps it."""
    return int(tensor.untyped_storage()._cdata)
