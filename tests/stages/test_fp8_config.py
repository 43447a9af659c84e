"""Configurations of checkpoints in FP8, as they were released and as transformers writes them."""

from typing import Any

import pytest
from configs import QWEN3, QWEN3_MOE, parse
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import FineGrainedFP8Config

from weft.errors import ConfigError
from weft.stages.config import Fp8Config

FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}


def test_fp8_as_released_checkpoints_and_transformers_write_it() -> None:
    released = {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
    theirs = FineGrainedFP8Config(
        modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"]
    ).to_dict()
    for raw in (released, {**theirs, "quant_method": "fp8"}):
        config = parse({**QWEN3_MOE, "quantization_config": raw})
        assert config.fp8 == Fp8Config(("lm_head", "model.layers.0.mlp.gate"))
    assert parse({**QWEN3_MOE, "quantization_config": None}).fp8 is None


PATTERNS = ["lm_head", "model.layers.1", "gate", "proj", "layers.3", ""]
MODULES = [
    "lm_head",
    "model.layers.1.mlp.up_proj",
    "model.layers.11.mlp.gate",
    "model.layers.3.self_attn.q_proj",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("module", MODULES)
def test_what_is_converted_is_what_transformers_converts(pattern: str, module: str) -> None:
    assert Fp8Config((pattern,)).converts(module) == should_convert_module(module, [pattern])


@pytest.mark.parametrize(
    ("changes", "problem", "instead"),
    [
        (
            {"quant_method": "gptq"},
            "quant_method='gptq'",
            "weights in FP8, or not quantised; where transformers",
        ),
        (
            {"weight_block_size": [64, 64]},
            "weight_block_size=[64, 64]",
            "weft supports quantization_config.weight_",
        ),
        (
            {"activation_scheme": "static"},
            "activation_scheme='static'",
            "weft supports quantization_config.activation",
        ),
        (
            {"bits": 8},
            "bits=8",
            "quantization_config takes quant_method, activation_scheme, weight_block_size, fmt",
        ),
        (
            {"modules_to_not_convert": "x"},
            "modules_to_not_convert='x'",
            "modules_to_not_convert is a list of names",
        ),
        (
            {"modules_to_not_convert": ["lm_head", ".*gate"]},
            "modules_to_not_convert=['lm_head', '.*gate']",
            "modules_to_not_convert is a list of names, without regular expressions",
        ),
    ],
)
def test_other_quantizations_are_refused(
    changes: dict[str, Any], problem: str, instead: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**QWEN3, "quantization_config": {**FP8, **changes}})
    assert caught.value.problem == f"config.json has quantization_config.{problem}"
    assert caught.value.instead.startswith(instead)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"quant_method": "fp8"}, "no quantization_config.weight_block_size"),
        ("fp8", "quantization_config='fp8'"),
        ({"weight_block_size": [128, 128]}, "no quantization_config.quant_method"),
    ],
)
def test_a_quantization_that_says_too_little(raw: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**QWEN3, "quantization_config": raw})
    assert caught.value.problem == f"config.json has {problem}"
