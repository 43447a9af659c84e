"""torch's tests of what CUDA graph trees return, as scenarios of `graphify`, on tapes too: copies,
gradients.

A docstring names the test. After it stands `refused` or `differs`, with the reason, where weft does
not do the same.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from graphified import captures
from torch import Tensor, nn

import weft
from weft.errors import CaptureError, StaleResultError
from weft.transforms.graphs.graphify import graphify


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def x(device: str) -> Tensor:
    return torch.rand(4, 4, device=device)


# Results and what they share
# ------------------------------------------------------------------------------------------


def test_results_do_not_share_storage(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_aliased_storage_single_weakref, test_output_alias,
    test_checkpoint_shared_output_storage_deallocation; differs: each result is a copy, so a write
    reaches one of them"""

    def f(x: Tensor) -> Any:
        y = x * 20
        return y, y[0], y[1:], x, x[0]

    g = graphify(f)
    for value in (x, x + 1):
        results = g(value)
        expected = f(value)
        assert [torch.equal(a, b) for a, b in zip(results, expected, strict=True)] == [True] * 5
        assert len({storage(t) for t in (*results, value)}) == 6
        results[1].zero_()
        assert torch.equal(results[0], expected[0])


def test_params_come_back_as_themselves_and_their_views_as_copies(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_alias_of_parameter, test_aliased_static_parameter,
    test_aliasing_static_ref, test_constant_output; differs: a view of a parameter is a copy"""
    params = torch.rand(4, 4, device=x.device)
    g = graphify(lambda params, x: (params[0], params, params.T, params + x))
    for value in (x, x + 1):
        row, same, transposed, total = g(params, value)
        assert same is params
        assert storage(row) != storage(params) != storage(transposed)
        assert torch.equal(row, params[0])
        assert torch.equal(transposed, params.T)
        assert torch.equal(total, params + value)


def test_a_module_that_returns_its_parameters(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_constant_output, test_aliasing_static_ref"""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.param = nn.Parameter(torch.arange(10.0, device=x.device), requires_grad=False)

        def forward(self, x: Tensor) -> Any:
            return self.param, self.param[:2], x + 2

    module = Constant()
    g = graphify(module)
    for value in (x, x + 1):
        assert [t.tolist() for t in g(value)] == [t.tolist() for t in module(value)]


def test_results_die_with_their_last_reference(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_peristed_output_livenes, test_aliased_output_checkpoint,
    test_tensor_dies_between_checkpoint"""
    g = graphify(lambda x: (x + 1, x + 2))
    for _ in range(3):
        first, second = g(x)
        refs = weakref.ref(first), weakref.ref(second)
        view = first[0:]
        del first, second
        assert refs[1]() is None
        assert torch.equal(view, x + 1)
        del view
        assert refs[0]() is None


def test_a_result_as_the_input_of_another_graph(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_tensor_no_longer_in_pool, test_forward_generation,
    test_checkpointing_resets_persistent_refs"""
    first = graphify(lambda x: (x + 1, x + 2))
    second = graphify(lambda x: x * x * x)
    for _ in range(3):
        a, b = first(x)
        assert torch.equal(second(a), (x + 1) ** 3) or torch.allclose(second(a), (x + 1) ** 3)
        assert torch.equal(second(b * 0), b * 0)
    assert (captures(first), captures(second)) == (1, 1)


def test_a_borrowed_result_that_was_overwritten_is_refused(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_error_on_dealloc_use"""
    g = graphify(lambda x: x * x * x, outputs="borrow")
    with weft.check_borrowed():
        first = g(x)
        second = g(x)
        with pytest.raises(StaleResultError, match="clone it"):
            first + first
        g(x)
        with pytest.raises(StaleResultError):
            second + second


def test_results_survive_the_function(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_cleanup"""

    def closure() -> Any:
        g = graphify(lambda x: (x + 1 + 2, x * 10))
        return g(x), weakref.ref(g)

    (first, second), ref = closure()
    gc.collect()
    assert ref() is None
    assert torch.equal(first, x + 1 + 2)
    assert torch.equal(second, x * 10)


def test_empty_results(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_empty_storage, test_empty_cpu_tensor"""

    def empty(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x + x,
            torch.zeros(0, device=x.device),
            (x * 2)[0:0],
            torch.tensor([], device=x.device),
        )

    g = graphify(empty)
    for _ in range(3):
        results = g(x)
        expected = empty(x)
        assert [t.shape for t in results] == [t.shape for t in expected]
        assert torch.equal(results[0], expected[0])
    assert graphify(lambda x: x * 3)(x[:0]).shape == (0, 4)


def test_a_sparse_result(device: str) -> None:
    """torch: CudaGraphTreeTests.test_sparsity"""

    def f(i: Tensor, v: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(i, v, (10, 4), is_coalesced=False, check_invariants=False)

    g = graphify(f)
    for i in range(3):
        index = torch.full((1, 3), i, device=device)
        values = torch.rand(3, 4, device=device)
        assert torch.equal(g(index, values).to_dense(), f(index, values).to_dense())


# Random numbers and gradients
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["plain", "piecewise"])
def test_a_seed_repeats_the_sequence(backend: str, device: str) -> None:
    """torch: CudaGraphTreeTests.test_rng_trees, test_rng_non_trees"""

    def f(x: Tensor) -> Tensor:
        return torch.rand(20, device=device) + torch.sort(x).values

    g = graphify(f) if backend == "plain" else weft.piecewise(f, split_at="aten::sort")
    x = torch.zeros(20, device=device)
    torch.manual_seed(0)
    first = [g(x) for _ in range(3)]
    torch.manual_seed(0)
    for expected in first:
        assert torch.equal(g(x), expected)
    torch.manual_seed(0)
    assert [torch.equal(f(x), expected) for expected in first] == [True] * 3


def test_gradients_with_dropout(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_forward_backward, test_single_stream_use; differs: the
    function runs inline"""

    def f(x: Tensor) -> Tensor:
        return torch.sin(x * 2) * nn.functional.dropout(x, p=0.4)

    leaf = x.clone().requires_grad_()
    gradients = []
    for fn in (graphify(f), f):
        torch.manual_seed(3)
        gradients.append(torch.autograd.grad(fn(leaf).sum(), leaf)[0])
    assert torch.equal(*gradients)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("create_graph", [False, True])
def test_accumulated_gradients(create_graph: bool, x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_accumulate_grad"""
    g = graphify(lambda x: x + 2)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        y = g(leaf)
        y.backward(torch.ones_like(y), retain_graph=True)
        kept, copy = leaf.grad, leaf.grad.clone()  # type: ignore[union-attr]
        y.backward(torch.ones_like(y), create_graph=create_graph)
        assert torch.equal(kept, copy if create_graph else copy * 2)  # type: ignore[arg-type]


def test_a_backward_with_expanded_gradients(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_forward_with_skipped_cudagraphed_backward,
    test_forward_backward_not_called"""
    g = graphify(lambda x, y: (x * x * x, y * y * y))
    for _ in range(3):
        a = x.clone().requires_grad_()
        b = x.clone().requires_grad_()
        cube, _ = g(a, b)
        cube.backward(torch.ones(1, device=x.device).expand(4, 4))
        torch.testing.assert_close(a.grad, 3 * x * x)
        assert b.grad is None
    assert g.cache_info().eager == 3


def test_training_and_inference_by_turns(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_warn_on_pending_backward, test_mark_step,
    test_forward_generation; differs: no step is marked, and a pending backward keeps its tensors"""
    g = graphify(lambda x: x * x * x)
    pending = []
    for scale in (1.0, 2.0, 3.0):
        leaf = (x * scale).requires_grad_()
        pending.append((leaf, g(leaf)))
        assert torch.equal(g(x), x * x * x)
    for leaf, y in pending:
        y.sum().backward()
        torch.testing.assert_close(leaf.grad, 3 * leaf.detach() ** 2)
    assert g.cache_info().captures == 1


def test_a_convolution(device: str) -> None:
    """torch: CudaGraphTreeTests.test_conv_benchmark"""
    model = nn.Conv2d(5, 6, 3).to(device)
    g = graphify(model)
    with (
        torch.no_grad(),
        torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False),
    ):
        for _ in range(2):
            x = torch.randn(2, 5, 16, 16, device=device)
            torch.testing.assert_close(g(x), model(x))


# CUDA alone
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_call_on_a_stream_of_the_user() -> None:
    """torch: CudaGraphTreeTests.test_warmup_stream_sync"""

    def powers(x: Tensor) -> Tensor:
        for _ in range(50):
            x = x @ x
        return x

    x = torch.rand(1024, 1024, device="cuda") / 512
    expected = powers(x)
    torch.cuda.synchronize()
    g = graphify(powers)
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            assert torch.equal(g(x) + 1, expected + 1)


@pytest.mark.gpu
def test_arguments_on_two_devices() -> None:
    """torch: CudaGraphTreeTests.test_multiple_devices_msg; refused: torch skips the graph"""
    with pytest.raises(CaptureError):
        graphify(lambda x, y: (x + 1, y + 2))(torch.ones(10, device="cuda"), torch.ones(20))
