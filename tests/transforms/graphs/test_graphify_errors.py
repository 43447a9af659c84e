"""Bad input to graphify: the type and text of each error, and that no partial state remains.

`test_refusals.py` has the table of all that a replay could not repeat.
"""

from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from refusal import REMEDY, at, refused
from torch import Tensor, nn

import weft
from weft.errors import CaptureError, DeviceError
from weft.proofs import assert_equal
from weft.stages.custom.module import from_module
from weft.transforms.graphs.calls.key import CacheInfo
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.pipeline import compose, pipeline
from weft.values.donation import clone


def branches(x: Tensor) -> Tensor:
    y = x * 2
    if y.sum() > 0:
        return y
    return -y


def loops(x: Tensor) -> Tensor:
    while (x < 100).all():
        x = x * 2
    return x


def reads_an_item(x: Tensor) -> Tensor:
    scale = x.max().item()
    return x * scale


def asks_a_helper(x: Tensor) -> Tensor:
    return branches(x + 1)


UNFIT: list[tuple[Callable[[Tensor], Tensor], str, str]] = [
    (branches, "a branch on a tensor's value", at(branches, "if y.sum()")),
    (loops, "a branch on a tensor's value", at(loops, "while")),
    (reads_an_item, "Tensor.item reads a tensor on the host", at(reads_an_item, ".item()")),
    (asks_a_helper, "a branch on a tensor's value", at(branches, "if y.sum()")),
]


@pytest.mark.parametrize(("fn", "problem", "line"), UNFIT, ids=[fn.__name__ for fn, *_ in UNFIT])
def test_a_function_that_cannot_be_captured_names_its_line(
    fn: Callable[[Tensor], Tensor], problem: str, line: str
) -> None:
    """The error names the innermost line of the user's code; nothing is kept, so a second call
    raises it again."""
    x = torch.tensor([1.0, 2.0])
    graph = graphify(fn)
    for _ in range(2):
        with refused(CaptureError, f"graphify({fn.__name__})", problem + line, REMEDY):
            graph(x)
    assert graph.cache_info() == CacheInfo()
    assert x.tolist() == [1.0, 2.0]
    assert bool(x.sum() == 3), "outside a capture the host may read again"


