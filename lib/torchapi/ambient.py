"""The per-thread settings of torch that a result depends on, for use in another thread.

Torch's global switches need no care, since all threads share them: deterministic algorithms, the
default dtype, `torch.backends`.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from weft.torchapi.private import saved_tensors_hooks

# Makes a context that puts something in force in the thread that enters it.
Surroundings = Callable[[], AbstractContextManager[Any]]

# torch's device types that may have an autocast mode.
_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu")

_c: Any = torch._C


def _grad_mode() -> Surroundings:
    return functools.partial(torch.set_grad_enabled, torch.is_grad_enabled())


def _inference_mode() -> Surroundings:
    return functools.partial(torch.inference_mode, torch.is_inference_mode_enabled())


def _forward_mode() -> Surroundings:
    set_enabled: Any = forward_ad._set_fwd_grad_enabled
    return functools.partial(set_enabled, _c._is_fwd_grad_enabled())


def _multithreading() -> Surroundings:
    return functools.partial(
        torch.autograd.set_multithreading_enabled, _c._is_multithreading_enabled()
    )


def _autocast() -> Surroundings:
    kinds = [
        kind
        for kind in _AUTOCAST
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    ]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def inside() -> Iterator[None]:
        with ExitStack() as stack:
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            yield

    return inside


def _default_device() -> Surroundings:
    device = torch.get_default_device()

    @contextmanager
    def inside() -> Iterator[None]:
        if device == torch.get_default_device():
            yield
            return
        with device:
            yield

    return inside


def _hooks_on_saved_tensors() -> Surroundings:
    hooks = saved_tensors_hooks()
    refusal = _c._autograd._saved_tensors_hooks_get_disabled_error_message()

    @contextmanager
    def inside() -> Iterator[None]:
        with ExitStack() as stack:
            if hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            if refusal is not None:
                stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(refusal))
            yield

    return inside


def _torch_function() -> Surroundings:
    is_enabled = _c._is_torch_function_enabled()
    is_all_disabled = _c._is_torch_function_all_disabled()

    @contextmanager
    def inside() -> Iterator[None]:
        with ExitStack() as stack:
            if is_all_disabled:
                stack.enter_context(_c.DisableTorchFunction())
            elif not is_enabled:
                stack.enter_context(_c.DisableTorchFunctionSubclass())
            yield

    return inside


def _cuda_stream() -> Surroundings:
    """The current CUDA device and its current stream."""
    if not torch.cuda.is_initialized():
        return nullcontext
    return functools.partial(torch.cuda.stream, torch.cuda.current_stream())


# The settings that torch keeps for each thread, in the order in which they are put in force.
# Function modes and dispatch modes are left out, because two threads cannot share one.
PER_THREAD: dict[str, Callable[[], Surroundings]] = {
    "inference mode": _inference_mode,
    "grad mode": _grad_mode,
    "forward mode": _forward_mode,
    "threads of autograd": _multithreading,
    "autocast": _autocast,
    "default device": _default_device,
    "hooks on saved tensors": _hooks_on_saved_tensors,
    "__torch_function__": _torch_function,
    "CUDA stream": _cuda_stream,
}


def surroundings() -> Surroundings:
    """A function that makes a context; in another thread, the context puts in force the settings
    that this thread has now.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     here = surroundings()
    >>> with here():
    ...     torch.is_autocast_enabled("cpu")
    True
    """
    present = [read() for read in PER_THREAD.values()]

    @contextmanager
    def inside() -> Iterator[None]:
        with ExitStack() as stack:
            for make in present:
                stack.enter_context(make())
            yield

    return inside
