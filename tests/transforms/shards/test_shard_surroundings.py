"""What a shard closes over, and what is around its calls: the results are those of the function on
the whole."""

import contextlib
import copy
import functools
import pickle
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from hypothesis import Phase, find, given, settings
from refusal import refused
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import weft
from weft.arguments.checks import kind_of
from weft.errors import CaptureError, DerivativeError, MeshError
from weft.meshes.placements import Placement
from weft.proofs import LawViolation
from weft.proofs._laws.shards import surroundings_of_shards_change_nothing
from weft.proofs._strategies import surrounded
from weft.proofs._strategies.shards import RankResults, rank_results
from weft.proofs._strategies.surrounded import SurroundedShard
from weft.torchapi.private import innermost, is_fake
from weft.transforms.graphs.graphify import graphify
from weft.transforms.shards import tracing
from weft.transforms.shards.local import _Rank
from weft.transforms.shards.shard import Sharded
from weft.transforms.shards.tracing import trace

TWO = weft.Mesh(tensor=2)
ROWS, WHOLE = weft.Shard(0), weft.Replicate()
X = torch.arange(4.0)


def by_rows(f: Callable[[Tensor], Tensor]) -> Sharded:
    """The function on two ranks that share the rows."""
    return weft.shard(f, TWO, ROWS, ROWS)


def weighted(weight: Any) -> Tensor:
    """A sum over both ranks, of a function that closes over its weight."""
    step = weft.shard(lambda x: weft.all_reduce((x * weight).sum(), "tensor"), TWO, ROWS, WHOLE)
    result: Tensor = step(X)
    return result


def gradient(f: Callable[[Tensor], Tensor], x: Tensor = X) -> list[float]:
    """By autograd."""
    leaf = x.clone().requires_grad_()
    f(leaf).sum().backward()
    assert leaf.grad is not None
    return list(leaf.grad.tolist())


DERIVATIVES: dict[str, tuple[Callable[[], Tensor], list[float] | float]] = {
    "grad": (lambda: func.grad(weighted)(torch.tensor(2.0)), 6),
    "jvp": (lambda: func.jvp(weighted, (torch.tensor(2.0),), (torch.tensor(1.0),))[1], 6),
    "vmap": (lambda: func.vmap(weighted)(torch.arange(3.0)), [0, 6, 12]),
    "hessian": (lambda: func.hessian(lambda w: weighted(w) ** 2)(torch.tensor(2.0)), 72),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_what_it_closes_over(name: str) -> None:
    derive, expected = DERIVATIVES[name]
    assert derive().tolist() == expected


def test_a_dual_tensor_that_it_closes_over() -> None:
    with forward_ad.dual_level():
        weight = forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0))
        tangent = forward_ad.unpack_dual(weighted(weight)).tangent
    assert tangent is not None
    assert tangent.item() == 6


def test_parameters_of_a_module_that_it_closes_over_are_trained() -> None:
    module = torch.nn.Linear(3, 3)
    step = by_rows(lambda x: torch.tanh(module(x)))
    x = torch.randn(4, 3)
    gradients = []
    for f in (step, lambda x: torch.tanh(module(x)), step):
        module.zero_grad()
        f(x).square().sum().backward()
        assert module.weight.grad is not None
        gradients.append(module.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[2], gradients[1])


@pytest.mark.parametrize("called_before", [False, True])
def test_functional_call_replaces_what_it_closes_over(called_before: bool) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)
            self.step = by_rows(self.inner)

        def inner(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x))

        def forward(self, x: Tensor) -> Any:
            return self.step(x)

    net, x = Net(), torch.randn(4, 3)
    if called_before:
        net(x)
    params = {name: value.detach() for name, value in net.named_parameters()}
    grads = func.grad(lambda weights: func.functional_call(net, weights, (x,)).square().sum())(
        params
    )
    for name, value in net.named_parameters():
        expected = torch.autograd.grad(torch.tanh(net.linear(x)).square().sum(), value)[0]
        torch.testing.assert_close(grads[name], expected)


def test_a_trace_is_kept_as_long_as_it_finds_what_it_closes_over() -> None:
    params: dict[str, Any] = {"inner": {"weight": torch.tensor(2.0)}}
    step = by_rows(lambda x: x * params["inner"]["weight"])
    with mock.patch.object(tracing, "_last_uses", wraps=tracing._last_uses) as traced:
        for _ in range(3):
            assert step(X).tolist() == [0, 2, 4, 6]
        assert traced.call_count == 2  # one for each rank
        params["inner"] = {"weight": torch.tensor(3.0)}
        assert step(X).tolist() == [0, 3, 6, 9]
        assert traced.call_count == 4


