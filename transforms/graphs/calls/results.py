"""Outputs of a captured run: which are the donated state, which are the caller's own tensors, which must be copied.

A new state is kept in the storage of the old one: an output tree of the same structure as a donated argument is written
back to it at the end of the capture, where the function did not already work in place.
"""

from collections.abc import Iterator, Sequence, Set
from typing import Any

import attrs
from torch import Tensor

from weft.errors import CaptureError
from weft.torchapi import storage_id
from weft.transforms.graphs.calls.call import Call
from weft.transforms.graphs.calls.memo import PLAIN
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
    """The outputs of one recording, and where each leaf of the caller's result comes from.

    Args:
        structure: of the result.
        leaves: the recording's own output leaves, which a replay overwrites; `...` where `references` has an index.
        references: for each leaf, the index of the caller's own tensor that it is; None for one to copy.
        recorded: for each leaf, whether it required grad when the function returned it.
    """

    structure: TreeSpec
    leaves: tuple[Any, ...]
    references: tuple[int | None, ...]
    recorded: tuple[bool, ...]


def _same_place(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and (a.storage_offset(), a.shape, a.stride(), a.dtype) == (b.storage_offset(), b.shape, b.stride(), b.dtype)
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        and storage_id(a) == storage_id(b)
    )


def subtrees(tree: Any, start: int = 0) -> Iterator[tuple[int, Any]]:
    """`tree`, and the values in its tuples, lists and dicts, outermost first, each with the index of its first leaf."""
    yield start, tree
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    for child in children:
        yield from subtrees(child, start)
        start += len(tree_leaves(child))


def find_next_value(result: Any, donated: Any, taken: Set[int]) -> range | None:
    """The leaves of `result` that are the next value of the `donated` argument: same structure, shapes and dtypes.

    Of several, those that share most storage with it, then the first. None if there are none, or all are `taken`.
    """
    structure, leaves = tree_structure(donated), tree_leaves(donated)
    found: list[tuple[int, range]] = []
    for start, candidate in subtrees(result):
        span = range(start, start + len(leaves))
        if tree_structure(candidate) != structure or not taken.isdisjoint(span):
            continue
        pairs = list(zip(tree_leaves(candidate), leaves, strict=True))
        if all(_same_kind(a, b) for a, b in pairs):
            found.append((sum(_same_place(a, b) for a, b in pairs), span))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _same_kind(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return type(a) is type(b)


def settle(result: Any, donated: Sequence[Any], references: Sequence[Any]) -> Outputs:
    """Run inside the capture, last: write new state back to donated storage, and sort the outputs.

    Args:
        result: what the function returned.
        donated: the donated arguments, of leaves at the caller's addresses.
        references: all leaves that are the caller's own tensors, in order.

    Every output that lies in donated storage without being its rightful next value is copied first, so that the order
    of the writes cannot be seen.
    """
    recorded = [isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(result)]
    result = tree_map(lambda x: x.detach() if isinstance(x, Tensor) and x.requires_grad else x, result)
    leaves, structure = tree_flatten(result)
    homes = _homes(result, donated)
    places = {storage_id(t) for t in tree_leaves(list(donated)) if isinstance(t, Tensor)}

    def detached(leaf: Any, home: Tensor | None) -> Any:
        if not isinstance(leaf, Tensor) or storage_id(leaf) not in places or _same_place(leaf, home):
            return leaf
        return leaf.clone()

    values = [detached(leaf, homes.get(i)) for i, leaf in enumerate(leaves)]
    settled = [_write_back(value, homes.get(i)) for i, value in enumerate(values)]
    owners = _owners(settled, references)
    for i, owner in enumerate(owners):  # a parameter that was detached is not the parameter
        if owner is not None and i not in homes and references[owner].requires_grad != recorded[i]:
            owners[i] = None
    # The caller's own tensors are not held here, or a graph would keep every state alive that it ever ran on.
    own = [leaf if owner is None else ... for leaf, owner in zip(settled, owners, strict=True)]
    return Outputs(structure, tuple(own), tuple(owners), tuple(recorded))


def refuse_recorded(name: str, outputs: Outputs, call: Call, buffers: Sequence[Any]) -> None:
    """Raise CaptureError for a result that requires grad by the function's own doing, and not because it is an argument
    that does: a replay records nothing."""
    pairs = [*zip(buffers, call.copied_leaves, strict=True), *((x, x) for x in call.reference_leaves)]
    requiring = {storage_id(own) for own, x in pairs if isinstance(x, Tensor) and x.requires_grad}
    for index, (recorded, owner) in enumerate(zip(outputs.recorded, outputs.references, strict=True)):
        leaf = outputs.leaves[index] if owner is None else call.reference_leaves[owner]
        if recorded and storage_id(leaf) not in requiring:
            seen = f"its result{_path(outputs, index)} requires grad, which a replay does not record"
            raise CaptureError(name, seen, "return x.detach(), and call requires_grad_() on what was returned")


def _path(outputs: Outputs, index: int) -> str:
    """Where in the result a leaf stands."""
    return leaves_with_names(tree_unflatten(list(outputs.leaves), outputs.structure))[index][0]


def refuse_opaque(name: str, outputs: Outputs, call: Call) -> None:
    """Raise CaptureError for a result that is neither a tensor nor a value that nobody can change: it would be the
    same object after every replay, with whatever tensors it holds."""
    given = {id(x) for x in (*call.statics.values(), *call.reference_leaves, *call.copied_leaves)}
    for index, (leaf, owner) in enumerate(zip(outputs.leaves, outputs.references, strict=True)):
        if owner is not None or leaf is None or isinstance(leaf, (Tensor, *PLAIN)) or id(leaf) in given:
            continue
        where, kind = _path(outputs, index), type(leaf).__name__
        seen = f"its result{where} is of class {kind}, neither tensor, plain value nor pytree"
        instead = "return the tensors, or make its class a pytree (@weft.pytree above @attrs.frozen)"
        raise CaptureError(name, seen, instead)


def _owners(leaves: Sequence[Any], references: Sequence[Any]) -> list[int | None]:
    """For each leaf, the index of the first of `references` that it is, if it is one."""
    found: dict[int, list[int]] = {}
    for i, own in enumerate(references):
        if isinstance(own, Tensor):
            found.setdefault(storage_id(own), []).append(i)
    near = [found.get(storage_id(leaf), []) if isinstance(leaf, Tensor) else [] for leaf in leaves]
    return [
        next((i for i in indices if _same_place(leaf, references[i])), None)
        for leaf, indices in zip(leaves, near, strict=True)
    ]


def _homes(result: Any, donated: Sequence[Any]) -> dict[int, Tensor]:
    """For each output leaf (by index) that is a donated leaf's next value, that donated leaf."""
    homes: dict[int, Tensor] = {}
    for old in donated:
        span = find_next_value(result, old, homes.keys())
        if span is not None:
            homes.update((i, home) for i, home in zip(span, tree_leaves(old), strict=True) if isinstance(home, Tensor))
    return homes


def _write_back(value: Any, home: Tensor | None) -> Any:
    if home is None or _same_place(value, home):
        return value
    home.copy_(value)
    return home
