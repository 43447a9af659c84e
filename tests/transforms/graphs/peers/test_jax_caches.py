"""JAX's tests of the caches of `jit`, as scenarios of `graphify`: hits, closures, nesting, leaks.

A docstring names the test. After it stands `refused` or `differs`, with the reason, where weft does
not do the same.
"""

import gc
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from graphified import X, captures
from torch import Tensor

import weft
from weft.errors import CacheMissError, CaptureError
from weft.transforms.graphs.graphify import graphify

# Hits
# -----------------------------------------------------------------------------------------------------------------


def test_three_calls_of_one_signature_hold_one_graph() -> None:
    """jax: JitTest.test_cache_key_defaults"""
    g = graphify(lambda x: (x**2).sum())
    assert g.cache_info().currsize == 0
    for _ in range(3):
        g(X)
    assert (g.cache_info().currsize, g.cache_info().replays) == (1, 3)


def test_each_graphify_of_a_function_has_its_own_graphs() -> None:
    """jax: JitTest.test_jit_global_cache, ArrayPjitTest.test_pjit_function_cache_cpp; differs:
    JAX's cache is global, while a graph belongs to the graphified function, with its pool of memory
    """

    def double(x: Tensor) -> Tensor:
        return x * 2

    first = graphify(double)
    second = graphify(double)
    assert torch.equal(first(X), second(X))
    assert (captures(first), captures(second)) == (1, 1)


def test_clearing_one_cache_captures_again() -> None:
    """jax: JitTest.test_jit_cache_clear"""
    g = graphify(lambda x, y: x + y)
    g(X, X)
    assert (len(g.captured()), g.memory_analysis().num_graphs) == (1, 1)
    g.cache_clear()
    assert (len(g.captured()), g.memory_analysis().num_graphs) == (0, 0)
    assert torch.equal(g(X, X), X + X)


def test_clearing_every_cache_captures_again() -> None:
    """jax: APITest.test_clear_cache"""
    runs = []

    @graphify
    def double(x: Tensor) -> Tensor:
        runs.append(1)
        return x * 2

    double(X)
    before = len(runs)
    weft.clear_caches()
    double(X)
    assert len(runs) == 2 * before


def test_python_runs_while_graphs_are_off() -> None:
    """jax: JitTest.test_disable_jit, ArrayPjitTest.test_pjit_disable_jit"""
    runs = []
    g = graphify(lambda x: (runs.append(1), x + 1)[1])
    for _ in range(2):
        g(X)
    before = len(runs)
    with weft.no_capture(replay=False):
        g(X)
        g(X)
    assert len(runs) == before + 2
    g(X)
    assert len(runs) == before + 2


def test_a_frozen_function_captures_nothing() -> None:
    """jax: JitTest.test_no_tracing"""
    g = graphify(lambda x: x * 1)
    g(torch.arange(3.0))
    g.freeze()
    with pytest.raises(
        CacheMissError, match=r"a miss after freeze\(\): x: shape \(4,\), captured \(3,\)"
    ):
        g(torch.arange(4.0))
    assert torch.equal(g(torch.arange(3.0)), torch.arange(3.0))


def test_no_capture_runs_a_function_without_arguments() -> None:
    """jax: JitTest.test_no_execution; differs: `no_capture` runs the function itself instead of
    raising"""
    g = graphify(lambda: torch.ones(3))
    with weft.no_capture():
        assert g().tolist() == [1, 1, 1]
    assert g.cache_info().eager == 1
    assert g().tolist() == [1, 1, 1]


@pytest.mark.parametrize("same", [True, False])
def test_threads_share_a_function(same: bool) -> None:
    """jax: JitTest.test_concurrent_jit, PJitTest.test_concurrent_pjit"""
    functions = (
        [graphify(lambda x: x + x - 3)] * 10
        if same
        else [graphify(lambda x: x + x - 3) for _ in range(10)]
    )
    inputs = [torch.randn(i) for i in range(10)]
    with ThreadPoolExecutor() as threads:
        results = list(threads.map(lambda g, x: [g(x), g(x)], functions, inputs))
    for x, pair in zip(inputs, results, strict=True):
        for y in pair:
            assert torch.equal(y, x + x - 3)


def test_an_identity_returns_a_copy() -> None:
    """jax: JitTest.test_trivial_computations"""
    y = graphify(lambda x: x)(X)
    assert torch.equal(y, X)
    assert y.data_ptr() != X.data_ptr()
    twice = graphify(lambda x: (x, x))(X)
    assert len({X.data_ptr(), *(t.data_ptr() for t in twice)}) == 3
    first, second, third = graphify(lambda x, y: (y, 1, x))(X, X + 1)
    assert (first.tolist(), second, third.tolist()) == ((X + 1).tolist(), 1, X.tolist())
    assert third.data_ptr() != X.data_ptr()


