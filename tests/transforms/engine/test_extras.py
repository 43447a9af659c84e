"""Inputs of its own that each request has for the model's stages: each request gets what it gets
alone."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.batches.batch import Batch, ResolvedBatch
from weft.batches.outputs import PerRequest
from weft.batches.sampling import SamplingParams
from weft.errors import ProgramError, RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import Model
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.generate import generate
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.setup import make_runner, make_state
from weft.transforms.graphs.ladder import MODES, Limits

PROMPT = "The function returns a list of"
LAYER = 1
WAYS: tuple[dict[str, Any], ...] = (
    *({"graph": mode} for mode in MODES),
    {"pipeline": 2},
    {"pipeline": 3, "graph": "full_and_piecewise"},
    {"speculation": Speculation(num_tokens=2)},
)


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


@pytest.fixture(scope="module")
def steered(model: Model) -> Model:
    """The model with a layer that adds each request's own vector, times its own strength."""

    def steer(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
        ) -> Any:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            vectors = batch.extras["vector"].values * batch.extras["strength"].values[:, None]
            return hidden + batch.per_token(vectors), kv_pages

        return run

    zero = torch.zeros(model.config.hidden_size)
    return model.with_stages(
        layers={LAYER: steer}, extras={"vector": zero, "strength": torch.tensor(1.0)}
    )


@pytest.fixture(scope="module")
def vectors(model: Model) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    return [
        None,
        *(3 * torch.randn(model.config.hidden_size, generator=generator) for _ in range(3)),
    ]


@pytest.fixture(scope="module")
def alone(model: Model, vectors: list[Tensor | None]) -> list[list[int]]:
    """The tokens of each vector, with that vector in the model itself."""

    def plus(vector: Tensor) -> Any:
        def change(layer: Any) -> Any:
            def run(*args: Any) -> Any:
                hidden, kv_pages = layer(*args)
                return hidden + vector, kv_pages

            return run

        return change

    models = [model if x is None else model.with_stages(layers={LAYER: plus(x)}) for x in vectors]
    return [
        generate(variant, [PROMPT], max_tokens=20, graph="none")[0].token_ids for variant in models
    ]


def extras_of(vectors: list[Tensor | None]) -> list[Mapping[str, Tensor] | None]:
    return [None if x is None else {"vector": x} for x in vectors]


@pytest.mark.one_of(4, 2)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_request_has_its_own_vector(
    steered: Model, vectors: list[Tensor | None], alone: list[list[int]], way: dict[str, Any]
) -> None:
    assert len({*map(tuple, alone)}) == len(alone)
    completions = generate(
        steered, [PROMPT] * 8, max_tokens=20, extras=extras_of(vectors) * 2, **way
    )
    assert [c.token_ids for c in completions] == alone * 2


def test_pages_of_other_extras_are_not_shared(
    steered: Model, vectors: list[Tensor | None], alone: list[list[int]]
) -> None:
    """One after the other, so that each finds the pages of those before: those of its own vector,
    and no others."""
    prompt = PROMPT * 4
    engine = Engine(steered, graph="none")
    tokens = []
    for extras in extras_of(vectors) * 2:
        before = engine.stats().prefix_tokens
        engine.add(prompt, max_tokens=12, extras=extras)
        tokens.append([token for output in engine for token in output.token_ids])
        num_prefix_tokens = engine.stats().prefix_tokens - before
        assert (num_prefix_tokens > 0) == (len(tokens) > len(vectors))
    assert tokens[:4] == tokens[4:]
    expected = [
        generate(steered, [prompt], max_tokens=12, graph="none", extras=extras)[0]
        for extras in extras_of(vectors)
    ]
    assert tokens[:4] == [c.token_ids for c in expected]


def test_preempted_requests_keep_their_extras(
    steered: Model, vectors: list[Tensor | None], alone: list[list[int]]
) -> None:
    limits = EngineLimits(max_num_reqs=4, max_num_tokens=64, num_pages=8, max_model_len=64)
    engine = Engine(steered, limits)
    names = [engine.add(PROMPT, max_tokens=20, extras=extras) for extras in extras_of(vectors)]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    for output in engine:
        tokens[output.id] += output.token_ids
    assert engine.stats().preempted > 0
    assert [*tokens.values()] == alone


def test_completions_of_one_request_share_its_extras(
    steered: Model, vectors: list[Tensor | None]
) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3)
    extras = {"vector": vectors[1], "strength": torch.tensor(0.5)}
    together = generate(steered, [PROMPT], max_tokens=8, sampling=params, extras=extras)
    engine = Engine(steered, graph="none")
    engine.add(PROMPT, params, max_tokens=8, extras=extras)
    tokens: dict[int, list[int]] = {}
    for output in engine:
        tokens.setdefault(output.index, []).extend(output.token_ids)
    assert [c.token_ids for c in together] == [tokens[i] for i in range(3)]


