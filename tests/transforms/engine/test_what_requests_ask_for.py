"""What a request may ask for besides its tokens: words that it never draws, the text of its end,
ranks, times; and what it shares with others. The oracles are transformers' own loop, and the
logprobs of all tokens."""

import math
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_detokenizing import KINDS, prompt_of
from tokenizers import Tokenizer

import weft
from weft.batches.sampling import SamplingParams
from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.model import Model
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.detokenizing import special_ids
from weft.transforms.engine.generate import token_texts
from weft.transforms.engine.requests.host_state import Request
from weft.transforms.engine.steps.results import StepResult

PROMPTS = ["The function returns", "A list is", "In Python, "]


def complete(
    demo: Model, sampling: Any, prompts: list[str] = PROMPTS, **options: Any
) -> list[weft.Completion]:
    return weft.generate(
        demo, prompts, **{"max_tokens": 24, "graph": "none"} | options, sampling=sampling
    )


# Words
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def plain(demo: Model) -> list[weft.Completion]:
    return complete(demo, None)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    "options", [{}, {"graph": "full"}, {"pipeline": 2, "graph": "piecewise"}], ids=str
)
def test_bad_words_are_never_drawn_as_transformers_never_draws_them(
    demo: Model, theirs: Any, plain: list[weft.Completion], options: dict[str, Any]
) -> None:
    """Words of one token and of several, in batches with others."""
    assert demo.tokenizer is not None
    words = [
        [completion.text[2:5], completion.text[9:10]] for completion in plain if completion.text
    ]
    sampling = [SamplingParams(bad_words=bad_words) for bad_words in words]
    completions = complete(demo, sampling, **options)
    for prompt, bad_words, completion, before in zip(
        PROMPTS, words, completions, plain, strict=True
    ):
        texts = [text for word in bad_words for text in (word, " " + word.lstrip())]
        barred = [demo.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        assert {len(ids) > 1 for ids in barred} == {True, False}, "one token, and several"
        ids = demo.encode(prompt)
        output_ids = theirs.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=24,
            pad_token_id=0,
            bad_words_ids=barred,
            eos_token_id=list(demo.config.eos_token_ids) or None,
        )
        assert completion.token_ids == output_ids[0, len(ids) :].tolist()
        assert completion.token_ids != before.token_ids


