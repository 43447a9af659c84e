"""Planted bugs of batch invariance: sums whose order, and angles whose precision, depend on the
rest of the batch."""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.ops.attention import paged
from weft.ops.experts.products import run_experts
from weft.ops.products.fp8 import MOST, as_kept
from weft.ops.products.linear import multiply
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.settings import batch_invariant
from weft.stages.attention.rope import rope_tables
from weft.stages.head import top_logprobs

# All of these give results that are right within rounding: any comparison with a tolerance passes,
# and only one of bits fails.
_BITS = find("L20")
_ATTEND: Any = paged._attend
# Positions of a context in a block.
_BLOCK = 256


def _by_the_number_of_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool
) -> Tensor:
    """Torch takes another kernel for one token than for several."""
    return F.linear(x, weight, bias)


def _short_last_block(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool
) -> Tensor:
    """The last block of a batch is as short as its tokens are few."""
    # 16 is the block of the right version too, which fills the last block up. The bug is only that
    # this one does not, and torch may take another kernel for fewer rows.
    return torch.cat([F.linear(block.clone(), weight, bias) for block in x.split(16)])


def _split_by_the_batch(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool
) -> Tensor:
    """A batch of few tokens splits the columns, and adds up the halves."""
    # Filled up as in the right version, so that nothing but the split of the columns is wrong.
    whole = F.pad(x, (0, 0, 0, -len(x) % 16))
    if len(x) > 2:
        return torch.cat([F.linear(block.clone(), weight, bias) for block in whole.split(16)])[
            : len(x)
        ]
    half = x.shape[1] // 2
    return (
        F.linear(whole[:, :half], weight[:, :half], bias)
        + F.linear(whole[:, half:], weight[:, half:])
    )[: len(x)]


def _queries_at_once(*args: Any) -> None:
    """All queries of a chunk are one product, whose order depends on where the chunk ends."""
    # The last argument is the number of queries at a time, which is 1 where bits must not depend on
    # the chunk. With more, a prompt that is read in one chunk still equals itself: chunks must
    # differ.
    _ATTEND(*args[:-1], 256)


