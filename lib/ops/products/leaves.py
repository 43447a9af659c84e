"""Leaves: parts of a sum, so that its order does not depend on how many ranks share it.

A sum over columns is cut into contiguous leaves of equal size. Each leaf is summed by itself, and
the leaves are added in float32 as a balanced tree. A rank that has some of the columns has whole
leaves and adds up a subtree; an all-reduce adds up the ranks' sums
(`weft.meshes.placements.reduced`). So the bits are the same for every number of ranks that divides
the number of leaves (Zhang et al., 2025, "Deterministic inference across tensor parallel sizes that
eliminates training-inference mismatch", arXiv 2511.17826).
"""

import operator as arithmetic

import torch
from torch import Tensor

from weft.meshes.placements import balanced
from weft.ops.products.parts import sum_parts, widened
from weft.ops.register import operator


def functional_sum_leaves(x: Tensor, leaves: int, dtype: torch.dtype) -> Tensor:
    """`sum_leaves` in torch's own operations."""
    sums = [sum_parts(leaf, widened(leaf).dtype) for leaf in x.unflatten(0, (leaves, -1))]
    return balanced(arithmetic.add, sums).to(dtype)


@operator(
    kernel="weft.ops.products.leaves_triton:sum_leaves",
    fake=lambda x, dtype: x.new_empty(x.shape[1:], dtype=dtype),
    functional=functional_sum_leaves,
)
def sum_leaves(x: Tensor, leaves: int, dtype: torch.dtype) -> Tensor:
    """Sum the leaves as a balanced tree in float32; each leaf is the sum of its parts, first to
    last.

    Args:
        x: `[leaves * S, T, N]`, with the parts of each leaf one after another.
        leaves: a power of two.
        dtype: the dtype of the result, which is rounded once.

    Returns:
        `[T, N]` of `dtype`.

    >>> sum_leaves(torch.tensor([2.0**25, 1.0, 1.0, 2.0])[:, None, None], 4, torch.float32) - 2.0**25
    tensor([[4.]])
    """
    return functional_sum_leaves(x, leaves, dtype)
