"""How an op of weft is made known to torch: a CPU reference, a CUDA implementation in Triton, and a fake."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import library

from weft.ops.presence import no_triton, triton_version


def register(name: str, signature: str, *, cpu: Callable[..., Any], fake: Callable[..., Any], kernel: str) -> None:
    """Define `weft::name`.

    Args:
        signature: as torch's `define` takes it, without the name.
        cpu: the reference; also what the op means.
        fake: results of the right shapes, dtypes and devices.
        kernel: `module:function` of the CUDA implementation, imported at its first call: a machine without triton can
            still import weft and run on its CPU.
    """

    implementation = cuda_implementation(name, kernel)
    library.define(f"weft::{name}", signature)
    library.impl(f"weft::{name}", "CPU", cpu)
    library.impl(f"weft::{name}", "CUDA", lambda *args: implementation()(*args))
    library.register_fake(f"weft::{name}", fake)


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
