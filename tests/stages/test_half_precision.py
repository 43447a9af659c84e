"""Logprobs in bfloat16 are no farther from those of float32 than transformers' are: of random
weights, with the dimensions of Qwen3-0.6B and of a small mixture of experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import weft
from weft.stages.random_weights import PRESETS

_TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 997}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
_EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "vocab_size": 32768,
    "moe_intermediate_size": 512,
}
CONFIGS: dict[str, Any] = {
    "dense": Qwen3Config(**PRESETS["qwen3-0.6b"]),
    "experts": Qwen3MoeConfig(**_HEADS, **_EXPERTS, **_LARGE),
    "tiny dense": Qwen3Config(**_HEADS, **_TINY),
    "tiny experts": Qwen3MoeConfig(**_HEADS, **_EXPERTS, **_TINY, moe_intermediate_size=64),
}
LENGTHS = 100, 200, 300, 500


def logprobs(model: Any, prompts: list[list[int]], device: str) -> Tensor:
    """The logprob that transformers gives each token of the prompts, without their first ones."""
    prompt_logprobs = []
    for ids in prompts:
        input_ids = torch.tensor([ids], device=device)
        with torch.no_grad():
            said = model(input_ids).logits[0, :-1].float().log_softmax(-1)
        prompt_logprobs.append(said.gather(1, input_ids[0, 1:, None])[:, 0].cpu())
    return torch.cat(prompt_logprobs)


@pytest.mark.one_of(4, 2)
@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param("tiny dense", "cpu"),
        pytest.param("tiny experts", "cpu"),
        pytest.param("dense", "cuda", marks=pytest.mark.gpu),
        pytest.param("experts", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_bfloat16_errs_no_more_than_transformers(name: str, device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = CONFIGS[name]
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS
    ]
    exact, theirs = (  # each loaded anew: `.to(bfloat16)` would round the rotary frequencies
        logprobs(
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).to(device).eval(),
            prompts,
            device,
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    model = weft.load(tmp_path, device, "bfloat16")
    sampling = weft.SamplingParams(temperature=0, prompt_logprobs=0)
    completions = weft.generate(model, prompts, max_tokens=1, sampling=sampling)
    ours = torch.cat([torch.tensor(completion.prompt_logprobs) for completion in completions])
    our_error, their_error = ((one - exact).abs().mean().item() for one in (ours, theirs))
    print(
        f"{name}, {len(exact)} tokens: mean error {our_error:.4f}, transformers {their_error:.4f}"
    )
    assert 0 < our_error <= 1.05 * their_error
