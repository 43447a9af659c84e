"""Faulty checkpoints are refused, and each error says what to do."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import scrambled, whole
from torch import Tensor

from weft.errors import CheckpointError, CheckpointNotFoundError, DeviceError, ProgramError
from weft.stages.checkpoints import reading as checkpoint
from weft.stages.checkpoints.formats import load_config, load_params
from weft.stages.config import parse_config
from weft.stages.layout import split_layers
from weft.stages.random_weights import random_params


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A small untied Llama in many files."""
    scrambled("llama").save_pretrained(tmp_path, max_shard_size="6KB")
    return tmp_path


def assert_refused(
    folder: Path,
    problem: str,
    instead: str,
    kind: type[CheckpointError] = CheckpointError,
    **config_changes: Any,
) -> None:
    """Loading fails with this text, before any tensor is read."""
    config = attrs.evolve(
        parse_config(json.loads((folder / "config.json").read_text()), source="t"), **config_changes
    )
    layout = whole(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "assemble", lambda *_: pytest.fail("loaded"))
        patch.setattr(
            checkpoint, "tqdm", lambda *_, **__: pytest.fail("a tensor was about to be read")
        )
        with pytest.raises(kind) as caught:
            load_params(folder, config, layout)
    assert type(caught.value) is kind
    assert caught.value.call == f"load_params({str(folder)!r}, config, {layout!r})"
    assert caught.value.problem.startswith(problem)
    assert caught.value.instead == instead


BELONG = "check that config.json and the weights belong together"


def test_missing_folders_and_files(folder: Path) -> None:
    config = load_config(folder)
    with pytest.raises(CheckpointNotFoundError) as caught:
        load_params("nowhere", config, whole(config))
    assert (
        str(caught.value)
        == "load_params('nowhere', config, StageLayout(index=0, num_stages=1, start=0, stop=5))\n"
        "  saw: there is no folder 'nowhere'\n"
        "  instead: pass a local folder; `hf download <name> --local-dir <folder>` makes one"
    )
    (folder / "model.safetensors").unlink()
    problem = f"{str(folder)!r} has no model.safetensors and no model.safetensors.index.json"
    assert_refused(
        folder, problem, "pass a folder that save_pretrained wrote", CheckpointNotFoundError
    )
    (folder / "pytorch_model.bin").write_bytes(b"")
    instead = (
        "convert it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…,"
        " safe_serialization=True)"
    )
    assert_refused(folder, f"{problem}, but pytorch_model.bin", instead, CheckpointNotFoundError)


def test_a_missing_shard(shards: Path) -> None:
    name = sorted(file.name for file in shards.glob("*.safetensors"))[1]
    (shards / name).unlink()
    problem = f"model.safetensors.index.json names {name}, and {str(shards)!r} has no such file"
    instead = "finish the download, or copy the missing shards"
    assert_refused(shards, problem, instead, CheckpointNotFoundError)


@pytest.mark.parametrize("keep", [0, 4, 200, 10_000])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    problem = f"model.safetensors ({keep} bytes) is damaged: "
    assert_refused(folder, problem, "copy model.safetensors again from where it came from")


def test_a_damaged_shard_and_a_damaged_index(shards: Path) -> None:
    file = max(shards.glob("*.safetensors"))
    whole_file = file.read_bytes()
    file.write_bytes(b"\xff" * 100)
    assert_refused(
        shards,
        f"{file.name} (100 bytes) is damaged",
        f"copy {file.name} again from where it came from",
    )
    file.write_bytes(whole_file)
    index = shards / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"lm_head.weight": 3}}'):
        index.write_text(text)
        instead = "copy model.safetensors.index.json again from where it came from"
        assert_refused(shards, "model.safetensors.index.json is not an index of shards: ", instead)


