"""The laws: what graphify, padding, pipelines and donation may not change. Each raises `LawViolation` where it breaks.

A law takes a scenario (a model and a *sequence* of batches, so that a replay follows somebody else's replay) or a
random pure function, and compares with a run that no transform touched. `weft.proofs.mutants` plants the bug that each
is to catch.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.donation import clone
from weft.errors import CaptureError, DonatedError
from weft.padding import pad, unpad
from weft.proofs.strategies import Function, Rows, Scenario
from weft.state import State, advance
from weft.transforms.graphify import graphify
from weft.transforms.ladder import Limits, make_ladder
from weft.transforms.microbatch import microbatch
from weft.transforms.piecewise import piecewise
from weft.transforms.pipeline import compose, pipeline
from weft.trees import leaves_with_names, tree_map

ATOL, RTOL = 2e-4, 2e-4
"""Bounds where two runs have different shapes, so that a matrix product may sum in another order (float32)."""


class LawViolation(AssertionError):
    """A law that did not hold: which, where the first difference is, and both values there."""


def assert_equal(law: str, seen: Any, expected: Any, *, exact: bool = True) -> None:
    """Raise LawViolation at the first leaf of `seen` that differs from `expected`.

    Args:
        exact: bitwise (NaN equals NaN); else within ATOL and RTOL, and integers exactly.
    """
    pairs, wanted = leaves_with_names(seen), leaves_with_names(expected)
    if [name for name, _ in pairs] != [name for name, _ in wanted]:
        raise LawViolation(f"{law}: trees differ: {[n for n, _ in pairs]} against {[n for n, _ in wanted]}")
    for (name, a), (_, b) in zip(pairs, wanted, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a != b:
                raise LawViolation(f"{law}: {name}: {a!r} against {b!r}")
            continue
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise LawViolation(f"{law}: {name}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
        tolerance = (0.0, 0.0) if exact or not a.is_floating_point() else (ATOL, RTOL)
        same = torch.isclose(a, b, atol=tolerance[0], rtol=tolerance[1], equal_nan=True)
        if not same.all():
            index = tuple(int(i) for i in (~same).nonzero()[0])
            raise LawViolation(f"{law}: {name}{list(index)}: {a[index].item()!r} against {b[index].item()!r}")


def visible(state: Sequence[State]) -> Any:
    """What a state says of its requests: all but the scratch row, which belongs to nobody."""
    return [
        {"kv_pages": s.kv_pages, **{n: getattr(s, n)[:-1] for n in ("block_table", "positions", "last_tokens")}}
        for s in state
    ]


def _whole(scenario: Scenario) -> Callable[..., Any]:
    return compose(scenario.stages(1), advance=advance)


def _larger(descriptor: BatchDescriptor, ladder: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
    return [d for d in ladder if d.covers(descriptor)]


def graph_is_eager(scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu") -> None:
    """L1: at the same padded descriptor a replay gives the outputs and the whole state of an eager run, bitwise.

    Every batch that a class covers replays, and no class is captured twice.
    """
    eager, graph = _whole(scenario), graphify(_whole(scenario), ladder=ladder)
    params = scenario.params(1, device)
    state, other = scenario.state(1, device), scenario.state(1, device)
    chosen = []
    for batch in scenario.batches(device):
        decision = graph.explain(params, other, batch).decision
        chosen += [] if decision.mode == "none" else [decision.descriptor]
        state, out = eager(params, state, pad(batch, decision.descriptor))
        other, replayed = graph(params, other, batch)
        assert_equal("L1 graph is eager: output", replayed, unpad(out, batch.descriptor))
        assert_equal("L1 graph is eager: state", other, state)
    info = graph.cache_info()
    covered = [b for b in scenario.batches() if _larger(b.descriptor, ladder)]
    if (info.replays, info.captures) != (len(covered), len(set(chosen))):
        raise LawViolation(f"L1 graph is eager: {info} where {len(covered)} of the batches are covered")


def graph_is_eager_on_functions(function: Function, device: str = "cpu") -> None:
    """L1 for any pure function: a replay of each signature equals the function itself, its next state included.

    Calls of two worlds alternate: other parameters and another state, in the same shapes.
    """
    graph = graphify(function.fn)
    params = [function.params.to(device), (function.params + 1).to(device)]
    states = [tree_map(lambda t: t.clone().to(device), function.state) for _ in params]
    others = clone(states)
    kept = []
    for x in (x.to(device) for x in function.inputs):
        for world, own in enumerate(params):
            states[world], out = function.fn(own, states[world], x)
            others[world], replayed = graph(own, others[world], x)
            assert_equal("L1 graph is eager: output", replayed, out)
            assert_equal("L1 graph is eager: state", others[world], states[world])
            kept.append((replayed, out.clone()))
    for replayed, out in kept:
        assert_equal("L9 a result does not change under its holder", replayed, out)
    info = graph.cache_info()
    if (info.captures, info.replays) != (2 * len({x.shape for x in function.inputs}), 2 * len(function.inputs)):
        raise LawViolation(f"L1 graph is eager: {info} for inputs {[tuple(x.shape) for x in function.inputs]}, twice")


def graph_is_eager_on_padded_functions(function: Function, rungs: Iterable[int], device: str = "cpu") -> None:
    """L1 and L8 for any pure function under a ladder, one that counts its calls in its state: a capture counts none."""

    def step(params: Tensor, state: dict[str, Tensor], batch: Rows) -> tuple[dict[str, Tensor], Rows]:
        _, y = function.fn(params, clone(state), batch.x)
        return {**state, "n": state["n"] + 1}, attrs.evolve(batch, x=y)

    graph = graphify(step, ladder=[BatchDescriptor(n, n) for n in sorted(rungs, reverse=True)], donate_argnames="state")
    params, state = function.params.to(device), tree_map(lambda x: x.to(device), function.state)
    for calls, x in enumerate(function.inputs):
        batch = Rows(BatchDescriptor(x.shape[0], x.shape[0]), x.to(device))
        graph.capture(params, state, batch)
        if int(state["n"]) != calls:
            raise LawViolation(f"L1 graph is eager: {int(state['n'])} steps counted after {calls} and a capture")
        _, expected = step(params, clone(state), pad(batch, graph.explain(params, state, batch).decision.descriptor))
        state, seen = graph(params, state, batch)
        assert_equal("L1 graph is eager: output", seen, unpad(expected, batch.descriptor))


def padding_is_inert(scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu") -> None:
    """L2: `unpad(f(pad(b, d)))` is `f(b)` for each d that covers b, whatever padding and unwritten memory hold."""
    step, params = _whole(scenario), scenario.params(1, device)
    for batch_index, batch in enumerate(scenario.batches(device)):
        for descriptor in _larger(batch.descriptor, ladder):
            before = _run_to(scenario, step, params, batch_index, device, poison=0.0)
            poisoned = _run_to(scenario, step, params, batch_index, device, poison=float("nan"))
            state, out = step(params, before, batch)
            other, padded = step(params, _garbage_scratch(poisoned), _garbage_tail(pad(batch, descriptor), batch))
            seen = unpad(padded, batch.descriptor)
            assert_equal("L2 padding is inert: output", seen, out, exact=False)
            unwritten = tree_map(lambda x: torch.nan_to_num(x) if x.is_floating_point() else x, visible(other))
            assert_equal("L2 padding is inert: state", unwritten, visible(state), exact=False)


def _run_to(scenario: Scenario, step: Any, params: Any, index: int, device: str, *, poison: float) -> Any:
    state = scenario.state(1, device, poison=poison)
    for batch in scenario.batches(device)[:index]:
        state, _ = step(params, state, batch)
    return state


def _garbage_scratch(state: Sequence[State]) -> Sequence[State]:
    """The state with old data in the row that padding points to."""
    for s in state:
        s.positions[-1], s.last_tokens[-1], s.seeds[-1] = 1, 3, 77
        s.temperature[-1] = float("nan")
        s.block_table[-1] = s.block_table[0]
    return state


def _garbage_tail(padded: Batch, batch: Batch) -> Batch:
    """The padded batch with tokens of somebody else where its padding is."""
    tail = padded.input_ids.clone()
    tail[batch.descriptor.num_tokens :] = 2
    return attrs.evolve(padded, input_ids=tail)


def stage_padding_is_inert(scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu") -> None:
    """L2 between stages: NaN in the tail of a received buffer reaches no request and no page."""
    stages, params = scenario.stages(2), scenario.params(2, device)
    state, other = list(scenario.state(2, device)), list(scenario.state(2, device))
    for batch in scenario.batches(device)[:1]:
        for descriptor in _larger(batch.descriptor, ladder)[:1]:
            state[0], x = stages[0](params[0], state[0], batch, None)
            state[1], out = stages[1](params[1], state[1], batch, x)
            wide = pad(x, descriptor)
            tail = torch.full_like(wide.hidden_states, float("nan"))
            tail[: x.hidden_states.shape[0]] = x.hidden_states
            wide = attrs.evolve(wide, hidden_states=tail)
            other[1], padded = stages[1](params[1], other[1], pad(batch, descriptor), wide)
            assert_equal("L2 padding is inert: output", unpad(padded, batch.descriptor), out, exact=False)
            assert_equal("L2 padding is inert: state", visible(other[1:]), visible(state[1:]), exact=False)


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


def pieces_are_the_whole(scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu") -> None:
    """L5: captured in pieces, with attention between them, a step gives bitwise what the whole graph and the function
    itself give at the same padded class; and it is really in pieces, one more than there are layers."""
    pieces = piecewise(_whole(scenario), split_at="weft::paged_attention", ladder=ladder)
    whole, eager, params = graphify(_whole(scenario), ladder=ladder), _whole(scenario), scenario.params(1, device)
    states = [scenario.state(1, device) for _ in range(3)]
    for batch in scenario.batches(device):
        padded = pad(batch, pieces.explain(params, states[0], batch).decision.descriptor)
        states[0], seen = pieces(params, states[0], batch)
        states[1], other = whole(params, states[1], batch)
        states[2], out = eager(params, states[2], padded)
        assert_equal("L5 pieces are the whole: output", seen, unpad(out, batch.descriptor))
        assert_equal("L5 pieces are the whole: output", seen, other)
        assert_equal("L5 pieces are the whole: state", states[0], states[2])
        assert_equal("L5 pieces are the whole: state", states[0], states[1])
    if any(n != scenario.config.num_layers + 1 for n in pieces.num_pieces()):
        raise LawViolation(f"L5 pieces are the whole: {pieces.num_pieces()} for {scenario.config.num_layers} layers")


def pieces_are_the_whole_on_functions(function: Function, device: str = "cpu") -> None:
    """L5 for any pure function, cut at every matrix product, sort and softmax in it."""
    split_at = {"matmul": "aten::mm", "sort": "aten::sort", "softmax": "aten::_softmax"}
    split_at["gather"] = split_at["sort"]  # by argsort
    names = [split_at[name] for name in function.code if name in split_at]
    if not names:
        return
    cut = piecewise(function.fn, split_at=names)
    params, state = function.params.to(device), tree_map(lambda x: x.to(device), function.state)
    other = clone(state)
    for x in (x.to(device) for x in function.inputs):
        state, out = function.fn(params, state, x)
        other, seen = cut(params, other, x)
        assert_equal("L5 pieces are the whole: output", seen, out)
        assert_equal("L5 pieces are the whole: state", other, state)
    if any(n != len(names) + 1 for n in cut.num_pieces()):
        raise LawViolation(f"L5 pieces are the whole: {cut.num_pieces()} pieces for {names}")


def dispatch_is_least(own: BatchDescriptor, limits: Limits, mode: str) -> None:
    """L6: dispatch is total and deterministic, takes a class that covers the batch, a whole graph before pieces, and
    none smaller would do; each class of the ladder is reached by its own batches."""
    ladder = make_ladder(mode, limits)
    decision = graphs_module().dispatch(own, ladder)
    if decision != graphs_module().dispatch(own, ladder):
        raise LawViolation(f"L6 dispatch is least: two decisions for '{own}'")
    full, pieces = _larger(own, ladder.full), _larger(own, ladder.piecewise)
    expected, classes = ("full", full) if full else ("piecewise", pieces) if pieces else ("none", [own])
    if decision.mode != expected or decision.descriptor not in classes:
        raise LawViolation(
            f"L6 dispatch is least: {decision}, where {expected} of {[str(d) for d in classes]} is right"
        )
    if any(d != decision.descriptor and decision.descriptor.covers(d) for d in classes):
        raise LawViolation(f"L6 dispatch is least: '{decision.descriptor}' for '{own}', where less would do")
    for way, rung in [*(("full", d) for d in ladder.full), *(("piecewise", d) for d in ladder.piecewise)]:
        reached = graphs_module().dispatch(rung, ladder)
        if (reached.mode, reached.descriptor) != (way, rung):
            raise LawViolation(f"L6 dispatch is least: '{rung}' goes {reached.mode} under '{reached.descriptor}'")


def nothing_is_captured_after_start(scenario: Scenario, mode: str, device: str = "cpu") -> None:
    """L6: once the ladder is captured and frozen, every batch that it covers replays, and no step captures."""
    reqs, tokens = len(scenario.prompts), sum(map(len, scenario.prompts)) + len(scenario.prompts)
    ladder = make_ladder(mode, Limits(reqs, tokens))
    graph = graphify(_whole(scenario), ladder=ladder, split_at="weft::paged_attention")
    params, state = scenario.params(1, device), scenario.state(1, device)
    batches = scenario.batches(device)
    captures = graph.capture(params, state, batches[0]).captures
    graph.freeze()
    for batch in batches:
        state, _ = graph(params, state, batch)
    info = graph.cache_info()
    covered = [b for b in batches if _larger(b.descriptor, tuple(ladder))]
    if info.captures != captures or captures != len(ladder) or info.replays != len(covered):
        raise LawViolation(f"L6 captures after start: {info}, {len(ladder)} classes, {len(covered)} covered batches")


def graphs_module() -> Any:
    """The module whose `dispatch` graphify calls (the package's attribute of that name is the function)."""
    return import_module("weft.transforms.graphs")


def class_is_kept(scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu") -> None:
    """L7: a uniform graph runs only for a batch whose maker declared it uniform, in capture, warm-up and replay; and
    the tensors have the sizes that their class says."""
    step = _whole(scenario)

    def recording(params: Any, state: Any, batch: Batch) -> Any:
        d = batch.descriptor
        if (batch.input_ids.shape[0], batch.rows.shape[0]) != (d.num_tokens, d.num_reqs):
            raise LawViolation(
                f"L7 class is kept: '{d}' with {batch.input_ids.shape[0]} tokens, {batch.rows.shape[0]} rows"
            )
        state, out = step(params, state, batch)
        ran = torch.full_like(out.logprobs, float(d.is_uniform))  # frozen at capture: the class that a replay is of
        return state, attrs.evolve(out, logprobs=ran)

    recording.__weft_donates__ = ("state",)  # type: ignore[attr-defined]
    graph, params, state = graphify(recording, ladder=ladder), scenario.params(1, device), scenario.state(1, device)
    for batch in scenario.batches(device):
        state, out = graph(params, state, batch)
        if not batch.descriptor.is_uniform and bool(out.logprobs.bool().any()):
            raise LawViolation(f"L7 class is kept: a uniform graph ran for '{batch.descriptor}'")


def capture_leaves_no_trace(scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu") -> None:
    """L8: explaining, capturing the whole ladder, and a capture that fails leave the state bitwise as it was."""
    graph, params, state = (
        graphify(_whole(scenario), ladder=ladder),
        scenario.params(1, device),
        scenario.state(1, device),
    )
    failing = graphify(_then_fail(_whole(scenario)), ladder=ladder)
    for batch in scenario.batches(device):
        before = clone(state)
        graph.explain(params, state, batch)
        graph.capture(params, state, batch)
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
        out.token_ids.sum().item()
        return state, out

    failing.__weft_donates__ = ("state",)  # type: ignore[attr-defined]
    return failing


def capture_leaves_no_trace_on_functions(function: Function, device: str = "cpu") -> None:
    """L8 for any pure function, which has no inert batch to be captured on."""
    graph = graphify(function.fn)
    params, state = function.params.to(device), tree_map(lambda x: x.to(device), function.state)
    before = clone(state)
    for x in function.inputs:
        graph.capture(params, state, x.to(device))
        assert_equal("L8 capture leaves no trace", state, before)


def ownership_is_kept(scenario: Scenario, ladder: Sequence[BatchDescriptor], device: str = "cpu") -> None:
    """L9: what a call returned never changes, and a donated state refuses to be used again and names its taker."""
    graph, params, state = (
        graphify(_whole(scenario), ladder=ladder),
        scenario.params(1, device),
        scenario.state(1, device),
    )
    held: list[tuple[Any, Any]] = []
    for batch in scenario.batches(device):
        old = state
        state, out = graph(params, state, batch)
        held.append((out, clone(out)))
        for result, copy in held:
            assert_equal("L9 a result does not change under its holder", result, copy)
        try:
            graph(params, old, batch)
        except DonatedError as error:
            if "donated to" not in str(error):
                raise LawViolation(f"L9 ownership: the error names no taker: {error}") from error
        else:
            raise LawViolation("L9 ownership: a donated state was used again")


def microbatches_are_one(scenario: Scenario, parts: int, device: str = "cpu") -> None:
    """L13: `microbatch(f, m)` is `f`, its state included."""
    step, params = _whole(scenario), scenario.params(1, device)
    cut = microbatch(step, parts)
    state, other = scenario.state(1, device), scenario.state(1, device)
    for batch in scenario.batches(device):
        state, out = step(params, state, batch)
        other, seen = cut(params, other, batch)
        assert_equal("L13 micro-batches: output", seen, out, exact=False)
        assert_equal("L13 micro-batches: state", visible(other), visible(state), exact=False)
