"""Collectives as effects: `AllReduce`, `AllGather`, `ReduceScatter`, `AllToAll` and `PPermute`, and
their results.

They are data like `weft.effects.Send`: they print as text that parses back.
"""

import re
from collections.abc import Sequence
from typing import cast

import attrs
import torch
from torch import Tensor

from weft.meshes.placements import reduced
from weft.values.schema import Schema, TensorSchema


@attrs.frozen
class _Meeting:
    """The fields that all collectives have.

    Args:
        ranks: the ranks that take part, in order.
        microbatch: the micro-batch.
        schema: the schema of each rank's tensor, if it is known.
    """

    ranks: tuple[int, ...]
    microbatch: int = 0
    schema: Schema | None = None

    def __str__(self) -> str:
        if self.schema is None:
            schema = ""
        else:
            schema = f": {self.schema}"
        ranks = ", ".join(map(str, self.ranks))
        verb = verb_of(cast("Collective", self))  # which has all subclasses
        return f"{verb} among {ranks} [mb {self.microbatch}]{schema}"


@attrs.frozen
class AllReduce(_Meeting):
    """Each rank gets the sum (maximum, minimum) of the tensors of all.

    Args:
        ranks, microbatch, schema: the ranks that take part, in order; the micro-batch; the schema
            of each rank's tensor, if it is known.
        reduce_op: `sum`, `max` or `min`. A sum is a balanced tree over the ranks in their order
            (`reduced`).
    """

    reduce_op: str = "sum"


@attrs.frozen
class AllGather(_Meeting):
    """Each rank gets the tensors of all, joined along dimension `dim` in the order of the ranks.

    Args:
        ranks, microbatch, schema: as in `AllReduce`.
        dim: the dimension.
    """

    dim: int = 0


@attrs.frozen
class ReduceScatter(_Meeting):
    """Each rank gets its part, along `dim`, of the sum (maximum, minimum) of the tensors of all.

    Args:
        ranks, microbatch, schema, reduce_op: as in `AllReduce`.
        dim: the dimension that is cut.
    """

    reduce_op: str = "sum"
    dim: int = 0


@attrs.frozen
class AllToAll(_Meeting):
    """Each rank sends part i of its tensor along `split_dim` to rank i, and joins what it gets
    along `concat_dim` in the order of the ranks.

    Args:
        ranks, microbatch, schema: as in `AllReduce`.
        split_dim, concat_dim: the dimension that is cut, and the one that grows.
    """

    split_dim: int = 0
    concat_dim: int = 0


@attrs.frozen
class PPermute(_Meeting):
    """Each rank sends its tensor to at most one rank, and receives at most one. A rank that
    receives none gets zeros.

    Args:
        ranks, microbatch, schema: as in `AllReduce`.
        pairs: the sender and the receiver of each tensor, as indices into `ranks`.
    """

    pairs: tuple[tuple[int, int], ...] = ()


Collective = AllReduce | AllGather | ReduceScatter | AllToAll | PPermute


def verb_of(effect: Collective) -> str:
    """The name and the options of a collective, as they print."""
    match effect:
        case AllReduce():
            return f"all_reduce {effect.reduce_op}"
        case AllGather():
            return f"all_gather dim {effect.dim}"
        case ReduceScatter():
            return f"reduce_scatter {effect.reduce_op} dim {effect.dim}"
        case AllToAll():
            return f"all_to_all dim {effect.split_dim} to {effect.concat_dim}"
        case PPermute():
            pairs = ", ".join(f"{source} to {to}" for source, to in effect.pairs)
            return f"ppermute {pairs or 'none'}"


def source_of(effect: PPermute, place: int) -> int | None:
    """The place of the rank whose tensor goes to this place; None if nobody sends one."""
    return {to: source for source, to in effect.pairs}.get(place)


# The regular expression of a collective in the text of an effect.
FORM = (
    r"(?P<collective>all_reduce|all_gather|reduce_scatter|all_to_all|ppermute)(?:"
    r" (?P<reduce>sum|max|min))?"
    r"(?: dim (?P<dim>-?\d+)(?: to (?P<concat>-?\d+))?)?(?: (?P<pairs>none|\d+ to \d+(?:, \d+ to"
    r" \d+)*))?"
    r" among (?P<ranks>\d+(?:, \d+)*)"
)


def parsed(matched: re.Match[str], microbatch: int, schema: Schema | None) -> Collective | None:
    """The collective of a match of `FORM`; None if the collective does not have those options."""
    common = tuple(map(int, matched["ranks"].split(", "))), microbatch, schema
    match (
        matched["collective"],
        matched["reduce"],
        matched["dim"],
        matched["concat"],
        matched["pairs"],
    ):
        case "all_reduce", str(reduce_op), None, None, None:
            return AllReduce(*common, reduce_op)
        case "all_gather", None, str(dim), None, None:
            return AllGather(*common, int(dim))
        case "reduce_scatter", str(reduce_op), str(dim), None, None:
            return ReduceScatter(*common, reduce_op, int(dim))
        case "all_to_all", None, str(split), str(concat), None:
            return AllToAll(*common, int(split), int(concat))
        case "ppermute", None, None, None, str(pairs):
            return PPermute(*common, _parsed_pairs(pairs))
        case _:
            return None


