"""Modules of transformers, diffusers and timm as stages: equal to themselves in bits, in a graph
too, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusal import refused
from torch import Tensor

from weft.errors import CaptureError
from weft.proofs import assert_equal
from weft.stages.custom.module import from_module
from weft.transforms.graphs.graphify import graphify
from weft.values.donation import clone

LAW = "a stage is its module"
IDS = torch.arange(14).view(2, 7) % 11 + 1
TEXT = {"input_ids": IDS, "attention_mask": (torch.arange(7) < torch.tensor([[7], [5]])).long()}
IMAGES = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
CONV = {"hidden_sizes": [8, 16], "depths": [1, 1]}

TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", SMALL, {**TEXT, "use_cache": False}),
    "MistralForCausalLM": (
        "MistralConfig",
        {**SMALL, "num_key_value_heads": 2, "sliding_window": 4},
        {**TEXT, "use_cache": False},
    ),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
        {**TEXT, "use_cache": False},
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SMALL, {**TEXT, "use_cache": False}),
    "BertForMaskedLM": ("BertConfig", SMALL, {**TEXT, "labels": IDS}),
    "DebertaV2Model": (
        "DebertaV2Config",
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        TEXT,
    ),
    "XLNetModel": (
        "XLNetConfig",
        {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
        {**TEXT, "use_mems": False},
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        {**TEXT, "decoder_input_ids": IDS, "use_cache": False},
    ),
    "MambaForCausalLM": (
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        {"input_ids": IDS, "use_cache": False},
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        {**SMALL, "image_size": 32, "patch_size": 8},
        IMAGES,
    ),
    "SwinModel": (
        "SwinConfig",
        {
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "image_size": 32,
            "patch_size": 2,
        },
        IMAGES,
    ),
    "ResNetModel": ("ResNetConfig", {**CONV, "embedding_size": 8, "layer_type": "basic"}, IMAGES),
    "ConvNextModel": ("ConvNextConfig", {**CONV, "num_stages": 2, "drop_path_rate": 0.3}, IMAGES),
}


def moved(inputs: dict[str, Any], by: int) -> dict[str, Any]:
    """Inputs of the same shapes with other values: other tokens, brighter images."""
    floats = {
        name: x + 0.1 * by
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    ids = {
        name: (inputs[name] + by) % 11 + 1
        for name in ("input_ids", "decoder_input_ids", "labels")
        if name in inputs
    }
    return {**inputs, **floats, **ids}


def check_equal_to_itself(
    make: Callable[[], Any], inputs: dict[str, Any], training: bool, device: str = "cpu"
) -> None:
    """Three calls of the stage and of its graph against the module: outputs, buffers, and the
    numbers drawn."""
    torch.manual_seed(0)
    module = make().to(device).train(training).requires_grad_(False)
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    module_stage = from_module(copy.deepcopy(module))
    graph = graphify(module_stage.stage)
    for way in (module_stage.stage, graph):
        state = clone(module_stage.state)
        reference = copy.deepcopy(module)
        for seed in range(3):
            torch.manual_seed(seed)
            expected = reference(**moved(inputs, seed))
            drawn = torch.rand(1, device=device)
            torch.manual_seed(seed)
            state, out = way(module_stage.params, state, moved(inputs, seed), None)
            assert_equal(LAW, (out, torch.rand(1, device=device)), (expected, drawn))
            assert_equal(f"{LAW}: buffers", state, dict(reference.named_buffers()))
    assert (graph.cache_info().captures, graph.cache_info().eager) == (1, 0)


@pytest.mark.one_of(13, 2)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_of_transformers(name: str, training: bool) -> None:
    make, inputs = of_transformers(name)
    check_equal_to_itself(make, inputs, training)


def of_transformers(name: str) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A small model, and inputs for it."""
    transformers = pytest.importorskip("transformers")
    config, arguments, inputs = TRANSFORMERS[name]
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 0}
    model_config = getattr(transformers, config)(**arguments, **ends)
    return lambda: getattr(transformers, name)(model_config), inputs


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM", "ResNetModel"])
def test_of_transformers_on_a_gpu(name: str, training: bool) -> None:
    """Models whose eager run has the same kernels as the captured one, with a padded mask or
    without any. (A ViT's has not: `torch.cuda.graph` of the module itself differs in last bits.)"""
    make, inputs = of_transformers(name)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        check_equal_to_itself(make, inputs, training, "cuda")


def test_what_a_graph_cannot_hold_of_transformers_is_refused_with_a_remedy() -> None:
    transformers = pytest.importorskip("transformers")
    module_stage = from_module(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)))
    with pytest.raises(
        CaptureError,
        match=r"(past_key_values|cache)'. is of class DynamicCache.*\n.*instead: call the model with use_cache=False",
    ):
        graphify(module_stage.stage)(module_stage.params, module_stage.state, TEXT, None)
    longformer = transformers.LongformerConfig(
        **SMALL, attention_window=4, max_position_embeddings=64
    )
    module_stage = from_module(transformers.LongformerModel(longformer))
    # Where a mask chooses what one number is written to, torch 2.15 needs no shape that depends on
    # data.
    why = r"(a boolean mask|Tensor\.item).*\n.*modeling_longformer.*\n.*instead: .*torch\.where"
    with pytest.raises(CaptureError, match=why):
        graphify(module_stage.stage)(module_stage.params, module_stage.state, TEXT, None)


def test_states_in_attributes_and_draws_of_numpy_in_transformers_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    arguments = {**SMALL, "num_hidden_layers": 3, "intermediate_size": 96, "lru_width": 32}
    module_stage = from_module(
        transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**arguments))
    )
    problem = (
        "model.layers.0.temporal_block.rg_lru.recurrent_states of the module changes while it runs,"
        " <any>"
    )
    with refused(
        CaptureError,
        "graphify(stage RecurrentGemmaForCausalLM)",
        problem,
        "return it, or register_buffer(<any>",
    ):
        graphify(module_stage.stage)(
            module_stage.params, module_stage.state, {**TEXT, "use_cache": False}, None
        )
    config = transformers.BigBirdConfig(
        **SMALL, block_size=4, num_random_blocks=1, max_position_embeddings=64
    )
    module_stage = from_module(transformers.BigBirdModel(config).train())
    problem = "a draw from numpy.random, which a replay does not repeat"
    instead = "a draw from torch: torch.rand(...)"
    with refused(CaptureError, "graphify(stage BigBirdModel)", problem, instead):
        graphify(module_stage.stage)(
            module_stage.params, module_stage.state, {"input_ids": IDS.repeat(1, 10)[:, :64]}, None
        )


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "time", [torch.tensor(3), torch.tensor([3, 900])], ids=["one time", "a time each"]
)
def test_a_unet_of_diffusers(training: bool, time: Tensor) -> None:
    diffusers = pytest.importorskip("diffusers")
    arguments = {
        "sample_size": 16,
        "block_out_channels": (32, 32),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    inputs = {"sample": IMAGES["pixel_values"][..., :16, :16], "timestep": time}
    check_equal_to_itself(lambda: diffusers.UNet2DModel(**arguments), inputs, training)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_tiny_patch16_224", {"img_size": 32, "depth": 2, "proj_drop_rate": 0.1}),
        ("resnet18", {}),
        ("convnext_atto", {"drop_path_rate": 0.3}),
    ],
)
def test_of_timm(name: str, arguments: Any, training: bool) -> None:
    timm = pytest.importorskip("timm")
    check_equal_to_itself(
        lambda: timm.create_model(name, **arguments), {"x": IMAGES["pixel_values"]}, training
    )
