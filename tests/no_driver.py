"""Import this first in a process: a torch for the CPU alone then looks like one that is built for
CUDA and finds no driver, which is what people have on laptops and CI does not."""

from typing import Any, NoReturn

import torch


def _raise(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("Found no NVIDIA driver on your system.")


def _missing(name: str) -> Any:
    if name.startswith("_cuda_"):
        return _raise
    raise AttributeError(f"module 'torch._C' has no attribute {name!r}")


if torch.version.cuda is None:
    torch.version.cuda = "13.0"
    vars(torch._C).update(
        __getattr__=_missing, _cuda_getDeviceCount=lambda: 0, _cuda_isInBadFork=lambda: False
    )
