"""`weft.stages.config` against transformers' configurations, and its refusals."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from configs import LLAMA, QWEN2, QWEN3, QWEN3_MOE, SMALL, assert_agrees, parse
from hypothesis import given, settings, strategies as st
from theirs import CLASSES
from transformers import PretrainedConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeSparseMoeBlock,
)

from weft.errors import CheckpointNotFoundError, ConfigError
from weft.proofs._strategies.models import moe_fields, window_fields
from weft.stages.attention.rope import Rope
from weft.stages.checkpoints.formats import load_config
from weft.stages.config import MoeConfig


def written(config: PretrainedConfig, architecture: str, folder: Path) -> dict[str, Any]:
    """The config.json that transformers' save_pretrained writes."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return dict(json.loads((folder / "config.json").read_text()))


@st.composite
def transformers_configs(draw: st.DrawFn) -> tuple[str, PretrainedConfig]:
    architecture = draw(st.sampled_from(list(CLASSES)))
    kv_heads = draw(st.integers(1, 4))
    groups = draw(st.integers(1, 4))
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
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw(st.sampled_from([1e4, 5e5])),
        },
    }
    if architecture not in ("Qwen2ForCausalLM", "MistralForCausalLM"):
        fields["attention_bias"] = draw(st.booleans())
    if architecture != "Qwen2ForCausalLM":
        fields |= draw(
            st.fixed_dictionaries({}, optional={"head_dim": st.sampled_from([2, 8, 64])})
        )
    if architecture == "LlamaForCausalLM":
        fields["mlp_bias"] = draw(st.booleans())
    else:
        fields |= draw(window_fields(architecture, fields["num_hidden_layers"]))
    if architecture == "Qwen3MoeForCausalLM":
        fields |= draw(moe_fields(fields["num_hidden_layers"]))
    return architecture, CLASSES[architecture][0](**fields)


@given(drawn=transformers_configs())
@settings(max_examples=60, deadline=None)
def test_what_transformers_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[str, PretrainedConfig]
) -> None:
    architecture, config = drawn
    folder = tmp_path_factory.mktemp("config")
    written(config, architecture, folder)
    assert_agrees(load_config(folder), config, architecture)


