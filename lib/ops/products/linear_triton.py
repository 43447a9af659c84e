"""The CUDA implementation of `weft::linear`, `weft::swiglu` and `weft::fp8_linear`, in Triton.

Import it only where triton is installed."""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Any

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from weft.ops.constants import is_asking, is_constant
from weft.ops.kernel_triton import begin, early, kernel, release
from weft.ops.norm_triton import quantize
from weft.ops.products.blocks_triton import gated, grouped, multiply
from weft.ops.products.gate_triton import silu_mul
from weft.ops.products.gated_many_triton import swiglu_many, takes
from weft.ops.tiles.linear import gated_many_tile, gated_tile, linear_tile, one_part_tile
from weft.ops.tiles.tile import Tile, cdiv, leaf_columns, segment_columns
from weft.torchapi.scaled_mm import scaled_mm

# The tile of batch-invariant products in float32.
_WIDE = Tile(64, 64, 32, 4, 2)
# The tiles of tokens that are multiplied with one tile of weights before the next.
_GROUP = 8
# The block sizes, in tokens, for which torch's product may replace the kernel in a batch-invariant
# product.
_BLOCKS = 4096, 2048, 1024, 512, 256
# The fewest elements of a weight for which torch's product may replace the kernel.
_LARGE = 2**24
# The most elements of a block's product, which is also held in float32.
# A trial with the weights of a vocabulary then allocates 0.8 GB, and not 3.7.
_MOST = 2**27
# In bytes. cuBLAS may choose another algorithm for less aligned tensors.
_ALIGNED = 256
# A trial is conclusive if another order of sums changes at least this many output columns.
_TELLING = 8
# Whether torch's product had the kernel's bits, by everything on which its order of sums could
# depend.
_AGREED: dict[Any, bool] = {}


@kernel(do_not_specialize=["tokens"])
def _linear_kernel(
    x,
    x_scales,
    weight,
    scale,
    bias,
    out,
    tokens,
    rows,
    columns,
    share,
    FP8: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SWAP: tl.constexpr,
    SEGMENTS: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    ALL: tl.constexpr,
    EARLY: tl.constexpr,
    GATED: tl.constexpr,
):
    if EARLY:
        release()  # `multiply` calls `begin` after it has loaded the first weights
    else:
        begin(AHEAD > 0)
    row_tile = tl.program_id(0)
    token_tile = tl.program_id(1)
    if GROUP > 1:
        row_tiles = tl.num_programs(0)
        row_tile, token_tile = grouped(
            token_tile * row_tiles + row_tile, row_tiles, tl.num_programs(1), GROUP
        )
    i = tl.arange(0, ROWS)
    n = row_tile * ROWS + i
    # 8 rows of the gate and then the same 8 of up, so that one thread holds matching gates and ups.
    if GATED:
        n = row_tile * (ROWS // 2) + i // 16 * 8 + i % 8 + i // 8 % 2 * (rows // 2)
    t = token_tile * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    low = part * share
    acc = multiply(
        x,
        x_scales,
        t,
        t < tokens,
        weight,
        scale,
        tl.minimum(n, rows - 1),
        low,
        tl.minimum(low + share, columns),
        columns,
        FP8,
        False,
        EVEN,
        ROWS,
        TOKENS,
        COLUMNS,
        SWAP,
        AHEAD,
        ALL,
        EARLY,
    )
    if BIAS:  # only the first part includes it
        add = tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32) * (part == 0)
        acc += add[:, None] if SWAP else add[None, :]
    for _ in tl.static_range(1, SEGMENTS):
        low += share
        acc += multiply(
            x,
            x_scales,
            t,
            t < tokens,
            weight,
            scale,
            tl.minimum(n, rows - 1),
            low,
            tl.minimum(low + share, columns),
            columns,
            FP8,
            False,
            EVEN,
            ROWS,
            TOKENS,
            COLUMNS,
            SWAP,
        )
    release()
    if GATED:
        acc = _gate_rows(acc, ROWS, TOKENS, SWAP, out.dtype.element_ty)
        rows = rows // 2
        n = row_tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
    first = out + part.to(tl.int64) * tokens * rows
    if SWAP:
        place = first + t.to(tl.int64)[None, :] * rows + n[:, None]
        tl.store(
            place, acc.to(out.dtype.element_ty), mask=(n < rows)[:, None] & (t < tokens)[None, :]
        )
    else:
        place = first + t.to(tl.int64)[:, None] * rows + n[None, :]
        tl.store(
            place, acc.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & (n < rows)[None, :]
        )


