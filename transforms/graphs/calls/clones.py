"""What a caller is given for a graph's outputs: clones, made by few launches, or the outputs themselves."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from weft.ops.byte_copies import is_bytes
from weft.ops.copies import plan_clones, uses_kernel
from weft.torchapi import clone_all

Cloner = Callable[[tuple[Tensor, ...]], list[Tensor]]


def lend_outputs(made: Sequence[Tensor], kept: Sequence[int]) -> Cloner:
    """How to lend all but those `kept`, of which there are clones."""
    if len(kept) == len(made):
        return cloning(made)
    return _merged(as_borrowed, [((*kept,), cloning([made[i] for i in kept]))]) if kept else as_borrowed


def as_borrowed(made: tuple[Tensor, ...]) -> list[Tensor]:
    """The graph's own buffers, which the next replay overwrites; as new tensors, so that no caller's `t_()` or donation
    reaches the next caller."""
    return [x.data for x in made]  # half the time of `detach()`


def cloning(made: Sequence[Tensor]) -> Cloner:
    """How to clone these outputs with few launches."""
    kernel: dict[Any, list[int]] = {}
    together: dict[Any, list[int]] = {}
    for i, x in enumerate(made):
        if type(x) is Tensor and is_bytes(x):
            if uses_kernel(x.device):
                kernel.setdefault(x.device, []).append(i)
            elif x.numel() and x.is_contiguous():
                together.setdefault((x.dtype, x.device), []).append(i)
    parts: list[tuple[tuple[int, ...], Cloner]] = []
    parts += [((*group,), plan_clones([made[i] for i in group])) for group in kernel.values()]
    parts += [((*group,), clone_all) for group in together.values() if len(group) > 1]
    if len(parts) == 1 and len(parts[0][0]) == len(made):
        return parts[0][1]
    done = {i for group, _ in parts for i in group}
    return _merged(lambda made: [x if i in done else x.clone() for i, x in enumerate(made)], parts)


def _merged(rest: Cloner, parts: Sequence[tuple[tuple[int, ...], Cloner]]) -> Cloner:
    """What `rest` returns, but at the places of each part what that part returns for the tensors there."""

    def merge(made: tuple[Tensor, ...]) -> list[Tensor]:
        found = rest(made)
        for places, clone in parts:
            for place, one in zip(places, clone(tuple(made[i] for i in places)), strict=True):
                found[place] = one
        return found

    return merge if parts else rest
