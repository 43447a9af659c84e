"""Linear layers: `weft::linear` for plain weights, and `weft::fp8_linear` for weights in blocks of
FP8."""

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.errors import DescriptorError
from weft.ops.products.fp8 import (
    BLOCK,
    ROUNDED,
    Quantized,
    ceil_blocks,
    dequantize,
    dequantize_weight,
    reference_quantize,
)
from weft.ops.products.gate import functional_silu_mul, silu_mul
from weft.ops.products.parts import widened
from weft.ops.register import operator
from weft.ops.tiles.linear import linear_parts
from weft.ops.tiles.tile import leaf_columns

_BLOCK_TOKENS = 16
_BLOCK_COLUMNS = 256


def _empty_product(
    x: Tensor, weight: Tensor, dtype: torch.dtype, split: bool, leaves: int, batch_invariant: bool
) -> Tensor:
    """An empty result, with leaves if there are any, or parts if the CUDA implementation splits the
    product."""
    (tokens, columns), rows = x.shape, weight.shape[0]
    if leaves:
        return x.new_empty((leaves, tokens, rows), dtype=torch.float32)
    # As many parts as the CUDA implementation returns.
    fp8 = weight.dtype == torch.float8_e4m3fn
    if x.device.type == "cuda" and split:
        parts = linear_parts(tokens, rows, columns, fp8, batch_invariant)
    else:
        parts = 1
    if parts == 1:
        return x.new_empty((tokens, rows), dtype=dtype)
    return x.new_empty((parts, tokens, rows), dtype=torch.float32)


