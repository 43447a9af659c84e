"""What `shard` refuses, with the texts of the errors, and what stands close to it and is right."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from refusal import refused
from torch import Tensor

import weft
from weft.errors import CaptureError, DerivativeError, MeshError, ProgramError
from weft.transforms.graphs.graphify import graphify

TWO = weft.Mesh(tensor=2)


@pytest.mark.parametrize(
    "draw", [torch.rand_like, lambda x: F.dropout(x, 0.5), lambda x: x.clone().normal_()]
)
def test_random_numbers_would_be_others_on_each_number_of_ranks(
    draw: Callable[[Tensor], Tensor],
) -> None:
    sharded = weft.shard(
        lambda x: weft.all_gather(draw(x), "tensor"), TWO, weft.Shard(0), weft.Replicate()
    )
    problem = "<any>, whose random numbers would be others on each number of ranks"
    with refused(
        CaptureError, "weft.shard(<any>, ...)", problem, "an argument that is drawn outside, <any>"
    ):
        sharded(torch.ones(4))


def test_attention_without_dropout_draws_nothing() -> None:
    q = torch.randn(2, 3, 4, 8)
    attend = weft.shard(
        lambda q: F.scaled_dot_product_attention(q, q, q), TWO, weft.Shard(0), weft.Shard(0)
    )
    torch.testing.assert_close(attend(q), F.scaled_dot_product_attention(q, q, q))
    assert torch.equal(
        weft.shard(lambda x: F.dropout(x, 0.5, training=False), TWO, weft.Shard(0), weft.Shard(0))(
            q
        ),
        q,
    )


CALL = "weft.shard(f, Mesh(tensor=2), ...)"
ONE = torch.ones(4, 3)


def f(x: Any) -> Any:
    """Returns what it gets."""
    return x


@pytest.mark.parametrize(
    ("placed", "args", "call", "problem", "instead"),
    [
        (
            (weft.Shard(0),),
            (ONE, ONE),
            f"{CALL}(...)",
            "in_placements for 1 arguments, and 2 arguments",
            "a placement, or a tree of them, for each argument",
        ),
        (
            {"a": weft.Shard(0)},
            ({"b": ONE},),
            CALL,
            "in_placements[0] of another structure than the values: <any>",
            "the same structure, or one placement for all that is below it",
        ),
        (
            weft.Shard(1),
            (ONE,),
            CALL,
            "Shard(1) of a tensor [4, 3] over 2 ranks along 'tensor'",
            "a dimension that is a multiple of 2: pad it, or Replicate()",
        ),
        (
            (weft.PerRank(),),
            ((ONE, ONE, ONE),),
            CALL,
            "PerRank() of a tuple of 3",
            "a tuple with a tree for each of 2 ranks",
        ),
        (
            (weft.PerRank(),),
            (ONE,),
            CALL,
            "PerRank() of a Tensor",
            "a tuple with a tree for each of 2 ranks",
        ),
        (
            weft.Placements(rows=weft.Shard(0)),
            (ONE,),
            f"{CALL}: in_placements",
            "Placements(rows=Shard(0)), on axis 'rows' of Mesh(tensor=2)",
            "one of tensor",
        ),
    ],
)
def test_placements_that_do_not_fit(
    placed: Any, args: tuple[Any, ...], call: str, problem: str, instead: str
) -> None:
    with refused(MeshError, call, problem, instead):
        weft.shard(f, TWO, placed, weft.Replicate())(*args)


def test_a_term_of_a_sum_that_is_written_in_place_is_refused() -> None:
    def f(state: Tensor, x: Tensor) -> Tensor:
        return state.add_(x.sum(0))

    state = torch.ones(3)
    problem = "Partial() of a tensor [3] that the function writes in place"
    with refused(
        MeshError,
        CALL,
        problem,
        "Replicate(), and all_reduce what is written; or return a new tensor",
    ):
        weft.shard(f, TWO, (weft.Partial(), weft.Shard(0)), weft.Partial())(state, ONE)
    assert state.tolist() == [1, 1, 1]


def test_results_that_do_not_fit() -> None:
    def f(x: Tensor) -> Any:
        return (x,) if weft.axis_index("tensor") else (x, x)

    instead = "the same structure on every rank"
    problem = "results of other structures on other ranks: <any>"
    with refused(MeshError, CALL, problem, instead):
        weft.shard(f, TWO, weft.Replicate(), weft.Replicate())(ONE)
    problem = "out_placements of another structure than the values: <any>"
    with refused(
        MeshError, CALL, problem, "the same structure, or one placement for all that is below it"
    ):
        weft.shard(f, TWO, weft.Replicate(), {"x": weft.Replicate()})(ONE)


def test_ranks_that_disagree_are_refused_before_anything_runs() -> None:
    def f(x: Tensor) -> Tensor:
        x.add_(1)
        return (
            weft.all_reduce(x, "tensor")
            if weft.axis_index("tensor")
            else weft.all_gather(x, "tensor")
        )

    x = torch.zeros(2)
    instead = (
        "the same collectives in the same order on all ranks of a group, with one shape and dtype"
    )
    problem = (
        "rank 0 performs 'all_gather dim 0 among 0, 1 [mb 0]: x[2] float32' where "
        "rank 1 performs 'all_reduce sum among 0, 1 [mb 0]: x[2] float32'"
    )
    with refused(ProgramError, "check of 2 programs", problem, instead):
        weft.shard(f, TWO, weft.Replicate(), weft.Replicate())(x)
    assert x.tolist() == [0, 0]
    waits = "'all_reduce sum among 0, 1 [mb 0]: x[2] float32' waits for rank 0, which is at its end"
    with refused(
        ProgramError, "check of 2 programs", f"no rank can go on: rank 1: {waits}", instead
    ):
        weft.shard(one_sided, TWO, weft.Replicate(), weft.Replicate())(x)


def one_sided(x: Tensor) -> Tensor:
    """A collective that the first rank does not come to."""
    return weft.all_reduce(x, "tensor") if weft.axis_index("tensor") else x


def test_a_function_that_reads_values_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    call = "weft.shard(f, ...)"
    problem = "rank 0 reads the values of a tensor: <any>"
    with refused(CaptureError, call, problem, "torch.where, or a Python argument"):
        weft.shard(f, TWO, weft.Replicate(), weft.Replicate())(ONE)


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: weft.all_reduce(x, "tensor"),
        lambda x: weft.all_gather(x, "tensor", dim=0),
        lambda x: weft.reduce_scatter(x, "tensor", dim=0),
        lambda x: weft.all_to_all(x, "tensor", split_dim=0, concat_dim=0),
        lambda x: weft.ppermute(x, "tensor", [(0, 1)]),
    ],
)
@pytest.mark.parametrize(
    "change", [lambda x: x[x > 1], lambda x: x.unique(), lambda x: x.repeat_interleave(x.long())]
)
def test_a_collective_of_a_shape_that_depends_on_values_is_refused(
    collective: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    sharded = weft.shard(lambda x: collective(change(x)), TWO, weft.Shard(0), weft.PerRank())
    with pytest.raises(CaptureError, match="rank 0 reads the values of a tensor"):
        sharded(torch.arange(4.0))


def test_a_collective_of_a_sparse_tensor_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        return weft.all_reduce(x.to_sparse(), "tensor").to_dense()

    call = "weft.shard(f, ...)"
    problem = "a collective's tensor is torch.sparse_coo, which no rank has a part of"
    with refused(CaptureError, call, problem, "x.to_dense(); or <any>"):
        weft.shard(f, TWO, weft.Shard(0), weft.Replicate())(ONE)


def test_what_is_closed_over_may_be_another_value_at_the_next_call() -> None:
    weight, scale, module = torch.ones(2), 1, torch.nn.Linear(2, 2)

    def f(x: Tensor) -> Tensor:
        return weft.all_reduce(module(x * weight * scale).sum(0), "tensor")

    x, step = torch.ones(4, 2), weft.shard(f, TWO, weft.Shard(0), weft.Replicate())
    graph = graphify(step)
    with torch.no_grad():
        for turn in range(4):
            weight, scale = (weight * 2, scale) if turn == 1 else (weight, scale * 3)
            if turn == 3:
                module.weight = torch.nn.Parameter(module.weight * 2)
            assert torch.allclose(step(x), module(x * weight * scale).sum(0)), turn
            assert torch.equal(graph(x), step(x)), turn


@pytest.mark.parametrize("count", [1, 2])
def test_a_closed_over_tensor_that_each_rank_writes_is_refused(count: int) -> None:
    running_sum = torch.zeros(3)
    norm = torch.nn.BatchNorm1d(3)

    def f(x: Tensor) -> Tensor:
        running_sum.add_(weft.all_reduce(x.sum(0), "tensor"))
        return running_sum * 1

    instead = "an argument, whose new value the function returns"
    mesh = weft.Mesh(tensor=count)
    said = "a tensor [3] that is no argument, and that each rank writes in place"
    with refused(CaptureError, "weft.shard(f, ...)", said, instead):
        weft.shard(f, mesh, weft.Shard(0), weft.Replicate())(ONE)
    assert running_sum.tolist() == [0, 0, 0]
    with refused(
        CaptureError, "weft.shard(<any>, ...)", "a tensor <any> that is no argument, <any>", instead
    ):
        weft.shard(norm, mesh, weft.Shard(0), weft.Replicate())(ONE)
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [0, 0, 0]


class Straight(torch.autograd.Function):
    """Rounds, with the derivative of the identity."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        return grads[0]


