"""What Python objects hold: the tensors in plain objects, and what a run changes in them.

A capture runs Python code once. So whatever the code keeps in an attribute, a dict entry or a
nonlocal variable is frozen, however deeply nested: transformers' caches count tokens in attributes
of objects in a list of an object. `places_of_tensors` finds tensors there, so that they can be
passed in and out like buffers. A `Snapshot` records everything reachable from some roots, finds
what a run has changed, and restores it.

The search does not enter objects of torch, weft and the standard library (except its containers),
iterators, and objects implemented in C.
"""

import functools
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Literal

import attrs
from torch import Tensor, nn

from weft.values.keys import value_key

# The attributes of a module in which torch keeps tensors and parts.
_MEMBERS = ("_parameters", "_buffers", "_modules")
# Modules of the standard library whose objects are entered: `UserDict`, `SimpleNamespace`.
_OPEN_OF_THE_LIBRARY = ("collections", "types")
_PLAIN = (int, float, complex, str, bytes, type(None))


@attrs.frozen
class Step:
    """One step from an owner to something that it holds.

    Args:
        kind: an attribute; a read-only attribute (`fixed`); an item of a dict, list or deque; an
            element of a tuple; a nonlocal of a function; an attribute of the owner's class.
        key: its name, key or index.
        owner: the name of the class, if the kind is `class`.
    """

    kind: Literal["attribute", "fixed", "item", "element", "nonlocal", "class"]
    key: Any
    owner: str = ""

    def after(self, path: str) -> str:
        """The path, one step longer.

        >>> Step("item", 0).after(Step("attribute", "layers").after("cache"))
        'cache.layers[0]'
        """
        if self.kind == "class":
            return f"{self.owner}.{self.key}"
        if self.kind == "nonlocal":
            return f"{path}.<nonlocal {self.key}>"
        if self.kind in ("attribute", "fixed"):
            if path:
                return f"{path}.{self.key}"
            return str(self.key)
        return f"{path}[{self.key!r}]"


Members = list[tuple[Step, Any]]


def members(owner: Any, registered: Set[int] = frozenset()) -> Members | None:
    """What an object holds, one step deep; None for a value that is not entered.

    Args:
        owner: any object.
        registered: the ids of modules whose parameters, buffers and submodules are left out,
            because the caller knows them.
    """
    if isinstance(owner, nn.Module):
        return [*_of_module(owner, id(owner) in registered), *_of_class(_kind(owner))]
    if isinstance(owner, type):
        return None
    if isinstance(owner, types.FunctionType):
        return _of_function(owner)
    if isinstance(owner, types.MethodType):
        return [
            (Step("fixed", "__self__"), owner.__self__),
            (Step("fixed", "__func__"), owner.__func__),
        ]
    if isinstance(owner, functools.partial):
        return [
            (Step("fixed", name), getattr(owner, name)) for name in ("func", "args", "keywords")
        ]
    entries: Members | None = None
    if isinstance(owner, dict):
        entries = [(Step("item", key), value) for key, value in dict.items(owner)]
    elif isinstance(owner, list | deque):
        entries = [(Step("item", index), value) for index, value in enumerate(owner)]
    elif isinstance(owner, tuple):
        entries = [(Step("element", index), value) for index, value in enumerate(owner)]
    if _is_plain_object(_kind(owner)):
        steps = ((Step("attribute", name), value) for name, value in attributes(owner))
        entries = [*(entries or ()), *steps, *_of_class(_kind(owner))]
    return entries


def _of_module(module: nn.Module, is_registered: bool) -> Iterator[tuple[Step, Any]]:
    """The attributes of a module, without the private ones of torch's modules."""
    private_prefix = "_" if _is_of_torch(type(module)) else ()
    for name, value in vars(module).items():
        if name in _MEMBERS:
            if not is_registered and name != "_parameters":
                yield Step("attribute", name), value
        elif not (private_prefix and name.startswith(private_prefix)):
            yield Step("attribute", name), value


def is_plain_object(value: Any) -> bool:
    """Whether a value is entered for its attributes, and is not a module or a class."""
    return _is_plain_object(_kind(value)) and not isinstance(value, nn.Module | type)


