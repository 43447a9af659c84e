"""Sampling by a table: each request of a batch by its own row's parameters, in one operator; and the count of what it
generated."""

import torch
from torch import Tensor, library

from weft.errors import RequestError
from weft.ops.logits import FEATURES, IN_PROMPT, MOST_COUNTED, PENALTIES, SEED, TEMPERATURE, process, scale
from weft.ops.presence import no_triton, triton_version
from weft.ops.sample import choose
from weft.sampling_table import SamplingTable
from weft.trees import tree_leaves


def sample_rows(
    logits: Tensor, table: SamplingTable, rows: Tensor, positions: Tensor, token_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token a request, by its row of the table: from the softmax of `weft.ops.logits.process`.

    One operator, `weft::sample_rows`. A request depends on nothing but its own row, logits, mask and position. On CUDA
    a request that uses no feature costs what it costs in `weft::sample`, and a launch.

    Args:
        logits: [num_reqs, vocab_size] floating point, computed with in float32; unchanged.
        table: of the stage that samples.
        rows: [num_reqs] int64; -1 for padding, which draws some token.
        positions: [num_reqs] int64, of the last token that the model has read.
        token_mask: [num_reqs, ceil(vocab_size / 32)] int32, a bit for each token that a grammar allows; None: all.

    Returns:
        As `weft.ops.sample.sample`: token ids, and their logprobs by the model, before anything was changed; -inf where
        the table, the mask and the model together leave no token.

    Raises:
        RequestError: the table or the mask is of another vocabulary.
    """
    vocab = logits.shape[1]
    call = f"sample_rows(<logits {tuple(logits.shape)}>, table, rows, positions, token_mask)"
    if table.vocab_size != vocab:
        instead = f"State.zeros(..., vocab_size={vocab}) for the stage that samples"
        raise RequestError(call, f"a table of vocab_size={table.vocab_size}", instead)
    if token_mask is not None and token_mask.shape != (shape := (logits.shape[0], -(-vocab // 32))):
        raise RequestError(call, f"a mask of shape {tuple(token_mask.shape)}", f"one of {shape}, int32")
    drawn: tuple[Tensor, Tensor] = torch.ops.weft.sample_rows(logits, rows, positions, *tree_leaves(table), token_mask)
    return drawn


def count_tokens(table: SamplingTable, rows: Tensor, token_ids: Tensor, kept: Tensor) -> None:
    """Count a token for each request, in place, where `kept` [num_reqs] bool and where the request has penalties.

    One operator, `weft::count_tokens`. No row stands twice but padding's, where nothing is kept.
    """
    if table.vocab_size:
        torch.ops.weft.count_tokens(table.counts, table.ints, rows, token_ids, kept)


def _sample_on_cpu(logits: Tensor, rows: Tensor, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The reference. Only requests that use something are processed."""
    table, token_mask = SamplingTable(*tensors[:-1]), tensors[-1]
    temperature, seeds = table.floats[rows, TEMPERATURE], table.ints[rows, SEED]
    scaled = scale(logits.float(), temperature)
    used = (rows >= 0) & ((table.ints[rows, FEATURES] != 0) | (token_mask is not None))
    (own,) = used.nonzero(as_tuple=True)
    if len(own):
        mask = None if token_mask is None else token_mask[own]
        scaled[own] = process(logits[own], table.rules(rows[own]), positions[own], mask)
    return choose(logits, scaled, temperature, seeds, positions)


def _sample_on_cuda(logits: Tensor, rows: Tensor, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    if triton_version() is None:
        raise no_triton(f"sample_rows(logits on {logits.device}, …)")
    # Not at the top: a machine without triton can still import weft and run on its CPU.
    from weft.ops.sample_rows_triton import draw_rows

    return draw_rows(logits, rows, positions, SamplingTable(*tensors[:-1]), tensors[-1])


def _sample_fake(logits: Tensor, rows: Tensor, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(positions), torch.empty_like(positions, dtype=torch.float32)


def _count_on_cpu(counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor) -> None:
    old = counts[rows, token_ids]
    counted = kept & (rows >= 0) & ((ints[rows, FEATURES] & PENALTIES) != 0) & ((old & ~IN_PROMPT) < MOST_COUNTED)
    counts[rows, token_ids] = old + counted.to(torch.int16)


def _count_on_cuda(counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor) -> None:
    if triton_version() is None:
        raise no_triton(f"count_tokens(table on {counts.device}, …)")
    from weft.ops.sample_rows_triton import count

    count(counts, ints, rows, token_ids, kept)


def _count_fake(counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor) -> None:
    return None


library.define(
    "weft::sample_rows",
    "(Tensor logits, Tensor rows, Tensor positions, Tensor floats, Tensor ints, Tensor allowed, Tensor stops, "
    "Tensor bias_ids, Tensor bias, Tensor counts, Tensor? token_mask) -> (Tensor, Tensor)",
)
library.impl("weft::sample_rows", "CPU", _sample_on_cpu)
library.impl("weft::sample_rows", "CUDA", _sample_on_cuda)
library.register_fake("weft::sample_rows", _sample_fake)
library.define(
    "weft::count_tokens", "(Tensor(a!) counts, Tensor ints, Tensor rows, Tensor token_ids, Tensor kept) -> ()"
)
library.impl("weft::count_tokens", "CPU", _count_on_cpu)
library.impl("weft::count_tokens", "CUDA", _count_on_cuda)
library.register_fake("weft::count_tokens", _count_fake)
