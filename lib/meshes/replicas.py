"""Comparison of values that should be the same on several ranks."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.meshes.mesh import Mesh, group_of
from weft.meshes.placements import Layout, Replicate
from weft.torchapi.private import (
    in_dispatch_mode,
    innermost,
    is_capturing,
    is_functorch_wrapped_tensor,
    without_modes,
)
from weft.values.keys import value_key


def differing(values: Sequence[Any]) -> list[int]:
    """The indices of the values that differ from the first one in any bit.

    Inside a transform of torch.func, tensors are compared by value instead. Tensors whose values
    cannot be read (in a trace, while a GPU captures, or ever) count as equal.

    >>> differing([torch.zeros(2), torch.zeros(2), torch.ones(2)]), differing([1, 1.0])
    ([2], [1])
    """
    first, *rest = values
    if all(one is first for one in rest):
        return []
    if not isinstance(first, Tensor):
        return [index for index, one in enumerate(rest, 1) if value_key(one) != value_key(first)]
    if not all(map(_is_readable, values)):
        return []
    with without_modes() if in_dispatch_mode() else nullcontext():
        return [index for index, one in enumerate(rest, 1) if not _is_equal(first, one)]


def _is_readable(x: Any) -> bool:
    """Whether the values of a tensor can be read now."""
    if isinstance(x, Tensor):
        x = innermost(x)
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_quantized:
        return False
    kind = x.device.type
    return kind == "cpu" or (kind == "cuda" and not is_capturing()())


def _is_equal(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if is_functorch_wrapped_tensor(a) or is_functorch_wrapped_tensor(b):
        return _is_equal_in_each_row(a, b)
    # A lazily conjugated or negated tensor has the bytes of another value.
    dense = [x.detach().resolve_conj().resolve_neg().contiguous() for x in (a, b.to(a.device))]
    # Not `reshape`: a dimension of one element may have any stride, `reshape` keeps it, and then
    # `view` with another dtype refuses it.
    flat = [x.as_strided((x.numel(),), (1,)) for x in dense]
    # Compared as integers: `torch.equal` of floats takes -0.0 and 0.0 for equal, NaNs for unequal.
    # torch views bytes as int64 only if their number and their offset are multiples of 8.
    in_words = all(x.nbytes % 8 == 0 and x.storage_offset() * x.itemsize % 8 == 0 for x in flat)
    bits = [x.view(torch.int64 if in_words else torch.uint8) for x in flat]
    return torch.equal(*bits)


def _is_equal_in_each_row(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors inside a transform have equal values, in all rows of `vmap`."""
    if a.is_floating_point() and a.itemsize == 1:  # torch cannot compare 8-bit floats
        a = a.float()
        b = b.float()
    same = (a == b) | ((a != a) & (b != b))
    return bool(innermost(same).all())


@functools.lru_cache(256)
def replicas(layout: Layout, mesh: Mesh) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The axes along which a value is placed as `Replicate()`, each with a group of ranks that must
    hold the same value."""
    axes = (axis for axis, placement in layout if placement == Replicate())
    return tuple(
        (axis, ranks)
        for axis in axes
        for ranks in dict.fromkeys(group_of(mesh, rank, axis) for rank in mesh)
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as text.

    >>> ranks_in_words([0, 1]), ranks_in_words([0, 2, 3])
    ('ranks 0 and 1', 'ranks 0, 2 and 3')
    """
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}"
