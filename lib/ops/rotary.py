"""Rotary embedding: the tables of cosines and sines, and the operator that rotates queries and
keys.

`weft::rotate_and_keep` does everything between the query-key-value product and attention: it
applies the QK norm, rotates, and writes keys and values to the KV cache.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import DerivativeError, DescriptorError
from weft.ops.attention.functional import keep, write_rows
from weft.ops.norm import functional_rms_norm
from weft.ops.products.fp8 import ROUNDED
from weft.ops.products.parts import sum_parts, widened
from weft.ops.register import operator
from weft.torchapi.private import is_differentiated


def _empty_tables(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = positions.shape[0], inv_freq.shape[0]
    return inv_freq.new_empty(shape, dtype=dtype), inv_freq.new_empty(shape, dtype=dtype)


@operator(kernel="weft.ops.rotary_triton:turn_tables", fake=_empty_tables)
def turn_tables(
    inv_freq: Tensor, positions: Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` of `positions[t] * inv_freq[i]` in float32, times `attention_factor`, rounded
    once.

    Args:
        inv_freq: `[D / 2]` float32.
        positions: `[T]` int64, or `[T, D / 2]` with a position for each pair.

    Returns:
        Both `[T, D / 2]` of `dtype`.
    """
    if positions.dim() == 2:
        of_pairs = positions
    else:
        of_pairs = positions[:, None]
    angles = of_pairs.float() * inv_freq
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def rotate_and_keep(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    kv_pages: Tensor,
    num_heads: int,
    starts: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and keys, rotate them, and write keys and values to their
    slots.

    The rotation turns the pairs `(x[i], x[i + D / 2])`, the half layout of transformers. The sum of
    the parts is rounded to the dtype of `cos`; everything after is in float32, and rounded once at
    the end.

    Args:
        qkv: `[T, N]` of the dtype of `cos`, or float32 parts of it `[S, T, N]`.
        q_norm, k_norm: `[D]`, the weights of the norms over a head; None: no norm.
        eps: of the norms.
        cos, sin: `[T, D / 2]`.
        slot_mapping: `[T]`; keys and values of a token with slot -1 are not written. All other
            slots are distinct.
        kv_pages: `[2, P, page_size, Hkv, D]`, contiguous, written in place: keys at 0, values at 1.
            Its dtype is that of `cos`, or float8_e4m3fn, which clamps values to ±448.
        num_heads: H, the number of query heads.
        starts: the columns of qkv where keys and values begin; queries begin at column 0.

    Returns:
        The queries `[T, H, D]` of the dtype of `cos`, and `kv_pages`, written in place. If a
        derivative is requested, or inside a transform of torch.func, the pages are new tensors with
        the same values.

    Raises:
        DescriptorError: columns or heads do not fit.
        DerivativeError: a derivative is requested of pages in FP8, whose values change in steps.
    """
    kv_heads, dim = kv_pages.shape[-2:]
    ends = (num_heads * dim, starts[0] + kv_heads * dim, starts[1] + kv_heads * dim)
    if (
        any(end > start for end, start in zip(ends, (*starts, qkv.shape[-1]), strict=True))
        or cos.shape[-1] * 2 != dim
    ):
        written = f"rotate_and_keep(…, num_heads={num_heads}, starts={starts})"
        problem = f"qkv {list(qkv.shape)}"
        problem += f", tables of {cos.shape[-1]} pairs and {kv_heads} key heads of {dim}"
        raise DescriptorError(
            written,
            problem,
            "let queries, keys and values lie one after the other, heads as in kv_pages",
        )
    # Not typed, since the functional form returns more than the operator.
    call: Callable[..., Any] = _rotate_and_keep
    result = call(qkv, q_norm, k_norm, eps, cos, sin, slot_mapping, kv_pages, num_heads, starts)
    return (result, kv_pages) if isinstance(result, Tensor) else result


def _torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), widened(weight), eps)


def _rotated(
    norm: Callable[[Tensor, Tensor, float], Tensor],
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    kv_pages: Tensor,
    num_heads: int,
    starts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rotated queries, rotated keys and values, and then the slots and pages to write them to."""
    kv_heads, dim = kv_pages.shape[-2:]
    whole, cos, sin = sum_parts(qkv, cos.dtype), widened(cos[:, None]), widened(sin[:, None])
    q, k, v = (
        whole[:, start : start + heads * dim].unflatten(1, (heads, dim))
        for start, heads in zip((0, *starts), (num_heads, kv_heads, kv_heads), strict=True)
    )

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            wide = widened(x)
        else:
            wide = norm(widened(x), weight, eps)
        left, right = wide.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

    return turned(q, q_norm), turned(k, k_norm), v, slot_mapping, kv_pages


def functional_rotate_and_keep(*args: Any) -> tuple[Tensor, Tensor]:
    """`rotate_and_keep` with new pages, which it returns after the queries; no value is read on the
    host."""
    # The arguments are those of `rotate_and_keep`; number 7 is `kv_pages`.
    if args[7].dtype == torch.float8_e4m3fn and any(
        isinstance(x, Tensor) and is_differentiated(x) for x in args
    ):
        instead = "a cache in the model's own dtype, kv_dtype=None; or torch.no_grad()"
        raise DerivativeError("the derivative of rotate_and_keep(…)", ROUNDED, instead)
    q, *kept = _rotated(functional_rms_norm, *args)
    return q, keep(*kept)


@operator(
    parameters=rotate_and_keep,
    writes=("kv_pages",),
    kernel="weft.ops.rotary_triton:rotate_and_keep",
    fake=lambda qkv, cos, num_heads: cos.new_empty((qkv.shape[-2], num_heads, 2 * cos.shape[-1])),
    functional=functional_rotate_and_keep,
)
def _rotate_and_keep(*args: Any) -> Tensor:
    """The operator of `rotate_and_keep`: it returns the queries."""
    q, k, v, slot_mapping, kv_pages = _rotated(_torch_norm, *args)
    # nonzero reads values on the host, which the functional form must not do.
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    for pages, rows in zip(kv_pages.flatten(1, 2), (k, v), strict=True):
        write_rows(rows[kept], slot_mapping[kept], pages)
    return q
