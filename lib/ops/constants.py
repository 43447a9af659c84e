"""Facts about the function that is running: which tensors are constant, and whether kernels are
only being collected for compilation.

Nothing writes a constant tensor, so a kernel may read it before the previous kernel has ended.
"""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from weft.torchapi.private import storage_id

# The storage ids of the constant tensors.
_CONSTANT: ContextVar[frozenset[int]] = ContextVar("weft.constant", default=frozenset())
# The kernels requested so far, by kind, while launches only request kernels
# (`weft.ops.kernel_triton.compiling`); otherwise None.
ASKED: ContextVar[dict[Any, Any] | None] = ContextVar("weft.asked", default=None)
# The largest alignment, in bytes, on which the choice of a kernel may depend. torch aligns its
# allocations to 64 bytes on a CPU and to 512 on a GPU.
_ALIGNED = 16
_ALIGNED_ON_GPU = 256


def is_asking() -> bool:
    """Whether this thread's launches only request kernels and compute nothing."""
    return ASKED.get() is not None


@contextlib.contextmanager
def constant(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Promise that nothing writes the storages of these tensors inside the context."""
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
    """Everything about a tensor, besides its values, on which the choice of a kernel may depend."""
    place = tensor.data_ptr() % (_ALIGNED_ON_GPU if tensor.is_cuda else _ALIGNED)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, place, is_constant(tensor)
