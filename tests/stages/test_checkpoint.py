"""`weft.stages.checkpoint`, `.params` and `.layout` against folders that transformers' save_pretrained wrote."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from weft.errors import CheckpointError, CheckpointNotFoundError, ConfigError, DeviceError, ProgramError
from weft.stages import checkpoint
from weft.stages.checkpoint import load_params, tensor_shapes
from weft.stages.config import ModelConfig, load_config, parse_config
from weft.stages.layer_fields import layer_fields
from weft.stages.layout import StageLayout, split_layers
from weft.stages.params import DecoderParams, num_bytes, slice_params
from weft.stages.random_weights import random_params
from weft.stages.rope import inverse_frequencies
from weft.trees import leaves_with_names, tree_leaves

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "mlp_only_layers": [1, 4]}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"head_dim": 8, **EXPERTS}),
}


def whole(config: ModelConfig) -> StageLayout:
    return split_layers(config.num_layers, 1)[0]


def scrambled(name: str) -> Any:
    """A transformers model whose norms and biases too are random, so that no two tensors are alike."""
    config_class, model_class, fields = MODELS[name]
    model = model_class(config_class(**SMALL, **fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(generator=generator)
    return model


@pytest.fixture(scope="module", params=[None, "6KB"], ids=["one file", "sharded"])
def shard_size(request: pytest.FixtureRequest) -> str | None:
    return str(request.param) if request.param else None


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, shard_size: str | None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder and the model that was saved in it."""
    folder, model = tmp_path_factory.mktemp("saved"), scrambled(request.param)
    model.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    assert (folder / "model.safetensors").is_file() == (shard_size is None)
    return folder, model


