"""Engines whose ranks share layers, beside one process: small models, the calls, and what they
return."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from weft.batches.sampling import SamplingParams
from weft.errors import WeftError
from weft.ops.requests import EMBEDDED
from weft.stages.adapters.adapter import Adapter
from weft.stages.choices import pick_experts
from weft.stages.config import ModelConfig, parse_config
from weft.stages.custom.functions import Layer
from weft.stages.custom.sown import sow
from weft.stages.layout import split_model
from weft.stages.model import Model
from weft.stages.random_weights import random_adapter, random_params
from weft.stages.shares import WHOLE, Share, adaptable
from weft.transforms.engine.engine import Engine
from weft.transforms.engine.options import EngineLimits, Speculation
from weft.transforms.engine.requests.prompts import EmbedsPrompt
from weft.transforms.pipelines.transports.distributed import Distributed

sys.path.insert(0, str(Path(__file__).parent))  # so that a rank finds this module by its name

SIZES: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {"architectures": ["Qwen2ForCausalLM"], "head_dim": None, "tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "images": {},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    },
}
WHOLE_EXPERTS = "whole experts", "whole experts in FP8"
KINDS["whole experts"] = KINDS["experts"]
KINDS["whole experts in FP8"] = KINDS["experts"] | {  # by columns 4 ranks could not share them
    "hidden_size": 128,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
PROMPTS = ([1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12], [3, 3])
LIMITS = EngineLimits(
    max_num_reqs=4, max_num_tokens=16, max_model_len=48, page_size=4, num_pages=40
)


def config_of(kind: str) -> ModelConfig:
    fields = SIZES | KINDS[kind]
    config = parse_config({name: x for name, x in fields.items() if x is not None}, source=kind)
    if kind in WHOLE_EXPERTS:
        return pick_experts("whole", config, 2, call="")
    if kind != "images":
        return config
    return attrs.evolve(config, rope=attrs.evolve(config.rope, mrope_section=(1, 1, 2)))


def prompt_of(prompt: Any) -> Any:
    """A prompt: token ids as they are, or an image between two texts."""
    if isinstance(prompt, list):
        return prompt
    ids = [1, 2, 3, *[EMBEDDED] * 4, 5]
    with torch.device("cpu"):
        embeds = torch.randn(
            len(ids), SIZES["hidden_size"], generator=torch.Generator().manual_seed(0)
        )
        places = torch.tensor(
            [[0, 1, 2, 3, 3, 3, 3, 5], [0, 1, 2, 3, 3, 4, 4, 5], [0, 1, 2, 3, 4, 3, 4, 5]]
        )
    return EmbedsPrompt(ids, embeds, places if prompt == "image" else None)


def model_of(
    kind: str,
    stage: tuple[int, int] = (0, 1),
    shard: Share = WHOLE,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    **kinds: Any,
) -> Model:
    """A share of a random model, which is without a checkpoint, on torch's default device."""
    config = config_of(kind)
    device = torch.get_default_device()
    layout = split_model(config, stage[1])[stage[0]]
    params = random_params(
        config, layout, seed=seed, device=device, dtype=dtype, std=0.3, shard=shard
    )
    return Model(config, params, None, Path("a small model"), layout=layout, shard=shard, **kinds)


def adapters_of(kind: str, seed: int = 0) -> dict[str, Adapter]:
    """One adapter of attention alone, and one of all that can be adapted."""
    config = config_of(kind)
    names = [name for layer in range(config.num_layers) for name in adaptable(config, layer)]
    parts = {"attention": [name for name in names if "self_attn" in name], "all": names}
    return {
        n: random_adapter(config, targets, rank=2, seed=seed + i, std=0.3)
        for i, (n, targets) in enumerate(parts.items())
    }


