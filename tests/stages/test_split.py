"""The split of a model that engines, runners and loaders share: by the bytes that a stage reads."""

from typing import Any

import pytest
from torch import Tensor

from weft import load
from weft.errors import ProgramError
from weft.stages import DEMO, load_config
from weft.stages.config import parse_config
from weft.stages.layout import layer_weights, split_model
from weft.stages.random_weights import PRESETS, random_params
from weft.transforms import make_runner
from weft.transforms.graphs.ladder import Limits
from weft.values.trees import tree_leaves


@pytest.mark.parametrize(
    ("preset", "num_stages", "sizes"),
    [
        ("qwen3-30b-a3b-fp8", 2, [25, 23]),
        ("llama-3.1-8b", 2, [17, 15]),
        ("qwen3-0.6b", 4, [8, 8, 8, 4]),
    ],
)
def test_the_last_stage_has_fewer_layers_for_its_head(
    preset: str, num_stages: int, sizes: list[int]
) -> None:
    stages = split_model(parse_config(PRESETS[preset], source=preset), num_stages)
    assert [len(stage.layers) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage.layers] == list(range(sum(sizes)))


SMALL: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "qwen3-32b-fp8": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    },
    "qwen3-30b-a3b-fp8": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
    },
}


@pytest.mark.parametrize("preset", SMALL)
def test_the_bytes_of_a_layer_are_those_of_its_tensors(preset: str) -> None:
    config = parse_config({**PRESETS[preset], **SMALL[preset], "vocab_size": 32}, source=preset)
    params = random_params(config, split_model(config, 1)[0], seed=0)
    for layer, weights in zip(params.layers, layer_weights(config), strict=True):
        tensors = [leaf for leaf in tree_leaves(layer) if isinstance(leaf, Tensor)]
        experts = sum(x.nbytes for x in tensors if x.dim() == 3)
        fixed = sum(x.nbytes for x in tensors if x.dim() < 3)
        assert (weights.fixed, weights.experts) == (fixed, experts)
        for size in (1, 3):
            share = 1 - 0.5**size if experts else 0.0
            assert weights.read(size) == pytest.approx(fixed + share * experts)


def test_loaders_and_runners_split_alike() -> None:
    config = load_config(DEMO)
    for num_stages in range(1, config.num_layers + 1):
        stages = split_model(config, num_stages)
        assert (
            tuple(load(DEMO, "cpu", stage=(i, num_stages)).layout for i in range(num_stages))
            == stages
        )
        assert (
            make_runner(load(DEMO, "cpu"), Limits(1, 1), num_stages=num_stages, mode="none").layouts
            == stages
        )


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ProgramError):
        split_model(load_config(DEMO), 7)
