"""Value numbers: which values of several ranks are equal by their traces, whatever values the
arguments have.

As in a compiler, two values have the same number if the same operator computes them from values
with the same numbers. Here the values are those of all ranks. A collective combines the values of
several ranks: the sum over all ranks has the same number on each of them. An operator that writes
in place gives its memory a new number.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.fx import Node

from weft.meshes.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    PPermute,
    source_of,
    verb_of,
)
from weft.torchapi.private import is_fake, without_modes
from weft.transforms.pipelines.machine import Step
from weft.transforms.shards.local import take_turns
from weft.transforms.shards.tracing import Trace, storage_of, written_by
from weft.values.keys import value_key

# The most elements of a constant that is compared by its values.
_MOST_ELEMENTS = 1024


class _Numbers:
    """The numbers of expressions."""

    def __init__(self) -> None:
        self._numbers = dict[Hashable, int]()

    def of(self, *expression: Hashable) -> int:
        """The number of an expression; a new number if the expression is new."""
        try:
            return self._numbers.setdefault(expression, len(self._numbers))
        except TypeError:  # unhashable, so it cannot be compared: a number that nothing else has
            return self.of(object())


@attrs.define(eq=False)
class _Rank:
    """The numbers of one rank's values.

    Args:
        trace: the trace of the rank.
        numbers: the numbers of all ranks' expressions.
        computed: the number that each node's value had when it was computed.
        memory: for each storage that has been written in place, the number of its contents.
        done: the number of parts that it has run.
    """

    trace: Trace
    numbers: _Numbers
    computed: dict[Node, int]
    memory: dict[int, int] = attrs.field(factory=dict)
    done: int = 0

    def run_part(self) -> None:
        """Number the values up to the next collective, or the end."""
        for node in self.trace.parts[self.done]:
            self.computed[node] = (
                self._constant(node) if node.op == "get_attr" else self._call(node)
            )
        self.done += 1

    def _constant(self, node: Node) -> int:
        tensor = self.trace.outside[str(node.target)]
        is_constant = not any(tensor is x for x in self.trace.closed_over)
        if (
            not is_constant
            or tensor.device.type != "cpu"
            or is_fake(tensor)
            or tensor.numel() > _MOST_ELEMENTS
        ):
            return self.numbers.of("outside", id(tensor))
        with without_modes():
            return self.numbers.of("constant", tensor.dtype, tensor.shape, _bits(tensor))

    def _call(self, node: Node) -> int:
        args = tuple(self._argument(value) for value in node.args)
        kwargs = tuple((name, self._argument(value)) for name, value in node.kwargs.items())
        number = self.numbers.of(node.target, args, kwargs)
        for storage in written_by(node):
            self.memory[storage] = self.numbers.of("written", number, self.memory.get(storage))
        return number

    def _argument(self, value: Any) -> Hashable:
        if isinstance(value, Node):
            return self.now(value)
        if isinstance(value, tuple | list):
            return tuple(map(self._argument, value))
        key: Hashable = value_key(value)
        return key

    def now(self, node: Node) -> int:
        """The number of a node's value as it is now."""
        if not isinstance(node.meta.get("val"), Tensor):
            return self.computed[node]
        written = self.memory.get(storage_of(node))
        if written is None:
            return self.computed[node]
        return self.numbers.of("read", self.computed[node], written)

    def offered(self) -> int:
        """The number of the value that this rank contributes to the collective after the last part
        that it ran."""
        node, _ = self.trace.collectives[self.done - 1]
        return self.now(node.all_input_nodes[0])

    def take(self, number: int) -> None:
        """Receive the number of the result of that collective."""
        node, _ = self.trace.collectives[self.done - 1]
        self.computed[node] = number

    def offered_parts(self, effect: Collective) -> list[int] | None:
        """If the value that this rank contributes is a concatenation of one part for each rank of
        an `all_to_all`, the numbers of these parts; else None."""
        if not isinstance(effect, AllToAll):
            return None
        node, _ = self.trace.collectives[self.done - 1]
        joined = node.all_input_nodes[0]
        if joined.target is not torch.ops.aten.cat.default:
            return None
        parts: Any = joined.args[0]
        if len(joined.args) > 1:
            dim: Any = joined.args[1]
        else:
            dim = 0
        num_dims = joined.meta["val"].ndim
        sizes = {part.meta["val"].shape for part in parts}
        if (
            len(parts) != len(effect.ranks)
            or len(sizes) != 1
            or (dim - effect.split_dim) % num_dims
        ):
            return None
        were_written = any(storage_of(one) in self.memory for one in (joined, *parts))
        if were_written:
            return None
        return [self.computed[part] for part in parts]

    def results(self) -> Iterator[int]:
        """The numbers of the leaves of the result."""
        for leaf in self.trace.leaves:
            yield (
                self.now(leaf)
                if isinstance(leaf, Node)
                else self.numbers.of("leaf", value_key(leaf))
            )


def result_numbers(
    traces: Sequence[Trace], order: Sequence[Step], arguments: Sequence[Sequence[Hashable]]
) -> list[list[int]]:
    """For each rank, the numbers of the leaves of its result.

    Args:
        traces: the traces of all ranks.
        order: an order of their effects that their programs allow.
        arguments: for each rank and tensor of its arguments, a key that only tensors with the same
            values share.
    """
    numbers = _Numbers()
    ranks = []
    for trace, keys in zip(traces, arguments, strict=True):
        nodes = trace.graph.find_nodes(op="placeholder")
        inputs = {node: numbers.of("argument", key) for node, key in zip(nodes, keys, strict=True)}
        ranks.append(_Rank(trace, numbers, inputs))

    def meet(effect: Collective) -> Iterator[int]:
        every = [ranks[rank].offered() for rank in effect.ranks]
        parts = [ranks[rank].offered_parts(effect) for rank in effect.ranks]
        return _combined(effect, every, parts, numbers)

    take_turns(ranks, order, meet)
    return [list(rank.results()) for rank in ranks]


def _combined(
    effect: Collective, every: Sequence[int], parts: Sequence[list[int] | None], numbers: _Numbers
) -> Iterator[int]:
    """The numbers of the results of a collective, for each of its ranks in order."""
    for place in range(len(every)):
        match effect:
            case AllReduce() | AllGather():
                yield numbers.of(verb_of(effect), *every)
            case PPermute():
                source = source_of(effect, place)
                sent = "zeros" if source is None else every[source]
                yield numbers.of(verb_of(effect), str(effect.schema), sent)
            case _ if None not in parts:  # all_to_all, where ranks may be sent the same parts
                yield numbers.of(
                    verb_of(effect), "parts", *(part[place] for part in parts if part is not None)
                )
            case _:
                yield numbers.of(verb_of(effect), place, *every)


def _bits(tensor: Tensor) -> Hashable:
    """The bits of a tensor's values."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(dense.reshape(-1).view(torch.uint8).tolist())
