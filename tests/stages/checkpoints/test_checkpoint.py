"""`weft.stages.checkpoints.reading` and `.params` against folders that transformers'
save_pretrained wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saved_models import MODELS, assert_same, scrambled, whole
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
)

from weft.errors import ConfigError, ProgramError
from weft.stages.checkpoints import reading as checkpoint
from weft.stages.checkpoints.formats import load_config, load_params
from weft.stages.checkpoints.reading import tensor_shapes
from weft.stages.config import ModelConfig
from weft.stages.layout import StageLayout, split_layers
from weft.stages.params import DecoderParams, num_bytes, slice_params
from weft.values.trees import leaves_with_names, tree_leaves


@pytest.fixture(scope="module", params=[None, "6KB"], ids=["one file", "sharded"])
def shard_size(request: pytest.FixtureRequest) -> str | None:
    return str(request.param) if request.param else None


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, shard_size: str | None, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A folder, and the model saved in it."""
    folder = tmp_path_factory.mktemp("saved")
    model = scrambled(request.param)
    model.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    assert (folder / "model.safetensors").is_file() == (shard_size is None)
    return folder, model


def by_their_names(config: ModelConfig, params: DecoderParams) -> dict[str, Tensor]:
    """The tensors under transformers' names, split up again by hand."""
    tensors = {
        "model.embed_tokens.weight": params.embed_tokens,
        "model.norm.weight": params.norm,
        "lm_head.weight": params.head,
    }
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    for i, layer in enumerate(params.layers):
        for kind, qkv, o in (
            ("weight", layer.qkv_proj, layer.o_proj),
            ("bias", layer.qkv_bias, layer.o_bias),
        ):
            parts = (None,) * 3 if qkv is None else qkv.split((query, key, key))
            tensors |= {
                f"model.layers.{i}.self_attn.{x}_proj.{kind}": t
                for x, t in zip("qkvo", (*parts, o), strict=True)
            }
        tensors[f"model.layers.{i}.self_attn.q_norm.weight"] = layer.q_norm
        tensors[f"model.layers.{i}.self_attn.k_norm.weight"] = layer.k_norm
        tensors[f"model.layers.{i}.input_layernorm.weight"] = layer.input_layernorm
        tensors[f"model.layers.{i}.post_attention_layernorm.weight"] = (
            layer.post_attention_layernorm
        )
        tensors[f"model.layers.{i}.mlp.gate.weight"] = layer.router
        if layer.router is not None:  # their module holds the experts stacked, as ours
            tensors[f"model.layers.{i}.mlp.experts.gate_up_proj"] = layer.gate_up_proj
            tensors[f"model.layers.{i}.mlp.experts.down_proj"] = layer.down_proj
            continue
        kinds = (
            ("weight", layer.gate_up_proj, layer.down_proj),
            ("bias", layer.gate_up_bias, layer.down_bias),
        )
        for kind, gate_up, down in kinds:
            gate, up = (None, None) if gate_up is None else gate_up.chunk(2)
            named = {"gate": gate, "up": up, "down": down}
            tensors |= {f"model.layers.{i}.mlp.{x}_proj.{kind}": t for x, t in named.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def test_the_whole_model_is_what_transformers_saved(saved: Any) -> None:
    folder, model = saved
    config = load_config(folder)
    params = load_params(folder, config, whole(config))
    theirs = model.state_dict()
    ours = by_their_names(config, params)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    assert (
        (params.lm_head is None)
        == (params.head is params.embed_tokens)
        == config.tie_word_embeddings
    )
    assert num_bytes(params) == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_a_stage_reads_its_own_tensors_alone(
    saved: Any, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    config = load_config(folder)
    complete = load_params(folder, config, whole(config))
    files = checkpoint._tensor_files(folder, "")
    read: list[str] = []
    opened: set[Path] = set()

    class Spy:
        def __init__(self, file: Path, **kwargs: Any) -> None:
            opened.add(file)
            self.handle: Any = safe_open(file, **kwargs)

        def __enter__(self) -> "Spy":
            self.handle.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.handle.__exit__(*args)

        def get_tensor(self, name: str) -> Any:
            read.append(name)
            return self.handle.get_tensor(name)

        def __getattr__(self, name: str) -> Any:
            assert name in ("keys", "get_slice")
            return getattr(self.handle, name)

    monkeypatch.setattr(checkpoint, "safe_open", Spy)
    for layout in split_layers(config.num_layers, num_stages):
        read.clear()
        opened.clear()
        stage = load_params(folder, config, layout)
        assert sorted(read) == sorted(tensor_shapes(config, layout))
        assert opened == {files[name] for name in read}
        assert len(stage.layers) == len(layout.layers)
        assert (stage.embed_tokens is not None) == layout.first
        assert (stage.norm is not None) == (stage.lm_head is not None) == layout.last
        assert_same(stage, slice_params(complete, layout))


def test_the_format_of_transformers_4(folder: Path) -> None:
    new = load_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"rope_theta": raw.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    raw |= {"torch_dtype": raw.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(raw))
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(2) for i in range(5)}
    save_file(load_file(folder / "model.safetensors") | buffers, folder / "model.safetensors")
    config = load_config(folder)
    assert config == new
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    params = load_params(folder, config, whole(config))
    assert torch.equal(params.layers[4].down_proj, theirs.model.layers[4].mlp.down_proj.weight)


def test_a_tied_head_that_was_saved_all_the_same(tmp_path: Path) -> None:
    scrambled("llama-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 0},
        tmp_path / "model.safetensors",
    )
    config = load_config(tmp_path)
    first, last = split_layers(5, 2)
    assert load_params(tmp_path, config, first).lm_head is None
    head = load_params(tmp_path, config, last).lm_head
    assert head is not None
    assert torch.equal(head, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_dtypes(folder: Path, dtype: torch.dtype | None) -> None:
    config = attrs.evolve(load_config(folder), dtype=torch.float16)
    params = load_params(folder, config, whole(config), dtype=dtype)
    exact = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert params.norm is not None
    assert torch.equal(params.norm, exact.to(dtype or torch.float16))
    assert {leaf.dtype for leaf in tree_leaves(params)} == {dtype or torch.float16}
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8\n.*instead: one of torch\.float16"):
        load_params(folder, config, whole(config), dtype=torch.int8)


def test_a_bar_shows_the_progress(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(folder)
    load_params(folder, config, whole(config))
    assert capsys.readouterr().err == ""
    load_params(folder, config, split_layers(5, 2)[1], progress=True)
    assert "stage 1: 100%" in capsys.readouterr().err


def shared(stages: list[DecoderParams]) -> Iterator[int]:
    return (
        leaf.data_ptr()
        for stage in stages
        for path, leaf in leaves_with_names(stage)
        if leaf is not None
    )


def test_slices_share_the_whole_models_tensors(folder: Path) -> None:
    config = load_config(folder)
    complete = load_params(folder, config, whole(config))
    stages = [slice_params(complete, layout) for layout in split_layers(5, 3)]
    assert set(shared(stages)) == set(shared([complete]))
    assert sum(map(num_bytes, stages)) == num_bytes(complete)
    assert slice_params(complete, StageLayout(0, 2, 0, 5)).layers == complete.layers
    with pytest.raises(ProgramError, match="already a stage's"):
        slice_params(stages[0], split_layers(5, 3)[0])
    with pytest.raises(ProgramError, match=r"a model of 5 layers\n.*split_layers\(5, 2\)\[1\]"):
        slice_params(complete, split_layers(4, 2)[1])
