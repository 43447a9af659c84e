"""The products of a mixture of experts: `weft::run_experts`."""

import torch
from torch import Tensor

from weft.errors import DescriptorError
from weft.ops.products.fp8 import (
    BLOCK,
    ROUNDED,
    Quantized,
    dequantize,
    dequantize_weight,
    reference_quantize,
)
from weft.ops.products.gate import functional_gated, gated
from weft.ops.products.linear import multiply
from weft.ops.products.parts import widened
from weft.ops.register import operator, without_derivative
from weft.ops.tiles.tile import leaf_columns


def run_experts(
    x: Tensor | Quantized,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    experts: Tensor,
    *,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    dtype: torch.dtype,
    first: int = 0,
    num_experts: int | None = None,
    leaves: int = 0,
) -> Tensor:
    """`weight * down(silu(gate(x)) * up(x))` for each token and each of its experts, not yet summed
    over experts.

    Products are in float32. The values between the two products are rounded to `dtype`, and in FP8
    then quantised, 128 columns of a token at a time.

    `gate_up` and `down` may hold only some of the experts, if other ranks hold the rest: for an
    expert that is elsewhere, the result here is 0 and costs no product.

    Args:
        x: `[T, H]` of `dtype`, or quantised if `gate_up` and `down` are.
        gate_up: `[E, 2 * I, H]`: the rows of the gate, then the rows of up.
        down: `[E, H, I]`.
        weights, experts: `[T, top_k]`, from `route`.
        gate_up_scale, down_scale: `[E, ceil(2 * I / 128), ceil(H / 128)]` and `[E, ceil(H / 128),
            ceil(I / 128)]` float32, for `gate_up` and `down` in FP8; then I is a multiple of 128.
        first: the number, among all experts, of the expert in `gate_up[0]` and `down[0]`.
        num_experts: the number of all experts, from which `route` chose; None: E.
        leaves: the number of equal leaves into which the product with `down` cuts I
            (`weft.ops.products.leaves`), in FP8 at multiples of 128; 0: not cut.

    Returns:
        Parts (`weft.ops.products.parts`) `[top_k, T, H]` of `dtype`; or `[leaves * top_k, T, H]`
        float32, with the parts of each leaf one after another.

    Raises:
        DescriptorError: shapes contradict each other, only some of x, `gate_up` and `down` are in
            FP8, `num_experts` is too small, or I cannot be cut into these leaves.
    """
    values, scales = (x.values, x.scales) if isinstance(x, Quantized) else (x, None)
    (num_local_experts, doubled, hidden), (_, _, inner) = gate_up.shape, down.shape
    kinds = {scales is None, gate_up_scale is None, down_scale is None}
    agree = (tuple(down.shape), doubled, values.shape[1]) == (
        (num_local_experts, hidden, inner),
        2 * inner,
        hidden,
    )
    if not agree or len(kinds) > 1 or (scales is not None and inner % BLOCK):
        named_operands = (
            ("x", values, scales),
            ("gate_up", gate_up, gate_up_scale),
            ("down", down, down_scale),
        )
        problem = ", ".join(
            f"{name} {list(one.shape)} {one.dtype} with{'out' * (scale is None)} scales"
            for name, one, scale in named_operands
        )
        instead = (
            "pass [T, H], [E, 2 * I, H] and [E, H, I]; and scales of all three, with I in"
            f" {BLOCK}s, or none"
        )
        raise DescriptorError("run_experts(x, gate_up, down, …)", problem, instead)
    if num_experts is None:
        every = num_local_experts
    else:
        every = num_experts
    if not 0 <= first <= every - num_local_experts:
        problem = f"the weights of {num_local_experts} experts from number {first} on, of {every}"
        raise DescriptorError(
            "run_experts(x, gate_up, down, …)",
            problem,
            f"first from 0 to {every - num_local_experts}",
        )
    leaf_columns(inner, leaves, 1 if scales is None else BLOCK)
    operands = values, scales, gate_up, gate_up_scale, down, down_scale, weights, experts, dtype
    return _run_experts(*operands, first, every, leaves)


