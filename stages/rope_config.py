"""The rotary embedding's part of a config.json, in either style: `rope_parameters` (transformers 5), or `rope_theta`
beside `rope_scaling` (transformers 4)."""

from collections.abc import Mapping
from typing import Any

import attrs

from weft.errors import ConfigError
from weft.stages.fields import Fields
from weft.stages.rope import KINDS, Rope, RopeKind

_MROPE = "mrope"
"""What Qwen2-VL's files call type default with an `mrope_section`."""
_SHARED_KEYS = frozenset(
    {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
)
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


def parse_rope(fields: Fields, default: Rope) -> Rope:
    """The `Rope` of a whole config.json, in transformers' 4 or 5 style.

    Args:
        default: the theta and the `mrope_section` where the file is silent; scaling has no default but none.

    Raises:
        ConfigError: a rope type that weft does not know, a needed key that is missing, a value of the wrong type, or
            two places that say different things.
    """
    blocks = _blocks(fields)
    ropes = [_parse_block(fields, block, default) for block in blocks or [attrs.evolve(fields, raw={})]]
    if ropes[0] != ropes[-1]:
        values = {block.prefix.rstrip("."): block.raw for block in blocks}
        raise fields.contradict(values, "say it once: rope_parameters, or rope_scaling beside rope_theta")
    return ropes[0]


def unknown_keys(fields: Fields) -> dict[str, Any]:
    """The keys of the rotary embedding's part that no rope type has, each with its value."""
    known = set().union(*map(_known_keys, KINDS))
    return {f"{x.prefix}{name}": value for x in _blocks(fields) for name, value in x.raw.items() if name not in known}


def _known_keys(kind: RopeKind) -> frozenset[str]:
    return _SHARED_KEYS | set(_NEEDED_KEYS[kind]) | _OPTIONAL_KEYS[kind]


def _blocks(fields: Fields) -> list[Fields]:
    return [_block(fields, name) for name in ("rope_parameters", "rope_scaling") if fields.raw.get(name)]


def _block(fields: Fields, name: str) -> Fields:
    if not isinstance(fields.raw[name], Mapping):
        raise fields.refuse(name, f"{name} is an object, or null")
    return attrs.evolve(fields, raw=fields.raw[name], prefix=f"{name}.")


def _parse_block(fields: Fields, block: Fields, default: Rope) -> Rope:
    kind = _kind(block)
    _check_keys(block, kind)
    theta = _same_in_both(fields, block, "rope_theta", default.theta)
    section = _section(block) or default.mrope_section
    rope = Rope(theta=theta.number("rope_theta", default.theta), kind=kind, mrope_section=section)
    if rope.theta <= 1:
        raise theta.refuse("rope_theta", "rope_theta is greater than 1, or the frequencies would not fall")
    if kind == "default":
        return rope
    rope = attrs.evolve(rope, factor=block.optional_number("factor"))
    return rope if kind == "linear" else _with_bands(fields, block, rope)


def _kind(block: Fields) -> RopeKind:
    """The rope type: `rope_type`, or `type` as transformers before 4.45 wrote it; both may stand, `mrope` for one."""
    names = {name: block.raw[name] for name in ("rope_type", "type") if block.raw.get(name) is not None}
    if len({repr("default" if value == _MROPE else value) for value in names.values()}) > 1:
        raise block.contradict(names, "keep rope_type alone")
    for name, value in names.items():
        if value not in (*KINDS, _MROPE):
            raise block.refuse(name, f"weft supports the rope types {', '.join((*KINDS, _MROPE))}")
        kind: RopeKind = "default" if value == _MROPE else value
        return kind
    return "default"


def _section(block: Fields) -> tuple[int, int, int] | None:
    """The pairs of a head that turn with time, height and width; None: the file has none."""
    value = block.raw.get("mrope_section")
    if value is None:
        if _MROPE in (block.raw.get("rope_type"), block.raw.get("type")):
            seen = f"{block.source} has no {block.prefix}mrope_section, and rope type 'mrope' needs it"
            raise ConfigError(block.call, seen, f"add mrope_section to {block.prefix.rstrip('.')}")
        return None
    numbers = isinstance(value, list | tuple) and all(type(one) is int and one >= 0 for one in value)
    if not numbers or len(value) != 3:
        raise block.refuse("mrope_section", "mrope_section is three whole numbers: pairs for time, height and width")
    time, height, width = value
    return time, height, width


def _check_keys(block: Fields, kind: RopeKind) -> None:
    for name in _NEEDED_KEYS[kind]:
        if name not in block.raw or (block.raw[name] is None and kind != "yarn"):
            seen = f"{block.source} has no {block.prefix}{name}, and rope type {kind!r} needs it"
            raise ConfigError(block.call, seen, f"add {name} to {block.prefix.rstrip('.')}")
    others = set().union(*map(_known_keys, KINDS)) - _known_keys(kind)
    for name, value in block.raw.items():
        if name in others and value is not None:
            raise block.refuse(name, f"rope type {kind!r} takes {', '.join(sorted(_known_keys(kind)))}")
    if block.raw.get("partial_rotary_factor") not in (None, 1):
        raise block.refuse("partial_rotary_factor", "weft rotates whole heads: partial_rotary_factor is 1.0 or missing")
    if block.raw.get("mrope_interleaved"):
        raise block.refuse("mrope_interleaved", "weft has the sections of mrope_section one after the other")


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
