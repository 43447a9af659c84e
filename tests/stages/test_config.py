"""`weft.stages.config` against transformers' configurations, new and old, and every field of them."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import FineGrainedFP8Config

from weft.errors import CheckpointNotFoundError, ConfigError
from weft.proofs.strategies.models import moe_fields
from weft.stages.architectures import NEUTRAL, NEUTRAL_AT
from weft.stages.config import ModelConfig, load_config, parse_config
from weft.stages.fp8_config import Fp8Config
from weft.stages.moe_config import MOE_FIELDS, MoeConfig
from weft.stages.rope import Rope

CONFIG_CLASSES: dict[str, Any] = {
    "LlamaForCausalLM": LlamaConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
    "Qwen3MoeForCausalLM": Qwen3MoeConfig,
}
MODEL_CLASSES: dict[str, Any] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}
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


def written(config: PretrainedConfig, architecture: str, folder: Path) -> dict[str, Any]:
    """What transformers' save_pretrained writes."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return dict(json.loads((folder / "config.json").read_text()))


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


@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_missing_fields_have_transformers_defaults(architecture: str) -> None:
    assert_agrees(parse({"architectures": [architecture]}), CONFIG_CLASSES[architecture](), architecture)
    model_type = CONFIG_CLASSES[architecture].model_type
    assert parse({"model_type": model_type, "architectures": []}) == parse({"architectures": [architecture]})


@st.composite
def transformers_configs(draw: st.DrawFn) -> tuple[str, PretrainedConfig]:
    architecture = draw(st.sampled_from(list(CONFIG_CLASSES)))
    kv_heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    fields: dict[str, Any] = {
        "vocab_size": draw(st.integers(1, 1000)),
        "num_attention_heads": kv_heads * groups,
        "num_key_value_heads": kv_heads,
        "hidden_size": kv_heads * groups * 2 * draw(st.integers(1, 8)),
        "intermediate_size": draw(st.integers(1, 100)),
        "num_hidden_layers": draw(st.integers(1, 6)),
        "max_position_embeddings": draw(st.integers(1, 4096)),
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "tie_word_embeddings": draw(st.booleans()),
        "eos_token_id": draw(st.sampled_from([None, 0, 7, [3, 5]])),
        "dtype": draw(st.sampled_from([None, "float32", "bfloat16", "float16"])),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(st.sampled_from([1e4, 5e5]))},
    }
    if architecture != "Qwen2ForCausalLM":
        fields["attention_bias"] = draw(st.booleans())
        fields |= draw(st.fixed_dictionaries({}, optional={"head_dim": st.sampled_from([2, 8, 64])}))
    if architecture == "LlamaForCausalLM":
        fields["mlp_bias"] = draw(st.booleans())
    if architecture == "Qwen3MoeForCausalLM":
        fields |= draw(moe_fields(fields["num_hidden_layers"]))
    return architecture, CONFIG_CLASSES[architecture](**fields)


@given(drawn=transformers_configs())
@settings(max_examples=60, deadline=None)
def test_what_transformers_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[str, PretrainedConfig]
) -> None:
    architecture, config = drawn
    folder = tmp_path_factory.mktemp("config")
    written(config, architecture, folder)
    assert_agrees(load_config(folder), config, architecture)


# The form in which transformers 4 wrote the configurations of released models.
LLAMA_2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize("raw", [LLAMA_2, LLAMA_3_2, SMOLLM2, QWEN_2_5, QWEN_3])
def test_old_files_are_read_as_transformers_reads_them(raw: dict[str, Any]) -> None:
    architecture = raw["architectures"][0]
    theirs = CONFIG_CLASSES[architecture].from_dict(json.loads(json.dumps(raw)))
    assert_agrees(attrs.evolve(parse(raw), rope=Rope(theta=parse(raw).rope.theta)), theirs, architecture)


