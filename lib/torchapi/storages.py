"""Who holds the memory of a tensor."""

import sys

import torch


def storage_uses(tensor: torch.Tensor) -> int:
    """The number of tensors on the storage of `tensor`, itself among them, that something holds; and the references to
    the storage as an object of its own."""
    storage = tensor.untyped_storage()
    uses = int(torch._C._storage_Use_Count(storage._cdata)) - 1  # that of `storage`
    return uses + sys.getrefcount(storage) - _REFERENCES


def _storage_references(tensor: torch.Tensor) -> int:
    """`sys.getrefcount` of a storage that only a tensor holds, which depends on the release of torch."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_REFERENCES = _storage_references(torch.empty(0, device="cpu"))