def functional_run_experts(
    values: Tensor,
    scales: Tensor | None,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    dtype: torch.dtype,
    first: int,
    num_experts: int,
    leaves: int = 0,
) -> Tensor:
    """`_run_experts` without a read on the host: every expert multiplies all tokens, and only the
    tokens that chose it keep the result."""
    if scales is not None:
        # FP8 has no derivative, so the reference serves, and refuses to be differentiated.
        in_fp8 = without_derivative("run_experts", ROUNDED, _run_experts.reference)
        operands = values, scales, gate_up, gate_up_scale, down, down_scale, weights, experts, dtype
        result: Tensor = in_fp8(*operands, first, num_experts, leaves)
        return result
    x = widened(values)
    kind = _kind(dtype, leaves)
    count = max(leaves, 1)
    out = torch.zeros_like(values, dtype=kind).expand(count, experts.shape[1], -1, -1)
    for expert in range(gate_up.shape[0]):
        gate, up = (x @ widened(gate_up[expert]).T).chunk(2, dim=-1)
        middle = widened(functional_gated(gate, up, dtype))
        columns = widened(down[expert])
        pairs = zip(middle.chunk(count, 1), columns.chunk(count, 1), strict=True)
        product = torch.stack([middle_leaf @ leaf.T for middle_leaf, leaf in pairs])[:, None]
        chosen = (experts == first + expert).T[:, :, None]
        out = torch.where(chosen, (product * weights.T[:, :, None]).to(kind), out)
    return out.flatten(0, 1)


def _kind(dtype: torch.dtype, leaves: int) -> torch.dtype:
    """The dtype of the result."""
    if not leaves:
        return dtype
    return torch.promote_types(dtype, torch.float32)


def _empty(values: Tensor, experts: Tensor, dtype: torch.dtype, leaves: int) -> Tensor:
    shape = max(leaves, 1) * experts.shape[1], *values.shape
    return values.new_empty(shape, dtype=_kind(dtype, leaves))


@operator(
    kernel="weft.ops.experts.products_triton:run_experts",
    fake=_empty,
    functional=functional_run_experts,
)
def _run_experts(
    values: Tensor,
    scales: Tensor | None,
    gate_up: Tensor,
    gate_up_scale: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    dtype: torch.dtype,
    first: int,
    num_experts: int,
    leaves: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """The operator of `run_experts`."""
    if scales is None:
        x = values.float()
    else:
        x = dequantize(Quantized(values, scales))
    out = torch.zeros_like(_empty(values, experts, dtype, leaves))
    count = max(leaves, 1)
    by_leaf = out.unflatten(0, (count, -1))
    # Multiply each chosen expert with its own tokens only; this reads the choices on the host.
    for chosen in experts.unique().tolist():
        # What an expert on another rank contributes stays 0 here.
        if not 0 <= (expert := chosen - first) < len(gate_up):
            continue
        tokens, slots = (experts == chosen).nonzero(as_tuple=True)
        product = multiply(x[tokens], _wide(gate_up, gate_up_scale, expert), None, batch_invariant)
        gate, up = product.chunk(2, dim=-1)
        middle = gated(gate, up, dtype)
        if scales is None:
            wide = middle.float()
        else:
            wide = dequantize(Quantized(*reference_quantize(middle)))
        pairs = zip(
            wide.chunk(count, 1), _wide(down, down_scale, expert).chunk(count, 1), strict=True
        )
        for leaf_out, (middle_leaf, columns) in zip(by_leaf, pairs, strict=True):
            # Contiguous, so that torch sees the same strides as on a rank with only these columns.
            product = multiply(
                middle_leaf, columns.contiguous(), None, batch_invariant or leaves > 0
            )
            leaf_out[slots, tokens] = (product * weights[tokens, slots, None]).to(out.dtype)
    return out


def _wide(weight: Tensor, scale: Tensor | None, expert: int) -> Tensor:
    if scale is None:
        return weight[expert].float()
    return dequantize_weight(weight[expert], scale[expert])
