"""The text decoder's part of a Qwen2-VL config.json: weft runs it alone, and takes images as embeddings."""

from collections.abc import Mapping, Sequence

import attrs

from weft.stages.fields import Fields
from weft.stages.rope import Rope

VL_ROPE = Rope(theta=1e6, mrope_section=(16, 24, 24))
"""What transformers (5.23) assumes of the rotary embedding."""

VL_FIELDS = frozenset(
    {
        "vision_config",
        "image_token_id",
        "video_token_id",
        "vision_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    }
)
"""What the encoder of images and the processor read, and the decoder does not."""

VL_TEXT_TYPES = ("qwen2_vl_text", "qwen2_vl")
"""The `model_type` that a `text_config` may have, the usual one first."""

_OF_THE_WHOLE = ("architectures", "model_type")


def text_part(fields: Fields, architecture: str, text_types: Sequence[str]) -> Fields:
    """The fields of the decoder: in `text_config` (transformers 5) and beside it, or all in one object (the files of
    the models as they were published).

    Args:
        architecture: for the error.
        text_types: the `model_type` that a `text_config` may have, the usual one first.

    Raises:
        ConfigError: a `text_config` that is none, or that contradicts what stands beside it.
    """
    text = fields.raw.get("text_config")
    outer = {name: value for name, value in fields.raw.items() if name != "text_config"}
    if text is None:
        return attrs.evolve(fields, raw=outer)
    if not isinstance(text, Mapping):
        raise fields.refuse("text_config", "text_config is an object, or null")
    if text.get("model_type", text_types[0]) not in text_types:
        values = {"text_config": {"model_type": text["model_type"]}}
        raise fields.contradict(values, f"text_config.model_type is {text_types[0]!r} for {architecture}")
    inner = {name: value for name, value in text.items() if name not in _OF_THE_WHOLE}
    for name, value in inner.items():
        if name in outer and outer[name] != value:
            raise fields.contradict({name: outer[name], f"text_config.{name}": value}, f"give {name} once")
    return attrs.evolve(fields, raw=outer | inner)