def _kind(value: Any) -> Any:
    """The class of a value, typed so that a cached function takes it."""
    return type(value)


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


@functools.cache
def _is_foreign(kind: Any) -> bool:
    """Whether a class is of torch, of weft or of the standard library."""
    package = kind.__module__.partition(".")[0]
    return package in ("torch", "weft", "numpy") or package in sys.stdlib_module_names


@functools.cache
def _is_plain_object(kind: Any) -> bool:
    """Whether objects of a class are entered for their attributes."""
    package = kind.__module__.partition(".")[0]
    if issubclass(kind, (Tensor, types.ModuleType)) or (
        _is_foreign(kind) and package not in _OPEN_OF_THE_LIBRARY
    ):
        return False
    return bool(_slots(kind)) or any("__dict__" in vars(base) for base in kind.__mro__)


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    """The names of a class's slots, including those of its bases."""
    names = [name for base in kind.__mro__ for name, value in vars(base).items() if _is_slot(value)]
    return tuple(dict.fromkeys(names))


def _is_slot(value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType) and value.__name__ not in (
        "__dict__",
        "__weakref__",
    )


def attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of an object's attributes, in its `__dict__` and its slots."""
    yield from getattr(owner, "__dict__", {}).items()
    for name in _slots(_kind(owner)):
        try:
            yield name, object.__getattribute__(owner, name)
        except AttributeError:  # an empty slot
            continue


@functools.cache
def _classes_with_values(kind: Any) -> tuple[type, ...]:
    return tuple(
        base for base in kind.__mro__ if not _is_foreign(base) and not issubclass(base, tuple)
    )


def _of_class(kind: Any) -> Iterator[tuple[Step, Any]]:
    """The values in the attributes of an object's classes, which all objects of a class share."""
    for base in _classes_with_values(kind):
        for name, value in vars(base).items():
            if isinstance(value, (*_PLAIN, list, dict, set)) and not name.startswith("__"):
                yield Step("class", name, base.__qualname__), value


def _of_function(function: types.FunctionType) -> Members:
    """The nonlocals and the attributes of a function."""
    nonlocals: Members = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            nonlocals.append((Step("nonlocal", name), cell.cell_contents))
        except ValueError:  # an empty cell
            continue
    return [
        *nonlocals,
        *((Step("attribute", name), value) for name, value in vars(function).items()),
    ]


def _get(owner: Any, step: Step) -> Any:
    """Return the member at a step. Raises LookupError or AttributeError if there is none."""
    if step.kind == "attribute" and step.key in getattr(owner, "__dict__", {}):
        return vars(owner)[step.key]
    if step.kind in ("attribute", "fixed"):
        return getattr(owner, step.key)
    if step.kind == "class":
        return vars(_class_of(owner, step))[step.key]
    if step.kind == "nonlocal":
        return owner.__closure__[owner.__code__.co_freevars.index(step.key)].cell_contents
    return owner[step.key]


def _put(owner: Any, step: Step, value: Any) -> None:
    if (
        step.kind == "attribute"
        and hasattr(owner, "__dict__")
        and step.key not in _slots(_kind(owner))
    ):
        # Not `setattr`, which modules and frozen classes override.
        vars(owner)[step.key] = value
    elif step.kind == "attribute":
        object.__setattr__(owner, step.key, value)
    elif step.kind == "nonlocal":
        owner.__closure__[owner.__code__.co_freevars.index(step.key)].cell_contents = value
    elif step.kind == "class":
        setattr(_class_of(owner, step), step.key, value)
    else:
        owner[step.key] = value


def _class_of(owner: Any, step: Step) -> type:
    return next(
        base
        for base in type(owner).__mro__
        if base.__qualname__ == step.owner and step.key in vars(base)
    )


def _remove(owner: Any, step: Step) -> None:
    if step.kind == "class":
        delattr(_class_of(owner, step), step.key)
    elif step.kind == "attribute" and step.key in getattr(owner, "__dict__", {}):
        del vars(owner)[step.key]
    elif step.kind == "attribute":
        object.__delattr__(owner, step.key)


