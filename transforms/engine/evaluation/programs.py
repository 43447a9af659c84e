"""`digest_functions`: a digest of the custom functions in a model, and of all values that they
read.

Ranks compare the source text of such functions (`weft.transforms.pipelines.transports.agreement`),
and leave out what may differ from rank to rank. A certificate has to distinguish two programs of
the same text, so its digest covers the values, and the bytecode of each function.
"""

import copyreg
import dis
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import attrs
import torch
from tokenizers import Tokenizer
from torch import Tensor

from weft.stages.model import Model
from weft.transforms.graphs.graphified import Graphified
from weft.values.trees import OF_THIS_PROCESS

_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    type(...),
    type(NotImplemented),
    torch.dtype,
    torch.Size,
)
# The packages whose versions are in every certificate; the standard library's is Python's.
_COVERED = {*sys.stdlib_module_names, "torch", "weft"}
_METHODS = (FunctionType, staticmethod, classmethod, property, functools.cached_property)
_LOADS = "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"
_SITE = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})

TensorDigest = Callable[[Tensor], str]


def digest_functions(model: Model, of_tensor: TensorDigest) -> tuple[str, list[str]]:
    """A digest of the custom functions in a model's stages. It depends neither on the process nor
    on the split.

    A function counts as its bytecode, its defaults, what it closes over, and the variables of its
    module that it reads; an object as its class and state; a tensor as `of_tensor`. A function of
    an installed package counts as its name and the package's version. Devices do not count. The
    model's parameters do not count either: they are in the digest of the weights.

    Returns:
        The digest, and the types of values that have no digest, such as a lock.
    """
    functions = model.functions
    named_params = {"the model's parameters": model.params}
    named_params |= {
        f"the parameters beside, {name}": other.params for name, other in functions.beside.items()
    }
    digests = _Digests(named_params, of_tensor)
    changed = {
        f.name: getattr(functions, f.name)
        for f in attrs.fields(type(functions))
        if f.name not in _ELSEWHERE
    }
    try:
        digest = digests.of((changed, model.transforms))
    except RecursionError:
        digest = ""
        digests.undigested = {"values nested more deeply than Python's recursion limit"}
    return digest, sorted(digests.undigested)


# Fields whose values are in the digest of the weights; and the one that is equal for every
# certified model.
_ELSEWHERE = "extras", "carries", "token_extras", "batch_invariant"


class _Digests:
    """Digests of values, memoized so that each value is read once.

    Args:
        named_params: values that count as their names.
        of_tensor: the digest of a tensor.
    """

    def __init__(self, named_params: Mapping[str, Any], of_tensor: TensorDigest) -> None:
        self.undigested = set[str]()
        self._of_tensor = of_tensor
        # The value is kept beside its digest, so that no other object gets its id.
        self._digests = {id(value): (value, name) for name, value in named_params.items()}
        self._open: dict[int, int] = {}

    def of(self, value: Any) -> str:
        """The digest of a value."""
        if type(value) in _PLAIN:
            return _hash(type(value).__name__, repr(value))
        if id(value) in self._digests:
            return self._digests[id(value)][1]
        # A cycle: count levels, since ids differ from process to process.
        if id(value) in self._open:
            return f"the value {len(self._open) - self._open[id(value)]} levels above"
        self._open[id(value)] = len(self._open)
        try:
            digest = _hash(*self._texts(value))
        # Not this value's fault: `digest_functions` reports the depth once.
        except RecursionError:
            raise
        except Exception:  # its class may raise anything when it is asked for its state
            digest = f"{type(value).__module__}.{type(value).__qualname__}"
            self.undigested.add(digest)
        del self._open[id(value)]
        self._digests[id(value)] = value, digest
        return digest

    def _texts(self, value: Any) -> Iterator[str]:
        """The kind of a value, and the digests of its parts."""
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, Tensor):
            yield self._of_tensor(value)
        elif isinstance(value, Tokenizer):
            yield value.to_str()
        elif isinstance(value, torch.device):
            return
        elif isinstance(value, ModuleType):
            yield (  # the attributes that functions read count with those functions
                f"{value.__name__} {_version(value.__name__) or ''}"
            )
        elif isinstance(value, frozenset | set) and type(value) in (frozenset, set):
            yield from sorted(map(self.of, value))  # their order differs from process to process
        else:
            yield from map(self.of, self._parts(value))

    def _parts(self, value: Any) -> Iterable[Any]:
        """The parts of a value."""
        if type(value) in (tuple, list):
            return [*value]
        if type(value) in (dict, MappingProxyType):
            return [part for item in value.items() for part in item]
        if isinstance(value, CodeType):
            return _of_code(value)
        if isinstance(value, FunctionType):
            return _of_function(value)
        if isinstance(value, type):
            return _of_class(value)
        return _of_object(value)


def _hash(*texts: str) -> str:
    hasher = hashlib.sha256()
    for text in texts:
        # With lengths, so that no two lists of texts give the same bytes; strings may hold lone
        # surrogates.
        hasher.update(f"{len(text)} {text}".encode(errors="surrogatepass"))
    return hasher.hexdigest()