@triton.jit
def _gate_rows(
    acc, ROWS: tl.constexpr, TOKENS: tl.constexpr, SWAP: tl.constexpr, TYPE: tl.constexpr
):
    """`silu(gate) * up` in float32, with half as many rows, of a product whose rows alternate: 8 of
    the gate, 8 of up, and so on; both are rounded to TYPE first."""
    HALF: tl.constexpr = ROWS // 2
    if SWAP:
        pairs = tl.permute(tl.reshape(acc, (ROWS // 16, 2, 8, TOKENS)), (0, 2, 3, 1))
    else:
        pairs = tl.permute(tl.reshape(acc, (TOKENS, ROWS // 16, 2, 8)), (0, 1, 3, 2))
    gate, up = tl.split(pairs.to(TYPE).to(tl.float32))
    return (
        tl.reshape(gated(gate, up), (HALF, TOKENS))
        if SWAP
        else tl.reshape(gated(gate, up), (TOKENS, HALF))
    )


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int = 0, batch_invariant: bool = False
) -> Tensor:
    """`weft::linear`."""
    if leaves:
        leaf_tile = (
            linear_tile(x.shape[0], *weight.shape, False, batch_invariant=True)
            if x.itemsize == 2
            else None
        )
        return run_tile(x, None, weight, None, bias, x.dtype, leaf_tile or _WIDE, leaves)
    tile = (
        linear_tile(x.shape[0], *weight.shape, False, batch_invariant) if x.itemsize == 2 else None
    )
    if batch_invariant and tile is None:
        tile = _WIDE
    if tile is not None and batch_invariant and x.shape[0] >= _BLOCKS[-1] and _is_large(weight):
        return _in_blocks(x.contiguous(), weight, bias, tile)
    return (
        F.linear(x, weight, bias)
        if tile is None
        else run_tile(x, None, weight, None, bias, x.dtype, tile)
    )


def swiglu(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> Tensor:
    """`weft::swiglu`."""
    may_differ = not batch_invariant and x.itemsize == 2
    many = gated_many_tile(x.shape[0], *weight.shape) if may_differ and len(x) else None
    if many is not None and takes(x, weight):
        return swiglu_many(x, weight, bias, many)
    tile = gated_tile(x.shape[0], *weight.shape) if may_differ else None
    if tile is None:
        return silu_mul(linear(x, weight, bias, 0, batch_invariant), x.dtype)
    return run_tile(x, None, weight, None, bias, x.dtype, tile, gate=True)


def _is_large(weight: Tensor) -> bool:
    """Whether the weight is so large that torch's product is faster, although it takes several
    launches."""
    return weight.itemsize == 2 and weight.numel() >= _LARGE


def _in_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """A batch-invariant product of many tokens, in blocks of a few sizes.

    A block uses torch's product if a trial has shown that it gives the same bits as the kernel, and
    the kernel otherwise. So trials affect the time, but never the result.
    """
    out = x.new_empty(len(x), len(weight))
    start = 0
    sizes = (
        [size for size in _BLOCKS if size * len(weight) <= _MOST]
        if _may_stand_in(x, weight, bias)
        else []
    )
    for size in sizes:
        agrees = len(x) - start >= size and _agrees(size, x, weight, bias, tile)
        while agrees and len(x) - start >= size:
            _multiply_segments(
                x[start : start + size], weight, bias, tile.segments, out[start : start + size]
            )
            start += size
    if start < len(x):
        out[start:] = run_tile(x[start:], None, weight, None, bias, x.dtype, tile)
    return out


def _may_stand_in(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the key of `_agrees` covers everything by which torch chooses its product.

    It does not with float16 sums, TunableOp or autocast, nor for tensors that are less aligned than
    those of a trial.
    """
    is_other = torch.backends.cuda.matmul.allow_fp16_accumulation or torch.cuda.tunable.is_enabled()
    aligned = all(
        tensor is None or tensor.data_ptr() % _ALIGNED == 0 for tensor in (x, weight, bias)
    )
    return aligned and not is_other and not torch.is_autocast_enabled("cuda")


def _agrees(size: int, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> bool:
    """Whether torch's product of a block of this many tokens gives the kernel's bits.

    A trial with random tokens is made once for each shape, but not while a graph is captured.
    (While kernels are compiled ahead, a trial only requests its kernels.) Some weights cannot tell
    orders of sums apart, such as zeros, whose sum is the same in any order. Such a weight is not
    tried again, and the next weight of its shape is tried instead.
    """
    matmul = torch.backends.cuda.matmul
    settings = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    library = torch.backends.cuda.preferred_blas_library()
    key = (
        size,
        tuple(weight.shape),
        weight.stride(),
        bias is None,
        x.dtype,
        x.device,
        tile.segments,
        settings,
        library,
    )
    alone = key, weight.data_ptr()
    if not {key, alone} & _AGREED.keys() and not torch.cuda.is_current_stream_capturing():
        generator = torch.Generator(x.device).manual_seed(size)
        tokens = torch.randn(size, x.shape[1], generator=generator, device=x.device, dtype=x.dtype)
        product = x.new_empty(size, len(weight))
        _multiply_segments(tokens, weight, bias, tile.segments, product)
        pairs = zip(tokens.split(_BLOCKS[-1]), product.split(_BLOCKS[-1]), strict=True)
        same = all(
            torch.equal(run_tile(t, None, weight, None, bias, x.dtype, tile), block)
            for t, block in pairs
        )
        # The trial is conclusive only if one more segment, another order of sums, changes the bits.
        other = attrs.evolve(tile, segments=tile.segments + 1)
        last = run_tile(tokens[-_BLOCKS[-1] :], None, weight, None, bias, x.dtype, other)
        tells = int((last != product[-_BLOCKS[-1] :]).any(0).sum()) >= _TELLING
        if not is_asking():  # otherwise no product was computed, and the comparison means nothing
            _AGREED[key if tells else alone] = same and tells
    return _AGREED.get(key, False)


def _multiply_segments(
    x: Tensor, weight: Tensor, bias: Tensor | None, segments: int, out: Tensor
) -> None:
    """Write torch's product to `out`; several segments are added in float32, first to last."""
    if segments == 1:
        torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(
            bias, x, weight.t(), out=out
        )
        return
    share = segment_columns(x.shape[1], segments)
    (first, *rest) = zip(x.split(share, 1), weight.split(share, 1), strict=True)
    total = torch.mm(first[0], first[1].t(), out_dtype=torch.float32)
    if bias is not None:
        total += bias
    for part, columns in rest:
        torch.addmm(total, part, columns.t(), out_dtype=torch.float32, out=total)
    out.copy_(total)


def fp8_linear(
    values: Tensor,
    scales: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    leaves: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """`weft::fp8_linear`."""
    tile = linear_tile(values.shape[0], *weight.shape, True, batch_invariant or leaves > 0)
    if scales is None:
        values, scales = quantize(values)
    if tile is None and dtype == torch.bfloat16:
        return _scaled_mm(values.contiguous(), scales, weight.contiguous(), scale, bias)
    chosen_tile = tile or one_part_tile(values.shape[0], weight.shape[0], weight.shape[1], True)
    return run_tile(values, scales, weight, scale, bias, dtype, chosen_tile, leaves)


def _scaled_mm(
    values: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None
) -> Tensor:
    """torch's blockwise product in bfloat16, by cuBLASLt.

    It requires a multiple of four tokens, the scales of tokens in column-major order, and the
    scales of the weights padded to a multiple of four columns.
    """
    tokens = len(values)
    missing = -len(values) % 4
    if missing:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(values.dtype)
    by_token = scales.new_empty(scales.shape[1], len(values))
    by_token[:, :tokens] = scales.t()
    by_block = F.pad(scale, (0, -scale.shape[1] % 4)) if scale.shape[1] % 4 else scale.contiguous()
    out = scaled_mm(values, weight, by_token, by_block)
    if bias is not None:
        out += bias
    return out[:tokens]


def run_tile(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: Tile,
    leaves: int = 0,
    gate: bool = False,
) -> Tensor:
    """A linear layer with this tile, in FP8 if the weights and x have scales.

    With `leaves`, the parts of the result are leaves. With `gate`, the first half of the rows gates
    the second, and the tile has one part.
    """
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    (tokens, columns), rows, fp8 = x.shape, weight.shape[0], scale is not None
    if leaves:
        share = leaf_columns(columns, leaves)
        parts = leaves
        segments = 1
    elif tile.segments > 1:
        share = segment_columns(columns, tile.segments)
        parts = tile.parts
        segments = tile.segments // tile.parts
    else:
        share = cdiv(cdiv(columns, tile.columns), tile.parts) * tile.columns
        parts = cdiv(columns, share)
        segments = 1
    is_whole = parts == 1 and not leaves
    even = (share if leaves else columns) % tile.columns == 0
    shape = (tokens, rows // 2 if gate else rows) if is_whole else (parts, tokens, rows)
    out = x.new_empty(shape, dtype=dtype if is_whole else torch.float32)
    token_tiles = cdiv(tokens, tile.tokens)
    with torch.cuda.device_of(x):
        if tokens:
            _linear_kernel[(cdiv(rows, tile.rows), token_tiles, parts)](
                x.contiguous(),
                out if x_scales is None else x_scales,
                weight,
                out if scale is None else scale,
                out if bias is None else bias,
                out,
                tokens,
                rows,
                columns,
                share,
                FP8=fp8,
                BIAS=bias is not None,
                EVEN=even,
                ROWS=tile.rows,
                TOKENS=tile.tokens,
                COLUMNS=tile.columns,
                SWAP=tile.tokens < 64,
                SEGMENTS=segments,
                GROUP=_GROUP if token_tiles > 2 else 1,
                AHEAD=tile.ahead,
                ALL=share <= tile.ahead * tile.columns,
                EARLY=tile.ahead > 0 and is_constant(weight),
                GATED=gate,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **early(x),
            )
    return out
