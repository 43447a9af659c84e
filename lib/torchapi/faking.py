"""Fake tensors: shapes without values, on which a function is traced."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode as FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from weft.torchapi.frames import clear_frames
from weft.torchapi.private import innermost

# Words in the errors that torch raises where a fake tensor would need values.
_WITHOUT_VALUES = (
    "fake",
    "datadependent",
    "data-dependent",
    "dynamicoutputshape",
    "tensor subclasses",
    "tracing tensor",
    "symfloat",
    "symint",
    "symbool",
    "its data is not allocated yet",
)
_FOLDER_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_SNAPSHOT_KEY = torch._C.DispatchKey.PythonTLSSnapshot


class _Fakes(FakeTensorMode):
    """A fake tensor mode that works in any thread."""

    @property
    def avoid_device_init(self) -> bool:
        """Always False. If it were True on a machine without a GPU, torch would replace an object
        of the process by one of this thread, and (in 2.11) read it after the thread has ended. It
        serves only fake tensors on a GPU that does not exist."""
        return False


def fake_tensors() -> FakeTensorMode:
    """A context in which operators make fake tensors. It accepts real ones as inputs too."""
    return _Fakes(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def teach_higher_order_operators() -> None:
    """Let the operators that take functions, with which torch's compiler wraps operators that write
    to their arguments, treat these modes as what they are: torch asks for the very class."""
    for operator in torch._ops._higher_order_ops.values():
        rules = operator.python_key_table
        if FakeTensorMode in rules:
            rules.setdefault(_Fakes, rules[FakeTensorMode])


def forget_real_tensors(mode: FakeTensorMode) -> None:
    """Drop what a mode remembers of the tensors that its fake ones stand for: weak references to
    them, which `torch.utils.swap_tensors` refuses."""
    mode.fake_tensor_converter = FakeTensorConverter()


def without_data_pointers() -> contextlib.AbstractContextManager[Any]:
    """A context in which new fake tensors raise an error if code asks for their address, to read or
    write there without an operator."""
    patched: contextlib.AbstractContextManager[Any] = functorch_config.patch(
        fake_tensor_allow_unsafe_data_ptr_access=False
    )
    return patched


def is_fake_of(tensor: Tensor, mode: FakeTensorMode) -> bool:
    """Whether a tensor, or the one inside the wrappers of torch.func's transforms, is a fake tensor
    of this context."""
    inner = innermost(tensor)
    return isinstance(inner, FakeTensor) and inner.fake_mode is mode


def reads_values(error: BaseException) -> bool:
    """Whether an error says that a fake tensor has no values."""
    text = f"{type(error).__name__} {error}".lower()
    return any(word in text for word in _WITHOUT_VALUES)


def makes_subclass(error: BaseException) -> bool:
    """Whether an error says that a fake tensor cannot become one of another subclass of Tensor."""
    return "creating a new tensor subclass" in str(error).lower()


def is_fault_of_torch(error: BaseException) -> bool:
    """Whether an error is a failed assertion inside torch."""
    return "INTERNAL ASSERT FAILED" in str(error)


def called_by_dispatcher() -> bool:
    """Whether a dispatch mode was called for an operator that some code called.

    The alternative is autograd, which calls `detach` for each tensor that it saves. That call
    bypasses the dispatcher, which otherwise excludes the keys above the mode's.
    """
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(_SNAPSHOT_KEY)
    return excluded


@contextlib.contextmanager
def keeping_dispatch_keys() -> Iterator[None]:
    """A context that restores the state of this thread's dispatcher at its end, even after an
    error.

    Some functions of torch hold a dispatcher guard in a local variable
    (`torch._tensor_str._str`). An error keeps their frames alive, and with them the guard, which
    would restore an old dispatcher state once the error is dropped: then modes are skipped, and the
    next trace computes with uninitialized memory.
    """
    with torch._C._PreserveDispatchKeyGuard():
        try:
            yield
        except BaseException as error:
            clear_frames(error, _FOLDER_OF_TORCH)
            raise


@contextlib.contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """A context in which no hooks of `torch.autograd.graph.saved_tensors_hooks` are active."""
    stack: Any = torch._C._autograd
    popped = []
    while (pair := stack._top_saved_tensors_default_hooks(True)) is not None:
        popped.append(pair)
        stack._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(popped):
            stack._push_saved_tensors_default_hooks(pack, unpack)
