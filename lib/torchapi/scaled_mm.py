"""torch's FP8 matrix product with block scales, `F.scaled_mm`: when it is available, and its
call."""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F


@functools.cache
def scaled_mm_lacks() -> str | None:
    """Why `scaled_mm` of this torch cannot run on this machine's GPU; None if it can. Without a GPU
    only the versions of torch and CUDA are checked."""
    cuda = torch.version.cuda
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no scaled_mm"
    # cuBLASLt has scales of 1 by 128 and 128 by 128 from CUDA 12.9 on.
    if cuda is None or tuple(map(int, cuda.split(".")[:2])) < (12, 9):
        return f"it needs CUDA 12.9, and torch has {cuda}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(0) != (9, 0):
        return "it needs compute capability 9.0"
    return None


def scaled_mm(values: Tensor, weight: Tensor, by_token: Tensor, by_block: Tensor) -> Tensor:
    """The product of values and weights in FP8, by torch: `[T, R]`, in bfloat16.

    Args:
        values: `[T, C]`; T is a multiple of four.
        weight: `[R, C]`, contiguous.
        by_token: the scales of the values, `[C / 128, T]`, float32, contiguous.
        by_block: the scales of the weights, `[R / 128, C / 128]`, float32, its columns padded to a
            multiple of four.
    """
    return F.scaled_mm(
        values,
        weight.t(),
        by_token.t(),
        F.ScalingType.BlockWise1x128,
        by_block.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