@operator(
    kernel="weft.ops.products.linear_triton:linear",
    fake=lambda x, weight, leaves, batch_invariant=False: _empty_product(
        x, weight, x.dtype, x.itemsize == 2, leaves, batch_invariant
    ),
)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    leaves: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, of x's dtype.
        bias: `[N]`.
        leaves: the number of equal leaves into which K is cut; the order of each leaf's sum depends
            neither on N nor on the other leaves (`weft.ops.products.leaves`). 0: the sum may have
            any order. The bias is added to the first leaf.

    Returns:
        `[T, N]` of x's dtype, or float32 parts of it `[S, T, N]` (`weft.ops.products.parts`). S is
        the number of leaves, or follows from the shapes, the dtype and the device.

    Raises:
        DescriptorError: K is not a multiple of the number of leaves.
    """
    if not leaves:
        return multiply(x, weight, bias, batch_invariant)
    return _multiply_leaves(x, weight, bias, leaves)


@operator(
    kernel="weft.ops.products.linear_triton:swiglu",
    fake=lambda x, weight: x.new_empty((x.shape[0], weight.shape[0] // 2)),
    functional=lambda x, weight, bias=None: functional_silu_mul(F.linear(x, weight, bias), x.dtype),
)
def swiglu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, batch_invariant: bool = False
) -> Tensor:
    """`silu(x @ gate.T) * (x @ up.T)` (Shazeer, arXiv 2002.05202): `silu_mul` of `linear`.

    A kernel that does both may sum in another order than the two operators.

    Args:
        x: `[T, K]`.
        weight: `[2 * I, K]`, of x's dtype: the rows of the gate, then the rows of up.
        bias: `[2 * I]`.

    Returns:
        `[T, I]` of x's dtype.

    >>> swiglu(torch.tensor([[2.0]]), torch.tensor([[0.5], [1.0]]))
    tensor([[1.4621]])
    """
    return silu_mul.reference(multiply(x, weight, bias, batch_invariant), x.dtype)


def _multiply_leaves(x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int) -> Tensor:
    """The leaves `[leaves, T, N]` of a product in float32, which are always batch invariant."""
    # Contiguous, so that torch sees the same strides as on a rank that holds only these columns.
    share = leaf_columns(x.shape[1], leaves)
    pairs = zip(x.split(share, 1), weight.split(share, 1), strict=True)
    products = torch.stack(
        [
            multiply(widened(x_part), widened(columns).contiguous(), None, True)
            for x_part, columns in pairs
        ]
    )
    if bias is None:
        return products
    return torch.cat((products[:1] + widened(bias), products[1:]))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    """`x @ weight.T + bias` by torch's own product.

    If batch invariant, it multiplies 16 tokens at a time, in new memory, so that neither the number
    of tokens nor their alignment affects the order of sums. In float32 it also multiplies 256
    columns at a time: some CPUs cut longer sums depending on the numbers of rows and threads.
    """
    if not batch_invariant:
        return F.linear(x, weight, bias)
    rows = len(weight)
    missing = -len(x) % _BLOCK_TOKENS
    # With one row torch would call its matrix-vector product, which sums in another order.
    if rows < _BLOCK_TOKENS:
        weight = F.pad(weight, (0, 0, 0, _BLOCK_TOKENS - rows))
        if bias is None:
            bias = None
        else:
            bias = F.pad(bias, (0, _BLOCK_TOKENS - rows))
    if len(x):
        blocks = F.pad(x, (0, 0, 0, missing)).split(_BLOCK_TOKENS)
    else:
        blocks = (x,)
    return torch.cat([_multiply_block(block, weight, bias) for block in blocks])[
        : len(x), :rows
    ].contiguous()


def _multiply_block(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype == torch.float32:
        share = _BLOCK_COLUMNS
    else:
        share = max(x.shape[1], 1)
    first, *rest = zip(x.split(share, 1), weight.split(share, 1), strict=True)
    total = F.linear(first[0].clone(), first[1], bias)
    for x_part, columns in rest:
        total = total + F.linear(x_part.clone(), columns)
    return total


def fp8_linear(
    x: Tensor | Quantized,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    leaves: int = 0,
) -> Tensor:
    """`x @ weight.T + bias` in FP8, with products in float32, where each block of 128 columns is
    scaled before it is added.

    Args:
        x: `[T, K]`; plain values are quantised as by `weft.ops.products.fp8.quantize`.
        weight: `[N, K]` float8_e4m3fn.
        scale: `[ceil(N / 128), ceil(K / 128)]` float32.
        bias: `[N]`.
        dtype: the dtype of the result.
        leaves: as in `linear`; each leaf has a multiple of 128 columns.

    Returns:
        `[T, N]` of `dtype`, or float32 parts of it `[S, T, N]`, as in `linear`.

    Raises:
        DescriptorError: shapes or dtypes contradict each other, or K cannot be cut into these
            leaves.
    """
    values, scales = (x.values, x.scales) if isinstance(x, Quantized) else (x, None)
    columns = values.shape[1]
    rows = weight.shape[0]
    scale_shape = (ceil_blocks(rows), ceil_blocks(columns))
    if (
        weight.dtype != torch.float8_e4m3fn
        or tuple(weight.shape) != (rows, columns)
        or tuple(scale.shape) != scale_shape
    ):
        problem = (
            f"weight {list(weight.shape)} {weight.dtype} and scale {list(scale.shape)} beside"
            f" {columns} columns"
        )
        instead = (
            f"pass float8_e4m3fn [N, {columns}], and a scale for every {BLOCK} by {BLOCK} of it"
        )
        raise DescriptorError("fp8_linear(x, weight, scale)", problem, instead)
    leaf_columns(columns, leaves, BLOCK)
    return _fp8_linear(values, scales, weight, scale, bias, dtype, leaves)


@operator(
    kernel="weft.ops.products.linear_triton:fp8_linear",
    fake=lambda values, weight, dtype, leaves, batch_invariant=False: _empty_product(
        values, weight, dtype, True, leaves, batch_invariant
    ),
    no_derivative=ROUNDED,
)
def _fp8_linear(
    values: Tensor,
    scales: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    leaves: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """The operator of `fp8_linear`; without scales, it quantises the plain `values` first."""
    if scales is None:
        x = Quantized(*reference_quantize(values))
    else:
        x = Quantized(values, scales)
    if leaves:
        return _multiply_leaves(dequantize(x), dequantize_weight(weight, scale), bias, leaves)
    out = multiply(dequantize(x), dequantize_weight(weight, scale), None, batch_invariant)
    return (out if bias is None else out + bias.float()).to(dtype)
