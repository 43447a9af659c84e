"""Small arguments for each of weft's operators, with padding if the operator supports it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    ReduceScatter,
    combine,
)
from weft.ops import norm, requests, rotary
from weft.ops.attention import backends, paged
from weft.ops.experts import products, routing
from weft.ops.products import fp8, gate, leaves, linear, lora
from weft.ops.products.fp8 import reference_quantize
from weft.ops.sampling import sample
from weft.ops.sampling.logits import FEATURES, PENALTIES, REPETITION, TEMPERATURE
from weft.ops.sampling.table import SamplingTable
from weft.ops.transfers import transfer
from weft.settings import batch_invariant
from weft.values.trees import tree_leaves

Args = tuple[Any, ...]

# The function by which weft calls each operator.
CALLS: dict[str, Callable[..., Any]] = {
    "add_lora": lora.add_lora.unchecked,
    "add_parts": norm.add_parts,
    "add_rms_norm": norm.add_rms_norm,
    "add_rms_norm_quantized": norm._add_rms_norm_quantized,
    "count_tokens": sample._count_tokens,
    "fp8_linear": linear._fp8_linear,
    "linear": linear.linear,
    "move_on": requests._move_on,
    "attend_outside": backends._attend_outside,
    "paged_attention": paged.paged_attention.unchecked,
    "paged_attention.quantized": paged._paged_attention_quantized,
    "quantize": fp8._quantize,
    "resolve_tokens": requests.resolve_tokens,
    "rms_norm": norm.rms_norm,
    "rms_norm_quantized": norm._rms_norm_quantized,
    "rotate_and_keep": rotary._rotate_and_keep,
    "route": routing.route,
    "run_experts": products._run_experts,
    "sample": sample.sample,
    "sample_rows": sample._sample_rows,
    "silu_mul": gate.silu_mul,
    "silu_mul_quantized": gate._silu_mul_quantized,
    "sum_leaves": leaves.sum_leaves,
    "swiglu": linear.swiglu,
    "token_logprobs": sample.token_logprobs,
    "turn_tables": rotary.turn_tables,
}

# The operators that are called in `weft.batch_invariant()`, by name, and those that are called
# elsewhere.
INVARIANT = {
    f"{name}_batch_invariant" if "." in name else f"{name}.batch_invariant": name
    for name in (
        "add_lora",
        "fp8_linear",
        "linear",
        "paged_attention",
        "paged_attention.quantized",
        "run_experts",
        "sample",
        "sample_rows",
        "swiglu",
    )
}
CALLS |= {name: batch_invariant()(CALLS[other]) for name, other in INVARIANT.items()}

_FP8 = {name for name in CALLS if name.endswith("quantized")} | {"fp8_linear", "quantize"}
# The operators without a derivative. `run_experts` has none in FP8.
IN_FP8 = _FP8 | {name for name, other in INVARIANT.items() if other in _FP8}


class Nobody:
    """An end of transfers that neither sends nor receives, and a member of collectives among its
    like."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> None: ...

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int, /) -> None: ...

    def perform(self, effect: Collective, x: Tensor, /) -> Tensor:
        """The result where all ranks bring the same tensor."""
        return combine(effect, [x] * len(effect.ranks))[0].clone(
            memory_format=torch.contiguous_format
        )


NOBODY = Nobody()
END = MEMBER = transfer.register(NOBODY)


