"""torch's tests of captures as CUDA graphs, as scenarios of `graphify`, on tapes too.

A docstring names the test. After it stands `refused` or `differs`, with the reason, where weft does
not do the same.
"""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from graphified import captures
from torch import Tensor

from weft.errors import CaptureError
from weft.transforms.graphs.graphify import graphify


def is_capturing() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a torch without CUDA
        return False


def ten_times(x: Tensor) -> Tensor:
    for _ in range(10):
        x = x + 1
    return x


def mixed(x: Tensor, by: float) -> Tensor:
    """A function with temporaries."""
    return (x.clone() + by) + (x.clone() + by)


# Capture and replay
# ---------------------------------------------------------------------------------------------------


def test_a_capture_is_visible_from_inside(device: str) -> None:
    """torch: TestCuda.test_graph_is_current_stream_capturing"""
    was_capturing: list[bool] = []
    g = graphify(lambda x: (was_capturing.append(is_capturing()), x + 1)[1])
    g(torch.ones(2, device=device))
    assert was_capturing[-1]
    assert not is_capturing()


def test_a_chain_of_additions(device: str) -> None:
    """torch: TestCuda.test_graph_capture_simple, test_accelerator_graph_simple"""
    g = graphify(ten_times)
    for value in (1.0, 5.0):
        assert g(torch.full((1000,), value, device=device)).sum().item() == 1000 * (value + 10)
    assert captures(g) == 1


def test_a_cleared_function_captures_again(device: str) -> None:
    """torch: TestCuda.test_graph_capture_reset_recapture,
    test_cuda_graph_raw_graph_reset_and_recapture"""
    g = graphify(ten_times)
    x = torch.full((1000,), 1.0, device=device)
    first = g(x)
    g.cache_clear()
    assert g(x * 2).sum().item() == 12000
    assert first.sum().item() == 11000


def test_a_function_is_captured_from_the_default_stream(device: str) -> None:
    """torch: TestCuda.test_graph_error; differs: weft captures on a stream of its own"""
    assert graphify(ten_times)(torch.zeros(2, device=device)).tolist() == [10, 10]


