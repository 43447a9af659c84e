"""What stands between the query-key-value product and attention: QK norm, rotary embedding and KV cache, as one op."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.errors import DescriptorError
from weft.ops.norm import functional_rms_norm
from weft.ops.paged_attention_functional import keep
from weft.ops.parts import sum_parts, widened
from weft.ops.register import register


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
    starts: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and keys, rotate them, and write keys and values to their slots.

    The rotation turns the pairs `(x[i], x[i + D / 2])`, transformers' half layout. All in float32, from the rounded
    product to one rounding at the end.

    Args:
        qkv: `[T, N]` of the dtype of `kv_pages`, or float32 parts of it `[S, T, N]`.
        q_norm, k_norm: `[D]`, the weights of the norms over a head; None: no norm.
        eps: of the norms.
        cos, sin: `[T, D / 2]`.
        slot_mapping: `[T]`; keys and values of a token with slot -1 are not kept. No two others are equal.
        kv_pages: `[2, P, page_size, Hkv, D]`, contiguous, written in place: keys at 0, values at 1.
        num_heads: H, of the queries.
        starts: the columns of qkv where keys and values begin; queries begin with the first.

    Returns:
        The queries `[T, H, D]`, and the pages: those given, written in place; or others with the same
        in them, where a derivative is asked for or inside a transform of torch.func.

    Raises:
        DescriptorError: columns or heads that do not fit.
    """
    kv_heads, dim = kv_pages.shape[-2:]
    ends = (num_heads * dim, starts[0] + kv_heads * dim, starts[1] + kv_heads * dim)
    if any(end > start for end, start in zip(ends, (*starts, qkv.shape[-1]), strict=True)) or cos.shape[-1] * 2 != dim:
        call, seen = f"rotate_and_keep(…, num_heads={num_heads}, starts={starts})", f"qkv {list(qkv.shape)}"
        seen += f", tables of {cos.shape[-1]} pairs and {kv_heads} key heads of {dim}"
        raise DescriptorError(call, seen, "let queries, keys and values lie one after the other, heads as in kv_pages")
    made = _rotate_and_keep(qkv, q_norm, k_norm, eps, cos, sin, slot_mapping, kv_pages, num_heads, starts)
    return (made, kv_pages) if isinstance(made, Tensor) else made


def reference_rotate_and_keep(*args: Any) -> Tensor:
    """`weft::rotate_and_keep` in plain torch, on any device."""
    q, k, v, slot_mapping, kv_pages = _rotated(_torch_norm, *args)
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    for pages, rows in zip(kv_pages.flatten(1, 2), (k, v), strict=True):
        pages.index_copy_(0, slot_mapping[kept].long(), rows[kept])
    return q


def functional_rotate_and_keep(*args: Any) -> tuple[Tensor, Tensor]:
    """The same with pages of its own, which it returns behind the queries; it reads nothing on the host."""
    q, *kept = _rotated(functional_rms_norm, *args)
    return q, keep(*kept)


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
    starts: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values, and what says where the last two go."""
    kv_heads, dim = kv_pages.shape[-2:]
    whole, cos, sin = sum_parts(qkv, kv_pages.dtype), widened(cos[:, None]), widened(sin[:, None])
    q, k, v = (
        whole[:, start : start + heads * dim].unflatten(1, (heads, dim))
        for start, heads in zip((0, *starts), (num_heads, kv_heads, kv_heads), strict=True)
    )

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        wide = widened(x) if weight is None else norm(widened(x), weight, eps)
        left, right = wide.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)

    return turned(q, q_norm), turned(k, k_norm), v, slot_mapping, kv_pages


def _fake(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slot_mapping: Tensor,
    kv_pages: Tensor,
    num_heads: int,
    starts: tuple[int, int],
) -> Tensor:
    return kv_pages.new_empty((qkv.shape[-2], num_heads, kv_pages.shape[-1]))


_rotate_and_keep = register(
    "rotate_and_keep",
    "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor slot_mapping, "
    "Tensor(a!) kv_pages, int num_heads, int[] starts) -> Tensor",
    cpu=reference_rotate_and_keep, fake=_fake, kernel="weft.ops.rotary_triton:rotate_and_keep",
    functional=functional_rotate_and_keep,
)  # fmt: skip