def by_their_names(config: ModelConfig, params: DecoderParams) -> dict[str, Tensor]:
    """The tensors under transformers' names, taken apart again by hand."""
    found = {
        "model.embed_tokens.weight": params.embed_tokens,
        "model.norm.weight": params.norm,
        "lm_head.weight": params.lm_head,
        "model.rotary_emb.inv_freq": params.inv_freq,
    }
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for i, layer in enumerate(params.layers):
        for kind, qkv, o in (("weight", layer.qkv_proj, layer.o_proj), ("bias", layer.qkv_bias, layer.o_bias)):
            parts = (None,) * 3 if qkv is None else qkv.split((query, key, key))
            found |= {
                f"model.layers.{i}.self_attn.{x}_proj.{kind}": t for x, t in zip("qkvo", (*parts, o), strict=True)
            }
        found[f"model.layers.{i}.self_attn.q_norm.weight"] = layer.q_norm
        found[f"model.layers.{i}.self_attn.k_norm.weight"] = layer.k_norm
        found[f"model.layers.{i}.input_layernorm.weight"] = layer.input_layernorm
        found[f"model.layers.{i}.post_attention_layernorm.weight"] = layer.post_attention_layernorm
        found[f"model.layers.{i}.mlp.gate.weight"] = layer.router
        if layer.router is not None:  # their module holds the experts stacked, as ours
            found[f"model.layers.{i}.mlp.experts.gate_up_proj"] = layer.gate_up_proj
            found[f"model.layers.{i}.mlp.experts.down_proj"] = layer.down_proj
            continue
        kinds = (("weight", layer.gate_up_proj, layer.down_proj), ("bias", layer.gate_up_bias, layer.down_bias))
        for kind, gate_up, down in kinds:
            gate, up = (None, None) if gate_up is None else gate_up.chunk(2)
            named = {"gate": gate, "up": up, "down": down}
            found |= {f"model.layers.{i}.mlp.{x}_proj.{kind}": t for x, t in named.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def their_tensors(model: Any) -> dict[str, Tensor]:
    return {**model.state_dict(), "model.rotary_emb.inv_freq": model.model.rotary_emb.inv_freq}


def test_the_whole_model_is_what_transformers_saved(saved: Any) -> None:
    folder, model = saved
    config = load_config(folder)
    params = load_params(folder, config, whole(config))
    theirs = their_tensors(model)
    ours = by_their_names(config, params)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name
    assert (params.lm_head is params.embed_tokens) == config.tie_word_embeddings
    assert num_bytes(params) == 4 * sum(p.numel() for p in model.parameters()) + 4 * config.head_dim // 2


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_a_stage_reads_its_own_tensors_alone(saved: Any, num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


def assert_same(ours: DecoderParams, theirs: DecoderParams) -> None:
    pairs = zip(leaves_with_names(ours), leaves_with_names(theirs), strict=True)
    for (path, left), (other, right) in pairs:
        assert path == other
        assert (left is None) == (right is None)
        if left is not None:
            assert left.dtype == right.dtype
            assert torch.equal(left, right), path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small untied Llama in one file."""
    scrambled("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A small untied Llama in many files."""
    scrambled("llama").save_pretrained(tmp_path, max_shard_size="6KB")
    return tmp_path


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
    assert torch.equal(params.inv_freq, theirs.model.rotary_emb.inv_freq)


def test_a_tied_head_that_was_saved_all_the_same(tmp_path: Path) -> None:
    scrambled("llama-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 0}, tmp_path / "model.safetensors")
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
    others = [leaf for path, leaf in leaves_with_names(params) if leaf is not None and path != ".inv_freq"]
    assert {leaf.dtype for leaf in others} == {dtype or torch.float16}
    assert params.inv_freq.dtype == torch.float32
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8\n.*use one of torch\.float16"):
        load_params(folder, config, whole(config), dtype=torch.int8)


def test_a_bar_shows_the_progress(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(folder)
    load_params(folder, config, whole(config))
    assert capsys.readouterr().err == ""
    load_params(folder, config, split_layers(5, 2)[1], progress=True)
    assert "stage 1: 100%" in capsys.readouterr().err


def assert_refused(
    folder: Path, seen: str, instead: str, kind: type[CheckpointError] = CheckpointError, **config_changes: Any
) -> None:
    """Loading fails with this text, and before any tensor was read."""
    config = attrs.evolve(parse_config(json.loads((folder / "config.json").read_text()), source="t"), **config_changes)
    layout = whole(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "assemble", lambda *_: pytest.fail("loaded"))
        patch.setattr(checkpoint, "tqdm", lambda *_, **__: pytest.fail("a tensor was about to be read"))
        with pytest.raises(kind) as caught:
            load_params(folder, config, layout)
    assert type(caught.value) is kind
    assert caught.value.call == f"load_params({str(folder)!r}, config, {layout!r})"
    assert caught.value.seen.startswith(seen)
    assert caught.value.instead == instead


BELONG = "check that config.json and the weights belong together"


def test_missing_folders_and_files(folder: Path) -> None:
    config = load_config(folder)
    with pytest.raises(CheckpointNotFoundError) as caught:
        load_params("nowhere", config, whole(config))
    assert str(caught.value) == (
        "load_params('nowhere', config, StageLayout(index=0, num_stages=1, start=0, stop=5))\n"
        "  saw: there is no folder 'nowhere'\n"
        "  instead: pass a local folder; `hf download <name> --local-dir <folder>` makes one"
    )
    (folder / "model.safetensors").unlink()
    seen = f"{str(folder)!r} has no model.safetensors and no model.safetensors.index.json"
    assert_refused(folder, seen, "pass a folder that save_pretrained wrote", CheckpointNotFoundError)
    (folder / "pytorch_model.bin").write_bytes(b"")
    instead = "convert it: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…, safe_serialization=True)"
    assert_refused(folder, f"{seen}, only pytorch_model.bin", instead, CheckpointNotFoundError)


def test_a_missing_shard(shards: Path) -> None:
    name = sorted(file.name for file in shards.glob("*.safetensors"))[1]
    (shards / name).unlink()
    seen = f"model.safetensors.index.json names {name}, and {str(shards)!r} has no such file"
    instead = "finish the download, or copy the missing shards"
    assert_refused(shards, seen, instead, CheckpointNotFoundError)


@pytest.mark.parametrize("keep", [0, 4, 200, 10_000])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    seen = f"model.safetensors ({keep} bytes) is damaged: "
    assert_refused(folder, seen, "copy model.safetensors again from where it came from")


def test_a_damaged_shard_and_a_damaged_index(shards: Path) -> None:
    file = max(shards.glob("*.safetensors"))
    whole_file = file.read_bytes()
    file.write_bytes(b"\xff" * 100)
    assert_refused(shards, f"{file.name} (100 bytes) is damaged", f"copy {file.name} again from where it came from")
    file.write_bytes(whole_file)
    index = shards / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"lm_head.weight": 3}}'):
        index.write_text(text)
        instead = "copy model.safetensors.index.json again from where it came from"
        assert_refused(shards, "model.safetensors.index.json is no index of shards: ", instead)


def test_an_index_that_names_the_wrong_shard(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    others = sorted(set(raw["weight_map"].values()) - {raw["weight_map"]["model.norm.weight"]})
    raw["weight_map"]["model.norm.weight"] = others[0]
    index.write_text(json.dumps(raw))
    seen = f"model.safetensors.index.json says that {others[0]} holds model.norm.weight, and it does not"
    assert_refused(shards, seen, "copy the index and the shards again from where they came from")


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
    seen = (
        "the checkpoint has no model.layers.0.self_attn.q_proj.bias, model.layers.0.self_attn.k_proj.bias, "
        "model.layers.0.self_attn.v_proj.bias, model.layers.1.self_attn.q_proj.bias and 11 more"
    )
    assert_refused(folder, seen, BELONG, qkv_bias=True)


def test_a_wrong_shape(folder: Path) -> None:
    edit(folder, model__layers__1__self_attn__k_proj__weight=torch.zeros(8, 12))
    seen = "model.layers.1.self_attn.k_proj.weight in model.safetensors is (8, 12), and config.json makes it (8, 16)"
    assert_refused(folder, seen, BELONG)


def test_tensors_that_nothing_explains(folder: Path) -> None:
    edit(folder, model__layers__1__self_attn__q_proj__bias=torch.zeros(16))
    unexplained = "and no field of config.json explains that"
    assert_refused(folder, f"the checkpoint has model.layers.1.self_attn.q_proj.bias, {unexplained}", BELONG)
    edit(folder, model__layers__1__self_attn__q_proj__bias=None)
    # A config.json with fewer layers than the weights have.
    seen = "the checkpoint has model.layers.4.input_layernorm.weight, model.layers.4.mlp.down_proj.weight, "
    assert_refused(folder, seen, BELONG, num_layers=4)
    assert_refused(folder, f"the checkpoint has no {qk_norms()} and 6 more", BELONG, qk_norm=True)


def qk_norms() -> str:
    return ", ".join(f"model.layers.{i}.self_attn.{part}_norm.weight" for i in range(2) for part in "qk")


@pytest.mark.parametrize(("dtype", "shown"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_quantized_tensors(folder: Path, dtype: torch.dtype, shown: str) -> None:
    edit(folder, model__layers__2__mlp__gate_proj__weight=torch.zeros(24, 16).to(dtype))
    seen = f"model.layers.2.mlp.gate_proj.weight in model.safetensors is {shown}"
    assert_refused(folder, seen, "weft loads F16, BF16, F32, F64: use the checkpoint before quantization")


def test_a_device_that_is_not_there(folder: Path) -> None:
    config = load_config(folder)
    with pytest.raises(DeviceError, match=r"device='cuda:99'.*\n.*use a device of this machine, or 'cpu'"):
        load_params(folder, config, whole(config), device="cuda:99")


def test_a_layout_for_another_model(folder: Path) -> None:
    config = load_config(folder)
    for layout in (split_layers(4, 2)[1], split_layers(6, 2)[1], split_layers(6, 1)[0]):
        with pytest.raises(ProgramError) as caught:
            load_params(folder, config, layout)
        assert caught.value.seen == f"a layout that ends with layer {layout.stop - 1}, and a model of 5 layers"
        assert caught.value.instead == f"split_layers(5, {layout.num_stages})[{layout.index}]"
        with pytest.raises(ProgramError, match="and a model of 5 layers"):
            random_params(config, layout, seed=0)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    kv_heads = draw(st.integers(1, 2))
    base = parse_config({"model_type": "qwen3", **SMALL, "head_dim": 4}, source="a test")
    names = ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    flags: dict[str, Any] = {name: draw(st.booleans()) for name in names}
    return attrs.evolve(
        base,
        num_layers=draw(st.integers(1, 6)),
        num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        **flags,
    )


@given(config=configs(), data=st.data(), seed=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_random_stages_agree_with_the_whole(config: ModelConfig, data: st.DataObject, seed: int) -> None:
    complete = random_params(config, whole(config), seed=seed)
    layouts = split_layers(config.num_layers, data.draw(st.integers(1, config.num_layers)))
    for layout in layouts:
        assert_same(random_params(config, layout, seed=seed), slice_params(complete, layout))
    inv_freq, _ = inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    assert torch.equal(complete.inv_freq, inv_freq)
    assert (complete.lm_head is complete.embed_tokens) == config.tie_word_embeddings
    for i, layer in enumerate(complete.layers):
        present = {field: tuple(getattr(layer, field).shape) for field in layer_fields(config, i)}
        assert present == {name: field.shape for name, field in layer_fields(config, i).items()}
        assert sum(leaf is not None for leaf in tree_leaves(layer)) == len(present)


def test_random_parameters() -> None:
    config = parse_config({"model_type": "qwen2", **SMALL, "hidden_size": 256}, source="a test")
    params = random_params(config, whole(config), seed=1, dtype=torch.float64, std=0.1)
    layer, other = params.layers[0], params.layers[1]
    assert params.norm is not None
    assert float(layer.gate_up_proj.std()) == pytest.approx(0.1, rel=0.05)
    assert float(layer.gate_up_proj.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(params.norm.mean()) == pytest.approx(1.0, abs=0.05)
    assert float(layer.input_layernorm.std()) == pytest.approx(0.1, rel=0.3)
    # Each tensor has its own noise, and another seed has other noise.
    assert not torch.equal(layer.qkv_proj, other.qkv_proj)
    assert not torch.equal(*layer.gate_up_proj.chunk(2))
    again = random_params(config, whole(config), seed=2, dtype=torch.float64, std=0.1)
    assert again.norm is not None
    assert not torch.equal(params.norm, again.norm)


def shared(stages: list[DecoderParams]) -> Iterator[int]:
    return (leaf.data_ptr() for stage in stages for path, leaf in leaves_with_names(stage) if leaf is not None)


def test_slices_share_the_whole_models_tensors(folder: Path) -> None:
    config = load_config(folder)
    complete = load_params(folder, config, whole(config))
    stages = [slice_params(complete, layout) for layout in split_layers(5, 3)]
    assert set(shared(stages)) == set(shared([complete]))
    assert sum(map(num_bytes, stages)) == num_bytes(complete) + 2 * complete.inv_freq.nbytes
    with pytest.raises(ProgramError, match="already a stage's"):
        slice_params(stages[0], split_layers(5, 3)[0])
    with pytest.raises(ProgramError, match=r"params with 5 layers\n.*split_layers\(5, 2\)\[1\]"):
        slice_params(complete, split_layers(4, 2)[1])


@given(num_layers=st.integers(1, 200), data=st.data())
def test_layers_are_split_evenly(num_layers: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, min(num_layers, 40)))
    layouts = split_layers(num_layers, num_stages)
    assert [i for layout in layouts for i in layout.layers] == list(range(num_layers))
    sizes = [len(layout.layers) for layout in layouts]
    assert max(sizes) - min(sizes) <= 1
    # The last stage has the head as well, and the first the embedding: neither is larger than one between.
    assert sizes[-1] == min(sizes)
    assert num_stages < 3 or sizes[0] <= max(sizes[1:-1])
    assert [layout.first for layout in layouts] == [True] + [False] * (num_stages - 1)
    assert [layout.last for layout in layouts] == [False] * (num_stages - 1) + [True]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(5, 2, [3, 2]), (7, 3, [2, 3, 2]), (30, 4, [7, 8, 8, 7]), (31, 4, [8, 8, 8, 7]), (29, 4, [7, 8, 7, 7])],
)
def test_where_the_layers_left_over_go(num_layers: int, num_stages: int, sizes: list[int]) -> None:
    assert [len(layout.layers) for layout in split_layers(num_layers, num_stages)] == sizes


@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 5), (4, 0), (4, -1), (0, 1)])
def test_splits_that_do_not_exist(num_layers: int, num_stages: int) -> None:
    with pytest.raises(ProgramError) as caught:
        split_layers(num_layers, num_stages)
    assert caught.value.call == f"split_layers({num_layers}, {num_stages})"
    assert caught.value.seen == f"{num_layers} layers for {num_stages} stages"
    expected = "use 1 to 4 stages, so that each owns a layer" if num_layers else "use a model with layers"
    assert caught.value.instead == expected


@pytest.mark.parametrize(
    "fields", [(0, 0, 0, 1), (2, 2, 0, 1), (-1, 2, 0, 1), (0, 2, 0, 0), (0, 2, 1, 2), (1, 2, 3, 3)]
)
def test_layouts_that_do_not_exist(fields: tuple[int, int, int, int]) -> None:
    with pytest.raises(ProgramError, match=r"number the stages|give every stage"):
        StageLayout(*fields)
