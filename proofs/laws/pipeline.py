"""L3, L4 and L13: pipelines and micro-batches are the composition of their stages."""

from collections.abc import Sequence

from torch import Tensor

from weft.descriptor import BatchDescriptor
from weft.proofs.laws.compare import assert_equal, visible, whole
from weft.proofs.strategies.functions import Function
from weft.proofs.strategies.models import Scenario
from weft.state import advance
from weft.transforms.graphify import graphify
from weft.transforms.microbatch import microbatch
from weft.transforms.pipeline import compose, pipeline
from weft.trees import tree_map


def pipeline_is_composition(
    scenario: Scenario,
    num_stages: int,
    microbatches: int,
    ladder: Sequence[BatchDescriptor] | None,
    device: str = "cpu",
) -> None:
    """L3: a pipeline of any split and any number of micro-batches gives the outputs and each stage's state of the
    hand-written sequence; with a ladder, its stages replay."""
    stages, params = scenario.stages(num_stages), scenario.params(num_stages, device)
    plain = compose(stages, advance=advance)
    parts = stages if ladder is None else [graphify(stage, ladder=ladder) for stage in stages]
    spanned = pipeline(parts, microbatches=microbatches, advance=advance)
    state, other = scenario.state(num_stages, device), scenario.state(num_stages, device)
    exact = microbatches == 1 and ladder is None
    for batch in scenario.batches(device):
        state, out = plain(params, state, batch)
        other, seen = spanned(params, other, batch)
        assert_equal("L3 pipeline is composition: output", seen, out, exact=exact)
        assert_equal("L3 pipeline is composition: state", visible(other), visible(state), exact=exact)


def pipeline_is_composition_on_functions(
    functions: Sequence[Function], x: Tensor, microbatches: int, device: str = "cpu"
) -> None:
    """L3 for any pure functions as stages."""
    stages, x = [f.fn for f in functions], x.to(device)
    params, states = tree_map(lambda t: t.to(device), ([f.params for f in functions], [f.state for f in functions]))
    state, out = compose(stages)(params, states, x)
    other, seen = pipeline(stages, microbatches=microbatches)(params, states, x)
    assert_equal("L3 pipeline is composition: output", seen, out, exact=microbatches == 1)
    assert_equal("L3 pipeline is composition: state", other, state, exact=microbatches == 1)


def microbatches_are_one(scenario: Scenario, parts: int, device: str = "cpu") -> None:
    """L13: `microbatch(f, m)` is `f`, its state included."""
    step, params = whole(scenario), scenario.params(1, device)
    cut = microbatch(step, parts)
    state, other = scenario.state(1, device), scenario.state(1, device)
    for batch in scenario.batches(device):
        state, out = step(params, state, batch)
        other, seen = cut(params, other, batch)
        assert_equal("L13 micro-batches: output", seen, out, exact=False)
        assert_equal("L13 micro-batches: state", visible(other), visible(state), exact=False)
