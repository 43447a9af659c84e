"""Two LoRA adapters for any model, and parameters that hold both, for the requests of scenarios and
traces."""

from itertools import cycle, islice

from hypothesis import strategies as st

from weft.stages.adapters.slots import with_adapters
from weft.stages.config import ModelConfig
from weft.stages.layout import StageLayout
from weft.stages.params import DecoderParams
from weft.stages.random_weights import random_adapter
from weft.stages.shares import WHOLE, Share, adaptable

NUM_ADAPTERS = 2


def slots(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """The adapter of each of `count` requests, -1 for none; empty if the model has no adapters."""
    # A single draw of a pattern: more draws would leave fewer examples of everything else.
    patterns = (
        (),
        (0, 1, -1),
        (0,),
        (-1, 1),
        (1, 0, 0),
    )
    return st.sampled_from(patterns).map(lambda pattern: tuple(islice(cycle(pattern), count)))


def hold_adapters(
    params: DecoderParams, config: ModelConfig, layout: StageLayout, seed: int, shard: Share = WHOLE
) -> DecoderParams:
    """A stage's parameters, or a rank's share of them, with two adapters.

    The first (LoRA rank 3) applies to all linear layers that can have one, the second (LoRA rank 1)
    to every other one of them. Their weights are large, so that differences show."""
    names = [name for index in range(config.num_layers) for name in adaptable(config, index)]
    first = random_adapter(config, names, rank=3, seed=seed, std=0.4)
    second = random_adapter(config, names[::2], rank=1, seed=seed + 1, std=0.6)
    return with_adapters(params, config, layout, [first, second], shard=shard)
