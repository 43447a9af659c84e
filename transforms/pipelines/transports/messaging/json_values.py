"""Values as JSON, so that ranks can exchange them without pickle.

A value is a number, a text, bytes, a dtype or a device of torch, or a container of these: a tuple,
list, dict, set, named tuple, enum, attrs class, dataclass or pytree node. A class travels as its
name, and the receiver looks it up among the classes that it has already loaded. Nothing is
imported, and only classes of these kinds are called.
"""

import base64
import dataclasses
import enum
import json
import sys
from collections.abc import Callable
from typing import Any

import attrs
import torch

from weft.arguments.checks import kind_of
from weft.errors import ProgramError
from weft.torchapi.private import pytree_node

_JSON = (bool, str, type(None))


def dumps(value: Any, call: str) -> bytes:
    """A value as bytes.

    Raises:
        ProgramError: the value cannot be encoded; the error names `call`.

    >>> loads(dumps((1, 2.5, {"a": torch.float16}), "f(x)"))
    (1, 2.5, {'a': torch.float16})
    """
    return json.dumps(_encoded(value, call), separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """The value from its bytes, made by `dumps`.

    Raises:
        ValueError: `dumps` cannot have made these bytes, or they name a class that this process has
            not loaded.
    """
    return _decoded(json.loads(data))


def _encoded(value: Any, call: str) -> Any:
    kind = type(value)
    if kind in _JSON:
        return value
    if kind is int:
        # JSON integers are interoperable only below 2**53 (RFC 8259, section 6).
        if abs(value) < 2**53:
            return value
        return ["int", str(value)]
    # `hex` is exact, and also covers infinities and NaN, which JSON lacks.
    if kind is float:
        return ["float", value.hex()]
    if kind is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if kind in _SEQUENCES.values():
        name = next(name for name, sequence_type in _SEQUENCES.items() if sequence_type is kind)
        if kind in (set, frozenset):
            # Python iterates over equal sets of strings in different orders in two processes.
            items = sorted(value, key=repr)
        else:
            items = value
        return [name, *(_encoded(item, call) for item in items)]
    if kind is type and _find_class(name := f"{value.__module__}:{value.__qualname__}") is value:
        return ["class", name]
    if kind is dict:
        return [
            "dict",
            *([_encoded(key, call), _encoded(entry, call)] for key, entry in value.items()),
        ]
    return _encoded_object(value, kind, call)


def _encoded_object(value: Any, kind: type, call: str) -> Any:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" not in name and _find_class(name) is kind:
        if isinstance(value, enum.Enum):
            return ["enum", name, value.name]
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return ["named", name, *(_encoded(item, call) for item in value)]
        if (node := pytree_node(kind)) is not None:
            children, context = node.flatten_fn(value)
            return [
                "node",
                name,
                _encoded(context, call),
                *(_encoded(child, call) for child in children),
            ]
        if (fields := _fields(kind)) is not None:
            return [
                "object",
                name,
                *([argument, _encoded(getattr(value, f), call)] for argument, f in fields.items()),
            ]
    problem = f"{value!r:.60}, {kind_of(value)}, which cannot travel to another process"
    raise ProgramError(
        call,
        problem,
        "tensors, numbers, texts, and tuples, dicts or attrs classes (of a module) of these",
    )


def _fields(kind: type) -> dict[str, str] | None:
    """The constructor arguments of an attrs class or a dataclass, each with the field that holds
    it; None for other classes."""
    if attrs.has(kind):
        return {str(field.alias): field.name for field in attrs.fields(kind) if field.init}
    if dataclasses.is_dataclass(kind):
        return {f.name: f.name for f in dataclasses.fields(kind) if f.init}
    return None


def _decoded(data: Any) -> Any:
    if not isinstance(data, list):
        return data
    if not data or data[0] not in _DECODERS:
        raise ValueError(f"not a value that was sent: {data!s:.60}")
    return _DECODERS[data[0]](*data[1:])


def _find_class(name: str) -> Any:
    """The class with the name `module:qualname`, if its module is loaded."""
    module, _, path = name.partition(":")
    # Only loaded modules: an import would run code because a message says so.
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        if value is not None:
            value = vars(value).get(part)
        else:
            value = None
    if isinstance(value, type):
        return value
    return None


def _class(name: str, fits: Callable[[Any], Any]) -> Any:
    kind = _find_class(name)
    if kind is None or not fits(kind):
        raise ValueError(f"no class {name!r} of that kind is loaded here")
    return kind


def _node(name: str, context: Any, *children: Any) -> Any:
    node = pytree_node(_class(name, lambda kind: pytree_node(kind) is not None))
    assert node is not None, "`_class` has looked it up"
    return node.unflatten_fn([_decoded(child) for child in children], _decoded(context))


def _object(name: str, *fields: Any) -> Any:
    return _class(name, lambda kind: _fields(kind) is not None)(
        **{field: _decoded(value) for field, value in fields}
    )


def _torch(kind: type) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        constant = getattr(torch, name, None)
        if not isinstance(constant, kind):
            raise ValueError(f"torch has no {kind.__name__} {name!r}")
        return constant

    return find


_SEQUENCES: dict[str, type] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}
_DECODERS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float.fromhex,
    "complex": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "bytes": base64.b64decode,
    "device": torch.device,
    **{kind.__name__: _torch(kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
    **{
        name: lambda *items, sequence_type=sequence_type: sequence_type(map(_decoded, items))
        for name, sequence_type in _SEQUENCES.items()
    },
    "dict": lambda *items: {_decoded(key): _decoded(value) for key, value in items},
    "class": lambda name: _class(name, lambda _: True),
    "enum": lambda name, member: _class(name, lambda kind: issubclass(kind, enum.Enum))[member],
    "named": lambda name, *items: _class(
        name, lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields")
    )(*map(_decoded, items)),
    "node": _node,
    "object": _object,
}
