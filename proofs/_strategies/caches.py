"""Impure functions that keep a value from their first call for later calls, which do not show
it."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

# The key by which a kept value is looked up.
KEYS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "the shape": lambda x: x.shape,
    "the dtype": lambda x: x.dtype,
    "the number of dimensions": lambda x: x.dim(),
}

# The value that a call keeps.
KEPT: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda x: x.mean(),
    "the argument": lambda x: x.clone(),
    "a number": lambda x: x.mean().item(),
    "a list": lambda x: x.flatten().tolist(),
    "a choice": lambda x: 1.0 if x.flatten()[0] > 0 else -1.0,
}

# A cache: `(key, make) -> value`, which calls `make` if there is no value for the key.
Look = Callable[[Any, Callable[[], Any]], Any]


def _in_a_closure() -> Look:
    kept: dict[Any, Any] = {}

    def look(key: Any, make: Callable[[], Any]) -> Any:
        if key in kept:
            return kept[key]
        return _put(kept, key, make())

    return look


def _in_an_attribute() -> Look:
    def look(key: Any, make: Callable[[], Any]) -> Any:
        kept = vars(look).setdefault("kept", {})
        if key in kept:
            return kept[key]
        return _put(kept, key, make())

    return look


def _put(kept: dict[Any, Any], key: Any, value: Any) -> Any:
    kept[key] = value
    return value


def _in_a_default() -> Look:
    kept_by_default: dict[Any, Any] = {}

    # Only the default leads to the dict: `look` has no closure.
    def look(key: Any, make: Callable[[], Any], kept: dict[Any, Any] = kept_by_default) -> Any:
        if key in kept:
            return kept[key]
        return _put(kept, key, make())

    return look


def _in_functools() -> Look:
    makers: list[Callable[[], Any]] = []

    @functools.cache
    def cached(key: Any) -> Any:
        return makers[-1]()

    def look(key: Any, make: Callable[[], Any]) -> Any:
        # `functools.cache` must see the key alone, since `make` is a new lambda in each call.
        makers[:] = [make]
        return cached(key)

    return look


def _in_a_module() -> Look:
    module = torch.nn.Module()
    vars(module)["kept"] = {}

    def look(key: Any, make: Callable[[], Any]) -> Any:
        kept = vars(module)["kept"]
        if key in kept:
            return kept[key]
        return _put(kept, key, make())

    return look


PLACES: dict[str, Callable[[], Look]] = {
    "a closure": _in_a_closure,
    "an attribute": _in_an_attribute,
    "a default argument": _in_a_default,
    "functools.cache": _in_functools,
    "a module": _in_a_module,
}
"""The places where a value is kept."""


@attrs.frozen(eq=False)
class Caching:
    """A function of one tensor that keeps a value from a call.

    Args:
        key, kept, place: keys of `KEYS`, `KEPT` and `PLACES`.
        fn: the function.
    """

    key: str
    kept: str
    place: str
    fn: Callable[[Tensor], Tensor] = attrs.field(repr=False)


def caching(key: str, kept: str, place: str) -> Caching:
    """A new function that keeps the value `kept` under `key` in `place`."""
    look = PLACES[place]()

    def centred(x: Tensor) -> Tensor:
        value = look(KEYS[key](x), lambda: KEPT[kept](x))
        # The sum makes a number of every kind of value: a later argument may have another shape.
        return x - torch.as_tensor(value, dtype=x.dtype).sum()

    return Caching(key, kept, place, centred)


def cachings() -> st.SearchStrategy[Caching]:
    """Functions that keep a value from their first call.

    >>> from hypothesis import find
    >>> find(cachings(), lambda caching: caching.kept == "a number")
    Caching(key='nothing', kept='a number', place='a closure')
    """
    return st.builds(caching, *map(st.sampled_from, ([*KEYS], [*KEPT], [*PLACES])))
