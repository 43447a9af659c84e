"""from_module: any nn.Module as a stage, its buffers as the state, the module itself untouched."""

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import CaptureError, DonatedError
from weft.proofs import assert_equal
from weft.stages.custom.module import ModuleStage, from_module
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.transforms.pipelines.transports.threads import Threads
from weft.values.donation import clone, donated_argnames

LAW = "a stage is its module"


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


class Tied(nn.Module):
    """A head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Assigns(nn.Module):
    """A counter that is assigned anew instead of written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return x * self.n


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3, momentum=0.5)
    )


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 2), torch.arange(12.0).view(3, 4)),
    "batch norm": (network, torch.arange(12.0).view(3, 4) ** 2),
    "no tracked statistics": (
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        torch.arange(12.0).view(3, 4),
    ),
    "in eval mode": (lambda: network().eval(), torch.arange(12.0).view(3, 4)),
    "no parameters": (nn.Flatten, torch.arange(12.0).view(3, 2, 2)),
    "tied": (Tied, torch.tensor([0, 3, 3, 1])),
    "a buffer assigned anew": (Assigns, torch.arange(3.0)),
}


@pytest.mark.parametrize("name", MODULES)
def test_three_steps_are_the_modules_own(name: str) -> None:
    make, x = MODULES[name]
    module = seeded(make)
    module_stage = from_module(module)
    before = values(module)
    reference = copy.deepcopy(module)
    state = module_stage.state
    for i in range(3):
        state, y = module_stage.stage(module_stage.params, state, x + i % 2, None)
        assert_equal(LAW, y, reference(x + i % 2))
        assert_equal(f"{LAW}: buffers", state, dict(reference.named_buffers()))
    assert_equal("the module is untouched", values(module), before)


@pytest.mark.parametrize("name", MODULES)
def test_graphified_it_is_the_same(name: str) -> None:
    make, x = MODULES[name]
    module_stage = from_module(seeded(make))
    g = graphify(module_stage.stage)
    state = clone(module_stage.state)
    other = clone(module_stage.state)
    for i in range(3):
        state, y = module_stage.stage(module_stage.params, state, x + i % 2, None)
        other, replayed = g(module_stage.params, other, x + i % 2, None)
        assert_equal(LAW, (other, replayed), (state, y.detach()))
    assert g.cache_info().captures == 1
    assert g.cache_info().replays == 3


def test_a_module_that_reads_a_buffer_on_the_host_runs_eagerly_only() -> None:
    # A cumulative average: it divides by its counter, on the host
    module = nn.BatchNorm1d(4, momentum=None)
    module_stage = from_module(module)
    reference = copy.deepcopy(module)
    x = torch.arange(12.0).view(3, 4)
    state, _ = module_stage.stage(module_stage.params, clone(module_stage.state), x, None)
    reference(x)
    assert_equal(f"{LAW}: buffers", state, dict(reference.named_buffers()))
    with pytest.raises(CaptureError, match=r"Tensor\.__float__ reads a tensor on the host"):
        graphify(module_stage.stage)(module_stage.params, module_stage.state, x, None)
    assert_equal(
        "a refused capture leaves no trace", module_stage.state, dict(module.named_buffers())
    )


def stages() -> tuple[list[ModuleStage], list[nn.Module]]:
    modules = [
        seeded(make) for make in (network, lambda: nn.Linear(3, 3), lambda: nn.BatchNorm1d(3))
    ]
    return [from_module(m) for m in modules], [copy.deepcopy(m) for m in modules]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("build", [compose, pipeline])
def test_in_a_pipeline(build: Any, graphs: bool) -> None:
    module_stages, modules = stages()
    step = build([graphify(m.stage) if graphs else m.stage for m in module_stages])
    params = tuple(m.params for m in module_stages)
    state = tuple(clone(m.state) for m in module_stages)
    x = torch.arange(12.0).view(3, 4) ** 2
    for _ in range(2):
        state, y = step(params, state, x)
        assert_equal(LAW, y.detach(), nn.Sequential(*modules)(x).detach())
        assert_equal(f"{LAW}: buffers", state, tuple(dict(m.named_buffers()) for m in modules))


