"""Masks: a function of the user's says, before each token of a request, which ones it may be: a grammar, a schema, a
list of names."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import RequestError
from weft.ops.logits import pack_bits

Mask = Callable[[Sequence[int]], Tensor | Iterable[int] | None]
"""From the tokens that a request has said to those that may be next: their ids; or a bit for each token of the
vocabulary, [ceil(vocab_size / 32)] int32, the lowest first, as XGrammar fills it; None: any.

On every rank that has a stage it is called alike, and must say the same."""


def read_mask(id: str, mask: Mask, said: Sequence[int], vocab_size: int) -> bytes | None:
    """The bits of what a request may say next, as bytes; None: anything.

    Args:
        id: of the request, for errors.
        said: its tokens so far, without its prompt.

    Raises:
        RequestError: the function raised, or what it returned allows no token or is no mask.
    """
    call = f"mask of request {id!r}, behind {len(said)} tokens"
    try:
        found = mask(list(said))
        bits = found if found is None or isinstance(found, Tensor) else pack_bits(_ids(found, vocab_size), vocab_size)
    except Exception as error:
        instead = "a function from tokens to the ids of those that may be next, which raises nothing"
        raise RequestError(call, f"{type(error).__name__}: {error}", instead) from error
    if bits is None:
        return None
    words = -(-vocab_size // 32)
    if bits.dtype != torch.int32 or tuple(bits.shape) != (words,):
        seen = f"a tensor {bits.dtype} {list(bits.shape)}"
        raise RequestError(call, seen, f"int32 [{words}], a bit for each of {vocab_size} tokens; or their ids")
    bits = bits.cpu().contiguous()
    if not (bits & _all(vocab_size)).any():
        raise RequestError(call, "no token that is allowed", "at least one: the end-of-sequence token ends a request")
    return bits.numpy().tobytes()


def _ids(found: Any, vocab_size: int) -> list[int]:
    ids = list(found)
    if wrong := [t for t in ids if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < vocab_size]:
        raise ValueError(f"{wrong[0]!r} is no token id from 0 to {vocab_size - 1}")
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
