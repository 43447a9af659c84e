"""Plans: how calls of one signature are answered, by the replay of a graph or by the function itself."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import torch

from weft.padding import unpad
from weft.settings import MAY_REPLAY
from weft.torchapi import backend_switches
from weft.transforms.graphs.calls.call import Call, Roles, num_donated
from weft.transforms.graphs.calls.results import Outputs, settle
from weft.transforms.graphs.calls.transfer import Handover, hand_over, plan_copies
from weft.transforms.graphs.capture import Entry
from weft.transforms.graphs.dispatch import Decision
from weft.trees import tree_flatten, tree_leaves, tree_unflatten

R = TypeVar("R")


@attrs.frozen(eq=False)
class Replay:
    """How calls of one signature are answered by a graph.

    Args:
        entry: the graph.
        enter: makes the current stream wait for the stream of the last replay, if that is another; None on the CPU.
        fill: fills its input buffers from the leaves of a call, those by reference first; None if it has none.
        run: replays it.
        handover: makes the result.
    """

    entry: Entry
    enter: Callable[[], None] | None
    fill: Callable[[Sequence[Any]], None] | None
    run: Callable[[], None]
    handover: Handover

    def may_run(self) -> bool:
        """Whether it may answer a call here: not inside `no_capture(replay=False)`, nor where autograd would record."""
        return MAY_REPLAY.get() and not self.entry.runs_itself()

    def holds(self) -> Callable[[], bool] | None:
        """What must go on to hold for a like call to be answered by it, beside all that any call is asked; None if
        nothing: a closure's tensor may come to require grad, and some kernels are chosen by switches."""
        entry, now = self.entry, backend_switches() if self.entry.consults_switches else None
        if now is None and not (entry.external and torch.is_grad_enabled()):
            return None
        return lambda: not entry.runs_itself() and (now is None or backend_switches() == now)


@attrs.frozen(eq=False)
class Plan:
    """What to do with calls of one signature: `replay`, or run the function itself if that is None."""

    decision: Decision[Any]
    replay: Replay | None = None


def make_replay(
    entry: Entry, call: Call, padded: Any, own: Any, borrow: bool, enter: Callable[[], None] | None
) -> Replay:
    """How calls like `call`, of class `own`, are answered by a graph of class `padded`."""
    leaves, first = (*call.reference_leaves, *call.copied_leaves), len(call.reference_leaves)
    copies = plan_copies(entry.buffers, entry.padding_sources, entry.axes, leaves, first)
    outputs = entry.outputs if padded == own else _cut(entry.outputs, own)
    handover = hand_over(outputs, entry.buffers, borrow)
    return Replay(entry, enter, copies.fill if copies else None, entry.recording.replay, handover)


def keep_in_place(result: R, roles: Roles, call: Call) -> R:
    """The result of an eager call, with each donated argument's next value in the storage of the old one, as a replay
    leaves it: a graph that was captured there finds it. A result that autograd recorded is left as it is."""
    if not roles.donated or (torch.is_grad_enabled() and any(_recorded(leaf) for leaf in tree_leaves(result))):
        return result
    count = num_donated(call, roles)
    with torch.no_grad():
        homes = tree_unflatten(call.reference_leaves, call.reference_tree)
        found = settle(result, [homes[n] for n in roles.donated if n in homes], call.reference_leaves)
    leaves = [
        own if index is None else call.reference_leaves[index].detach() if index < count else leaf
        for own, index, leaf in zip(found.leaves, found.references, tree_leaves(result), strict=True)
    ]
    made: R = tree_unflatten(leaves, found.structure)
    return made


def _recorded(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _cut(outputs: Outputs, own: Any) -> Outputs:
    """The outputs as views of the size that class `own` has."""
    views, structure = tree_flatten(unpad(tree_unflatten(list(outputs.leaves), outputs.structure), own))
    return attrs.evolve(outputs, structure=structure, leaves=tuple(views))
