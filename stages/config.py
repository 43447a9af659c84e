"""`ModelConfig`: the configuration of a decoder, read from a checkpoint's config.json.

Weft uses each field that it knows, or ignores it if its value changes nothing, or raises an error
if it asks for something that weft does not support. Unknown fields are listed in one warning; in
strict mode, they are an error.
"""

import difflib
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from weft.arguments.checks import is_int
from weft.arguments.json_text import Fields, is_plain_name, read_object
from weft.errors import CheckpointNotFoundError, ConfigError
from weft.stages.architectures import (
    ARCHITECTURES,
    Architecture,
    architecture_of,
    check_every_field,
    decoder_fields,
    layer_windows,
    supported,
)
from weft.stages.attention.rope import Rope, parse_rope
from weft.stages.checkpoints.known_models import NAMES

DTYPES: Mapping[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
# The most feed-forward blocks of a model, counting each expert. The largest released models have
# about 23,000.
_MOST_BLOCKS = 2**16
# The values that each key of `quantization_config` may have.
_FP8_ONLY: Mapping[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([128, 128], (128, 128)),
    "fmt": ("e4m3",),
    "scale_fmt": ("float", None),
    "expert_dtype": ("fp8", None),
    "dequantize": (False,),
    "modules_to_convert": (None, []),
}
_FP8_NEEDED = ("quant_method", "weight_block_size")
_SKIPPED = "modules_to_not_convert"


def _check(call: str, holds: bool, problem: str, instead: str) -> None:
    if not holds:
        raise ConfigError(call, problem, instead)


@attrs.frozen
class MoeConfig:
    """A mixture of experts in place of a feed-forward block: a router picks `top_k` of them for
    each token.

    Args:
        num_experts: the experts in each sparse layer.
        top_k: the experts for each token.
        inner: the width between an expert's two products.
        renormalize: whether the weights of the chosen experts are divided by their sum.
        sparse_step: layer i has experts if `(i + 1) % sparse_step == 0` and it is not in
            `dense_layers`.
        dense_layers: layers that have one feed-forward block of `intermediate_size` instead, even
            if `sparse_step` selects them.
        sharing: how ranks that share a layer divide its experts: `columns`, a part of the inner
            columns of every expert; `whole`, an equal number of whole experts; None: columns if
            these can be cut, otherwise whole experts.
        num_local_experts: the whole experts in one rank's share of a sparse layer; None: all of
            them.

    Raises:
        ConfigError: more experts for each token than there are.
    """

    num_experts: int
    top_k: int
    inner: int
    renormalize: bool
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    sharing: str | None = None
    num_local_experts: int | None = None

    def __attrs_post_init__(self) -> None:
        problem = f"num_experts_per_tok={self.top_k} and num_experts={self.num_experts}"
        _check(
            "MoeConfig(…)",
            1 <= self.top_k <= self.num_experts,
            problem,
            "num_experts_per_tok is from 1 to num_experts",
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer, counted in the whole model, has experts.

        >>> [i for i in range(6) if MoeConfig(4, 2, 8, True, sparse_step=2, dense_layers=(3,)).is_sparse(i)]
        [1, 5]
        """
        return layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


@attrs.frozen
class Fp8Config:
    """Weights as float8_e4m3fn with a float32 scale for each block of 128 by 128, the format of
    DeepSeek-V3 (arXiv 2412.19437, section 3.3). Activations are quantised during the step, 128
    columns of a token at a time.

    Args:
        skipped: the modules that are not quantised. As in transformers, each is the beginning of a
            module's name, up to a dot, or the end of one.
    """

    skipped: tuple[str, ...] = ()

    def converts(self, module: str) -> bool:
        """Whether the linear layer of this name is in FP8.

        >>> Fp8Config(("lm_head", "model.layers.1")).converts("model.layers.1.mlp.up_proj")
        False
        >>> Fp8Config(("lm_head", "model.layers.1")).converts("model.layers.11.mlp.up_proj")
        True
        """
        parents = _prefixes(self.skipped)
        return not (module.endswith(self.skipped) or f"{module}.".startswith(parents))


@functools.lru_cache(maxsize=16)
def _prefixes(modules: tuple[str, ...]) -> tuple[str, ...]:
    """The beginnings of the names of what is in these modules; with the dot, as `model.layers.1` is
    also how `model.layers.11` begins."""
    return tuple(f"{name.rstrip('.')}." for name in modules)


@attrs.frozen
class ModelConfig:
    """A decoder's configuration: everything that its computation depends on, apart from its
    weights.

    Args:
        architecture: `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`,
            `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM`, or the text decoder of
            `Qwen2VLForConditionalGeneration`.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads: sizes.
        rms_norm_eps: the epsilon of every norm.
        max_position_embeddings: the most tokens of a request.
        head_dim: the size of a head, even; `num_heads * head_dim` need not be `hidden_size`.
        rope: the rotary embedding.
        tie_word_embeddings: whether the head is the embedding's matrix.
        qkv_bias, o_bias, mlp_bias: which linear layers have a bias.
        qk_norm: whether queries and keys are normalised, one head at a time.
        eos_token_ids: the tokens that end a generation; may be empty.
        dtype: the dtype that the checkpoint declares; float32 if it declares none.
        moe: the mixture of experts; None: every layer has one feed-forward block of
            `intermediate_size`.
        fp8: which linear layers are stored in FP8; None: no layer is.
        windows: for each layer, the number of last positions that its attention sees; 0: all.
            Empty: every layer sees all positions.

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
    windows: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        check = functools.partial(_check, f"ModelConfig(architecture={self.architecture!r}, …)")
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        )
        for name in (*sizes, "head_dim", "max_position_embeddings"):
            check(getattr(self, name) >= 1, f"{name}={getattr(self, name)}", f"{name} is 1 or more")
        heads = self.num_heads
        kv_heads = self.num_kv_heads
        dim = self.head_dim
        problem = f"num_attention_heads={heads} and num_key_value_heads={kv_heads}"
        check(
            heads % kv_heads == 0,
            problem,
            "num_attention_heads is a multiple of num_key_value_heads",
        )
        check(dim % 2 == 0, f"head_dim={dim}", "head_dim is even: the rotary embedding turns pairs")
        section = self.rope.mrope_section or (dim // 2,)
        problem = f"mrope_section={list(section)} and head_dim={dim}"
        check(
            sum(section) * 2 == dim,
            problem,
            f"mrope_section adds up to the {dim // 2} pairs of a head",
        )
        if self.moe is None:
            experts = 1
        else:
            experts = self.moe.num_experts
        problem = f"{self.num_layers} layers" + (
            "" if self.moe is None else f" of {experts} experts"
        )
        few = self.num_layers * experts <= _MOST_BLOCKS
        check(few, problem, f"{_MOST_BLOCKS} layers at most, or as many experts in all")
        fits = len(self.windows) in (0, self.num_layers) and min(self.windows, default=0) >= 0
        check(
            fits,
            f"windows={list(self.windows)}",
            f"one of 0 or more for each of {self.num_layers} layers, or none",
        )
        check(
            self.architecture in ARCHITECTURES, f"architecture={self.architecture!r}", supported()
        )
        check(
            self.dtype in DTYPES.values(),
            f"dtype={self.dtype}",
            f"dtype is one of {', '.join(DTYPES)}",
        )


def parse_config(raw: Mapping[str, Any], *, source: str, strict: bool = False) -> ModelConfig:
    """Read the object of a config.json; missing fields have transformers' defaults.

    Args:
        raw: the object, as transformers 4 or 5 writes it.
        source: the name of the object in errors.
        strict: raise an error for unknown fields, instead of listing them in one `ConfigWarning`.

    Raises:
        ConfigError: a field that weft does not support, named with its value; a value of the wrong
            type; an architecture that weft does not know; sizes that contradict each other.

    >>> parse_config({"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 5}, source="a dict")
    Traceback (most recent call last):
        ...
    weft.errors.ConfigError: parse_config(raw, source='a dict')
      saw: a dict has num_attention_heads=32 and num_key_value_heads=5
      instead: num_attention_heads is a multiple of num_key_value_heads
    """
    return parse_fields(Fields(raw, f"parse_config(raw, source={source!r})", source), strict)


def config_in_folder(folder: Path, call: str, *, strict: bool = False) -> ModelConfig:
    """The configuration of a checkpoint folder (`weft.stages.load_config`); errors name `call`."""
    written = "pass a folder that save_pretrained wrote, or that `hf download` filled"
    several = "name the one to load: there are several, or it is no file"
    find_file(folder, ("config.json",), call, written, {"*.gguf": several})
    config = parse_fields(
        Fields(read_object(folder / "config.json", call), call, "config.json"), strict
    )
    if not os.path.isfile(folder / "generation_config.json"):
        return config
    generation = read_object(folder / "generation_config.json", call)
    return attrs.evolve(
        config,
        eos_token_ids=_eos_token_ids(Fields(generation, call, "generation_config.json"), None),
    )


def find_file(
    folder: Path, names: Sequence[str], call: str, instead: str, other_formats: Mapping[str, str]
) -> Path:
    """The first of these files that a folder has.

    Args:
        instead: the remedy, if the folder has none of them.
        other_formats: a dict from a pattern of files in another format to the remedy, if the folder
            has such a file instead.

    Raises:
        CheckpointNotFoundError: it has none, or it is not a folder.
    """
    # `os.path` rather than Path's methods: it returns False for a name that no file can have, such
    # as one that is too long, where those may raise.
    if path := next((folder / name for name in names if os.path.isfile(folder / name)), None):
        return path
    problem = f"{str(folder)!r:.300} has no {' and no '.join(names)}"
    if os.path.isfile(folder):
        problem = f"{str(folder)!r} is a file"
        instead = f"its folder: {str(folder.parent)!r}"
    elif not os.path.isdir(folder):
        problem = f"there is no folder {str(folder)!r:.300}"
        near = [
            f"'{name}', which weft knows, or "
            for name in difflib.get_close_matches(str(folder), NAMES, n=1)
        ]
        instead = (
            f"pass {''.join(near)}a local folder; `hf download <name> --local-dir <folder>`"
            " makes one"
        )
    else:
        for pattern, remedy in other_formats.items():
            # The least, since the order of a folder differs between file systems.
            if file := min(folder.glob(pattern), default=None):
                problem = f"{problem}, but {file.name!s:.300}"
                instead = remedy
    raise CheckpointNotFoundError(call, problem, instead)


def parse_fields(fields: Fields, strict: bool) -> ModelConfig:
    """Like `parse_config`, for the fields of any source."""
    architecture = architecture_of(fields)
    spec = ARCHITECTURES[architecture]
    fields = decoder_fields(fields, architecture)
    check_every_field(fields, architecture, strict)
    try:
        config = ModelConfig(
            architecture=architecture,
            rms_norm_eps=fields.number("rms_norm_eps", spec.defaults["rms_norm_eps"]),
            rope=parse_rope(fields, spec.rope),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qk_norm=spec.qk_norm,
            eos_token_ids=_eos_token_ids(fields, spec.defaults["eos_token_id"]),
            dtype=_dtype(fields),
            moe=_parse_moe(fields) if spec.experts else None,
            fp8=_parse_fp8(fields),
            **_sizes(fields, spec),
            **_biases(fields, spec),
        )
        # Only now: it makes lists of `num_layers` entries, which `ModelConfig` has just bounded.
        return attrs.evolve(config, windows=layer_windows(fields, spec, config.num_layers))
    except ConfigError as error:
        # Errors of `ModelConfig` name its constructor; name the user's call and source instead.
        if error.call == fields.call:
            raise
        fields.refuse(error.problem, error.instead)


def _sizes(fields: Fields, spec: Architecture) -> dict[str, Any]:
    def size(name: str) -> int:
        return fields.integer(name, spec.defaults[name])

    hidden = size("hidden_size")
    heads = size("num_attention_heads")
    # `null` in a file means that the size follows from others, unless the architecture has a
    # default.
    head_dim = spec.defaults["head_dim"]
    if fields.raw.get("head_dim", head_dim) is not None or head_dim is not None:
        head_dim = size("head_dim")
    else:
        values = {"hidden_size": hidden, "num_attention_heads": heads}
        instead = "hidden_size is a multiple of num_attention_heads, or head_dim is given"
        fields.check(hidden % heads == 0, values, instead)
    kv_heads = fields.raw.get("num_key_value_heads", spec.defaults["num_key_value_heads"])
    return {
        "vocab_size": size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": size("intermediate_size"),
        "num_layers": size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else size("num_key_value_heads"),
        "head_dim": hidden // heads if head_dim is None else head_dim,
        "max_position_embeddings": size("max_position_embeddings"),
    }


def _biases(fields: Fields, spec: Architecture) -> dict[str, Any]:
    if spec.qkv_bias_only:
        return {"qkv_bias": True, "o_bias": False, "mlp_bias": False}
    attention = fields.flag("attention_bias", False)
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": fields.flag("mlp_bias", False)}


def _parse_moe(fields: Fields) -> MoeConfig:
    """The mixture of experts; missing fields have the defaults of transformers' Qwen3Moe (5.23)."""
    numbers = {
        name: fields.raw[name]
        for name in ("num_experts", "num_local_experts")
        if name in fields.raw
    }
    # By `repr`, because a wrong value may not be hashable.
    fields.check(len(set(map(repr, numbers.values()))) <= 1, numbers, "keep num_experts alone")
    return MoeConfig(
        num_experts=fields.integer(next(iter(numbers), "num_experts"), 128),
        top_k=fields.integer("num_experts_per_tok", 8),
        inner=fields.integer("moe_intermediate_size", 768),
        renormalize=fields.flag("norm_topk_prob", False),
        sparse_step=fields.integer("decoder_sparse_step", 1),
        dense_layers=tuple(
            sorted(set(fields.items("mlp_only_layers", int, "a list of layers, or null")))
        ),
    )


def _parse_fp8(fields: Fields) -> Fp8Config | None:
    """The FP8 format in `quantization_config`; None if there is no such field."""
    block = fields.nested("quantization_config")
    if block is None:
        return None
    instead = (
        "weights in FP8, or not quantised; where transformers has dequantised them, remove the"
        " field"
    )
    block.check(block.raw.get("quant_method", "fp8") == "fp8", "quant_method", instead)
    for name, allowed in _FP8_ONLY.items():
        if name in block.raw:
            fits = block.raw[name] in allowed
        else:
            fits = name not in _FP8_NEEDED
        block.check(fits, name, f"weft supports quantization_config.{name}={allowed[0]!r}")
    for name in block.raw:
        # A key that is not known may change what the numbers in the file mean.
        takes = (*_FP8_ONLY, _SKIPPED)
        block.check(name in takes, name, f"quantization_config takes {', '.join(takes)}")
    names = block.items(_SKIPPED, str, "a list of names of modules, or null")
    are_plain = all(map(is_plain_name, names))
    block.check(are_plain, _SKIPPED, f"{_SKIPPED} is a list of names, without regular expressions")
    return Fp8Config(tuple(names))


def _eos_token_ids(fields: Fields, default: int | None) -> tuple[int, ...]:
    def listed(value: Any) -> list[Any]:
        if value is None:
            return []
        if isinstance(value, list):
            return value
        return [value]

    def fits(value: Any) -> bool:
        return all(is_int(one, 0) for one in listed(value))

    return tuple(
        listed(fields.value("eos_token_id", default, fits, "a token, a list of tokens, or null"))
    )


def _dtype(fields: Fields) -> torch.dtype:
    values = {
        name: fields.raw[name]
        for name in ("dtype", "torch_dtype")
        if fields.raw.get(name) is not None
    }
    for name, value in values.items():
        fields.check(value in list(DTYPES), name, f"{name} is one of {', '.join(DTYPES)}")
    fields.check(len(set(values.values())) <= 1, values, "keep dtype alone")
    return DTYPES[next(iter(values.values()), "float32")]
