"""Random parameters, models and adapters for a configuration, for benchmarks and tests. They are
drawn on their device.

`PRESETS` has configurations of known models by name.
"""

import hashlib
import math
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import DeviceError
from weft.stages.adapters.adapter import Adapter
from weft.stages.checkpoints.digests import Origin, digest_params
from weft.stages.checkpoints.reading import assemble, checked_device, checked_dtype, stage_fields
from weft.stages.choices import pick_device, pick_dtype, pick_kv_dtype, pick_stage
from weft.stages.config import ModelConfig
from weft.stages.layer_fields import Field
from weft.stages.layout import StageLayout, split_model
from weft.stages.model import Model
from weft.stages.params import DecoderParams
from weft.stages.shares import WHOLE, Share, adaptable, cut_field

# The number of elements drawn at a time: 1 GiB of float32 beside the parameters.
_AT_ONCE = 2**28

_QWEN3: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}

_LLAMA3: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

_LLAMA3_ROPE: Mapping[str, Any] = {
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

_FP8: Mapping[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}

# Objects for `weft.stages.config.parse_config`. `tiny` is for tests, and no published model.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        **_QWEN3,
        "eos_token_id": 256,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": 257,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "tie_word_embeddings": False,
    },
    "qwen3-32b-fp8": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "quantization_config": _FP8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b-fp8": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "quantization_config": {
            **_FP8,
            "modules_to_not_convert": [
                "lm_head",
                *(
                    f"model.layers.{i}.{name}"
                    for i in range(48)
                    for name in ("input_layernorm", "mlp.gate")
                ),
                *(f"model.layers.{i}.post_attention_layernorm" for i in range(48)),
            ],
        },
        "tie_word_embeddings": False,
    },
    "qwen2.5-3b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "max_window_layers": 36,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "llama-3.2-1b": {
        **_LLAMA3,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
}


def random_params(
    config: ModelConfig,
    layout: StageLayout,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    std: float = 0.02,
    shard: Share = WHOLE,
) -> DecoderParams:
    """Random parameters of the right structure, for benchmarks and tests: normal with standard
    deviation `std`.

    A field's values depend only on `seed`, its name, the layer and the kind of device, so that the
    stages and shares of any split agree with the whole model. Norms are 1 plus the same noise.
    Weights in FP8 are normal with standard deviation 16, and their scales are `std / 16` times a
    uniform number from 0.5 to 1.5.

    Args:
        config, layout: the model's configuration, and the stage's layout.
        seed, std: as above.
        device: the device on which they are drawn.
        dtype: `float32`, `bfloat16` or `float16`; None: the configuration's.
        shard: a rank's share of each layer, `(index, number of ranks)`.

    Raises:
        ConfigError: a dtype that no decoder computes in, or layers that the ranks cannot share.
        ProgramError: a layout for another number of layers.
        DeviceError: a device that this machine does not have, or whose memory is too small.
    """
    call = f"random_params(config, {layout!r}, seed={seed})"
    dtype, device = checked_dtype(config, layout, dtype, call), checked_device(device, call)
    fields = dict(stage_fields(config, layout))
    if shard == WHOLE:
        shard_fields = fields
    else:
        shard_fields = dict(stage_fields(config, layout, shard))
    _check_memory(shard_fields.values(), dtype, device, call)

    def draw(path: str, field: Field) -> Tensor:
        # Not `hash`, which differs from process to process.
        digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
        # A generator for each field, so that the values do not depend on which fields are drawn.
        generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:6], "little"))
        whole = torch.empty(field.shape, dtype=field.dtype or dtype, device=device)
        # In parts, since the noise is drawn in float32, whatever the field's dtype is.
        for some in whole.view(-1).split(_AT_ONCE):
            some.copy_(_noise(path, field, some, std, generator))
        return _without_gaps(field, whole)

    # Drawn whole and then cut, so that a share has the values of the whole model.
    tensors = {
        path: cut_field(draw(path, field), field, shard_fields[path])
        for path, field in fields.items()
    }
    return assemble(config, layout, tensors)


