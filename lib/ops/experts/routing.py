"""The router of a mixture of experts: `weft::route`."""

import torch
from torch import Tensor

from weft.ops.products.parts import sum_parts, widened
from weft.ops.register import operator


def _empty_choice(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = logits.shape[-2], top_k
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@operator(kernel="weft.ops.experts.routing_triton:route", fake=_empty_choice)
def route(
    logits: Tensor, top_k: int, renormalize: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each token by softmax(logits), best first; ties go to the lower index.

    Args:
        logits: `[T, E]`, or float32 parts of it `[S, T, E]`.
        renormalize: whether the weights are divided by their sum.
        dtype: the dtype to which the sum of the parts is rounded; everything after is in float32.

    Returns:
        Weights `[T, top_k]` float32 and experts `[T, top_k]` int32.

    >>> route(torch.tensor([[0.0, 2.0, 2.0]]), 2, True, torch.float32)
    (tensor([[0.5000, 0.5000]]), tensor([[1, 2]], dtype=torch.int32))
    """
    best, order = widened(sum_parts(logits, dtype)).sort(dim=-1, descending=True, stable=True)
    powers = torch.exp(best - best[:, :1])  # relative to the largest, which is first
    weights = powers[:, :top_k]
    weights = weights / (weights if renormalize else powers).sum(-1, keepdim=True)
    return weights.contiguous(), order[:, :top_k].to(torch.int32).contiguous()
