"""Names that a function reads: another object leads to a new capture, an equal value or a counter
to none."""

import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphified import LAW, captures
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules import module as modules

from weft.errors import CacheMissError
from weft.proofs import assert_equal
from weft.transforms.graphs import outside
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.pipeline import compose, pipeline

X = torch.linspace(-1.0, 1.0, 4)
act = torch.relu
bias = None
gain = 2.0
scale = 0.1
counted = 0


class Act:
    """A class that a notebook's cell defines."""

    @staticmethod
    def go(x: Tensor) -> Tensor:
        return x * 2


class OtherAct:
    """The same, after the cell ran again."""

    @staticmethod
    def go(x: Tensor) -> Tensor:
        return x * 3


class Sub(nn.Module):
    """A module whose forward reads a global."""

    def forward(self, x: Tensor) -> Tensor:
        return x * gain


class Top(nn.Module):
    """A module that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.sub = Sub()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.sub(x)
        return result


class Called:
    """An object that is called as a function."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * gain


class Holder:
    """An object that holds a function, which its users call."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function


class Activated(nn.Module):
    """A module with a function among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.function = amplified

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def amplified(x: Tensor) -> Tensor:
    return x * gain


def stage(params: Any, state: Any, batch: Tensor, x: Tensor | None) -> tuple[Any, Tensor]:
    return state, amplified(batch if x is None else x)


def first_of(step: Callable[..., tuple[Any, Tensor]]) -> Callable[[Tensor], Tensor]:
    """A step of two stages without parameters and state, as a function of the batch."""
    return lambda x: step((None, None), (None, None), x)[1]


class Helped(nn.Module):
    """A module whose forward calls another method."""

    def forward(self, x: Tensor) -> Tensor:
        return self.help(x)

    def help(self, x: Tensor) -> Tensor:
        return x * gain


class Tripled:
    """An object with a method, and a module that its class has."""

    part = nn.Sequential(nn.Tanh())

    def go(self, x: Tensor) -> Tensor:
        return x * 3


class Halved(Tripled):
    """The same with another method."""

    def go(self, x: Tensor) -> Tensor:
        return x / 2


