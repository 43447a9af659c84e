"""The `quantization_config` of a config.json: linear layers in FP8, with a scale for every 128 by 128 weights."""

import functools
from collections.abc import Mapping
from typing import Any

import attrs

from weft.errors import ConfigError
from weft.stages.expressions import Expression, is_plain
from weft.stages.fields import Fields

_BLOCKS = ([128, 128], (128, 128))
# Each value is what it says here, or the field is missing (but for quant_method and weight_block_size).
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": _BLOCKS,
    "fmt": ("e4m3",),
    "scale_fmt": ("float", None),
    "expert_dtype": ("fp8", None),
    "dequantize": (False,),
    "modules_to_convert": (None, []),
}
_SKIPPED = "modules_to_not_convert"


@attrs.frozen
class Fp8Config:
    """Weights as float8_e4m3fn with a float32 scale for each block of 128 by 128, DeepSeek-V3's format (arXiv
    2412.19437, section 3.3); activations are quantised as they come, 128 columns of a token at a time.

    Args:
        skipped: the modules that stay as they are: each a regular expression that matches a module's name from its
            start up to the end of a part, or the end of its name, as in transformers.
    """

    skipped: tuple[str, ...] = ()

    def converts(self, module: str) -> bool:
        """Whether the linear layer of this name is in FP8.

        >>> Fp8Config(("lm_head", "model.layers.1")).converts("model.layers.1.mlp.up_proj")
        False
        >>> Fp8Config(("lm_head", "model.layers.1")).converts("model.layers.11.mlp.up_proj")
        True
        """
        return not (module.endswith(self.skipped) or any(one.matches(module) for one in _expressions(self.skipped)))


_BOUNDARY = r"(?:(?<=\.)|(?=\.|$)).*"


@functools.lru_cache(maxsize=16)  # a checkpoint may name hundreds, and have tens of thousands of modules
def _expressions(names: tuple[str, ...]) -> tuple[Expression, ...]:
    plain = "|".join(name for name in names if is_plain(name))
    others = (name for name in names if not is_plain(name))
    return tuple(Expression(name, after=_BOUNDARY) for name in ([plain, *others] if plain else others))


def parse_fp8(fields: Fields) -> Fp8Config | None:
    """The FP8 format of a whole config.json; None where no linear layer is quantised.

    Raises:
        ConfigError: another quantisation, another block size, static activation scales, or a key that weft does not
            know.
    """
    if fields.raw.get("quantization_config") is None:
        return None
    if not isinstance(fields.raw["quantization_config"], Mapping):
        raise fields.refuse("quantization_config", "quantization_config is an object, or null")
    block = attrs.evolve(fields, raw=fields.raw["quantization_config"], prefix="quantization_config.")
    if block.raw.get("quant_method", "fp8") != "fp8":
        instead = "weights in FP8, or not quantised; where transformers has dequantised them, remove the field"
        raise block.refuse("quant_method", instead)
    for name in ("quant_method", "weight_block_size"):
        if name not in block.raw:
            instead = f"weft supports quantization_config.{name}={_ONLY[name][0]!r}"
            raise fields.refuse("quantization_config", instead)
    for name, value in block.raw.items():
        if name in _ONLY and value not in _ONLY[name]:
            raise block.refuse(name, f"weft supports quantization_config.{name}={_ONLY[name][0]!r}")
        if name not in _ONLY and name != _SKIPPED:
            raise block.refuse(name, f"quantization_config takes {', '.join((*_ONLY, _SKIPPED))}")
    return Fp8Config(_skipped(block))


def _skipped(block: Fields) -> tuple[str, ...]:
    names = block.raw.get(_SKIPPED)
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise block.refuse(_SKIPPED, f"{_SKIPPED} is a list of names of modules, or null")
    for name in names:
        try:
            Expression(name)
        except ConfigError as error:
            instead = f"each of {_SKIPPED} is a regular expression, and {name!r:.60} is none: {error.seen}"
            raise block.refuse(_SKIPPED, instead) from None
    return tuple(names)
