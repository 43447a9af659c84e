"""Engines whose sums are cut into leaves give the same bits on 1, 2 and 4 ranks that share layers,
and on 2 x 2 ranks, however their requests are batched."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import attrs
import pytest
import torch
from shares import LIMITS, PROMPTS, Asked, model_of, run, run_rank

import weft
from weft.errors import ConfigError, ProgramError, RequestError
from weft.stages.custom.functions import StageFunctions
from weft.stages.model import model_facts
from weft.transforms.engine.options import Speculation
from weft.transforms.pipelines.transports.launch import launch

LEAVES = 4
CUT = {"functions": StageFunctions(batch_invariant=True, reduction_leaves=LEAVES)}
# Requests in twos, whose prompts are read in other chunks.
OTHERWISE = attrs.evolve(LIMITS, max_num_reqs=2, max_num_tokens=5)
EVERY: dict[str, Asked] = {
    "plain": Asked(),
    "graphs": Asked(options={"graph": "full_and_piecewise"}),
    "batched otherwise": Asked(limits=OTHERWISE, options={"graph": "none"}),
    "bfloat16": Asked(model={"dtype": torch.bfloat16}),
    "bfloat16, batched otherwise": Asked(model={"dtype": torch.bfloat16}, limits=OTHERWISE),
    "one kv head": Asked("one kv head", model={"dtype": torch.bfloat16}),
    "biases": Asked("biases", model={"dtype": torch.bfloat16}),
    "experts": Asked("experts", model={"dtype": torch.bfloat16}),
    "prompt logprobs": Asked(sampling={"prompt_logprobs": 2}, twice=True),
    "adapters": Asked(adapters=True, model={"dtype": torch.bfloat16}),
    "lookup": Asked(options={"speculation": Speculation(2, ngram=(1, 2)), "graph": "full"}),
    "long": Asked("one kv head", prompts=([*range(36)], *PROMPTS), model={"dtype": torch.bfloat16}),
}
EVERY = {name: attrs.evolve(case, model={**CUT, **case.model}) for name, case in EVERY.items()}
# Ways to ask the same.
SAME = {
    "batched otherwise": "plain",
    "graphs": "plain",
    "bfloat16, batched otherwise": "bfloat16",
    "lookup": "plain",
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: run(case, model_of(case.kind, **case.model))[0] for name, case in EVERY.items()}


ON_STAGES = "graphs", "prompt logprobs", "adapters", "bfloat16, batched otherwise"
# The ranks that share layers, all ranks, and the engines that `--all` has on them; `--nightly` has
# all.
SPLITS = {
    "tp 2": (2, 2, tuple(EVERY)),
    "tp 4": (4, 4, ON_STAGES),
    "tp 2 x pp 2": (2, 4, ON_STAGES),
}
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
def shared(runs_nightly: bool) -> Callable[[str], list[dict[str, Any]]]:
    """What each rank of a split returns, of all engines of the split."""

    @cache
    def on(split: str) -> list[dict[str, Any]]:
        tensor, ranks, slow_names = SPLITS[split]
        return found_by(tensor, ranks, EVERY if runs_nightly else slow_names)

    return on


def found_by(
    tensor: int, ranks: int, names: Iterable[str] = EVERY, backend: str = "gloo"
) -> list[dict[str, Any]]:
    """The completions of engines on each rank, by the engine's name."""
    every = {name: EVERY[name] for name in names}
    in_float32 = {name: case for name, case in every.items() if "dtype" not in case.model}
    in_other_dtypes = {name: case for name, case in every.items() if name not in in_float32}
    # A transport's messages of one class of batch have one dtype.
    results = [
        launch(run_rank, ranks, cases, tensor, backend, timeout=180)
        for cases in (in_float32, in_other_dtypes)
    ]
    return [{**one, **other} for one, other in zip(*results, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["peer", "nccl"])
@pytest.mark.parametrize("split", SPLITS)
def test_any_number_of_gpus_says_the_same_bits(split: str, backend: str) -> None:
    tensor, ranks, _ = SPLITS[split]
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    every = found_by(tensor, ranks, backend=backend)
    with torch.device("cuda:0"):
        for name, case in EVERY.items():
            expected = run(case, model_of(case.kind, **case.model))[0]
            assert all(results[name][0] == expected for results in every), name


@pytest.mark.parametrize(("split", "name"), CASES)
def test_any_number_of_ranks_says_the_same_bits(
    split: str, name: str, alone: Mapping[str, Any], shared: Callable[[str], list[dict[str, Any]]]
) -> None:
    for rank, every in enumerate(shared(split)):
        assert every[name][0] == alone[name], f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_other_batches_have_the_same_bits(name: str, alone: Mapping[str, Any]) -> None:
    assert alone[name] == alone[SAME[name]]


@pytest.mark.slow
def test_without_leaves_other_numbers_of_ranks_have_other_bits() -> None:
    """The models can tell."""
    uncut = {"functions": StageFunctions(batch_invariant=True)}
    cases = {
        name: attrs.evolve(EVERY[name], model={**EVERY[name].model, **uncut})
        for name in ("plain", "bfloat16")
    }
    expected = {
        name: run(case, model_of(case.kind, **case.model))[0] for name, case in cases.items()
    }
    results = launch(run_rank, 2, cases, 2, timeout=60)
    assert all(results[0][name][0] != expected[name] for name in cases)


# What cannot be cut is refused


def test_sums_that_cannot_be_cut_are_refused() -> None:
    model = model_of("experts")
    with pytest.raises(
        ConfigError,
        match=r"reduction_leaves=16(.|\n)*moe_intermediate_size=8, which cannot be cut into 16"
        r" equal leaves\n(.|\n)*a power of two that divides the columns into equal leaves; or 1",
    ):
        model.with_stages(batch_invariant=True, reduction_leaves=16)
    with pytest.raises(
        ConfigError,
        match=r"reduction_leaves=64(.|\n)*32 columns of 4 heads, which cannot be cut into 64",
    ):
        model.with_stages(batch_invariant=True, reduction_leaves=64)
    with pytest.raises(ConfigError, match=r"reduction_leaves=2(.|\n)*4 ranks(.|\n)*divides 2"):
        model_of("qwen3", shard=(1, 4)).with_stages(batch_invariant=True, reduction_leaves=2)
    with pytest.raises(ProgramError, match=r"reduction_leaves=2(.|\n)*batch_invariant=True, too"):
        model.with_stages(reduction_leaves=2)
    with pytest.raises(RequestError, match=r"reduction_leaves=2(.|\n)*batch_invariant=True, too"):
        weft.load("demo", "cpu", reduction_leaves=2)
    with pytest.raises(RequestError, match=r"reduction_leaves(.|\n)*a power of two"):
        weft.load("demo", "cpu", batch_invariant=True, reduction_leaves=3)
    with pytest.raises(
        ProgramError,
        match=r"reduction_leaves=2\n  saw: a custom feed_forward(.|\n)*attend=f or layers",
    ):
        model.with_stages(
            batch_invariant=True,
            reduction_leaves=2,
            feed_forward=lambda config, layer, batch, x: x.plain,
        )


def test_the_leaves_are_in_the_facts_of_a_model() -> None:
    """They are other bits: so ranks must agree on them, and a certificate has them."""
    cut = weft.load("demo", "cpu", batch_invariant=True, reduction_leaves=4)
    other = weft.load("demo", "cpu", batch_invariant=True)
    assert "4 reduction leaves" in model_facts(cut)["stages"]
    assert model_facts(other)["stages"] == "batch invariant"
    assert (
        model_facts(cut)["stages"] == model_facts(other.with_stages(reduction_leaves=4))["stages"]
    )
    options: dict[str, Any] = {"max_tokens": 4, "seed": 0}
    certificates = [
        weft.generate(model, ["A list"], **options)[0].certificate() for model in (cut, other)
    ]
    assert certificates[0].program != certificates[1].program
    [verification] = weft.verify(certificates[0], other)
    assert "program" in verification.other_facts
    [verification] = weft.verify(certificates[0], other.with_stages(reduction_leaves=4), pipeline=2)
    assert verification.equal
