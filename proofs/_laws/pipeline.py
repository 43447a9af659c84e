"""L3, L4 and L13: pipelines and micro-batches equal the composition of their stages."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.batches.descriptor import BatchDescriptor
from weft.batches.state import advance
from weft.proofs._laws.compare import whole
from weft.proofs._strategies.captures.functions import Function
from weft.proofs._strategies.models import Scenario
from weft.proofs.checks.difference import assert_equal, visible
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import microbatch
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.values.trees import tree_map


def pipeline_is_composition(
    scenario: Scenario,
    num_stages: int,
    microbatches: int,
    ladder: Sequence[BatchDescriptor] | None,
    device: str = "cpu",
) -> None:
    """L3: a pipeline with any split and any number of micro-batches gives the outputs and states of
    `compose` of its stages; with a ladder, its stages replay."""
    stages = scenario.stages(num_stages, device)
    params = scenario.params(num_stages, device)
    plain = compose(stages, advance=advance)
    if ladder is None:
        parts = stages
    else:
        parts = [graphify(stage, ladder=ladder) for stage in stages]
    spanned = pipeline(parts, microbatches=microbatches, advance=advance)
    state = scenario.state(num_stages, device)
    other = scenario.state(num_stages, device)
    # Micro-batches and padding change the shapes of the products, and so their rounding.
    exact = microbatches == 1 and ladder is None
    for batch in scenario.batches(device):
        state, out = plain(params, state, batch)
        other, result = spanned(params, other, batch)
        assert_equal("L3 pipeline is composition: output", result, out, exact=exact)
        assert_equal(
            "L3 pipeline is composition: state", visible(other), visible(state), exact=exact
        )


def pipeline_is_composition_on_functions(
    functions: Sequence[Function], x: Tensor, microbatches: int, device: str = "cpu"
) -> None:
    """L3 for arbitrary pure functions as stages."""
    stages = [f.fn for f in functions]
    x = x.to(device)
    params, states = tree_map(
        lambda t: t.to(device), ([f.params for f in functions], [f.state for f in functions])
    )
    state, out = compose(stages)(params, states, x)
    other, result = pipeline(stages, microbatches=microbatches)(params, states, x)
    assert_equal("L3 pipeline is composition: output", result, out, exact=microbatches == 1)
    assert_equal("L3 pipeline is composition: state", other, state, exact=microbatches == 1)


def microbatches_are_one(scenario: Scenario, parts: int, device: str = "cpu") -> None:
    """L13: `microbatch(f, m)` gives the outputs and state of `f`."""
    step = whole(scenario, device)
    params = scenario.params(1, device)
    cut = microbatch(step, parts)
    state = scenario.state(1, device)
    other = scenario.state(1, device)
    for batch in scenario.batches(device):
        state, out = step(params, state, batch)
        other, result = cut(params, other, batch)
        assert_equal("L13 micro-batches: output", result, out, exact=False)
        assert_equal("L13 micro-batches: state", visible(other), visible(state), exact=False)


def transforms_commute(
    scenario: Scenario,
    num_stages: int,
    microbatches: int,
    ladder: Sequence[BatchDescriptor],
    device: str = "cpu",
) -> None:
    """L4: `graphify(pipeline(s))`, `pipeline(map(graphify, s))` and `compose(s)` give the same
    outputs and the same state of each stage.

    Splitting a ragged batch reads the host, which a graph cannot do, so several micro-batches need
    uniform classes.
    """
    stages = scenario.stages(num_stages, device)
    params = scenario.params(num_stages, device)
    steps: dict[str, Any] = {
        "compose": compose(stages, advance=advance),
        "pipeline of graphs": pipeline(
            [graphify(s, ladder=ladder) for s in stages], microbatches=microbatches, advance=advance
        ),
        "graph of a pipeline": graphify(
            pipeline(stages, microbatches=microbatches, advance=advance), ladder=ladder
        ),
    }
    states = {name: scenario.state(num_stages, device) for name in steps}
    for batch in scenario.batches(device):
        outs = {}
        for name, step in steps.items():
            states[name], outs[name] = step(params, states[name], batch)
        for name in steps:
            law = f"L4 transforms commute: {name} and compose"
            assert_equal(f"{law}: output", outs[name], outs["compose"], exact=False)
            assert_equal(
                f"{law}: state", visible(states[name]), visible(states["compose"]), exact=False
            )


def transforms_commute_on_functions(
    functions: Sequence[Function], inputs: Sequence[Tensor], microbatches: int, device: str = "cpu"
) -> None:
    """L4 for arbitrary pure functions as stages; bitwise where shapes agree, since all but
    `compose` split the batch alike."""
    stages = [f.fn for f in functions]
    params, state = tree_map(
        lambda t: t.to(device), ([f.params for f in functions], [f.state for f in functions])
    )
    steps: dict[str, Any] = {
        "compose": compose(stages),
        "pipeline": pipeline(stages, microbatches=microbatches),
        "pipeline of graphs": pipeline([graphify(s) for s in stages], microbatches=microbatches),
        "graph of a pipeline": graphify(pipeline(stages, microbatches=microbatches)),
    }
    states = dict.fromkeys(steps, state)
    for x in (x.to(device) for x in inputs):
        outs = {}
        for name, step in steps.items():
            states[name], outs[name] = step(params, states[name], x)
        for name, other, exact in (
            ("pipeline", "compose", microbatches == 1),
            ("pipeline of graphs", "pipeline", True),
            ("graph of a pipeline", "pipeline", True),
        ):
            law = f"L4 transforms commute: {name} and {other}"
            assert_equal(f"{law}: output", outs[name], outs[other], exact=exact)
            assert_equal(f"{law}: state", states[name], states[other], exact=exact)