class Gate(nn.Module):
    """A module that branches on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.sum() > 0:
            return y
        return x


def test_a_modules_line_is_named() -> None:
    """The error for a stage alone, for a whole step, and for a stage in a pipeline."""
    gate = from_module(Gate())
    batch = torch.ones(1, 2)
    whole = graphify(compose([gate.stage]))
    spanned = pipeline([graphify(gate.stage)])
    problem = "a branch on a tensor's value" + at(Gate.forward, "if y.sum()")
    with refused(CaptureError, "graphify(stage Gate)", problem, REMEDY):
        graphify(gate.stage)(gate.params, gate.state, batch, None)
    with refused(CaptureError, "graphify(step)", problem, REMEDY):
        whole((gate.params,), (gate.state,), batch)
    with refused(CaptureError, "graphify(stage Gate)", problem, REMEDY):
        spanned((gate.params,), (gate.state,), batch)


class Flaw:
    """A step over {"sum": …, "steps": …} that works in place and, while `kind` is set, fails once
    it has begun."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind

    def step(
        self, params: Tensor, state: dict[str, Tensor], batch: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        state["sum"].add_(batch.sum(0))
        state["steps"].add_(1)
        y = batch @ params
        if self.kind == "item":
            y = y * state["sum"].sum().item()
        if self.kind == "branch" and (y > 0).any():
            y = -y
        if self.kind == "own":
            raise KeyError("the user's own error")
        if self.kind == "write":
            params.zero_()
        return state, y


@pytest.mark.parametrize("call", ["call", "capture"])
@pytest.mark.parametrize(
    ("kind", "error"),
    [("item", CaptureError), ("branch", CaptureError), ("write", CaptureError), ("own", KeyError)],
)
def test_a_failed_capture_leaves_the_state_and_the_next_call_works(
    kind: str, error: type[Exception], call: str
) -> None:
    flaw = Flaw(kind)
    params = torch.randn(2, 3)
    batch = torch.randn(4, 2)
    state = {"sum": torch.randn(2), "steps": torch.tensor(7)}
    before = clone((params, state, batch))
    graph = graphify(flaw.step, donate_argnames=["state"])
    with pytest.raises(error):
        (graph if call == "call" else graph.capture)(params, state, batch)
    assert_equal("after a failed capture", (params, state, batch), before)
    assert graph.cache_info() == CacheInfo()

    flaw.kind = None
    expected, expected_y = Flaw(None).step(params, clone(state), batch)
    state, y = graph(params, state, batch)
    assert_equal("after the next call", (state, y), (expected, expected_y))
    assert graph.cache_info() == CacheInfo(captures=1, replays=1, currsize=1)


def test_a_failed_capture_harms_no_graph_captured_before() -> None:
    flaw = Flaw(None)
    params = torch.randn(2, 3)
    state = {"sum": torch.zeros(2), "steps": torch.tensor(0)}
    graph = graphify(flaw.step, donate_argnames=["state"])
    state, _ = graph(params, state, torch.ones(4, 2))
    flaw.kind = "item"
    with pytest.raises(CaptureError):
        graph(params, state, torch.ones(5, 2))
    state, y = graph(params, state, torch.ones(4, 2))
    assert torch.equal(y, torch.ones(4, 2) @ params)
    assert (state["sum"].tolist(), int(state["steps"])) == ([8.0, 8.0], 2)
    assert graph.cache_info() == CacheInfo(captures=1, replays=2, currsize=1)


def two(x: Tensor, y: Any) -> Tensor:
    return x + y


class Opaque:
    def __init__(self, x: Any) -> None:
        self.x = x


@dataclass
class Data:
    x: Tensor


@dataclass(frozen=True, eq=False)
class Frozen:
    x: Tensor


REGISTER = "@weft.pytree above @attrs.frozen instead of @dataclass above Data; or its tensors"
STATIC = (
    "register its class (weft.pytree), pass its tensors, or name it in static_argnames if it never"
    " changes"
)
FOREIGN: dict[str, tuple[Any, str, str]] = {
    "an array": (
        np.ones(2),
        "y is not a tensor and cannot be hashed (<any>)",
        "torch.from_numpy(array)",
    ),
    "a numpy number": (np.float32(3), "y is a float32, <any>", "float(...) or int(...) of it"),
    "a module": (
        nn.Linear(2, 2),
        "y is a Linear, <any>",
        "its parameters, with torch.func.functional_call, <any>",
    ),
    "a mapping": (
        UserDict(x=1),
        "y is not a tensor and cannot be hashed (<any>)",
        "dict(...) of it",
    ),
    "a dataclass": (
        Data(torch.ones(2)),
        "y is not a tensor and cannot be hashed (<any>)",
        REGISTER,
    ),
    "a frozen dataclass": (
        Frozen(torch.ones(2)),
        "y is a Frozen, <any>",
        REGISTER.replace("Data", "Frozen"),
    ),
    "an object": (
        Opaque(1),
        "y is an Opaque, which is neither a tensor, a plain value nor a pytree",
        STATIC,
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_arguments_that_are_no_tensors(case: str) -> None:
    value, problem, instead = FOREIGN[case]
    with refused(CaptureError, "two(...)", problem, instead):
        graphify(two)(torch.ones(2), value)


@pytest.mark.parametrize("value", [torch.ones(2), (torch.ones(2), 1)])
def test_a_static_argument_that_holds_a_tensor(value: Any) -> None:
    instead = "take y out of static_argnames: tensors are read at each call"
    with refused(CaptureError, "two(...)", "y, a static argument, holds a tensor", instead):
        graphify(two, static_argnames="y")(torch.ones(2), value)


def yields(x: Tensor) -> Iterator[Tensor]:
    yield x


async def awaits(x: Tensor) -> Tensor:
    return x


def test_what_is_no_function_of_results() -> None:
    problem = "a function that yields or awaits, so that a call does not run it"
    instead = "a function that returns <any>"
    for fn in (yields, awaits):
        with refused(CaptureError, f"graphify({fn.__name__}, ...)", problem, instead):
            graphify(fn)
    with refused(
        CaptureError, "graphify(3, ...)", "3, which is not a function", "a function over tensors"
    ):
        graphify(3)  # type: ignore[call-overload]


def chooses(x: Tensor) -> Tensor:
    chosen: Tensor = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
    return chosen


def prints(x: Tensor) -> Tensor:
    print(x)
    return x + 1


def returns_an_object(x: Tensor) -> Opaque:
    return Opaque(x + 1)


def test_what_a_function_does_that_a_graph_cannot() -> None:
    x = torch.ones(2)
    problem = "torch.cond chooses a branch, which a graph cannot do" + at(chooses, "torch.cond")
    instead = "torch.where, with both branches computed; or call torch.cond outside the function"
    with refused(CaptureError, "graphify(chooses)", problem, instead):
        graphify(chooses)(x)
    problem = "Tensor.__repr__ reads a tensor on the host" + at(prints, "print(")
    show = "call it inside weft.no_capture(replay=False), where it may print; or "
    with refused(CaptureError, "graphify(prints)", problem, show + REMEDY):
        graphify(prints)(x)
    with weft.no_capture(replay=False):
        assert graphify(prints)(x).tolist() == [2, 2]
    problem = "its result is of class Opaque, which is neither a tensor, a plain value nor a pytree"
    instead = "return the tensors, or make its class a pytree (@weft.pytree above @attrs.frozen)"
    with refused(CaptureError, "graphify(returns_an_object)", problem, instead):
        graphify(returns_an_object)(x)


def test_a_write_to_what_a_function_closes_over() -> None:
    norm = nn.BatchNorm1d(2)
    linear = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss: Tensor = linear(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    instead = (
        "return a new tensor, or pass it in (a module's: weft.stages.from_module) and donate the"
        " argument (donate_argnames=...)"
    )
    before = clone(dict(norm.state_dict()))
    for fn in (train, norm):
        with pytest.raises(CaptureError, match="writes to a tensor from outside it") as error:
            graphify(fn)(torch.ones(3, 2))
        assert error.value.instead == instead
    assert_equal("a refused capture leaves no trace", dict(norm.state_dict()), before)


@pytest.mark.parametrize("most", ["1", -1, True, None])
def test_a_number_of_captures_that_is_none(most: Any) -> None:
    call = f"weft.assert_max_captures({most!r})"
    with (
        refused(CaptureError, call, f"most={most!r}", "an int >= 0"),
        weft.assert_max_captures(most),
    ):
        pass


def test_the_cuda_back_end_without_a_device_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    graph = graphify(Flaw(None).step, donate_argnames=["state"], backend="cuda")
    state = {"sum": torch.ones(2), "steps": torch.tensor(1)}
    problem = "this machine has no CUDA device"
    instead = "move the arguments there, or write backend='tape'"
    with refused(DeviceError, "graphify(..., backend='cuda')", problem, instead):
        graph(torch.ones(2, 3), state, torch.ones(4, 2))
    assert (state["sum"].tolist(), int(state["steps"])) == ([1.0, 1.0], 1)
    assert graph.cache_info() == CacheInfo()
