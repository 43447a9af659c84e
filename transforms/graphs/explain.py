"""Explanations: what a call would do, and why; how a call differs from the captured ones, and how
to avoid that; warnings for functions that capture, or run inline, at every call.
"""

import contextlib
import inspect
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import attrs
from torch import Tensor, nn

from weft.settings import config
from weft.transforms.graphs.backends.host_reads import user_line
from weft.transforms.graphs.calls.key import Key, LeafKey
from weft.transforms.graphs.dispatch import Decision
from weft.values.trees import TreeSpec, node_fields

_LOG = logging.getLogger("weft")


@attrs.frozen
class Explanation:
    """What a call would do, and why. Its `str` is the reason.

    Args:
        decision: the mode and the class that the call would run under.
        captured: whether a graph for the call exists.
        reason: the reason in words.
    """

    decision: Decision[Any]
    captured: bool
    reason: str

    def __str__(self) -> str:
        return self.reason


# The number of captures in a row, or of inline calls in a row, after which a warning says that
# nothing replays.
ENDLESS = 8
# The number of differences that a message lists; it only counts further ones.
_MOST_SHOWN = 4


@attrs.frozen
class Miss:
    """The difference between a call and a captured one, in words, and the code that avoids it
    (empty if unknown)."""

    differs: str
    remedy: str = ""

    def __str__(self) -> str:
        if self.remedy:
            return f"{self.differs}; {self.remedy}"
        return self.differs


@attrs.frozen
class Changed:
    """The fields in which two keys differ, of the kinds that can differ again at every call.

    Args:
        donated: donated arguments at another address.
        references: other arguments captured by reference, at another address.
        values: leaves that are numbers, with the new number.
        has_others: whether the keys differ in other fields too.
        outside: the change, in words, of something that the function reads from outside its
            arguments; empty if nothing changed.
    """

    donated: tuple[str, ...]
    references: tuple[str, ...]
    values: Mapping[str, Any]
    has_others: bool
    outside: str = ""

    @property
    def fields(self) -> tuple[Any, ...]:
        """The names of the changed fields, without the values."""
        return (self.donated, self.references, tuple(self.values), self.outside)

    def __str__(self) -> str:
        moved = [
            f"{name} (captured by reference, and other tensors at each call)"
            for name in self.references
        ]
        moved += [f"{name} (donated, and in other storage at each call)" for name in self.donated]
        moved += [f"{name} (a Python value, which is part of the key)" for name in self.values]
        return ", ".join(
            [*moved, *([f"what it reads from outside ({self.outside})"] if self.outside else [])]
        )

    def remedy(self) -> str:
        """The code to write instead, which avoids these differences."""
        remedies = [
            f"keep {name} in place ({name}.copy_(...)), or write donate_argnames={name!r} if the"
            " call returns its next value, or reference_argnames=() to copy it in"
            for name in self.references
        ]
        remedies += [
            f"pass the {name} that the call before returned (copy_ a new one into it), and return"
            f" the next {name} before other results of its structure"
            for name in self.donated
        ]
        remedies += [
            f"pass {name} as a 0-dim tensor: torch.tensor({value})"
            for name, value in self.values.items()
        ]
        remedies += ["keep that as it is, or pass it in as an argument"] if self.outside else []
        return "; ".join(remedies)


def changed_between(
    new: Key, old: Key, names: Callable[[], Iterable[str]], donated: Sequence[str]
) -> Changed:
    """Sort the fields in which two keys differ by kind. `names` makes the names of the leaves; it
    is called only if needed, because it takes milliseconds."""
    if any(
        one != other for one, other in zip(_besides_leaves(new), _besides_leaves(old), strict=True)
    ):
        return Changed((), (), {}, True)
    moved: dict[str, None] = {}
    values: dict[str, Any] = {}
    has_others = False
    for name, a, b in zip(names(), new.leaves, old.leaves, strict=True):
        if a == b:
            continue
        if (
            isinstance(a, LeafKey)
            and isinstance(b, LeafKey)
            and a.besides_address() == b.besides_address()
        ):
            moved[re.split(r"\W", name, maxsplit=1)[0]] = None
        elif not isinstance(b, LeafKey) and _is_number(a):
            values[name] = value_text(a)
        else:
            has_others = True
    return Changed(
        tuple(n for n in moved if n in donated),
        tuple(n for n in moved if n not in donated),
        values,
        has_others,
    )


