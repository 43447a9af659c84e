"""Batch-invariant models of every kind, and loads of their engines."""

import functools
from pathlib import Path
from typing import Any

import attrs
import torch
from hypothesis import strategies as st

from weft.ops.requests import EMBEDDED
from weft.proofs._strategies.engine.embeds import images
from weft.proofs._strategies.engine.engines import VOCABULARY, Call, Load, loads
from weft.stages.config import parse_config
from weft.stages.layout import split_model
from weft.stages.model import Model
from weft.stages.random_weights import random_params
from weft.transforms.engine.requests.prompts import EmbedsPrompt, ids_of

_LAYERS = 4
_STD = 0.2
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
_FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
}
# The configuration fields of the batch-invariant models, by kind. Each architecture has a kind.
INVARIANT_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "Llama with a scaled rope": {
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "Qwen2 with biases": {"architectures": ["Qwen2ForCausalLM"]},
    "Mistral with a window": {"architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "Qwen2-VL with images": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
        "eos_token_id": None,
    },
    "experts": {"architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS},
    "FP8": {"architectures": ["Qwen3ForCausalLM"], **_FP8},
    "experts in FP8": {"architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS, **_FP8},
    "float16": {"architectures": ["LlamaForCausalLM"]},
    "a cache in FP8": {"architectures": ["Qwen3ForCausalLM"]},
}
_DTYPES = {"FP8": torch.bfloat16, "experts in FP8": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {"a cache in FP8": torch.float8_e4m3fn}
# The most tokens of a prompt together with its completion.
MAX_LEN = 640


@functools.cache
def invariant_model(kind: str) -> Model:
    """A batch-invariant model, one of `INVARIANT_MODELS`, wide enough that its sums may be taken in
    several orders.

    Its weights are large: a logprob is rounded coarsely, so differences between small logits would
    seldom show in it."""
    config = parse_config(
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": MAX_LEN,
            "tie_word_embeddings": False,
            **INVARIANT_MODELS[kind],
        },
        source=f"a model of {kind}",
    )
    (whole,) = split_model(config, 1)
    params = random_params(
        config, whole, seed=0, device="cpu", dtype=_DTYPES.get(kind, torch.float32), std=_STD
    )
    return Model(config, params, None, Path(kind), kv_dtype=_KV_DTYPES.get(kind)).with_stages(
        batch_invariant=True
    )


@attrs.frozen
class InvariantLoad:
    """A batch-invariant model, and the load of an engine that serves it.

    Args:
        kind: the model, one of `INVARIANT_MODELS`.
        prompts: for each call of the load, a prompt with positions, and perhaps an image, that
            replaces the call's prompt; or None to keep it.
        has_threads: whether each stage runs in its own thread.
    """

    kind: str
    load: Load
    prompts: tuple[EmbedsPrompt | None, ...]
    has_threads: bool

    def prompt(self, index: int) -> tuple[int, ...] | EmbedsPrompt:
        """The prompt of a call."""
        prompt = self.prompts[index]
        if prompt is None:
            return self.load.calls[index].prompt
        return prompt


@st.composite
def invariant_loads(draw: st.DrawFn, stages: tuple[int, int] = (1, _LAYERS)) -> InvariantLoad:
    """A model, and a load of 1 to 4 stages, in threads or not.

    If the model has mRoPE, most prompts have positions, and most of these an image. For any other
    model, some prompts are long.

    Args:
        stages: the fewest and the most stages.
    """
    kind = draw(st.sampled_from(tuple(INVARIANT_MODELS)))
    config = invariant_model(kind).config
    prompts = list[EmbedsPrompt | None]()
    load = draw(loads(adapters=config.fp8 is None, stages=stages))
    if config.rope.mrope_section is None and draw(st.sampled_from((False, False, False, True))):
        load = draw(_lengthened(load))
    for index, call in enumerate(load.calls):
        has_image = config.rope.mrope_section is not None and draw(st.integers(0, 3)) < 3
        prompts.append(
            # Two images for all prompts, so that some prompts have the same one and share pages.
            draw(images(call.prompt, config.hidden_size, index % 2)) if has_image else None
        )
    # Each request has a count: its likeliest tokens must not depend on a neighbour's count.
    counts = [draw(st.sampled_from((None, 0, 1, 3))) for _ in load.calls]
    calls = tuple(map(_asking, load.calls, counts, prompts))
    # In a planted bug only the main thread is batch invariant.
    has_threads = load.pipeline > 1 and draw(st.booleans())
    return InvariantLoad(kind, attrs.evolve(load, calls=calls), tuple(prompts), has_threads)


@st.composite
def _lengthened(draw: st.DrawFn, load: Load) -> Load:
    """The load with the same long text in front of one prompt or all, in chunks of several sizes.

    It drafts by prompt lookup, if at all, because the draft models take only short prompts."""
    longer = draw(st.sampled_from((270, 70, 270, 530)))
    index = draw(st.sampled_from((0, 0, None)))
    text = tuple(at * at % 11 for at in range(longer))
    calls = tuple(
        attrs.evolve(call, prompt=(*text, *call.prompt)) if index in (None, at) else call
        for at, call in enumerate(load.calls)
    )
    longest = max(len(call.prompt) + call.max_tokens for call in calls)
    limits = load.limits
    page_size = 16
    # The long prompts come in several chunks, in one or two, or whole.
    more_tokens = draw(st.sampled_from((90, 300, MAX_LEN)))
    limits = attrs.evolve(
        limits,
        max_num_tokens=limits.max_num_reqs + more_tokens,
        max_model_len=longest,
        page_size=page_size,
        num_pages=-(-longest // page_size) + draw(st.sampled_from((0, 1, 3, 100))),
    )
    drafts = load.drafts
    if drafts is not None and isinstance(drafts.way, str):
        drafts = attrs.evolve(drafts, way=(1, 3))
    return attrs.evolve(load, calls=calls, limits=limits, drafts=drafts)


def _asking(call: Call, logprobs: int | None, prompt: EmbedsPrompt | None) -> Call:
    """The call, made to ask for the logprobs of this many top tokens.

    If it asked for prompt logprobs, these get the same number, unless the prompt has embeddings,
    which have no logprobs."""
    has_none = prompt is not None and EMBEDDED in ids_of(prompt)
    if has_none or call.sampling.prompt_logprobs is None:
        of_prompt = None
    else:
        of_prompt = logprobs
    return attrs.evolve(
        call, sampling=attrs.evolve(call.sampling, logprobs=logprobs, prompt_logprobs=of_prompt)
    )
