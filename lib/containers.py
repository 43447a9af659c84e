"""Containers that are not pytrees: attrs classes, dataclasses and mappings, as trees of what they hold."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import attrs
from torch import Tensor

from weft.trees import tree_leaves, tree_map


def opened(tree: Any) -> Any:
    """The tree with a dict in the place of every attrs class, dataclass and mapping in it that is not a pytree.

    >>> from types import MappingProxyType
    >>> opened([MappingProxyType({"a": 1})])
    [{'a': 1}]
    """

    def visit(leaf: Any) -> Any:
        found = _values(leaf)
        return leaf if found is None else {name: opened(value) for name, value in found.items()}

    return tree_map(visit, tree)


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply `fn` to every tensor in a tree, also in the containers that `opened` opens. These are made anew by their
    class; a class that refuses the new values raises its own error."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        found = _values(leaf)
        if found is None or not any(isinstance(x, Tensor) for x in tree_leaves(opened(leaf))):
            return leaf
        return _with_values(leaf, {name: map_tensors(fn, value) for name, value in found.items()})

    return tree_map(visit, tree)


def _values(node: Any) -> dict[str, Any] | None:
    """The values in a container, by the name of the argument that makes them; None for anything else."""
    if isinstance(node, type):
        return None
    if attrs.has(type(node)):
        return {str(f.alias): getattr(node, f.name) for f in attrs.fields(type(node)) if f.init}
    if is_dataclass(node):
        return {f.name: getattr(node, f.name) for f in fields(node) if f.init}
    return dict(node) if isinstance(node, Mapping) else None


def _with_values(node: Any, values: dict[str, Any]) -> Any:
    if attrs.has(type(node)):
        return attrs.evolve(node, **values)
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **values)
    return type(node)(values)
