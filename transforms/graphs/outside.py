"""`Outside`: what a graph reads that is not an argument, and whether that has changed since the
capture.

A graph reads a closed-over tensor at the address that it had at the capture, and knows nothing of
names. So each call compares:

- the addresses of closed-over tensors, at some 0.06 µs each;
- at some 0.04 µs each, the objects that the function's globals and nonlocals name, and the
  parameters and buffers of closed-over modules that the graph reads;
- functions and modules among the attributes of objects, in dicts and in lists; the names that these
  read; the tensors there that the graph reads; and the mode of modules that read `self.training`;
- the methods that are called on these objects, in their classes; and what functions read of a class
  or a Python module that they name (`settings.scale`);
- whether a module or an object has gained an attribute that is a function; and whether containers
  that were empty, such as those of hooks, still are, at some 0.01 to 0.03 µs each;
- on the CPU only, at some 0.2 µs each: the code and the defaults of functions, the classes of
  objects, and the shapes, strides and dtypes of closed-over tensors, which `t_()` or `x.data = ...`
  may change at the same address.

A name that the function itself binds, such as a counter, is not compared, and an equal number or
string is no change. Anything else inside an object (a number, a string, an object) is not compared
at calls; `graphify(..., verify=n)` finds such changes. Changes that the recorded run itself makes
are refused at the capture (`PythonState`).
"""

import dis
import functools
import inspect
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence, Set
from operator import attrgetter, is_
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from weft.errors import CaptureError
from weft.torchapi.private import GLOBAL_HOOKS, MODULE_HOOKS, innermost_storage_id, storage_id
from weft.values.keys import value_key
from weft.values.objects import (
    Change,
    Snapshot,
    attributes,
    is_plain_object,
    is_refillable,
    members,
)

# Packages whose functions are not searched for the names that they read.
# Their globals are thousands of names that users do not rebind.
_FOREIGN = ("torch", "numpy", "weft", "functools", "contextlib", "builtins")
_cell_contents = attrgetter("cell_contents")
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")
_OF_FUNCTIONS = tuple(map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))
# Classes whose values are compared by `==`: an equal value is no change.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (tuple, list, dict, deque, set, frozenset, types.MappingProxyType)
# Classes of containers whose truth value says whether they are empty.
_FILLABLE = (list, dict, deque, set, OrderedDict, defaultdict)
# The instructions that load a global or a nonlocal.
_LOADS_FROM_OUTSIDE = ("LOAD_GLOBAL", "LOAD_DEREF")
# The containers of a module that must stay empty if they were empty at the capture.
_KEPT_BY_MODULES = (*MODULE_HOOKS, "_modules")
# What torch itself keeps in each module, whatever its class.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@attrs.define(eq=False)
class _Bindings:
    """Places of one kind, such as globals or list items, and what they held at the capture.

    Args:
        get: reads a place; the parts of a place, such as a dict and a key, are its arguments.
        places: the places.
        labels: their names in messages.
        values: what they held.
    """

    get: Callable[..., Any]
    places: list[tuple[Any, ...]] = attrs.field(factory=list)
    labels: list[str] = attrs.field(factory=list)
    values: list[Any] = attrs.field(factory=list)

    def note(self, label: str, *place: Any) -> None:
        """Note a place and what it holds now."""
        self.places.append(place)
        self.labels.append(label)
        self.values.append(self.get(*place))

    def comparison(self) -> Callable[[], bool]:
        """A function that returns whether the places hold the same objects."""
        get = self.get
        values = self.values
        if len(values) == 1:  # a third of the time of the general comparison
            place = self.places[0]
            return lambda: get(*place) is values[0]
        columns = [*zip(*self.places, strict=True)]
        return lambda: all(map(is_, map(get, *columns), values))

    def change(self) -> str:
        """The first change, in words; empty if there is none. An equal plain value is no change; it
        replaces the noted one, so that the next comparison is of identity."""
        for index, (label, place) in enumerate(zip(self.labels, self.places, strict=True)):
            value = self.get(*place)
            if not _is_equal(value, self.values[index]):
                return f"{label} is another object than at the capture"
            # Small ints are one object, but floats and long strings are new objects at each
            # assignment: without this line, the slow comparison would run at every call from now
            # on.
            self.values[index] = value
        return ""


