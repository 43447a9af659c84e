"""The CUDA implementation of `weft::sample` and `weft::token_logprobs`, in Triton.

Each operator is two kernels, whose launches depend on shapes alone.

1. `_part_kernel`, one program for a share of one request's vocabulary, computes a running maximum,
   the sum of exponentials relative to it (Milakov and Gimelshein, 2018, arXiv 1805.02867), and the
   best noisy score relative to the same maximum. Each lane keeps its own values, and they are
   combined once, at the end.
2. `_combine_kernel`, one program per request, takes the best of its shares and computes the logprob
   of that token: -inf if no share has a score, since then no logit was chosen. `_score_kernel`
   computes the logprobs of given tokens.

The random bits equal the reference's. Scores differ from the reference's in the last places of
float32, so another token can win only if the two best scores are within about 1e-4. Import this
module only where triton is installed. If TRITON_INTERPRET=1 was set before, it runs on CPU tensors,
for tests.
"""

# Triton's decorators have no types, and neither have the pointers that a kernel takes.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.ops.kernel_triton import begin, early, kernel
from weft.ops.sampling.splitmix import GOLDEN, MIX_1, MIX_2
from weft.ops.tiles.tile import cdiv, power_of_two

_BLOCK = 1024
# The number of programs that a launch aims for.
_PROGRAMS = 1024
# The shares of a row if batch invariant, whatever the number of rows.
_FIXED_SPLITS = 16

# Kinds of requests; kind 0 is a plain request.
FILTERED, ADJUSTED = tl.constexpr(1), tl.constexpr(2)

_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(x % 2**64) for x in (GOLDEN, MIX_1, MIX_2))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _unsigned(x):
    return x.to(tl.uint64, bitcast=True)


# 2.3283064365386963e-10 is 2**-32, 1.1102230246251565e-16 is 2**-53, 5.9604644775390625e-08 is
# 2**-24, and 0.6931471805599453 is ln 2: a kernel has only literals (`splitmix.exponential`).
@triton.jit
def _gumbel(stream, columns):
    """The noise of the reference: -log(E) with E = -log(1 - u), for which a small u uses the
    series: small variates win, so they need the precision."""
    bits = _mix(stream + (columns + 1).to(tl.uint64) * _GOLDEN)
    high = (bits >> 32).to(tl.uint32)
    low = bits.to(tl.uint32) >> 11
    u = (
        high.to(tl.float32) * 2.3283064365386963e-10
        + (low.to(tl.float32) + 0.5) * 1.1102230246251565e-16
    )
    u = tl.minimum(u, 1 - 5.9604644775390625e-08)
    series = u * (1 + u * (0.5 + u * (1.0 / 3 + u * 0.25)))
    # The hardware computes logarithms to base 2.
    return -0.6931471805599453 * tl.log2(
        tl.where(u < 0.015625, series, -0.6931471805599453 * tl.log2(1 - u))
    )


@triton.jit
def inverse(t):
    """1 / temperature, finite even for the smallest temperature, and 1 for a greedy request."""
    return tl.where(t <= 0, 1.0, 1.0 / tl.maximum(t, 1e-30))


