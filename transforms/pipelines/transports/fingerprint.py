"""Fingerprints: what ranks compare of their stages' and `advance`'s code, before the first tensor moves."""

import dis
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import attrs
import torch

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.Size)
_KNOWN = {*sys.stdlib_module_names, "torch"}
"""Packages whose version stands for their code."""


def fingerprint(role: str, fn: Callable[..., Any]) -> str:
    """A function of a pipeline in one line: what it is there, its name, and a hash of its code: of the functions that
    it calls by their names too, and of the plain values among what it closes over, its defaults, and the constants (of
    UPPER_CASE names) of its module.

    Tensors, devices and variables of a module may differ from rank to rank, and are not in it.
    """
    found = hashlib.blake2b(digest_size=6)
    for part in _parts(fn, set()):
        found.update(f"{part};".encode())
    return f"{role}: {getattr(fn, '__name__', type(fn).__name__)} {found.hexdigest()}"


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    """What the hash is of, piece by piece; each object once, for functions may call each other."""
    if isinstance(value, _PLAIN):
        yield repr(value)
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    yield type(value).__qualname__
    if isinstance(value, frozenset | set):
        yield repr(sorted(map(repr, value)))  # their order differs from process to process
        return
    for part in _inside(value):
        yield from _parts(part, seen)


def _inside(value: Any) -> Iterator[Any]:
    """What a value is made of, as far as it is code or plain."""
    if hasattr(value, "__wrapped__"):
        yield value.__wrapped__
        if not isinstance(value, FunctionType):  # what graphify holds besides is no code
            return
    if isinstance(value, CodeType):
        yield from (value.co_code, value.co_names, *value.co_consts)
    elif isinstance(value, FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        yield from _contents(value)
        yield from _used(value.__code__, value.__globals__)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, tuple | list):
        yield from value
    elif isinstance(value, Mapping):
        yield from (part for item in value.items() for part in item)
    elif attrs.has(type(value)):
        yield from (getattr(value, field.name, None) for field in attrs.fields(type(value)))
    if isinstance(call := inspect.getattr_static(type(value), "__call__", None), FunctionType):
        yield call


def _contents(function: FunctionType) -> Iterator[Any]:
    """What a function closes over, but for what is not there yet."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def _used(code: CodeType, names: Mapping[str, Any]) -> Iterator[Any]:
    """The functions and constants of a module that code uses, in order."""
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        value = names.get(name) if instruction.opname == "LOAD_GLOBAL" else None
        own = isinstance(value, FunctionType) and str(value.__module__).partition(".")[0] not in _KNOWN
        if own or (value is not None and name.isupper()):
            yield value
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _used(inner, names)
