"""Immutable arguments, such as a model's parameters, are read once and then recognized by identity.

The contents of a frozen class cannot change, all the way down, with one exception: a tensor may get
other memory or other attributes, or may be donated, which sets an attribute. A few calls in C check
the tensors for that.
"""

import weakref
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from weft.values.donation import is_donatable
from weft.values.keys import EXACT
from weft.values.trees import node_fields

# A subtree: its key, its leaves, and its distinct tensors.
ReadTree = tuple[Any, tuple[Any, ...], tuple[Tensor, ...]]
_data_ptr = Tensor.data_ptr


def is_frozen_tree(value: Any) -> bool:
    """Whether a value is of a frozen class registered with `weft.pytree`, and holds only instances
    of such classes, tuples, plain values and tensors."""
    return node_fields(type(value)) is not None and _is_frozen_part(value)


def _is_frozen_part(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, Tensor | float) or kind in EXACT:
        return True
    if kind is tuple:
        return all(map(_is_frozen_part, value))
    if (fields := node_fields(kind)) is None or is_donatable(value) or not _is_frozen_class(kind):
        return False
    return all(
        _is_frozen_part(getattr(value, name)) for name in (*fields.children, *fields.statics)
    )


def _is_frozen_class(kind: type) -> bool:
    """Whether attrs made a class frozen; False for classes that attrs did not make."""
    return getattr(kind.__setattr__, "__name__", "") == "_frozen_setattrs"


@attrs.frozen(eq=False)
class CachedSubtree:
    """A subtree that was read.

    Args:
        subtree: a weak reference to the subtree.
        read: its key, leaves and tensors.
        addresses: the data pointers of its tensors.
        kinds: the types of its tensors.
        attributes: the dictionary of each tensor's attributes.
    """

    subtree: Callable[[], Any]
    read: ReadTree
    addresses: tuple[int, ...]
    kinds: tuple[type, ...]
    attributes: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, subtree: Callable[[], Any], read: ReadTree) -> "CachedSubtree":
        """The subtree as it is now."""
        tensors = read[2]
        addresses = tuple(map(_data_ptr, tensors))
        kinds = tuple(map(type, tensors))
        return cls(subtree, read, addresses, kinds, tuple(map(vars, tensors)))

    def is_valid(self) -> bool:
        """Whether its tensors have the same addresses and types as before, and no attributes. If
        they have any, the subtree is read again, and the generated reader compares them."""
        tensors = self.read[2]
        return (
            tuple(map(_data_ptr, tensors)) == self.addresses
            and tuple(map(type, tensors)) == self.kinds
            and not any(self.attributes)
        )


class _Hashed:
    """A long key whose hash is computed once."""

    def __init__(self, key: Any) -> None:
        self._key = key
        self._hash = hash(key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Hashed) and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash


class SubtreeCache:
    """Reads subtrees of one structure, and caches the last one.

    Args:
        read: reads a subtree; None if it has another structure.
    """

    def __init__(self, read: Callable[[Any], ReadTree | None]) -> None:
        self._read = read
        self._cached: CachedSubtree | None = None

    def read(self, value: Any) -> ReadTree | None:
        """Read a subtree; None if it has another structure."""
        cached = self._cached
        if cached is not None and cached.subtree() is value and cached.is_valid():
            return cached.read
        parsed = self._read(value)
        if parsed is None:
            return None
        key, leaves, tensors = parsed
        read = _Hashed(key), leaves, tensors
        reference = weakref.ref(value, self._forget)  # the cache must not keep the weights alive
        self._cached = CachedSubtree.of(reference, read)
        return read

    def _forget(self, reference: Any) -> None:
        if self._cached is not None and self._cached.subtree is reference:
            self._cached = None