def _besides_leaves(key: Key) -> tuple[Any, ...]:
    """Everything in a key except the keys of its leaves."""
    structures = [(part.structure, part.keys) for part in (key.references, key.copied)]
    return key.ambient, key.mode, key.statics, key.descriptor, *structures


def _is_number(key: Any) -> bool:
    # A bool is an int to Python, but it has two values, and cannot cause a miss at every call.
    return (
        not isinstance(key, LeafKey)
        and key[0] is not bool
        and issubclass(key[0], int | float | complex)
    )


def differences(new: Key, old: Key, names: Iterable[str]) -> Iterator[str]:
    """Yield each field in which two keys differ, in words: the new value, then the captured one."""
    if new.descriptor != old.descriptor:
        yield f"descriptor: '{new.descriptor}', captured '{old.descriptor}'"
    for (name, value), (_, captured) in zip(new.statics, old.statics, strict=False):
        if value != captured:
            yield f"static argument {name}: {value_text(value)}, captured {value_text(captured)}"
    for (name, value), (_, captured) in zip(new.ambient, old.ambient, strict=True):
        if value != captured:
            yield f"{name}: {value}, captured {captured}"
    parts = (new.references, old.references), (new.copied, old.copied)
    structures = [(one.structure, other.structure) for one, other in parts]
    keys = [(*key.references.keys, *key.copied.keys) for key in (new, old)]
    if any(one != other for one, other in structures) or keys[0] != keys[1]:
        if (
            new.descriptor == old.descriptor
        ):  # the descriptor is part of the structure, and was reported above
            for one, other in structures:
                yield from _argument_differences(one, other)
            if all(one == other for one, other in structures):
                yield f"keys of dicts: {values_text(keys[0])}, captured {values_text(keys[1])}"
        return
    for name, a, b in zip(names, new.leaves, old.leaves, strict=True):
        if a == b:
            continue
        if isinstance(a, LeafKey) and isinstance(b, LeafKey):
            for field in attrs.fields(LeafKey):
                value = getattr(a, field.name)
                captured = getattr(b, field.name)
                if value == captured:
                    continue
                if field.name == "address":
                    yield f"{name}: another tensor than the captured one (captured by reference)"
                elif field.name == "attributes":
                    yield (
                        f"{name}: attributes {_attributes_text(value)}, captured"
                        f" {_attributes_text(captured)}"
                    )
                else:
                    yield f"{name}: {field.name} {value}, captured {captured}"
        else:
            yield f"{name}: {value_text(a)}, captured {value_text(b)}"


def _attributes_text(attributes: Iterable[tuple[str, Any]]) -> str:
    """The attributes that Python code has set on a tensor, as text."""
    return "{" + ", ".join(f"{name}: {value_text(key)}" for name, key in attributes) + "}"


def _argument_differences(new: TreeSpec, old: TreeSpec) -> Iterator[str]:
    """Yield the differences in structure between arguments, by name."""
    # The context of the outermost structure is the names of the arguments.
    if new.context != old.context:
        yield f"arguments {', '.join(new.context)}, captured {', '.join(old.context)}"
        return
    for name, one, other in zip(new.context, new.children(), old.children(), strict=True):
        for path, current, captured in structure_differences(one, other):
            yield f"{name}{path}: structure {current}, captured {captured}"


def value_text(key: Any) -> str:
    """The value that the key of one leaf stands for, as text."""
    if isinstance(key, LeafKey):
        return "a tensor"
    kind, value = key[:2]
    if issubclass(kind, float):
        # Keys hold floats as hexadecimal text, which tells -0.0 from 0.0, and finds NaN equal to
        # itself.
        return repr(kind.fromhex(value))
    if issubclass(kind, complex):
        return str(value)
    if issubclass(kind, tuple | slice):
        return f"{'slice' if kind is slice else ''}({values_text(value)})"
    return repr(value)


def values_text(keys: Iterable[Any]) -> str:
    """The values of several such keys, as text."""
    return ", ".join(value_text(key) for key in keys)


