"""`unchanged`: refuses a captured run of a module that changes what no replay would change again."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.jit import ScriptModule

from weft.errors import CaptureError

_VALUES = (int, float, complex, str, bytes, type(None))
_MEMBERS = ("_parameters", "_buffers", "_modules")
"""The attributes whose values `functional_call` gives and takes back."""


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Context of a captured run of a module. It restores the module's attributes, and the generators of Python and
    NumPy, if the run changed them.

    Args:
        module: all of its parts are watched: their attributes, and the contents of lists, dicts and sets among them.

    Raises:
        CaptureError: the run changed one.
    """
    parts = [(path, part) for path, part in module.named_modules() if not isinstance(part, ScriptModule)]
    before = {path: {key: (value, _contents(value)) for key, value in _attributes(part)} for path, part in parts}
    draws = [(generator, get, put, get()) for generator, get, put in _generators()]
    try:
        yield
    finally:
        changed = [f"{path}.{key}".lstrip(".") for path, part in parts for key in _restore(part, before[path])]
        drawn = [generator for generator, get, put, state in draws if _differs(get(), state) and not put(state)]
    if changed:
        seen = f"{changed[0]} of the module changes while it runs, and a replay does not repeat that"
        path, _, key = changed[0].rpartition(".")
        instead = f"return it, or register_buffer({key!r}, ...); if it is set only once, run the module before"
        if f"{key}_orig" in vars(module.get_submodule(path))["_parameters"]:
            instead = "torch.nn.utils.parametrizations in the place of this hook; prune.remove(...) of a pruned module"
    elif drawn:
        seen, instead = f"a draw from {drawn[0]}, which a replay does not repeat", "a draw from torch: torch.rand(...)"
    else:
        return
    raise CaptureError(f"graphify(stage {type(module).__name__})", seen, instead)


def _attributes(part: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module; without those that torch's own modules keep for themselves."""
    skipped = "_" if type(part).__module__.startswith("torch.nn.") else _MEMBERS
    return [(key, value) for key, value in vars(part).items() if not key.startswith(skipped)]


def _contents(value: Any) -> Any:
    """A copy of what a container holds; None for any other value."""
    return value.copy() if type(value) in (list, dict, set) else None


def _same(now: Any, was: Any) -> bool:
    return now is was or (type(now) is type(was) and isinstance(now, _VALUES) and now == was)


def _same_contents(now: Any, was: Any) -> bool:
    if was is None or isinstance(was, set):
        return was is None or now == was
    items = [*now.items()] if isinstance(was, dict) else [*enumerate(now)]
    others = [*was.items()] if isinstance(was, dict) else [*enumerate(was)]
    return len(items) == len(others) and all(
        key == other and _same(value, own) for (key, value), (other, own) in zip(items, others, strict=True)
    )


def _restore(part: nn.Module, before: dict[str, tuple[Any, Any]]) -> list[str]:
    """Give a module its attributes back. Returns the names of those that had changed."""
    now, changed = dict(_attributes(part)), []
    for key in now.keys() - before.keys():
        vars(part).pop(key)
        changed.append(key)
    for key, (value, contents) in before.items():
        if key in now and _same(now[key], value) and _same_contents(value, contents):
            continue
        vars(part)[key] = value
        if isinstance(value, list):
            value[:] = contents
        elif contents is not None:
            value.clear()
            value.update(contents)
        changed.append(key)
    return changed


def _generators() -> list[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """The generators that are not torch's: their names, and functions that get and set their states."""
    found: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [("random", random.getstate, random.setstate)]
    if (numpy := sys.modules.get("numpy")) is not None:
        found.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
    return found


def _differs(now: Any, was: Any) -> bool:
    """Whether the states of a generator differ. They are tuples of numbers, and one array."""
    return [list(x) if hasattr(x, "shape") else x for x in now] != [list(x) if hasattr(x, "shape") else x for x in was]