@attrs.frozen(eq=False)
class Place:
    """The place of a tensor: the steps to it from a root."""

    root: Any
    steps: tuple[Step, ...]
    path: str

    def get(self) -> Any:
        """Return the value there now. Raises LookupError or AttributeError if a step is gone."""
        return self._at(len(self.steps))

    def put(self, value: Any) -> None:
        """Put a value there; a tuple on the way is replaced."""
        # From the innermost owner outwards, until one can be changed in place.
        for depth in range(len(self.steps) - 1, -1, -1):
            owner = self._at(depth)
            step = self.steps[depth]
            if step.kind != "element":
                _put(owner, step, value)
                return
            items = [*owner[: step.key], value, *owner[step.key + 1 :]]
            if hasattr(owner, "_fields"):
                value = type(owner)(*items)
            else:
                value = type(owner)(items)

    def owners(self) -> list[Any]:
        """The plain objects on the way."""
        on_the_way = [self._at(depth) for depth in range(len(self.steps))]
        return [owner for owner in on_the_way if _is_plain_object(_kind(owner))]

    def _at(self, depth: int) -> Any:
        value = self.root
        for step in self.steps[:depth]:
            value = _get(value, step)
        return value


def places_of_tensors(
    roots: Mapping[str, Any], registered: Set[int]
) -> list[tuple[Tensor, list[Place]]]:
    """The tensors that plain objects hold, also in containers inside them, each with all places
    that hold it.

    It leaves out parameters, tensors of a subclass, leaves that require a gradient, tensors that
    only modules hold, and tensors in places that cannot be assigned, such as the arguments of a
    partial function.

    Args:
        roots: the modules from which the objects are reached, by path.
        registered: the ids of the modules whose parameters, buffers and submodules are known.
    """
    tensors: dict[int, Tensor] = {}
    places: dict[int, list[Place]] = {}
    of_objects = set[int]()
    fixed = set[int]()
    for place, tensor, in_object in reachable_tensors(roots, registered):
        if type(tensor) is Tensor and not (tensor.requires_grad and tensor.is_leaf):
            tensors[id(tensor)] = tensor
            places.setdefault(id(tensor), []).append(place)
            of_objects.update({id(tensor)} if in_object else ())
            fixed.update({id(tensor)} if _is_fixed(place.steps) else ())
    return [
        (tensor, places[key])
        for key, tensor in tensors.items()
        if key in of_objects and key not in fixed
    ]


def reachable_tensors(
    roots: Mapping[str, Any], registered: Set[int]
) -> Iterator[tuple[Place, Tensor, bool]]:
    """Every place of a tensor that is reachable from some roots, the tensor, and whether a plain
    object is on the way.

    Args:
        roots: the modules from which the objects are reached, by path.
        registered: the ids of the modules whose parameters, buffers and submodules are known.
    """
    start: list[tuple[str, Any, Any, tuple[Step, ...], bool]]
    start = [(path, root, root, (), False) for path, root in roots.items()]
    # Reversed, as members are below: a stack gives back last what was put on it first.
    stack = start[::-1]
    # A value is visited once below plain objects and once outside of them: the answer differs.
    visited = set[tuple[int, bool]]()
    while stack:
        path, value, root, steps, in_object = stack.pop()
        if isinstance(value, Tensor):
            yield Place(root, steps, path), value, in_object
            continue
        if isinstance(value, _PLAIN) or (id(value), in_object) in visited:
            continue
        visited.add((id(value), in_object))
        is_module = isinstance(value, nn.Module)
        if is_module and steps and id(value) in registered:
            continue  # it is a root itself, under its own path
        inside = (in_object or _is_plain_object(_kind(value))) and not is_module
        for step, member in reversed(members(value, registered) or ()):
            stack.append((step.after(path), member, root, (*steps, step), inside))


def _is_fixed(steps: tuple[Step, ...]) -> bool:
    """Whether no other value can be put at the end of the steps. A tuple can be replaced in its
    owner, so the last step that is not into a tuple decides."""
    depth = len(steps) - 1
    while steps[depth].kind == "element":
        depth -= 1
    return steps[depth].kind == "fixed"