class Outside:
    """The tensors that a graph reads from outside its arguments, and the values of the names that
    its function reads.

    Args:
        fn: the function.
        external: the tensors.
        thorough: whether the code of functions, the classes of objects, and the shapes of tensors
            are compared too.
        without_gradient: tensors whose `grad` the function read and found None.
        with_mode_in_key: the modules whose mode is part of the graph's key, and so not compared
            here.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        external: Sequence[Tensor],
        thorough: bool,
        without_gradient: Sequence[Tensor] = (),
        with_mode_in_key: Sequence[nn.Module] = (),
    ) -> None:
        # Sparse and meta tensors have no address to compare.
        self._tensors = tuple(x for x in external if x.layout is torch.strided and not x.is_meta)
        self._addresses = tuple(map(Tensor.data_ptr, self._tensors))
        names = _Names(set(map(id, with_mode_in_key)))
        names.read_all(fn)
        storages = {storage_id(x) for x in external}
        # After all names: which parameters count depends on the storages that the graph reads.
        names.read_modules(storages)
        named = (names.entries, names.cells, names.of_classes)
        self.named = tuple(value for bindings in named for value in bindings.values)
        """What the names stood for at the capture."""
        names.note_tensors(storages)
        gradients = _Bindings(attrgetter("grad"))
        for tensor in without_gradient:
            gradients.note(
                f"the gradient of a tensor of shape {tuple(tensor.shape)} that it asks for", tensor
            )
        self._bindings = [
            names.entries,
            names.cells,
            names.of_classes,
            names.items,
            names.slots,
            gradients,
        ]
        # Not on a GPU, where the host is on the critical path of a decode step.
        self._kinds = names.kinds if thorough else _Bindings(type)
        self._registries = names.registries
        # A copy: the registry itself changes with what is put in it.
        self._entries = [list(_values_in(registry)) for _, registry in self._registries]
        self._empty = names.empty
        self._dicts = names.dicts
        # Modules of one class have the same names: keep each tuple of names once.
        same = dict[tuple[str, ...], tuple[str, ...]]()
        self._names = [
            same.setdefault(names, names)
            for names in (tuple(bindings) for _, bindings in self._dicts)
        ]
        self._sizes = list(map(len, self._names))
        self._functions = names.functions if thorough else []
        self._parts = [list(map(part, self._functions)) for part in _OF_FUNCTIONS]
        self._layouts = _layouts(self._tensors) if thorough else None
        self.holds = self._comparison()
        """Returns whether nothing has changed since the capture; None: there is nothing to
        compare."""

    def _comparison(self) -> Callable[[], bool] | None:
        """A function that returns whether nothing has changed since the capture; None if there is
        nothing to compare."""
        parts = [
            (bool(self._tensors), self._same_addresses()),
            (bool(self._tensors) and self._layouts is not None, self._same_layouts()),
            *((True, bindings.comparison()) for bindings in self._bindings if bindings.values),
            (bool(self._registries), self._same_entries()),
            (bool(self._empty), self._still_empty()),
            (bool(self._dicts), self._same_sizes()),
            (bool(self._kinds.values), self._same_classes()),
        ]
        pairs = zip(_OF_FUNCTIONS, self._parts, strict=True)
        parts += [(bool(self._functions), _same(part, self._functions, now)) for part, now in pairs]
        needed = [holds for is_needed, holds in parts if is_needed]
        # A function with a single kind of outside, such as tensors, is the usual one; one call
        # less.
        if len(needed) < 2:
            if needed:
                return needed[0]
            return None
        return lambda: all(holds() for holds in needed)

    def _same_addresses(self) -> Callable[[], bool]:
        tensors = self._tensors
        addresses = self._addresses
        return lambda: tuple(map(Tensor.data_ptr, tensors)) == addresses

    def _same_layouts(self) -> Callable[[], bool]:
        tensors = self._tensors
        layouts = self._layouts
        return lambda: _layouts(tensors) == layouts

    def _same_entries(self) -> Callable[[], bool]:
        views = [_values_in(registry) for _, registry in self._registries]
        entries = self._entries
        return lambda: list(map(list, views)) == entries

    def _still_empty(self) -> Callable[[], bool]:
        containers = [container for _, container in self._empty]
        return lambda: not any(containers)

    def _same_sizes(self) -> Callable[[], bool]:
        dicts = [bindings for _, bindings in self._dicts]
        sizes = self._sizes
        return lambda: list(map(len, dicts)) == sizes

    def _same_classes(self) -> Callable[[], bool]:
        objects = [place[0] for place in self._kinds.places]
        kinds = self._kinds.values
        return lambda: list(map(type, objects)) == kinds

    def change(self) -> str:
        """The first change since the capture, in words; empty if there is none. An equal plain
        value is no change, and replaces the noted one."""
        for bindings in self._bindings:
            if change := bindings.change():
                return change
        for (label, registry), entries in zip(self._registries, self._entries, strict=True):
            if list(_values_in(registry)) != entries:
                return f"{label} has other functions or modules than at the capture"
        if change := self._kinds.change() or self._addition():
            return change
        for part, captured, name in zip(
            _OF_FUNCTIONS, self._parts, ("code", "defaults", "defaults"), strict=True
        ):
            for function, original in zip(self._functions, captured, strict=True):
                if part(function) is not original:
                    return f"{function.__name__} has other {name} than at the capture"
        for tensor, address in zip(self._tensors, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                return (
                    f"a tensor of shape {tuple(tensor.shape)} that it reads from outside has other"
                    " storage"
                )
        if self._layouts is not None and _layouts(self._tensors) != self._layouts:
            shapes = zip(self._tensors, *self._layouts, strict=True)
            tensor = next(x for x, *then in shapes if [x.shape, x.stride(), x.dtype] != then)
            return (
                f"a tensor of shape {tuple(tensor.shape)} that it reads from outside had another"
                " shape or layout"
            )
        return ""

    def _addition(self) -> str:
        """The first function or module that was added where there was none, in words. Anything else
        that was added is no change, and belongs to the noted state from now on."""
        for label, container in self._empty:
            # A hook or a callback may have been added. Numbers and strings in a list that was empty
            # are results that the function collects for its caller, which no graph reads.
            if any(map(_may_be_called, _values_in(container))):
                return f"{label} was empty at the capture and is not"
        for (label, bindings), names in zip(self._dicts, self._names, strict=True):
            # A new attribute that is a function may hide a method of the class.
            for name in bindings.keys() - set(names):
                if _is_function(bindings[name]):
                    return f"{_joined(label, name)} was not there at the capture"
        # The comparison must pass from now on, or it would take the slow path at each call.
        if any(container for _, container in self._empty):
            self._empty = [(label, container) for label, container in self._empty if not container]
            self.holds = self._comparison()
        self._sizes[:] = [len(bindings) for _, bindings in self._dicts]
        return ""

    def has_changed(self) -> bool:
        """Whether something has changed since the capture."""
        # The quick comparison first; `change` alone decides, since an equal value in a new object
        # is none.
        return self.holds is not None and not self.holds() and bool(self.change())


class _Carried:
    """A global or a nonlocal that a function binds and uses, so that a run may leave it to the next.

    Args:
        label: its name in messages.
        names: the function's globals.
        name: the name.
        cell: the cell of a nonlocal; None: it is a global.
    """

    def __init__(
        self, label: str, names: dict[str, Any], name: str, cell: types.CellType | None
    ) -> None:
        self.label = label
        self._names = names
        self._name = name
        self._cell = cell
        # `_first` to restore after a refusal, `last` to find what one run changed.
        self._first = self.last = self.value

    @property
    def value(self) -> Any:
        """The number or other plain value that the name stands for. None for anything else, and for
        a name that is not bound."""
        # What is no plain value may be made anew in each run, and read by none after it.
        if self._cell is None:
            value = self._names.get(self._name)
        else:
            value = _held_by(self._cell)
        if isinstance(value, _PLAIN):
            return value
        return None

    def restore(self) -> None:
        """Bind the name as before the first run, if it stood for a plain value."""
        if self._first is None:
            return
        if self._cell is None:
            self._names[self._name] = self._first
        else:
            self._cell.cell_contents = self._first


class PythonState:
    """The state that a function keeps in Python: in the modules and plain objects that it names,
    however deep, and in globals and nonlocals that it binds and uses. A capture freezes this state,
    so the recorded run must not change it.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        names = _Names()
        names.read_all(fn)
        self._roots = dict[str, Any]()
        for label, root in names.roots.items():
            if isinstance(root, nn.Module):
                parts = root.named_modules()
            else:
                parts = [("", root)]
            self._roots |= {_joined(label, path): part for path, part in parts}
        self._containers = names.containers
        self._carried = names.carried
        self._registered = {
            id(root) for root in self._roots.values() if isinstance(root, nn.Module)
        }
        # `_first` to restore after a refusal, `_last` to find what one run changed.
        self._first = self._last = self._snapshot()

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._roots, self._registered)

    def begin_run(self) -> None:
        """Note the state before a run."""
        self._last = self._snapshot()
        for name in self._carried:
            name.last = name.value

    def with_containers(self) -> Snapshot:
        """The state now, including the lists, dicts and sets that the function names, which a run
        may fill."""
        return Snapshot(self._roots | self._containers, self._registered)

    def change(self) -> Change | None:
        """The first value other than a tensor that has changed since the last run began."""
        for change in self._last.changes():
            # Tensors are the audit's subject, which names the line that made them.
            if not isinstance(change.before, Tensor) and not isinstance(change.after, Tensor):
                return change
        for name in self._carried:
            if not _is_equal(name.value, name.last):
                return Change(name.label, name.last, name.value)
        return None

    def refuse_changes(self, call: str) -> None:
        """Raise CaptureError if the last run changed a value, and restore the state from before the
        first run. Tensors that a run keeps are refused by the audit."""
        if (change := self.change()) is not None:
            self._first.restore()
            for name in self._carried:
                name.restore()
            problem = f"{change.path} {change}, and a replay does not repeat that"
            instead = (
                "a tensor in its place, which the function takes as an argument and returns (for"
                " what a module "
            )
            instead += "holds: weft.stages.from_module)"
            raise CaptureError(call, problem, instead)


