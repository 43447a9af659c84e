"""The config.json of released models, as their makers publish them.

Those in `SEEN` were compared with public copies. The others are reconstructions: the dimensions are
the models' own, and the other fields come from a sibling in `SEEN`.
"""

from typing import Any

_ALL = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, positions: int, vocab: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "vocab_size": vocab,
    }


def llama(bos: int, eos: int | list[int], version: str, **fields: Any) -> dict[str, Any]:
    family_fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
    }
    plain = {"rope_scaling": None, "tie_word_embeddings": False}
    tokens = {"bos_token_id": bos, "eos_token_id": eos, "transformers_version": version}
    return {**_ALL, **family_fields, **plain, **tokens, **fields}


_NO_BIAS = {"attention_bias": False, "attention_dropout": 0.0}
_LLAMA_3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3_1 = {
    **_NO_BIAS,
    "mlp_bias": False,
    "rope_theta": 500000.0,
    "rope_scaling": {**_LLAMA_3, "rope_type": "llama3"},
}
_LLAMA_3_2 = {
    **_LLAMA_3_1,
    "head_dim": 64,
    "rope_scaling": {**_LLAMA_3, "factor": 32.0, "rope_type": "llama3"},
}
_SMOL = {
    **_NO_BIAS,
    "is_llama_config": True,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}
_ENDS = [128001, 128008, 128009]
_LLAMAS: dict[str, dict[str, Any]] = {
    "Llama-2-7b-hf": llama(
        1,
        2,
        "4.31.0.dev0",
        **sizes(4096, 11008, 32, 32, 32, 4096, 32000),
        _name_or_path="meta-llama/Llama-2-7b-hf",
        torch_dtype="float16",
    ),
    "Meta-Llama-3-8B-Instruct": llama(
        128000,
        128009,
        "4.40.0.dev0",
        **sizes(4096, 14336, 32, 32, 8, 8192, 128256),
        **_NO_BIAS,
        rope_theta=500000.0,
    ),
    "Llama-3.1-8B-Instruct": llama(
        128000, _ENDS, "4.42.3", **sizes(4096, 14336, 32, 32, 8, 131072, 128256), **_LLAMA_3_1
    ),
    "Llama-3.2-1B": llama(
        128000,
        128001,
        "4.45.0.dev0",
        **sizes(2048, 8192, 16, 32, 8, 131072, 128256),
        **_LLAMA_3_2 | {"tie_word_embeddings": True},
    ),
    "Llama-3.2-3B-Instruct": llama(
        128000,
        _ENDS,
        "4.45.0.dev0",
        **sizes(3072, 8192, 28, 24, 8, 131072, 128256),
        **_LLAMA_3_2 | {"tie_word_embeddings": True, "head_dim": 128},
    ),
    "Llama-3.3-70B-Instruct": llama(
        128000,
        _ENDS,
        "4.47.0.dev0",
        **sizes(8192, 28672, 80, 64, 8, 131072, 128256),
        **_LLAMA_3_1,
        head_dim=128,
    ),
    "DeepSeek-R1-Distill-Llama-8B": llama(
        128000, 128001, "4.43.0.dev0", **sizes(4096, 14336, 32, 32, 8, 131072, 128256), **_LLAMA_3_1
    ),
    "TinyLlama-1.1B-Chat-v1.0": llama(
        1,
        2,
        "4.35.0",
        **sizes(2048, 5632, 22, 32, 4, 2048, 32000),
        attention_bias=False,
        rope_theta=10000.0,
    ),
    "SmolLM2-135M-Instruct": llama(
        1,
        2,
        "4.42.3",
        **sizes(576, 1536, 30, 9, 3, 8192, 49152),
        **_SMOL,
        initializer_range=0.041666666666666664,
        pad_token_id=2,
    ),
    "SmolLM2-1.7B": llama(
        0,
        0,
        "4.40.1",
        **sizes(2048, 8192, 24, 32, 32, 8192, 49152),
        **_SMOL | {"rope_theta": 130000},
    ),
    "deepseek-coder-1.3b-base": llama(
        32013,
        32014,
        "4.33.1",
        **sizes(2048, 5504, 24, 16, 16, 16384, 32256),
        rms_norm_eps=1e-06,
        rope_scaling={"factor": 4.0, "type": "linear"},
        rope_theta=100000,
    ),
}


def mistral(version: str, window: int | None, theta: float, vocab: int) -> dict[str, Any]:
    family_fields = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rms_norm_eps": 1e-05,
        "rope_theta": theta,
    }
    tokens = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "transformers_version": version,
    }
    return {
        **_ALL,
        **family_fields,
        **tokens,
        **sizes(4096, 14336, 32, 32, 8, 32768, vocab),
        "sliding_window": window,
    }


_MISTRALS = {
    "Mistral-7B-v0.1": mistral("4.34.0.dev0", 4096, 10000.0, 32000),
    "Mistral-7B-Instruct-v0.3": mistral("4.42.0.dev0", None, 1000000.0, 32768),
}


def qwen(name: str, eos: int, version: str, **fields: Any) -> dict[str, Any]:
    family_fields = {
        "architectures": [f"{name}ForCausalLM"],
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-06,
    }
    window = {"rope_theta": 1000000.0, "use_sliding_window": False, "tie_word_embeddings": True}
    tokens = {"bos_token_id": 151643, "eos_token_id": eos, "transformers_version": version}
    return {**_ALL, **family_fields, **window, **tokens, **fields}


