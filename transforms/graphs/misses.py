"""Misses: in what a call differs from those that were captured, what would avoid that, and a warning where one function
captures, or runs by itself, without end."""

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import attrs
from torch import Tensor, nn

from weft.transforms.graphs.backends.host_reads import user_line
from weft.transforms.graphs.calls.memo import Key, LeafKey
from weft.transforms.graphs.calls.structures import structure_differences
from weft.trees import TreeSpec

ENDLESS = 8
"""Captures in a row, or calls that run the function itself, that are a sign that no call will ever replay."""
_MOST_SHOWN = 4


@attrs.frozen
class Miss:
    """In what a call differs from a captured one, in words; and what to write so that it does not, if that is known."""

    differs: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.differs}; {self.remedy}" if self.remedy else self.differs


@attrs.frozen
class Changed:
    """The fields in which one key differs from another that calls may change for ever.

    Args:
        donated: arguments that are donated, of another address.
        references: other arguments captured by reference, of another address.
        values: leaves that are numbers, with the new one.
        others: whether there are other differences.
    """

    donated: tuple[str, ...]
    references: tuple[str, ...]
    values: Mapping[str, Any]
    others: bool

    @property
    def fields(self) -> tuple[Any, ...]:
        """What changed, whatever the values are."""
        return (self.donated, self.references, tuple(self.values))

    def __str__(self) -> str:
        moved = [f"{name} (captured by reference, and other tensors at each call)" for name in self.references]
        moved += [f"{name} (donated, and in other storage at each call)" for name in self.donated]
        return ", ".join([*moved, *(f"{name} (a Python value, which is part of the key)" for name in self.values)])

    def remedy(self) -> str:
        """What to write, so that these differences are none."""
        found = [
            f"keep {name} in place ({name}.copy_(...)), or write donate_argnames={name!r} if the call returns its next "
            "value, or reference_argnames=() to copy it in"
            for name in self.references
        ]
        found += [
            f"pass the {name} that the call before returned (copy_ a new one into it), and return the next {name} "
            "before other results of its structure"
            for name in self.donated
        ]
        found += [f"pass {name} as a 0-dim tensor: torch.tensor({value})" for name, value in self.values.items()]
        return "; ".join(found)


def changed_between(new: Key, old: Key, names: Iterable[str], donated: Sequence[str]) -> Changed:
    """The fields in which two keys differ, by kind."""
    same = [_but_leaves(key) for key in (new, old)]
    if same[0] != same[1]:
        return Changed((), (), {}, True)
    moved: dict[str, None] = {}
    values: dict[str, Any] = {}
    others = False
    for name, a, b in zip(names, new.leaves, old.leaves, strict=True):
        if a == b:
            continue
        if isinstance(a, LeafKey) and isinstance(b, LeafKey) and attrs.evolve(a, address=b.address) == b:
            moved[re.split(r"\W", name, maxsplit=1)[0]] = None
        elif not isinstance(b, LeafKey) and _is_number(a):
            values[name] = brief(a)
        else:
            others = True
    return Changed(tuple(n for n in moved if n in donated), tuple(n for n in moved if n not in donated), values, others)


def _but_leaves(key: Key) -> Key:
    bare = [attrs.evolve(part, leaves=()) for part in (key.references, key.copied)]
    return attrs.evolve(key, references=bare[0], copied=bare[1])


def _is_number(key: Any) -> bool:
    return not isinstance(key, LeafKey) and key[0] is not bool and issubclass(key[0], int | float | complex)


def differences(new: Key, old: Key, names: Iterable[str]) -> Iterator[str]:
    """Each field in which two keys differ, in words: the new value, then the captured one."""
    if new.descriptor != old.descriptor:
        yield f"descriptor: '{new.descriptor}', captured '{old.descriptor}'"
    for (name, value), (_, captured) in zip(new.statics, old.statics, strict=False):
        if value != captured:
            yield f"static argument {name}: {brief(value)}, captured {brief(captured)}"
    for (name, value), (_, captured) in zip(new.ambient, old.ambient, strict=True):
        if value != captured:
            yield f"{name}: {value}, captured {captured}"
    parts = (new.references, old.references), (new.copied, old.copied)
    structures = [(one.structure, other.structure) for one, other in parts]
    keys = [(*own.references.keys, *own.copied.keys) for own in (new, old)]
    if any(one != other for one, other in structures) or keys[0] != keys[1]:
        if new.descriptor == old.descriptor:  # which is part of the structure
            for one, other in structures:
                yield from _of_arguments(one, other)
            if all(one == other for one, other in structures):
                yield f"keys of dicts: {brief_all(keys[0])}, captured {brief_all(keys[1])}"
        return
    for name, a, b in zip(names, new.leaves, old.leaves, strict=True):
        if a == b:
            continue
        if isinstance(a, LeafKey) and isinstance(b, LeafKey):
            for field in ("kind", "shape", "dtype", "stride", "device", "flags", "address"):
                value, captured = getattr(a, field), getattr(b, field)
                if value != captured and field != "address":
                    yield f"{name}: {field} {value}, captured {captured}"
                elif value != captured:
                    yield f"{name}: another tensor than the captured one (captured by reference)"
        else:
            yield f"{name}: {brief(a)}, captured {brief(b)}"


