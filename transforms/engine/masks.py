"""Masks: the user's function that says, before each token of a request, which tokens are allowed: a grammar, a schema,
a list of names.

A mask reaches the device in four steps: `outputs.apply_masks` calls it and puts its bits into `step.Work.masks`; the
work's batch has them as `Batch.token_mask`; and `weft.ops.sampling.logits.adjust`, or the sampling kernel, bars the
other tokens.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.errors import RequestError
from weft.ops.sampling.logits import pack_bits
from weft.sampling import SamplingParams
from weft.transforms.engine.faults import blamed

Mask = Callable[[Sequence[int]], Tensor | Iterable[int] | None]
"""Takes the tokens that a request has generated; returns the ids that may be next; or a bit for each token of the
vocabulary, [ceil(vocab_size / 32)] int32, the lowest bit first, as XGrammar fills it; or None: any token.

Every rank that has a stage calls it for the same tokens, and must get the same answer."""

_MAX_REPEATS = 16
"""A mask may return at most this many times `vocab_size` ids. More is an error, since the iterator may be endless."""


@attrs.frozen(eq=False)
class RequestMask:
    """A mask, and the tokens that its request's sampling parameters allow.

    Args:
        mask: of the request.
        allowed: the bits of the allowed tokens.
        allowed_early: the same without the tokens that end the request, for its first `min_tokens`.
        min_tokens: of the request.
    """

    mask: Mask
    allowed: Tensor
    allowed_early: Tensor
    min_tokens: int

    @classmethod
    def of(cls, mask: Mask, params: SamplingParams, vocab_size: int) -> "RequestMask":
        """A mask with its request's parameters, which `SamplingParams.for_request` made."""
        allowed = _all(vocab_size) & ~pack_bits(params.bad_token_ids, vocab_size)
        if params.allowed_token_ids is not None:
            allowed = allowed & pack_bits(params.allowed_token_ids, vocab_size)
        return cls(mask, allowed, allowed & ~pack_bits(params.stop_token_ids, vocab_size), params.min_tokens)

    def allowed_after(self, num_generated: int) -> Tensor:
        """The tokens that the parameters allow after so many."""
        return self.allowed_early if num_generated < self.min_tokens else self.allowed


def compute_mask(id: str, own: RequestMask, token_ids: Sequence[int], vocab_size: int) -> bytes | None:
    """The bits of the tokens that a request's mask allows next, as bytes; None: any token.

    Args:
        id: of the request, for errors.
        own: its mask.
        token_ids: the tokens that it has generated.

    Raises:
        RequestError: the function raised; or it returned something that is not a mask, or allows no token; or the
            request's parameters bar every token that it allows.
    """
    call, words = f"mask of request {id!r}, after {len(token_ids)} tokens", -(-vocab_size // 32)
    with blamed(call, "a function from tokens to the ids of those that may be next, which raises nothing"):
        found = own.mask(list(token_ids))
        if found is None:
            return None
        bits = found if isinstance(found, Tensor) else pack_bits(_ids(found, vocab_size), vocab_size)
        if bits.dtype != torch.int32 or tuple(bits.shape) != (words,):
            seen = f"a tensor {bits.dtype} {list(bits.shape)}"
            raise RequestError(call, seen, f"int32 [{words}], a bit for each of {vocab_size} tokens; or their ids")
        bits = bits.cpu().contiguous()
        allowed = bits & _all(vocab_size)
        if not (allowed & own.allowed_after(len(token_ids))).any():
            seen, instead = "no token that is allowed", "at least one: the end-of-sequence token ends a request"
            if allowed.any():
                seen = "tokens that are all barred by the request's allowed_token_ids, bad_token_ids or min_tokens"
                instead = "at least one that they leave; a request that may end has min_tokens=0"
            raise RequestError(call, seen, instead)
        return bits.numpy().tobytes()


def _ids(found: Any, vocab_size: int) -> set[int]:
    ids: set[int] = set()
    for count, token in enumerate(found):  # one after the other: an iterator may be endless
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ValueError(f"{token!r} is not a token id from 0 to {vocab_size - 1}")
        if count == _MAX_REPEATS * vocab_size:
            raise ValueError(f"more than {count} ids, where there are {vocab_size}")
        ids.add(token)
    return ids


@functools.cache
def _all(vocab_size: int) -> Tensor:
    """The bits of all tokens; bits past the last token are 0."""
    whole = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
    if rest := vocab_size % 32:
        whole[-1] = (1 << rest) - 1
    return whole


def stack_masks(masks: Sequence[bytes | None]) -> Tensor:
    """`Batch.token_mask` [num_reqs, ceil(vocab_size / 32)] int32 from a batch's masks, not all of them None."""
    size = max(len(mask) for mask in masks if mask is not None)
    rows = b"".join(b"\xff" * size if mask is None else mask for mask in masks)
    return torch.frombuffer(bytearray(rows), dtype=torch.int32).view(len(masks), -1)
