"""Matrix products on the CPU whose sums have an order that no setting of torch changes."""

from collections.abc import Callable
from typing import Any

import torch

from weft.errors import DeviceError

Function = Callable[..., Any]


def in_fixed_order(name: str, function: Function) -> Function:
    """A function that calls `function(*args, batch_invariant=True)` in one CPU thread and outside
    autocast, so that no setting of torch changes the order of its sums.

    A product divides its columns among threads, so that a machine with more cores would compute
    other bits. The other settings belong to the whole process and cannot be changed for one call
    while other threads compute.

    Args:
        name: the name of the operator, for errors.
        function: the CPU implementation of a batch-invariant operator.

    Raises:
        DeviceError: (when called) a setting of the process chooses other products.
    """

    def call(*args: Any) -> Any:
        _check_settings(name)
        threads = torch.get_num_threads()  # a setting of this thread alone
        if threads > 1:
            torch.set_num_threads(1)
        try:
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    return function(*args, batch_invariant=True)
            return function(*args, batch_invariant=True)
        finally:
            if threads > 1:
                torch.set_num_threads(threads)

    return call


def _check_settings(name: str) -> None:
    precision = torch._C._get_fp32_precision_getter("mkldnn", "matmul")
    if precision in ("none", "ieee") and torch._C._get_mkldnn_enabled():
        return
    problem = (
        f"torch.backends.mkldnn.matmul.fp32_precision = {precision!r}"
        " (torch.set_float32_matmul_precision sets it)"
    )
    instead = "torch.set_float32_matmul_precision('highest')"
    if precision in ("none", "ieee"):
        problem = "torch.backends.mkldnn.enabled = False"
        instead = "torch.backends.mkldnn.enabled = True"
    raise DeviceError(
        f"{name}(…) in weft.batch_invariant(), on the CPU",
        f"{problem}, with which products round differently",
        instead,
    )
