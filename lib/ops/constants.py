"""Which tensors are not written while a function runs: what a kernel may read before the last kernel has ended."""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from torch import Tensor

from weft.torchapi.private import storage_id

_CONSTANT: ContextVar[frozenset[int]] = ContextVar("weft.constant", default=frozenset())
"""The storages of these tensors."""


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
