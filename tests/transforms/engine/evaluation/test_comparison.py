"""Runs of one model in several ways: any split agrees, other prompts are refused, and a NaN is a
fault."""

import attrs
import pytest
import torch

from weft.batches.descriptor import BatchDescriptor
from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.checkpoints.loading import load
from weft.transforms.engine.evaluation.comparison import (
    TOLERANCE,
    RunComparison,
    RunTrace,
    TracedStep,
    Way,
    compare_alone,
    compare_runs,
    trace_run,
)

EAGER, PIPELINED, BOTH = (
    Way("eager", 1, "none"),
    Way("pipelined", 3, "none"),
    Way("both", 3, "full"),
)
PROMPTS = [[65, 66, 67], [97]]


def test_three_stages_compute_what_one_does() -> None:
    model = load(DEMO, "cpu", "float32")
    eager, split = (trace_run(model, way, PROMPTS, 3) for way in (EAGER, PIPELINED))
    assert isinstance(eager, RunTrace)
    assert eager.calls == {"captures": 0, "replays": 0, "eager calls": 3}
    comparison = compare_runs(split, eager)
    assert (comparison.steps, comparison.tokens, comparison.tables) == (3, True, True)
    assert str(comparison).splitlines()[1].split()[:4] == ["pipelined", "eager", "equal", "equal"]
    assert str(eager).splitlines()[1].split()[2:] == ["0", "0", "3"]
    assert [*comparison.faults()] == []
    assert comparison.allowed > max(comparison.sizes.values()) > 0.0
    with pytest.raises(RequestError, match="instead: two runs from the same prompts"):
        compare_runs(trace_run(model, EAGER, PROMPTS[::-1], 1), eager)


def test_a_longer_run_has_other_tokens() -> None:
    model = load(DEMO, "cpu", "float32")
    long, short = (trace_run(model, EAGER, PROMPTS, steps) for steps in (3, 2))
    assert [*compare_runs(long, short).faults()] == [
        "the tokens differ in step 2, the last that was compared"
    ]
    with pytest.raises(RequestError, match="saw: max_tokens=0"):
        trace_run(model, EAGER, PROMPTS, 0)


def test_a_run_ends_with_the_models_own_end_and_is_compared_to_the_bit_in_equal_shapes() -> None:
    model = load(DEMO, "cpu", "float32")
    whole = trace_run(model, EAGER, PROMPTS, 4)
    end = whole.token_ids[0][1]
    assert end not in (whole.token_ids[0][0], whole.token_ids[1][0])
    ending = attrs.evolve(model, config=attrs.evolve(model.config, eos_token_ids=(end,)))
    cut = trace_run(ending, EAGER, PROMPTS, 4)
    assert cut.token_ids[0] == whole.token_ids[0][:2]
    comparison = compare_runs(whole, trace_run(model, EAGER, PROMPTS, 4))
    assert (comparison.allowed, comparison.bitwise, comparison.row["verdict"]) == (
        0.0,
        True,
        "holds",
    )
    assert attrs.evolve(comparison, tokens=False).row["verdict"] == "BROKEN"
    invariant = model.with_stages(batch_invariant=True)
    split, one = (trace_run(invariant, way, PROMPTS, 2) for way in (PIPELINED, EAGER))
    assert (compare_runs(split, one).allowed, compare_runs(split, one).bitwise) == (0.0, True)


def test_the_rate_is_that_of_decode_steps_after_the_first_of_each_class() -> None:
    prompts = BatchDescriptor(5, 2)
    decode = BatchDescriptor.uniform(2)
    fewer = BatchDescriptor.uniform(1)
    x = torch.zeros(1)

    def run(*steps: tuple[BatchDescriptor, float]) -> RunTrace:
        traced = tuple(TracedStep(descriptor, seconds, x, x, x, x) for descriptor, seconds in steps)
        return RunTrace(EAGER, PROMPTS, traced, [], {})

    steps = [
        (prompts, 10.0),
        (prompts, 20.0),
        (decode, 40.0),
        (decode, 0.25),
        (decode, 0.25),
        (fewer, 80.0),
    ]
    assert run(*steps, (fewer, 0.5)).tokens_per_second == (2 + 2 + 1) / 1.0
    assert run(*steps[:3]).tokens_per_second is None
    assert run(*steps[:3]).row["tokens/s"] is None
    assert run(*steps).row["tokens/s"] == "8"


def test_a_nan_holds_nowhere() -> None:
    none = {"logits": 0.0, "KV pages": 0.0}
    same = RunComparison(
        BOTH, PIPELINED, 1, tokens=True, tables=True, sizes=none, bitwise=True, allowed=0.0
    )
    assert not [*same.faults()]
    assert [*attrs.evolve(same, bitwise=False).faults()] == ["zeros differ in sign"]
    for allowed in (0.0, TOLERANCE):
        assert [
            *attrs.evolve(same, allowed=allowed, sizes=none | {"logits": float("nan")}).faults()
        ]


def test_each_prompt_alone_differs_by_rounding_and_in_no_bit_if_batch_invariant() -> None:
    fast = load(DEMO, "cpu", "float32")
    sizes = []
    for model in (fast, fast.with_stages(batch_invariant=True)):
        together = trace_run(model, EAGER, PROMPTS, 5)
        alone = [trace_run(model, EAGER, [ids], 5) for ids in PROMPTS]
        comparison = compare_alone(together, alone)
        assert (comparison.tokens, comparison.tables, [*comparison.faults()]) == (True, None, [])
        sizes.append((comparison.sizes["logits"] > 0, comparison.bitwise, comparison.allowed))
        shifted = attrs.evolve(together, token_ids=[[*ids[:-1], 0] for ids in together.token_ids])
        assert [*compare_alone(shifted, alone).faults()] == [
            "the tokens differ in step 5, the last that was compared"
        ]
        with pytest.raises(RequestError, match="a run of each of the prompts"):
            compare_alone(together, alone[::-1])
    assert sizes == [(True, False, TOLERANCE), (False, True, 0.0)]
