"""Rotary position embedding: its parameters, read from a config.json; its frequencies and tables;
and the positions of tokens."""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import attrs
import torch
from torch import Tensor

from weft.arguments.json_text import Fields
from weft.batches.batch import Batch, ResolvedBatch, owners_of
from weft.batches.outputs import IntermediateTensors
from weft.batches.state import State
from weft.ops.rotary import turn_tables

RopeKind = Literal["default", "linear", "llama3", "yarn"]
KINDS: tuple[RopeKind, ...] = get_args(RopeKind)
# Qwen2-VL's files use this name for type `default` with an `mrope_section`.
_MROPE = "mrope"
_SHARED_KEYS = {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
}
_NEEDED_KEYS: Mapping[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_YARN_KEYS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_OPTIONAL_KEYS: Mapping[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "llama3": ("original_max_position_embeddings",),
    "yarn": ("original_max_position_embeddings", *_YARN_KEYS),
}
# For each key that weft does not use: the values at which it changes nothing, and the text of the
# error for other values.
_NEUTRAL_AT: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "partial_rotary_factor": (
        (None, 1),
        "weft rotates whole heads: partial_rotary_factor is 1.0 or missing",
    ),
    "mrope_interleaved": (
        (None, False),
        "weft has the sections of mrope_section one after the other",
    ),
}


