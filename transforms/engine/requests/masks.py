"""Masks: functions that say which tokens a request may draw next, such as a grammar's, or one that
bars `bad_words`."""

import functools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.sampling import SamplingParams
from weft.errors import RequestError
from weft.ops.sampling.logits import pack_bits
from weft.stages.model import Model
from weft.transforms.engine.requests.mask_budget import MaskBudget

Mask = Callable[[Sequence[int]], Tensor | Iterable[int] | None]
"""A user's function that says, before each token of a request, which tokens are allowed: a grammar,
a schema, a list of names. It takes the tokens that the request has generated. It returns the ids
that may be next; or one bit for each token of the vocabulary, [ceil(vocab_size / 32)] int32, lowest
bit first, as XGrammar and llguidance fill it; or None: any token.

Every rank that runs a stage calls it with the same tokens, and must get the same answer.
`outputs.apply_masks` calls it and puts the bits into `step.Work.masks`; the work's batch holds them
as `Batch.token_mask`; `weft.ops.sampling.logits.adjust`, or the sampling kernel, bars all other
tokens.

If it has an attribute `budget`, a `MaskBudget`, a request whose masks take longer ends with an
error, since all other requests wait while masks are computed."""
# A mask may return at most this many times `vocab_size` ids, repeats included; more is an error,
# since the iterator may be endless.
_MAX_REPEATS = 16


def budget_of(mask: Mask | None) -> MaskBudget | None:
    """A mask's budget; None: it may take any time."""
    return getattr(mask, "budget", None)


@attrs.frozen(eq=False)
class RequestMask:
    """A mask, and the tokens that its request's sampling parameters allow.

    Args:
        mask: of the request.
        allowed: the bits of the allowed tokens.
        allowed_early: the same without the tokens that end the request, while it has fewer than
            `min_tokens`.
        min_tokens: of the request.
    """

    mask: Mask
    allowed: Tensor
    allowed_early: Tensor
    min_tokens: int

    @classmethod
    def of(cls, mask: Mask, params: SamplingParams, vocab_size: int) -> "RequestMask":
        """A mask with its request's parameters, as `weft.batches.sampling.for_request` makes
        them."""
        allowed = _all(vocab_size) & ~pack_bits(params.bad_token_ids, vocab_size)
        if params.allowed_token_ids is not None:
            allowed = allowed & pack_bits(params.allowed_token_ids, vocab_size)
        return cls(
            mask,
            allowed,
            allowed & ~pack_bits(params.stop_token_ids, vocab_size),
            params.min_tokens,
        )

    def allowed_after(self, num_generated: int) -> Tensor:
        """The tokens that the parameters allow after `num_generated` tokens."""
        if num_generated < self.min_tokens:
            return self.allowed_early
        return self.allowed


