"""`graphify(..., compiler=...)`: a compiled graph is its function, and what cannot be compiled says
so. `aot_eager` is torch's compiler without code of its own, and takes no seconds."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from graphified import LAW, counts
from hypothesis import given, strategies as st
from test_reasonable_functions import REASONABLE, REPLAYS
from torch import Tensor, nn

import weft
from weft.errors import CaptureError, CompilerError, VerificationError
from weft.ops.requests import move_on
from weft.proofs import assert_equal
from weft.torchapi.faking import fake_tensors
from weft.transforms.graphs.compiler.compilations import Compilations
from weft.transforms.graphs.compiler.sizes import (
    DIVISORS,
    NotShared,
    Size,
    check_instance,
    generalize,
)
from weft.transforms.graphs.compiler.trace import Operation, Ref, Trace
from weft.transforms.graphs.graphify import graphify

X = torch.arange(12.0).reshape(3, 4)
NET = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
NET.requires_grad_(False)
FUNCTIONS = REPLAYS | REASONABLE


def compiled(fn: Callable[..., Any], **options: Any) -> Any:
    return graphify(fn, **{"compiler": "aot_eager", "strict": True} | options)


@pytest.mark.one_of(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("fn", "calls"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_compiled_graph_is_its_function(
    fn: Callable[..., Any], calls: tuple[tuple[Any, ...], ...]
) -> None:
    g = graphify(fn, compiler="aot_eager")
    kept = []
    for args in calls:
        torch.manual_seed(0)
        result = g(*args)
        torch.manual_seed(0)
        expected = fn(*args)
        assert_equal(LAW, result, expected, exact=False)
        kept.append((result, weft.clone(result)))
    for result, as_it_was in kept:
        assert_equal("a result never changes", result, as_it_was)


def train(params: Any, moments: Any, x: Tensor) -> Any:
    """A step of gradient descent with momentum, in place."""

    def loss(p: Any) -> Tensor:
        y: Tensor = torch.func.functional_call(NET, p, (x,))
        return y.square().mean()

    slopes, value = torch.func.grad_and_value(loss)(params)
    for name, slope in slopes.items():
        moments[name].mul_(0.9).add_(slope)
        params[name].sub_(0.1 * moments[name])
    return params, moments, value


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_training_step_is_one_graph(compiler: str) -> None:
    params = {name: p.clone() for name, p in NET.named_parameters()}
    moments = {name: torch.zeros_like(p) for name, p in params.items()}
    addresses = [p.data_ptr() for p in params.values()]
    expected = train(weft.clone(params), weft.clone(moments), X)
    expected = train(*expected[:2], X + 1)
    step = compiled(train, compiler=compiler, donate_argnames=["params", "moments"])
    params, moments, value = step(params, moments, X)
    params, moments, value = step(params, moments, X + 1)
    assert_equal(LAW, (params, moments, value), expected, exact=False)
    assert [p.data_ptr() for p in params.values()] == addresses
    assert counts(step) == (1, 2, 0)


def test_inductor_on_a_cpu() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.sin(x) * 2 + 1, x.t(), x

    g = compiled(fn, compiler="inductor")
    for x in (X, X + 1):
        assert_equal(LAW, g(x), fn(x), exact=False)
    assert counts(g) == (1, 2, 0)


def test_random_numbers_are_the_functions_own() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(3, 4) * nn.functional.dropout(x, 0.5)

    g = compiled(noisy)
    state = torch.get_rng_state()
    g.capture(X)
    assert_equal("a capture draws nothing", torch.get_rng_state(), state)
    replayed = [g(X), g(X)]
    torch.set_rng_state(state)
    assert_equal(LAW, replayed, [noisy(X), noisy(X)])


def test_an_operator_of_weft_s_own_writes_to_the_state() -> None:
    def step(state: dict[str, Tensor], rows: Tensor, starts: Tensor, ids: Tensor) -> Any:
        move_on(state["positions"], state["last_tokens"], rows, starts, rows >= 0, ids)
        return state, state["positions"] * 2

    def new_state() -> dict[str, Tensor]:
        return {name: torch.arange(4) for name in ("positions", "last_tokens")}

    batch = (torch.tensor([2, 0, -1]), torch.tensor([0, 3, 4, 4]), torch.tensor([7, 8, 9]))
    g = compiled(step, donate_argnames="state")
    state = new_state()
    expected = new_state()
    for _ in range(2):
        state, doubled = g(state, *batch)
        expected, expected_doubled = step(expected, *batch)
        assert_equal(LAW, (state, doubled), (expected, expected_doubled))


@attrs.frozen
class Length(weft.Descriptor):
    steps: int


@weft.pytree
@attrs.frozen(eq=False)
class Signal:
    length: Length = attrs.field(metadata=weft.descriptor_field())
    x: Tensor = attrs.field(metadata=weft.axes("steps"))


LADDER = [Length(n) for n in (40, 24, 16, 12, 8, 6, 5, 4)]


def attend(signal: Signal) -> Signal:
    """Uses the size in a view, in a factory, as a number, and as its square."""
    n = signal.length.steps
    x = NET(signal.x)
    scores = (x @ x.T).reshape(n * n).reshape(n, n) + torch.arange(n)[:, None]
    x = scores.softmax(-1) @ x + signal.x.cumsum(0)
    return Signal(signal.length, torch.cat([x[: n // 2], x[n // 2 :]]))


def compilations(g: Any) -> int:
    held_by_cache: Compilations = g._cache.compilations
    return held_by_cache.count


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_ladder_is_one_compilation(compiler: str) -> None:
    g = compiled(attend, compiler=compiler, ladder=LADDER)
    for n in (40, 3, 5, 6, 7, 11, 16, 24, 23, 1):
        signal = Signal(Length(n), torch.randn(n, 4))
        padded = Signal(Length(g.explain(signal).decision.descriptor.steps), torch.zeros(0))
        padded = Signal(
            padded.length, torch.nn.functional.pad(signal.x, (0, 0, 0, padded.length.steps - n))
        )
        expected = Signal(signal.length, attend(padded).x[:n])
        assert_equal(LAW, g(signal), expected, exact=False)
    assert g.cache_info().captures == len(LADDER)
    assert compilations(g) == 1


def test_a_number_that_follows_no_size_is_compiled_for_its_class() -> None:
    weights = {n: float(n % 5) for n in range(64)}

    def fn(signal: Signal) -> Signal:
        return Signal(signal.length, signal.x * weights[signal.length.steps])

    g = compiled(fn, ladder=LADDER)
    for n in (40, 24, 16):
        signal = Signal(Length(n), torch.randn(n, 4))
        assert_equal(LAW, g(signal), fn(signal))
    assert compilations(g) == 3


def test_a_class_that_computes_in_another_way_has_a_compilation_of_its_own() -> None:
    def fn(signal: Signal) -> Signal:
        # As many modules choose an algorithm by size.
        return Signal(
            signal.length, signal.x.cos() if signal.length.steps == 12 else signal.x.sin()
        )

    g = compiled(fn, ladder=LADDER)
    for n in (40, 24, 12, 8):
        signal = Signal(Length(n), torch.randn(n, 4))
        assert_equal(LAW, g(signal), fn(signal))
    assert compilations(g) == 2


@st.composite
def expressions(draw: st.DrawFn) -> Size:
    factors = draw(st.sampled_from([("a",), ("b",), ("a", "a"), ("a", "b")]))
    divisor = draw(st.sampled_from(DIVISORS))
    rounding = draw(st.sampled_from([0, divisor - 1]))
    return Size(factors, draw(st.integers(1, 9)), divisor, draw(st.integers(-20, 20)), rounding)


def _trace_of(number: int) -> Trace:
    operation = Operation(torch.ops.aten.view.default, (Ref(0), [number, 4]), {}, (((), 1),))
    return Trace((), (operation,), (), fake_tensors())


@given(expressions(), st.lists(st.tuples(st.integers(2, 99), st.integers(2, 99)), min_size=4))
def test_an_expression_that_is_taken_is_right_or_noticed(
    size: Size, classes: list[tuple[int, int]]
) -> None:
    """A class either has the numbers that the general trace gives it, or is told apart."""
    sizes = [{"a": a, "b": b} for a, b in classes]
    try:
        general = generalize([_trace_of(size.of(s)) for s in sizes[:3]], sizes[:3])
    except NotShared:
        return  # each class is compiled for itself
    (operation,) = general.operations
    number = operation.args[1][0]
    for s in sizes:
        fits = (number.of(s) if isinstance(number, Size) else number) == size.of(s)
        try:
            check_instance(_trace_of(size.of(s)), general, s, ())
            assert fits
        except NotShared:
            assert not fits


@pytest.mark.parametrize(
    "number",
    [
        lambda a, b: a * 64,
        lambda a, b: b + 1,
        lambda a, b: a // 2,
        lambda a, b: a - a // 2,
        lambda a, b: -(-a // 16),
        lambda a, b: a * a,
        lambda a, b: 8 * a * b,
        lambda a, b: 7,
    ],
)
def test_numbers_that_code_computes_from_sizes_are_found(number: Callable[[int, int], int]) -> None:
    sizes = [{"a": a, "b": b} for a, b in ((200, 9), (5, 2), (64, 7), (33, 3))]
    general = generalize([_trace_of(number(**s)) for s in sizes[:3]], sizes[:3])
    for s in sizes:
        check_instance(_trace_of(number(**s)), general, s, ())


def test_what_does_not_depend_on_arguments_may_be_kept() -> None:
    cache: dict[str, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        if "mask" not in cache:
            cache["mask"] = torch.ones(3, 4).tril()
        return x * cache["mask"]

    g = compiled(fn)
    for x in (X, X + 1):
        assert_equal(LAW, g(x), fn(x))
    assert type(cache["mask"]) is Tensor


def test_a_constant_is_read_and_written() -> None:
    def fn(x: Tensor) -> Tensor:
        steps = torch.arange(4)
        factor = int(steps[2])
        total = torch.zeros(4)
        total.add_(x.sum(0))
        return x * factor + total + steps.add_(1)

    g = compiled(fn)
    for x in (X, X + 1):
        assert_equal(LAW, g(x), fn(x))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_surroundings_are_those_of_the_function(dtype: torch.dtype | None) -> None:
    g = compiled(lambda x: (x @ x.T, torch.ones(3)))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        assert_equal(LAW, g(X), (X @ X.T, torch.ones(3)))


def test_a_host_read_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match="a branch on a tensor's value"):
        compiled(lambda x: x if bool(x.sum() > 0) else -x)(X)


def test_a_graph_does_not_keep_the_params() -> None:
    params = {"w": torch.ones(4, 4)}
    alive = weakref.ref(params["w"])
    g = compiled(lambda params, x: x @ params["w"])
    g(params, X)
    del params
    assert alive() is None


def loop(x: Tensor) -> Any:
    return weft.while_loop(lambda y: y.sum() < 100, lambda y: y * 2, x)


def test_what_cannot_be_compiled_says_so_once_and_runs() -> None:
    g = graphify(loop, compiler="aot_eager")
    with pytest.warns(
        RuntimeWarning, match="loop: runs without compiler='aot_eager', which failed"
    ):
        assert_equal(LAW, g(X), loop(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(LAW, g(X[:2]), loop(X[:2]))


def test_strict_makes_it_an_error() -> None:
    with pytest.raises(CompilerError, match="while_loop, whose number of steps depends on data"):
        compiled(loop)(X)
    with weft.batch_invariant(), pytest.raises(CompilerError, match="sums in an order of its own"):
        compiled(lambda x: x.sum())(X)


def test_an_error_of_the_function_itself_is_raised() -> None:
    def fn(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compiled(fn)(X)


def test_a_compiler_of_ones_own() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        calls.append(len(examples))
        return graph.forward

    g = compiled(lambda x: x * 2, compiler=backend)
    assert_equal(LAW, g(X), X * 2)
    assert calls == [1]


def test_an_unknown_compiler() -> None:
    with pytest.raises(CompilerError) as error:
        graphify(loop, compiler="inductr")
    assert str(error.value) == (
        "graphify(loop, ...)\n  saw: compiler='inductr', which is no compiler of torch\n"
        "  instead: compiler='inductor'; without it, nothing is compiled"
    )


def test_verify_allows_for_rounding() -> None:
    scale = torch.nn.Identity()
    scale.factor = 2.0
    g = compiled(lambda x: torch.sin(x) * scale.factor, verify=1)
    assert_equal(LAW, g(X), torch.sin(X) * 2)
    scale.factor = 3.0
    with pytest.raises(VerificationError):
        g(X + 1)
