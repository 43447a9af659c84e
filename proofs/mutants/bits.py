"""Planted bugs of batch invariance: sums whose order, and angles whose precision, depend on the rest of the batch."""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops.attention import paged
from weft.ops.experts.products import run_experts
from weft.proofs.mutants.mutant import Mutant, replace
from weft.proofs.suite import find
from weft.settings import batch_invariant
from weft.stages.attention.rope import rope_tables
from weft.stages.head import top_logprobs

_BITS = find("L20")
_ATTEND: Any = paged._attend


def _by_the_number_of_tokens(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    """Torch takes another kernel for one token than for several."""
    return F.linear(x, weight, bias)


def _short_last_block(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    """The last block of a batch is as short as its tokens are few."""
    return torch.cat([F.linear(block.clone(), weight, bias) for block in x.split(16)])


def _split_by_the_batch(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    """A batch of few tokens splits the columns, and adds up the halves."""
    whole = F.pad(x, (0, 0, 0, -len(x) % 16))
    if len(x) > 2:
        return torch.cat([F.linear(block.clone(), weight, bias) for block in whole.split(16)])[: len(x)]
    half = x.shape[1] // 2
    return (F.linear(whole[:, :half], weight[:, :half], bias) + F.linear(whole[:, half:], weight[:, half:]))[: len(x)]


def _queries_at_once(*args: Any) -> None:
    """All queries of a chunk are one product, whose order depends on where the chunk ends."""
    _ATTEND(*args[:-1], 256)


def _experts_in_the_batch(*args: Any, **options: Any) -> Tensor:
    """A token's experts are added up in the order in which the batch comes to them."""
    made = run_experts(*args, **options)
    return made.flip(0) if made.shape[1] > 1 else made


def _wide_beside_an_image(inv_freq: Tensor, positions: Tensor, factor: float, dtype: torch.dtype, section: Any) -> Any:
    """The angles of a batch with an image are computed in float64."""
    tables = rope_tables(inv_freq, positions, factor, dtype, section)
    if section is None:
        return tables
    wide = rope_tables(inv_freq.double(), positions.double(), factor, torch.float64, section)
    has_image = (positions != positions[:, :1]).any()
    return tuple(torch.where(has_image, own.to(dtype), table) for own, table in zip(wide, tables, strict=True))


def _in_the_main_thread() -> AbstractContextManager[None]:
    """The other threads' stages are not batch invariant."""
    return batch_invariant() if threading.current_thread() is threading.main_thread() else nullcontext()


def _shifted_in_twos(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens' logprobs are others in a step of two."""
    ids, logprobs, ranks = top_logprobs(logits, *args)
    return ids, logprobs + 1e-4 * (len(logits) == 2), ranks


BITS = (
    Mutant(
        "the likeliest tokens' logprobs are others in a step of two",
        _BITS,
        replace("weft.stages.head", "top_logprobs", _shifted_in_twos),
    ),
    Mutant(
        "the number of tokens chooses a product's order of sums",
        _BITS,
        replace("weft.ops.linear", "multiply", _by_the_number_of_tokens),
    ),
    Mutant("the last block of tokens is a short one", _BITS, replace("weft.ops.linear", "multiply", _short_last_block)),
    Mutant("a small batch splits the columns", _BITS, replace("weft.ops.linear", "multiply", _split_by_the_batch)),
    Mutant(
        "a chunk's queries share a product", _BITS, replace("weft.ops.attention.paged", "_attend", _queries_at_once)
    ),
    Mutant(
        "experts are added up in the order of the batch",
        _BITS,
        replace("weft.stages.decoder", "run_experts", _experts_in_the_batch),
    ),
    Mutant(
        "a batch with an image computes wider angles",
        _BITS,
        replace("weft.stages.decoder", "rope_tables", _wide_beside_an_image),
    ),
    Mutant(
        "only the main thread is batch invariant",
        _BITS,
        replace("weft.stages.decoder", "invariant", _in_the_main_thread),
    ),
)