def miss_between(new: Key, old: Key, names: Sequence[str], donated: Sequence[str]) -> Miss:
    """The difference between a call with key `new` and one with key `old`."""
    text = shortened(differences(new, old, names), "; ")
    return Miss(text, changed_between(new, old, lambda: names, donated).remedy())


def shortened(texts: Iterable[str], separator: str) -> str:
    """The first few texts, joined, and the number of the others."""
    # An iterator: with hundreds of parameters the texts that nobody reads are only counted.
    remaining = iter(texts)
    shown = [*islice(remaining, _MOST_SHOWN)]
    more = sum(1 for _ in remaining)
    return separator.join([*shown, *([f"and {more} more"] if more else [])])


def nearest_miss(
    key: Key, memo: Mapping[Key, Any], names: Sequence[str], donated: Sequence[str]
) -> Miss:
    """The difference between `key` and the most similar captured key, preferably of the same
    class."""
    if not memo:
        return Miss("nothing is captured yet")

    def distance(old: Key) -> tuple[bool, int]:
        # The same class first: a user who changed a dtype wants to hear of that, not of the class.
        return key.descriptor != old.descriptor, sum(1 for _ in differences(key, old, names))

    nearest = min(memo, key=distance)
    return miss_between(key, nearest, names, donated)


@attrs.define
class Recaptures:
    """Warns once if a function captures at every call: if each of `ENDLESS` captures in a row
    differs from the previous one only in the same addresses and numbers, and no call in between
    replayed an existing graph.

    Args:
        name: the function's name.
        donated: its donated arguments.
    """

    name: str
    donated: tuple[str, ...]
    _last: Key | None = None
    _fields: tuple[Any, ...] = ()
    _replays: int = 0
    _streak: int = 0
    _warned: list[Any] = attrs.field(factory=list)

    def note(
        self, key: Key, names: Callable[[], Sequence[str]], replays: int, outside: str = ""
    ) -> None:
        """Count a capture.

        Args:
            names: makes the names of the key's leaves.
            replays: the number of replays of all graphs so far.
            outside: what had changed outside the arguments, if that made a graph of this key stale.
        """
        # A call that captures a graph also replays it once, so one replay more is no reuse.
        last = self._last
        quiet = replays <= self._replays + 1
        self._last = key
        self._replays = replays
        if last is None or not quiet:
            changed = None
        else:
            changed = changed_between(key, last, names, self.donated)
        if changed is not None and key == last:
            changed = attrs.evolve(changed, outside=outside)
        if changed is None or changed.has_others:
            self._streak = 1
            self._fields = ()
            return
        self._streak = (
            self._streak + 1 if changed.fields == self._fields or self._streak == 1 else 2
        )
        self._fields = changed.fields
        # Equal to, not above: a streak warns once.
        if self._streak == ENDLESS and changed.fields not in self._warned:
            self._warned.append(changed.fields)
            warnings.warn(
                f"{self.name}: each of the last {ENDLESS} calls captured a graph, and none replayed"
                f" an existing one. They differ only in {changed}. Instead: {changed.remedy()}. The"
                f" last call: {user_line()}",
                RuntimeWarning,
                stacklevel=2,
            )


_MOST_REASONS = 64
# Stands for all reasons after the first `_MOST_REASONS`: reasons contain sizes, so their number has
# no other bound.
OTHER_REASONS = "other reasons"
# The reason of calls that run inline, whatever the argument; `explain` names it.
INLINE = "autograd must see the operators, or an argument has no fixed addresses"


@attrs.define
class EagerCalls:
    """The calls that ran the function itself, by reason. If `weft.config` asks for messages, each
    new reason is logged. "No class covers the batch" is a separate reason for each class of batch.

    Args:
        name: the function's name.
    """

    name: str
    counts: Counter[str] = attrs.field(factory=Counter)

    @property
    def number(self) -> int:
        """The number of these calls."""
        return self.counts.total()

    def note(self, reason: str) -> None:
        """Count a call."""
        if reason not in self.counts and len(self.counts) >= _MOST_REASONS:
            reason = OTHER_REASONS
        is_new = reason not in self.counts
        self.counts[reason] += 1
        # Once for each reason: a decode loop would write thousands of equal lines.
        if is_new and (config.explain_cache_misses or config.log_captures):
            _LOG.warning("%s: runs without a graph: %s", self.name, reason)


