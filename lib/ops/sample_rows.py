"""Sampling by a table: each request of a batch by its own row's parameters, in one operator; and the count of what it
generated."""

import attrs
import torch
from torch import Tensor

from weft.errors import RequestError
from weft.ops.logits import FEATURES, IN_PROMPT, MOST_COUNTED, PENALTIES, SEED, TEMPERATURE, process, scale
from weft.ops.register import register
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
    drawn: tuple[Tensor, Tensor] = _sample_rows(logits, rows, positions, *tree_leaves(table), token_mask)
    return drawn


def count_tokens(table: SamplingTable, rows: Tensor, token_ids: Tensor, kept: Tensor) -> SamplingTable:
    """Count a token for each request where `kept` [num_reqs] bool and where the request has penalties: in place, and in
    a table of its own inside a transform of torch.func.

    One operator, `weft::count_tokens`. No row stands twice but padding's, where nothing is kept.
    """
    if not table.vocab_size:
        return table
    made = _count_tokens(table.counts, table.ints, rows, token_ids, kept)
    return table if made is None else attrs.evolve(table, counts=made[1])


def reference_sample_rows(logits: Tensor, rows: Tensor, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """`weft::sample_rows` in plain torch, on any device. Only requests that use something are processed."""
    table, token_mask = SamplingTable(*tensors[:-1]), tensors[-1]
    temperature, seeds = table.floats[rows, TEMPERATURE], table.ints[rows, SEED]
    scaled = scale(logits.float(), temperature)
    (own,) = _uses_something(table, rows, token_mask).nonzero(as_tuple=True)
    if len(own):
        mask = None if token_mask is None else token_mask[own]
        scaled[own] = process(logits[own], table.rules(rows[own]), positions[own], mask)
    return choose(logits, scaled, temperature, seeds, positions)


def functional_sample_rows(logits: Tensor, rows: Tensor, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a read on the host: all requests are processed."""
    table, token_mask = SamplingTable(*tensors[:-1]), tensors[-1]
    temperature, seeds, constant = table.floats[rows, TEMPERATURE], table.ints[rows, SEED], logits.detach()
    used = _uses_something(table, rows, token_mask)[:, None]
    processed = process(constant, table.rules(rows), positions, token_mask)
    return choose(
        logits, torch.where(used, processed, scale(constant.float(), temperature)), temperature, seeds, positions
    )


def _uses_something(table: SamplingTable, rows: Tensor, token_mask: Tensor | None) -> Tensor:
    return (rows >= 0) & ((table.ints[rows, FEATURES] != 0) | (token_mask is not None))


def _sample_fake(logits: Tensor, rows: Tensor, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(positions), torch.empty_like(positions, dtype=torch.float32)


def reference_count_tokens(counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor) -> None:
    """`weft::count_tokens` in plain torch, on any device."""
    counts[rows, token_ids] = _counted(counts, ints, rows, token_ids, kept)


def functional_count_tokens(
    counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor
) -> tuple[None, Tensor]:
    """The same with counts of its own, which it returns."""
    return None, counts.index_put((rows, token_ids), _counted(counts, ints, rows, token_ids, kept))


def _counted(counts: Tensor, ints: Tensor, rows: Tensor, token_ids: Tensor, kept: Tensor) -> Tensor:
    old = counts[rows, token_ids]
    counted = kept & (rows >= 0) & ((ints[rows, FEATURES] & PENALTIES) != 0) & ((old & ~IN_PROMPT) < MOST_COUNTED)
    return old + counted.to(torch.int16)


_sample_rows = register(
    "sample_rows",
    "(Tensor logits, Tensor rows, Tensor positions, Tensor floats, Tensor ints, Tensor allowed, Tensor stops, "
    "Tensor bias_ids, Tensor bias, Tensor counts, Tensor? token_mask) -> (Tensor, Tensor)",
    cpu=reference_sample_rows, fake=_sample_fake, kernel="weft.ops.sample_rows_triton:draw_rows",
    functional=functional_sample_rows,
)  # fmt: skip
_count_tokens = register(
    "count_tokens", "(Tensor(a!) counts, Tensor ints, Tensor rows, Tensor token_ids, Tensor kept) -> ()",
    cpu=reference_count_tokens, fake=lambda *tensors: None, kernel="weft.ops.sample_rows_triton:count",
    functional=functional_count_tokens,
)  # fmt: skip
