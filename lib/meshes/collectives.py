"""Collectives as effects: `AllReduce`, `AllGather`, `ReduceScatter` and `AllToAll`, and the results that they define.

They are data like `weft.effects.Send`: they print, and parse back.
"""

import re
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from weft.meshes.placements import reduced
from weft.schema import Schema, TensorSchema


@attrs.frozen
class _Meeting:
    """The part that all collectives have.

    Args:
        ranks: the ranks that take part, in order.
        microbatch: the micro-batch.
        schema: of each rank's tensor, if it is known.
    """

    ranks: tuple[int, ...]
    microbatch: int = 0
    schema: Schema | None = None

    @property
    def verb(self) -> str:
        """Its name and options, as it prints."""
        raise NotImplementedError

    def __str__(self) -> str:
        schema = "" if self.schema is None else f": {self.schema}"
        return f"{self.verb} among {', '.join(map(str, self.ranks))} [mb {self.microbatch}]{schema}"


@attrs.frozen
class AllReduce(_Meeting):
    """Each rank gets the sum (maximum, minimum) of the tensors of all.

    Args:
        ranks, microbatch, schema: the ranks that take part, in order; the micro-batch; each rank's tensor, if known.
        reduce_op: `sum`, `max` or `min`. A sum is a balanced tree over the ranks in their order (`reduced`).
    """

    reduce_op: str = "sum"

    @property
    def verb(self) -> str:
        """Its name and options, as it prints."""
        return f"all_reduce {self.reduce_op}"


@attrs.frozen
class AllGather(_Meeting):
    """Each rank gets the tensors of all, joined along dimension `dim` in the order of the ranks.

    Args:
        ranks, microbatch, schema: as in `AllReduce`.
        dim: the dimension.
    """

    dim: int = 0

    @property
    def verb(self) -> str:
        """Its name and options, as it prints."""
        return f"all_gather dim {self.dim}"


@attrs.frozen
class ReduceScatter(_Meeting):
    """Each rank gets its part along `dim` of the sum (maximum, minimum) of the tensors of all.

    Args:
        ranks, microbatch, schema, reduce_op: as in `AllReduce`.
        dim: the dimension that is cut.
    """

    reduce_op: str = "sum"
    dim: int = 0

    @property
    def verb(self) -> str:
        """Its name and options, as it prints."""
        return f"reduce_scatter {self.reduce_op} dim {self.dim}"


@attrs.frozen
class AllToAll(_Meeting):
    """Each rank sends part i of its tensor along `split_dim` to rank i, and joins what it gets along `concat_dim` in
    the order of the ranks.

    Args:
        ranks, microbatch, schema: as in `AllReduce`.
        split_dim, concat_dim: the dimension that is cut, and the one that grows.
    """

    split_dim: int = 0
    concat_dim: int = 0

    @property
    def verb(self) -> str:
        """Its name and options, as it prints."""
        return f"all_to_all dim {self.split_dim} to {self.concat_dim}"


Collective = AllReduce | AllGather | ReduceScatter | AllToAll

FORM = (
    r"(?P<collective>all_reduce|all_gather|reduce_scatter|all_to_all)(?: (?P<reduce>sum|max|min))?"
    r"(?: dim (?P<dim>-?\d+)(?: to (?P<concat>-?\d+))?)? among (?P<ranks>\d+(?:, \d+)*)"
)
"""The expression of a collective in the text of an effect."""


def parsed(found: re.Match[str], microbatch: int, schema: Schema | None) -> Collective | None:
    """The collective of a match of `FORM`; None for options that it does not have."""
    given = tuple(map(int, found["ranks"].split(", "))), microbatch, schema
    match found["collective"], found["reduce"], found["dim"], found["concat"]:
        case "all_reduce", str(reduce_op), None, None:
            return AllReduce(*given, reduce_op)
        case "all_gather", None, str(dim), None:
            return AllGather(*given, int(dim))
        case "reduce_scatter", str(reduce_op), str(dim), None:
            return ReduceScatter(*given, reduce_op, int(dim))
        case "all_to_all", None, str(split), str(concat):
            return AllToAll(*given, int(split), int(concat))
    return None


def impossible(effect: Collective) -> tuple[str, str] | None:
    """The reason why no ranks can perform a collective on tensors of its schema, and what they can; None: they can, as
    far as the schema and its dimensions are known."""
    if effect.schema is None:
        return None
    seen, count = f"'{effect}'", len(effect.ranks)
    if len(effect.schema.tensors) != 1:
        return f"{seen} of {len(effect.schema.tensors)} tensors", "one tensor"
    dims, cut_dim, used = effect.schema.tensors[0].dims, None, tuple[int, ...]()
    match effect:
        case AllGather(dim=dim):
            used = (dim,)
        case ReduceScatter(dim=dim):
            cut_dim, used = dim, (dim,)
        case AllToAll(split_dim=split, concat_dim=concat):
            cut_dim, used = split, (split, concat)
    if wrong := [dim for dim in used if not -len(dims) <= dim < len(dims)]:
        return f"{seen} along dimension {wrong[0]} of {len(dims)}", "one of its dimensions"
    size = None if cut_dim is None else dims[cut_dim]
    if isinstance(size, int) and size % count:
        return f"{seen}, which cuts {size} into {count} parts", f"a dimension {cut_dim} that is a multiple of {count}"
    return None


def with_schema(effect: Collective, x: Tensor) -> Collective:
    """The collective with the schema of a rank's tensor."""
    return attrs.evolve(effect, schema=Schema((TensorSchema("x", tuple(map(int, x.shape)), x.dtype),)))


def cut(effect: Collective, x: Tensor) -> Tensor:
    """The parts of one rank's tensor that a collective sends to the ranks, [ranks, ...], in their order: a part each,
    or the whole tensor to all. A view."""
    count = len(effect.ranks)
    match effect:
        case ReduceScatter(dim=dim) | AllToAll(split_dim=dim):
            dim %= x.ndim
            parts: Tensor = x.unflatten(dim, (count, x.shape[dim] // count))
            return parts.movedim(dim, 0)
        case _:
            return x.expand(count, *x.shape)


def join(effect: Collective, received: Sequence[Tensor]) -> Tensor:
    """The result of a collective on one rank, from what it got of the tensors of all ranks, in order."""
    match effect:
        case AllReduce(reduce_op=reduce_op) | ReduceScatter(reduce_op=reduce_op):
            return reduced(received, reduce_op)
        case AllGather(dim=dim) | AllToAll(concat_dim=dim):
            return torch.cat(list(received), dim)


def combine(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result of a collective on each rank, by definition, from the tensors of all ranks in order. Results may share
    memory with one another."""
    if isinstance(effect, AllReduce | AllGather):
        return [join(effect, inputs)] * len(inputs)
    return [join(effect, received) for received in zip(*(cut(effect, x) for x in inputs), strict=True)]
