"""`weft::add_lora`: what low-rank adapters add to a linear layer (Hu et al., 2021, arXiv 2106.09685), a token's own."""

from itertools import pairwise

import torch
from torch import Tensor

from weft.errors import DescriptorError
from weft.ops.parts import sum_parts, widened
from weft.ops.register import register


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, active: Tensor, starts: tuple[int, ...]
) -> Tensor:
    """`y[t] + b[s] @ (a[s] @ x[t])`, where s is `slots[t]`; `y[t]` where that is no active one.

    The matrices of a slot are P pairs beside each other: those of `a` one behind the other, those of `b` one below the
    other, as the linear layers are that are one product. What `a` gives is rounded to x's dtype; products are added up
    in float32, and the sum is rounded once.

    Args:
        y: `[T, N]` of x's dtype, or float32 parts of it `[S, T, N]` (`weft.ops.parts`).
        x: `[T, K]`.
        a: `[L, P, R, K]`, of x's dtype.
        b: `[L, N, R]`, of x's dtype.
        slots: `[T]` int32; -1: none.
        active: `[n]` int32, the slots that are in `slots`, each once, and -1.
        starts: P + 1 columns of y, where each pair's begin, and N.

    Returns:
        `[T, N]` of x's dtype.

    Raises:
        DescriptorError: shapes or dtypes contradict each other.
    """
    (tokens, columns), (num_slots, pairs, rank, _) = x.shape, a.shape
    wanted = (y.shape[-2:], a.shape, b.shape, slots.shape, len(starts), starts[0], starts[-1])
    rows = b.shape[1]
    if wanted != (
        (tokens, rows), (num_slots, pairs, rank, columns), (num_slots, rows, rank), (tokens,), pairs + 1, 0, rows,
    ) or not x.dtype == a.dtype == b.dtype:  # fmt: skip
        shapes = ", ".join(f"{name} {list(t.shape)} {t.dtype}" for name, t in (("y", y), ("x", x), ("a", a), ("b", b)))
        seen = f"{shapes}, slots {list(slots.shape)}"
        instead = "y [T, N], x [T, K], a [L, P, R, K], b [L, N, R], slots [T], P + 1 starts from 0 to N, one dtype"
        raise DescriptorError(f"add_lora(y, x, a, b, slots, active, {starts})", seen, instead)
    out: Tensor = _add_lora(y, x, a, b, slots, active, starts)
    return out


def reference_add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, active: Tensor, starts: list[int]
) -> Tensor:
    """`weft::add_lora` in plain torch, on any device."""
    total = sum_parts(y, x.dtype).to(torch.float32, copy=True)
    for slot in active[active >= 0].tolist():
        mine = (slots == slot).nonzero()[:, 0]
        for pair, (start, end) in enumerate(pairwise(starts)):
            low = (x[mine].float() @ a[slot, pair].float().T).to(x.dtype)
            total[mine, start:end] += low.float() @ b[slot, start:end].float().T
    return total.to(x.dtype)


def functional_add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, active: Tensor, starts: list[int]
) -> Tensor:
    """The same without a read on the host: every slot's products with all tokens, of which its own keep theirs."""
    total, wide = widened(sum_parts(y, x.dtype)), widened(x)
    for slot in range(a.shape[0]):
        low = [(wide @ widened(a[slot, pair]).T).to(x.dtype) for pair in range(a.shape[1])]
        parts = zip(low, pairwise(starts), strict=True)
        added = torch.cat([widened(part) @ widened(b[slot, start:end]).T for part, (start, end) in parts], -1)
        mine = (slots == slot) & (active == slot).any()
        total = total + torch.where(mine[:, None], added, 0)
    return total.to(x.dtype)


def _fake(y: Tensor, x: Tensor, a: Tensor, b: Tensor, slots: Tensor, active: Tensor, starts: list[int]) -> Tensor:
    return x.new_empty(y.shape[-2:])


_add_lora = register(
    "add_lora",
    "(Tensor y, Tensor x, Tensor a, Tensor b, Tensor slots, Tensor active, int[] starts) -> Tensor",
    cpu=reference_add_lora, fake=_fake, kernel="weft.ops.lora_triton:add_lora",
    functional=functional_add_lora,
)  # fmt: skip