@attrs.frozen
class Rope:
    """The parameters of a rotary position embedding; those that `kind` does not use keep their
    defaults.

    Args:
        theta: the base of the frequencies.
        kind: `default`; `linear` (position interpolation, arXiv 2306.15595); `llama3` (Llama 3.1's
            frequency bands); `yarn` (arXiv 2309.00071).
        factor: the ratio by which the context was stretched; None: `max_position_embeddings`
            divided by `original_max_position_embeddings`.
        original_max_position_embeddings: the context length before stretching; None:
            `max_position_embeddings`.
        low_freq_factor, high_freq_factor: the bounds of llama3's bands, in turns within the
            original context.
        beta_fast, beta_slow: the bounds of YaRN's bands, in turns within the original context.
        attention_factor: YaRN's factor of cosine and sine; None: it follows from `factor` and the
            mscales.
        mscale, mscale_all_dim: the weights in YaRN's attention factor, used only if both are given.
        truncate: whether YaRN's bands are rounded outwards to whole dimensions.
        mrope_section: the numbers of pairs of a head that turn with a token's position in time, in
            height and in width (mRoPE; Qwen2-VL, arXiv 2409.12191, section 2.1); None: a token has
            one position, and all pairs turn with it.
        factors: divisors of the frequencies of a head's pairs, from a GGUF (`rope_freqs.weight`);
            only with the kind `default`.
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
    factors: tuple[float, ...] | None = None


def parse_rope(fields: Fields, default: Rope) -> Rope:
    """Read the rotary embedding from a config.json in either style: `rope_parameters` (transformers
    5), or `rope_theta` beside `rope_scaling` (transformers 4).

    Args:
        default: has the theta and the `mrope_section` to use if the file has none. Without a rope
            type, there is no scaling.

    Raises:
        ConfigError: a rope type that weft does not know, a required key that is missing, a value of
            the wrong type, or two places that disagree.
    """
    blocks = _blocks(fields)
    # Without a block, `rope_theta` may still stand alone in the file: an empty block reads it.
    ropes = [
        _parse_block(fields, block, default) for block in blocks or [attrs.evolve(fields, raw={})]
    ]
    values = {block.prefix.rstrip("."): block.raw for block in blocks}
    # A file that was converted between versions of transformers may have both, and they may
    # disagree.
    instead = "say it once: rope_parameters, or rope_scaling beside rope_theta"
    fields.check(ropes[0] == ropes[-1], values, instead)
    return ropes[0]


def unknown_rope_keys(fields: Fields) -> dict[str, Any]:
    """The keys of `rope_parameters` and `rope_scaling` that no rope type has, with their values."""
    rope_keys = set().union(*map(_known_keys, KINDS))
    return {
        f"{x.prefix}{name}": value
        for x in _blocks(fields)
        for name, value in x.raw.items()
        if name not in rope_keys
    }


def _known_keys(kind: RopeKind) -> set[str]:
    return {*_SHARED_KEYS, *_NEEDED_KEYS[kind], *_OPTIONAL_KEYS[kind]}


def _blocks(fields: Fields) -> list[Fields]:
    blocks = (
        fields.nested(name) for name in ("rope_parameters", "rope_scaling") if fields.raw.get(name)
    )
    return [block for block in blocks if block is not None]


def _parse_block(fields: Fields, block: Fields, default: Rope) -> Rope:
    kind = _kind(block)
    _check_keys(block, kind)
    theta = _same_in_both(fields, block, "rope_theta", default.theta)
    section = _section(block) or default.mrope_section
    rope = Rope(theta=theta.number("rope_theta", default.theta), kind=kind, mrope_section=section)
    theta.check(
        rope.theta > 1,
        "rope_theta",
        "rope_theta is greater than 1, or the frequencies would not fall",
    )
    if kind == "default":
        return rope
    rope = attrs.evolve(rope, factor=block.optional_number("factor"))
    if kind == "linear":
        return rope
    return _with_bands(fields, block, rope)


def _kind(block: Fields) -> RopeKind:
    """The rope type: `rope_type`, or `type` in files of transformers before 4.45. A file may have
    both."""
    names = {
        name: block.raw[name] for name in ("rope_type", "type") if block.raw.get(name) is not None
    }
    kinds: list[Any] = ["default" if value == _MROPE else value for value in names.values()] or [
        "default"
    ]
    block.check(kinds[0] == kinds[-1], names, "keep rope_type alone")
    block.check(
        kinds[0] in KINDS, names, f"weft supports the rope types {', '.join((*KINDS, _MROPE))}"
    )
    kind: RopeKind = kinds[0]
    return kind


def _section(block: Fields) -> tuple[int, int, int] | None:
    """The numbers of pairs that turn with time, height and width; None if the file has none."""
    needed = _MROPE in (block.raw.get("rope_type"), block.raw.get("type"))
    there = block.raw.get("mrope_section") is not None
    _check_needed(block, there or not needed, "mrope_section", _MROPE)

    def fits(value: Any) -> bool:
        three = isinstance(value, list | tuple) and len(value) == 3
        return value is None or (three and all(type(one) is int and one >= 0 for one in value))

    section = block.value(
        "mrope_section", None, fits, "three whole numbers: pairs for time, height and width"
    )
    if section is None:
        return None
    return (section[0], section[1], section[2])


def _check_keys(block: Fields, kind: RopeKind) -> None:
    for name in _NEEDED_KEYS[kind]:
        # YaRN's factor may be null: it then follows from the two context lengths.
        there = name in block.raw and (block.raw[name] is not None or kind == "yarn")
        _check_needed(block, there, name, kind)
    allowed_keys = _known_keys(kind)
    foreign_keys = set().union(*map(_known_keys, KINDS)) - allowed_keys
    # A key of another rope type is a wrong `rope_type` more often than an idle key.
    for name in sorted(foreign_keys & block.raw.keys()):
        block.check(
            block.raw[name] is None,
            name,
            f"rope type {kind!r} takes {', '.join(sorted(allowed_keys))}",
        )
    for name, (allowed, instead) in _NEUTRAL_AT.items():
        block.check(block.raw.get(name) in allowed, name, instead)


def _check_needed(block: Fields, there: bool, name: str, kind: str) -> None:
    block.check(there, name, f"add {name} to {block.prefix[:-1]}: rope type {kind!r} needs it")


def _same_in_both(fields: Fields, block: Fields, name: str, default: Any) -> Fields:
    """Whichever of the two objects has `name`; an error if both have it and disagree."""
    outer = fields.raw.get(name)
    inner = block.raw.get(name)
    agree = None in (outer, inner) or outer == inner
    fields.check(
        agree,
        {name: outer, f"{block.prefix}{name}": inner},
        f"write {name} in one place, or the same value in both",
    )
    if inner is not None:
        return block
    if outer is not None:
        return fields
    return attrs.evolve(fields, raw={name: default})


def _with_bands(fields: Fields, block: Fields, rope: Rope) -> Rope:
    """`rope` with the parameters of llama3 or yarn."""
    # Phi's and other files have it beside `rope_scaling`, not in it.
    original = _same_in_both(fields, block, "original_max_position_embeddings", None)
    if original.raw["original_max_position_embeddings"] is not None:
        length = original.integer("original_max_position_embeddings", 1)
        rope = attrs.evolve(rope, original_max_position_embeddings=length)
    low, high = (
        ("low_freq_factor", "high_freq_factor")
        if rope.kind == "llama3"
        else ("beta_slow", "beta_fast")
    )
    bands: dict[str, Any] = {
        name: block.optional_number(name) or getattr(rope, name) for name in (low, high)
    }
    block.check(bands[low] < bands[high], bands, f"{low} is less than {high}")
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


def inverse_frequencies(
    rope: Rope, head_dim: int, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """The frequency of each pair of dimensions, and the attention factor, by which cosine and sine
    are multiplied.

    Returns:
        float32 `[head_dim / 2]` on the CPU, in radians per position, and the attention factor (1.0
        unless YaRN). The values are those of transformers 5.23.

    Sources: RoFormer (arXiv 2104.09864) for `theta ** (-2i / head_dim)`; position interpolation
    (arXiv 2306.15595); Llama 3.1's reference code, `apply_scaling`; YaRN (arXiv 2309.00071),
    section 3.

    >>> inverse_frequencies(Rope(theta=100.0), 4, 2048)
    (tensor([1.0000, 0.1000]), 1.0)
    """
    original = rope.original_max_position_embeddings or max_position_embeddings
    if rope.factor is None:
        factor = max_position_embeddings / original
    else:
        factor = rope.factor
    # On the CPU: a GPU's `pow` differs in the last bit, and then so do all angles.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    periods = rope.theta**exponents
    if rope.kind == "default":
        factors = torch.tensor(rope.factors or (1.0,), dtype=torch.float32, device="cpu")
        return 1.0 / periods / factors, 1.0
    if rope.kind == "linear":
        return 1.0 / periods / factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / periods, factor, original), 1.0
    return _yarn(rope, periods, factor, original, head_dim), _yarn_attention_factor(rope, factor)


def _llama3(rope: Rope, frequencies: Tensor, factor: float, original: int) -> Tensor:
    """Llama 3.1's frequencies: slow pairs are interpolated, fast ones kept, and those between are
    blended by their number of turns within the original context."""
    # By way of the wavelength, as in transformers, since another order of operations rounds
    # differently.
    turns = original / (2 * math.pi / frequencies)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(
        0, 1
    )
    return (1 - keep) * frequencies / factor + keep * frequencies


def _yarn(rope: Rope, periods: Tensor, factor: float, original: int, head_dim: int) -> Tensor:
    """NTK-by-parts interpolation, section 3.2 of arXiv 2309.00071."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension(rope.beta_fast)
    high = dimension(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    # An empty band is widened as in transformers, so that the ramp has a slope.
    if high != low:
        width = high - low
    else:
        width = (high + 0.001) - low
    steps = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    # `1 - (1 - x)` rather than `x`, as in transformers: its rounding decides the last bit.
    keep = 1 - ((steps - low) / width).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_attention_factor(rope: Rope, factor: float) -> float:
    """`0.1 ln(factor) + 1` (section 3.4 of arXiv 2309.00071), or the ratio of two such terms
    weighted by the mscales."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def term(weight: float) -> float:
        if factor > 1:
            return 0.1 * weight * math.log(factor) + 1.0
        return 1.0

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
        attention_factor: the factor of both tables.
        dtype: the tables' dtype. The angles are always float32: bfloat16 cannot tell position 257
            from 256.
        mrope_section: as in `Rope`. Where a token's three positions are equal, the tables are those
            of that position.

    Returns:
        `(cos, sin)`, each `[T, head_dim / 2]` of `dtype`.
    """
    if mrope_section is not None:
        columns = positions.split(1, dim=1)
        positions = torch.cat(
            [x.expand(-1, count) for x, count in zip(columns, mrope_section, strict=True)], dim=1
        )
    return turn_tables(inv_freq, positions, attention_factor, dtype)


def mrope_position_delta(positions: Tensor) -> int:
    """The number to add to the place of a token after the prompt to get its position: positions
    continue after the largest one in the prompt.

    Args:
        positions: [3, n], the positions of the whole prompt.

    >>> mrope_position_delta(torch.tensor([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]))
    -2
    """
    return int(positions.max()) + 1 - positions.shape[1]


def mrope_positions(state: State, batch: Batch, resolved: ResolvedBatch) -> Tensor:
    """The position of each token in time, height and width: [num_tokens, 3] int64, without a host
    read.

    The tokens of a prompt have the positions in the batch. The position of a later token is, in all
    three dimensions, its place in the request plus the request's delta. The state holds the delta,
    so a decode batch needs only rows. A request of text alone has the delta 0, and three equal
    positions rotate a head as a single one does.
    """
    owner, _ = owners_of(batch)
    in_order = (resolved.positions + state.mrope_position_deltas[batch.rows[owner]])[:, None]
    if batch.positions is None:
        return in_order.repeat(1, 3)
    batch_positions = batch.positions.T
    # Negative: the token has no position of its own, as after the prompt.
    return torch.where(batch_positions >= 0, batch_positions, in_order).contiguous()


def position_fault(
    batch: Batch, x: IntermediateTensors | None, has_mrope: bool
) -> tuple[str, str] | None:
    """A problem with positions and its remedy, or None: inputs of the first stage at a later stage,
    positions in a model without mRoPE, or an `x` without positions in a model with mRoPE.

    Args:
        x: the intermediate tensors from the stage before.
        has_mrope: whether the model has mRoPE.
    """
    if x is not None and batch.after_first() is not batch:
        if batch.positions is not None:
            name = "positions"
        else:
            name = "inputs_embeds"
        problem = f"batch.{name}, which the first stage alone takes"
        return problem, "batch.after_first(); what the first stage makes of them comes with x"
    if batch.positions is not None and not has_mrope:
        problem = (
            "batch.positions, and a model without mRoPE (no mrope_section in its rope_parameters)"
        )
        return problem, "a batch without positions: a token stands where it does in its request"
    if has_mrope and x is not None and x.positions is None:
        instead = "attrs.evolve(y, hidden_states=...) of what the stage before returned"
        return "no x.positions, in a model with mRoPE", instead
    return None
