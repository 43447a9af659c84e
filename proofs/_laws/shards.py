"""L22: a function or model sharded over the ranks of a mesh gives the results of the unsharded
one."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, func

from weft.batches.state import State, advance
from weft.effects import listing, parse_listing
from weft.errors import CaptureError, DerivativeError, MeshError, ProgramError
from weft.meshes.mesh import Mesh
from weft.meshes.placements import PerRank, Placements, Replicate
from weft.proofs._strategies.engine.adapters import hold_adapters
from weft.proofs._strategies.models import Scenario
from weft.proofs._strategies.shards import Disagreement, RankFunction, as_stage
from weft.proofs._strategies.shares import CutScenario
from weft.proofs._strategies.surrounded import FIRST_CALLS, HOLDERS, LATER_CALLS, SurroundedShard
from weft.proofs.checks.difference import LawViolation, assert_equal, find_difference, visible
from weft.stages.decoder import decoder_stage
from weft.stages.layout import StageLayout, split_layers
from weft.stages.params import DecoderParams
from weft.stages.random_weights import random_params
from weft.stages.shares import AXIS, Share, TensorRanks, share_config
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import microbatch, scan
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.shards.shard import shard
from weft.values.donation import clone
from weft.values.trees import tree_map

Step = Callable[[Any, Any, Any], Any]


def shards_are_the_function(function: RankFunction) -> None:
    """L22: called with whole arguments, a function sharded over all ranks or one rank gives the
    results and state of the function without ranks, over a sequence of calls.

    A state that is written in place is returned as the same tensors. Programs print and parse
    back."""
    sharded = function.sharded()
    steps: dict[str, Step] = {"shards": sharded}
    names_places = any(step.startswith("ppermute") for step in function.code)
    if not names_places:  # a function of ranks' places is another one on another mesh
        one_rank = Mesh(**dict.fromkeys(function.mesh.sizes, 1))
        steps["one rank"] = function.sharded(mesh=one_rank)
    states = {name: clone(function.state) for name in steps}
    expected = clone(function.state)
    for x in function.inputs:
        expected, out = function.whole(function.params, expected, x)
        for name, step in steps.items():
            previous_state = states[name]
            law = f"L22 shards are the function: {name}"
            states[name], result = _result_of(law, step, function.params, previous_state, x)
            assert_equal(f"{law}: output", result, out, exact=False)
            assert_equal(f"{law}: state", states[name], expected, exact=False)
            if function.code[-1] == "state: in place" and any(
                states[name][key] is not previous_state[key] for key in previous_state
            ):
                raise LawViolation(
                    f"{law}: a state that was written in place is returned as another tensor"
                )
        programs = sharded.programs(function.params, states["shards"], x)
        if parse_listing(listing(programs)) != programs:
            raise LawViolation(
                "L22 shards are the function: their programs do not parse back:"
                f" {listing(programs)}"
            )


def shards_commute(function: RankFunction, microbatches: int, length: int) -> None:
    """L22: graphs, micro-batches and scans of a sharded function give the same results as those of
    the unsharded function."""
    sharded = function.sharded()
    pairs: dict[str, tuple[Step, Step]] = {
        "graph": (graphify(sharded), function.whole),
        "micro-batches": (
            microbatch(sharded, microbatches),
            microbatch(function.whole, microbatches),
        ),
        "scan": (scan(sharded, length), scan(function.whole, length)),
        "graph of a scan": (graphify(scan(sharded, length)), scan(function.whole, length)),
    }
    for name, (step, plain) in pairs.items():
        state = clone(function.state)
        expected = clone(function.state)
        for x in function.inputs:
            expected, out = plain(function.params, expected, x)
            law = f"L22 shards commute: {name}"
            state, result = _result_of(law, step, function.params, state, x)
            assert_equal(f"{law}: output", result, out, exact=False)
            assert_equal(f"{law}: state", state, expected, exact=False)


def stages_of_shards_are_stages(functions: Sequence[RankFunction], microbatches: int) -> None:
    """L22: a pipeline of sharded stages, a graph of it, and a pipeline of their graphs give the
    results of the pipeline of unsharded stages."""
    params = [function.params for function in functions]
    plain = pipeline(
        [as_stage(function.whole) for function in functions], microbatches=microbatches
    )
    stages = [as_stage(function.sharded()) for function in functions]
    steps: dict[str, Step] = {
        "pipeline": pipeline(stages, microbatches=microbatches),
        "graph of a pipeline": graphify(pipeline(stages, microbatches=microbatches)),
        "pipeline of graphs": pipeline(
            [graphify(stage) for stage in stages], microbatches=microbatches
        ),
    }
    initial_states = tuple(function.state for function in functions)
    states = {name: clone(initial_states) for name in steps}
    expected = clone(initial_states)
    for x in functions[0].inputs:
        expected, out = plain(params, expected, x)
        for name, step in steps.items():
            law = f"L22 stages of shards: {name}"
            states[name], result = _result_of(law, step, params, states[name], x)
            assert_equal(f"{law}: output", result, out, exact=False)
            assert_equal(f"{law}: state", states[name], expected, exact=False)


def _result_of(law: str, call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call; an error is a violation of the law."""
    try:
        return call(*args)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise LawViolation(f"{law}: {text}, where the function raises nothing") from error