@pytest.mark.parametrize("whole", [True, False])
def test_stages_that_share_a_module_run_on_threads_of_their_own(whole: bool) -> None:
    """The stages have other parameters, and give them to the same parts, which one thread must not
    see of another."""
    module = seeded(
        lambda: nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(20)])
    )
    module_stages = [from_module(module), from_module(module if whole else module[:15])]
    params = [
        {name: p * (1 + index) for name, p in module_stage.params.items()}
        for index, module_stage in enumerate(module_stages)
    ]
    stages = [module_stage.stage for module_stage in module_stages]
    x = torch.arange(64.0).view(16, 4)
    _, expected = pipeline(stages, microbatches=8)(params, [{}, {}], x)
    threads = Threads()
    step = pipeline(stages, microbatches=8, transport=threads)
    for _ in range(5):
        assert_equal(LAW, step(params, [{}, {}], x)[1], expected)
    threads.close()


def test_training_buffers_see_one_micro_batch_after_the_other() -> None:
    module_stage = from_module(nn.BatchNorm1d(2))
    reference = nn.BatchNorm1d(2)
    x = torch.arange(8.0).view(4, 2)
    (state,), y = pipeline([module_stage.stage], microbatches=2)(
        (module_stage.params,), (module_stage.state,), x
    )
    assert_equal(LAW, y, torch.cat([reference(x[:2]), reference(x[2:])]).detach())
    assert_equal(f"{LAW}: buffers", state, dict(reference.named_buffers()))


def test_a_later_stage_is_called_on_x_and_the_first_on_the_batch() -> None:
    module_stage = from_module(nn.Identity())
    assert module_stage.stage({}, {}, "batch", None)[1] == "batch"
    assert module_stage.stage({}, {}, "batch", "x")[1] == "x"


def test_the_state_is_donated_and_the_params_are_not() -> None:
    module_stage = from_module(nn.BatchNorm1d(2))
    assert donated_argnames(module_stage.stage) == ("state",)
    assert module_stage.stage.__name__ == "stage BatchNorm1d"
    module_stage.stage(module_stage.params, module_stage.state, torch.ones(2, 2), None)
    with pytest.raises(DonatedError, match="donated to"):
        module_stage.stage(module_stage.params, module_stage.state, torch.ones(2, 2), None)


def test_nothing_is_shared_that_a_step_could_write() -> None:
    module = nn.BatchNorm1d(2)
    first = from_module(module)
    second = from_module(module)
    first.stage(first.params, first.state, torch.rand(3, 2), None)
    assert_equal("another stage of the module", second.state, dict(module.named_buffers()))
    assert not any(p.requires_grad for p in first.params.values())


def test_gradients_by_torch_func() -> None:
    module = seeded(lambda: nn.Linear(4, 2))
    module_stage, x = from_module(module), torch.arange(4.0)
    grads = torch.func.grad(lambda params: module_stage.stage(params, {}, x, None)[1].sum())(
        module_stage.params
    )
    module(x).sum().backward()
    assert_equal(LAW, grads, {name: p.grad for name, p in module.named_parameters()})


