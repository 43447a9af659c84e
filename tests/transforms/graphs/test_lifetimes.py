"""Graphs keep alive what they read, and nothing else."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import weft
from weft import graphify
from weft.errors import CaptureError
from weft.transforms.graphs import capture, lower
from weft.transforms.graphs.one_at_a_time import ONE_AT_A_TIME


class Scaled:
    """An instance with a graphified method."""

    def __init__(self, factor: float) -> None:
        self.factor = torch.tensor(factor)

    @graphify(static_argnames="self")
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_static_self_is_not_kept_and_its_graph_goes_with_it() -> None:
    Scaled.scaled.cache_clear()
    for factor in (2.0, 3.0, 4.0):
        instance = Scaled(factor)
        for _ in range(3):
            assert instance.scaled(torch.ones(2)).tolist() == [factor] * 2
        ends = weakref.ref(instance), weakref.ref(instance.factor)
        del instance
        assert [end() for end in ends] == [None, None]
        assert Scaled.scaled.cache_info().currsize == 0


def test_a_module_that_is_static_switches_and_goes() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        @graphify(static_argnames="self")
        def forward(self, x: Tensor) -> Tensor:
            dropped: Tensor = self.drop(x)
            return dropped

    module = Dropping().eval()
    x = torch.ones(64)
    for _ in range(3):
        assert torch.equal(module(x), x)
        module.train()
        assert not torch.equal(module(x), x)
        module.eval()
    end = weakref.ref(module)
    del module
    gc.collect()  # a module refers to itself
    assert end() is None


def test_a_result_that_is_a_view_of_params_keeps_none_of_them() -> None:
    g = graphify(lambda params, x: (params[0][:2], x + 1))
    params = [torch.ones(4), torch.ones(4)]
    for _ in range(2):
        view, _ = g(params, torch.ones(2))
    storage_refs = [StorageWeakRef(p.untyped_storage()) for p in params]
    del params
    assert [one.expired() for one in storage_refs] == [True, True]
    assert view.tolist() == [1, 1]


def test_an_evicted_graph_is_gone_at_once() -> None:
    gc.disable()
    g = graphify(lambda x: x + 1, max_captures=1)
    for _ in range(2):
        g(torch.ones(2))
    ends = [weakref.ref(graph) for graph in g._cache.graphs()]
    g(torch.ones(3))
    gc.enable()
    assert [end() for end in ends] == [None]
    assert g(torch.ones(2)).tolist() == [2, 2]


def test_a_refused_backward_leaves_no_gradient() -> None:
    linear = nn.Linear(2, 2)

    def train(x: Tensor) -> Tensor:
        loss: Tensor = linear(x).sum()
        loss.backward()
        return loss

    with pytest.raises(CaptureError):
        graphify(train)(torch.ones(1, 2))
    assert [p.grad for p in linear.parameters()] == [None, None]


def test_a_lent_state_outlives_the_next_call_of_a_microbatched_step() -> None:
    step = graphify(lambda params, state, batch: (state + batch.sum(), batch * 2), outputs="borrow")
    for transformed in (weft.microbatch(step, 2), weft.scan(step, 2)):
        state, _ = transformed(None, torch.zeros(()), torch.ones(4))
        value = state.item()
        transformed(None, torch.ones(()), torch.ones(4))
        assert state.item() == value


@pytest.mark.gpu
def test_graphs_share_a_pool_though_each_reads_another_tensor_from_outside() -> None:
    """The second capture must first see that its tensor is older than it, and is recorded twice for
    that."""
    sizes = []
    # The first graph of a process may add a workspace.
    for same in (True, True, False):
        tensors = [torch.ones(1024, 1024, device="cuda") for _ in range(4)]
        graph = graphify(
            lambda rows, same=same, tensors=tensors: (
                rows + tensors[0 if same else len(rows) - 1] * 2
            )[:1]
        )
        for count in (1, 2, 3, 4):
            graph(torch.ones(count, 1024, 1024, device="cuda"))
        assert graph.cache_info().captures == 4
        sizes.append(graph.memory_analysis().graph_bytes)
    assert sizes[1] == sizes[2]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_tensor_from_outside_that_is_only_returned_may_change_its_memory(device: str) -> None:
    outside = torch.ones(3, device=device)
    g = graphify(lambda x: (x + 1, outside))
    g(torch.ones(3, device=device))
    outside.data = outside.data * 5
    for _ in range(2):
        assert g(torch.ones(3, device=device))[1].tolist() == [5, 5, 5]


def test_the_parameters_of_a_captured_module_can_be_swapped() -> None:
    """Torch swaps no tensor that has a weak reference."""
    layer = nn.Linear(3, 2).requires_grad_(False)
    graph = graphify(lambda x: layer(x))
    x = torch.ones(1, 3)
    for value in (1.0, 2.0):
        assert torch.equal(graph(x), layer(x))
        bias = nn.Parameter(torch.full((2,), value), requires_grad=False)
        torch.utils.swap_tensors(layer.bias, bias)
    assert torch.equal(graph(x), layer(x))


def test_a_capture_saves_generators_when_no_other_capture_has_set_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone: list[bool] = []

    def noted(*args: Any) -> Any:
        free = threading.Thread(
            target=lambda: alone.append(not ONE_AT_A_TIME._lock.acquire(blocking=False))
        )
        free.start()
        free.join()
        return audit_of(*args)

    audit_of = capture.audit_of
    for module in (capture, lower):
        monkeypatch.setattr(module, "audit_of", noted)
    g = graphify(lambda x: x + torch.rand(x.shape))
    g(torch.ones(2))
    g.lower(torch.ones(3))
    assert alone == [True, True]
