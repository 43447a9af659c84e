"""GGUF files of small transformers models, written by llama.cpp's package `gguf`."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from theirs import CLASSES

# Sizes whose rows are whole blocks of each type.
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 5,
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}),
    "llama-tied": ("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", "LlamaForCausalLM", {"attention_bias": True}),
    "mistral": ("llama", "MistralForCausalLM", {"head_dim": 64, "sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3-moe": ("qwen3moe", "Qwen3MoeForCausalLM", {"head_dim": 64, **EXPERTS}),
}
Packed = tuple[np.ndarray[Any, Any], GGMLQuantizationType]
Kind = Callable[[np.ndarray[Any, Any]], Packed]


def scrambled(name: str, **fields: Any) -> Any:
    """A transformers model whose norms and biases too are random, so that no two tensors are alike."""
    _, architecture, overrides = MODELS[name]
    config_class, model_class = CLASSES[architecture]
    model = model_class(config_class(**SIZES | overrides | fields)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(generator=generator).mul_(0.5)
    return model


def stored_tensors(model: Any, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a model as llama.cpp's converter names and arranges them."""
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)

    def keep(name: str, values: np.ndarray[Any, Any]) -> None:
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        tensors[stored] = values

    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        module, _, kind = name.rpartition(".")
        values = tensor.float().numpy()
        if kind == "gate_up_proj":
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                keep(f"{module}.{part}_proj.weight", half.copy())
            continue
        if architecture == "llama" and module.endswith((".q_proj", ".k_proj")):
            heads = (
                model.config.num_attention_heads
                if "q_proj" in module
                else model.config.num_key_value_heads
            )
            # LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        keep(f"{name}.weight" if kind == "down_proj" else name, values)
    return tensors


def metadata_of(model: Any, architecture: str) -> dict[str, Any]:
    """The metadata of a model's configuration, as the converter writes them."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    if architecture == "llama":
        metadata |= {"rope.dimension_count": head_dim, "vocab_size": config.vocab_size}
    if architecture == "qwen3moe":
        metadata |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    named: dict[str, Any] = {f"{architecture}.{name}": value for name, value in metadata.items()}
    return named | {"tokenizer.ggml.eos_token_id": config.eos_token_id}


def write_file(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Packed]
) -> None:
    """Write a GGUF: ints as uint32, and numbers, texts, flags and lists by their type."""
    writer = GGUFWriter(path, architecture)
    for name, value in metadata.items():
        kinds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        if name == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            kinds[type(value)](name, value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized(kind: GGMLQuantizationType) -> Kind:
    """Packs matrices in a type, and vectors in F32, as llama.cpp does."""

    def pack(values: np.ndarray[Any, Any]) -> Packed:
        qtype = kind if values.ndim > 1 else GGMLQuantizationType.F32
        return quants.quantize(values, qtype), qtype

    return pack


# The bytes of a block at which its scales begin, which are float16 (ggml-common.h).
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(kind: GGMLQuantizationType, seed: int = 0) -> Kind:
    """Makes matrices of random blocks, of a type that the package unpacks and does not pack."""
    drawn = np.random.default_rng(seed)

    def pack(values: np.ndarray[Any, Any]) -> Packed:
        if values.ndim == 1:
            return values, GGMLQuantizationType.F32
        block, size = GGML_QUANT_SIZES[kind]
        blocks = drawn.integers(0, 256, (math.prod(values.shape) // block, size), np.uint8)
        for start in _SCALES[kind.name]:
            scales = (drawn.standard_normal((len(blocks), 1)) * 2e-3).astype("<f2")
            blocks[:, start : start + 2] = scales.view(np.uint8)
        return blocks.reshape(*values.shape[:-1], -1), kind

    return pack


def write_model(path: Path, name: str, model: Any, pack: Kind, **more: Any) -> dict[str, Packed]:
    """Write a model, with more metadata, and return its tensors."""
    architecture = MODELS[name][0]
    tensors = {
        tensor_name: pack(values)
        for tensor_name, values in stored_tensors(model, architecture).items()
    }
    write_file(path, architecture, metadata_of(model, architecture) | more, tensors)
    return tensors


def unpacked(tensors: Mapping[str, Packed]) -> dict[str, Packed]:
    """The same tensors in F32, by the package."""
    return {
        name: (quants.dequantize(values, kind), GGMLQuantizationType.F32)
        for name, (values, kind) in tensors.items()
    }
