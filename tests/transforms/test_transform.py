"""A user's own transform equals the hand-written sequence, with any of weft's and torch.func's
transforms around it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import weft
from weft import compose, graphify, microbatch, pipeline, scan
from weft.errors import ProgramError
from weft.proofs import assert_equal
from weft.proofs.strategies import Function, pure_functions, stage_lists
from weft.transforms import Threads, Transform, lift
from weft.transforms.graphs.calls.borrowing import lends
from weft.transforms.transform import Carried
from weft.values.donation import clone

LAW = "a custom transform is what one would write by hand"

# The work of a hook, as values: the sum of all rows that left the step, and the number of calls.
summed = Transform(
    init=lambda params, state: {"sum": torch.zeros(4), "calls": torch.zeros((), dtype=torch.int64)},
    apply=lambda step, carry, params, state, *rest: seen_by(carry, *step(params, state, *rest)),
)


def seen_by(
    carry: dict[str, Tensor], state: Any, y: Tensor
) -> tuple[dict[str, Tensor], Any, Tensor]:
    return {"sum": carry["sum"] + y.sum(0), "calls": carry["calls"] + 1}, state, y


def step(params: Tensor, state: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    state = state + 1
    return state, torch.tanh(batch @ params) * state


WAYS: dict[str, Callable[[Any], Any]] = {
    "transform": summed,
    "graphify outside": lambda f: graphify(summed(f), donate_argnames="state"),
    "graphify inside": lambda f: summed(graphify(f)),
    "graphify inside, lent": lambda f: summed(graphify(f, outputs="borrow")),
    "both": lambda f: graphify(summed(graphify(f))),
    "pieces": lambda f: weft.piecewise(summed(f), split_at="aten::tanh"),
}
PARAMS, STATE = torch.linspace(-1, 1, 16).view(4, 4), torch.zeros(())
BATCHES = [torch.linspace(-2, 2, rows * 4).view(rows, 4) for rows in (3, 1, 3)]


def fresh() -> Carried:
    """An initial state, which may be donated."""
    return summed.carry(PARAMS, clone(STATE))


def by_hand(batches: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """The calls and the sums in order, written by hand."""
    state = STATE
    carry = summed.init(PARAMS, STATE)
    outs = []
    for batch in batches:
        state, out = step(PARAMS, state, batch)
        carry = {"sum": carry["sum"] + out.sum(0), "calls": carry["calls"] + 1}
        outs.append(out)
    return Carried(state, carry), outs


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_sequence_by_hand(way: str) -> None:
    transformed = WAYS[way](step)
    state = fresh()
    outs = []
    for batch in BATCHES:
        state, out = transformed(PARAMS, state, batch)
        outs.append(out.clone())
    assert_equal(LAW, (state, outs), by_hand(BATCHES))


@given(pure_functions(), st.sampled_from(sorted(set(WAYS) - {"pieces", "graphify outside"})))
def test_any_function_that_donates_its_state(function: Function, way: str) -> None:
    width = function.params.shape[0]
    wide = Transform(
        lambda params, state: torch.zeros(width), lambda f, carry, *args: _added(carry, *f(*args))
    )
    state = clone(function.state)
    other = wide.carry(function.params, clone(function.state))
    transformed = graphify(wide(function.fn)) if way != "transform" else wide(function.fn)
    total = torch.zeros(width)
    for x in function.inputs:
        state, out = function.fn(function.params, state, x)
        total = total + out.sum(0)
        other, other_out = transformed(function.params, other, x)
        assert_equal(LAW, (other.state, other.transform_state, other_out), (state, total, out))


def _added(carry: Tensor, state: Any, y: Tensor) -> tuple[Tensor, Any, Tensor]:
    return carry + y.sum(0), state, y


@pytest.mark.parametrize("way", WAYS)
def test_it_is_scanned(way: str) -> None:
    state, outs = scan(WAYS[way](step), 3)(PARAMS, fresh(), BATCHES[0])
    assert_equal(LAW, (state, outs), by_hand([BATCHES[0]] * 3))


def test_around_a_scan_it_sees_one_call() -> None:
    last = Transform(
        lambda params, state: torch.zeros(3, 4), lambda f, carry, *args: _last(*f(*args))
    )
    state, outs = last(scan(step, 3))(PARAMS, last.carry(PARAMS, STATE), BATCHES[0])
    expected = by_hand([BATCHES[0]] * 3)[1]
    assert_equal(LAW, (outs, state.transform_state), (expected, expected[-1]))


def _last(state: Any, outs: list[Tensor]) -> tuple[Tensor, Any, list[Tensor]]:
    return outs[-1], state, outs


@pytest.mark.parametrize("way", WAYS)
def test_it_is_cut_into_parts(way: str) -> None:
    x = BATCHES[0]
    state, out = microbatch(WAYS[way](step), 3)(PARAMS, fresh(), x)
    expected, outs = by_hand([x[:1], x[1:2], x[2:]])
    assert_equal(LAW, (state, out), (expected, torch.cat(outs)))


@given(stage_lists(), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans())
def test_stages_in_a_pipeline(
    functions: list[Function], rows: int, parts: int, graph: bool, lent: bool
) -> None:
    stages = [f.fn for f in functions]
    params = [f.params for f in functions]
    states = [f.state for f in functions]
    x = torch.linspace(-2, 2, rows * 4).view(rows, 4)
    expected_states, out = compose(stages)(params, states, x)
    inside = [
        graphify(s, outputs="borrow" if lent else "safe", reference_argnames=()) for s in stages
    ]
    mine = [summed(s) for s in (inside if graph else stages)]
    carried = [summed.carry(p, s) for p, s in zip(params, states, strict=True)]
    state, output = pipeline(mine, microbatches=parts)(params, carried, x)
    assert_equal(
        LAW, ([s.state for s in state], output), (list(expected_states), out), exact=parts == 1
    )
    assert {int(s.transform_state["calls"]) for s in state} == {min(parts, rows)}
    assert_equal(LAW, state[-1].transform_state["sum"], out.sum(0), exact=False)


def stage(params: Tensor, state: Tensor, batch: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor]:
    return state + 1, ((batch if x is None else x) + params) * 2


def stepped(state: Tensor, batch: Tensor, out: Tensor) -> Tensor:
    return state + out.sum()


@pytest.mark.parametrize("transport", [None, Threads()], ids=["local", "threads"])
@pytest.mark.parametrize("whole", [False, True])
def test_advance_is_lifted_over_what_some_stages_carry(transport: Any, whole: bool) -> None:
    params = [torch.ones(4), torch.zeros(4)]
    states = [torch.tensor(0.0)] * 2
    x = BATCHES[0]
    plain = pipeline([stage, stage], advance=stepped)
    transformed: Any = pipeline([summed(stage), stage], advance=lift(stepped), transport=transport)
    transformed = graphify(transformed) if whole and transport is None else transformed
    state: Any = (summed.carry(params[0], states[0]), states[1])
    expected_states, out = plain(params, states, x)
    for calls in (1, 2):
        state, output = transformed(params, state, x)
        assert int(state[0].transform_state["calls"]) == calls
    assert_equal(LAW, output, out)
    assert_equal(LAW, [state[0].state, state[1]], plain(params, expected_states, x)[0])


def test_one_inside_another_carries_both() -> None:
    both = summed(summed(step))
    state = summed.carry(PARAMS, fresh())
    state, out = graphify(both)(PARAMS, state, BATCHES[0])
    expected, outs = by_hand(BATCHES[:1])
    assert_equal(LAW, (state, out), (Carried(expected, expected.transform_state), outs[0]))


def test_torch_func_goes_through_it() -> None:
    batches = torch.stack([BATCHES[0], -BATCHES[0]])
    carried = fresh()
    for transformed in (summed(step), summed(graphify(step)), graphify(summed(step))):
        mapped, outs = torch.func.vmap(transformed, (None, None, 0))(PARAMS, carried, batches)
        for index, batch in enumerate(batches):
            state, out = transformed(PARAMS, carried, batch)
            assert_equal(
                LAW,
                (outs[index], mapped.transform_state["sum"][index]),
                (out, state.transform_state["sum"]),
                exact=False,
            )
        grad = torch.func.grad(
            lambda p, f=transformed: f(p, carried, batches[0])[0].transform_state["sum"].sum()
        )(PARAMS)
        assert_equal(
            LAW,
            grad,
            torch.func.grad(lambda p: step(p, STATE, batches[0])[1].sum())(PARAMS),
            exact=False,
        )


# a transform that carries nothing: f -> f, with functools.wraps


def doubled(f: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(f)
    def run(*args: Any) -> Any:
        state, out = f(*args)
        return state, 2 * out if out.ndim == 0 else out

    return run


@pytest.mark.parametrize("transport", [None, Threads()], ids=["local", "threads"])
def test_one_without_state_hands_on_that_a_stage_lends(transport: Any) -> None:
    x = torch.arange(24.0).view(6, 4)
    params = [torch.ones(4)] * 2
    states = [torch.tensor(0.0)] * 2
    lent = [doubled(graphify(stage, outputs="borrow")) for _ in range(2)]
    assert all(map(lends, lent))
    _, out = pipeline(lent, microbatches=3, transport=transport)(params, states, x)
    assert_equal(LAW, out, compose([stage, stage])(params, states, x)[1])


@pytest.mark.parametrize("wrap", [lambda f: f, doubled], ids=["plain", "wrapped"])
def test_parts_and_steps_of_what_lends_are_all_there(wrap: Any) -> None:
    lent = wrap(graphify(step, outputs="borrow"))
    _, out = microbatch(lent, 3)(PARAMS, STATE, BATCHES[0])
    state, outs = scan(lent, 3)(PARAMS, STATE, BATCHES[0])
    x = BATCHES[0]
    assert_equal(LAW, out, torch.cat(by_hand([x[:1], x[1:2], x[2:]])[1]))
    assert_equal(LAW, (state, outs), (by_hand([x] * 3)[0].state, by_hand([x] * 3)[1]))
    assert lends(compose([doubled(graphify(stage, outputs="borrow"))]))
    assert not any(
        map(lends, (microbatch(lent, 3), scan(lent, 3), graphify(lent), pipeline([stage])))
    )


# what it refuses


def broken(step: Any, carry: Any, *args: Any) -> Any:
    return step(*args)


@pytest.mark.parametrize(
    ("wrong", "problem", "instead"),
    [
        (lambda: Transform(None, broken), "None", "a function"),  # type: ignore[arg-type]
        (lambda: summed(3), "step=3", "a step"),  # type: ignore[type-var]
        (
            lambda: summed(step)(PARAMS, STATE, BATCHES[0]),
            "a state that is a Tensor",
            "transform.carry(params, state)",
        ),
        (
            lambda: Transform(lambda p, s: None, broken)(step)(
                PARAMS, Carried(STATE, None), BATCHES[0]
            ),
            "apply returned a tuple of 2",
            "return (transform_state, state, out)",
        ),
    ],
)
def test_what_it_refuses(wrong: Callable[[], Any], problem: str, instead: str) -> None:
    with pytest.raises(ProgramError) as error:
        wrong()
    assert problem in error.value.problem
    assert instead in error.value.instead
