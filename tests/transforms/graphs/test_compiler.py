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
from torch.optim.adamw import adamw

import weft
from weft.errors import CaptureError, CompilerError, VerificationError
from weft.ops.requests import move_on
from weft.proofs import assert_equal
from weft.proofs._strategies.compositions.layers import LAYERS
from weft.torchapi.faking import fake_tensors
from weft.transforms.graphs.compiler import parts
from weft.transforms.graphs.compiler.compilations import Compilations
from weft.transforms.graphs.compiler.sizes import (
    DIVISORS,
    NotShared,
    Size,
    check_instance,
    generalize,
)
from weft.transforms.graphs.compiler.trace import Operation, Ref, Trace
from weft.transforms.graphs.graphified import num_pieces
from weft.transforms.graphs.graphify import graphify

X = torch.arange(12.0).reshape(3, 4)
Y = torch.ones(3, 4)
NET = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
NET.requires_grad_(False)
DEEP = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).requires_grad_(False)
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


def adamw_by_lists(params: Any, means: Any, squares: Any, steps: Any, x: Tensor) -> Any:
    """A step of AdamW by torch's operators on lists of tensors."""
    slopes, norm = clipped_slopes(params, x)
    torch._foreach_add_([*steps.values()], 1)
    p, m, s = ([*tree.values()] for tree in (params, means, squares))
    torch._foreach_lerp_(m, slopes, 0.1)
    torch._foreach_mul_(s, 0.99)
    torch._foreach_addcmul_(s, slopes, slopes, 0.01)
    torch._foreach_mul_(p, 0.999)
    torch._foreach_addcdiv_(p, m, torch._foreach_add(torch._foreach_sqrt(s), 1e-8), -0.01)
    return params, means, squares, steps, norm


def adamw_fused(params: Any, means: Any, squares: Any, steps: Any, x: Tensor) -> Any:
    """A step of AdamW by torch's operator for all of it."""
    slopes, norm = clipped_slopes(params, x)
    p, m, s, number_of_steps = ([*tree.values()] for tree in (params, means, squares, steps))
    betas = {"beta1": 0.9, "beta2": 0.99}
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    adamw(p, slopes, m, s, [], number_of_steps, fused=True, **betas, **options)
    return params, means, squares, steps, norm


def clipped_slopes(params: Any, x: Tensor) -> tuple[list[Tensor], Tensor]:
    def loss(p: Any) -> Tensor:
        y: Tensor = torch.func.functional_call(DEEP, p, (x,))
        return y.square().mean()

    slopes = [*torch.func.grad(loss)(params).values()]
    norm = nn.utils.get_total_norm(slopes)
    torch._foreach_mul_(slopes, (1 / norm).clamp(max=1.0))
    return slopes, norm


