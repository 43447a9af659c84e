"""Differences between calls that the fast path must notice."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import pytest
import torch
from graphified import LAW, Node, Point, X, doubled, general_calls
from torch import Tensor

from weft.batches.state import State
from weft.errors import CaptureError, DonatedError
from weft.proofs import assert_equal
from weft.transforms.graphs.calls import fast_path
from weft.transforms.graphs.graphify import graphify

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to another dtype": lambda: torch.autocast("cpu", torch.float16),
    "a default device": lambda: torch.device("cpu"),
    "default dtype": lambda: _default_dtype(torch.float64),
    "nothing": nullcontext,
}


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def test_what_holds_around_a_call() -> None:
    def fn(a: Tensor) -> Any:
        return a @ a, a + torch.ones(2), torch.full((2,), 1.5)

    a, g = torch.eye(2), graphify(fn)
    for first, second in itertools.product(SURROUNDINGS, repeat=2):
        for name in (first, second, first):
            with SURROUNDINGS[name]():
                assert_equal(f"{LAW}: {first}, then {second}", g(a), fn(a))


HELD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tensor": (lambda x: x, lambda w: w),
    "a dict": (lambda x: {"x": x, "y": torch.ones(2)}, lambda w: w["x"]),
    "a frozen class": (lambda x: Node(x, torch.ones(2)), lambda w: w.x),
}


@pytest.mark.parametrize("name", HELD)
def test_attributes_of_what_is_captured_by_reference(name: str) -> None:
    make, take = HELD[name]
    x = torch.ones(2)
    weights = make(x)

    def fn(w: Any, y: Tensor) -> Tensor:
        return y * getattr(take(w), "scale", 5.0) + getattr(take(w), "shift", 0)

    g = graphify(fn, reference_argnames="w")
    changes: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "one is set": lambda: setattr(x, "scale", 1.5),
        "to another value": lambda: setattr(x, "scale", 2.0),
        "to an equal one": lambda: setattr(x, "scale", float("2")),
        "a second one": lambda: setattr(x, "shift", -1),
        "to one that == takes for it": lambda: (setattr(x, "shift", True), setattr(x, "scale", 1)),
        "the first is gone": lambda: delattr(x, "scale"),
        "both": lambda: delattr(x, "shift"),
        "the first value again": lambda: setattr(x, "scale", float("1.5")),
    }
    for what, change in changes.items():
        change()
        for size in (2, 2, 3):
            assert_equal(
                f"{LAW}: {what}", g(weights, torch.ones(size)), fn(weights, torch.ones(size))
            )
    # Two sizes each; three changes lead to what was there before
    assert g.cache_info().captures == 12


def test_an_attribute_that_moves_from_one_tensor_to_another() -> None:
    w = Node(torch.ones(2), torch.ones(2))

    def fn(w: Node, y: Tensor) -> Tensor:
        return y * getattr(w.x, "scale", 3.0) + getattr(w.rest, "scale", 4.0)

    g = graphify(fn, reference_argnames="w")
    for one, other in ((w.x, w.rest), (w.rest, w.x), (w.x, w.rest)):
        vars(one)["scale"] = True
        vars(other).pop("scale", None)
        for _ in range(2):
            assert_equal(LAW, g(w, torch.ones(2)), fn(w, torch.ones(2)))
    assert g.cache_info().captures == 2


def test_a_call_that_autograd_records_is_not_replayed() -> None:
    g = graphify(lambda x: x * 2)
    w = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        g(w)
        g(w)
    assert g(w).requires_grad
    assert not g(w.detach()).requires_grad
    w.requires_grad_(False)
    assert not g(w).requires_grad
    w.requires_grad_(True)
    assert g(w).requires_grad


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "transposed in place": lambda x: x.t_(),
    "resized": lambda x: x.resize_(3, 2),
    "a view's shape": lambda x: x.unsqueeze_(0),
    "other data": lambda x: setattr(x, "data", torch.arange(6.0).view(3, 2).t() + 5),
    "other dtype": lambda x: setattr(x, "data", torch.arange(6).view(2, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("role", ["copied", "by reference"])
def test_a_tensor_that_changed_under_its_name(change: str, role: str) -> None:
    g = graphify(lambda x: x * 2 + x.shape[0], reference_argnames="x" if role != "copied" else ())
    x = torch.arange(6.0).view(2, 3).clone()
    for _ in range(2):
        g(x)
    CHANGES[change](x)
    for _ in range(2):
        assert_equal(LAW, g(x), x * 2 + x.shape[0])


ALIKE: list[Any] = [
    0.0,
    -0.0,
    0,
    False,
    None,
    "0",
    (0,),
    (0.0,),
    (False,),
    [0],
    [0.0],
    {"x": 0},
    Point(0, 1),
    (0, 1),
    1,
    True,
    1.0,
    torch.tensor([1 + 2j]),
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([1 - 2j]).imag,
    torch.tensor([1 + 2j]).conj().imag,
    X,
    X.double(),
    X.int(),
    X[:2],
    X[::2],
    X[:, None],
    torch.nn.Parameter(X.clone(), requires_grad=False),
    X.expand(2, 4),
    Node(X, None, 1),
    Node(X, None, True),
    Node(X, None, 1.0),
    Node(X, 1, 1),
    torch.empty(0),
]


def test_arguments_that_are_almost_alike_one_after_the_other() -> None:
    def fn(x: Any) -> Any:
        kind = "a tensor" if isinstance(x, Tensor) else repr((type(x), getattr(x, "tag", x)))
        return kind, doubled(x)

    g = graphify(fn)
    for _ in range(2):
        for value in ALIKE:
            assert_equal(LAW, g(value), fn(value))


def test_a_donated_tensor_is_refused_on_the_fast_path() -> None:
    g = graphify(lambda s, x: s + x, donate_argnames=("s",))
    state = torch.zeros(4)
    dead = torch.zeros(4)
    for _ in range(3):
        state = g(state, X)
    g(dead, X)
    for args in ((dead, X), (state, dead)):
        with pytest.raises(DonatedError, match="donated to <lambda>"):
            g(*args)
    assert state.tolist() == (3 * X).tolist()


def test_a_donated_state_object_is_emptied_on_the_fast_path() -> None:
    def step(state: State, by: Tensor) -> State:
        return attrs.evolve(state, positions=state.positions + by)

    g = graphify(step, donate_argnames=("state",))
    state = State.zeros(
        num_layers=1, num_kv_heads=1, head_dim=2, max_num_reqs=2, num_pages=2, max_pages=1
    )
    for turn in range(4):
        old = state
        with general_calls(g) as general:
            state = g(state, torch.tensor(1))
        assert len(general) == (turn == 0)
        with pytest.raises(
            DonatedError, match=r"State\.positions\n  saw: this State was donated to step\(state\)"
        ):
            _ = old.positions
    assert state.positions.tolist() == [4, 4, 4]


def test_a_value_that_cannot_be_hashed_is_named_on_the_fast_path() -> None:
    g = graphify(lambda x, how: x + 1, static_argnames=("how",))
    g(X, (1, 2))
    with pytest.raises(CaptureError, match="how is not a tensor and cannot be hashed"):
        g(X, (1, [2]))


def test_another_address_by_reference_is_a_miss() -> None:
    g = graphify(lambda params, x: params["w"] * x)
    several = [{"w": torch.full((4,), float(i))} for i in range(4)]
    for params in several * 3:
        assert_equal(LAW, g(params, X), params["w"] * X)
    assert g.cache_info().captures == 4


def test_more_structures_and_more_kin_than_are_kept_are_right_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast_path, "MAX_FAST_PATHS", 16)
    g = graphify(doubled)
    for _ in range(2):
        for n in range(16 + 3):
            assert_equal(LAW, g([X] * n), doubled([X] * n))
        for n in range(1, fast_path.MAX_PER_KEY + 4):  # of the same shape, with as many strides
            x = torch.arange(4.0 * n)[::n]
            assert_equal(LAW, g(x), doubled(x))