def _parsed_pairs(text: str) -> tuple[tuple[int, int], ...]:
    if text == "none":
        return ()
    pairs = (pair.split(" to ") for pair in text.split(", "))
    return tuple((int(source), int(to)) for source, to in pairs)


def mistake_in_pairs(pairs: Sequence[tuple[int, int]], count: int) -> str | None:
    """Why `count` ranks cannot send their tensors as `pairs` say; None if they can."""
    if wrong := next((place for pair in pairs for place in pair if not 0 <= place < count), None):
        return f"place {wrong} among {count} ranks"
    for what, places in (
        ("sends", [source for source, _ in pairs]),
        ("receives", [to for _, to in pairs]),
    ):
        if twice := [place for place in places if places.count(place) > 1]:
            return f"place {twice[0]}, which {what} twice"
    return None


def impossible(effect: Collective) -> tuple[str, str] | None:
    """Why no ranks can perform a collective on tensors of its schema, and what they can do instead.
    None if they can, as far as the schema and its dimensions are known."""
    if isinstance(effect, PPermute) and (
        mistake := mistake_in_pairs(effect.pairs, len(effect.ranks))
    ):
        return (
            f"'{effect}', with {mistake}",
            "each place at most once as a sender and once as a receiver",
        )
    if effect.schema is None:
        return None
    description = f"'{effect}'"
    count = len(effect.ranks)
    if len(effect.schema.tensors) != 1:
        return f"{description} of {len(effect.schema.tensors)} tensors", "one tensor"
    dims = effect.schema.tensors[0].dims
    cut_dim = None
    used = tuple[int, ...]()
    match effect:
        case AllGather(dim=dim):
            used = (dim,)
        case ReduceScatter(dim=dim):
            cut_dim = dim
            used = (dim,)
        case AllToAll(split_dim=split, concat_dim=concat):
            cut_dim = split
            used = (split, concat)
        case AllReduce() | PPermute():
            pass
    if wrong := [dim for dim in used if not -len(dims) <= dim < len(dims)]:
        return f"{description} along dimension {wrong[0]} of {len(dims)}", "one of its dimensions"
    if cut_dim is None:
        size = None
    else:
        size = dims[cut_dim]
    if isinstance(size, int) and size % count:
        return (
            f"{description}, which cuts {size} into {count} parts",
            f"a dimension {cut_dim} that is a multiple of {count}",
        )
    return None


def with_schema(effect: Collective, x: Tensor) -> Collective:
    """The collective with the schema of a rank's tensor."""
    return attrs.evolve(
        effect, schema=Schema((TensorSchema("x", tuple(map(int, x.shape)), x.dtype),))
    )


def cut(effect: Collective, x: Tensor) -> Tensor:
    """Return what one rank sends to each rank of a collective: a view of its tensor, [ranks, ...],
    with one part for each rank, or the whole tensor for all of them."""
    count = len(effect.ranks)
    match effect:
        case ReduceScatter(dim=dim) | AllToAll(split_dim=dim):
            dim %= x.ndim
            parts: Tensor = x.unflatten(dim, (count, x.shape[dim] // count))
            return parts.movedim(dim, 0)
        case AllReduce() | AllGather() | PPermute():
            return x.expand(count, *x.shape)


def goes(effect: Collective, source: int, to: int) -> bool:
    """Whether the rank at place `to` needs the tensor of the rank at place `source`."""
    match effect:
        case PPermute(pairs=pairs):
            return (source, to) in pairs
        case AllReduce() | AllGather() | ReduceScatter() | AllToAll():
            return True


def join(effect: Collective, received: Sequence[Tensor], place: int) -> Tensor:
    """The result of a collective on the rank at `place`, from what it received of the tensors of
    all ranks, in order."""
    match effect:
        case AllReduce(reduce_op=reduce_op) | ReduceScatter(reduce_op=reduce_op):
            return reduced(received, reduce_op)
        case AllGather(dim=dim) | AllToAll(concat_dim=dim):
            return torch.cat(list(received), dim)
        case PPermute():
            source = source_of(effect, place)
            if source is None:
                return _zeros(received[place])
            return received[source]


def _zeros(like: Tensor) -> Tensor:
    """Zeros in the shape of `like`. Autograd tracks them, with a derivative of 0, just as it tracks
    the tensors that other ranks get."""
    zeros = torch.zeros_like(like)
    if like.requires_grad:
        # The sum of no elements: 0, whatever the values are (`like * 0` would make NaN from inf).
        return zeros + like.reshape(-1)[:0].sum()
    return zeros


def combine(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result of a collective on each rank, computed by its definition from the tensors of all
    ranks in order. Results may share memory."""
    if isinstance(effect, AllReduce | AllGather):
        # The result is the same on all ranks, so it is computed once.
        return [join(effect, inputs, 0)] * len(inputs)
    by_rank = zip(*(cut(effect, x) for x in inputs), strict=True)
    return [join(effect, received, place) for place, received in enumerate(by_rank)]
