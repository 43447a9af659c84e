"""`Engine(speculation=...)`: the same tokens, logprobs and ends as without it, in fewer steps."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import weft
from weft.batches.batch import Batch
from weft.batches.sampling import SamplingParams
from weft.errors import RequestError
from weft.ops.requests import LAST_TOKEN
from weft.ops.sampling.logits import pack_bits
from weft.proofs._strategies.engine.engines import small_model
from weft.stages.head import read_at
from weft.stages.model import Model
from weft.transforms.engine.completion import CompletionState
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.requests.host_state import Budget, HostState, Request
from weft.transforms.engine.scheduler import add, choose_query_len, observe, schedule
from weft.transforms.graphs.ladder import MODES

SMALL = EngineLimits(max_num_reqs=4, max_num_tokens=20, max_model_len=24, page_size=4, num_pages=24)
ITSELF = Speculation(4, model=small_model())
WAYS = {"lookup": Speculation(3), "itself": ITSELF, "another": Speculation(2, model=small_model(1))}


def served(
    speculation: Speculation | None, **options: Any
) -> tuple[dict[tuple[str, int], CompletionState], Engine]:
    """Requests of all kinds."""
    limits = options.pop("limits", SMALL)
    engine = Engine(
        small_model(), limits, num_logprobs=2, seed=0, speculation=speculation, **options
    )
    for index in range(8):
        params = SamplingParams(
            temperature=float(index % 2),
            n=1 + (index == 2),
            logprobs=2,
            prompt_logprobs=1 if index == 3 else None,
            frequency_penalty=0.5 if index == 4 else 0.0,
            min_tokens=4 if index == 5 else 0,
            stop_token_ids=[2, 3] if index > 4 else [],
            top_k=4 if index == 7 else 0,
        )
        engine.add((1, 2, 3, 1, 2)[: 2 + index % 3], params, max_tokens=14, id=str(index))
    outputs = list(engine)
    tokens: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        tokens.setdefault((output.id, output.index), []).extend(output.token_ids)
    tracks = {(output.id, output.index): output.track for output in outputs}
    assert tokens == {key: track.token_ids for key, track in tracks.items()}
    assert engine.stats().pages_held == 0
    return tracks, engine


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, int], CompletionState]:
    return served(None, graph="none")[0]


@pytest.mark.one_of(12, 4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("pipeline", "graph", "run_ahead"), [(1, "none", 0), (1, "full", 2), (3, "piecewise", 1)]
)
def test_tokens_logprobs_and_ends_are_the_same(
    way: str,
    pipeline: int,
    graph: str,
    run_ahead: int,
    plain: dict[tuple[str, int], CompletionState],
) -> None:
    tracks, engine = served(WAYS[way], pipeline=pipeline, graph=graph, run_ahead=run_ahead)
    assert engine.stats().accepted > 0
    for key, track in plain.items():
        other = tracks[key]
        assert (other.token_ids, other.reason) == (track.token_ids, track.reason)
        assert other.logprobs == pytest.approx(track.logprobs, abs=1e-5)
        assert other.prompt_logprobs == pytest.approx(track.prompt_logprobs, abs=1e-5)
        for ours, theirs in zip(other.top_logprobs, track.top_logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)


def with_nan(model: Model, name: str, token: int | slice) -> Model:
    """The draft model: one row, or all rows, of its embeddings or its head are NaN."""
    weights = getattr(model.params, name).clone()
    weights[token] = torch.nan
    return attrs.evolve(model, params=attrs.evolve(model.params, **{name: weights}))


@pytest.mark.one_of(5, 2)
@pytest.mark.parametrize("graph", ["none", "full"])
@pytest.mark.parametrize(
    ("name", "token"), [("lm_head", 11), ("embed_tokens", slice(None)), ("embed_tokens", 5)]
)
def test_a_draft_model_whose_logits_are_nan_drafts_nothing(
    graph: str, name: str, token: Any
) -> None:
    """Neither does it say token 11, whose embedding here is NaN too, and which the requests bar: as
    a draft it would be read, and the tokens before it would attend to it."""
    model = with_nan(small_model(), "embed_tokens", 11)
    told = []
    bars = SamplingParams(temperature=0.0, bad_token_ids=[11])
    for drafts in (None, Speculation(3, model=with_nan(small_model(), name, token))):
        engine = Engine(model, SMALL, graph=graph, run_ahead=1, speculation=drafts)
        for index, prompt in enumerate(([1, 2, 3, 4, 5], [4, 6], [3, 3, 3])):
            engine.add(
                prompt,
                attrs.evolve(bars, temperature=index / 2, seed=index),
                max_tokens=9,
                id=str(index),
            )
        told.append({o.id: (o.track.token_ids, o.finish_reason) for o in engine if o.finish_reason})
    assert told[0] == told[1]
    assert {reason for _, reason in told[0].values()} == {"length"}
    stats = engine.stats()
    assert (stats.drafted == 0) == (token != 5), "after another token its logits are finite"


def test_what_is_not_drafted_is_a_token_that_was_read_before() -> None:
    """A slot without a draft does not hold the first token of the vocabulary, whose embedding may
    be NaN."""
    model = with_nan(small_model(), "embed_tokens", 0)
    bars = SamplingParams(temperature=0.0, bad_token_ids=[0])
    engine = Engine(model, SMALL, graph="full", speculation=Speculation(3))
    for seed in range(3):
        engine.add([6, 7, 8 + seed], attrs.evolve(bars, temperature=1.0, seed=seed), max_tokens=9)
    assert {output.finish_reason for output in engine} == {None, "length"}


@pytest.mark.one_of(5, 2)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("graph", ["none", "full", "full_and_piecewise"])
def test_a_model_that_drafts_for_itself_is_always_right(mixed: bool, graph: str) -> None:
    """The draft model's cache holds all tokens, after steps of prompts, decodes without drafts, and
    right drafts."""
    engine = Engine(
        small_model(),
        attrs.evolve(SMALL, mixed=mixed),
        graph=graph,
        run_ahead=0,
        seed=0,
        speculation=ITSELF,
    )
    for index in range(6):
        engine.add(
            [1, 2, index], SamplingParams(temperature=float(index % 2)), max_tokens=6 + index
        )
        engine.step()
    list(engine)
    stats = engine.stats()
    assert stats.drafted == stats.accepted > 20
    assert stats.acceptance == 1


def test_drafts_save_steps() -> None:
    steps = []
    for speculation in (None, ITSELF):
        engine = Engine(small_model(), SMALL, graph="none", run_ahead=0, speculation=speculation)
        engine.add([1, 2, 3], SamplingParams(temperature=1.0, seed=3), max_tokens=21)
        list(engine)
        steps.append(engine.stats().steps["decode"])
    assert steps == [20, 4]


@pytest.mark.one_of(9)
@pytest.mark.parametrize("graph", MODES)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_after_warm_up_nothing_is_captured(graph: str, pipeline: int) -> None:
    engine = Engine(
        small_model(), SMALL, pipeline=pipeline, graph=graph, seed=0, speculation=Speculation(3)
    )
    captured = engine.warm_up().captures
    for index in range(6):
        engine.add([1, 2, 1, 2, index], max_tokens=2 + index)
    list(engine)
    assert engine.stats().captures == captured


def test_a_text_that_ends_a_request_amid_right_drafts(demo: Model) -> None:
    whole = weft.generate(demo, ["def add(a, b):"], max_tokens=40, graph="none")[0].text
    assert whole is not None
    sampling = SamplingParams(temperature=0.0, stop=whole[13:16])
    runs = [
        weft.generate(
            demo,
            ["def add(a, b):"],
            max_tokens=40,
            sampling=sampling,
            graph="none",
            speculation=speculation,
        )
        for speculation in (None, Speculation(4, model=demo), Speculation(4))
    ]
    assert runs[0][0].finish_reason == "stop"
    for completions in runs[1:]:
        assert attrs.evolve(completions[0], logprobs=[]) == attrs.evolve(runs[0][0], logprobs=[])


def test_greedy_tokens_are_those_of_transformers_with_prompt_lookup(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 23,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
    model.save_pretrained(tmp_path)
    prompts = [[1, 2, 3, 1, 2], [7, 7, 8], [4, 9, 4, 9, 4, 10, 11]]
    completions = weft.generate(
        weft.load(tmp_path, "cpu"), prompts, max_tokens=30, speculation=Speculation(3)
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 30, "attention_mask": torch.ones_like(ids)}
        theirs = model.generate(input_ids=ids, prompt_lookup_num_tokens=3, **options)
        assert completion.token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.one_of(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["lookup", "another"])
def test_the_distribution_is_the_model_s(way: str) -> None:
    """Chi-square of the second and third token of 4,000 completions, with drafts, against the
    model's probabilities."""
    model = small_model()
    prompt = [1, 2, 3]
    count = 4000
    sampled = weft.generate(
        model,
        [prompt],
        max_tokens=3,
        seed=1,
        graph="none",
        speculation=WAYS[way],
        sampling=SamplingParams(temperature=1.5, n=count),
    )
    observed = torch.zeros(12, 12)
    for completion in sampled:
        observed[completion.token_ids[1], completion.token_ids[2]] += 1
    first = _probabilities(model, [prompt])[0]
    second = _probabilities(model, [[*prompt, a] for a in range(12)])
    third = _probabilities(model, [[*prompt, a, b] for a in range(12) for b in range(12)]).view(
        12, 12, 12
    )
    expected = count * torch.einsum("a,ab,abc->bc", first, second, third)
    kept = expected >= 5
    cells = torch.cat([expected[kept], expected[~kept].sum()[None]])
    counts = torch.cat([observed[kept], observed[~kept].sum()[None]])
    statistic = float(((counts - cells) ** 2 / cells).sum())
    freedom = len(cells) - 1
    assert freedom > 20
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, "about one in 10,000"


