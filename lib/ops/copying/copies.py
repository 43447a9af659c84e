"""Copies between a graph's buffers and the tensors of its callers, all in one launch.

On a CUDA device a Triton kernel copies bytes (`weft.ops.copying.copies_triton`), whatever the
dtypes. If it cannot run, and on the CPU, `torch._foreach_copy_` copies the tensors of one dtype
together. `weft doctor` prints which of them runs, and why.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from weft.ops.copying.byte_copies import Copies
from weft.ops.register import triton_version
from weft.torchapi.private import current_device, empty_strided_on

T = TypeVar("T")


def no_kernel(device: torch.device, *, trial: bool = True) -> str | None:
    """Why the kernel does not run on a CUDA device, or None if it does; without a trial, None means
    that it may run."""
    if triton_version() is None:
        return "triton cannot be imported"
    if trial:
        return _tried(device)
    return None


@functools.cache
def _tried(device: torch.device) -> str | None:
    # Imported here, so that a machine without triton can import weft.
    from weft.ops.copying.copies_triton import ARITIES, kernel_handle

    # Whatever keeps triton from running a kernel, such as no compiler or an old driver, must not
    # stop weft, which can copy without it.
    try:
        kernel_handle(device, ARITIES[0])
    except Exception as error:
        problem = (
            f"triton cannot run it: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        )
        warnings.warn(f"weft copies with torch._foreach_copy_ on {device}: {problem}", stacklevel=2)
        return problem
    return None


def how_launched(device: torch.device) -> str:
    """Whether the driver or Triton launches the kernel, on a CUDA device that runs it."""
    from weft.ops.copying.copies_triton import ARITIES, kernel_handle

    direct = kernel_handle(device, ARITIES[0]) is not None
    if direct:
        return "launched by the driver"
    return "launched by triton, which takes longer: it gives no handle"


def uses_kernel(device: torch.device) -> bool:
    """Whether the kernel copies on this device."""
    return device.type == "cuda" and no_kernel(device) is None


def plan_copies_of_bytes(copies: Copies) -> Callable[[Sequence[Tensor]], None]:
    """Plan copies by the kernel, in one launch, or in several if there are more tensors than one
    launch takes."""
    return _on_device(_plan(copies), copies.device)


def plan_clones(tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Plan repeated clones, by the kernel, of these tensors, which are dense and on one device.

    Each clone has its own storage. If they were views of one storage, each would keep all others
    alive, and a caller who resizes or saves one would affect them.
    """
    device = tensors[0].device
    empty = empty_strided_on(device)
    kinds = [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]
    copy = _plan(Copies(tuple(tensors), False))

    def clone(_: Sequence[Tensor]) -> list[Tensor]:
        fresh = [empty(*kind) for kind in kinds]
        copy(fresh)
        return fresh

    return _on_device(clone, device)


def _plan(copies: Copies) -> Callable[[Sequence[Tensor]], None]:
    from weft.ops.copying.copies_triton import ARITIES, plan_launch

    most = ARITIES[-1]
    if len(copies.fixed) <= most:
        return plan_launch(copies)
    starts = range(0, len(copies.fixed), most)
    launches = [
        (slice(start, start + most), plan_launch(copies[start : start + most])) for start in starts
    ]

    def launch(counterparts: Sequence[Tensor]) -> None:
        for part, one in launches:
            one(counterparts[part])

    return launch


def _on_device(
    fn: Callable[[Sequence[Tensor]], T], device: torch.device
) -> Callable[[Sequence[Tensor]], T]:
    """`fn` with `device` as the current device."""
    # Entering `torch.cuda.device` takes time, so it is skipped if the device is current already.
    index, current = device.index, current_device()

    def run(counterparts: Sequence[Tensor]) -> T:
        if current() == index:
            return fn(counterparts)
        with torch.cuda.device(device):
            return fn(counterparts)

    return run
