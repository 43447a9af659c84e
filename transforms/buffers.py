"""The buffers that a graph reads its copied inputs from, and the padding beside them."""

from typing import Any

import torch
from torch import Tensor

from weft.torchapi import seen_as
from weft.transforms.overlap import overlaps_itself
from weft.trees import Axes

SPARSE_BYTES = 2**26
"""A strided argument is copied into a buffer of its strides if that takes no more than this, or four times its size."""
BLANK_BYTES = 2**20
"""Padding up to this size is copied from a tensor of padding, in the launch of the values; larger tails are filled."""


def buffer_like(value: Tensor) -> Tensor:
    """A copy of a tensor with its strides, so that kernels that go by them compute the same; a dense copy where its
    elements overlap, or where most of the memory between the first and the last of them is not its own."""
    span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    sparse = span * value.element_size() > max(SPARSE_BYTES, 4 * value.nbytes)
    if value.numel() == 0 or value.is_meta or sparse or overlaps_itself(value):
        return torch.empty_like(value).copy_(value)
    buffer = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return seen_as(buffer, value).copy_(value)


def blank_like(buffer: Any, spec: Axes | None) -> Tensor | None:
    """A tensor of padding of a buffer's size; None if it is not padded with one number, or large."""
    if spec is None or isinstance(spec.pad, str) or buffer.nbytes > BLANK_BYTES:
        return None
    return torch.full_like(buffer, spec.pad)
