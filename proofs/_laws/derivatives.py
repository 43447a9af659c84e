"""L15 on the models' steps: derivatives agree with finite differences of the plain steps, and
graphs of derivatives replay."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, func

from weft.batches.batch import Batch
from weft.proofs._laws.compare import whole
from weft.proofs._strategies.models import Scenario
from weft.proofs.checks.difference import LawViolation, assert_equal, visible
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone
from weft.values.trees import leaves_with_names, tree_leaves, tree_map

# The step of a finite difference, as a multiple of the direction. Weights have a deviation of 0.3.
STEP = 1e-2
NEAR = 1e-3
# The tolerances in float32 between a slope and its finite difference. NEAR is relative to the
# typical slope in a random direction; NOISE is absolute.
NOISE = 1e-4


def derivatives_are_of_the_step(scenario: Scenario, place: int | None, device: str = "cpu") -> None:
    """L15: under torch.func a model's steps, run in order over one state, give the loss, tokens and
    state of the plain steps.

    `grad`, `jvp` and `backward` give the slope of that loss along a direction in all parameters, or
    in the parameter at `place` alone."""
    run = _steps(scenario, device)
    params = scenario.params(1, device)
    expected = run(params)
    slopes, result = func.grad_and_value(run, has_aux=True)(params)
    assert_equal(
        "L15 a step under torch.func: its loss, tokens and state", result, expected, exact=False
    )

    recorded = tree_map(lambda x: x.clone().requires_grad_(), params)
    run(recorded)[0].backward()
    # A parameter that no token has reached has no gradient, such as that of an expert nobody chose.
    gradients = tree_map(lambda x: torch.zeros_like(x) if x.grad is None else x.grad, recorded)
    assert_equal("L15 backward of a step is its grad", gradients, slopes, exact=False)

    names = [name for name, _ in leaves_with_names(params)]
    if place is None:
        at = list(range(len(names)))
    else:
        at = [place % len(names)]
    direction = _direction(params, at, scenario.seed)
    slope = _product(slopes, direction)
    # The deviation of a slope along a direction whose numbers have deviation 0.3.
    size = 0.3 * math.sqrt(_product(slopes, slopes, at))
    pushed: tuple[Any, ...] = func.jvp(run, (params,), (direction,), has_aux=True)
    forward = pushed[1]
    measured = _measured(run, params, direction, expected[1][0])
    # Where there is no finite difference, `jvp` and `grad` are still compared.
    for way, one, other in (("grad", slope, measured), ("jvp", forward.item(), slope)):
        # `not <=`, so that NaN breaks the law.
        if other is not None and not abs(one - other) <= NEAR * size + NOISE:
            if place is None:
                what = "all parameters"
            else:
                what = names[at[0]]
            raise LawViolation(
                f"L15 the slope of a step's loss by {what}: {way} gives {one:.6g}, and it is"
                f" {other:.6g}"
            )


def graphs_of_gradients_are_gradients(scenario: Scenario, device: str = "cpu") -> None:
    """L15: a graph that computes a step and its gradient gives both bitwise, for each batch of a
    sequence."""
    step, params = whole(scenario, device), scenario.params(1, device)

    def learn(params: Any, state: Any, batch: Batch) -> Any:
        def loss(params: Any) -> Any:
            after, out = step(params, state, batch)
            return _loss(out.logits), after

        slopes, after = func.grad(loss, has_aux=True)(params)
        return after, slopes

    graph = graphify(learn, donate_argnames="state")
    state, other = scenario.state(1, device), scenario.state(1, device)
    for batch in scenario.batches(device):
        state, expected = learn(params, state, batch)
        other, gradients = graph(params, other, batch)
        assert_equal("L15 a graph of a step's gradient", gradients, expected)
        assert_equal("L15 a graph of a step's gradient: state", visible(other), visible(state))
    info = graph.cache_info()
    if info.replays != len(scenario.moves):
        raise LawViolation(
            f"L15 a graph of a step's gradient: {info} for {len(scenario.moves)} batches"
        )


def _steps(
    scenario: Scenario, device: str
) -> Callable[[Any], tuple[Tensor, tuple[list[Tensor], Any]]]:
    """All steps of the scenario as one function of the parameters, which returns a loss over all
    logits, the tokens and the state."""
    step, batches, start = (
        whole(scenario, device),
        scenario.batches(device),
        scenario.state(1, device),
    )

    def run(params: Any) -> tuple[Tensor, tuple[list[Tensor], Any]]:
        state = clone(start)
        losses = []
        tokens = []
        for batch in batches:
            state, out = step(params, state, batch)
            losses.append(_loss(out.logits))
            tokens.append(out.token_ids)
        return torch.stack(losses).sum(), (tokens, visible(state))

    return run


def _loss(logits: Tensor) -> Tensor:
    """The mean of the logits, each multiplied by a different weight."""
    return (
        logits * torch.arange(logits.numel(), device=logits.device).view_as(logits).cos()
    ).mean()


def _direction(params: Any, places: Sequence[int], seed: int) -> Any:
    """Noise with deviation 0.3 in some leaves, zeros in the others."""
    generator, index = torch.Generator().manual_seed(seed), iter(range(len(tree_leaves(params))))
    return tree_map(
        lambda x: (0.3 * torch.randn(x.shape, generator=generator)).to(x) * (next(index) in places),
        params,
    )


def _product(one: Any, other: Any, places: Sequence[int] | None = None) -> float:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    if places is None:
        kept = pairs
    else:
        kept = [pairs[place] for place in places]
    # In float64, or a sum over all weights would have an error of its own.
    return sum(float((a.double() * b.double()).sum()) for a, b in kept)


def _measured(
    run: Callable[[Any], Any], params: Any, direction: Any, tokens: list[Tensor]
) -> float | None:
    """The slope by second-order finite differences, extrapolated to fourth order (Richardson). None
    if the loss jumps within the step because another token was drawn or another expert chosen."""
    slopes = []
    for step in (STEP, STEP / 2):
        ends = [
            run(tree_map(lambda x, d, by=by: x + by * d, params, direction)) for by in (step, -step)
        ]
        if any(
            not torch.equal(a, b)
            for _, (drawn, _) in ends
            for a, b in zip(drawn, tokens, strict=True)
        ):
            return None
        slopes.append(float(ends[0][0] - ends[1][0]) / (2 * step))
    # The tokens reveal another draw, but not another expert. Slopes that disagree reveal that too.
    if abs(slopes[0] - slopes[1]) > 1e-2 * (1 + abs(slopes[1])):
        return None
    # Halving the step quarters the second-order error, so this combination cancels it.
    return (4 * slopes[1] - slopes[0]) / 3
