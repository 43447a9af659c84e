"""Into which stages a model is split where nothing else was said: by what a decode step reads."""

import functools
import math

import attrs

from weft.stages.config import ModelConfig
from weft.stages.layer_fields import layer_fields
from weft.stages.layout import StageLayout, balance, split_layers

_REQUESTS, _CONTEXT = 64, 512
"""Of the step that is reckoned with."""
_BYTES_PER_LOGIT = 26
"""What sampling costs, as bytes that could be read meanwhile: measured on an H200, 60 us for 64 requests and 151,936
tokens."""


@attrs.frozen
class Weights:
    """The bytes of a layer's weights: those that every step reads, and those of its experts.

    Args:
        share: of the experts, what one token chooses.
    """

    fixed: int
    experts: int
    share: float = 0.0

    def read(self, size: int) -> float:
        """What a step of `size` requests reads, if all experts are as likely: any is left out by all tokens with
        probability `(1 - share) ** size`."""
        return self.fixed + self.experts * (1 - (1 - self.share) ** size)


@functools.lru_cache(maxsize=16)  # half a second where every layer has 128 experts
def layer_weights(config: ModelConfig) -> tuple[Weights, ...]:
    """Of every layer."""
    return tuple(_layer_weights(config, index) for index in range(config.num_layers))


def _layer_weights(config: ModelConfig, index: int) -> Weights:
    fields = layer_fields(config, index)
    fixed = experts = 0
    for name, field in fields.items():
        count = math.prod(field.shape) * (field.dtype or config.dtype).itemsize
        of_experts = "router" in fields and name.startswith(("gate_up", "down"))
        fixed, experts = fixed + count * (not of_experts), experts + count * of_experts
    return Weights(fixed, experts, 0.0 if config.moe is None else config.moe.top_k / config.moe.num_experts)


def split_model(config: ModelConfig, num_stages: int) -> tuple[StageLayout, ...]:
    """The stages that an engine, a runner and `weft.load(..., stage=...)` split a model into: contiguous, the slowest
    as fast as can be (`balance`), if a stage is as slow as the bytes are many that it reads.

    Reckoned is a decode step of 64 requests at a context of 512 tokens: weights, of experts those that are chosen, keys
    and values; and on the last stage the head, and the sampler.

    Args:
        config: of the whole model.
        num_stages: from one to one a layer.

    Returns:
        The layout of each stage, in order.

    Raises:
        ProgramError: fewer than one stage, or more stages than layers.
    """
    if num_stages == 1:
        return split_layers(config.num_layers, 1)
    kv = 2 * config.num_kv_heads * config.head_dim * config.dtype.itemsize * _REQUESTS * _CONTEXT
    layers = [weights.read(_REQUESTS) + kv for weights in layer_weights(config)]
    last = config.vocab_size * (config.hidden_size * config.dtype.itemsize + _REQUESTS * _BYTES_PER_LOGIT)
    return balance(layers, num_stages, last=last)