def compute_mask(
    id: str, request_mask: RequestMask, token_ids: Sequence[int], vocab_size: int
) -> bytes | None:
    """The bits of the tokens that a request's mask allows next, as bytes; None: any token.

    Args:
        id: of the request, for errors.
        request_mask: its mask.
        token_ids: the tokens that it has generated.

    Raises:
        RequestError: the function raised; it returned something that is not a mask, or that allows
            no token; or the request's parameters bar every token that it allows.
    """
    call = f"mask of request {id!r}, after {len(token_ids)} tokens"
    words = -(-vocab_size // 32)
    with blamed(
        call, "a function from tokens to the ids of those that may be next, which raises nothing"
    ):
        # A copy: the function may keep or change the list, and this one is the completion.
        mask = request_mask.mask(list(token_ids))
        if mask is None:
            return None
        if isinstance(mask, Tensor):
            bits = mask
        else:
            bits = pack_bits(_ids(mask, vocab_size), vocab_size)
        if bits.dtype != torch.int32 or tuple(bits.shape) != (words,):
            problem = f"a tensor {bits.dtype} {list(bits.shape)}"
            instead = f"int32 [{words}], a bit for each of {vocab_size} tokens; or their ids"
        else:
            bits = bits.cpu().contiguous()
            # The function may set bits past the last token.
            allowed = bits & _all(vocab_size)
            if (allowed & request_mask.allowed_after(len(token_ids))).any():
                return bits.numpy().tobytes()
            problem = "no token that is allowed"
            instead = "at least one: the end-of-sequence token ends a request"
            if allowed.any():
                problem = (
                    "tokens that are all barred by the request's allowed_token_ids, bad_token_ids"
                    " or min_tokens"
                )
                instead = "at least one that they leave; a request that may end has min_tokens=0"
        raise RequestError(call, problem, instead)


def _ids(token_ids: Any, vocab_size: int) -> set[int]:
    ids = set[int]()
    most = _MAX_REPEATS * vocab_size
    for count, token in enumerate(token_ids):  # one by one: an iterator may be endless
        is_token = (
            isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size
        )
        if not is_token or count == most:
            many = f"more than {count} ids, where there are {vocab_size}"
            raise ValueError(
                many if is_token else f"{token!r} is not a token id from 0 to {vocab_size - 1}"
            )
        ids.add(token)
    return ids


@functools.cache
def _all(vocab_size: int) -> Tensor:
    """The bits of all tokens; bits past the last token are 0."""
    whole = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
    if rest := vocab_size % 32:
        whole[-1] = (1 << rest) - 1
    return whole


def without_bad_words(
    call: str, model: Model, params: SamplingParams, mask: Mask | None
) -> tuple[SamplingParams, Mask | None]:
    """The parameters, and the mask, of a request that never draws its `bad_words`.

    A word of one token becomes a bad token. Of a longer word, the last token is barred whenever the
    others have just been generated, as in vLLM; other tokens may still produce the same text.

    Args:
        call: of an error.
        mask: of the request; None: it has none.

    Raises:
        RequestError: the tokenizer makes no tokens of a word.
    """
    sequences = {ids for word in params.bad_words for ids in _sequences(call, model, word)}
    single = [ids[0] for ids in sequences if len(ids) == 1]
    longer = sorted(ids for ids in sequences if len(ids) > 1)
    params = attrs.evolve(params, bad_token_ids=sorted({*params.bad_token_ids, *single}))
    if not longer:
        return params, mask
    vocab_size = model.config.vocab_size

    def allowed(token_ids: Sequence[int]) -> Tensor | Iterable[int] | None:
        if mask is None:
            base_mask = None
        else:
            base_mask = mask(token_ids)
        said = tuple(token_ids)
        barred = {ids[-1] for ids in longer if said[max(len(said) - len(ids) + 1, 0) :] == ids[:-1]}
        if not barred:
            return base_mask
        if base_mask is None or isinstance(base_mask, Tensor):
            bits = ~pack_bits(barred, vocab_size)
            if base_mask is None:
                return bits
            return base_mask.cpu() & bits
        return (token for token in base_mask if token not in barred)

    allowed.budget = budget_of(mask)  # type: ignore[attr-defined]
    return params, allowed


def _sequences(call: str, model: Model, word: str) -> set[tuple[int, ...]]:
    """The tokens of a word at the beginning of a text, and those of the word after a space."""
    assert model.tokenizer is not None, "check_sampling refuses words without a tokenizer"
    texts = word, " " + word.lstrip()
    sequences = {
        tuple(model.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts
    }
    if () in sequences:
        raise RequestError(
            call,
            f"bad_words holds {word!r}, which has no tokens",
            "words of the model's vocabulary",
        )
    return sequences


def blame(error: BaseException, call: str, instead: str) -> RequestError:
    """Turn an exception of user code into the error of one request; a RequestError stays as it is.

    Args:
        call, instead: of that error.

    Raises:
        BaseException: the exception itself, if it is no `Exception`, such as an interrupt. A panic
            of a Rust extension is not an `Exception` either, but counts as an error of the request.
    """
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
        raise error
    # Not `str(error)`, which may raise as well.
    blamed = RequestError(call, traceback.format_exception_only(error)[-1].strip(), instead)
    blamed.__cause__ = error
    return blamed


@contextmanager
def blamed(call: str, instead: str) -> Iterator[None]:
    """A context in which an exception becomes the error of one request (`blame`)."""
    try:
        yield
    except BaseException as error:
        if (request_error := blame(error, call, instead)) is error:
            raise
        raise request_error from error
