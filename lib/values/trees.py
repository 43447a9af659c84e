"""Frozen attrs classes as pytrees, and the functions on trees that weft uses.

A *sized* class declares, for each tensor field, which dimensions have a size that the batch
descriptor gives (`axes`). `weft.batches.padding` pads and unpads any tree of such classes.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from numbers import Number
from types import MappingProxyType
from typing import Any, TypeVar

import attrs
import torch
from torch import Size, Tensor

from weft.arguments.checks import kind_of
from weft.errors import DescriptorError, TreeError
from weft.torchapi.private import children_of, pytree as _pytree, pytree_node, unnamed_children
from weft.values.keys import EXACT, value_key

C = TypeVar("C", bound=type)
T = TypeVar("T")

TreeSpec = _pytree.TreeSpec
tree_unflatten = _pytree.tree_unflatten
keystr = _pytree.keystr

_AXES = "weft.axes"
_STATIC = "weft.static"
_DESCRIPTOR = "weft.descriptor"
_OF_THIS_VALUE = "weft.of_this_value"
# The attribute in which attrs caches a hash.
_HASH = "_attrs_cached_hash"
# The metadata of a field whose value may differ from rank to rank.
OF_THIS_PROCESS = {"weft.of_this_process": True}
# The metadata of a field that is not part of the tree. It is not copied into values that are made
# from another one; they get the field's default.
OF_THIS_VALUE = {_OF_THIS_VALUE: True}
_FIELDS = "__weft_fields__"
_SIZED = "__weft_sized__"


def _is_size(node: Any) -> bool:
    """Whether a value is a torch.Size. It is a leaf here, because torch's pytree would turn it into
    a tuple."""
    return type(node) is Size


IsLeaf = Callable[[Any], bool]


def tree_flatten(tree: Any, is_leaf: IsLeaf = _is_size) -> tuple[list[Any], TreeSpec]:
    """The leaves of a tree, and its structure."""
    return _pytree.tree_flatten(tree, is_leaf)


def tree_leaves(tree: Any, is_leaf: IsLeaf = _is_size) -> list[Any]:
    """The leaves of a tree."""
    if is_leaf is not _is_size:
        return _pytree.tree_leaves(tree, is_leaf)
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves


def _collect(node: Any, leaves: list[Any]) -> None:
    """Append the leaves of a tree. For the classes of `pytree` it takes a tenth of the time of
    torch's pytree."""
    kind = type(node)
    if kind is Tensor:
        leaves.append(node)
    elif (fields := kind.__dict__.get(_FIELDS)) is not None:
        # This path bypasses `flatten`, so it must refuse tensors in static fields itself.
        for name in fields.statics:
            if isinstance(value := getattr(node, name), Tensor):
                _check_static(kind, name, value)
        for child in fields.values(node):
            _collect(child, leaves)
    elif kind is tuple or kind is list or kind is dict:
        for child in node.values() if kind is dict else node:
            _collect(child, leaves)
    else:
        leaves += _pytree.tree_leaves(node, _is_size)


def tree_structure(tree: Any, is_leaf: IsLeaf = _is_size) -> TreeSpec:
    """The structure of a tree."""
    return _pytree.tree_structure(tree, is_leaf)


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = _is_size) -> Any:
    """Apply `fn` to each leaf of a tree, with the leaves of other trees at the same place."""
    return _pytree.tree_map(fn, tree, *rest, is_leaf=is_leaf)


