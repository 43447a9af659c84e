"""Linear layers: torch's for plain weights, and `weft::fp8_linear` for weights in FP8 blocks."""

import torch
from torch import Tensor

from weft.errors import DescriptorError
from weft.ops.fp8 import BLOCK, Quantized, ceil_blocks, dequantize, dequantize_weight
from weft.ops.register import register
from weft.ops.tiles import linear_parts


def fp8_linear(
    x: Quantized, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """`x @ weight.T + bias`, both in FP8; products in float32, each block of 128 columns scaled before it is added.

    Args:
        x: `[T, K]`.
        weight: `[N, K]` float8_e4m3fn.
        scale: `[ceil(N / 128), ceil(K / 128)]` float32.
        bias: `[N]`.
        dtype: of the result.

    Returns:
        `[T, N]` of `dtype`, or float32 parts of it `[S, T, N]` (`weft.ops.parts`): S follows from the shapes and the
        device, `weft.ops.tiles.linear_parts`.

    Raises:
        DescriptorError: shapes or dtypes contradict each other.
    """
    columns, rows = x.values.shape[1], weight.shape[0]
    wanted = (ceil_blocks(rows), ceil_blocks(columns))
    if weight.dtype != torch.float8_e4m3fn or tuple(weight.shape) != (rows, columns) or tuple(scale.shape) != wanted:
        seen = f"weight {list(weight.shape)} {weight.dtype} and scale {list(scale.shape)} beside {columns} columns"
        instead = f"pass float8_e4m3fn [N, {columns}], and a scale for every {BLOCK} by {BLOCK} of it"
        raise DescriptorError("fp8_linear(x, weight, scale)", seen, instead)
    out: Tensor = torch.ops.weft.fp8_linear(x.values, x.scales, weight, scale, bias, dtype)
    return out


def _on_cpu(
    values: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    out = dequantize(Quantized(values, scales)) @ dequantize_weight(weight, scale).T
    return (out if bias is None else out + bias.float()).to(dtype)


def _fake(
    values: Tensor, scales: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    (tokens, columns), rows = values.shape, weight.shape[0]
    parts = linear_parts(tokens, rows, columns) if values.device.type == "cuda" else 1
    if parts == 1:
        return values.new_empty((tokens, rows), dtype=dtype)
    return values.new_empty((parts, tokens, rows), dtype=torch.float32)


register(
    "fp8_linear",
    "(Tensor values, Tensor scales, Tensor weight, Tensor scale, Tensor? bias, ScalarType dtype) -> Tensor",
    cpu=_on_cpu, fake=_fake, kernel="weft.ops.linear_triton:fp8_linear",
)  # fmt: skip
