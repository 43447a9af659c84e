"""`ModelConfig`: what a checkpoint's config.json says, every field of it used, known to be neutral, or refused.

A field that weft does not know is told of in a warning, or is an error if the file is read strictly. What is known to
change the computation in a way that weft does not do is always an error, never a shrug.
"""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from weft.arguments import kind_of
from weft.errors import CheckpointNotFoundError, ConfigError, ConfigWarning
from weft.json_text import parse_json
from weft.stages.architectures import ARCHITECTURES, NEUTRAL, NEUTRAL_AT, USED
from weft.stages.fields import Fields
from weft.stages.fp8_config import Fp8Config, parse_fp8
from weft.stages.moe_config import MoeConfig, parse_moe
from weft.stages.rope import Rope
from weft.stages.rope_config import parse_rope, unknown_keys
from weft.stages.vl_config import text_part

DTYPES: Mapping[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_FROM_GGUF = (
    "transformers reads GGUF, and writes what weft does: AutoModelForCausalLM.from_pretrained(folder, gguf_file=…), "
    "then save_pretrained(…)"
)
_MOST_BLOCKS = 2**16
"""A model's feed-forward blocks at most, each expert counted; the largest released models have some 23,000."""
_MOST_BYTES = 2**26
"""Of a file of JSON."""
_SHOWN = 16


@attrs.frozen
class ModelConfig:
    """A decoder's configuration: all that its computation depends on, apart from its weights.

    Args:
        architecture: `LlamaForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`, or the text
            decoder of `Qwen2VLForConditionalGeneration`.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads: sizes.
        rms_norm_eps: of every norm.
        max_position_embeddings: tokens of a request at most.
        head_dim: the size of a head, even; `num_heads * head_dim` need not be `hidden_size`.
        rope: the rotary embedding.
        tie_word_embeddings: whether the head is the embedding's matrix.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        qk_norm: whether queries and keys are normalised a head at a time.
        eos_token_ids: the tokens that end a generation; empty: none does.
        dtype: what the checkpoint declares; float32 where it is silent.
        moe: the mixture of experts; None: every layer has the one feed-forward block of `intermediate_size`.
        fp8: how linear layers are stored in FP8; None: none is.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    moe: MoeConfig | None = None
    fp8: Fp8Config | None = None

    def __attrs_post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings"):
            if getattr(self, name) < 1:
                self._refuse(f"{name}={getattr(self, name)}", f"{name} is 1 or more")
        if self.num_heads % self.num_kv_heads:
            seen = f"num_attention_heads={self.num_heads} and num_key_value_heads={self.num_kv_heads}"
            self._refuse(seen, "num_attention_heads is a multiple of num_key_value_heads")
        if self.head_dim % 2:
            self._refuse(f"head_dim={self.head_dim}", "head_dim is even: the rotary embedding turns pairs")
        section = self.rope.mrope_section
        if section is not None and sum(section) * 2 != self.head_dim:
            seen = f"mrope_section={list(section)} and head_dim={self.head_dim}"
            self._refuse(seen, f"mrope_section adds up to the {self.head_dim // 2} pairs of a head")
        blocks = self.num_layers * (1 if self.moe is None else self.moe.num_experts)
        if blocks > _MOST_BLOCKS:
            seen = f"{self.num_layers} layers" + ("" if self.moe is None else f" of {self.moe.num_experts} experts")
            self._refuse(seen, f"{_MOST_BLOCKS} layers at most, or as many experts in all")
        if self.architecture not in ARCHITECTURES:
            self._refuse(f"architecture={self.architecture!r}", _supported())
        if self.dtype not in DTYPES.values():
            self._refuse(f"dtype={self.dtype}", f"dtype is one of {', '.join(DTYPES)}")

    def _refuse(self, seen: str, instead: str) -> None:
        raise ConfigError(f"ModelConfig(architecture={self.architecture!r}, …)", seen, instead)


def parse_config(raw: Mapping[str, Any], *, source: str, strict: bool = False) -> ModelConfig:
    """The configuration that a config.json's object holds; missing fields have transformers' defaults.

    Args:
        raw: the object, as transformers 4 or 5 writes it.
        source: what errors call it.
        strict: whether fields that weft does not know are an error, instead of one `ConfigWarning` that lists them.

    Raises:
        ConfigError: a field that weft does not support, named with its value; a value of the wrong type; an
            architecture other than the five; sizes that contradict each other.

    >>> parse_config({"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 5}, source="a dict")
    Traceback (most recent call last):
        ...
    weft.errors.ConfigError: parse_config(raw, source='a dict')
      saw: a dict has num_attention_heads=32 and num_key_value_heads=5
      instead: num_attention_heads is a multiple of num_key_value_heads
    """
    return _parse(Fields(raw, f"parse_config(raw, source={source!r})", source), strict)


def load_config(path: str | os.PathLike[str], *, strict: bool = False) -> ModelConfig:
    """The configuration of a checkpoint folder.

    The tokens that end a generation come from generation_config.json where there is one, even if it names none, as
    in transformers; from config.json otherwise.

    Args:
        path: the folder.
        strict: as `parse_config` takes it.

    Raises:
        CheckpointNotFoundError: no folder, or no config.json in it.
        ConfigError: what `parse_config` refuses, or a file that is not a JSON object.
    """
    return config_in_folder(Path(path), f"load_config({os.fspath(path)!r:.300})", strict=strict)


def config_in_folder(folder: Path, call: str, *, strict: bool = False) -> ModelConfig:
    """As `load_config`, whose errors name the call that wanted it."""
    check_folder(folder, call)
    if not os.path.isfile(folder / "config.json"):
        instead = "pass a folder that save_pretrained wrote, or that `hf download` filled"
        seen = f"{str(folder)!r} has no config.json"
        if file := next(folder.glob("*.gguf"), None):
            seen, instead = f"{seen}, but {file.name!r:.300}", _FROM_GGUF
        raise CheckpointNotFoundError(call, seen, instead)
    config = _parse(Fields(read_object(folder / "config.json", call), call, "config.json"), strict)
    if not os.path.isfile(folder / "generation_config.json"):
        return config
    generation = read_object(folder / "generation_config.json", call)
    return attrs.evolve(config, eos_token_ids=_eos_token_ids(Fields(generation, call, "generation_config.json"), None))


def check_folder(folder: Path, call: str) -> None:
    """Refuse what is not a folder.

    Raises:
        CheckpointNotFoundError: it is so.
    """
    if os.path.isfile(folder):
        instead = f"its folder: {str(folder.parent)!r}"
        if folder.suffix == ".gguf":
            instead = _FROM_GGUF
        raise CheckpointNotFoundError(call, f"{str(folder)!r} is a file", instead)
    if not os.path.isdir(folder):  # unlike Path's, False also of a name that no file can have
        instead = "pass a local folder; `hf download <name> --local-dir <folder>` makes one"
        raise CheckpointNotFoundError(call, f"there is no folder {str(folder)!r:.300}", instead)


def read_object(path: Path, call: str) -> Mapping[str, Any]:
    """The object in a file of JSON.

    Raises:
        ConfigError: it holds something else, or cannot be read.
    """
    instead = f"copy {path.name} again from where the checkpoint came from"
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise ValueError(f"{size} bytes, and {_MOST_BYTES} are the most")
        raw = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(call, f"{path.name} cannot be read: {error.strerror}", instead) from error
    except ValueError as error:
        raise ConfigError(call, f"{path.name} is not JSON: {error}", instead) from error
    if not isinstance(raw, dict):
        raise ConfigError(call, f"{path.name} holds {kind_of(raw)}, not an object", instead)
    return raw


def _parse(fields: Fields, strict: bool) -> ModelConfig:
    architecture = _architecture(fields)
    known = ARCHITECTURES[architecture]
    fields = text_part(fields, architecture, known.text_types) if known.text_types else fields
    _check_every_field(fields, architecture, strict)
    values = _sizes(fields, architecture) | _biases(fields, architecture)
    try:
        return ModelConfig(
            architecture=architecture,
            rms_norm_eps=fields.number("rms_norm_eps", known.defaults.get("rms_norm_eps", 1e-6)),
            rope=parse_rope(fields, known.rope),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qk_norm=known.qk_norm,
            eos_token_ids=_eos_token_ids(fields, known.defaults["eos_token_id"]),
            dtype=_dtype(fields),
            moe=parse_moe(fields) if known.experts else None,
            fp8=parse_fp8(fields),
            **values,
        )
    except ConfigError as error:
        if error.call == fields.call:
            raise
        raise ConfigError(fields.call, f"{fields.source} has {error.seen}", error.instead) from None


def _supported() -> str:
    return f"weft supports the architectures {', '.join(ARCHITECTURES)}"


def _architecture(fields: Fields) -> str:
    """The one name in `architectures`, or the one that `model_type` stands for where there is none."""
    model_type = fields.raw.get("model_type")
    by_type = {known.model_type: name for name, known in ARCHITECTURES.items()}
    if not fields.raw.get("architectures"):
        if model_type is None:
            seen = f"{fields.source} has neither architectures nor model_type"
            raise ConfigError(fields.call, seen, _supported())
        if not isinstance(model_type, str) or model_type not in by_type:
            raise fields.refuse("model_type", _supported())
        return by_type[model_type]
    names = fields.raw["architectures"]
    name = names[0] if isinstance(names, list | tuple) and len(names) == 1 else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise fields.refuse("architectures", _supported())
    if model_type not in (None, ARCHITECTURES[name].model_type):
        values = {"architectures": names, "model_type": model_type}
        raise fields.contradict(values, f"model_type is {ARCHITECTURES[name].model_type!r} for {name}")
    return name


def _check_every_field(fields: Fields, architecture: str, strict: bool) -> None:
    """Refuse each field that says something which weft does not do, and tell of those that it does not know."""
    known = ARCHITECTURES[architecture]
    neutral_at = {**NEUTRAL_AT, **known.neutral_at}
    unknown: dict[str, Any] = {}
    for name, value in fields.raw.items():
        if name in neutral_at and name not in known.fields:
            allowed = neutral_at[name]
            if not any(type(value) is type(one) and value == one for one in allowed):
                raise fields.refuse(name, f"weft supports {name}={allowed[0]!r} in {architecture}, or no {name}")
        elif name not in USED | NEUTRAL.keys() | known.fields:
            unknown[name] = value
    _check_attention_is_full(fields, architecture)
    unknown |= unknown_keys(fields)
    if not unknown:
        return
    shown, more = list(unknown.items())[:_SHOWN], len(unknown) - _SHOWN
    listed = ", ".join(f"{name:.60}={value!r:.60}" for name, value in shown) + (f" and {more} more" if more > 0 else "")
    if strict:
        instead = f"weft does not know what that does to {architecture}; remove what does nothing, or leave out strict"
        raise ConfigError(fields.call, f"{fields.source} has {listed}", instead)
    seen = f"weft does not know these fields of {fields.source}, and ignores them: {listed}"
    warnings.warn(seen, ConfigWarning, stacklevel=2)


def _check_attention_is_full(fields: Fields, architecture: str) -> None:
    # Qwen's window counts only where use_sliding_window says so; Llama knows neither, so that a window alone is odd.
    off = "use_sliding_window" in fields.raw or architecture != "LlamaForCausalLM"
    if fields.raw.get("sliding_window") is not None and not off:
        raise fields.refuse("sliding_window", "weft has no sliding windows: set sliding_window to null")
    types = fields.raw.get("layer_types")
    if types is None:
        return
    layers = fields.integer("num_hidden_layers", ARCHITECTURES[architecture].defaults.get("num_layers", 32))
    if not isinstance(types, list) or len(types) != layers or any(one != "full_attention" for one in types):
        raise fields.refuse("layer_types", f"weft supports 'full_attention' in each of the {layers} layers")


def _sizes(fields: Fields, architecture: str) -> dict[str, Any]:
    defaults = ARCHITECTURES[architecture].defaults
    hidden = fields.integer("hidden_size", defaults.get("hidden_size", 4096))
    heads = fields.integer("num_attention_heads", defaults.get("num_heads", 32))
    kv_heads, head_dim = fields.raw.get("num_key_value_heads", defaults["num_key_value_heads"]), defaults["head_dim"]
    if fields.raw.get("head_dim", head_dim) is not None or head_dim is not None:
        head_dim = fields.integer("head_dim", head_dim)
    elif hidden % heads:
        values = {"hidden_size": hidden, "num_attention_heads": heads}
        raise fields.contradict(values, "hidden_size is a multiple of num_attention_heads, or head_dim is given")
    return {
        "vocab_size": fields.integer("vocab_size", defaults["vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", defaults["intermediate_size"]),
        "num_layers": fields.integer("num_hidden_layers", defaults.get("num_layers", 32)),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else fields.integer("num_key_value_heads", kv_heads),
        "head_dim": hidden // heads if head_dim is None else head_dim,
        "max_position_embeddings": fields.integer("max_position_embeddings", defaults["max_position_embeddings"]),
    }


def _biases(fields: Fields, architecture: str) -> dict[str, bool]:
    if ARCHITECTURES[architecture].fixed_biases:
        return {"qkv_bias": True, "o_bias": False, "mlp_bias": False}
    attention = fields.flag("attention_bias", False)
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": fields.flag("mlp_bias", False)}


def _eos_token_ids(fields: Fields, default: int | None) -> tuple[int, ...]:
    value = fields.raw.get("eos_token_id", default)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in ids):
        raise fields.refuse("eos_token_id", "eos_token_id is a token, a list of tokens, or null")
    return tuple(ids)


def _dtype(fields: Fields) -> torch.dtype:
    values = {name: fields.raw[name] for name in ("dtype", "torch_dtype") if fields.raw.get(name) is not None}
    for name, value in values.items():
        if not isinstance(value, str) or value not in DTYPES:
            raise fields.refuse(name, f"{name} is one of {', '.join(DTYPES)}")
    if len(set(values.values())) > 1:
        raise fields.contradict(values, "keep dtype alone")
    return DTYPES[next(iter(values.values()), "float32")]
