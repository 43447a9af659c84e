"""Runs of one model in several ways: any split agrees, other prompts are refused, and a NaN is a fault."""

import attrs
import pytest

from weft.errors import RequestError
from weft.stages.checkpoints.known_models import DEMO
from weft.stages.model import load
from weft.transforms.engine.evaluation.comparison import RunComparison, RunTrace, Way, compare_runs, trace_run

EAGER, PIPELINED, BOTH = Way("eager", 1, "none"), Way("pipelined", 3, "none"), Way("both", 3, "full")
PROMPTS = [[65, 66, 67], [97]]


def test_three_stages_compute_what_one_does() -> None:
    model = load(DEMO, "cpu", "float32")
    eager, split = (trace_run(model, way, PROMPTS, 3) for way in (EAGER, PIPELINED))
    assert isinstance(eager, RunTrace)
    assert eager.calls == {"captures": 0, "replays": 0, "eager calls": 3}
    found = compare_runs(split, eager)
    assert (found.steps, found.tokens, found.tables) == (3, True, True)
    assert str(found).splitlines()[1].split()[:4] == ["pipelined", "eager", "equal", "equal"]
    assert str(eager).splitlines()[1].split()[2:] == ["0", "0", "3"]
    assert [*found.faults()] == []
    assert found.allowed > max(found.sizes.values()) > 0.0
    with pytest.raises(RequestError, match="instead: two runs from the same prompts"):
        compare_runs(trace_run(model, EAGER, PROMPTS[::-1], 1), eager)


def test_a_longer_run_has_other_tokens() -> None:
    model = load(DEMO, "cpu", "float32")
    long, short = (trace_run(model, EAGER, PROMPTS, steps) for steps in (3, 2))
    assert [*compare_runs(long, short).faults()] == ["the tokens differ in step 2, the last that was compared"]
    with pytest.raises(RequestError, match="saw: max_tokens=0"):
        trace_run(model, EAGER, PROMPTS, 0)


def test_a_nan_holds_nowhere() -> None:
    none = {"logits": 0.0, "KV pages": 0.0}
    same = RunComparison(BOTH, PIPELINED, 1, tokens=True, tables=True, sizes=none, bitwise=True)
    assert not [*same.faults()]
    assert [*attrs.evolve(same, bitwise=False).faults()] == ["zeros differ in sign"]
    for against in (PIPELINED, EAGER):
        assert [*attrs.evolve(same, against=against, sizes=none | {"logits": float("nan")}).faults()]