def _layouts(tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], ...]:
    """The shapes, strides and dtypes of tensors."""
    return (
        tuple(map(_shape, tensors)),
        tuple(map(Tensor.stride, tensors)),
        tuple(map(_dtype, tensors)),
    )


def _is_equal(value: Any, captured: Any) -> bool:
    """Whether a name still stands for the same object, or for an equal plain value."""
    if value is captured:
        return True
    return (
        type(value) is type(captured)
        and isinstance(value, _PLAIN)
        # `value_key` tells 1 from True, and -0.0 from 0.0.
        and value_key(value) == value_key(captured)
    )


def _same(
    get: Callable[[Any], Any], places: Sequence[Any], now: Sequence[Any]
) -> Callable[[], bool]:
    """A function that returns whether `get` still finds the objects `now` in these places."""
    return lambda: all(map(is_, map(get, places), now))


def _is_function(value: Any) -> bool:
    """Whether a value is a function, a module or another callable, but not a class or a tensor."""
    # A class is compared by name where it is read.
    return callable(value) and not isinstance(value, type | Tensor)


def _may_be_called(value: Any) -> bool:
    """Whether a value is a function, a module, or an object with methods; or a container that holds
    one."""
    if isinstance(value, _CONTAINERS):
        return any(map(_may_be_called, _values_in(value)))
    return _is_function(value) or is_plain_object(value)


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


