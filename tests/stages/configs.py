"""What the tests of configurations share: small ones, those of released models, and what transformers says of them."""

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
LLAMA, QWEN2, QWEN3, QWEN3_MOE = ({"architectures": [name]} for name in CLASSES)
QWEN2_VL = {"architectures": ["Qwen2VLForConditionalGeneration"]}

# Released models, in the form in which transformers 4 wrote their files; Qwen2-VL's holds all in one object.
_ALL = {"hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
_LLAMA = {**_ALL, **LLAMA, "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None}
_NO_BIAS = {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": True}
LLAMA_2 = {
    **_LLAMA,
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "vocab_size": 32000,
}
LLAMA_3_2 = {
    **_LLAMA,
    **_NO_BIAS,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "transformers_version": "4.45.0.dev0",
    "vocab_size": 128256,
}
SMOLLM2 = {
    **_LLAMA,
    **_NO_BIAS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "vocab_size": 49152,
}
_QWEN = {
    **_ALL,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_2_5 = {
    **_QWEN,
    **QWEN2,
    "eos_token_id": 151643,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "transformers_version": "4.40.1",
    "use_mrope": False,
}
QWEN_3 = {
    **_QWEN,
    **QWEN3,
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "transformers_version": "4.51.0",
}
QWEN2_VL_2B = {
    **_QWEN,
    **QWEN2_VL,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "transformers_version": "4.41.2",
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "patch_size": 14},
}


def parse(raw: dict[str, Any], *, strict: bool = False) -> ModelConfig:
    return parse_config(raw, source="config.json", strict=strict)


def assert_agrees(ours: ModelConfig, theirs: Any, architecture: str) -> None:
    """Field by field; of the rotary embedding what transformers keeps in each of its configurations, not scaling."""
    text, is_qwen2 = theirs.get_text_config(), architecture.startswith("Qwen2")
    attention_bias = is_qwen2 or text.attention_bias
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
        rope=Rope(theta=text.rope_parameters["rope_theta"], mrope_section=section_of(text, architecture)),
        tie_word_embeddings=theirs.tie_word_embeddings,
        qkv_bias=attention_bias,
        o_bias=attention_bias and not is_qwen2,
        mlp_bias=getattr(text, "mlp_bias", False),
        qk_norm=architecture.startswith("Qwen3"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=theirs.dtype or torch.float32,
        moe=None if architecture != "Qwen3MoeForCausalLM" else experts_of(text),
    )


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
