"""Plain objects: the tensors that they hold, and what a run changes in them, however deep."""

import collections
import functools
import itertools
import random
import types
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weft.values.objects import Snapshot, is_plain_object, places_of_tensors


class Pair(NamedTuple):
    one: Any
    other: Any


@attrs.frozen(slots=True)
class Frozen:
    inner: Any


class Plain:
    shared = 0

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner


class Below(Plain):
    shared = 7


def counter() -> Callable[[], int]:
    count = 0

    def bump() -> int:
        nonlocal count
        count += 1
        return count

    return bump


def module_with(value: Any) -> nn.Module:
    module = nn.Module()
    vars(module)["held"] = value
    return module


def places(value: Any) -> dict[str, Tensor]:
    module = module_with(value)
    tensor_places = places_of_tensors({"": module}, {id(module)})
    return {place.path: tensor for tensor, where in tensor_places for place in where}


HOLDERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an attribute": (Plain, ".inner"),
    "a slot of a frozen class": (Frozen, ".inner"),
    "an item of a list": (lambda x: Plain([0, x]), ".inner[1]"),
    "an item of a deque": (lambda x: Plain(collections.deque([x])), ".inner[0]"),
    "an entry of a dict": (lambda x: Plain({"a": x}), ".inner['a']"),
    "an entry of a dict in an object of the library": (
        lambda x: Plain(collections.UserDict(a=x)),
        ".inner.data['a']",
    ),
    "an element of a tuple": (lambda x: Plain((0, x)), ".inner[1]"),
    "an element of a named tuple": (lambda x: Plain(Pair(0, (x,))), ".inner[1][0]"),
    "a namespace": (lambda x: types.SimpleNamespace(a=x), ".a"),
    "a keyword of a partial function": (
        lambda x: Plain(functools.partial(print, end=x)),
        ".inner.keywords['end']",
    ),
    "the object of a method": (lambda x: Plain(Plain(x).__init__), ".inner.__self__.inner"),  # type: ignore[misc]
}
every_holder = pytest.mark.parametrize("name", HOLDERS)


@every_holder
def test_a_tensor_is_found_in_its_place_however_deep(name: str) -> None:
    make, path = HOLDERS[name]
    tensor = torch.zeros(2)
    assert places(Plain([make(tensor)])) == {f"held.inner[0]{path}": tensor}


@every_holder
@pytest.mark.parametrize("depth", range(3))
def test_a_tensor_is_put_into_its_place_and_taken_from_it(name: str, depth: int) -> None:
    make, _ = HOLDERS[name]
    value: Any = make(torch.zeros(2))
    for _ in range(depth):
        value = make(value)
    module = module_with(value)
    (_, (place,)), *_ = places_of_tensors({"": module}, {id(module)})
    new = torch.ones(2)
    place.put(new)
    assert place.get() is new
    assert list(places(vars(module)["held"]).values()) == [new]


def test_what_is_no_state_is_left_out() -> None:
    tensor = torch.zeros(2)
    assert places(tensor) == {}  # a module's own attribute
    assert places([tensor]) == {}
    assert places(Plain(nn.Parameter(tensor))) == {}
    assert places(Plain(torch.zeros(2, requires_grad=True))) == {}
    assert places(Plain(functools.partial(print, tensor))) == {}  # nothing else can be put there
    assert places(Plain(nn.BatchNorm1d(2))) == {}  # a module that the object holds has its own
    assert list(places(Plain(torch.zeros(2, requires_grad=True) * 2))) == ["held.inner"]