def _probabilities(model: Model, prompts: list[list[int]]) -> torch.Tensor:
    """The model's probabilities of each token after each prompt, at the temperature of the test."""
    params = SamplingParams(temperature=0.0, logprobs=12)
    completions = weft.generate(model, prompts, max_tokens=1, graph="none", sampling=params)
    logprobs = torch.tensor(
        [
            [each.top_logprobs[0][token] for token in range(12)]
            for each in completions
            if each.top_logprobs
        ]
    )
    return (logprobs / 1.5).softmax(-1)


def test_drafts_are_as_many_as_there_is_use_room_and_pages_for() -> None:
    budget = Budget(2, 8, 8, query_lens=(1, 3, 5))
    greedy = SamplingParams(temperature=0.0)
    penalised = SamplingParams(temperature=0.0, presence_penalty=1.0)

    def query_len_of(num_pages: int, *requests: tuple[SamplingParams, int]) -> int:
        host = HostState.empty(budget, num_pages, 2)
        for index, (params, most) in enumerate(requests):
            host = add(host, Request(str(index), (1, 2), most, params), budget)
        host, (work,) = schedule(host, budget)
        host, _ = observe(host, work.job, [[0]] * len(requests))
        return choose_query_len(host, budget, list(host.running.values()))

    assert query_len_of(16, (greedy, 9)) == 5
    assert query_len_of(16, (greedy, 9), (greedy, 9)) == 3, (
        "two times five tokens are more than eight"
    )
    assert query_len_of(16, (greedy, 3)) == 3, "two are left"
    assert query_len_of(16, (greedy, 2)) == 1
    assert query_len_of(16, (penalised, 9)) == 1
    assert query_len_of(16, (penalised, 9), (greedy, 9)) == 3
    assert query_len_of(6, (greedy, 9), (greedy, 9)) == 3, (
        "of six pages two are taken, and each needs two more"
    )
    assert query_len_of(5, (greedy, 7), (greedy, 7)) == 1, "for drafts nobody makes room"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"num_tokens": True}, "num_tokens=True"),
        ({"num_tokens": 2, "ngram": (3, 1)}, "ngram=(3, 1)"),
        ({"num_tokens": 2, "ngram": 3}, "ngram=3"),
        ({"num_tokens": 2, "model": "folder"}, "model is a str"),
        ({"num_tokens": 2, "model": small_model(), "ngram": (1, 3)}, "beside model, ngram=(1, 3)"),
    ],
)
def test_what_drafts_nothing_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError) as error:
        Speculation(**options)
    assert error.value.problem == problem


