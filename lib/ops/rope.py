"""The cosine and sine of every token's angles, as one op."""

import torch
from torch import Tensor

from weft.ops.register import register


def turn_tables(
    inv_freq: Tensor, positions: Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` of `positions[t] * inv_freq[i]` in float32, times the factor, rounded once.

    Args:
        inv_freq: `[D / 2]` float32.
        positions: `[T]` int64, or of each pair its own `[T, D / 2]`.

    Returns:
        Both `[T, D / 2]` of `dtype`.
    """
    cos, sin = _turn_tables(inv_freq, positions, attention_factor, dtype)
    return cos, sin


def reference_turn_tables(
    inv_freq: Tensor, positions: Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`weft::turn_tables` in plain torch, on any device."""
    of_pairs = positions if positions.dim() == 2 else positions[:, None]
    angles = of_pairs.float() * inv_freq
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def _fake(inv_freq: Tensor, positions: Tensor, attention_factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = positions.shape[0], inv_freq.shape[0]
    return inv_freq.new_empty(shape, dtype=dtype), inv_freq.new_empty(shape, dtype=dtype)


_turn_tables = register(
    "turn_tables", "(Tensor inv_freq, Tensor positions, float attention_factor, ScalarType dtype) -> (Tensor, Tensor)",
    cpu=reference_turn_tables, fake=_fake, kernel="weft.ops.rope_triton:turn_tables",
)  # fmt: skip
