"""What the tests of configurations share: small ones, and what transformers says of them."""

from typing import Any

import torch
from theirs import CLASSES

from weft.stages.config import ModelConfig, parse_config
from weft.stages.moe_config import MoeConfig
from weft.stages.rope import Rope

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def parse(raw: dict[str, Any]) -> ModelConfig:
    return parse_config(raw, source="config.json")


def assert_agrees(ours: ModelConfig, theirs: Any, architecture: str) -> None:
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    attention_bias = getattr(theirs, "attention_bias", architecture == "Qwen2ForCausalLM")
    eos = theirs.eos_token_id
    assert ours == ModelConfig(
        architecture=architecture,
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=theirs.intermediate_size,
        num_layers=theirs.num_hidden_layers,
        num_heads=theirs.num_attention_heads,
        num_kv_heads=theirs.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=theirs.rms_norm_eps,
        max_position_embeddings=theirs.max_position_embeddings,
        rope=Rope(theta=theirs.rope_parameters["rope_theta"]),
        tie_word_embeddings=theirs.tie_word_embeddings,
        qkv_bias=attention_bias,
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=getattr(theirs, "mlp_bias", False),
        qk_norm=architecture.startswith("Qwen3"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=theirs.dtype or torch.float32,
        moe=None if architecture != "Qwen3MoeForCausalLM" else experts_of(theirs),
    )


def experts_of(theirs: Any) -> MoeConfig:
    return MoeConfig(
        num_experts=theirs.num_experts,
        top_k=theirs.num_experts_per_tok,
        inner=theirs.moe_intermediate_size,
        renormalize=theirs.norm_topk_prob,
        sparse_step=theirs.decoder_sparse_step,
        dense_layers=tuple(theirs.mlp_only_layers),
    )


LLAMA, QWEN2, QWEN3, QWEN3_MOE = ({"architectures": [name]} for name in CLASSES)