@attrs.frozen(eq=False)
class _Place:
    """A place that holds a value.

    Args:
        kind: the noted places of its kind.
        label: its name in messages.
        owner: the object that contains the place.
        key: the key, index or name of the place in its owner.
    """

    kind: _Bindings
    label: str
    owner: Any
    key: Any


def _item(container: Any, index: int) -> Any:
    """The item of a list at an index; None past its end."""
    try:
        # A list may be shorter than at the capture.
        return container[index]
    except IndexError:
        return None


def _attribute(owner: Any, name: str) -> Any:
    """The value in a slot of an object; None if the slot is empty."""
    return getattr(owner, name, None)


class _Names:
    """The names that functions read, and what they stand for.

    Args:
        with_mode_in_key: the ids of the modules whose mode is not noted.
    """

    def __init__(self, with_mode_in_key: Set[int] = frozenset()) -> None:
        self._with_mode_in_key = with_mode_in_key
        self.entries = _Bindings(dict.get)
        self.cells = _Bindings(_cell_contents)
        self.carried: list[_Carried] = []
        self.of_classes = _Bindings(types.MappingProxyType.get)
        self.items = _Bindings(_item)
        self.slots = _Bindings(_attribute)
        self.kinds = _Bindings(type)
        self.functions: list[types.FunctionType] = []
        self.objects: dict[str, Any] = {}
        self.containers: dict[str, Any] = {}
        self.registries: list[tuple[str, Any]] = []
        """The dicts and lists that hold only functions and modules, with their labels."""
        self.empty: list[tuple[str, Any]] = []
        """The empty containers, with their labels."""
        self.dicts: list[tuple[str, dict[str, Any]]] = []
        """The attribute dicts of modules and objects, with the labels of these."""
        # The tensors in containers and among attributes, each with the places on the way to it.
        self._in_places: list[tuple[Tensor, tuple[_Place, ...]]] = []
        # The places on the way to the value that is being read.
        self._way: tuple[_Place, ...] = ()
        self._noted = set[tuple[int, Any]]()
        self._modules: dict[str, nn.Module] = {}
        self._visited: set[int] = set()
        self._classes: dict[type, set[str]] = {}
        """The classes of the modules and objects, each with its attributes that have been read."""
        self._asked_for = {"forward", "__call__"}
        """The names of attributes that the functions read, and of the methods that run when an
        object is called."""

    def read_all(self, fn: Callable[..., Any]) -> None:
        """Note the names that a function reads; and, in turn, the names read by the functions that
        it names, and by the methods of the objects that these name."""
        self.read(fn)
        # A method that is read may ask for further attributes: repeat until no class has a new one.
        while pending := [(kind, names) for kind in self._classes if (names := self._unread(kind))]:
            for kind, names in pending:
                self._classes[kind] |= names
                for name in sorted(names):
                    self._read_of_class(kind, name)

    def _unread(self, kind: type) -> Set[str]:
        """The attributes of a class that functions ask for and that have not been read yet."""
        if _is_foreign_class(kind):
            # Methods of torch's classes are taken as fixed, but for a patched `forward`.
            asked_for = {"forward"}
        else:
            asked_for = self._asked_for
        return {
            name for base in kind.__mro__ for name in vars(base).keys() & asked_for
        } - self._classes[kind]

    def read(self, value: Any, label: str = "") -> None:
        """Note the names that a function reads, and in turn the names that the functions it names
        read."""
        # `dict[str, Tensor]`, in an annotation, passes for an object with the attributes of `dict`.
        if id(value) in self._visited or isinstance(value, type | types.GenericAlias):
            return
        # Before its parts are read, since objects refer to each other in circles.
        self._visited.add(id(value))
        if isinstance(value, nn.Module):
            self._read_module(value, label)
        elif type(value) in _FILLABLE:
            self._read_elements(value, label)
        elif isinstance(value, functools.partial):
            self.read(value.func, label)
            for bound in (*value.args, *value.keywords.values()):
                self._read_value(label or "an argument of functools.partial", bound)
        elif isinstance(value, types.MethodType):
            # The method may be rebound on the object, or overridden in its class.
            self._note_object(label or type(value.__self__).__name__, value.__self__)
            if isinstance(value.__self__, type):
                self._classes.setdefault(value.__self__, set())
            self.read(value.__self__, label)
            self.read(value.__func__, label)
        elif isinstance(value, weakref.ref):
            self._read_value(label, value())
        elif isinstance(value, types.FunctionType):
            self._read_function(value)
        elif isinstance(
            inner := getattr(value, "__dict__", {}).get("__wrapped__"),
            types.FunctionType | nn.Module,
        ):
            self.read(inner, label)  # such as a graphified function
        elif isinstance(
            call := inspect.getattr_static(type(value), "__call__", None), types.FunctionType
        ):
            self._note_object(label or type(value).__name__, value)
            self.read(call, label)
            self._read_object(value, label)
        elif isinstance(value, _CONTAINERS):
            self._read_elements(value, label)
        elif is_plain_object(value):
            self._read_object(value, label)

    def _read_value(self, label: str, value: Any) -> None:
        """Read the object that a name stands for, or that a function is bound to."""
        self._note_object(label, value)
        if not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            self.read(value, label)

    def _read_module(self, module: nn.Module, label: str) -> None:
        # Global hooks run for each module, so they matter once there is one.
        if not self._modules:
            for name, hooks in GLOBAL_HOOKS.items():
                self._read_part(name, hooks, None)
        self._modules[label or type(module).__name__] = module
        self._visited.update(map(id, module.modules()))
        for path, part in module.named_modules():
            self.read(inspect.getattr_static(type(part), "forward", None), label)
            self._read_object(part, _joined(label, path))
            is_keyed = id(part) in self._with_mode_in_key
            if not is_keyed and _asks_for_mode(_class_of(part)) and "training" in vars(part):
                self.entries.note(_joined(label, path, "training"), vars(part), "training")

    def _read_object(self, owner: Any, label: str) -> None:
        """Read the functions among the attributes of an object, and note its class."""
        bindings = getattr(owner, "__dict__", {})
        is_dict = isinstance(bindings, dict)
        is_foreign = _is_foreign_class(type(owner)) and not isinstance(owner, nn.Module)
        self.kinds.note(f"the class of {label or type(owner).__name__}", owner)
        self._classes.setdefault(type(owner), set())
        if is_dict and not is_foreign:
            self.dicts.append((label, bindings))
        for name, value in attributes(owner):
            if isinstance(owner, nn.Module) and _is_kept_by_torch(type(owner), name):
                continue
            if is_foreign and _is_empty(value):
                continue
            part = _joined(label, name)
            place = _Place(self.slots, part, owner, name)
            if is_dict and name in bindings:
                place = _Place(self.entries, part, bindings, name)
            self._read_part(part, value, place)

    def _read_elements(self, container: Any, label: str) -> None:
        """Read the functions in a container."""
        entries = list(_values_in(container))
        if not entries and type(container) in _FILLABLE:
            self.empty.append((label, container))
        is_registry = bool(entries) and all(map(_is_known_by_itself, entries))
        if is_registry and not isinstance(container, tuple | frozenset):
            self.registries.append((label, container))
        if is_registry:
            places = None
        elif isinstance(container, dict):
            places = self.entries
        elif isinstance(container, list | deque):
            places = self.items
        else:
            places = None  # nothing else can be put there
        steps = members(container)
        if steps is None:  # a set, or a view of a dict
            for value in entries:
                self._read_part(label, value, None)
        for step, value in steps or ():
            part = step.after(label)
            place = None if places is None else _Place(places, part, container, step.key)
            self._read_part(part, value, place)

    def _read_part(self, label: str, value: Any, place: "_Place | None") -> None:
        """Read a function or a container. Note it, or the tensor there, with the places on the way.

        Args:
            place: where it is; None: nowhere that is compared, or where nothing else can be put.
        """
        before = self._way
        if place is not None:
            self._way = (*before, place)
        is_function = _is_function(value)
        if isinstance(value, Tensor):
            self._in_places.append((value, self._way))
        if is_function:
            self._note_way(self._way)
        is_read = is_function and not isinstance(value, types.BuiltinFunctionType)
        if is_read or isinstance(value, _CONTAINERS):
            self.read(value, label)
        self._way = before

    def _note_way(self, way: Iterable["_Place"]) -> None:
        """Note the places on the way to a value, each once."""
        # Two tensors in one list share the way to the list.
        for place in way:
            if (id(place.owner), place.key) not in self._noted:
                self._noted.add((id(place.owner), place.key))
                place.kind.note(place.label, place.owner, place.key)

    def _read_of_class(self, kind: type, name: str) -> None:
        """Note a function or a module that is an attribute of a class, and the places in its
        subclasses where an override could be defined."""
        bases = [base for base in kind.__mro__ if not _is_foreign_class(base) or name == "forward"]
        for depth, base in enumerate(bases):
            if name in vars(base):
                value = vars(base)[name]
                if _is_method(value):  # a subclass that comes earlier in the MRO may override it
                    # A comparison of each class up to the one that defines the method, as Python
                    # looks it up.
                    for one in bases[: depth + 1]:
                        self.of_classes.note(f"{one.__qualname__}.{name}", vars(one), name)
                if not _is_foreign_class(base):
                    self._read_method(value, f"{base.__qualname__}.{name}")
                return

    def _read_method(self, value: Any, label: str) -> None:
        """Read an attribute of a class: a function, also inside a descriptor, a module or a
        container."""
        parts = [value]
        if isinstance(value, property):
            parts = [value.fget]
        elif isinstance(value, staticmethod | classmethod):
            parts = [value.__func__]
        elif isinstance(value, functools.cached_property):
            parts = [value.func]
        for part in parts:
            if callable(part) or isinstance(part, _CONTAINERS):
                self._read_value(label, part)

    def _read_function(self, function: types.FunctionType) -> None:
        is_foreign = _is_foreign(function)
        if not is_foreign:
            self.functions.append(function)
        names = _names_in(function.__code__)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if (content := _held_by(cell)) is not cell:
                if not is_foreign and name not in names.bound:
                    self.cells.note(f"{name}, a nonlocal of {function.__name__},", cell)
                if not is_foreign:
                    self._read_value(name, content)
                elif not _is_empty(content):
                    self.read(content, name)
        if is_foreign:
            return
        self._asked_for |= names.attributes
        for name in names.read - names.bound:
            self.entries.note(
                f"{name}, a global of {function.__name__},", function.__globals__, name
            )
            self._read_value(name, function.__globals__.get(name))
        self._note_carried(function, names.carried)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._read_value(f"a default of {function.__name__}", value)
        free = dict(
            zip(
                function.__code__.co_freevars,
                map(_held_by, function.__closure__ or ()),
                strict=True,
            )
        )
        for root, *path in names.paths:
            if root not in names.bound:
                self._read_path(root, free.get(root, function.__globals__.get(root)), path)

    def _note_carried(self, function: types.FunctionType, carried: Set[str]) -> None:
        """Note the names that a function carries from one run to the next."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name in sorted(carried):
            cell = cells.get(name)
            kind = "global" if cell is None else "nonlocal"
            label = f"{name}, a {kind} of {function.__name__},"
            self.carried.append(_Carried(label, function.__globals__, name, cell))

    def _read_path(self, label: str, owner: Any, path: Iterable[str]) -> None:
        """Note what a function reads of the classes, functions and Python modules that it names:
        `a.b.c`."""
        for name in path:
            if isinstance(owner, types.ModuleType):
                if _is_foreign_package(owner.__name__):
                    return
                bindings: Any = vars(owner)
            elif isinstance(owner, type):
                bindings = next((vars(base) for base in owner.__mro__ if name in vars(base)), {})
                if _is_foreign_class(owner):
                    return
            elif isinstance(owner, types.FunctionType):
                bindings = vars(owner)
            else:
                return
            if name not in bindings or name.startswith("__"):
                return
            label = f"{label}.{name}"
            owner = bindings[name]
            if isinstance(bindings, dict):
                self.entries.note(label, bindings, name)
            else:
                self.of_classes.note(label, bindings, name)
            if isinstance(owner, property | staticmethod | classmethod):
                self._read_method(owner, label)
            else:
                self._read_value(label, owner)

    def note_tensors(self, storages: Set[int]) -> None:
        """Note the tensors in containers and among attributes that lie in these storages."""
        for tensor, way in self._in_places:
            if innermost_storage_id(tensor) in storages:
                self._note_way(way)

    def read_modules(self, storages: Set[int]) -> None:
        """Note the parameters and buffers of the modules that lie in these storages or are None."""
        for label, module in self._modules.items():
            for path, part in module.named_modules():
                for names in (part._parameters, part._buffers):
                    # A module of TorchScript cannot be given other tensors.
                    if not isinstance(names, dict):
                        continue
                    for name, value in names.items():
                        if value is None or innermost_storage_id(value) in storages:
                            self.entries.note(_joined(label, path, name), names, name)

    def _note_object(self, label: str, value: Any) -> None:
        if is_plain_object(value):
            self.objects.setdefault(label, value)
        elif isinstance(value, _CONTAINERS) or (members(value) is None and is_refillable(value)):
            self.containers.setdefault(label, value)

    @property
    def roots(self) -> dict[str, Any]:
        """The modules and the plain objects that the functions name."""
        return self._modules | self.objects


def _is_empty(value: Any) -> bool:
    """Whether a value is a container with nothing in it."""
    return isinstance(value, _CONTAINERS) and not value


def _is_kept_by_torch(kind: type, name: str) -> bool:
    """Whether an attribute of a module is torch's own business: its parameters and buffers, which
    are noted by themselves, and what torch's modules keep in private, such as a recurrent module
    its list of parameters, which each run of a stage fills anew."""
    if name in ("_parameters", "_buffers"):
        return True
    is_private = name.startswith("_") and name not in _KEPT_BY_MODULES
    return is_private and (kind.__module__.startswith("torch.nn.") or name in _OF_EVERY_MODULE)


def _values_in(container: Any) -> Any:
    """A view of the values in a container."""
    if isinstance(container, types.MappingProxyType):
        return container.values()
    if isinstance(container, dict):
        return dict.values(container)
    return container


def _is_method(value: Any) -> bool:
    """Whether a value in a class is a function, a descriptor of one, or a module."""
    return callable(value) or isinstance(
        value, property | staticmethod | classmethod | functools.cached_property
    )


@functools.cache
def _is_foreign_package(name: str) -> bool:
    """Whether a Python module is not the user's: it belongs to torch, weft, the standard library or
    an installed package."""
    if name == "__main__" or name.startswith("weft.proofs."):
        return False  # laws and strategies stand for what users write
    package = name.partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return package in _FOREIGN or package in sys.stdlib_module_names or "site-packages" in file


def _is_foreign_class(kind: type) -> bool:
    return _is_foreign_package(str(kind.__module__))


def _class_of(part: nn.Module) -> Any:
    """The class of a module, typed so that a cached function accepts it."""
    return type(part)


@functools.cache
def _asks_for_mode(kind: Any) -> bool:
    """Whether a method of a class of modules reads `self.training`."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    methods = [value for base in bases for value in vars(base).values()]
    return any(
        "training" in _names_in(method.__code__).attributes
        for method in methods
        if isinstance(method, types.FunctionType)
    )


