"""`Outside`: what a graph reads that is not an argument, and whether it is still what the capture read.

A graph reads a closed-over tensor at the address that it had at the capture, and knows nothing of names. So each call
compares these addresses, at some 0.06 µs each; and at some 0.04 µs each the objects that the function's globals and
nonlocals name, and those of the parameters and buffers of closed-over modules that the graph reads. A name that the
function itself binds anew, such as a counter, is not compared, and an equal number or string is no change. Functions
and modules among the attributes of objects, in dicts, and in lists of nothing else are compared too, and the names
that they read. On the CPU it also compares the code and the defaults of functions, and the shapes, strides and dtypes
of closed-over tensors, which `t_()` or `x.data = ...` may change at the same address, at some 0.2 µs each. What else
an object holds inside (a number, a tensor in a list) is not compared at calls; `graphify(..., verify=n)` finds such
changes. Those that the recorded run itself makes are refused at the capture (`PythonState`).
"""

import dis
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Sequence, Set
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import CaptureError
from weft.objects import Snapshot, attributes, is_plain_object, members
from weft.torchapi.private import innermost_storage_id, storage_id
from weft.value_keys import value_key

_FOREIGN = ("torch", "numpy", "weft", "functools", "contextlib", "builtins")
"""Packages whose functions are not read for the names that they use."""
_cell_contents = attrgetter("cell_contents")
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")
_OF_FUNCTIONS = tuple(map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Classes whose equal values are no change."""


_CONTAINERS = (tuple, list, dict, deque)


class Outside:
    """The tensors that a graph reads from outside its arguments, and the values of the names by which its function
    finds them and others.

    Args:
        fn: the function.
        external: the tensors.
        thorough: whether the code of functions, and the shapes of tensors, are compared too.
    """

    def __init__(self, fn: Callable[..., Any], external: Sequence[Tensor], thorough: bool) -> None:
        self._tensors = tuple(x for x in external if x.layout is torch.strided and not x.is_meta)
        self._addresses = tuple(map(Tensor.data_ptr, self._tensors))
        found = _Names()
        found.read(fn)
        found.read_modules({storage_id(x) for x in external})
        self._labels = (*found.labels, *found.cell_labels)
        self._mappings, self._keys, self._values = found.mappings, found.keys, found.values
        self._cells, self._contents = found.cells, found.contents
        self._registries = found.registries
        self._entries = [list(_values_in(registry)) for _, registry in self._registries]
        self._functions = found.functions if thorough else []
        self._parts = [list(map(part, self._functions)) for part in _OF_FUNCTIONS]
        self._layouts = _layouts(self._tensors) if thorough else None
        self.holds = self._comparison()
        """Returns whether all is as it was at the capture; None: there is nothing to compare."""

    @property
    def named(self) -> tuple[Any, ...]:
        """What the names stood for at the capture."""
        return (*self._values, *self._contents)

    def _comparison(self) -> Callable[[], bool] | None:
        """A function that returns whether all is as it was at the capture; None if there is nothing to compare."""
        parts = [
            (bool(self._tensors), self._same_addresses()),
            (bool(self._tensors) and self._layouts is not None, self._same_layouts()),
            (bool(self._mappings), _same(dict.get, self._mappings, self._keys, now=self._values)),
            (bool(self._cells), _same(_cell_contents, self._cells, now=self._contents)),
            (bool(self._registries), self._same_entries()),
        ]
        pairs = zip(_OF_FUNCTIONS, self._parts, strict=True)
        parts += [(bool(self._functions), _same(part, self._functions, now=now)) for part, now in pairs]
        needed = [holds for is_needed, holds in parts if is_needed]
        if len(needed) < 2:
            return needed[0] if needed else None
        return lambda: all(holds() for holds in needed)

    def _same_addresses(self) -> Callable[[], bool]:
        tensors, addresses = self._tensors, self._addresses
        return lambda: tuple(map(Tensor.data_ptr, tensors)) == addresses

    def _same_layouts(self) -> Callable[[], bool]:
        tensors, layouts = self._tensors, self._layouts
        return lambda: _layouts(tensors) == layouts

    def _same_entries(self) -> Callable[[], bool]:
        views = [_values_in(registry) for _, registry in self._registries]
        entries = self._entries
        return lambda: list(map(list, views)) == entries

    def change(self) -> str:
        """The first change since the capture, in words; empty if there is none. An equal plain value is none, and takes
        the place of the old one."""
        now = [*map(dict.get, self._mappings, self._keys), *map(_cell_contents, self._cells)]
        places = [*((self._values, i) for i in range(len(self._values)))]
        places += [(self._contents, i) for i in range(len(self._contents))]
        for label, value, (held, place) in zip(self._labels, now, places, strict=True):
            if not _is_equal(value, held[place]):
                return f"{label} is another object than at the capture"
            held[place] = value
        for (label, registry), entries in zip(self._registries, self._entries, strict=True):
            if list(_values_in(registry)) != entries:
                return f"{label} has other functions or modules than at the capture"
        for part, captured, name in zip(_OF_FUNCTIONS, self._parts, ("code", "defaults", "defaults"), strict=True):
            for function, own in zip(self._functions, captured, strict=True):
                if part(function) is not own:
                    return f"{function.__name__} has other {name} than at the capture"
        for tensor, address in zip(self._tensors, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                return f"a tensor of shape {tuple(tensor.shape)} that it reads from outside has other storage"
        if self._layouts is not None and _layouts(self._tensors) != self._layouts:
            shapes = zip(self._tensors, *self._layouts, strict=True)
            tensor = next(x for x, *then in shapes if [x.shape, x.stride(), x.dtype] != then)
            return f"a tensor of shape {tuple(tensor.shape)} that it reads from outside had another shape or layout"
        return ""

    def has_changed(self) -> bool:
        """Whether something is not as it was."""
        return self.holds is not None and not self.holds() and bool(self.change())


class PythonState:
    """What a function keeps in Python, in the modules and the plain objects that it names, however deep. A capture
    freezes it, so it may not change in the run that is recorded.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        names = _Names()
        names.read(fn)
        self._roots = names.roots
        parts = (part for root in self._roots.values() if isinstance(root, nn.Module) for part in root.modules())
        self._registered = {id(part) for part in parts}
        self._first = self._last = self._snapshot()

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._roots, self._registered)

    def begin_run(self) -> None:
        """Note what there is, before a run."""
        self._last = self._snapshot()

    def refuse_changes(self, call: str) -> None:
        """Raise CaptureError, and put back what there was before the first run, if the last run changed a value.
        Tensors that it keeps are for the audit to refuse."""
        for change in self._last.changes():
            if isinstance(change.before, Tensor) or isinstance(change.after, Tensor):
                continue
            self._first.restore()
            seen = f"{change.path} {change}, and a replay does not repeat that"
            instead = "a tensor in its place, which the function takes as an argument and returns (for what a module "
            instead += "holds: weft.stages.from_module)"
            raise CaptureError(call, seen, instead)