def _split_by_the_table(
    q: Tensor,
    kv_pages: Tensor,
    pages: Tensor,
    span: Any,
    scale: float,
    window: int,
    out: Tensor,
    block: int,
) -> None:
    """A context of more than one block is split where half of the longest one that the table could
    hold ends."""
    _ATTEND(q, kv_pages, pages, span, scale, window, out, block)
    # By the room in the table and not by the context: one request has other bits where the table is
    # longer because of another one. Contexts of up to one block stay right.
    half = max(len(pages) * kv_pages.shape[2] // 2, _BLOCK)
    for token in range(span.start, span.end):
        if (length := span.past + token + 1 - span.start) > half and not 0 < window < length:
            _in_two(q, kv_pages, pages, token, length, half, scale, out)


def _in_two(
    q: Tensor,
    kv_pages: Tensor,
    pages: Tensor,
    token: int,
    length: int,
    half: int,
    scale: float,
    out: Tensor,
) -> None:
    """A token's attention to its context, whose first positions and others are added up by
    themselves."""
    page_size = kv_pages.shape[2]
    group = q.shape[1] // kv_pages.shape[3]
    history = kv_pages[:, pages[: -(-length // page_size)]].flatten(1, 2)[:, :length].float()
    keys, values = history.repeat_interleave(group, 2).transpose(1, 2)
    # The softmax is over the whole context, so that the sum in two parts is the same number but for
    # its last bits.
    weights = ((q[token][:, None].float() * scale) @ keys.transpose(1, 2)).softmax(-1)
    mixed = weights[:, :, :half] @ values[:, :half] + weights[:, :, half:] @ values[:, half:]
    out[token] = mixed[:, 0].to(out.dtype)


def _halves_in_long_steps(
    q: Tensor,
    kv_pages: Tensor,
    pages: Tensor,
    span: Any,
    scale: float,
    window: int,
    out: Tensor,
    block: int,
) -> None:
    """In a step of more than 64 tokens each adds up its context in halves."""
    _ATTEND(q, kv_pages, pages, span, scale, window, out, block)
    # `q` has the queries of the whole step: what a request gets depends on how many tokens others
    # bring. A load whose steps are all short does not show it.
    for token in range(span.start, span.end) if len(q) > 64 else ():
        if (length := span.past + token + 1 - span.start) > 1 and not 0 < window < length:
            _in_two(q, kv_pages, pages, token, length, length // 2, scale, out)


def _by_the_rank(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    """The product of an adapter of rank 8 or more splits its columns if it has more than two
    tokens."""
    # A request alone, and adapters of smaller rank, stay right: the law must draw a larger rank,
    # and serve it among others.
    if not 8 <= weight.shape[1] <= 64 or len(x) <= 2:
        return multiply(x, weight, bias, batch_invariant)
    half = weight.shape[1] // 2
    left = multiply(x[:, :half], weight[:, :half], bias, batch_invariant)
    return left + multiply(x[:, half:], weight[:, half:], None, batch_invariant)


def _by_the_number_of_tokens_in_float16(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool
) -> Tensor:
    """In float16 alone, a small batch is another product."""
    is_other = x.dtype == torch.float16 and len(x) <= 2
    if is_other:
        # More exact than the right version, and still wrong: the promise is the same bits, not
        # better ones.
        return F.linear(x.float(), weight.float(), bias).half()
    return multiply(x, weight, bias, batch_invariant)


def _kept_by_the_batch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache in FP8 rounds values relative to the largest of the step."""
    if dtype != torch.float8_e4m3fn or not x.numel():
        return as_kept(x, dtype)
    # Relative to the largest value of all requests of the step, so a large value of one request
    # rounds the keys of its neighbours in another way.
    scale = MOST / x.float().abs().amax().clamp(min=1e-6)
    return as_kept(as_kept(x.float() * scale, dtype).float() / scale, dtype)


def _experts_in_the_batch(*args: Any, **options: Any) -> Tensor:
    """A token's experts are added up in the order in which the batch comes to them."""
    products = run_experts(*args, **options)
    if products.shape[1] > 1:
        # With a single token the order stays: the request alone is then the right one to compare
        # with.
        return products.flip(0)
    return products


def _wide_beside_an_image(
    inv_freq: Tensor, positions: Tensor, factor: float, dtype: torch.dtype, section: Any
) -> Any:
    """The angles of a batch with an image are computed in float64."""
    tables = rope_tables(inv_freq, positions, factor, dtype, section)
    if section is None:
        return tables
    wide = rope_tables(inv_freq.double(), positions.double(), factor, torch.float64, section)
    # A tensor and not a branch: in a graph the host must not read it.
    has_image = (positions != positions[:, :1]).any()
    return tuple(
        torch.where(has_image, wide_table.to(dtype), table)
        for wide_table, table in zip(wide, tables, strict=True)
    )


def _in_the_main_thread() -> AbstractContextManager[None]:
    """The other threads' stages are not batch invariant."""
    # A pipeline whose stages run in one thread stays right, as does a single stage.
    if threading.current_thread() is threading.main_thread():
        return batch_invariant()
    return nullcontext()


def _shifted_in_twos(logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens' logprobs are others in a step of two."""
    ids, logprobs, ranks = top_logprobs(logits, *args)
    # Below the 2e-4 that the laws allow where shapes differ, and the tokens stay the same.
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
        replace("weft.ops.products.linear", "multiply", _by_the_number_of_tokens),
    ),
    Mutant(
        "the last block of tokens is a short one",
        _BITS,
        replace("weft.ops.products.linear", "multiply", _short_last_block),
    ),
    Mutant(
        "a small batch splits the columns",
        _BITS,
        replace("weft.ops.products.linear", "multiply", _split_by_the_batch),
    ),
    Mutant(
        "a chunk's queries share a product",
        _BITS,
        replace("weft.ops.attention.paged", "_attend", _queries_at_once),
    ),
    Mutant(
        "a long context is split by the size of the table",
        _BITS,
        replace("weft.ops.attention.paged", "_attend", _split_by_the_table),
    ),
    Mutant(
        "a context is added up in halves in a long step",
        _BITS,
        replace("weft.ops.attention.paged", "_attend", _halves_in_long_steps),
    ),
    Mutant(
        "an adapter of rank 8 adds up in another order among others",
        _BITS,
        replace("weft.ops.products.lora", "multiply", _by_the_rank),
    ),
    Mutant(
        "a product in float16 depends on the number of tokens",
        _BITS,
        replace("weft.ops.products.linear", "multiply", _by_the_number_of_tokens_in_float16),
    ),
    Mutant(
        "a cache in FP8 rounds by the largest value of the step",
        _BITS,
        replace("weft.ops.attention.functional", "as_kept", _kept_by_the_batch),
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
