"""Planted bugs of `shard`, and of a model's shares."""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    Collective,
    PPermute,
    ReduceScatter,
    combine,
    verb_of,
)
from weft.meshes.mesh import Mesh
from weft.meshes.placements import Layout, Partial, Replicate, on_axes, part_of
from weft.ops.experts.products import run_experts
from weft.ops.products.leaves import sum_leaves
from weft.ops.products.linear import multiply
from weft.ops.products.parts import sum_parts
from weft.ops.transfers.collective import all_gather, all_reduce, axis_index, axis_size
from weft.proofs.evidence.mutants.mutant import Mutant, replace
from weft.proofs.evidence.runs.suite import find
from weft.stages.decoder import adapted
from weft.stages.layer_fields import Field
from weft.stages.layers import Blocks
from weft.stages.shares import SharedRows, TensorRanks, _share_field, share_rows
from weft.torchapi.private import in_dispatch_mode
from weft.transforms.pipelines.machine import Machine, Step
from weft.transforms.shards.local import _Rank
from weft.transforms.shards.shard import Parts
from weft.transforms.shards.surroundings import ClosedOver

_LOCAL = "weft.transforms.shards.local"
_SHARD = "weft.transforms.shards.shard"
_TRACING = "weft.transforms.shards.tracing"
_NUMBERS = "weft.transforms.shards.value_numbers"
_SHARES = "weft.stages.shares"
_READING = "weft.stages.checkpoints.reading"
_DECODER = "weft.stages.decoder"


