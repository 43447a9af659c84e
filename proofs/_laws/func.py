"""L15: graphs and the transforms of `torch.func` compose in both orders."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, func, nn

from weft.proofs._strategies.captures.functions import Mapping
from weft.proofs.checks.difference import LawViolation, assert_equal
from weft.transforms.graphs.graphify import graphify

F = Callable[[Tensor, Tensor], Tensor]
Transform = Callable[[F, Tensor, Tensor], Any]


class _Holding(nn.Module):
    """A module with one weight, whose forward pass calls `fn(weight, x)`."""

    def __init__(self, fn: F, weight: Tensor) -> None:
        super().__init__()
        self.fn = fn
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.weight, x)


def _loss(fn: F) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda params, x: fn(params, x).square().sum()


def _stack(x: Tensor) -> Tensor:
    return torch.stack([x, 2 * x, x - 1])


TRANSFORMS: dict[str, Transform] = {
    "vmap": lambda f, p, x: func.vmap(f, in_dims=(None, 0))(p, _stack(x)),
    "vmap of both": lambda f, p, x: func.vmap(f)(_stack(p), _stack(x)),
    "grad": lambda f, p, x: func.grad(_loss(f))(p, x),
    "grad_and_value": lambda f, p, x: func.grad_and_value(_loss(f), argnums=(0, 1))(p, x),
    "jvp": lambda f, p, x: func.jvp(f, (p, x), (p + 1, x * 2)),
    "vjp": lambda f, p, x: func.vjp(f, p, x)[1](torch.ones_like(x)),
    "jacrev": lambda f, p, x: func.jacrev(f)(p, x),
    "functional_call": lambda f, p, x: func.functional_call(
        _Holding(f, p), {"weight": p + 1}, (x,)
    ),
    "gradients of each sample": lambda f, p, x: func.vmap(func.grad(_loss(f)), in_dims=(None, 0))(
        p, _stack(x)
    ),
    # Called within a transform, but only on tensors that the transform does not follow.
    "around a call of its own": lambda f, p, x: func.grad(lambda q: (f(p, x) * q.sum()).sum())(p),
}
"""The transforms of torch.func, by name. Each applies to a function `(params, x) -> y` whose result
has the shape of x."""


def functions_of_graphs_are_functions(mapping: Mapping, transform: str) -> None:
    """L15: torch.func of a graphified function equals torch.func of the function, whether or not
    the graph was captured before, and the graph still replays afterwards."""
    apply = TRANSFORMS[transform]
    fn = mapping.fn
    params = mapping.params
    cold = graphify(fn)
    warm = graphify(fn)
    for x in mapping.inputs:
        expected = apply(fn, params, x)
        assert_equal(f"L15 {transform} of a graph", warm(params, x), fn(params, x))
        for graph in (cold, warm):
            assert_equal(
                f"L15 {transform} of a graph",
                _applied(apply, graph, params, x, transform),
                expected,
            )
        assert_equal(f"L15 {transform} of a graph", warm(params, x), fn(params, x))
    infos = [graph.cache_info() for graph in (cold, warm)]
    # `functional_call` makes plain calls, which may capture.
    if (infos[1].captures, infos[0].currsize) != (1, 0) and transform != "functional_call":
        raise LawViolation(f"L15 {transform} of a graph: it captured inside: {infos}")


def _applied(apply: Transform, graph: Any, params: Tensor, x: Tensor, name: str) -> Any:
    try:
        return apply(graph, params, x)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise LawViolation(
            f"L15 {name} of a graph raises {text}, where the function does not"
        ) from error


def graphs_of_functions_are_functions(mapping: Mapping, transform: str) -> None:
    """L15: torch.func inside a graph equals torch.func outside, with one capture and new values in
    each replay."""
    apply = TRANSFORMS[transform]
    fn = mapping.fn
    params = mapping.params

    def applied(params: Tensor, x: Tensor) -> Any:
        return apply(fn, params, x)

    graph = graphify(applied)
    for x in mapping.inputs:
        assert_equal(f"L15 a graph of {transform}", graph(params, x), applied(params, x))
    info = graph.cache_info()
    if (info.captures, info.replays) != (1, len(mapping.inputs)):
        raise LawViolation(
            f"L15 a graph of {transform}: {info} for {len(mapping.inputs)} inputs of one shape"
        )