@attrs.frozen
class Axes:
    """The dimensions of a tensor field whose sizes the descriptor gives, and the value of the
    padding.

    Args:
        dims: one entry for each leading dimension: an attribute of the descriptor, optionally with
            a constant (`"num_reqs+1"`), or None for a dimension that is the same in every batch.
        pad: the value of the padding, or `"last"`: the last valid entry along the dimension (0 if
            there is none).
    """

    dims: tuple[str | None, ...]
    pad: float | str = 0

    def name(self, dim: int) -> str | None:
        """The name of dimension `dim`, or None if it is the same in every batch."""
        if dim < len(self.dims):
            return self.dims[dim]
        return None

    def sizes(self) -> set[str]:
        """The attributes of the descriptor that give sizes."""
        return {name.partition("+")[0] for name in self.dims if name is not None}

    def padding(self, dtype: torch.dtype) -> Any:
        """The value of the padding, for a tensor of a dtype.

        Raises:
            DescriptorError: the dtype does not hold the value, as uint8 does not hold -1: torch
                would write another value, which a function would not know as padding.
        """
        if not _holds(dtype, self.pad):
            call = f"weft.axes({_listed(self.dims)}, pad={self.pad!r})"
            problem = f"a tensor of {dtype}, which does not hold that padding"
            raise DescriptorError(
                call, problem, "a value that it holds, or a tensor of another dtype"
            )
        return self.pad

    def extent(self, dim: int, descriptor: Any) -> int | None:
        """The size of dimension `dim` under `descriptor`, or None if the descriptor does not give
        it."""
        name = self.name(dim)
        if name is None:
            return None
        base, plus, constant = name.partition("+")
        size: Any = getattr(descriptor, base, None)
        if not hasattr(size, "__index__"):
            if hasattr(descriptor, base):
                has = f"{base}={size!r}"
            else:
                has = f"no attribute {base!r}"
            problem = f"a descriptor {descriptor!r}, with {has}"
            kind = type(descriptor).__name__
            instead = (
                f"an int attribute {base!r} of {kind}, or in axes(...) the name of one that it has"
            )
            raise DescriptorError(f"weft.axes({_listed(self.dims)})", problem, instead)
        return int(size) + (int(constant) if plus else 0)


