"""Tensors with a few simple values, so that shrunk examples are easy to read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from weft.arguments.checks import is_int, kind_of
from weft.errors import CheckError

Size = int | st.SearchStrategy[int]


def _is_size(value: Any) -> bool:
    return is_int(value, 0)


def tensors(
    *shape: Size,
    dtype: torch.dtype = torch.float32,
    elements: st.SearchStrategy[Any] | None = None,
    device: torch.device | str = "cpu",
) -> st.SearchStrategy[Tensor]:
    """Tensors of the given shape, whose elements shrink towards 0.

    Args:
        shape: the dimensions; each may be a strategy: `tensors(st.integers(1, 6), 4)`.
        dtype: any real dtype, or bool.
        elements: a strategy of Python numbers. None: multiples of 1/4 between -4 and 4, or whole
            numbers from 0 to 8.
        device: the device of the tensors.

    Two tensors that share a drawn size: `st.integers(1, 6).flatmap(lambda n: st.tuples(tensors(n,
    4), tensors(n)))`.

    Raises:
        CheckError: a dimension is not a size, or `dtype` is not a dtype.

    >>> from hypothesis import find
    >>> find(tensors(st.integers(1, 3), 2), lambda x: bool((x > 1).all()))
    tensor([[1.2500, 1.2500]])
    """
    dims: tuple[Any, ...] = shape
    call = f"tensors({', '.join(f'{size!r:.40}' for size in dims)}, dtype={dtype!r})"
    if strange := [
        size for size in dims if not isinstance(size, st.SearchStrategy) and not _is_size(size)
    ]:
        instead = "each dimension by itself, a whole number or a strategy: tensors(2, 3)"
        raise CheckError(call, f"{strange[0]!r:.40}, {kind_of(strange[0])}", instead)
    if not isinstance(dtype, torch.dtype):
        raise CheckError(
            call, f"dtype is {kind_of(dtype)}", "a dtype of torch: dtype=torch.float32"
        )
    if elements is None:
        # Exact in float16 and bfloat16, too.
        quarters = st.integers(-16, 16).map(lambda n: n / 4)
        elements = (
            st.booleans()
            if dtype == torch.bool
            else quarters
            if dtype.is_floating_point
            else st.integers(0, 8)
        )
    kind = np.bool_ if dtype == torch.bool else np.float64 if dtype.is_floating_point else np.int64

    def of(sizes: Sequence[int]) -> st.SearchStrategy[Tensor]:
        drawn = arrays.arrays(kind, tuple(sizes), elements=elements)
        return drawn.map(
            lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)
        )

    return st.tuples(
        *(size if isinstance(size, st.SearchStrategy) else st.just(size) for size in shape)
    ).flatmap(of)