# Closures
# -------------------------------------------------------------------------------------------------------------


def test_dropping_the_function_drops_what_it_closes_over() -> None:
    """jax: JitTest.test_jit_reference_dropping"""

    class Held:
        value = torch.ones(3)

    holder = Held()
    g = (lambda holder: graphify(lambda: holder.value + 1))(holder)
    ref = weakref.ref(holder)
    del holder
    g()
    assert g().tolist() == [2, 2, 2]
    assert ref() is not None
    del g
    gc.collect()
    assert ref() is None


def test_a_graphified_bound_method_is_collected() -> None:
    """jax: APITest.test_jit_boundmethod_reference_cycle"""

    class A:
        def __init__(self) -> None:
            self.graphed = graphify(self.add)

        def add(self, x: Tensor) -> Tensor:
            return x + 1

    a = A()
    a.graphed(X)
    ref = weakref.ref(a)
    del a
    gc.collect()
    assert ref() is None


def test_results_and_arguments_are_freed_at_once() -> None:
    """jax: JitTest.testBuffersAreFreedPromptly, GarbageCollectionTest.test_xla_gc_callback"""
    g = graphify(lambda x: x + 1)
    x = torch.ones(1000)
    refs = []
    for _ in range(50):
        x = g(x)
        refs.append(weakref.ref(x))
    assert sum(ref() is not None for ref in refs) == 1


def test_a_closed_over_mask_of_bools() -> None:
    """jax: JitTest.test_sum_of_closed_over_bools"""
    mask = torch.ones(32, dtype=torch.bool)
    assert graphify(lambda m: m.sum())(mask) == 32
    g = graphify(lambda: mask.sum())
    assert [g().item(), g().item()] == [32, 32]


def test_a_large_closed_over_constant() -> None:
    """jax: APITest.test_large_device_constant,
    JaxJitTest.test_check_for_large_number_of_constants_new"""
    constant = torch.ones(2_000_000)
    g = graphify(lambda x: 2 * x + constant)
    assert g(constant).eq(3).all()
    assert g.memory_analysis().num_graphs == 1


def test_nested_functions_close_over_tensors_of_every_level() -> None:
    """jax: ArrayPjitTest.test_nested_pjit_closing_over_const_top_level_and_tracer,
    test_nested_pjit_closing_over_tracer, test_nested_pjit_closing_over_top_level_const,
    test_closed_constants_at_top_level, PJitTest.testNested"""
    constant = torch.arange(4.0)

    def plain(x: Tensor, wrap: Callable[..., Any]) -> Any:
        y = x * 3 + constant
        return wrap(lambda z: z + y * 2 + constant)(x)

    g = graphify(lambda x: plain(x, graphify))
    for x in (X, X + 7):
        assert torch.equal(g(x), plain(x, lambda f: f))
    assert captures(g) == 1


def test_a_closed_over_constant_is_one_graph_for_every_call() -> None:
    """jax: ArrayPjitTest.test_lowering_cache_hit_with_closed_over_constants_jit"""
    constant = torch.arange(10.0)
    g = graphify(lambda x: x + constant[:4])
    for x in (X, X.clone(), X + 1):
        assert torch.equal(g(x), x + constant[:4])
    assert captures(g) == 1


# Nesting
# --------------------------------------------------------------------------------------------------------------


def test_an_inner_function_is_inlined() -> None:
    """jax: APITest.test_inner_jit_function_retracing; differs: the inner function is recorded into
    the outer graph and keeps none of its own"""
    inner = graphify(lambda s: 2 * s)

    def outer(x: Tensor) -> Tensor:
        y = x
        for _ in range(10):
            y = inner(y)
        return y + x

    g = graphify(outer)
    assert torch.equal(g(X), X * 1025)
    assert torch.equal(g(X + 1), (X + 1) * 1025)
    assert (captures(inner), captures(g)) == (0, 1)
    inner(X)
    assert captures(inner) == 1


def test_nested_functions_with_constant_arguments_and_results() -> None:
    """jax: APITest.test_nested_jit_hoisting, test_fastpath_cache_confusion,
    test_fastpath_cache_confusion2, test_inner_jit_forwarded_consts_stay_const"""
    f = graphify(lambda x, y: (y + 2 * x, 3))
    g = graphify(lambda x: f(2, x))
    none = graphify(lambda: ())
    twice = graphify(lambda x: (x, x))
    h = graphify(lambda x: (none(), twice(x)))
    for x in (X, X + 1):
        result, three = g(x)
        assert (result.tolist(), three) == ((x + 4).tolist(), 3)
        empty, pair = h(x)
        assert empty == ()
        assert [t.tolist() for t in pair] == [x.tolist()] * 2


