"""Collectives between the ranks of a mesh, as functions and operators: `all_reduce`, `all_gather`,
`reduce_scatter`, `all_to_all`, `ppermute`. They run inside a function that `weft.shard` calls, once
on each rank.

The operator `weft::collective` takes the effect as text, so that a listing of a program shows it. A
`Member`, this rank's part in the group, executes it. Operators cannot take objects, so a number
stands for the member (`weft.ops.transfers.transfer`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol

import attrs
import torch
from torch import Tensor

from weft.arguments.checks import is_int, kind_of
from weft.effects import parse_effect
from weft.errors import DerivativeError, MeshError
from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    ReduceScatter,
    combine,
    mistake_in_pairs,
)
from weft.meshes.mesh import Mesh, coordinates_of, group_of
from weft.meshes.placements import REDUCTIONS
from weft.ops.register import define
from weft.ops.transfers.transfer import find
from weft.torchapi.private import in_functorch_transform


class Member(Protocol):
    """A rank that takes part in collectives with other ranks."""

    def perform(self, effect: Collective, x: Tensor, /) -> Tensor:
        """This rank's result of a collective, in new memory."""


@attrs.frozen
class Place:
    """The rank on which a function runs.

    Args:
        mesh: the mesh of ranks.
        rank: this rank.
        number: the number of its `Member` (`weft.ops.transfers.transfer.register`); -1 in a trace,
            which executes nothing.
        differentiated: whether the trace will be differentiated.
    """

    mesh: Mesh
    rank: int
    number: int = -1
    differentiated: bool = False


_PLACE: ContextVar[Place | None] = ContextVar("weft.place", default=None)


