"""`generate` with `SamplingParams`: against transformers' own loop, alone and in batches, in every
split and mode."""

from typing import Any

import attrs
import pytest
import torch

import weft
from weft.batches.sampling import SamplingParams
from weft.batches.sampling_rows import MAX_BIASED
from weft.errors import RequestError
from weft.proofs import assert_equal
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.model import Model
from weft.transforms.engine.requests.host_state import sample_seeds

PROMPTS = ["The function returns", "A list is", "In Python, "]


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def complete(
    demo: Model, sampling: Any, prompts: list[str] = PROMPTS, **options: Any
) -> list[weft.Completion]:
    return weft.generate(
        demo, prompts, **{"max_tokens": 24, "seed": 3, "graph": "none"} | options, sampling=sampling
    )


GREEDY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "repetition": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "bias": ({"logit_bias": {97: 2.5, 32: -1.0}}, {"sequence_bias": [[[97], 2.5], [[32], -1.0]]}),
    "bad tokens": ({"bad_token_ids": [32, 101]}, {"suppress_tokens": [32, 101]}),
    "both": (
        {"repetition_penalty": 1.2, "logit_bias": {97: 1.5}, "bad_token_ids": [116]},
        {"repetition_penalty": 1.2, "sequence_bias": [[[97], 1.5]], "suppress_tokens": [116]},
    ),
    "min tokens": (
        {"min_tokens": 9, "stop_token_ids": [101, 115]},
        {"min_new_tokens": 9, "eos_token_id": [101, 115]},
    ),
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_completions_are_those_of_transformers(demo: Model, theirs: Any, name: str) -> None:
    ours, options = GREEDY[name]
    for prompt in PROMPTS:
        ids = demo.encode(prompt)
        output_ids = theirs.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
            **{"eos_token_id": list(demo.config.eos_token_ids) or None} | options,
        )
        sampling = SamplingParams(temperature=0.0, **ours)
        [completion] = complete(demo, sampling, [prompt])
        assert completion.token_ids == output_ids[0, len(ids) :].tolist()


MIXED = [
    SamplingParams(
        temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seed=4
    ),
    SamplingParams(
        temperature=0.0,
        presence_penalty=0.7,
        frequency_penalty=0.2,
        min_tokens=3,
        stop_token_ids=[101],
    ),
    SamplingParams(temperature=1.2, logit_bias={32: -3.0}, bad_token_ids=[97], logprobs=2, seed=9),
]


@pytest.fixture(scope="module")
def mixed_alone(demo: Model) -> list[weft.Completion]:
    return [
        complete(demo, params, [prompt])[0] for prompt, params in zip(PROMPTS, MIXED, strict=True)
    ]


@pytest.mark.one_of(4, 2)
@pytest.mark.parametrize(
    "options",
    [
        {"graph": "full"},
        {"graph": "piecewise"},
        {"pipeline": 2},
        {"pipeline": 3, "graph": "full_and_piecewise"},
    ],
    ids=str,
)
def test_a_request_says_the_same_alone_in_company_and_in_every_way(
    demo: Model, mixed_alone: list[weft.Completion], options: dict[str, Any]
) -> None:
    together = complete(demo, MIXED, **options)
    for index, alone in enumerate(mixed_alone):
        assert together[index].token_ids == alone.token_ids
        assert together[index].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert together[index].finish_reason == alone.finish_reason
    backwards = complete(demo, MIXED[::-1], PROMPTS[::-1], **options)[::-1]
    assert [c.token_ids for c in backwards] == [c.token_ids for c in together]


def test_temperature_is_short_for_sampling(demo: Model) -> None:
    short = complete(demo, None, temperature=0.8)
    assert_equal("short", short, complete(demo, SamplingParams(temperature=0.8)))
    assert short != complete(demo, SamplingParams(temperature=0.8), seed=4)


def test_a_seed_in_sampling_is_the_requests_whatever_that_of_all(demo: Model) -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    first = complete(demo, params, PROMPTS[:1] * 2, seed=1)
    second = complete(demo, params, PROMPTS[:1], seed=2)
    assert first[0].token_ids == first[1].token_ids == second[0].token_ids


def test_a_stop_text_ends_a_request_and_its_text(demo: Model) -> None:
    [whole] = complete(demo, SamplingParams(temperature=0.0), PROMPTS[:1])
    assert whole.text is not None
    stop = whole.text[5:8]
    [cut] = complete(demo, SamplingParams(temperature=0.0, stop=["never this", stop]), PROMPTS[:1])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    [later] = complete(
        demo, SamplingParams(temperature=0.0, stop=[stop], min_tokens=20), PROMPTS[:1]
    )
    assert later.token_ids == whole.token_ids[: len(later.token_ids)]
    assert len(later.token_ids) >= 20
    assert later.text is not None
    assert stop in later.text, "one that was complete before ends nothing"


def test_a_stop_token_ends_a_request_and_eos_can_be_ignored(demo: Model) -> None:
    [whole] = complete(demo, SamplingParams(temperature=0.0), PROMPTS[:1])
    token = whole.token_ids[4]
    [cut] = complete(demo, SamplingParams(temperature=0.0, stop_token_ids=[token]), PROMPTS[:1])
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert cut.finish_reason == "stop"
    eos = attrs.evolve(demo, config=attrs.evolve(demo.config, eos_token_ids=(token,)))
    assert complete(eos, SamplingParams(temperature=0.0), PROMPTS[:1])[0].token_ids == cut.token_ids
    [on] = complete(eos, SamplingParams(temperature=0.0, ignore_eos=True), PROMPTS[:1])
    assert on.token_ids == whole.token_ids