def test_bad_words_narrow_a_mask(demo: Model, plain: list[weft.Completion]) -> None:
    """A mask of ids, one of bits, and one that allows any token."""
    first = plain[0].token_ids
    word = demo.decode(first[1:3])
    assert word is not None
    allowed = {*first, 120, 121}
    bits = torch.zeros(-(-demo.config.vocab_size // 32) * 32, dtype=torch.bool)
    bits[list(allowed)] = True
    packed = (bits.view(-1, 32).long() << torch.arange(32)).sum(1).to(torch.int32)
    said = []
    for mask in (lambda _: allowed, lambda _: iter(allowed), lambda _: packed, lambda _: None):
        engine = weft.Engine(
            demo, weft.EngineLimits(max_num_reqs=2, max_model_len=64), graph="none"
        )
        engine.add(PROMPTS[0], SamplingParams(bad_words=word), max_tokens=24, mask=mask)
        said.append([token for output in engine for token in output.token_ids])
    assert said[0] == said[1] == said[2]
    assert {*said[0]} <= allowed
    for tokens in said:
        pairs = [*pairwise(tokens)]
        assert tuple(first[1:3]) not in pairs


def test_bad_words_without_tokens_or_a_tokenizer_are_refused(demo: Model) -> None:
    mute = attrs.evolve(demo, tokenizer=None)
    with pytest.raises(
        RequestError,
        match=r"bad_words=\('a',\)\n  instead: bad_token_ids=\[...\]: the checkpoint has",
    ):
        weft.generate(mute, [[65]], max_tokens=2, sampling=SamplingParams(bad_words="a"))


# Texts
# ----------------------------------------------------------------------------------------------------------------


def state_of(kind: str, ids: list[int], reason: str, **sampling: Any) -> CompletionState:
    """A completion of these tokens, the last of which ends it where the reason is `stop`."""
    tokenizer = KINDS[kind]
    request = Request("a", prompt_of(tokenizer), 99, SamplingParams(**sampling))
    state = CompletionState(request, tokenizer, special_ids(tokenizer), (7,))
    for place, token in enumerate(ids):
        is_stop = reason == "stop" and place == len(ids) - 1
        if state.append(StepResult([[token]], [[0.0]], [], [], []), 0, is_stop=is_stop):
            break
    state.end(reason)
    return state


def text_after_prompt(tokenizer: Tokenizer, ids: list[int], skips: bool) -> str:
    prompt = prompt_of(tokenizer)
    before, whole = (
        tokenizer.decode(token_ids, skip_special_tokens=skips)
        for token_ids in (prompt, [*prompt, *ids])
    )
    return str(whole[len(before) :])


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_texts_with_special_tokens_are_those_of_the_tokenizer(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(
        st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=20)
    )
    whole = text_after_prompt(tokenizer, ids, skips=False)
    assert state_of(kind, ids, "length", skip_special_tokens=False).text == whole
    assert state_of(kind, ids, "length", detokenize=False).tokenizer is None


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_token_that_ends_a_request_is_not_in_its_text(kind: str, data: st.DataObject) -> None:
    """Unless the request wants it; whether it is special or not."""
    tokenizer = KINDS[kind]
    skips = data.draw(st.booleans())
    ids = data.draw(
        st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=2, max_size=12)
    )
    sampling = {"skip_special_tokens": skips, "stop_token_ids": ids[-1:]}
    state = state_of(kind, ids, "stop", **sampling)
    assert state.text == text_after_prompt(tokenizer, ids[:-1], skips)
    whole = state_of(kind, ids, "stop", **sampling, include_stop_str_in_output=True).text
    assert whole == text_after_prompt(tokenizer, ids, skips)
    assert state.text_offsets[-1] == len(state.text)
    assert state.token_ids == ids
    assert state.stop_reason == (None if ids[-1] == 7 else ids[-1])
    assert state_of(kind, ids, "stop", **sampling, ignore_eos=True).stop_reason == ids[-1]


def test_the_stop_text_that_begins_first_wins(demo: Model, plain: list[weft.Completion]) -> None:
    """Whatever their order in the list; of two that begin at one place, the first in the list."""
    text = plain[0].text
    assert text is not None
    early = text[4:7]
    late = text[5:12]
    for stop in ([late, early], [early, late]):
        [completion] = complete(demo, SamplingParams(stop=stop), PROMPTS[:1])
        assert (completion.text, completion.stop_reason, completion.finish_reason) == (
            text[: text.index(early)],
            early,
            "stop",
        )
    [completion] = complete(
        demo, SamplingParams(stop=text[4:6], include_stop_str_in_output=True), PROMPTS[:1]
    )
    assert completion.text == text[: text.index(text[4:6]) + 2]
    [token] = complete(demo, SamplingParams(stop_token_ids=[plain[0].token_ids[3]]), PROMPTS[:1])
    assert token.stop_reason == plain[0].token_ids[3]
    assert plain[0].stop_reason is None


def test_a_completion_without_text(demo: Model, plain: list[weft.Completion]) -> None:
    completions = complete(demo, SamplingParams(detokenize=False))
    assert [(completion.text, completion.token_ids) for completion in completions] == [
        (None, completion.token_ids) for completion in plain
    ]
    assert "".join(token_texts(plain[0])) == plain[0].text
    assert token_texts(completions[0]) == [f"{token} " for token in completions[0].token_ids]


# Ranks
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.one_of(2)
@pytest.mark.parametrize("options", [{}, {"graph": "full_and_piecewise", "pipeline": 2}], ids=str)
def test_ranks_are_places_among_all_tokens(demo: Model, options: dict[str, Any]) -> None:
    vocab = demo.config.vocab_size
    hot = SamplingParams(temperature=1.5, seed=3, logprobs=-1, prompt_logprobs=-1)
    for completion, prompt in zip(complete(demo, hot, **options), PROMPTS, strict=True):
        assert completion.ranks is not None
        assert completion.prompt_ranks is not None
        ranked = [
            *zip(completion.token_ids, completion.top_logprobs or (), completion.ranks, strict=True)
        ]
        ranked += [
            *zip(
                demo.encode(prompt)[1:],
                completion.prompt_top_logprobs or (),
                completion.prompt_ranks,
                strict=True,
            )
        ]
        assert len(ranked) > 24
        for token, top, rank in ranked:
            assert len(top) == vocab
            assert math.fsum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-4)
            assert rank == 1 + sum(logprob > top[token] for logprob in top.values())
        assert max(completion.ranks) > 3


@pytest.mark.slow
def test_ranks_do_not_depend_on_company(demo: Model) -> None:
    sampling_params = [
        SamplingParams(logprobs=2),
        SamplingParams(logprobs=0),
        SamplingParams(prompt_logprobs=0),
    ]
    completions = complete(demo, sampling_params)
    assert [
        (completion.ranks is None, completion.prompt_ranks is None) for completion in completions
    ] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    for params, prompt, completion in zip(sampling_params, PROMPTS, completions, strict=True):
        [alone] = complete(demo, params, [prompt])
        assert (alone.ranks, alone.prompt_ranks) == (completion.ranks, completion.prompt_ranks)
    assert completions[0].ranks == [1] * 24, "greedy"
    many = complete(
        demo, SamplingParams(temperature=2.0, seed=1, n=2, prompt_logprobs=1), PROMPTS[:1]
    )
    assert many[0].prompt_ranks == many[1].prompt_ranks is not None


