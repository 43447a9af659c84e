"""The registration of operators with torch: a decorator that turns a reference function into an
operator."""

import functools
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, library

from weft.errors import DerivativeError, DeviceError
from weft.extras import install_command
from weft.settings import ANYWHERE, is_batch_invariant
from weft.torchapi.cpu_sums import in_fixed_order
from weft.torchapi.private import (
    FUNCTORCH_KEY,
    in_functorch_transform,
    in_other_transform_than_grad,
    is_differentiated,
    overload_of,
    unwrapped_call,
)

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]

# A function with this parameter becomes two operators: one for each value of the flag.
FLAG = "batch_invariant"
# The dtypes of weights, hidden states and KV cache in which the operators compute.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Operator(Protocol[P, R]):
    """An operator, called with the arguments of the decorated function.

    Attributes:
        reference: the decorated function, in plain torch, on any device.
        unchecked: the same call, without the check of its arguments.
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
    returns_written: bool = True,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Register the decorated function as the operator `weft::name`.

    The function is the reference: it defines the result, and it is the CPU implementation. Its
    annotations are the operator's signature. A call goes to the operator, or to `functional` if an
    argument requires grad or a transform of torch.func is active. (An Autograd kernel in Python
    could make that choice too, but it takes as long as the whole call.)

    Args:
        kernel: `module:function` of the CUDA implementation, with the same parameters. It is
            imported at the first call on CUDA, so that weft works on a CPU without triton.
        fake: makes empty results of the right shapes, dtypes and devices. Its parameters are those
            of the operator that it needs, matched by name.
        name: the operator's name; None: the function's name without leading underscores.
        parameters: a function whose parameters are the operator's; None: the decorated function.
        writes: the parameters whose tensors are written in place.
        functional: the same computation in torch's own operations, on any device, for autograd and
            torch.func; None: the reference. It writes to no argument: instead of writing in place,
            it returns the new values after the result.
        returns_written: False: `functional` writes in place too, but only if its second or third
            argument is given (the keys and values of attention).
        no_derivative: why the operator has no derivative; a request for one raises an error that
            gives this reason.
        check: called with all arguments before the operator; raises if they contradict each other.

    `torch.compile` always traces the operator, since it treats every call as one inside a transform
    of torch.func.

    If the function and its kernel have a last parameter `batch_invariant: bool = False`, it is not
    a parameter of the call. It defines a second operator, `weft::name.batch_invariant`, which is
    called in `weft.batch_invariant()`, so a traced program shows which of the two it runs. In that
    context the values are the operator's, bit for bit, and the derivative is that of `functional`.
    On the CPU the second operator runs in one thread (`weft.torchapi.cpu_sums`).
    """

    def register(reference: Callable[P, R]) -> Operator[P, R]:
        op_name = name or reference.__name__.lstrip("_")
        derived = functional or reference
        if no_derivative is not None:
            derived = without_derivative(op_name.replace(".", "_"), no_derivative, derived)
        ops = [
            define(
                op_name, reference, fake=fake, kernel=kernel, parameters=parameters, writes=writes
            )
        ]
        if FLAG in inspect.signature(reference).parameters:
            ops.append(_define_invariant(op_name, reference, fake, kernel, parameters, writes))
        for op in ops:
            if not op._schema.is_mutable:
                library.impl(op.name(), FUNCTORCH_KEY, derived)  # for callers of torch.ops.weft
        if no_derivative is not None:
            exact = derived
        else:
            exact = _exact(ops[-1], derived, writes, returns_written)
        unchecked = _write_call(ops, derived, exact)
        if check is None:
            call: Operator[P, R] = unchecked
        else:
            call = _write_checked(ops[0], check, unchecked)
        for wrapper in {unchecked, call}:
            functools.update_wrapper(wrapper, reference)
            wrapper.__defaults__ = _without_flag(parameters or reference)
            if len(ops) > 1 and parameters is None:
                vars(wrapper)["__signature__"] = _signature_without_flag(reference)
        call.reference = reference
        call.unchecked = unchecked
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
        implementation, flag = (
            cuda_implementation(name, kernel),
            {FLAG: True} if name.endswith(FLAG) else {},
        )
        # A lambda, so that the module with the kernel is imported at the first call.
        library.impl(full, "CUDA", lambda *args: implementation()(*args, **flag))
    # torch passes all arguments by position; the fake takes some of them, by name.
    names = list(inspect.signature(parameters or reference).parameters)
    places = [
        names.index(parameter)
        for parameter in inspect.signature(fake).parameters
        if parameter != FLAG
    ]
    library.register_fake(full, lambda *args: fake(*(args[place] for place in places)))
    return overload_of(full)


