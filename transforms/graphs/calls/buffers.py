"""`InputBufferPool`: the buffers from which graphs read their copied inputs, and the padding sources of these buffers.

Graphs that replay one at a time share the buffers, because each replay fills its buffers completely, and results are
never views of them.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from weft.torchapi.private import seen_as
from weft.transforms.graphs.calls.overlap import overlaps_itself
from weft.trees import Axes

SPARSE_BYTES = 2**26
"""The size up to which a strided argument gets a buffer with its strides; four times its own size is allowed too."""
PADDING_SOURCE_BYTES = 2**20
"""The size up to which padding is copied from a padding source, in the launch that copies the values; larger padding
is filled in a launch of its own."""


def buffer_like(value: Tensor) -> Tensor:
    """Copy a tensor with its strides, so that kernels that depend on strides compute the same; make a dense copy if its
    elements overlap, or if they cover little of the memory between the first and the last."""
    span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    sparse = span * value.element_size() > max(SPARSE_BYTES, 4 * value.nbytes)
    if value.numel() == 0 or value.is_meta or sparse or overlaps_itself(value):
        return torch.empty_like(value).copy_(value)
    buffer = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return seen_as(buffer, value).copy_(value)


@attrs.define
class InputBufferPool:
    """Memory for the input buffers of graphs that replay one at a time: one block per input index, as large as the
    largest buffer of that input; smaller buffers are the first part of it.

    Args:
        nbytes: the bytes allocated so far for buffers and padding sources.
    """

    nbytes: int = 0
    _blocks: dict[Any, Tensor] = attrs.field(factory=dict, init=False)

    def buffer(self, index: int, value: Tensor) -> Tensor:
        """Make the buffer for the input at `index`, with a copy of `value`; a dense one is part of a shared block."""
        if is_dense(value):
            return self._block_part(("buffer", index), value).copy_(value)
        self.nbytes += value.nbytes
        return buffer_like(value)

    def padding_source(self, index: int, buffer: Any, spec: Axes | None) -> Tensor | None:
        """Make a tensor of a buffer's size, full of its padding; None if that is not one number, or if it is large."""
        if spec is None or isinstance(spec.pad, str) or buffer.nbytes > PADDING_SOURCE_BYTES:
            return None
        if is_dense(buffer):
            return self._block_part(("padding", index, spec.pad), buffer).fill_(spec.pad)
        self.nbytes += buffer.nbytes
        return torch.full_like(buffer, spec.pad)

    def _block_part(self, key: tuple[Any, ...], like: Tensor) -> Tensor:
        key = *key, like.dtype, like.device, torch.is_inference_mode_enabled()
        if (block := self._blocks.get(key)) is None or block.numel() < like.numel():
            block = self._blocks[key] = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
            self.nbytes += block.nbytes
        return block.as_strided(like.shape, like.stride())


def is_dense(value: Tensor) -> bool:
    """Whether a buffer like `value` is contiguous memory without lazy bits, so that it may be part of a shared
    block."""
    lazy = value.is_meta or value.is_conj() or value.is_neg()
    return type(value) is Tensor and not lazy and value.is_contiguous() and value.numel() > 0