SUPPORTED = (
    "weft supports the architectures LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM,"
    " Qwen3MoeForCausalLM"
)
SLIDING = {"use_sliding_window": True, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("raw", "problem", "instead"),
    [
        (
            {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
            "config.json has architectures=['GemmaForCausalLM']",
            SUPPORTED,
        ),
        (
            {"architectures": ["LlamaForCausalLM", "LlamaModel"]},
            "config.json has architectures=['LlamaForCausalLM', 'LlamaModel']",
            SUPPORTED,
        ),
        (
            {"architectures": "LlamaForCausalLM"},
            "config.json has architectures='LlamaForCausalLM'",
            SUPPORTED,
        ),
        ({"model_type": "gemma"}, "config.json has model_type='gemma'", SUPPORTED),
        ({}, "config.json has no model_type", SUPPORTED),
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
        (
            {**QWEN3, "head_dim": None},
            "config.json has head_dim=None",
            "head_dim is a whole number, 1 or more",
        ),
        (
            {**LLAMA, "vocab_size": 0},
            "config.json has vocab_size=0",
            "vocab_size is a whole number, 1 or more",
        ),
        (
            {**LLAMA, "hidden_size": 64.0},
            "config.json has hidden_size=64.0",
            "hidden_size is a whole number, 1 or",
        ),
        (
            {**LLAMA, "num_hidden_layers": True},
            "config.json has num_hidden_layers=True",
            "num_hidden_layers is a",
        ),
        (
            {**LLAMA, "rms_norm_eps": "1e-6"},
            "config.json has rms_norm_eps='1e-6'",
            "rms_norm_eps is a finite",
        ),
        (
            {**LLAMA, "tie_word_embeddings": 1},
            "config.json has tie_word_embeddings=1",
            "tie_word_embeddings is true or false",
        ),
        (
            {**LLAMA, "attention_bias": None},
            "config.json has attention_bias=None",
            "attention_bias is true or false",
        ),
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
            {
                **QWEN2,
                "num_hidden_layers": 2,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "config.json has layer_types=['full_attention', 'sliding_attention']",
            (
                "weft supports 'full_attention' in each of the 2 layers, or no layer_types;"
                " 'sliding_attention' beside use_sliding_window=true"
            ),
        ),
        (
            {
                **QWEN2,
                "num_hidden_layers": 2,
                "layer_types": ["full_attention", "linear_attention"],
                **SLIDING,
            },
            "config.json has layer_types=['full_attention', 'linear_attention']",
            (
                "weft supports 'full_attention' or 'sliding_attention' in each of the 2 layers, or"
                " no layer_types"
            ),
        ),
        (
            {**QWEN3_MOE, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, **SLIDING},
            "config.json has layer_types=['full_attention', 'full_attention']",
            (
                "in a qwen3_moe all layers slide: 'sliding_attention' in each of the 2, or no"
                " layer_types"
            ),
        ),
        (
            {**QWEN2, **SLIDING, "sliding_window": 0},
            "config.json has sliding_window=0",
            "sliding_window is a whole number, 1 or more",
        ),
        (
            {**QWEN2, **SLIDING, "max_window_layers": None},
            "config.json has max_window_layers=None",
            "max_window_layers is a whole number of layers",
        ),
        (
            {**QWEN2, "num_hidden_layers": 2, "layer_types": ["full_attention"]},
            "config.json has layer_types=['full_attention']",
            (
                "weft supports 'full_attention' in each of the 2 layers, or no layer_types;"
                " 'sliding_attention' beside use_sliding_window=true"
            ),
        ),
        (  # the right list for so many layers would fill the memory
            {**QWEN2, "num_hidden_layers": 2**31 - 1, "layer_types": ["full_attention"]},
            f"config.json has {2**31 - 1} layers",
            "65536 layers at most",
        ),
        (
            {**LLAMA, "sliding_window": 4096},
            "config.json has sliding_window=4096",
            (
                "a llama has no sliding windows: set sliding_window to null, or name"
                " MistralForCausalLM"
            ),
        ),
        # In Python 0 == False and 1 == True, but neither may be read as the other.
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
def test_what_is_refused(raw: dict[str, Any], problem: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    assert caught.value.call == "parse_config(raw, source='config.json')"
    assert caught.value.problem == problem
    assert caught.value.instead.startswith(instead)


def test_a_window_that_is_switched_off() -> None:
    assert parse({**QWEN2, "sliding_window": 4096}) == parse(QWEN2)
    assert parse({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}) == parse(LLAMA)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_kv_heads": 3}, "num_attention_heads=32 and num_key_value_heads=3"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"head_dim": 3}, "head_dim=3"),
        ({"dtype": torch.int8}, "dtype=torch.int8"),
        ({"architecture": "GPT"}, "architecture='GPT'"),
        ({"num_layers": 2**16 + 1}, "65537 layers"),
        ({"moe": MoeConfig(2**12, 1, 8, True)}, "32 layers of 4096 experts"),
        ({"windows": (4,)}, "windows=[4]"),
        ({"windows": (-1,) * 32}, f"windows={[-1] * 32}"),
        ({"rope": Rope(mrope_section=(1, 2, 3))}, "mrope_section=[1, 2, 3] and head_dim=128"),
    ],
)
def test_a_configuration_is_valid_at_construction(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        attrs.evolve(parse(LLAMA), **changes)
    assert caught.value.problem == problem
    assert caught.value.call.startswith("ModelConfig(architecture=")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"decoder_sparse_step": 2}, {"sparse_step": 2}),
        ({"mlp_only_layers": [1]}, {"dense_layers": (1,)}),
        (
            {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
            {"sparse_step": 2, "dense_layers": (3,)},
        ),
    ],
)
def test_layers_have_experts_where_transformers_has_them(
    theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, **theirs)
    with torch.device("meta"):
        layers = [Qwen3MoeDecoderLayer(config, index) for index in range(6)]
    has_experts = [isinstance(layer.mlp, Qwen3MoeSparseMoeBlock) for layer in layers]
    moe = MoeConfig(num_experts=4, top_k=2, inner=8, renormalize=True, **ours)
    assert [moe.is_sparse(index) for index in range(6)] == has_experts


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
    assert (
        str(missing.value)
        == "load_config('Qwen/Qwen3-0.6B')\n  saw: there is no folder 'Qwen/Qwen3-0.6B'\n"
        "  instead: pass a local folder; `hf download <name> --local-dir <folder>` makes one"
    )
    with pytest.raises(
        CheckpointNotFoundError, match=r"pass 'smollm2', which weft knows, or a local folder; `hf"
    ):
        load_config("smolm2")
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
    assert refused.value.problem == "config.json has hidden_act='gelu'"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json has eos_token_id='</s>'"):
        load_config(tmp_path)
