"""A model's configuration, from the metadata of a GGUF."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from weft.arguments.json_text import Fields
from weft.errors import ConfigError
from weft.stages.checkpoints.gguf.file import GgufFile
from weft.stages.checkpoints.gguf.tensors import KINDS, rope_factors
from weft.stages.config import ModelConfig, parse_fields

# Transformers' classes by llama.cpp's names; llama.cpp has Mistral's models as llama, too.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_NEEDED = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_NEEDED_OF_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_OTHERS = {
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
}
# A note on how the model was trained.
_NEUTRAL = {"rope.scaling.finetuned"}
# The keys that weft does not use, with the values at which they change nothing.
_NEUTRAL_AT: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (True,),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "attention.scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
}
_ENDS = "eos_token_id", "eot_token_id", "eom_token_id"


def read_config(file: GgufFile, call: str, *, strict: bool = False) -> ModelConfig:
    """The configuration of a file's model.

    Its dtype is that of the matrices, or bfloat16 if these are quantised.

    Args:
        strict: raise an error for unknown keys of the architecture, instead of one `ConfigWarning`.

    Raises:
        ConfigError: another architecture, a key that is missing, or one that asks for something
            that weft does not support.
        CheckpointError: no embedding, or invalid factors of the rotary embedding.
    """
    architecture = file.architecture
    if architecture not in _ARCHITECTURES:
        problem = f"{file.path.name} has general.architecture={architecture!r:.60}"
        raise ConfigError(call, problem, f"weft reads GGUFs of {', '.join(_ARCHITECTURES)}")
    prefix = f"{architecture}."
    model_metadata = {
        name.removeprefix(prefix): one
        for name, one in file.metadata.items()
        if name.startswith(prefix)
    }
    fields = Fields(model_metadata, call, file.path.name, prefix)
    raw = dict(_fields_of(file, fields, experts=architecture == "qwen3moe"))
    config = parse_fields(
        Fields(raw, call, f"{file.path.name}, in the words of a config.json,"), strict
    )
    factors = rope_factors(file, config.head_dim // 2, call)
    if factors is None:
        return config
    fields.check(
        config.rope.kind == "default",
        "rope.scaling.type",
        "no scaling type, or no tensor rope_freqs.weight: weft does not combine them",
    )
    return attrs.evolve(config, rope=attrs.evolve(config.rope, factors=factors))


def _fields_of(file: GgufFile, fields: Fields, *, experts: bool) -> Iterator[tuple[str, Any]]:
    """The equivalent fields of a config.json."""
    needed = _NEEDED | (_NEEDED_OF_EXPERTS if experts else {})
    for name, field in needed.items():
        instead = f"a file that has the key {fields.prefix}{name}; convert the model again"
        fields.check(name in fields.raw, name, instead)
        yield field, fields.raw[name]
    window = fields.raw.get("attention.sliding_window", 0)
    fields.check(
        not window or file.architecture == "llama",
        "attention.sliding_window",
        "weft supports it only in llama",
    )
    yield (
        "architectures",
        # Only the window tells a Mistral from a Llama here (`_ARCHITECTURES`).
        ["MistralForCausalLM" if window else _ARCHITECTURES[str(file.architecture)]],
    )
    yield from {"sliding_window": window}.items() if window else ()
    yield from _sizes(file, fields)
    yield from _rope(fields)
    if experts:
        yield from {
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }.items()  # as llama.cpp computes it
    else:
        yield from (
            {"attention_bias": "blk.0.attn_q.bias" in file.tensors}.items() if not window else ()
        )
    yield "eos_token_id", _ends(file, fields)
    for name, value in fields.raw.items():
        if name in _NEUTRAL_AT and name not in needed:
            allowed = _NEUTRAL_AT[name]
            fields.check(
                value in allowed,
                name,
                f"weft supports {fields.prefix}{name}={allowed[-1]!r}, or none",
            )
        elif name not in needed and name not in _OTHERS | _NEUTRAL:
            # Unknown: passed on, so that the parser warns of it.
            yield f"{fields.prefix}{name}", value


def _sizes(file: GgufFile, fields: Fields) -> Iterator[tuple[str, Any]]:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        fields.refuse(
            "no tensor token_embd.weight of two dimensions",
            "copy the file again from where it came from",
        )
    heads, hidden = (
        fields.integer(name, None) for name in ("attention.head_count", "embedding_length")
    )
    layers = fields.integer("block_count", None)
    fields.check(
        # Checked before anything has that size: the count in a malformed file may be 2**31 - 1.
        layers <= len(file.tensors),
        "block_count",
        f"block_count is at most the number of tensors in the file, {len(file.tensors)}",
    )
    size = fields.integer("attention.key_length", max(hidden // heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        fields.check(
            fields.raw.get(name, size) == size, name, f"{name} is the size of a head, {size}"
        )
    yield "head_dim", size
    yield "num_key_value_heads", fields.integer("attention.head_count_kv", heads)
    yield "vocab_size", fields.integer("vocab_size", embedding.shape[0])
    # The format has no key for a tied head: llama.cpp uses the embedding if there is no output
    # matrix.
    yield "tie_word_embeddings", "output.weight" not in file.tensors
    # A matrix of a block, because llama.cpp writes norms in F32 in every GGUF, and the embedding
    # may be packed in another type than the blocks.
    matrix = file.tensors.get("blk.0.ffn_down.weight") or file.tensors.get(
        "blk.0.ffn_down_exps.weight", embedding
    )
    kind = KINDS.get(matrix.kind)
    yield "dtype", "bfloat16" if kind is None else f"{kind}".removeprefix("torch.")


def _rope(fields: Fields) -> Iterator[tuple[str, Any]]:
    yield "rope_theta", fields.number("rope.freq_base", 10_000.0)
    kind = fields.raw.get("rope.scaling.type", "none")
    kinds = "none", "linear", "yarn"
    fields.check(
        kind in kinds,
        "rope.scaling.type",
        f"weft supports {', '.join(kinds)}, and the tensor rope_freqs.weight",
    )
    if kind == "none":
        return
    block = {"rope_type": kind, "factor": fields.number("rope.scaling.factor", 1.0)}
    if kind == "yarn" and "rope.scaling.original_context_length" in fields.raw:
        block["original_max_position_embeddings"] = fields.integer(
            "rope.scaling.original_context_length", None
        )
    yield "rope_scaling", block


def _ends(file: GgufFile, fields: Fields) -> list[int]:
    """The tokens that end a text, or a turn of a chat."""
    tokens = attrs.evolve(fields, raw=file.metadata, prefix="")
    token_ids = (
        tokens.value(f"tokenizer.ggml.{name}", None, _is_token, "a token") for name in _ENDS
    )
    return list(dict.fromkeys(token for token in token_ids if token is not None))


def _is_token(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**31)