@lru_cache(maxsize=256)
def _holds(dtype: torch.dtype, value: Any) -> bool:
    """Whether an integer or bool dtype holds a number; others round it."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype is torch.bool:
        return value in (0, 1)
    if isinstance(value, complex):
        return False
    bounds = torch.iinfo(dtype)
    return bool(bounds.min <= value <= bounds.max and value == int(value))


def axes(*dims: str | None, pad: float | str = 0) -> dict[str, Any]:
    """Metadata for a tensor field of a sized class: `attrs.field(metadata=axes("num_tokens",
    pad=-1))`.

    Args:
        dims: for each dimension, the attribute of the class's descriptor that gives its size
            (`"num_reqs+1"`: one more); None: the descriptor does not give it.
        pad: the value of the padding; `"last"`: the last valid entry.

    Raises:
        DescriptorError: an argument is not a name, or `pad` is neither a number nor "last". Where a
            tensor is padded: its dtype does not hold `pad`, such as uint8 a padding of -1.

    The names are attributes of the class's descriptor, which may have a type of your own:

    >>> import torch, weft
    >>> @attrs.frozen
    ... class Length(weft.Descriptor):
    ...     steps: int
    >>> @weft.pytree
    ... @attrs.frozen(eq=False)
    ... class Signal:
    ...     length: Length = attrs.field(metadata=weft.descriptor_field())
    ...     x: Tensor = attrs.field(metadata=weft.axes("steps"))
    >>> running = weft.graphify(lambda s: Signal(s.length, s.x.cumsum(0)), ladder=[Length(8), Length(4)])
    >>> running(Signal(Length(3), torch.ones(3))).x  # runs under Length(4)
    tensor([1., 2., 3.])
    """
    if strange := [dim for dim in dims if not isinstance(dim, str | None)]:
        instead = (
            'names of sizes of the descriptor, as in axes("num_tokens"); None for a size of its own'
        )
        raise DescriptorError(
            f"weft.axes({_listed(dims)})", f"{strange[0]!r:.40}, {kind_of(strange[0])}", instead
        )
    if pad != "last" and not isinstance(pad, Number):
        raise DescriptorError(
            f"weft.axes({_listed(dims)}, pad={pad!r:.40})",
            f"a padding that is {kind_of(pad)}",
            'a number; or pad="last", for the last valid entry',
        )
    return {_AXES: Axes(dims, pad)}


def _listed(dims: Iterable[str | None]) -> str:
    return ", ".join(map(repr, dims))


def static() -> dict[str, Any]:
    """Metadata for a hashable field that is not a tensor: it is part of the tree's structure, and a
    capture freezes it."""
    return {_STATIC: True}


def descriptor_field() -> dict[str, Any]:
    """Metadata for the static field that holds the descriptor of a sized value (see `axes` for an
    example)."""
    return {_STATIC: True, _DESCRIPTOR: True}


@attrs.frozen
class ClassFields:
    """The fields of an attrs class.

    Args:
        names: the fields that are part of a tree, including those that `__init__` does not take.
        fresh: the other fields (`OF_THIS_VALUE`), each with a function that makes its default; and
            the attribute in which attrs caches a hash, if the class has one.
    """

    names: tuple[str, ...]
    fresh: tuple[tuple[str, Callable[[], Any]], ...]


@lru_cache(maxsize=256)
def class_fields(cls: type) -> ClassFields:
    """The fields of an attrs class."""
    fields = attrs.fields(cls)
    names = tuple(f.name for f in fields if not f.metadata.get(_OF_THIS_VALUE))
    fresh = [(f.name, _maker(f.default)) for f in fields if f.metadata.get(_OF_THIS_VALUE)]
    # attrs does not list the attribute of its cached hash, but its `__hash__` names it.
    hashing = getattr(cls.__hash__, "__code__", None)
    if hashing is not None and _HASH in hashing.co_names:
        fresh.append((_HASH, _maker(None)))
    return ClassFields(names, tuple(fresh))


def _maker(default: Any) -> Callable[[], Any]:
    """A function that makes the default of a field."""
    factory: Callable[[], Any] | None = getattr(default, "factory", None)
    if factory is None:
        return lambda: default
    return factory


def built(cls: type, values: Iterable[tuple[str, Any]]) -> Any:
    """A value of an attrs class with these fields by name, made without calling its class.

    `__init__`, converters, validators and `__attrs_post_init__` are for what a user writes. They
    would change or refuse what a transform puts into an existing value: traced tensors, axes,
    gradients, marks.
    """
    node: Any = object.__new__(cls)
    write = object.__setattr__
    for name, value in values:
        write(node, name, value)
    for name, make in class_fields(cls).fresh:
        write(node, name, make())
    return node


def replaced(node: T, values: Mapping[str, Any]) -> T:
    """A value like `node` with other values in some fields, made without calling its class."""
    cls: Any = type(node)
    names = class_fields(cls).names
    changed: T = built(
        cls, [(name, values[name] if name in values else getattr(node, name)) for name in names]
    )
    return changed


@attrs.frozen(hash=True)
class Context:
    """The part of a tree's structure that one node adds: its static fields, and which of its
    optional fields are None."""

    # Compared by `kinds` instead, since `==` takes 1, 1.0 and True for equal.
    values: tuple[Any, ...] = attrs.field(eq=False)
    absent: tuple[str, ...] = ()
    kinds: tuple[Any, ...] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(value_key(v) for v in self.values))


@attrs.frozen
class NodeFields:
    """The names of the fields of a class registered with `pytree`: those that are children, those
    that are structure, and the optional ones, which are children unless they are None."""

    children: tuple[str, ...]
    statics: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def of(self, context: Context) -> tuple[str, ...]:
        """The fields that are the children of a node with this context."""
        return tuple(name for name in self.children if name not in context.absent)

    def values(self, node: Any) -> list[Any]:
        """The children of a node."""
        optional = self.optional
        return [
            x
            for name in self.children
            if (x := getattr(node, name)) is not None or name not in optional
        ]


def node_fields(cls: type) -> NodeFields | None:
    """The fields of a class that `pytree` registered itself, not only a base of it; else None."""
    return vars(cls).get(_FIELDS)


def pytree(cls: C) -> C:
    """Register a frozen attrs class as a pytree node: tensor fields are children, `static()` fields
    are structure.

    All fields count, including those that `__init__` does not take. A field without `axes` whose
    value is None is structure too, because torch.func refuses trees with a leaf that is None.

    Transforms make values of the class without calling it. So `__init__`, converters, validators
    and `__attrs_post_init__` run only where you call the class yourself.

    Args:
        cls: the class; `@weft.pytree` stands above `@attrs.frozen`.

    Returns:
        The same class.

    >>> @pytree
    ... @attrs.frozen
    ... class Pair:
    ...     left: Any
    ...     right: Any
    >>> tree_leaves(Pair(1, (2, 3)))
    [1, 2, 3]

    Raises:
        TreeError: the class is not a frozen attrs class, or is registered with torch's pytree. When
            a value of the class is used as a tree: a static field holds a tensor, or a value that
            cannot be hashed.
    """
    name = getattr(cls, "__name__", str(cls))
    call = f"weft.pytree({name})"
    if not hasattr(cls, "__attrs_attrs__"):
        if hasattr(cls, "__dataclass_fields__"):
            kind = "a dataclass"
        else:
            kind = "no attrs class"
        raise TreeError(call, kind, f"@weft.pytree, then @attrs.frozen, then class {name}: ...")
    if getattr(cls.__setattr__, "__name__", "") != "_frozen_setattrs":
        raise TreeError(
            call, "a class whose fields can change", "@attrs.frozen in place of @attrs.define"
        )
    if pytree_node(cls) is not None:
        if node_fields(cls) is not None:
            return cls
        problem = "a class that is registered with torch's pytree"
        raise TreeError(
            call, problem, "one of the two: weft's transforms take it as torch knows it"
        )
    fields = [f for f in attrs.fields(cls) if f.name in class_fields(cls).names]
    children = tuple(f.name for f in fields if not f.metadata.get(_STATIC))
    statics = tuple(f.name for f in fields if f.metadata.get(_STATIC))
    optional = tuple(f.name for f in fields if not {_AXES, _STATIC} & f.metadata.keys())
    names = NodeFields(children, statics, optional)

    def flatten(node: Any) -> tuple[list[Any], Context]:
        absent = tuple(name for name in optional if getattr(node, name) is None)
        values = [getattr(node, name) for name in children if name not in absent]
        static_values = tuple(getattr(node, name) for name in statics)
        for static_name, value in zip(statics, static_values, strict=True):
            _check_static(cls, static_name, value)
        return values, Context(static_values, absent)

    def unflatten(values: Iterable[Any], context: Context) -> Any:
        return built(
            cls,
            [
                *zip(names.of(context), values, strict=True),
                *((name, None) for name in context.absent),
                *zip(statics, context.values, strict=True),
            ],
        )

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Context]:
        values, context = flatten(node)
        keys = [_pytree.GetAttrKey(name) for name in names.of(context)]
        return list(zip(keys, values, strict=True)), context

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        # torch.export stores structures, and finds their classes again by this name.
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    type.__setattr__(cls, _FIELDS, names)
    return cls


def _check_static(cls: type, name: str, value: Any) -> None:
    """Raise TreeError if a static field holds a tensor, which a structure cannot compare, or a
    value that cannot be hashed."""
    kind = type(value)
    if kind in EXACT:
        return
    call = f"{cls.__name__}({name}={value!r:.60})"
    is_tree = isinstance(value, Tensor | tuple) or pytree_node(kind) is not None
    if is_tree and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
        raise TreeError(
            call, f"a tensor in {name}, a static field", f"{name} without weft.static()"
        )
    try:
        hash(value)
    except TypeError as error:
        instead = f"a value that can be hashed, such as a tuple; or {name} without weft.static()"
        raise TreeError(call, f"a static field that cannot be hashed ({error})", instead) from None


def keys_in(structure: TreeSpec) -> tuple[Any, ...]:
    """The `value_key`s of the parts of a structure that `==` does not tell apart: the dict keys
    that are not strings, and the contexts of classes that others registered."""
    kind = structure.type
    context = structure.context
    node_keys = list[Any]()
    if isinstance(kind, type) and issubclass(kind, dict):
        # torch's context of a defaultdict is its factory and its keys; of other dicts, the keys
        # alone.
        if kind is defaultdict:
            keys = context[1]
        else:
            keys = context
        node_keys = [value_key(key) for key in keys if type(key) is not str]
    elif context is not None and not isinstance(context, type | Context):
        node_keys = [value_key(context)]
    return (
        *node_keys,
        *(child_key for child in children_of(structure) for child_key in keys_in(child)),
    )


def leaves_with_names(tree: Any, is_leaf: IsLeaf = _is_size) -> list[tuple[str, Any]]:
    """The leaves with their paths as text (`.kv_pages`, `[0]['w']`), in flattening order. Children
    without names are numbered."""
    # torch raises for classes that were registered without key paths, so it must stop at them.
    pairs, _ = _pytree.tree_flatten_with_path(
        tree,
        is_leaf=lambda node: _is_size(node) or is_leaf(node) or unnamed_children(node) is not None,
    )
    named_leaves: list[tuple[str, Any]] = []
    for path, part in pairs:
        if is_leaf(part) or (children := unnamed_children(part)) is None:
            named_leaves.append((keystr(path), part))
            continue
        for index, child in enumerate(children):
            named_leaves += [
                (f"{keystr(path)}[{index}]{name}", leaf)
                for name, leaf in leaves_with_names(child, is_leaf)
            ]
    return named_leaves


@attrs.frozen
class SizedFields:
    """The fields of a sized class, by name: tensors with axes, fields that hold the descriptor, and
    parts, which are trees of their own."""

    axes: Mapping[str, Axes]
    descriptors: tuple[str, ...]
    parts: tuple[str, ...]


def sized_class_fields(kind: type) -> SizedFields | None:
    """The fields of a sized class; None for any other class. They are cached on the class."""
    of, sized_fields = vars(kind).get(_SIZED, (None, None))
    # Stale if attrs has processed the class again, which replaces its fields.
    if of is not None and of is getattr(kind, "__attrs_attrs__", None):
        cached: SizedFields | None = sized_fields
        return cached
    if not attrs.has(kind):
        return None
    fields = attrs.fields(kind)
    axes = {f.name: f.metadata[_AXES] for f in fields if _AXES in f.metadata}
    descriptors = tuple(f.name for f in fields if f.metadata.get(_DESCRIPTOR))
    plain = [f.name for f in fields if not {_AXES, _STATIC} & f.metadata.keys()]
    parts = tuple(name for name in plain if name in class_fields(kind).names)
    sized_fields = SizedFields(MappingProxyType(axes), descriptors, parts) if axes else None
    type.__setattr__(kind, _SIZED, (fields, sized_fields))
    return sized_fields


def sized_fields(node: Any) -> Mapping[str, Axes]:
    """The fields of `node` that have axes; empty for anything but a sized class."""
    fields = sized_class_fields(type(node))
    if fields is None:
        return {}
    return fields.axes


def _is_sized(node: Any) -> bool:
    return sized_class_fields(type(node)) is not None


def _map_values(fn: Callable[[Any, SizedFields], Any], node: Any) -> Any:
    """Apply `fn(value, its fields)` to each sized value in a tree, outermost first. It takes a
    fifth of the time of torch's pytree, which first lists all leaves."""
    kind = type(node)
    if kind is Tensor or kind is Size:
        return node
    if (fields := sized_class_fields(kind)) is not None:
        return fn(node, fields)
    if kind is not tuple and isinstance(node, tuple):
        # A named tuple is not registered by its class; torch's pytree recognizes it by its bases.
        return tree_map(
            lambda part: _map_values(fn, part) if _is_sized(part) else part,
            node,
            is_leaf=_is_leaf_here,
        )
    if (node_def := pytree_node(kind)) is None:
        return node
    children, context = node_def.flatten_fn(node)
    return node_def.unflatten_fn([_map_values(fn, child) for child in children], context)


