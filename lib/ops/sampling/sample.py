"""The draw of a token: `weft::sample`, `weft::sample_rows` with a table of parameters, and
`weft::count_tokens`.

A request's seed and position determine its random numbers, in any batch, order or split.
"""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import RequestError
from weft.ops.products.parts import widened
from weft.ops.register import operator
from weft.ops.sampling.logits import (
    FEATURES,
    IN_PROMPT,
    MOST_COUNTED,
    PENALTIES,
    SEED,
    TEMPERATURE,
    process,
    scale,
)
from weft.ops.sampling.splitmix import exponential, random_bits
from weft.ops.sampling.table import SamplingTable


def _choose(
    logits: Tensor, scaled: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The arg max of `scaled`, with noise unless the temperature is 0, and its logprob under
    `logits`; the logprob is -inf if all of `scaled` is."""
    noise = -torch.log(exponential(random_bits(seeds, positions, logits.shape[-1])))
    token_ids = torch.where((temperature <= 0)[:, None], scaled, scaled + noise).argmax(-1)
    logprobs = token_logprobs.reference(logits, token_ids[:, None])[:, 0]
    # Subtract infinity rather than write -inf, so that NaN stays NaN.
    return token_ids, logprobs - torch.where(scaled.amax(-1) == -torch.inf, torch.inf, 0.0)


@operator(
    kernel="weft.ops.sampling.sample_triton:draw",
    fake=lambda temperature, seeds: (torch.empty_like(seeds), torch.empty_like(temperature)),
)
def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw one token per request: the arg max if the temperature is 0, otherwise from
    softmax(logits / temperature).

    With independent exponentials E_i, the index that maximises l_i / t - log(E_i) is distributed as
    softmax(l / t): the Gumbel-max trick (Gumbel 1954; Maddison, Tarlow and Minka, 2014, arXiv
    1411.0030). On CUDA one kernel reads the logits once and keeps nothing of their size.

    The token has no derivative, since it changes in steps; its logprob has one.

    Args:
        logits: [num_reqs, vocab_size] floating point, converted to float32.
        temperature: [num_reqs] float32.
        seeds, positions: [num_reqs] int64; equal pairs draw equal noise.

    Returns:
        Token ids [num_reqs] int64, and their logprobs [num_reqs] float32 under softmax(logits),
        that is at temperature 1. If no token can be drawn, the logprob is -inf and the id is
        arbitrary.
    """
    return _choose(
        logits, scale(logits.detach().float(), temperature), temperature, seeds, positions
    )


@operator(
    kernel="weft.ops.sampling.sample_triton:score",
    fake=lambda token_ids: torch.empty_like(token_ids, dtype=torch.float32),
)
def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The logprobs of some tokens under softmax(logits), like those that `sample` returns for the
    tokens that it draws.

    In `weft.batch_invariant()` the two are equal, bit for bit.

    Args:
        logits: [n, vocab_size] floating point, converted to float32.
        token_ids: [n, count] int64.

    Returns:
        [n, count] float32; -inf if the token's logit is -inf, or if all logits are.

    >>> token_logprobs(torch.zeros(1, 4), torch.tensor([[0, 3]]))
    tensor([[-1.3863, -1.3863]])
    """
    logprobs = widened(logits).log_softmax(-1).gather(-1, token_ids)
    # If all logits are -inf their softmax is NaN, although no logit is.
    return logprobs.masked_fill((logits.detach().amax(-1) == -torch.inf)[:, None], -torch.inf)


def sample_rows(
    logits: Tensor,
    table: SamplingTable,
    rows: Tensor,
    positions: Tensor,
    token_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per request, from the softmax of `weft.ops.sampling.logits.process` with the
    parameters in the request's row of the table.

    The result for a request depends only on its own row, logits, mask and position. On CUDA a
    request that uses no feature costs one launch more than in `sample`.

    Args:
        logits: [num_reqs, vocab_size] floating point, converted to float32; not modified.
        table: the table of the stage that samples.
        rows: [num_reqs] int64; -1 for padding, which draws an arbitrary token.
        positions: [num_reqs] int64, the position of the last token that the model has read.
        token_mask: [num_reqs, ceil(vocab_size / 32)] int32, with a bit for each token that a
            grammar allows; None: all are allowed.

    Returns:
        Token ids and logprobs, as `sample` returns them. The logprobs are the model's, before the
        rules change the logits; -inf if the table, the mask and the model together leave no token.

    Raises:
        RequestError: the table or the mask has another vocabulary size.
    """
    vocab = logits.shape[1]
    shape = logits.shape[0], -(-vocab // 32)
    if table.vocab_size != vocab or (token_mask is not None and token_mask.shape != shape):
        problem = f"a table of vocab_size={table.vocab_size}"
        instead = f"State.zeros(..., vocab_size={vocab}) for the stage that samples"
        if token_mask is not None and table.vocab_size == vocab:
            problem = f"a mask of shape {tuple(token_mask.shape)}"
            instead = f"one of {shape}, int32"
        call = f"sample_rows(<logits {tuple(logits.shape)}>, table, rows, positions, token_mask)"
        raise RequestError(call, problem, instead)
    return _sample_rows(
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
        token_mask,
    )


def functional_sample_rows(
    logits: Tensor, rows: Tensor, positions: Tensor, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """`sample_rows` without a read on the host, so that all requests are processed."""
    table = SamplingTable(*tensors[:-1])
    token_mask = tensors[-1]
    # A padding row of -1 reads the last row, with whose parameters it draws an arbitrary token.
    temperature = table.floats[rows, TEMPERATURE]
    seeds = table.ints[rows, SEED]
    constant = logits.detach()
    used = _uses_something(table, rows, token_mask)[:, None]
    processed = process(constant, table.rules(rows), positions, token_mask)
    return _choose(
        logits,
        torch.where(used, processed, scale(constant.float(), temperature)),
        temperature,
        seeds,
        positions,
    )


@operator(
    kernel="weft.ops.sampling.sample_rows_triton:draw_rows",
    fake=lambda positions: (
        torch.empty_like(positions),
        torch.empty_like(positions, dtype=torch.float32),
    ),
    functional=functional_sample_rows,
)
def _sample_rows(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    floats: Tensor,
    ints: Tensor,
    allowed: Tensor,
    stops: Tensor,
    bias_ids: Tensor,
    bias: Tensor,
    counts: Tensor,
    token_mask: Tensor | None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """The operator of `sample_rows`, which processes only requests that use a feature."""
    table = SamplingTable(floats, ints, allowed, stops, bias_ids, bias, counts)
    temperature = table.floats[rows, TEMPERATURE]
    seeds = table.ints[rows, SEED]
    scaled = scale(logits.float(), temperature)
    (processed,) = _uses_something(table, rows, token_mask).nonzero(as_tuple=True)
    if len(processed):
        if token_mask is None:
            mask = None
        else:
            mask = token_mask[processed]
        scaled[processed] = process(
            logits[processed], table.rules(rows[processed]), positions[processed], mask
        )
    return _choose(logits, scaled, temperature, seeds, positions)


def _uses_something(table: SamplingTable, rows: Tensor, token_mask: Tensor | None) -> Tensor:
    return (rows >= 0) & ((table.ints[rows, FEATURES] != 0) | (token_mask is not None))


def count_tokens(
    table: SamplingTable, rows: Tensor, token_ids: Tensor, kept: Tensor
) -> SamplingTable:
    """Count a token for each request where `kept` [num_reqs] bool is true and the request has
    penalties.

    The table is written in place; inside a transform of torch.func the result is a new table. Rows
    are distinct, except for padding, whose tokens are not counted.
    """
    if not table.vocab_size:
        return table
    call: Callable[..., Any] = _count_tokens  # the functional form returns more than the operator
    outputs = call(table.counts, table.ints, rows, token_ids, kept)
    if outputs is None:
        return table
    return attrs.evolve(table, counts=outputs[1])


def functional_count_tokens(
    counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor
) -> tuple[None, Tensor]:
    """`_count_tokens` with new counts, which it returns."""
    return None, counts.index_put((rows, token_ids), _counted(counts, ints, rows, token_ids, kept))


@operator(
    writes=("counts",),
    kernel="weft.ops.sampling.sample_rows_triton:count",
    fake=lambda: None,
    functional=functional_count_tokens,
)
def _count_tokens(
    counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor
) -> None:
    """The operator of `count_tokens`."""
    counts[rows, token_ids] = _counted(counts, ints, rows, token_ids, kept)


def _counted(counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor) -> Tensor:
    old = counts[rows, token_ids]
    # Counts stop at the largest, since one more would change the sign bit, IN_PROMPT.
    counted = (
        kept
        & (rows >= 0)
        & ((ints[rows, FEATURES] & PENALTIES) != 0)
        & ((old & ~IN_PROMPT) < MOST_COUNTED)
    )
    return old + counted.to(torch.int16)
