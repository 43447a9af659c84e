"""The one module that imports torch's private names, so that a new torch breaks one file."""

from typing import Any, Self

import torch
import torch.utils._pytree as pytree
from torch._C._functorch import is_functorch_wrapped_tensor as _is_functorch_wrapped
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["DispatchMode", "FunctionMode", "in_dispatch_mode", "in_functorch_transform", "pytree", "storage_address"]


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


def in_dispatch_mode(kind: type) -> bool:
    """Whether a dispatch mode of class `kind` is active in this thread."""
    return any(isinstance(mode, kind) for mode in _get_current_dispatch_mode_stack())


def in_functorch_transform(leaf: Any) -> bool:
    """Whether `leaf` is a tensor that an outer torch.func transform (vmap, grad, jvp) has wrapped."""
    return isinstance(leaf, torch.Tensor) and bool(_is_functorch_wrapped(leaf))


def storage_address(tensor: torch.Tensor) -> int:
    """The address of the storage that `tensor` is a view of; 0 for an empty one."""
    return int(tensor.untyped_storage()._cdata) if tensor.numel() == 0 else int(tensor.untyped_storage().data_ptr())