@pytest.mark.parametrize("name", surrounded.HOLDERS)
def test_a_weight_in_any_place_may_be_another_one(name: str) -> None:
    read, write = surrounded.HOLDERS[name]()
    step = by_rows(lambda x: x * read())
    for value in (2.0, 2.0, 3.0):
        write(torch.tensor(value))
        assert step(X).tolist() == (X * value).tolist()
    assert func.grad(lambda w: (write(w), step(X).sum())[1])(torch.tensor(1.0)).item() == 6
    write(torch.tensor(4.0))
    assert step(X).tolist() == (X * 4).tolist()


class _Slots:
    __slots__ = ("number",)


class _Scale(torch.nn.Module):
    number = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


def _numbers() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[float], Any]]]:
    """For each place of a number outside a function: the function that multiplies by it, and what
    writes it."""
    space, slots, listed, nested = types.SimpleNamespace(), _Slots(), [0.0], {"a": [{"b": 0.0}]}
    module, parts = _Scale(), torch.nn.Sequential(torch.nn.Identity(), _Scale())
    several: set[float] = set()
    partial = functools.partial(lambda x, by: x * by["n"], by={"n": 0.0})
    dropout = torch.nn.Dropout(1.0)
    return {
        "an attribute": (lambda x: x * space.number, lambda n: setattr(space, "number", n)),
        "a slot": (lambda x: x * slots.number, lambda n: setattr(slots, "number", n)),
        "a list": (lambda x: x * listed[0], lambda n: listed.__setitem__(0, n)),
        "a dict in a list in a dict": (
            lambda x: x * nested["a"][0]["b"],
            lambda n: nested["a"].__setitem__(0, {"b": n}),
        ),
        "a set": (lambda x: x * max(several), several.add),
        "a module": (lambda x: module(x), lambda n: setattr(module, "number", n)),
        "a part of a module": (lambda x: parts(x), lambda n: setattr(parts[1], "number", n)),
        "an argument of a partial": (partial, lambda n: partial.keywords["by"].__setitem__("n", n)),
        "whether a module trains": (
            lambda x: dropout(x) if not dropout.training else x * 3,
            lambda n: dropout.train(n > 2),
        ),
    }


@pytest.mark.parametrize("name", _numbers())
def test_a_number_in_any_place_may_be_another_one(name: str) -> None:
    fn, write = _numbers()[name]
    step = by_rows(fn)
    for value in (2.0, 2.0, 3.0, 0.0, 5.0):
        write(value)
        assert torch.equal(step(X), fn(X))
        assert torch.equal(graphify(step)(X), fn(X))


def test_a_number_that_it_changes_itself_is_refused() -> None:
    space = types.SimpleNamespace(parts=[types.SimpleNamespace(n=0)])

    def count(x: Tensor) -> Tensor:
        space.parts[0].n += 1
        return x * space.parts[0].n

    problem = (
        "space.parts[0].n changes from 1 to 2 while it runs, and a replay does not repeat that"
    )
    with refused(
        CaptureError,
        "weft.shard(count, Mesh(tensor=2), ...)",
        problem,
        "a tensor in its place<any>",
    ):
        by_rows(count)(X)
    assert space.parts[0].n == 0


def test_what_its_first_run_puts_into_a_cache_is_kept() -> None:
    kept = types.SimpleNamespace(scale=None)

    def cached(x: Tensor) -> Tensor:
        if kept.scale is None:
            kept.scale = 3.0
        return x * kept.scale

    assert torch.equal(by_rows(cached)(X), X * 3)


def test_a_function_that_names_too_much_is_traced_in_each_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.transforms.shards.surroundings._MOST_VALUES", 3)
    many = [1.0, 2.0, 3.0, 4.0]
    step = by_rows(lambda x: x * many[3])
    for value in (4.0, 5.0):
        many[3] = value
        assert torch.equal(step(X), X * value)
    assert not step._traces


def test_a_trace_leaves_torch_no_object_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, torch's own fake tensors replace the process's guard of devices by an object
    of the thread, which torch 2.11 reads after the thread's end."""
    monkeypatch.setattr(
        "torch._C._ensureCUDADeviceGuardSet", lambda: pytest.fail("an object of this thread")
    )
    assert torch.equal(by_rows(lambda x: x * 2)(X), X * 2)


def test_an_argument_of_a_partial_is_found() -> None:
    step = weft.shard(functools.partial(torch.mul, torch.tensor(2.0)), TWO, ROWS, ROWS)
    for _ in range(2):
        assert step(X).tolist() == [0, 2, 4, 6]
    assert len(step._traces) == 1


