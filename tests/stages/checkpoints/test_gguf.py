"""GGUFs of small models of each architecture and type, against transformers' own reading of them."""

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from saved_models import assert_same
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import weft
from weft.errors import CheckpointError, CheckpointNotFoundError, ConfigError, ConfigWarning
from weft.stages.attention.rope import inverse_frequencies
from weft.stages.checkpoints.formats import load_config, load_params
from weft.stages.layout import split_layers

pytest.importorskip("gguf")

import gguf
from gguf_files import (
    MODELS,
    SIZES,
    metadata_of,
    quantized,
    random_blocks,
    scrambled,
    stored_tensors,
    unpacked,
    write_file,
    write_model,
)

from weft.stages.model import describe_weights

Q = gguf.GGMLQuantizationType
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [40], [9, 8, 7, 9, 8, 7]]
PACKED = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
DRAWN = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def loaded(path: Path, **options: Any) -> weft.Model:
    return weft.load(path, "cpu", "float32", strict=True, **options)


def logits_of(model: weft.Model, ids: list[int]) -> torch.Tensor:
    """The logits after each token but the last."""
    sampling = weft.SamplingParams(
        temperature=0, logprobs=0, prompt_logprobs=model.config.vocab_size
    )
    [completion] = weft.generate(model, [ids], max_tokens=1, sampling=sampling)
    assert completion.prompt_top_logprobs is not None
    return torch.tensor(
        [[row[token] for token in range(len(row))] for row in completion.prompt_top_logprobs]
    )


def assert_like(model: weft.Model, theirs: Any) -> None:
    """The same log-probabilities, to rounding, and the same greedy tokens."""
    for ids in PROMPTS:
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            said = theirs.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[
                0, len(ids) :
            ].tolist()
        if len(ids) > 1:
            torch.testing.assert_close(logits_of(model, ids), expected[:-1], rtol=2e-4, atol=2e-4)
        [completion] = weft.generate(model, [ids], max_tokens=6)
        assert completion.token_ids == said


@pytest.mark.one_of(7, 2)
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_read_as_transformers_wrote_it(name: str, tmp_path: Path) -> None:
    theirs = scrambled(name)
    file = tmp_path / "model.gguf"
    write_model(file, name, theirs, quantized(Q.F32))
    model = loaded(file)
    theirs.save_pretrained(tmp_path / "folder")
    folder = weft.load(tmp_path / "folder", "cpu", "float32")
    # Of float32 in a GGUF
    differing = {"architecture", "rms_norm_eps"} if name == "mistral" else {"rms_norm_eps"}
    gguf_config, other = (attrs.asdict(one.config, recurse=False) for one in (model, folder))
    assert {key for key in gguf_config if gguf_config[key] != other[key]} <= differing
    assert gguf_config["rms_norm_eps"] == pytest.approx(other["rms_norm_eps"])
    assert_same(model.params, folder.params)
    assert (model.tokenizer, model.chat_template, model.path) == (None, None, file)
    assert_like(model, theirs)


# Of a GGUF transformers takes these sizes from its own defaults.
ITS_DEFAULTS = {"qwen3": {"head_dim": 128}, "qwen3-moe": {"moe_intermediate_size": 768}}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3-moe"])
def test_transformers_reads_the_same_from_the_file(name: str, tmp_path: Path) -> None:
    theirs = scrambled(name, **ITS_DEFAULTS.get(name, {}))
    tokens = [f"t{index}" for index in range(SIZES["vocab_size"])]
    more = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.model": "no_vocab",
        "general.alignment": 64,
    }
    write_model(tmp_path / "model.gguf", name, theirs, quantized(Q.Q8_0), **more)
    read: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    assert_like(loaded(tmp_path), read)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("kind", [*PACKED, *DRAWN])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_every_type_is_unpacked_as_the_package_unpacks_it(
    name: str, kind: str, tmp_path: Path
) -> None:
    theirs = scrambled(name)
    architecture = MODELS[name][0]
    pack = random_blocks(Q[kind]) if kind in DRAWN else quantized(Q[kind])
    tensors = write_model(tmp_path / "packed.gguf", name, theirs, pack)
    write_file(
        tmp_path / "plain.gguf", architecture, metadata_of(theirs, architecture), unpacked(tensors)
    )
    packed, plain = (loaded(tmp_path / f"{which}.gguf") for which in ("packed", "plain"))
    assert_same(packed.params, plain.params)
    assert all(
        bool(x.isfinite().all())
        for x in (packed.params.embed_tokens, packed.params.lm_head)
        if x is not None
    )
    dtype = {"F16": torch.float16}.get(kind, torch.bfloat16)
    assert weft.load(tmp_path / "packed.gguf", "cpu").dtype == dtype
    assert weft.load(tmp_path / "plain.gguf", "cpu").dtype == torch.float32


