"""What executors make of work, and use again."""

from typing import Any

import attrs
import pytest
import torch

from weft.batches.batch import Batch
from weft.batches.outputs import Output
from weft.proofs.checks.difference import assert_equal
from weft.transforms.engine.steps.classes import Classes
from weft.transforms.engine.steps.executor import (
    BatchCache,
    PipelineExecutor,
    StepExecutor,
    _submission,
    _with_edits,
)
from weft.transforms.engine.steps.step import Edits, Growth, Work, is_advanced, with_edits
from weft.transforms.graphs.ladder import Limits, make_ladder
from weft.transforms.pipelines.pipeline import pipeline
from weft.transforms.pipelines.session import Submission

DECODE = Work(0, Edits(), ("a", "b"), (3, 1), (), (True, True), None)
GROWS = attrs.evolve(DECODE, job=1, edits=Edits(growths=(Growth(3, 1, (7,)),)))
PROMPT = Work(2, GROWS.edits, ("a",), (3,), ((5, 6),), (False,), None)


def assert_same(one: Submission, other: Submission) -> None:
    assert one.text == other.text
    for ours, theirs in ((one.batch, other.batch), (one.later, other.later)):
        assert ours.edits == theirs.edits
        assert_equal("a submission", ours.batch, theirs.batch)


def test_a_submission_is_what_a_session_would_make() -> None:
    cache = BatchCache(torch.device("cpu"), Classes(), _submission, _with_edits)
    for work in (DECODE, GROWS, DECODE, PROMPT):
        assert_same(cache(work), Submission.of(work.place("cpu")))


LADDER = make_ladder("full_and_piecewise", Limits(4, 8))
THREE = attrs.evolve(DECODE, requests=("a", "b", "c"), rows=(2, 1, 0), samples=(True,) * 3)


@pytest.mark.parametrize(
    "classes", [Classes(eager=LADDER), Classes(LADDER, LADDER)], ids=["no graphs", "graphs"]
)
def test_batches_are_padded_to_their_class(classes: Classes) -> None:
    cache = BatchCache("cpu", classes, _submission, _with_edits)
    works = PROMPT, THREE, attrs.evolve(PROMPT, token_ids=((5, 6, 7),))
    batches = [cache(work).batch.batch for work in works]
    assert [(len(batch.rows), batch.descriptor.num_tokens) for batch in batches] == [
        (2, 2),
        (4, 4),
        (4, 4),
    ]


def test_what_a_padded_step_returned_is_cut() -> None:
    def stage(_: Any, state: Any, batch: Batch, __: Any = None) -> tuple[Any, Output]:
        return state, Output(token_ids=batch.rows, logprobs=batch.rows.float())

    classes = Classes(eager=LADDER)
    step = pipeline([with_edits(stage)], advance=is_advanced)
    executors = (
        StepExecutor(stage, (), (), "cpu", classes),
        PipelineExecutor(step, (None,), (None,), "cpu", classes),
    )
    for executor in executors:
        [(_, out)] = [*executor([THREE]), *executor.flush()]
        assert out is not None
        assert out.token_ids.tolist() == [2, 1, 0]


def test_a_decode_of_the_same_rows_has_the_same_tensors() -> None:
    cache = BatchCache(torch.device("cpu"), Classes(), _submission, _with_edits)
    first = cache(DECODE)
    grown = cache(GROWS)
    again = cache(DECODE)
    assert first is again
    assert grown.batch.batch is first.batch.batch
