"""The architectures that weft knows: a table with a row for each, and the fields of their
config.json.

To add an architecture, add a row to `ARCHITECTURES`. All share the layers of
`weft.stages.decoder`; where they differ, `weft.stages.config.ModelConfig` has a field. An
architecture that computes something new needs a new field, and the computation in the decoder.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs

from weft.arguments.checks import is_int
from weft.arguments.json_text import Fields
from weft.errors import ConfigWarning
from weft.stages.attention.rope import Rope, unknown_rope_keys

# For each field, the values at which it changes nothing.
Allowed = Mapping[str, tuple[Any, ...]]
_SHOWN = 16
# A `text_config` may have its own values of these, which name the text decoder; the outer ones
# count.
_OF_THE_WHOLE = ("architectures", "model_type")


@attrs.frozen
class Architecture:
    """The properties that distinguish an architecture from the others.

    Args:
        model_type: its name in a config.json.
        defaults: the defaults of transformers (5.23) for missing fields, by their names in a
            config.json.
        rope: the default rotary embedding.
        fields: the fields that it has besides the common ones.
        neutral_at: like `NEUTRAL_AT`, for this architecture only.
        text_types: the values of `model_type` in a file's `text_config`, the usual one first;
            empty: its files have no `text_config`.
        qkv_bias_only: whether q, k and v have a bias and nothing else does, whatever a file says.
        qk_norm: whether queries and keys are normalised, one head at a time.
        experts: whether layers have a mixture of experts.
        windows: the layers with a sliding window, if `sliding_window` is in effect. `some`: those
            that `layer_types` names, or all from `max_window_layers` on; `all`: every layer; empty:
            none, in this architecture.
        window_switch: whether `sliding_window` is in effect only if `use_sliding_window` is true.
        other_tensors: prefixes of the names of tensors that are not the decoder's.
    """

    model_type: str
    defaults: Mapping[str, Any]
    rope: Rope = attrs.field(factory=Rope)
    fields: frozenset[str] = frozenset()
    neutral_at: Allowed = attrs.field(factory=dict)
    text_types: tuple[str, ...] = ()
    qkv_bias_only: bool = False
    qk_norm: bool = False
    experts: bool = False
    windows: Literal["", "some", "all"] = ""
    window_switch: bool = False
    other_tensors: tuple[str, ...] = ()


_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "eos_token_id": None,
}
_QWEN_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
}
# Qwen2 always has its biases, Qwen3 its norms, and every Qwen an MLP without biases; a file that
# says otherwise is refused.
_QWEN2_BIASES: Allowed = {"attention_bias": (True,), "mlp_bias": (False,)}
_MISTRAL_BIASES: Allowed = {"attention_bias": (False,), "mlp_bias": (False,)}
_QWEN3_FIXED: Allowed = {"mlp_bias": (False,), "use_qk_norm": (True, None)}
_WINDOW_FIELDS = frozenset({"use_sliding_window", "max_window_layers"})
# The default of transformers for a missing `sliding_window`.
_WINDOW = 4096
# The fields that an architecture with experts has besides the common ones.
MOE_FIELDS = frozenset(
    {
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    }
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "llama",
        {
            **_DEFAULTS,
            "vocab_size": 32_000,
            "intermediate_size": 11_008,
            "max_position_embeddings": 2048,
            # None: as many as there are query heads; files older than grouped-query attention lack
            # the field.
            "num_key_value_heads": None,
            "eos_token_id": 2,
        },
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        _QWEN_DEFAULTS,
        fields=_WINDOW_FIELDS,
        neutral_at=_QWEN2_BIASES,
        qkv_bias_only=True,
        windows="some",
        window_switch=True,
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        {**_QWEN_DEFAULTS, "head_dim": 128},
        fields=_WINDOW_FIELDS,
        neutral_at=_QWEN3_FIXED,
        qk_norm=True,
        windows="some",
        window_switch=True,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        {
            **_QWEN_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
        },
        fields=MOE_FIELDS | _WINDOW_FIELDS,
        neutral_at=_QWEN3_FIXED,
        qk_norm=True,
        experts=True,
        windows="all",
        window_switch=True,
    ),
    "MistralForCausalLM": Architecture(
        "mistral",
        {
            **_DEFAULTS,
            "vocab_size": 32_000,
            "intermediate_size": 14_336,
            "max_position_embeddings": 131_072,
            "num_key_value_heads": 8,
            "eos_token_id": 2,
        },
        neutral_at=_MISTRAL_BIASES,
        windows="all",
    ),
    # The text decoder alone: weft takes images as embeddings.
    "Qwen2VLForConditionalGeneration": Architecture(
        "qwen2_vl",
        {
            **_DEFAULTS,
            "vocab_size": 152_064,
            "hidden_size": 8192,
            "intermediate_size": 29_568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 151_645,
            "max_window_layers": 80,
        },
        rope=Rope(theta=1e6, mrope_section=(16, 24, 24)),
        fields=frozenset(
            {
                "vision_config",
                "image_token_id",
                "video_token_id",
                "vision_token_id",
                "vision_start_token_id",
                "vision_end_token_id",
            }
        )
        | _WINDOW_FIELDS,
        neutral_at=_QWEN2_BIASES,
        text_types=("qwen2_vl_text", "qwen2_vl"),
        qkv_bias_only=True,
        windows="some",
        window_switch=True,
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

# Fields that cannot change what a decoder computes at inference, grouped by the reason.
_NEUTRAL_BY_REASON: Mapping[str, str] = {
    "a note about the file or its tools": (
        """_name_or_path name_or_path _model_name_or_path _commit_hash
        transformers_version transformers.js_config unsloth_fixed unsloth_version is_llama_config"""
    ),
    "training only": (
        """initializer_range attention_dropout hidden_dropout gradient_checkpointing use_bfloat16
        tf_legacy_loss problem_type router_aux_loss_coef"""
    ),
    "which kernels and which extra outputs transformers uses": (
        """use_cache attn_implementation _attn_implementation
        _attn_implementation_autoset output_attentions output_hidden_states return_dict torchscript
        tie_last_hidden_states output_router_logits"""
    ),
    "into which parts transformers cuts the work": "pretraining_tp chunk_size_feed_forward",
    "the tokenizer's business": (
        "bos_token_id pad_token_id sep_token_id unk_token_id tokenizer_class prefix"
    ),
    "heads for other tasks": "num_labels id2label label2id finetuning_task task_specific_params",
    "encoder-decoder models only": "is_decoder decoder_start_token_id tie_encoder_decoder",
    "layers without a window have no first one": "max_window_layers",
    "an old copy of max_position_embeddings that nothing reads": "max_sequence_length",
    "defaults of transformers' generate, which a weft request says itself": (
        """max_length min_length do_sample
        early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
        repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
        num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
        remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"""
    ),
}
NEUTRAL: Mapping[str, str] = {
    name: reason for reason, names in _NEUTRAL_BY_REASON.items() for name in names.split()
}

# Fields of other decoders that change the computation without changing the name or shape of any
# tensor, or that change the sizes that `weft plan` works with. A field that adds tensors, such as a
# bias or a norm, needs no entry: loading refuses tensors that the configuration does not explain.
_ELSEWHERE: Sequence[tuple[tuple[Any, ...], str]] = (
    (
        (None, 0, 0.0),
        """attn_logit_softcapping final_logit_softcapping logits_soft_cap logit_softcap logit_cap clip_qkv
        swiglu_limit""",
    ),
    (
        (None, 1, 1.0),
        """embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_scale
        lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier attention_value_scale
        embedding_scale scale_emb scale_depth attn_scale routed_scaling_factor n_group topk_group""",
    ),
    (
        (None, False, 0),
        """use_qk_norm alibi no_rope_layers no_rope_layer_interval rotary_dim rope_local_base_freq
        local_rope_theta layer_rope_theta attention_chunk_size sliding_window_pattern sliding_window_size
        use_bidirectional_attention attn_temperature_tuning query_pre_attn_scalar dim_model_base scale_embedding
        use_parallel_residual parallel_attn num_kv_shared_layers num_experts num_local_experts n_routed_experts""",
    ),
    ((None, "silu", "swish"), "hidden_activation activation_function"),
    ((None, "softmax"), "scoring_func"),
    ((None, "rope", "rotary"), "position_embedding_type"),
)

# Fields that change nothing at these values, and at any other value ask for something that weft
# does not support.
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


def supported() -> str:
    """The architectures, for an error."""
    summary = f"weft supports the architectures {', '.join(ARCHITECTURES)}"
    return (
        f"{summary}; another model's module runs by weft.stages.from_module"
        " (proofs/pages/your_modules.md)"
    )


def architecture_of(fields: Fields) -> str:
    """The single name in `architectures`; if that is missing, the architecture of `model_type`.

    Raises:
        ConfigError: an architecture that weft does not know, or two fields that disagree.
    """
    model_type = fields.raw.get("model_type")
    names = fields.raw.get("architectures")
    if not names:
        by_type = {spec.model_type: name for name, spec in ARCHITECTURES.items()}
        instead = f"{supported()}; name one in architectures, or its model_type"
        # In a list, as a wrong value may not be hashable.
        fields.check(model_type in list(by_type), "model_type", instead)
        return by_type[str(model_type)]
    if isinstance(names, list | tuple) and len(names) == 1:
        name = names[0]
    else:
        name = None
    fields.check(name in list(ARCHITECTURES), "architectures", supported())
    name = str(name)
    expected_type = ARCHITECTURES[name].model_type
    values = {"architectures": names, "model_type": model_type}
    fields.check(
        model_type in (None, expected_type), values, f"model_type is {expected_type!r} for {name}"
    )
    return name


def decoder_fields(fields: Fields, architecture: str) -> Fields:
    """The fields of the text decoder.

    In an architecture with `text_types`, they are in `text_config` and beside it (transformers 5),
    or all in one object (the files as published).

    Raises:
        ConfigError: a `text_config` that is not an object, or that contradicts the fields beside
            it.
    """
    types = ARCHITECTURES[architecture].text_types
    if not types:
        return fields
    outer = {name: value for name, value in fields.raw.items() if name != "text_config"}
    text = fields.nested("text_config")
    if text is None:
        return attrs.evolve(fields, raw=outer)
    instead = f"text_config.model_type is {types[0]!r} for {architecture}"
    text.check(text.raw.get("model_type", types[0]) in types, "model_type", instead)
    inner = {name: value for name, value in text.raw.items() if name not in _OF_THE_WHOLE}
    for name, value in inner.items():
        values = {name: outer.get(name, value), f"text_config.{name}": value}
        instead = f"write {name} in one place, or the same value in both"
        fields.check(name not in outer or outer[name] == value, values, instead)
    return attrs.evolve(fields, raw=outer | inner)


def check_every_field(fields: Fields, architecture: str, strict: bool) -> None:
    """Refuse each field that asks for something that weft does not support, and report unknown
    fields: in a warning, or in an error if `strict`.

    Raises:
        ConfigError: there is such a field.
    """
    spec = ARCHITECTURES[architecture]
    neutral_at = {**NEUTRAL_AT, **spec.neutral_at}
    unknown: dict[str, Any] = {}
    for name, value in fields.raw.items():
        if name in neutral_at and name not in spec.fields:
            allowed = neutral_at[name]
            # Types are compared, too, as `False == 0` and `True == 1`.
            holds = any(type(value) is type(one) and value == one for one in allowed)
            fields.check(
                holds, name, f"weft supports {name}={allowed[0]!r} in {architecture}, or no {name}"
            )
        elif name not in USED | NEUTRAL.keys() | spec.fields:
            unknown[name] = value
    unknown |= unknown_rope_keys(fields)
    if not unknown:
        return
    shown = list(unknown.items())[:_SHOWN]
    more = len(unknown) - _SHOWN
    listed = ", ".join(f"{name:.60}={value!r:.60}" for name, value in shown) + (
        f" and {more} more" if more > 0 else ""
    )
    if strict:
        instead = (
            f"weft does not know what that does to {architecture}; remove what does nothing, or"
            " leave out strict"
        )
        fields.refuse(listed, instead)
    message = f"weft does not know these fields of {fields.source}, and ignores them: {listed}"
    warnings.warn(message, ConfigWarning, stacklevel=2)


def layer_windows(fields: Fields, spec: Architecture, num_layers: int) -> tuple[int, ...]:
    """The number of last positions that the attention of each layer sees; 0: all. Empty if every
    layer sees all positions.

    Raises:
        ConfigError: kinds of layers, or a window, that the architecture does not have.
    """
    window = fields.raw.get("sliding_window", _WINDOW if spec.windows else None)
    kinds = fields.raw.get("layer_types")
    if not spec.windows:
        full = (
            f"a {spec.model_type} has no sliding windows: set sliding_window to null, or name"
            " MistralForCausalLM"
        )
        fields.check(window is None or "use_sliding_window" in fields.raw, "sliding_window", full)
    on = window is not None and (
        fields.flag("use_sliding_window", False) if spec.window_switch else bool(spec.windows)
    )
    first = 0
    if on and spec.windows == "some":
        # 28 is transformers' default in Qwen2 and Qwen3; Qwen2-VL's is in its row.
        usual = spec.defaults.get("max_window_layers", 28)
        first = fields.value(
            "max_window_layers", usual, lambda one: is_int(one, 0), "a whole number of layers"
        )
    if kinds is not None:
        names = ("full_attention", "sliding_attention") if on else ("full_attention",)
        listed = (
            isinstance(kinds, list)
            and len(kinds) == num_layers
            and all(kind in names for kind in kinds)
        )
        instead = (
            f"weft supports {' or '.join(map(repr, names))} in each of the {num_layers} layers, or"
            " no layer_types"
        )
        if spec.windows and not on:
            switch = "use_sliding_window=true" if spec.window_switch else "a sliding_window"
            instead += f"; 'sliding_attention' beside {switch}"
        fields.check(listed, "layer_types", instead)
    # Without `layer_types`, as transformers derives them: the first layers see all positions.
    slides = [on and i >= first for i in range(num_layers)]
    if kinds is not None:
        sliding = [kind == "sliding_attention" for kind in kinds]
        every = f"in a {spec.model_type} all layers slide: "
        every += f"'sliding_attention' in each of the {num_layers}, or no layer_types"
        fields.check(spec.windows != "all" or sliding == slides, "layer_types", every)
        slides = sliding
    if not any(slides):
        return ()
    size = fields.integer("sliding_window", _WINDOW)
    return tuple(size if slide else 0 for slide in slides)
