"""Random parameters: the stages' agree with the whole model's."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from saved_models import SMALL, assert_same, whole

from weft.errors import DeviceError, ProgramError
from weft.stages.config import ModelConfig, parse_config
from weft.stages.layer_fields import layer_fields
from weft.stages.layout import split_layers
from weft.stages.params import slice_params
from weft.stages.random_weights import PRESETS, random_model, random_params
from weft.values.trees import tree_leaves


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 2))
    base = parse_config({"model_type": "qwen3", **SMALL, "head_dim": 4}, source="a test")
    names = ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    flags: dict[str, Any] = {name: draw(st.booleans()) for name in names}
    return attrs.evolve(
        base,
        num_layers=draw(st.integers(1, 6)),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        **flags,
    )


@given(config=configs(), data=st.data(), seed=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_random_stages_agree_with_the_whole(
    config: ModelConfig, data: st.DataObject, seed: int
) -> None:
    complete = random_params(config, whole(config), seed=seed)
    layouts = split_layers(config.num_layers, data.draw(st.integers(1, config.num_layers)))
    for layout in layouts:
        assert_same(random_params(config, layout, seed=seed), slice_params(complete, layout))
    assert (complete.lm_head is None) == config.tie_word_embeddings
    for i, layer in enumerate(complete.layers):
        present = {field: tuple(getattr(layer, field).shape) for field in layer_fields(config, i)}
        assert present == {name: field.shape for name, field in layer_fields(config, i).items()}
        assert sum(leaf is not None for leaf in tree_leaves(layer)) == len(present)


def test_random_parameters() -> None:
    config = parse_config({"model_type": "qwen2", **SMALL, "hidden_size": 256}, source="a test")
    params = random_params(config, whole(config), seed=1, dtype=torch.float64, std=0.1)
    layer = params.layers[0]
    other = params.layers[1]
    assert params.norm is not None
    assert float(layer.gate_up_proj.std()) == pytest.approx(0.1, rel=0.05)
    assert float(layer.gate_up_proj.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(params.norm.mean()) == pytest.approx(1.0, abs=0.05)
    assert float(layer.input_layernorm.std()) == pytest.approx(0.1, rel=0.3)
    # Each tensor has its own noise, and another seed has other noise.
    assert not torch.equal(layer.qkv_proj, other.qkv_proj)
    assert not torch.equal(*layer.gate_up_proj.chunk(2))
    again = random_params(config, whole(config), seed=2, dtype=torch.float64, std=0.1)
    assert again.norm is not None
    assert not torch.equal(params.norm, again.norm)


def test_what_no_memory_could_hold_is_refused() -> None:
    config = attrs.evolve(
        parse_config({"model_type": "qwen3", **SMALL}, source="a test"), vocab_size=2**31 - 1
    )
    config = attrs.evolve(config, hidden_size=2**31 - 1)
    with pytest.raises(
        DeviceError, match=r"saw: weights of [0-9.]+ GiB, and cpu has [0-9.]+ GiB of memory\n"
    ):
        random_params(config, whole(config), seed=0)


def test_a_random_models_stage_holds_what_the_whole_model_holds() -> None:
    config = parse_config(PRESETS["tiny"], source="tiny")
    model, last = (
        random_model(config, seed=3, device="cpu", stage=stage) for stage in (None, (1, 2))
    )
    assert (model.tokenizer, model.dtype, model.layout.num_stages) == (None, torch.float32, 1)
    assert torch.equal(model.params.layers[-1].down_proj, last.params.layers[-1].down_proj)
    assert len(last.params.layers) == len(last.layout.layers) < config.num_layers
    assert (model.path.name, random_model(config, seed=3, device="cpu", name="own").path.name) == (
        "model",
        "own",
    )


@pytest.mark.parametrize("stage", [(2, 2), (-1, 2), 1])
def test_a_random_model_has_no_stage_beyond_its_number(stage: Any) -> None:
    with pytest.raises(ProgramError, match=r"saw: stage=.*\n  instead: \(index, num_stages\)"):
        random_model(
            parse_config(PRESETS["tiny"], source="tiny"), seed=3, device="cpu", stage=stage
        )
