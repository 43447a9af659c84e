"""Rotary position embedding: its parameters as a value, its inverse frequencies, and its tables.

Llama, Qwen2 and Qwen3 share it; `weft.stages.rope_config` reads it from a configuration.
"""

import math
from typing import Literal, get_args

import attrs
import torch
from torch import Tensor

from weft.ops.rotary import turn_tables

RopeKind = Literal["default", "linear", "llama3", "yarn"]
KINDS: tuple[RopeKind, ...] = get_args(RopeKind)


@attrs.frozen
class Rope:
    """The parameters of a rotary position embedding; those that `kind` does not use keep their defaults.

    Args:
        theta: the base of the frequencies.
        kind: `default`; `linear` (position interpolation, arXiv 2306.15595); `llama3` (Llama 3.1's frequency bands);
            `yarn` (arXiv 2309.00071).
        factor: how far the context was stretched; None: `max_position_embeddings / original_max_position_embeddings`.
        original_max_position_embeddings: the context length before stretching; None: `max_position_embeddings`.
        low_freq_factor, high_freq_factor: llama3's bands, in turns within the original context.
        beta_fast, beta_slow: YaRN's bands, in turns within the original context.
        attention_factor: what YaRN multiplies cosine and sine by; None: it follows from `factor` and the mscales.
        mscale, mscale_all_dim: the weights of YaRN's attention factor; they count only when both are given.
        truncate: whether YaRN's bands are rounded outwards to whole dimensions.
        mrope_section: how many pairs of a head turn with a token's position in time, in height and in width, in this
            order (mRoPE; Qwen2-VL, arXiv 2409.12191, section 2.1); None: all with its only one.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    mrope_section: tuple[int, int, int] | None = None


def inverse_frequencies(rope: Rope, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """How fast each pair of dimensions turns, and what cosine and sine are multiplied by.

    Returns:
        float32 `[head_dim / 2]` on the CPU, radians a position, and the attention factor (1.0 unless YaRN). The values
        are those of transformers 5.23.

    Sources: RoFormer (arXiv 2104.09864) for `theta ** (-2i / head_dim)`; position interpolation (arXiv 2306.15595);
    Llama 3.1's reference code, `apply_scaling`; YaRN (arXiv 2309.00071), section 3.

    >>> inverse_frequencies(Rope(theta=100.0), 4, 2048)
    (tensor([1.0000, 0.1000]), 1.0)
    """
    original = rope.original_max_position_embeddings or max_position_embeddings
    factor = max_position_embeddings / original if rope.factor is None else rope.factor
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    periods = rope.theta**exponents
    if rope.kind == "default":
        return 1.0 / periods, 1.0
    if rope.kind == "linear":
        return 1.0 / periods / factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / periods, factor, original), 1.0
    return _yarn(rope, periods, factor, original, head_dim), _yarn_attention_factor(rope, factor)


def _llama3(rope: Rope, frequencies: Tensor, factor: float, original: int) -> Tensor:
    """Slow pairs are interpolated, fast ones kept, and those between are blended by their turns in `original`."""
    turns = original / (2 * math.pi / frequencies)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * frequencies / factor + keep * frequencies


def _yarn(rope: Rope, periods: Tensor, factor: float, original: int, head_dim: int) -> Tensor:
    """NTK-by-parts interpolation, section 3.2 of arXiv 2309.00071."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # transformers' widening of an empty band, so that the ramp has a slope.
    width = high - low if high != low else (high + 0.001) - low
    steps = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    # The rounding of `1 - (1 - x)` is transformers', and the last bit of its values depends on it.
    keep = 1 - ((steps - low) / width).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_attention_factor(rope: Rope, factor: float) -> float:
    """`0.1 ln(factor) + 1`, section 3.4 of arXiv 2309.00071, or the ratio of two such terms with the mscales."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def term(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return term(rope.mscale) / term(rope.mscale_all_dim)
    return term(1.0)


def rope_tables(
    inv_freq: Tensor,
    positions: Tensor,
    attention_factor: float,
    dtype: torch.dtype,
    mrope_section: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles.

    Args:
        inv_freq: float32 `[head_dim / 2]`.
        positions: integer `[T]`, on the device of `inv_freq`; with a section `[T, 3]`.
        attention_factor: what both tables are multiplied by.
        dtype: the tables' dtype. The angles are float32 whatever it is: bfloat16 cannot tell position 257 from 256.
        mrope_section: of `Rope`. Where a token's three positions are equal, the tables are those of that one.

    Returns:
        `(cos, sin)`, each `[T, head_dim / 2]` of `dtype`.
    """
    if mrope_section is not None:
        columns = positions.split(1, dim=1)
        positions = torch.cat([x.expand(-1, count) for x, count in zip(columns, mrope_section, strict=True)], dim=1)
    return turn_tables(inv_freq, positions, attention_factor, dtype)
