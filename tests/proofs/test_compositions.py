"""L25's strategy draws every public transform and every effect, and its definitions are plain
torch's."""

import dis
import inspect
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from torch import Tensor

import weft
import weft.transforms
from weft.effects import Effect
from weft.proofs import LawViolation
from weft.proofs._laws.captures import Tally
from weft.proofs._laws.compositions import compositions_mean_their_parts
from weft.proofs._strategies.compositions.bodies import OPERATIONS, Body, World
from weft.proofs._strategies.compositions.composition import (
    MAX_DEPTH,
    ROWS,
    Composition,
    compositions,
)
from weft.proofs._strategies.compositions.layers import LAYERS
from weft.proofs._strategies.compositions.occasions import OCCASIONS
from weft.transforms.graphs.backends.audit import Audit

# Public names that take functions or surround calls, and are no layer of their own, with the
# reason.
NOT_DRAWN = {
    "launch": "starts processes",
    "plan_cohorts": "predicts times",
    "measure": "takes times",
    "no_capture": "raises at a capture, which is its purpose",
    "assert_max_captures": "raises at a capture too many, which is its purpose",
    "check_borrowed": "raises at a stale result, which is its purpose",
}


def _takes_a_function(thing: Any) -> bool:
    """Whether a call of it, or of what it makes, takes a function to transform."""
    if inspect.isclass(thing):
        return "__call__" in vars(thing) and "step" in inspect.signature(thing.__call__).parameters
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return False
    # A compiler is a function, but none to transform.
    annotations = [str(p.annotation) for p in parameters if p.name != "compiler"]
    return any("Callable" in annotation or annotation == "~F" for annotation in annotations)


def _is_context(thing: Any) -> bool:
    wrapped = inspect.unwrap(thing) if callable(thing) else thing
    return inspect.isgeneratorfunction(wrapped)


def public_transforms() -> Iterator[str]:
    """The public names that transform a function, or surround its calls."""
    for home in (weft, weft.transforms):
        for name in home.__all__:
            thing = getattr(home, name)
            if isinstance(thing, types.ModuleType):
                continue
            if callable(thing) and (_takes_a_function(thing) or _is_context(thing)):
                yield name


def test_every_public_transform_is_a_layer() -> None:
    drawn = {name for layer in LAYERS.values() for name in layer.uses}
    public = set(public_transforms())
    assert {"graphify", "shard", "while_loop", "Transform", "batch_invariant"} <= public
    assert public - drawn - set(NOT_DRAWN) == set()
    assert set(NOT_DRAWN) <= public


def test_every_effect_is_performed_by_a_layer() -> None:
    members = {
        member
        for union in typing.get_args(Effect)
        for member in (typing.get_args(union) or (union,))
    }
    performed = set()
    for layer in LAYERS.values():
        function: Any = layer.apply(lambda x: x * 2)
        if hasattr(function, "programs"):
            for program in function.programs(torch.ones(ROWS, 2)):
                performed |= {type(effect) for effect in program.effects}
    assert performed == members


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_a_plain_function_means_its_definition(name: str) -> None:
    compositions_mean_their_parts(
        Composition(Body(("x * weight", "tanh(x)")), (name,), ("a call", "a call"))
    )


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_runs_without_layers(name: str) -> None:
    world = World(torch.tensor([1.0, 2.0]), torch.eye(2), 1.5, {})
    assert OPERATIONS[name].run(torch.ones(ROWS, 2), world).shape == (ROWS, 2)


def test_the_definitions_call_nothing_of_weft() -> None:
    for layer in LAYERS.values():
        for wrap in (layer.meaning, layer.torch_alone):
            homes = {
                value.__module__ for value in _globals_read(wrap) if hasattr(value, "__module__")
            }
            product = [home for home in homes if home and home.startswith("weft.")]
            assert [home for home in product if not home.startswith("weft.proofs.")] == []


def _globals_read(wrap: Callable[..., Any] | None) -> Iterator[Any]:
    """The global values that a wrap's code, and the code inside it, reads by name."""
    codes = [wrap.__code__] if isinstance(wrap, types.FunctionType) else []
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL":
                yield wrap.__globals__.get(instruction.argval)


def test_users_bring_functions_of_their_own() -> None:
    nests = compositions(body=st.just(Body(("x * scale",))))

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(nests)
    def run(nest: Composition) -> None:
        compositions_mean_their_parts(nest)

    run()


@pytest.mark.nightly
def test_every_layer_operation_and_occasion_is_drawn() -> None:
    counts: Counter[str] = Counter()

    @seed(0)
    @settings(max_examples=1500, deadline=None, database=None, phases=[Phase.generate])
    @given(compositions())
    def draw(nest: Composition) -> None:
        assert 1 <= len(nest.layers) <= MAX_DEPTH
        counts.update((*nest.layers, *nest.occasions, *nest.body.operations))

    draw()
    assert set(counts) == {*LAYERS, *OCCASIONS, *OPERATIONS}


def test_a_call_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor) -> Tensor:
        return x + 1

    nest = Composition(Body(("tanh(x)",)), ("scan",), ("a call",))
    monkeypatch.setitem(LAYERS, "scan", LAYERS["compose"])
    tally = Tally()
    compositions_mean_their_parts(nest, tally=tally)
    assert (tally.calls, tally.errors) == (1, 0)
    monkeypatch.setattr(
        LAYERS["compose"].__class__, "apply", property(lambda self: lambda function: wrong)
    )
    with pytest.raises(
        LawViolation, match=r"L25 .*scan\(f\) of f: tanh\(x\); a call \(seed 0\), call 0: result\["
    ):
        compositions_mean_their_parts(nest)


def test_a_thread_that_a_capture_does_not_see_is_refused_or_a_violation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nest = Composition(Body(("tanh(x)",)), ("graphify", "a thread"), ("a call", "a call"))
    tally = Tally()
    compositions_mean_their_parts(nest, tally=tally)
    assert [reason for reason in tally.refused if "another thread did" in reason]
    monkeypatch.setattr(Audit, "_refuse_unseen", lambda self, storage, tensor: None)
    with pytest.raises(LawViolation, match=r"graphify\(a thread\(f\)\) .*, call 1: result"):
        compositions_mean_their_parts(nest)


def test_sums_that_overflow_may_differ_and_others_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    overflowing = Composition(
        Body(("detaches",)), ("shard, all_gather", "scan", "scan"), ("backward",)
    )
    finite = Composition(Body(("detaches",)), ("shard, all_gather",), ("backward",))
    tally = Tally()
    compositions_mean_their_parts(overflowing, tally=tally)
    assert tally.errors == 1
    compositions_mean_their_parts(finite)
    undefined = property(lambda self: lambda function: lambda x: function(x) * float("nan"))
    monkeypatch.setattr(type(LAYERS["shard, all_gather"]), "apply", undefined)
    with pytest.raises(LawViolation, match="nan against"):
        compositions_mean_their_parts(finite)


def test_an_unfit_refusal_is_a_violation() -> None:
    refused = Composition(Body(("reads its argument",)), ("graphify",), ("a call",))
    assert refused.may_be_refused("a call")
    compositions_mean_their_parts(refused)
    allowed = Composition(Body(("tanh(x)",)), ("graphify",), ("a call",))
    assert not allowed.may_be_refused("a call")
