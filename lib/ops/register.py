"""How an op of weft is made known to torch: a CPU reference, a CUDA implementation in Triton, a fake, and what stands
for it where its derivative is asked for."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, library

from weft.errors import DerivativeError
from weft.ops.presence import no_triton, triton_version
from weft.torchapi import FUNCTORCH_KEY, in_functorch_transform, is_differentiated, overload_of, unwrapped_call

Function = Callable[..., Any]


def register(
    name: str, signature: str, *, cpu: Function, fake: Function, kernel: str, functional: Function | None = None
) -> Function:
    """Define `weft::name`.

    Args:
        signature: as torch's `define` takes it, without the name.
        cpu: the reference; also what the op means.
        fake: results of the right shapes, dtypes and devices.
        kernel: `module:function` of the CUDA implementation, imported at its first call: a machine without triton can
            still import weft and run on its CPU.
        functional: the same in torch's own operations, on any device, for autograd and torch.func to go through; None:
            the reference. It writes to no argument: where the op does, it returns the new values behind the result.

    Returns:
        What calls the op, with positional arguments; or calls `functional`, where an argument requires grad or inside a
        transform of torch.func. (An Autograd kernel in Python would decide the same, and take as long as the call.)
    """

    implementation = cuda_implementation(name, kernel)
    library.define(f"weft::{name}", signature)
    library.impl(f"weft::{name}", "CPU", cpu)
    library.impl(f"weft::{name}", "CUDA", lambda *args: implementation()(*args))
    library.register_fake(f"weft::{name}", fake)
    op, derived = overload_of(f"weft::{name}"), functional or cpu
    if not op._schema.is_mutable:
        library.impl(f"weft::{name}", FUNCTORCH_KEY, derived)  # for who calls torch.ops.weft itself
    launch, requires_grad = unwrapped_call(op), _write_check(op)

    def call(*args: Any) -> Any:
        if (torch.is_grad_enabled() and requires_grad(args)) or in_functorch_transform():
            return derived(*args)
        return op(*args) if torch.compiler.is_dynamo_compiling() else launch(*args)

    return call


def _write_check(op: Any) -> Callable[[tuple[Any, ...]], bool]:
    """What says whether one of an op's arguments requires grad: written out, since it is asked at every call."""
    checks = []
    for place, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if kind == "Tensor":
            checks.append(f"args[{place}].requires_grad")
        elif kind == "Optional[Tensor]":
            checks.append(f"(args[{place}] is not None and args[{place}].requires_grad)")
    check: Callable[[tuple[Any, ...]], bool] = eval(f"lambda args: {' or '.join(checks)}")
    return check


def without_derivative(name: str, why: str, reference: Function) -> Function:
    """The functional form of an op that has no derivative: its reference, as long as none is asked for.

    Raises:
        DerivativeError: (when called) autograd, or a transform of torch.func, follows an argument.
    """

    def functional(*args: Any) -> Any:
        if any(isinstance(x, Tensor) and is_differentiated(x) for x in args):
            instead = "a model in float32, bfloat16 or float16; or torch.no_grad(), and detach(), where none is needed"
            raise DerivativeError(f"the derivative of {name}(…)", why, instead)
        return reference(*args)

    return functional


def cuda_implementation(name: str, kernel: str) -> Callable[[], Callable[..., Any]]:
    """What finds the implementation when it is first called for.

    Raises:
        DeviceError: (when called) there is no triton.
    """

    @functools.cache
    def implementation() -> Callable[..., Any]:
        if triton_version() is None:
            raise no_triton(f"{name}(…) on CUDA")
        module, _, function = kernel.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), function)
        return found

    return implementation
