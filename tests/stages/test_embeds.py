"""Embeddings in place of tokens at the first stage, against transformers' `inputs_embeds`."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from weft.batches.batch import Batch
from weft.batches.state import State, advance
from weft.errors import DescriptorError
from weft.ops.requests import EMBEDDED, LAST_TOKEN
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.decoder import decoder_stage
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.params import slice_params
from weft.transforms.engine.setup import make_state
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.pipeline import compose, pipeline

IDS = [5, 9, 2, 40, 7, 11]


@pytest.fixture(scope="module")
def model() -> Model:
    return load(DEMO, "cpu", "float32")


@pytest.fixture(scope="module")
def embeds(model: Model) -> Tensor:
    return 0.1 * torch.randn(
        len(IDS), model.config.hidden_size, generator=torch.Generator().manual_seed(3)
    )


def _setup(model: Model, num_stages: int) -> tuple[Any, Any, tuple[State, ...]]:
    layouts = split_layers(model.config.num_layers, num_stages)
    stages = [decoder_stage(model.config, layout, keep_logits=True) for layout in layouts]
    params = tuple(slice_params(model.params, layout) for layout in layouts)
    return stages, params, make_state(model, layouts, [32, 32])


def _batch(embeds: Tensor, embedded: list[int]) -> Batch:
    ids = [EMBEDDED if i in embedded else token for i, token in enumerate(IDS)]
    return Batch.ragged([0], [ids], inputs_embeds=embeds)


@pytest.mark.parametrize("embedded", [[], [2, 3], [0, 1, 2, 3, 4, 5]])
def test_logits_are_those_of_transformers(
    model: Model, embeds: Tensor, embedded: list[int]
) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    inputs = theirs.get_input_embeddings()(torch.tensor(IDS))
    inputs[embedded] = embeds[embedded]
    with torch.no_grad():
        expected = theirs(inputs_embeds=inputs[None]).logits[0, -1]
    stages, params, state = _setup(model, 1)
    with torch.no_grad():
        _, out = compose(stages, advance=advance)(params, state, _batch(embeds, embedded))
    torch.testing.assert_close(out.logits[0], expected, atol=1e-4, rtol=1e-4)


def test_known_embeddings_are_the_tokens(model: Model) -> None:
    assert model.params.embed_tokens is not None
    token_embeds = model.params.embed_tokens[torch.tensor(IDS)]
    stages, params, state = _setup(model, 1)
    step = compose(stages, advance=advance)
    _, by_id = step(params, state, Batch.ragged([0], [IDS]))
    _, _, state = _setup(model, 1)
    _, embedded = step(params, state, _batch(token_embeds, [1, 2, 4]))
    assert torch.equal(by_id.logits, embedded.logits)


@pytest.mark.parametrize("graph", [False, True])
def test_only_the_first_stage_takes_them(model: Model, embeds: Tensor, graph: bool) -> None:
    """Two requests, one of them with embeddings, then a decode of both: a pipeline equals the
    composition."""
    without_embeds: list[bool] = []
    stages, params, state = _setup(model, 2)

    def watched(params: Any, state: Any, batch: Batch, x: Any) -> Any:
        without_embeds.append(batch.inputs_embeds is None)
        return stages[1](params, state, batch, x)

    _, _, other = _setup(model, 2)
    parts = [graphify(stages[0]), watched] if graph else [stages[0], watched]
    spanned = pipeline(parts, microbatches=2, advance=advance)
    whole = compose(stages, advance=advance)
    ids = [[IDS[0], EMBEDDED, EMBEDDED], [IDS[3], IDS[4], IDS[5]]]
    for batch in (
        Batch.ragged([0, 1], ids, inputs_embeds=embeds),
        Batch.ragged([0, 1], [[LAST_TOKEN]] * 2),
    ):
        state, out = spanned(params, state, batch)
        other, expected = whole(params, other, batch)
        assert torch.equal(out.token_ids, expected.token_ids)
        torch.testing.assert_close(out.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert all(without_embeds)


def test_what_is_missing_or_does_not_fit_is_named(embeds: Tensor) -> None:
    with pytest.raises(
        DescriptorError, match=r"a token that is EMBEDDED \(-2\), and no inputs_embeds"
    ):
        Batch.ragged([0], [[1, EMBEDDED]])
    with pytest.raises(DescriptorError, match=r"inputs_embeds of shape \[6, 64\] for 2 tokens"):
        Batch.ragged([0], [[1, EMBEDDED]], inputs_embeds=embeds[:, :64])
