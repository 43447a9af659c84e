"""Every field of a decoder's configuration is used, has no effect, is refused, or is reported."""

from typing import Any

import pytest
import torch
from configs import CONFIGS, QWEN3, QWEN3_MOE, SMALL, assert_agrees, parse
from hypothesis import assume, given, settings, strategies as st
from theirs import CLASSES
from transformers import PretrainedConfig

from weft.errors import ConfigError, ConfigWarning
from weft.stages.architectures import MOE_FIELDS, NEUTRAL, NEUTRAL_AT

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
    dense = {**QWEN3, **SMALL, name: MOE_CHANGES[name]}
    if name in NEUTRAL_AT:
        with pytest.raises(ConfigError, match=f"weft supports {name}=None in Qwen3ForCausalLM"):
            parse(dense)
    else:
        with pytest.warns(
            ConfigWarning, match=f"weft does not know these fields of config.json, .* {name}="
        ):
            parse(dense)


# A value other than the default, for each neutral field that a decoder's configuration holds.
ODD_VALUES: dict[str, Any] = {
    "_name_or_path": "elsewhere",
    "_model_name_or_path": "elsewhere",
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
    "unk_token_id": 11,
    "tokenizer_class": "T5Tokenizer",
    "num_labels": 5,
    "is_decoder": True,
    "max_window_layers": 0,
    "pretraining_tp": 2,
    "chunk_size_feed_forward": 2,
    "max_sequence_length": 5,
    "max_length": 5,
    "temperature": 0.1,
    "top_k": 3,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [1, 2, 3],
}


@pytest.mark.parametrize("architecture", CLASSES)
def test_neutral_fields_change_nothing(architecture: str) -> None:
    raw = {"architectures": [architecture], **SMALL}
    odd = {**raw, **ODD_VALUES}
    assert set(ODD_VALUES) <= set(NEUTRAL)
    assert parse(odd) == parse(raw)
    config_class, model_class = CLASSES[architecture]
    # Nor in transformers: both models compute the same logits from the same weights.
    plain, strange = (model_class(config_class.from_dict(dict(one))).eval() for one in (raw, odd))
    strange.load_state_dict(plain.state_dict())
    tokens = torch.tensor([[1, 9, 7, 2, 30, 9]])
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, strange(tokens).logits)


@pytest.mark.parametrize("architecture", CLASSES)
def test_no_field_of_transformers_own_is_unknown(architecture: str) -> None:
    """transformers' general fields, all of which a file may contain, are neither refused nor
    reported."""
    for fields in (PretrainedConfig().to_dict(), CLASSES[architecture][0]().to_dict()):
        raw = {name: value for name, value in fields.items() if name != "model_type"}
        parse({**raw, "architectures": [architecture]}, strict=True)


