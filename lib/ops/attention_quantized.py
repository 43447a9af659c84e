"""Attention over a paged KV cache whose result is in FP8, for an output projection in FP8: an overload of the op
`weft::paged_attention`, for heads as wide as a block of FP8."""

from typing import Any

from torch import Tensor

from weft.errors import DescriptorError
from weft.ops.fp8 import BLOCK, ROUNDED, Quantized, empty_quantized, reference_quantize
from weft.ops.paged_attention import attend_on_cpu, check
from weft.ops.paged_attention_functional import attend
from weft.ops.register import register, without_derivative


def paged_attention_quantized(q: Tensor, *where: Any) -> Quantized:
    """`weft.ops.fp8.quantize` of what `paged_attention` returns, bit for bit, without a launch of its own.

    Args:
        q, where: the arguments of `weft.ops.paged_attention.paged_attention`, in order; heads of 128.

    Returns:
        `[T, H * 128]`: each head is a block.

    Raises:
        DescriptorError: heads of another width. Whatever `paged_attention` raises.
    """
    check(q, *where)
    if q.shape[2] != BLOCK:
        seen = f"heads of {q.shape[2]}, which are no blocks of {BLOCK}"
        raise DescriptorError("paged_attention_quantized(q, …)", seen, "quantize(paged_attention(q, …).flatten(1))")
    return Quantized(*_paged_attention_quantized(q, *where))


def reference(q: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    """`weft::paged_attention.quantized` on the CPU."""
    return reference_quantize(attend_on_cpu(q, *where).flatten(1))


def _functional(q: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    return reference_quantize(attend(q, *where).flatten(1))


def _fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_quantized(q, q.shape[0], q.shape[1] * q.shape[2])


_paged_attention_quantized = register(
    "paged_attention.quantized",
    "(Tensor q, Tensor? k, Tensor? v, Tensor(a!) kv_pages, Tensor slot_mapping, Tensor block_table, "
    "Tensor query_start_loc, Tensor seq_lens, SymInt max_query_len, float scale) -> (Tensor, Tensor)",
    cpu=reference, fake=_fake, kernel="weft.ops.paged_attention_triton:attend_quantized",
    functional=without_derivative("paged_attention_quantized", ROUNDED, _functional),
)  # fmt: skip
