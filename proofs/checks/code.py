"""Writes values as code to paste, which evaluates to equal values. Tensors that are too large to
print are saved to a file, which the code loads."""

import enum
import inspect
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from weft.proofs.checks.digits import digits
from weft.proofs.checks.elements import has_no_numbers

# The most elements of a tensor that are printed, unless all are the same.
MOST_PRINTED = 256
_WIDTH = 100
# The public modules, which show names of others. They are looked up when a name is written, because
# some of them import this module.
_FACES = (
    "weft",
    "weft.transforms",
    "weft.stages",
    "weft.proofs",
    "weft.proofs.strategies",
)
_PLAIN = (type(None), bool, int, str, bytes, type(...))


@attrs.frozen
class Group:
    """An expression of parts, which are printed one per line if a single line would be too long."""

    before: str
    parts: tuple["Code", ...]
    after: str

    def flat(self) -> str:
        """The expression on one line."""
        comma = "," * (self.before == "(" and len(self.parts) == 1)
        return self.before + ", ".join(map(_flat, self.parts)) + comma + self.after


Code = str | Group | tuple[str, "Code"]


def _flat(code: Code) -> str:
    if isinstance(code, tuple):
        return code[0] + _flat(code[1])
    if isinstance(code, str):
        return code
    return code.flat()


def _lines(code: Code, indent: int, before: str = "") -> list[str]:
    """The lines of the expression; the first one starts with `before`."""
    if isinstance(code, tuple):
        return _lines(code[1], indent, before + code[0])
    line = " " * indent + before + _flat(code)
    if isinstance(code, str) or len(line) <= _WIDTH or not code.parts:
        return [line]
    inside = itertools.chain.from_iterable(
        _with_comma(_lines(part, indent + 4)) for part in code.parts
    )
    return [" " * indent + before + code.before, *inside, " " * indent + code.after]


def _with_comma(lines: list[str]) -> list[str]:
    return [*lines[:-1], lines[-1] + ","]


@attrs.define
class Writer:
    """Writes values as code, and collects the imports, saved tensors and remarks that it needs."""

    imports: set[str] = attrs.field(factory=set)
    saved: list[Tensor] = attrs.field(factory=list)
    remarks: list[str] = attrs.field(factory=list)

    def write(self, value: Any) -> Code:
        """The value as an expression."""
        kind = type(value)
        # By class, since a subclass, such as an enum of ints, has a `repr` that is no code.
        if kind in _PLAIN:
            return repr(value)
        for classes, write in _WRITERS:
            if isinstance(value, classes):
                return write(self, value)
        if attrs.has(kind) or hasattr(value, "__dataclass_fields__"):
            return self._fields(value)
        if inspect.isclass(value) or inspect.isfunction(value):
            return self.named(value)
        return self._unknown(value)

    def named(self, thing: Any) -> str:
        """The name of a class or function: imported by the code, or defined in the user's own code."""
        name = thing.__qualname__
        module = thing.__module__
        face = _face_of(thing)
        if face == "weft":
            self.imports.add("import weft")
            return f"weft.{name}"
        # "<locals>" in a name: no module can import it.
        if module in ("builtins", "__main__") or "<" in name:
            if module != "builtins":
                self.remarks.append(f"{name.rpartition('.')[2]} is of your own code ({module})")
            return str(name.rpartition(".")[2])
        self.imports.add(f"from {face or module} import {name.partition('.')[0]}")
        return str(name)

    def _fields(self, value: Any) -> Code:
        """An attrs or dataclass instance, without the fields that equal their defaults."""
        if attrs.has(type(value)):
            fields = [
                (f.name, f.alias or f.name, f.default) for f in attrs.fields(type(value)) if f.init
            ]
        else:
            fields = [
                (f.name, f.name, f.default) for f in value.__dataclass_fields__.values() if f.init
            ]
        field_values = [(alias, getattr(value, name), default) for name, alias, default in fields]
        parts = tuple(
            _keyed(f"{alias}=", self.write(x))
            for alias, x, default in field_values
            if not _is_default(x, default)
        )
        return Group(f"{self.named(type(value))}(", parts, ")")

    def _unknown(self, value: Any) -> str:
        """An ellipsis for a value that has no code, with a remark that says so."""
        self.remarks.append(
            f"the `...` stands for {value!r:.200}, of class {type(value).__name__}: put yours there"
        )
        return "..."

    def tensor(self, x: Tensor) -> Code:
        """A tensor: printed in full, filled with one number, or loaded from a file."""
        self.imports.add("import torch")
        if x.device.type in ("cpu", "meta"):
            where = ""
        else:
            where = f", device={str(x.device)!r}"
        if x.requires_grad:
            grad = ".requires_grad_()"
        else:
            grad = ""
        resolved = x.detach().resolve_conj().resolve_neg()
        if resolved.is_meta:
            return (
                f"torch.empty({list(resolved.shape)}, dtype={resolved.dtype}, device='meta'){grad}"
            )
        written = _constant(resolved, where) or (
            _printed(resolved, where) if resolved.numel() <= MOST_PRINTED else None
        )
        if written is None:
            self.saved.append(resolved.clone().cpu())
            written = f"saved[{len(self.saved) - 1}]" + (f".to({str(x.device)!r})" if where else "")
        return _strided(resolved, written) + grad

    def block(self, lines: Iterable[tuple[str, Any]], folder: Path | None = None) -> str:
        """Statements `name = value`, after the imports and loads that they need.

        Args:
            lines: the names and values.
            folder: where large tensors are saved; None: a new temporary folder.
        """
        body = list(
            itertools.chain.from_iterable(
                _lines(self.write(value), 0, f"{name} = ") for name, value in lines
            )
        )
        head = sorted(self.imports, key=lambda line: (line.startswith("from"), line))
        if self.saved:
            if folder is None:
                folder = Path(tempfile.mkdtemp(prefix="weft-"))
            path = folder / "saved.pt"
            torch.save(self.saved, path)
            head.append(
                f"saved = torch.load({str(path)!r})  # {len(self.saved)} large, saved there"
            )
        remarks = [f"# {remark}" for remark in dict.fromkeys(self.remarks)]
        return "\n".join([*head, *remarks, *body])