@attrs.define
class Inlines:
    """Warns once if a function always runs inline because of an argument or autograd: after
    `ENDLESS` such calls in a row, with no replay in between.

    Args:
        name: the function's name.
    """

    name: str
    _replays: int = 0
    _streak: int = 0
    _warned: bool = False

    def note(self, why: Callable[[], str | None], replays: int) -> None:
        """Count an inline call; `replays` is the number of replays of all graphs so far."""
        self._streak = self._streak + 1 if replays == self._replays else 1
        self._replays = replays
        if self._streak >= ENDLESS and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name}: the last {ENDLESS} calls ran the function itself and replayed"
                f" nothing: {why()}. The last call: {user_line()}",
                RuntimeWarning,
                stacklevel=2,
            )


def outside_name(fn: Callable[..., Any], tensor: Tensor) -> str:
    """The name by which a function reads a tensor that is not an argument, such as
    `model.lm_head.weight`."""
    for name, value in _values_read_by(inspect.unwrap(fn)):
        parameters = value.named_parameters() if isinstance(value, nn.Module) else [("", value)]
        # By identity: two parameters may be equal in value.
        if (path := next((path for path, x in parameters if x is tensor), None)) is not None:
            return f"{name}.{path}" if path else name
    return f"a tensor of shape {tuple(tensor.shape)}"


def _values_read_by(fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the instance that a function is bound to, and for its nonlocals and
    globals."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    yield type(owner).__name__, owner
    with contextlib.suppress(
        TypeError, ValueError
    ):  # not a Python function, or a closure cell that is still empty
        read = inspect.getclosurevars(fn)
        yield from (*read.nonlocals.items(), *read.globals.items())


def structure_text(structure: TreeSpec) -> str:
    """A structure as Python code, with `*` for each leaf.

    >>> from weft.values.trees import tree_structure
    >>> structure_text(tree_structure({"a": [1, 2], "b": (3,)}))
    "{'a': [*, *], 'b': (*,)}"
    """
    if structure.type is None:
        return "*"
    parts = [structure_text(child) for child in structure.children()]
    if structure.type is dict:
        return (
            "{"
            + ", ".join(f"{k!r}: {part}" for k, part in zip(structure.context, parts, strict=True))
            + "}"
        )
    if structure.type is list:
        return f"[{', '.join(parts)}]"
    if structure.type is tuple:
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    if isinstance(structure.context, type):
        named = structure.context
    else:
        named = structure.type
    if (fields := node_fields(structure.type)) is not None:
        parts = [
            f"{name}={part}" for name, part in zip(fields.of(structure.context), parts, strict=True)
        ]
        parts += [f"{name}=None" for name in structure.context.absent]
        parts += [
            f"{name}={value!r}"
            for name, value in zip(fields.statics, structure.context.values, strict=True)
        ]
    return f"{named.__name__}({', '.join(parts)})"


def structure_differences(new: TreeSpec, old: TreeSpec) -> Iterator[tuple[str, str, str]]:
    """The differences between two structures: for each, the path and the text of both structures
    there.

    >>> from weft.values.trees import tree_structure
    >>> [*structure_differences(tree_structure({"a": [1, 2]}), tree_structure({"a": 3}))]
    [("['a']", '[*, *]', '*')]
    """
    if new == old:
        return
    # Here the two differ; below this node there is nothing to compare side by side.
    if (new.type, new.context, new.num_children) != (old.type, old.context, old.num_children):
        yield "", f"{structure_text(new):.200}", f"{structure_text(old):.200}"
        return
    fields = node_fields(new.type)
    if new.type is dict:
        keys = [f"[{k!r}]" for k in new.context]
    else:
        keys = [f"[{i}]" for i in range(new.num_children)]
    if fields:
        steps = [f".{name}" for name in fields.of(new.context)]
    else:
        steps = keys
    for step, one, other in zip(steps, new.children(), old.children(), strict=True):
        for path, current, captured in structure_differences(one, other):
            yield step + path, current, captured