def _losses(fn: Step) -> Callable[[Any, Any, Tensor], Tensor]:
    return lambda params, state, x: fn(params, state, x)[1].square().sum()


def _stack(x: Tensor) -> Tensor:
    return torch.stack([x, x / 2, x - 1])


def _backward(fn: Step, params: Any, state: Any, x: Tensor) -> Any:
    leaves = (
        {name: p.clone().requires_grad_() for name, p in params.items()},
        x.clone().requires_grad_(),
    )
    _losses(fn)(leaves[0], state, leaves[1]).backward()
    return {name: p.grad for name, p in leaves[0].items()}, leaves[1].grad


TRANSFORMS: dict[str, Callable[[Step, Any, Any, Tensor], Any]] = {
    "grad": lambda f, p, s, x: func.grad(_losses(f), argnums=(0, 2))(p, s, x),
    "vmap": lambda f, p, s, x: func.vmap(lambda y: f(p, s, y)[1])(_stack(x)),
    "jvp": lambda f, p, s, x: func.jvp(lambda y: f(p, s, y)[1], (x,), (x * 2,)),
    "vjp": lambda f, p, s, x: func.vjp(lambda y: f(p, s, y)[1], x)[1](torch.ones_like(x)),
    "gradients of each sample": lambda f, p, s, x: func.vmap(
        func.grad(_losses(f), argnums=2), (None, None, 0)
    )(p, s, _stack(x)),
    "graph of grad": lambda f, p, s, x: graphify(func.grad(_losses(f), argnums=(0, 2)))(p, s, x),
    "backward": _backward,
}
"""Transforms of a step `(params, state, x) -> (state, y)`, by name."""


def derivatives_of_shards_are_derivatives(function: RankFunction, transform: str) -> None:
    """L22: `torch.func` and autograd give the same derivatives for a sharded function as for the
    unsharded one."""
    apply = TRANSFORMS[transform]
    sharded = function.sharded()
    for x in function.inputs:
        law = f"L22 {transform} of shards"
        result = _result_of(law, apply, sharded, function.params, clone(function.state), x)
        expected = apply(function.whole, function.params, clone(function.state), x)
        assert_equal(law, result, expected, exact=False)


def surroundings_of_shards_change_nothing(case: SurroundedShard) -> None:
    """L22: wherever a sharded function is called first, and whatever it closes over, its results
    and derivatives equal those of the unsharded function, in those surroundings and in later
    ones."""
    read, write = HOLDERS[case.holder]()
    whole = case.function(read, on_a_rank=False)
    step = case.sharded(read)
    # Written after the function is made, for it must read the tensor when it is called.
    write(torch.tensor(1.5))
    call = FIRST_CALLS[case.first]
    law = f"L22 surroundings of shards: {case.first}"
    with contextlib.suppress(*_REFUSALS):
        expected = call(whole, case.x)
        assert_equal(law, _result_of(law, call, step, case.x), expected, exact=False)
    for turn, name in enumerate(case.later):
        # A new value each time: a trace that keeps what it closed over would show.
        weight = torch.tensor(2.0 + turn)
        later = LATER_CALLS[name]
        law = f"L22 surroundings of shards: {name}, after {case.first}"
        with contextlib.suppress(*_REFUSALS):
            expected = later(_with_weight(whole, write), weight, case.x)
            result = _result_of(law, later, _with_weight(step, write), weight, case.x)
            assert_equal(law, result, expected, exact=False)


