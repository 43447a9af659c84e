"""The buffers that graphs read their copied inputs from, and the padding beside them.

Graphs that replay one at a time share them: a replay fills all of a buffer anew, and no result lies in one.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from weft.torchapi import seen_as
from weft.transforms.graphs.calls.overlap import overlaps_itself
from weft.trees import Axes

SPARSE_BYTES = 2**26
"""A strided argument is copied into a buffer of its strides if that takes no more than this, or four times its size."""
PADDING_SOURCE_BYTES = 2**20
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


@attrs.define
class InputBufferPool:
    """Memory for the buffers of graphs that replay one at a time: for each place among their copied inputs as much as
    the largest buffer there takes, of which the others are the first part.

    Args:
        nbytes: what was made so far, of buffers and padding.
    """

    nbytes: int = 0
    _of: dict[Any, Tensor] = attrs.field(factory=dict, init=False)

    def buffer(self, place: int, value: Tensor) -> Tensor:
        """`buffer_like(value)`, for the input at `place`; one that is dense is part of a shared block."""
        if is_dense(value):
            return self._part(("buffer", place), value).copy_(value)
        self.nbytes += value.nbytes
        return buffer_like(value)

    def padding_source(self, place: int, buffer: Any, spec: Axes | None) -> Tensor | None:
        """A tensor of padding of a buffer's size; None if it is not padded with one number, or large."""
        if spec is None or isinstance(spec.pad, str) or buffer.nbytes > PADDING_SOURCE_BYTES:
            return None
        if is_dense(buffer):
            return self._part(("padding", place, spec.pad), buffer).fill_(spec.pad)
        self.nbytes += buffer.nbytes
        return torch.full_like(buffer, spec.pad)

    def _part(self, key: tuple[Any, ...], like: Tensor) -> Tensor:
        key = *key, like.dtype, like.device, torch.is_inference_mode_enabled()
        if (block := self._of.get(key)) is None or block.numel() < like.numel():
            block = self._of[key] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
            self.nbytes += block.nbytes
        return block.as_strided(like.shape, like.stride())


def is_dense(value: Tensor) -> bool:
    """Whether a buffer like it is a run of numbers."""
    lazy = value.is_meta or value.is_conj() or value.is_neg()
    return type(value) is Tensor and not lazy and value.is_contiguous() and value.numel() > 0
