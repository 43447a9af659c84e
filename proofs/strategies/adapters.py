"""Two LoRA adapters of any model, and parameters that hold them: requests in scenarios and traces draw from these."""

from itertools import cycle, islice

from hypothesis import strategies as st

from weft.stages.adapters import adaptable, with_adapters
from weft.stages.config import ModelConfig
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams
from weft.stages.random_weights import random_adapter

NUM_ADAPTERS = 2


def slots(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """The adapter of each of `count` requests, in turn; -1 for none; empty: the model has no adapters."""
    patterns = ((), (0, 1, -1), (0,), (-1, 1), (1, 0, 0))  # in one draw: more are fewer examples of all else
    return st.sampled_from(patterns).map(lambda pattern: tuple(islice(cycle(pattern), count)))


def hold_adapters(params: DecoderParams, config: ModelConfig, layout: StageLayout, seed: int) -> DecoderParams:
    """A stage's parameters with both: one changes all linear layers that can be, the other some, in another rank. Their
    weights are large, so that differences show."""
    names = [name for index in range(config.num_layers) for name in adaptable(config, index)]
    first = random_adapter(config, names, rank=3, seed=seed, std=0.4)
    second = random_adapter(config, names[::2], rank=1, seed=seed + 1, std=0.6)
    return with_adapters(params, config, layout, [first, second])
