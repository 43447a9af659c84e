"""Random programs for a persistent kernel: what one or two layers of a decoder make, with sizes of many kinds."""

from typing import Any

import attrs
import torch
from torch import Tensor

from weft.ops.persistent.instructions import Attend, Instruction, Linear, Norm


@attrs.frozen
class Case:
    """The sizes of a program.

    Args:
        lengths: the context of the request; 0: padding.
        parts: of the products that norms and attention take; 0: whole.
    """

    lengths: tuple[int, ...] = (9,)
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    page_size: int = 4
    parts: int = 0
    qk_norm: bool = True
    bias: bool = False
    fused_norm: bool = True
    kv_dtype: torch.dtype | None = None
    seed: int = 0


CASES = [
    Case(),
    Case((70,), parts=2),
    Case((130,), hidden=256, heads=8, parts=2, bias=True, qk_norm=False, page_size=16),
    Case((130,), hidden=144, heads=6, kv_heads=1, dim=16, page_size=8),
    Case((0,), parts=2),
    Case((1,), hidden=1056, heads=2, kv_heads=2, parts=2, fused_norm=False, seed=3),
    Case((64,), hidden=2112, parts=2),
    Case((1100,), heads=4, kv_heads=1, dim=128, page_size=16),
    Case((33,), dim=64, kv_dtype=torch.float8_e4m3fn),
]


def make_program(case: Case, dtype: torch.dtype, device: str = "cpu") -> list[Instruction]:
    """A program with its own tensors, the same values for the same case."""
    generator = torch.Generator().manual_seed(case.seed)
    tokens, width = len(case.lengths), (case.heads + 2 * case.kv_heads) * case.dim
    columns, inner = case.heads * case.dim, 2 * case.hidden

    def draw(*shape: int, scale: float = 0.3) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)

    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.full(shape, 7.0, dtype=kind, device=device)

    def product(rows: int) -> Tensor:
        if not case.parts:
            return empty(tokens, rows)
        return empty(case.parts, tokens, rows, kind=torch.float32)

    each = max(-(-max(case.lengths) // case.page_size), 1)
    order = torch.randperm(tokens * each, generator=generator).to(torch.int32)
    table = order.view(tokens, each)
    last = [max(length, 1) - 1 for length in case.lengths]
    slots = [int(table[i, at // case.page_size]) * case.page_size + at % case.page_size for i, at in enumerate(last)]
    slots = [slot if length else -1 for slot, length in zip(slots, case.lengths, strict=True)]
    pages = draw(2, tokens * each, case.page_size, case.kv_heads, case.dim)
    pages = pages.to(case.kv_dtype or dtype)

    def ints(values: Any, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(values, dtype=kind, device=device)

    first, residual, gain = draw(2, tokens, case.hidden).float(), draw(tokens, case.hidden), draw(case.hidden)
    total, qkv, mixed = empty(tokens, case.hidden), product(width), empty(tokens, case.heads, case.dim)
    added, second, normed = product(case.hidden), empty(tokens, case.hidden), empty(tokens, case.hidden)
    gated, down, third = empty(tokens, inner), product(case.hidden), empty(tokens, case.hidden)
    before: list[Instruction] = []
    norm: dict[str, Any] = {"x": first, "residual": residual, "gain": gain, "total": total, "eps": 1e-5}
    if not case.fused_norm:
        before.append(Norm(**norm, out=normed.clone()))
        norm = {"x": before[0].out}
    feeds: dict[str, Any] = {"x": added, "residual": total, "gain": gain, "total": second, "eps": 1e-6}
    between: list[Instruction] = [Norm(**feeds, out=normed)] if not case.fused_norm else []
    feeds = {"x": normed} if between else feeds
    gate_bias = draw(2 * inner) if case.bias else None
    return [
        *before,
        Linear(**norm, weight=draw(width, case.hidden), bias=draw(width) if case.bias else None, out=qkv),
        Attend(
            qkv=qkv,
            q_norm=draw(case.dim, scale=1.0) if case.qk_norm else None,
            k_norm=draw(case.dim, scale=1.0) if case.qk_norm else None,
            cos=draw(tokens, case.dim // 2),
            sin=draw(tokens, case.dim // 2),
            slot_mapping=ints(slots, torch.int64),
            kv_pages=pages,
            block_table=table.to(device),
            query_start_loc=ints(range(tokens + 1)),
            seq_lens=ints(case.lengths),
            out=mixed,
            keys=case.heads * case.dim,
            values=(case.heads + case.kv_heads) * case.dim,
            eps=1e-6,
            scale=case.dim**-0.5,
        ),
        Linear(x=mixed.flatten(1), weight=draw(case.hidden, columns), out=added),
        *between,
        Linear(**feeds, weight=draw(2 * inner, case.hidden), bias=gate_bias, out=gated, gate=True),
        Linear(x=gated, weight=draw(case.hidden, inner), out=down),
        Norm(x=down, residual=second, total=third),
        Norm(x=third, gain=gain, out=empty(tokens, case.hidden), eps=1e-5),
        Linear(x=third, weight=draw(37, case.hidden), bias=draw(37), out=empty(tokens, 37)),
    ]


def results(program: list[Instruction]) -> list[Tensor]:
    """What it wrote; parts as their sum, on the CPU."""
    found = []
    for each in program:
        for name in each.written:
            if (x := getattr(each, name)) is not None:
                is_parts = x.dim() == 3 and not isinstance(each, Attend)
                found.append((x.sum(0) if is_parts else x).float().cpu())
    return found
