"""Custom batch classes: any number of micro-batches gives the whole batch's results."""

from typing import Any

import attrs
import pytest
import torch
from own_batches import OWN_BATCHES, WHOLE_BATCHES, Graph, Length, Signal
from refusal import refused

from weft.errors import DescriptorError
from weft.proofs import assert_equal
from weft.transforms.graphs.graphify import graphify
from weft.transforms.pipelines.microbatch import scan
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.transports.threads import Threads

LAW = "micro-batches are one batch"
CASES = [(name, parts) for name in OWN_BATCHES for parts in (1, 2, 3)] + [
    (name, 1) for name in WHOLE_BATCHES
]


@pytest.mark.parametrize("transport", [None, Threads], ids=["local", "threads"])
@pytest.mark.parametrize(("name", "parts"), CASES)
def test_the_results_are_the_whole_batchs(name: str, parts: int, transport: Any) -> None:
    batch, step = {**OWN_BATCHES, **WHOLE_BATCHES}[name]
    stages = [lambda p, s, batch, x: (s + 1, step(batch)), lambda p, s, batch, x: (s, x)]
    spanned = pipeline(stages, microbatches=parts, transport=transport and transport())
    (count, _), out = spanned((None, None), (0, 0), batch)
    assert_equal(LAW, out, step(batch))
    assert 1 <= count <= parts


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("graph_of", ["stages", "pipeline"])
def test_parts_of_ones_own_class_run_under_a_ladder(parts: int, graph_of: str) -> None:
    def double(p: Any, s: Any, batch: Signal, x: Any) -> tuple[Any, Signal]:
        return s, attrs.evolve(batch, x=2 * (batch if x is None else x).x)

    ladder = [Length(8), Length(4), Length(2)]
    signal = Signal(Length(5), torch.arange(5.0))
    if graph_of == "stages":
        step: Any = pipeline(
            [graphify(double, ladder=ladder) for _ in range(2)], microbatches=parts
        )
    else:
        step = graphify(pipeline([double] * 2, microbatches=parts), ladder=ladder)
    _, out = step((None, None), (None, None), signal)
    assert out.length == Length(5)
    assert_equal(LAW, out.x, 4 * signal.x)


def test_a_loop_over_parts_of_ones_own_class() -> None:
    def add(p: Any, s: Any, batch: Signal, x: Any) -> tuple[Any, Any]:
        return s + batch.x.sum(), batch.x

    batch = Signal(Length(5), torch.arange(5.0))
    (total,), outs = scan(pipeline([add], microbatches=2), 3)((None,), (0.0,), batch)
    assert_equal(LAW, (total, outs), (torch.tensor(30.0), [batch.x] * 3))


def test_a_class_that_nobody_says_how_to_split_is_named() -> None:
    step = pipeline([lambda p, s, batch, x: (s, batch.x)], microbatches=2)
    problem = "axes num_nodes, num_edges, and no field that says how they go together"
    instead = (
        "in class Graph a method split(parts) that returns a tuple of batches, and join(outputs) if"
        " they need one; or, where an entry of one has some of the other to itself, an integer"
        ' field of starts, axes("num_nodes+1") or axes("num_edges+1")'
    )
    with refused(DescriptorError, "split(<Graph>, 2)", problem, instead):
        step((None,), (None,), Graph.ring(4))
