"""Helpers for tests of configurations: small ones, and comparisons with transformers."""

from typing import Any

import torch
from theirs import CLASSES
from transformers import Qwen2VLConfig

from weft.stages.attention.rope import Rope
from weft.stages.config import ModelConfig, MoeConfig, parse_config

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"]}
QWEN3_MOE: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"]}
QWEN2_VL: dict[str, Any] = {"architectures": ["Qwen2VLForConditionalGeneration"]}
# transformers' configuration of each architecture.
CONFIGS: dict[str, Any] = {name: pair[0] for name, pair in CLASSES.items()} | {
    QWEN2_VL["architectures"][0]: Qwen2VLConfig
}


def parse(raw: dict[str, Any], *, strict: bool = False) -> ModelConfig:
    return parse_config(raw, source="config.json", strict=strict)


def assert_agrees(ours: ModelConfig, theirs: Any, architecture: str) -> None:
    """Compare field by field; of the rotary embedding, only the fields that all transformers
    configurations have."""
    text = theirs.get_text_config()
    is_qwen2 = architecture.startswith("Qwen2")
    attention_bias = is_qwen2 or getattr(text, "attention_bias", False)
    eos = text.eos_token_id
    assert ours == ModelConfig(
        architecture=architecture,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        rope=Rope(
            theta=text.rope_parameters["rope_theta"], mrope_section=section_of(text, architecture)
        ),
        tie_word_embeddings=theirs.tie_word_embeddings,
        qkv_bias=attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=getattr(text, "mlp_bias", False),
        qk_norm=architecture.startswith("Qwen3"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=theirs.dtype or torch.float32,
        moe=None if architecture != "Qwen3MoeForCausalLM" else experts_of(text),
        windows=windows_of(text),
    )


def windows_of(text: Any) -> tuple[int, ...]:
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    windows = tuple(window if window and kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def section_of(text: Any, architecture: str) -> tuple[int, int, int] | None:
    if architecture != QWEN2_VL["architectures"][0]:
        return None
    time, height, width = text.rope_parameters.get("mrope_section", (16, 24, 24))
    return time, height, width


def experts_of(theirs: Any) -> MoeConfig:
    return MoeConfig(
        num_experts=theirs.num_experts,
        top_k=theirs.num_experts_per_tok,
        inner=theirs.moe_intermediate_size,
        renormalize=theirs.norm_topk_prob,
        sparse_step=theirs.decoder_sparse_step,
        dense_layers=tuple(theirs.mlp_only_layers),
    )