class Several(nn.Module):
    """Takes several inputs, by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, t: Tensor, *, scale: Tensor | None = None) -> dict[str, Any]:
        y = self.linear(x) * t
        return {"y": y if scale is None else y * scale, "shape": tuple(y.shape), "none": None}


X, T = torch.arange(12.0).view(3, 4), torch.tensor(2.0)
INPUTS: dict[str, tuple[Any, Callable[[nn.Module], Any]]] = {
    "a tuple": ((X, T), lambda module: module(X, T)),
    "a dict": ({"x": X, "t": T, "scale": T}, lambda module: module(X, T, scale=T)),
    "another mapping": (MappingProxyType({"t": T, "x": X}), lambda module: module(X, T)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_several_inputs(name: str) -> None:
    inputs, expected = INPUTS[name]
    module = seeded(Several).requires_grad_(False)
    module_stage = from_module(module)
    # Which is no pytree
    graph = module_stage.stage if name == "another mapping" else graphify(module_stage.stage)
    for way in (module_stage.stage, graph):
        assert_equal(LAW, way(module_stage.params, {}, inputs, None)[1], expected(module))
        assert_equal(LAW, way(module_stage.params, {}, "batch", inputs)[1], expected(module))


def test_a_named_tuple_is_one_input() -> None:
    packed = nn.utils.rnn.pack_sequence([X[:2], X[:1]])
    module = seeded(lambda: nn.LSTM(4, 2)).requires_grad_(False)
    module_stage = from_module(module)
    assert_equal(
        LAW,
        module_stage.stage(module_stage.params, {}, packed, None)[1][0].data,
        module(packed)[0].data,
    )


def test_a_call_of_ones_own_takes_what_it_wants_of_the_batch_and_of_x() -> None:
    module = seeded(Several).requires_grad_(False)
    module_stage = from_module(module, call=lambda module, batch, x: module(x, batch["t"])["y"])
    _, y = graphify(module_stage.stage)(module_stage.params, {}, {"t": T, "mask": X}, X)
    assert_equal(LAW, y, module(X, T)["y"])


STOCHASTIC: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)), X),
    "in a recurrent net": (lambda: nn.GRU(4, 3, num_layers=2, dropout=0.5), X),
    "in an activation": (nn.RReLU, -X),
    "in attention": (lambda: nn.MultiheadAttention(4, 2, dropout=0.5), (X, X, X)),
}


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_graph_draws_the_numbers_that_the_module_draws(name: str) -> None:
    make, inputs = STOCHASTIC[name]
    module = seeded(make).requires_grad_(False)
    module_stage = from_module(module)
    step = graphify(module_stage.stage)
    state = module_stage.state
    outs = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        state, out = step(module_stage.params, state, inputs, None)
        after = torch.rand(2)
        torch.manual_seed(seed)
        assert_equal(LAW, out, module(*inputs) if isinstance(inputs, tuple) else module(inputs))
        assert_equal("the generator goes on as after the module", after, torch.rand(2))
        outs.append(out)
    assert_equal(f"{LAW}: buffers", state, dict(module.named_buffers()))
    assert str(outs[0]) != str(outs[1])
    module.eval()
    _, out = step(module_stage.params, state, inputs, None)
    assert_equal(
        f"{LAW}: eval", out, module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    )
    assert step.cache_info().captures == 2


def test_buffers_that_are_not_persistent_are_state_too() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.total.add_(x.sum(0))  # type: ignore[operator]

    module = Sums()
    module_stage = from_module(module)
    step = graphify(module_stage.stage)
    state = module_stage.state
    for _ in range(3):
        state, out = step(module_stage.params, state, X, None)
    assert_equal(LAW, out, X * X.sum(0) * 3)
    assert_equal("the module is untouched", module.total, torch.zeros(4))


@pytest.mark.parametrize("script", [torch.jit.script, lambda module: torch.jit.trace(module, X)])
def test_a_module_of_torchscript(script: Any) -> None:
    module = seeded(lambda: nn.Linear(4, 2)).requires_grad_(False)
    module_stage = from_module(script(module))
    assert_equal(LAW, graphify(module_stage.stage)(module_stage.params, {}, X, None)[1], module(X))
    larger = {name: value + 1 for name, value in module_stage.params.items()}
    assert_equal(
        LAW,
        module_stage.stage(larger, {}, X, None)[1],
        torch.func.functional_call(module, larger, (X,)),
    )
