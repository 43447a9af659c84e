"""from_module: what it refuses, and what a graph of a module refuses; the module is left as it was."""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusal import refused
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from weft.errors import CaptureError, ProgramError
from weft.proofs import assert_equal
from weft.stages.custom.module import from_module
from weft.transforms.graphs.graphify import graphify
from weft.values.trees import tree_leaves

LAW = "a stage is its module"
X, T = torch.arange(12.0).view(3, 4), torch.tensor(2.0)


class Several(nn.Module):
    """Takes several inputs."""

    def forward(self, x: Tensor, t: Tensor, *, scale: Tensor | None = None) -> Tensor:
        return x * t if scale is None else x * t * scale


@pytest.mark.parametrize(
    ("inputs", "arguments", "why"),
    [
        ((X,), "a Tensor", "missing a required argument: 't'"),
        ((X, T, T), "a Tensor, a Tensor, a Tensor", "too many positional arguments"),
        ({"x": X, "time": T}, "x=..., time=...", "missing a required argument: 't'"),
        ({}, "", "missing a required argument: 'x'"),
        (X, "a Tensor", "missing a required argument: 't'"),
    ],
)
def test_inputs_that_forward_does_not_take(inputs: Any, arguments: str, why: str) -> None:
    module_stage = from_module(Several())
    problem = f"forward(x, t, scale) is given ({arguments}): {why}"
    instead = "from_module(module, call=lambda module, batch, x: module(...))"
    with refused(ProgramError, "stage Several(params, state, batch, None)", problem, instead):
        module_stage.stage(module_stage.params, {}, inputs, None)


class Keeps(nn.Module):
    """Keeps something outside its buffers: a number, a tensor or a list, as `change` says."""

    def __init__(self, change: Callable[["Keeps", Tensor], Any]) -> None:
        super().__init__()
        self.change = change
        self.count = 0
        self.last = torch.zeros(3, 4)
        self.items = list[int]()
        self.register_buffer("absent", None)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return x * self.weight + self.count + self.last


