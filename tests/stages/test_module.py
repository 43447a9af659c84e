"""from_module: any nn.Module as a stage, its buffers as the state, the module itself untouched."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.donation import clone, donated_argnames
from weft.errors import CaptureError, DonatedError
from weft.proofs.laws import assert_equal
from weft.stages.module import ModuleStage, from_module
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.pipeline import compose, pipeline

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
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
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
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.BatchNorm1d(3, momentum=0.5))


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 2), torch.arange(12.0).view(3, 4)),
    "batch norm": (network, torch.arange(12.0).view(3, 4) ** 2),
    "no tracked statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), torch.arange(12.0).view(3, 4)),
    "in eval mode": (lambda: network().eval(), torch.arange(12.0).view(3, 4)),
    "no parameters": (nn.Flatten, torch.arange(12.0).view(3, 2, 2)),
    "tied": (Tied, torch.tensor([0, 3, 3, 1])),
    "a buffer assigned anew": (Assigns, torch.arange(3.0)),
}


@pytest.mark.parametrize("name", MODULES)
def test_three_steps_are_the_modules_own(name: str) -> None:
    make, x = MODULES[name]
    module = seeded(make)
    made, before = from_module(module), values(module)
    reference, state = copy.deepcopy(module), made.state
    for i in range(3):
        state, y = made.stage(made.params, state, x + i % 2, None)
        assert_equal(LAW, y, reference(x + i % 2))
        assert_equal(f"{LAW}: buffers", state, dict(reference.named_buffers()))
    assert_equal("the module is untouched", values(module), before)


@pytest.mark.parametrize("name", MODULES)
def test_graphified_it_is_the_same(name: str) -> None:
    make, x = MODULES[name]
    made = from_module(seeded(make))
    g, state, other = graphify(made.stage), clone(made.state), clone(made.state)
    for i in range(3):
        state, y = made.stage(made.params, state, x + i % 2, None)
        other, replayed = g(made.params, other, x + i % 2, None)
        assert_equal(LAW, (other, replayed), (state, y.detach()))
    assert g.cache_info().captures == 1
    assert g.cache_info().replays == 3


def test_a_module_that_reads_a_buffer_on_the_host_runs_eagerly_only() -> None:
    module = nn.BatchNorm1d(4, momentum=None)  # a cumulative average: it divides by its counter, on the host
    made, reference, x = from_module(module), copy.deepcopy(module), torch.arange(12.0).view(3, 4)
    state, _ = made.stage(made.params, clone(made.state), x, None)
    reference(x)
    assert_equal(f"{LAW}: buffers", state, dict(reference.named_buffers()))
    with pytest.raises(CaptureError, match=r"Tensor\.__float__ reads a tensor on the host"):
        graphify(made.stage)(made.params, made.state, x, None)
    assert_equal("a refused capture leaves no trace", made.state, dict(module.named_buffers()))


def stages() -> tuple[list[ModuleStage], list[nn.Module]]:
    modules = [seeded(make) for make in (network, lambda: nn.Linear(3, 3), lambda: nn.BatchNorm1d(3))]
    return [from_module(m) for m in modules], [copy.deepcopy(m) for m in modules]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("build", [compose, pipeline])
def test_in_a_pipeline(build: Any, graphs: bool) -> None:
    made, modules = stages()
    step = build([graphify(m.stage) if graphs else m.stage for m in made])
    params, state = tuple(m.params for m in made), tuple(clone(m.state) for m in made)
    x = torch.arange(12.0).view(3, 4) ** 2
    for _ in range(2):
        state, y = step(params, state, x)
        assert_equal(LAW, y.detach(), nn.Sequential(*modules)(x).detach())
        assert_equal(f"{LAW}: buffers", state, tuple(dict(m.named_buffers()) for m in modules))


def test_training_buffers_see_one_micro_batch_after_the_other() -> None:
    made = from_module(nn.BatchNorm1d(2))
    reference = nn.BatchNorm1d(2)
    x = torch.arange(8.0).view(4, 2)
    (state,), y = pipeline([made.stage], microbatches=2)((made.params,), (made.state,), x)
    assert_equal(LAW, y, torch.cat([reference(x[:2]), reference(x[2:])]).detach())
    assert_equal(f"{LAW}: buffers", state, dict(reference.named_buffers()))


def test_a_later_stage_is_called_on_x_and_the_first_on_the_batch() -> None:
    made = from_module(nn.Identity())
    assert made.stage({}, {}, "batch", None)[1] == "batch"
    assert made.stage({}, {}, "batch", "x")[1] == "x"


def test_the_state_is_donated_and_the_params_are_not() -> None:
    made = from_module(nn.BatchNorm1d(2))
    assert donated_argnames(made.stage) == ("state",)
    assert made.stage.__name__ == "stage BatchNorm1d"
    made.stage(made.params, made.state, torch.ones(2, 2), None)
    with pytest.raises(DonatedError, match="donated to"):
        made.stage(made.params, made.state, torch.ones(2, 2), None)


def test_nothing_is_shared_that_a_step_could_write() -> None:
    module = nn.BatchNorm1d(2)
    first, second = from_module(module), from_module(module)
    first.stage(first.params, first.state, torch.rand(3, 2), None)
    assert_equal("another stage of the module", second.state, dict(module.named_buffers()))
    assert not any(p.requires_grad for p in first.params.values())


def test_gradients_by_torch_func() -> None:
    module = seeded(lambda: nn.Linear(4, 2))
    made, x = from_module(module), torch.arange(4.0)
    grads = torch.func.grad(lambda params: made.stage(params, {}, x, None)[1].sum())(made.params)
    module(x).sum().backward()
    assert_equal(LAW, grads, {name: p.grad for name, p in module.named_parameters()})