def _is_leaf_here(node: Any) -> bool:
    return _is_size(node) or _is_sized(node)


def map_sized(fn: Callable[[Tensor, Axes], Any], tree: T, descriptor: Any = None) -> T:
    """Apply `fn(tensor, axes)` to every tensor field with axes in `tree`. If `descriptor` is not
    None, it replaces the descriptor of each sized value that holds one."""

    def change(node: Any, fields: SizedFields) -> Any:
        values = {name: getattr(node, name) for name in fields.axes}
        for name, spec in fields.axes.items():
            _check_field(node, name, spec)
        changes = {
            name: fn(x, fields.axes[name]) for name, x in values.items() if isinstance(x, Tensor)
        }
        changes |= {name: _map_values(change, getattr(node, name)) for name in fields.parts}
        if descriptor is not None:
            changes |= dict.fromkeys(fields.descriptors, descriptor)
        return replaced(node, changes)

    mapped: T = _map_values(change, tree)
    return mapped


def _check_field(node: Any, name: str, spec: Axes) -> None:
    value = getattr(node, name)
    if isinstance(value, Tensor):
        if value.dim() >= len(spec.dims):
            return
        shown = f"<tensor of shape {tuple(value.shape)}>"
        problem = f"{value.dim()} dimensions"
        instead = "a name for each dimension, or for the first ones"
    elif isinstance(value, list | tuple | dict | int | float):
        shown = f"{value!r:.60}"
        problem = kind_of(value)
        instead = "a tensor (torch.tensor), or a field without axes"
    else:
        return
    call = f"{type(node).__name__}({name}={shown})"
    raise DescriptorError(call, f"{problem} in a field with axes({_listed(spec.dims)})", instead)


def leaf_axes(tree: Any) -> list[Axes | None]:
    """For each leaf, in flattening order, its `Axes` if it is a field with axes, else None."""
    # Put each field's `Axes` in the place of its tensor, then flatten.
    marked = map_sized(lambda _, spec: spec, tree)
    return [leaf if isinstance(leaf, Axes) else None for leaf in tree_leaves(marked)]


def find_descriptors(tree: Any) -> list[Any]:
    """The distinct descriptors that the sized values in `tree` hold, in order."""
    descriptors: list[Any] = []

    def note(node: Any, fields: SizedFields) -> Any:
        descriptors.extend(getattr(node, name) for name in fields.descriptors)
        for name in fields.parts:
            _map_values(note, getattr(node, name))
        return node

    _map_values(note, tree)
    return list(dict.fromkeys(descriptors))
