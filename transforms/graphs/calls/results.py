"""The outputs of a capture, and how a replay hands them to the caller.

The outputs are sorted into the next donated state, the caller's own tensors, and the tensors to
clone or to lend. The next state is kept in the storage of the old one: at the end of the capture,
an output tree with the structure of a donated argument is written back to that argument, unless the
function worked in place.
"""

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from weft.batches.padding import cut
from weft.errors import CaptureError
from weft.ops.copying.byte_copies import is_bytes
from weft.ops.copying.copies import plan_clones, uses_kernel
from weft.torchapi.private import children_of, clone_all, storage_id
from weft.transforms.graphs.calls.builder import Template, write_template
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.calls.key import PLAIN
from weft.values.trees import (
    TreeSpec,
    leaves_with_names,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)


@attrs.frozen
class Outputs:
    """The outputs of one recording, and the source of each leaf of the caller's result.

    Args:
        structure: the structure of the result.
        leaves: the recording's own output leaves, which a replay overwrites; `...` where
            `references` has an index.
        references: for each leaf that is one of the caller's own tensors, its index among them;
            None for the others.
        required_grad: for each leaf, whether it required grad when the function returned it.
        detached: for each leaf, whether it is the caller's own tensor, which requires grad, with a
            value that does not.

    The template, which depends on the structure alone, is made once for the results of all classes.
    """

    structure: TreeSpec
    leaves: tuple[Any, ...]
    references: tuple[int | None, ...]
    required_grad: tuple[bool, ...]
    detached: tuple[bool, ...]
    _templates: list[Template] = attrs.field(factory=list, init=False, eq=False, repr=False)

    def template(self) -> Template:
        """The code that makes the caller's result."""
        # Not in `__init__`: a capture that is refused never needs the template.
        if not self._templates:
            self._templates.append(
                write_template(self.structure, self.leaves, self.references, self.detached)
            )
        return self._templates[0]

    def cut(self, descriptor: Any) -> list[Any]:
        """The leaves as views of the sizes of class `descriptor`."""
        pairs = zip(self.leaves, self.template().axes(), strict=True)
        return [
            leaf if spec is None or not isinstance(leaf, Tensor) else cut(leaf, spec, descriptor)
            for leaf, spec in pairs
        ]


def _same_view(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.storage_offset(), a.shape, a.stride(), a.dtype)
        == (b.storage_offset(), b.shape, b.stride(), b.dtype)
        # Two views of the same bytes are different values if one of them is a lazy conjugate.
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        and storage_id(a) == storage_id(b)
    )


def subtrees(structure: TreeSpec, start: int = 0) -> Iterator[tuple[int, TreeSpec]]:
    """Yield (index of the first leaf, structure) for a tree and all trees in its tuples, lists and
    dicts, outermost first."""
    # Outermost first, so that a whole state is preferred to a part of it that has the same
    # structure.
    yield start, structure
    kind = structure.type
    if kind is namedtuple or (isinstance(kind, type) and issubclass(kind, tuple | list | dict)):
        for child in children_of(structure):
            yield from subtrees(child, start)
            start += child.num_leaves


def find_next_value(result: Any, donated: Any, taken: Set[int]) -> range | None:
    """The leaves of `result` that are the next value of the `donated` argument: same structure,
    shapes and dtypes.

    Among several candidates, the one that shares most tensors with the argument is chosen; among
    equals, the first. None if every candidate has `taken` leaves, or if there is none.
    """
    (leaves, donated_structure), (result_leaves, structure) = (
        tree_flatten(donated),
        tree_flatten(result),
    )
    matches: list[tuple[int, range]] = []
    for start, candidate in subtrees(structure):
        span = range(start, start + len(leaves))
        if (
            candidate.num_leaves != len(leaves)
            or candidate != donated_structure
            or not taken.isdisjoint(span)
        ):
            continue
        pairs = list(zip(result_leaves[start : span.stop], leaves, strict=True))
        if all(_same_kind(a, b) for a, b in pairs):
            # A function may return two trees that look like its state, such as the new and the old
            # one. The one that shares its storage was written in place, so it is the next value.
            matches.append((sum(_same_view(a, b) for a, b in pairs), span))
    if matches:
        return max(matches, key=lambda pair: pair[0])[1]
    return None


