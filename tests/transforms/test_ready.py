"""The fast path of a graphified call: taken by calls like an earlier one, and by no others."""

import collections
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from weft.batch import Batch
from weft.descriptor import BatchDescriptor
from weft.errors import CaptureError, DonatedError
from weft.outputs import Output
from weft.proofs.laws import assert_equal
from weft.state import State
from weft.transforms import graphify as _face
from weft.transforms.graphify import Graphified, graphify
from weft.transforms.ready import MAX_ALIKE, MAX_READERS
from weft.trees import axes, pytree, static

LAW = "graphify changes nothing"
X = torch.arange(4.0)
assert _face is graphify


@contextmanager
def general_calls(g: Graphified[..., Any]) -> Iterator[list[Any]]:
    """The calls that took the general path while the context was open."""
    seen: list[Any] = []
    general = g._call

    def counted(args: Any, kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return general(args, kwargs)

    g._call = counted  # type: ignore[method-assign]
    yield seen
    del g._call


@pytree
@attrs.frozen(eq=False)
class Node:
    x: Tensor
    rest: Any
    tag: Any = attrs.field(default=1, metadata=static())


Point = collections.namedtuple("Point", "a b")

TREES: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: X.clone(),
    "a parameter": lambda: torch.nn.Parameter(X.clone(), requires_grad=False),
    "nested": lambda: {"a": [X + 1, (X + 2, {})], "b": None, 3: (), "c": [X.int()]},
    "attrs": lambda: Node(X + 1, {"n": Node(X + 2, [2.5, True, "s"], (1, 2.0))}, "tag"),
    "a named tuple": lambda: Point(X + 1, [X + 2]),
    "values": lambda: (1, 1.5, None, "text", torch.float32, X + 1),
    "0-dim and empty": lambda: [torch.tensor(2.0), torch.empty(0, 3)],
    "strided": lambda: torch.arange(8.0)[::2],
    "many dtypes": lambda: [X + 1, X.int(), X.double(), X.bool(), X.int() + 1, X + 2],
    "a batch": lambda: Batch.decode([1, 2, 3]),
}


def doubled(tree: Any, by: Any = 2) -> Any:
    """A result of the argument's own structure."""
    return torch.utils._pytree.tree_map(lambda t: t * by if isinstance(t, Tensor) else t, tree), by


