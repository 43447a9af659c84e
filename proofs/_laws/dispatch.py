"""L6 and L7: dispatch chooses the least class, nothing is captured after start-up, and the class is
kept."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import attrs
import torch

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.proofs._laws.compare import larger, whole
from weft.proofs._strategies.images import ImageScenario, Resolution
from weft.proofs._strategies.models import Scenario
from weft.proofs.checks.difference import LawViolation
from weft.transforms.graphs.dispatch import dispatch
from weft.transforms.graphs.graphify import graphify
from weft.transforms.graphs.ladder import Limits, make_ladder
from weft.values.donation import declare_donated


def dispatch_is_least(descriptor: BatchDescriptor, limits: Limits, mode: str) -> None:
    """L6: dispatch is total and deterministic.

    It takes the least class that covers the batch and prefers a whole graph to pieces. Each class
    of the ladder is reached by a batch of exactly that class."""
    ladder = make_ladder(mode, limits)
    decision = graphs_module().dispatch(descriptor, ladder)
    if decision != graphs_module().dispatch(descriptor, ladder):
        raise LawViolation(f"L6 dispatch is least: two decisions for '{descriptor}'")
    full = larger(descriptor, ladder.full)
    pieces = larger(descriptor, ladder.piecewise)
    expected, classes = (
        ("full", full) if full else ("piecewise", pieces) if pieces else ("none", [descriptor])
    )
    if decision.mode != expected or decision.descriptor not in classes:
        raise LawViolation(
            f"L6 dispatch is least: {decision}, where {expected} of {[str(d) for d in classes]} is"
            " right"
        )
    if any(d != decision.descriptor and decision.descriptor.covers(d) for d in classes):
        raise LawViolation(
            f"L6 dispatch is least: '{decision.descriptor}' for '{descriptor}', where less would do"
        )
    for way, rung in [
        *(("full", d) for d in ladder.full),
        *(("piecewise", d) for d in ladder.piecewise),
    ]:
        reached = graphs_module().dispatch(rung, ladder)
        if (reached.mode, reached.descriptor) != (way, rung):
            raise LawViolation(
                f"L6 dispatch is least: '{rung}' goes {reached.mode} under '{reached.descriptor}'"
            )


def nothing_is_captured_after_start(scenario: Scenario, mode: str, device: str = "cpu") -> None:
    """L6: once the ladder is captured and frozen, every batch that it covers replays and nothing
    more is captured."""
    reqs = len(scenario.prompts)
    # No step of the scenario has more.
    tokens = sum(map(len, scenario.prompts)) + len(scenario.prompts)
    ladder = make_ladder(mode, Limits(reqs, tokens))
    graph = graphify(whole(scenario, device), ladder=ladder, split_at="weft::paged_attention")
    params = scenario.params(1, device)
    state = scenario.state(1, device)
    batches = scenario.batches(device)
    captures = graph.capture(params, state, batches[0]).captures
    graph.freeze()
    for batch in batches:
        state, _ = graph(params, state, batch)
    info = graph.cache_info()
    covered = [b for b in batches if larger(b.descriptor, tuple(ladder))]
    if info.captures != captures or captures != len(ladder) or info.replays != len(covered):
        raise LawViolation(
            f"L6 captures after start: {info}, {len(ladder)} classes, {len(covered)} covered"
            " batches"
        )


def graphs_module() -> Any:
    """The module whose `dispatch` graphify calls."""
    # Looked up in the module at each call, because mutants replace `dispatch` there.
    return import_module("weft.transforms.graphs.cache")


def own_classes_are_dispatched(
    scenario: ImageScenario, ladder: Sequence[Resolution], device: str = "cpu"
) -> None:
    """L6 for a custom descriptor: dispatch takes the least resolution that covers the image, and
    reports the actual padding.

    Once the ladder is captured and frozen, every covered image replays and nothing is captured."""
    # "Covers" is spelled out here by height and width rather than taken from the descriptor.
    graph = graphify(scenario.step(), ladder=ladder)
    params = scenario.params(device)
    state = scenario.state(device)
    images = scenario.images(device)
    captures = graph.capture(params, state, images[0]).captures
    graph.freeze()
    for image in images:
        resolution = image.resolution
        decision = graph.explain(params, state, image).decision
        fitting = [
            d for d in ladder if d.height >= resolution.height and d.width >= resolution.width
        ]
        chosen = decision.descriptor
        if decision.mode != ("full" if fitting else "none") or chosen not in (
            fitting or [resolution]
        ):
            raise LawViolation(
                f"L6 dispatch is least: {decision} for '{resolution}', where {[str(d) for d in fitting]}"
                " cover"
            )
        if any(
            d != chosen and d.height <= chosen.height and d.width <= chosen.width for d in fitting
        ):
            raise LawViolation(
                f"L6 dispatch is least: '{chosen}' for '{resolution}', where less would do"
            )
        padded = {
            "height": chosen.height - resolution.height,
            "width": chosen.width - resolution.width,
        }
        if dict(decision.padding) != {name: more for name, more in padded.items() if more}:
            raise LawViolation(
                f"L6 dispatch is least: padding {decision.padding} of '{resolution}' to '{chosen}'"
            )
        state, _ = graph(params, state, image)
    info = graph.cache_info()
    covered = [r for r in scenario.resolutions if larger(r, ladder)]
    if (info.captures, captures, info.replays) != (captures, len(ladder), len(covered)):
        raise LawViolation(
            f"L6 captures after start: {info}, {len(ladder)} classes, {len(covered)} covered images"
        )


def class_is_kept(
    scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu"
) -> None:
    """L7: the graph that runs has the class that dispatch chose, including its number of LoRAs.

    In capture, warm-up and replay, a uniform class is used only for a batch declared uniform, and
    the tensors have the sizes of the class."""
    step = whole(scenario, device)

    def recording(params: Any, state: Any, batch: Batch) -> Any:
        d = batch.descriptor
        if (batch.input_ids.shape[0], batch.rows.shape[0]) != (d.num_tokens, d.num_reqs):
            raise LawViolation(
                f"L7 class is kept: '{d}' with {batch.input_ids.shape[0]} tokens,"
                f" {batch.rows.shape[0]} rows"
            )
        state, out = step(params, state, batch)
        # The code is a constant in the captured graph, so a replay's output tells its class.
        ran = torch.full_like(out.logprobs, _code(d))
        return state, attrs.evolve(out, logprobs=ran)

    graph = graphify(declare_donated(recording, ["state"]), ladder=ladder)
    params, state = scenario.params(1, device), scenario.state(1, device)
    for batch in scenario.batches(device):
        descriptor = batch.descriptor
        state, out = graph(params, state, batch)
        expected = dispatch(descriptor, ladder).descriptor
        codes = sorted(set(out.logprobs.tolist()))
        # An odd code is that of a uniform class.
        if not descriptor.is_uniform and any(code % 2 for code in codes):
            raise LawViolation(f"L7 class is kept: a uniform graph ran for '{descriptor}'")
        if codes != [_code(expected)]:
            loras = [int(code // 2) for code in codes]
            raise LawViolation(
                f"L7 class is kept: a graph of {loras} LoRAs ran for '{descriptor}', not '{expected}'"
            )


def _code(descriptor: BatchDescriptor) -> float:
    """A number that differs between classes of the same size."""
    return float(descriptor.is_uniform + 2 * descriptor.num_active_loras)
