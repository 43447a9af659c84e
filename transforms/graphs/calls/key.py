"""`Key`: the memo key of a graphified function. Its parts have names, so that a miss can say which
field differed.

`key_of` in `weft.transforms.graphs.calls.call` makes the key of a call.
"""

import enum
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from weft.arguments.checks import kind_of
from weft.errors import CaptureError
from weft.transforms.graphs.calls.buffers import offset_of
from weft.values.keys import EXACT, by_identity, value_key
from weft.values.trees import TreeSpec, tree_leaves

# Attributes of tensors with these prefixes belong to weft and torch.compile, and say nothing about
# the tensor.
# Were they part of the key, donation or a compilation elsewhere would be a cache miss.
OF_OTHERS = ("_weft", "_dynamo")


@attrs.frozen
class LeafKey:
    """The properties of one tensor argument that a captured graph depends on."""

    kind: type
    shape: tuple[int, ...]
    dtype: Any
    # The result of an operator may depend on strides (its own layout, or the kernel that is
    # chosen).
    stride: tuple[int, ...]
    device: Any
    flags: tuple[bool, ...]
    """In this order, whether the tensor is a lazy conjugate, is a lazy negative, requires grad, is
    a leaf of autograd, is quantized, and (only if captured by reference) was made in inference
    mode."""
    address: int | None
    """The data pointer, for arguments captured by reference; None for copied ones."""
    # Kernels choose vectorized loads by alignment, and results may differ in the last bit with
    # them.
    offset: int = 0
    """For copied arguments, the address of the first element modulo 16 bytes."""
    attributes: tuple[tuple[str, Any], ...] = ()
    """The attributes that Python code has set on the tensor."""

    def besides_address(self) -> tuple[Any, ...]:
        """All properties but the address."""
        return (
            self.kind,
            self.shape,
            self.dtype,
            self.stride,
            self.device,
            self.flags,
            self.offset,
            self.attributes,
        )


@attrs.frozen(cache_hash=True)
class TreeKey:
    """The part of a key for some of the arguments.

    Args:
        structure: their tree structure.
        keys: the dict keys in the structure, made distinct where `==` is not enough (1, 1.0 and
            True).
        leaves: one `LeafKey` per tensor; for any other leaf its `value_key`.
    """

    # `hash(1) == hash(1.0) == hash(True)`, and the three are equal: hence `keys` beside the
    # structure.
    structure: Any
    keys: tuple[Any, ...]
    leaves: tuple[Any, ...]


