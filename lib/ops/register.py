"""The registration of operators with torch: a decorator that makes an operator of its reference function."""

import functools
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, library

from weft.errors import DerivativeError, DeviceError
from weft.torchapi.private import FUNCTORCH_KEY, in_functorch_transform, is_differentiated, overload_of, unwrapped_call

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of a model's weights, hidden states and KV cache that the operators compute with."""


class Operator(Protocol[P, R]):
    """An operator, called as the function that was decorated.

    Attributes:
        reference: that function, in plain torch, on any device.
        unchecked: the call without the check of its arguments.
    """

    reference: Callable[P, R]
    unchecked: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the operator."""


def operator(
    *,
    kernel: str,
    fake: Function,
    name: str | None = None,
    parameters: Function | None = None,
    writes: Sequence[str] = (),
    functional: Function | None = None,
    no_derivative: str | None = None,
    check: Function | None = None,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Register the decorated function as the operator `weft::name`.

    The function is the reference: it defines the result, and it is the CPU implementation. Its annotations are the
    operator's signature. A call goes to the operator, or to `functional` where an argument requires grad or a transform
    of torch.func is active. (An Autograd kernel in Python could decide that too, but takes as long as the whole call.)

    Args:
        kernel: `module:function` of the CUDA implementation, with the same parameters. It is imported at the first call
            on CUDA, so that weft works on a CPU without triton.
        fake: makes empty results of the right shapes, dtypes and devices. It takes the parameters that it needs, by
            their names.
        name: None: the function's name without leading underscores.
        parameters: a function whose parameters are the operator's; None: the decorated function.
        writes: the parameters whose tensors are written in place.
        functional: the same in torch's own operations, on any device, for autograd and torch.func; None: the reference.
            It writes to no argument: where the operator does, `functional` returns the new values after the result.
        no_derivative: why the operator has no derivative. Asking for one is an error that says so.
        check: called with all arguments before the operator; raises if they contradict each other.
    """

    def register(reference: Callable[P, R]) -> Operator[P, R]:
        own = name or reference.__name__.lstrip("_")
        derived = functional or reference
        if no_derivative is not None:
            derived = without_derivative(own.replace(".", "_"), no_derivative, derived)
        op = define(own, reference, fake=fake, kernel=kernel, parameters=parameters, writes=writes)
        if not op._schema.is_mutable:
            library.impl(f"weft::{own}", FUNCTORCH_KEY, derived)  # for callers of torch.ops.weft
        unchecked = _write_call(op, derived)
        call: Operator[P, R] = unchecked if check is None else _write_checked(op, check, unchecked)
        for made in {unchecked, call}:
            functools.update_wrapper(made, reference)
            made.__defaults__ = (parameters or reference).__defaults__
        call.reference, call.unchecked = reference, unchecked
        return call

    return register


def define(
    name: str,
    reference: Function,
    *,
    fake: Function,
    kernel: str | None = None,
    parameters: Function | None = None,
    writes: Sequence[str] = (),
) -> Any:
    """Define `weft::name` with its CPU, CUDA and fake implementations, and return the operator.

    The arguments are those of `operator`; without a kernel, the reference runs on CUDA too.
    """
    full = f"weft::{name}"
    library.define(full, _infer_schema(reference, parameters or reference, writes))
    library.impl(full, "CPU", reference)
    if kernel is None:
        library.impl(full, "CUDA", reference)
    else:
        implementation = cuda_implementation(name, kernel)
        library.impl(full, "CUDA", lambda *args: implementation()(*args))
    names = list(inspect.signature(parameters or reference).parameters)
    places = [names.index(parameter) for parameter in inspect.signature(fake).parameters]
    library.register_fake(full, lambda *args: fake(*(args[place] for place in places)))
    return overload_of(full)


def _infer_schema(reference: Function, parameters: Function, writes: Sequence[str]) -> str:
    """The operator's schema. It has no defaults: torch would leave such arguments out when it calls a kernel."""
    signature = inspect.signature(parameters)
    required = [one.replace(default=inspect.Parameter.empty) for one in signature.parameters.values()]
    returned = inspect.signature(reference).return_annotation

    def prototype() -> None: ...

    vars(prototype)["__signature__"] = signature.replace(parameters=required, return_annotation=returned)
    return library.infer_schema(prototype, mutates_args=writes)


_CALL = """
def bind(op, launch, derived, is_grad_enabled, in_functorch_transform, is_dynamo_compiling):
    def call({given}):
        if (is_grad_enabled() and ({requires_grad})) or in_functorch_transform():
            return derived({given})
        return op({given}) if is_dynamo_compiling() else launch({given})
    return call
"""
_CHECKED = """
def bind(check, unchecked):
    def call({given}):
        check({given})
        return unchecked({given})
    return call
"""


def _write_call(op: Any, derived: Function) -> Any:
    """Write the call as source, with named parameters: a call of `*args` that looks at each of them takes longer."""
    conditions = []
    for argument in op._schema.arguments:
        if str(argument.type) == "Tensor":
            conditions.append(f"{argument.name}.requires_grad")
        elif str(argument.type) == "Optional[Tensor]":
            conditions.append(f"({argument.name} is not None and {argument.name}.requires_grad)")
    bind = _bind(op, _CALL, requires_grad=" or ".join(conditions))
    switches = torch.is_grad_enabled, in_functorch_transform, torch.compiler.is_dynamo_compiling
    return bind(op, unwrapped_call(op), derived, *switches)


def _write_checked(op: Any, check: Function, unchecked: Function) -> Any:
    return _bind(op, _CHECKED)(check, unchecked)


def _bind(op: Any, source: str, **more: str) -> Function:
    """The function `bind` of a source, in which `given` stands for the operator's parameters."""
    given = ", ".join(argument.name for argument in op._schema.arguments)
    found: dict[str, Any] = {}
    exec(compile(source.format(given=given, **more), f"<the call of {op}>", "exec"), found)
    bind: Function = found["bind"]
    return bind


def without_derivative(name: str, why: str, reference: Function) -> Function:
    """The functional form of an operator that has no derivative: its reference, which refuses to be differentiated.

    Raises:
        DerivativeError: (when called) autograd, or a transform of torch.func, follows an argument.
    """

    def functional(*args: Any) -> Any:
        if any(isinstance(x, Tensor) and is_differentiated(x) for x in args):
            *some, last = (f"{dtype}".removeprefix("torch.") for dtype in FLOATS)
            instead = f"a model in {', '.join(some)} or {last}; or torch.no_grad(), and detach(), where none is needed"
            raise DerivativeError(f"the derivative of {name}(…)", why, instead)
        return reference(*args)

    return functional


def cuda_implementation(name: str, kernel: str) -> Callable[[], Function]:
    """A function that imports the implementation at its first call, and returns it.

    Raises:
        DeviceError: (when called) triton is not installed.
    """

    @functools.cache
    def implementation() -> Function:
        if triton_version() is None:
            raise no_triton(f"{name}(…) on CUDA")
        module, _, function = kernel.partition(":")
        found: Function = getattr(import_module(module), function)
        return found

    return implementation


def triton_version() -> str | None:
    """The version of triton, or None if it cannot be imported."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def no_triton(call: str) -> DeviceError:
    """The error of `call` on a CUDA device without triton."""
    return DeviceError(call, "triton cannot be imported, and CUDA has no other kernel", "pip install 'weft[cuda]'")