UNSUPPORTED: dict[str, Any] = {
    "hidden_act": "gelu",
    "use_sliding_window": True,
    "partial_rotary_factor": 0.5,
    "is_encoder_decoder": True,
    "add_cross_attention": True,
    "cross_attention_hidden_size": 8,
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
    # In Python 0 == False and 1 == True, but neither may be read as the other.
    kinds = {(type(value), value) for value in NEUTRAL_AT[name] if isinstance(value, int | float)}
    twins = [
        value
        for value in (False, True, 0, 1, 0.0, 1.0)
        if value in NEUTRAL_AT[name] and (type(value), value) not in kinds
    ]
    for value in (UNSUPPORTED.get(name, 2.5), *twins):
        with pytest.raises(ConfigError) as caught:
            parse({**base, name: value})
        assert caught.value.problem == f"config.json has {name}={value!r}"
        assert caught.value.instead.startswith(
            f"weft supports {name}={NEUTRAL_AT[name][0]!r} in LlamaForCausalLM"
        )


@given(
    name=st.text(min_size=1, max_size=20),
    value=st.one_of(st.none(), st.booleans(), st.integers(), st.text()),
)
@settings(max_examples=50, deadline=None)
def test_no_unknown_field_is_overlooked(name: str, value: Any) -> None:
    assume(
        name not in NEUTRAL
        and name not in NEUTRAL_AT
        and name not in CHANGES
        and name != "quantization_config"
    )
    raw = {"architectures": ["LlamaForCausalLM"], name: value}
    with pytest.raises(ConfigError) as caught:
        parse(raw, strict=True)
    assert caught.value.problem == f"config.json has {name}={value!r:.60}"
    assert caught.value.instead.startswith("weft does not know what that does to LlamaForCausalLM")
    with pytest.warns(ConfigWarning) as told:
        assert parse(raw) == parse({"architectures": ["LlamaForCausalLM"]})
    [warning] = told
    said = f"weft does not know these fields of config.json, and ignores them: {name}={value!r:.60}"
    assert str(warning.message) == said


@pytest.mark.parametrize(
    ("count", "last"),
    [
        (1, "field_0=0"),
        (14, "field_13=13"),
        (15, "field_14=14"),
        (16, "field_14=14 and 1 more"),
        (20, "field_14=14 and 5 more"),
    ],
)
def test_unknown_fields_are_told_of_together(count: int, last: str) -> None:
    """`auto_map`, which names a checkpoint's own code, is among them: weft has its own code for
    these architectures."""
    raw = {
        **QWEN3,
        "auto_map": {"AutoModel": "modeling.Model"},
        **{f"field_{i}": i for i in range(count)},
    }
    with pytest.warns(ConfigWarning) as told:
        parse(raw)
    [warning] = told
    assert "ignores them: auto_map={'AutoModel': 'modeling.Model'}, field_0=0" in str(
        warning.message
    )
    assert str(warning.message).endswith(f", {last}")


@pytest.mark.parametrize("architecture", CONFIGS)
def test_missing_fields_have_transformers_defaults(architecture: str) -> None:
    plain = parse({"architectures": [architecture]})
    assert_agrees(plain, CONFIGS[architecture](), architecture)
    for other, config in CONFIGS.items():
        alone = {"model_type": config.model_type, "architectures": []}
        both = {"model_type": config.model_type, "architectures": [architecture]}
        if other == architecture:
            assert parse(alone) == parse(both) == plain
        else:
            assert parse(alone) != plain
            with pytest.raises(
                ConfigError, match=f"model_type is '{CONFIGS[architecture].model_type}' for"
            ):
                parse(both)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_layers_slide_beside_the_field_that_the_error_names(architecture: str) -> None:
    theirs = CONFIGS[architecture]().get_text_config()
    fields: dict[str, Any] = {}
    more = ""
    if hasattr(theirs, "use_sliding_window"):
        fields = {"use_sliding_window": True, "sliding_window": 4}
        more = "; 'sliding_attention' beside use_sliding_window=true"
    elif hasattr(theirs, "sliding_window"):
        fields = {"sliding_window": 4}
        more = "; 'sliding_attention' beside a sliding_window"
    kinds = ["sliding_attention"] * 3
    raw = {
        "architectures": [architecture],
        "num_hidden_layers": 3,
        "layer_types": kinds,
        "sliding_window": None,
    }
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    instead = f"weft supports 'full_attention' in each of the 3 layers, or no layer_types{more}"
    assert (caught.value.problem, caught.value.instead) == (
        f"config.json has layer_types={kinds!r}",
        instead,
    )
    assert not fields or parse(raw | fields).windows == (4, 4, 4)


def test_what_an_architecture_has_anyway_may_be_said() -> None:
    assert parse({**QWEN3, "use_qk_norm": True}, strict=True) == parse(QWEN3)
    with pytest.raises(ConfigError, match="weft supports use_qk_norm=True in Qwen3ForCausalLM"):
        parse({**QWEN3, "use_qk_norm": False})
