"""Inputs: users' prompts, sampling parameters and masks, checked, as requests."""

import functools
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import COUNT, Rule, check_values, is_int
from weft.batch import EMBEDDED
from weft.errors import RequestError
from weft.ops.sampling.logits import pack_bits
from weft.sampling import SamplingParams
from weft.sampling_table import MAX_BIASED, SamplingTable, write_rows
from weft.stages.model import Model
from weft.transforms.engine.prompts import EmbedsPrompt, check_extras, read_content, with_token_extras
from weft.transforms.engine.requests import Request, request_seed, sample_seeds

Mask = Callable[[Sequence[int]], Tensor | Iterable[int] | None]
"""A user's function that says, before each token of a request, which tokens are allowed: a grammar, a schema, a list of
names. It takes the tokens that the request has generated; returns the ids that may be next; or a bit for each token of
the vocabulary, [ceil(vocab_size / 32)] int32, the lowest bit first, as XGrammar fills it; or None: any token.

Every rank that has a stage calls it for the same tokens, and must get the same answer. `outputs.apply_masks` calls it
and puts its bits into `step.Work.masks`; the work's batch has them as `Batch.token_mask`; and
`weft.ops.sampling.logits.adjust`, or the sampling kernel, bars the other tokens."""
_MAX_REPEATS = 16
"""A mask may return at most this many times `vocab_size` ids. More is an error, since the iterator may be endless."""
_NO_LOGPROBS: Rule = (lambda wanted: wanted is None), "SamplingParams() without prompt_logprobs: embeddings have none"
_REQUEST_RULES: dict[str, Rule] = {
    "sampling": (SamplingParams, "weft.SamplingParams(...), or None"),
    "id": (lambda value: isinstance(value, str) and value, "a string that is not empty, or None: one is made"),
    "priority": (lambda value: isinstance(value, int), "a whole number; the lower goes first"),
    "mask": (
        lambda value: value is None or callable(value),
        "a function from the tokens said so far to the ids of those that may be next",
    ),
    "max_tokens": COUNT,
}