def qwen2(eos: int, version: str, window: int, layers: int, **fields: Any) -> dict[str, Any]:
    family_fields = {"model_type": "qwen2", "sliding_window": window, "max_window_layers": layers}
    return qwen("Qwen2", eos, version, **family_fields, **fields)


def qwen3(eos: int, version: str, layers: int, **fields: Any) -> dict[str, Any]:
    family_fields = {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "rope_scaling": None,
        "rope_theta": 1000000,
    }
    return qwen(
        "Qwen3",
        eos,
        version,
        **{**family_fields, "sliding_window": None, "max_window_layers": layers, **fields},
    )


def qwen3_moe(layers: int, inner: int, **fields: Any) -> dict[str, Any]:
    moe = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
    }
    routed = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    family_fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
    }
    return qwen3(151645, "4.51.0", layers, **{**moe, **routed, **family_fields, **fields})


_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"]
    + [f"model.layers.{i}.{name}" for i in range(48) for name in ("input_layernorm", "mlp.gate")]
    + [f"model.layers.{i}.post_attention_layernorm" for i in range(48)],
}
_QWENS: dict[str, dict[str, Any]] = {
    "Qwen2-0.5B": qwen2(
        151643, "4.40.1", 131072, 24, **sizes(896, 4864, 24, 14, 2, 131072, 151936)
    ),
    "Qwen2-7B-Instruct": qwen2(
        151645,
        "4.41.2",
        131072,
        28,
        **sizes(3584, 18944, 28, 28, 4, 32768, 152064),
        tie_word_embeddings=False,
    ),
    "Qwen2.5-0.5B": qwen2(
        151643, "4.40.1", 32768, 24, **sizes(896, 4864, 24, 14, 2, 32768, 151936), use_mrope=False
    ),
    "Qwen2.5-1.5B-Instruct": qwen2(
        151645, "4.43.1", 32768, 21, **sizes(1536, 8960, 28, 12, 2, 32768, 151936)
    ),
    "Qwen2.5-7B-Instruct": qwen2(
        151645,
        "4.43.1",
        131072,
        28,
        **sizes(3584, 18944, 28, 28, 4, 32768, 152064),
        tie_word_embeddings=False,
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": qwen2(
        151643,
        "4.44.0",
        4096,
        21,
        **sizes(1536, 8960, 28, 12, 2, 131072, 151936),
        tie_word_embeddings=False,
        rope_theta=10000,
        use_mrope=False,
    ),
    "Qwen3-0.6B": qwen3(151645, "4.51.0", 28, **sizes(1024, 3072, 28, 16, 8, 40960, 151936)),
    "Qwen3-4B": qwen3(151645, "4.51.0", 36, **sizes(2560, 9728, 36, 32, 8, 40960, 151936)),
    "Qwen3-8B": qwen3(
        151645,
        "4.51.0",
        36,
        **sizes(4096, 12288, 36, 32, 8, 40960, 151936),
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": qwen3_moe(
        48, 768, **sizes(2048, 6144, 48, 32, 4, 40960, 151936), rope_theta=1000000.0
    ),
    "Qwen3-30B-A3B-FP8": qwen3_moe(
        48,
        768,
        **sizes(2048, 6144, 48, 32, 4, 40960, 151936),
        rope_theta=1000000.0,
        quantization_config=_FP8,
    ),
    "Qwen3-235B-A22B": qwen3_moe(
        94, 1536, **sizes(4096, 12288, 94, 64, 4, 40960, 151936), rope_theta=1000000.0
    ),
    "Qwen3-235B-A22B-Instruct-2507": qwen3_moe(
        94, 1536, **sizes(4096, 12288, 94, 64, 4, 262144, 151936), rope_theta=5000000
    ),
}


def qwen2_vl(hidden: int, **fields: Any) -> dict[str, Any]:
    """All fields in one object, as published."""
    ids = {
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_token_id": 151654,
    }
    vision = {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": hidden,
    }
    patches = {
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    }
    family_fields = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "image_token_id": 151655,
        "video_token_id": 151656,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": vision | patches,
    }
    return {**qwen2(151645, "4.41.2", 32768, 28), **family_fields, **ids, **fields}


_VLS: dict[str, dict[str, Any]] = {
    "Qwen2-VL-2B-Instruct": qwen2_vl(1536, **sizes(1536, 8960, 28, 12, 2, 32768, 151936)),
    "Qwen2-VL-7B-Instruct": qwen2_vl(
        3584, **sizes(3584, 18944, 28, 28, 4, 32768, 152064), tie_word_embeddings=False
    ),
}
RELEASED = {**_LLAMAS, **_MISTRALS, **_QWENS, **_VLS}

# Its rotary embedding has a key that transformers does not know and ignores, too.
R1_0528_QWEN3_8B = qwen3(
    151645,
    "4.51.0",
    36,
    **sizes(4096, 12288, 36, 32, 8, 131072, 151936),
    tie_word_embeddings=False,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "attn_factor": 0.8782488562869419,
    },
)

SEEN = {
    "Llama-2-7b-hf",
    "Meta-Llama-3-8B-Instruct",
    "Llama-3.3-70B-Instruct",
    "TinyLlama-1.1B-Chat-v1.0",
    "Qwen2-0.5B",
    "Qwen2-7B-Instruct",
    "Qwen2.5-0.5B",
    "Qwen2.5-1.5B-Instruct",
    "Qwen3-0.6B",
    "Qwen3-235B-A22B",
    "Qwen3-235B-A22B-Instruct-2507",
    "DeepSeek-R1-0528-Qwen3-8B",
}
