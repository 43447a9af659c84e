"""torch's tests of what CUDA graph trees record, as scenarios of `graphify`, on tapes too: shapes,
parameters, writes.

A docstring names the test. After it stands `refused` or `differs`, with the reason, where weft does
not do the same.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphified import captures
from torch import Tensor, nn

import weft
from weft.errors import CacheMissError, CaptureError, DonatedError
from weft.transforms.graphs.graphify import graphify


@pytest.fixture
def x(device: str) -> Tensor:
    return torch.rand(4, 4, device=device)


# Signatures
# -----------------------------------------------------------------------------------------------------------


def test_two_shapes_are_two_graphs(device: str) -> None:
    """torch: CudaGraphTreeTests.test_run_simple, test_separate_recordings"""
    g = graphify(lambda x: x * x * x)
    for make, n in ((torch.ones, 4), (torch.zeros, 5), (torch.ones, 4), (torch.zeros, 5)):
        x = make(n, n, device=device)
        assert torch.equal(g(x), x * x * x)
    assert captures(g) == 2


def test_python_runs_at_captures_alone(device: str) -> None:
    """torch: CudaGraphTreeTests.test_dynamic_warmup"""
    runs = []

    def f(n: int, x: Tensor) -> Tensor:
        runs.append(n)
        return x * 2

    g = graphify(f)
    for n in (2, 3):
        g(n, torch.randn(n, device=device))
        at_capture = runs.count(n)
        for _ in range(3):
            g(n, torch.randn(n, device=device))
        assert runs.count(n) == at_capture <= 2


def test_sizes_are_plain_numbers(device: str) -> None:
    """torch: CudaGraphTreeTests.test_skip_symbolic, test_dynamic_backward; differs: a graph holds
    one size"""

    def f(x: Tensor) -> Any:
        x = torch.cat([x, x])
        return torch.addmm(x, x, x).relu(), x.size(0)

    g = graphify(f)
    for rows, columns in ((2, 4), (3, 6), (2, 4)):
        x = torch.randn(rows, columns, device=device)
        (result, size), (expected, _) = g(x), f(x)
        assert torch.equal(result, expected)
        assert size == 2 * rows
        leaf = x.clone().requires_grad_()
        assert torch.equal(*(torch.autograd.grad(fn(leaf)[0].sum(), leaf)[0] for fn in (g, f)))
    assert captures(g) == 2


def test_a_frozen_function_records_nothing_more(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_frozen_fn"""
    g = graphify(lambda x: x @ x)
    g(x)
    g.freeze()
    for _ in range(3):
        assert torch.equal(g(x), x @ x)
    with pytest.raises(CacheMissError, match="a miss after freeze"):
        g(x[:2, :2])
    assert captures(g) == 1


def test_the_number_of_graphs_is_bounded(device: str) -> None:
    """torch: CudaGraphTreeTests.test_skip_if_dynamic_shape_limit_reached1,
    test_skip_if_dynamic_shape_limit_reached2, test_fallback_to_eager_if_recompiling_too_many_times;
    differs: the oldest graph is dropped, and nothing runs eagerly"""
    g = graphify(lambda x: x * 2, max_captures=2)
    for n in (10, 20, 30, 10):
        assert g(torch.ones(n, device=device)).sum().item() == 2 * n
    info = g.cache_info()
    assert (info.captures, info.currsize, info.eager) == (4, 2, 0)


@pytest.mark.parametrize("offset", [0, 1])
def test_inputs_of_any_alignment(offset: int, device: str) -> None:
    """torch: CudaGraphTreeTests.test_unaligned_static_input_trees, test_unaligned_static_parameter"""
    g = graphify(lambda x, y: x + y)
    h = graphify(lambda params, y: params + y)
    for start in (offset, 1 - offset):
        x, y = (torch.rand(21, device=device)[start : start + 20] for _ in range(2))
        assert torch.equal(g(x, y), x + y)
        assert torch.equal(h(x, y), x + y)


