"""Rotary position embedding: its parameters as a value, its inverse frequencies, its tables, and the rotation.

Llama, Qwen2 and Qwen3 share it. A configuration says it in one of two styles: `rope_parameters` (transformers 5), or
`rope_theta` beside `rope_scaling` (transformers 4); `parse_rope` reads both.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs
import torch
from torch import Tensor

from weft.errors import ConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
KINDS: tuple[RopeKind, ...] = get_args(RopeKind)

_SHARED_KEYS = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
_NEEDED_KEYS: Mapping[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OPTIONAL_KEYS: Mapping[RopeKind, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(),
    "llama3": frozenset({"original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@attrs.frozen
class Fields:
    """A JSON object that is being read, and how an error names it.

    Args:
        raw: the object.
        call: the call that the user wrote, for errors.
        source: the file, or whatever else the object came from.
        prefix: what stands before a field's name when the object is nested, such as `rope_scaling.`.
    """

    raw: Mapping[str, Any]
    call: str
    source: str
    prefix: str = ""

    def refuse(self, name: str, instead: str) -> ConfigError:
        """The error for a field whose value cannot be used."""
        return self.contradict({name: self.raw[name]}, instead)

    def contradict(self, values: Mapping[str, Any], instead: str) -> ConfigError:
        """The error for fields that do not go together."""
        pairs = " and ".join(f"{self.prefix}{name}={value!r}" for name, value in values.items())
        return ConfigError(self.call, f"{self.source} has {pairs}", instead)

    def integer(self, name: str, default: int) -> int:
        """A whole number, 1 or more."""
        value = self.raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(name, f"{name} is a whole number, 1 or more")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number greater than 0."""
        value = self.raw.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refuse(name, f"{name} is a finite number greater than 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number greater than 0; null and missing are None."""
        return None if self.raw.get(name) is None else self.number(name, 1.0)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, f"{name} is true or false")
        return value


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


def parse_rope(fields: Fields) -> Rope:
    """The `Rope` of a whole config.json, in transformers' 4 or 5 style; missing means theta 10000 and no scaling.

    Raises:
        ConfigError: a rope type or a rope key that weft does not know, a needed key that is missing, a value of the
            wrong type, or two places that say different things.
    """
    given = [name for name in ("rope_parameters", "rope_scaling") if fields.raw.get(name)]
    blocks = [_block(fields, name) for name in given] or [attrs.evolve(fields, raw={})]
    ropes = [_parse_block(fields, block) for block in blocks]
    if ropes[0] != ropes[-1]:
        values = {name: fields.raw[name] for name in given}
        raise fields.contradict(values, "say it once: rope_parameters, or rope_scaling beside rope_theta")
    return ropes[0]


def _block(fields: Fields, name: str) -> Fields:
    if not isinstance(fields.raw[name], Mapping):
        raise fields.refuse(name, f"{name} is an object, or null")
    return attrs.evolve(fields, raw=fields.raw[name], prefix=f"{name}.")


def _parse_block(fields: Fields, block: Fields) -> Rope:
    kind = _kind(block)
    _check_keys(block, kind)
    theta = _same_in_both(fields, block, "rope_theta", 10_000.0)
    rope = Rope(theta=theta.number("rope_theta", 10_000.0), kind=kind)
    if rope.theta <= 1:
        raise theta.refuse("rope_theta", "rope_theta is greater than 1, or the frequencies would not fall")
    if kind == "default":
        return rope
    rope = attrs.evolve(rope, factor=block.optional_number("factor"))
    return rope if kind == "linear" else _with_bands(fields, block, rope)


def _kind(block: Fields) -> RopeKind:
    """The rope type: `rope_type`, or `type` as transformers before 4.45 wrote it."""
    names = {name: block.raw[name] for name in ("rope_type", "type") if block.raw.get(name) is not None}
    if len(set(map(repr, names.values()))) > 1:
        raise block.contradict(names, "keep rope_type alone")
    for name, value in names.items():
        if value not in KINDS:
            raise block.refuse(name, f"weft supports the rope types {', '.join(KINDS)}")
        kind: RopeKind = value
        return kind
    return "default"


