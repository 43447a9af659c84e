"""A decode step of transformers' Llama, and a training step of LoRA adapters in it."""

from typing import Any

import torch
from torch import Tensor, nn

from weft.proofs.evidence.bench.modules.training import trained
from weft.proofs.evidence.bench.modules.variants import Call, Setting
from weft.torchapi.inductor import mark_static


def llama(setting: Setting) -> Any:
    """A Llama of Llama-3.2-1B's shape, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=setting.size(128256, 64),
        hidden_size=setting.size(2048, 32),
        intermediate_size=setting.size(8192, 64),
        num_hidden_layers=setting.size(16, 1),
        num_attention_heads=setting.size(32, 4),
        num_key_value_heads=setting.size(8, 2),
        head_dim=setting.size(64, 8),
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    return setting.built(lambda: LlamaForCausalLM(config), setting.half)


class Decoder(nn.Module):
    """A model with its cache: the next tokens, and the logits that choose them."""

    def __init__(self, model: Any, batch_size: int, length: int) -> None:
        from transformers import StaticCache

        super().__init__()
        self.model = model
        self.cache = StaticCache(model.config, max_cache_len=length)
        config = model.config
        self.cache.early_initialization(
            batch_size, config.num_key_value_heads, config.head_dim, model.dtype, model.device
        )

    def mark_static(self) -> None:
        """Tell torch.compile that the cache stays where it is. Otherwise it takes no CUDA graph,
        since the step writes to its inputs."""
        for layer in self.cache.layers:
            for value in vars(layer).values():
                if isinstance(value, Tensor):
                    mark_static(value)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(ids, past_key_values=self.cache).logits[:, -1]
        return logits.argmax(-1), logits


def decode(setting: Setting, rows: int) -> Call:
    """A step that decodes a token of each row, with a cache of 2,048 tokens."""
    model = llama(setting)
    decoder = Decoder(model, rows, setting.size(2048, 64))
    if not setting.is_weft:
        decoder.mark_static()
    ids = setting.tokens(rows, 1, vocab_size=model.config.vocab_size)
    return setting.inference(decoder, ids)


class LoRALinear(nn.Module):
    """A frozen linear layer, and the product of two small matrices, which train."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        device = linear.weight.device
        self.down = nn.Parameter(torch.randn(rank, linear.in_features, device=device) / rank)
        # Not zero, as it is usually, so that each part of the result counts in the check.
        self.up = nn.Parameter(torch.randn(linear.out_features, rank, device=device) / 100)

    def forward(self, x: Tensor) -> Tensor:
        down, up = (self.down.to(x.dtype), self.up.to(x.dtype))
        result: Tensor = self.linear(x) + 2 * nn.functional.linear(
            nn.functional.linear(x, down), up
        )
        return result


def lora(setting: Setting) -> Call:
    """A training step of adapters of rank 8 on the queries and the values, 2 x 512 tokens."""
    model = llama(setting).requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj = LoRALinear(attention.q_proj, setting.size(8, 2))
        attention.v_proj = LoRALinear(attention.v_proj, setting.size(8, 2))
    length = setting.size(512, 16)
    ids = setting.tokens(2, length, vocab_size=model.config.vocab_size)

    def loss(module: nn.Module, ids: Tensor) -> Any:
        return module(input_ids=ids, labels=ids, use_cache=False).loss

    return trained(setting, model, loss, ids, update="plain")
