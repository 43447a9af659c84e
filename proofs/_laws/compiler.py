"""L26: with a compiler, a graph is its function."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from weft.batches.padding import pad, unpad
from weft.errors import WeftError
from weft.proofs._laws.captures import (
    UNCOMPILED,
    Tally,
    graph_is_eager_on_tensor_programs,
    reason_of,
)
from weft.proofs._laws.compare import whole
from weft.proofs._laws.func import TRANSFORMS
from weft.proofs._strategies.captures.tensor_programs import TensorProgram
from weft.proofs._strategies.compiled import CompiledCase, CompiledMapping, CompiledModel
from weft.proofs._strategies.compilers import EXACT, INDUCTOR, QUICK
from weft.proofs._strategies.sized_functions import Sheet, SizedFunction
from weft.proofs.checks.difference import LawViolation, assert_equal
from weft.proofs.checks.rounding import RoundingViolation, assert_rounded, errors
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone, donates
from weft.values.trees import tree_map

_LAW = "L26 a compiled graph is eager"


def compiled_graphs_are_their_functions(
    case: CompiledCase, device: str = "cpu", tally: Tally | None = None
) -> None:
    """L26 for a case of any kind.

    The results, the donated state after any number of calls, and the random numbers are those of
    the function, or weft refuses it. They have the same bits, if the compiler takes torch's own
    kernels (`EXACT`). Otherwise each differs by no more than the default tolerances of
    torch.testing for its dtype, or than twice as much as `torch.compile` of the function, without
    weft. Weft may capture without the compiler only what its own reasons name.

    Args:
        tally: counts the outcomes.
    """
    tally = Tally() if tally is None else tally
    with _only_uncompiled_for_a_reason(case, tally):
        match case:
            case TensorProgram():
                _check_program(case, device, tally)
            case SizedFunction():
                _check_classes(case, device, tally)
            case CompiledMapping():
                _check_mapping(case, tally)
            case CompiledModel():
                _check_model(case, device, tally)


@contextmanager
def _only_uncompiled_for_a_reason(case: CompiledCase, tally: Tally) -> Iterator[None]:
    """Count what is captured without its compiler; raise LawViolation if a compiler that compiles
    nothing failed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=UNCOMPILED)
        yield
    for warning in caught:
        text = str(warning.message)
        reason = re.sub(r"\[.*?\]", "[...]", text.partition("which failed: ")[2])
        tally.uncompiled[reason.removesuffix(". strict=True makes this an error.")] += 1
        # An error and no reason of weft's own begins with its class.
        if case.compiler in QUICK and re.match(r"[A-Za-z.]*(Error|Exception)\b", reason):
            raise LawViolation(f"{_LAW}: {text}")


def _assert_alike(
    case: CompiledCase, where: str, actual: Any, expected: Any, by_torch: Callable[[], Any]
) -> bool:
    """Raise LawViolation if results are not those of the function; return whether they are rounded
    in another way, and no more than by torch's compiler.

    Args:
        by_torch: the results of the function that `torch.compile` has compiled.
    """
    if case.compiler in EXACT:
        assert_equal(where, actual, expected)
        return False
    try:
        assert_rounded(where, actual, expected)
    except RoundingViolation as violation:
        try:
            allowed = errors(by_torch(), expected)
        except Exception:
            raise violation from None  # there is nothing to compare with
        if not _are_within(errors(actual, expected), allowed):
            raise
        return True
    return False


# An error of torch's compiler above this is none of rounding, and allows nothing. Some roundings to
# bfloat16 stay below.
_MOST = 0.05


def _are_within(actual: Sequence[float], allowed: Sequence[float]) -> bool:
    """Whether no error is more than twice the largest that is allowed. One tensor's own is no
    measure, since in a sum errors may cancel."""
    largest = max(allowed, default=0.0)
    return largest < _MOST and max(actual, default=0.0) <= 2 * largest


