"""On a model without a stop token: graphs replay the expected number of times, and a seed fixes
each token."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from chi_square import p_value
from completing import PIPELINES, SIZES, Case, complete
from hypothesis import given, settings, strategies as st
from torch import Tensor

import weft
from weft.batches.batch import Batch
from weft.batches.sampling import SamplingParams
from weft.ops.sampling.sample import sample
from weft.stages import decoder
from weft.transforms.engine.generate import Completion
from weft.transforms.engine.requests.host_state import request_seed
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.calls.key import CacheInfo
from weft.transforms.graphs.ladder import MODES, Limits

# Graphs replay


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> weft.Model:
    """A model of three layers and 32 positions that no token stops."""
    folder = tmp_path_factory.mktemp("endless")
    case = Case("Qwen3ForCausalLM", {**SIZES, "head_dim": 6, "max_position_embeddings": 32}, 5, [])
    case.save(case.build(), folder)
    return weft.load(folder, "cpu")


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("pipeline", "mode", "lengths", "expected"),
    [
        # One prefill of more tokens than requests, eagerly; then five decodes of five requests.
        (1, "full", [5, 1, 1, 1, 1], CacheInfo(captures=1, replays=5, eager=1, currsize=1)),
        # A prefill with one token per request has a graph too, which is not the decode's.
        (1, "full", [1, 1, 1, 1, 1], CacheInfo(captures=2, replays=6, eager=0, currsize=2)),
        (
            1,
            "full_decode_only",
            [1, 1, 1, 1, 1],
            CacheInfo(captures=1, replays=5, eager=1, currsize=1),
        ),
        # Requests end at 32 positions: decodes of 4, 3 (padded to 4), 3, 2, 2.
        (1, "full", [31, 30, 28, 5, 5], CacheInfo(captures=2, replays=5, eager=1, currsize=2)),
        # Cohorts of 3 and 2 requests. Their prefills have 7 tokens (eagerly) and 3 (with a graph).
        (2, "full", [5, 1, 1, 1, 2], CacheInfo(captures=3, replays=11, eager=1, currsize=3)),
        # Cohorts of 2, 2 and 1 requests, whose prefills have 7 tokens (eagerly), 2 and 1; two share
        # one of decodes.
        (3, "full", [6, 1, 1, 1, 1], CacheInfo(captures=4, replays=17, eager=1, currsize=4)),
        (
            3,
            "full_decode_only",
            [5, 1, 1, 1, 1],
            CacheInfo(captures=2, replays=15, eager=3, currsize=2),
        ),
        (1, "none", [5, 1, 1, 1, 1], None),
        (3, "none", [5, 1, 1, 1, 1], None),
    ],
)
def test_graphs_really_replay(
    endless: weft.Model,
    pipeline: int,
    mode: str,
    lengths: list[int],
    expected: CacheInfo | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captures and replays are counted; the stages' Python code runs for captures and eager calls
    only."""
    runs = _counted(monkeypatch)
    result = complete(
        endless, [[7] * n for n in lengths], max_tokens=6, pipeline=pipeline, graph=mode
    )
    graphs = result.executor.graphs
    assert len(graphs) == (0 if expected is None else pipeline)
    assert [graph.cache_info() for graph in graphs] == [expected] * len(graphs)
    microbatches = 6 * pipeline * min(pipeline, len(lengths))
    warm_up = 1
    runs_of_stages = (
        microbatches
        if expected is None
        else pipeline * (warm_up + expected.captures + expected.eager)
    )
    assert len(runs) == runs_of_stages


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one entry whenever a stage's layers run as Python."""
    runs: list[None] = []
    layers: Callable[..., Tensor] = decoder.run_layers

    def counting(*args: Any) -> Tensor:
        runs.append(None)
        return layers(*args)

    monkeypatch.setattr(decoder, "run_layers", counting)
    return runs


# Random choices


def serve(
    model: weft.Model,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    order: Sequence[int],
    **options: Any,
) -> list[list[int]]:
    """Six tokens for each prompt at temperature 1, where row i holds prompt i and every batch names
    its rows in `order`."""
    runner = make_runner(model, Limits(len(prompts), 2048), **options)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    state = make_state(model, runner.layouts, [len(p) + 6 for p in prompts], params)
    batches = [
        Batch.ragged(order, [prompts[row] for row in order]),
        *(Batch.decode(order) for _ in range(5)),
    ]
    tokens: list[list[int]] = [[] for _ in prompts]
    for batch in batches:
        state, out = runner.step(runner.params, state, batch)
        for row, token in zip(order, out.token_ids.tolist(), strict=True):
            tokens[row].append(token)
    return tokens


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in completions]


