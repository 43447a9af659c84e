"""Drafters for the requests of a trace or an engine: prompt lookup, a model that is often right, or
one that seldom is."""

from pathlib import Path

import attrs
import torch
from hypothesis import strategies as st

from weft.stages.config import ModelConfig
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.random_weights import random_params
from weft.transforms.engine.options import Speculation
from weft.values.trees import tree_map

MODELS = ("itself", "another")


@attrs.frozen
class Drafts:
    """The most tokens drafted per step, and the drafter.

    `way` is the n-gram sizes of prompt lookup, or one of `MODELS`: the served model itself, or
    another one with one layer."""

    num_tokens: int
    way: tuple[int, int] | str

    def speculation(
        self, config: ModelConfig, seed: int, std: float, device: torch.device | str = "cpu"
    ) -> Speculation:
        """The drafter for a model whose weights are `random_params` of this seed and deviation."""
        if not isinstance(self.way, str):
            return Speculation(self.num_tokens, ngram=self.way)
        if self.way == "itself":
            draft_config = config
        else:
            draft_config = attrs.evolve(config, num_layers=1, windows=config.windows[:1])
        seed += self.way == "another"
        (whole,) = split_layers(draft_config.num_layers, 1)
        params = random_params(
            draft_config, whole, seed=seed, device="cpu", dtype=torch.float32, std=std
        )
        params = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, params)
        return Speculation(self.num_tokens, model=Model(draft_config, params, None, Path("drafts")))


def lookups() -> st.SearchStrategy[Drafts]:
    """Drafting by prompt lookup, often from a single token."""
    return st.builds(
        Drafts, st.sampled_from((4, 3, 2, 1)), st.sampled_from(((1, 3), (1, 1), (2, 3)))
    )


def models() -> st.SearchStrategy[Drafts]:
    """Drafting by a model."""
    return st.builds(Drafts, st.sampled_from((3, 4, 2, 1)), st.sampled_from(MODELS))