def test_what_is_made_anew_in_each_call_is_read_anew() -> None:
    import numpy as np

    values = np.array([1.0, 2.0], dtype=np.float32)
    step = by_rows(lambda x: x * torch.from_numpy(values))
    assert step(torch.ones(4)).tolist() == [1, 2, 1, 2]
    values = np.array([3.0, 4.0], dtype=np.float32)
    assert step(torch.ones(4)).tolist() == [3, 4, 3, 4]


SCALE = torch.tensor(3.0)


def jvp_by_ones(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: func.jvp(f, (x,), (torch.ones_like(x),))[1]


DETACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda x: x * x.detach(),
    "detach_": lambda x: x * (x * 3).detach_(),
    "data": lambda x: x * x.data,
    "a result that autograd saves": lambda x: torch.tanh(x) * x.detach(),
    "inside a derivative": lambda x: func.grad(lambda y: (torch.tanh(y) * y.detach()).sum())(x),
    "inside vmap": lambda x: torch.vmap(lambda y: torch.tanh(y) * y.detach())(x),
    "inside jvp": lambda x: jvp_by_ones(lambda y: torch.tanh(y) * y)(x),
    "inside jvp twice": lambda x: jvp_by_ones(jvp_by_ones(lambda y: torch.tanh(y) * y * 2))(x),
    "inside jvp twice, of a product": lambda x: (
        jvp_by_ones(jvp_by_ones(lambda y: y * SCALE))(x) + x
    ),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", DETACHED)
def test_a_detached_value_has_no_gradient_and_all_others_have(name: str) -> None:
    f = DETACHED[name]
    assert gradient(by_rows(f)) == pytest.approx(gradient(f))
    inner = weft.shard(f, weft.Mesh(inner=2), ROWS, ROWS)
    assert gradient(by_rows(inner)) == pytest.approx(gradient(f))


OF_ONE_LEVEL: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda x: x * x.detach(),
    "detach_": lambda x: x * (x * 3).detach_(),
    "data": lambda x: x * x.data,
    "data of data": lambda x: x * x.data.data,
    "data of a result": lambda x: x * (x * x).data,
    "detach_ inside": lambda x: func.grad(lambda y: (y.tanh() * (y * 3).detach_()).sum())(x),
    "data inside": lambda x: func.grad(lambda y: (y.tanh() * y.data).sum())(x),
    "data of what is around": lambda x: func.grad(lambda y: (y.tanh() * x.data).sum())(x),
}


@pytest.mark.parametrize("name", OF_ONE_LEVEL)
def test_a_detached_value_has_the_derivatives_that_torch_gives_it(name: str) -> None:
    """`x.data` and `x.detach_()` drop those of the innermost transform, `x.detach()` all of them."""
    f = OF_ONE_LEVEL[name]

    def derivatives(step: Callable[[Tensor], Tensor]) -> list[Tensor]:
        first = func.grad(lambda x: step(x).square().sum())
        return [first(X), func.grad(lambda x: first(x).sum())(X)]

    torch.testing.assert_close(derivatives(by_rows(f)), derivatives(f))