def test_a_function_without_operators(device: str) -> None:
    """torch: TestCuda.test_graph_warn_if_has_zero_nodes; differs: an empty graph is no warning"""
    g = graphify(lambda x: {"x": x, "n": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert g(torch.ones(2, device=device))["x"].tolist() == [1, 1]


def test_the_graph_as_dot(device: str) -> None:
    """torch: TestCuda.test_graph_debugdump"""
    text = graphify(lambda x, y: (x + y) + y).lower(
        torch.ones(2, device=device), torch.zeros(2, device=device)
    )
    assert text.as_text("dot").count("aten::add") == 2


def test_full_memory_in_a_capture_is_an_error_of_torch(device: str) -> None:
    """torch: TestCuda.test_graph_capture_oom"""
    g = graphify(lambda x: x + torch.zeros(2**45, device=x.device))
    with warnings.catch_warnings():
        # It says that nothing is captured from now on
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(RuntimeError, match="memory"):
            g(torch.ones((), device=device))
    assert graphify(ten_times)(torch.zeros(2, device=device)).tolist() == [10, 10]


def test_a_tensor_as_an_index_is_gathered(device: str) -> None:
    """torch: TestCuda.test_cuda_graph_tensor_item_not_allowed"""
    a, b = torch.ones(4, device=device), torch.arange(4.0, device=device)
    product = graphify(lambda a, b, order: a[0] * b[order[0]])
    for first in range(3):
        assert product(a, b, torch.arange(first, 4, device=device)[:1]).item() == first
    assert product.cache_info().captures == 1


# Several graphs
# -------------------------------------------------------------------------------------------------------


def test_two_graphs_one_after_the_other_with_eager_operators_between(device: str) -> None:
    """torch: TestCuda.test_graph_two_successive"""

    def five_times(x: Tensor) -> Tensor:
        for _ in range(5):
            x = mixed(x, 1)
        return x

    first = graphify(five_times)
    second = graphify(five_times)
    ones = torch.ones(1000, device=device)
    for _ in range(2):
        b = first(ones)
        c = mixed(mixed(ones, 3), 3)
        c = mixed(mixed(c, 3), 3)
        b = second(b)
        assert b.sum().item() == 1000 * 3070
        assert mixed(mixed(c, 3), 3).sum().item() == 1000 * 442


def test_graphs_that_replay_in_another_order_than_captured(device: str) -> None:
    """torch: TestCuda.test_graph_three_successive; differs: graphs share a pool and are still safe
    in any order"""
    g = graphify(lambda x, n: (x.clone() + n, x.clone() + n + 1), static_argnames="n")
    x = torch.ones(1000, device=device)
    for n in (0, 3, 4):
        g(x, n)
    results = {n: g(x, n) for n in (4, 0, 3)}
    for n, (low, high) in results.items():
        assert (low.sum().item(), high.sum().item()) == (1000 * (n + 1), 1000 * (n + 2))


def test_replays_of_two_threads_at_once(device: str) -> None:
    """torch: TestCuda.test_graph_concurrent_replay"""
    first = graphify(lambda x: mixed(mixed(x, 1), 1))
    second = graphify(lambda x: mixed(mixed(x, 2), 2))
    x = torch.ones(100_000, device=device)

    def run(g: Callable[[Tensor], Tensor]) -> list[float]:
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            return [g(x).sum().item() for _ in range(10)]

    for pair in ((first, second), (first, first)):
        with ThreadPoolExecutor(2) as threads:
            expected = [
                [mixed(mixed(x, 1), 1).sum().item()] * 10,
                [mixed(mixed(x, 2), 2).sum().item()] * 10,
            ]
            assert list(threads.map(run, pair)) == [expected[0 if g is first else 1] for g in pair]


@pytest.mark.parametrize("numel", [128, 262_144, 262_272, 2_621_568])
def test_results_outlive_their_graph(numel: int, device: str) -> None:
    """torch: TestCuda.test_graph_memory_stats_and_use_result_after_destroy_graph"""
    g = graphify(ten_times)
    x = torch.ones(numel, device=device)
    kept = [g(x) for _ in range(2)]
    ref = weakref.ref(g)
    del g
    gc.collect()
    assert ref() is None
    torch.full((numel,), 9.0, device=device)
    assert [t.sum().item() for t in kept] == [11 * numel] * 2


def test_a_thread_that_works_during_a_capture_is_not_recorded(device: str) -> None:
    """torch: TestCuda.test_cuda_graph_error_options"""
    tensors: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        y = x + x
        thread = threading.Thread(target=lambda: tensors.append(torch.zeros(2000) + 1))
        thread.start()
        thread.join()
        return y + x

    g = graphify(f)
    for _ in range(3):
        assert g(torch.ones(4, device=device)).tolist() == [3] * 4
    assert all(t.eq(1).all() for t in tensors)


# CUDA alone
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_number_for_one_element_is_refused() -> None:
    """torch: TestCuda.test_cuda_graph_tensor_item_not_allowed (a write); refused: torch copies the
    number from the CPU, as no graph may"""

    def fill(x: Tensor) -> Tensor:
        x[0] = 7
        return x

    with pytest.raises(CaptureError, match="a copy from cpu to cuda inside the function"):
        graphify(fill, donate_argnames="x")(torch.zeros(2, device="cuda"))


@pytest.mark.gpu
def test_side_streams_inside_a_capture() -> None:
    """torch: TestCuda.test_graph_record_stream, test_cuda_graph_allocator_propagates_stream"""

    def fork(x: Tensor) -> Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y + x

    g = graphify(fork)
    for value in (1.0, 2.0):
        assert g(torch.full((4,), value, device="cuda")).tolist() == [3 * value] * 4


@pytest.mark.gpu
def test_many_captures_keep_few_workspaces() -> None:
    """torch: TestCuda.test_repeat_graph_capture_cublas_workspace_memory; differs: each function
    captures on a stream of its own, and torch keeps one workspace of cuBLAS for each of its 32
    streams"""
    a, b = torch.rand(1024, 512, device="cuda"), torch.rand(512, 64, device="cuda")

    def capture(times: int) -> int:
        for _ in range(times):
            torch.testing.assert_close(graphify(lambda a, b: a @ b)(a, b), a @ b)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    capture(70)
    assert capture(50) == capture(50)


@pytest.mark.gpu
def test_memory_comes_back_when_a_function_is_dropped() -> None:
    """torch: TestCuda.test_memory_stats_of_multiple_generators_and_graphs"""

    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def run(graphs: int) -> None:
        functions = [graphify(lambda x: x + torch.rand(1, device="cuda")) for _ in range(graphs)]
        for g in functions:
            g(torch.ones(1000, device="cuda"))

    run(1)
    before = allocated()
    for graphs in (1, 3, 10):
        run(graphs)
        assert allocated() == before
