"""Requests with odd or invalid values, and engines that must serve or refuse them."""

import random
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from tokenizers import decoders

from weft.ops.requests import EMBEDDED
from weft.ops.sampling.logits import pack_bits
from weft.proofs._strategies.engine.drafts import Drafts, lookups, models
from weft.proofs._strategies.engine.engines import (
    VOCABULARY,
    small_adapters,
    small_model,
    small_speculation,
)
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits
from weft.transforms.engine.requests.prompts import EmbedsPrompt

# The model's end-of-sequence tokens.
ENDS = (3, 7)
# A token that some tokenizers cannot decode.
MUTE = 9
# The kinds of a mask's answers. Those from "nothing" on are invalid.
ANSWERS = (
    "any",
    "ids",
    "bits",
    "few",
    "ends",
    "twice",
    "generator",
    "nothing",
    "raises",
    "a number",
    "beyond",
    "no token",
    "shape",
    "dtype",
    "sparse",
)


@attrs.frozen
class OddMask:
    """A mask with answers of several kinds, chosen by the tokens so far.

    Args:
        kinds: the kinds to choose from, of `ANSWERS`.
        seed: the seed of that choice and of the tokens allowed.
    """

    kinds: tuple[str, ...]
    seed: int

    def __call__(self, said: Sequence[int]) -> Any:
        chosen = random.Random(f"{self.seed} {list(said)}")
        kind = chosen.choice(self.kinds)
        ids = chosen.sample(range(VOCABULARY), chosen.randint(1, VOCABULARY))
        match kind:
            case "any":
                return None
            case "bits" | "sparse":
                # The top bit lies beyond the vocabulary, and the engine must ignore it.
                bits = pack_bits(ids, VOCABULARY) | torch.tensor(
                    [chosen.choice((0, -(2**31)))], dtype=torch.int32
                )
                if kind == "bits":
                    return bits
                return bits.to_sparse()
            case "few":
                return ids[:1]
            case "ends":
                return set(ENDS)
            case "twice":
                return ids + ids
            case "generator":
                return (token for token in ids)
            case "nothing":
                return chosen.choice(([], torch.zeros(1, dtype=torch.int32)))
            case "raises":
                raise chosen.choice(
                    (
                        KeyError("state"),
                        RecursionError(),
                        StopIteration(),
                        AssertionError("grammar"),
                    )
                )
            case "a number":
                return 3
            case "beyond":
                return [*ids, VOCABULARY]
            case "no token":
                return [*ids, chosen.choice(("a", None, True, -1, 1.0))]
            case "shape":
                return torch.ones(2, dtype=torch.int32)
            case "dtype":
                return torch.ones(VOCABULARY, dtype=torch.bool)
            case _:
                return ids


class Letters:
    """A tokenizer with one letter per token, which cannot decode token `mute`."""

    def __init__(self, mute: int | None) -> None:
        self.mute = mute
        self.decoder = decoders.Fuse()

    def id_to_token(self, token: int) -> str:
        """The token's letter.

        Raises:
            UnicodeError: it is token `mute`.
        """
        return self.decode([token], skip_special_tokens=True)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """The special tokens, of which there are none."""
        return {}

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:  # noqa: ARG002
        """The tokens' letters.

        Raises:
            UnicodeError: token `mute` is among them.
        """
        if self.mute in token_ids:
            raise UnicodeError(f"token {self.mute}")
        return "".join(chr(97 + token) for token in token_ids)


@attrs.frozen
class OddCall:
    """The arguments of a call of `Engine.add`, and the step before which it is made.

    Args:
        sampling: the arguments of `SamplingParams`, which may refuse them.
        id: the beginning of the request's id. None: the engine chooses the id.
        embeds: the scales of the embeddings that replace tokens, by position. Empty: the prompt is
            ids only.
        aborted: the step before which the request is aborted. None: never.
    """

    step: int
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    max_tokens: int
    id: str | None
    priority: int
    adapter: str | None
    mask: OddMask | None
    embeds: dict[int, float]
    aborted: int | None

    @property
    def prompt_input(self) -> Any:
        """The prompt as `add` takes it."""
        if not self.embeds:
            return self.prompt
        hidden = small_model().config.hidden_size
        rows = torch.zeros(len(self.prompt), hidden)
        for place, value in self.embeds.items():
            rows[place] = value * torch.linspace(-1, 1, hidden)
        return EmbedsPrompt(
            [EMBEDDED if i in self.embeds else t for i, t in enumerate(self.prompt)], rows
        )


@attrs.frozen
class OddLoad:
    """An engine's limits and options, and the calls of `Engine.add`.

    Args:
        ends: the model's end-of-sequence tokens, some of which may be beyond its vocabulary.
        decodes: which tokens the model's tokenizer decodes: "all", "most" (not `MUTE`), or
            "nothing" if there is no tokenizer.
    """

    limits: EngineLimits
    pipeline: int
    graph: str
    run_ahead: int
    drafts: Drafts | None
    ends: tuple[int, ...]
    decodes: str
    calls: tuple[OddCall, ...]

    def engine(self) -> Engine:
        """The engine, which serves `small_model()` with these ends and this tokenizer."""
        model: Any = small_model()
        if self.decodes == "nothing":
            tokenizer = None
        else:
            tokenizer = Letters(MUTE if self.decodes == "most" else None)
        config = attrs.evolve(model.config, eos_token_ids=self.ends)
        return Engine(
            attrs.evolve(model, config=config, tokenizer=tokenizer),
            self.limits,
            pipeline=self.pipeline,
            graph=self.graph,
            run_ahead=self.run_ahead,
            num_logprobs=2,
            seed=0,
            adapters=small_adapters(),
            speculation=None if self.drafts is None else small_speculation(self.drafts),
        )


