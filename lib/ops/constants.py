"""What is known of the function that runs: which tensors nothing writes meanwhile, so that a kernel may read them
before the last one has ended, and whether it runs only so that its kernels are compiled."""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from weft.torchapi.private import storage_id

_CONSTANT: ContextVar[frozenset[int]] = ContextVar("weft.constant", default=frozenset())
"""The storages of these tensors."""
ASKED: ContextVar[dict[Any, Any] | None] = ContextVar("weft.asked", default=None)
"""While kernels are only asked for (`weft.ops.kernel_triton.compiling`), those that were, by kind; otherwise None."""


def is_asking() -> bool:
    """Whether this thread's launches only ask for kernels: no result is computed."""
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