@attrs.frozen
class RequestBuilder:
    """Checks what users ask for, and builds the requests that the scheduler takes.

    Args:
        model: the model, whose tokens and limits hold.
        num_logprobs: the most logprobs that a request may ask for.
        seed: for requests without one.
        slots: the adapters' slots, by name.
    """

    model: Model
    num_logprobs: int
    seed: int
    slots: Mapping[str, int]
    _eos_ids: tuple[int, ...] = attrs.field(init=False, repr=False)
    _scratch: SamplingTable = attrs.field(init=False, repr=False)
    _adapter_rule: Rule = attrs.field(init=False, repr=False)
    _written: list[SamplingParams] = attrs.field(factory=list, init=False, repr=False)  # the last that were

    @_eos_ids.default
    def _eos_ids_of_vocabulary(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens that are in its vocabulary: a configuration may name others."""
        ends, vocab = self.model.config.eos_token_ids, self.model.config.vocab_size
        if beyond := [token for token in ends if token >= vocab]:
            warnings.warn(
                f"{self.model!r}: its eos_token_id names {beyond}, beyond its {vocab} tokens, which ends nothing. "
                "Instead: the ids of its tokenizer, in generation_config.json.",
                stacklevel=5,  # whoever makes the engine
            )
        return tuple(token for token in ends if token < vocab)

    @_adapter_rule.default
    def _known_adapter(self) -> Rule:
        instead = "Engine(..., adapters={name: weft.load_adapter(model, folder)}): this one has none"
        if self.slots:
            instead = f"one of the engine's: {', '.join(map(repr, self.slots))}"
        return (lambda own: own is None or (isinstance(own, str) and own in self.slots)), instead

    @_scratch.default
    def _one_row(self) -> SamplingTable:
        return SamplingTable.zeros(1, self.model.config.vocab_size, MAX_BIASED, "cpu")

    def build(
        self,
        index: int,
        name: str,
        prompt: str | Sequence[int] | EmbedsPrompt,
        sampling: SamplingParams | None,
        *,
        max_tokens: int,
        priority: int,
        adapter: str | None,
        mask: Any,
        extras: Any,
    ) -> list[Request]:
        """Build request number `index` from the arguments of `Engine.add`: one request per completion.

        Raises:
            RequestError: it could never be served.
        """
        given = SamplingParams(temperature=0.0) if sampling is None else sampling
        call = f"engine.add(prompt, {given!r}, max_tokens={max_tokens!r}, id={name!r})"
        values = {"sampling": given, "id": name, "priority": priority, "mask": mask, "max_tokens": max_tokens}
        check_values(call, _REQUEST_RULES, values)
        check_values(call, {"adapter": self._adapter_rule}, {"adapter": adapter})
        check_sampling(call, self.model, given, self.num_logprobs)
        ids = tuple(encode_prompt(self.model, prompt, call))
        if EMBEDDED in ids:
            check_values(call, {"prompt_logprobs": _NO_LOGPROBS}, {"prompt_logprobs": given.prompt_logprobs})
        params = given.for_request(self._eos_ids, request_seed(self.seed, index))
        if [given] != self._written or given.logit_bias:  # a dict, which the user may have changed
            with blamed(call, "weft.SamplingParams of plain ints and floats"):
                # The step that admits the request does this on the rank that samples, when it cannot be refused.
                write_rows(self._scratch, [0], [params], [()], [()])
            self._written[:] = [given]
        most = min(max_tokens, self.model.config.max_position_embeddings - len(ids))
        slot, content = -1 if adapter is None else self.slots[adapter], None
        if isinstance(prompt, EmbedsPrompt):
            with blamed(call, "EmbedsPrompt(...) of dense tensors that can be read on the host"):
                content = read_content(prompt)
        with blamed(call, "extras={name: a dense tensor that can be read on the host}"):
            own, of_tokens = check_extras(call, self.model.functions, extras, len(ids))
            content = with_token_extras(content, self.model.functions.token_extras, of_tokens, len(ids))
        captured, policy = bool(self.model.functions.captures), self.model.functions.policy
        first = Request(name, ids, most, params, priority, slot, content, mask is not None, own, captured, policy)
        seeds = enumerate(sample_seeds(params.seed or 0, params.n)[1:], 1)
        samplings = ((f"{name}[{index}]", attrs.evolve(params, seed=seed)) for index, seed in seeds)
        return [first, *(attrs.evolve(first, id=id, sampling=own) for id, own in samplings)]


def encode_prompt(model: Model, prompt: Any, call: str, name: str = "the prompt") -> list[int]:
    """The token ids of a prompt.

    Args:
        name: the prompt's name in errors.

    Raises:
        RequestError: the prompt is empty, leaves no room to generate, or holds an id that is not a token; or its
            embeddings or positions do not fit.
    """
    limit, vocab, embeds = model.config.max_position_embeddings, model.config.vocab_size, None
    if isinstance(prompt, EmbedsPrompt):
        embeds, prompt = prompt, prompt.ids
    is_prompt = isinstance(prompt, str | list | tuple)
    ids = model.encode(prompt) if isinstance(prompt, str) else list(prompt) if is_prompt else []
    known = ids if embeds is None else [token for token in ids if token != EMBEDDED]
    are_tokens = {*map(type, known)} == {int} and min(known) >= 0 and max(known) < vocab  # a long prompt's fast way
    wrong = [] if are_tokens else [token for token in known if not is_int(token, 0, vocab - 1)]
    if not is_prompt:
        seen, instead = f"{name} is {prompt!r:.200}, a {type(prompt).__name__}", "a string or a list of token ids"
        if isinstance(prompt, Mapping) and "input_ids" in prompt:
            instead = 'its ["input_ids"]'  # what transformers' tokenizers and chat templates return
        elif hasattr(prompt, "tolist"):
            instead = "its .tolist()"
    elif not 0 < len(ids) < limit:
        seen = f"{name} has {len(ids)} tokens; the model's limit is {limit}, one of them to be generated"
        instead = f"a prompt of 1 to {limit - 1} tokens"
    elif wrong:
        seen, instead = f"{name} holds {wrong[0]!r:.200}", f"token ids are ints from 0 to {vocab - 1}"
        if isinstance(wrong[0], str):
            instead = "one prompt: a string or a list of token ids"
        elif isinstance(wrong[0], Mapping):
            instead = "model.encode_chat(messages), or weft.generate(model, [messages], chat=True)"
    else:
        if embeds is not None:
            embeds.check(call, model)
        return ids
    raise RequestError(call, seen, instead)


def check_sampling(call: str, model: Model, params: SamplingParams, num_logprobs: int) -> None:
    """Check sampling parameters against the model and the engine.

    Raises:
        RequestError: the model or the engine's step cannot do what they ask.
    """
    vocab = model.config.vocab_size
    most = min(num_logprobs, vocab)
    wanted = max(params.logprobs or 0, params.prompt_logprobs or 0)
    remedy = f"Engine(..., num_logprobs={wanted})" if wanted <= vocab else f"at most {vocab}, the tokens of the model"
    own: Rule = (lambda count: (count or 0) <= most), remedy
    no_tokenizer = "stop_token_ids=[...]: the checkpoint has no tokenizer"
    stop: Rule = (lambda texts: not texts or model.tokenizer is not None), no_tokenizer
    rules = {"logprobs": own, "prompt_logprobs": own, "stop": stop}
    check_values(call, rules, {name: getattr(params, name) for name in rules})
    params.check_tokens(vocab, MAX_BIASED)


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
            instead = f"int32 [{words}], a bit for each of {vocab_size} tokens; or their ids"
        else:
            bits = bits.cpu().contiguous()
            allowed = bits & _all(vocab_size)
            if (allowed & own.allowed_after(len(token_ids))).any():
                return bits.numpy().tobytes()
            seen, instead = "no token that is allowed", "at least one: the end-of-sequence token ends a request"
            if allowed.any():
                seen = "tokens that are all barred by the request's allowed_token_ids, bad_token_ids or min_tokens"
                instead = "at least one that they leave; a request that may end has min_tokens=0"
        raise RequestError(call, seen, instead)


def _ids(found: Any, vocab_size: int) -> set[int]:
    ids, most = set[int](), _MAX_REPEATS * vocab_size
    for count, token in enumerate(found):  # one after the other: an iterator may be endless
        is_token = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size
        if not is_token or count == most:
            many = f"more than {count} ids, where there are {vocab_size}"
            raise ValueError(many if is_token else f"{token!r} is not a token id from 0 to {vocab_size - 1}")
        ids.add(token)
    return ids


@functools.cache
def _all(vocab_size: int) -> Tensor:
    """The bits of all tokens; bits past the last token are 0."""
    whole = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
    if rest := vocab_size % 32:
        whole[-1] = (1 << rest) - 1
    return whole


def blame(error: BaseException, call: str, instead: str) -> RequestError:
    """Turn what user code raised for a request into that request's error; a RequestError stays as it is.

    Args:
        call, instead: of that error.

    Raises:
        BaseException: the error itself, if it is an interrupt or the like. A panic of a Rust extension is not an
            `Exception`, but counts as an error of the request.
    """
    if isinstance(error, RequestError):
        return error
    if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
        raise error
    blamed = RequestError(call, traceback.format_exception_only(error)[-1].strip(), instead)  # str(error) may raise too
    blamed.__cause__ = error
    return blamed


@contextmanager
def blamed(call: str, instead: str) -> Iterator[None]:
    """A context in which whatever is raised becomes the error of one request (`blame`)."""
    try:
        yield
    except BaseException as error:
        if (found := blame(error, call, instead)) is error:
            raise
        raise found from error
