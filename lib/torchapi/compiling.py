"""torch.compile: the names of it that benchmarks use, and that torch does not document."""

import importlib

import torch
from torch import Tensor


def import_compiler() -> None:
    """Import what torch.compile imports at its first call."""
    importlib.import_module("torch._inductor.compile_fx")


def mark_static(tensor: Tensor) -> None:
    """Tell torch.compile that a tensor stays where it is, so that a function that writes to it
    may be a CUDA graph."""
    torch._dynamo.mark_static_address(tensor)
