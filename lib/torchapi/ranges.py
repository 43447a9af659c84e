"""Ranges of weft in torch's profiles."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

from weft.torchapi.private import in_dispatch_mode, in_functorch_transform

_NO_RANGE: AbstractContextManager[object] = nullcontext()


def is_profiled() -> bool:
    """Whether a range would show: a profiler of torch is on, in any thread. False in a capture, a
    trace or a transform, where the operators that begin and end a range would be recorded too."""
    return profiler._is_profiler_enabled and not in_dispatch_mode() and not in_functorch_transform()


def profile_range(name: str, *values: object) -> AbstractContextManager[object]:
    """A context that shows as a range in torch's profiles; nothing if `is_profiled` is False.

    Args:
        name: the name of the range, with a {} for each of the values. They are not printed unless
            the range shows.
    """
    if is_profiled():
        return torch.profiler.record_function(name.format(*values))
    return _NO_RANGE