def state_dict(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a random model, by transformers' names."""
    from weft.stages.checkpoints.reading import places

    model = model_of(kind, seed=seed)
    return {
        name: place.view for name, place in places(model.params, model.config, model.layout).items()
    }


@attrs.frozen
class Asked:
    """One engine and what is asked of it.

    Args:
        kind: of the model, one of `KINDS`.
        options: the engine's.
        requests: for all, and of each prompt.
        model: options of the model.
        adapters: whether requests have adapters.
        updates: `params`, `adapters` or both, which change before the prompts are asked a second
            time.
        twice: whether the prompts are asked a second time, which finds them in the prefix cache.
        draft: whether a second model drafts.
        beside: whether a second model reads beside, whose logits are subtracted.
        changed: whether the logits are changed by what each request has of its own, and by what a
            layer captured.
        masked: whether requests have masks.
    """

    kind: str = "qwen3"
    options: Mapping[str, Any] = attrs.field(factory=dict)
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    limits: EngineLimits = LIMITS
    model: Mapping[str, Any] = attrs.field(factory=dict)
    prompts: tuple[Any, ...] = PROMPTS
    adapters: bool = False
    updates: tuple[str, ...] = ()
    twice: bool = False
    draft: bool = False
    beside: bool = False
    changed: bool = False
    masked: bool = False


def run(case: Asked, model: Model, **split: Any) -> tuple[list[Any], Any]:
    """The tokens, logprobs and prompt logprobs of each request, and the engine's counts."""
    options: dict[str, Any] = dict(case.options)
    if case.draft:
        options["speculation"] = Speculation(2, model=model_of(case.kind, seed=2))
    if case.beside:
        model = model.with_stages(beside={"other": model_of(case.kind, seed=3)}, logits=contrast)
    if case.changed:
        named = {"extras": {"scale": torch.tensor(1.0)}, "captures": {"seen": torch.tensor(0.0)}}
        model = model.with_stages(**named, layers={0: seeing}, logits=scaled)
    adapters = adapters_of(case.kind) if case.adapters else None
    engine = Engine(
        model, case.limits, seed=0, num_logprobs=3, adapters=adapters, **options, **split
    )
    ordered_tracks: list[Any] = []
    for turn in range(2 if case.twice or case.updates else 1):
        if turn and case.updates:
            engine.update(
                state_dict(case.kind, 4) if "params" in case.updates else None,
                adapters=adapters_of(case.kind, 5) if "adapters" in case.updates else None,
            )
        for index, prompt in enumerate(case.prompts):
            sampling = {
                "temperature": 0.0 if index % 2 else 1.0,
                "seed": index,
                "logprobs": 3,
            } | dict(case.sampling)
            adapter = [None, "attention", "all"][(index + 1) % 3] if case.adapters else None
            request_options: dict[str, Any] = {
                "adapter": adapter,
                "mask": only_even if case.masked else None,
            }
            request_options["extras"] = (
                {"scale": torch.tensor(0.5 + index / 4)} if case.changed else None
            )
            engine.add(
                prompt_of(prompt),
                SamplingParams(**sampling),
                max_tokens=8,
                id=f"{turn} {index}",
                **request_options,
            )
        tracks = {output.id: output.track for output in engine}
        ordered_tracks += [tracks[f"{turn} {index}"] for index in range(len(case.prompts))]
    stats = engine.stats()
    counts = {
        name: getattr(stats, name)
        for name in ("tokens", "prefix_tokens", "preempted", "pages_held")
    }
    return [
        (t.token_ids, t.logprobs, t.top_logprobs, t.prompt_logprobs) for t in ordered_tracks
    ], counts


def only_even(said: Any) -> list[int]:
    return [token for token in range(37) if token % 2 == len(said) % 2]


def contrast(
    logits: torch.Tensor, rows: torch.Tensor, extras: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    return logits - 0.5 * extras["other"]


def scaled(
    logits: torch.Tensor, rows: torch.Tensor, extras: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    places = torch.arange(logits.shape[1]) * extras["seen"][:, None]
    return logits * extras["scale"][:, None] + places.sin()


def seeing(layer: Layer) -> Layer:
    def run(params: Any, kv_pages: Any, batch: Any, tables: Any, hidden: Any) -> Any:
        hidden, kv_pages = layer(params, kv_pages, batch, tables, hidden)
        sow("seen", hidden.mean(-1))
        return hidden, kv_pages

    return run


def other_weights(what: str) -> str:
    """The error of a rank of two, where rank 1 has something else."""
    torch.set_num_threads(1)
    transport = Distributed(timeout=10)
    rank = transport.rank
    try:
        model = model_of("qwen3", shard=(rank, 2), seed=1 + rank if what == "seed" else 1)
        if what == "experts":
            config = pick_experts(["columns", "whole"][rank], config_of("experts"), 2, call="")
            model = attrs.evolve(model_of("experts", shard=(rank, 2)), config=config)
        if what == "share":
            model = attrs.evolve(model, shard=(1 - rank, 2))
        engine = Engine(model, LIMITS, tensor=2, transport=transport, seed=0, graph="none")
        if what == "whole parameters":
            engine.update(model_of("qwen3").params)
        engine.add([1, 2, 3], max_tokens=2)
        for _ in engine:
            pass
    except WeftError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        transport.close()
    return "no error"


def run_rank(every: Mapping[str, Asked], tensor: int, backend: Any = "gloo") -> dict[str, Any]:
    """A rank's part of each engine."""
    torch.set_num_threads(1)
    transport = Distributed(backend=backend, timeout=60)
    results = {}
    if transport.device.type != "cpu":  # a default device slows down every call of torch
        torch.set_default_device(transport.device)
    stages = transport.num_ranks // tensor
    for name, case in every.items():
        place = (transport.rank // tensor, stages), (transport.rank % tensor, tensor)
        model = model_of(case.kind, *place, **case.model)
        results[name] = run(case, model, pipeline=stages, tensor=tensor, transport=transport)
    transport.close()
    return results
