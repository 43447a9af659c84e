"""Engines whose ranks share layers do what one process does: `shares.py` has the engines, and what
is asked of them."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import pytest
import shares
import torch
from shares import LIMITS, PROMPTS, Asked, config_of, model_of, run, run_rank

import weft
from weft.errors import ConfigError, ProgramError, RequestError
from weft.stages.adapters.slots import reserve_slots, write_slot
from weft.stages.choices import pick_experts
from weft.stages.shares import share_config
from weft.transforms.engine.options import Speculation
from weft.transforms.engine.setup import make_runner
from weft.transforms.graphs.ladder import Limits
from weft.transforms.pipelines.transports.launch import launch

SMALL = attrs.evolve(LIMITS, num_pages=9)
LARGE = attrs.evolve(LIMITS, max_num_reqs=9, max_num_tokens=64, num_pages=120)
FILTERS = {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.02}
EVERY: dict[str, Asked] = {
    "plain": Asked(),
    "graphs": Asked(options={"graph": "full_and_piecewise"}),
    "tied": Asked("tied"),
    "one kv head": Asked("one kv head"),
    "biases": Asked("biases"),
    "experts": Asked("experts"),
    "whole experts": Asked("whole experts"),
    "whole experts in graphs": Asked("whole experts", options={"graph": "full_and_piecewise"}),
    "whole experts in FP8": Asked("whole experts in FP8", options={"graph": "full"}),
    "prompt logprobs": Asked(sampling={"prompt_logprobs": 2}, twice=True),
    "prefixes": Asked(twice=True),
    "no prefixes": Asked(twice=True, options={"prefix_caching": False}),
    "preemption": Asked(limits=SMALL, prompts=PROMPTS * 2),
    "fp8 cache": Asked(model={"kv_dtype": torch.float8_e4m3fn}),
    "masks": Asked(masked=True),
    "penalties": Asked(
        sampling={"repetition_penalty": 1.3, "min_p": 0.05, "logit_bias": {3: 2.0}, "n": 1}
    ),
    "adapters": Asked(adapters=True),
    "adapters of biases": Asked("biases", adapters=True, options={"graph": "full"}),
    "adapters of experts": Asked("experts", adapters=True),
    "adapters of one kv head": Asked("one kv head", adapters=True),
    "windows": Asked("windows", prompts=(list(range(20)), *PROMPTS)),
    "images": Asked("images", prompts=(*PROMPTS, "image", "image without positions"), twice=True),
    "update": Asked(updates=("params",)),
    "update of tied": Asked("tied", updates=("params",)),
    "update of biases": Asked("biases", updates=("params",)),
    "update of experts": Asked("experts", updates=("params",)),
    "update of whole experts": Asked("whole experts", updates=("params",)),
    "update of whole experts in FP8": Asked("whole experts in FP8", updates=("params",)),
    "update of adapters": Asked(
        adapters=True, updates=("params", "adapters"), options={"graph": "full"}
    ),
    "lookup": Asked(options={"speculation": Speculation(2, ngram=(1, 2))}),
    "draft model": Asked(draft=True),
    "beside": Asked(beside=True),
    "changed": Asked(changed=True),
    "changed prompts": Asked(
        changed=True, sampling={"prompt_logprobs": 2}, options={"graph": "full"}
    ),
    "one request": Asked(prompts=PROMPTS[:1], options={"graph": "full"}),
    "three requests": Asked(prompts=PROMPTS[:3], options={"graph": "full"}),
    "many requests": Asked(prompts=PROMPTS * 3, limits=LARGE, sampling=FILTERS),
    "run ahead": Asked(options={"run_ahead": 3, "graph": "full"}),
}


# What stages change: embeddings at both ends, pages and adapters per stage, and what travels beside
# activations.
ON_STAGES = (
    "tied",
    "preemption",
    "adapters",
    "update of tied",
    "draft model",
    "beside",
    "changed prompts",
)
# What more ranks than key-value heads, and fewer columns or experts on each, change.
ON_FOUR = "one kv head", "biases", "whole experts"
# The ranks that share layers, all ranks, and the engines that `--all` has on them; `--nightly` has
# all.
SPLITS = {"tp 2": (2, 2, tuple(EVERY)), "tp 2 x pp 2": (2, 4, ON_STAGES), "tp 4": (4, 4, ON_FOUR)}
CASES = [
    pytest.param(
        split,
        name,
        id=f"{split}-{name}",
        marks=pytest.mark.slow if name in slow_names else pytest.mark.nightly,
    )
    for split, (*_, slow_names) in SPLITS.items()
    for name in EVERY
]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: run(case, model_of(case.kind, **case.model)) for name, case in EVERY.items()}


@pytest.fixture(scope="module")
def shared(runs_nightly: bool) -> Callable[[str], list[dict[str, Any]]]:
    """What each rank of a split returns: one launch for all engines of a split, when the first is
    asked for."""

    @cache
    def on(split: str) -> list[dict[str, Any]]:
        tensor, ranks, slow_names = SPLITS[split]
        every = {name: EVERY[name] for name in (EVERY if runs_nightly else slow_names)}
        return launch(run_rank, ranks, every, tensor, timeout=120)

    return on


def flat(values: Any) -> list[float]:
    """All numbers of a tree of logprobs."""
    if isinstance(values, dict):
        return [x for key in sorted(values) for x in flat(values[key])]
    return (
        [x for value in values for x in flat(value)]
        if isinstance(values, list | tuple)
        else [float(values)]
    )


def assert_said(name: str, expected: tuple[Any, Any], shared: list[dict[str, Any]]) -> None:
    """Every rank returns what one process does, within rounding, and the same bits as the others.
    In FP8, where activations are rounded to 3 bits, a sum in another order may make one of them
    another one."""
    near = 0.3 if "FP8" in name else 2e-4
    for rank, every in enumerate(shared):
        completions, own_counts = every[name]
        assert [tokens for tokens, *_ in completions] == [tokens for tokens, *_ in expected[0]], (
            f"rank {rank}"
        )
        if rank == 0:  # pages and preemptions differ where stages are several
            assert own_counts["pages_held"] == expected[1]["pages_held"] == 0
        for completion, other in zip(completions, expected[0], strict=True):
            pairs = zip(
                flat([completion[1], completion[3]]), flat([other[1], other[3]]), strict=True
            )
            assert all(math.isclose(x, y, abs_tol=near, rel_tol=1e-4) for x, y in pairs)
        assert completions == shared[0][name][0], "all ranks return the same bits"


@pytest.mark.parametrize(("split", "name"), CASES)
def test_ranks_that_share_layers_say_what_one_process_says(
    split: str, name: str, alone: dict[str, Any], shared: Callable[[str], list[dict[str, Any]]]
) -> None:
    assert_said(name, alone[name], shared(split))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["peer", "nccl"])
@pytest.mark.parametrize("split", SPLITS)
def test_gpus_that_share_layers_say_what_one_says(split: str, backend: str) -> None:
    tensor, ranks, _ = SPLITS[split]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    names = [name for name in EVERY if tensor == 2 or EVERY[name].kind != "one kv head"]
    every = {name: EVERY[name] for name in names}
    shared = launch(run_rank, ranks, every, tensor, backend, timeout=120)
    with torch.device("cuda:0"):
        for name, case in every.items():
            assert_said(name, run(case, model_of(case.kind, **case.model)), shared)


@pytest.mark.slow
def test_four_ranks_share_experts_in_fp8_whose_columns_they_cannot_cut() -> None:
    name = "whole experts in FP8"
    config = pick_experts("columns", config_of(name), 4, call="")
    with pytest.raises(ConfigError, match="moe_intermediate_size=256, shared as 'columns'"):
        share_config(config, 4)
    case = Asked(name)
    torch.set_num_threads(1)
    assert_said(name, run(case, model_of(name)), launch(run_rank, 4, {name: case}, 4, timeout=120))


@pytest.mark.slow
def test_what_is_asked_comes_about(alone: dict[str, Any]) -> None:
    """Pages are found, requests are preempted, and updates and adapters change what follows."""
    assert alone["prefixes"][1]["prefix_tokens"] > 0 == alone["no prefixes"][1]["prefix_tokens"]
    assert alone["preemption"][1]["preempted"] > 0
    tokens = {
        name: [completion[0] for completion in completions]
        for name, (completions, _) in alone.items()
    }
    assert tokens["plain"] != tokens["adapters"] != tokens["update of adapters"]
    assert tokens["update"] != tokens["prefixes"]
    assert tokens["plain"] != tokens["changed"] == tokens["changed prompts"]
    assert (
        tokens["plain"]
        == tokens["lookup"]
        == tokens["draft model"]
        == tokens["run ahead"]
        != tokens["beside"]
    )


DIFFERS = {
    "seed": "'weights: torch.float32, ",
    "share": "which has share ",
    "experts": "'config.moe: MoeConfig(num_experts=4, ",
    "whole parameters": "[37, 32], torch.float32",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", *DIFFERS])
def test_weights_that_do_not_belong_together_are_refused(what: str) -> None:
    """Norms tell shares of different models apart, where no checkpoint does; a share is of its
    rank."""
    texts = launch(shares.other_weights, 2, what, timeout=30)
    if what == "nothing":
        assert texts == ["no error"] * 2
    for rank, text in enumerate(texts):
        assert DIFFERS.get(what, "no error") in text
        assert what != "seed" or f", where rank {1 - rank} has 'weights: torch.float32, " in text


# What a share cannot do is refused


def test_a_share_by_itself_is_refused() -> None:
    share = model_of("qwen3", shard=(1, 2))
    assert "share 1 of 2" in repr(share)
    with pytest.raises(RequestError, match=r"weft.logprobs(.|\n)*share 1 of 2(.|\n)*a whole model"):
        weft.logprobs(share, [[1, 2, 3]])
    with pytest.raises(ProgramError, match=r"a part of the head, <Model .*share 1 of 2"):
        share.logits(torch.zeros(1, 32))
    with pytest.raises(
        ProgramError,
        match=r"make_runner(.|\n)*share 1 of 2(.|\n)*weft.Engine, whose ranks share layers",
    ):
        make_runner(share, Limits(2, 8))
    with pytest.raises(ProgramError, match=r"beside=\{'other'(.|\n)*share 1 of 2"):
        model_of("qwen3").with_stages(beside={"other": share})
    with pytest.raises(
        RequestError, match=r"the draft model(.|\n)*share 1 of 2(.|\n)*whole and beside"
    ):
        weft.Engine(model_of("qwen3"), LIMITS, speculation=Speculation(2, model=share))
    with pytest.raises(
        ProgramError, match=r"Distributed\(\), and weft.load\(path, shard=\(index, 2\)\)"
    ):
        weft.Engine(share, LIMITS)


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("qwen3", 2), ("qwen3", 4), ("one kv head", 2), ("one kv head", 4), ("biases", 2)],
)
def test_the_shares_of_an_adapter_add_up_to_it(kind: str, num_ranks: int) -> None:
    """The products `b @ a` of the shares, put together by rows and summed where each has columns of
    its own."""
    adapter = shares.adapters_of(kind)["all"]
    loras = []
    for rank in range(num_ranks):
        model = model_of(kind, shard=(rank, num_ranks))
        kept: dict[str, Any] = {"num_slots": 2, "rank": 2, "shard": model.shard}
        params = reserve_slots(model.params, model.config, model.layout, **kept)
        write_slot(params, model.config, model.layout, 1, adapter, shard=model.shard)
        loras.append(params.layers[0].lora)
    name = "model.layers.0."
    a, b = adapter.deltas[f"{name}self_attn.o_proj"]
    total = sum(
        lora.o.b[1] @ pad(lora.o.a[1, 0], rank, num_ranks)
        for rank, lora in enumerate(loras)
        if lora.o
    )
    torch.testing.assert_close(total, b @ a)
    a, b = adapter.deltas[f"{name}mlp.up_proj"]
    rows = [
        lora.gate_up.b[1][lora.gate_up.starts[1] :] @ lora.gate_up.a[1, 1]
        for lora in loras
        if lora.gate_up
    ]
    torch.testing.assert_close(torch.cat(rows), b @ a)
    a, b = adapter.deltas[f"{name}self_attn.q_proj"]
    rows = [lora.qkv.b[1][: lora.qkv.starts[1]] @ lora.qkv.a[1, 0] for lora in loras if lora.qkv]
    torch.testing.assert_close(torch.cat(rows), b @ a)


def pad(part: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Columns with zeros where other ranks have theirs."""
    columns = torch.zeros(part.shape[0], num_ranks, part.shape[1])
    columns[:, rank] = part
    return columns.flatten(1)