# One rank has nothing to add up.
def _without_a_reduce(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(effect, AllReduce):
        return list(inputs)
    return combine(effect, inputs)


def _without_a_reduce_in_graphs(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    # A capture on the tape runs in a dispatch mode: the function by itself stays right, so that
    # `shard` must be compared inside `graphify`.
    return (_without_a_reduce if in_dispatch_mode() else combine)(effect, inputs)


def _joined_backwards(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    # Shapes are right, as are values that are equal on all ranks.
    return combine(effect, inputs[::-1] if isinstance(effect, AllGather) else inputs)


def _without_gradients(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    # Every value is right: only derivatives show it.
    return [output.detach() for output in combine(effect, inputs)]


def _sums_for_any(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(effect, AllReduce):
        # Sums, the usual reduction, stay right.
        effect = attrs.evolve(effect, reduce_op="sum")
    return combine(effect, inputs)


def _whole_on_every_rank(value: Tensor, placements: Any, *where: Any) -> Tensor:
    """Every rank has the whole of a partial sum."""
    layout = tuple(
        # The right version gives the value to one rank and 0 to the others, so that it is their
        # sum.
        (axis, Replicate() if placement == Partial() else placement)
        for axis, placement in placements
    )
    return part_of(value, layout, *where)


def _permuted_backwards(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(effect, PPermute):
        # With two ranks that change places this is the same permutation.
        effect = attrs.evolve(effect, pairs=tuple((to, source) for source, to in effect.pairs))
    return combine(effect, inputs)


def _from_the_start(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    """A dimension that is counted from the end is the first one."""
    if isinstance(effect, AllGather | ReduceScatter):
        # A tensor of one dimension, and every dimension that is counted from the front, stay right.
        effect = attrs.evolve(effect, dim=max(effect.dim, 0))
    return combine(effect, inputs)


def _in_the_order_of_the_mesh(spec: Any, mesh: Mesh, call: str) -> Layout:
    """The first axis of the mesh cuts first, whichever is named first."""
    return tuple(
        # Only a dimension that two axes cut, named in another order than the mesh has them, is cut
        # in another way. Each rank's part has the right shape.
        sorted(on_axes(spec, mesh, call), key=lambda pair: list(mesh.sizes).index(pair[0]))
    )


def _read_without_gradient(self: _Rank, node: Node) -> Any:
    """What is closed over has no derivative."""
    value = _run(self, node)
    # Closed-over tensors only: arguments keep their derivatives, so that a test by arguments
    # passes.
    if node.op == "get_attr":
        return value.detach()
    return value


_run = _Rank._run


# The first call is right, and so is any call before a closed-over tensor is bound anew.
def _never_changes(self: ClosedOver) -> bool:
    return False


def _nothing(*_: Any) -> AbstractContextManager[None]:
    return nullcontext()


# A stride of 1 is right for the last axis, and so for every mesh of one axis.
def _as_of_the_last_axis(mesh: Mesh, axis: str) -> int:
    return 1


def _not_copied(self: Parts, traces: Any, call: str) -> list[list[Tensor]]:
    """Each rank writes a donated argument that all of them have."""
    # In place, so each rank adds its update to the same memory: right where the function writes
    # nothing.
    return _tensors(attrs.evolve(self, replicas=set()), traces, call)


_tensors = Parts.tensors


# Ranks that agree are right. The law makes them disagree, and asks for a refusal before anything
# runs.
def _matches_any(self: Machine, step: Step) -> None:
    """Ranks meet in whatever collective each comes to."""


def _forgets_shapes(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        # The first shape is right, and the next one runs the trace that was made for it.
        return (leaf.ndim, leaf.dtype)
    return leaf


def _not_summed(self: TensorRanks, added: Tensor) -> Tensor:
    return added


def _heads_of_the_next(name: str, whole: Field, share: Field, rank: int, kv_rank: int) -> Field:
    """A rank's query heads are not those whose columns of `o` it has."""
    # Each field by itself is a right share. What is wrong is that two fields no longer go together.
    if name == "o_proj":
        count = whole.shape[1] // share.shape[1]
        return _share_field(name, whole, share, (rank + 1) % count, kv_rank)
    return _share_field(name, whole, share, rank, kv_rank)


def _keys_of_the_first(name: str, whole: Field, share: Field, rank: int, kv_rank: int) -> Field:
    """All ranks have the first keys and values."""
    # Right where all ranks share one head of keys, as with a single head.
    return _share_field(name, whole, share, rank, 0)


def _keys_in_turn(name: str, whole: Field, share: Field, rank: int, kv_rank: int) -> Field:
    """Ranks take the heads of keys and values in turn, where neighbours should have the same one."""
    if not name.startswith("qkv"):
        return _share_field(name, whole, share, rank, kv_rank)
    shared = [
        part.shape[0] // mine.shape[0] for part, mine in zip(whole.parts, share.parts, strict=True)
    ]
    # Right where each rank has a head of its own: the law must draw more ranks than heads of keys.
    return _share_field(name, whole, share, rank, rank % shared[-1])


def _bias_on_every_rank(name: str, whole: Field, share: Field, rank: int, kv_rank: int) -> Field:
    # Results of the ranks are summed, so that the bias is added once for each rank. Models without
    # such a bias stay right.
    return _share_field(name, whole, share, 0 if name in ("o_bias", "down_bias") else rank, kv_rank)


def _one_row_later(field: Field, shard: tuple[int, int]) -> Field:
    """A rank's rows of the vocabulary begin one too late, or one too early where there are no more."""
    share = share_rows(field, shard)
    if shard[1] == 1 or not share.parts:
        return share
    (part,), (rank, _) = share.parts, shard
    start = rank * share.shape[0] + 1
    # A share beyond the last row could not be read, and an error would be noticed by any test.
    start -= 2 * (start + part.shape[0] > field.shape[0])
    return attrs.evolve(share, parts=(attrs.evolve(part, offset=(start, 0)),))


def _one_token_later(self: TensorRanks, input_ids: Tensor, weight: Tensor) -> Tensor:
    local_ids = input_ids - axis_index(self.axis) * weight.shape[0]
    # As the right lookup, with each bound moved by one: no index is out of range.
    holds = (local_ids > 0) & (local_ids <= weight.shape[0])
    embeddings = F.embedding(torch.where(holds, local_ids - 1, 0), weight)
    return all_reduce(torch.where(holds[:, None], embeddings, 0), self.axis)


def _rows_of_the_next(self: SharedRows, x: Tensor) -> Tensor:
    """A rank samples from its rows with the seeds, temperatures and positions of another rank's."""
    if self.ranks is None:
        return x
    count = axis_size(self.ranks.axis)
    # The logits are right, and only the rows of the table of sampling are another rank's: requests
    # with equal parameters and seeds do not show it.
    first = self._first((axis_index(self.ranks.axis) + 1) % count)
    return x[first : first + self.size]


def _first_rows(self: SharedRows, rows: Tensor) -> Tensor:
    """A row that two ranks have is there twice, and the last one is not."""
    if self.ranks is None or self.count == 1:
        return rows
    # Where the ranks share rows evenly, no two have the same one. The right version leaves out the
    # overlap of the last ranks.
    return all_gather(rows, self.ranks.axis)[: self.count]


def _renormalised_here(*args: Any, first: int, num_experts: int, **options: Any) -> Tensor:
    """The weights of a token's experts add up to 1 among those of a rank."""
    x, gate_up, down, weights, experts = args
    local_weights = weights.masked_fill((experts < first) | (experts >= first + len(gate_up)), 0.0)
    # A model whose router renormalises does so over all chosen experts. With one rank these are the
    # same.
    weights = weights / local_weights.sum(-1, keepdim=True).clamp(min=1e-6)
    return run_experts(
        x, gate_up, down, weights, experts, first=first, num_experts=num_experts, **options
    )


def _twice(*args: Any, first: int, num_experts: int, **options: Any) -> Tensor:
    """A rank takes the first expert of the next one for its last, too."""
    x, gate_up, down, weights, experts = args
    end = first + len(gate_up)
    # No token loses an expert, and the last rank has no next one: the sum has one product too many.
    mistaken = torch.where(experts == end, end - 1, experts)
    return run_experts(
        x, gate_up, down, weights, mistaken, first=first, num_experts=num_experts, **options
    )


def _experts_of_the_first(*args: Any, first: int, num_experts: int, **options: Any) -> Tensor:
    """Every rank takes its experts for the first ones."""
    # Rank 0 is right, as is a model whose experts are shared by columns.
    return run_experts(*args, first=0, num_experts=num_experts, **options)


def _one_expert_later(name: str, whole: Field, share: Field, rank: int, kv_rank: int) -> Field:
    """A rank's experts begin one too late; the last rank's end with the first of all."""
    # Experts that are cut by columns have as many parts as the whole, and stay right.
    if len(share.parts) == len(whole.parts):
        return _share_field(name, whole, share, rank, kv_rank)
    each = len(whole.parts) // whole.shape[0]
    return _share_field(
        name,
        attrs.evolve(whole, parts=whole.parts[each:] + whole.parts[:each]),
        share,
        rank,
        kv_rank,
    )


def _in_sequence(x: Tensor, leaves: int, dtype: torch.dtype) -> Tensor:
    """Leaves are added up first to last."""
    return sum_parts(
        # The promise is a balanced tree, whatever rank has which leaves. With two leaves both
        # orders are one.
        torch.stack([sum_parts(leaf, torch.float32) for leaf in x.unflatten(0, (leaves, -1))]),
        dtype,
    )


def _ranks_in_sequence(effect: Collective, inputs: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(effect, AllReduce) and effect.reduce_op == "sum":
        # As above, between ranks: two of them have only one order.
        return [functools.reduce(torch.add, inputs)] * len(inputs)
    return combine(effect, inputs)


def _rounded_before(self: Blocks, added: Tensor, hidden: Tensor) -> Tensor:
    """A rank rounds what it adds up to the model's dtype, before the ranks' sums are added up."""
    total = sum_leaves(added, max(self.leaves, 1), hidden.dtype)
    if self.ranks is None:
        return total
    # The sum is rounded twice. One rank rounds once, and in float32 there is nothing to round.
    return self.ranks.total(total)


def _cut_elsewhere(x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int) -> Tensor:
    """The first of a rank's leaves has a column more than it should, and the last one less."""
    sizes = [x.shape[1] // leaves] * leaves
    # The sum of the leaves is the same product: only its last bits depend on where the cut is.
    sizes[0], sizes[-1] = sizes[0] + (leaves > 1), sizes[-1] - (leaves > 1)
    pairs = zip(x.split(sizes, 1), weight.split(sizes, 1), strict=True)
    products = torch.stack(
        [
            multiply(columns.float(), part.float().contiguous(), None, True)
            for columns, part in pairs
        ]
    )
    if bias is None:
        return products
    return torch.cat((products[:1] + bias.float(), products[1:]))


def _whole_adapter(y: Tensor, x: Tensor, lora: Any, batch: Any, leaves: int = 0) -> Tensor:
    """A rank's first leaf gets all that the adapter adds to its sum."""
    if not leaves or lora is None or batch.adapters is None:
        return adapted(y, x, lora, batch, leaves)
    # The total is right; it is the first leaf's part of it that is not, and so the order of the
    # sum.
    return torch.cat((adapted(y[:1], x, lora, batch, 1), y[1:]))


def _one_for_all(effect: Collective, every: Sequence[int], parts: Any, numbers: Any) -> list[int]:
    """Each rank's result of any collective is the same."""
    # A gather, an exchange or a permutation would count as equal on all ranks, so that a result
    # that differs is believed to be a replica.
    return [numbers.of(verb_of(effect), *every)] * len(every)


_FUNCTION, _COMMUTE = find("L22", "shards are the function"), find("L22", "commute")
_SURROUNDINGS = find("L22", "surroundings of shards")
_REPLICAS = find("L22", "false replicas")
_MODEL, _SAME_BITS = find("L22", "the model"), find("L22", "same bits")


def _method(home: Any, name: str, value: Any) -> Any:
    return partial(mock.patch.object, home, name, value)


# The bugs of `shard` and its collectives, of shares of heads, columns, experts, biases, vocabulary
# and rows, and of leaves.
SHARDS = (
    Mutant(
        "a sum over the ranks is missing", _FUNCTION, replace(_LOCAL, "combine", _without_a_reduce)
    ),
    Mutant(
        "a maximum over the ranks is a sum", _FUNCTION, replace(_LOCAL, "combine", _sums_for_any)
    ),
    Mutant("parts are joined backwards", _FUNCTION, replace(_LOCAL, "combine", _joined_backwards)),
    Mutant(
        # A function that adds up the ranks then counts the value once for each.
        "each rank has the whole of a partial sum",
        _FUNCTION,
        replace(_SHARD, "part_of", _whole_on_every_rank),
    ),
    Mutant(
        "tensors are permuted backwards", _FUNCTION, replace(_LOCAL, "combine", _permuted_backwards)
    ),
    Mutant(
        "a negative dimension is the first", _FUNCTION, replace(_LOCAL, "combine", _from_the_start)
    ),
    Mutant(
        "the mesh says which axis cuts first",
        _FUNCTION,
        replace(_SHARD, "on_axes", _in_the_order_of_the_mesh),
    ),
    Mutant(
        "what is closed over has no derivative",
        _SURROUNDINGS,
        _method(_Rank, "_run", _read_without_gradient),
    ),
    Mutant(
        "a trace keeps what it closed over",
        _SURROUNDINGS,
        _method(ClosedOver, "has_changed", _never_changes),
    ),
    Mutant(
        "a detached value has a gradient",
        _SURROUNDINGS,
        replace(_TRACING, "called_by_dispatcher", lambda: False),
    ),
    Mutant(
        "hooks see the trace",
        _SURROUNDINGS,
        replace(_TRACING, "without_saved_tensors_hooks", _nothing),
    ),
    Mutant(
        "a capture has the loops of a trace", _SURROUNDINGS, replace(_TRACING, "looping", _nothing)
    ),
    Mutant(
        "a run converts for autocast again",
        _SURROUNDINGS,
        replace(_SHARD, "WithoutAutocast", _nothing),
    ),
    Mutant(
        "an axis is taken for the last one",
        _FUNCTION,
        replace("weft.meshes.mesh", "stride_of", _as_of_the_last_axis),
    ),
    Mutant(
        "each rank writes what all of them have", _FUNCTION, _method(Parts, "tensors", _not_copied)
    ),
    Mutant(
        "a trace is found without its shapes",
        _FUNCTION,
        replace(_SHARD, "_leaf_key", _forgets_shapes),
    ),
    Mutant(
        "in a graph, a sum is missing",
        _COMMUTE,
        replace(_LOCAL, "combine", _without_a_reduce_in_graphs),
    ),
    Mutant(
        "in a graph, a sum is missing",
        find("L22", "stages of shards"),
        replace(_LOCAL, "combine", _without_a_reduce_in_graphs),
    ),
    Mutant(
        "a collective has no gradient",
        find("L22", "derivatives of shards"),
        replace(_LOCAL, "combine", _without_gradients),
    ),
    Mutant(
        "ranks meet in whatever collective each comes to",
        find("L22", "disagree"),
        _method(Machine, "_match", _matches_any),
    ),
    Mutant(
        "all parts of an argument are one", _REPLICAS, replace(_SHARD, "part_key", lambda *_: ())
    ),
    # Constants of one type are one value here, also the number of a rank, on which results may
    # depend.
    Mutant("the number of a rank is not seen", _REPLICAS, replace(_NUMBERS, "value_key", type)),
    Mutant("ranks exchange nothing", _REPLICAS, replace(_NUMBERS, "_combined", _one_for_all)),
    Mutant("a block's results are not summed", _MODEL, _method(TensorRanks, "total", _not_summed)),
    Mutant(
        "query heads are not those of the columns",
        _MODEL,
        replace(_SHARES, "_share_field", _heads_of_the_next),
    ),
    Mutant(
        "all ranks have the first keys",
        _MODEL,
        replace(_SHARES, "_share_field", _keys_of_the_first),
    ),
    Mutant(
        "shared heads of keys go round", _MODEL, replace(_SHARES, "_share_field", _keys_in_turn)
    ),
    Mutant(
        "every rank adds the bias", _MODEL, replace(_SHARES, "_share_field", _bias_on_every_rank)
    ),
    Mutant(
        "a share of the vocabulary is off by one",
        _MODEL,
        replace(_READING, "share_rows", _one_row_later),
    ),
    Mutant(
        "a token is looked up one row away", _MODEL, _method(TensorRanks, "embed", _one_token_later)
    ),
    Mutant(
        "a rank samples as for another's rows",
        _MODEL,
        _method(SharedRows, "local_rows", _rows_of_the_next),
    ),
    Mutant(
        "a row that two ranks have is there twice",
        _MODEL,
        _method(SharedRows, "gather", _first_rows),
    ),
    Mutant(
        "weights add up to 1 among a rank's experts",
        _MODEL,
        replace(_DECODER, "run_experts", _renormalised_here),
    ),
    Mutant("an expert is counted on two ranks", _MODEL, replace(_DECODER, "run_experts", _twice)),
    Mutant(
        "a rank takes its experts for the first",
        _MODEL,
        replace(_DECODER, "run_experts", _experts_of_the_first),
    ),
    Mutant(
        "a rank's experts begin one too late",
        _MODEL,
        replace(_SHARES, "_share_field", _one_expert_later),
    ),
    Mutant(
        "leaves are added up in sequence",
        _SAME_BITS,
        replace("weft.stages.layers", "sum_leaves", _in_sequence),
    ),
    Mutant(
        "ranks are added up in sequence", _SAME_BITS, replace(_LOCAL, "combine", _ranks_in_sequence)
    ),
    Mutant(
        "a rank rounds its part of a sum", _SAME_BITS, _method(Blocks, "total", _rounded_before)
    ),
    Mutant(
        "a leaf is cut at another place",
        _SAME_BITS,
        replace("weft.ops.products.linear", "_multiply_leaves", _cut_elsewhere),
    ),
    Mutant(
        "an adapter's sum is not cut",
        _SAME_BITS,
        replace("weft.stages.decoder", "adapted", _whole_adapter),
    ),
)
