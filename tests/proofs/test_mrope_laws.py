"""The laws of steps, on models with mRoPE whose prompts have images and positions: on the tape
everywhere, and on CUDA graphs where there is a GPU."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from weft.proofs import strategies
from weft.proofs._laws.engine.requests import order_is_free
from weft.proofs._laws.graph import graph_is_eager
from weft.proofs._laws.ownership import capture_leaves_no_trace, ownership_is_kept
from weft.proofs._laws.padding import padding_is_inert, stage_padding_is_inert
from weft.proofs._laws.pieces import pieces_are_the_whole
from weft.proofs._laws.pipeline import (
    microbatches_are_one,
    pipeline_is_composition,
    transforms_commute,
)

WITH_LADDER: dict[str, Any] = {
    "L1": graph_is_eager,
    "L2": padding_is_inert,
    "L2, between stages": stage_padding_is_inert,
    "L5": pieces_are_the_whole,
    "L8": capture_leaves_no_trace,
    "L9": ownership_is_kept,
}
SETTINGS = settings(max_examples=25, deadline=None)
# A fixture would be made once for all examples
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.one_of(12, 3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("law", WITH_LADDER)
@given(data=st.data())
@SETTINGS
def test_laws_under_a_ladder(law: str, device: str, data: st.DataObject) -> None:
    scenario = data.draw(strategies.scenarios(min_layers=2, max_layers=2, mrope=True))
    ladder = data.draw(strategies.ladders(scenario.batches(), covered=data.draw(st.booleans())))
    WITH_LADDER[law](scenario, ladder, device)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
@SETTINGS
def test_pipelines_and_micro_batches(device: str, data: st.DataObject) -> None:
    """L3, L4 and L13."""
    scenario = data.draw(strategies.scenarios(max_layers=3, mrope=True))
    ladder = data.draw(strategies.ladders(scenario.batches()))
    num_stages = data.draw(st.integers(1, scenario.config.num_layers))
    pipeline_is_composition(scenario, num_stages, data.draw(st.integers(1, 3)), ladder, device)
    transforms_commute(scenario, num_stages, 1, ladder, device)
    microbatches_are_one(scenario, data.draw(st.integers(1, 4)), device)


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
@SETTINGS
def test_order_is_free(device: str, data: st.DataObject) -> None:
    """L17."""
    scenario = data.draw(strategies.scenarios(max_layers=2, mrope=True))
    orders = [data.draw(st.permutations(range(len(step)))) for step in scenario.moves]
    order_is_free(scenario, orders, data.draw(strategies.ladders(scenario.batches())), device)
