"""Outputs of a captured run, sorted: the next donated state, the caller's own tensors, and the tensors to copy.

The next state is kept in the storage of the old one: at the end of the capture, an output tree with the structure of a
donated argument is written back to that argument, unless the function worked in place.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Any

import attrs
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi.private import storage_id
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.calls.key import PLAIN
from weft.trees import (
    TreeSpec,
    leaves_with_names,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)


@attrs.frozen
class Outputs:
    """The outputs of one recording, and the source of each leaf of the caller's result.

    Args:
        structure: the structure of the result.
        leaves: the recording's own output leaves, which a replay overwrites; `...` where `references` has an index.
        references: for each leaf that is one of the caller's own tensors, its index among them; None for the others.
        required_grad: for each leaf, whether it required grad when the function returned it.
    """

    structure: TreeSpec
    leaves: tuple[Any, ...]
    references: tuple[int | None, ...]
    required_grad: tuple[bool, ...]


def _same_view(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.storage_offset(), a.shape, a.stride(), a.dtype) == (b.storage_offset(), b.shape, b.stride(), b.dtype)
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        and storage_id(a) == storage_id(b)
    )


def subtrees(tree: Any, start: int = 0) -> Iterator[tuple[int, Any]]:
    """(index of its first leaf, subtree) for `tree` and all values in its tuples, lists and dicts, outermost first."""
    yield start, tree
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    for child in children:
        yield from subtrees(child, start)
        start += len(tree_leaves(child))


def find_next_value(result: Any, donated: Any, taken: Set[int]) -> range | None:
    """The leaves of `result` that are the next value of the `donated` argument: same structure, shapes and dtypes.

    Among several candidates, the one that shares most tensors with the argument is chosen, then the first. None if
    there is no candidate that is not `taken`.
    """
    structure, leaves = tree_structure(donated), tree_leaves(donated)
    found: list[tuple[int, range]] = []
    for start, candidate in subtrees(result):
        span = range(start, start + len(leaves))
        if tree_structure(candidate) != structure or not taken.isdisjoint(span):
            continue
        pairs = list(zip(tree_leaves(candidate), leaves, strict=True))
        if all(_same_kind(a, b) for a, b in pairs):
            found.append((sum(_same_view(a, b) for a, b in pairs), span))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _same_kind(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return type(a) is type(b)


def make_outputs(result: Any, donated: Sequence[Any], references: Sequence[Any]) -> Outputs:
    """Write the next state back to the donated storage, and sort the outputs. The last step inside a capture.

    Args:
        result: what the function returned.
        donated: the donated arguments, with leaves at the caller's addresses.
        references: all leaves that are the caller's own tensors, in order.

    An output that lies in donated storage, and is not the next value of that storage, is copied first, so that the
    order of the writes does not matter.
    """
    required_grad = [isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(result)]
    result = tree_map(lambda x: x.detach() if isinstance(x, Tensor) and x.requires_grad else x, result)
    leaves, structure = tree_flatten(result)
    targets = _write_back_targets(result, donated)
    donated_storages = {storage_id(t) for t in tree_leaves(list(donated)) if isinstance(t, Tensor)}

    def outside_donated(leaf: Any, target: Tensor | None) -> Any:
        if not isinstance(leaf, Tensor) or storage_id(leaf) not in donated_storages or _same_view(leaf, target):
            return leaf
        return leaf.clone()

    values = [outside_donated(leaf, targets.get(i)) for i, leaf in enumerate(leaves)]
    written = [_write_back(value, targets.get(i)) for i, value in enumerate(values)]
    owners = _owners(written, references)
    for i, owner in enumerate(owners):  # a detached parameter is not the parameter
        if owner is not None and i not in targets and references[owner].requires_grad != required_grad[i]:
            owners[i] = None
    # The caller's own tensors are not held here, or a graph would keep every state alive that it ever ran on.
    own = [leaf if owner is None else ... for leaf, owner in zip(written, owners, strict=True)]
    return Outputs(structure, tuple(own), tuple(owners), tuple(required_grad))


def refuse_requiring_grad(name: str, outputs: Outputs, call: Call, buffers: Sequence[Any]) -> None:
    """Raise CaptureError for a result that requires grad because of what the function did, and not because it is an
    argument that does: autograd records nothing in a replay."""
    pairs = [*zip(buffers, call.copied_leaves, strict=True), *((x, x) for x in call.reference_leaves)]
    requiring = {storage_id(own) for own, x in pairs if isinstance(x, Tensor) and x.requires_grad}
    for index, (required_grad, owner) in enumerate(zip(outputs.required_grad, outputs.references, strict=True)):
        leaf = outputs.leaves[index] if owner is None else call.reference_leaves[owner]
        if required_grad and storage_id(leaf) not in requiring:
            seen = f"its result{_path(outputs, index)} requires grad, which a replay does not record"
            raise CaptureError(name, seen, "return x.detach(), and call requires_grad_() on what was returned")


def _path(outputs: Outputs, index: int) -> str:
    """The path of a leaf in the result."""
    return leaves_with_names(tree_unflatten(list(outputs.leaves), outputs.structure))[index][0]


def refuse_opaque(name: str, outputs: Outputs, call: Call) -> None:
    """Raise CaptureError for a result that is neither a tensor nor an immutable value: every replay would return the
    same object, with the tensors of the capture in it."""
    given = {id(x) for x in (*call.statics.values(), *call.reference_leaves, *call.copied_leaves)}
    for index, (leaf, owner) in enumerate(zip(outputs.leaves, outputs.references, strict=True)):
        if owner is not None or leaf is None or isinstance(leaf, (Tensor, *PLAIN)) or id(leaf) in given:
            continue
        where, kind = _path(outputs, index), type(leaf).__name__
        seen = f"its result{where} is of class {kind}, which is neither a tensor, a plain value nor a pytree"
        instead = "return the tensors, or make its class a pytree (@weft.pytree above @attrs.frozen)"
        raise CaptureError(name, seen, instead)


def _owners(leaves: Sequence[Any], references: Sequence[Any]) -> list[int | None]:
    """For each leaf, the index of the first of `references` that is the same view of the same storage, or None."""
    found: dict[int, list[int]] = {}
    for i, own in enumerate(references):
        if isinstance(own, Tensor):
            found.setdefault(storage_id(own), []).append(i)
    candidates = [found.get(storage_id(leaf), []) if isinstance(leaf, Tensor) else [] for leaf in leaves]
    return [
        next((i for i in indices if _same_view(leaf, references[i])), None)
        for leaf, indices in zip(leaves, candidates, strict=True)
    ]


def _write_back_targets(result: Any, donated: Sequence[Any]) -> dict[int, Tensor]:
    """The donated leaf, for the index of each output leaf that is its next value."""
    targets: dict[int, Tensor] = {}
    for old in donated:
        span = find_next_value(result, old, targets.keys())
        if span is not None:
            targets.update(
                (i, target) for i, target in zip(span, tree_leaves(old), strict=True) if isinstance(target, Tensor)
            )
    return targets


def _write_back(value: Any, target: Tensor | None) -> Any:
    if target is None or _same_view(value, target):
        return value
    target.copy_(value)
    return target