@pytest.mark.parametrize("step", [adamw_by_lists, adamw_fused])
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("is_small", [False, True])
def test_optimizers_of_torch(
    step: Callable[..., Any], compiler: str, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, where several groups on small tensors are one kernel.
    monkeypatch.setattr(parts, "_is_small", lambda values: is_small)
    check_training(step, compiler)


def check_training(step: Callable[..., Any], compiler: Any) -> None:
    """Check that two steps of training by a compiled graph are those of the function."""
    params = {name: p.clone() for name, p in DEEP.named_parameters()}
    moments = ({name: torch.zeros_like(p) for name, p in params.items()} for _ in range(2))
    steps = {name: torch.zeros(()) for name in params}
    state = (params, *moments, steps)
    expected = weft.clone(state)
    graph = compiled(
        step, compiler=compiler, donate_argnames=["params", "means", "squares", "steps"]
    )
    for x in (X, X + 1):
        *state, norm = graph(*state, x)
        *expected, expected_norm = step(*expected, x)
        assert_equal(LAW, (state, norm), (expected, expected_norm), exact=False)
    assert counts(graph) == (1, 2, 0)


def test_what_a_step_does_to_each_parameter_is_compiled_once() -> None:
    operators = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        operators.append(len([x for x in graph.graph.nodes if x.op == "call_function"]))
        return graph.forward

    check_training(adamw_by_lists, backend)
    # The gradients, the number of steps, and what becomes of a weight and of a bias.
    largest, *rest = sorted(operators, reverse=True)
    assert len(rest) == 3
    assert largest > 50 > 10 > max(rest)


def test_inductor_on_a_cpu() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.sin(x) * 2 + 1, x.t(), x

    g = compiled(fn, compiler="inductor")
    for x in (X, X + 1):
        assert_equal(LAW, g(x), fn(x), exact=False)
    assert counts(g) == (1, 2, 0)


def test_a_loop_reads_its_counter_in_each_step() -> None:
    def gather(x: Tensor) -> Tensor:
        def step(carry: Any) -> Any:
            total, i = carry
            return total + x[i], i + 1

        start = (torch.zeros(4), torch.zeros((), dtype=torch.int64))
        total: Tensor = weft.while_loop(lambda c: c[1] < 3, step, start)[0]
        return total

    assert_equal(LAW, compiled(gather)(X), gather(X))


def test_operators_stay_whole_between_compiled_parts() -> None:
    generator = torch.Generator()

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.randn(3, 4, generator=generator)
        y = torch.sort(x + noise).values
        z = y * 2
        rows = z[1:]
        torch.sort(rows.t().contiguous())
        rows.mul_(2)
        return y, z, rows

    g = compiled(fn, split_at="aten::sort")
    generator.manual_seed(0)
    replayed = [g(X), g(X + 1)]
    generator.manual_seed(0)
    assert_equal(LAW, replayed, [fn(X), fn(X + 1)])
    assert num_pieces(g) == (3,)


def nested(x: Tensor, y: Tensor) -> Any:
    """A loop of loops; the parts of its carry begin equal, and go different ways."""

    def inner(carry: Any) -> Any:
        z, step = carry
        return torch.sort(z * 1.1 + y.mean()).values, step + 1

    def outer(carry: Any) -> Any:
        (a, b), step = carry
        z, _ = weft.while_loop(lambda c: c[1] < 3, inner, (a, torch.zeros_like(step)))
        return (z, b + a.mean()), step + 1

    (a, b), steps = weft.while_loop(
        lambda c: (c[0][0].sum() < 200) & (c[1] < 9),
        outer,
        ((x, x), torch.zeros((), dtype=torch.int64)),
    )
    return a * 2, b, steps


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_loops_whose_length_depends_on_data(compiler: str) -> None:
    g = compiled(nested, compiler=compiler)
    for x in (X, X - 3, X * 30):
        assert_equal(LAW, g(x, Y), nested(x, Y), exact=False)
    assert counts(g) == (1, 3, 0)


@pytest.mark.slow
def test_donated_tensors_that_trade_places_by_inductor() -> None:
    def turn(state: dict[str, Tensor]) -> Any:
        return {"a": state["b"] + 1, "b": state["c"], "c": state["a"].flip(0)}, state["a"] * 2

    def new_state() -> dict[str, Tensor]:
        return {name: X[:, :3] + i for i, name in enumerate("abc")}

    g = compiled(turn, compiler="inductor", donate_argnames="state")
    state = new_state()
    expected = new_state()
    for _ in range(3):
        state, out = g(state)
        expected, expected_out = turn(expected)
        assert_equal(LAW, (state, out), (expected, expected_out))


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


def test_draws_whose_results_nothing_uses_are_made() -> None:
    def noisy(x: Tensor) -> Tensor:
        torch.rand(3)
        return x + torch.rand(4)

    g = compiled(noisy)
    state = torch.get_rng_state()
    replayed = [g(X), torch.rand(1)]
    torch.set_rng_state(state)
    assert_equal(LAW, replayed, [noisy(X), torch.rand(1)])


def test_a_map_in_inference_mode() -> None:
    g = compiled(lambda x: torch.func.vmap(lambda q: q * 2)(x))
    with torch.inference_mode():
        assert_equal(LAW, g(X), X * 2)


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


WEIGHTS = {n: float(n % 5) for n in range(64)}


def weigh(signal: Signal) -> Signal:
    """Multiplies by a number that follows no size, so that each class is compiled for itself."""
    return Signal(signal.length, signal.x * WEIGHTS[signal.length.steps])


def test_a_number_that_follows_no_size_is_compiled_for_its_class() -> None:
    g = compiled(weigh, ladder=LADDER)
    for n in (40, 24, 16):
        signal = Signal(Length(n), torch.randn(n, 4))
        assert_equal(LAW, g(signal), weigh(signal))
    assert compilations(g) == 3


def test_what_is_compiled_ahead_is_not_compiled_again() -> None:
    signal = Signal(Length(5), torch.randn(5, 4))
    g = compiled(weigh, ladder=LADDER)
    g.compile_ahead(signal)
    assert (compilations(g), counts(g)) == (len(LADDER), (0, 0, 0))
    g.capture(signal)
    assert_equal(LAW, g(signal), weigh(signal))
    assert compilations(g) == len(LADDER)


def test_an_estimate_is_of_what_is_captured() -> None:
    signal = Signal(Length(5), torch.randn(5, 4))
    g = compiled(attend, ladder=LADDER)
    estimate = g.memory_estimate(signal)
    g.capture(signal)
    measured = g.memory_analysis()
    assert estimate.total_bytes == measured.total_bytes
    # Nothing but the results and the buffers: what is computed in between is freed.
    rows = sum(length.steps for length in LADDER)
    assert (measured.graph_bytes, measured.buffer_bytes) == (rows * 16, 2 * 40 * 16)
    assert compilations(g) == 1


def test_it_says_what_is_compiled_and_with_which_classes() -> None:
    signals = [Signal(Length(n), torch.randn(n, 4)) for n in (40, 24, 1)]
    g = compiled(attend, ladder=[*LADDER, Length(1)], strict=False)
    assert "compiled" not in g.explain(signals[0]).reason
    for signal in signals:
        g(signal)
    first, second, alone = (g.explain(signal).reason for signal in signals)
    assert first.endswith("; compiled by aot_eager, with the graphs for Length(steps=24)")
    assert second.endswith("; compiled by aot_eager, with the graphs for Length(steps=40)")
    assert alone.endswith("; compiled by aot_eager")
    assert [row.compiled for row in g.graphs().graphs] == [
        "aot_eager",
        "aot_eager, with Length(steps=40)",
        "aot_eager",
    ]


@pytest.mark.parametrize("name", ["pipeline", "microbatch", "scan", "shard, all_reduce"])
def test_nests_are_compiled(name: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.tanh(x @ x.T)

    layer = LAYERS[name]
    outside = compiled(layer.apply(fn))
    inside = compiled(fn)
    # Ranks of a shard run the function itself, where a graph would hide it from them.
    is_inline = layer.kind == "shard"
    nest = layer.apply(inside)
    for x in (torch.randn(16, 16), torch.randn(16, 16)):
        expected = layer.meaning(fn)(x)
        assert_equal(LAW, outside(x), expected, exact=False)
        assert_equal(LAW, nest(x), expected, exact=False)
    assert [row.compiled for row in outside.graphs().graphs] == ["aot_eager"]
    assert [row.compiled for row in inside.graphs().graphs] == ["aot_eager"] * (not is_inline)


def test_torch_s_switches_are_those_of_the_compilation() -> None:
    switches = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        switches.append(torch.are_deterministic_algorithms_enabled())
        return graph.forward

    g = compiled(lambda x: x * 2, compiler=backend)
    g(X)
    torch.use_deterministic_algorithms(True)
    try:
        g(X)
    finally:
        torch.use_deterministic_algorithms(False)
    assert switches == [False, True]


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


def test_a_real_view_of_a_complex_constant_is_not_compiled() -> None:
    def slope(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            z = torch.fft.fft2(y)
            direction = torch.arange(12.0).to(z.dtype).reshape(3, 4)
            return torch.autograd.grad(z, y, direction)[0]

    with pytest.warns(RuntimeWarning, match="a view of another dtype of a constant"):
        assert_equal(LAW, graphify(slope, compiler="aot_eager")(X), slope(X))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_surroundings_are_those_of_the_function(dtype: torch.dtype | None) -> None:
    g = compiled(lambda x: (x @ x.T, torch.ones(3)))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        assert_equal(LAW, g(X), (X @ X.T, torch.ones(3)))


def test_a_function_that_keeps_a_tensor_is_refused() -> None:
    kept: dict[str, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        return x - kept.setdefault("first", x.detach())

    with pytest.raises(CaptureError, match="is kept and not returned"):
        compiled(fn)(X)


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


def through_sparse(x: Tensor) -> Any:
    return torch.sparse.mm(SPARSE, x)


SPARSE = torch.eye(3).to_sparse()


def test_a_module_with_gradients_is_compiled() -> None:
    module = nn.Linear(4, 2)
    module(X).sum().backward()
    gradient = module.weight.grad
    with torch.no_grad():
        assert_equal(LAW, compiled(module)(X), module(X))
    assert module.weight.grad is gradient


def test_what_cannot_be_compiled_says_so_once_and_runs() -> None:
    g = graphify(through_sparse, compiler="aot_eager")
    with pytest.warns(
        RuntimeWarning, match="through_sparse: runs without compiler='aot_eager', which failed"
    ):
        assert_equal(LAW, g(X), through_sparse(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(LAW, g(X[:, :2]), through_sparse(X[:, :2]))


def test_it_says_why_something_is_not_compiled() -> None:
    g = graphify(through_sparse, compiler="aot_eager")
    with pytest.warns(RuntimeWarning, match="runs without compiler"):
        g(X)
    [row] = g.graphs().graphs
    problem = row.compiled.removeprefix("nothing: ")
    assert problem.startswith("a tensor of class Tensor, torch.sparse")
    assert g.explain(X).reason.endswith(f"; not compiled by aot_eager: {problem}")
    text = g.lower(X).compile().as_text()
    assert text.endswith(f"\nnot compiled by aot_eager: {problem}")


@pytest.mark.parametrize(
    ("compiler", "calls"),
    [
        ("aot_eager", ["aten::mm", "aten::sin", "aten::mul"]),
        pytest.param(
            "inductor",
            ["extern_kernels.mm  of aten.mm", "cpp_fused_mul_sin_0"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_lowered_function_is_compiled(compiler: str, calls: list[str]) -> None:
    g = graphify(lambda x, w: torch.sin(x @ w) * 2)
    w = torch.randn(4, 4)
    lowered = g.lower(X, w)
    graph = lowered.compile(compiler=compiler)
    assert_equal(LAW, graph(X + 1, w), torch.sin((X + 1) @ w) * 2, exact=False)
    assert graph.as_text().splitlines() == [
        *lowered.as_text().splitlines(),
        f"compiled by {compiler}:",
        *(f"  {call}" for call in calls),
    ]
    assert graph.memory_analysis().graph_bytes == X.nbytes
    assert counts(g) == (0, 0, 0)
    with pytest.raises(CompilerError, match=r"lower\(...\).compile\(...\)\n.*'inductr'"):
        lowered.compile(compiler="inductr")


def test_a_batch_invariant_part_is_not_compiled() -> None:
    def fn(x: Tensor) -> Tensor:
        with weft.batch_invariant():
            return x.sum()

    with pytest.raises(CompilerError, match="sums in an order of its own"):
        compiled(fn)(X)


def test_strict_makes_it_an_error() -> None:
    with pytest.raises(CompilerError, match="a tensor of class Tensor, torch"):
        compiled(through_sparse)(X)
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
        graphify(nested, compiler="inductr")
    assert str(error.value) == (
        "graphify(nested, ...)\n  saw: compiler='inductr', which is no compiler of torch\n"
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
