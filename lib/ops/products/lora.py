"""`weft::add_lora`: the low-rank adapter of each token, added to a linear layer (Hu et al., 2021,
arXiv 2106.09685)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from weft.errors import DescriptorError
from weft.ops.products.linear import multiply
from weft.ops.products.parts import num_parts, sum_parts, widened
from weft.ops.register import operator
from weft.ops.tiles.tile import leaf_columns


def _check(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    active: Tensor,
    starts: Sequence[int],
    leaves: int = 0,
) -> None:
    (tokens, columns), (num_slots, pairs, rank, _) = x.shape, a.shape
    actual_shapes = (
        y.shape[-2:],
        a.shape,
        b.shape,
        slots.shape,
        len(starts),
        starts[0],
        starts[-1],
    )
    rows = b.shape[1]
    if (
        actual_shapes
        != (
            (tokens, rows),
            (num_slots, pairs, rank, columns),
            (num_slots, rows, rank),
            (tokens,),
            pairs + 1,
            0,
            rows,
        )
        or not x.dtype == a.dtype == b.dtype
        or (leaves and num_parts(y) != leaves)
    ):
        shapes = ", ".join(
            f"{name} {list(t.shape)} {t.dtype}"
            for name, t in (("y", y), ("x", x), ("a", a), ("b", b))
        )
        problem = f"{shapes}, slots {list(slots.shape)}"
        instead = (
            "y [T, N], x [T, K], a [L, P, R, K], b [L, N, R], slots [T], P + 1 starts from 0 to N,"
            " one dtype"
        )
        instead += f"; y [{leaves}, T, N]" * bool(leaves)
        raise DescriptorError(f"add_lora(y, x, a, b, slots, active, {starts})", problem, instead)
    leaf_columns(columns, leaves)


def functional_add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    active: Tensor,
    starts: Sequence[int],
    leaves: int = 0,
) -> Tensor:
    """`add_lora` without a read on the host: every slot multiplies all tokens, and only the slot's
    own tokens keep the result."""
    if leaves:
        leaf_operands = zip(y, x.chunk(leaves, 1), a.chunk(leaves, 3), strict=True)
        shared_operands = b, slots, active, starts
        return torch.stack(
            [
                _add_to_all(widened(part), left, right, *shared_operands)
                for part, left, right in leaf_operands
            ]
        )
    return _add_to_all(widened(sum_parts(y, x.dtype)), x, a, b, slots, active, starts).to(x.dtype)


def _add_to_all(
    total: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    active: Tensor,
    starts: Sequence[int],
) -> Tensor:
    wide = widened(x)
    for slot in range(a.shape[0]):
        low = [(wide @ widened(a[slot, pair]).T).to(x.dtype) for pair in range(a.shape[1])]
        parts = zip(low, pairwise(starts), strict=True)
        added = torch.cat(
            [widened(part) @ widened(b[slot, start:end]).T for part, (start, end) in parts], -1
        )
        # A token whose slot is not active keeps its y, as in the operator.
        mine = (slots == slot) & (active == slot).any()
        total = total + torch.where(mine[:, None], added, 0)
    return total


@operator(
    kernel="weft.ops.products.lora_triton:add_lora",
    fake=lambda y, x, leaves: torch.empty_like(y) if leaves else x.new_empty(y.shape[-2:]),
    functional=functional_add_lora,
    check=_check,
)
def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    active: Tensor,
    starts: Sequence[int],
    leaves: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """`y[t] + b[s] @ (a[s] @ x[t])`, where s is `slots[t]`; just `y[t]` if slot s is not active.

    A slot holds P pairs of matrices, one pair for each linear layer of a fused product. The
    matrices of `a` are stacked along P, and those of `b` are concatenated along their rows. The
    result of `a` is rounded to x's dtype; products are summed in float32, and the sum is rounded
    once.

    Args:
        y: `[T, N]` of x's dtype, or float32 parts of it `[S, T, N]` (`weft.ops.products.parts`).
        x: `[T, K]`.
        a: `[L, P, R, K]`, of x's dtype.
        b: `[L, N, R]`, of x's dtype.
        slots: `[T]` int32, the slot of each token; -1: none.
        active: `[n]` int32, the slots that occur in `slots`, each once, and -1.
        starts: P + 1 columns of y: the first column of each pair, and N.
        leaves: the number of equal leaves into which K is cut, if y is the leaves of a product of x
            (`weft.ops.products.leaves`); each leaf gets the contribution of its own columns. 0: K
            is not cut.

    Returns:
        `[T, N]` of x's dtype, or the leaves `[leaves, T, N]` float32.

    Raises:
        DescriptorError: shapes or dtypes contradict each other, or K cannot be cut into these
            leaves.
    """
    if leaves:
        # Leaves must be the same on any number of ranks, so their sums have a fixed order.
        leaf_operands = zip(y, x.chunk(leaves, 1), a.chunk(leaves, 3), strict=True)
        return torch.stack(
            [
                _add(part, left, right, b, slots, active, starts, True)
                for part, left, right in leaf_operands
            ]
        )
    return _add(sum_parts(y, x.dtype), x, a, b, slots, active, starts, batch_invariant).to(x.dtype)


def _add(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    active: Tensor,
    starts: Sequence[int],
    batch_invariant: bool,
) -> Tensor:
    # Copy even if y is float32 already, since the loop writes to it.
    total = y.to(torch.float32, copy=True)
    for slot in active[active >= 0].tolist():
        mine = (slots == slot).nonzero()[:, 0]
        for pair, (start, end) in enumerate(pairwise(starts)):
            low = multiply(x[mine].float(), a[slot, pair].float(), None, batch_invariant).to(
                x.dtype
            )
            total[mine, start:end] += multiply(
                low.float(), b[slot, start:end].float(), None, batch_invariant
            )
    return total