def test_a_tensor_in_two_places_is_one() -> None:
    tensor = torch.zeros(2)
    owner = Plain([tensor])
    owner.again = owner  # type: ignore[attr-defined]
    owner.other = (tensor,)  # type: ignore[attr-defined]
    assert list(places(owner)) == ["held.inner[0]", "held.again.other[0]"]
    module = module_with(owner)
    module.last = tensor
    (_, tensor_places), *rest = places_of_tensors({"": module}, {id(module)})
    assert ("last" in [place.path for place in tensor_places], rest) == (True, [])


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "an attribute": (lambda: Plain(0), lambda x: setattr(x, "inner", 1), "inner"),
    "a new attribute": (lambda: Plain(0), lambda x: setattr(x, "new", 1), "new"),
    "an attribute that goes": (lambda: Plain(0), lambda x: delattr(x, "inner"), "inner"),
    "a slot": (lambda: Frozen([0]), lambda x: object.__setattr__(x, "inner", 2), "inner"),
    "an item": (lambda: Frozen([0]), lambda x: x.inner.__setitem__(0, 0.0), "inner[0]"),
    "a new item": (lambda: Frozen([0]), lambda x: x.inner.append(1), "inner"),
    "an entry": (lambda: Plain({1: True}), lambda x: x.inner.update({1: 1}), "inner[1]"),
    "an entry of an ordered dict": (
        lambda: Plain(collections.OrderedDict(a=1, b=2)),
        lambda x: x.inner.update(a=3),
        "inner['a']",
    ),
    "a tuple": (lambda: Plain((0, "a")), lambda x: setattr(x, "inner", (0, "b")), "inner[1]"),
    "a set": (lambda: Plain({1}), lambda x: x.inner.add(2), "inner"),
    "bytes": (lambda: Plain(bytearray(2)), lambda x: x.inner.__setitem__(0, 1), "inner"),
    "an array": (lambda: Plain(array("i", [0])), lambda x: x.inner.__setitem__(0, 1), "inner"),
    "an array of NumPy": (lambda: Plain(np.zeros(2)), lambda x: x.inner.__iadd__(1), "inner"),
    "the shape of an array of NumPy": (
        lambda: Plain(np.zeros(2)),
        lambda x: setattr(x.inner, "shape", (2, 1)),
        "inner",
    ),
    "a generator": (lambda: Plain(random.Random(0)), lambda x: x.inner.random(), "inner"),
    "a generator of NumPy": (
        lambda: Plain(np.random.default_rng(0)),
        lambda x: x.inner.random(),
        "inner",
    ),
    "an old generator of NumPy": (
        lambda: Plain(np.random.RandomState(0)),
        lambda x: x.inner.rand(),
        "inner",
    ),
    "a nonlocal": (lambda: Plain(counter()), lambda x: x.inner(), "inner.<nonlocal count>"),
    "what a method's object holds": (
        lambda: Plain(Plain(0).__init__),
        lambda x: x.inner.__self__.__init__(1),
        "inner.__self__.inner",
    ),
    "a value of the class": (
        lambda: Plain(),
        lambda x: setattr(Plain, "shared", 1),
        "Plain.shared",
    ),
    "a new value of the class": (lambda: Plain(), lambda x: setattr(Plain, "new", 1), "Plain.new"),
    "a value of a class below which another has its name": (
        lambda: Below(),
        lambda x: setattr(Plain, "shared", 1),
        "Plain.shared",
    ),
    "a buffer of a module that no module has": (
        lambda: Plain(nn.BatchNorm1d(2)),
        lambda x: setattr(x.inner, "running_mean", torch.ones(2)),
        "inner._buffers['running_mean']",
    ),
    "a tensor": (
        lambda: Plain(torch.zeros(1)),
        lambda x: setattr(x, "inner", x.inner + 1),
        "inner",
    ),
    "none yet": (lambda: Plain(), lambda x: setattr(x, "inner", torch.zeros(1)), "inner"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_undone(name: str) -> None:
    make, change, path = CHANGES[name]
    value = make()
    for _ in range(2):
        before = Snapshot({"": value})
        assert list(before.changes()) == []
        change(value)
        assert [difference.path for difference in before.changes()] == [path]
        before.restore()
        assert list(before.changes()) == []


def test_each_of_several_changes_is_named_and_undone() -> None:
    of_one_object = [case for case in CHANGES.values() if not case[2].startswith("Plain.")]
    for (make, change, path), (make_other, change_other, other_path) in itertools.permutations(
        of_one_object, 2
    ):
        twice = make()
        value = Plain((twice, twice, make_other()))
        before = Snapshot({"": value})
        change(twice)
        change_other(value.inner[2])
        assert [difference.path for difference in before.changes()] == [
            f"inner[0].{path}",
            f"inner[2].{other_path}",
        ]
        before.restore()
        assert list(before.changes()) == []


class Lazy(types.ModuleType):
    """A module that imports its parts when they are asked for, as packages have it."""


class Named(Tensor):
    """A tensor with attributes of its own."""


@pytest.mark.parametrize("make", [lambda: Lazy("lazy"), lambda: torch.zeros(2).as_subclass(Named)])
def test_modules_and_tensors_of_any_class_are_not_entered(make: Callable[[], Any]) -> None:
    value = make()
    value.inner = torch.zeros(1)
    assert places(Plain(value)) == {}
    before = Snapshot({"": Plain(value)})
    value.inner = torch.ones(1)
    assert list(before.changes()) == []
    assert not is_plain_object(value)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(x, "inner", [0, {"a": float("nan")}, torch.device("cpu")]),
        lambda x: x.inner[1].update(a=float("nan")),
        lambda x: x.inner.append(x.inner.pop()),
        lambda x: None,
    ],
)
def test_an_equal_value_is_no_change(change: Callable[[Any], Any]) -> None:
    value = Plain([0, {"a": float("nan")}, torch.device("cpu")])
    before = Snapshot({"": value})
    change(value)
    assert list(before.changes()) == []


def test_a_tensor_of_the_state_may_be_replaced() -> None:
    value = Plain((torch.zeros(1), 0))
    before = Snapshot({"": value})
    old = value.inner[0]
    value.inner = (old + 1, 0)
    assert list(before.changes({id(old)})) == []
    assert [change.path for change in before.changes()] == ["inner[0]"]
    value.inner = (None, 0)
    assert [change.path for change in before.changes({id(old)})] == ["inner[0]"]


def test_what_is_said_of_a_change() -> None:
    value = Plain(0)
    before = Snapshot({"": value})
    value.inner = 6
    assert [str(change) for change in before.changes()] == ["changes from 0 to 6 while it runs"]
    value.inner = [1]
    assert [str(change) for change in before.changes()] == ["changes while it runs"]
