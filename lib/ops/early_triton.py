"""Programmatic dependent launch: a kernel's programs are placed while the last kernel's still run, and wait there for
its end, so that a step of hundreds of short kernels does not pay for the start of each (CUDA programming guide,
"Programmatic Dependent Launch and Synchronization"; sm_90 and later). Import it only where triton is installed.

Every kernel that is launched so calls `begin()` first, in all of its programs: then that a kernel has ended implies
that all before it have, and nothing is read or written too soon. Where little is left to do it calls `release()`, upon
which the next kernel's programs are placed; not before, or they would crowd on the multiprocessors that are free first.
Captured, it is an edge of the graph.
"""

# Triton's decorators have no types.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import functools
import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether kernels run by triton's interpreter, on the CPU."""


@triton.jit
def begin():
    """Wait for the end of the last kernel, and see what it wrote."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@triton.jit
def release():
    """Let the next kernel's programs be placed, once all of this one's have come here or ended."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


def early(x: Tensor) -> dict[str, bool]:
    """The launch options, on x's device, of a kernel that calls `begin`."""
    return _of_device(x.device)


@functools.cache
def _of_device(device: torch.device) -> dict[str, bool]:
    there = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"launch_pdl": True} if there else {}