@kernel()
def _part_kernel(
    logits,
    temperature,
    seeds,
    positions,
    best,
    indices,
    chosen,
    maxima,
    sums,
    adjusted,
    kinds,
    peaks,
    bounds,
    vocab,
    stride,
    share,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    begin()
    row = tl.program_id(0)
    split = tl.program_id(1)
    t = tl.load(temperature + row)
    greedy = t <= 0
    scale = inverse(t)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    stream = _mix(_mix(_unsigned(seed) + _GOLDEN) + _unsigned(position) * _GOLDEN)
    kind = 0
    peak = 0.0
    bound = 0.0
    if PROCESSED:
        kind = tl.load(kinds + row)
        peak = tl.load(peaks + row)
        bound = tl.load(bounds + row)
    nothing = float("-inf")
    top = tl.full([BLOCK], nothing, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    score = tl.full([BLOCK], nothing, tl.float32)
    index = tl.zeros([BLOCK], tl.int32)
    at_index = tl.full([BLOCK], nothing, tl.float32)
    first = split * share
    for start in range(first, tl.minimum(first + share, vocab), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = (columns < vocab) & (columns < first + share)
        x = tl.load(
            logits + row.to(tl.int64) * stride + columns, mask=inside, other=float("-inf")
        ).to(tl.float32)
        new = tl.maximum(top, x)
        below = tl.where(x == new, 0.0, x - new)  # avoid -inf - -inf
        fall = tl.where(top == new, 0.0, top - new)
        total = total * tl.exp(fall) + tl.where(x == nothing, 0.0, tl.exp(below))
        scores = below * scale
        if kind > 0:
            logit = x
            if kind == ADJUSTED:
                logit = tl.load(
                    adjusted + row.to(tl.int64) * vocab + columns, mask=inside, other=float("-inf")
                )
            # The peak is the row's known maximum, so these scores need no rescaling.
            scores = tl.where(peak - logit <= bound, (logit - peak) * scale, nothing)
            fall = tl.zeros([BLOCK], tl.float32)
        if not greedy:
            scores += _gumbel(stream, columns)
        scores = tl.where(inside & (x > nothing), scores, nothing)
        kept = score + fall * scale
        better = scores > kept
        score = tl.where(better, scores, kept)
        at_index = tl.where(better, x, at_index)
        index = tl.where(better, columns, index)
        top = new
    peak_here = tl.max(top, 0)
    fall = tl.where(top == peak_here, 0.0, top - peak_here)
    total = total * tl.exp(fall)
    if kind == 0:
        score += fall * scale
    best_here = tl.max(score, 0)
    place = tl.min(tl.where(score == best_here, index, 2147483647), 0)  # the first among equals
    out = row * SPLITS + split
    tl.store(best + out, best_here)
    tl.store(indices + out, tl.minimum(place, vocab - 1))  # in range even if a logit is NaN
    tl.store(
        chosen + out,
        tl.max(tl.where((score == best_here) & (index == place), at_index, nothing), 0),
    )
    tl.store(maxima + out, peak_here)
    tl.store(sums + out, tl.sum(total, 0))


@kernel()
def _combine_kernel(
    temperature,
    best,
    indices,
    chosen,
    maxima,
    sums,
    kinds,
    token_ids,
    logprobs,
    SPLITS: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    begin()
    row = tl.program_id(0)
    scale = inverse(tl.load(temperature + row))
    splits = row * SPLITS + tl.arange(0, SPLITS)
    tops = tl.load(maxima + splits)
    top = tl.max(tops, 0)
    falls = tl.where(tops == top, 0.0, tops - top)
    total = tl.sum(tl.load(sums + splits) * tl.exp(falls), 0)
    if PROCESSED:
        falls = tl.where(tl.load(kinds + row) > 0, 0.0, falls)
    scores = tl.load(best + splits) + falls * scale
    _, place = tl.max(scores, 0, return_indices=True, return_indices_tie_break_left=True)
    winner = tl.arange(0, SPLITS) == place
    token = tl.sum(tl.where(winner, tl.load(indices + splits), 0), 0)
    logit = tl.sum(tl.where(winner, tl.load(chosen + splits), 0.0), 0)
    tl.store(token_ids + row, token.to(tl.int64))
    # The sum is 0 if all logits are -inf, and NaN if a logit is.
    tl.store(logprobs + row, tl.where(total == 0, float("-inf"), logit - top - tl.log(total)))


def plan_splits(num_reqs: int, vocab: int, batch_invariant: bool = False) -> tuple[int, int]:
    """The number of shares of a row, a power of two, and the columns of each, a multiple of a
    block."""
    blocks = cdiv(vocab, _BLOCK)
    target_splits = (
        _FIXED_SPLITS if batch_invariant else power_of_two(max(1, _PROGRAMS // max(num_reqs, 1)))
    )
    splits = min(target_splits, power_of_two(blocks))
    return splits, cdiv(blocks, splits) * _BLOCK


@attrs.frozen(eq=False)
class Processed:
    """The results of `weft.ops.sampling.sample_rows_triton` that `draw` reads, for each request.

    Args:
        kinds: [num_reqs] int32. 0: draw from softmax(logits / temperature); FILTERED: the same
            within a bound; ADJUSTED: from `adjusted` instead of the logits, within a bound.
        adjusted: [num_reqs, vocab_size] float32, written only for requests of kind ADJUSTED.
        peaks: [num_reqs] float32, the largest logit; 0 for a greedy request.
        bounds: [num_reqs] float32, the distance from the peak, before temperature, up to which
            tokens are kept.
    """

    kinds: Tensor
    adjusted: Tensor
    peaks: Tensor
    bounds: Tensor


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    processed: Processed | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """`weft::sample`; with `processed`, the last part of `weft::sample_rows`."""
    rows, vocab = logits.shape
    token_ids = torch.empty_like(seeds)
    logprobs = torch.empty_like(temperature)
    if rows == 0:
        return token_ids, logprobs
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    splits, share = plan_splits(rows, vocab, batch_invariant)
    best, chosen, maxima, sums = torch.empty(
        4, rows, splits, dtype=torch.float32, device=logits.device
    )
    indices = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    # Without processed logits, any tensors stand for the buffers that the kernel does not read.
    buffers = processed or Processed(indices, best, best, best)
    is_processed = processed is not None
    _part_kernel[(rows, splits)](
        logits,
        temperature,
        seeds,
        positions,
        best,
        indices,
        chosen,
        maxima,
        sums,
        buffers.adjusted,
        buffers.kinds,
        buffers.peaks,
        buffers.bounds,
        vocab,
        logits.stride(0),
        share,
        SPLITS=splits,
        BLOCK=_BLOCK,
        PROCESSED=is_processed,
        num_warps=4,
        **early(logits),
    )
    _combine_kernel[(rows,)](
        temperature,
        best,
        indices,
        chosen,
        maxima,
        sums,
        buffers.kinds,
        token_ids,
        logprobs,
        SPLITS=splits,
        PROCESSED=is_processed,
        **early(logits),
    )
    return token_ids, logprobs


@kernel()
def _score_kernel(
    logits,
    token_ids,
    maxima,
    sums,
    logprobs,
    vocab,
    stride,
    count,
    SPLITS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The logprobs of a row's tokens, from the maxima and sums of its shares."""
    begin()
    row = tl.program_id(0)
    splits = row * SPLITS + tl.arange(0, SPLITS)
    tops = tl.load(maxima + splits)
    top = tl.max(tops, 0)
    falls = tl.where(tops == top, 0.0, tops - top)
    total = tl.sum(tl.load(sums + splits) * tl.exp(falls), 0)
    place = tl.arange(0, COUNT)
    token = tl.load(token_ids + row.to(tl.int64) * count + place, mask=place < count, other=0)
    logit = tl.load(logits + row.to(tl.int64) * stride + token, mask=place < count, other=0.0).to(
        tl.float32
    )
    logprob = tl.where(total == 0, float("-inf"), logit - top - tl.log(total))
    tl.store(logprobs + row.to(tl.int64) * count + place, logprob, mask=place < count)


def score(logits: Tensor, token_ids: Tensor) -> Tensor:
    """`weft::token_logprobs`, with the shares of a batch-invariant draw."""
    (rows, vocab), count = logits.shape, token_ids.shape[1]
    logprobs = torch.empty_like(token_ids, dtype=torch.float32)
    if rows == 0 or count == 0:
        return logprobs
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    token_ids = token_ids.contiguous()
    splits, share = plan_splits(rows, vocab, True)
    best, chosen, maxima, sums = torch.empty(
        4, rows, splits, dtype=torch.float32, device=logits.device
    )
    indices = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    # Temperature 0 spares `_part_kernel` the noise; only its maxima and sums are read.
    greedy = torch.zeros(rows, dtype=torch.float32, device=logits.device)
    zeros = torch.zeros_like(token_ids[:, 0])
    _part_kernel[(rows, splits)](
        logits,
        greedy,
        zeros,
        zeros,
        best,
        indices,
        chosen,
        maxima,
        sums,
        best,
        indices,
        best,
        best,
        vocab,
        logits.stride(0),
        share,
        SPLITS=splits,
        BLOCK=_BLOCK,
        PROCESSED=False,
        num_warps=4,
        **early(logits),
    )
    _score_kernel[(rows,)](
        logits,
        token_ids,
        maxima,
        sums,
        logprobs,
        vocab,
        logits.stride(0),
        count,
        SPLITS=splits,
        COUNT=power_of_two(count),
        **early(logits),
    )
    return logprobs