def _check_memory(
    fields: Iterable[Field], dtype: torch.dtype, device: torch.device, call: str
) -> None:
    """Raise DeviceError if the parameters are larger than the device's whole memory: on a CPU, the
    process would be killed."""
    needed = sum(math.prod(field.shape) * (field.dtype or dtype).itemsize for field in fields)
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        # The whole memory and not what is free, which changes while one looks.
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        problem = (
            f"weights of {needed / 2**30:.1f} GiB, and {device} has {there / 2**30:.1f} GiB of"
            " memory"
        )
        raise DeviceError(
            call, problem, "more stages, each on a device of its own, or a smaller model"
        )


def _without_gaps(field: Field, whole: Tensor) -> Tensor:
    """Write zeros outside the parts of the field."""
    if sum(math.prod(part.shape) for part in field.parts) < whole.numel():
        kept = torch.zeros_like(whole, dtype=torch.bool)
        for part in field.parts:
            if part.expert is None:
                rows = kept
            else:
                rows = kept[part.expert]
            rows[part.start : part.start + part.shape[0], : part.shape[-1]] = True
        # As uint8, since torch has no `masked_fill` for float8; zero has the same bits in both.
        whole.view(torch.uint8 if whole.itemsize == 1 else whole.dtype).masked_fill_(~kept, 0)
    return whole


def _noise(path: str, field: Field, like: Tensor, std: float, generator: torch.Generator) -> Tensor:
    noise = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    if path.endswith("_scale"):
        return noise.uniform_(0.5 * std / 16, 1.5 * std / 16, generator=generator)
    if field.dtype is torch.float8_e4m3fn:
        # Within float8_e4m3's range of ±448, and far above its smallest steps.
        return noise.normal_(0.0, 16.0, generator=generator)
    return noise.normal_(1.0 if "norm" in path else 0.0, std, generator=generator)


def random_model(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    stage: tuple[int, int] | None = None,
    shard: Share = WHOLE,
    name: str = "model",
    kv_dtype: torch.dtype | str | None = None,
) -> Model:
    """A model with random weights and without a tokenizer, for benchmarks and tests.

    Args:
        config: the whole model's configuration, from `load_config`, or
            `parse_config(PRESETS["tiny"], source="tiny")`.
        seed: as in `random_params`.
        device, dtype, stage, shard, kv_dtype: as in `weft.load`.
        name: the model's name. Ranks compare the name and the seed, instead of a checkpoint.

    Raises:
        DeviceError: a device that this machine does not have, or whose memory is too small.
        ProgramError: a stage that the model does not have.
        RequestError: a dtype that no decoder runs in.
    """
    call = f"random_model(config, seed={seed}, device={device!r}, dtype={dtype!r})"
    where = pick_device(device, call=call)
    kind = pick_dtype(dtype or config.dtype, call=call)
    index, num_stages = pick_stage(stage, call=call)
    layout = split_model(config, num_stages)[index]
    params = random_params(config, layout, seed=seed, device=where, dtype=kind, shard=shard)
    origin = Origin(f"random {name} {seed}", digest_params(params))
    kept = pick_kv_dtype(kv_dtype, call=call)
    return Model(
        config, params, None, Path(name), layout=layout, origin=origin, kv_dtype=kept, shard=shard
    )


def random_adapter(
    config: ModelConfig, names: Collection[str], *, rank: int, seed: int, std: float
) -> Adapter:
    """A random adapter for benchmarks and tests: normal with standard deviation `std`.

    Args:
        config: the base model's configuration.
        names: the linear layers that it changes, as in `Adapter.deltas`.
        rank: the rank of its matrices.
        seed, std: as in `random_params`.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = {
        name: part
        for i in range(config.num_layers)
        for name, (_, _, part) in adaptable(config, i).items()
    }
    deltas = {}
    for name in names:
        rows, columns = parts[name].shape
        a, b = (
            torch.randn(size, generator=generator, device="cpu") * std
            for size in ((rank, columns), (rows, rank))
        )
        deltas[name] = (a, b)
    return Adapter(deltas, Path(f"random {seed}"))
