"""The CUDA implementation of `weft::sample_rows` and `weft::count_tokens`, in Triton.

1. `_process_kernel`, one program per request, ends at once if the request uses no feature. If the
   request adjusts its logits (penalties, bias, masks), the program writes the adjusted logits. If
   it filters (top_k, top_p, min_p), the program searches for the distance from the largest logit,
   before temperature, up to which tokens are kept. Instead of sorting, it repeatedly cuts the
   interval of float32 bit patterns that contains the distance into eight, until a single value is
   left. So the distance is exact, and equal logits are kept or dropped together.
2. The kernels of `weft::sample` read the adjusted logits and the distances.

A program handles a whole request, so that its sums do not depend on the batch. Penalties divide as
torch does, and no product is fused with a sum, so adjusted logits equal the reference's bit for
bit. Import this module only where triton is installed. If TRITON_INTERPRET=1 was set before, it
runs on CPU tensors, for tests.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import begin, early, kernel
from weft.ops.sampling import logits as names
from weft.ops.sampling.sample_triton import ADJUSTED, FILTERED, Processed, draw, inverse
from weft.ops.sampling.table import SamplingTable
from weft.ops.tiles.tile import cdiv, power_of_two

_COLUMNS = 2048
# The bits of infinity. Distances are not negative, so their bits, as integers, have the same order.
_INFINITE = tl.constexpr(0x7F800000)

_TEMPERATURE, _TOP_P, _MARGIN = (
    tl.constexpr(x) for x in (names.TEMPERATURE, names.TOP_P, names.MARGIN)
)
_REPETITION, _FREQUENCY = tl.constexpr(names.REPETITION), tl.constexpr(names.FREQUENCY)
_PRESENCE = tl.constexpr(names.PRESENCE)
_NUM_FLOATS, _NUM_INTS = tl.constexpr(len(names.FLOATS)), tl.constexpr(len(names.INTS))
_SEED, _FEATURES, _TOP_K, _MIN_LEN = (
    tl.constexpr(x) for x in (names.SEED, names.FEATURES, names.TOP_K, names.MIN_LEN)
)
_PENALTIES, _BIAS, _ALLOWED, _STOPS, _FILTERS = (
    tl.constexpr(x)
    for x in (names.PENALTIES, names.BIAS, names.ALLOWED, names.STOPS, names.FILTERS)
)
_MOST_COUNTED = tl.constexpr(names.MOST_COUNTED)


@triton.jit
def _has_bit(mask, row, columns, inside, words):
    word = tl.load(mask + row * words + (columns >> 5), mask=inside, other=0)
    return ((word >> (columns & 31)) & 1) != 0


@triton.jit
def _adjust(
    x,
    bias,
    columns,
    inside,
    row,
    request,
    used,
    floats,
    allowed,
    stops,
    counts,
    token_mask,
    vocab,
    words,
    HAS_MASK: tl.constexpr,
):
    """`weft.ops.sampling.logits.adjust` for some columns; `used` contains STOPS only while the
    request is too short."""
    nothing = float("-inf")
    if HAS_MASK:
        x = tl.where(_has_bit(token_mask, request, columns, inside, words), x, nothing)
    if used & _ALLOWED:
        x = tl.where(_has_bit(allowed, row, columns, inside, words), x, nothing)
    if used & _STOPS:
        x = tl.where(_has_bit(stops, row, columns, inside, words), nothing, x)
    x += bias
    if used & _PENALTIES:
        count = tl.load(counts + row * vocab + columns, mask=inside, other=0).to(tl.int32)
        penalty = tl.load(floats + row * _NUM_FLOATS + _REPETITION) + tl.zeros_like(x)
        x = tl.where(count != 0, tl.where(x < 0, x * penalty, tl.math.div_rn(x, penalty)), x)
        generated = (count & _MOST_COUNTED).to(tl.float32)
        x -= tl.load(floats + row * _NUM_FLOATS + _FREQUENCY) * generated
        x -= tl.where(generated > 0, tl.load(floats + row * _NUM_FLOATS + _PRESENCE), 0.0)
    return x


@triton.jit
def _values(logits, adjusted, columns, inside, kind):
    """The logits of some columns, adjusted or plain. Both loads are masked, since a branch would
    keep them from overlapping."""
    nothing = float("-inf")
    kinds = kind + tl.zeros_like(columns)
    adjusted_logits = tl.load(adjusted + columns, mask=inside & (kinds == ADJUSTED), other=nothing)
    plain = tl.load(logits + columns, mask=inside & (kinds != ADJUSTED), other=nothing)
    return tl.maximum(adjusted_logits, plain.to(tl.float32))


@triton.jit
def _search(
    logits,
    adjusted,
    vocab,
    kind,
    peak,
    scale,
    limit,
    aim,
    BY_MASS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The bits of the smallest distance within which there are `aim` tokens.

    With BY_MASS, it is the smallest distance within which tokens have the share `aim` of the
    probability of all tokens within `limit`. The distance lies between `low`, which falls short,
    and `high`, which does not. The first cuts are an eighth of the temperature, a quarter, and so
    on, doubling; later cuts are evenly spaced.
    """
    steps = tl.arange(0, 8) + 1
    doubled = (tl.exp2(steps.to(tl.float32) - 4) / scale).to(tl.int32, bitcast=True)
    is_first = tl.full((), 1, tl.int32)
    low = tl.full((), -1, tl.int32)
    high = limit + tl.zeros([], tl.int32)
    goal = aim
    if BY_MASS:
        # The goal is known after the first pass, which sums the whole mass.
        goal = tl.full((), 0.0, tl.float32)
    while high - low > 1:
        step = tl.maximum((high - low) >> 3, 1)
        cuts = tl.where(is_first != 0, doubled, low + step * steps)
        cuts = tl.where(steps == 8, high, tl.minimum(cuts, high))
        sums = tl.zeros([8, COLUMNS], tl.float32)
        nearest = tl.full([1, COLUMNS], _INFINITE, tl.int32)
        farthest = tl.full([1, COLUMNS], -1, tl.int32)
        for start in tl.range(0, vocab, COLUMNS, loop_unroll_factor=4):
            # In the shape of the sums, which avoids a conversion between layouts
            columns = start + tl.arange(0, COLUMNS)[None, :]
            inside = columns < vocab
            away = peak - _values(logits, adjusted, columns, inside, kind)
            bits = away.to(tl.int32, bitcast=True)
            here = inside & (bits > low) & (bits <= high)
            nearest = tl.minimum(nearest, tl.where(here, bits, _INFINITE))
            farthest = tl.maximum(farthest, tl.where(here, bits, -1))
            weight = tl.where(inside, 1.0, 0.0)
            if BY_MASS:
                weight *= tl.exp(-away * scale)
            sums += tl.where(bits <= cuts[:, None], weight, 0.0)
        reached = tl.sum(sums, 1)
        if BY_MASS:
            total = tl.sum(tl.where(steps == 8, reached, 0.0), 0)
            goal = tl.where(is_first != 0, aim * total, goal)
        is_first = tl.full((), 0, tl.int32)
        enough = reached >= goal
        # Narrow the interval to distances that occur, so that the search ends after few passes.
        first = tl.min(nearest)
        last = tl.max(farthest)
        low = tl.maximum(tl.max(tl.where(enough, low, cuts), 0), first - 1)
        high = tl.minimum(tl.min(tl.where(enough, cuts, high), 0), last)
    return high