def to_code(value: Any, name: str = "value", folder: Path | None = None) -> str:
    """Statements that rebuild a value: imports, loads of saved tensors, and `name = ...`.

    Supports tensors, containers, attrs classes and dataclasses, enums, numbers, dtypes and devices.
    A tensor of more than 256 elements that are not all the same is saved to a file, which the code
    loads. A value of any other type becomes `...`, with a remark that says what belongs there.

    Args:
        value: the value.
        name: its name in the statements.
        folder: where large tensors are saved; None: a new temporary folder.

    >>> print(to_code({"h": torch.zeros(2, 3), "x": torch.tensor([0.1, float("nan")])}))
    import torch
    value = {'h': torch.zeros(2, 3), 'x': torch.tensor([0.1, float('nan')])}
    >>> from weft.batches.descriptor import BatchDescriptor
    >>> print(to_code(BatchDescriptor.uniform(3), "descriptor"))
    import weft
    descriptor = weft.BatchDescriptor(num_tokens=3, num_reqs=3, query_len=1)
    """
    return Writer().block([(name, value)], folder)


def _face_of(thing: Any) -> str | None:
    """The public module that shows a class or function; None if none does."""
    name = thing.__qualname__
    if not thing.__module__.startswith("weft."):
        return None
    for face in _FACES:
        module = sys.modules.get(face)
        if module is not None and name in module.__all__ and getattr(module, name) is thing:
            return face
    return None


def _keyed(key: str, code: Code) -> Code:
    return (key, code)


def _is_default(value: Any, default: Any) -> bool:
    # By type as well, since 1 equals True and 1.0. Other values may have an `==` of their own.
    return value is default or (
        type(value) is type(default) and type(value) in _PLAIN and value == default
    )


def _number(value: Any) -> str:
    if isinstance(value, complex):
        return f"complex({_number(value.real)}, {_number(value.imag)})"
    if not isinstance(value, float) or math.isfinite(value):
        return repr(value)
    return f"float({str(value)!r})"