def scaled_without_grad(x: Tensor) -> Tensor:
    """Takes its scale for a constant."""
    with torch.no_grad():
        scale = x.exp().sum()
    return x * scale


@pytest.mark.parametrize(("f", "op"), [(Straight.apply, "round"), (scaled_without_grad, "exp")])
def test_what_autograd_would_follow_in_the_trace_alone_is_refused(f: Any, op: str) -> None:
    def wrapped(x: Tensor) -> Tensor:
        result: Tensor = f(x)
        return result

    step = weft.shard(wrapped, TWO, weft.Shard(0), weft.Shard(0))
    x = torch.ones(4)
    assert torch.equal(step(x[:2].repeat(2)), f(x[:2]).repeat(2))
    problem = (
        f"aten.{op}.default under torch.no_grad(), or in an autograd.Function, on a value that has"
        " a gradient"
    )
    with refused(
        DerivativeError,
        "weft.shard(wrapped, ...)",
        problem,
        "value.detach(); or the whole call in torch.no_grad()",
    ):
        step(x.requires_grad_())


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_a_trace_would_lose_is_refused(name: str) -> None:
    def f(x: Tensor) -> Tensor:
        getattr(x if name != "register_hook" else x * 2, name)(lambda grad: None)
        return x

    problem = f"{name} on a tensor [2] inside it, which its trace would lose"
    with refused(
        DerivativeError,
        "weft.shard(f, ...)",
        problem,
        "the hook outside, on an argument or on a result",
    ):
        weft.shard(f, TWO, weft.Shard(0), weft.Shard(0))(torch.ones(4, requires_grad=True))


