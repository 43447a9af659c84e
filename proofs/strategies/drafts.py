"""How requests of a trace, or of an engine, are drafted for: by prompt lookup, or by a model that is right often or
seldom."""

from pathlib import Path

import attrs
import torch
from hypothesis import strategies as st

from weft.stages.config import ModelConfig
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.random_weights import random_params
from weft.transforms.engine.speculation import Speculation
from weft.trees import tree_map

MODELS = ("itself", "another")


@attrs.frozen
class Drafts:
    """So many tokens a step at most, found by prompt lookup of n-grams, or said by a model: the one that is drafted
    for, or another with one layer."""

    num_tokens: int
    way: tuple[int, int] | str

    def speculation(
        self, config: ModelConfig, seed: int, std: float, device: torch.device | str = "cpu"
    ) -> Speculation:
        """For a model of these weights (`random_params`)."""
        if not isinstance(self.way, str):
            return Speculation(self.num_tokens, ngram=self.way)
        own = config if self.way == "itself" else attrs.evolve(config, num_layers=1)
        seed += self.way == "another"
        (whole,) = split_layers(own.num_layers, 1)
        params = random_params(own, whole, seed=seed, device="cpu", dtype=torch.float32, std=std)
        params = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, params)
        return Speculation(self.num_tokens, model=Model(own, params, None, Path("drafts")))


def lookups() -> st.SearchStrategy[Drafts]:
    """By prompt lookup, single tokens often."""
    return st.builds(Drafts, st.sampled_from((4, 3, 2, 1)), st.sampled_from(((1, 3), (1, 1), (2, 3))))


def models() -> st.SearchStrategy[Drafts]:
    """By a model."""
    return st.builds(Drafts, st.sampled_from((3, 4, 2, 1)), st.sampled_from(MODELS))
