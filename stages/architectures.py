"""The architectures that weft knows, and what each field of their config.json is to it."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from weft.stages.moe_config import MOE_FIELDS
from weft.stages.rope import Rope
from weft.stages.vl_config import VL_FIELDS, VL_ROPE, VL_TEXT_TYPES

Allowed = Mapping[str, tuple[Any, ...]]
"""The values of each field that say nothing."""


@attrs.frozen
class Architecture:
    """What sets an architecture apart from the others.

    Args:
        model_type: its name in a config.json.
        defaults: what transformers (5.23) assumes where a file is silent.
        rope: the rotary embedding that it assumes there.
        fields: those that it has beside the common ones.
        neutral_at: as `NEUTRAL_AT`, of this architecture alone.
        text_types: the `model_type` that the decoder's own part of a file, `text_config`, may have; empty: files have
            no such part.
        fixed_biases: whether q, k and v have a bias, and nothing else has, whatever a file says.
        qk_norm: whether queries and keys are normalised a head at a time.
        experts: whether layers have a mixture of experts.
        other_tensors: what the names of tensors begin with that are not the decoder's.
    """

    model_type: str
    defaults: Mapping[str, Any]
    rope: Rope = attrs.field(factory=Rope)
    fields: frozenset[str] = frozenset()
    neutral_at: Allowed = attrs.field(factory=dict)
    text_types: tuple[str, ...] = ()
    fixed_biases: bool = False
    qk_norm: bool = False
    experts: bool = False
    other_tensors: tuple[str, ...] = ()


_QWEN_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "head_dim": None,
    "eos_token_id": None,
}
# Qwen2 has its biases, Qwen3 its norms, and all Qwens their bare MLP, whatever the file says: it may only agree.
_QWEN2_BIASES: Allowed = {"attention_bias": (True,), "mlp_bias": (False,)}
_QWEN3_FIXED: Allowed = {"mlp_bias": (False,), "use_qk_norm": (True, None)}
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "llama",
        {
            "vocab_size": 32_000,
            "intermediate_size": 11_008,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "head_dim": None,
            "eos_token_id": 2,
        },
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", _QWEN_DEFAULTS, neutral_at=_QWEN2_BIASES, fixed_biases=True),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", {**_QWEN_DEFAULTS, "head_dim": 128}, neutral_at=_QWEN3_FIXED, qk_norm=True
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        {**_QWEN_DEFAULTS, "hidden_size": 2048, "intermediate_size": 6144, "num_layers": 24, "num_key_value_heads": 4},
        fields=MOE_FIELDS,
        neutral_at=_QWEN3_FIXED,
        qk_norm=True,
        experts=True,
    ),
    "Qwen2VLForConditionalGeneration": Architecture(
        "qwen2_vl",
        {
            "vocab_size": 152_064,
            "hidden_size": 8192,
            "intermediate_size": 29_568,
            "num_layers": 80,
            "num_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": None,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 151_645,
        },
        rope=VL_ROPE,
        fields=VL_FIELDS,
        neutral_at=_QWEN2_BIASES,
        text_types=VL_TEXT_TYPES,
        fixed_biases=True,
        other_tensors=("visual.",),
    ),
}

_USED = """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps max_position_embeddings rope_parameters rope_theta rope_scaling
    original_max_position_embeddings tie_word_embeddings attention_bias mlp_bias eos_token_id dtype torch_dtype
    sliding_window layer_types quantization_config
"""
USED = frozenset(_USED.split())

# Why a field cannot change what a decoder computes at inference, and the fields of which that is so.
_NEUTRAL_BY_REASON: Mapping[str, str] = {
    "a note about the file or its tools": """_name_or_path name_or_path _model_name_or_path _commit_hash
        transformers_version transformers.js_config unsloth_fixed unsloth_version is_llama_config""",
    "training only": """initializer_range attention_dropout hidden_dropout gradient_checkpointing use_bfloat16
        tf_legacy_loss problem_type router_aux_loss_coef""",
    "which kernels and which extra outputs transformers uses": """use_cache attn_implementation _attn_implementation
        _attn_implementation_autoset output_attentions output_hidden_states return_dict torchscript
        tie_last_hidden_states output_router_logits""",
    "into which parts transformers cuts the work": "pretraining_tp chunk_size_feed_forward",
    "the tokenizer's business": "bos_token_id pad_token_id sep_token_id unk_token_id tokenizer_class prefix",
    "heads for other tasks": "num_labels id2label label2id finetuning_task task_specific_params",
    "encoder-decoder models only": "is_decoder decoder_start_token_id tie_encoder_decoder",
    "full attention has no window": "max_window_layers",
    "an old copy of max_position_embeddings that nothing reads": "max_sequence_length",
    "defaults of transformers' generate, which a weft request says itself": """max_length min_length do_sample
        early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
        repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
        num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
        remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""",
}
NEUTRAL: Mapping[str, str] = {name: reason for reason, names in _NEUTRAL_BY_REASON.items() for name in names.split()}

# Fields of other decoders that change what is computed, and that no tensor's name or shape would betray, or that change
# the sizes which `weft plan` reckons with; what else adds tensors, such as a bias or a norm, is refused where one is
# found that nothing explains.
_ELSEWHERE: Sequence[tuple[tuple[Any, ...], str]] = (
    ((None, 0, 0.0), """attn_logit_softcapping final_logit_softcapping logits_soft_cap logit_softcap logit_cap clip_qkv
        swiglu_limit"""),
    ((None, 1, 1.0), """embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_scale
        lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier attention_value_scale
        embedding_scale scale_emb scale_depth attn_scale routed_scaling_factor n_group topk_group"""),
    ((None, False, 0), """use_qk_norm alibi no_rope_layers no_rope_layer_interval rotary_dim rope_local_base_freq
        local_rope_theta layer_rope_theta attention_chunk_size sliding_window_pattern sliding_window_size
        use_bidirectional_attention attn_temperature_tuning query_pre_attn_scalar dim_model_base scale_embedding
        use_parallel_residual parallel_attn num_kv_shared_layers num_experts num_local_experts n_routed_experts"""),
    ((None, "silu", "swish"), "hidden_activation activation_function"),
    ((None, "softmax"), "scoring_func"),
    ((None, "rope", "rotary"), "position_embedding_type"),
)  # fmt: skip

# Fields that say nothing at these values, and something that weft does not do at any other.
NEUTRAL_AT: Allowed = {name: values for values, names in _ELSEWHERE for name in names.split()} | {
    "hidden_act": ("silu", "swish"),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0, 1, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
