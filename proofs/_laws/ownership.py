"""L8 and L9: a capture leaves no trace, and results do not change in their callers' hands."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from weft.batches.batch import Batch
from weft.batches.descriptor import BatchDescriptor
from weft.errors import CaptureError, DonatedError
from weft.proofs._laws.compare import whole
from weft.proofs._strategies.captures.functions import Function
from weft.proofs._strategies.models import Scenario
from weft.proofs.checks.difference import LawViolation, assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone, declare_donated, donates
from weft.values.trees import tree_map


def capture_leaves_no_trace(
    scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu"
) -> None:
    """L8: explaining, capturing the whole ladder, and a failed capture leave the state bitwise as
    it was."""
    graph = graphify(whole(scenario, device), ladder=ladder)
    params = scenario.params(1, device)
    state = scenario.state(1, device)
    failing = graphify(_then_fail(whole(scenario, device)), ladder=ladder)
    for batch in scenario.batches(device):
        before = clone(state)
        graph.explain(params, state, batch)
        try:
            graph.capture(params, state, batch)
        # A capture must use an inert batch. On the real one, its next token is beyond the state.
        except IndexError as error:
            raise LawViolation(f"L8 capture leaves no trace: it raises {error}") from error
        # Without a class nothing is captured, so that nothing fails.
        if ladder:
            try:
                failing.capture(params, state, batch)
            except CaptureError:
                pass
            else:
                raise LawViolation("L8 capture leaves no trace: a host read was captured")
        assert_equal("L8 capture leaves no trace", state, before)
        state, _ = graph(params, state, batch)


def _then_fail(step: Callable[..., Any]) -> Callable[..., Any]:
    def failing(params: Any, state: Any, batch: Batch) -> Any:
        state, out = step(params, state, batch)
        # A read on the host, which no capture allows, after the step has written its state.
        out.token_ids.sum().item()
        return state, out

    return declare_donated(failing, ["state"])


def capture_leaves_no_trace_on_functions(function: Function, device: str = "cpu") -> None:
    """L8 for any pure function, for which there is no inert batch to capture on."""
    graph = graphify(function.fn)
    params = function.params.to(device)
    state = tree_map(lambda x: x.to(device), function.state)
    before = clone(state)
    for x in function.inputs:
        graph.capture(params, state, x.to(device))
        assert_equal("L8 capture leaves no trace", state, before)


def ownership_is_kept(
    scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu"
) -> None:
    """L9: a call's results never change, and reusing a donated state is an error that names the
    call that took it."""
    graph = graphify(whole(scenario, device), ladder=ladder)
    params = scenario.params(1, device)
    state = scenario.state(1, device)
    results: list[tuple[Any, Any]] = []
    for batch in scenario.batches(device):
        old = state
        state, out = graph(params, state, batch)
        results.append((out, clone(out)))
        # All results so far, since a replay of any class may overwrite those of another.
        for result, copy in results:
            assert_equal("L9 a result does not change under its holder", result, copy)
        try:
            graph(params, old, batch)
        except DonatedError as error:
            if "donated to" not in str(error):
                raise LawViolation(f"L9 ownership: the error names no taker: {error}") from error
        else:
            raise LawViolation("L9 ownership: a donated state was used again")


def borrowed_results_are_right(function: Function, device: str = "cpu") -> None:
    """L9 for borrowed results: they are right until the next call and may be its arguments, even in
    swapped places."""

    @donates("state")
    def step(params: Any, state: Any, pair: tuple[Tensor, Tensor]) -> Any:
        state, out = function.fn(params, state, pair[0])
        return state, (pair[1], pair[0], out)

    graph = graphify(step, outputs="borrow")
    params, state = function.params.to(device), tree_map(lambda x: x.to(device), function.state)
    other = clone(state)
    for x in (x.to(device) for x in function.inputs):
        replayed = expected = (x, x + 1, x)
        # Results are the next call's arguments in swapped places: writing one buffer before the
        # other is read would lose a value.
        for _ in range(3):
            state, expected = step(params, state, expected[:2])
            other, replayed = graph(params, other, replayed[:2])
            assert_equal("L9 a borrowed result", replayed, expected)
            assert_equal("L9 a borrowed result: state", other, state)


def graph_keeps_what_it_reads(code: Sequence[int], device: str = "cpu") -> None:
    """L9: a tensor that a graph reads lives as long as the graph, even if its owner drops it.

    Here the owner is a cache of one table, which the next size evicts."""

    @lru_cache(maxsize=1)
    def table(size: int) -> Tensor:
        return torch.arange(1.0, size + 1, device=device)

    def fn(x: Tensor) -> Tensor:
        return x * table(x.shape[0])

    graph = graphify(fn)
    for size in code:
        x = torch.full((size,), 2.0, device=device)
        expected = fn(x)  # makes the table, so that the capture finds it in the cache
        assert_equal("L9 a graph keeps what it reads", graph(x), expected)
