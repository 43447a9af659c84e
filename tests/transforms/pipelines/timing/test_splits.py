"""Splits over GPUs: each prediction equals a separate one and arithmetic by hand, and impossible
splits are refused."""

import attrs
import pytest

from weft.effects import Send
from weft.errors import ConfigError, ProgramError
from weft.stages import DEMO, load_config
from weft.stages.config import ModelConfig
from weft.stages.layout import BYTES_PER_LOGIT, layer_weights
from weft.stages.shares import share_config
from weft.transforms.pipelines.timing.costs import Costs, transfer_seconds
from weft.transforms.pipelines.timing.hardware import KERNELS_PER_LAYER, Machine
from weft.transforms.pipelines.timing.prediction import predict_decode
from weft.transforms.pipelines.timing.splits import SplitPlan, plan_splits

SLOW = Machine(bandwidth=1e9, link=1e9, latency=1e-5)


@pytest.fixture
def config() -> ModelConfig:
    return load_config(DEMO)


@pytest.mark.parametrize(("size", "rows"), [(4, 2), (5, 3), (1, 1)])
def test_a_share_reads_its_part_and_pays_for_collectives(
    config: ModelConfig, size: int, rows: int
) -> None:
    """Each rank gets the logits of its rows, and then all tokens and logprobs. With a single row,
    it already has them."""
    context = 10
    shards = 2
    prediction = predict_decode(
        config, 1, shards=shards, requests=size, context=context, cohorts=1, machine=SLOW
    )
    rank_config = share_config(config, shards)
    item = config.dtype.itemsize
    row = config.hidden_size * item
    read = sum(weights.read(size) for weights in layer_weights(rank_config))
    kv = (
        size
        * context
        * 2
        * rank_config.num_kv_heads
        * rank_config.head_dim
        * item
        * config.num_layers
    )
    head = row + -(-config.vocab_size // shards) * row
    # Two in each layer, and the embedding's
    sums = (2 * config.num_layers + 1) * (1e-5 + size * row / 1e9)
    logits = 1e-5 + rows * -(-config.vocab_size // shards) * item / 1e9
    tokens = 1e-5 + rows * 12 / 1e9 if size > 1 else 0
    sampling = rows * config.vocab_size * BYTES_PER_LOGIT
    by_hand = (read + kv + head + size * row + sampling) / 1e9 + sums + logits + tokens
    assert prediction.splits["balanced"][0]["seconds"] == pytest.approx(by_hand)
    assert prediction.num_gpus == 2
    assert "each shared by 2 ranks" in str(prediction)


def test_every_split_is_tried_and_the_fastest_is_best(config: ModelConfig) -> None:
    plan = plan_splits(config, 4, requests=8, machine=SLOW)
    assert isinstance(plan, SplitPlan)
    assert [(one.load.num_shards, one.load.num_stages) for one in plan.predictions] == [
        (1, 4),
        (2, 2),
        (4, 1),
    ]
    for one in plan.predictions:
        alone = predict_decode(
            config, one.load.num_stages, shards=one.load.num_shards, requests=8, machine=SLOW
        )
        assert one.chosen == alone.chosen
    assert plan.best.chosen.tokens_per_second == max(
        one.chosen.tokens_per_second for one in plan.predictions
    )
    (marked,) = (line.split() for line in str(plan).splitlines() if line.endswith("best"))
    assert tuple(marked[:2]) == (str(plan.best.load.num_shards), str(plan.best.load.num_stages))


def test_without_links_to_pay_for_shares_are_as_fast_as_their_bytes(config: ModelConfig) -> None:
    one, two = (
        predict_decode(
            config,
            1,
            shards=shards,
            requests=1,
            cohorts=1,
            context=0,
            machine=Machine(bandwidth=1e9),
        )
        for shards in (1, 2)
    )
    assert 1.5 < one.chosen.step_time / two.chosen.step_time < 2


def test_slow_links_bound_a_step(config: ModelConfig) -> None:
    prediction = predict_decode(config, 1, shards=2, requests=1, machine=Machine(latency=1.0))
    assert prediction.bound().startswith("collectives: ")
    best = plan_splits(config, 2, requests=1, machine=Machine(latency=1.0)).best
    assert (best.load.num_shards, best.load.num_stages) == (1, 2)


NODES = Machine(
    bandwidth=1e9, link=1e9, latency=1e-5, gpus_per_node=2, node_link=1e8, node_latency=1e-4
)


def test_ranks_of_two_nodes_pay_for_the_network(config: ModelConfig) -> None:
    size = 4
    row = config.hidden_size * config.dtype.itemsize
    inside, across = (
        predict_decode(config, 1, shards=n, requests=size, machine=NODES).load for n in (2, 4)
    )
    assert inside.all_reduce(size) == pytest.approx(1e-5 + size * row / 1e9)
    half = size * row / 2  # summed within a node, then with the other node
    assert across.all_reduce(size) == pytest.approx(2 * (1e-5 + half / 1e9) + 1e-4 + half / 1e8)
    prediction = predict_decode(config, 1, shards=4, requests=size, machine=NODES)
    assert "two all-reduces of 4 ranks, in three phases: within nodes, between them, within" in str(
        prediction
    )
    assert inside.transfer(size) == 0
    one, two = (
        predict_decode(config, 4 // n, shards=n, requests=size, machine=NODES).load for n in (1, 2)
    )
    assert (one.transfer(size), two.transfer(size)) == (pytest.approx(1e-4 + size * row / 1e8),) * 2
    costs = one.costs(size)
    assert isinstance(costs, Costs)
    edges = [transfer_seconds(costs, Send(b, 0), (a, b), 0) for a, b in ((0, 1), (1, 2), (2, 3))]
    assert edges == [1e-5, 1e-4, 1e-5]


def test_a_stage_of_which_one_part_is_in_another_node_counts_for_all(config: ModelConfig) -> None:
    odd = attrs.evolve(config, num_heads=3, num_kv_heads=3, intermediate_size=282)
    load = predict_decode(
        odd, 2, shards=3, requests=4, machine=attrs.evolve(NODES, gpus_per_node=4)
    ).load
    assert [NODES.is_near(load.ranks(stage)) for stage in range(2)] == [False, False]
    assert [load.machine.is_near(load.ranks(stage)) for stage in range(2)] == [True, False]
    assert load.all_reduce(4) > 1e-4


def test_measured_collectives_take_the_place_of_links(config: ModelConfig) -> None:
    prediction = predict_decode(
        config, 1, shards=2, requests=4, machine=Machine(collective=lambda effect: 1.0)
    )
    assert prediction.load.all_reduce(4) == 1.0 < prediction.load.sampling(4)
    assert "as measured" in str(prediction)


def test_kernels_count_in_every_layer(config: ModelConfig) -> None:
    with_, without = (
        predict_decode(config, 1, requests=4, machine=Machine(kernel=k)) for k in (1e-6, 0.0)
    )
    more = with_.chosen.step_time - without.chosen.step_time
    assert more == pytest.approx(KERNELS_PER_LAYER * config.num_layers * 1e-6)
    assert with_.bound().startswith("kernels: ")


def test_refusals(config: ModelConfig) -> None:
    with pytest.raises(ProgramError, match="fewer GPUs"):
        plan_splits(config, 1009)
    with pytest.raises(ProgramError, match="num_gpus=0"):
        plan_splits(config, 0)
    with pytest.raises(ConfigError, match="4 heads"):
        predict_decode(config, 1, shards=3)
    odd = attrs.evolve(config, num_heads=3, num_kv_heads=3, intermediate_size=282)
    assert [one.load.num_shards for one in plan_splits(odd, 6, requests=8).predictions] == [1, 3]
