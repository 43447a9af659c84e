"""Transformers models to save, for the tests of code that reads them."""

from typing import Any

import torch
from theirs import CLASSES

from weft.stages.config import ModelConfig
from weft.stages.layout import StageLayout, split_layers
from weft.stages.params import DecoderParams
from weft.values.trees import leaves_with_names

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "mlp_only_layers": [1, 4],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biased": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "qwen3-tied": (
        "Qwen3ForCausalLM",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"head_dim": 8, **EXPERTS}),
}


def whole(config: ModelConfig) -> StageLayout:
    return split_layers(config.num_layers, 1)[0]


def scrambled(name: str) -> Any:
    """A transformers model whose norms and biases too are random, so that no two tensors are alike."""
    architecture, fields = MODELS[name]
    config_class, model_class = CLASSES[architecture]
    model = model_class(config_class(**SMALL, **fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(generator=generator)
    return model


def assert_same(ours: DecoderParams, theirs: DecoderParams) -> None:
    pairs = zip(leaves_with_names(ours), leaves_with_names(theirs), strict=True)
    for (path, left), (other, right) in pairs:
        assert path == other
        assert (left is None) == (right is None)
        if left is not None:
            assert left.dtype == right.dtype
            assert torch.equal(left, right), path