def test_logprobs_of_the_likeliest(demo: Model) -> None:
    """Each request gets as many as it asks for; in a greedy one, the first is the chosen token."""
    sampling_params = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.0),
        MIXED[0],
    ]
    first, second, _ = complete(
        demo, [*sampling_params[:2], SamplingParams(temperature=1.0, seed=1, logprobs=0)]
    )
    assert second.top_logprobs is None
    assert first.top_logprobs is not None
    for token, logprob, likeliest in zip(
        first.token_ids, first.logprobs, first.top_logprobs, strict=True
    ):
        assert len(likeliest) == 3
        assert next(iter(likeliest)) == token
        assert likeliest[token] == pytest.approx(logprob, abs=1e-5)
        assert list(likeliest.values()) == sorted(likeliest.values(), reverse=True)


def test_logprobs_of_the_prompt_are_those_of_transformers(demo: Model, theirs: Any) -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2)
    for prompt, completion in zip(PROMPTS, complete(demo, sampling, max_tokens=2), strict=True):
        ids = demo.encode(prompt)
        said = theirs(torch.tensor([ids])).logits[0].detach().log_softmax(-1)
        assert completion.prompt_logprobs == pytest.approx(
            [float(said[i, token]) for i, token in enumerate(ids[1:])], abs=1e-4
        )
        assert completion.prompt_top_logprobs is not None
        for place, likeliest in enumerate(completion.prompt_top_logprobs):
            values, tokens = said[place].topk(2)
            assert set(likeliest) == set(tokens.tolist())
            assert sorted(likeliest.values(), reverse=True) == pytest.approx(
                values.tolist(), abs=1e-4
            )


SEVERAL = SamplingParams(temperature=1.0, seed=5, n=5, prompt_logprobs=0, logprobs=1)


@pytest.fixture(scope="module")
def several_alone(demo: Model) -> list[weft.Completion]:
    """The five completions of the first prompt, and one of the second, each by a call of its own."""
    one = [attrs.evolve(SEVERAL, n=1, seed=seed) for seed in sample_seeds(5, 5)]
    completions = [complete(demo, params, PROMPTS[:1]) for params in one] + [
        complete(demo, MIXED[0], PROMPTS[1:2])
    ]
    return [completion for [completion] in completions]


@pytest.mark.one_of(3, 2)
@pytest.mark.parametrize(
    "options", [{}, {"pipeline": 3}, {"graph": "full_and_piecewise", "pipeline": 2}], ids=str
)
def test_completions_of_one_prompt_each_have_a_seed_of_their_own(
    demo: Model, several_alone: list[weft.Completion], options: dict[str, Any]
) -> None:
    """Two prompts, five completions of the first: each is what it is alone, with its seed."""
    *several, last = complete(demo, [SEVERAL, MIXED[0]], PROMPTS[:2], **options)
    assert last.token_ids == several_alone[-1].token_ids
    assert len({tuple(c.token_ids) for c in several}) == 5
    for completion, alone in zip(several, several_alone[:-1], strict=True):
        assert completion.token_ids == alone.token_ids
        assert completion.text == alone.text
        assert completion.prompt_logprobs == pytest.approx(alone.prompt_logprobs, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"pipeline": 2}], ids=str)
def test_a_stream_has_the_tokens_and_texts_of_the_completions(
    demo: Model, options: dict[str, Any]
) -> None:
    params = attrs.evolve(MIXED[0], n=2)
    whole = complete(demo, params, **options)
    tokens: dict[tuple[str, int], list[int]] = {}
    texts: dict[tuple[str, int], str] = {}
    reasons: dict[tuple[str, int], str] = {}
    for output in weft.generate(
        demo, PROMPTS, max_tokens=24, seed=3, graph="none", sampling=params, stream=True
    ):
        key = output.id, output.index
        assert key not in reasons
        tokens[key] = [*tokens.get(key, []), *output.token_ids]
        texts[key] = texts.get(key, "") + (output.text or "")
        if output.finish_reason is not None:
            reasons[key] = output.finish_reason
    assert [tokens[key] for key in sorted(tokens)] == [c.token_ids for c in whole]
    assert [texts[key] for key in sorted(texts)] == [c.text for c in whole]
    assert [reasons[key] for key in sorted(reasons)] == [c.finish_reason for c in whole]


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "two temperatures": (
        SamplingParams(),
        {"temperature": 0.5},
        "beside sampling, temperature=0.5",
    ),
    "too few": ([SamplingParams()], {}, "instead: one SamplingParams, or a list of 3"),
    "no parameters": (5, {}, "sampling=5"),
    "a dict": ({"top_p": 1}, {}, "one SamplingParams, or a list of 3"),
    "of prompts": (SamplingParams(prompt_logprobs=10**6), {}, "saw: prompt_logprobs=1000000"),
    "no such token": (SamplingParams(bad_token_ids=[10**6]), {}, "bad_token_ids holds 1000000"),
    "more logprobs than tokens": (SamplingParams(logprobs=10**6), {}, "saw: logprobs=1000000"),
    "biases": (
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASED + 1), 1.0)),
        {},
        "logit_bias",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_generate_does_not_serve_is_refused(demo: Model, name: str) -> None:
    sampling, options, problem = REFUSED[name]
    with pytest.raises(RequestError) as error:
        complete(demo, sampling, **options)
    assert problem in str(error.value)


def test_a_stop_text_needs_a_tokenizer(demo: Model) -> None:
    mute = attrs.evolve(demo, tokenizer=None)
    with pytest.raises(RequestError, match="the checkpoint has no tokenizer"):
        weft.generate(mute, [[65]], max_tokens=2, sampling=SamplingParams(stop="a"))
