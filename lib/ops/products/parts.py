"""Parts: a result whose sum the next kernel computes, so that no launch is spent on addition alone.

A product that is split, over its columns or over experts, is `[S, T, N]`: S parts, to be added in
float32, first to last, and rounded once to the model's dtype. Every operator that takes such a
result also takes the finished sum, `[T, N]`.

Leaves are parts that are added as a balanced tree instead (`weft.ops.products.leaves`), so that
each rank may have some of them.
"""

import torch
from torch import Tensor


def sum_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum `[T, N]` in `dtype` of parts `[S, T, N]`; a finished sum `[T, N]` is only converted.

    >>> sum_parts(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.float32)
    tensor([[4., 6.]])
    """
    if x.dim() == 2:
        return x.to(dtype)
    # One after the other, as the kernels add them; `x.sum(0)` may add in another order.
    total = widened(x[0])
    for part in x[1:]:
        total = total + widened(part)
    return total.to(dtype)


def widened(x: Tensor) -> Tensor:
    """`x` in float32, in which the operators compute, or unchanged if it is float64, in which tests
    check derivatives."""
    if x.dtype == torch.float64:
        return x
    return x.float()


def num_parts(x: Tensor) -> int:
    """The number of parts S, or 0 for a finished sum."""
    if x.dim() == 3:
        return x.shape[0]
    return 0
