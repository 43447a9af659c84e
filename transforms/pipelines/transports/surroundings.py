"""What a caller's thread has in force, for the threads that work for it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from weft.errors import CaptureError
from weft.torchapi import function_modes, in_dispatch_mode

_AUTOCAST = ("cpu", "cuda")
"""The devices whose autocast is carried over."""


def refuse_unseen(call: str, instead: str) -> None:
    """Raise CaptureError where something is in force in this thread that could not be in force in another one: a
    capture, a torch function mode."""
    if in_dispatch_mode():
        seen = "threads, whose work the capture of this one does not see"
        raise CaptureError(f"{call} inside a captured function", seen, instead)
    if modes := [mode for mode in function_modes() if not isinstance(mode, str)]:
        seen = f"threads, whose work the {type(modes[0]).__name__} of this one does not see"
        raise CaptureError(f"{call} under a torch function mode", seen, "transport=Local()")


def surroundings(device: torch.device | None) -> Callable[[], AbstractContextManager[None]]:
    """For another thread, what is in force in this one: grad and inference mode, autocast, the default device; and its
    stream, which the work on `device` follows.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     here = surroundings(None)
    >>> with here():
    ...     torch.is_autocast_enabled("cpu")
    True
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST if torch.is_autocast_enabled(kind)]
    cached, default = torch.is_autocast_cache_enabled(), torch.get_default_device()
    here = torch.cuda.current_stream() if device is not None and device.type == "cuda" else None

    @contextmanager
    def inside() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
            if default != torch.get_default_device():
                stack.enter_context(default)
            if here is None:
                yield
                return
            with torch.cuda.device(device):
                torch.cuda.current_stream().wait_stream(here)
                yield
                here.wait_stream(torch.cuda.current_stream())

    return inside
