"""graphify under the transforms of torch.func, around them, and under torch's own modes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphified import LAW, X, agree, counts
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jvp, vmap

import weft
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify


def sine(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) * y


FUNC: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
    "vmap": lambda f: vmap(f)(torch.eye(4), torch.ones(4, 4)),
    "vmap of one": lambda f: vmap(f, in_dims=(0, None))(torch.eye(4), X),
    "grad": lambda f: grad(lambda x: f(x, X).sum())(X),
    "grad, argnums": lambda f: grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(X, X),
    "jvp": lambda f: jvp(f, (X, X), (X + 1, X)),
    "hessian": lambda f: hessian(lambda x: f(x, x).sum())(X),
    "per-sample": lambda f: vmap(grad(lambda x, y: f(x, y)))(X, X),
    "unmapped arguments in vmap": lambda f: vmap(lambda a: f(X, X) + a)(torch.eye(4)),
    "unmapped arguments in grad": lambda f: grad(lambda a: (f(X, X) * a).sum())(X),
    "unmapped arguments in jvp": lambda f: jvp(lambda a: f(X, X) * a, (X,), (X,)),
    "closure in grad": lambda f: grad(lambda w: (graphify(lambda x: f(x, w))(X)).sum())(X),
    "closure in vmap": lambda f: vmap(lambda w: graphify(lambda x: f(x, w))(X))(torch.eye(4)),
    "functionalize": lambda f: torch.func.functionalize(f)(X, X),
}


@pytest.mark.parametrize("name", FUNC)
def test_under_an_outer_transform_it_is_the_function(name: str) -> None:
    warm = graphify(sine)
    warm(X, X)
    for g in (graphify(sine), warm):
        assert_equal(LAW, FUNC[name](g), FUNC[name](sine))
    assert_equal(LAW, warm(X + 1, X), sine(X + 1, X))


INNER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "grad_and_value": grad_and_value(lambda w, x: (w * x).pow(2).sum()),
    "jvp": lambda w, x: jvp(lambda v: v**3, (w,), (x,)),
    "vmap": lambda w, x: vmap(lambda r: (r * w).sum())(torch.outer(x, x)),
    "jacrev": lambda w, x: torch.func.jacrev(lambda v: v * x)(w),
    "hessian": lambda w, x: hessian(lambda v: (v**3 * x).sum())(w),
}


@pytest.mark.parametrize("name", INNER)
def test_a_transform_inside_is_captured(name: str) -> None:
    g = agree(INNER[name], (X, X), (X + 1, X - 1), (X, X))
    assert counts(g) == (2, 3, 0)  # one tensor passed twice has a graph of its own


def test_a_training_step_with_autograd_inside() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            (g,) = torch.autograd.grad((w * x).pow(2).sum(), w)
        return w.detach() - 0.1 * g

    agree(step, (X, X), (X + 1, X - 1))


def test_where_autograd_records_the_function_itself_runs() -> None:
    g = graphify(sine)
    w = torch.ones(4, requires_grad=True)
    g(X, w).sum().backward()
    assert_equal(LAW, w.grad, torch.sin(X))
    assert counts(g) == (0, 0, 1)
    with torch.no_grad():
        assert_equal(LAW, g(X, w), torch.sin(X))
    assert counts(g) == (1, 1, 1)
    assert g(X, w).requires_grad
    assert counts(g) == (1, 1, 2)


def test_a_closed_over_parameter_keeps_its_gradient() -> None:
    w = torch.ones(4, requires_grad=True)
    g = graphify(lambda x: x * w)
    for _ in range(2):
        assert g(X).requires_grad
    assert counts(g) == (1, 0, 2)
    assert str(g.explain(X)).startswith(
        "runs inline: it reads w from outside, which requires grad, and autograd"
    )
    with torch.no_grad():
        assert not g(X).requires_grad
        assert str(g.explain(X)).startswith("replays: ")
    assert counts(g) == (2, 1, 2)


def test_a_closed_over_parameter_keeps_its_gradient_beside_a_donated_state() -> None:
    w = torch.ones(4, requires_grad=True)
    g = graphify(lambda s, x: (s * 0.5 + x * w, x), donate_argnames="s")
    state = torch.zeros(4)
    for _ in range(3):
        state, _ = g(state, X)
    state.sum().backward()
    assert_equal(LAW, w.grad, 1.75 * X)
    with weft.no_capture(replay=False):
        assert (
            str(g.explain(torch.zeros(4), X))
            == "runs eagerly: inside weft.no_capture(replay=False)"
        )


def test_forward_mode_duals_keep_their_tangents() -> None:
    forward = torch.autograd.forward_ad
    g = graphify(lambda x: x * 2)
    g(X)
    with forward.dual_level():
        tangent = forward.unpack_dual(g(forward.make_dual(X, torch.ones(4)))).tangent
    assert_equal(LAW, tangent, torch.full((4,), 2.0))


def test_capture_with_arguments_that_require_grad_leaves_later_results_without() -> None:
    g = graphify(lambda x: x)
    w = torch.ones(4, requires_grad=True)
    g.capture(w)
    assert not g(X).requires_grad
    with torch.no_grad():
        assert_equal(LAW, g(w), torch.ones(4))


def test_a_graph_captured_in_inference_mode_serves_outside_and_back() -> None:
    g = graphify(lambda x: x * 2)
    for _ in range(2):
        with torch.inference_mode():
            g(X)
        assert_equal(LAW, g(X), X * 2)


def test_autocast_is_seen() -> None:
    g = graphify(lambda x: x @ x)
    a = torch.eye(2)
    assert g(a).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert g(a).dtype == torch.bfloat16
    assert g(a).dtype == torch.float32


def test_a_fake_call_leaves_the_real_one_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    g = graphify(lambda x: x * 2)
    with FakeTensorMode():
        assert g(torch.ones(3)).shape == (3,)
    assert g(torch.ones(3)).tolist() == [2.0] * 3


def test_make_fx_traces_through_it() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    g = graphify(lambda x: x * 2)
    g(X)
    traced = make_fx(g)(X)
    assert_equal(LAW, traced(X + 1), 2 * X + 2)
    assert [n.name for n in traced.graph.nodes if n.op == "call_function"] == ["mul"]


def test_a_number_that_stands_for_a_tensor_is_one_again() -> None:
    fn = torch.vmap(lambda end: torch.linspace(4, end, 3))
    g = graphify(fn)
    for end in (torch.tensor([2.0, 6.0]), torch.tensor([0.0, 5.0])):
        assert torch.equal(g(end), fn(end))


@pytest.mark.parametrize(
    "fn",
    [
        vmap(lambda x: torch.empty_like(x).copy_(x) + 1),
        vmap(lambda x: x * torch.tensor(2.0)),
        lambda x: jvp(lambda x: x * torch.as_tensor(2.0), (x,), (x,)),
        grad(lambda x: (x * torch.tensor([2.0])).sum()),
    ],
    ids=["empty", "tensor", "as_tensor", "grad"],
)
def test_tensors_made_inside_a_transform_have_no_storage_of_their_own(
    fn: Callable[[Tensor], Any],
) -> None:
    assert_equal(LAW, graphify(fn)(X), fn(X))


def test_a_host_read_inside_a_transform_is_refused() -> None:
    with pytest.raises(weft.errors.CaptureError, match=r"Tensor.item reads a tensor on the host"):
        graphify(lambda x: jvp(lambda x: x * x.sum().item(), (x,), (x,)))(X)
    with pytest.raises(weft.errors.CaptureError, match=r"Tensor.item reads a tensor on the host"):
        graphify(lambda x: jvp(lambda x: x * x.sum().item(), (x,), (x,)))(X)


@pytest.mark.parametrize(
    "name", ["dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "rrelu"]
)
def test_noise_under_a_gradient_draws_what_eager_code_draws(name: str) -> None:
    x = torch.rand(2, 3, 4)
    gradient = grad(lambda x: getattr(torch.nn.functional, name)(x, training=True).sum())
    g = graphify(gradient)
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        expected = gradient(x)
        torch.manual_seed(seed)
        assert torch.equal(g(x), expected)