def _is_known_by_itself(value: Any) -> bool:
    """Whether a value is a function or a module, and equal to nothing but itself."""
    compares: Any = type(value).__eq__
    return callable(value) and compares is object.__eq__


def _is_foreign(function: types.FunctionType) -> bool:
    # Not by `__module__`, which functools.wraps copies from the wrapped function.
    home = function.__globals__.get("__name__", "")
    if home.startswith("weft.proofs."):
        return False  # laws and strategies stand for what users write
    return home.split(".")[0] in _FOREIGN or "site-packages" in function.__code__.co_filename


def _held_by(cell: types.CellType) -> Any:
    """The content of a closure cell; the cell itself if it is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


@attrs.frozen
class _Code:
    """The names in the code of a function and of the functions inside it.

    Args:
        read: the names that it looks up among the globals; attributes are not among them.
        bound: the globals and nonlocals that it binds.
        carried: those among them that it also uses, other than to count: `n += 1`.
        attributes: the names of the attributes that it reads.
        paths: the attribute paths, such as `a.b.c`, that it reads of a global or nonlocal, and of
            which it binds no attribute.
    """

    read: Set[str]
    bound: Set[str]
    carried: Set[str]
    attributes: Set[str]
    paths: Set[tuple[str, ...]]


def _only_counts(instructions: Sequence[dis.Instruction]) -> bool:
    """Whether these instructions, of which the first loads a name, are `name += other`."""
    if len(instructions) < 4:
        return False
    first, other, operation, last = instructions
    return (
        other.opname.startswith("LOAD_")
        and operation.opname == "BINARY_OP"
        and last.opname == first.opname.replace("LOAD", "STORE")
        and last.argval == first.argval
    )


@functools.lru_cache(1024)
def _names_in(code: types.CodeType) -> _Code:
    read = set[str]()
    bound = set[str]()
    used = set[str]()
    local = set[str]()
    attributes = set[str]()
    stored = set[str]()
    paths = set[tuple[str, ...]]()
    path: tuple[str, ...] = ()
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        kind = instruction.opname
        name = instruction.argval
        if kind in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(name)
            path = (*path, name) if path else ()
            continue
        paths.update({path} if len(path) > 1 else ())
        path = ()
        if kind in _LOADS_FROM_OUTSIDE and not _only_counts(instructions[index : index + 4]):
            used.add(name)
        if kind in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            read.add(name)
            path = (name,)
        elif kind in ("LOAD_DEREF", "LOAD_CLASSDEREF") and name in code.co_freevars:
            path = (name,)
        elif kind in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
            kind == "STORE_DEREF" and name in code.co_freevars
        ):
            bound.add(name)
        elif kind in ("STORE_ATTR", "DELETE_ATTR"):
            stored.add(name)
        elif kind == "STORE_NAME":  # a local name in the body of a class
            local.add(name)
    inner = [
        _names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    ]
    paths.update(path for one in inner for path in one.paths if path[0] not in code.co_cellvars)
    carried = (used & bound).union(*(one.carried for one in inner))
    return _Code(
        read=(read - local).union(*(one.read for one in inner)),
        bound=bound.union(*(one.bound for one in inner)),
        carried=carried.difference(code.co_cellvars),
        attributes=attributes.union(*(one.attributes for one in inner)),
        paths={one for one in paths if stored.isdisjoint(one[1:])},
    )