@st.composite
def prompt_lists(draw: st.DrawFn) -> list[list[int]]:
    return draw(
        st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=18), min_size=2, max_size=4)
    )


@given(
    prompts=prompt_lists(),
    seed=st.integers(10, 2**62),
    temperature=st.sampled_from((0.3, 1.0, 3.0)),
    shift=st.sampled_from(range(len(MODES))),
)
@settings(max_examples=6)
def test_a_seed_fixes_the_tokens_in_any_split_mode_and_company(
    endless: weft.Model, prompts: list[list[int]], seed: int, temperature: float, shift: int
) -> None:
    """The seed and the index i fix the random numbers of request i, however it runs and whatever
    follows it."""
    options: dict[str, Any] = {"max_tokens": 6, "temperature": temperature}
    expected = tokens_of(weft.generate(endless, prompts, seed=seed, graph="none", **options))
    for pipeline in PIPELINES:
        mode = MODES[(pipeline + shift) % len(MODES)]
        tokens = tokens_of(
            weft.generate(endless, prompts, seed=seed, pipeline=pipeline, graph=mode, **options)
        )
        assert tokens == expected
    for company in (prompts[:1], [*prompts, [1], [2, 3, 4]]):
        tokens = tokens_of(weft.generate(endless, company, seed=seed, **options))
        assert tokens[: len(prompts)] == expected[: len(tokens)]


@given(
    data=st.data(),
    prompts=prompt_lists(),
    pipeline=st.sampled_from(PIPELINES),
    mode=st.sampled_from(MODES),
)
@settings(max_examples=8)
def test_the_order_in_a_batch_and_the_row_change_no_token(
    endless: weft.Model, data: st.DataObject, prompts: list[list[int]], pipeline: int, mode: str
) -> None:
    rows = range(len(prompts))
    expected = serve(endless, prompts, rows, rows, mode="none")
    order = data.draw(st.permutations(rows))
    assert serve(endless, prompts, rows, order, num_stages=pipeline, mode=mode) == expected
    moved = serve(endless, [prompts[i] for i in order], order, rows, num_stages=pipeline, mode=mode)
    assert moved == [expected[i] for i in order]


def test_each_token_is_drawn_with_its_requests_seed_and_its_own_position(
    endless: weft.Model,
) -> None:
    """`sample` on the recorded logits, with the row's seed and the position of the token before."""
    prompts = [[1, 2, 3], [4], [5] * 17]
    result = complete(endless, prompts, max_tokens=6, temperature=1.0, seed=40)
    seeds = [request_seed(40, index) for index in range(3)]
    rows = zip(prompts, seeds, result.logits, result.completions, strict=True)
    for prompt, seed, logits, completion in rows:
        positions = len(prompt) - 1 + torch.arange(6)
        drawn, logprobs = sample(logits, torch.ones(6), torch.full((6,), seed), positions)
        assert drawn.tolist() == completion.token_ids
        assert logprobs.tolist() == pytest.approx(completion.logprobs, abs=1e-6)


def test_seeds_differ(endless: weft.Model) -> None:
    """Equal prompts of one call draw apart from each other, another seed draws apart, and so does
    no seed."""
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "graph": "none"}
    calls = [
        tokens_of(weft.generate(endless, [[7]] * 8, seed=seed, **options))
        for seed in (0, 100, None, None)
    ]
    assert len({tuple(ids) for sequences in calls for ids in sequences}) == 32


def test_greedy_ignores_the_seed(endless: weft.Model) -> None:
    calls = [
        weft.generate(endless, [[7, 8], [9]], max_tokens=6, seed=seed) for seed in (0, 1, None)
    ]
    assert calls[0] == calls[1] == calls[2]
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    drawn, _ = sample(logits, torch.zeros(50), torch.arange(50), torch.arange(50) * 3)
    assert torch.equal(drawn, logits.argmax(-1))


def test_generated_tokens_are_distributed_as_the_models_probabilities(endless: weft.Model) -> None:
    """The whole path: the first tokens of 600 equal prompts, against the softmax of one greedy
    run's logits."""
    [logits] = complete(endless, [[3, 1, 4]], max_tokens=1).logits
    probabilities = (logits[0] / 1.5).softmax(-1)
    completions = weft.generate(endless, [[3, 1, 4]] * 600, max_tokens=1, temperature=1.5, seed=0)
    counts = torch.bincount(
        torch.tensor([c.token_ids[0] for c in completions]), minlength=len(probabilities)
    )
    rare = probabilities * 600 < 5
    cells = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, probabilities)]
    assert p_value(*cells) > 1e-4