@pytest.mark.one_of(3)
@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q6_K"])
def test_a_quantized_model_computes_what_transformers_does(kind: str, tmp_path: Path) -> None:
    pack = random_blocks(Q[kind]) if kind in DRAWN else quantized(Q[kind])
    more = {"tokenizer.ggml.tokens": [f"t{index}" for index in range(SIZES["vocab_size"])]}
    write_model(tmp_path / "model.gguf", "llama", scrambled("llama"), pack, **more)
    read: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).eval()
    assert_like(loaded(tmp_path), read)


def test_a_type_that_nothing_unpacks_is_named(tmp_path: Path) -> None:
    tensors = {
        name: quantized(Q.F32)(values)
        for name, values in stored_tensors(scrambled("llama"), "llama").items()
    }
    shape = tensors["blk.1.ffn_up.weight"][0].shape
    tensors["blk.1.ffn_up.weight"] = np.ones(shape, np.float64), Q.F64
    write_file(tmp_path / "a.gguf", "llama", metadata_of(scrambled("llama"), "llama"), tensors)
    with pytest.raises(
        CheckpointError, match=r"saw: blk.1.ffn_up.weight is F64, which the package gguf"
    ):
        loaded(tmp_path / "a.gguf")
    assert loaded(tmp_path / "a.gguf", stage=(0, 2)).layout.layers == range(1)


def test_only_the_tensors_of_a_stage_are_read(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "qwen3-moe", scrambled("qwen3-moe"), quantized(Q.Q8_0))
    config = load_config(tmp_path)
    whole = loaded(tmp_path)
    for layout in split_layers(2, 2):
        part = load_params(tmp_path / "model.gguf", config, layout, dtype=torch.float32)
        assert_same(part, weft.stages.slice_params(whole.params, layout))
    prompts = [[1, 2, 3], [4]]
    stages = [weft.load(tmp_path, "cpu", "float32", stage=(i, 2)) for i in range(2)]
    assert {describe_weights(stage).split(",")[1] for stage in stages} == {
        describe_weights(whole).split(",")[1]
    }
    said = [weft.generate(whole, prompts, max_tokens=4, pipeline=n) for n in (1, 2)]
    assert [completion.token_ids for completion in said[0]] == [
        completion.token_ids for completion in said[1]
    ]


def test_only_the_experts_of_a_rank_are_read(tmp_path: Path) -> None:
    write_model(
        tmp_path / "model.gguf",
        "qwen3-moe",
        scrambled("qwen3-moe", num_experts=4),
        quantized(Q.Q8_0),
    )
    whole = loaded(tmp_path)
    shares = [loaded(tmp_path, shard=(rank, 2), experts="whole") for rank in range(2)]
    for layer, *rank_layers in zip(
        whole.params.layers, *(share.params.layers for share in shares), strict=True
    ):
        for name in ("gate_up_proj", "down_proj"):
            parts = [getattr(one, name) for one in rank_layers]
            assert [len(part) for part in parts] == [2, 2]
            assert torch.equal(torch.cat(parts), getattr(layer, name))
        assert all(torch.equal(one.router, layer.router) for one in rank_layers)