def calling(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = module(x)
    return result


def by_default(x: Tensor, module: nn.Module = nn.Sequential(nn.Tanh())) -> Tensor:  # noqa: B008
    return calling(module, x)


def by_attribute(x: Tensor) -> Tensor:
    return calling(by_attribute.part, x)  # type: ignore[attr-defined]


def hook(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result * 10


TOP, CALLED, HELPED = Top(), Called(), Helped()
LISTED = [torch.tanh, amplified]
NAMED = {"amplify": (amplified, "a text")}
HOLDER, ACTIVATED = Holder(amplified), Activated()
COMPOSED, PIPELINED = first_of(compose([stage, stage])), first_of(pipeline([stage, stage]))
INNER = graphify(lambda x: x * gain)
CHANGED: dict[str, tuple[Callable[..., Tensor], str, Any]] = {
    "a function of torch": (lambda x: act(x), "act", torch.tanh),
    "None": (lambda x: x if bias is None else x + bias, "bias", torch.ones(4)),
    "a class": (lambda x: Act.go(x), "Act", OtherAct),
    "a module": (lambda x: math.floor(x), "math", types.SimpleNamespace(floor=torch.ceil)),
    "a builtin": (lambda x: abs(x), "abs", torch.sin),
    "a name read by a submodule": (lambda x: TOP(x), "gain", 5.0),
    "a name read by a method that forward calls": (lambda x: HELPED(x), "gain", 5.0),
    "a name read by an object that is called": (lambda x: CALLED(x), "gain", 5.0),
    "a name read by a graphified function": (lambda x: INNER(x), "gain", 5.0),
    "a name read by a function in a list": (lambda x: LISTED[1](x), "gain", 5.0),
    "a name read by a function in a dict of tuples": (
        lambda x: NAMED["amplify"][0](x),
        "gain",
        5.0,
    ),
    "a name read by a function that an object holds": (lambda x: HOLDER.function(x), "gain", 5.0),
    "a name read by a function that a module holds": (lambda x: ACTIVATED(x), "gain", 5.0),
    "a name read by a stage of compose": (COMPOSED, "gain", 5.0),
    "a name read by a stage of a pipeline": (PIPELINED, "gain", 5.0),
    "a number": (lambda x: x * scale, "scale", 0.2),
}
math: Any = types.SimpleNamespace(floor=torch.floor)


@pytest.mark.parametrize("case", CHANGED)
def test_a_name_that_stands_for_something_else_is_captured_anew(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, name, value = CHANGED[case]
    graph = graphify(fn)
    assert torch.equal(graph(X), fn(X))
    monkeypatch.setitem(globals(), name, value)
    for _ in range(3):
        assert torch.equal(graph(X), fn(X))
    assert graph.cache_info().captures == 2


def replaced(place: Any, key: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A change of an attribute or an entry that ends with the test."""
    if isinstance(place, dict):
        return lambda monkeypatch: monkeypatch.setitem(place, key, value)
    return lambda monkeypatch: monkeypatch.setattr(place, key, value)


FUNCTIONS = {"act": torch.tanh}
LAYERS = [nn.Tanh(), amplified]
MIXED: dict[str, Any] = {"calls": 3, "act": amplified}
UNHOOKED, UNCHANGED, FOR_ALL = nn.Sequential(nn.Tanh()), nn.Tanh(), nn.Tanh()
NONE: dict[str, Callable[[Tensor], Tensor]] = {}
METHOD, KIND, SHARED = Tripled(), Tripled(), Tripled()
BOUND, REFERENCED, IN_A_SET = (
    nn.Sequential(nn.Tanh()),
    nn.Sequential(nn.Tanh()),
    nn.Sequential(nn.Tanh()),
)
PARTIAL, REFERENCE, SET = functools.partial(calling, BOUND), weakref.ref(REFERENCED), {IN_A_SET}
vars(by_attribute)["part"] = nn.Sequential(nn.Tanh())
settings: Any = types.ModuleType("settings")
settings.scale = 2.0


def with_all_of(functions: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for function in functions.values():
        x = function(x)
    return x * 1


WEIGHTS: dict[str, Any] = {"weight": torch.ones(4), "inside": [{"weight": torch.ones(4)}]}
WEIGHED: Any = types.SimpleNamespace(weight=torch.ones(4), last=deque([torch.ones(4)]))
OTHER = torch.full((4,), 5.0)


class Slotted:
    __slots__ = ("weight",)


SLOTTED = Slotted()
SLOTTED.weight = torch.ones(4)


class Moded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.halved(x)

    def halved(self, x: Tensor) -> Tensor:
        return x * 0.5 if self.training else x


MODED, INSIDE = nn.Sequential(nn.Tanh(), Moded()), nn.Sequential(nn.Dropout(1.0)).eval()


def with_mode(part: nn.Module, mode: bool) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(part, "training", mode)


REPLACED: dict[str, tuple[Callable[..., Tensor], Callable[[pytest.MonkeyPatch], None]]] = {
    "a function in a dict": (lambda x: FUNCTIONS["act"](x), replaced(FUNCTIONS, "act", torch.relu)),
    "an attribute of an object": (
        lambda x: HOLDER.function(x),
        replaced(HOLDER, "function", torch.relu),
    ),
    "an attribute of a module": (
        lambda x: ACTIVATED(x),
        replaced(ACTIVATED, "function", torch.relu),
    ),
    "a function in a dict with numbers": (
        lambda x: MIXED["act"](x),
        replaced(MIXED, "act", torch.relu),
    ),
    "a module in a list": (lambda x: LAYERS[0](x), lambda monkeypatch: LAYERS.reverse()),
    "a submodule": (lambda x: TOP(x), replaced(TOP._modules, "sub", nn.Tanh())),
    "a submodule of the function itself": (TOP, replaced(TOP._modules, "sub", nn.Tanh())),
    "a first hook": (lambda x: UNHOOKED(x), replaced(UNHOOKED[0]._forward_hooks, "0", hook)),
    "a hook of all modules": (
        lambda x: FOR_ALL(x),
        replaced(modules._global_forward_hooks, "0", hook),
    ),
    "a function in an empty dict": (
        lambda x: with_all_of(NONE, x),
        replaced(NONE, "act", torch.exp),
    ),
    "a module's own forward": (lambda x: UNCHANGED(x), replaced(UNCHANGED, "forward", torch.exp)),
    "the class of an object": (lambda x: KIND.go(x), replaced(KIND, "__class__", Halved)),
    "a method of a class": (lambda x: METHOD.go(x), replaced(Tripled, "go", lambda self, x: x * 9)),
    "the forward of a class": (Sub(), replaced(Sub, "forward", lambda self, x: x * 9)),
    "a submodule in a class": (
        lambda x: SHARED.part(x),
        replaced(Tripled.part._modules, "0", nn.ReLU()),
    ),
    "a submodule in a class that it names": (
        lambda x: Tripled.part(x),
        replaced(Tripled.part._modules, "0", nn.ReLU()),
    ),
    "a submodule in a partial function": (
        lambda x: PARTIAL(x),
        replaced(BOUND._modules, "0", nn.ReLU()),
    ),
    "a submodule of the partial function itself": (
        PARTIAL,
        replaced(BOUND._modules, "0", nn.ReLU()),
    ),
    "a submodule behind a weak reference": (
        lambda x: calling(REFERENCE(), x),  # type: ignore[arg-type]
        replaced(REFERENCED._modules, "0", nn.ReLU()),
    ),
    "a submodule in a set": (
        lambda x: calling(next(iter(SET)), x),
        replaced(IN_A_SET._modules, "0", nn.ReLU()),
    ),
    "a submodule of a default": (
        by_default,
        replaced(by_default.__defaults__[0]._modules, "0", nn.ReLU()),
    ),
    "a submodule of an attribute of a function": (
        by_attribute,
        replaced(vars(by_attribute)["part"]._modules, "0", nn.ReLU()),
    ),
    "a number in a file of Python code": (
        lambda x: x * settings.scale,
        replaced(settings, "scale", 5.0),
    ),
    "the mode of a module that a method asks for": (lambda x: MODED(x), with_mode(MODED[1], False)),
    "the mode of a part": (lambda x: INSIDE(x), with_mode(INSIDE[0], True)),
    "a tensor in a dict": (lambda x: x * WEIGHTS["weight"], replaced(WEIGHTS, "weight", OTHER)),
    "a tensor deep inside": (
        lambda x: x * WEIGHTS["inside"][0]["weight"],
        replaced(WEIGHTS["inside"][0], "weight", OTHER),
    ),
    "a tensor of an object": (lambda x: x * WEIGHED.weight, replaced(WEIGHED, "weight", OTHER)),
    "a tensor in a deque": (
        lambda x: x * WEIGHED.last[0],
        lambda monkeypatch: WEIGHED.last.appendleft(OTHER * len(WEIGHED.last)),
    ),
    "a tensor in a slot": (lambda x: x * SLOTTED.weight, replaced(SLOTTED, "weight", OTHER)),
}


@pytest.mark.parametrize("case", REPLACED)
def test_what_was_replaced_in_its_place_is_captured_anew(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, replace = REPLACED[case]
    graph = graphify(fn)
    before = graph(X)
    replace(monkeypatch)
    for _ in range(3):
        assert torch.equal(graph(X), fn(X))
    assert not torch.equal(graph(X), before)
    assert graph.cache_info().captures == 2


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["_read_elements", "_read_object", "_read_part"])
def test_planted_bugs_are_found(reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes some of the tests above fail."""
    monkeypatch.setattr(outside._Names, reads, lambda *args: None)
    failed = []
    for test, cases in (
        (test_a_name_that_stands_for_something_else_is_captured_anew, CHANGED),
        (test_what_was_replaced_in_its_place_is_captured_anew, REPLACED),
    ):
        for case in cases:
            with monkeypatch.context() as patch:
                try:
                    test(case, patch)
                except AssertionError:
                    failed.append(case)
    assert failed != []


def counting(x: Tensor) -> Tensor:
    global counted
    counted += 1
    return x + 1


def nonlocal_counting() -> Callable[[Tensor], Tensor]:
    count = 0

    def count_up(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x + 1

    return count_up


@pytest.mark.parametrize("fn", [counting, nonlocal_counting()])
def test_a_counter_of_the_functions_own_captures_nothing_anew(
    fn: Callable[[Tensor], Tensor],
) -> None:
    graph = graphify(fn)
    for _ in range(4):
        for size in (2, 3):
            graph(torch.ones(size))
    assert graph.cache_info().captures == 2


def test_an_equal_value_captures_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graphify(lambda x: x * scale)
    for _ in range(4):
        monkeypatch.setitem(globals(), "scale", float("0.1"))
        assert torch.equal(graph(X), X * 0.1)
    assert graph.cache_info().captures == 1


def test_names_of_a_class_body_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor) -> Tensor:
        class Local:
            gain = 2.0
            twice = 2 * gain

        return x * Local.twice

    graph = graphify(f)
    for value in range(3):
        monkeypatch.setitem(globals(), "gain", value)
        assert torch.equal(graph(X), X * 4)
    assert graph.cache_info().captures == 1


def test_what_is_no_function_may_be_added() -> None:
    module, log = Top(), list[float]()

    def logged(x: Tensor) -> Tensor:
        y: Tensor = module(x)
        return y * (1 + len(log[:0]))

    graph = graphify(logged)
    graph(X)
    graph.freeze()
    for value in range(3):
        log.append(1.0)
        vars(module.sub)[f"number {value}"] = value
        assert torch.equal(graph(X), module(X))
    vars(module)["act"] = torch.relu
    with pytest.raises(
        CacheMissError, match=r"a miss after freeze\(\): module\.act was not there at the capture"
    ):
        graph(X)


def test_defaults_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    graph = graphify(lambda x: scaled(x))
    assert torch.equal(graph(X), X * 2)
    monkeypatch.setattr(scaled, "__defaults__", (3.0,))
    assert torch.equal(graph(X), X * 3)


def test_models_of_earlier_captures_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graphify(lambda x: TOP(x))
    models = list[weakref.ref[Top]]()
    for size in range(1, 6):
        model = Top()
        models.append(weakref.ref(model))
        monkeypatch.setitem(globals(), "TOP", model)
        graph(torch.ones(size))
        del model
    monkeypatch.undo()
    graph(torch.ones(1))
    gc.collect()
    assert [model for model in models if model() is not None] == []


def test_per_sample_gradients_of_a_convolution() -> None:
    """functorch passes memory that nothing has written to the derivative, which reads its shape."""

    def gradients(kernels: Tensor, images: Tensor) -> Tensor:
        return vmap(grad(lambda k, x: F.conv2d(x[None], k).square().sum()), (None, 0))(
            kernels, images
        )

    graph = graphify(gradients)
    kernels = torch.randn(2, 1, 3, 3)
    for _ in range(2):
        images = torch.randn(4, 1, 6, 6)
        assert torch.equal(graph(kernels, images), gradients(kernels, images))
    assert graph.cache_info().captures == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_closed_over_module_of_torchscript() -> None:
    script = torch.jit.script(nn.Linear(4, 4).requires_grad_(False))
    graph = graphify(lambda x: script(x))
    for value in range(2):
        assert torch.equal(graph(X + value), script(X + value))


Tensors = dict[str, Tensor]


def test_an_annotation_of_a_nested_function_is_no_reason_to_capture_again() -> None:
    def outer(x: Tensor) -> Tensor:
        def inner(values: Tensors) -> Tensor:
            return values["x"] * 2

        return inner({"x": x})

    g = graphify(outer)
    for x in (torch.zeros(2), torch.ones(2)):
        assert_equal(LAW, g(x), outer(x))
    assert captures(g) == 1
