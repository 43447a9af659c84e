"""`OperatorWatch`: a context that sees each operator below autograd, without torch's own code
noticing it.

Some of torch's composite operators and derivatives compute in another way while a
`TorchDispatchMode` is active: the derivative of `max` returns nan instead of 0, `svdvals` computes
vectors too (`areAnyTensorSubclassLike` in
https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/TensorSubclassLikeUtils.h). A capture
under such a mode would record that other way. So a watch uses a separate dispatch key: `Fake`,
which torch reserves for external packages and does not use itself, directly above the key of
dispatch modes.
"""

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode

KEY = torch._C._dispatch_key_parse("Fake")
_KEYS = torch._C.DispatchKeySet(KEY)
# The key under which the active watches, innermost last, are stored in torch's thread-local
# objects. Unlike Python's, these are passed on to the threads of the autograd engine.
_NAME = "weft.watches"


class OperatorWatch:
    """A context in which each operator of this thread is passed to `operator`, which a subclass
    defines to call it and return its result. Watches nest: the outer one sees what the inner one
    passes on."""

    _outer: "OperatorWatch | None" = None
    _included: Any = None

    def __enter__(self) -> Self:
        _install()
        active = _active()
        self._outer = active[-1] if active else None
        if not _BY_MODE.get():
            if _needs_each_operator() and not active:
                _register_each()
            self._included = torch._C._IncludeDispatchKeyGuard(KEY)
            self._included.__enter__()
        _set_active((*active, self))
        return self

    def __exit__(self, *error: Any) -> None:
        _set_active(_active()[:-1])
        if self._included is not None:
            self._included.__exit__(None, None, None)
            self._included = None
        self._outer = None  # the outer watch may hold this one: leave no reference cycle

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass an operator's overload on (`pass_on`), or do something else, and return the result.
        No watch sees the operators that this method calls directly."""
        raise NotImplementedError

    def pass_on(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func(*args, **kwargs)` through the next outer watch, if there is one."""
        outer = self._outer
        if outer is None:
            return func(*args, **kwargs)
        return outer.operator(func, args, kwargs)


# Whether the watches of this thread see operators through a dispatch mode.
_BY_MODE: ContextVar[bool] = ContextVar("weft.watches_by_mode", default=False)


class _ToWatches(TorchDispatchMode):
    """The dispatch mode that passes operators to the watches in `watching_by_mode`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "prim":  # a property of a fake tensor, such as its device
            return func(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled() and func._can_decompose():
            # Elsewhere autograd's kernels call the parts of an operator that is made of others.
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if _is_on_lists(func):
            with self:
                return func._op_dk(_COMPOSITE, *args, **(kwargs or {}))
        watch = _active()[-1]
        positions = _tensors_only(func)
        if any(_is_number(args[i]) for i in positions if i < len(args)):
            args = tuple(
                self._lifted(watch, x) if i in positions and _is_number(x) else x
                for i, x in enumerate(args)
            )
        return watch.operator(func, args, kwargs or {})

    def _lifted(self, watch: OperatorWatch, number: Any) -> Any:
        """A tensor in place of a number, as the watches see any new tensor."""
        with temporarily_clear_interpreter_stack():
            tensor = _tensor(number)
        return watch.operator(torch.ops.aten.lift_fresh.default, (tensor,), {})


_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd


@functools.cache
def _is_on_lists(func: Any) -> bool:
    """Whether an operator has a kernel that calls another operator on each tensor of its lists."""
    is_foreach = func._schema.name.startswith("aten::_foreach_")
    return is_foreach and bool(func.has_kernel_for_dispatch_key(_COMPOSITE))


@contextlib.contextmanager
def watching_by_mode() -> Iterator[None]:
    """A context in which watches see operators through a dispatch mode and not through their own
    key, so that they see operators on fake tensors too, in torch's threads for backward passes as
    well. Some operators then compute in another way, as in every trace of torch. Watches that are
    active already see nothing; enter those that are to see the operators before the mode.
    An operator on lists of tensors (`torch._foreach_*`) is seen as one on each of them."""
    token = _BY_MODE.set(True)
    try:
        yield
    finally:
        _BY_MODE.reset(token)


def mode_of_watches() -> Any:
    """The dispatch mode to enter inside `watching_by_mode`, after the watches."""
    return _ToWatches()


def _active() -> tuple[OperatorWatch, ...]:
    if torch._C._is_key_in_tls(_NAME):
        watches: tuple[OperatorWatch, ...] = torch._C._get_obj_in_tls(_NAME)
    else:
        watches = ()
    return watches


def _set_active(watches: tuple[OperatorWatch, ...]) -> None:
    if _takes_the_reference():
        _add_reference(watches)
    torch._C._stash_obj_in_tls(_NAME, watches)


def _add_reference(value: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@functools.cache
def _takes_the_reference() -> bool:
    """Whether `_stash_obj_in_tls` takes over the caller's reference, as in torch 2.11. Then the
    object would be freed once too often."""
    value = (object(),)
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls("weft.reference_count", value)
    if takes := sys.getrefcount(value) == before:
        _add_reference(value)
    return takes


def watched() -> bool:
    """Whether a watch is active in this thread. None is while torch.compile traces: a capture
    compiles outside of its watches."""
    if torch.compiler.is_dynamo_compiling():  # it cannot trace the call below in torch 2.11
        return False
    included: bool = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    return included or _BY_MODE.get()


def unwatched() -> Any:
    """A context in which no watch sees the operators."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def set_in_sight(visible: bool) -> bool:
    """Set whether the watches of this thread see operators, and return whether they did."""
    before = not torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not visible)
    return before