def _same_kind(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return type(a) is type(b)


def make_outputs(result: Any, donated: Sequence[Any], references: Sequence[Any]) -> Outputs:
    """Write the next state back to the donated storage, and sort the outputs. The last step inside
    a capture.

    Args:
        result: what the function returned.
        donated: the donated arguments, with leaves at the caller's addresses.
        references: all leaves that are the caller's own tensors, in order.

    An output that lies in donated storage but is not the next value of that storage is cloned
    first, so that the order of the writes does not matter.
    """
    leaves, structure = tree_flatten(result)
    required_grad = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
    leaves = [
        x.detach() if required else x for x, required in zip(leaves, required_grad, strict=True)
    ]
    targets = _write_back_targets(result, donated)
    donated_storages = {storage_id(t) for t in tree_leaves(list(donated)) if isinstance(t, Tensor)}

    def outside_donated(leaf: Any, target: Tensor | None) -> Any:
        if (
            not isinstance(leaf, Tensor)
            or storage_id(leaf) not in donated_storages
            or _same_view(leaf, target)
        ):
            return leaf
        return leaf.clone()

    # All clones come before all writes: a function may swap two leaves of its state.
    values = [outside_donated(leaf, targets.get(i)) for i, leaf in enumerate(leaves)]
    written = [_write_back(value, targets.get(i)) for i, value in enumerate(values)]
    owners = _owners(written, references)
    for i, owner in enumerate(owners):  # a detached parameter is not the caller's parameter
        if (
            owner is not None
            and i not in targets
            and references[owner].requires_grad != required_grad[i]
        ):
            owners[i] = None
    # Do not hold the caller's own tensors, or a graph would keep alive every state that it ever ran
    # on.
    kept_leaves = [
        leaf if owner is None else ... for leaf, owner in zip(written, owners, strict=True)
    ]
    pairs = zip(owners, required_grad, strict=True)
    detached = [
        owner is not None and references[owner].requires_grad and not required
        for owner, required in pairs
    ]
    return Outputs(
        structure, tuple(kept_leaves), tuple(owners), tuple(required_grad), tuple(detached)
    )


def refuse_requiring_grad(name: str, outputs: Outputs, call: Call, leaves: Sequence[Any]) -> None:
    """Raise CaptureError for a result that requires grad, unless it is an argument that does:
    autograd records nothing in a replay.

    Args:
        name: the call, in the error.
        outputs: the outputs of the run.
        call: the call.
        leaves: what the run had in place of the call's leaves.
    """
    originals = (*call.reference_leaves, *call.copied_leaves)
    requiring = {
        # An argument that is returned as it came, or a view of it, may go on requiring grad.
        storage_id(leaf)
        for leaf, x in zip(leaves, originals, strict=True)
        if isinstance(x, Tensor) and x.requires_grad
    }
    for index, (required_grad, owner) in enumerate(
        zip(outputs.required_grad, outputs.references, strict=True)
    ):
        if owner is None:
            leaf = outputs.leaves[index]
        else:
            leaf = leaves[owner]
        if required_grad and storage_id(leaf) not in requiring:
            problem = (
                f"its result{_path(outputs, index)} requires grad, which a replay does not record"
            )
            raise CaptureError(
                name, problem, "return x.detach(), and call requires_grad_() on what was returned"
            )


def _path(outputs: Outputs, index: int) -> str:
    """The path of a leaf in the result."""
    return leaves_with_names(_tree(outputs))[index][0]


def refuse_opaque(name: str, outputs: Outputs, call: Call) -> None:
    """Raise CaptureError for a result that is neither a tensor nor an immutable value: every replay
    would return the same object, with the tensors of the capture in it."""
    # An object that the caller passed in and gets back is the caller's own at every replay too.
    argument_ids = {
        id(x) for x in (*call.statics.values(), *call.reference_leaves, *call.copied_leaves)
    }
    for index, (leaf, owner) in enumerate(zip(outputs.leaves, outputs.references, strict=True)):
        if (
            owner is not None
            or leaf is None
            or isinstance(leaf, (Tensor, *PLAIN))
            or id(leaf) in argument_ids
        ):
            continue
        where = _path(outputs, index)
        kind = type(leaf).__name__
        problem = (
            f"its result{where} is of class {kind}, which is neither a tensor, a plain value nor a"
            " pytree"
        )
        instead = (
            "return the tensors, or make its class a pytree (@weft.pytree above @attrs.frozen)"
        )
        if type(leaf).__module__.partition(".")[0] == "transformers":
            instead = (
                "call the model with use_cache=False, or give it the cache as an argument, as"
                " proofs/pages/your_modules.md does for a decoder"
            )
        raise CaptureError(name, problem, instead)


def _owners(leaves: Sequence[Any], references: Sequence[Any]) -> list[int | None]:
    """For each leaf, the index of the first of `references` that is the same view of the same
    storage, or None."""
    indices_by_storage: dict[int, list[int]] = {}
    for i, reference in enumerate(references):
        if isinstance(reference, Tensor):
            indices_by_storage.setdefault(storage_id(reference), []).append(i)
    candidates = [
        indices_by_storage.get(storage_id(leaf), []) if isinstance(leaf, Tensor) else []
        for leaf in leaves
    ]
    return [
        next((i for i in indices if _same_view(leaf, references[i])), None)
        for leaf, indices in zip(leaves, candidates, strict=True)
    ]


def _write_back_targets(result: Any, donated: Sequence[Any]) -> dict[int, Tensor]:
    """The donated leaves, by the index of the output leaf that is their next value."""
    targets: dict[int, Tensor] = {}
    for old in donated:
        span = find_next_value(result, old, targets.keys())
        if span is not None:
            targets.update(
                (i, target)
                for i, target in zip(span, tree_leaves(old), strict=True)
                if isinstance(target, Tensor)
            )
    return targets


def _write_back(value: Any, target: Tensor | None) -> Any:
    if target is None or _same_view(value, target):
        return value
    target.copy_(value)
    return target


def _tree(outputs: Outputs) -> Any:
    return tree_unflatten(list(outputs.leaves), outputs.structure)


R = TypeVar("R")
Cloner = Callable[[Any], list[Tensor]]


def plan_lending(outputs: Sequence[Tensor], cloned: Sequence[int]) -> Cloner:
    """Plan to lend all outputs except those at the indices `cloned`, which are cloned."""
    if len(cloned) == len(outputs):
        return plan_cloning(outputs)
    if cloned:
        return _merged(lend_all, [((*cloned,), plan_cloning([outputs[i] for i in cloned]))])
    return lend_all


def lend_all(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The graph's own buffers, which the next replay overwrites. They are new tensor objects, so
    that one caller's `t_()` or donation does not affect the next caller."""
    return [x.data for x in outputs]  # `.data` takes half the time of `detach()`


def plan_cloning(outputs: Sequence[Tensor]) -> Cloner:
    """Plan to clone these outputs in few launches."""
    # On a GPU one kernel copies all outputs at once. On a CPU, `clone_all` calls one operator for a
    # group. Tensors of other kinds (subclasses, sparse ones) are cloned one by one.
    by_kernel: dict[Any, list[int]] = {}
    together: dict[Any, list[int]] = {}
    for i, x in enumerate(outputs):
        if type(x) is Tensor and is_bytes(x):
            if uses_kernel(x.device):
                by_kernel.setdefault(x.device, []).append(i)
            elif x.numel() and x.is_contiguous():
                together.setdefault((x.dtype, x.device), []).append(i)
    # A clone of a small tensor costs little but its launch, so outputs are cloned in groups.
    groups: list[tuple[tuple[int, ...], Cloner]] = []
    groups += [
        ((*group,), plan_clones([outputs[i] for i in group])) for group in by_kernel.values()
    ]
    groups += [((*group,), clone_all) for group in together.values() if len(group) > 1]
    # The usual case: no merging, which would cost a Python loop at each replay.
    if len(groups) == 1 and len(groups[0][0]) == len(outputs):
        return groups[0][1]
    grouped = {i for group, _ in groups for i in group}
    return _merged(
        lambda outputs: [x if i in grouped else x.clone() for i, x in enumerate(outputs)], groups
    )


def _merged(rest: Cloner, groups: Sequence[tuple[tuple[int, ...], Cloner]]) -> Cloner:
    """Clone the outputs at each group's indices with the group's cloner, and all others with
    `rest`."""

    def merge(outputs: tuple[Tensor, ...]) -> list[Tensor]:
        results = rest(outputs)
        for indices, clone in groups:
            for index, cloned in zip(
                indices, clone(tuple(outputs[i] for i in indices)), strict=True
            ):
                results[index] = cloned
        return results

    if groups:
        return merge
    return rest


@attrs.frozen(eq=False)
class Handover:
    """The plan that makes the caller's result after a replay.

    Args:
        outputs: the recording's own output tensors; or the list in which a replay puts new ones.
        build: `(the clones or lent tensors, the caller's own leaves) -> result`.
        clone_or_lend: clones the outputs, so that no later replay changes the result, or lends
            them.
    """

    outputs: Sequence[Tensor]
    build: Callable[[Sequence[Tensor], Sequence[Any]], Any]
    clone_or_lend: Cloner


def hand_over(
    outputs: Outputs, buffers: Sequence[Any], borrow: bool, descriptor: Any = None
) -> Handover:
    """Plan how the results of a recording reach the caller.

    Args:
        outputs: the recording's outputs.
        buffers: the recording's input buffers. An output that lies in one of them is never lent: if
            it were passed to the next call, it could be overwritten while it is read.
        borrow: whether the other outputs are lent; otherwise they are cloned.
        descriptor: the class that results are cut to; None: results keep the class of the graph.
    """
    leaves = outputs.leaves if descriptor is None else outputs.cut(descriptor)
    pairs = zip(leaves, outputs.references, strict=True)
    tensors = [leaf for leaf, reference in pairs if reference is None and isinstance(leaf, Tensor)]
    inputs = {storage_id(x) for x in buffers if isinstance(x, Tensor)}
    cloned = [i for i, x in enumerate(tensors) if not borrow or storage_id(x) in inputs]
    return Handover(
        tuple(tensors), outputs.template().builder(descriptor), plan_lending(tensors, cloned)
    )


def keep_in_place(result: R, donated: Sequence[str], call: Call) -> R:
    """In the result of an eager call, move the next value of each donated argument to the storage
    of the old value, as a replay does, so that a graph captured on that storage finds it there. A
    result that autograd recorded is returned unchanged."""
    # Autograd has saved the new values for its backward pass; moving them would break that.
    if not donated or (
        torch.is_grad_enabled() and any(_requires_grad(leaf) for leaf in tree_leaves(result))
    ):
        return result
    with torch.no_grad():
        taken = []
        start = 0
        for name, part in zip(call.references, children_of(call.reference_tree), strict=True):
            stop = start + part.num_leaves
            if name in donated:
                taken.append(tree_unflatten(call.reference_leaves[start:stop], part))
            start = stop
        outputs = make_outputs(result, taken, call.reference_leaves)
    leaves = [
        (
            output
            if index is None
            else call.reference_leaves[index].detach()
            if index < call.num_donated
            else leaf
        )
        for output, index, leaf in zip(
            outputs.leaves, outputs.references, tree_leaves(result), strict=True
        )
    ]
    in_place: R = tree_unflatten(leaves, outputs.structure)
    return in_place


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
