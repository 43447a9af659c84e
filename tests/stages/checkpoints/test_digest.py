"""Digests of weights: they cover everything that ranks might load differently."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from weft.stages.adapters.adapter import load_adapter
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.stages.model import describe_weights


def changed(folder: Path, file: str) -> None:
    tensors = load_file(folder / file)
    save_file(
        {name: 1.5 * x if "layers.1." in name else x for name, x in tensors.items()}, folder / file
    )


@pytest.mark.parametrize("shard", ["model.safetensors", "below/of.safetensors"])
def test_checkpoints_are_told_apart_wherever_their_shards_lie(tmp_path: Path, shard: str) -> None:
    said = []
    for number in range(3):
        folder = tmp_path / str(number)
        shutil.copytree(DEMO, folder)
        (folder / shard).parent.mkdir(exist_ok=True)
        (folder / "model.safetensors").rename(folder / shard)
        if shard != "model.safetensors":
            index = {"weight_map": dict.fromkeys(load_file(folder / shard), shard)}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "beside.safetensors").write_text("no part of it")
        if number == 2:
            changed(folder, shard)
        said.append(describe_weights(load(folder, "cpu", stage=(0, 2))))
    assert said[0] == said[1] != said[2]


def test_adapters_are_told_apart_by_their_scaling_and_by_what_became_of_them(
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(DEMO)
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    model = load(DEMO, "cpu", stage=(1, 2))
    first = load_adapter(model, tmp_path)
    # Each read its own layers
    assert load_adapter(load(DEMO, "cpu", stage=(0, 2)), tmp_path).weights == first.weights
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 800}))
    second = load_adapter(model, tmp_path)
    assert second.weights != first.weights
    before = second.weights
    for _, b in second.deltas.values():
        b += 1
    assert second.weights == f"{before}, changed since it was loaded"
