"""Gradients of the decoders' steps are those of transformers: of all parameters and of embeddings, by each way of
torch's to ask for them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import (
    MODELS,
    build,
    chunked,
    cloned,
    gradients_as_params,
    load,
    loss_of,
    next_token_loss,
    prompts_of,
    total,
    worst,
)
from torch import Tensor

from weft.stages.model import Model
from weft.transforms.ladder import Limits
from weft.transforms.runner import make_runner, make_state
from weft.trees import tree_map

LENGTHS = (19, 3, 33, 1)
TOLERANCE = 2e-5
"""Of a leaf's greatest error, relative to its greatest element, in float32."""


def expected(model: Any, prompts: Sequence[Sequence[int]], folder: Path) -> Any:
    for ids in prompts:
        next_token_loss(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], ids).backward()
    return gradients_as_params(model, folder)


def loss(model: Model, prompts: Sequence[Sequence[int]], params: Any, sizes: Sequence[int], num_stages: int) -> Tensor:
    """Of the prompts in chunks of these sizes, a step each, over pages that start empty."""
    runner = make_runner(model, Limits(4, 64), num_stages=num_stages, mode="none")
    state, found, done = make_state(model, runner.layouts, [48] * len(prompts)), torch.zeros(()), dict[int, int]()
    for batch in chunked(prompts, sizes):
        state, out = runner.step((params,), state, batch)
        found = found + loss_of(out, batch, prompts, done)
    return found


@pytest.mark.parametrize("sizes", [(64,), (5, 1, 20, 38)], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_transformers(name: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    theirs, prompts = build(name), prompts_of(LENGTHS)
    model = load(theirs, tmp_path / "model")
    wanted = expected(theirs, prompts, tmp_path / "gradients")
    tied = model.config.tie_word_embeddings

    found = torch.func.grad(lambda params: loss(model, prompts, params, sizes, 1))(model.params)
    error, where = worst(total(found) if tied else found, wanted)
    print(f"{name}: {error:.1e} at {where}")
    assert error < TOLERANCE, where

    params = cloned(model.params)
    loss(model, prompts, params, sizes, 1).backward()
    error, where = worst(tree_map(lambda x: x.grad, params), wanted)
    assert error < TOLERANCE, where