_TOKEN = st.integers(0, VOCABULARY - 1)
_TOKENS = st.lists(_TOKEN, min_size=1, max_size=VOCABULARY, unique=True)
_OTHERS = [token for token in range(VOCABULARY) if token not in ENDS]
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    # 1e-46 and 1e-50 are 0 in float32, 0.999999999 is 1, and 10**37 is no int64.
    "temperature": st.sampled_from((0.0, 0, 1, 1.0, 1e-46, 1e-30, 0.01, 50.0, 1e38, 10**37)),
    "top_k": st.sampled_from((1, 2, 11, 12, 1000, 2**31 - 1)),
    "top_p": st.sampled_from((1e-320, 1e-50, 1e-9, 0.5, 0.999999999, 1)),
    "min_p": st.sampled_from((1e-320, 1e-9, 0.3, 1, 0.999999)),
    "repetition_penalty": st.sampled_from((1e-30, 0.01, 1.3, 2, 1e30)),
    "presence_penalty": st.sampled_from((-2, 2, 0.1)),
    "frequency_penalty": st.sampled_from((-2, 2, 0.1)),
    "logit_bias": st.dictionaries(
        _TOKEN, st.sampled_from((0, -100, 100, 10**30, -(10**30), 1e30, -1e30, 1e-30)), min_size=1
    ),
    "allowed_token_ids": st.one_of(
        st.lists(_TOKEN, min_size=1, max_size=2), _TOKENS, st.just(list(ENDS))
    ),
    "bad_token_ids": st.one_of(_TOKENS, st.just(_OTHERS)),
    "min_tokens": st.sampled_from((1, 2, 5, 1000, 2**31 - 1)),
    "stop_token_ids": _TOKENS,
    "stop": st.lists(st.text("abcdefghijkl", min_size=1, max_size=3), min_size=1, max_size=3),
    "ignore_eos": st.just(True),
    "seed": st.sampled_from((0, -(2**63), 2**63 - 1)),
    "logprobs": st.integers(0, 2),
    "prompt_logprobs": st.integers(0, 2),
    "n": st.sampled_from((2, 3)),
}


@st.composite
def odd_loads(draw: st.DrawFn) -> OddLoad:
    """Four to eight requests with any parameters, arbitrary masks, NaN or infinite embeddings, and
    odd ids, for an engine with few or many rows and pages."""
    page_size = draw(st.sampled_from((2, 4)))
    stages = draw(st.integers(1, 3))
    rows = draw(st.integers(1, 5))
    limits = EngineLimits(
        max_num_reqs=rows,
        max_num_tokens=-(-rows // stages) + draw(st.sampled_from((0, 3, 20))),
        # As many as `small_model()` has positions.
        max_model_len=24,
        page_size=page_size,
        num_pages=24 // page_size + draw(st.sampled_from((0, 1, 3, 30))),
        mixed=draw(st.booleans()),
    )
    return OddLoad(
        limits,
        stages,
        draw(st.sampled_from(("none", "none", "none", "full"))),
        draw(st.integers(0, 3)),
        draw(st.one_of(st.none(), lookups(), models())),
        # 99 is beyond the vocabulary.
        draw(st.sampled_from(((), ENDS, (*ENDS, 99)))),
        draw(st.sampled_from(("all", "most", "nothing"))),
        tuple(draw(_calls()) for _ in range(draw(st.integers(4, 8)))),
    )


# By theme: the kinds of answers that a request's mask may give, and the parameters that it may set.
# The first two themes are those in which mask and parameters, or parameters alone, may leave no
# token: at random they would seldom come together.
_THEMES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a mask, and parameters that bar": (
        ("few", "ends", "ids"),
        ("allowed_token_ids", "min_tokens", "bad_token_ids"),
    ),
    "parameters that bar": (
        (),
        ("bad_token_ids", "min_tokens", "stop_token_ids", "allowed_token_ids"),
    ),
    "a mask": (ANSWERS, ("temperature", "n", "prompt_logprobs", "seed")),
    "any parameters": ((), tuple(_FIELDS)),
    "anything": (ANSWERS, tuple(_FIELDS)),
}


@st.composite
def _calls(draw: st.DrawFn) -> OddCall:
    kinds, names = _THEMES[draw(st.sampled_from(sorted(_THEMES)))]
    prompt = tuple(draw(st.lists(_TOKEN, min_size=1, max_size=8)))
    named = draw(st.lists(st.sampled_from(sorted(names)), unique=True, max_size=5))
    if kinds:
        answers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    else:
        answers = []
    places = st.integers(0, len(prompt) - 1)
    # 1e30 is finite, and overflows when a norm squares it.
    values = st.sampled_from((1.0, 0.0, 100.0, 1e30, float("inf"), float("nan")))
    embeds = draw(
        st.one_of(
            st.just({}), st.just({}), st.just({}), st.dictionaries(places, values, max_size=3)
        )
    )
    step = draw(st.integers(0, 6))
    return OddCall(
        step,
        prompt,
        {"temperature": 1.0} | {name: draw(_FIELDS[name]) for name in named},
        # 10**9 is more than the model has positions, which then end the completion.
        draw(st.sampled_from((5, 2, 1, 9, 10**9))),
        # UTF-8 has no lone surrogate, and "x[1]" looks like the second completion of "x".
        draw(st.sampled_from((None, None, "x", "\ud800", "x[1]"))),
        # -(10**30) is no int64, and True is an int for Python.
        draw(st.sampled_from((0, 0, 1, -(10**30), True))),
        draw(st.sampled_from((None, None, *small_adapters()))),
        OddMask(tuple(answers), draw(st.integers(0, 99))) if answers else None,
        embeds,
        draw(st.one_of(st.none(), st.none(), st.none(), st.integers(step + 1, step + 6))),
    )