@attrs.frozen(cache_hash=True)
class Key:
    """Everything that a capture depends on: calls share a graph if and only if their keys are
    equal."""

    ambient: tuple[Any, ...]
    """The call's surroundings as (name, value): grad mode, autocast, torch's global switches,
    `weft.batch_invariant()`, function modes."""
    mode: str
    """`full` or `piecewise`."""
    statics: tuple[tuple[str, Any], ...]
    descriptor: Any
    references: TreeKey
    """The arguments captured by reference."""
    copied: TreeKey
    """The copied arguments, padded to the class."""

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The key of each leaf, those by reference first."""
        return *self.references.leaves, *self.copied.leaves


@attrs.frozen
class KnownReferences:
    """The key of a call's arguments by reference, taken from an earlier call with the same
    addresses and shapes.

    Args:
        tree: the structure of these arguments.
        key: their part of the memo key.
    """

    tree: TreeSpec
    key: TreeKey
    # The fast path reads `holds` of whatever it finds. References alone have no outside to compare.
    holds: None = None


class Weakly:
    """A static argument that is equal only to itself, in a key that does not keep it alive."""

    def __init__(self, value: Any) -> None:
        self.reference = weakref.ref(value)
        # Kept, because the key must still be found, to be removed, when the value has died.
        self._hash = id(value)

    def __eq__(self, other: object) -> bool:
        # Identity first, because a dead reference equals only itself.
        if self is other:
            return True
        value = self.reference()
        return isinstance(other, Weakly) and value is not None and value is other.reference()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self.reference())


def static_key(value: Any) -> Any:
    """The `value_key` of a static argument; an argument that is compared by identity is held
    weakly."""
    if is_held_weakly(value):
        # The type, so that a weak key can never be equal to the plain key of another value.
        return (type(value), Weakly(value))
    return value_key(value)


def is_held_weakly(value: Any) -> bool:
    """Whether keys hold a static argument weakly: it is compared by identity, as the instance of a
    method is, and it supports weak references."""
    kind: Any = type(value)
    # An own `__hash__` says that the object is a value; then equal ones share a graph.
    is_candidate = kind.__hash__ is object.__hash__ and kind.__weakrefoffset__ != 0
    return is_candidate and kind not in EXACT and by_identity(kind) and not isinstance(value, type)


def without_grad_mode(key: Key) -> Key:
    """The key without its grad mode."""
    return attrs.evolve(key, ambient=tuple(pair for pair in key.ambient if pair[0] != "grad mode"))


def attributes_of(tensor: Tensor) -> tuple[tuple[str, Any], ...]:
    """The attributes that Python code has set on a tensor: names and `value_key`s."""
    return tuple(
        (name, value_key(x)) for name, x in vars(tensor).items() if not name.startswith(OF_OTHERS)
    )


def leaf_key(leaf: Any, shape: tuple[int, ...] | None, by_reference: bool) -> Any:
    """The key of one leaf. `shape` is the padded shape of a sized leaf, and None for others. The
    buffer of a sized leaf is contiguous, so its stride and alignment are not part of the key."""
    if not isinstance(leaf, Tensor):
        return value_key(leaf)
    kind = type(leaf)
    dtype = leaf.dtype
    device = leaf.device
    flags: tuple[bool, ...] = (
        # Conjugation and negation are lazy flags of a tensor: its memory alone does not say its
        # value.
        leaf.is_conj(),
        leaf.is_neg(),
        leaf.requires_grad,
        leaf.is_leaf,
        leaf.is_quantized,
    )
    set_on = attributes_of(leaf)
    if by_reference:
        flags = (*flags, leaf.is_inference())
        return LeafKey(
            kind, tuple(leaf.shape), dtype, leaf.stride(), device, flags, leaf.data_ptr(), 0, set_on
        )
    # A padded leaf is copied into a contiguous buffer of the class, whatever its own layout is.
    if shape is not None:
        return LeafKey(kind, shape, dtype, (), device, flags, None, 0, set_on)
    return LeafKey(
        kind, tuple(leaf.shape), dtype, leaf.stride(), device, flags, None, offset_of(leaf), set_on
    )


def check_hashable(key: Key, call: str, names: Callable[[], Iterable[str]]) -> None:
    """Raise an error that names the part of `key` that cannot be hashed, if there is one."""
    try:
        hash(key)
    except TypeError:
        parts = [
            ("tree structure", (part.structure, part.keys)) for part in (key.references, key.copied)
        ]
        for name, value in [*key.statics, *zip(names(), key.leaves, strict=True), *parts]:
            try:
                hash(value)
            except TypeError as error:
                problem = f"{name} is not a tensor and cannot be hashed ({error})"
                is_tree = isinstance(value, tuple) and any(
                    isinstance(part, dict | list) for part in value
                )
                if is_tree and name in dict(key.statics):
                    way = f", or take {name} out of static_argnames"
                else:
                    way = ""
                instead = f"pass a tensor, or a hashable value (a tuple for a list){way}"
                if isinstance(value, tuple) and value:
                    leaf = value[-1]
                else:
                    leaf = value
                is_container = isinstance(leaf, Mapping) or is_dataclass(leaf)
                has_advice = _is_numpy(leaf) or (is_container and name not in dict(key.statics))
                raise CaptureError(
                    call, problem, _instead_of(leaf) if has_advice else instead
                ) from None
        raise


# Immutable types.
PLAIN = (
    *(
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        type(...),
        enum.Enum,
        range,
        slice,
        type,
        torch.Generator,
    ),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def check_tensors(leaves: Iterable[Any], call: str, names: Callable[[], Iterable[str]]) -> None:
    """Raise an error for a tensor whose behaviour its key does not capture."""
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or (
            type(leaf) in (Tensor, Parameter) and not leaf.is_quantized
        ):
            continue
        if leaf.is_quantized:
            what = "quantized, and its scales are not part of the key"
            instead = "pass x.int_repr() and the scales"
        else:
            what = f"{kind_of(leaf)}, a subclass of Tensor, which may redefine any operator"
            instead = "pass plain tensors: those that it wraps, or x.as_subclass(torch.Tensor)"
        raise CaptureError(call, f"{[*names()][index]} is {what}", instead)


_STATIC = "name it in static_argnames if it never changes"


def check_plain(
    leaves: Iterable[Any], call: str, names: Callable[[], Iterable[str]], if_constant: str = _STATIC
) -> None:
    """Raise an error for a mutable leaf: an object that is neither a tensor, a plain value nor a
    pytree.

    Args:
        leaves: the leaves of the arguments.
        call, names: the call, and the names of the leaves, as the user writes them.
        if_constant: the advice for an object that never changes.
    """
    leaves = list(leaves)
    if all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
        return
    name, leaf = next(
        p for p in zip(names(), leaves, strict=True) if not isinstance(p[1], (Tensor, *PLAIN))
    )
    problem = f"{name} is {kind_of(leaf)}, which is neither a tensor, a plain value nor a pytree"
    raise CaptureError(call, problem, _instead_of(leaf, if_constant))


def _is_numpy(leaf: Any) -> bool:
    return type(leaf).__module__.split(".")[0] == "numpy"


def _instead_of(leaf: Any, if_constant: str = _STATIC) -> str:
    """The advice for an object that cannot be a leaf: what to pass instead."""
    if _is_numpy(leaf):
        if hasattr(leaf, "shape") and leaf.shape:
            return "torch.from_numpy(array)"
        return "float(...) or int(...) of it"
    if isinstance(leaf, torch.nn.Module):
        return (
            "its parameters, with torch.func.functional_call, or a stage of it"
            " (weft.stages.from_module)"
        )
    if isinstance(leaf, Mapping):
        return "dict(...) of it"
    if is_dataclass(leaf) and not attrs.has(type(leaf)):
        return (
            f"@weft.pytree above @attrs.frozen instead of @dataclass above {type(leaf).__name__};"
            " or its tensors"
        )
    return f"register its class (weft.pytree), pass its tensors, or {if_constant}"


def check_statics(statics: Mapping[str, Any], call: str) -> None:
    """Raise an error for a static argument that holds a tensor, because a key cannot hold a
    tensor's value."""
    for name, value in statics.items():
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            problem = f"{name}, a static argument, holds a tensor"
            raise CaptureError(
                call, problem, f"take {name} out of static_argnames: tensors are read at each call"
            )


@attrs.frozen
class CacheInfo:
    """Counts since the function was graphified, or since `cache_clear()`.

    Args:
        captures: graphs captured.
        replays: calls answered by a replay (the call that captures replays too).
        eager: calls that ran the function itself, except those inside a trace, another capture or a
            torch.func transform.
        currsize: graphs held now.
        eager_reasons: the eager calls by reason; after 64 reasons, all others count as one. Not
            printed and not compared.
    """

    captures: int = 0
    replays: int = 0
    eager: int = 0
    currsize: int = 0
    eager_reasons: Mapping[str, int] = attrs.field(factory=dict, repr=False, eq=False)