def watches_see() -> OperatorWatch | None:
    """The innermost watch of this thread, if it sees operators now; else None."""
    included = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    if not included or torch._C._dispatch_tls_is_dispatch_key_excluded(KEY):
        return None
    return next(reversed(_active()), None)


@contextlib.contextmanager
def watching_alone(watch: OperatorWatch) -> Iterator[None]:
    """A context, inside `OperatorWatch.operator`, in which only this watch sees the operators."""
    outer = _active()
    _set_active((watch,))
    before = set_in_sight(True)
    try:
        yield
    finally:
        set_in_sight(before)
        _set_active(outer)


def watches_by_mode() -> bool:
    """Whether this thread is in `watching_by_mode`."""
    return _BY_MODE.get()


def _to_innermost(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass an operator to the innermost watch."""
    args = _with_tensors(func, args)
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return _active()[-1].operator(func, args, kwargs)


def _with_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with tensors again where torch has turned a zero-dimensional tensor into a
    number, which the operator does not take."""
    positions = _tensors_only(func)
    if not any(_is_number(args[i]) for i in positions if i < len(args)):
        return args
    # Watches see each new tensor as a constant, through the operator that lifts it.
    return tuple(_tensor(x) if i in positions else x for i, x in enumerate(args))


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


def _tensor(value: Any) -> Any:
    if isinstance(value, float | complex):
        return torch.tensor(
            value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64
        )
    if isinstance(value, bool | int):
        return torch.tensor(value)
    return value


@functools.cache
def _tensors_only(func: Any) -> tuple[int, ...]:
    """The indices of an operator's arguments that must be tensors, not numbers."""
    if torch._C._should_allow_numbers_as_tensors(func._schema.name.rpartition("::")[2]):
        return ()
    return tuple(
        i for i, a in enumerate(func._schema.arguments) if isinstance(a.type, torch.TensorType)
    )


@functools.cache
def _install() -> Any:
    """Register the fallback of the key, once; it is called only inside a watch. The registration
    lives as long as the returned object, which the cache keeps."""
    registration: Any = torch._C._dispatch_library("IMPL", "_", "Fake")
    registration.fallback("Fake", _to_innermost, False)
    _hide_from_watches("_make_subclass")
    _hide_from_watches("as_subclass")
    return registration


class _Passing(OperatorWatch):
    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.pass_on(func, args, kwargs)


class _Wrapper(torch.Tensor):
    """A tensor subclass with `__torch_dispatch__`, like the results of functional collectives."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return torch.empty(1)


@functools.cache
def _needs_each_operator() -> bool:
    """Whether torch finds a fallback in Python only for plain tensors, as torch 2.11 does."""
    wrapper = torch.Tensor._make_wrapper_subclass(_Wrapper, (1,))
    with torch._C._IncludeDispatchKeyGuard(KEY):
        _set_active((_Passing(),))
        try:
            torch.ops.aten.sin.default(wrapper)
        except RuntimeError:
            return True
        finally:
            _set_active(())
    return False


# The operators for which the fallback is registered as a kernel, with their registrations.
_registered: dict[str, Any] = {}


def _register_each() -> None:
    """Register the fallback for each operator that exists by now."""
    # Operators may be defined at any time, so each outermost watch looks for new ones.
    names = torch._C._dispatch_get_all_op_names()
    if len(names) == len(_registered):
        return
    for name in names:
        if name not in _registered:
            namespace, _, operator = name.partition("::")
            registration: Any = torch._C._dispatch_library("IMPL", namespace, "Fake")
            _registered[name] = registration
            registration.impl(operator, "Fake", functools.partial(_by_name, name), False)


def _by_name(name: str, *args: Any, **kwargs: Any) -> Any:
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator)
    return _to_innermost(getattr(packet, overload or "default"), *args, **kwargs)


def _hide_from_watches(name: str) -> None:
    """Hide from watches the view to which a method of Tensor gives another class, as in
    `nn.Parameter(x)`: a view that has passed through Python has a class already, so torch raises.
    """
    method = getattr(torch.Tensor, name)
    static = isinstance(torch._C.TensorBase.__dict__.get(name), staticmethod)

    @functools.wraps(method)
    def hidden(*args: Any, **kwargs: Any) -> Any:
        if not watched():
            return method(*args, **kwargs)
        with unwatched():
            return method(*args, **kwargs)

    setattr(torch.Tensor, name, staticmethod(hidden) if static else hidden)
