"""The configurations of released models are read like transformers reads them."""

import json
from typing import Any

import attrs
import pytest
import torch
from configs import CONFIGS, assert_agrees, parse
from released import R1_0528_QWEN3_8B, RELEASED, SEEN
from theirs import CLASSES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from weft.errors import ConfigWarning
from weft.stages.attention.rope import Rope, inverse_frequencies
from weft.stages.config import ModelConfig


def assert_as_transformers_reads_it(raw: dict[str, Any], ours: ModelConfig) -> None:
    """The fields agree, and the frequencies of the rotary embedding."""
    architecture = raw["architectures"][0]
    theirs = CONFIGS[architecture].from_dict(json.loads(json.dumps(raw)))
    plain = attrs.evolve(
        ours, rope=Rope(theta=ours.rope.theta, mrope_section=ours.rope.mrope_section), fp8=None
    )
    assert_agrees(plain, theirs, architecture)
    if architecture in CLASSES:
        module = LlamaRotaryEmbedding(theirs)
        frequencies, factor = inverse_frequencies(
            ours.rope, ours.head_dim, ours.max_position_embeddings
        )
        assert torch.equal(frequencies, module.inv_freq)
        assert factor == module.attention_scaling


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_configuration(name: str) -> None:
    """No field is unknown."""
    ours = parse(RELEASED[name], strict=True)
    assert_as_transformers_reads_it(RELEASED[name], ours)
    assert (ours.fp8 is not None) == name.endswith("FP8")


def test_a_rotary_embedding_with_a_key_that_transformers_ignores() -> None:
    with pytest.warns(
        ConfigWarning, match=r"of config.json, and ignores them: rope_scaling.attn_factor=0.8782"
    ):
        ours = parse(R1_0528_QWEN3_8B)
    assert_as_transformers_reads_it(R1_0528_QWEN3_8B, ours)


def test_there_are_many_of_all_architectures() -> None:
    assert len(RELEASED) >= 20
    assert {raw["architectures"][0] for raw in RELEASED.values()} == set(CONFIGS)
    assert len(SEEN) >= 12
    assert {*RELEASED, "DeepSeek-R1-0528-Qwen3-8B"} >= SEEN


def test_llama_3_2s_rope() -> None:
    assert parse(RELEASED["Llama-3.2-1B"]).rope == Rope(
        theta=500_000.0,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
