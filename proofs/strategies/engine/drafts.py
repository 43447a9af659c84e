"""Drafters for the requests of a trace or an engine: prompt lookup, or a model that is often or
seldom right."""

from pathlib import Path

import attrs
import torch
from hypothesis import strategies as st

from weft.stages.config import ModelConfig
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.random_weights import random_params
from weft.transforms.engine.options import Speculation
from weft.trees import tree_map

MODELS = ("itself", "another")


@attrs.frozen
class Drafts:
    """The most tokens drafted per step, by prompt lookup of n-grams or by a model: the served one
    itself, or another with one layer."""

    num_tokens: int
    way: tuple[int, int] | str

    def speculation(
        self, config: ModelConfig, seed: int, std: float, device: torch.device | str = "cpu"
    ) -> Speculation:
        """The drafter for a model with these weights (`random_params`)."""
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
    """Prompt lookup, often of single tokens."""
    return st.builds(
        Drafts, st.sampled_from((4, 3, 2, 1)), st.sampled_from(((1, 3), (1, 1), (2, 3)))
    )


def models() -> st.SearchStrategy[Drafts]:
    """A draft model."""
    return st.builds(Drafts, st.sampled_from((3, 4, 2, 1)), st.sampled_from(MODELS))