def test_llama_3_1_scales_its_frequencies_by_a_tensor(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    theirs = scrambled("llama", rope_parameters=rope)
    plain = LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    )
    factors = (plain.model.rotary_emb.inv_freq / theirs.model.rotary_emb.inv_freq).numpy()
    assert factors.min() == 1
    assert factors.max() > 7.9
    tensors = {
        name: quantized(Q.F32)(values) for name, values in stored_tensors(theirs, "llama").items()
    }
    tensors["rope_freqs.weight"] = factors, Q.F32
    write_file(tmp_path / "a.gguf", "llama", metadata_of(theirs, "llama"), tensors)
    model = loaded(tmp_path)
    frequencies, _ = inverse_frequencies(model.config.rope, model.config.head_dim, 64)
    torch.testing.assert_close(frequencies, theirs.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert_like(model, theirs)
    tensors["rope_freqs.weight"] = factors[1:].copy(), Q.F32
    write_file(tmp_path / "a.gguf", "llama", metadata_of(theirs, "llama"), tensors)
    with pytest.raises(
        CheckpointError, match=r"rope_freqs.weight is F32 \(31,\)\n.*instead: 32 finite numbers"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scalings_that_the_metadata_name(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    more: dict[str, Any] = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = more[
            "llama.rope.scaling.original_context_length"
        ] = 32
    theirs = scrambled("llama", rope_parameters=rope)
    write_model(
        tmp_path / "a.gguf",
        "llama",
        theirs,
        quantized(Q.F32),
        **more,
        **{"llama.rope.scaling.finetuned": True},
    )
    assert_like(loaded(tmp_path), theirs)


def test_a_window_of_mistral(tmp_path: Path) -> None:
    theirs = scrambled("mistral", sliding_window=3)
    write_model(
        tmp_path / "a.gguf",
        "mistral",
        theirs,
        quantized(Q.F32),
        **{"llama.attention.sliding_window": 3},
    )
    model = loaded(tmp_path)
    assert (model.config.architecture, model.config.windows) == ("MistralForCausalLM", (3, 3))
    assert_like(model, theirs)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown architecture": (
        {"general.architecture": "gemma2"},
        "general.architecture='gemma2'",
    ),
    "experts of Mixtral": ({"llama.expert_count": 8}, "llama.expert_count=8"),
    "long rope": ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type='longrope'"),
    "a part of a head": ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count=32"),
    "values of another size": (
        {"llama.attention.value_length": 32},
        "llama.attention.value_length=32",
    ),
    "a scale": ({"llama.logit_scale": 0.5}, "llama.logit_scale=0.5"),
    "heads of each layer": (
        {"llama.attention.head_count_kv": [2, 1]},
        r"llama.attention.head_count_kv=\[2, 1\]",
    ),
    "layers without tensors": (
        {"llama.block_count": 2**30},
        r"llama.block_count=1073741824\n  instead: block_count is at most the number of tensors in"
        r" the file, \d+",
    ),
    "an end beyond": ({"tokenizer.ggml.eos_token_id": -1.0}, "tokenizer.ggml.eos_token_id=-1.0"),
    "no heads": ({"llama.attention.head_count": 0}, "llama.attention.head_count=0"),
    "a text for a size": ({"llama.embedding_length": "64"}, "llama.embedding_length='64'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_weft_does_not_support_is_named(case: str, tmp_path: Path) -> None:
    changed, problem = REFUSED[case]
    theirs = scrambled("llama")
    metadata = metadata_of(theirs, "llama") | changed
    architecture = metadata.pop("general.architecture", "llama")
    tensors = {
        name: quantized(Q.F32)(values) for name, values in stored_tensors(theirs, "llama").items()
    }
    write_file(tmp_path / "a.gguf", architecture, metadata, tensors)
    with pytest.raises(ConfigError, match=rf"saw: a.gguf has {problem}"):
        loaded(tmp_path)


def test_a_missing_key_and_an_unknown_one(tmp_path: Path) -> None:
    theirs = scrambled("llama")
    write_model(tmp_path / "a.gguf", "llama", theirs, quantized(Q.F32), **{"llama.pooling_type": 3})
    with pytest.raises(ConfigError, match=r"llama.pooling_type=3\n"):
        loaded(tmp_path)
    with pytest.warns(ConfigWarning, match=r"ignores them: llama.pooling_type=3$"):
        weft.load(tmp_path, "cpu")
    metadata = metadata_of(theirs, "llama")
    del metadata["llama.feed_forward_length"]
    write_file(tmp_path / "a.gguf", "llama", metadata, {})
    with pytest.raises(
        ConfigError,
        match=r"a.gguf has no llama.feed_forward_length\n  instead: a file that has the key"
        r" llama.feed_forward_length; convert the model again",
    ):
        loaded(tmp_path)


def test_files_that_are_not_there_and_parts(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"there is no file '.*missing.gguf'"):
        loaded(tmp_path / "missing.gguf")
    write_model(
        tmp_path / "a.gguf", "llama", scrambled("llama"), quantized(Q.F32), **{"split.count": 2}
    )
    with pytest.raises(
        CheckpointError, match=r"a.gguf is one of 2 parts\n.*llama-gguf-split --merge"
    ):
        loaded(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"config.json has no model_type"
    ):  # the folder's own configuration counts
        loaded(tmp_path)