@attrs.frozen(eq=False)
class Change:
    """A change that a run made: the path of what changed, and the values before and after it."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        """The change as a predicate, to follow a subject such as `n of the module `."""
        if all(
            isinstance(value, _PLAIN) and len(repr(value)) < 40
            for value in (self.before, self.after)
        ):
            return f"changes from {self.before!r} to {self.after!r} while it runs"
        return "changes while it runs"


class _Absent:
    """Stands for a member that is not there."""


_ABSENT = _Absent()


class Snapshot:
    """Everything reachable from some roots, as it is when the snapshot is taken.

    Args:
        roots: objects, by path.
        registered: the ids of the modules among them whose parameters, buffers and submodules are
            known.
    """

    def __init__(self, roots: Mapping[str, Any], registered: Set[int] = frozenset()) -> None:
        self._roots = dict(roots)
        self._registered = registered
        self._members: dict[int, tuple[Any, Members]] = {}
        self._contents: dict[int, tuple[Any, Any]] = {}
        stack = list(self._roots.values())
        while stack:
            value = stack.pop()
            if (
                isinstance(value, (*_PLAIN, Tensor))
                or id(value) in self._members
                or id(value) in self._contents
            ):
                continue
            if (handle := _contents_handle(value)) is not None:
                self._contents[id(value)] = value, handle.get(value)
            elif (inside := members(value, registered)) is not None:
                self._members[id(value)] = value, inside
                stack += [member for _, member in inside]

    @property
    def num_values(self) -> int:
        """The number of values that a comparison looks at."""
        return len(self._contents) + sum(len(inside) for _, inside in self._members.values())

    def is_unchanged(self) -> bool:
        """Whether all members are still the same objects, with the same contents. It is a quick
        check, which takes an equal but different object for a change."""
        for value, before in self._members.values():
            now = members(value, self._registered) or []
            if len(now) != len(before) or any(
                one is not old for (_, one), (_, old) in zip(now, before, strict=True)
            ):
                return False
        handles = (
            (_contents_handle(value), value, before) for value, before in self._contents.values()
        )
        return all(
            handle is not None and handle.same(handle.get(value), before)
            for handle, value, before in handles
        )

    def changes(self, state: Set[int] = frozenset()) -> Iterator[Change]:
        """Yield the changes since the snapshot, in the order of the roots.

        Args:
            state: the ids of tensors that are part of a state, and so may be replaced by its next
                tensors.
        """
        stack = [(path, root, root) for path, root in reversed(self._roots.items())]
        visited = set[tuple[int, int]]()
        while stack:
            path, was, now = stack.pop()
            if (id(was), id(now)) in visited:
                continue
            if isinstance(was, (*_PLAIN, Tensor)) or type(was) is not type(now):
                if not _is_equal(was, now) and not _is_next(was, now, state):
                    yield Change(path, was, now)
                continue
            visited.add((id(was), id(now)))
            if id(was) in self._contents:
                handle = _contents_handle(now)
                before = self._contents[id(was)][1]
                if handle is not None and not handle.same(handle.get(now), before):
                    yield Change(path, before, handle.get(now))
            elif id(was) not in self._members:
                if not _is_equal(was, now):
                    yield Change(path, was, now)
            else:
                pairs = _paired(self._members[id(was)][1], members(now, self._registered) or [])
                if any(
                    step.kind == "item" and _Absent in (type(old), type(new))
                    for step, old, new in pairs
                ):
                    yield Change(path, was, now)  # it holds more, or less
                    continue
                stack += [
                    (step.after(path), before, after) for step, before, after in reversed(pairs)
                ]

    def restore(self) -> None:
        """Restore everything that has changed."""
        for value, before in self._members.values():
            now = members(value, self._registered) or []
            if len(now) == len(before) and all(
                step == other and member is old
                for (step, member), (other, old) in zip(now, before, strict=True)
            ):
                continue
            _restore(value, now, before)
        for value, contents in self._contents.values():
            handle = _contents_handle(value)
            if handle is not None and not handle.same(handle.get(value), contents):
                handle.put(value, contents)


def _paired(before: Members, now: Members) -> list[tuple[Step, Any, Any]]:
    """(step, member before, member now) for each step in either; `_ABSENT` for a missing member."""
    old_members = dict(before)
    new_members = dict(now)
    steps = [*old_members, *(step for step in new_members if step not in old_members)]
    return [
        (step, old_members.get(step, _ABSENT), new_members.get(step, _ABSENT)) for step in steps
    ]


def _restore(value: Any, now: Members, before: Members) -> None:
    """Give an object back the members that it had."""
    # Items are left for below: refilling the container restores their order too.
    for step, member, after in _paired(before, now):
        if step.kind in ("item", "element", "fixed") or member is after:
            continue
        if member is _ABSENT:
            _remove(value, step)
        else:
            _put(value, step, member)
    items = {step.key: member for step, member in before if step.kind == "item"}
    if isinstance(value, dict):
        value.clear()
        value.update(items)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(items.values())


@attrs.frozen(eq=False)
class _Contents:
    """Functions that copy, restore and compare the contents of a set, an array or a generator."""

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]
    same: Callable[[Any, Any], bool]


def _refill(value: set[Any], contents: Set[Any]) -> None:
    value.clear()
    value.update(contents)


def _refill_array(value: Any, contents: Any) -> None:
    if value.shape != contents.shape:
        # Not by its `shape`, to which NumPy deprecates writes; and without the check, which refuses
        # an array that anything else refers to.
        value.resize(contents.shape, refcheck=False)
    value[...] = contents


_SET = _Contents(set, _refill, lambda now, was: bool(now == was))
_BYTES = _Contents(
    bytes,
    lambda value, contents: value.__setitem__(slice(None), contents),
    lambda now, was: now == was,
)
_ARRAY = _Contents(
    lambda value: value[:],
    lambda value, contents: value.__setitem__(slice(None), contents),
    lambda now, was: bool(now == was),
)
_RANDOM = _Contents(
    random.Random.getstate, random.Random.setstate, lambda now, was: bool(now == was)
)
# Compared by their bytes, as `==` takes NaN for a change, and -0.0 for 0.0.
_NUMPY_ARRAY = _Contents(
    lambda value: value.copy(),
    _refill_array,
    lambda now, was: now.shape == was.shape and (now is was or now.tobytes() == was.tobytes()),
)
# Compared as texts: the state is a dict that may hold an array, whose `==` has no truth value.
_NUMPY_GENERATOR = _Contents(
    lambda value: value.bit_generator.state,
    lambda value, contents: setattr(value.bit_generator, "state", contents),
    lambda now, was: repr(now) == repr(was),
)
_NUMPY_RANDOM_STATE = _Contents(
    lambda value: value.get_state(legacy=False),
    lambda value, contents: value.set_state(contents),
    lambda now, was: bool(
        repr(now) == repr(was) and (now["state"]["key"] == was["state"]["key"]).all()
    ),
)


def is_refillable(value: Any) -> bool:
    """Whether an object has mutable contents that are not members: a set, an array, a random
    generator."""
    return _contents_handle(value) is not None


def _contents_handle(value: Any) -> _Contents | None:
    """How to handle the contents of this object; None if it has members or cannot change."""
    kind = type(value)
    if issubclass(kind, set):
        return _SET
    if kind is bytearray:
        return _BYTES
    if kind is array:
        return _ARRAY
    if issubclass(kind, random.Random):
        return _RANDOM
    if kind.__module__.partition(".")[0] != "numpy":
        return None
    if kind.__name__ == "ndarray":
        # `tobytes` of an array of objects gives their addresses, not their values.
        if value.dtype.hasobject:
            return None
        return _NUMPY_ARRAY
    return {"Generator": _NUMPY_GENERATOR, "RandomState": _NUMPY_RANDOM_STATE}.get(kind.__name__)


def _is_equal(was: Any, now: Any) -> bool:
    """Whether one value can stand in for the other: it is the same object, or equal and of a class
    that compares by value."""
    if was is now:
        return True
    if type(was) is not type(now) or isinstance(was, Tensor):
        return False
    try:
        # `value_key`, because `==` takes 0.0 and -0.0 for equal, even inside containers.
        return bool(value_key(was) == value_key(now))
    except Exception:  # a class whose objects cannot be compared
        return False


def _is_next(was: Any, now: Any, state: Set[int]) -> bool:
    """Whether a tensor was part of the state, and another one has replaced it."""
    return isinstance(was, Tensor) and type(now) is Tensor and id(was) in state