def test_llama_3_2s_rope() -> None:
    assert parse(LLAMA_3_2).rope == Rope(
        theta=500_000.0,
        kind="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


CHANGES: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 41,
    "hidden_size": 24,
    "intermediate_size": 25,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 65,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 9.0,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "eos_token_id": 11,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
MOE_CHANGES: dict[str, Any] = {
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 9,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_used_field_is_used(name: str) -> None:
    base = {"architectures": ["LlamaForCausalLM"], **SMALL}
    assert parse({**base, name: CHANGES[name]}) != parse(base)


@pytest.mark.parametrize("name", sorted(MOE_FIELDS))
def test_every_field_of_the_experts_is_used(name: str) -> None:
    base = {**QWEN3_MOE, **SMALL}
    assert parse({**base, name: MOE_CHANGES[name]}) != parse(base)
    with pytest.raises(ConfigError, match=f"weft does not know what {name} does to Qwen3ForCausalLM"):
        parse({**QWEN3, **SMALL, name: MOE_CHANGES[name]})


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def test_fp8_as_released_checkpoints_and_transformers_write_it() -> None:
    released = {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
    theirs = FineGrainedFP8Config(modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"]).to_dict()
    for raw in (released, {**theirs, "quant_method": "fp8"}):
        found = parse({**QWEN3_MOE, "quantization_config": raw})
        assert found.fp8 == Fp8Config(("lm_head", "model.layers.0.mlp.gate"))
    assert parse({**QWEN3_MOE, "quantization_config": None}).fp8 is None


PATTERNS = ["lm_head", "model.layers.1", "gate", r"model\.layers\.\d\.mlp", "proj", "layers.3", ""]
MODULES = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.gate", "model.layers.3.self_attn.q_proj"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("module", MODULES)
def test_what_is_converted_is_what_transformers_converts(pattern: str, module: str) -> None:
    assert Fp8Config((pattern,)).converts(module) == should_convert_module(module, [pattern])


@pytest.mark.parametrize(
    ("changes", "seen", "instead"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'", "weft supports quantization_config.quant_method='fp8'"),
        ({"weight_block_size": [64, 64]}, "weight_block_size=[64, 64]", "weft supports quantization_config.weight_"),
        ({"activation_scheme": "static"}, "activation_scheme='static'", "weft supports quantization_config.activation"),
        ({"bits": 8}, "bits=8", "quantization_config takes quant_method, activation_scheme, weight_block_size, fmt"),
        ({"modules_to_not_convert": "x"}, "modules_to_not_convert='x'", "modules_to_not_convert is a list of names"),
        ({"modules_to_not_convert": ["("]}, "modules_to_not_convert=['(']", "each of modules_to_not_convert is a reg"),
    ],
)
def test_other_quantizations_are_refused(changes: dict[str, Any], seen: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**QWEN3, "quantization_config": {**FP8, **changes}})
    assert caught.value.seen == f"config.json has quantization_config.{seen}"
    assert caught.value.instead.startswith(instead)


@pytest.mark.parametrize("raw", [{"quant_method": "fp8"}, "fp8", {"weight_block_size": [128, 128]}])
def test_a_quantization_that_says_too_little(raw: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**QWEN3, "quantization_config": raw})
    assert caught.value.seen == f"config.json has quantization_config={raw!r}"


# A value other than the default, for each neutral field that a decoder's configuration holds.
ODD_VALUES: dict[str, Any] = {
    "_name_or_path": "elsewhere",
    "transformers_version": "4.0.0",
    "is_llama_config": False,
    "initializer_range": 0.9,
    "attention_dropout": 0.9,
    "use_cache": False,
    "return_dict": True,
    "torchscript": False,
    "output_hidden_states": True,
    "bos_token_id": 7,
    "pad_token_id": 9,
    "tokenizer_class": "T5Tokenizer",
    "num_labels": 5,
    "is_decoder": True,
    "max_window_layers": 0,
    "max_sequence_length": 5,
    "max_length": 5,
    "temperature": 0.1,
    "top_k": 3,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [1, 2, 3],
}


@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_neutral_fields_change_nothing(architecture: str) -> None:
    raw = {"architectures": [architecture], **SMALL}
    odd = {**raw, **ODD_VALUES}
    assert set(ODD_VALUES) <= set(NEUTRAL)
    assert parse(odd) == parse(raw)
    # Nor in transformers: both models compute the same logits from the same weights.
    plain, strange = (
        MODEL_CLASSES[architecture](CONFIG_CLASSES[architecture].from_dict(dict(one))).eval() for one in (raw, odd)
    )
    strange.load_state_dict(plain.state_dict())
    tokens = torch.tensor([[1, 9, 7, 2, 30, 9]])
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, strange(tokens).logits)


UNSUPPORTED = {
    "hidden_act": "gelu",
    "use_sliding_window": True,
    "pretraining_tp": 2,
    "partial_rotary_factor": 0.5,
    "is_encoder_decoder": True,
    "add_cross_attention": True,
    "cross_attention_hidden_size": 8,
    "chunk_size_feed_forward": 2,
    "pruned_heads": {"0": [1]},
    "per_layer_config": {"0": {"intermediate_size": 8}},
    "rope_interleaved": True,
    "use_mrope": True,
}


@pytest.mark.parametrize("name", NEUTRAL_AT)
def test_fields_that_are_neutral_only_at_some_values(name: str) -> None:
    base = {"architectures": ["LlamaForCausalLM"], **SMALL}
    for value in NEUTRAL_AT[name]:
        assert parse({**base, name: value}) == parse(base)
    with pytest.raises(ConfigError) as caught:
        parse({**base, name: UNSUPPORTED[name]})
    assert caught.value.seen == f"config.json has {name}={UNSUPPORTED[name]!r}"
    assert caught.value.instead.startswith(f"weft supports {name}={NEUTRAL_AT[name][0]!r} in LlamaForCausalLM")


@given(name=st.text(min_size=1, max_size=20), value=st.one_of(st.none(), st.booleans(), st.integers(), st.text()))
@settings(max_examples=50, deadline=None)
def test_no_unknown_field_is_overlooked(name: str, value: Any) -> None:
    assume(name not in NEUTRAL and name not in NEUTRAL_AT and name not in CHANGES and name != "quantization_config")
    with pytest.raises(ConfigError) as caught:
        parse({"architectures": ["LlamaForCausalLM"], name: value})
    assert caught.value.seen == f"config.json has {name}={value!r}"
    assert caught.value.instead.startswith(f"weft does not know what {name} does to LlamaForCausalLM")


LLAMA, QWEN2, QWEN3, QWEN3_MOE = ({"architectures": [name]} for name in CONFIG_CLASSES)
SUPPORTED = "weft supports the architectures LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"


@pytest.mark.parametrize(
    ("raw", "seen", "instead"),
    [
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
            "config.json has architectures=['MistralForCausalLM']",
            SUPPORTED,
        ),
        (
            {"architectures": ["LlamaForCausalLM", "LlamaModel"]},
            "config.json has architectures=['LlamaForCausalLM', 'LlamaModel']",
            SUPPORTED,
        ),
        ({"architectures": "LlamaForCausalLM"}, "config.json has architectures='LlamaForCausalLM'", SUPPORTED),
        ({"model_type": "gemma"}, "config.json has model_type='gemma'", SUPPORTED),
        ({}, "config.json has neither architectures nor model_type", SUPPORTED),
        (
            {**LLAMA, "model_type": "qwen2"},
            "config.json has architectures=['LlamaForCausalLM'] and model_type='qwen2'",
            "model_type is 'llama' for LlamaForCausalLM",
        ),
        (
            {**LLAMA, "num_attention_heads": 6, "hidden_size": 12, "num_key_value_heads": 4},
            "config.json has num_attention_heads=6 and num_key_value_heads=4",
            "num_attention_heads is a multiple of num_key_value_heads",
        ),
        (
            {**LLAMA, "num_attention_heads": 6, "hidden_size": 16},
            "config.json has hidden_size=16 and num_attention_heads=6",
            "hidden_size is a multiple of num_attention_heads, or head_dim is given",
        ),
        (
            {**QWEN2, "head_dim": 5},
            "config.json has head_dim=5",
            "head_dim is even: the rotary embedding turns pairs",
        ),
        (
            {**QWEN3_MOE, "num_experts": 4, "num_local_experts": 5},
            "config.json has num_experts=4 and num_local_experts=5",
            "keep num_experts alone",
        ),
        (
            {**QWEN3_MOE, "num_local_experts": 7},
            "config.json has num_experts_per_tok=8 and num_experts=7",
            "num_experts_per_tok is from 1 to num_experts",
        ),
        (
            {**QWEN3_MOE, "mlp_only_layers": 3},
            "config.json has mlp_only_layers=3",
            "mlp_only_layers is a list of layers, or null",
        ),
        ({**QWEN3, "head_dim": None}, "config.json has head_dim=None", "head_dim is a whole number, 1 or more"),
        ({**LLAMA, "vocab_size": 0}, "config.json has vocab_size=0", "vocab_size is a whole number, 1 or more"),
        ({**LLAMA, "hidden_size": 64.0}, "config.json has hidden_size=64.0", "hidden_size is a whole number, 1 or"),
        ({**LLAMA, "num_hidden_layers": True}, "config.json has num_hidden_layers=True", "num_hidden_layers is a"),
        ({**LLAMA, "rms_norm_eps": "1e-6"}, "config.json has rms_norm_eps='1e-6'", "rms_norm_eps is a finite"),
        (
            {**LLAMA, "tie_word_embeddings": 1},
            "config.json has tie_word_embeddings=1",
            "tie_word_embeddings is true or false",
        ),
        ({**LLAMA, "attention_bias": None}, "config.json has attention_bias=None", "attention_bias is true or false"),
        (
            {**QWEN2, "attention_bias": False},
            "config.json has attention_bias=False",
            "weft supports attention_bias=True in Qwen2ForCausalLM, or no attention_bias",
        ),
        (
            {**QWEN3, "mlp_bias": True},
            "config.json has mlp_bias=True",
            "weft supports mlp_bias=False in Qwen3ForCausalLM, or no mlp_bias",
        ),
        (
            {**QWEN2, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            "config.json has layer_types=['full_attention', 'sliding_attention']",
            "weft supports 'full_attention' in each of the 2 layers",
        ),
        (
            {**QWEN2, "num_hidden_layers": 2, "layer_types": ["full_attention"]},
            "config.json has layer_types=['full_attention']",
            "weft supports 'full_attention' in each of the 2 layers",
        ),
        (
            {**LLAMA, "sliding_window": 4096},
            "config.json has sliding_window=4096",
            "weft has no sliding windows: set sliding_window to null",
        ),
        # Python's 0 == False and 1 == True are no reason to read one as the other.
        (
            {**LLAMA, "use_sliding_window": 0},
            "config.json has use_sliding_window=0",
            "weft supports use_sliding_window=False in LlamaForCausalLM",
        ),
        (
            {**LLAMA, "eos_token_id": [2, "</s>"]},
            "config.json has eos_token_id=[2, '</s>']",
            "eos_token_id is a token, a list of tokens, or null",
        ),
        (
            {**LLAMA, "torch_dtype": "int8"},
            "config.json has torch_dtype='int8'",
            "torch_dtype is one of float16, bfloat16, float32, float64",
        ),
        (
            {**LLAMA, "torch_dtype": "float16", "dtype": "bfloat16"},
            "config.json has dtype='bfloat16' and torch_dtype='float16'",
            "keep dtype alone",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "config.json has rope_scaling.type='dynamic'",
            "weft supports the rope types default, linear, llama3, yarn",
        ),
    ],
)
def test_what_is_refused(raw: dict[str, Any], seen: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    assert caught.value.call == "parse_config(raw, source='config.json')"
    assert caught.value.seen == seen
    assert caught.value.instead.startswith(instead)


def test_a_window_that_is_switched_off() -> None:
    assert parse({**QWEN2, "sliding_window": 4096}) == parse(QWEN2)
    assert parse({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}) == parse(LLAMA)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"num_kv_heads": 3}, "num_attention_heads=32 and num_key_value_heads=3"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"head_dim": 3}, "head_dim=3"),
        ({"dtype": torch.int8}, "dtype=torch.int8"),
        ({"architecture": "GPT"}, "architecture='GPT'"),
    ],
)
def test_a_configuration_is_valid_at_construction(changes: dict[str, Any], seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        attrs.evolve(parse(LLAMA), **changes)
    assert caught.value.seen == seen
    assert caught.value.call.startswith("ModelConfig(architecture=")


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (1,)),
        ({"eos_token_id": [5, 6]}, (5, 6)),
        ({"eos_token_id": 5, "temperature": 0.6}, (5,)),
        ({"eos_token_id": None}, ()),
        ({"temperature": 0.6}, ()),
    ],
)
def test_the_generation_config_decides_where_it_is_there(
    tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 1}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_config(tmp_path).eos_token_ids == expected


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as missing:
        load_config("Qwen/Qwen3-0.6B")
    assert str(missing.value) == (
        "load_config('Qwen/Qwen3-0.6B')\n  saw: there is no folder 'Qwen/Qwen3-0.6B'\n"
        "  instead: pass a local folder; `hf download <name> --local-dir <folder>` makes one"
    )
    with pytest.raises(CheckpointNotFoundError, match=r"has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Llama')
    with pytest.raises(ConfigError, match=r"config\.json is not JSON: Unterminated string"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json holds a list, not an object"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_act": "gelu"}))
    with pytest.raises(ConfigError) as refused:
        load_config(str(tmp_path))
    assert refused.value.call == f"load_config({str(tmp_path)!r})"
    assert refused.value.seen == "config.json has hidden_act='gelu'"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json has eos_token_id='</s>'"):
        load_config(tmp_path)