@contextmanager
def placed(place: Place) -> Iterator[None]:
    """A context whose code runs on a rank of a mesh."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


# The rank on which the current function runs; None outside a mesh. A captured call depends on it.
current_place: Callable[[], Place | None] = _PLACE.get


def others_wait() -> bool:
    """Whether other ranks take part in this rank's collectives, and would wait for any that it
    skips."""
    place = current_place()
    return place is not None and place.mesh.num_ranks > 1


def all_reduce(x: Tensor, axis: str, *, reduce_op: str = "sum") -> Tensor:
    """The sum of the tensors of all ranks along an axis of the mesh, on each of them, like JAX's
    `psum`.

    Args:
        x: a tensor of the same shape and dtype on all ranks. The sum is computed in that dtype, or
            in float32 for 16-bit values, as a balanced tree over the ranks in their order: `(x0 +
            x1) + (x2 + x3)`.
        axis: an axis of the mesh.
        reduce_op: `sum`, `max` or `min`.

    Raises:
        MeshError: outside a function that `weft.shard` runs, or the mesh has no such axis.

    >>> import torch, weft
    >>> f = weft.shard(lambda x: all_reduce(x, "tensor"), weft.Mesh(tensor=2), weft.Shard(0), weft.Replicate())
    >>> f(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([4., 6.])
    """
    place = _find_place(f"all_reduce(x, {axis!r})", axis, x, reduce_op)
    return _call(place, x, AllReduce(group_of(place.mesh, place.rank, axis), reduce_op=reduce_op))


def all_gather(x: Tensor, axis: str, *, dim: int = 0) -> Tensor:
    """The tensors of all ranks along an axis, concatenated along `dim` in the order of the ranks,
    on each of them.

    >>> import torch, weft
    >>> f = weft.shard(lambda x: all_gather(x, "tensor"), weft.Mesh(tensor=2), weft.Shard(0), weft.Replicate())
    >>> f(torch.arange(4))
    tensor([0, 1, 2, 3])
    """
    place = _find_place(f"all_gather(x, {axis!r}, dim={dim})", axis, x, dims=(dim,))
    return _call(place, x, AllGather(group_of(place.mesh, place.rank, axis), dim=dim))


def reduce_scatter(x: Tensor, axis: str, *, dim: int = 0, reduce_op: str = "sum") -> Tensor:
    """This rank's part, along `dim`, of the sum of the tensors of all ranks along an axis, like
    JAX's `psum_scatter`.

    Args:
        x, axis, reduce_op: as in `all_reduce`.
        dim: the dimension that is cut.

    Raises:
        MeshError: as for `all_reduce`; or the size of the dimension is not a multiple of the number
            of ranks.
    """
    place = _find_place(f"reduce_scatter(x, {axis!r}, dim={dim})", axis, x, reduce_op, (dim,), dim)
    return _call(
        place,
        x,
        ReduceScatter(group_of(place.mesh, place.rank, axis), reduce_op=reduce_op, dim=dim),
    )


def all_to_all(x: Tensor, axis: str, *, split_dim: int, concat_dim: int) -> Tensor:
    """Send part i of each rank's tensor along `split_dim` to the i-th rank along the axis, and
    concatenate the received parts along `concat_dim`, like JAX's `all_to_all` with `tiled=True`.

    Args:
        x, axis: as in `all_reduce`.
        split_dim, concat_dim: the dimension that is cut, and the one that grows.

    Raises:
        MeshError: as for `reduce_scatter`.
    """
    call = f"all_to_all(x, {axis!r}, split_dim={split_dim}, concat_dim={concat_dim})"
    place = _find_place(call, axis, x, dims=(split_dim, concat_dim), split=split_dim)
    group = group_of(place.mesh, place.rank, axis)
    return _call(place, x, AllToAll(group, split_dim=split_dim, concat_dim=concat_dim))


def ppermute(x: Tensor, axis: str, perm: Sequence[tuple[int, int]]) -> Tensor:
    """The tensor of the rank that sends to this one along an axis, or zeros if none does, like
    JAX's `ppermute`.

    Args:
        x, axis: as in `all_reduce`.
        perm: pairs of places along the axis, a sender and its receiver. A place sends at most once
            and receives at most once.

    Raises:
        MeshError: as for `all_reduce`; or a place is not on the axis, or sends or receives twice.

    >>> import torch, weft
    >>> shift = weft.shard(lambda x: ppermute(x, "tensor", [(0, 1)]), weft.Mesh(tensor=2), weft.Shard(0), weft.Shard(0))
    >>> shift(torch.tensor([1.0, 2.0]))
    tensor([0., 1.])
    """
    call = f"ppermute(x, {axis!r}, {perm!r:.60})"
    place = _find_place(call, axis, x)
    instead = (
        "pairs of places along the axis, each once as a sender and once as a receiver: [(0, 1),"
        " (1, 0)]"
    )
    if not isinstance(perm, Sequence) or not all(_is_pair(pair) for pair in perm):
        raise MeshError(call, f"perm is {perm!r:.60}", instead)
    pairs = tuple((source, to) for source, to in perm)
    group = group_of(place.mesh, place.rank, axis)
    if mistake := mistake_in_pairs(pairs, len(group)):
        raise MeshError(call, mistake, instead)
    return _call(place, x, PPermute(group, pairs=pairs))


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(is_int(place) for place in pair)


def axis_index(axis: str) -> int:
    """This rank's place along an axis of the mesh; programs that branch on it differ by rank."""
    place = _find_axis(f"axis_index({axis!r})", axis)
    return coordinates_of(place.mesh, place.rank)[axis]


def axis_size(axis: str) -> int:
    """The number of ranks along an axis of the mesh."""
    return _find_axis(f"axis_size({axis!r})", axis).mesh.sizes[axis]


def _find_axis(call: str, axis: str) -> Place:
    place = _PLACE.get()
    if place is None:
        instead = "weft.shard(f, mesh, in_placements, out_placements), and the call inside f"
        raise MeshError(
            call, "no mesh: the call is not in a function that weft.shard runs", instead
        )
    if axis not in place.mesh.sizes:
        raise MeshError(
            call,
            f"axis {axis!r} of {place.mesh}",
            f"one of {', '.join(map(repr, place.mesh.sizes))}",
        )
    return place


def _find_place(
    call: str,
    axis: str,
    x: Any,
    reduce_op: str = "sum",
    dims: Sequence[Any] = (),
    split: int | None = None,
) -> Place:
    place = _find_axis(call, axis)
    size = place.mesh.sizes[axis]
    if not isinstance(x, Tensor):
        problem = f"x is {kind_of(x)}"
        instead = "a tensor; for trees, torch.utils._pytree.tree_map"
    elif reduce_op not in REDUCTIONS:
        problem = f"reduce_op={reduce_op!r}"
        instead = f"one of {', '.join(map(repr, REDUCTIONS))}"
    elif not all(is_int(dim, -x.ndim, x.ndim - 1) for dim in dims):
        problem = f"x {list(x.shape)}"
        instead = "one of its dimensions"
    elif split is not None and x.shape[split] % size:
        problem = f"x {list(x.shape)} for {size} ranks"
        instead = f"a dimension {split} that is a multiple of {size}"
    elif place.number >= 0 and x.requires_grad and torch.is_grad_enabled():
        problem = "a tensor that requires grad, whose gradient does not come back from another rank"
        raise DerivativeError(
            call,
            problem,
            "torch.no_grad(); for gradients weft.shard, whose ranks are in one thread",
        )
    else:
        return place
    raise MeshError(call, problem, instead)


class _Traced(torch.autograd.Function):
    """A collective in a trace, which refuses to be differentiated.

    The derivatives of the sharded function come from the trace; one that the function takes itself
    would have to come back from the other ranks.
    """

    # Without this, `vmap` refuses a custom autograd.Function.
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, number: int, effect: str) -> Tensor:
        """The operator."""
        out: Tensor = _COLLECTIVE(x, number, effect)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        """Keep the text of the effect."""
        ctx.effect = inputs[2]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        _refuse_derivative(ctx.effect)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        _refuse_derivative(ctx.effect)


