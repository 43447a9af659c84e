"""The Triton kernels of a decoder layer, with small arguments, and the operators that they
implement."""

from typing import Any

import attrs
import torch
from torch import Tensor

from weft.ops.products.fp8 import ceil_blocks, reference_quantize
from weft.ops.requests import DRAFT
from weft.ops.tiles.tile import Tile
from weft.stages.attention.rope import Rope, inverse_frequencies, rope_tables

FP8 = torch.float8_e4m3fn
GENERATOR = torch.Generator().manual_seed(11)


@attrs.frozen(eq=False)
class Case:
    """A kernel by `module:function`, its arguments, and the operator, by `module:op` of weft.ops,
    whose reference gives the expected results.

    Args:
        more: the function's extra arguments, after the operator's.
        kernel_args: the function's other arguments, if they are not the operator's.
        written: the arguments that are written in place.
        tolerance: relative to the norm of a result; FP8 values and integers must be equal.
    """

    name: str
    kernel: str
    op: str
    args: tuple[Any, ...]
    more: tuple[Any, ...] = ()
    written: tuple[int, ...] = ()
    tolerance: float = 2e-6
    kernel_args: tuple[Any, ...] | None = None


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=GENERATOR) * scale).to(dtype)


def fp8_weight(*shape: int) -> tuple[Tensor, Tensor]:
    *outer, rows, columns = shape
    scale = torch.rand(*outer, ceil_blocks(rows), ceil_blocks(columns), generator=GENERATOR) / 64
    return randn(*shape, scale=16.0).to(FP8), scale


def norms() -> list[Case]:
    cases = []
    for columns, parts in ((32, 0), (300, 1), (2048, 3)):
        for dtype in (torch.float32, torch.float16):
            x = randn(
                *((parts,) if parts else ()), 3, columns, dtype=torch.float32 if parts else dtype
            )
            residual = randn(3, columns, dtype=dtype)
            weight = 1 + randn(columns, dtype=dtype)
            near = 2e-6 if dtype == torch.float32 else 5e-3
            name = f"{columns} {parts} {dtype}"
            both = (x, residual, weight, 1e-5)
            module = "weft.ops.norm_triton:"
            cases += [
                Case(
                    f"add_rms_norm {name}",
                    f"{module}add_norm",
                    "norm:add_rms_norm",
                    both,
                    tolerance=near,
                ),
                Case(
                    f"rms_norm {name}",
                    f"{module}norm",
                    "norm:rms_norm",
                    (residual, weight, 1e-5),
                    tolerance=near,
                ),
                Case(
                    f"add_parts {name}",
                    f"{module}add",
                    "norm:add_parts",
                    (x, residual),
                    tolerance=near,
                ),
                Case(f"quantize {name}", f"{module}quantize", "products.fp8:quantize", (residual,)),
            ]
    return cases


def gates() -> list[Case]:
    cases = []
    for inner, parts in ((20, 0), (128, 2), (1152, 0)):
        x = randn(*((parts,) if parts else ()), 3, 2 * inner)
        module = "weft.ops.products.gate_triton:"
        for dtype, near in ((torch.float32, 2e-6), (torch.float16, 1e-4)):
            name = f"silu_mul {inner} {parts} {dtype}"
            cases.append(
                Case(
                    name, f"{module}silu_mul", "products.gate:silu_mul", (x, dtype), tolerance=near
                )
            )
    return cases


