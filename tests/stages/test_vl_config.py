"""The text decoder's part of a Qwen2-VL config.json, as transformers reads it, and what contradicts itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2VLConfig

from weft.errors import ConfigError
from weft.stages.config import ModelConfig, load_config, parse_config
from weft.stages.rope import Rope

# The form in which the models were published: all in one object.
QWEN2_VL_2B = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "patch_size": 14},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def parse(raw: dict[str, Any]) -> ModelConfig:
    return parse_config(raw, source="config.json")


def as_theirs(config: Qwen2VLConfig) -> ModelConfig:
    text: Any = config.text_config
    return ModelConfig(
        architecture="Qwen2VLForConditionalGeneration",
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=text.hidden_size // text.num_attention_heads,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        rope=Rope(
            theta=text.rope_parameters["rope_theta"],
            mrope_section=tuple(text.rope_parameters.get("mrope_section", (16, 24, 24))),
        ),
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(text.eos_token_id,),
        dtype=config.dtype or torch.float32,
    )


def test_a_published_file_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    theirs = Qwen2VLConfig.from_dict(json.loads(json.dumps(QWEN2_VL_2B)))
    assert parse(QWEN2_VL_2B) == as_theirs(theirs)
    theirs.architectures = QWEN2_VL_2B["architectures"]
    theirs.save_pretrained(tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    assert load_config(tmp_path) == parse(QWEN2_VL_2B)


def test_missing_fields_have_transformers_defaults() -> None:
    assert parse({"model_type": "qwen2_vl"}) == as_theirs(Qwen2VLConfig())


@pytest.mark.parametrize(
    ("changes", "seen", "instead"),
    [
        ({"text_config": [1]}, "config.json has text_config=[1]", "text_config is an object, or null"),
        (
            {"text_config": {"hidden_size": 8}},
            "config.json has hidden_size=1536 and text_config.hidden_size=8",
            "give hidden_size once",
        ),
        (
            {"text_config": {"model_type": "qwen3"}},
            "config.json has text_config={'model_type': 'qwen3'}",
            "text_config.model_type is 'qwen2_vl_text' for Qwen2VLForConditionalGeneration",
        ),
        (
            {"text_config": {"window": 3}},
            "config.json has window=3",
            "weft does not know what window does to Qwen2VLForConditionalGeneration",
        ),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}},
            "config.json has mrope_section=[16, 24, 23] and head_dim=128",
            "mrope_section adds up to the 64 pairs of a head",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], seen: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(QWEN2_VL_2B | changes)
    assert caught.value.seen == seen
    assert caught.value.instead.startswith(instead)