def arguments(dtype: torch.dtype = torch.float32) -> dict[str, list[Args]]:
    """Calls of each operator in this dtype."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def integers(*values: int, of: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=of)

    def parts(*shape: int) -> Tensor:
        return randn(*shape).to(torch.promote_types(dtype, torch.float32))

    x = randn(3, 6)
    parted = parts(2, 3, 6)
    weight = randn(6)
    rows = integers(1, 0, -1)
    values, scales = reference_quantize(randn(3, 200))
    fp8_weight = randn(130, 200).to(torch.float8_e4m3fn)
    fp8_scale = randn(2, 2).float().abs()
    in_fp8 = reference_quantize(randn(3, 128))
    gate_up, down = (randn(2, *shape).to(torch.float8_e4m3fn) for shape in ((256, 128), (128, 128)))
    chosen = torch.tensor([[1, 0], [3, 1], [0, 2]], dtype=torch.int32)
    # Two requests: the first has 5 tokens in its pages and reads 2 more, the second begins. Then
    # two of padding.
    where = (
        integers(13, 14, 4, 5, 6, -1, -1),
        torch.tensor([[2, 3], [1, 2], [0, 0]], dtype=torch.int32),
        integers(0, 2, 5, 7, of=torch.int32),
        integers(7, 3, 0, of=torch.int32),
        3,
        0.5,
        2,
    )
    tables = randn(7, 1).cos(), randn(7, 1).sin()
    table = SamplingTable.zeros(3, 10, 2, "cpu")
    table.floats[:, TEMPERATURE], table.floats[:2, REPETITION] = integers(0, 1, 0), 1.5
    table.ints[1, FEATURES] = PENALTIES
    counts = table.counts.index_put((rows, rows + 3), integers(1, 2, 1, of=torch.int16))
    starts = integers(0, 2, 3, 4, of=torch.int32)
    kept = torch.tensor([True, False, False])
    calls: dict[str, list[Args]] = {
        "add_lora": [
            (
                y,
                randn(3, 4),
                randn(3, 2, 2, 4),
                randn(3, 6, 2),
                integers(2, -1, 0, of=torch.int32),
                integers(2, 0, -1, of=torch.int32),
                [0, 4, 6],
                count,
            )
            for y, count in ((x, 0), (parted, 0), (parted, 2))
        ],
        "add_parts": [(parted, x), (x, x)],
        "add_rms_norm": [(parted, x, weight, 1e-3), (x, randn(3, 6), weight, 1e-3)],
        "add_rms_norm_quantized": [(parted, x, weight, 1e-3)],
        "count_tokens": [(counts, table.ints, rows, integers(4, 5, 0), kept)],
        "fp8_linear": [
            (values, scales, fp8_weight, fp8_scale, randn(130), dtype, 0),
            (randn(3, 200), None, fp8_weight, fp8_scale, None, dtype, 1),
        ],
        "linear": [
            (x, randn(5, 6), None, 0),
            (x, randn(5, 6), randn(5), 0),
            (x, randn(5, 6), randn(5), 2),
        ],
        "move_on": [
            (integers(3, 4, 0), integers(7, 8, 9), rows, starts, kept, ids)
            for ids in (integers(1, 2, 3), None)
        ],
        "attend_outside": [
            (randn(7, 2, 2), randn(2, 4, 4, 1, 2), *where, backends.TORCH.handle, True)
        ],
        "paged_attention": [
            (randn(7, 2, 2), k, v, randn(2, 4, 4, 1, 2), *where)
            for k, v in ((None, None), (randn(7, 1, 2), randn(7, 1, 2)))
        ],
        "paged_attention.quantized": [
            (randn(7, 2, 128), None, None, randn(2, 4, 4, 1, 128), *where)
        ],
        "quantize": [(randn(3, 200),)],
        "collective": [
            (torch.ones(4, 2), MEMBER, str(effect))
            for effect in (
                AllReduce((0, 1)),
                AllGather((0, 1), dim=1),
                ReduceScatter((0, 1)),
                AllToAll((0, 1)),
                PPermute((0, 1), pairs=((0, 1), (1, 0))),
            )
        ],
        "recv": [([torch.zeros(2), torch.zeros(3)], END, 0, 7)],
        "resolve_tokens": [
            (
                rows,
                integers(5, -1, -1, 2),
                starts,
                integers(3, 4, 0),
                integers(7, 8, 9),
                torch.tensor([[0, 1], [2, 3], [0, 0]], dtype=torch.int32),
                limits,
                4,
            )
            for limits in (None, integers(9, 5, 0))
        ],
        "rms_norm": [(x, weight, 1e-3)],
        "rms_norm_quantized": [(x, weight, 1e-3)],
        "rotate_and_keep": [
            (
                randn(7, 9),
                randn(2),
                randn(2),
                1e-3,
                *tables,
                where[0],
                randn(2, 4, 4, 1, 2),
                2,
                (5, 7),
            ),
            (parts(2, 7, 9), None, None, 1e-3, *tables, where[0], randn(2, 4, 4, 1, 2), 2, (5, 7)),
        ],
        "route": [(y, 2, renormalize, dtype) for y, renormalize in ((x, True), (parted, False))],
        "run_experts": [
            (
                x,
                None,
                randn(4, 10, 6),
                None,
                randn(4, 6, 5),
                None,
                randn(3, 2).to(parted),
                chosen,
                dtype,
                0,
                4,
                0,
            ),
            (
                x,
                None,
                randn(2, 10, 6),
                None,
                randn(2, 6, 5),
                None,
                randn(3, 2).to(parted),
                chosen,
                dtype,
                1,
                4,
                0,
            ),
            (
                x,
                None,
                randn(4, 8, 6),
                None,
                randn(4, 6, 4),
                None,
                randn(3, 2).to(parted),
                chosen,
                dtype,
                0,
                4,
                2,
            ),
            (
                *in_fp8,
                gate_up,
                torch.ones(2, 2, 1),
                down,
                torch.ones(2, 1, 1),
                torch.ones(3, 2),
                chosen % 2,
                dtype,
                0,
                2,
                0,
            ),
        ],
        "sample": [(randn(3, 10), torch.tensor([0.0, 1.0, 2.0]), rows, integers(3, 4, 5))],
        "sample_rows": [
            (randn(3, 10), rows, integers(3, 4, 5), *tree_leaves(table)[:-1], counts, mask)
            for mask in (None, torch.full((3, 1), 77, dtype=torch.int32))
        ],
        "send": [([torch.ones(2), torch.ones(3)], END, 0, 7)],
        "silu_mul": [(y, dtype) for y in (x, parted)],
        "silu_mul_quantized": [(x, dtype)],
        "sum_leaves": [(parts(4, 3, 6), count, dtype) for count in (1, 2, 4)],
        "swiglu": [(x, randn(8, 6), None), (x, randn(8, 6), randn(8))],
        "token_logprobs": [(randn(3, 10), torch.tensor([[0, 9], [3, 3], [5, 1]]))],
        "turn_tables": [
            (randn(3), places, 1.5, dtype)
            for places in (integers(0, 3, 7), torch.ones(4, 3).long())
        ],
    }
    return calls | {name: calls[other] for name, other in INVARIANT.items()}


def tensors_in(args: Args) -> list[int]:
    """The positions of the arguments that could have a derivative."""
    return [
        i
        for i, x in enumerate(args)
        if isinstance(x, Tensor) and x.is_floating_point() and x.itemsize > 1
    ]
