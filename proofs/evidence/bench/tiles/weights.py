"""The weights of timed products, which take turns."""

import torch
from torch import Tensor

# Elements from which all weights of a dtype are cut.
_ARENA = 2**31


def drawn(dtype: torch.dtype) -> Tensor:
    """Random elements, from which weights are cut."""
    arena = torch.empty(_ARENA, dtype=dtype, device="cuda")
    # In pieces: the random numbers in float32 would take two or four times the arena's memory.
    for some in arena.split(2**27):
        some.copy_(torch.randn(len(some), device="cuda") * (16 if arena.itemsize == 1 else 1))
    return arena
