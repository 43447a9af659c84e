"""Comparison of values that should be the same on several ranks."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from weft.meshes.mesh import Mesh
from weft.meshes.placements import Layout, Replicate
from weft.torchapi.private import in_dispatch_mode, in_functorch_transform, is_capturing, without_modes
from weft.value_keys import value_key


def differing(values: Sequence[Any]) -> list[int]:
    """The indices of the values that differ from the first one in any bit. Tensors whose values cannot be read now, or
    at all, count as equal: under a torch.func transform, in a trace, or while a GPU captures.

    >>> differing([torch.zeros(2), torch.zeros(2), torch.ones(2)]), differing([1, 1.0])
    ([2], [1])
    """
    first, *others = values
    if all(one is first for one in others):
        return []
    if not isinstance(first, Tensor):
        return [index for index, one in enumerate(others, 1) if value_key(one) != value_key(first)]
    if in_functorch_transform() or not all(map(_is_readable, values)):
        return []
    with without_modes() if in_dispatch_mode() else nullcontext():
        return [index for index, one in enumerate(others, 1) if not _is_equal(first, one)]


def _is_readable(x: Any) -> bool:
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided or x.is_quantized:
        return False
    kind = x.device.type
    return kind == "cpu" or (kind == "cuda" and not is_capturing()())


def _is_equal(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    dense = [x.detach().resolve_conj().resolve_neg().contiguous() for x in (a, b.to(a.device))]
    # A dimension of one element may have any stride, which `reshape` keeps and `view` of another dtype refuses.
    flat = [x.as_strided((x.numel(),), (1,)) for x in dense]
    in_words = all(x.nbytes % 8 == 0 and x.storage_offset() * x.itemsize % 8 == 0 for x in flat)
    bits = [x.view(torch.int64 if in_words else torch.uint8) for x in flat]
    return torch.equal(*bits)


def unequal_replicas(leaves: Sequence[Any], layout: Layout, mesh: Mesh) -> Iterator[tuple[str, list[int]]]:
    """The axes along which a value is placed as `Replicate()`, and ranks along one that differ; the first is the one
    that the others differ from."""
    for axis, placement in layout:
        if placement != Replicate():
            continue
        for ranks in _groups(mesh, axis):
            if found := differing([leaves[rank] for rank in ranks]):
                yield axis, [ranks[0], *(ranks[index] for index in found)]


@functools.lru_cache(64)
def _groups(mesh: Mesh, axis: str) -> tuple[tuple[int, ...], ...]:
    return tuple(dict.fromkeys(mesh.group(rank, axis) for rank in mesh))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks as text.

    >>> ranks_in_words([0, 1]), ranks_in_words([0, 2, 3])
    ('ranks 0 and 1', 'ranks 0, 2 and 3')
    """
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}"