@kernel(do_not_specialize=["num_rows", "biased"])
def _process_kernel(
    logits,
    rows,
    positions,
    floats,
    ints,
    allowed,
    stops,
    bias_ids,
    bias,
    counts,
    token_mask,
    adjusted,
    temperatures,
    seeds,
    kinds,
    peaks,
    bounds,
    num_rows,
    vocab,
    stride,
    biased,
    HAS_MASK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
):
    begin()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    is_padding = row < 0
    # Padding reads the last row, as the index -1 does in the reference.
    row = tl.where(is_padding, num_rows - 1, row)
    t = tl.load(floats + row * _NUM_FLOATS + _TEMPERATURE)
    tl.store(temperatures + request, t)
    tl.store(seeds + request, tl.load(ints + row * _NUM_INTS + _SEED))
    used = tl.load(ints + row * _NUM_INTS + _FEATURES).to(tl.int32)
    is_short = tl.load(positions + request) + 1 < tl.load(ints + row * _NUM_INTS + _MIN_LEN)
    used = tl.where(is_short, used, used & ~_STOPS)
    kind = tl.where((used & _FILTERS) != 0, FILTERED, 0)
    kind = tl.where((used & (_PENALTIES | _BIAS | _ALLOWED | _STOPS)) != 0, ADJUSTED, kind)
    if HAS_MASK:
        kind = ADJUSTED
    kind = tl.where(is_padding, 0, kind)
    words = (vocab + 31) // 32
    logits += request * stride
    adjusted += request * vocab
    peak = 0.0
    bound = tl.full([], _INFINITE, tl.int32)

    if kind == ADJUSTED:
        for start in range(0, vocab, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            inside = columns < vocab
            x = tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
            x = _adjust(
                x,
                0.0,
                columns,
                inside,
                row,
                request,
                used,
                floats,
                allowed,
                stops,
                counts,
                token_mask,
                vocab,
                words,
                HAS_MASK,
            )
            tl.store(adjusted + columns, x, mask=inside)
        tl.debug_barrier()  # below, other threads write these places and then read them
        if used & _BIAS:
            place = tl.arange(0, BIASED)
            columns = tl.load(bias_ids + row * biased + place, mask=place < biased, other=-1)
            inside = columns >= 0
            x = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
            more = tl.load(bias + row * biased + place, mask=inside, other=0.0)
            x = _adjust(
                x,
                more,
                columns,
                inside,
                row,
                request,
                used,
                floats,
                allowed,
                stops,
                counts,
                token_mask,
                vocab,
                words,
                HAS_MASK,
            )
            tl.store(adjusted + columns, x, mask=inside)
            tl.debug_barrier()

    if (kind > 0) & (t > 0):
        largest = tl.full([COLUMNS], float("-inf"), tl.float32)
        for start in tl.range(0, vocab, COLUMNS, loop_unroll_factor=4):
            columns = start + tl.arange(0, COLUMNS)
            largest = tl.maximum(largest, _values(logits, adjusted, columns, columns < vocab, kind))
        peak = tl.max(largest, 0)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        if used & _FILTERS:
            scale = inverse(t)
            bound = (tl.load(floats + row * _NUM_FLOATS + _MARGIN) * t).to(tl.int32, bitcast=True)
            top_k = tl.load(ints + row * _NUM_INTS + _TOP_K).to(tl.float32)
            top_p = tl.load(floats + row * _NUM_FLOATS + _TOP_P)
            if top_k > 0:
                last = _search(
                    logits, adjusted, vocab, kind, peak, scale, _INFINITE, top_k, False, COLUMNS
                )
                bound = tl.minimum(bound, last)
            if top_p < 1:
                bound = _search(
                    logits, adjusted, vocab, kind, peak, scale, bound, top_p, True, COLUMNS
                )

    tl.store(kinds + request, kind)
    tl.store(peaks + request, peak)
    tl.store(bounds + request, bound.to(tl.float32, bitcast=True))


def draw_rows(
    logits: Tensor, rows: Tensor, positions: Tensor, *tensors: Any, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """`weft::sample_rows`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    table = SamplingTable(*tensors[:-1])
    token_mask = tensors[-1]
    temperatures, seeds, processed = process_rows(logits, rows, positions, table, token_mask)
    return draw(logits, temperatures, seeds, positions, processed, batch_invariant)


def process_rows(
    logits: Tensor, rows: Tensor, positions: Tensor, table: SamplingTable, token_mask: Tensor | None
) -> tuple[Tensor, Tensor, Processed]:
    """Each request's temperature [num_reqs] float32, its seed [num_reqs] int64, and its processed
    logits for `draw`.

    The rows of `logits` must be dense.
    """
    num_reqs, vocab = logits.shape
    device = logits.device
    temperatures, peaks, bounds = torch.empty(3, num_reqs, dtype=torch.float32, device=device)
    kinds = torch.empty(num_reqs, dtype=torch.int32, device=device)
    seeds = torch.empty_like(positions)
    adjusted = torch.empty(num_reqs, vocab, dtype=torch.float32, device=device)
    processed = Processed(kinds, adjusted, peaks, bounds)
    if num_reqs == 0:
        return temperatures, seeds, processed
    biased = table.bias.shape[1]
    _process_kernel[(num_reqs,)](
        logits,
        rows,
        positions,
        table.floats,
        table.ints,
        table.allowed,
        table.stops,
        table.bias_ids,
        table.bias,
        table.counts,
        table.allowed if token_mask is None else token_mask.contiguous(),
        adjusted,
        temperatures,
        seeds,
        kinds,
        peaks,
        bounds,
        table.floats.shape[0],
        vocab,
        logits.stride(0),
        biased,
        HAS_MASK=token_mask is not None,
        COLUMNS=_COLUMNS,
        BIASED=power_of_two(max(biased, 1)),
        num_warps=16,
        # A fused multiply-add would round once where the reference rounds twice.
        enable_fp_fusion=False,
        **early(logits),
    )
    return temperatures, seeds, processed


@kernel(do_not_specialize=["num_reqs"])
def _count_kernel(counts, ints, rows, token_ids, kept, num_reqs, vocab, BLOCK: tl.constexpr):
    begin()
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = request < num_reqs
    row = tl.load(rows + request, mask=inside, other=-1)
    counted = inside & (row >= 0) & (tl.load(kept + request, mask=inside, other=0) != 0)
    used = tl.load(ints + row * _NUM_INTS + _FEATURES, mask=counted, other=0).to(tl.int32)
    counted = counted & ((used & _PENALTIES) != 0)
    place = counts + row * vocab + tl.load(token_ids + request, mask=counted, other=0)
    old = tl.load(place, mask=counted, other=0)
    # Counts stop at the largest, since one more would change the sign bit, IN_PROMPT.
    tl.store(place, old + 1, mask=counted & ((old & _MOST_COUNTED) < _MOST_COUNTED))


def count(counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor) -> None:
    """`weft::count_tokens`."""
    if num_reqs := rows.shape[0]:
        _count_kernel[(cdiv(num_reqs, 256),)](
            counts,
            ints,
            rows,
            token_ids,
            kept,
            num_reqs,
            counts.shape[1],
            BLOCK=256,
            **early(counts),
        )