def _constant(x: Tensor, where: str) -> str | None:
    """`torch.full`, `zeros` or `ones` for two or more equal elements; None for other tensors."""
    if x.numel() < 2 or has_no_numbers(x.dtype) or x.layout != torch.strided:
        return None
    first = x[(0,) * x.dim()]
    # As bytes: 0.0 equals -0.0, and NaN does not equal NaN.
    bits = x.contiguous().reshape(-1).view(torch.uint8).view(x.numel(), -1)
    if not bool((bits == bits[:1]).all()):
        return None
    (number,) = digits(first.reshape(1))
    size = ", ".join(map(str, x.shape))
    if x.dtype == torch.float32 and number in ("0.0", "1.0"):
        return f"torch.{'zeros' if number == '0.0' else 'ones'}({size}{where})"
    return f"torch.full(({size}{',' * (x.dim() == 1)}), {number}, dtype={x.dtype}{where})"


def _printed(x: Tensor, where: str) -> str | None:
    """A tensor written as the list of its elements."""
    if has_no_numbers(x.dtype) or x.layout != torch.strided:
        return None
    numbers = iter(digits(x.reshape(-1)))

    def listed(shape: torch.Size) -> str:
        if not shape:
            return next(numbers)
        return "[" + ", ".join(listed(shape[1:]) for _ in range(shape[0])) + "]"

    if x.numel() == 0:
        return f"torch.empty({list(x.shape)}, dtype={x.dtype}{where})"
    # The dtypes that `torch.tensor` gives to Python's numbers.
    inferred = x.dtype in (torch.float32, torch.int64, torch.bool)
    return f"torch.tensor({listed(x.shape)}{'' if inferred else f', dtype={x.dtype}'}{where})"


def _strided(x: Tensor, written: str) -> str:
    """Add the strides, unless the written tensor has them anyway, or a copy would not keep them."""
    if (
        x.layout != torch.strided
        or (like := torch.empty_like(x)).is_contiguous()
        or written.startswith("saved")
    ):
        return written
    if x.device.type == "cpu":
        device = ""
    else:
        device = f", device={str(x.device)!r}"
    return (
        f"torch.empty_strided({tuple(x.shape)}, {like.stride()},"
        f" dtype={x.dtype}{device}).copy_({written})"
    )


def _array(writer: Writer, value: np.ndarray[Any, Any]) -> Code:
    return Group(
        "", (("", writer.tensor(torch.from_numpy(np.ascontiguousarray(value)))),), ".numpy()"
    )


def _items(before: str, after: str) -> Callable[[Writer, Any], Code]:
    return lambda writer, value: Group(before, tuple(map(writer.write, value)), after)


def _tuple(writer: Writer, value: Any) -> Code:
    if hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)
        return Group(
            f"{writer.named(type(value))}(",
            tuple(_keyed(f"{n}=", writer.write(x)) for n, x in parts),
            ")",
        )
    if type(value) is not tuple:
        return Group(f"{writer.named(type(value))}(", (writer.write(list(value)),), ")")
    return Group("(", tuple(map(writer.write, value)), ")")


def _dict(writer: Writer, value: Any) -> Code:
    parts = tuple((f"{_flat(writer.write(key))}: ", writer.write(x)) for key, x in value.items())
    inner = Group("{", parts, "}")
    if type(value) is dict:
        return inner
    before = f"{writer.named(type(value))}("
    factory = getattr(value, "default_factory", None)
    return Group(before, (writer.write(factory), inner) if factory else (inner,), ")")


def _torch_name(writer: Writer, value: Any) -> Code:
    writer.imports.add("import torch")
    if isinstance(value, torch.device | torch.Size):
        return f"torch.{value!r}"
    return repr(value)


# The first class that fits decides: an enum may be an int or float, and a Size is a tuple.
_WRITERS: tuple[tuple[Any, Callable[[Writer, Any], Code]], ...] = (
    (Tensor, Writer.tensor),
    (np.ndarray, _array),
    (enum.Enum, lambda writer, value: f"{writer.named(type(value))}.{value.name}"),
    ((float, complex), lambda writer, value: _number(value)),
    ((torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format), _torch_name),
    (tuple, _tuple),
    (list, _items("[", "]")),
    (frozenset, lambda writer, value: Group("frozenset(", (writer.write(list(value)),), ")")),
    (set, lambda writer, value: Group("set(", (writer.write(list(value)),), ")")),
    (dict, _dict),
    ((range, slice), lambda writer, value: repr(value)),
)
