"""Splits over GPUs: each is predicted as by itself, against arithmetic by hand, and what cannot be split is refused."""

import attrs
import pytest

from weft.errors import ConfigError, ProgramError
from weft.stages import DEMO, load_config
from weft.stages.config import ModelConfig
from weft.stages.layout import layer_weights
from weft.stages.shares import share_config
from weft.transforms.pipelines.prediction import Machine, predict_decode
from weft.transforms.pipelines.splits import SplitPlan, plan_splits

SLOW = Machine(bandwidth=1e9, link=1e9, latency=1e-5)


@pytest.fixture
def config() -> ModelConfig:
    return load_config(DEMO)


def test_a_share_reads_its_part_and_pays_for_collectives(config: ModelConfig) -> None:
    size, context, shards = 4, 10, 2
    found = predict_decode(config, 1, shards=shards, requests=size, context=context, cohorts=1, machine=SLOW)
    own, item = share_config(config, shards), config.dtype.itemsize
    row = config.hidden_size * item
    read = sum(weights.read(size) for weights in layer_weights(own))
    kv = size * context * 2 * own.num_kv_heads * own.head_dim * item * config.num_layers
    head = row + -(-config.vocab_size // shards) * row
    sums = (2 * config.num_layers + 1) * (1e-5 + size * row / 1e9)  # two in each layer, and the embedding's
    logits = 1e-5 + size * -(-config.vocab_size // shards) * item / 1e9
    by_hand = (read + kv + head + size * row) / 1e9 + sums + logits
    assert found.splits["balanced"][0]["seconds"] == pytest.approx(by_hand)
    assert found.num_gpus == 2
    assert "each shared by 2 ranks" in str(found)


def test_every_split_is_tried_and_the_fastest_is_best(config: ModelConfig) -> None:
    found = plan_splits(config, 4, requests=8, machine=SLOW)
    assert isinstance(found, SplitPlan)
    assert [(one.load.num_shards, one.load.num_stages) for one in found.predictions] == [(1, 4), (2, 2), (4, 1)]
    for one in found.predictions:
        alone = predict_decode(config, one.load.num_stages, shards=one.load.num_shards, requests=8, machine=SLOW)
        assert one.chosen == alone.chosen
    assert found.best.chosen.tokens_per_second == max(one.chosen.tokens_per_second for one in found.predictions)
    (marked,) = (row for row in found.table().rows if row[-1] == "best")
    assert marked[:2] == (str(found.best.load.num_shards), str(found.best.load.num_stages))


def test_without_links_to_pay_for_shares_are_as_fast_as_their_bytes(config: ModelConfig) -> None:
    one, two = (
        predict_decode(config, 1, shards=shards, requests=1, cohorts=1, context=0, machine=Machine(bandwidth=1e9))
        for shards in (1, 2)
    )
    assert 1.5 < one.chosen.step_time / two.chosen.step_time < 2


def test_slow_links_bound_a_step(config: ModelConfig) -> None:
    found = predict_decode(config, 1, shards=2, requests=1, machine=Machine(latency=1.0))
    assert found.bound().startswith("collectives: ")
    best = plan_splits(config, 2, requests=1, machine=Machine(latency=1.0)).best
    assert (best.load.num_shards, best.load.num_stages) == (1, 2)


def test_refusals(config: ModelConfig) -> None:
    with pytest.raises(ProgramError, match="fewer GPUs"):
        plan_splits(config, 1009)
    with pytest.raises(ProgramError, match="num_gpus=0"):
        plan_splits(config, 0)
    with pytest.raises(ConfigError, match="4 heads"):
        predict_decode(config, 1, shards=3)
    odd = attrs.evolve(config, num_heads=3, num_kv_heads=3, intermediate_size=282)
    assert [one.load.num_shards for one in plan_splits(odd, 6, requests=8).predictions] == [1, 3]
