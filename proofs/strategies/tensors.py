"""Tensors of a shape and a type, of few plain values, so that what shrinking leaves can be read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

Size = int | st.SearchStrategy[int]


def tensors(
    *shape: Size,
    dtype: torch.dtype = torch.float32,
    elements: st.SearchStrategy[Any] | None = None,
    device: torch.device | str = "cpu",
) -> st.SearchStrategy[Tensor]:
    """Tensors of that shape, whose elements shrink towards 0.

    Args:
        shape: its dimensions; each may be a strategy: `tensors(st.integers(1, 6), 4)`.
        dtype: any of real numbers, or bool.
        elements: a strategy of Python numbers; None: quarters between -4 and 4, or whole numbers from 0 to 8.
        device: where they are.

    Two tensors of one size that is drawn: `st.integers(1, 6).flatmap(lambda n: st.tuples(tensors(n, 4), tensors(n)))`.

    >>> from hypothesis import find
    >>> find(tensors(st.integers(1, 3), 2), lambda x: bool((x > 1).all()))
    tensor([[1.2500, 1.2500]])
    """
    if elements is None:
        quarters = st.integers(-16, 16).map(lambda n: n / 4)
        elements = st.booleans() if dtype == torch.bool else quarters if dtype.is_floating_point else st.integers(0, 8)
    kind = np.bool_ if dtype == torch.bool else np.float64 if dtype.is_floating_point else np.int64

    def of(sizes: Sequence[int]) -> st.SearchStrategy[Tensor]:
        drawn = arrays.arrays(kind, tuple(sizes), elements=elements)
        return drawn.map(lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype))

    return st.tuples(*(size if isinstance(size, st.SearchStrategy) else st.just(size) for size in shape)).flatmap(of)