def _check_keys(block: Fields, kind: RopeKind) -> None:
    for name in _NEEDED_KEYS[kind]:
        if name not in block.raw or (block.raw[name] is None and kind != "yarn"):
            seen = f"{block.source} has no {block.prefix}{name}, and rope type {kind!r} needs it"
            raise ConfigError(block.call, seen, f"add {name} to {block.prefix.rstrip('.')}")
    known = _SHARED_KEYS | set(_NEEDED_KEYS[kind]) | _OPTIONAL_KEYS[kind]
    for name in block.raw:
        if name not in known:
            raise block.refuse(name, f"rope type {kind!r} takes {', '.join(sorted(known))}")
    if block.raw.get("partial_rotary_factor") not in (None, 1):
        raise block.refuse("partial_rotary_factor", "weft rotates whole heads: partial_rotary_factor is 1.0 or missing")


def _same_in_both(fields: Fields, block: Fields, name: str, default: Any) -> Fields:
    """The one of the two objects that has `name`; an error if both have it and disagree."""
    outer, inner = fields.raw.get(name), block.raw.get(name)
    if outer is not None and inner is not None and outer != inner:
        raise fields.contradict({name: outer, f"{block.prefix}{name}": inner}, f"give {name} once")
    if inner is not None:
        return block
    return fields if outer is not None else attrs.evolve(fields, raw={name: default})


def _with_bands(fields: Fields, block: Fields, rope: Rope) -> Rope:
    """`rope` with the parameters that only llama3 and yarn have."""
    original = _same_in_both(fields, block, "original_max_position_embeddings", None)
    if original.raw["original_max_position_embeddings"] is not None:
        length = original.integer("original_max_position_embeddings", 1)
        rope = attrs.evolve(rope, original_max_position_embeddings=length)
    low, high = ("low_freq_factor", "high_freq_factor") if rope.kind == "llama3" else ("beta_slow", "beta_fast")
    bands: dict[str, Any] = {name: block.optional_number(name) or getattr(rope, name) for name in (low, high)}
    if not bands[low] < bands[high]:
        raise block.contradict(bands, f"{low} is less than {high}")
    rope = attrs.evolve(rope, **bands)
    if rope.kind == "llama3":
        return rope
    return attrs.evolve(
        rope,
        attention_factor=block.optional_number("attention_factor"),
        mscale=block.optional_number("mscale"),
        mscale_all_dim=block.optional_number("mscale_all_dim"),
        truncate=block.flag("truncate", True),
    )


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
    inv_freq: Tensor, positions: Tensor, attention_factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles.

    Args:
        inv_freq: float32 `[head_dim / 2]`.
        positions: integer `[T]`, on the device of `inv_freq`.
        attention_factor: what both tables are multiplied by.
        dtype: the tables' dtype. The angles are float32 whatever it is: bfloat16 cannot tell position 257 from 256.

    Returns:
        `(cos, sin)`, each `[T, head_dim / 2]` of `dtype`.
    """
    angles = positions[:, None].float() * inv_freq
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs `(x[..., i], x[..., i + D/2])`: the half layout of transformers' checkpoints.

    Args:
        x: `[T, H, D]`, queries or keys.
        cos, sin: `[T, D/2]` of the dtype of `x`, from `rope_tables`.

    Returns:
        `[T, H, D]` of the dtype of `x`.

    >>> cos, sin = rope_tables(torch.tensor([math.pi / 2]), torch.tensor([1]), 1.0, torch.float32)
    >>> apply_rope(torch.tensor([[[1.0, 0.0]]]), cos, sin).round()
    tensor([[[-0., 1.]]])
    """
    left, right = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