AROUND: dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]] = {
    "vjp": lambda step: func.vjp(step, X)[1](torch.ones_like(X))[0],
    "jvp": lambda step: func.jvp(step, (X,), (torch.ones_like(X),))[1],
    "vmap": lambda step: func.vmap(step)(torch.stack([X, X + 1])),
    "jvp in a graph": lambda step: weft.graphify(
        lambda x: func.jvp(step, (x,), (torch.ones_like(x),))[1]
    )(X),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_tangent_of_a_product_with_a_constant_is_traced_without_its_shapes(around: str) -> None:
    """For the zero tangent of the constant, torch asks for shapes by operators on `meta`."""
    weight = torch.arange(1.0, 3.0)

    def tangent(x: Tensor) -> Tensor:
        pairs = x.view(-1, 2)
        slope: Tensor = func.jvp(lambda y: y * weight * y, (pairs,), (torch.ones_like(pairs),))[1]
        return slope.flatten()

    torch.testing.assert_close(AROUND[around](by_rows(tangent)), AROUND[around](tangent))


def test_planted_bugs_of_traces_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would notice each of these."""
    with monkeypatch.context() as planted:
        planted.setattr(tracing, "_erase_shapes_alone", lambda graph, results: None)
        with pytest.raises(RuntimeError, match="setup_context"):
            test_a_tangent_of_a_product_with_a_constant_is_traced_without_its_shapes("vjp")
    with monkeypatch.context() as planted:
        planted.delitem(tracing._OF_ONE_LEVEL, torch.ops.aten.detach_.default)
        with pytest.raises(AssertionError):
            test_a_detached_value_has_no_gradient_and_all_others_have("detach_")


def test_what_a_collective_makes_may_be_written_where_only_a_constant_has_a_gradient() -> None:
    weight = torch.tensor([2.0, 3.0, 4.0, 5.0], requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return weft.all_gather(x, "tensor").add_(1) * weight

    weft.shard(step, TWO, ROWS, WHOLE)(X).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 2, 3, 4]


def test_a_detached_argument_is_not_the_argument() -> None:
    x = X.clone().requires_grad_()
    assert not by_rows(lambda x: x.detach())(x).requires_grad
    assert by_rows(lambda x: x)(x) is x


def test_a_state_without_gradient_may_be_written_beside_what_has_one() -> None:
    def f(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return state.add_(1), x * x

    state, x = torch.zeros(4), X.clone().requires_grad_()
    written, y = weft.shard(f, TWO, (ROWS, ROWS), (ROWS, ROWS))(state, x)
    y.sum().backward()
    assert written is state
    assert state.tolist() == [1] * 4
    assert x.grad is not None
    assert x.grad.tolist() == (2 * X).tolist()


def test_checkpoint_and_hooks_at_the_first_call() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.tanh(x) * x

    for reentrant in (False, True):
        checkpointed = functools.partial(checkpoint, by_rows(f), use_reentrant=reentrant)
        assert gradient(checkpointed) == gradient(f)
    packed = list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        by_rows(torch.tanh)(X.clone().requires_grad_())
    assert [x.tolist() for x in packed] == [X[:2].tanh().tolist(), X[2:].tanh().tolist()]


def test_the_default_device_is_that_of_each_call() -> None:
    step = by_rows(lambda x: torch.zeros(2))
    with torch.device("meta"):
        assert step(X).device.type == "meta"
    assert step(X).device.type == "cpu"


def test_autocast_that_is_off_inside_is_off() -> None:
    def exact(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ x.t()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert by_rows(exact)(torch.ones(4, 2)).dtype == torch.float32
        assert by_rows(lambda x: x @ x.t())(torch.ones(4, 2)).dtype == torch.bfloat16


def test_first_calls_in_threads() -> None:
    errors, start = list[BaseException](), threading.Barrier(4)

    def run(step: Sharded) -> None:
        start.wait()
        try:
            assert step(X).tolist() == (X.tanh() * 2).tolist()
        except BaseException as error:
            errors.append(error)

    shared = by_rows(lambda x: torch.tanh(x) * 2)
    for turn in range(6):
        steps = [shared if turn % 2 else by_rows(lambda x: torch.tanh(x) * 2) for _ in range(4)]
        threads = [threading.Thread(target=run, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


COPIES: dict[str, Callable[[Sharded], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda step: pickle.loads(pickle.dumps(step)),
    "torch.compile": lambda step: torch.compile(step, backend="eager"),
    "inside torch.compile": lambda step: torch.compile(lambda x: step(x), backend="eager"),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_and_compiled_ones_are_the_same_function(name: str) -> None:
    step = by_rows(torch.sin)
    for _ in range(2):  # before its first call, and after it
        assert torch.equal(COPIES[name](step)(X), X.sin())
        assert torch.equal(step(X), X.sin())


@pytest.mark.parametrize("count", [1, 2])
def test_a_collective_of_a_constant(count: int) -> None:
    def mean(x: Tensor) -> Tensor:
        return weft.all_reduce(x.sum(), "tensor") / weft.all_reduce(
            torch.tensor(float(len(x))), "tensor"
        )

    assert weft.shard(mean, weft.Mesh(tensor=count), ROWS, WHOLE)(X).item() == 1.5


def test_a_trace_in_a_capture_is_that_of_a_plain_call() -> None:
    def loop(x: Tensor) -> Tensor:
        return weft.while_loop(lambda c: c.sum() < 50, lambda c: 2 * c, x, max_steps=10)

    x = torch.arange(1.0, 9.0)
    expected = by_rows(loop)(x)
    for name in ("lower", "__call__"):
        step = by_rows(loop)
        getattr(weft.graphify(step), name)(x)
        assert torch.equal(step(x), expected)
        assert torch.equal(weft.graphify(step)(x), expected)


class Named(torch.Tensor):
    """A tensor of a class of its own."""


def test_a_subclass_of_tensor_is_refused() -> None:
    instead = "pass plain tensors: those that it wraps, or x.as_subclass(torch.Tensor)"
    problem = "args[0]['x'] is a Named, a subclass of Tensor, which may redefine any operator"
    step = weft.shard(lambda tree: tree["x"] * 2, TWO, ROWS, ROWS)
    with refused(CaptureError, "weft.shard(<any>, Mesh(tensor=2), ...)", problem, instead):
        step({"x": X.as_subclass(Named)})
    assert step({"x": torch.nn.Parameter(X)}).tolist() == [0, 2, 4, 6]
    weight = torch.ones(2).as_subclass(Named)
    problem = (
        "a tensor that it closes over is a Named, a subclass of Tensor, which may redefine any"
        " operator"
    )
    with refused(CaptureError, "weft.shard(<any>, ...)", problem, instead):
        by_rows(lambda x: x * weight)(X)
    problem = "rank 0 makes a tensor of a subclass of Tensor, which may redefine any operator"
    with refused(
        CaptureError,
        "weft.shard(<any>, ...)",
        problem,
        "plain tensors inside, and the subclass around it",
    ):
        by_rows(lambda x: (x.as_subclass(Named) * 2).as_subclass(torch.Tensor))(X)


WEIGHT = torch.tensor([3.0, 4.0])
READERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x * WEIGHT[0].item(),
    "tolist": lambda x: x * WEIGHT.tolist()[0],
    "numpy": lambda x: x * float(WEIGHT.numpy()[0]),
    "bool": lambda x: x if WEIGHT[0] > 2 else -x,
}


@pytest.mark.parametrize("name", READERS)
def test_values_of_what_it_closes_over_are_not_frozen(name: str) -> None:
    problem = "rank 0 reads the values of a tensor<any>"
    with refused(
        CaptureError, "weft.shard(<any>, ...)", problem, "torch.where, or a Python argument"
    ):
        by_rows(READERS[name])(X)


def test_writes_that_no_operator_makes_are_refused() -> None:
    def f(x: Tensor) -> Tensor:
        x.data = x * 2
        return x

    problem = "x.data = ... on a tensor [2], which its trace would lose"
    instead = "x.copy_(...) on an argument; or a new tensor that it returns"
    with refused(CaptureError, "weft.shard(f, ...)", problem, instead):
        by_rows(f)(X)


def test_a_transform_inside_of_what_it_closes_over_is_refused() -> None:
    weight = torch.tensor(2.0)

    def derivative(x: Tensor) -> Tensor:
        return func.grad(lambda w: (x * w**2).sum())(weight) * x

    def of_a_copy(x: Tensor) -> Tensor:
        return func.grad(lambda w: (x * w**2).sum())(weight * 1) * x

    problem = "a transform of torch.func inside it, of a tensor [] that it closes over"
    instead = "the tensor as an argument of f; or x * 1 for x in that call"
    with refused(CaptureError, "weft.shard(derivative, ...)", problem, instead):
        by_rows(derivative)(X)
    assert by_rows(of_a_copy)(X).tolist() == [0, 4, 40, 60]


def uneven(x: Tensor) -> Any:
    """Fewer rows on the second rank."""
    return x[: 2 - weft.axis_index("tensor")]


def mixed(x: Tensor) -> Any:
    """Another dtype on the second rank."""
    return x.double() if weft.axis_index("tensor") else x


def partly(x: Tensor) -> Any:
    """No tensor on the second rank."""
    return 1 if weft.axis_index("tensor") else x


KINDS = {
    uneven: "[2] float32 on 'cpu' on rank 0 and [1] float32 on 'cpu' on rank 1",
    mixed: "[2] float32 on 'cpu' on rank 0 and [2] float64 on 'cpu' on rank 1",
    partly: "[2] float32 on 'cpu' on rank 0 and no tensor on rank 1",
}


@pytest.mark.parametrize("placement", [ROWS, WHOLE, weft.Partial()])
@pytest.mark.parametrize("f", KINDS)
def test_results_of_other_kinds_are_refused(f: Any, placement: Any) -> None:
    problem = f"result, placed as {placement}, is {KINDS[f]}"
    instead = "the same shape and dtype on every rank: pad it, convert it; or PerRank()"
    with refused(MeshError, f"weft.shard({f.__name__}, Mesh(tensor=2), ...)", problem, instead):
        weft.shard(f, TWO, ROWS, placement)(X)
    assert len(weft.shard(f, TWO, ROWS, weft.PerRank())(X)) == 2


def test_sizes_that_depend_on_values_are_compared_in_each_call() -> None:
    step = by_rows(lambda x: x[x > 0])
    assert step(X + 1).tolist() == [1, 2, 3, 4]
    with refused(
        MeshError,
        "<any>",
        "result, placed as Shard(0), is [1] float32 on 'cpu' on rank 0 <any>",
        "<any>",
    ):
        step(X)


def test_a_scalar_is_no_shard() -> None:
    problem = "result['sum'] [] is Shard(0) along 'tensor', and has no dimension 0"
    instead = (
        "weft.all_reduce(..., 'tensor') and Replicate(); Partial(); or x.reshape(1) for a part each"
    )
    step = weft.shard(lambda x: {"sum": x.sum()}, TWO, ROWS, ROWS)
    with refused(MeshError, "weft.shard(<any>, Mesh(tensor=2), ...)", problem, instead):
        step(X)


def test_a_result_may_be_another_argument_on_each_rank() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return y if weft.axis_index("tensor") else x

    assert weft.shard(f, TWO, (ROWS, ROWS), ROWS)(X, X + 10).tolist() == [0, 1, 12, 13]


def test_a_result_that_is_an_argument_on_one_rank_alone_is_compared_in_each_call() -> None:
    def f(x: Tensor) -> Tensor:
        return x * x if weft.axis_index("tensor") else x

    step = weft.shard(f, TWO, WHOLE, WHOLE)
    assert step(torch.ones(2)).tolist() == [1, 1]
    with refused(
        MeshError, "<any>", "result is Replicate() along 'tensor', and ranks 0 and 1 <any>", "<any>"
    ):
        step(torch.full((2,), 3.0))


def test_replicas_are_found_beside_results_of_other_structures() -> None:
    def f(x: Tensor) -> Any:
        rank = weft.axis_index("tensor")
        return [x] * (rank + 1), x * (rank + 1)

    placed = (weft.PerRank(), WHOLE)
    with refused(
        MeshError,
        "<any>",
        "result[1] is Replicate() along 'tensor', and ranks 0 and 1 <any>",
        "<any>",
    ):
        weft.shard(f, TWO, ROWS, placed)(torch.ones(4))


@pytest.mark.parametrize("placement", [ROWS, WHOLE, weft.Partial(), weft.PerRank()])
def test_a_value_that_is_no_tensor_on_a_mesh_of_one_rank(placement: Any) -> None:
    step = weft.shard(lambda x: (x, 3), weft.Mesh(tensor=1), ROWS, (ROWS, placement))
    expected = (3,) if placement == weft.PerRank() else 3
    assert step(X)[1] == expected


# `find` gives the first case that it draws, and does not make it smaller.
FIRST = settings(max_examples=2000, database=None, phases=[Phase.generate])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*surrounded.STEPS, *surrounded.COLLECTIVE_STEPS])
def test_every_step_is_drawn(name: str) -> None:
    case = find(surrounded.surrounded_shards(), lambda case: name in case.code, settings=FIRST)
    assert name in case.code


@pytest.mark.slow
@pytest.mark.parametrize("first", surrounded.FIRST_CALLS)
def test_every_first_call_is_drawn(first: str) -> None:
    case = find(surrounded.surrounded_shards(), lambda case: case.first == first, settings=FIRST)
    assert case.first == first


# Planted bugs
# ---------------------------------------------------------------------------------------------------------

_SHARD = "weft.transforms.shards.shard"
_TRACING = "weft.transforms.shards.tracing"
_blank = tracing._blank
_run = _Rank._run


def blank_of_no_constant(like: Tensor) -> Tensor:
    """A constant is the same on all ranks."""
    return like if is_fake(like) else _blank(like)


def one_at_a_time() -> Callable[..., Any]:
    """A trace that changes what all threads share."""
    is_under_way = threading.Lock()

    def alone(*args: Any, **options: Any) -> Any:
        if not is_under_way.acquire(blocking=False):
            raise RuntimeError("another trace is under way")
        try:
            return trace(*args, **options)
        finally:
            is_under_way.release()

    return alone


def read_without_rows(self: _Rank, node: Any) -> Any:
    """What is closed over is read without the wrappers of transforms."""
    value = _run(self, node)
    return innermost(value) if node.op == "get_attr" else value


def with_its_traces(self: Sharded) -> dict[str, Any]:
    return {**vars(self)}


def case_of(
    *code: str, first: str = "a plain call", later: str = "a plain call"
) -> SurroundedShard:
    return SurroundedShard(
        code, num_ranks=2, holder="an entry of a dict", first=first, later=(later,), rows=2
    )


# Bugs, each with a case of the strategy that shows it.
PLANTED: dict[str, tuple[Callable[[], AbstractContextManager[Any]], SurroundedShard]] = {
    "what is closed over has no rows": (
        lambda: mock.patch.object(_Rank, "_run", read_without_rows),
        case_of("closed over", later="vmap of what is closed over"),
    ),
    "what is detached in place has a gradient": (
        lambda: mock.patch.dict(tracing._OF_ONE_LEVEL, clear=True),
        case_of("detach in place", later="backward"),
    ),
    "a trace has the default device of none": (
        lambda: mock.patch(f"{_TRACING}.default_device", return_value=None),
        case_of("made inside", first="on another default device"),
    ),
    "a trace is found by any default device": (
        lambda: mock.patch(f"{_SHARD}.default_device", return_value=None),
        case_of("made inside", first="on another default device"),
    ),
    "a copy has the traces": (
        lambda: mock.patch.object(Sharded, "__getstate__", with_its_traces),
        case_of("tanh", first="of a copy of a called one"),
    ),
    "threads trace one at a time": (
        lambda: mock.patch(f"{_SHARD}.trace", one_at_a_time()),
        case_of("a meeting of threads", first="in threads"),
    ),
    "the sum of a constant is the constant": (
        lambda: mock.patch(f"{_TRACING}._blank", blank_of_no_constant),
        case_of("less the mean"),
    ),
    "a checkpoint sees the trace": (
        lambda: mock.patch(f"{_TRACING}.without_saved_tensors_hooks", contextlib.nullcontext),
        case_of("tanh", first="in checkpoint"),
    ),
    "a listing keeps its loop": (
        lambda: mock.patch(f"{_TRACING}.looping", contextlib.nullcontext),
        case_of("a loop", first="after lower"),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_show_in_drawn_surroundings(name: str) -> None:
    plant, case = PLANTED[name]
    surroundings_of_shards_change_nothing(case)
    with plant(), pytest.raises(LawViolation):
        surroundings_of_shards_change_nothing(case)
    surroundings_of_shards_change_nothing(case)


@pytest.mark.slow
def test_a_call_that_torch_compiles_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other code is not marked as what the compiler passes over: it looks into the call, and finds
    that."""
    code = Sharded.__call__.__code__.replace(co_name="compiled")
    looked = list[str]()

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        looked.append(module.code)
        return module

    def compiled() -> int:
        torch.compiler.reset()
        looked.clear()
        try:
            torch.compile(by_rows(torch.sin), backend=backend)(X)
        except Exception as error:  # by another line in each torch
            looked.append(str(error))
        return len(looked)

    assert compiled() == 0
    monkeypatch.setattr(Sharded, "__call__", types.FunctionType(code, Sharded.__call__.__globals__))
    assert compiled() > 0


# Results of each rank
# -------------------------------------------------------------------------------------------------


def check_results(case: RankResults) -> None:
    """The result is that of its placement's definition, or a MeshError where that has none."""
    expected = case.expected()
    if expected is None:
        with pytest.raises(MeshError):
            case.sharded()
        return
    torch.testing.assert_close(case.sharded(), expected, rtol=0, atol=0)


@given(rank_results())
@settings(max_examples=60, deadline=None)
def test_results_of_any_shapes_are_placed_or_refused(case: RankResults) -> None:
    check_results(case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*get_args(Placement), weft.PerRank])
