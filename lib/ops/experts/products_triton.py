"""The CUDA implementation of `weft::run_experts`, in Triton: two products, whose launches depend on
shapes alone.

A pair is a token and one of its experts; pair p is slot `p % top_k` of token `p // top_k`.

1. The pairs are assigned to programs. For a single token, each pair has a different expert, and a
   program takes one pair. Otherwise pairs are sorted by expert first
   (`weft.ops.experts.routing_triton`), and each expert's pairs are padded to whole blocks; programs
   for unused blocks end at once. In float32, and on GPUs without measurements, each program finds
   the pairs of its expert if they are few, and takes them one tile at a time.
2. `_expert_kernel` multiplies a tile of the expert's rows with its pairs: first gate and up, which
   become `silu(gate) * up`, then, in a second launch, the weighted product with `down`. It is made
   for few tokens, where the bytes of the weights are the bound; for many tokens,
   `weft.ops.experts.products_many_triton` computes the same.

The next kernel sums over experts: each pair is stored in a separate place, so that nothing is added
atomically and no result depends on the order of programs. Import this module only where triton is
installed.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.experts import products_many_triton
from weft.ops.experts.routing_triton import Aligned, align, find_expert, scan
from weft.ops.kernel_triton import begin, early, kernel, release
from weft.ops.norm_triton import quantize
from weft.ops.products.blocks_triton import TRITON_DTYPES, gated, multiply, quantize_rows
from weft.ops.tiles.experts import SCAN_PAIRS, expert_tile
from weft.ops.tiles.tile import Tile, cdiv, leaf_columns, power_of_two


@triton.jit
def _store_gated(
    acc,
    out,
    out_scales,
    pair,
    live,
    tile,
    inner,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    FP8_OUT: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Store `silu(gate) * up` of a tile `[2 * WIDTH, TOKENS]`, gates above ups, in the pairs' rows;
    in FP8 WIDTH is 128."""
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, WIDTH, TOKENS]), [1, 2, 0]))
    result = gated(gate, up).to(TYPE)
    column = tile * WIDTH + tl.arange(0, WIDTH)
    place = pair.to(tl.int64)
    if FP8_OUT:
        values, scale = quantize_rows(tl.trans(result).to(tl.float32))
        tl.store(out + place[:, None] * inner + column[None, :], values, mask=live[:, None])
        tl.store(out_scales + place * (inner // 128) + tile, scale, mask=live)
    else:
        tl.store(
            out + place[None, :] * inner + column[:, None],
            result,
            mask=(column < inner)[:, None] & live[None, :],
        )


@triton.jit
def _store_weighted(
    acc,
    out,
    weights,
    pair,
    live,
    tile,
    leaf,
    inner,
    tokens,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Store a tile `[WIDTH, TOKENS]` times the pairs' weights, each in the part of its slot and
    leaf."""
    column = tile * WIDTH + tl.arange(0, WIDTH)
    by = tl.load(weights + pair, mask=live, other=0.0)
    place = (leaf * TOP_K + pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K
    mask = (column < inner)[:, None] & live[None, :]
    tl.store(
        out + place[None, :] * inner + column[:, None], (acc * by[None, :]).to(TYPE), mask=mask
    )


@triton.jit
def _rows(tile, inner, GATED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The rows of the weights in a tile; in the first product, half of them are gates, and half the
    matching ups."""
    which = tl.arange(0, ROWS)
    n = tl.minimum(tile * WIDTH + which % WIDTH, inner - 1)
    if GATED:
        n += which // WIDTH * inner
    return n


# Without `EARLY`: loading an expert's weights before `begin` gained 2 % at one token, and lost 2 %
# at eight.
@triton.jit
def _expert_tile(
    x,
    x_scales,
    weight,
    scale,
    weights,
    out,
    out_scales,
    expert,
    pair,
    live,
    columns,
    share,
    inner,
    tokens,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    FP8: tl.constexpr,
    QUANTIZE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8_OUT: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Compute and store a tile of an expert's product with some pairs."""
    WIDTH: tl.constexpr = ROWS // 2 if GATED else ROWS
    height = 2 * inner if GATED else inner
    w = weight + expert.to(tl.int64) * height * columns
    s = scale + expert * tl.cdiv(height, 128) * tl.cdiv(columns, 128)
    source = pair // TOP_K if GATED else pair
    tile = tl.program_id(1)
    leaf = tl.program_id(2)
    n = _rows(tile, inner, GATED, ROWS, WIDTH)
    acc = multiply(
        x,
        x_scales,
        source,
        live,
        w,
        s,
        n,
        leaf * share,
        (leaf + 1) * share,
        columns,
        FP8,
        QUANTIZE,
        EVEN,
        ROWS,
        TOKENS,
        COLUMNS,
        True,
    )
    release()
    if GATED:
        _store_gated(acc, out, out_scales, pair, live, tile, inner, WIDTH, TOKENS, FP8_OUT, TYPE)
    else:
        _store_weighted(
            acc, out, weights, pair, live, tile, leaf, inner, tokens, TOP_K, WIDTH, TYPE
        )


@kernel(do_not_specialize=["pairs", "first_expert"])
def _expert_kernel(
    x,
    x_scales,
    weight,
    scale,
    weights,
    experts,
    order,
    owners,
    out,
    out_scales,
    pairs,
    num_experts,
    first_expert,
    columns,
    share,
    inner,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    FP8: tl.constexpr,
    QUANTIZE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8_OUT: tl.constexpr,
    TYPE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Multiply a tile of an expert's rows with its pairs, over the `share` columns of a leaf;
    `inner` is the number of columns of the result.

    With PAIRS > 1, a power of two no less than the number of pairs, each program finds its own
    pairs. With PAIRS = 1, for one token, a program has the pair `program_id(0)`. With PAIRS = 0,
    the pairs are sorted in `order` and `owners`.
    """
    begin()
    tokens = pairs // TOP_K
    if PAIRS == 1:
        pair_index = tl.program_id(0)
        expert = tl.load(experts + pair_index) - first_expert
        if (expert >= 0) & (expert < num_experts):
            slot = tl.arange(0, TOKENS)
            _expert_tile(
                x,
                x_scales,
                weight,
                scale,
                weights,
                out,
                out_scales,
                expert,
                pair_index + 0 * slot,
                slot == 0,
                columns,
                share,
                inner,
                tokens,
                TOP_K,
                GATED,
                FP8,
                QUANTIZE,
                EVEN,
                ROWS,
                TOKENS,
                COLUMNS,
                FP8_OUT,
                TYPE,
            )
    elif PAIRS > 1:
        expert, count = find_expert(experts, first_expert, pairs, num_experts, PAIRS)
        for start in range(0, count, TOKENS):
            pair, live = scan(experts, first_expert + expert, pairs, start, PAIRS, TOKENS)
            _expert_tile(
                x,
                x_scales,
                weight,
                scale,
                weights,
                out,
                out_scales,
                expert,
                pair,
                live,
                columns,
                share,
                inner,
                tokens,
                TOP_K,
                GATED,
                FP8,
                QUANTIZE,
                EVEN,
                ROWS,
                TOKENS,
                COLUMNS,
                FP8_OUT,
                TYPE,
            )
    else:
        expert = tl.load(owners + tl.program_id(0))
        if expert >= 0:
            pair = tl.load(order + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))
            _expert_tile(
                x,
                x_scales,
                weight,
                scale,
                weights,
                out,
                out_scales,
                expert,
                tl.maximum(pair, 0),
                pair >= 0,
                columns,
                share,
                inner,
                tokens,
                TOP_K,
                GATED,
                FP8,
                QUANTIZE,
                EVEN,
                ROWS,
                TOKENS,
                COLUMNS,
                FP8_OUT,
                TYPE,
            )


def run_experts(
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
    """`weft::run_experts`, which is always batch invariant, since every tile sums an expert's
    columns in the same order.

    Tiles are chosen by the number of all experts, so that they are the same if a rank holds only
    some of them.
    """
    (tokens, top_k), (_, doubled, hidden) = experts.shape, gate_up.shape
    up_tile = expert_tile(tokens, top_k, doubled, hidden, num_experts, gate_up.itemsize)
    down_tile = expert_tile(tokens, top_k, hidden, doubled // 2, num_experts, down.itemsize)
    operands = (
        values,
        scales,
        gate_up,
        gate_up_scale,
        down,
        down_scale,
        weights,
        experts,
        dtype,
        first,
        num_experts,
    )
    return run_tiles(*operands, up_tile, down_tile, leaves)


def run_tiles(
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
    up_tile: Tile,
    down_tile: Tile,
    leaves: int = 0,
) -> Tensor:
    """`run_experts` with these tiles."""
    (tokens, top_k), (num_local_experts, _, hidden) = experts.shape, gate_up.shape
    with torch.cuda.device_of(values):
        # No program writes the rows of a pair whose expert is on another rank, so they start as 0.
        make = values.new_empty if num_local_experts == num_experts else values.new_zeros
        out = make(
            (max(leaves, 1) * top_k, tokens, hidden), dtype=torch.float32 if leaves else dtype
        )
        if not tokens:
            return out
        aligned = align(experts, num_local_experts, up_tile.tokens, first) if up_tile.sort else None
        middle, middle_scales = launch_gate_up(
            values.contiguous(),
            scales,
            gate_up,
            gate_up_scale,
            experts,
            aligned,
            dtype,
            up_tile,
            first,
        )
        if not down_tile.sort:
            aligned = None
        elif aligned is None or down_tile.tokens != up_tile.tokens:
            aligned = align(experts, num_local_experts, down_tile.tokens, first)
        # With many pairs in a tile, quantise each once here, rather than in every program that
        # reads it.
        if scales is not None and middle_scales is None and down_tile.tokens >= 64:
            middle, middle_scales = quantize(middle)
        launch_down(
            middle,
            middle_scales,
            down,
            down_scale,
            weights,
            experts,
            aligned,
            out,
            down_tile,
            first,
            leaves,
        )
    return out


def launch_gate_up(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    experts: Tensor,
    aligned: Aligned | None,
    dtype: torch.dtype,
    tile: Tile,
    first: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """`silu(gate) * up` for all pairs with the experts from `first` on; quantised, with scales, if
    a tile contains a whole block of columns."""
    inner = weight.shape[1] // 2
    pairs = experts.numel()
    fp8_out = (
        scale is not None and tile.rows == 256 and not products_many_triton.takes(tile, weight)
    )
    out = x.new_empty((pairs, inner), dtype=torch.float8_e4m3fn if fp8_out else dtype)
    out_scales = x.new_empty((pairs, inner // 128), dtype=torch.float32) if fp8_out else None
    _launch(x, x_scales, weight, scale, None, experts, aligned, out, out_scales, tile, dtype, first)
    return out, out_scales


def launch_down(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    weights: Tensor,
    experts: Tensor,
    aligned: Aligned | None,
    out: Tensor,
    tile: Tile,
    first: int = 0,
    leaves: int = 0,
) -> None:
    """Write the weighted product with `down`, for all pairs with the experts from `first` on, to
    the parts `out`, with the parts of each leaf one after another."""
    _launch(
        x,
        x_scales,
        weight,
        scale,
        weights,
        experts,
        aligned,
        out,
        None,
        tile,
        out.dtype,
        first,
        leaves,
    )


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    weights: Tensor | None,
    experts: Tensor,
    aligned: Aligned | None,
    out: Tensor,
    out_scales: Tensor | None,
    tile: Tile,
    dtype: torch.dtype,
    first: int,
    leaves: int = 0,
) -> None:
    """One product: of tokens with gate and up if `weights` is None, otherwise of pairs with
    `down`."""
    if products_many_triton.takes(tile, weight):
        assert aligned is not None, "a tile that sorts"
        products_many_triton.launch(
            x, x_scales, weight, scale, weights, experts, aligned, out, tile, leaves
        )
        return
    (num_experts, _, columns), inner, pairs = weight.shape, out.shape[-1], experts.numel()
    one_token = aligned is None and pairs == experts.shape[-1]
    programs = (
        aligned.owners.shape[0]
        if aligned is not None
        else pairs
        if one_token
        else min(pairs, num_experts)
    )
    width = tile.rows if weights is not None else tile.rows // 2
    share = leaf_columns(columns, leaves)
    order, owners = (experts, experts) if aligned is None else (aligned.order, aligned.owners)
    absent = experts
    _expert_kernel[(programs, cdiv(inner, width), max(leaves, 1))](
        x,
        absent if x_scales is None else x_scales,
        weight,
        absent if scale is None else scale,
        absent if weights is None else weights,
        experts,
        order,
        owners,
        out,
        absent if out_scales is None else out_scales,
        pairs,
        num_experts,
        first,
        columns,
        share,
        inner,
        TOP_K=experts.shape[1],
        GATED=weights is None,
        FP8=scale is not None,
        QUANTIZE=scale is not None and x_scales is None,
        EVEN=share % tile.columns == 0,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        FP8_OUT=out_scales is not None,
        TYPE=TRITON_DTYPES[dtype],
        PAIRS=1
        if one_token
        else 0
        if aligned is not None
        else max(SCAN_PAIRS, power_of_two(pairs)),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early(x),
    )
