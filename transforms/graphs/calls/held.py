"""Arguments that cannot change, such as a model's parameters: read once, and known again by being the same object.

What is inside a frozen class, all the way down, is what it was; a tensor alone can still be given another memory, or be
taken. Those are asked, in a few calls of C.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from weft.donation import TAKEN, is_donatable
from weft.trees import node_fields
from weft.value_keys import EXACT

ReadTree = tuple[Any, tuple[Any, ...], tuple[Tensor, ...]]
"""A subtree: its key, its leaves, and those of them that are tensors, each once."""

_data_ptr = Tensor.data_ptr
_MAX_TOKENS = 4096


def is_fixed(value: Any) -> bool:
    """Whether it is of a frozen class, registered with `weft.pytree`, of such classes, tuples, plain values and tensors
    alone."""
    return node_fields(type(value)) is not None and _is_fixed(value)


def _is_fixed(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, Tensor | float) or kind in EXACT:
        return True
    if kind is tuple:
        return all(map(_is_fixed, value))
    if (fields := node_fields(kind)) is None or is_donatable(value) or not _is_frozen(kind):
        return False
    return all(_is_fixed(getattr(value, name)) for name in (*fields.children, *fields.statics))


def _is_frozen(kind: type) -> bool:
    """Whether attrs made a class frozen; False where that cannot be told."""
    return getattr(kind.__setattr__, "__name__", "") == "_frozen_setattrs"


@attrs.frozen(eq=False)
class Known:
    """A subtree that was read.

    Args:
        of: it, as long as somebody else holds it.
        part: what was found.
        addresses, kinds: of its tensors.
    """

    of: Callable[[], Any]
    part: ReadTree
    addresses: tuple[int, ...]
    kinds: tuple[type, ...]

    def holds(self) -> bool:
        """Whether its tensors are where they were, and nobody has taken one."""
        tensors = self.part[2]
        return (
            tuple(map(_data_ptr, tensors)) == self.addresses
            and tuple(map(type, tensors)) == self.kinds
            and not any(map(hasattr, tensors, itertools.repeat(TAKEN)))
        )


class Held:
    """Reads subtrees of one structure; the last one is known again.

    Args:
        read: takes one apart; None if it has another structure.
    """

    def __init__(self, read: Callable[[Any], ReadTree | None]) -> None:
        self._read = read
        self._known: Known | None = None
        self._numbers = itertools.count()
        self._tokens: dict[Any, int] = {}

    def read(self, value: Any) -> ReadTree | None:
        """A subtree, taken apart; in place of its key a number that stands for that key alone."""
        known = self._known
        if known is not None and known.of() is value and known.holds():
            return known.part
        found = self._read(value)
        if found is None:
            return None
        key, leaves, tensors = found
        part = self._token(key), leaves, tensors
        of = weakref.ref(value, self._forget)  # what it holds is not kept alive
        self._known = Known(of, part, tuple(map(_data_ptr, tensors)), tuple(map(type, tensors)))
        return part

    def _token(self, key: Any) -> int:
        if (found := self._tokens.get(key)) is None:
            if len(self._tokens) >= _MAX_TOKENS:
                self._tokens.clear()  # no number is given twice
            found = self._tokens[key] = next(self._numbers)
        return found

    def _forget(self, of: Any) -> None:
        if self._known is not None and self._known.of is of:
            self._known = None
