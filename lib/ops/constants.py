"""Facts about the function that is running. Nothing writes its constant tensors, so a kernel may
read them before the last kernel has ended. And it may be run only to learn which kernels to
compile."""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from weft.torchapi.private import storage_id

# The storages of these tensors.
_CONSTANT: ContextVar[frozenset[int]] = ContextVar("weft.constant", default=frozenset())
# While kernels are only asked for (`weft.ops.kernel_triton.compiling`), those that were, by kind;
# otherwise None.
ASKED: ContextVar[dict[Any, Any] | None] = ContextVar("weft.asked", default=None)
_ALIGNED = 16
# Kernels are chosen by whether an address is a multiple of so many bytes, or of less. torch's
# allocations are multiples of 64 on a CPU, and of 512 on a GPU.
_ALIGNED_ON_GPU = 256


def is_asking() -> bool:
    """Whether this thread's launches only ask for kernels, and compute nothing."""
    return ASKED.get() is not None


@contextlib.contextmanager
def constant(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context in which nothing writes the storages of these tensors."""
    token = _CONSTANT.set(frozenset(map(storage_id, tensors)))
    try:
        yield
    finally:
        _CONSTANT.reset(token)


def is_constant(tensor: Tensor) -> bool:
    """Whether nothing writes the tensor's storage in this context.

    >>> import torch
    >>> weight = torch.ones(2, 2)
    >>> with constant([weight]):
    ...     is_constant(weight.t()), is_constant(weight.clone())
    (True, False)
    """
    constants = _CONSTANT.get()
    return bool(constants) and storage_id(tensor) in constants


def kernel_kind(tensor: Tensor) -> tuple[Any, ...]:
    """Everything about a tensor that the choice of a kernel may depend on, other than its values."""
    place = tensor.data_ptr() % (_ALIGNED_ON_GPU if tensor.is_cuda else _ALIGNED)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, place, is_constant(tensor)
