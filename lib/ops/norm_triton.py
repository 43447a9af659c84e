"""The CUDA implementation of the operators of `weft.ops.norm` and of `weft::quantize`, in Triton.

One kernel with a program per token implements all of them; each operator leaves out what it does
not need. Import this module only where triton is installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton.language as tl
from torch import Tensor

from weft.ops.constants import is_constant
from weft.ops.kernel_triton import at_once, begin, early, kernel, release
from weft.ops.products.blocks_triton import TRITON_DTYPES, load_sum, quantize_rows
from weft.ops.products.fp8 import ceil_blocks
from weft.ops.products.parts import num_parts
from weft.ops.tiles.tile import power_of_two


@kernel(do_not_specialize=["at_once", "is_early"])
def _norm_kernel(
    x,
    residual,
    weight,
    total,
    normed,
    values,
    scales,
    columns,
    stride,
    eps,
    at_once,
    is_early,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TYPE: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < columns
    if at_once:
        release()
    if is_early == 0:  # something may write the weight
        begin()
    # `.cg` bypasses the L1 cache, which may hold stale bytes before `begin`.
    if NORM:
        gain = tl.load(weight + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    begin()
    token = tl.program_id(0).to(tl.int64)
    offsets = token * columns + column
    row = load_sum(x, offsets, inside, stride, PARTS, TYPE)
    if ADD:
        row += tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
        # The norm is of the rounded sum, which is the residual of the next layer.
        row = row.to(TYPE).to(tl.float32)
        tl.store(total + offsets, row.to(TYPE), mask=inside)
    if NORM:
        mean = tl.sum(tl.sum(row * row, 1), 0) / columns
        row = (row * (1 / tl.sqrt(mean + eps)) * gain).to(TYPE).to(tl.float32)
        tl.store(normed + offsets, row.to(TYPE), mask=inside)
    release()
    if QUANTIZE:
        fp8, scale = quantize_rows(row)
        tl.store(values + offsets, fp8, mask=inside)
        blocks = tl.cdiv(columns, 128)
        tl.store(scales + token * blocks + group, scale, mask=group < blocks)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weft::rms_norm`."""
    return _run(x, weight=weight, eps=eps)[1]


def norm_quantized(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`weft::rms_norm_quantized`."""
    _, normed, values, scales = _run(x, weight=weight, eps=eps, quantized=True)
    return normed, values, scales


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`weft::add_rms_norm`."""
    total, normed, *_ = _run(x, residual, weight, eps)
    return normed, total


def add_norm_quantized(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`weft::add_rms_norm_quantized`."""
    total, normed, values, scales = _run(x, residual, weight, eps, quantized=True)
    return normed, values, scales, total


def add(x: Tensor, residual: Tensor) -> Tensor:
    """`weft::add_parts`."""
    return _run(x, residual)[0]


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """`weft::quantize`."""
    _, _, values, scales = _run(x, quantized=True)
    return values, scales


def _run(
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    quantized: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Total, normed, values and scales; `x` stands for those that were not requested."""
    x, (tokens, columns) = x.contiguous(), x.shape[-2:]
    like = x if residual is None else residual.contiguous()
    total = x if residual is None else torch.empty_like(like)
    normed = x if weight is None else torch.empty_like(like)
    values = like.new_empty((tokens, columns), dtype=torch.float8_e4m3fn) if quantized else x
    scales = like.new_empty((tokens, ceil_blocks(columns)), dtype=torch.float32) if quantized else x
    groups = power_of_two(ceil_blocks(columns))
    few = at_once(tokens)
    is_early = int(few and weight is not None and is_constant(weight))
    with torch.cuda.device_of(x):
        if tokens:
            _norm_kernel[(tokens,)](
                x,
                like,
                x if weight is None else weight,
                total,
                normed,
                values,
                scales,
                columns,
                tokens * columns,
                eps,
                few,
                is_early,
                PARTS=num_parts(x),
                ADD=residual is not None,
                NORM=weight is not None,
                QUANTIZE=quantized,
                GROUPS=groups,
                TYPE=TRITON_DTYPES[like.dtype],
                num_warps=max(1, min(8, groups // 2)),
                **early(x),
            )
    return total, normed, values, scales
