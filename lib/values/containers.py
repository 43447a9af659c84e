"""Containers that are not pytrees, such as dataclasses and mappings, as trees of what they hold;
and the detection of containers that a function has changed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import attrs
from torch import Size, Tensor

from weft.torchapi.private import pytree_node
from weft.values.trees import node_fields, tree_leaves, tree_map


def opened(tree: Any) -> Any:
    """The tree with every attrs class, dataclass and mapping that is not a pytree replaced by a
    dict.

    >>> from types import MappingProxyType
    >>> opened([MappingProxyType({"a": 1})])
    [{'a': 1}]
    """

    def visit(leaf: Any) -> Any:
        contents = _values(leaf)
        if contents is None:
            return leaf
        return {name: opened(value) for name, value in contents.items()}

    return tree_map(visit, tree)


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply `fn` to every tensor in a tree, also in the containers that `opened` opens. These are
    made anew by calling their class, which raises its own error if it refuses the new values."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return fn(leaf)
        contents = _values(leaf)
        if contents is None or not any(isinstance(x, Tensor) for x in tree_leaves(opened(leaf))):
            return leaf
        return _with_values(
            leaf, {name: map_tensors(fn, value) for name, value in contents.items()}
        )

    return tree_map(visit, tree)


def _values(node: Any) -> dict[str, Any] | None:
    """The values in a container, by the argument of its class that takes each; None for anything
    that is not a container."""
    if isinstance(node, type):
        return None
    if attrs.has(type(node)):
        # By the alias: `__init__` takes a field `_x` as `x`.
        return {str(f.alias): getattr(node, f.name) for f in attrs.fields(type(node)) if f.init}
    if is_dataclass(node):
        return {f.name: getattr(node, f.name) for f in fields(node) if f.init}
    if isinstance(node, Mapping):
        return dict(node)
    return None


def _with_values(node: Any, values: dict[str, Any]) -> Any:
    if attrs.has(type(node)):
        return attrs.evolve(node, **values)
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **values)
    return type(node)(values)


# A dict, a list or another container that can change: its path, itself, and its children.
Container = tuple[str, Any, list[Any]]


def containers_in(arguments: Mapping[str, Any]) -> list[Container]:
    """The mutable containers in the arguments of a call, given by name: all but tuples and frozen
    classes."""
    return [
        container for name, value in arguments.items() for container in _containers(name, value)
    ]


def _containers(path: str, node: Any) -> Iterator[Container]:
    # A torch.Size is a leaf in weft's trees, although torch's pytree opens it.
    if type(node) is Size:
        children = []
    else:
        children = _children(node)
    if (
        not isinstance(node, tuple)
        and node_fields(type(node)) is None
        and pytree_node(type(node)) is not None
    ):
        yield path, node, children
    for index, child in enumerate(children):
        if type(child) is not Tensor:
            if isinstance(node, dict):
                key = [*node][index]
            else:
                key = index
            yield from _containers(f"{path}[{key!r}]", child)


def _children(node: Any) -> list[Any]:
    if (fields := node_fields(type(node))) is not None:
        return fields.values(node)
    node_def = pytree_node(type(node))
    if node_def is None:
        return []
    return list(node_def.flatten_fn(node)[0])


def changed_container(before: Iterable[Container]) -> str | None:
    """The path of the first of these containers that has changed since; None if none has."""
    for path, node, children in before:
        now = _children(node)
        # By identity: `==` of tensors compares their values.
        if len(now) != len(children) or any(x is not y for x, y in zip(now, children, strict=True)):
            return path
    return None
