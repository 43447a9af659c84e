"""Results for the caller: clones of a graph's outputs, made in few launches, or the outputs themselves, lent."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weft.ops.byte_copies import is_bytes
from weft.ops.copies import plan_clones, uses_kernel
from weft.torchapi.private import clone_all

Cloner = Callable[[tuple[Tensor, ...]], list[Tensor]]


def plan_lending(outputs: Sequence[Tensor], cloned: Sequence[int]) -> Cloner:
    """Plan to lend all outputs except those at the indices `cloned`, which are cloned."""
    if len(cloned) == len(outputs):
        return plan_cloning(outputs)
    return _merged(lend_all, [((*cloned,), plan_cloning([outputs[i] for i in cloned]))]) if cloned else lend_all


def lend_all(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The graph's own buffers, which the next replay overwrites, as new tensor objects, so that one caller's `t_()` or
    donation does not affect the next caller."""
    return [x.data for x in outputs]  # `.data` takes half the time of `detach()`


def plan_cloning(outputs: Sequence[Tensor]) -> Cloner:
    """Plan to clone these outputs in few launches."""
    by_kernel: dict[Any, list[int]] = {}
    together: dict[Any, list[int]] = {}
    for i, x in enumerate(outputs):
        if type(x) is Tensor and is_bytes(x):
            if uses_kernel(x.device):
                by_kernel.setdefault(x.device, []).append(i)
            elif x.numel() and x.is_contiguous():
                together.setdefault((x.dtype, x.device), []).append(i)
    groups: list[tuple[tuple[int, ...], Cloner]] = []
    groups += [((*group,), plan_clones([outputs[i] for i in group])) for group in by_kernel.values()]
    groups += [((*group,), clone_all) for group in together.values() if len(group) > 1]
    if len(groups) == 1 and len(groups[0][0]) == len(outputs):
        return groups[0][1]
    grouped = {i for group, _ in groups for i in group}
    return _merged(lambda outputs: [x if i in grouped else x.clone() for i, x in enumerate(outputs)], groups)


def _merged(rest: Cloner, groups: Sequence[tuple[tuple[int, ...], Cloner]]) -> Cloner:
    """Clone the outputs at each group's indices with the group's cloner, and all others with `rest`."""

    def merge(outputs: tuple[Tensor, ...]) -> list[Tensor]:
        results = rest(outputs)
        for indices, clone in groups:
            for index, cloned in zip(indices, clone(tuple(outputs[i] for i in indices)), strict=True):
                results[index] = cloned
        return results

    return merge if groups else rest