def test_ranks_with_drafts(demo: Model) -> None:
    params = SamplingParams(temperature=0.7, seed=2, logprobs=3)
    drafted = complete(demo, params, speculation=weft.Speculation(3), max_tokens=40)
    assert [completion.ranks for completion in drafted] == [
        completion.ranks for completion in complete(demo, params, max_tokens=40)
    ]


# Times
# ----------------------------------------------------------------------------------------------------------------


def test_times_are_in_order(demo: Model) -> None:
    """Of requests that wait for a row, that are preempted, and that end before they begin."""
    limits = weft.EngineLimits(max_num_reqs=2, max_num_tokens=16, max_model_len=48, num_pages=4)
    engine = weft.Engine(demo, limits, graph="none")
    names = [engine.add(prompt, max_tokens=20) for prompt in PROMPTS]
    last = {output.id: output for output in engine}
    assert engine.stats().preempted
    for name in names:
        times = last[name].track.times
        assert times.admitted is not None
        assert times.first_token is not None
        assert times.finished is not None
        assert times.added <= times.admitted <= times.first_token <= times.finished
    name = engine.add(PROMPTS[0], max_tokens=20)
    [gone] = engine.abort(name)
    assert (gone.track.times.admitted, gone.track.times.first_token) == (None, None)
    assert gone.track.times.finished is not None


# The prefix cache
# -----------------------------------------------------------------------------------------------------

LONG = list(range(32, 112))


def found_by(engine: weft.Engine, **options: Any) -> int:
    """The tokens of the prompt that the prefix cache had."""
    before = engine.stats().prefix_tokens
    engine.add(LONG, max_tokens=2, **options)
    assert sum(len(output.token_ids) for output in engine) == 2
    return engine.stats().prefix_tokens - before


def engine_of(demo: Model, **options: Any) -> weft.Engine:
    return weft.Engine(
        demo, weft.EngineLimits(max_num_reqs=4, max_model_len=128), graph="none", **options
    )


def test_requests_of_one_salt_share_pages(demo: Model) -> None:
    engine = engine_of(demo)
    assert [found_by(engine, cache_salt=salt) for salt in ("", "", "a", "a", "b", "")] == [
        0,
        79,
        0,
        79,
        0,
        79,
    ]
    for wrong in (3, "\ud800"):
        salt: Any = wrong
        with pytest.raises(RequestError, match=r"saw: cache_salt=.*\n  instead: a string"):
            engine.add(LONG, max_tokens=1, cache_salt=salt)


def test_without_prefix_caching_each_request_computes_its_own(demo: Model) -> None:
    engine = engine_of(demo, prefix_caching=False)
    assert [found_by(engine), found_by(engine)] == [0, 0]
    engine.add(LONG, SamplingParams(temperature=1.0, n=3, seed=1), max_tokens=4)
    said: dict[int, list[int]] = {}
    for output in engine:
        said.setdefault(output.index, []).extend(output.token_ids)
    other = engine_of(demo)
    other.add(LONG, SamplingParams(temperature=1.0, n=3, seed=1), max_tokens=4)
    for output in other:
        del said[output.index][: len(output.token_ids)]
    assert said == {0: [], 1: [], 2: []}
    assert (engine.stats().prefix_tokens, other.stats().prefix_tokens) == (0, 2 * 79)


def test_a_prefix_cache_is_reset(demo: Model) -> None:
    """Also while a request is under way, which goes on with its pages; and no page is lost."""
    engine = engine_of(demo)
    assert [found_by(engine), found_by(engine)] == [0, 79]
    free = engine.stats().pages_free
    assert engine.reset_prefix_cache() == 5
    assert engine.reset_prefix_cache() == 0
    assert (engine.stats().pages_kept, engine.stats().pages_free) == (0, free)
    assert [found_by(engine), found_by(engine)] == [0, 79]
    [whole] = weft.generate(demo, [LONG], max_tokens=30, graph="none")
    engine.add(LONG, max_tokens=30)
    said = [token for _ in range(9) for output in engine.step() for token in output.token_ids]
    assert engine.reset_prefix_cache() >= 5
    assert found_by_beside(engine) == 0
    said += [token for output in engine if output.id != "beside" for token in output.token_ids]
    assert said == whole.token_ids[: len(said)]
    stats = engine.stats()
    assert (stats.pages_held, stats.pages_free) == (0, engine.limits.num_pages)


def found_by_beside(engine: weft.Engine) -> int:
    """The same of a request beside one that is under way, without its tokens."""
    before = engine.stats().prefix_tokens
    engine.add(LONG, max_tokens=1, id="beside")
    engine.launch()
    return engine.stats().prefix_tokens - before
