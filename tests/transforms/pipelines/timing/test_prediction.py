"""A prediction without the command line: it prints its answer, and refuses the arguments that the
command's parser would refuse."""

import re
from typing import Any

import pytest

from weft.errors import CostError, ProgramError, RequestError
from weft.stages import DEMO, load_config
from weft.stages.config import parse_config
from weft.stages.random_weights import PRESETS
from weft.transforms.pipelines.timing.hardware import Machine
from weft.transforms.pipelines.timing.prediction import Prediction, predict_decode


def test_a_slower_memory_takes_as_many_times_longer() -> None:
    config = load_config(DEMO)
    fast, slow = (
        predict_decode(config, 2, cohorts=2, machine=Machine(bandwidth=b)) for b in (2e9, 1e9)
    )
    assert slow.chosen.step_time == pytest.approx(2 * fast.chosen.step_time)
    assert slow.splits["even"][0] | {"seconds": 0} == fast.splits["even"][0] | {"seconds": 0}
    assert isinstance(slow, Prediction)
    first, *_ = str(slow).splitlines()
    assert first == f"{slow.chosen.tokens_per_second:,.0f} tokens/s from 128 requests"
    assert "memory bandwidth: 1 GB/s" in str(slow).splitlines()


def test_a_notebook_shows_the_answer_the_splits_the_cohorts_and_the_timeline() -> None:
    prediction = predict_decode(load_config(DEMO), 2, requests=12)
    shown = prediction._repr_html_()
    for part in (next(prediction.answer()), "balanced: layers", "of requests", "<svg "):
        assert shown.count(part) == 1
    assert prediction.stages().rows == (
        ("0", "3", "0.442 us", "3", "0.442 us"),
        ("1", "3", "0.464 us", "3", "0.464 us"),
    )


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "more cohorts than requests": (
        {"requests": 2, "cohorts": 3},
        ProgramError,
        "cohorts=3)\n  saw: 3 cohorts for 2",
    ),
    "no cohort": ({"cohorts": 0}, ProgramError, "cohorts=0)\n  saw: 0 cohorts for 128 requests"),
    "more context than positions": (
        {"context": 512},
        RequestError,
        "context=512)\n  saw: 512 tokens before",
    ),
    "no request": (
        {"requests": 0},
        ProgramError,
        "saw: requests=0\n  instead: a whole number >= 1",
    ),
    "a text": (
        {"context": "long"},
        ProgramError,
        "saw: context is a str\n  instead: a whole number, or None",
    ),
    "no step": ({"steps": 0}, ProgramError, "steps=0)\n  saw: 0 steps of each"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_are_refused_with_their_remedy(case: str) -> None:
    options, kind, text = REFUSED[case]
    with pytest.raises(kind, match=re.escape(text)):
        predict_decode(load_config(DEMO), 2, **options)


def test_a_bandwidth_is_a_finite_number() -> None:
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(CostError, match="a finite number > 0"):
            Machine(bandwidth=wrong)


def test_it_says_what_each_rank_has_and_that_nodes_share_layers_at_no_cost() -> None:
    name = "qwen3-30b-a3b-fp8"
    note = "too fast: nodes share layers at no cost"
    config = parse_config(PRESETS[name], source=name)
    free = predict_decode(config, 2, shards=4, machine=Machine(gpus_per_node=2))
    assert note in str(free)
    assert "experts whole: each rank has 32 of 128, and as much to do as any other" in str(free)
    assert "48 layers, bfloat16 and FP8, in 2 stages, each shared by 4 ranks" in str(free)
    assert "weights of each rank: " in str(free)
    assert "KV cache of each rank: " in str(free)
    report = str(predict_decode(config, 2, shards=2, machine=Machine(gpus_per_node=2)))
    assert note not in report
    assert "experts by columns: each rank has 384 of the 768 of every expert" in report
    assert note not in str(
        predict_decode(config, 2, shards=4, machine=Machine(gpus_per_node=2, node_link=1e9))
    )


WRONG: list[dict[str, Any]] = [
    {"bandwidth": "fast"},
    {"link": 0},
    {"latency": -1e-6},
    {"capacity": 0},
    {"kernel": float("inf")},
    {"gpus_per_node": 0},
    {"node_link": -1},
    {"node_latency": "long"},
    {"collective": 1e-6},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_machine_that_there_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    (argument,) = wrong
    with pytest.raises(CostError, match=rf"Machine\({argument}=.*\)\n  saw: {argument}[= ]"):
        Machine(**wrong)
