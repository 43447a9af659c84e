"""The CUDA implementation of `weft::route`, in Triton: softmax, top-k and division in one kernel, a program a token.
Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.blocks_triton import TRITON_DTYPES, load_sum
from weft.ops.early_triton import begin, early, release
from weft.ops.kernel_triton import kernel
from weft.ops.parts import num_parts
from weft.ops.tiles import power_of_two


@kernel()
def _route_kernel(
    logits, weights, experts, num_experts, stride, part_stride,
    PARTS: tl.constexpr, TYPE: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    begin()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < num_experts
    left = load_sum(logits, token * stride + expert, inside, part_stride, PARTS, TYPE)
    left = tl.where(inside, left, float("-inf"))
    top = tl.max(left, 0)
    total = tl.sum(tl.exp(left - top), 0)
    slot = tl.arange(0, SLOTS)
    best = tl.full([SLOTS], float("-inf"), tl.float32)
    chosen = tl.zeros([SLOTS], tl.int32)
    for i in tl.static_range(TOP_K):
        value, index = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(slot == i, value, best)
        chosen = tl.where(slot == i, index, chosen)
        left = tl.where(expert == index, float("-inf"), left)
    release()
    powers = tl.where(slot < TOP_K, tl.exp(best - top), 0.0)
    if RENORMALIZE:
        total = tl.sum(powers, 0)
    tl.store(weights + token * TOP_K + slot, powers / total, mask=slot < TOP_K)
    # In range even where a logit is NaN.
    tl.store(experts + token * TOP_K + slot, tl.minimum(chosen, num_experts - 1), mask=slot < TOP_K)


def route(logits: Tensor, top_k: int, renormalize: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`weft::route`."""
    tokens, num_experts = logits.shape[-2:]
    logits = logits.contiguous()
    weights = logits.new_empty((tokens, top_k), dtype=torch.float32)
    experts = logits.new_empty((tokens, top_k), dtype=torch.int32)
    with torch.cuda.device_of(logits):
        if tokens:
            _route_kernel[(tokens,)](
                logits, weights, experts, num_experts, num_experts, tokens * num_experts,
                PARTS=num_parts(logits), TYPE=TRITON_DTYPES[dtype], TOP_K=top_k, SLOTS=power_of_two(top_k),
                BLOCK=power_of_two(num_experts), RENORMALIZE=renormalize,
                num_warps=1, **early(logits),
            )  # fmt: skip
    return weights, experts
