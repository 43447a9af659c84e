"""Functions that `torch.compile` has compiled, in a capture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import CaptureError
from weft.proofs import assert_equal
from weft.torchapi.private import function_modes, in_plain_surroundings
from weft.transforms.graphs.graphify import graphify
from weft.values.trees import tree_leaves

LAW = "graphify of a compiled function changes nothing"
X = torch.rand(3, 4)
Example = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


@pytest.fixture(autouse=True)
def without_compilations() -> None:
    torch.compiler.reset()


def scaled(x: Tensor) -> Tensor:
    return torch.relu(x * 2 - 1)


def itself(backend: str) -> Callable[[Tensor], Tensor]:
    return torch.compile(scaled, backend=backend)


def inside(backend: str) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(scaled, backend=backend)
    return lambda x: compiled(x.sin()) + 1


def module(backend: str) -> Callable[[Tensor], Tensor]:
    compiled: Callable[[Tensor], Tensor] = torch.compile(nn.Linear(4, 2), backend=backend)
    return compiled


def compiled_in_place(backend: str) -> Callable[[Tensor], Tensor]:
    linear = nn.Linear(4, 2)
    linear.compile(backend=backend)
    return nn.Sequential(linear, nn.ReLU())


# torch.compile imports its compiler, which takes seconds: it is called in the tests only.
WAYS: dict[str, tuple[Callable[[str], Callable[[Tensor], Tensor]], str]] = {
    "itself, eager": (itself, "eager"),
    "inside, aot_eager": (inside, "aot_eager"),
    "a module, eager": (module, "eager"),
    "a module compiled in place, aot_eager": (compiled_in_place, "aot_eager"),
}


def assert_replays(fn: Callable[[Tensor], Tensor], device: str = "cpu") -> None:
    """Assert that a graph of `fn` has its bits, for several sizes, of which the second one and
    those after it are compiled for any size."""
    with torch.no_grad():
        g = graphify(fn)
        for rows in (3, 5, 7):
            for x in torch.rand(3, rows, 4, device=device):
                assert_equal(LAW, g(x), fn(x))
        assert g.cache_info().captures == 3
        assert g.cache_info().replays == 9


@pytest.mark.parametrize(("way", "backend"), WAYS.values(), ids=WAYS)
def test_it_replays(way: Callable[[str], Callable[[Tensor], Tensor]], backend: str) -> None:
    assert_replays(way(backend))


@pytest.mark.slow
@pytest.mark.parametrize("way", [itself, inside, module, compiled_in_place])
def test_inductor_s_code_replays_too(way: Callable[[str], Callable[[Tensor], Tensor]]) -> None:
    assert_replays(way("inductor"))


def test_a_replay_runs_the_code_that_inductor_made() -> None:
    g = graphify(inside("inductor"))
    assert str(g.lower(X)).splitlines()[2:4] == [
        "  %1 = aten::sin(%0)  : float32[3, 4]",
        "  %2 = inductor::graph(compiled, [], [%1])  : float32[3, 4]",
    ]


def test_what_it_reads_from_outside_is_read_again() -> None:
    linear = nn.Linear(4, 2)
    compiled = torch.compile(linear, backend="inductor")
    with torch.no_grad():
        g = graphify(lambda x: compiled(x) * 2)
        for captures in (1, 1, 2):
            assert_equal(LAW, g(X), linear(X) * 2)
            assert g.cache_info().captures == captures
            if captures == 1:
                linear.weight.mul_(2)  # the same memory
            if g.cache_info().replays == 2:
                linear.weight = nn.Parameter(torch.rand(2, 4))


FACTOR = 2.0


def by_a_global(x: Tensor) -> Tensor:
    return x * FACTOR


def test_a_number_that_dynamo_passes_as_a_tensor_is_a_constant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does once the number has changed. The graph holds it, and a change is seen."""
    g = graphify(torch.compile(by_a_global, backend="eager"))
    for factor in (2.0, 3.0, 4.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        for _ in range(2):
            assert_equal(LAW, g(X), X * factor)


def added(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    state.add_(x)
    return state, state * 2


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_writes_what_is_donated_and_nothing_else(backend: str) -> None:
    compiled = torch.compile(added, backend=backend)
    g = graphify(compiled, donate_argnames="state")
    state = torch.zeros(3, 4)
    for number in (1, 2):
        state, result = g(state, X)
        assert_equal(LAW, (state, result), (X * number, X * number * 2))
    with pytest.raises(CaptureError, match="writes to state of shape"):
        graphify(compiled)(torch.zeros(3, 4), X)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_draws_the_same_numbers(backend: str) -> None:
    compiled = torch.compile(
        lambda x: nn.functional.dropout(x) + torch.rand_like(x), backend=backend
    )
    g = graphify(compiled)
    g(X)
    drawn = []
    for fn in (compiled, g):
        torch.manual_seed(0)
        drawn.append(torch.stack([fn(X), fn(X)]))
    assert_equal(LAW, *drawn)


def training_step(backend: str) -> Callable[..., Any]:
    loss_of = torch.compile(lambda w, x: ((x @ w) ** 2).mean(), backend=backend)

    def step(weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = weight.detach().requires_grad_()
        with torch.enable_grad():
            loss = loss_of(leaf, x)
        (gradient,) = torch.autograd.grad(loss, leaf)
        return weight.sub_(0.1 * gradient), loss.detach()

    return step


def assert_trains(step: Callable[..., Any], device: str) -> None:
    g = graphify(step, donate_argnames="weight")
    weights = [torch.ones(4, 2, device=device) for _ in range(2)]
    for x in torch.rand(3, 3, 4, device=device):
        results = [fn(weight, x) for fn, weight in zip((g, step), weights, strict=True)]
        assert_equal(LAW, *results)
        weights = [weight for weight, _ in results]
    assert g.cache_info().captures == 1


def test_a_gradient_of_it_is_compiled_too() -> None:
    assert_trains(training_step("inductor"), "cpu")


def broken(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x * 2


def branching(x: Tensor) -> Tensor:
    y = x * 2
    return y + 1 if y.sum() > 0 else y


def sized_by_data(x: Tensor) -> Tensor:
    return torch.ones(int(x.sum().item())).sum() + x


doubled = graphify(lambda x: x * 2)
BREAKS = "a result of torch.compile that has graph breaks"
ITS_OWN = "a result of torch.compile with CUDA graphs of its own"
SWITCH = {"triton.cudagraphs": True}
# What returns the function, and the reason.
REFUSED: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], str]] = {
    "a break at the start": (lambda: torch.compile(broken, backend="eager"), BREAKS),
    "a branch": (lambda: torch.compile(lambda x: branching(x), backend="eager"), BREAKS),
    "a graphified function inside": (
        lambda: torch.compile(lambda x: doubled(x + 1) * 3, backend="eager"),
        BREAKS,
    ),
    "a transform around it": (
        lambda: lambda x: torch.func.vmap(torch.compile(scaled, backend="aot_eager"))(x),
        "nothing is compiled: a transform of torch.func",
    ),
    "reduce-overhead": (lambda: torch.compile(scaled, mode="reduce-overhead"), ITS_OWN),
    "max-autotune": (lambda: lambda x: torch.compile(scaled, mode="max-autotune")(x) + 1, ITS_OWN),
    "an option": (lambda: torch.compile(scaled, options=SWITCH), ITS_OWN),
    "a back end": (
        lambda: torch.compile(scaled, backend="cudagraphs"),
        r"\(backend='cudagraphs'\)",
    ),
}


@pytest.mark.parametrize(("compiled", "why"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_by_name(
    compiled: Callable[[], Callable[[Tensor], Tensor]], why: str
) -> None:
    fn = compiled()
    for _ in range(2):
        with pytest.raises(CaptureError, match=f"saw: it calls .*{why}"):
            graphify(fn)(X)
        assert in_plain_surroundings()
        assert function_modes() == ()
        assert torch.is_autocast_cache_enabled()


def test_the_refusal_names_the_mode_to_use() -> None:
    with pytest.raises(CaptureError) as caught:
        graphify(REFUSED["reduce-overhead"][0]())(X)
    instead = "torch.compile(..., mode='default') or mode='max-autotune-no-cudagraphs'"
    assert caught.value.instead == instead


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_host_read_in_its_code_is_refused(backend: str) -> None:
    compiled = torch.compile(sized_by_data, backend=backend, fullgraph=True)
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(CaptureError, match="a tensor's value is read on the host") as caught,
    ):
        graphify(compiled)(X)
    assert "def sized_by_data" in str(caught.value)  # the user's code, and not the generated one


def test_a_function_that_always_compiles_is_refused() -> None:
    calls: list[str] = []
    compiled = torch.compile(lambda x, name: x + len(name), backend="eager", dynamic=False)

    def different(x: Tensor) -> Tensor:
        calls.append("x")
        return compiled(x, "".join(calls))

    with pytest.raises(CaptureError, match=r"still compiles in call 8 .* since .*== 'x{7}'"):
        graphify(different)(X)
    assert len(calls) == 8


def test_a_recorded_run_does_not_compile() -> None:
    """A function that takes another path in each recording. Before one, a run compiles, and another
    one shows that nothing else does."""
    calls: list[int] = []
    factors = [2, 2, 3, 3, 3, 4]  # two runs, a recording, and the same again
    compiled = torch.compile(lambda x, by: x * by, backend="eager", dynamic=False)

    def different(x: Tensor) -> Tensor:
        calls.append(factors[len(calls)])
        return compiled(x, calls[-1])

    with pytest.raises(CaptureError, match=r"compiles once more while it is captured, since .*by"):
        graphify(different)(X)
    assert calls == factors


def test_another_thread_may_compile_meanwhile() -> None:
    import threading

    results: list[Tensor] = []
    other = torch.compile(lambda x: x - 1, backend="eager")

    def starting(x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: results.append(other(X)))
        thread.start()
        thread.join()
        return x * 2

    assert_equal(LAW, graphify(starting)(X), X * 2)
    assert all(torch.equal(x, X - 1) for x in results)
    assert len(results) == 2


def test_a_compiler_of_the_graph_compiles_it_in_one() -> None:
    """The function itself runs in its trace, and not what torch.compile makes of it."""
    compiled_by_backend = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_by_backend.append(graph)
        return graph.forward

    for fullgraph in (False, True):
        compiled = torch.compile(scaled, backend=backend, fullgraph=fullgraph)
        g = graphify(lambda x, compiled=compiled: compiled(x) + 1, compiler="inductor")
        torch.testing.assert_close(g(X), scaled(X) + 1)
    assert compiled_by_backend == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_kernels_on_a_gpu_are_captured(mode: str) -> None:
    linear = nn.Linear(4, 4).cuda()
    compiled = torch.compile(linear, mode=mode)
    assert_replays(compiled, "cuda")
    assert_replays(lambda x: torch.relu(compiled(x.sin())).sum(0) * 2, "cuda")
    with torch.no_grad():
        g = graphify(compiled)
        for _ in range(2):
            x = torch.rand(3, 4, device="cuda")
            assert_equal(LAW, g(x), compiled(x))
            linear.weight.mul_(2)


@pytest.mark.gpu
def test_a_training_step_on_a_gpu_is_one_graph() -> None:
    assert_trains(training_step("inductor"), "cuda")


@pytest.mark.gpu
def test_states_and_draws_on_a_gpu() -> None:
    g = graphify(torch.compile(added), donate_argnames="state")
    x = torch.rand(3, 4, device="cuda")
    state = torch.zeros(3, 4, device="cuda")
    for number in (1, 2):
        state, result = g(state, x)
        assert_equal(LAW, (state, result), (x * number, x * number * 2))
    compiled = torch.compile(lambda x: nn.functional.dropout(x) + torch.rand_like(x))
    noisy = graphify(compiled)
    noisy(x)
    results = []
    for fn in (compiled, noisy):
        torch.cuda.manual_seed(0)
        results.append(torch.stack([fn(x), fn(x)]))
    assert_equal(LAW, *results)


@pytest.mark.gpu
def test_graphs_outlive_their_compilations() -> None:
    x = torch.rand(3, 4, device="cuda")
    table = torch.arange(4.0, device="cuda")
    compiled = torch.compile(lambda x: x @ torch.arange(16.0, device=x.device).view(4, 4) + table)
    g = graphify(lambda x: compiled(x) * 2)
    expected = g(x)
    torch.compiler.reset()
    blocks = [torch.full((64,), float("nan"), device="cuda") for _ in range(64)]
    assert_equal(LAW, g(x), expected)
    assert len(tree_leaves(blocks)) == 64


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["reduce-overhead", "max-autotune", "an option"])
def test_cuda_graphs_inside_are_refused_on_a_gpu(name: str) -> None:
    with pytest.raises(CaptureError, match=ITS_OWN):
        graphify(REFUSED[name][0])(X.cuda())
