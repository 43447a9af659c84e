"""What users ask for, checked, as requests that the scheduler takes."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from weft.arguments import is_int, kind_of
from weft.batch import EMBEDDED
from weft.errors import RequestError
from weft.sampling import SamplingParams
from weft.sampling_table import MAX_BIASED, SamplingTable, write_rows
from weft.stages.model import Model
from weft.transforms.engine.faults import blamed
from weft.transforms.engine.prompts import EmbedsPrompt, read_given
from weft.transforms.engine.requests import Request, request_seed


@attrs.frozen
class Intake:
    """Makes requests of one model.

    Args:
        model: whose tokens and limits.
        num_logprobs: the most that a request may ask for.
        seed: of requests that bring none.
        slots: of adapters, by name.
    """

    model: Model
    num_logprobs: int
    seed: int
    slots: Mapping[str, int]
    _ends: tuple[int, ...] = attrs.field(init=False, repr=False)
    _scratch: SamplingTable = attrs.field(init=False, repr=False)

    @_ends.default
    def _ends_of_vocabulary(self) -> tuple[int, ...]:
        """The model's end-of-sequence tokens that it can say: a configuration may name others."""
        ends, vocab = self.model.config.eos_token_ids, self.model.config.vocab_size
        if beyond := [token for token in ends if token >= vocab]:
            warnings.warn(
                f"{self.model!r}: its eos_token_id names {beyond}, beyond its {vocab} tokens, which ends nothing. "
                "Instead: the ids of its tokenizer, in generation_config.json.",
                stacklevel=5,  # whoever makes the engine
            )
        return tuple(token for token in ends if token < vocab)

    @_scratch.default
    def _one_row(self) -> SamplingTable:
        return SamplingTable.zeros(1, self.model.config.vocab_size, MAX_BIASED, "cpu")

    def request(
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
    ) -> Request:
        """What `Engine.add` was called with, as a request; `index` is its number.

        Raises:
            RequestError: it could never be served.
        """
        given = SamplingParams(temperature=0.0) if sampling is None else sampling
        call = f"engine.add(prompt, {given!r}, max_tokens={max_tokens!r}, id={name!r})"
        if not isinstance(given, SamplingParams):
            raise RequestError(call, f"sampling is {kind_of(given)}", "weft.SamplingParams(...), or None")
        if not isinstance(name, str) or not name:
            raise RequestError(call, f"id={name!r}", "a string that is not empty, or None: one is made")
        if not isinstance(priority, int):
            raise RequestError(call, f"priority={priority!r}", "a whole number; the lower goes first")
        if mask is not None and not callable(mask):
            instead = "a function from the tokens said so far to the ids of those that may be next"
            raise RequestError(call, f"mask is {kind_of(mask)}", instead)
        if not is_count(max_tokens):
            raise RequestError(call, f"max_tokens={max_tokens!r}", "a whole number >= 1")
        check_sampling(call, self.model, given, self.num_logprobs)
        ids = tuple(encode_prompt(self.model, prompt, call))
        if EMBEDDED in ids and given.prompt_logprobs is not None:
            seen = f"prompt_logprobs={given.prompt_logprobs!r} of a prompt with embeddings, which have none"
            raise RequestError(call, seen, "SamplingParams() without prompt_logprobs")
        if adapter is not None and not (isinstance(adapter, str) and adapter in self.slots):
            known = f"one of the engine's: {', '.join(map(repr, self.slots))}"
            none = "Engine(..., adapters={name: weft.load_adapter(model, folder)}): this one has none"
            raise RequestError(call, f"adapter={adapter!r}", known if self.slots else none)
        config = self.model.config
        params = given.for_request(self._ends, request_seed(self.seed, index))
        check_sampling(call, self.model, params, self.num_logprobs)
        with blamed(call, "weft.SamplingParams of plain ints and floats"):
            # As the step that admits it will, on the rank that samples; there it would be too late to refuse it.
            write_rows(self._scratch, [0], [params], [()], [()])
        most = min(max_tokens, config.max_position_embeddings - len(ids))
        slot, more = -1 if adapter is None else self.slots[adapter], None
        if isinstance(prompt, EmbedsPrompt):
            with blamed(call, "EmbedsPrompt(...) of dense tensors that can be read on the host"):
                more = read_given(prompt)
        return Request(name, ids, most, params, priority, slot, more, mask is not None)


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 1 on."""
    return is_int(value, 1)


def encode_prompt(model: Model, prompt: Any, call: str, name: str = "the prompt") -> list[int]:
    """Token ids of a prompt, which errors call by a name.

    Raises:
        RequestError: an empty one, one that leaves no room to generate, an id that is no token, or embeddings or
            positions that do not fit.
    """
    limit, vocab, embeds = model.config.max_position_embeddings, model.config.vocab_size, None
    if isinstance(prompt, EmbedsPrompt):
        embeds, prompt = prompt, prompt.ids
    if not isinstance(prompt, str | list | tuple):
        instead = "its .tolist()" if hasattr(prompt, "tolist") else "a string or a list of token ids"
        if isinstance(prompt, Mapping) and "input_ids" in prompt:
            instead = 'its ["input_ids"]'  # of what a tokenizer of transformers returns, or its chat template
        raise RequestError(call, f"{name} is {prompt!r:.200}, a {type(prompt).__name__}", instead)
    ids = model.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise RequestError(call, f"{name} is empty ({prompt!r})", "give at least one token to go on from")
    if len(ids) >= limit:
        seen = f"{name} has {len(ids)} tokens; the model's limit is {limit}, one of them to be generated"
        raise RequestError(call, seen, f"shorten it to {limit - 1} tokens")
    if any(isinstance(token, str) for token in ids):
        raise RequestError(call, f"{name} is a list of strings", "one prompt: a string or a list of token ids")
    known = ids if embeds is None else [t for t in ids if t != EMBEDDED]
    if wrong := [t for t in known if not is_int(t, 0, vocab - 1)]:
        instead = f"token ids are ints from 0 to {vocab - 1}"
        if isinstance(wrong[0], Mapping):
            instead = "a text; transformers' apply_chat_template(messages, tokenize=False, …) makes one of a chat"
        raise RequestError(call, f"{name} holds {wrong[0]!r:.200}", instead)
    if embeds is not None:
        embeds.check(call, model)
    return ids


def check_sampling(call: str, model: Model, params: SamplingParams, num_logprobs: int) -> None:
    """Refuse what the model or the engine's step cannot do.

    Raises:
        RequestError: it is so.
    """
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > model.config.vocab_size:
            raise RequestError(call, f"{name}={getattr(params, name)}", f"at most {model.config.vocab_size}")
    params.check_tokens(model.config.vocab_size, MAX_BIASED)
    if params.stop and model.tokenizer is None:
        raise RequestError(call, f"stop={params.stop!r}; the checkpoint has no tokenizer", "stop_token_ids=[...]")
    wanted = max(params.logprobs or 0, params.prompt_logprobs or 0)
    if wanted > num_logprobs:
        raise RequestError(call, f"logprobs of {wanted} tokens", f"Engine(..., num_logprobs={wanted})")
