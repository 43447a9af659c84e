"""Runs the ranks of a mesh in one process and one thread, by running the parts of their traces in
turn.

Everything is an operation on tensors of this process, so autograd and torch.func follow the result,
and `graphify` records all ranks in one graph.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import attrs
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from weft.meshes.collectives import Collective, combine
from weft.transforms.pipelines.machine import Step
from weft.transforms.shards.tracing import Trace

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


@attrs.define(eq=False)
class _Rank:
    """One rank of a run.

    Args:
        trace: the trace that it runs.
        values: the values of the nodes so far, each kept while a later node uses it.
        done: the number of parts that it has run.
    """

    trace: Trace
    values: dict[Node, Any]
    done: int = 0

    def run_part(self) -> None:
        """Run the operators up to the next collective, or the end."""
        for node in self.trace.parts[self.done]:
            self.values[node] = self._run(node)
            self._drop(node)
        self.done += 1

    def _run(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self.trace.outside[str(node.target)]
        args, kwargs = map_arg((node.args, node.kwargs), self.values.__getitem__)
        target: Any = node.target
        return target(*args, **kwargs)

    def _drop(self, node: Node) -> None:
        for used in self.trace.last_uses.get(node, ()):
            del self.values[used]

    def offered(self) -> Tensor:
        """The tensor that this rank contributes to the collective after the last part that it
        ran."""
        node, _ = self.trace.collectives[self.done - 1]
        (input_node,) = node.all_input_nodes
        tensor: Tensor = self.values[input_node]
        return tensor

    def take(self, result: Tensor) -> None:
        """Receive the result of that collective."""
        node, _ = self.trace.collectives[self.done - 1]
        self.values[node] = result
        self._drop(node)


class Participant(Protocol[T_contra]):
    """A rank that takes part in the collectives of its trace."""

    def run_part(self) -> None:
        """Run the operators up to the next collective, or the end."""

    def take(self, result: T_contra, /) -> None:
        """Receive the result of the collective after that part."""


def take_turns(
    ranks: Sequence[Participant[T]],
    order: Sequence[Step],
    meet: Callable[[Collective], Iterable[T]],
) -> None:
    """Run the parts of all ranks in an order that their programs allow. `meet` makes the results of
    a collective, for each of its ranks in order."""
    # The first rank that reaches a collective computes the results of all its ranks; they wait here
    # until the others reach it.
    results = dict[int, T]()
    for step in order:
        rank = ranks[step.rank]
        if not isinstance(step.effect, Collective):
            rank.run_part()
            continue
        if step.rank not in results:
            results.update(zip(step.effect.ranks, meet(step.effect), strict=True))
        rank.take(results.pop(step.rank))


def run_in_turn(
    traces: Sequence[Trace], order: Sequence[Step], args: Sequence[Sequence[Tensor]]
) -> list[list[Any]]:
    """Run traces on the tensors of each rank's arguments, in an order that their programs allow,
    and return the leaves of each rank's result. A leaf that is an argument is that tensor
    itself."""
    ranks = [
        _Rank(one, dict(zip(_inputs(one), tensors, strict=True)))
        for one, tensors in zip(traces, args, strict=True)
    ]

    def meet(effect: Collective) -> Iterator[Tensor]:
        every = combine(effect, [ranks[rank].offered() for rank in effect.ranks])
        # A clone for each rank, which may write its result in place; contiguous, as in the trace.
        return (x.clone(memory_format=torch.contiguous_format) for x in every)

    take_turns(ranks, order, meet)
    return [_results(rank, tensors) for rank, tensors in zip(ranks, args, strict=True)]


def _results(rank: _Rank, args: Sequence[Tensor]) -> list[Any]:
    leaves = [rank.values[x] if isinstance(x, Node) else x for x in rank.trace.leaves]
    return [
        args[rank.trace.arguments[index]] if index in rank.trace.arguments else x
        for index, x in enumerate(leaves)
    ]


def _inputs(one: Trace) -> Iterator[Node]:
    return iter(one.graph.find_nodes(op="placeholder"))