def _of_arguments(new: TreeSpec, old: TreeSpec) -> Iterator[str]:
    """The differences in structure of arguments by name."""
    if new.context != old.context:
        yield f"arguments {', '.join(new.context)}, captured {', '.join(old.context)}"
        return
    for name, one, other in zip(new.context, new.children(), old.children(), strict=True):
        for path, seen, captured in structure_differences(one, other):
            yield f"{name}{path}: structure {seen}, captured {captured}"


def brief(key: Any) -> str:
    """A key of one leaf as the value that it stands for."""
    if isinstance(key, LeafKey):
        return "a tensor"
    kind, value = key[:2]
    if issubclass(kind, float):
        return repr(kind.fromhex(value))
    if issubclass(kind, complex):
        return str(value)
    return f"({brief_all(value)})" if issubclass(kind, tuple) else repr(value)


def brief_all(keys: Iterable[Any]) -> str:
    """Several such keys."""
    return ", ".join(brief(key) for key in keys)


def miss_between(new: Key, old: Key, names: Sequence[str], donated: Sequence[str]) -> Miss:
    """In what a call of key `new` differs from one of key `old`."""
    found = differences(new, old, names)
    shown = [*islice(found, _MOST_SHOWN)]
    more = sum(1 for _ in found)
    text = "; ".join([*shown, *([f"and {more} more"] if more else [])])
    return Miss(text, changed_between(new, old, names, donated).remedy())


def nearest_miss(key: Key, memo: Mapping[Key, Any], names: Sequence[str], donated: Sequence[str]) -> Miss:
    """In what `key` differs from the captured key that is most like it."""
    if not memo:
        return Miss("nothing is captured yet")

    def distance(old: Key) -> tuple[bool, int]:
        return key.descriptor != old.descriptor, sum(1 for _ in differences(key, old, names))

    nearest = min(memo, key=distance)
    return miss_between(key, nearest, names, donated)


@attrs.define
class Recaptures:
    """Watches the captures of one function, and warns once where they do not end: where `ENDLESS` of them in a row
    differ, each from the one before, only in the same addresses and numbers, and no call between replayed a graph that
    was there.

    Args:
        name: of the function.
        donated: its donated arguments.
    """

    name: str
    donated: tuple[str, ...]
    _last: Key | None = None
    _fields: tuple[Any, ...] = ()
    _replays: int = 0
    _row: int = 0
    _said: list[Any] = attrs.field(factory=list)

    def note(self, key: Key, names: Sequence[str], replays: int) -> None:
        """Take note of a capture, after so many replays of all graphs together."""
        last, quiet = self._last, replays <= self._replays + 1  # a captured graph is replayed once at once
        self._last, self._replays = key, replays
        changed = None if last is None or not quiet else changed_between(key, last, names, self.donated)
        if changed is None or changed.others:
            self._row, self._fields = 1, ()
            return
        self._row = self._row + 1 if changed.fields == self._fields or self._row == 1 else 2
        self._fields = changed.fields
        if self._row == ENDLESS and changed.fields not in self._said:
            self._said.append(changed.fields)
            warnings.warn(
                f"{self.name}: the last {ENDLESS} calls captured a graph each, and replayed none that was there. They "
                f"differ only in {changed}. Instead: {changed.remedy()}. The last call: {user_line()}",
                RuntimeWarning,
                stacklevel=2,
            )


@attrs.define
class Inlines:
    """Watches the calls of one function that run it inline for an argument's sake, or autograd's, and warns once where
    `ENDLESS` of them in a row do, with no replay between.

    Args:
        name: of the function.
    """

    name: str
    _replays: int = 0
    _row: int = 0
    _said: bool = False

    def note(self, why: Callable[[], str | None], replays: int) -> None:
        """Take note of such a call, after so many replays of all graphs together."""
        self._row = self._row + 1 if replays == self._replays else 1
        self._replays = replays
        if self._row >= ENDLESS and not self._said:
            self._said = True
            warnings.warn(
                f"{self.name}: the last {ENDLESS} calls replayed nothing, but ran the function itself: {why()}. The "
                f"last call: {user_line()}",
                RuntimeWarning,
                stacklevel=2,
            )


def outside_name(fn: Callable[..., Any], tensor: Tensor) -> str:
    """What a function calls a tensor that it reads and is not given: `model.lm_head.weight`."""
    for name, value in _read_by(inspect.unwrap(fn)):
        own = value.named_parameters() if isinstance(value, nn.Module) else [("", value)]
        if (path := next((path for path, x in own if x is tensor), None)) is not None:
            return f"{name}.{path}" if path else name
    return f"a tensor of shape {tuple(tensor.shape)}"


def _read_by(fn: Any) -> Iterator[tuple[str, Any]]:
    """What a function is a method of, closes over, or reads of its module, by name."""
    of = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    yield type(of).__name__, of
    with contextlib.suppress(TypeError, ValueError):  # no function of Python, or a cell that is empty still
        read = inspect.getclosurevars(fn)
        yield from (*read.nonlocals.items(), *read.globals.items())