def test_a_hook_outside_is_kept() -> None:
    grads = list[Tensor]()
    x = torch.ones(4, requires_grad=True)
    y = weft.shard(lambda x: x * 2, TWO, weft.Shard(0), weft.Shard(0))(x)
    y.register_hook(lambda grad: grads.append(grad) or grad * 10)
    y.sum().backward()
    assert x.grad is not None
    assert (len(grads), x.grad.tolist()) == (1, [20] * 4)


def test_detached_values_and_masks_have_no_gradient() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = x > 0
            scale = torch.arange(2.0)
        return weft.all_reduce((x * mask * scale * x.detach()).sum(), "tensor")

    x = torch.tensor([1.0, 2.0, -3.0, 4.0], requires_grad=True)
    weft.shard(f, TWO, weft.Shard(0), weft.Replicate())(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 0, 4]


def test_what_is_no_function_or_no_mesh() -> None:
    with refused(MeshError, "weft.shard(an int, Mesh(tensor=2), ...)", "f is an int", "a function"):
        weft.shard(cast(Any, 3), TWO, weft.Replicate(), weft.Replicate())
    with refused(
        MeshError, "weft.shard(f, 2, ...)", "mesh is an int", "weft.Mesh(tensor=2), or <any>"
    ):
        weft.shard(f, 2, weft.Replicate(), weft.Replicate())