# The errors by which torch and captures refuse the unsharded function. `LawViolation` is not a
# subclass of any of them, so suppressing these hides no violation.
_REFUSALS = (RuntimeError, CaptureError, DerivativeError)


def _with_weight(
    step: Callable[[Tensor], Tensor], write: Callable[[Tensor], None]
) -> Callable[..., Tensor]:
    """Make the closed-over weight an argument: `(weight, x)` writes it, then calls `step(x)`."""

    def call(weight: Tensor, x: Tensor) -> Tensor:
        write(weight)
        return step(x)

    return call


def disagreeing_ranks_are_refused(case: Disagreement) -> None:
    """L22: ranks that would not reach the same collectives in the same order are refused before
    anything runs."""
    function = case.function
    step = function.sharded(case.fn)
    state = clone(function.state)
    before = clone(state)
    try:
        step(function.params, state, function.inputs[0])
    except ProgramError:
        assert_equal("L22 disagreeing ranks are refused: the state afterwards", state, before)
        return
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise LawViolation(
            f"L22 disagreeing ranks are refused: {text}, which is not a ProgramError"
        ) from error
    raise LawViolation(
        f"L22 disagreeing ranks are refused: rank {case.rank} has a collective {case.how}, and"
        " it ran"
    )


def false_replicas_are_refused(function: RankFunction) -> None:
    """L22: a graph refuses to take a result that ranks compute from different parts for
    `Replicate()`, even though all parts are zero at capture."""
    # With zeros the ranks' values agree, so a check of values alone would pass.
    params, state, x = tree_map(
        torch.zeros_like, (function.params, function.state, function.inputs[0])
    )
    placements = function.placements
    for axis, placement in placements[-1].by_axis:
        # Here the claim would be true.
        if placement == Replicate() or function.mesh.sizes[axis] == 1:
            continue
        claimed = Placements(**(dict(placements[-1].by_axis) | {axis: Replicate()}))
        step = graphify(shard(function.fn, function.mesh, placements[:3], (placements[1], claimed)))
        try:
            step(params, clone(state), x)
        except MeshError:
            continue
        law = "L22 false replicas are refused"
        raise LawViolation(
            f"{law}: {placement} along {axis!r} is taken for Replicate(), and a graph is made of it"
        )


def shares_are_the_model(
    scenario: Scenario, num_ranks: int, num_stages: int, captured: bool
) -> None:
    """L22: a model whose layers are shared by ranks gives the unsharded model's logits, tokens and
    pages within rounding, over a sequence of batches, for any split into stages, and in a graph.

    Where the two likeliest tokens differ by less than rounding, either may be chosen, and the rest
    of the sequence is not compared.
    """
    step = compose(scenario.stages(num_stages), advance=advance)
    params = scenario.params(num_stages)
    state = scenario.state(num_stages)
    shared, own_params, own_state = _shared(
        CutScenario(scenario, torch.float32, 1, num_stages, captured), num_ranks
    )
    for batch in scenario.batches():
        state, out = step(params, state, batch)
        own_state, result = shared(own_params, own_state, batch)
        assert_equal("L22 shares are the model: logits", result.logits, out.logits, exact=False)
        if not torch.equal(result.token_ids, out.token_ids):
            _refuse_apart(out.logits, result.token_ids, out.token_ids)
            return
        assert_equal("L22 shares are the model: output", result, out, exact=False)
        for stage, expected in zip(own_state, state, strict=True):
            pages = _pages(expected.kv_pages, scenario, num_ranks)
            assert_equal(
                "L22 shares are the model: pages",
                [one.kv_pages for one in stage],
                pages,
                exact=False,
            )
            rest = [attrs.evolve(one, kv_pages=expected.kv_pages) for one in stage]
            # Each rank has a part of the pages, compared above, and all of the other tables.
            law = "L22 shares are the model: state"
            assert_equal(law, visible(rest), visible([expected] * num_ranks), exact=False)