@functools.cache
def _version(module: str | None) -> str | None:
    """The version of the installed package that a module belongs to; empty for packages that are in
    every certificate; None for the user's modules."""
    top = (module or "").partition(".")[0]
    if module is not None and module.startswith("weft.proofs."):
        return None
    if top in _COVERED:
        return ""
    if not (getattr(sys.modules.get(top), "__file__", None) or "").startswith(_SITE):
        return None
    try:
        return importlib.metadata.version(importlib.metadata.packages_distributions()[top][0])
    except LookupError:
        return str(getattr(sys.modules[top], "__version__", "of no version"))


def _named(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__} {_version(value.__module__) or ''}"


def _of_code(code: CodeType) -> Iterator[Any]:
    """The instructions and constants of code, without its file, line numbers and name."""
    yield from (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    yield from (
        code.co_code,
        code.co_exceptiontable,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
    )
    yield from code.co_consts


def _of_function(function: FunctionType) -> Iterator[Any]:
    if (compiled := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        yield "torch.compile", compiled
        return
    yield from (function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield "not filled yet"
    if _version(function.__module__) is not None:
        yield _named(function)
        return
    yield from (
        function.__code__,
        _sorted({k: x for k, x in vars(function).items() if k != "__wrapped__"}),
    )
    yield from _read_by(function)


def _read_by(function: FunctionType) -> Iterator[Any]:
    """The names and values of the variables that a function reads from its module, and of the
    attributes that it reads from other modules."""
    codes = [*_codes(function.__code__)]
    names = function.__globals__
    attributes = sorted({name for code in codes for name in code.co_names})
    modules = [cell.cell_contents for cell in function.__closure__ or () if _is_module(cell)]
    for code in codes:
        # IMPORT_NAME comes after the loads of its level and of its list of names.
        before: list[Any] = [None, None]
        for one in dis.get_instructions(code):
            if one.opname in _LOADS and one.argval in names:
                yield one.argval, names[one.argval]
                modules += [names[one.argval]] if isinstance(names[one.argval], ModuleType) else []
            elif one.opname == "IMPORT_NAME":
                path = "." * (before[0] or 0) + one.argval
                modules += _imported(path, str(names.get("__package__") or ""))
            before = [before[1], one.argval]
    visited = set[str]()
    while modules:
        module = modules.pop()
        if module.__name__ in visited or _version(module.__name__) is not None:
            continue
        visited.add(module.__name__)
        for name in attributes:
            if name in vars(module) and not name.startswith("__"):
                value = vars(module)[name]
                yield f"{module.__name__}.{name}", value
                modules += [value] if isinstance(value, ModuleType) else []


def _is_module(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, ModuleType)
    except ValueError:
        return False


def _imported(name: str, package: str) -> list[ModuleType]:
    """The modules that an import statement inside a function names, if they are imported
    already."""
    if name.startswith("."):
        path = importlib.util.resolve_name(name, package)
    else:
        path = name
    parts = path.split(".")
    modules = (sys.modules.get(".".join(parts[: i + 1])) for i in range(len(parts)))
    return [module for module in modules if module is not None]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Code, and the code of the functions inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _of_class(kind: type) -> Iterator[Any]:
    """The name of an installed class; or the bases, methods and values of a user's class."""
    if _version(kind.__module__) is not None:
        yield _named(kind)
        return
    yield kind.__bases__
    for name, member in sorted(vars(kind).items()):
        if isinstance(member, _METHODS) or not (name.startswith("__") or name == "_abc_impl"):
            yield name, member


def _of_object(value: Any) -> Iterator[Any]:
    """The parts of an object that would recreate it."""
    kind: Any = type(value)
    # Their caches are not part of the program.
    if isinstance(value, Graphified | functools._lru_cache_wrapper):
        yield value.__wrapped__
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, BuiltinFunctionType):
        owner = value.__self__
        yield value.__qualname__, value.__module__, _version(value.__module__)
        yield None if isinstance(owner, ModuleType) else owner
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, _sorted(value.keywords))
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset, value.fdel)
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, enum.Enum):
        yield from (kind, value.name, value.value)
    elif kind.__module__.startswith("triton.") and hasattr(value, "fn"):
        yield from (value.fn, [str(one) for one in getattr(value, "configs", ())])
    elif kind.__module__ == "torch._ops":
        yield str(value)
    elif isinstance(value, _DESCRIPTORS):
        yield value.__qualname__
    elif attrs.has(kind):
        yield kind
        fields = (
            field
            for field in attrs.fields(kind)
            if not field.metadata.keys() & OF_THIS_PROCESS.keys()
        )
        yield from ((field.name, getattr(value, field.name, None)) for field in fields)
    else:
        yield from _reduced(value)


_DESCRIPTORS = (
    MethodDescriptorType,
    WrapperDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodWrapperType,
)


def _reduced(value: Any) -> Iterator[Any]:
    """The parts of an object that pickle would save.

    Raises:
        TypeError: it cannot be pickled.
    """
    reducer = copyreg.dispatch_table.get(type(value))
    if reducer is None:
        reduced: Any = value.__reduce_ex__(4)
    else:
        reduced = reducer(value)
    yield type(value)
    if isinstance(reduced, str):
        yield reduced
        return
    state, items, pairs = [*reduced[2:5], None, None, None][:3]
    yield from reduced[:2]
    yield _sorted(state) if isinstance(state, dict) else state
    yield from ([*(items or ())], [*(pairs or ())])


def _sorted(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(state.items(), key=lambda item: str(item[0]))
