"""Functions that eager code runs without a thought replay too; a test that fails names what is
still refused or raw."""

import contextlib
import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from graphified import LAW, X, agree, captures
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import weft
from weft.errors import CaptureError, DonatedError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify


def of(fn: Callable[..., Any], *calls: tuple[Any, ...]) -> Any:
    """A function and its calls."""
    return pytest.param(fn, calls)


# What raised errors of torch or Python
# -------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


def adds_an_argument(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(x: Tensor, extra: Tensor) -> Any:
        return fn(x) + extra

    return wrapper


def drops_an_argument(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(x: Tensor) -> Any:
        return fn(x, 3.0)

    return wrapper


def per_sample(w: Tensor, x: Tensor) -> Any:
    return torch.vmap(torch.func.grad(lambda w, x: 0.5 * (w @ x) ** 2), (None, 0))(w, x)


MATRIX = torch.eye(4)
SPARSE, COMPRESSED = MATRIX.to_sparse(), MATRIX.to_sparse_csr()
TIED = Tied().requires_grad_(False)
RECURRENT = {"lstm": nn.LSTM(4, 4).requires_grad_(False), "gru": nn.GRU(4, 4).requires_grad_(False)}
ROWS = torch.rand(3, 4)

REPLAYS = {
    "a scalar under vmap": of(lambda x: torch.vmap(lambda a: a * 2)(x), (X,), (X + 1,)),
    "gradients of samples": of(per_sample, (X, ROWS), (X, ROWS + 1)),
    "inference mode": of(torch.inference_mode()(lambda x: x * 2), (X,), (X + 1,)),
    "a sparse closure": of(lambda x: torch.sparse.mm(SPARSE, x), (X[:, None],), (X[:, None] + 1,)),
    "a compressed closure": of(lambda x: COMPRESSED @ x, (X[:, None],), (X[:, None] + 1,)),
    "tied weights": of(
        lambda params, x: torch.func.functional_call(TIED, params, (x,)),
        (dict(TIED.named_parameters()), X),
        (dict(TIED.named_parameters()), X + 1),
    ),
    "a decorator that adds an argument": of(
        adds_an_argument(lambda x: x * 2), (X, X + 1), (X + 1, X)
    ),
    "a decorator that drops an argument": of(drops_an_argument(lambda x, y: x * y), (X,), (X + 1,)),
    "an argument named self": of(lambda x, self: x + self, (X, X + 1), (X + 1, X)),
    "an LSTM with grad mode on": of(lambda x: RECURRENT["lstm"](x)[0], (ROWS,), (ROWS + 1,)),
    "a GRU with grad mode on": of(lambda x: RECURRENT["gru"](x)[0], (ROWS,), (ROWS + 1,)),
}


@pytest.mark.parametrize(("fn", "calls"), REPLAYS.values(), ids=REPLAYS)
def test_it_replays(fn: Callable[..., Any], calls: tuple[tuple[Any, ...], ...]) -> None:
    assert captures(agree(fn, *calls)) == 1


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a torch without mkldnn")
def test_a_closure_in_the_layout_of_mkldnn() -> None:
    closure = MATRIX.to_mkldnn()
    agree(lambda x: (closure + x.to_mkldnn()).to_dense(), (MATRIX,), (MATRIX + 1,))


def test_an_argument_named_self_by_keyword() -> None:
    g: Any = graphify(lambda x, self: x + self)
    assert torch.equal(g(X, self=X), 2 * X)
    assert "aten::add" in g.lower(X, self=X).as_text()


@weft.pytree
@attrs.frozen(eq=False)
class Private:
    _x: Tensor
    y: Tensor = attrs.field(alias="why")


def test_a_pytree_with_private_and_aliased_fields() -> None:
    g = graphify(lambda p: Private(p._x + 1, why=p.y))
    for x in (X, X + 1):
        result = g(Private(x, why=x * 2))
        assert_equal(LAW, (result._x, result.y), (x + 1, x * 2))


NAMES = ["_plan", "_call", "_lock", "_cache", "_graphable", "_fast_paths", "_replay"]


@pytest.mark.parametrize("name", NAMES)
def test_attributes_of_the_function_do_not_replace_those_of_graphify(name: str) -> None:
    def f(x: Tensor) -> Tensor:
        return x + 1

    setattr(f, name, "mine")
    agree(f, (X,), (X + 1,))


def test_a_refused_backward_leaves_no_gradient() -> None:
    weight = nn.Parameter(torch.ones(4))

    def backward(x: Tensor) -> Tensor:
        with torch.enable_grad():
            (weight * x).sum().backward()
        return x * 2

    with pytest.raises(CaptureError):
        graphify(backward)(X)
    assert weight.grad is None


@pytest.mark.parametrize("run", [1, 2])
def test_an_interrupt_in_a_capture_leaves_torch_as_it_was(run: int) -> None:
    runs: list[int] = []

    def interrupted(x: Tensor) -> Tensor:
        y = x + 1
        runs.append(1)
        if len(runs) == run:
            raise KeyboardInterrupt
        return y

    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        graphify(interrupted)(X)
    assert torch.is_autocast_cache_enabled()
    assert X.tolist() == [0, 1, 2, 3]
    assert torch.equal(torch.get_rng_state(), before)
    agree(lambda x: x + torch.ones(4), (X,), (X + 1,))


# Lifetimes
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result", [lambda params: params[0], lambda params: params.T, lambda params: params * 2]
)
def test_a_graph_does_not_keep_the_params(result: Callable[[Tensor], Tensor]) -> None:
    g = graphify(lambda params: result(params))
    refs = []
    for _ in range(3):
        params = torch.zeros(100, 100)
        refs.append(weakref.ref(params))
        kept = g(params)
        del params
    gc.collect()
    assert [ref() is None for ref in refs] == [True] * 3
    assert kept.untyped_storage().nbytes() <= 40_000


def test_a_static_self_does_not_keep_the_instance() -> None:
    class A:
        @graphify(static_argnames="self")
        def add(self, x: Tensor) -> Tensor:
            return x + 1

    refs = []
    for _ in range(3):
        a = A()
        a.add(X)
        refs.append(weakref.ref(a))
        del a
    gc.collect()
    assert [ref() is None for ref in refs] == [True] * 3


# What was refused
# ----------------------------------------------------------------------------------------------------

PAIRS = torch.rand(2, 4)
COUNTS = torch.tensor([1, 3])
LOGS = torch.randn(5, 2, 4).log_softmax(-1)
TARGETS = torch.ones(2, 3, dtype=torch.long)


def packed(x: Tensor, lengths: Any) -> Tensor:
    sequence = nn.utils.rnn.pack_padded_sequence(x, lengths)
    return nn.utils.rnn.pad_packed_sequence(RECURRENT["lstm"](sequence)[0])[0]


def activated(x: Tensor, act: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
    return act(x)


QUERY = torch.rand(1, 1, 8, 16)
REASONABLE = {
    "as_tensor": of(lambda x: torch.as_tensor(x) + 1, (X,), (X + 1,)),
    "as_tensor of another dtype": of(
        lambda x: torch.as_tensor(x, dtype=torch.float64) + 1, (X,), (X + 1,)
    ),
    "asarray": of(lambda x: torch.asarray(x) + 1, (X,), (X + 1,)),
    "repeat_interleave": of(
        lambda x, n: torch.repeat_interleave(x, n, output_size=4),
        (X[:2], COUNTS),
        (X[:2], COUNTS.flip(0)),
    ),
    "cov": of(lambda x: torch.cov(x), (PAIRS,), (PAIRS + X,)),
    "corrcoef": of(lambda x: torch.corrcoef(x), (PAIRS,), (PAIRS + X,)),
    "packed sequences": of(
        lambda x: packed(x, [3, 2]), (torch.rand(3, 2, 4),), (torch.rand(3, 2, 4),)
    ),
    "a default that is never passed": of(activated, (X - 2,), (X - 1,)),
    "a slice": of(lambda x, s: x[s], (X, slice(1, 3)), (X + 1, slice(1, 3))),
    "an ellipsis": of(lambda x, s: x[s], (X, ...), (X + 1, ...)),
}
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "cov with weights": (
        lambda x, w: torch.cov(x, aweights=w),
        (PAIRS, X + 1),
        "aten.equal.default has a result",
    ),
    "ctc_loss": (
        lambda logs: nn.functional.ctc_loss(logs, TARGETS, (5, 5), (3, 2)),
        (LOGS,),
        "depends on data",
    ),
    "flex_attention": (
        lambda q: flex_attention(q, q, q),
        (QUERY,),
        "flex_attention compiles its functions",
    ),
}


@pytest.mark.parametrize(("fn", "calls"), REASONABLE.values(), ids=REASONABLE)
def test_it_is_not_refused(fn: Callable[..., Any], calls: tuple[tuple[Any, ...], ...]) -> None:
    assert captures(agree(fn, *calls)) == 1


@pytest.mark.parametrize(("fn", "call", "why"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_with_its_reason(
    fn: Callable[..., Any], call: tuple[Any, ...], why: str
) -> None:
    """A CUDA graph cannot hold these either: the host waits for a value, or torch compiles."""
    with pytest.raises(CaptureError, match=why):
        graphify(fn)(*call)


@pytest.mark.parametrize(("fn", "call", "why"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_is_gone_when_it_has_been_handled(
    fn: Callable[..., Any], call: tuple[Any, ...], why: str
) -> None:
    """With its frames, which hold the arguments; it need not wait until Python collects garbage."""
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CaptureError):
            graphify(fn)(*call)
        alive = [x for x in gc.get_objects() if isinstance(x, CaptureError)]
        assert alive == []
    finally:
        gc.enable()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
@pytest.mark.parametrize(
    "fn", [activated, nn.Linear(4, 4).requires_grad_(False)], ids=["function", "module"]
)
def test_a_copy_has_no_graphs_and_makes_its_own(
    fn: Callable[[Tensor], Tensor], way: Callable[[Any], Any]
) -> None:
    g = graphify(fn)
    g(X)
    other = way(g)
    assert torch.equal(other(X - 1), fn(X - 1))
    assert captures(other) == 1


def test_a_pytree_that_can_be_written_to_is_refused() -> None:
    with pytest.raises(weft.errors.WeftError, match=r"attrs\.frozen"):

        @weft.pytree
        @attrs.define(eq=False)
        class Mutable:
            x: Tensor


def test_a_donated_leaf_is_named_by_its_path() -> None:
    g = graphify(lambda state, x: {"h": {"w": state["h"]["w"] + x}}, donate_argnames="state")
    state = {"h": {"w": torch.zeros(4)}}
    g(state, X)
    with pytest.raises(DonatedError, match=r"state\['h'\]\['w'\]"):
        g(state, X)