def _refuse_derivative(effect: str) -> NoReturn:
    problem = (
        "a derivative inside the function that weft.shard runs, which does not come back from the"
        " other ranks"
    )
    instead = (
        "torch.func.grad(weft.shard(f, ...)); or the collective after the derivative, on its result"
    )
    raise DerivativeError(f"'{effect}'", problem, instead)


def _call(place: Place, x: Tensor, effect: Collective) -> Tensor:
    """Call the operator. In a trace that will be differentiated, the result stands for a value that
    autograd tracks."""
    is_transformed = in_functorch_transform()
    grad_mode: Any = contextlib.nullcontext()
    if place.differentiated and x.is_floating_point() and not (x.requires_grad or is_transformed):
        # A detached inference tensor is still one, and cannot require grad; its clone can.
        if x.is_inference():
            plain = x.clone()
        else:
            plain = x.detach()
        # With this the result is no leaf: autograd forbids in-place writes to a leaf.
        x = plain.requires_grad_()
        grad_mode = torch.enable_grad()
    if place.number < 0 and (x.requires_grad or is_transformed):
        call: Any = _Traced.apply
    else:
        call = _COLLECTIVE
    with grad_mode:
        out: Tensor = call(x, place.number, str(effect))
    return out


# Each call of the operator passes the effect as text, which is parsed once.
@functools.lru_cache(1024)
def _effect(text: str) -> Collective:
    effect = parse_effect(text)
    assert isinstance(effect, Collective), "only a collective is called"
    return effect


def effect_of(op: Any, args: Sequence[Any]) -> Collective | None:
    """The collective that an operator's call performs, or None for another operator."""
    if op is _COLLECTIVE:
        return _effect(args[2])
    return None


def _perform(x: Tensor, member: int, effect: str) -> Tensor:
    resolved_member: Member = find(member, f"'{effect}'")
    return resolved_member.perform(_effect(effect), x)


def _like_first(x: Tensor, effect: str) -> Tensor:
    """An empty result of a collective; its shape is the same on all ranks."""
    parsed = _effect(effect)
    # By the definition itself, on fake tensors, rather than by a second set of rules for shapes.
    return torch.empty_like(
        combine(parsed, [x] * len(parsed.ranks))[0], memory_format=torch.contiguous_format
    )


_COLLECTIVE = define("collective", _perform, fake=_like_first)