def test_a_runner_takes_them_too(
    steered: Model, vectors: list[Tensor | None], alone: list[list[int]]
) -> None:
    runner = make_runner(steered, Limits(4, 64))
    ids = steered.encode(PROMPT)
    extras = [{} if x is None else {"vector": x} for x in vectors]
    state = make_state(steered, runner.layouts, [64] * 4, extras=extras)
    state, out = runner.step(runner.params, state, Batch.ragged(range(4), [ids] * 4))
    tokens = [out.token_ids.tolist()]
    for _ in range(5):
        state, out = runner.step(runner.params, state, Batch.decode(range(4)))
        tokens.append(out.token_ids.tolist())
    assert [*map(list, zip(*tokens, strict=True))] == [completion[:6] for completion in alone]


WITHOUT: tuple[Callable[[Tensor, Any], Any], ...] = (
    lambda hidden, per_request: hidden + per_request,
    lambda hidden, per_request: per_request * hidden,
    lambda hidden, per_request: torch.cat([hidden, per_request], -1),
)


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("combine", WITHOUT)
@pytest.mark.parametrize(
    "prompts", [[[5]], [[5, 6], [7, 8]]], ids=["one token", "as many requests as tokens"]
)
def test_values_of_requests_are_not_taken_for_those_of_tokens(
    model: Model, prompts: list[list[int]], combine: Callable[[Tensor, Any], Any], mode: str
) -> None:
    """Two prompts of two tokens are padded to four requests and four tokens, where torch would
    broadcast."""

    def change(layer: Any) -> Any:
        def run(
            params: Any, kv_pages: Tensor, batch: ResolvedBatch, tables: Any, hidden: Tensor
        ) -> Any:
            hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
            return combine(hidden, batch.extras["vector"]), kv_pages

        return run

    vector_model = model.with_stages(
        layers={LAYER: change}, extras={"vector": torch.zeros(model.config.hidden_size)}
    )
    runner = make_runner(vector_model, Limits(4, 64), mode=mode)
    state = make_state(vector_model, runner.layouts, [64] * len(prompts))
    text = r"a PerRequest, whose values are of requests[\s\S]*instead: batch.per_token\(...\) of it"
    with pytest.raises(ProgramError, match=text) as error:
        runner.step(runner.params, state, Batch.ragged(range(len(prompts)), prompts))
    assert any("batch.extras has 'vector'" in note for note in error.value.__notes__)


@pytest.mark.parametrize(
    "use",
    [
        bool,
        len,
        float,
        lambda x: x == 0,
        lambda x: x != 0,
        lambda x: x > 0,
        lambda x: x[0],
        lambda x: -x,
        lambda x: [*x],
        lambda x: 0 in x,
    ],
)
def test_python_answers_nothing_in_its_place(use: Callable[[Any], Any]) -> None:
    """An object without these is true, equals itself alone, and raises errors that know no remedy."""
    with pytest.raises(ProgramError, match=r"batch.per_token\(...\) of it"):
        use(PerRequest(torch.zeros(2)))
    with pytest.raises(AttributeError, match=r"batch.per_token\(...\) of it"):
        PerRequest(torch.zeros(2)).float()


WRONG = [
    ({"other": torch.zeros(1)}, "a dict of the model's extras by name: 'vector', 'strength'"),
    ({"vector": torch.zeros(3)}, r"a tensor \[64\]|for one request"),
    ({"vector": [0.0]}, "for one request"),
    ({"strength": torch.tensor(1, dtype=torch.int64)}, "torch.float32, for one request"),
    (3, "a dict of"),
]


@pytest.mark.parametrize(("extras", "text"), WRONG)
def test_wrong_extras_are_named_and_end_nothing(steered: Model, extras: Any, text: str) -> None:
    engine = Engine(steered, graph="none")
    engine.add(PROMPT, max_tokens=2, id="good")
    with pytest.raises(RequestError, match=text):
        engine.add(PROMPT, max_tokens=2, extras=extras)
    assert sum(len(output.token_ids) for output in engine) == 2


def test_a_model_without_extras_says_how_it_gets_some(model: Model) -> None:
    with pytest.raises(RequestError, match=r"with_stages\(..., extras="):
        generate(model, [PROMPT], max_tokens=1, extras={"vector": torch.zeros(2)})