def test_grad_of_a_graphified_function_and_the_reverse() -> None:
    """jax: APITest.test_grad_of_jit, APITest.test_jit_of_grad,
    test_grad_of_jit_compilation_caching2"""
    square = graphify(lambda x: x * x)
    gradient = torch.func.grad(square)
    assert [gradient(torch.tensor(v)).item() for v in (1.0, 2.0)] == [2, 4]
    g = graphify(gradient)
    assert [g(torch.tensor(v)).item() for v in (1.0, 2.0)] == [2, 4]
    assert captures(g) == 1


def test_a_hessian_captures_once() -> None:
    """jax: APITest.test_vmap_caching"""
    f = graphify(lambda x: x.square().mean())
    g = graphify(torch.func.hessian(f))
    x = torch.rand(2, 3)
    for _ in range(3):
        torch.testing.assert_close(g(x), torch.func.hessian(lambda x: x.square().mean())(x))
    assert captures(g) == 1


@pytest.mark.parametrize("seed", range(6))
def test_inputs_forwarded_to_outputs_in_any_order(seed: int) -> None:
    """jax: APITest.test_jit_forwarding_correctness, APITest.test_forwarding_bug"""
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed)).tolist()

    def f(inputs: list[Tensor]) -> list[Tensor]:
        mixed = [inputs[i] for i in order]
        results = [*mixed[: seed % 3], *(x.exp() for x in mixed[seed % 3 :])]
        return [results[i] for i in reversed(order)]

    g = graphify(f)
    for shift in (0.0, 1.0):
        inputs = [torch.full((2,), i + shift) for i in range(3)]
        assert [t.tolist() for t in g(inputs)] == [t.tolist() for t in f(inputs)]


# Leaks and errors
# -----------------------------------------------------------------------------------------------------


def test_a_tensor_that_is_kept_is_refused() -> None:
    """jax: APITest.test_leak_checker_catches_a_jit_leak"""
    kept: list[Tensor] = []
    with pytest.raises(
        CaptureError, match="an argument, or a view of one, is kept and not returned"
    ):
        graphify(lambda x: (kept.append(x), x + 1)[1])(X)


def test_a_tensor_that_a_kept_closure_holds_is_refused() -> None:
    """jax: APITest.test_leak_checker_reference_chain"""

    class A:
        leaked: Any = None

    def keeps(x: Tensor) -> Tensor:
        y = x * 2
        A.leaked = {"hi": [lambda: y]}
        return x + 1

    with pytest.raises(CaptureError, match="a tensor that it made is kept and not returned"):
        graphify(keeps)(X)


def test_a_state_that_is_rebound_outside_is_refused() -> None:
    """jax: JitTest.test_omnistaging; refused: JAX leaves a tracer in the list, weft says so"""
    keys = [torch.rand(2)]

    def draw() -> Tensor:
        keys[0] = keys[0] * 2
        return keys[0] + 1

    with pytest.raises(CaptureError, match="is kept and not returned"):
        graphify(draw)()


def test_what_an_outer_function_drops_again_is_not_a_leak() -> None:
    """jax: APITest.test_leak_checker_catches_a_sublevel_leak; differs: a tensor that dies with the
    call is no leak"""

    def outer(x: Tensor) -> Any:
        inputs: list[Tensor] = []
        return graphify(lambda x: (inputs.append(x), x * 2)[1])(x)

    assert torch.equal(graphify(outer)(X), X * 2)


def test_no_false_leaks() -> None:
    """jax: APITest.test_leak_checker_avoids_false_positives, APITest.test_leaked_tracer_issue_7613"""
    g = graphify(lambda x: x * 1)
    assert torch.equal(g(X), X)
    assert torch.equal(torch.vmap(g)(X), X)
    a = torch.randn(5, 5)
    loss = graphify(lambda a, x: ((torch.sigmoid(a * x) - x) ** 2).sum())
    step = graphify(torch.func.grad(loss))
    torch.testing.assert_close(
        step(a, torch.ones(5)), torch.func.grad(loss.__wrapped__)(a, torch.ones(5))
    )


def test_the_users_frame_is_the_last_of_an_error() -> None:
    """jax: TracebackTest.test_jit_traceback"""

    def broken(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        graphify(broken)(X)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "broken"
    assert len(frames) < 20
