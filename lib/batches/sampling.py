"""`SamplingParams`: how a request's tokens are sampled and what ends it, checked on the host."""

import copy
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from weft.arguments.checks import is_int, is_number, names_arguments
from weft.arguments.equivalents import SAMPLING
from weft.errors import RequestError

_HALVES = re.compile("[\ud800-\udfff]")
_LARGEST = 1e30
# The largest product of a bias and a penalty: it leaves room in float32 for the logit.
_LARGEST_PRODUCT = 1e37
_MOST_COMPLETIONS = 10_000
# Token ids are below this, and so no vocabulary is larger.
_MOST_TOKENS = 2**31


def _as_tuple(value: Any) -> Any:
    """A collection as a tuple, and a string as a tuple of one. Other values are returned unchanged,
    for the checks to refuse."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        return tuple(value)
    return value


def _as_dict(value: Any) -> Any:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    return value


def _is_none(value: Any) -> bool:
    return value is None


def _as_top_k(value: Any) -> Any:
    """vLLM takes -1 as well as 0 for all tokens."""
    if is_int(value, -1, -1):
        return 0
    return value


@names_arguments(**SAMPLING)
@attrs.frozen(kw_only=True, repr=False)
class SamplingParams:
    """How a request's tokens are chosen, and what ends it. Names and defaults are those of vLLM,
    except the default of `temperature`.

    Args:
        temperature: divides the logits; 0 is greedy. If it is not given, the request is greedy, and
            arguments that only affect random draws are refused: `top_k`, `top_p`, `min_p`, `n`,
            `seed`.
        top_k: draw from this many of the likeliest tokens (and those that tie with the last); 0 and
            -1: all.
        top_p: draw from the smallest set of the likeliest tokens that together have this
            probability (and those that tie with the last).
        min_p: draw from tokens whose probability is at least this fraction of the likeliest
            token's; 0: all.
        repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens
            in the prompt or the completion.
        presence_penalty: subtracted from the logits of tokens in the completion.
        frequency_penalty: subtracted from the logits of tokens in the completion, once for each
            occurrence.
        logit_bias: a number for each token id, added to that token's logit.
        allowed_token_ids: only these tokens are drawn; None: all are allowed.
        bad_token_ids: tokens that are never drawn.
        bad_words: texts whose token sequences, with or without a leading space, are never drawn. If
            a text has several tokens, each token of the request waits until the host has read the
            one before, and the request has no drafts.
        min_tokens: until it has this many tokens, a request draws no token that would end it, and a
            stop text does not end it.
        stop_token_ids: tokens that end the request, in addition to the model's own.
        stop: texts that end the request; the one that begins first in its text wins.
        include_stop_str_in_output: whether the completion includes the stop text or token that
            ended it.
        ignore_eos: whether to continue after the model's end-of-sequence tokens.
        seed: a whole number from -2**63 to 2**63 - 1. It and a token's position determine what is
            drawn. None: a fresh seed.
        logprobs: return the logprobs of this many of the likeliest tokens, and the rank of the
            chosen one; -1: of all tokens; None: only the logprob of the chosen one.
        prompt_logprobs: the same for each token of the prompt.
        skip_special_tokens: whether to leave special tokens out of the text.
        detokenize: whether the completion has a text. False saves time on the host.
        n: the number of completions of the prompt, each with its own seed; at most 10,000.

    Raises:
        RequestError: a value is invalid for every request.

    >>> SamplingParams(top_p=0)
    Traceback (most recent call last):
        ...
    weft.errors.RequestError: SamplingParams(top_p=0)
      saw: top_p=0
      instead: a number > 0 and <= 1; 1 keeps all
    """

    # None until `__attrs_post_init__` has checked all fields, so that it can tell a temperature of
    # 0 from none; then 0.0.
    temperature: float = attrs.field(default=None)
    top_k: int = attrs.field(default=0, converter=_as_top_k)
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_as_dict)
    allowed_token_ids: Sequence[int] | None = attrs.field(default=None, converter=_as_tuple)
    bad_token_ids: Sequence[int] = attrs.field(default=(), converter=_as_tuple)
    bad_words: str | Sequence[str] = attrs.field(default=(), converter=_as_tuple)
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = attrs.field(default=(), converter=_as_tuple)
    stop: str | Sequence[str] = attrs.field(default=(), converter=_as_tuple)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = 1

    def __attrs_post_init__(self) -> None:
        if fault := self._fault():
            raise RequestError(repr(self), *fault)
        if _is_none(self.temperature):
            object.__setattr__(self, "temperature", 0.0)

    def _fault(self) -> tuple[str, str] | None:
        """The first field, or pair of fields, that is invalid for every request, and what to write
        instead."""
        for name, default, holds, instead in _checks():
            value = getattr(self, name)
            # A default is valid, and most fields hold the default object itself.
            if value is not default and not holds(value):
                return f"{name}={value!r}", instead
        # A greedy request would ignore these without a word.
        if _is_none(self.temperature) and (drawn := self._only_drawn()):
            problem = f"{drawn}, which changes nothing of a greedy request, and no temperature"
            return (
                problem,
                (
                    "temperature=1.0, or another at which to draw; temperature=0 to be greedy all"
                    " the same"
                ),
            )
        if self.stop and not self.detokenize:
            return (
                "stop texts, and detokenize=False",
                "stop_token_ids=[...]: a completion without text has no such end",
            )
        if fault := self._all_barred(_MOST_TOKENS):
            return fault
        factor = max(self.repetition_penalty, 1 / self.repetition_penalty)
        if max(map(abs, self.logit_bias.values()), default=0) * factor > _LARGEST_PRODUCT:
            problem = (
                f"logit_bias and repetition_penalty={self.repetition_penalty!r}, whose product"
                " float32 does not hold"
            )
            return problem, "a smaller bias: one of 1000 outweighs any logit"
        return None

    def _only_drawn(self) -> str:
        """The first argument that matters only where tokens are drawn, as it was written; empty if
        there is none."""
        names = [name for name, default in _DRAWN.items() if getattr(self, name) != default]
        if names:
            return f"{names[0]}={getattr(self, names[0])!r}"
        return ""

    def __repr__(self) -> str:
        """The call that makes it, with the arguments that differ from the defaults. The temperature
        of a greedy request is left out, unless other arguments would be refused without one."""
        changed: list[str] = []
        for name, default in _defaults():
            value = getattr(self, name)
            if value is not default and repr(value) != repr(
                default
            ):  # by their repr: True is not 1
                changed.append(f"{name}={value!r}")
        drawn = self._only_drawn()
        if changed[:1] == ["temperature=0.0"] and (
            not drawn or drawn.startswith("seed=")
        ):  # an engine gives any a seed
            del changed[0]
        return f"SamplingParams({', '.join(changed)})"

    def _token_fault(self, vocab_size: int, most_biased: int) -> tuple[str, str] | None:
        for name in ("logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            if wrong := [token for token in getattr(self, name) or () if token >= vocab_size]:
                return (
                    f"{name} holds {wrong[0]}",
                    f"token ids of this model go from 0 to {vocab_size - 1}",
                )
        if (count := len(self.logit_bias)) > most_biased:
            problem = f"{count} tokens in logit_bias; the state holds {most_biased} a request"
            return problem, f"State.zeros(..., max_biased={count})"
        return self._all_barred(vocab_size)

    def _all_barred(self, vocab_size: int) -> tuple[str, str] | None:
        """The fault if none of the `vocab_size` tokens can be drawn; None if one can."""
        bars = {*self.bad_token_ids, *(self.stop_token_ids if self.min_tokens else ())}
        allowed = self.allowed_token_ids
        if allowed is None:
            left = vocab_size - len(bars)
        else:
            left = len(set(allowed) - bars)
        if left < 1:
            if self.min_tokens:
                ends = f", those that end a request by min_tokens={self.min_tokens}"
            else:
                ends = ""
            problem = f"all {vocab_size if allowed is None else 'allowed'} tokens barred{ends}"
            if self.min_tokens:
                return (
                    problem,
                    "leave one that can be drawn; min_tokens bars those that end a request",
                )
            return problem, "allow one that is not in bad_token_ids"
        return None


def for_request(params: SamplingParams, eos_token_ids: Iterable[int], seed: int) -> SamplingParams:
    """These parameters for one request: with all tokens that end it in `stop_token_ids`, and
    with a seed.

    Args:
        eos_token_ids: the model's end-of-sequence tokens.
        seed: the seed to use if these parameters have none.

    Raises:
        RequestError: no token can be drawn, because `min_tokens` bars all that are left: they
            would end the request.
    """
    ends = () if params.ignore_eos else tuple(eos_token_ids)
    stops = tuple(dict.fromkeys((*params.stop_token_ids, *ends)))
    seed = seed if params.seed is None else params.seed
    if params.logit_bias:
        # A dict may have changed since it was checked, so let `__init__` check it again.
        return attrs.evolve(params, stop_token_ids=stops, seed=seed)
    # Without a dict all fields are immutable and checked: a copy costs less than `evolve`.
    params = copy.copy(params)
    for name, value in (("stop_token_ids", stops), ("seed", seed), ("logit_bias", {})):
        object.__setattr__(params, name, value)
    if fault := params._all_barred(_MOST_TOKENS):
        raise RequestError(repr(params), *fault)
    return params


def check_tokens(params: SamplingParams, vocab_size: int, most_biased: int) -> None:
    """Raise RequestError if the model does not have a token, if there are more biases than a
    table holds, or if no token can be drawn."""
    if fault := params._token_fault(vocab_size, most_biased):
        raise RequestError(repr(params), *fault)


def is_text(value: Any) -> bool:
    """Whether a value is a text without unpaired surrogates, which have no UTF-8 form."""
    return isinstance(value, str) and _HALVES.search(value) is None


def _is_count(value: Any) -> bool:
    return is_int(value, 0, _MOST_TOKENS - 1)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_count, value))


def _are_biases(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_count(token) and is_number(bias, -_LARGEST, _LARGEST) for token, bias in value.items()
    )


_TOKENS = "a list of token ids"
_LOGPROBS = (
    lambda x: x is None or _is_count(x) or is_int(x, -1, -1),
    "a whole number >= 0, -1 for all, or None",
)
_TEXTS = (
    lambda x: isinstance(x, tuple) and all(is_text(s) and s for s in x),
    "texts that are not empty",
)
_BOOL = (lambda x: isinstance(x, bool), "True or False")
_PENALTY = (lambda x: is_number(x, -2, 2), "a number from -2 to 2; 0 changes nothing")
# For each field, the condition on its value, and the text of the error if it does not hold.
CHECKS: dict[str, tuple[Any, str]] = {
    "temperature": (
        lambda x: x is None or is_number(x, 0, 1e38),
        "a finite number >= 0; 0 is greedy",
    ),
    "top_k": (_is_count, "a whole number >= 0; 0 keeps all"),
    "top_p": (lambda x: is_number(x, 0, 1) and x > 0, "a number > 0 and <= 1; 1 keeps all"),
    "min_p": (lambda x: is_number(x, 0, 1), "a number from 0 to 1; 0 keeps all"),
    "repetition_penalty": (
        lambda x: is_number(x, 1 / _LARGEST, _LARGEST),
        "a number > 0; 1 changes nothing",
    ),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": (_are_biases, "a dict of finite numbers by token ids"),
    "allowed_token_ids": (
        lambda x: x is None or (_are_tokens(x) and x),
        f"{_TOKENS}, at least one; None allows all",
    ),
    "bad_token_ids": (_are_tokens, _TOKENS),
    "min_tokens": (_is_count, "a whole number >= 0"),
    "stop_token_ids": (_are_tokens, _TOKENS),
    **dict.fromkeys(("bad_words", "stop"), _TEXTS),
    **dict.fromkeys(
        ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"), _BOOL
    ),
    "seed": (
        lambda x: x is None or is_int(x, -(2**63), 2**63 - 1),
        "a whole number from -2**63 to 2**63 - 1, or None",
    ),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "n": (
        lambda x: is_int(x, 1, _MOST_COMPLETIONS),
        f"a whole number from 1 to {_MOST_COMPLETIONS}",
    ),
}


@functools.cache
def _checks() -> tuple[tuple[str, Any, Any, str], ...]:
    """For each field its name, its default (which is valid), the condition, and the text."""
    defaults = dict(_defaults())
    return tuple(
        (name, defaults[name], holds, instead) for name, (holds, instead) in CHECKS.items()
    )


@functools.cache
def _defaults() -> tuple[tuple[str, Any], ...]:
    """The name of each field, and its default."""
    fields = attrs.fields(SamplingParams)
    return tuple(
        (field.name, {} if field.name == "logit_bias" else field.default) for field in fields
    )


# The arguments that do not change the tokens of a greedy request, with their defaults.
_DRAWN = {"top_k": 0, "top_p": 1, "min_p": 0, "n": 1, "seed": None}