@pytest.mark.parametrize("outputs", ["safe", "borrow"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("role", ["copied", "by reference", "donated"])
def test_a_second_call_is_fast_and_says_the_same(tree: str, role: str, outputs: Any) -> None:
    names = {"by reference": {"reference_argnames": "tree"}, "donated": {"donate_argnames": "tree"}}.get(role, {})
    g: Graphified[..., Any] = graphify(doubled, outputs=outputs, **names)
    value = TREES[tree]()
    for turn in range(3):
        wanted = doubled(value)
        with general_calls(g) as general:
            seen = g(value)
        assert_equal(LAW, seen, wanted)
        if turn != 1:  # the second state may be of other types than the first
            assert len(general) == (turn == 0)
        if role == "donated":
            with pytest.raises(DonatedError):
                g(value)
            value = seen[0]
        elif role == "copied":
            value = TREES[tree]()


def test_a_node_that_generated_code_does_not_know_is_right_all_the_same() -> None:
    g = graphify(doubled)
    for i in range(3):
        value = collections.OrderedDict(a=X + i, b=X)
        assert_equal(LAW, g(value), doubled(value))


@pytest.mark.parametrize("by_reference", ["", "a b"])
def test_one_tensor_in_two_places(by_reference: str) -> None:
    """As tied weights are; in each order of such calls and others."""
    g = graphify(lambda a, b: (a + b, a - b), reference_argnames=by_reference.split())
    values = [X.clone(), X + 1]
    for turn in range(2):
        for a, b in [*itertools.product(values, repeat=2), *itertools.product(values[::-1], repeat=2)]:
            with general_calls(g) as general:
                assert_equal(LAW, g(a, b), (a + b, a - b))
            assert not (general and turn)


FORMS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((X,), {}), ((X, X + 1), {}), ((X, X + 1, X + 2), {}), ((X,), {"c": 3.0}), ((X,), {"b": X + 5}),
    ((X,), {"a": X + 7}), ((X,), {"z": X + 1, "a": X + 2}), ((X,), {"a": X + 2, "z": X + 1}),
    ((X,), {"c": 2.5, "b": X + 1}),
]  # fmt: skip


def test_calls_of_every_form_twice() -> None:
    default = torch.ones(4)

    def mixed(a: Tensor, /, b: Tensor = default, *rest: Tensor, c: float = 2.0, **more: Tensor) -> Tensor:
        return a + 10 * b + 100 * sum(rest, torch.zeros(4)) + c * 1000 + 5 * more.get("a", X) + more.get("z", X)

    g = graphify(mixed)
    for args, kwargs in FORMS:
        g(*args, **kwargs)
    default.mul_(3)
    with general_calls(g) as general:
        for args, kwargs in FORMS:
            assert_equal(LAW, g(*args, **kwargs), mixed(*args, **kwargs))
    assert general == []


# What it must not overlook -------------------------------------------------------------------------------------------

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
    a = torch.eye(2)
    fn: Callable[[Tensor], Any] = lambda a: (a @ a, a + torch.ones(2), torch.full((2,), 1.5))  # noqa: E731
    g = graphify(fn)
    for first, second in itertools.product(SURROUNDINGS, repeat=2):
        for name in (first, second, first):
            with SURROUNDINGS[name]():
                assert_equal(f"{LAW}: {first}, then {second}", g(a), fn(a))


def test_a_call_that_autograd_records_is_not_replayed() -> None:
    g, w = graphify(lambda x: x * 2), torch.ones(4, requires_grad=True)
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
    0.0, -0.0, 0, False, None, "0", (0,), (0.0,), (False,), [0], [0.0], {"x": 0}, Point(0, 1), (0, 1), 1, True, 1.0,
    torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]).imag,
    torch.tensor([1 + 2j]).conj().imag,
    X, X.double(), X.int(), X[:2], X[::2], X[:, None], torch.nn.Parameter(X.clone(), requires_grad=False),
    X.expand(2, 4), Node(X, None, 1), Node(X, None, True), Node(X, None, 1.0), Node(X, 1, 1), torch.empty(0),
]  # fmt: skip


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
    state, dead = torch.zeros(4), torch.zeros(4)
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
    state = State.zeros(num_layers=1, num_kv_heads=1, head_dim=2, max_num_reqs=2, num_pages=2, max_pages=1)
    for turn in range(4):
        old = state
        with general_calls(g) as general:
            state = g(state, torch.tensor(1))
        assert len(general) == (turn == 0)
        with pytest.raises(DonatedError, match=r"State\.positions\n  saw: this State was donated to step\(state\)"):
            _ = old.positions
    assert state.positions.tolist() == [4, 4, 4]


def test_a_value_that_cannot_be_hashed_is_named_on_the_fast_path() -> None:
    g = graphify(lambda x, how: x + 1, static_argnames=("how",))
    g(X, (1, 2))
    with pytest.raises(CaptureError, match="how is no tensor and cannot be hashed"):
        g(X, (1, [2]))


def test_another_address_by_reference_is_a_miss() -> None:
    g = graphify(lambda params, x: params["w"] * x)
    several = [{"w": torch.full((4,), float(i))} for i in range(4)]
    for params in several * 3:
        assert_equal(LAW, g(params, X), params["w"] * X)
    assert g.cache_info().captures == 4


def test_more_structures_and_more_kin_than_are_kept_are_right_all_the_same() -> None:
    g = graphify(doubled)
    for _ in range(2):
        for n in range(MAX_READERS + 3):
            assert_equal(LAW, g([X] * n), doubled([X] * n))
        for n in range(1, MAX_ALIKE + 4):  # of one shape, and of as many strides
            x = torch.arange(4.0 * n)[::n]
            assert_equal(LAW, g(x), doubled(x))


def test_cleared_it_captures_again() -> None:
    g = graphify(lambda x: x * 2)
    for _ in range(2):
        g(X)
    g.cache_clear()
    assert_equal(LAW, g(X), X * 2)
    assert g.cache_info().captures == 1


