"""Sampling parameters of requests, each at its default or at any value that a model of the given
vocabulary can serve."""

from collections.abc import Mapping
from typing import Any

import attrs
from hypothesis import strategies as st

from weft.batches.sampling import SamplingParams

_CHOICES: dict[str, st.SearchStrategy[Any]] = {
    # 1000 is more than any drawn vocabulary has.
    "top_k": st.sampled_from((1, 2, 5, 1000)),
    "top_p": st.sampled_from((1e-3, 0.3, 0.9)),
    "min_p": st.sampled_from((0.01, 0.3, 1.0)),
    # On both sides of the default, which is neither to punish repetition nor to reward it.
    "repetition_penalty": st.sampled_from((0.7, 1.3)),
    "presence_penalty": st.sampled_from((-1.0, 0.5)),
    "frequency_penalty": st.sampled_from((-0.5, 1.5)),
    "min_tokens": st.integers(1, 4),
}
# The fields that `sampling_params` draws for each request.
ALWAYS = ("temperature", "seed", "stop_token_ids")
# The fields that do not reach the table of sampling parameters, each with the reason.
ON_HOST: Mapping[str, str] = {
    "bad_words": "becomes a mask of each step, or bad_token_ids",
    "stop": "ends a text, which the host has",
    "include_stop_str_in_output": "ends a text",
    "ignore_eos": "chooses the stop_token_ids of a request",
    "logprobs": "how many the host reads",
    "prompt_logprobs": "how many the host reads",
    "skip_special_tokens": "what is in a text",
    "detokenize": "whether there is a text",
    "n": "the number of requests",
}


def choices(vocab_size: int) -> dict[str, st.SearchStrategy[Any]]:
    """For each field on which a request's logits may depend, except those in `ALWAYS`, values other
    than the default."""
    tokens = _tokens(vocab_size)
    return _CHOICES | {
        "logit_bias": st.dictionaries(
            st.integers(0, vocab_size - 1), st.floats(-9, 9, width=32), max_size=4
        ),
        # Half of the vocabulary, of which `bad_token_ids`, and stop tokens barred by `min_tokens`,
        # each take at most a third: some token can always be drawn.
        "allowed_token_ids": tokens.map(lambda ids: [*ids, *range(vocab_size // 2)]),
        "bad_token_ids": tokens,
    }


def _tokens(vocab_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(
        st.integers(0, vocab_size - 1), min_size=1, max_size=vocab_size // 6, unique=True
    )


def fields_not_drawn(kind: type = SamplingParams) -> set[str]:
    """The fields that no strategy draws and that are not in `ON_HOST`."""
    return {field.name for field in attrs.fields(kind)} - {*choices(12), *ALWAYS, *ON_HOST}


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int, greedy: bool = True) -> SamplingParams:
    """A request's parameters, including its seed and its stop tokens.

    At most four tokens have a bias, and at least half of the tokens can always be drawn.

    Args:
        vocab_size: the number of token ids.
        greedy: whether some requests are greedy.
    """
    values = choices(vocab_size)
    names = draw(st.one_of(st.just([]), st.lists(st.sampled_from(sorted(values)), unique=True)))
    drawn = {name: draw(values[name]) for name in names}
    temperature = draw(st.sampled_from((0.0, 0.7, 1.0) if greedy else (0.7, 1.0, 1.5)))
    # All that a seed may be, so that a table that keeps fewer bits shows.
    seed = draw(st.integers(-(2**63), 2**63 - 1))
    return SamplingParams(
        temperature=temperature, seed=seed, stop_token_ids=draw(_tokens(vocab_size)), **drawn
    )
