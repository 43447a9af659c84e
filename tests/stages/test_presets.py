"""Presets have the dimensions of the models that they are named after."""

import math

import pytest

from weft.stages.checkpoints.reading import tensor_shapes
from weft.stages.config import parse_config
from weft.stages.layout import split_layers
from weft.stages.random_weights import PRESETS

PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b-fp8": 32_762_123_264,
    "qwen3-30b-a3b-fp8": 30_532_122_624,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
}


def test_every_preset_of_a_model_is_counted() -> None:
    assert {*PARAMETERS} == {*PRESETS} - {"tiny"}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_as_many_parameters_as_the_models(name: str) -> None:
    config = parse_config(PRESETS[name], source=name)
    (whole,) = split_layers(config.num_layers, 1)
    shapes = {
        name: shape for name, shape in tensor_shapes(config, whole).items() if "scale" not in name
    }
    assert sum(map(math.prod, shapes.values())) == PARAMETERS[name]
