"""Checkpoints in FP8 blocks, as Hugging Face writes them: loaded (with ragged edges), run, and
refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import weft
from weft.errors import CheckpointError, ConfigError
from weft.ops.products.fp8 import dequantize_weight
from weft.stages.checkpoints.formats import load_config, load_params
from weft.stages.config import parse_config
from weft.stages.layer_fields import layer_fields, row_starts
from weft.stages.layout import split_layers
from weft.stages.params import LayerParams, slice_params
from weft.stages.random_weights import random_params
from weft.transforms.graphs.ladder import MODES
from weft.values.trees import leaves_with_names

FP8 = torch.float8_e4m3fn
FORMAT = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 160,
    "intermediate_size": 150,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 130,
    "mlp_only_layers": [1],
}
SKIPPED = ["lm_head", "model.layers.0.mlp.gate", "model.layers.2"]


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weights block by block, and return them with their scales."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    out = torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = weight[place].abs().max() / 448
            out[place] = weight[place] / scale[i, j]
    return out.to(FP8), scale


def write(folder: Path, kind: str, scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write a checkpoint in FP8, and return the values of its tensors in float32."""
    torch.manual_seed(3)
    model = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, attention_bias=True)),
        "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS)),
    }[kind]()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.25 if tensor.dim() == 1 else 0.1)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**FORMAT, "modules_to_not_convert": SKIPPED}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    values = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        converted = name.endswith("_proj.weight") and not name.startswith("model.layers.2.")
        tensors[name] = values[name] = tensor
        if converted:
            tensors[name], scale = in_blocks(tensor)
            tensors[f"{name}_scale_inv"] = scale.to(scale_dtype)
            values[name] = dequantize_weight(tensors[name], scale.to(scale_dtype).float())
    save_file(tensors, folder / "model.safetensors")
    return values


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with an FP8 checkpoint, and its tensors' values."""
    folder = tmp_path_factory.mktemp("fp8")
    return folder, write(folder, request.param)


def projections(layer: LayerParams) -> dict[str, Tensor]:
    """A layer's projections in float32, with the gaps between their parts."""
    weights = {}
    for name in ("qkv", "o", "gate_up", "down"):
        weight = getattr(layer, f"{name}_proj")
        scale = getattr(layer, f"{name}_scale")
        weights[name] = weight.float() if scale is None else dequantize_weight(weight, scale)
    return weights


def test_every_block_and_every_ragged_edge_is_loaded(written: Any) -> None:
    folder, values = written
    config = load_config(folder)
    params = load_params(folder, config, split_layers(3, 1)[0])
    for i, layer in enumerate(params.layers):
        fp8 = i < 2
        ours = projections(layer)
        prefix = f"model.layers.{i}"
        assert (layer.qkv_proj.dtype == FP8) == (layer.down_scale is not None) == fp8
        q, k, v, end = row_starts((144, 72, 72), fp8)
        assert ours["qkv"].shape == (end, 160)
        for part, start, rows in (("q", q, 144), ("k", k, 72), ("v", v, 72)):
            theirs = values[f"{prefix}.self_attn.{part}_proj.weight"]
            assert torch.equal(ours["qkv"][start : start + rows], theirs)
            assert not ours["qkv"][start + rows : [k, v, end]["qkv".index(part)]].any()
        experts = [""] if layer.router is None else [f".experts.{e}" for e in range(4)]
        for e, expert in enumerate(experts):
            gate_up, down = (
                x if layer.router is None else x[e] for x in (ours["gate_up"], ours["down"])
            )
            inner = values[f"{prefix}.mlp{expert}.up_proj.weight"].shape[0]
            gate, up = gate_up.chunk(2)
            assert gate.shape[0] == down.shape[1] == (256 if fp8 else inner)
            for name, tensor in (
                ("gate", gate[:inner]),
                ("up", up[:inner]),
                ("down", down[:, :inner]),
            ):
                assert torch.equal(tensor, values[f"{prefix}.mlp{expert}.{name}_proj.weight"])
            assert not gate[inner:].any()
            assert not up[inner:].any()
            assert not down[:, inner:].any()


def test_scales_of_another_float_are_cast(tmp_path: Path) -> None:
    values = write(tmp_path, "qwen3", torch.bfloat16)
    params = load_params(
        tmp_path, load_config(tmp_path), split_layers(3, 1)[0], dtype=torch.bfloat16
    )
    layer = params.layers[0]
    assert layer.o_scale is not None
    assert (layer.o_scale.dtype, layer.o_proj.dtype, layer.input_layernorm.dtype) == (
        torch.float32,
        FP8,
        torch.bfloat16,
    )
    assert torch.equal(projections(layer)["o"], values["model.layers.0.self_attn.o_proj.weight"])


