"""`BoundedDict`: a cache that drops its oldest entries when it is full."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


# Not cachetools: `LRUCache.get` costs several times a dict's on paths that each call takes, and
# raises KeyError where threads share a cache without a lock.
class BoundedDict(OrderedDict[K, V]):
    """A dict of limited size: setting an entry drops the oldest ones that no longer fit.

    A look-up changes nothing, so it takes no lock, costs what a dict's does, and cannot raise in
    one thread because another one is adding an entry. Where the entry used last is to stay longest,
    `move_to_end` says so.

    >>> squares = BoundedDict(2)
    >>> for x in (1, 2, 3):
    ...     squares[x] = x * x
    >>> dict(squares)
    {2: 4, 3: 9}

    Args:
        limit: the most that `size` may return.
        size: the size of a dict; its number of entries, unless given.
    """

    def __init__(self, limit: int, size: Callable[["BoundedDict[K, V]"], int] = len) -> None:
        super().__init__()
        self._limit = limit
        self._size = size

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while self._size(self) > self._limit:
            self.popitem(last=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or pickle the dict with its limit."""
        return type(self), (self._limit, self._size), None, None, iter(self.items())