def test_an_index_that_names_the_wrong_shard(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    other_shards = sorted(
        set(raw["weight_map"].values()) - {raw["weight_map"]["model.norm.weight"]}
    )
    raw["weight_map"]["model.norm.weight"] = other_shards[0]
    index.write_text(json.dumps(raw))
    problem = (
        f"model.safetensors.index.json says that {other_shards[0]} holds model.norm.weight, and it"
        " does not"
    )
    assert_refused(shards, problem, "copy the index and the shards again from where they came from")


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors; `__` stands for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_missing_tensors(folder: Path) -> None:
    edit(folder, model__layers__3__mlp__up_proj__weight=None)
    assert_refused(folder, "the checkpoint has no model.layers.3.mlp.up_proj.weight", BELONG)
    config = load_config(folder)
    # Layer 3 is the last stage's: the first one loads.
    assert len(load_params(folder, config, split_layers(5, 2)[0]).layers) == 3


def test_missing_biases_are_counted(folder: Path) -> None:
    problem = (
        "the checkpoint has no model.layers.0.self_attn.q_proj.bias,"
        " model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.v_proj.bias,"
        " model.layers.1.self_attn.q_proj.bias and 11 more"
    )
    assert_refused(folder, problem, BELONG, qkv_bias=True)


def test_a_wrong_shape(folder: Path) -> None:
    edit(folder, model__layers__1__self_attn__k_proj__weight=torch.zeros(8, 12))
    name = "model.layers.1.self_attn.k_proj.weight"
    problem = f"{name} in model.safetensors is F32 (8, 12), and config.json makes it (8, 16) of F16"
    assert_refused(folder, problem, BELONG)


def test_tensors_that_nothing_explains(folder: Path) -> None:
    edit(folder, model__layers__1__self_attn__q_proj__bias=torch.zeros(16))
    unexplained = "and no field of config.json explains that"
    assert_refused(
        folder, f"the checkpoint has model.layers.1.self_attn.q_proj.bias, {unexplained}", BELONG
    )
    edit(folder, model__layers__1__self_attn__q_proj__bias=None)
    # A config.json with fewer layers than the weights have.
    problem = (
        "the checkpoint has model.layers.4.input_layernorm.weight,"
        " model.layers.4.mlp.down_proj.weight, "
    )
    assert_refused(folder, problem, BELONG, num_layers=4)
    assert_refused(folder, f"the checkpoint has no {qk_norms()} and 6 more", BELONG, qk_norm=True)


def qk_norms() -> str:
    return ", ".join(
        f"model.layers.{i}.self_attn.{part}_norm.weight" for i in range(2) for part in "qk"
    )


@pytest.mark.parametrize(("dtype", "shown"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantized_tensors(folder: Path, dtype: torch.dtype, shown: str) -> None:
    edit(folder, model__layers__2__mlp__gate_proj__weight=torch.zeros(24, 16).to(dtype))
    problem = f"model.layers.2.mlp.gate_proj.weight in model.safetensors is {shown}"
    assert_refused(folder, problem, "use the checkpoint before quantization")


def test_a_head_that_is_stored_though_it_is_tied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5 takes it where it differs, and older ones do not."""
    monkeypatch.setattr(checkpoint, "_ROWS", 7)
    file = folder / "model.safetensors"
    problem = "lm_head.weight is not model.embed_tokens.weight, and config.json has"
    instead = "set it to false to use the head that is stored, or leave that head out of the files"
    assert_refused(folder, problem, instead, tie_word_embeddings=True)
    tensors = load_file(file)
    for change in (0.0, 1.0):
        head = tensors[checkpoint.EMBED].clone()
        head[-1, -1] += change
        save_file({**tensors, checkpoint.HEAD: head}, file)
        if change:
            assert_refused(folder, problem, instead, tie_word_embeddings=True)
        else:
            config = attrs.evolve(load_config(folder), tie_word_embeddings=True)
            params = load_params(folder, config, whole(config))
            assert params.lm_head is None


def test_a_device_that_is_not_there(folder: Path) -> None:
    config = load_config(folder)
    with pytest.raises(
        DeviceError, match=r"device='cuda:99'.*\n.*use a device of this machine, or 'cpu'"
    ):
        load_params(folder, config, whole(config), device="cuda:99")


def test_a_layout_for_another_model(folder: Path) -> None:
    config = load_config(folder)
    for layout in (split_layers(4, 2)[1], split_layers(6, 2)[1], split_layers(6, 1)[0]):
        with pytest.raises(ProgramError) as caught:
            load_params(folder, config, layout)
        assert (
            caught.value.problem
            == f"a layout that ends with layer {layout.stop - 1}, and a model of 5 layers"
        )
        assert caught.value.instead == f"split_layers(5, {layout.num_stages})[{layout.index}]"
        with pytest.raises(ProgramError, match="and a model of 5 layers"):
            random_params(config, layout, seed=0)
