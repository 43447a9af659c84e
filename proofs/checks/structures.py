"""Finds the first difference between the structures of two trees."""

from typing import Any

from weft.arguments.checks import with_article
from weft.torchapi.private import children_of
from weft.values.keys import value_key
from weft.values.trees import TreeSpec, node_fields


def structure_difference(
    actual: TreeSpec, expected: TreeSpec, path: str = ""
) -> tuple[str, str, str] | None:
    """The path of the first node that differs, and a description of both sides; None if the
    structures are equal.

    >>> from weft.values.trees import tree_structure
    >>> structure_difference(tree_structure({"a": (1, 2)}), tree_structure({"a": [1, 2]}))
    ("['a']", 'a tuple of 2', 'a list of 2')
    """
    if (actual.type, *_told(actual)) != (expected.type, *_told(expected)):
        return path, _words(actual), _words(expected)
    for name, one, other in zip(
        _names(actual), children_of(actual), children_of(expected), strict=True
    ):
        if difference := structure_difference(one, other, path + name):
            return difference
    return None


def _told(spec: TreeSpec) -> tuple[Any, ...]:
    """What must be equal of a node besides its type and children: the number of children, the
    context (static fields among it), and dict keys."""
    # Keys of dicts once more by `value_key`, since 1 equals True in the context.
    return len(children_of(spec)), spec.context, [value_key(key) for key in _keys(spec) or ()]


def _keys(spec: TreeSpec) -> list[Any] | None:
    """The keys of a dict node; None for other nodes."""
    if not (isinstance(spec.type, type) and issubclass(spec.type, dict)):
        return None
    keys = spec.context
    # A defaultdict's context is the pair of its factory and its keys.
    return list(
        keys[1]
        if isinstance(keys, list | tuple) and len(keys) == 2 and isinstance(keys[1], list)
        else keys
    )


def _names(spec: TreeSpec) -> list[str]:
    """The children's paths relative to the node, in the form of
    `weft.values.trees.leaves_with_names`."""
    if (keys := _keys(spec)) is not None:
        return [f"[{key!r}]" for key in keys]
    if isinstance(spec.type, type) and (fields := node_fields(spec.type)) is not None:
        return [f".{name}" for name in fields.of(spec.context)]
    if names := getattr(spec.context, "_fields", None):  # a namedtuple's class
        return [f".{name}" for name in names]
    return [f"[{index}]" for index in range(len(children_of(spec)))]


def _words(spec: TreeSpec) -> str:
    if spec.type is None:
        return "a leaf"
    if (keys := _keys(spec)) is not None:
        return f"{with_article(spec.type.__name__)} of {', '.join(map(repr, keys)) or 'nothing'}"
    if isinstance(spec.type, type) and (fields := node_fields(spec.type)) is not None:
        absent = ((name, None) for name in spec.context.absent)
        statics = (*absent, *zip(fields.statics, spec.context.values, strict=True))
        return f"{with_article(spec.type.__name__)}({', '.join(f'{name}={value!r}' for name, value in statics)})"
    if hasattr(spec.context, "_fields"):
        kind = spec.context
    else:
        kind = spec.type
    return f"{with_article(kind.__name__)} of {len(children_of(spec))}"