def test_a_draft_model_of_another_vocabulary_is_refused(demo: Model) -> None:
    with pytest.raises(
        RequestError,
        match="the draft model's vocab_size=12\n  instead: a draft model of 257 tokens",
    ):
        Engine(demo, graph="none", speculation=ITSELF)


def test_a_draft_model_that_is_not_here_is_refused() -> None:
    with pytest.raises(RequestError, match="the draft model=ModelConfig"):
        Engine(small_model(), graph="none", speculation=Speculation(2, model=small_model().config))


@pytest.mark.parametrize("query_len", [1, 3])
def test_with_a_mask_no_draft_holds(query_len: int) -> None:
    """A mask for the token after a draft would depend on the draft, and masks are computed before
    drafts."""
    allowed = pack_bits([7], 12).expand(2, -1).contiguous()
    ragged = attrs.evolve(Batch.ragged([0, 1], [[1, 2], [LAST_TOKEN]]), token_mask=allowed)
    assert read_at(ragged, 2).tolist() == [[1], [2]]
    engine = Engine(small_model(), SMALL, graph="none", seed=0, speculation=Speculation(2))
    for index in range(2):
        engine.add([1, 2, index], max_tokens=9)
    engine.step()
    stepper: Any = engine._executor
    before = [state.positions.clone() for state in stepper.state]
    batch = attrs.evolve(Batch.decode([0, 1], query_len=query_len), token_mask=allowed)
    state, out = stepper.step(stepper.params, stepper.state, batch)
    assert (out.token_ids.tolist(), out.num_tokens.tolist()) == ([[7], [7]], [1, 1])
    for old, new in zip(before, state, strict=True):
        assert (new.positions - old)[:2].tolist() == [1, 1]
