"""L1: a graph gives the results of its function run eagerly."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.batches.descriptor import BatchDescriptor
from weft.batches.padding import pad, unpad
from weft.proofs._laws.compare import larger, whole
from weft.proofs._strategies.captures.calls import Call, called, worlds
from weft.proofs._strategies.captures.functions import Function, Rows, counting_step
from weft.proofs._strategies.images import ImageScenario, Resolution
from weft.proofs._strategies.models import Scenario
from weft.proofs.checks.difference import LawViolation, assert_equal
from weft.transforms.graphs.dispatch import dispatch
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone
from weft.values.trees import tree_map


def graph_is_eager(
    scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu"
) -> None:
    """L1: a replay gives bitwise the outputs and the whole state of an eager run at the same padded
    descriptor.

    Every batch that some class covers replays, and no class is captured twice for batches with the
    same fields.
    """
    eager = whole(scenario, device)
    graph = graphify(whole(scenario, device), ladder=ladder)
    params = scenario.params(1, device)
    state = scenario.state(1, device)
    other = scenario.state(1, device)
    chosen = []
    for batch in scenario.batches(device):
        decision = graph.explain(params, other, batch).decision
        # Batches of one class with other fields have graphs of their own.
        fields = batch.inputs_embeds is None, batch.positions is None
        chosen += [] if decision.mode == "none" else [(decision.descriptor, *fields)]
        # Padded, since products of another shape may round differently.
        state, out = eager(params, state, pad(batch, decision.descriptor))
        other, replayed = graph(params, other, batch)
        assert_equal("L1 graph is eager: output", replayed, unpad(out, batch.descriptor))
        assert_equal("L1 graph is eager: state", other, state)
    info = graph.cache_info()
    covered = [b for b in scenario.batches() if larger(b.descriptor, ladder)]
    if (info.replays, info.captures) != (len(covered), len(set(chosen))):
        raise LawViolation(
            f"L1 graph is eager: {info} where {len(covered)} of the batches are covered"
        )


def graph_is_eager_on_functions(function: Function, device: str = "cpu") -> None:
    """L1 for any pure function: a replay of each signature equals the function itself, including
    its next state.

    Calls alternate between two worlds, which have the same shapes but different parameters and
    states.
    """
    graph = graphify(function.fn)
    params = [function.params.to(device), (function.params + 1).to(device)]
    states = [tree_map(lambda t: t.clone().to(device), function.state) for _ in params]
    graph_states = clone(states)
    kept = []
    for x in (x.to(device) for x in function.inputs):
        for world, world_params in enumerate(params):
            states[world], out = function.fn(world_params, states[world], x)
            graph_states[world], replayed = graph(world_params, graph_states[world], x)
            assert_equal("L1 graph is eager: output", replayed, out)
            assert_equal("L1 graph is eager: state", graph_states[world], states[world])
            kept.append((replayed, out.clone()))
    for replayed, out in kept:
        assert_equal("L9 a result does not change under its holder", replayed, out)
    info = graph.cache_info()
    # Twice: the two worlds do not share a graph, since their parameters are different tensors.
    if (info.captures, info.replays) != (
        2 * len({x.shape for x in function.inputs}),
        2 * len(function.inputs),
    ):
        raise LawViolation(
            f"L1 graph is eager: {info} for inputs {[tuple(x.shape) for x in function.inputs]},"
            " twice"
        )


def graph_is_eager_on_padded_functions(
    function: Function, rungs: Iterable[int], device: str = "cpu"
) -> None:
    """L1 and L8 under a ladder, for any pure function that counts its calls in its state: a capture
    does not add to the count.

    All sizes share buffers, and each size comes again after the others have left their values
    there. A result contains all rows, including padding."""

    counted = counting_step(function)

    def step(params: Any, state: Any, batch: Rows) -> tuple[Any, Any]:
        state, out = counted(params, state, batch)
        # The sum reads the padding: rows that an earlier, larger batch left there would show.
        return state, (out, Rows(batch.descriptor, batch.x + batch.x.sum(0)))

    graph = graphify(
        step,
        ladder=[BatchDescriptor(n, n) for n in sorted(rungs, reverse=True)],
        donate_argnames="state",
    )
    params, state = function.params.to(device), tree_map(lambda x: x.to(device), function.state)
    for calls, x in enumerate((*function.inputs, *reversed(function.inputs))):
        batch = Rows(BatchDescriptor(x.shape[0], x.shape[0]), x.to(device))
        graph.capture(params, state, batch)
        if int(state["n"]) != calls:
            raise LawViolation(
                f"L1 graph is eager: {int(state['n'])} steps counted after {calls} and a capture"
            )
        _, expected = step(
            params,
            clone(state),
            pad(batch, graph.explain(params, state, batch).decision.descriptor),
        )
        state, replayed = graph(params, state, batch)
        assert_equal("L1 graph is eager: output", replayed, unpad(expected, batch.descriptor))


def graph_is_eager_on_calls(calls: Sequence[Call], device: str = "cpu") -> None:
    """L1 for calls that differ in one property of an argument: its address, shape, stride, type,
    device or value."""
    graph = graphify(called, static_argnames="static")
    tensors = worlds(device)
    x = torch.arange(4.0, device=device).reshape(2, 2)
    for call in calls:
        arguments = call.arguments(tensors, x)
        try:
            result = graph(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise LawViolation(
                f"L1 graph is eager: {call} raises {text}, where the function does not"
            ) from error
        assert_equal(f"L1 graph is eager: {call}", result, called(*arguments))


def graph_is_eager_on_images(
    scenario: ImageScenario, ladder: Sequence[Resolution], device: str = "cpu"
) -> None:
    """L1 for a custom descriptor with two sizes: the image and the state equal those of an eager
    run at the padded class."""
    step = scenario.step()
    graph = graphify(scenario.step(), ladder=ladder)
    params = scenario.params(device)
    state = scenario.state(device)
    other = scenario.state(device)
    for image in scenario.images(device):
        resolution = dispatch(image.resolution, ladder).descriptor
        state, out = step(params, state, pad(image, resolution))
        other, result = graph(params, other, image)
        assert_equal("L1 graph is eager: image", result, unpad(out, image.resolution))
        assert_equal("L1 graph is eager: state", other, state)
    classes = {dispatch(r, ladder).descriptor for r in scenario.resolutions if larger(r, ladder)}
    if graph.cache_info().captures != len(classes):
        raise LawViolation(
            f"L1 graph is eager: {graph.cache_info()} for the classes {sorted(map(str, classes))}"
        )
