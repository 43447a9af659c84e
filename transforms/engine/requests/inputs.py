"""Inputs: checks users' prompts and sampling parameters, and turns them into requests."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from weft.arguments.checks import COUNT, Rule, check_values, is_int
from weft.batches.sampling import SamplingParams, check_tokens, for_request, is_text
from weft.batches.sampling_rows import MAX_BIASED, write_rows
from weft.errors import RequestError
from weft.ops.requests import EMBEDDED
from weft.ops.sampling.table import SamplingTable
from weft.stages.custom.functions import caching_policy
from weft.stages.model import Model
from weft.transforms.engine.requests.host_state import Request, request_seed, sample_seeds
from weft.transforms.engine.requests.masks import Mask, blamed, without_bad_words
from weft.transforms.engine.requests.prompts import (
    EmbedsPrompt,
    check_embeds,
    check_extras,
    ids_of,
    read_content,
    with_token_extras,
)

_GREEDY = SamplingParams(temperature=0.0)
_SALT: Rule = is_text, "a string"
_NO_LOGPROBS: Rule = (
    (lambda prompt_logprobs: prompt_logprobs is None),
    "SamplingParams() without prompt_logprobs: embeddings have none",
)
_REQUEST_RULES: dict[str, Rule] = {
    "sampling": (SamplingParams, "weft.SamplingParams(...), or None"),
    "id": (
        lambda value: isinstance(value, str) and value,
        "a string that is not empty, or None: one is made",
    ),
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
        model: the model, whose vocabulary and limits apply.
        num_logprobs: the most logprobs that a request may ask for.
        seed: the seed for requests that bring none.
        slots: the adapters' slots, by name.
        prefix_caching: whether requests share pages of equal prefixes.
    """

    model: Model
    num_logprobs: int
    seed: int
    slots: Mapping[str, int]
    prefix_caching: bool = True
    eos_ids: tuple[int, ...] = attrs.field(init=False, repr=False)
    _scratch: SamplingTable = attrs.field(init=False, repr=False)
    _adapter_rule: Rule = attrs.field(init=False, repr=False)
    # The last parameters that were checked, so that equal ones, which most requests have, are not
    # checked again.
    _checked: list[SamplingParams] = attrs.field(factory=list, init=False, repr=False)

    @eos_ids.default
    def _eos_ids_of_vocabulary(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens that are in its vocabulary. A configuration may name
        others, which warn."""
        ends = self.model.config.eos_token_ids
        vocab = self.model.config.vocab_size
        if beyond := [token for token in ends if token >= vocab]:
            warnings.warn(
                f"{self.model!r}: its eos_token_id names {beyond}, beyond its {vocab} tokens, which"
                " ends nothing. Instead: the ids of its tokenizer, in generation_config.json.",
                stacklevel=5,  # the caller that makes the engine
            )
        return tuple(token for token in ends if token < vocab)

    @_adapter_rule.default
    def _known_adapter(self) -> Rule:
        instead = (
            "Engine(..., adapters={name: weft.load_adapter(model, folder)}): this one has none"
        )
        if self.slots:
            instead = f"one of the engine's: {', '.join(map(repr, self.slots))}"
        return (
            lambda name: name is None or (isinstance(name, str) and name in self.slots)
        ), instead

    @_scratch.default
    def _one_row(self) -> SamplingTable:
        return SamplingTable.zeros(1, self.model.config.vocab_size, MAX_BIASED, "cpu")

    def build(
        self,
        call: str,
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
        cache_salt: Any = "",
    ) -> tuple[list[Request], Mask | None]:
        """Build request number `index` from the arguments of `Engine.add`; returns one request per
        completion, and their mask.

        Raises:
            RequestError: it could never be served.
        """
        if sampling is None:
            sampling_params = _GREEDY
        else:
            sampling_params = sampling
        values = {
            "sampling": sampling_params,
            "id": name,
            "priority": priority,
            "mask": mask,
            "max_tokens": max_tokens,
        }
        check_values(call, _REQUEST_RULES, values)
        own_rules = {"adapter": self._adapter_rule, "cache_salt": _SALT}
        check_values(call, own_rules, {"adapter": adapter, "cache_salt": cache_salt})
        is_known = self._is_known(sampling_params)
        if not is_known:
            check_sampling(call, self.model, sampling_params, self.num_logprobs)
        ids = tuple(encode_prompt(self.model, prompt, call))
        if EMBEDDED in ids:
            check_values(
                call,
                {"prompt_logprobs": _NO_LOGPROBS},
                {"prompt_logprobs": sampling_params.prompt_logprobs},
            )
        params = with_all_logprobs(sampling_params, self.model.config.vocab_size)
        if sampling_params.bad_words:
            params, mask = without_bad_words(call, self.model, params, mask)
        params = for_request(params, self.eos_ids, request_seed(self.seed, index))
        if not is_known:
            with blamed(call, "weft.SamplingParams of plain ints and floats"):
                # A trial run: the step that admits the request writes these values on the rank that
                # samples, too late to refuse the request.
                write_rows(self._scratch, [0], [params], [()], [()])
            self._checked[:] = [sampling_params]
        most = min(max_tokens, self.model.config.max_position_embeddings - len(ids))
        if adapter is None:
            slot = -1
        else:
            slot = self.slots[adapter]
        content = None
        if isinstance(prompt, EmbedsPrompt):
            with blamed(call, "EmbedsPrompt(...) of dense tensors that can be read on the host"):
                content = read_content(prompt)
        with blamed(call, "extras={name: a dense tensor that can be read on the host}"):
            request_extras, of_tokens = check_extras(call, self.model.functions, extras, len(ids))
            content = with_token_extras(
                content, self.model.functions.token_extras, of_tokens, len(ids)
            )
        captured = bool(self.model.functions.captures)
        policy = caching_policy(self.model.functions)
        if not self.prefix_caching:
            policy = "none"
        more = content, mask is not None, request_extras, captured, policy, cache_salt
        first = Request(name, ids, most, params, priority, slot, *more)
        seeds = enumerate(sample_seeds(params.seed or 0, params.n)[1:], 1)
        samplings = ((f"{name}[{index}]", attrs.evolve(params, seed=seed)) for index, seed in seeds)
        return [
            first,
            *(
                attrs.evolve(first, id=id, sampling=completion_params)
                for id, completion_params in samplings
            ),
        ], mask

    def _is_known(self, sampling_params: SamplingParams) -> bool:
        """Whether equal parameters were checked last; never if they hold a dict, which the user may
        have changed since."""
        return (
            bool(self._checked)
            and not sampling_params.logit_bias
            and sampling_params == self._checked[0]
        )


def call_of_add(sampling: Any, max_tokens: Any, name: Any) -> str:
    """A call of `Engine.add` as text, for errors."""
    if sampling is None:
        sampling_text = ""
    else:
        sampling_text = f"{sampling!r}, "
    return f"engine.add(prompt, {sampling_text}max_tokens={max_tokens!r}, id={name!r})"


def encode_prompt(model: Model, prompt: Any, call: str, name: str = "the prompt") -> list[int]:
    """The token ids of a prompt.

    Args:
        name: the prompt's name in errors.

    Raises:
        RequestError: the prompt is empty, leaves no room to generate, or holds an id that is not a
            token; or its embeddings or positions do not fit.
    """
    limit = model.config.max_position_embeddings
    vocab = model.config.vocab_size
    embeds = None
    if isinstance(prompt, EmbedsPrompt):
        embeds = prompt
        prompt = ids_of(prompt)
    is_prompt = isinstance(prompt, str | list | tuple)
    ids = model.encode(prompt) if isinstance(prompt, str) else list(prompt) if is_prompt else []
    token_ids = ids if embeds is None else [token for token in ids if token != EMBEDDED]
    # The fast path: a long prompt's tokens are checked as a whole, and one by one only if that
    # fails.
    # By type, not `isinstance`: True and False are ints, but no tokens.
    are_tokens = {*map(type, token_ids)} == {int} and min(token_ids) >= 0 and max(token_ids) < vocab
    wrong = [] if are_tokens else [token for token in token_ids if not is_int(token, 0, vocab - 1)]
    if not is_prompt:
        problem = f"{name} is {prompt!r:.200}, a {type(prompt).__name__}"
        instead = "a string or a list of token ids"
        if isinstance(prompt, Mapping) and "input_ids" in prompt:
            instead = 'its ["input_ids"]'  # what transformers' tokenizers and chat templates return
        elif hasattr(prompt, "tolist"):
            instead = "its .tolist()"
    elif not 0 < len(ids) < limit:
        problem = (
            f"{name} has {len(ids)} tokens; the model's limit is {limit}, one of them to be"
            " generated"
        )
        instead = f"a prompt of 1 to {limit - 1} tokens"
    elif wrong:
        problem = f"{name} holds {wrong[0]!r:.200}"
        instead = f"token ids are ints from 0 to {vocab - 1}"
        if isinstance(wrong[0], str):
            instead = "one prompt: a string or a list of token ids"
        elif isinstance(wrong[0], Mapping):
            instead = "model.encode_chat(messages), or weft.generate(model, [messages], chat=True)"
    else:
        if embeds is not None:
            check_embeds(embeds, call, model)
        return ids
    raise RequestError(call, problem, instead)


def check_sampling(call: str, model: Model, params: SamplingParams, num_logprobs: int) -> None:
    """Check sampling parameters against the model and the engine.

    Raises:
        RequestError: the model or the engine's step does not support the parameters.
    """
    vocab = model.config.vocab_size
    most = min(num_logprobs, vocab)
    num_requested = most_logprobs(params, vocab)
    if num_requested <= vocab:
        remedy = f"Engine(..., num_logprobs={num_requested})"
    else:
        remedy = f"at most {vocab}, the tokens of the model"
    logprobs_rule: Rule = (lambda count: (vocab if count == -1 else count or 0) <= most), remedy

    def by_tokens(instead: str) -> Rule:
        no_tokenizer = f"{instead}=[...]: the checkpoint has no tokenizer"
        return (lambda texts: not texts or model.tokenizer is not None), no_tokenizer

    rules = {"logprobs": logprobs_rule, "prompt_logprobs": logprobs_rule}
    rules |= {"stop": by_tokens("stop_token_ids"), "bad_words": by_tokens("bad_token_ids")}
    check_values(call, rules, {name: getattr(params, name) for name in rules})
    check_tokens(params, vocab, MAX_BIASED)


def most_logprobs(params: SamplingParams, vocab_size: int) -> int:
    """The largest number of top logprobs that a request asks for; -1 counts as the whole
    vocabulary."""
    counts = (params.logprobs or 0, params.prompt_logprobs or 0)
    if -1 in counts:
        return vocab_size
    return max(counts)


def with_all_logprobs(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """The parameters with -1 replaced by the size of the vocabulary."""
    counts = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    changed: dict[str, Any] = {name: vocab_size for name, count in counts.items() if count == -1}
    if changed:
        return attrs.evolve(params, **changed)
    return params


def each_rule(kind: Any, count: int, instead: str) -> Rule:
    """The rule for an argument per prompt or sequence: one value for all of them, or a list of
    `count` values.

    Args:
        kind: the type of a value.
        instead: the error's remedy, with {} for the count.
    """

    def fits(value: Any) -> bool:
        is_list = isinstance(value, list | tuple) and len(value) == count
        return isinstance(value, kind) or (
            is_list and all(isinstance(item, kind) for item in value)
        )

    return fits, instead.format(count)


def one_each(value: Any, count: int) -> list[Any]:
    """The values of an argument that `each_rule` has checked, one for each prompt or sequence."""
    if isinstance(value, list | tuple):
        return list(value)
    return [value] * count