def test_expanded_inputs(device: str) -> None:
    """torch: CudaGraphTreeTests.test_expanded_inputs"""
    g = graphify(lambda x: x + 4 + torch.ones(4, 8, device=x.device))
    for _ in range(3):
        x = torch.rand(1, 8, device=device).expand(4, 8)
        assert torch.equal(g(x), x + 5)


def test_an_autocast_weight_is_cast_anew(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_amp_cache_disabled"""
    g = graphify(lambda x: x + x)
    with torch.autocast(x.device.type, torch.bfloat16):
        result = g(x)
        first = result @ x
        result.zero_()
        assert not torch.equal(first, result @ x)


# Parameters by reference
# ----------------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, weight: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift


def make_module(name: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    makers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(4, 4),
        "batch norm": lambda: nn.BatchNorm1d(4).eval(),
        "custom": lambda: Scale(torch.rand(4), torch.rand(4)),
    }
    return makers[name]().to(device)


REPLACED = [
    ("linear", "weight"),
    ("batch norm", "running_mean"),
    ("custom", "weight"),
    ("custom", "shift"),
]


def replace_and_put_back(name: str, tensor: str, device: str) -> None:
    module = make_module(name, device)
    x = torch.rand(4, 4, device=device)
    g = graphify(module)
    old = getattr(module, tensor)
    new: Any = torch.rand_like(old)
    with torch.no_grad():
        for value in (old, type(old)(new) if isinstance(old, nn.Parameter) else new, old):
            setattr(module, tensor, value)
            for _ in range(2):
                assert torch.equal(g(x), module(x))


@pytest.mark.parametrize(("name", "tensor"), REPLACED)
def test_a_module_whose_tensor_is_replaced_and_put_back(name: str, tensor: str) -> None:
    """torch: CudaGraphTreeTests.test_multi_dispatch_single_compile_builtin_module,
    test_multi_dispatch_single_compile_builtin_module_buffers, test_multi_dispatch_custom_module,
    test_multi_dispatch_custom_module_buffer"""
    replace_and_put_back(name, tensor, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "tensor"), REPLACED)
def test_a_module_on_a_gpu_whose_tensor_is_replaced_and_put_back(name: str, tensor: str) -> None:
    """torch: CudaGraphTreeTests.test_multi_dispatch_single_compile_builtin_module,
    test_multi_dispatch_single_compile_builtin_module_buffers, test_multi_dispatch_custom_module,
    test_multi_dispatch_custom_module_buffer"""
    replace_and_put_back(name, tensor, "cuda")


def test_two_parameter_sets_have_a_graph_each(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_multi_dispatch_single_compile_param_inputs,
    test_multi_dispatch_child_node, test_multi_dispatch_parent_node,
    test_not_fallback_to_eager_if_have_not_recompiling_too_many_times"""
    g = graphify(lambda params, x: x * params["w"] + x)
    sets = [{"w": torch.rand(4, device=x.device)} for _ in range(2)]
    for params in (*sets, *sets):
        for _ in range(3):
            assert torch.equal(g(params, x), x * params["w"] + x)
    assert captures(g) == 2


def test_new_data_of_a_parameter(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_unstable_ptr, test_rerecord_if_static_input_address_changed;
    differs: torch 2.3 raises, weft captures again"""
    module = nn.Linear(4, 4).to(x.device)
    g = graphify(module)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(g(x), module(x))
            module.weight.data = torch.rand(4, 4, device=x.device)


def test_a_miss_names_the_parameter_that_moved(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_static_inputs_address_mutation_log"""
    g = graphify(lambda params, x: x @ params["goo"]["weight"])
    old = x * 1
    g({"goo": {"weight": old}}, x)
    assert "params['goo']['weight']: another tensor" in str(
        g.explain({"goo": {"weight": x * 1}}, x)
    )


def test_an_update_in_place_is_seen(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_compiled_autograd_static_input_params"""
    g = graphify(lambda params, x: x @ params)
    params = torch.rand(4, 4, device=x.device)
    for _ in range(3):
        assert torch.equal(g(params, x), x @ params)
        params += 1
    assert captures(g) == 1


# Writes to inputs
# -----------------------------------------------------------------------------------------------------


def test_a_write_to_an_input_is_refused(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_mutation_on_inp,
    test_mutation_cudagraph_managed_tensors_config, test_mutation_cudagraph_managed_tensor_warn;
    refused: torch skips the graph, weft says so and names the line"""
    with pytest.raises(
        CaptureError, match=r"aten\.add_\.Tensor writes to x.*which it does not own"
    ):
        graphify(lambda x: x.add_(2))(x)


def test_a_write_to_a_donated_input(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_mutation_cudagraph_managed_tensors"""
    produce = graphify(lambda x: x + 1)
    mutate = graphify(lambda x: x.add_(2), donate_argnames="x")
    for _ in range(3):
        tmp = produce(x)
        assert torch.equal(mutate(tmp), x + 1 + 2)
        with pytest.raises(DonatedError):
            mutate(tmp)


def test_an_out_argument_is_refused_unless_donated(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_mutation_reinplaced; refused: torch skips the graph"""

    def f(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return torch.logical_xor(a, b, out=out)

    with pytest.raises(CaptureError, match="writes to out"):
        graphify(f)(x, x * 0, torch.zeros_like(x))
    assert graphify(f, donate_argnames="out")(x, x * 0, torch.zeros_like(x)).eq(1).all()


@pytest.mark.parametrize("registered", [True, False])
def test_a_module_that_writes_to_itself_is_refused(registered: bool, x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_mutation_on_inp (buffers), test_tensor_constant_mutation;
    refused: pass the tensor in, and donate it"""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if registered:
                self.register_buffer("total", torch.ones(4, 4, device=x.device))
            else:
                self.total = torch.ones(4, 4, device=x.device)

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x)
            return self.total + x

    module = Counter()
    with pytest.raises(CaptureError, match="writes to a tensor from outside it"):
        graphify(module)(x)
    assert module.total.eq(1).all()


# Branches
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cubed", [True, False])
def test_a_branch_on_data_is_refused(cubed: bool, x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_execution_into_recording, test_accumulate_multiple_recordings,
    test_live_outputs_multiple_graphs; refused: there are no graph breaks"""

    def f(x: Tensor) -> Tensor:
        y = x * x * x if cubed else x + x
        return y + 10 if y.sum() > 0 else y - 10

    with pytest.raises(CaptureError, match="a branch on a tensor's value"):
        graphify(f)(x)


NO_GRAPH: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "nonzero twice": lambda x: x.nonzero().nonzero(),
}


@pytest.mark.parametrize("operator", NO_GRAPH)
def test_operators_that_no_graph_holds_are_refused(operator: str, x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_incompatible_cudagraph_ops_item,
    test_incompatible_cudagraph_ops_nonzero, test_incompatible_cudagraph_ops_nonzero_graph_breaks,
    test_incompatible_cudagraph_ops_nonzero_backend; refused: torch skips the graph"""
    with pytest.raises(CaptureError, match="on the host"):
        graphify(NO_GRAPH[operator])(x)


def test_a_piecewise_function_breaks_at_an_operator(x: Tensor) -> None:
    """torch: CudaGraphTreeTests.test_end_recording_early, test_function_compiled_multiple_times;
    differs: breaks are asked for by operator"""
    g = weft.piecewise(lambda x: (torch.sort(x * x).values + x) * 2, split_at="aten::sort")
    for value in (x, -x):
        assert torch.equal(g(value), (torch.sort(value * value).values + value) * 2)
    assert g.num_pieces() == (2,)