def rotations() -> list[Case]:
    cases = []
    for heads, kv_heads, dim, starts, parts, normed, section in (
        (3, 1, 8, (24, 32), 0, True, None),
        (4, 2, 6, (128, 256), 2, True, None),
        (8, 2, 16, (128, 160), 1, False, None),
        (
            4,
            2,
            16,
            (64, 96),
            0,
            False,
            (2, 3, 3),
        ),  # as in a model with mRoPE, which only the tables depend on
    ):
        columns = starts[1] + kv_heads * dim
        qkv = randn(*((parts,) if parts else ()), 5, columns)
        angles = randn(5, dim // 2)
        tables = angles.cos(), angles.sin()
        if section is not None:
            positions = torch.tensor([[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [300, 3, 2]])
            tables = rope_tables(
                inverse_frequencies(Rope(), dim, 512)[0], positions, 1.0, torch.float32, section
            )
        norms = (1 + randn(dim), 1 + randn(dim)) if normed else (None, None)
        slots = torch.tensor([7, -1, 0, 11, 3])
        args = (qkv, *norms, 1e-6, *tables, slots, randn(2, 3, 4, kv_heads, dim), heads, starts)
        kernel = "weft.ops.rotary_triton:rotate_and_keep"
        name = f"rotate_and_keep {heads} {dim} {parts} {section}"
        cases.append(Case(name, kernel, "rotary:rotate_and_keep", args, written=(7,)))
    return cases


def routes() -> list[Case]:
    kernel = "weft.ops.experts.routing_triton:route"
    ties = torch.tensor([[1.0, 3, 3, 0, 3], [2, 2, 2, 2, 2]])
    return [
        Case(
            f"route {experts} {top_k} {renormalize}",
            kernel,
            "experts.routing:route",
            (logits, top_k, renormalize, torch.float32),
        )
        for experts, top_k, logits in (
            (5, 3, ties),
            (128, 8, randn(3, 1, 128)),
            (60, 1, randn(4, 60)),
        )
        for renormalize in (False, True)
    ]


def linears() -> list[Case]:
    cases = []
    kernel = "weft.ops.products.linear_triton:run_tile"
    for tokens, rows, columns, tile in (
        (1, 200, 300, Tile(64, 16, 128, 4, 2)),
        (17, 64, 512, Tile(64, 16, 128, 4, 2)),
        (70, 130, 256, Tile(128, 64, 128, 4, 2)),
    ):
        x = randn(tokens, columns)
        bias = randn(rows) if tokens == 1 else None
        rest = (*fp8_weight(rows, columns), bias, torch.float32)
        op = "products.linear:fp8_linear"
        kernel_args = (*reference_quantize(x), *rest)
        cases.append(
            Case(
                f"fp8_linear {tokens}",
                kernel,
                op,
                (*kernel_args, 0),
                (tile,),
                kernel_args=kernel_args,
            )
        )
        whole = "weft.ops.products.linear_triton:fp8_linear"
        cases.append(Case(f"fp8_linear {tokens} of plain values", whole, op, (x, None, *rest, 0)))
    return cases


def parts() -> list[Case]:
    """Products left in parts, against their references' sums."""
    cases = []
    kernel = "weft.ops.products.linear_triton:run_tile"
    for tokens, rows, columns, tile in (
        (3, 72, 200, Tile(64, 16, 64, 4, 2, parts=3)),
        (66, 72, 512, Tile(64, 64, 128, 4, 2, parts=4)),
        (
            2,
            72,
            900,
            Tile(64, 16, 64, 4, 2, parts=2, ahead=2),
        ),  # two of eight tiles of columns ahead of a loop
        (5, 72, 900, Tile(64, 16, 128, 4, 1, parts=2, ahead=4)),  # all of them
    ):
        x = randn(tokens, columns)
        weight = randn(rows, columns)
        bias = randn(rows)
        split = (x, None, weight, None, bias, torch.float32)
        name = f"linear {tokens}"
        args = (x, weight, bias, 0)
        cases.append(Case(name, kernel, "products.linear:linear", args, (tile,), kernel_args=split))
        in_fp8 = (*reference_quantize(x), *fp8_weight(rows, columns), bias, torch.float32)
        tile = attrs.evolve(tile, columns=128)
        name = f"fp8_linear {tokens} parts"
        op = "products.linear:fp8_linear"
        cases.append(Case(name, kernel, op, (*in_fp8, 0), (tile,), kernel_args=in_fp8))
    return cases


def gated() -> list[Case]:
    """Products that end with a gate: few tokens and many, rows that are not those of whole tiles,
    weights ahead."""
    cases = []
    kernel = "weft.ops.products.linear_triton:run_tile"
    for tokens, inner, columns, tile in (
        (1, 40, 300, Tile(64, 16, 64, 4, 2)),
        (5, 100, 900, Tile(64, 16, 128, 4, 2, ahead=1)),
        (5, 64, 500, Tile(64, 16, 128, 4, 1, ahead=4)),
        (40, 72, 200, Tile(128, 32, 64, 4, 2)),
        (70, 100, 256, Tile(64, 64, 128, 4, 2)),
        (130, 64, 200, Tile(128, 128, 64, 8, 2)),
        (50, 40, 200, Tile(64, 16, 128, 4, 2)),  # four tiles of tokens share those of weights
    ):
        x = randn(tokens, columns)
        weight = randn(2 * inner, columns)
        bias = randn(2 * inner) if tokens < 70 else None
        kernel_args = (x, None, weight, None, bias, torch.float32)
        name = f"swiglu {tokens} {inner}"
        args = (x, weight, bias)
        cases.append(
            Case(
                name,
                kernel,
                "products.linear:swiglu",
                args,
                (tile, 0, True),
                tolerance=2e-5,
                kernel_args=kernel_args,
            )
        )
    for tokens, inner, columns, tile in (
        (130, 72, 200, Tile(64, 64, 64, 4, 2)),
        (290, 40, 96, Tile(32, 16, 32, 4, 2)),  # more tiles of tokens than share those of weights
        (64, 128, 64, Tile(256, 64, 64, 8, 3)),
    ):
        x = randn(tokens, columns)
        weight = randn(2 * inner, columns)
        bias = randn(2 * inner) if tokens > 64 else None
        name = f"swiglu of many {tokens} {inner}"
        kernel = "weft.ops.products.gated_many_triton:swiglu_many"
        args = (x, weight, bias)
        cases.append(Case(name, kernel, "products.linear:swiglu", args, (tile,), tolerance=2e-5))
    for tokens, inner, columns in ((1, 128, 256), (5, 64, 1000), (33, 100, 300)):
        # Sums of whole numbers are exact in any order, and so is silu of large ones. Gates are
        # beyond 2048, so that it shows whether each is rounded before it is multiplied.
        x = randn(tokens, columns, scale=2.0).round()
        gate = randn(inner, columns, scale=32.0).round()
        up = torch.eye(inner, columns) / 2
        bias = torch.cat((torch.full((inner,), 8192.0), torch.zeros(inner)))
        args = tuple(one.half() for one in (x, torch.cat((gate, up)), bias))
        name = f"swiglu {tokens} {inner}, any tile"
        kernel = "weft.ops.products.linear_triton:swiglu"
        cases.append(Case(name, kernel, "products.linear:swiglu", args, tolerance=0))
    return cases


def leaves() -> list[Case]:
    """Products cut into leaves, of columns that are and are not those of a tile, and the sum of
    leaves."""
    cases = []
    module = "weft.ops.products.linear_triton"
    for tokens, rows, columns, count, dtype in (
        (3, 72, 200, 1, torch.float32),
        (3, 72, 200, 4, torch.float16),
        (70, 72, 512, 2, torch.float16),
        (70, 30, 40, 8, torch.float32),
    ):
        x = randn(tokens, columns, dtype=dtype)
        weight = randn(rows, columns, dtype=dtype)
        bias = randn(rows)
        args = (x, weight, bias.to(dtype) if count > 1 else None, count)
        cases.append(
            Case(
                f"linear {tokens}, {count} leaves",
                f"{module}:linear",
                "products.linear:linear",
                args,
            )
        )
        x = randn(tokens, 128 * count)
        weights = fp8_weight(rows, 128 * count)
        args = (*reference_quantize(x), *weights, None, torch.float32, count)
        name = f"fp8_linear {tokens}, {count} leaves"
        cases.append(Case(name, f"{module}:fp8_linear", "products.linear:fp8_linear", args))
        for each in (1, 3):
            kind = dtype if each == 1 else torch.float32
            sum_args = (randn(count * each, tokens, rows), count, kind)
            name = f"sum_leaves {tokens}, {count} of {each}"
            kernel = "weft.ops.products.leaves_triton:sum_leaves"
            cases.append(Case(name, kernel, "products.leaves:sum_leaves", sum_args, tolerance=0))
    return cases


def experts() -> list[Case]:
    small = Tile(32, 16, 128, 4, 2)
    large = Tile(64, 64, 128, 4, 2, sort=True)
    whole = Tile(256, 16, 128, 4, 2)
    cases = []
    for tokens, top_k, num, fp8, tiles, leaves, *expert_range in (
        (1, 2, 4, False, (small, small), 0),
        (1, 2, 4, False, (small, small), 2),
        (1, 2, 4, True, (attrs.evolve(small, sort=True), small), 0),
        (9, 2, 4, True, (whole, small), 0),
        (9, 2, 4, True, (whole, small), 2),
        (9, 2, 4, True, (attrs.evolve(small, sort=True), attrs.evolve(small, sort=True)), 0),
        (9, 2, 4, False, (attrs.evolve(small, sort=True), attrs.evolve(small, sort=True)), 4),
        (20, 1, 1, False, (small, attrs.evolve(small, columns=16)), 0),
        (300, 2, 3, True, (attrs.evolve(whole, sort=True), large), 0),
        (300, 2, 3, True, (attrs.evolve(large, rows=256), attrs.evolve(large, tokens=128)), 0),
        (300, 2, 3, True, (large, attrs.evolve(large, rows=128)), 0),
        (300, 2, 3, True, (large, attrs.evolve(large, rows=128)), 2),
        (300, 2, 3, False, (large, attrs.evolve(small, sort=True)), 0),
        (300, 2, 3, False, (attrs.evolve(large, columns=16), large), 0),
        (300, 2, 3, False, (attrs.evolve(large, columns=16), large), 2),
        (9, 2, 4, True, (whole, small), 0, 1, 3),
        (300, 2, 6, True, (large, attrs.evolve(large, rows=128)), 0, 2, 4),
        (300, 2, 6, False, (attrs.evolve(small, sort=True), large), 0, 0, 2),
    ):
        hidden, inner = (160, 128 * max(leaves, 1)) if fp8 else (40, 24)
        x = randn(tokens, hidden)
        gate_up = randn(num, 2 * inner, hidden)
        down = randn(num, hidden, inner)
        gate_up_scale = down_scale = scales = None
        if fp8:
            x, scales = reference_quantize(x)
            (gate_up, gate_up_scale), (down, down_scale) = (
                fp8_weight(*gate_up.shape),
                fp8_weight(*down.shape),
            )
        # No token chooses the last expert, if there are several.
        chosen = (
            torch.rand(tokens, max(1, num - 1), generator=GENERATOR).argsort(1)[:, :top_k].int()
        )
        weights = torch.rand(tokens, top_k, generator=GENERATOR)
        start, stop = expert_range or (0, num)  # the experts that are here
        local_experts = [
            None if one is None else one[start:stop]
            for one in (gate_up, gate_up_scale, down, down_scale)
        ]
        args = (x, scales, *local_experts, weights, chosen.contiguous(), torch.float32, start, num)
        # A sum that is rounded another way may fall to the next value of FP8.
        near = 5e-3 if fp8 else 2e-6
        name = f"run_experts {tokens} {fp8} {len(cases)}"
        kernel = "weft.ops.experts.products_triton:run_tiles"
        more = (*tiles, leaves)
        op = "experts.products:run_experts"
        cases.append(
            Case(name, kernel, op, (*args, leaves), more, tolerance=near, kernel_args=args)
        )
    return cases


def loras() -> list[Case]:
    """One, two and three products; y in parts; ranks split over steps and columns shared by
    programs; slots without tokens, and tokens without a slot."""
    cases = []
    kernel = "weft.ops.products.lora_triton:add_lora"
    for tokens, columns, starts, rank, num_slots, parts, dtype, is_cut in (
        (1, 40, (0, 24), 3, 1, 0, torch.float32, False),
        (5, 40, (0, 24, 32, 40), 8, 3, 0, torch.float32, False),
        (37, 1500, (0, 70, 200), 16, 4, 3, torch.float32, False),
        (20, 200, (0, 130), 100, 2, 0, torch.float32, False),
        (20, 136, (0, 128, 256, 300), 4, 2, 2, torch.float16, False),
        (20, 136, (0, 300), 4, 2, 2, torch.float16, True),
        (37, 1500, (0, 70), 16, 4, 4, torch.float32, True),
    ):
        y = randn(
            *((parts,) if parts else ()),
            tokens,
            starts[-1],
            dtype=torch.float32 if parts else dtype,
        )
        a = randn(num_slots, len(starts) - 1, rank, columns, scale=columns**-0.5, dtype=dtype)
        b = randn(num_slots, starts[-1], rank, scale=rank**-0.5, dtype=dtype)
        slots = torch.randint(-1, num_slots, (tokens,), generator=GENERATOR, dtype=torch.int32)
        slots[0] = 0
        there = slots[slots >= 0].unique()
        active = torch.cat([there, torch.full((2,), -1)]).int()
        args = (y, randn(tokens, columns, dtype=dtype), a, b, slots, active, starts, parts * is_cut)
        near = 2e-6 if dtype == torch.float32 else 1e-3
        cut = ", cut" * is_cut
        name = f"add_lora {tokens} {rank} {dtype}{cut}"
        cases.append(Case(name, kernel, "products.lora:add_lora", args, tolerance=near))
    return cases


def requests() -> list[Case]:
    """Reads and writes of the table of requests: padding, prompts and decodes, tokens after the
    end, drafts at a limit, more requests than a block, and no request."""
    cases = []
    module = "weft.ops.requests_triton"
    for lengths, rows, behind in (
        ((1, 1, 1), (2, 0, 1), 0),
        ((4, 1, 3, 1), (5, 1, 6, -1), 3),
        ((1,) * 150 + (200,), (*range(150), -1), 9),
        ((), (), 0),
    ):
        size = sum(lengths) + behind
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        num_rows = 160
        positions, last = torch.randint(0, 30, (2, num_rows), generator=GENERATOR)
        table = torch.randint(0, 99, (num_rows, 80), generator=GENERATOR, dtype=torch.int32)
        ids = torch.randint(-1, 50, (size,), generator=GENERATOR)
        limits = positions + 2
        drafts = torch.where(torch.arange(size) % 3 == 1, DRAFT, ids)
        row_indices = torch.tensor(rows, dtype=torch.int64)
        for token_ids, most in ((ids, None), (drafts, limits)):
            args: tuple[Any, ...] = (
                row_indices,
                token_ids,
                starts,
                positions,
                last,
                table,
                most,
                4,
            )
            name = f"resolve_tokens {len(rows)} {most is not None}"
            cases.append(Case(name, f"{module}:resolve_tokens", "requests:resolve_tokens", args))
        if rows:
            kept = torch.arange(len(rows)) % 4 != 1
            sampled = torch.randint(50, 99, (len(rows),), generator=GENERATOR)
            for more, written in ((None, (0,)), (sampled, (0, 1))):
                args = (positions.clone(), last.clone(), row_indices, starts, kept, more)
                name = f"move_on {len(rows)} {more is not None}"
                cases.append(
                    Case(name, f"{module}:move_on", "requests:move_on", args, written=written)
                )
    return cases


def turns() -> list[Case]:
    """One position for all pairs, and one for each pair; large positions too."""
    kernel = "weft.ops.rotary_triton:turn_tables"
    cases = []
    for shape, dtype in (((5,), torch.float32), ((70,), torch.float16), ((3, 12), torch.float32)):
        positions = torch.randint(0, 40_000, shape, generator=GENERATOR)
        args = (torch.rand(12, generator=GENERATOR), positions, 1.2, dtype)
        near = 1e-3 if dtype == torch.float16 else 2e-6
        cases.append(
            Case(f"turn_tables {shape} {dtype}", kernel, "rotary:turn_tables", args, tolerance=near)
        )
    return cases


CASES = [
    *norms(),
    *gates(),
    *rotations(),
    *routes(),
    *linears(),
    *parts(),
    *gated(),
    *leaves(),
    *loras(),
    *experts(),
]
CASES += [*requests(), *turns()]