def _compiled_by_torch(case: CompiledCase, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled by torch, with the same compiler."""
    torch.compiler.reset()
    compiler = case.compiler or INDUCTOR
    # The same random numbers as the function.
    options: Any = {"fallback_random": True} if compiler == INDUCTOR else None
    return torch.compile(function, backend=compiler, options=options)


# Programs of tensors


def _check_program(program: TensorProgram, device: str, tally: Tally) -> None:
    try:
        graph_is_eager_on_tensor_programs(program, device, tally)
    except RoundingViolation:
        if not _rounds_as_torch_does(program, device):
            raise
        tally.rounded += 1


def _rounds_as_torch_does(program: TensorProgram, device: str) -> bool:
    """Whether no result of the graph is off by more than twice as much as of the function that
    torch compiled."""

    allowed = _errors_of(program, lambda f: _compiled_by_torch(program, f), device)
    graphed = _errors_of(program, lambda f: graphify(f, **program.options()), device)
    if allowed is None or graphed is None:
        return False
    return _are_within(graphed, allowed)


def _errors_of(
    program: TensorProgram, transform: Callable[[Callable[..., Any]], Any], device: str
) -> list[float] | None:
    """The errors of all results of all calls of a transformed function; None if it raises."""
    devices = ["cuda"] if device == "cuda" else []
    results = []
    for is_transformed in (True, False):
        names = program.run()
        plain = donates(*program.donated)(names["f"]) if program.donated else names["f"]
        function = transform(names["f"]) if is_transformed else plain
        state = None
        of_calls = []
        with warnings.catch_warnings(), torch.random.fork_rng(devices=devices):
            warnings.simplefilter("ignore")
            for call in range(program.calls):
                arguments = [*names["arguments"](call)]
                if isinstance(state, Tensor) and state.shape == arguments[0].shape:
                    arguments[0] = state
                names["before"](call)
                torch.manual_seed(call)
                try:
                    with names["around"](call):
                        result = function(*arguments)
                except Exception:
                    return None
                state = result[0] if program.chained else None
                of_calls.append(tree_map(lambda x: x.detach().clone(), result))
        results.append(of_calls)
    return errors(*results)


# Ladders


def _check_classes(function: SizedFunction, device: str, tally: Tally) -> None:
    """Each class of a ladder computes what the function does at the padded size, and what the same
    class does that is compiled alone."""
    tally.programs += 1

    def graph_of(classes: Sequence[Any]) -> Any:
        return graphify(
            function.step, ladder=classes, donate_argnames="state", compiler=function.compiler
        )

    shared = graph_of(function.classes)
    alone = {extent: graph_of([extent]) for extent in function.classes}
    params = function.params(device)
    state = function.state(device)
    expected_state = function.state(device)
    # Donated tensors are captured where they are, so each graph has a state of its own.
    states = {extent: function.state(device) for extent in function.classes}
    devices = ["cuda"] if device == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for call, sheet in enumerate(function.sheets(device)):
            where = f"{_LAW}, call {call}"
            tally.calls += 1
            descriptor = shared.explain(params, state, sheet).decision.descriptor
            padded = pad(sheet, descriptor)
            torch.manual_seed(call)
            before = clone(expected_state)
            try:
                expected_state, expected = function.step(params, expected_state, padded)
            except Exception:
                tally.errors += 1
                return
            drawn = _drawn(device)
            if descriptor in alone:
                for name, x in states[descriptor].items():
                    x.copy_(state[name])
            try:
                torch.manual_seed(call)
                state, result = shared(params, state, sheet)
            except WeftError as error:
                tally.refused[reason_of(error)] += 1
                return
            except Exception as error:
                raise LawViolation(f"{where}: it raises {type(error).__name__}: {error}") from error
            assert_equal(f"{where}: random generator", _drawn(device), drawn)
            expected = unpad(expected, sheet.extent)

            def by_torch(
                call: int = call, before: Any = before, padded: Sheet = padded, sheet: Sheet = sheet
            ) -> Any:
                torch.manual_seed(call)
                compiled = _compiled_by_torch(function, function.on_tensors())
                next_state, x = compiled(params, clone(before), padded.x)
                return next_state, unpad(attrs.evolve(padded, x=x), sheet.extent)

            tally.rounded += _assert_alike(
                function, f"{where}: result", (state, result), (expected_state, expected), by_torch
            )
            if descriptor in alone:
                torch.manual_seed(call)
                states[descriptor], by_itself = alone[descriptor](params, states[descriptor], sheet)
                _assert_alike(
                    function,
                    f"{where}: result alone",
                    (states[descriptor], by_itself),
                    (expected_state, expected),
                    by_torch,
                )
            # The next call begins with the same bits.
            for name, x in expected_state.items():
                state[name].copy_(x)
    info = shared.cache_info()
    tally.replays += info.replays
    tally.captures += info.captures


def _drawn(device: str) -> Tensor:
    """Numbers that show where the device's random generator stands."""
    return torch.rand(2, device=device)


# Derivatives


def _check_mapping(case: CompiledMapping, tally: Tally) -> None:
    """A compiled graph of a transform of torch.func is the transform; and inside the transform, a
    compiled graph is its function."""
    tally.programs += 1
    apply = TRANSFORMS[case.transform]
    fn = case.mapping.fn
    params = case.mapping.params
    inside = graphify(fn, compiler=case.compiler)

    def applied(params: Tensor, x: Tensor) -> Any:
        return apply(fn, params, x)

    around = graphify(applied, compiler=case.compiler)
    for x in case.mapping.inputs:
        tally.calls += 1
        expected = applied(params, x)
        where = f"{_LAW}: {case.transform}"

        def by_torch(x: Tensor = x) -> Any:
            return _compiled_by_torch(case, applied)(params, x)

        for place, result in (("inside", around(params, x)), ("around", apply(inside, params, x))):
            rounded = _assert_alike(case, f"{where} {place}", result, expected, by_torch)
            tally.rounded += rounded

        def plain_by_torch(x: Tensor = x) -> Any:
            return _compiled_by_torch(case, fn)(params, x)

        plain = inside(params, x)
        _assert_alike(case, f"{where}, a plain call", plain, fn(params, x), plain_by_torch)
    for graph in (inside, around):
        info = graph.cache_info()
        tally.replays += info.replays
        tally.captures += info.captures


# Models


def _check_model(case: CompiledModel, device: str, tally: Tally) -> None:
    """A compiled model has the outputs and the whole state of an eager run at the same padded
    size."""
    tally.programs += 1
    scenario = case.scenario
    eager = whole(scenario, device)
    graph = graphify(whole(scenario, device), ladder=case.ladder, compiler=case.compiler)
    params = scenario.params(1, device)
    expected_state = scenario.state(1, device)
    state = scenario.state(1, device)
    for batch in scenario.batches(device):
        tally.calls += 1
        descriptor = graph.explain(params, state, batch).decision.descriptor
        expected_state, expected = eager(params, expected_state, pad(batch, descriptor))
        state, out = graph(params, state, batch)
        assert_equal(f"{_LAW}: a model's output", out, unpad(expected, batch.descriptor))
        assert_equal(f"{_LAW}: a model's state", state, expected_state)
    info = graph.cache_info()
    tally.replays += info.replays
    tally.captures += info.captures
