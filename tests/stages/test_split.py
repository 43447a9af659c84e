"""The split of a model that engines, runners and loaders share: by the bytes that a stage reads."""

import pytest

from weft.errors import ProgramError
from weft.stages import DEMO, load, load_config, split_model
from weft.stages.config import parse_config
from weft.stages.random_weights import PRESETS
from weft.transforms import make_runner
from weft.transforms.graphs.ladder import Limits


@pytest.mark.parametrize(
    ("preset", "num_stages", "sizes"),
    [("qwen3-30b-a3b-fp8", 2, [25, 23]), ("llama-3.1-8b", 2, [17, 15]), ("qwen3-0.6b", 4, [8, 8, 8, 4])],
)
def test_the_last_stage_has_fewer_layers_for_its_head(preset: str, num_stages: int, sizes: list[int]) -> None:
    stages = split_model(parse_config(PRESETS[preset], source=preset), num_stages)
    assert [len(stage.layers) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage.layers] == list(range(sum(sizes)))


def test_loaders_and_runners_split_alike() -> None:
    config = load_config(DEMO)
    for num_stages in range(1, config.num_layers + 1):
        stages = split_model(config, num_stages)
        assert tuple(load(DEMO, "cpu", stage=(i, num_stages)).layout for i in range(num_stages)) == stages
        assert make_runner(load(DEMO, "cpu"), Limits(1, 1), num_stages=num_stages, mode="none").layouts == stages


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ProgramError):
        split_model(load_config(DEMO), 7)
