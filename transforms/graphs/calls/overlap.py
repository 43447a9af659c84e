"""Tests whether strided tensors share memory, element by element: views of one storage may be disjoint."""

import torch
from torch import Tensor

from weft.torchapi import storage_id


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have a byte in common.

    >>> x = torch.arange(6)
    >>> overlap(x[:4], x[3:]), overlap(x[:3], x[3:]), overlap(x[::2], x[1::2])
    (True, False, False)
    """
    if storage_id(a) != storage_id(b) or not a.numel() or not b.numel():
        return False
    if _first(a) >= _first(b) + _extent(b) or _first(b) >= _first(a) + _extent(a):
        return False
    (starts, length), (other_starts, other_length) = _blocks(a), _blocks(b)
    last = torch.searchsorted(other_starts, starts + length) - 1  # b's last block that begins before a's block ends
    return bool(((last >= 0) & (other_starts[last.clamp(min=0)] + other_length > starts)).any())


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements of a tensor share memory, as in an expanded tensor.

    >>> x = torch.arange(4)
    >>> overlaps_itself(x), overlaps_itself(x.expand(2, 4)), overlaps_itself(x.unfold(0, 3, 1))
    (False, True, True)
    """
    dims = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    reach = 1
    for stride, size in dims:
        if stride < reach:
            break
        reach = stride * (size - 1) + reach
    else:
        return False
    if dims[0][0] == 0:
        return x.numel() > 0
    starts, length = _blocks(x)
    return bool((starts.diff() < length).any())


def _first(x: Tensor) -> int:
    return int(x.storage_offset() * x.element_size())


def _extent(x: Tensor) -> int:
    """The number of bytes from the start of the first element to the end of the last."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return int(span * x.element_size())


def _blocks(x: Tensor) -> tuple[Tensor, int]:
    """The bytes of a tensor as blocks of one length: (the sorted start of each block, the length)."""
    dims = sorted(
        (stride * x.element_size(), size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1
    )
    length = x.element_size()
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    starts = torch.tensor([_first(x)])
    for stride, size in dims:
        starts = (starts[:, None] + stride * torch.arange(size)).flatten()
    return starts.sort().values, length
