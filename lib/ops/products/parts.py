"""Parts: a result whose sum the next kernel forms, so that no launch is spent on addition alone.

A product that was split, over its columns or over experts, is `[S, T, N]`: S parts, to be added in
float32, first to last, and rounded once to the model's dtype. Every operator here that takes such a
result also takes the sum, `[T, N]`.

Leaves are parts that are added up as a balanced tree instead (`weft.ops.products.leaves`), so that
ranks may have some of them each.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def sum_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum `[T, N]` of `dtype`, from parts `[S, T, N]` or from the sum.

    >>> sum_parts(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.float32)
    tensor([[4., 6.]])
    """
    if x.dim() == 2:
        return x.to(dtype)
    total = widened(x[0])
    for part in x[1:]:
        total = total + widened(part)
    return total.to(dtype)


def widened(x: Tensor) -> Tensor:
    """x in float32, in which the operators compute; float64, in which derivatives are checked,
    stays."""
    if x.dtype == torch.float64:
        return x
    return x.float()


def balanced(add: Callable[[Tensor, Tensor], Tensor], xs: Sequence[Tensor]) -> Tensor:
    """The tensors added up, by a function of two, as a balanced tree: `(x0 + x1) + (x2 + x3)`. So
    those whose number is a power of two may be added up on several ranks, as many on each, and then
    the ranks' sums."""
    while len(xs) > 1:
        xs = [add(*xs[i : i + 2]) if i + 1 < len(xs) else xs[i] for i in range(0, len(xs), 2)]
    return xs[0]


def num_parts(x: Tensor) -> int:
    """S, or 0 if the sum was formed already."""
    if x.dim() == 3:
        return x.shape[0]
    return 0