CHANGES: dict[str, tuple[Callable[[Any, Tensor], Any], str, str]] = {
    "a number": (
        lambda module, x: setattr(module, "count", module.count + 1),
        "inner.count",
        "changes from 0 to 1 while it runs",
    ),
    "a tensor": (
        lambda module, x: setattr(module, "last", module.last + x),
        "inner.last",
        "changes while it runs",
    ),
    "a list": (lambda module, x: module.items.append(1), "inner.items", "changes while it runs"),
    "a new attribute": (
        lambda module, x: setattr(module, "fresh", module.count),
        "inner.fresh",
        "changes while it runs",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_module_keeps_in_attributes_is_refused_in_a_graph_and_left_as_it_was(
    name: str,
) -> None:
    change, path, how = CHANGES[name]
    module = nn.Sequential(OrderedDict(inner=Keeps(change)))
    module_stage = from_module(module)
    key = path.partition(".")[2]
    problem = f"{path} of the module {how}, and a replay does not repeat that"
    instead = (
        f"return it, or register_buffer({key!r}, ...); if it is set only once, run the module"
        " before"
    )
    with refused(CaptureError, "graphify(stage Sequential)", problem, instead):
        graphify(module_stage.stage)(module_stage.params, module_stage.state, X, None)
    inner: Any = module.inner
    assert (inner.count, inner.items, inner.last.sum(), hasattr(inner, "fresh")) == (
        0,
        [],
        0,
        False,
    )
    reference = copy.deepcopy(module).requires_grad_(False)
    for _ in range(2):  # outside a graph it is the module
        assert_equal(LAW, module_stage.stage(module_stage.params, {}, X, None)[1], reference(X))


@pytest.mark.parametrize(
    "hook",
    [nn.utils.spectral_norm, lambda module: prune.random_unstructured(module, "weight", 0.5)],
)
def test_a_weight_that_a_hook_computes_is_refused_in_a_graph(hook: Any) -> None:
    module_stage = from_module(nn.Sequential(hook(nn.Linear(4, 2))))
    problem = "0.weight of the module changes while it runs, and a replay does not repeat that"
    instead = (
        "torch.nn.utils.parametrizations in the place of this hook; prune.remove(...) of a pruned"
        " module"
    )
    with refused(CaptureError, "graphify(stage Sequential)", problem, instead):
        graphify(module_stage.stage)(module_stage.params, module_stage.state, X, None)


@pytest.mark.parametrize(
    ("name", "draw"), [("random", random.random), ("numpy.random", np.random.rand)]
)
def test_draws_that_are_not_torchs_are_refused_in_a_graph(
    name: str, draw: Callable[[], float]
) -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * draw()

    random.seed(0)
    np.random.seed(0)
    expected = draw()
    random.seed(0)
    np.random.seed(0)
    problem = f"a draw from {name}, which a replay does not repeat"
    instead = "a draw from torch: torch.rand(...)"
    with refused(CaptureError, "graphify(stage Draws)", problem, instead):
        graphify(from_module(Draws()).stage)({}, {}, X, None)
    assert draw() == expected


@pytest.mark.parametrize(
    ("change", "problem", "instead"),
    [
        (
            lambda module, x: setattr(module, "absent", x),
            "the run made the buffer absent",
            "make it before that: run the module once",
        ),
        (
            lambda module, x: setattr(module, "weight", nn.Parameter(module.weight * 2)),
            "the run replaced the parameter weight, which is not part of the new state",
            "a buffer in its place: register_buffer('weight', ...)",
        ),
    ],
)
def test_a_run_that_makes_what_has_no_place_in_the_state(
    change: Any, problem: str, instead: str
) -> None:
    module_stage = from_module(Keeps(change))
    with refused(ProgramError, "stage Keeps(params, state, ...)", problem, instead):
        module_stage.stage(module_stage.params, module_stage.state, X, None)


class Views(nn.Module):
    """Has two buffers in one piece of memory, which overlap by `more` entries."""

    def __init__(self, more: int) -> None:
        super().__init__()
        memory = torch.zeros(8)
        self.register_buffer("a", memory[: 4 + more])
        self.register_buffer("b", memory[4:])


@pytest.mark.parametrize(
    ("module", "call", "written", "problem", "instead"),
    [
        (
            nn.LazyLinear(3),
            None,
            "LazyLinear(...)",
            "weight, which has no shape yet",
            "call the module once on inputs before that",
        ),
        (
            Views(1),
            None,
            "Views(...)",
            "buffers a and b, which share memory",
            "a clone() of one of them",
        ),
        (Views(0), 3, "Views(...)", "call=3, an int", "call=lambda module, batch, x: module(...)"),
        (nn.Linear, None, "module", "Linear, the class", "a module of it: Linear(...)"),
    ],
)
def test_modules_that_are_refused(
    module: Any, call: Any, written: str, problem: str, instead: str
) -> None:
    with refused(ProgramError, f"weft.stages.from_module({written})", problem, instead):
        from_module(module, call=call)


def test_a_counter_of_operators_is_no_graph() -> None:
    change, _, _ = CHANGES["a number"]
    module = Keeps(change)
    module_stage = from_module(module)
    with FlopCounterMode(display=False):
        module_stage.stage(module_stage.params, {}, X, None)
    assert module.count == 1


class Aliased(nn.Module):
    """A module with a tensor that is no buffer, and shares memory with one or with a parameter."""

    def __init__(self, alias: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.register_buffer("total", torch.zeros(2, 3))
        self.alias = alias(self)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("alias", "text"),
    [
        (lambda module: module.total, "alias, which shares memory with total"),
        (lambda module: module.total[0], "alias, which shares memory with total"),
        (lambda module: [None, module.total[1]], r"alias\[1\], which shares memory with total"),
        (
            lambda module: SimpleNamespace(w=module.layer.weight.detach()),
            r"alias.w, which shares memory with layer.weight",
        ),
        (lambda module: (module.layer.weight,), r"alias\[0\], which shares memory with layer.w"),
    ],
)
def test_an_alias_that_would_keep_the_modules_own_values_is_refused(
    alias: Callable[[nn.Module], Any], text: str
) -> None:
    with pytest.raises(ProgramError, match=f"{text}.*\n.*instead: a view that forward makes"):
        from_module(Aliased(alias))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(3, 3, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: Aliased(lambda module: module.total.clone()),
        lambda: Aliased(lambda module: module.layer),
    ],
)
def test_what_follows_the_modules_values_is_no_such_alias(make: Callable[[], nn.Module]) -> None:
    module = make()
    module_stage = from_module(module)
    x = torch.ones(1, 3)
    params = {name: value * 2 for name, value in module_stage.params.items()}
    result = module_stage.stage(params, module_stage.state, x, None)[1]
    expected = torch.func.functional_call(module, params, (x,))
    for value, other in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        assert torch.equal(value, other)