def _define_invariant(
    name: str,
    reference: Function,
    fake: Function,
    kernel: str,
    parameters: Function | None,
    writes: Sequence[str],
) -> Any:
    """Define `weft::name.batch_invariant`."""

    invariant = functools.wraps(reference)(in_fixed_order(name, reference))
    invariant_fake = (
        functools.partial(fake, **{FLAG: True})
        if FLAG in inspect.signature(fake).parameters
        else fake
    )
    overload_name = f"{name}_{FLAG}" if "." in name else f"{name}.{FLAG}"
    return define(
        overload_name,
        invariant,
        fake=invariant_fake,
        kernel=kernel,
        parameters=parameters or reference,
        writes=writes,
    )


def _without_flag(function: Function) -> tuple[Any, ...] | None:
    """The defaults of a function's parameters, without that of the flag, which is the last one."""
    defaults: tuple[Any, ...] | None = function.__defaults__
    if defaults and FLAG in inspect.signature(function).parameters:
        return defaults[:-1]
    return defaults


def _signature_without_flag(function: Function) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(
        parameters=[one for name, one in signature.parameters.items() if name != FLAG]
    )


def _infer_schema(reference: Function, parameters: Function, writes: Sequence[str]) -> str:
    """The operator's schema, without defaults: when torch calls a kernel, it omits arguments that
    equal their defaults."""
    signature = _signature_without_flag(parameters)
    required = [
        one.replace(default=inspect.Parameter.empty) for one in signature.parameters.values()
    ]
    returned = inspect.signature(reference).return_annotation

    def prototype() -> None: ...

    vars(prototype)["__signature__"] = signature.replace(
        parameters=required, return_annotation=returned
    )
    return library.infer_schema(prototype, mutates_args=writes)


# torch.compile treats every call as one inside a transform of torch.func, and cannot read a context
# variable: while it compiles (`compiling()`), `anywhere` is asked instead (`weft.settings`).
_CALL = """
def bind(op, launch, derived, exact, is_grad_enabled, in_functorch_transform, is_batch_invariant, compiling, anywhere):
    def call({names}):
        if (is_grad_enabled() and ({requires_grad})) or (in_functorch_transform() and not compiling()):
            return exact({names}) if (anywhere[0] if compiling() else is_batch_invariant()) else derived({names})
        return op({names}) if compiling() else launch({names})
    return call
"""
_CALL_OF_TWO = """
def bind(
    op, launch, op_invariant, launch_invariant, derived, exact,
    is_grad_enabled, in_functorch_transform, is_batch_invariant, compiling, anywhere
):
    def call({names}):
        if (is_grad_enabled() and ({requires_grad})) or (in_functorch_transform() and not compiling()):
            return exact({names}) if (anywhere[0] if compiling() else is_batch_invariant()) else derived({names})
        if compiling():
            return op_invariant({names}) if anywhere[0] else op({names})
        return launch_invariant({names}) if is_batch_invariant() else launch({names})
    return call
"""
_CHECKED = """
def bind(check, unchecked):
    def call({names}):
        check({names})
        return unchecked({names})
    return call
"""


def _write_call(ops: Sequence[Any], derived: Function, exact: Function) -> Any:
    """Generate the call as source with named parameters: a loop over `*args` takes longer."""
    conditions = []
    for argument in ops[0]._schema.arguments:
        if str(argument.type) == "Tensor":
            conditions.append(f"{argument.name}.requires_grad")
        elif str(argument.type) == "Optional[Tensor]":
            conditions.append(f"({argument.name} is not None and {argument.name}.requires_grad)")
    if len(ops) == 1:
        source = _CALL
    else:
        source = _CALL_OF_TWO
    bind = _bind(ops[0], source, requires_grad=" or ".join(conditions) or "False")
    switches = (
        torch.is_grad_enabled,
        in_functorch_transform,
        is_batch_invariant,
        torch.compiler.is_dynamo_compiling,
    )
    # `torch.compile` traces `op`; an eager call skips its Python wrapper, which takes time.
    return bind(
        *(call for op in ops for call in (op, unwrapped_call(op))),
        derived,
        exact,
        *switches,
        ANYWHERE,
    )


def _write_checked(op: Any, check: Function, unchecked: Function) -> Any:
    return _bind(op, _CHECKED)(check, unchecked)