def shares_have_the_same_bits(cut: CutScenario) -> None:
    """L22: a model whose sums are cut into leaves gives the same bits on 1, 2 and 4 ranks (up to
    the number that can share its layers).

    Logits, tokens, logprobs, pages and the rest of the state are compared, over a sequence of
    batches, for any split into stages."""
    steps = {count: _shared(cut, count) for count in cut.numbers_of_ranks}
    for batch in cut.scenario.batches():
        outputs = {}
        for count, (step, params, states) in steps.items():
            states, out = step(params, states, batch)
            steps[count], outputs[count] = (step, params, states), out
        for count, out in outputs.items():
            law = f"L22 shares have the same bits: {cut.leaves} leaves, {count} ranks"
            assert_equal(f"{law}: output", out, outputs[1])
            for stage, (expected,) in zip(steps[count][2], steps[1][2], strict=True):
                pages = _pages(expected.kv_pages, cut.scenario, count)
                assert_equal(f"{law}: pages", [one.kv_pages for one in stage], pages)
                rest = [attrs.evolve(one, kv_pages=expected.kv_pages) for one in stage]
                assert_equal(f"{law}: state", visible(rest), visible([expected] * count))


def _refuse_apart(logits: Tensor, tokens: Tensor, expected: Tensor) -> None:
    """Raise LawViolation if tokens differ although their logits are more than 1e-2 apart."""
    there = [logits.gather(-1, ids.reshape(-1, 1)) for ids in (tokens, expected)]
    if (difference := find_difference(tokens, expected)) is not None and bool(
        ((there[0] - there[1]).abs() > 1e-2).any()
    ):
        raise LawViolation(f"L22 shares are the model: tokens: {difference}")


def _pages(pages: Tensor, scenario: Scenario, num_ranks: int) -> list[Tensor]:
    """The part of a stage's pages that each rank holds, by definition: rank r computes query heads
    r·H/n to (r+1)·H/n, and holds the keys and values that these heads read."""
    config = scenario.config
    parts = []
    heads = config.num_heads // num_ranks
    each = config.num_heads // config.num_kv_heads
    for rank in range(num_ranks):
        read = sorted({head // each for head in range(rank * heads, (rank + 1) * heads)})
        parts.append(pages[..., read, :])
    return parts


def _shared(cut: CutScenario, num_ranks: int) -> tuple[Step, Any, Any]:
    """The step of the model's sharded stages, with each rank's parameters and states. On one rank
    there are no collectives."""
    scenario = cut.scenario
    config = cut.scenario.config
    mesh = Mesh(**{AXIS: num_ranks})
    layouts = split_layers(config.num_layers, cut.num_stages)
    rank_config = share_config(config, num_ranks)
    is_cut = cut.leaves > 1
    if num_ranks > 1:
        ranks = TensorRanks(AXIS, config.vocab_size)
    else:
        ranks = None
    options: dict[str, Any] = {
        "keep_logits": True,
        "batch_invariant": is_cut,
        "reduction_leaves": cut.leaves,
    }
    where = (PerRank(), PerRank(), Replicate(), Replicate()), (PerRank(), Replicate())
    stages = [
        shard(decoder_stage(rank_config, layout, **options, ranks=ranks), mesh, *where)
        for layout in layouts
    ]
    params = [
        tuple(_share_of(cut, layout, (rank, num_ranks)) for rank in mesh) for layout in layouts
    ]
    by_rank = [attrs.evolve(scenario, config=rank_config).state(cut.num_stages) for _ in mesh]
    states = tuple(
        tuple(
            attrs.evolve(each[index], kv_pages=each[index].kv_pages.to(cut.dtype))
            for each in by_rank
        )
        for index in range(cut.num_stages)
    )
    step = compose(stages, advance=_advance)
    return graphify(step) if cut.is_captured else step, params, states


def _share_of(cut: CutScenario, layout: StageLayout, share: Share) -> DecoderParams:
    """A rank's share of a stage's parameters."""
    scenario = cut.scenario
    options: dict[str, Any] = {"device": "cpu", "dtype": cut.dtype, "std": 0.3, "shard": share}
    params = random_params(scenario.config, layout, seed=scenario.seed, **options)
    if scenario.adapters:
        return hold_adapters(params, scenario.config, layout, scenario.seed, share)
    return params


def _advance(states: tuple[State, ...], batch: Any, out: Any) -> tuple[State, ...]:
    return tuple(advance(state, batch, out) for state in states)