def without_quantization(folder: Path, values: dict[str, Tensor], into: Path) -> weft.Model:
    """The same values as a checkpoint in float32."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config))
    save_file(values, into / "model.safetensors")
    return weft.load(into, "cpu")


def test_the_model_is_near_the_one_without_quantisation(written: Any, tmp_path: Path) -> None:
    """Logprobs differ by the effect of rounding activations to 3 bits of mantissa; the bound is
    five times the observed difference."""
    folder, values = written
    ours = weft.load(folder, "cpu")
    plain = without_quantization(folder, values, tmp_path)
    prompts = [[i, 2 * i, 63 - i] for i in range(1, 17)]
    our_completions, theirs = (
        weft.generate(model, prompts, max_tokens=1) for model in (ours, plain)
    )
    same = [
        (a.logprobs[0], b.logprobs[0])
        for a, b in zip(our_completions, theirs, strict=True)
        if a.token_ids == b.token_ids
    ]
    assert len(same) >= 8
    differences = torch.tensor([a - b for a, b in same]).abs()
    assert 1e-5 < float(differences.mean()) < 0.25
    assert ours.dtype == torch.float32


@pytest.mark.one_of(12, 4)
@pytest.mark.parametrize("mode", MODES)
def test_modes_and_splits_agree(written: Any, mode: str) -> None:
    folder, _ = written
    model = weft.load(folder, "cpu")
    prompts = [[1, 2, 3], [4], [5, 6]]
    expected = weft.generate(model, prompts, max_tokens=5)
    for pipeline in (1, 2, 3):
        completions = weft.generate(model, prompts, max_tokens=5, pipeline=pipeline, graph=mode)
        assert [one.token_ids for one in completions] == [one.token_ids for one in expected]
        for a, b in zip(completions, expected, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_what_a_checkpoint_lacks_or_has_too_much(tmp_path: Path) -> None:
    write(tmp_path, "qwen3")
    config, (whole,) = load_config(tmp_path), split_layers(3, 1)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def refused(**changes: Tensor | None) -> str:
        kept = {**tensors, **{f"{name}{key}": value for key, value in changes.items()}}
        save_file({k: v for k, v in kept.items() if v is not None}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            load_params(tmp_path, config, whole)
        return caught.value.problem

    assert refused(_scale_inv=None) == f"the checkpoint has no {name}_scale_inv"
    problem = f"{name}_scale_inv in model.safetensors is F32 (1, 2)"
    assert (
        refused(_scale_inv=torch.ones(1, 2))
        == f"{problem}, and config.json makes it (2, 2) of F16, BF16, F32, F64"
    )
    problem = f"{name} in model.safetensors is F32 (150, 160)"
    assert (
        refused(**{"": torch.ones(150, 160)})
        == f"{problem}, and config.json makes it (150, 160) of F8_E4M3"
    )
    unexplained = "and no field of config.json explains that"
    assert refused(_scale=torch.ones(2, 2)) == f"the checkpoint has {name}_scale, {unexplained}"


@pytest.mark.parametrize(
    ("skipped", "problem"),
    [
        (
            "model.layers.0.self_attn.k_proj",
            "self_attn.q_proj in FP8 and model.layers.0.self_attn.k_proj not,",
        ),
        (
            "model.layers.0.mlp.experts.2",
            "experts.0.gate_proj in FP8 and model.layers.0.mlp.experts.2.gate_proj not,",
        ),
    ],
)
def test_what_is_one_product_is_quantised_as_one(skipped: str, problem: str) -> None:
    raw = {"model_type": "qwen3_moe", **SIZES, **EXPERTS}
    raw["quantization_config"] = {**FORMAT, "modules_to_not_convert": [skipped]}
    config = parse_config(raw, source="a test")
    with pytest.raises(ConfigError) as caught:
        layer_fields(config, 0)
    assert problem in caught.value.problem


def test_random_parameters_in_fp8() -> None:
    raw = {"model_type": "qwen3_moe", **SIZES, **EXPERTS}
    config = parse_config({**raw, "quantization_config": FORMAT}, source="a test")
    params = random_params(config, split_layers(3, 1)[0], seed=5, std=0.1)
    layer = params.layers[0]
    assert layer.qkv_proj.dtype == layer.down_proj.dtype == FP8
    assert layer.down_scale is not None
    assert layer.down_scale.shape == (4, 2, 2)
    assert len(layer.down_scale.unique()) == 16
    gate, _ = projections(layer)["gate_up"].chunk(2, dim=1)
    assert float(gate[:, :130].std()) == pytest.approx(0.1, rel=0.1)
    assert not gate[:, 130:].any()
    assert not projections(layer)["down"][..., 130:].any()
    stages = [random_params(config, layout, seed=5, std=0.1) for layout in split_layers(3, 2)]
    for stage, layout in zip(stages, split_layers(3, 2), strict=True):
        same = zip(
            leaves_with_names(stage), leaves_with_names(slice_params(params, layout)), strict=True
        )
        assert all(a is b is None or torch.equal(a.float(), b.float()) for (_, a), (_, b) in same)