def test_every_placement_of_a_result_is_drawn(kind: type) -> None:
    find(rank_results(), lambda case: isinstance(case.placement, kind) and case.parts[0].ndim == 0)


@pytest.mark.parametrize("check", ["_refuse_missing", "refuse_unlike"])
def test_planted_results_without_a_check_are_found(
    check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"weft.transforms.shards.results.{check}", lambda *_: None)

    def differs(case: RankResults) -> bool:
        try:
            check_results(case)
        except (
            BaseException
        ):  # a raw error of torch, or pytest's own, for a call that does not raise
            return True
        return False

    broken = find(
        rank_results(), differs, settings=settings(database=None, phases=[Phase.generate])
    )
    monkeypatch.undo()
    check_results(broken)


class Ruled(torch.autograd.Function):
    """Its own rules give other values than its operators, so that it shows whose are taken."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        return tangent * 100

    @staticmethod
    def vmap(_: Any, in_dims: Any, x: Tensor) -> Any:
        return x * 10, in_dims[0]


AROUND_RULES: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "jvp": lambda step: func.jvp(step, (X,), (torch.ones_like(X),))[1],
    "jacfwd": lambda step: func.jacfwd(step)(X),
    "vmap": lambda step: torch.vmap(step)(X[None]),
    "vmap in a graph": lambda step: weft.graphify(torch.vmap(step))(X[None]),
}


@pytest.mark.parametrize("name", AROUND_RULES)
def test_a_function_with_rules_of_its_own_is_refused_under_them(name: str) -> None:
    problem = (
        "the autograd.Function Ruled under a transform of torch.func, which would lose its rule"
    )
    step = by_rows(lambda x: Ruled.apply(x))
    assert step(X).tolist() == X.tolist()
    with refused(
        DerivativeError, "weft.shard(<any>, ...)", problem, "the transform inside the shard: <any>"
    ):
        AROUND_RULES[name](step)


def test_a_function_with_rules_of_its_own_keeps_them_inside() -> None:
    step = weft.shard(torch.vmap(lambda x: Ruled.apply(x)), TWO, ROWS, ROWS)
    assert step(X[:, None]).tolist() == (10 * X[:, None]).tolist()


BACKWARDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "of what it closes over": lambda x, weight: (weight * x).sum().backward(),
    "by torch.autograd": lambda x, weight: torch.autograd.backward((weight * x).sum()),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward_inside_is_refused(name: str) -> None:
    weight = torch.ones(2, requires_grad=True)
    problem = "backward() inside it, whose gradient of a tensor [2] its trace would lose"
    with refused(
        DerivativeError, "weft.shard(<any>, ...)", problem, "torch.autograd.grad inside it; <any>"
    ):
        by_rows(lambda x: (BACKWARDS[name](x, weight), x * 1)[1])(X)
    assert weight.grad is None
    slope = by_rows(lambda x: torch.autograd.grad((weight * x).sum(), weight)[0])
    assert slope(X).tolist() == X.tolist()


def test_backward_of_an_argument_inside_is_refused() -> None:
    leaf = X.clone().requires_grad_()
    with pytest.raises(DerivativeError, match=r"backward\(\) inside it"):
        by_rows(lambda x: ((x * x).sum().backward(), x * 1)[1])(leaf)


def swallows(x: Tensor) -> Tensor:
    try:
        scale = float(x.max())
    except Exception:
        scale = 1.0
    return x / scale


HIDDEN_READS: dict[str, Callable[[Tensor], Any]] = {
    "an error that it swallows": swallows,
    "the type of a number": lambda x: x if isinstance(x.sum().item(), float) else -x,
    "a bool by identity": lambda x: x if (x.sum() > 0).item() is True else -x,
    "text": lambda x: x if "1." in str(x) else -x,
    "formatted text": lambda x: x if "1." in f"{x}" else -x,
    "a formatted number": lambda x: x if f"{x.sum().item():.1f}" else -x,
    "a result that is a number": lambda x: (x, x[0].item()),
    "a result that is a list": lambda x: (x, x.tolist()),
    "a result that is a size": lambda x: (x, x.nonzero().shape[0]),
}


@pytest.mark.parametrize("name", HIDDEN_READS)
def test_a_hidden_read_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="reads the values of a tensor"):
        by_rows(HIDDEN_READS[name])(X)


def test_constants_may_be_read() -> None:
    step = by_rows(lambda x: x * torch.tensor(3.0).item() if float(torch.tensor(2.0)) == 2 else x)
    assert step(X).tolist() == (3 * X).tolist()


@pytest.mark.parametrize("holder", ["an argument", "closed over"])
def test_a_sparse_tensor_is_refused(holder: str) -> None:
    sparse = torch.eye(2).to_sparse()
    name = "args[0]" if holder == "an argument" else "a tensor that it closes over"
    problem = f"{name} is torch.sparse_coo, which no rank has a part of"
    with refused(CaptureError, "weft.shard(<any>, <any>...)", problem, "x.to_dense(); <any>"):
        if holder == "an argument":
            weft.shard(lambda s: s.to_dense(), TWO, weft.Replicate(), weft.Replicate())(sparse)
        else:
            by_rows(lambda x: (sparse.to_dense() @ x[:, None])[:, 0])(X)


class Scale:
    """An object that may change."""

    factor = 2.0


@pytest.mark.parametrize(
    "value", [Scale(), torch.nn.Dropout(), {1, 2}, bytearray(b"a"), len], ids=kind_of
)
def test_an_object_that_may_change_is_no_argument(value: Any) -> None:
    """A trace would keep what it was at the first call."""
    problem = (
        f"args[1]['own'] is {kind_of(value)}, which is neither a tensor, a plain value nor a pytree"
    )
    with refused(CaptureError, "weft.shard(<any>, <any>...)", problem, "<any>"):
        weft.shard(lambda x, tree: x, TWO, ROWS, weft.Replicate())(X, {"own": value})


@pytest.mark.parametrize(
    "value", [2, 2.0, "sum", None, torch.float32, slice(1), (1, "a")], ids=repr
)
def test_a_plain_value_is_an_argument(value: Any) -> None:
    step = weft.shard(
        lambda x, argument: x * 2 if argument == value else x, TWO, (ROWS, weft.Replicate()), ROWS
    )
    assert step(X, value).tolist() == (X * 2).tolist()