# Borrowed results ----------------------------------------------------------------------------------------------------


def test_a_borrowed_result_is_overwritten_by_the_next_replay() -> None:
    g = graphify(lambda x: x * 2, outputs="borrow")
    first = g(X)
    assert_equal(LAW, first, X * 2)
    second = g(X + 1)
    assert first.data_ptr() == second.data_ptr()
    assert_equal("overwritten", first, (X + 1) * 2)


def test_a_borrowed_tensor_object_is_the_callers_own() -> None:
    g = graphify(lambda x: x[None] * 2, outputs="borrow")
    g(X).t_()
    assert g(X).shape == (1, 4)
    step = graphify(lambda s: s + 1, donate_argnames=("s",))
    for _ in range(2):
        assert_equal(LAW, step(g(X)), X[None] * 2 + 1)


def test_a_borrowed_result_in_inference_mode() -> None:
    g = graphify(lambda x: x * 2, outputs="borrow")
    with torch.inference_mode():
        for turn in range(3):
            with general_calls(g) as general:
                seen = g(X)
            assert_equal(LAW, seen, X * 2)
            assert seen.is_inference()
            assert len(general) == (turn == 0)
    assert not g(X).is_inference()


def test_an_input_buffer_is_never_lent() -> None:
    g = graphify(lambda a, b: (a, b, a + b), outputs="borrow")
    a, b, _ = g(X, X + 1)
    for _ in range(2):
        a, b, both = g(b, a)
    assert_equal(LAW, (a, b, both), (X, X + 1, X + X + 1))


def test_outputs_of_another_kind_are_refused() -> None:
    with pytest.raises(CaptureError) as error:
        graphify(doubled, outputs="safely")  # type: ignore[call-overload]
    assert (error.value.seen, error.value.instead) == ("outputs='safely'", "outputs='safe' or 'borrow'")


# Padding -------------------------------------------------------------------------------------------------------------


@pytree
@attrs.frozen(eq=False)
class Sized:
    descriptor: BatchDescriptor = attrs.field(metadata={"weft.static": True, "weft.descriptor": True})
    ids: Tensor = attrs.field(metadata=axes("num_tokens", pad=-1))
    starts: Tensor = attrs.field(metadata=axes("num_reqs+1", pad="last"))
    table: Tensor = attrs.field(metadata=axes("num_reqs", "num_tokens", pad=7))
    wide: Tensor = attrs.field(metadata=axes(None, "num_tokens", pad=2.5))


def sized(tokens: int, reqs: int, seed: int) -> Sized:
    torch.manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(tokens,), (reqs + 1,), (reqs, tokens), (3, tokens)]
    kinds = (torch.int64, torch.int32, torch.int64, torch.float32)
    values = [torch.randint(10, 99, shape).to(kind) for shape, kind in zip(shapes, kinds, strict=True)]
    return Sized(BatchDescriptor(tokens, reqs), *values)


@pytest.mark.parametrize("blank_bytes", [2**20, -1])
def test_nothing_of_an_earlier_batch_is_left_in_a_buffer(blank_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of each padded buffer, as the graph sees it, is what padding says, in any order of sizes."""
    from weft.padding import pad

    monkeypatch.setattr("weft.transforms.buffers.BLANK_BYTES", blank_bytes)
    rung = BatchDescriptor(6, 4)
    g = graphify(lambda b: Output(b.starts[1:] * 1, b.starts[1:] * 1.0), ladder=[rung])
    sizes = [(6, 4), (2, 1), (5, 3), (1, 1), (2, 1), (6, 4), (3, 3), (0, 0), (5, 3)]
    for turn, (tokens, reqs) in enumerate(sizes * 2):
        batch = sized(tokens, reqs, turn)
        g(batch)
        (entry,) = g._graphs.memo.values()
        wanted = pad(batch, rung)
        buffers = [x for x in entry.buffers if isinstance(x, Tensor)]
        assert_equal("a buffer is padded", buffers, [wanted.ids, wanted.starts, wanted.table, wanted.wide])
    assert g.cache_info().captures == 1
