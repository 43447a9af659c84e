"""L14, and L9 for evicted graphs: the memory of graphs is known beforehand, and no graph is dropped
while in use."""

from typing import Any

import torch

from weft.batches.descriptor import BatchDescriptor
from weft.proofs._strategies.captures.functions import Function, Rows, counting_step
from weft.proofs.checks.difference import LawViolation, assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone
from weft.values.trees import tree_map

# The fraction by which an estimate may exceed the memory used.
SHARE = 0.1


def memory_is_estimated(function: Function, classes: int, device: str = "cpu") -> None:
    """L14: `used <= estimate <= used * (1 + SHARE)` for a ladder of this many classes, and
    estimating changes nothing."""

    ladder = [BatchDescriptor(n, n) for n in range(classes, 0, -1)]
    graph = graphify(counting_step(function), ladder=ladder, donate_argnames="state")
    params = function.params.to(device)
    state = tree_map(lambda x: x.to(device), function.state)
    # One row, which every class covers.
    x = function.inputs[0][:1].to(device)
    batch = Rows(BatchDescriptor(1, 1), x)
    before = clone(state)
    estimate = graph.memory_estimate(params, state, batch)
    assert_equal("L14 memory: an estimate leaves no trace", state, before)
    if graph.cache_info().currsize or graph.memory_analysis().total_bytes:
        raise LawViolation(f"L14 memory: an estimate left {graph.memory_analysis()}")
    graph.capture(params, state, batch)
    used = graph.memory_analysis()
    if estimate.buffer_bytes != used.buffer_bytes:
        raise LawViolation(
            f"L14 memory: {estimate.buffer_bytes} bytes of buffers estimated, {used.buffer_bytes}"
            " used"
        )
    if not used.graph_bytes <= estimate.graph_bytes <= used.graph_bytes * (1 + SHARE):
        raise LawViolation(f"L14 memory: {estimate} where {used} is used, for {classes} classes")


def dropped_graphs_are_not_in_use(function: Function, most: int, device: str = "cpu") -> None:
    """L9: with room for at most `most` graphs, every call gives the function's results, and no more
    graphs are held."""
    graph = graphify(function.fn, max_captures=most)
    params = function.params.to(device)
    state = tree_map(lambda t: t.to(device), function.state)
    other: Any = clone(state)
    # Twice, so that sizes whose graph was dropped come again.
    for x in (x.to(device) for x in (*function.inputs, *function.inputs)):
        state, out = function.fn(params, state, x)
        other, replayed = graph(params, other, x)
        assert_equal("L9 a dropped graph is not in use: output", replayed, out)
        assert_equal("L9 a dropped graph is not in use: state", other, state)
        if graph.cache_info().currsize > most:
            raise LawViolation(f"L9 a dropped graph: {graph.cache_info()} with room for {most}")
    # Launches are asynchronous: an error of a graph that was dropped in use would come later.
    if device != "cpu":
        torch.cuda.synchronize()