def _layouts(tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], ...]:
    """The shapes, strides and dtypes of tensors."""
    return tuple(map(_shape, tensors)), tuple(map(Tensor.stride, tensors)), tuple(map(_dtype, tensors))


def _is_equal(value: Any, captured: Any) -> bool:
    """Whether a name still stands for the same object, or for an equal plain value."""
    if value is captured:
        return True
    return type(value) is type(captured) and isinstance(value, _PLAIN) and value_key(value) == value_key(captured)


def _same(get: Callable[..., Any], *places: Sequence[Any], now: Sequence[Any]) -> Callable[[], bool]:
    """A function that returns whether `get` finds these objects in these places."""
    if len(now) == 1:  # in a third of the time
        place = [one[0] for one in places]
        return lambda: get(*place) is now[0]
    return lambda: all(map(is_, map(get, *places), now))


class _Names:
    """The names that functions read, and what they stand for."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.mappings: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.values: list[Any] = []
        self.cell_labels: list[str] = []
        self.cells: list[types.CellType] = []
        self.contents: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self.objects: dict[str, Any] = {}
        self.registries: list[tuple[str, Any]] = []
        """The dicts and lists in which there are only functions and modules, with their labels."""
        self._modules: dict[str, nn.Module] = {}
        self._seen: set[int] = set()

    def read(self, value: Any, label: str = "") -> None:
        """Note the names that a function reads, and those that the functions which it names read."""
        if id(value) in self._seen or isinstance(value, type):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._modules[label or type(value).__name__] = value
            self._seen.update(map(id, value.modules()))
            for path, part in value.named_modules():
                self.read(inspect.getattr_static(type(part), "forward", None), label)
                self._read_attributes(part, ".".join(filter(None, (label, path))))
        elif isinstance(value, functools.partial):
            self.read(value.func, label)
        elif isinstance(value, types.MethodType):
            self._note_object(label or type(value.__self__).__name__, value.__self__)
            self.read(value.__self__, label)
            self.read(value.__func__, label)
        elif isinstance(value, types.FunctionType):
            self._read_function(value)
        elif isinstance(inner := getattr(value, "__dict__", {}).get("__wrapped__"), types.FunctionType | nn.Module):
            self.read(inner, label)  # such as a graphified function
        elif isinstance(call := inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
            self._note_object(label or type(value).__name__, value)
            self.read(call, label)
            self._read_attributes(value, label)
        elif isinstance(value, _CONTAINERS):
            self._read_elements(value, label)
        elif is_plain_object(value):
            self._read_attributes(value, label)

    def _read_attributes(self, owner: Any, label: str) -> None:
        """Read the functions among the attributes of an object."""
        bindings = getattr(owner, "__dict__", {})
        for name, value in attributes(owner):
            path = f"{label}.{name}" if label else name
            is_bound = isinstance(bindings, dict) and name in bindings
            self._read_part(path, value, bindings if is_bound else None, name)

    def _read_elements(self, container: Any, label: str) -> None:
        """Read the functions in a container."""
        entries = list(_values_in(container))
        is_registry = bool(entries) and all(map(_is_known_by_itself, entries))
        if is_registry and not isinstance(container, tuple):
            self.registries.append((label, container))
        mapping = container if isinstance(container, dict) and not is_registry else None
        for step, value in members(container) or ():
            self._read_part(step.after(label), value, mapping, step.key)

    def _read_part(self, label: str, value: Any, mapping: dict[Any, Any] | None, key: Any) -> None:
        """Read a function or a container that `mapping` has under `key`; None: it is in no mapping."""
        is_function = callable(value) and not isinstance(value, type | Tensor)
        if is_function and mapping is not None:
            self._note(label, mapping, key)
        is_read = is_function and not isinstance(value, types.BuiltinFunctionType)
        if is_read or (isinstance(value, _CONTAINERS) and value):
            self.read(value, label)

    def _read_function(self, function: types.FunctionType) -> None:
        own = _is_foreign(function)
        if not own:
            self.functions.append(function)
        read, bound = _names_in(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if (held := _held_by(cell)) is not cell:
                if not own:
                    self._note_object(name, held)
                if not own and name not in bound:
                    self.cell_labels.append(f"{name}, a nonlocal of {function.__name__},")
                    self.cells.append(cell)
                    self.contents.append(held)
                self.read(held, name)
        for name in () if own else read - bound:
            held = function.__globals__.get(name)
            self._note(f"{name}, a global of {function.__name__},", function.__globals__, name)
            self._note_object(name, held)
            if not isinstance(held, types.ModuleType | types.BuiltinFunctionType):
                self.read(held, name)

    def read_modules(self, storages: Set[int]) -> None:
        """Note those parameters and buffers of the modules that lie in these storages, or that are None."""
        for label, module in self._modules.items():
            for path, part in module.named_modules():
                for names in (part._parameters, part._buffers):
                    if not isinstance(names, dict):  # a module of TorchScript, which cannot be given other tensors
                        continue
                    for name, value in names.items():
                        if value is not None and innermost_storage_id(value) not in storages:
                            continue
                        self._note(".".join(filter(None, (label, path, name))), names, name)

    def _note_object(self, label: str, value: Any) -> None:
        if is_plain_object(value):
            self.objects.setdefault(label, value)

    @property
    def roots(self) -> dict[str, Any]:
        """The modules and the plain objects that the functions name."""
        return self._modules | self.objects

    def _note(self, label: str, mapping: dict[str, Any], key: str) -> None:
        self.labels.append(label)
        self.mappings.append(mapping)
        self.keys.append(key)
        self.values.append(mapping.get(key))


def _values_in(container: Any) -> Any:
    """A view of what lies in a dict, list or tuple."""
    return dict.values(container) if isinstance(container, dict) else container


def _is_known_by_itself(value: Any) -> bool:
    """Whether a value is a function or a module, and equal to nothing but itself."""
    compares: Any = type(value).__eq__
    return callable(value) and compares is object.__eq__


def _is_foreign(function: types.FunctionType) -> bool:
    home = function.__globals__.get("__name__", "")  # and not __module__, which functools.wraps copies
    if home.startswith("weft.proofs."):
        return False  # laws and strategies stand for what users write
    return home.split(".")[0] in _FOREIGN or "site-packages" in function.__code__.co_filename


def _held_by(cell: types.CellType) -> Any:
    """What a cell holds; the cell itself if it is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


@functools.lru_cache(1024)
def _names_in(code: types.CodeType) -> tuple[Set[str], Set[str]]:
    """The names that a function and the functions inside it look up among the globals, which are not those of
    attributes; and the globals and nonlocals that they bind."""
    read, bound, local = set[str](), set[str](), set[str]()
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            read.add(name)
        elif kind in ("STORE_GLOBAL", "DELETE_GLOBAL") or (kind == "STORE_DEREF" and name in code.co_freevars):
            bound.add(name)
        elif kind == "STORE_NAME":  # in the body of a class
            local.add(name)
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return (read - local).union(*(one for one, _ in inner)), bound.union(*(one for _, one in inner))
