"""Masks: a function of the user's says, before each token of a request, which ones it may be: a grammar, a schema, a
list of names."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments import is_int
from weft.errors import RequestError
from weft.ops.sampling.logits import pack_bits
from weft.sampling import SamplingParams
from weft.transforms.engine.faults import blamed

Mask = Callable[[Sequence[int]], Tensor | Iterable[int] | None]
"""From the tokens that a request has said to those that may be next: their ids; or a bit for each token of the
vocabulary, [ceil(vocab_size / 32)] int32, the lowest first, as XGrammar fills it; None: any.

On every rank that has a stage it is called alike, and must say the same."""

_MOST_TIMES = 16
"""Ids that a mask may give, for each that there is."""


@attrs.frozen(eq=False)
class Masked:
    """A mask, and the tokens that the sampling parameters of its request leave.

    Args:
        mask: of the request.
        left: their bits.
        left_early: the same, without those that end the request, for its first `min_tokens`.
        min_tokens: of the request.
    """

    mask: Mask
    left: Tensor
    left_early: Tensor
    min_tokens: int

    @classmethod
    def of(cls, mask: Mask, params: SamplingParams, vocab_size: int) -> "Masked":
        """A mask beside parameters as `SamplingParams.for_request` makes them."""
        left = _all(vocab_size) & ~pack_bits(params.bad_token_ids, vocab_size)
        if params.allowed_token_ids is not None:
            left = left & pack_bits(params.allowed_token_ids, vocab_size)
        return cls(mask, left, left & ~pack_bits(params.stop_token_ids, vocab_size), params.min_tokens)

    def left_behind(self, num_said: int) -> Tensor:
        """The tokens that the parameters leave behind so many."""
        return self.left_early if num_said < self.min_tokens else self.left


def read_mask(id: str, masked: Masked, said: Sequence[int], vocab_size: int) -> bytes | None:
    """The bits of what a request's mask lets it say next, as bytes; None: anything.

    Args:
        id: of the request, for errors.
        said: its tokens so far, without its prompt.

    Raises:
        RequestError: the function raised, what it returned allows no token or is no mask, or the request's parameters
            bar every token that it allows.
    """
    call, words = f"mask of request {id!r}, behind {len(said)} tokens", -(-vocab_size // 32)
    with blamed(call, "a function from tokens to the ids of those that may be next, which raises nothing"):
        found = masked.mask(list(said))
        if found is None:
            return None
        bits = found if isinstance(found, Tensor) else pack_bits(_ids(found, vocab_size), vocab_size)
        if bits.dtype != torch.int32 or tuple(bits.shape) != (words,):
            seen = f"a tensor {bits.dtype} {list(bits.shape)}"
            raise RequestError(call, seen, f"int32 [{words}], a bit for each of {vocab_size} tokens; or their ids")
        bits = bits.cpu().contiguous()
        allowed = bits & _all(vocab_size)
        if not allowed.any():
            instead = "at least one: the end-of-sequence token ends a request"
            raise RequestError(call, "no token that is allowed", instead)
        if not (allowed & masked.left_behind(len(said))).any():
            seen = "tokens that are all barred by the request's allowed_token_ids, bad_token_ids or min_tokens"
            raise RequestError(call, seen, "at least one that they leave; a request that may end has min_tokens=0")
        return bits.numpy().tobytes()


def _ids(found: Any, vocab_size: int) -> set[int]:
    ids: set[int] = set()
    for count, token in enumerate(found):  # one after the other: an iterator may have no end
        if not is_int(token, 0, vocab_size - 1):
            raise ValueError(f"{token!r} is no token id from 0 to {vocab_size - 1}")
        if count == _MOST_TIMES * vocab_size:
            raise ValueError(f"more than {count} ids, where there are {vocab_size}")
        ids.add(token)
    return ids


@functools.cache
def _all(vocab_size: int) -> Tensor:
    """The bits of all tokens: what stands behind the last one counts as nothing."""
    whole = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
    if rest := vocab_size % 32:
        whole[-1] = (1 << rest) - 1
    return whole


def stack_masks(masks: Sequence[bytes | None]) -> Tensor:
    """`Batch.token_mask` [num_reqs, ceil(vocab_size / 32)] int32 of several requests, of which some have one."""
    size = max(len(mask) for mask in masks if mask is not None)
    rows = b"".join(b"\xff" * size if mask is None else mask for mask in masks)
    return torch.frombuffer(bytearray(rows), dtype=torch.int32).view(len(masks), -1)
