"""Random models whose layers are shared by several ranks."""

from typing import Any

import attrs
import torch
from hypothesis import assume, strategies as st

from weft.errors import ConfigError
from weft.proofs._strategies.models import Scenario, scenarios
from weft.stages.choices import pick_experts
from weft.stages.config import ModelConfig, MoeConfig, parse_config
from weft.stages.shares import check_leaves, share_config

# Experts that 2, 3 or 4 ranks can share. Some ranks can share them in one way only.
_SHARED_EXPERTS = MoeConfig(6, 2, 12, True), MoeConfig(12, 3, 5, False, dense_layers=(1,))


@st.composite
def shared_scenarios(draw: st.DrawFn) -> tuple[Scenario, int]:
    """A model, batches for it, and a number of ranks that can share its layers.

    Many models have experts, which ranks share by columns or as whole experts."""
    drawn = draw(
        scenarios(max_layers=2, max_steps=3).filter(lambda scenario: bool(_splits(scenario.config)))
    )
    config = attrs.evolve(
        drawn.config, moe=draw(st.sampled_from((drawn.config.moe, *_SHARED_EXPERTS)))
    )
    config, count = draw(st.sampled_from(_splits(config)))
    return attrs.evolve(drawn, config=config, adapters=(), loras=()), count


def _splits(config: ModelConfig) -> list[tuple[ModelConfig, int]]:
    """The pairs of a configuration with a way to share experts, and a number of ranks that can
    share its layers."""
    ways = [None] if config.moe is None else [None, "columns", "whole"]
    every = [config if how is None else pick_experts(how, config, 2, call="") for how in ways]
    return [
        (candidate, count)
        for candidate in every
        for count in (2, 3, 4)
        if _shares(candidate, count)
    ]


@attrs.frozen
class CutScenario:
    """A batch-invariant model whose sums are cut into leaves, and batches for it.

    Args:
        scenario: the model and its batches.
        dtype: the dtype of its weights, keys and values.
        leaves: the number of leaves of each sum that ranks may share.
        num_stages: the number of stages that it is split into.
        is_captured: whether its steps are graphs.
    """

    scenario: Scenario
    dtype: torch.dtype
    leaves: int
    num_stages: int
    is_captured: bool

    @property
    def numbers_of_ranks(self) -> list[int]:
        """The numbers of ranks, 1 first, that can share its layers and give the same bits."""
        return [count for count in (1, 2, 4) if _shares(self.scenario.config, count, self.leaves)]


@st.composite
def cut_scenarios(draw: st.DrawFn) -> CutScenario:
    """A model of any architecture, perhaps in FP8 or with adapters, with the number of leaves and
    the other options of `CutScenario`."""
    scenario = draw(scenarios(max_layers=2, max_steps=4))
    # 4 is the least number of leaves that 4 ranks can share evenly.
    leaves = draw(st.sampled_from((4, 4, 2, 8)))
    scenario = attrs.evolve(scenario, loras=())
    if in_fp8 := draw(st.sampled_from((False, False, False, True))):
        # In FP8 a leaf is a multiple of 128 columns, and the narrowest sum that ranks share has
        # 256.
        leaves = 2
        scenario = attrs.evolve(
            scenario, config=draw(_configs_in_fp8(scenario.config)), adapters=()
        )
    cut = CutScenario(
        scenario,
        (
            torch.bfloat16
            if in_fp8
            else draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
        ),
        leaves,
        draw(st.integers(1, scenario.config.num_layers)),
        draw(st.booleans()),
    )
    # A single number of ranks has nothing to be compared with.
    assume(len(cut.numbers_of_ranks) > 1)
    return cut


@st.composite
def _configs_in_fp8(draw: st.DrawFn, config: ModelConfig) -> ModelConfig:
    """A model with FP8 linear layers, and the vocabulary and number of layers of another model."""
    # FP8 scales are per block of 128 x 128, so the widths must be larger than the other model's.
    raw: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from((4, 2))),
        "head_dim": draw(st.sampled_from((128, 64))),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        },
    }
    if draw(st.booleans()):
        experts = {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        }
        raw |= {"architectures": ["Qwen3MoeForCausalLM"], **experts}
    return parse_config(raw, source="a drawn configuration in FP8")


def _shares(config: ModelConfig, count: int, leaves: int = 1) -> bool:
    """Whether this many ranks can share the layers of a model whose sums are cut into leaves."""
    try:
        share_config(config, count)
        check_leaves("a drawn model", config, leaves, count)
    except ConfigError:
        return False
    return True
