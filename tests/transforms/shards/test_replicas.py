"""Results that are placed as `Replicate()` and are not: ranks that differ are named, whatever runs
them."""

from typing import Any

import pytest
import torch
from refusal import refused
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from weft.errors import MeshError
from weft.meshes.replicas import differing
from weft.transforms.graphs.graphify import graphify

TWO = weft.Mesh(tensor=2)
CALL = "weft.shard(forgot, Mesh(tensor=2), ...)"
SEEN = "result is Replicate() along 'tensor', and ranks 0 and 1 have different values"
INSTEAD = "weft.all_reduce(..., 'tensor') in forgot; or as its placement Partial() or Shard(dim)"


def forgot(x: Tensor) -> Tensor:
    """A sum over each rank's rows, without the sum over ranks."""
    return x.sum(0)


RUNS: dict[str, Any] = {
    "a call": lambda step: step,
    "autograd": lambda step: lambda x: step(x.requires_grad_()),
    "no grad": torch.no_grad(),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_forgotten_sum_is_refused(name: str) -> None:
    step = RUNS[name](weft.shard(forgot, TWO, weft.Shard(0), weft.Replicate()))
    with refused(MeshError, CALL, SEEN, INSTEAD):
        step(torch.arange(8.0).view(4, 2))


def test_it_is_refused_at_any_call() -> None:
    """Zeros hide it, and a later call does not."""
    step = weft.shard(forgot, TWO, weft.Shard(0), weft.Replicate())
    assert step(torch.zeros(4, 2)).tolist() == [0, 0]
    with refused(MeshError, CALL, SEEN, INSTEAD):
        step(torch.arange(8.0).view(4, 2))


@pytest.mark.parametrize("placement", [weft.Partial(), weft.Shard(0), weft.PerRank()])
def test_the_placements_that_it_names_are_right(placement: Any) -> None:
    x = torch.arange(8.0).view(4, 2)
    result = weft.shard(forgot, TWO, weft.Shard(0), placement)(x)
    expected = {weft.Partial(): x.sum(0), weft.Shard(0): torch.cat([x[:2].sum(0), x[2:].sum(0)])}
    assert all(map(torch.equal, result, expected.get(placement, (x[:2].sum(0), x[2:].sum(0)))))


def test_the_path_the_axis_and_the_ranks_are_named() -> None:
    def f(x: Tensor) -> Any:
        rank = weft.axis_index("data") * 3 + weft.axis_index("tensor")
        return {"same": x, "of": [x, x + (rank == 2 or rank == 4)]}

    mesh = weft.Mesh(data=2, tensor=3)
    problem = (
        "result['of'][1] is Replicate() along 'tensor', and ranks 0 and 2 have different values"
    )
    placed = weft.Replicate(), {"same": weft.Replicate(), "of": weft.Placements(data=weft.Shard(0))}
    with refused(MeshError, "weft.shard(f, Mesh(data=2, tensor=3), ...)", problem, "<any>"):
        weft.shard(f, mesh, *placed)(torch.ones(2))
    with refused(
        MeshError,
        "<any>",
        "result['of'][1] is Replicate() along 'data', and ranks 1 and 4 <any>",
        "<any>",
    ):
        weft.shard(f, mesh, placed[0], weft.Placements(tensor=weft.Shard(0)))(torch.ones(2))


def test_a_state_that_ranks_write_differently_is_refused() -> None:
    def forgot(state: Tensor, x: Tensor) -> Tensor:
        return state.add_(x.sum(0))

    step = weft.shard(forgot, TWO, (weft.Replicate(), weft.Shard(0)), weft.Replicate())
    with refused(MeshError, CALL, SEEN, INSTEAD):
        step(torch.zeros(2), torch.arange(8.0).view(4, 2))


def test_a_value_that_is_no_tensor_is_the_same_on_all_ranks() -> None:
    def f(x: Tensor) -> Any:
        return x, weft.axis_index("tensor")

    problem = "result[1] is no tensor, and ranks 0 and 1 have different values"
    instead = "<any>or PerRank()<any>"
    with refused(MeshError, "<any>", problem, instead):
        weft.shard(f, TWO, weft.Shard(0), weft.Shard(0))(torch.ones(2))
    assert weft.shard(f, TWO, weft.Shard(0), (weft.Shard(0), weft.PerRank()))(torch.ones(2))[1] == (
        0,
        1,
    )


NAN = torch.tensor([float("nan"), 0.0, 1.0])
SAME: dict[str, tuple[Tensor, Tensor]] = {
    "not a number": (NAN, NAN.clone()),
    "odd bytes": (torch.ones(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)),
    "nothing": (torch.ones(0), torch.ones(0)),
    "a scalar": (torch.tensor(True), torch.tensor(True)),
    "other strides": (torch.ones(2, 3), torch.ones(3, 2).T),
    "an offset": (torch.ones(5)[1:], torch.ones(4)),
    "a conjugate": (
        torch.ones(2, dtype=torch.cfloat).conj(),
        torch.complex(torch.ones(2), -torch.zeros(2)),
    ),
}
OTHER: dict[str, tuple[Any, Any]] = {
    "a bit": (torch.tensor([1.0]), torch.nextafter(torch.tensor([1.0]), torch.tensor([2.0]))),
    "a sign": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "a shape": (torch.ones(2), torch.ones(2, 1)),
    "a dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "a number": (1, True),
}


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_every_bit_counts(name: str) -> None:
    assert differing((SAME | OTHER)[name]) == ([1] if name in OTHER else [])


# Uses that run the function again on other values, or differentiate it: equal zeros now are not
# enough.
LATER: dict[str, Any] = {
    "a graph": graphify,
    "a graph of vmap": lambda step: lambda x: graphify(torch.func.vmap(step))(x[None]),
    "a shard around it": lambda step: weft.shard(
        step, weft.Mesh(outer=1), weft.Replicate(), weft.Replicate()
    ),
    "a trace of torch": lambda step: lambda x: make_fx(step)(x),
    "linearize": lambda step: lambda x: torch.func.linearize(step, x),
    "grad": lambda step: torch.func.grad(lambda x: step(x).sum()),
    "jvp": lambda step: lambda x: torch.func.jvp(step, (x,), (x,)),
    "autograd": lambda step: lambda x: step(x.requires_grad_()),
}


def wrote(x: Tensor) -> Tensor:
    """The same, in place."""
    return x[0].mul(0).add_(x.sum(0))


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("fn", [forgot, wrote])
def test_equal_values_do_not_hide_it(name: str, fn: Any) -> None:
    step = LATER[name](weft.shard(fn, TWO, weft.Shard(0), weft.Replicate()))
    problem = (
        "result is Replicate() along 'tensor', and ranks 0 and 1 do not compute it from the same"
        " values<any>"
    )
    with refused(MeshError, "<any>", problem, "<any>"):
        step(torch.zeros(4, 2))


def test_every_row_of_vmap_is_compared() -> None:
    step = torch.func.vmap(weft.shard(forgot, TWO, weft.Shard(0), weft.Replicate()))
    assert step(torch.zeros(3, 4, 2)).tolist() == [[0, 0]] * 3
    x = torch.zeros(3, 4, 2)
    x[2, 3, 1] = 1
    with refused(MeshError, CALL, SEEN, INSTEAD):
        step(x)


def test_what_all_ranks_compute_alike_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(state: Tensor, x: Tensor) -> Any:
        total = weft.all_gather(weft.all_reduce(x, "data"), "tensor").sum(0)
        state.add_(total)
        return state, total / 2, weft.ppermute(total, "tensor", [(0, 1), (1, 0)])

    monkeypatch.setattr(f"{weft.shard.__module__}.differing", None)
    mesh = weft.Mesh(data=2, tensor=2)
    placed = weft.Replicate(), weft.Placements(data=weft.Shard(0), tensor=weft.Shard(0))
    sharded = weft.shard(f, mesh, placed, weft.Replicate())
    x = torch.arange(8.0).view(4, 2)
    for step in (sharded, graphify(sharded, donate_argnames="state")):
        state, half, sent = step(torch.ones(2), x)
        assert torch.equal(state, 1 + x.sum(0))
        assert torch.equal(half, x.sum(0) / 2)
        assert torch.equal(sent, x.sum(0))
