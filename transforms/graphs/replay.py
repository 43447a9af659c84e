"""`Dispatched` and `Replay`: how calls of one signature are answered, by a replay or by the function itself."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import torch

from weft.padding import unpad
from weft.settings import MAY_REPLAY
from weft.torchapi.private import backend_switches
from weft.transforms.graphs.calls.call import Call, Roles, num_donated
from weft.transforms.graphs.calls.results import Outputs, make_outputs
from weft.transforms.graphs.calls.transfer import Handover, hand_over, plan_copies
from weft.transforms.graphs.capture import Entry
from weft.transforms.graphs.dispatch import Decision
from weft.trees import tree_flatten, tree_leaves, tree_unflatten

R = TypeVar("R")


@attrs.frozen(eq=False)
class Replay:
    """A graph as the answer to calls of one signature.

    Args:
        entry: the graph.
        wait_for_last_replay: makes the current stream wait for the last replay, if that ran on another stream; None on
            the CPU.
        fill: fills the graph's input buffers from the leaves of a call, those by reference first; None if it has no
            buffers.
        run: replays the graph.
        handover: makes the result.
    """

    entry: Entry
    wait_for_last_replay: Callable[[], None] | None
    fill: Callable[[Sequence[Any]], None] | None
    run: Callable[[], None]
    handover: Handover

    def may_run(self) -> bool:
        """Whether the graph may replay now: not inside `no_capture(replay=False)`, and not where autograd would
        record."""
        return MAY_REPLAY.get() and not self.entry.needs_autograd()

    def guard(self) -> Callable[[], bool]:
        """The guard that this graph adds to those of the fast path: what it reads from outside is what it was, none of
        that has come to require grad, and torch's back-end switches choose the same kernels."""
        entry, switches = self.entry, backend_switches() if self.entry.consults_switches else None
        if switches is None and not (entry.external and torch.is_grad_enabled()):
            return entry.outside.holds
        return lambda: (
            entry.outside.holds()
            and not entry.needs_autograd()
            and (switches is None or backend_switches() == switches)
        )


@attrs.frozen(eq=False)
class Dispatched:
    """The dispatch of one signature: its decision, and its replay, or None if the function itself runs."""

    decision: Decision[Any]
    replay: Replay | None = None


def make_replay(
    entry: Entry, call: Call, padded: Any, own: Any, borrow: bool, wait_for_last_replay: Callable[[], None] | None
) -> Replay:
    """Plan how a graph of class `padded` answers calls like `call`, of class `own`."""
    leaves, num_references = (*call.reference_leaves, *call.copied_leaves), len(call.reference_leaves)
    copies = plan_copies(entry.buffers, entry.padding_sources, entry.axes, leaves, num_references)
    outputs = entry.outputs if padded == own else _unpadded(entry.outputs, own)
    handover = hand_over(outputs, entry.buffers, borrow)
    return Replay(entry, wait_for_last_replay, copies.fill if copies else None, entry.recording.replay, handover)


def keep_in_place(result: R, roles: Roles, call: Call) -> R:
    """Move the next value of each donated argument, in the result of an eager call, to the storage of the old value, as
    a replay does, so that a graph captured on that storage finds it. A result that autograd recorded stays as it is."""
    if not roles.donated or (torch.is_grad_enabled() and any(_requires_grad(leaf) for leaf in tree_leaves(result))):
        return result
    count = num_donated(call, roles)
    with torch.no_grad():
        references = tree_unflatten(call.reference_leaves, call.reference_tree)
        outputs = make_outputs(result, [references[n] for n in roles.donated if n in references], call.reference_leaves)
    leaves = [
        own if index is None else call.reference_leaves[index].detach() if index < count else leaf
        for own, index, leaf in zip(outputs.leaves, outputs.references, tree_leaves(result), strict=True)
    ]
    in_place: R = tree_unflatten(leaves, outputs.structure)
    return in_place


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _unpadded(outputs: Outputs, own: Any) -> Outputs:
    """The outputs as views of the sizes of class `own`."""
    views, structure = tree_flatten(unpad(tree_unflatten(list(outputs.leaves), outputs.structure), own))
    return attrs.evolve(outputs, structure=structure, leaves=tuple(views))