def _bind(op: Any, source: str, **more: str) -> Function:
    """The function `bind` that a source defines, with the operator's parameters for `{names}`."""
    parameters = ", ".join(argument.name for argument in op._schema.arguments)
    namespace: dict[str, Any] = {}
    exec(
        compile(source.format(names=parameters, **more), f"<the call of {op}>", "exec"),
        namespace,
    )
    bind: Function = namespace["bind"]
    return bind


def _exact(op: Any, derived: Function, writes: Sequence[str], returns_written: bool) -> Function:
    """The call in `weft.batch_invariant()` if a derivative is requested: the operator's values,
    with the derivative of `derived`.

    Inside a transform of torch.func other than `grad` or `vjp`, the call is `derived` itself.
    """
    names = [argument.name for argument in op._schema.arguments]
    written = [names.index(name) for name in writes]

    def run(*args: Any) -> Any:
        if not written or not returns_written:
            return op(*args)
        # `derived` writes to no argument and returns the new values, so write to clones instead.
        cloned_args = list(args)
        for place in written:
            cloned_args[place] = cloned_args[place].clone()
        out = op(*cloned_args)
        return *(out if isinstance(out, tuple) else (out,)), *(
            cloned_args[place] for place in written
        )

    class Exact(torch.autograd.Function):
        """The operator, with the derivative of its functional form."""

        @staticmethod
        def forward(*args: Any) -> Any:
            return run(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, tuple):
                outs = output
            else:
                outs = (output,)
            ctx.floating = [index for index, x in enumerate(outs) if x.is_floating_point()]
            ctx.non_tensors = [None if isinstance(x, Tensor) else x for x in inputs]
            ctx.places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]
            # Unlike an attribute of ctx, this detects a later write in place.
            ctx.save_for_backward(*(inputs[place] for place in ctx.places))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            args = list(ctx.non_tensors)
            for place, saved in zip(ctx.places, ctx.saved_tensors, strict=True):
                args[place] = saved
            grad_places = [place for place in ctx.places if ctx.needs_input_grad[place]]
            followed = [index for index in ctx.floating if grads[index] is not None]

            def differentiated(*values: Tensor) -> tuple[Tensor, ...]:
                full_args = list(args)
                for place, value in zip(grad_places, values, strict=True):
                    full_args[place] = value
                out = derived(*full_args)
                if isinstance(out, tuple):
                    outs = out
                else:
                    outs = (out,)
                return tuple(outs[index] for index in followed)

            pullback = torch.func.vjp(differentiated, *(args[place] for place in grad_places))[1]
            input_grads = dict(
                zip(grad_places, pullback(tuple(grads[index] for index in followed)), strict=True)
            )
            return tuple(input_grads.get(place) for place in range(len(args)))

    def call(*args: Any) -> Any:
        in_place = not returns_written and any(x is not None for x in args[1:3])
        apply: Function = Exact.apply
        elsewhere = torch.compiler.is_dynamo_compiling() or (
            in_functorch_transform() and in_other_transform_than_grad()
        )
        if in_place or elsewhere:
            return derived(*args)
        return apply(*args)

    return call


def without_derivative(name: str, why: str, reference: Function) -> Function:
    """The functional form of an operator without a derivative: its reference, which raises if it is
    differentiated.

    Raises:
        DerivativeError: (when called) autograd or a transform of torch.func tracks an argument.
    """

    def functional(*args: Any) -> Any:
        if any(isinstance(x, Tensor) and is_differentiated(x) for x in args):
            *some, last = (f"{dtype}".removeprefix("torch.") for dtype in FLOATS)
            instead = (
                f"a model in {', '.join(some)} or {last}; or torch.no_grad(), and detach(), where"
                " none is needed"
            )
            raise DerivativeError(f"the derivative of {name}(…)", why, instead)
        return reference(*args)

    return functional


def cuda_implementation(name: str, kernel: str) -> Callable[[], Function]:
    """A function that returns the implementation, which it imports at its first call.

    Raises:
        DeviceError: (when called) triton is not installed.
    """

    @functools.cache
    def implementation() -> Function:
        if triton_version() is None:
            raise no_triton(f"{name}(…) on CUDA")
        module, _, function = kernel.partition(":")
        fn: Function = getattr(import_module(module), function)
        return fn

    return implementation


def triton_version() -> str | None:
    """The version of triton, or None if it cannot be imported."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def no_triton(call: str) -> DeviceError:
    """The error that `call` raises on a CUDA device without triton."""
    return DeviceError(
        call, "triton cannot be imported, and CUDA has no other kernel", install_command("cuda")
    )
